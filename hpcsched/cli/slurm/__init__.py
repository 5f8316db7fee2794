"""Slurm's names for the commands: sbatch, squeue, scancel and the others.

They run the code of our own commands with Slurm's defaults, formats, messages and exit statuses (`hpcsched.commands.options`).
They are found only if the directory of ``hpcsched slurm-path`` is in the PATH.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli.output import run_command
from hpcsched.commands.options import (
    SLURM_VERSION,
    Face,
    Words,
    clusters_of,
    refuse_operands,
    refuse_others,
    slurm_explained,
    usage_text,
    with_usage,
)


def run_face(face: Face, work: Callable[[Words], int], argv: Sequence[str] | None) -> int:
    """Run a command with Slurm's name, and return its exit status."""
    command = with_usage(face)

    def here(words: Words) -> int:
        if words.has("usage"):
            sys.stdout.write(usage_text(command.name, command.options, *command.usage[0].split()[1:]))
            return 0
        if named := clusters_of(",".join(words.given.get("clusters", ()))):
            refuse_others(named, own_cluster())
        return work(words)

    return run_command(
        command,
        here,
        argv,
        explain=lambda name, error: slurm_explained(name, error, face.contact),
        version=lambda name: print(f"slurm {SLURM_VERSION}"),
    )


def own_cluster() -> str:
    """Return the cluster's name."""
    return str(client.call("GET", "/v1/ping")["cluster"])


def look_again(words: Words, look: Callable[[Words], int]) -> int:
    """Print once, or with --iterate repeatedly until interrupted.

    Raises UsageError if there are operands.
    """
    refuse_operands(words)
    if not words.has("iterate"):
        return look(words)
    pause_s = words.number("iterate", 1, at_least=1)
    while True:
        look(words)
        sys.stdout.write("\n")
        sys.stdout.flush()
        time.sleep(pause_s)
