"""A state directory that cannot be written (full, read-only, a file where it should be) is named in an error for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.cli.admin import daemon
from hpcsched.controller.__main__ import make_own_dir
from hpcsched.controller.lock import HOLDER_FILE, StateLock
from hpcsched.errors import ConfigError, UnavailableError


def test_the_lock_is_held_by_one_who_is_named(tmp_path: Path) -> None:
    with StateLock(tmp_path) as held:
        held.acquire("noon")
        with pytest.raises(UnavailableError, match="cannot restore: another hpcschedd .*since noon.* holds"):
            StateLock(tmp_path).acquire("later", "restore")
    StateLock(tmp_path).acquire("later")


@pytest.mark.parametrize("name", ["controller.lock", Path(HOLDER_FILE).with_suffix(".tmp").name])
def test_a_lock_that_cannot_be_written_is_an_error_with_the_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()  # as a full disk does: the file cannot be written, whoever we are
    with pytest.raises(UnavailableError, match=f"cannot start: cannot write to {tmp_path}: Is a directory"):
        StateLock(tmp_path).acquire("noon")


def test_a_directory_that_cannot_be_made_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"cannot use {tmp_path}/file/state: Not a directory"):
        make_own_dir(tmp_path / "file" / "state")


def test_up_says_that_it_cannot_write_the_log(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="cannot start hpcschedd: cannot write its log .*: File exists"):
        daemon.open_log(tmp_path / "file" / "hpcschedd.log")
