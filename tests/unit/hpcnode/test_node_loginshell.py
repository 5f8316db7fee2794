"""Scripts with a login shell find our commands, although the profile resets PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcnode.shepherd import environment, task

SCRIPT = """#!/bin/bash -l
echo "$0 $# $2 $FROM_PROFILE"
ours
shopt -q login_shell && echo login
[ "${BASH_SOURCE[0]}" = "$0" ] && profile_function
exit 3
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/bin/bash -l", True),
        ("/bin/bash --login", True),
        ("/usr/bin/zsh -el", True),
        ("/bin/sh -l", True),
        ("/bin/bash", False),
        ("/bin/bash -e", False),
        ("/bin/bash --posix-l", False),
        ("/usr/bin/env bash", False),
        ("/usr/bin/perl -l", False),
        ("", False),
    ],
)
def test_which_first_lines_ask_for_a_login_shell(line: str, expected: bool) -> None:
    assert task.is_login_script(line.split(None, 1)) is expected


def test_the_profile_is_read_and_our_commands_are_found(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash
    folder = tmp_path / "our folder"
    folder.mkdir()
    (folder / "ours").write_text("#!/bin/sh\necho found\n")
    (folder / "ours").chmod(0o755)
    (tmp_path / ".bash_profile").write_text(
        "PATH=/usr/bin:/bin; FROM_PROFILE=yes; profile_function() { echo function; }\n"
    )
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT)
    words = task.command([bash, "-l"], [str(script), "a", "b c"], [str(folder)])
    done = subprocess.run(
        words, env={"HOME": str(tmp_path), "PATH": "/nowhere"}, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.stdout.splitlines() == [f"{script} 2 b c yes", "found", "login", "function"]
    assert done.returncode == 3


def test_of_a_path_those_folders_are_ours_that_have_our_commands() -> None:
    path = [
        "/home/ann/venv/bin",
        "/a/bin",
        "/a/bin/slurm",
        "/lib/hpcsched/slurm",
        "/b/hpcsched/slurm-0123456789ab",
        "/bin",
    ]
    env = {environment.AGENT_ROOT: "/a", "PATH": os.pathsep.join(path)}
    assert environment.own_folders(env) == path[1:5]
