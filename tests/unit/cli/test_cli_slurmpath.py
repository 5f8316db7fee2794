"""hpcsched slurm-path: a directory of programs that run, made once, mended when it is of an older release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsched.cli.admin import shell
from hpcsched.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_each_name_is_a_program_that_says_what_it_is(place: Path) -> None:
    directory = shell.ensure_directory()
    assert directory == place / "prefix" / "libexec" / "hpcsched" / "slurm"
    assert {path.name for path in directory.iterdir()} - {"hpcsched-command"} == set(shell.COMMANDS)
    env = {"PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"}  # a job's own must not matter
    for name in ("squeue", "srun", "sattach"):
        done = subprocess.run(
            [directory / name, "--version"], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout == "slurm 23.02.7\n"


def test_what_is_old_is_written_again_and_what_is_right_is_left(place: Path) -> None:
    directory = shell.ensure_directory()
    before = {path.name: path.stat().st_ino for path in directory.iterdir()}
    (directory / "sacct").write_text("#!/bin/sh\nexit 1\n")
    os.chmod(directory / "sinfo", 0o644)
    shell.ensure_directory()
    after = {path.name: path.stat().st_ino for path in directory.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"sacct", "sinfo"}
    assert os.access(directory / "sinfo", os.X_OK)


def test_where_the_installation_cannot_be_written_it_is_the_users_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "prefix").write_text("no directory")
    directory = shell.ensure_directory()
    assert directory.parent == place / "cache" / "hpcsched"
    (place / "cache2").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache2"))
    with pytest.raises(ConfigError, match="cannot make the directory of Slurm's commands"):
        shell.ensure_directory()


def test_a_python_with_a_long_path_or_a_space_is_found_all_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = place / "a b"
    odd.mkdir()
    (odd / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(odd / "python"))
    directory = shell.ensure_directory()
    done = subprocess.run([directory / "sinfo", "-V"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "slurm 23.02.7\n"
