"""Whether users can run the Python of a node whose agent is root."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpcnode.agent import probe
from hpcsched.cli.admin.node import _describe_python


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that all users can run; the test's own directories are readable by root only."""
    for directory in (tmp_path, *tmp_path.parents):
        if directory != Path("/") and directory.owner() == Path(sys.executable).owner():
            directory.chmod(directory.stat().st_mode | 0o011)
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    path = home / "bin" / "python3"
    path.touch(mode=0o755)
    path.chmod(0o755)
    for directory in (home, home / "bin"):
        directory.chmod(0o755)
    return path


def test_the_first_part_that_keeps_users_out_is_named(python: Path) -> None:
    assert probe.closed_to_others(str(python)) == ""
    python.parent.parent.chmod(0o700)
    assert probe.closed_to_others(str(python)) == str(python.parent.parent)
    python.parent.parent.chmod(0o711)
    python.chmod(0o750)
    assert probe.closed_to_others(str(python)) == str(python)
    python.unlink()
    assert probe.closed_to_others(str(python)) == str(python)


def test_another_python_is_offered_where_the_agents_own_is_closed(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "__file__", "/etc/passwd")  # stands for a library that all can read
    link = tmp_path / "python3"
    link.symlink_to(python)
    assert probe.python_of_users(str(link), "/")["python_closed"] == ""
    python.parent.chmod(0o700)
    found = probe.python_of_users(str(link), "/")
    assert found["python_closed"] == str(python.parent), "what the link leads to counts"
    offered = Path(probe.SYSTEM_PYTHON)
    assert found["python_for_all"] == (str(offered) if offered.exists() else "")


def test_which_python_was_chosen_is_said() -> None:
    assert list(_describe_python({})) == []
    (line,) = _describe_python({"python_path": "/usr/bin/python3", "python_closed": ""})
    assert line == "  python   /usr/bin/python3, which all users can run"
    said = "\n".join(_describe_python({"python_path": "/closed/x/python3", "python_closed": "/closed"}))
    assert said.startswith("! python   /closed/x/python3: users cannot run it")
    assert "(/closed is closed to them)" in said
    assert "--python=PATH" in said
