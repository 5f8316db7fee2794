"""The identity of a spool: copies, other machines and new directories have another one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import hpcnode
from hpcnode.spool import IDENTITY, identity_of

HERE = {"HPCNODE_MACHINE_ID": "one"}


def _spool(path: Path) -> str:
    path.mkdir(parents=True)
    return str(path)


def test_a_spool_keeps_its_identity(tmp_path: Path) -> None:
    spool = _spool(tmp_path / "root/spool")
    first = identity_of(spool, HERE)
    assert len(first["id"]) == 32
    assert identity_of(spool, HERE) == first
    assert os.stat(os.path.join(spool, IDENTITY)).st_mode & 0o777 == 0o600
    assert os.listdir(spool) == [IDENTITY]


def test_a_copy_and_another_machine_differ(tmp_path: Path) -> None:
    spool = _spool(tmp_path / "root/spool")
    first = identity_of(spool, HERE)
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    copy = identity_of(str(tmp_path / "copy/spool"), HERE)
    assert (copy["id"], copy["machine"]) == (first["id"], first["machine"])
    assert copy["inode"] != first["inode"]
    assert identity_of(spool, {"HPCNODE_MACHINE_ID": "two"})["machine"] != first["machine"]


def test_a_moved_directory_is_the_same_spool(tmp_path: Path) -> None:
    first = identity_of(_spool(tmp_path / "root/spool"), HERE)
    (tmp_path / "root").rename(tmp_path / "moved")
    assert identity_of(str(tmp_path / "moved/spool"), HERE) == first


def test_a_wiped_spool_is_another_one(tmp_path: Path) -> None:
    spool = _spool(tmp_path / "root/spool")
    first = identity_of(spool, HERE)
    shutil.rmtree(spool)
    assert identity_of(_spool(tmp_path / "root/spool"), HERE)["id"] != first["id"]


def test_a_process_killed_at_any_call_leaves_a_whole_identity_or_none(tmp_path: Path) -> None:
    killed_at_s = """
import os, sys
from hpcnode.spool import make_identity
calls = 0
def counted(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    setattr(os, name, call)
for name in ("open", "write", "fsync", "close", "link", "unlink", "stat"):
    counted(name)
make_identity(sys.argv[1])
"""
    path = str(Path(hpcnode.__file__).parents[1])
    for number in itertools.count(1):
        spool = _spool(tmp_path / f"{number}/spool")
        done = subprocess.run(
            [sys.executable, "-c", killed_at_s, spool, str(number)],
            env={"PYTHONPATH": path},
            capture_output=True,
            check=False,
        )
        left = Path(spool, IDENTITY)
        before = json.loads(left.read_bytes()) if left.exists() else None
        after = identity_of(spool, HERE)
        assert before is None or before["id"] == after["id"]
        if done.returncode == 0:
            assert number > 5  # it was killed at open, write, fsync, close and link
            return
        assert done.returncode == -signal.SIGKILL, done.stderr
