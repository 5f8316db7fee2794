"""The check for a full file system does not wait for one that does not answer."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcnode.shepherd import task


@pytest.mark.parametrize(("free", "full"), [(0, True), (15, True), (16, False), (10**6, False)])
def test_less_than_64_kib_is_full(free: int, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(f_blocks=10**6, f_bavail=free, f_frsize=4096)
    monkeypatch.setattr(task.os, "statvfs", lambda path: about)
    assert task.is_full(str(tmp_path)) is full


def test_nothing_is_known_of_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert not task.is_full(str(tmp_path / "missing" / "file"))


def test_a_file_system_without_blocks_is_not_full() -> None:
    assert os.statvfs("/proc").f_blocks == 0
    assert not task.is_full("/proc/self")


def test_a_share_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()

    def hang(path: str) -> None:
        hangs.wait()
        raise OSError("Stale file handle")

    monkeypatch.setattr(task.os, "statvfs", hang)
    monkeypatch.setattr(task, "LOOK_S", 0.01)
    assert not task.is_full(str(tmp_path))
    hangs.set()


def test_the_disk_check_without_threads_reports_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(task._thread, "start_new_thread", fail)
    assert not task.is_full(str(tmp_path))
