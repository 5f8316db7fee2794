"""srun --multi-prog: the file becomes a shell command, which a real shell runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcnode.commands import multi_prog

FILE = r"""# who does what
0-1,4   echo server %t of=%o 'a b' "c $HOME"
2       no-such-program
3       echo \
        went on   # and this is no word
*       echo other %o;id
"""


def run(task: int, file: Path) -> tuple[int, str, str]:
    command = multi_prog.command_of(str(file))
    env = {"SLURM_PROCID": str(task), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_each_task_runs_its_program(tmp_path: Path) -> None:
    file = tmp_path / "multi.conf"
    file.write_text(FILE)
    assert run(0, file) == (0, "server 0 of=0 a b c $HOME\n", "")
    assert run(1, file)[1] == "server 1 of=1 a b c $HOME\n"
    assert run(4, file)[1] == "server 4 of=2 a b c $HOME\n"
    assert run(2, file)[0] == 2
    assert run(3, file)[1] == "went on\n"
    assert run(6, file)[1] == "other 1;id\n"


def test_a_task_without_a_program_says_so(tmp_path: Path) -> None:
    file = tmp_path / "multi.conf"
    file.write_text("0 true\n")
    assert run(1, file) == (1, "", f"srun: error: no program for task 1 in {file}\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0-1 true\n1 false\n", "line 2: tasks 1 have a program already"),
        ("3-1 true\n", "line 1: 3-1 are not tasks"),
        ("true\n", "line 1: it begins with 'true', not with tasks as 0-3,7 or *"),
        ("0\n", "line 1: tasks 0 have no program"),
        ("0 'true\n", "line 1: No closing quotation"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(multi_prog.MultiProgError) as caught:
        multi_prog.script_of(text, "f")
    assert why in str(caught.value)
