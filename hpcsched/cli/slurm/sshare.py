"""sshare: `hshare` under Slurm's name."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli import hshare
from hpcsched.cli.slurm import run_face
from hpcsched.commands.options import Option
from hpcsched.commands.slurm import ELSEWHERE, Face

FACE = Face(
    hshare.COMMAND._replace(
        name="sshare", accepted=(*ELSEWHERE, Option("partition", "m"), Option("verbose", "v"), Option("usage"))
    ),
    "sshare: error",
)
# Source: sshare of Slurm 23.02.
WIDTHS = {
    "Account": 20, "User": 10, "RawShares": 10, "NormShares": 11, "RawUsage": 11, "NormUsage": 11, "EffectvUsage": 13,
    "FairShare": 10, "LevelFS": 10,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(FACE, lambda words: hshare.show(words, WIDTHS), argv)
