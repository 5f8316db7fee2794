"""sbatch in its own process: `hsub` under Slurm's name, with Slurm's words where it fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcsched.cli import hsub
from hpcsched.commands.slurm import usage_text
from hpcsched.commands.submit import SBATCH


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--usage"]:
        sys.stdout.write(usage_text(SBATCH.name, hsub.OPTIONS, "script [args...]"))
        return 0
    return hsub.main(words, SBATCH)
