"""scancel: `hcancel` under Slurm's name, which says nothing of jobs that are not there or have ended."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli import hcancel
from hpcsched.cli.slurm import run_face
from hpcsched.commands.options import Option
from hpcsched.commands.slurm import ELSEWHERE, Face

FACE = Face(
    hcancel.COMMAND._replace(
        name="scancel", accepted=(*ELSEWHERE, Option("hurry", "H"), Option("ctld"), Option("wckey", "", "KEY"))
    ),
    "scancel: error: Kill job error",
)
MANNERS = hcancel.Manners(FACE.command, lambda work, argv: run_face(FACE, work, argv), slurms=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return hcancel.main(argv, MANNERS)
