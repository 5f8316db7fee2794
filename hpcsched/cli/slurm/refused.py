"""Commands of Slurm's that do nothing here: each says so, and what to use instead, and fails.

They are there so that whoever calls them learns why, instead of finding another cluster's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hpcsched.cli.errors import FAILED
from hpcsched.cli.slurm.face import SLURM_VERSION

_INSTEAD = {
    "sreport": "use sacct, sshare or hacct --json",
    "strigger": "use --dependency for a job that starts after another, or sbatch --wait",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command by whose name this was called, and return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    name = os.path.basename(sys.argv[0])
    if words and words[0] in ("-V", "--version"):
        print(f"slurm {SLURM_VERSION}")
        return 0
    print(
        f"{name}: error: not supported by hpcsched: {_INSTEAD.get(name, 'there is no such thing here')}",
        file=sys.stderr,
    )
    return FAILED
