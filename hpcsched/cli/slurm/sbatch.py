"""sbatch: `hsub` under Slurm's name, with Slurm's words where it fails.

Clients look for *Batch job submission failed:* and for a few phrases behind it; ours are put first, then what there is to
say beyond them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcnode.commands import slurm_text
from hpcsched.cli import submit
from hpcsched.cli.errors import FAILED
from hpcsched.commands.slurm import NO_CONTACT, SLURM_VERSION, explained, usage_text
from hpcsched.errors import HpcschedError, UnavailableError

NAME = "sbatch"
FAILURE = "Batch job submission failed"

# What our own texts have, and what sbatch says of it before it has asked anybody.
_BEFORE = (
    ("cannot read script ", "Unable to open file {}"),
    ("the script: it is empty", "Batch script is empty!"),
)


def _explained(name: str, error: HpcschedError) -> tuple[str, int]:
    if isinstance(error, UnavailableError) and not error.by_controller:
        return f"{name}: error: {FAILURE}: {NO_CONTACT}\n{name}: error: {error}", FAILED
    if error.by_controller:
        return f"{name}: error: {FAILURE}: {slurm_text.of_job(str(error))}\n{name}: error: {error}", FAILED
    text, status = explained(name, error, f"{name}: error")
    words = [slurms for ours, slurms in _BEFORE if ours in str(error)]
    file = str(error).removeprefix(_BEFORE[0][0]).rpartition(": ")[0]
    return "\n".join([*(f"{name}: error: {said.format(file)}" for said in words), text]), status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("--usage", "--verbose") or (word[:2] == "-v" and not word.strip("-v")) for word in words):
        return _whole(words)  # the controller, asked in the command's place, prints neither
    return submit.start(NAME, words, _whole, _explained, _print_version)


def _whole(argv: Sequence[str]) -> int:
    from hpcsched.cli import hsub  # takes long to import, and most submissions get by without it

    if list(argv) == ["--usage"]:
        sys.stdout.write(usage_text(NAME, hsub.OPTIONS, "script [args...]"))
        return 0
    return hsub.main(argv, hsub.Face(NAME, _print_version, _explained, cluster=True))


def _print_version(name: str) -> None:
    print(f"slurm {SLURM_VERSION}")
