"""sprio: `hprio` under Slurm's name."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli import hprio
from hpcsched.cli.options import Option
from hpcsched.cli.slurm.face import ELSEWHERE, Face, run_face

FACE = Face(
    hprio.COMMAND._replace(
        name="sprio", accepted=(*ELSEWHERE, Option("sort", "S", "LIST"), Option("verbose", "v"), Option("usage"))
    ),
    "slurm_load_jobs error",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(FACE, hprio.show, argv)
