"""sbatch: `hsub` under Slurm's name, with Slurm's words where it fails.

Clients look for *Batch job submission failed:* and for a few phrases behind it; ours are put first, then what there is to
say beyond them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcsched.cli import submit
from hpcsched.cli.errors import FAILED
from hpcsched.cli.slurm.face import NO_CONTACT, SLURM_VERSION, explained
from hpcsched.errors import HpcschedError, UnavailableError

NAME = "sbatch"
FAILURE = "Batch job submission failed"

# What our own texts have, in lower case, and Slurm's name for it (slurm_errno.c).
_PHRASES = (
    ("invalid partition name", "Invalid partition name specified"),
    ("invalid account", "Invalid account or account/partition combination specified"),
    ("invalid qos", "Invalid qos specification"),
    ("invalid license", "Invalid license specification"),
    ("invalid node name", "Invalid node name specified"),
    ("job dependency problem", "Job dependency problem"),
    (
        "job violates accounting/qos policy",
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    ),
    ("reservation", "Requested reservation is invalid"),
    ("max_array_size", "Invalid job array specification"),
    ("max_jobs", "Slurm temporarily unable to accept job, sleeping and retrying"),
    ("time limit", "Requested time limit is invalid (missing or exceeds some limit)"),
    ("permission", "Access/permission denied"),
)  # fmt: skip
_OTHERWISE = "Requested node configuration is not available"


def _explained(name: str, error: HpcschedError) -> tuple[str, int]:
    if isinstance(error, UnavailableError) and not error.by_controller:
        return f"{name}: error: {FAILURE}: {NO_CONTACT}\n{name}: error: {error}", FAILED
    if error.by_controller:
        return f"{name}: error: {FAILURE}: {phrase_of(str(error))}\n{name}: error: {error}", FAILED
    return explained(name, error, f"{name}: error")


def phrase_of(text: str) -> str:
    """Return Slurm's words for why a job was refused, of our own."""
    lowered = text.lower()
    return next((slurms for ours, slurms in _PHRASES if ours in lowered), _OTHERWISE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return submit.start(NAME, sys.argv[1:] if argv is None else argv, _whole, _explained, _print_version)


def _whole(argv: Sequence[str]) -> int:
    from hpcsched.cli import hsub  # takes long to import, and most submissions get by without it

    return hsub.main(argv, hsub.Face(NAME, _print_version, _explained, cluster=True))


def _print_version(name: str) -> None:
    print(f"slurm {SLURM_VERSION}")
