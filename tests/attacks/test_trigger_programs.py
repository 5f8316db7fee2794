"""Programs that the controller starts for triggers: none that another than root and the trigger's user could replace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcsched.controller.requests.triggers import check_program

UID = os.geteuid()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    made = tmp_path / "a" / "b" / "program"
    made.parent.mkdir(parents=True)
    made.write_text("#!/bin/sh\n")
    made.chmod(0o755)
    return made


def test_f7_a_program_that_is_safe_is_run(program: Path) -> None:
    link = program.parent / "link"
    link.symlink_to("../b/program")
    for path in (program, link, Path("/bin/sh")):
        check_program(path, UID)


@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize("up", [0, 1, 2])
def test_f7_a_program_that_others_may_replace_is_not_run(program: Path, up: int, mode: int) -> None:
    part = [program, *program.parents][up]
    part.chmod(mode)
    with pytest.raises(PermissionError, match=f"others may write {part}, .*chmod go-w"):
        check_program(program, UID)


def test_f7_what_a_link_leads_through_is_checked(program: Path) -> None:
    link = program.parents[1] / "link"
    link.symlink_to("b/program")
    program.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others may write {program.parent},"):
        check_program(link, UID)


@pytest.mark.root
@pytest.mark.skipif(UID != 0, reason="needs to run as root: it gives files to another user")
def test_f7_a_program_of_another_user_below_a_sticky_directory_is_not_run(program: Path) -> None:
    program.parent.chmod(0o1777)
    check_program(program, UID)
    link = program.parent / "link"
    link.symlink_to("program")
    for theirs in (link, program):
        os.chown(theirs, 65534, 65534, follow_symlinks=False)
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            check_program(theirs, 0)
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            check_program(theirs, 1)
        os.chown(theirs, 0, 0, follow_symlinks=False)


def test_f7_a_circle_of_links_ends(program: Path) -> None:
    (program.parent / "one").symlink_to("two")
    (program.parent / "two").symlink_to("one")
    with pytest.raises(PermissionError, match="more than"):
        check_program(program.parent / "one", UID)
