"""salloc: `halloc` under Slurm's name."""

from __future__ import annotations

from collections.abc import Sequence

from hpcnode.commands import slurm_text
from hpcnode.commands.srun import SLURM_VERSION
from hpcsched.cli import halloc

FACE = halloc.Face("salloc", f"slurm {SLURM_VERSION}", 1, slurm_text.of_allocation)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return halloc.main(argv, FACE)
