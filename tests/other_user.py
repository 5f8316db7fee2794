"""A Python, and the node's program, that another account of this machine can run.

The interpreter of the tests often lies where only its owner may look (pyenv or conda in root's home), and so may the clone.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import hpcnode

PROGRAM = Path(hpcnode.__file__).parent
DEBIAN_PYTHON = "/usr/bin/python3"
# It starts itself again: `setpriv` keeps root's capabilities until the exec after its own. An interpreter that cannot read its
# own library may take another one's, which the prefixes show.
TRIAL = """
import subprocess, sys
code = "import json, select, socket, sys; print(sys.base_prefix)"
prefix = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True).stdout
sys.exit(prefix.strip() != {prefix!r} or sys.version_info < (3, 9))
"""


def become(uid: int) -> list[str]:
    """Return the words that run a command as `uid`; none if we already are that user."""
    if uid == os.geteuid():
        return []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


@functools.cache
def python_of(uid: int) -> str:
    """Return a Python (3.9 or newer) that `uid` can run; skip the test if this machine has none."""
    wanted = os.environ.get("HPCSCHED_TEST_NODE_PYTHON", sys.executable)
    for python in (wanted, DEBIAN_PYTHON):
        if os.path.exists(python) and runs(uid, python):
            return python
    pytest.skip(f"NOT TESTED as uid {uid}: it can run neither {wanted} nor {DEBIAN_PYTHON}")


def runs(uid: int, python: str, *, first: str = "", env: dict[str, str] | None = None) -> bool:
    """Return whether `uid` can run `python` with its own library, after the statement `first`."""
    code = "import sys; print(sys.base_prefix)"
    prefix = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    command: Sequence[str] = [*become(uid), python, "-c", f"{first}\n{TRIAL.format(prefix=prefix)}"]
    return subprocess.run(command, capture_output=True, cwd="/", env=env).returncode == 0


@functools.cache
def program_of(uid: int) -> Path:
    """Return the node's program where `uid` can read it: that of the clone, or a copy."""
    if subprocess.run([*become(uid), "cat", PROGRAM / "__main__.py"], capture_output=True, cwd="/").returncode == 0:
        return PROGRAM
    copied = Path(tempfile.mkdtemp(prefix="hpcnode-program-", dir="/tmp"))
    atexit.register(shutil.rmtree, copied, ignore_errors=True)
    copied.chmod(0o755)
    shutil.copytree(PROGRAM, copied / PROGRAM.name, ignore=shutil.ignore_patterns("__pycache__"))
    return copied / PROGRAM.name
