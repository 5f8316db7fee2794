"""The attacks again, with everything as a plain user: the tests, the controller, the agents and the jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.test_table import PURE, ids_of, named, reasons, table

ROOT = Path(__file__).parents[2]
UID, NAME = 61_001, "attacker"
LIMIT_S = 900.0
FUZZ_REQUESTS = 1000
LEAST_PASSED = 250
# Files of other folders whose tests, as far as the table names them, are in the round.
OF_OTHERS = ("integration/test_agent.py", "integration/test_agent_kill.py", "integration/test_node_spool.py")
# It reads the controller's descriptors, which the kernel shows to root alone.
OF_ROOT = ("test_gateway.py::test_a13_the_controller_listens_on_no_network_address",)
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+ (.*)$", re.M)
_PASSED = re.compile(r"^PASSED [^\s:]+::(\w+)", re.M)
_REASON = re.compile(r"root|several accounts|users|cannot enforce|NOT TESTED|could not import")


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="plain-", dir="/tmp"))
    path.chmod(0o755)
    (path / "home").mkdir()
    os.chown(path / "home", UID, UID)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def private_ancestor(path: Path) -> Path | None:
    """Return the topmost directory above a path that other users may not enter."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)


def of_others() -> list[str]:
    """Return the tests of other folders that are in the round."""
    entries = [entry for _, entries in table() for entry in entries if entry.partition("::")[0] in OF_OTHERS]
    found = [f"tests/{entry.partition('::')[0]}::{name}" for entry in entries for name in named(entry)]
    return list(dict.fromkeys(found))


def wrong_rows(passed: set[str]) -> list[str]:
    """Return the attacks that no test tried as a plain user, and that have no reason in the table."""
    tried = {attack for name in passed for attack in ids_of(name)}
    for attack, entries in table():
        if any(entry.startswith(PURE) and attack in ids_of(name) for entry in entries for name in named(entry)):
            tried.add(attack)
    return [attack for attack, _ in table() if attack not in tried and attack not in reasons()]


def script(base: Path, command: str) -> str:
    """Return what runs the command as the user, in a mount namespace where it has an account and can reach our files."""
    needed = sorted({ROOT, Path(sys.prefix), Path(sys.base_prefix)})
    hidden = {path: above for path in needed if (above := private_ancestor(path))}
    lines = ["set -e"]
    for number, path in enumerate(hidden):
        lines += [f"mkdir {base}/{number}", f"mount --bind '{path}' {base}/{number}"]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs '{above}'" for above in sorted(set(hidden.values()))]
    for number, path in enumerate(hidden):
        lines += [f"mkdir -p '{path}'", f"mount --bind {base}/{number} '{path}'"]
    for name, line in (
        ("passwd", f"{NAME}:x:{UID}:{UID}::{base}/home:/bin/sh"),
        ("group", f"{NAME}:x:{UID}:"),
    ):
        (base / name).write_text(Path("/etc", name).read_text() + line + "\n")
        lines.append(f"mount --bind {base}/{name} /etc/{name}")
    user = f"setpriv --reuid={UID} --regid={UID} --clear-groups --no-new-privs"
    return "\n".join([*lines, f"exec {user} {command}\n"])


@pytest.mark.root
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to run as root: it becomes another user; run the folder itself")
@pytest.mark.skipif(not shutil.which("unshare"), reason="NOT TESTED: needs unshare of util-linux")
def test_the_attacks_are_refused_with_everything_as_a_plain_user(base: Path) -> None:
    """Tests that need root are left out, and say so."""
    words = [sys.executable, "-m", "pytest", "-rsfEp", "-p", "no:cacheprovider", "--basetemp", f"{base}/home/t"]
    words += ["tests/attacks", *of_others(), "--ignore", __file__]
    words += [f"--ignore=tests/{name}" for name in PURE if name.startswith("attacks/")]
    words += [f"--deselect=tests/attacks/{name}" for name in OF_ROOT]
    env = {"HOME": f"{base}/home", "USER": NAME, "LOGNAME": NAME, "PATH": os.environ["PATH"], "TMPDIR": "/tmp"}
    env |= {"HPCSCHED_TEST_FUZZ_REQUESTS": str(FUZZ_REQUESTS)} | {n: os.environ[n] for n in ("CI",) if n in os.environ}
    log = base / "log"
    with log.open("w") as output:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script(base, " ".join(words))],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=env,
            timeout=LIMIT_S,
        )
    said = log.read_text()
    print(said)
    assert done.returncode == 0, said[-30000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) >= LEAST_PASSED, said[-2000:]
    skips = {reason for _, reason in _SKIPPED.findall(said)}
    assert skips
    assert [reason for reason in skips if not _REASON.search(reason)] == []
    assert wrong_rows(set(_PASSED.findall(said))) == []
