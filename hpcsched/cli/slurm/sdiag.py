"""sdiag: the load of the controller, in the format that exporters parse.

It shows only values that exist here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.output import print_json
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, Words
from hpcsched.errors import RequestError
from hpcsched.listing.jobs import ACTIVE_STATES, ENDED_STATES

SDIAG = Face(
    Command(
        "sdiag",
        ("[OPTIONS]",),
        "Show what the controller has to do.",
        (
            Option("all", "a", help="show everything (the default)"),
            Option("json", help="print as JSON"),
            Option("reset", "r", help="refused: the counts describe the present state"),
            HELP,
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("sort-by-id", "i"), Option("sort-by-time", "t"), Option("sort-by-time2", "T")),
    ),
    "slurm_get_statistics",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SDIAG, _work, argv)


def _work(words: Words) -> int:
    if words.has("reset"):
        raise RequestError("cannot reset counts: sdiag shows only current values")
    ping = client.call("GET", "/v1/ping")
    counts = ping["counts"]
    figures = {
        "server_thread_count": 1,
        "agent_queue_size": 0,
        "jobs_pending": counts.get("PENDING", 0),
        "jobs_running": sum(counts.get(state, 0) for state in ACTIVE_STATES),
        "jobs_completed": counts.get("COMPLETED", 0),
        "jobs_canceled": counts.get("CANCELLED", 0),
        "jobs_failed": sum(counts.get(state, 0) for state in ENDED_STATES - {"COMPLETED", "CANCELLED"}),
    }
    if words.has("json"):
        print_json({"statistics": figures, "errors": [], "warnings": []})
    else:
        _print(ping, figures)
    return 0


def _print(ping: Json, figures: dict[str, int]) -> None:
    rule = "*" * 55
    print(rule)
    print(f"sdiag output at {_stamp(ping['now_s'])}")
    print(f"Data since      {_stamp(ping['started_at_s'])}")
    print(rule)
    print(f"Server thread count:  {figures['server_thread_count']}")
    print(f"Agent queue size:     {figures['agent_queue_size']}")
    print()
    print(f"Jobs completed: {figures['jobs_completed']}")
    print(f"Jobs canceled:  {figures['jobs_canceled']}")
    print(f"Jobs failed:    {figures['jobs_failed']}")
    print()
    print(f"Job states ts:  {_stamp(ping['now_s'])}")
    print(f"Jobs pending:   {figures['jobs_pending']}")
    print(f"Jobs running:   {figures['jobs_running']}")


def _stamp(at_s: float) -> str:
    return f"{time.strftime('%a %b %d %H:%M:%S %Y', time.localtime(at_s))} ({int(at_s)})"
