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


def installation(directory: Path) -> Path:
    """Return the `bin` of an environment in `directory` that every user can run; skip the test if none can be made.

    It has the packages and the code of ours, and an interpreter of the system.
    """
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    script = f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    base = next((python for python in (sys.base_prefix + "/bin/python3", DEBIAN_PYTHON) if runs(1, python)), "")
    if not base or subprocess.run([base, "-c", script]).returncode:
        pytest.skip(f"NOT TESTED: no Python {sys.version_info[0]}.{sys.version_info[1]} here that every user can run")
    subprocess.run([base, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    found = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                           check=True, capture_output=True, text=True)  # fmt: skip
    Path(found.stdout.strip(), "ours.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    for path in Path(sys.executable).parent.iterdir():
        if path.is_file() and path.name not in os.listdir(directory / "bin"):
            shutil.copyfile(path, directory / "bin" / path.name)
            text = path.read_bytes()
            if text.startswith(f"#!{sys.executable}".encode()[:-4]):
                (directory / "bin" / path.name).write_bytes(f"#!{python}\n".encode() + text.partition(b"\n")[2])
            (directory / "bin" / path.name).chmod(0o755)
    trial = subprocess.run([python, "-P", "-c", "import hpcsched, hpcnode, paramiko, sqlalchemy"], user=1, group=1,
                           extra_groups=[], cwd="/", capture_output=True, text=True)  # fmt: skip
    if trial.returncode:
        pytest.skip(f"NOT TESTED: other users cannot import our packages: {trial.stderr[-300:]}")
    return directory / "bin"
