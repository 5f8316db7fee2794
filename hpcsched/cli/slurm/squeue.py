"""squeue in its own process: what the controller cannot answer as text, which are --iterate, --steps, --json and --help.

The rest is `hpcsched.commands.queue`, the same code for the controller and for here.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.process import finish, own_call
from hpcsched.cli.render.slurm_json import print_jobs
from hpcsched.cli.render.steps import print_steps
from hpcsched.cli.slurm import look_again, run_face
from hpcsched.commands.options import Words
from hpcsched.commands.queue import SQUEUE, show_slurm, slurm_filters

FACE = SQUEUE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SQUEUE, lambda words: look_again(words, _look), argv)


def _look(words: Words) -> int:
    if words.has("json"):
        return print_jobs(client.call("GET", client.query("/v1/jobs", strict="0", **slurm_filters(words, own_call()))))
    if words.has("steps"):
        return print_steps(words)
    return finish(show_slurm(words, own_call()))
