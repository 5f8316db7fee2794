"""scancel: `hcancel` under Slurm's name, which says nothing of jobs that are not there or have ended."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli import hcancel
from hpcsched.cli.slurm import run_face
from hpcsched.commands.cancel import SCANCEL

FACE = SCANCEL


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SCANCEL, lambda words: hcancel.work(words, slurms=True), argv)
