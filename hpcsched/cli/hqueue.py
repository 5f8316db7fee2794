"""hqueue in its own process: what the controller cannot answer as text, which are --watch, --steps, --json and --help.

The rest is `hpcsched.commands.queue`, the same code for the controller and for here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from hpcsched import client
from hpcsched.cli.errors import run_command
from hpcsched.cli.output import is_terminal, print_json
from hpcsched.cli.process import finish, own_call
from hpcsched.cli.render.steps import print_steps
from hpcsched.client import Json
from hpcsched.commands.call import Call, Collected
from hpcsched.commands.options import Words
from hpcsched.commands.queue import HQUEUE, WATCH_S, filters, one_job, show

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
        _one(reference) if reference else client.call("GET", client.query("/v1/jobs", **filters(words, call.caller)))
    )
    return 0


def _one(reference: str) -> Json:
    """Return the API's answer about a job, without script and environment."""
    answer = client.call("GET", client.job_path(reference))
    hidden = ("script", "script_args", "env")
    answer["jobs"] = [{key: job[key] for key in job if key not in hidden} for job in answer["jobs"]]
    return answer
