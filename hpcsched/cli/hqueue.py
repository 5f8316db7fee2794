"""hqueue and squeue in their own process: what the controller cannot answer as text.

These are --watch, --iterate, --steps, --json and --help.

The rest is `hpcsched.commands.queue`, the same code for the controller and for here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from hpcsched import client
from hpcsched.cli.output import is_terminal, print_json, run_command
from hpcsched.cli.process import finish, own_call
from hpcsched.cli.slurm import look_again, run_face
from hpcsched.cli.slurm.records import print_jobs
from hpcsched.cli.slurm.sstat import print_steps
from hpcsched.client import Json
from hpcsched.commands.call import Call, Collected
from hpcsched.commands.options import Words
from hpcsched.commands.queue import HQUEUE, SQUEUE, WATCH_S, filters, one_job, show, show_slurm, slurm_filters

COMMAND = HQUEUE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(HQUEUE, _work, argv)


def _work(words: Words) -> int:
    call = own_call()
    if not words.has("watch"):
        return _look(words, call)
    pause_s = words.number("watch", WATCH_S, at_least=0.1)
    try:
        while True:
            screen = Collected()
            _look(words, replace(call, output=screen))
            text = "".join(part for _, part in screen.parts)
            sys.stdout.write("\x1b[H\x1b[2J" + text if is_terminal() else text + "\n")
            sys.stdout.flush()
            time.sleep(pause_s)
    except KeyboardInterrupt:
        return 0


def _look(words: Words, call: Call) -> int:
    """Print one look at the queue."""
    if words.has("steps"):
        return print_steps(words)
    if not words.has("json"):
        return finish(show(words, call))
    reference = one_job(words)
    print_json(
        _job(reference) if reference else client.call("GET", client.query("/v1/jobs", **filters(words, call.caller)))
    )
    return 0


def _job(reference: str) -> Json:
    """Return the API's answer about a job, without script and environment."""
    answer = client.call("GET", client.job_path(reference))
    hidden = ("script", "script_args", "env")
    answer["jobs"] = [{key: job[key] for key in job if key not in hidden} for job in answer["jobs"]]
    return answer


def squeue(argv: Sequence[str] | None = None) -> int:
    """Run squeue and return its exit status."""
    return run_face(SQUEUE, lambda words: look_again(words, _look_squeue), argv)


def _look_squeue(words: Words) -> int:
    if words.has("json"):
        return print_jobs(client.call("GET", client.query("/v1/jobs", strict="0", **slurm_filters(words, own_call()))))
    if words.has("steps"):
        return print_steps(words)
    return finish(show_slurm(words, own_call()))
