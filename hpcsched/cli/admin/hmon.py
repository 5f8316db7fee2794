"""hmon: the cluster live on a terminal, or once as plain text.

The live screen needs textual; --once and output that is no terminal do not import it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys

import click

import hpcsched
from hpcsched import client
from hpcsched.cli.admin import run
from hpcsched.errors import ConfigError, UnavailableError

INTERVAL_S = 2.0
SWITCH_S = 0.0005  # a key waits so long for the thread that reads an answer of 10,000 jobs; Python's own: 5 ms


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="")
@click.option("--once", is_flag=True, help="Print plain text once and exit, as if the output is not a terminal.")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(min=0.2),
    default=INTERVAL_S,
    show_default=True,
    help="Time between two refreshes.",
)
@click.version_option(hpcsched.__version__, "-V", "--version", message="%(prog)s (hpcsched) %(version)s")
def hmon(job: str, once: bool, interval: float) -> int:
    """Show jobs, nodes and what is wrong, live, with keys to act on them.

    With JOB, the details of this job are shown first. Keys: 1 to 6 are the screens, ? is help, q quits.
    """
    if job:
        job = str(client.call("GET", client.job_path(job))["jobs"][0]["display_id"])
    if once or not is_live():
        return _print_once(job)
    if importlib.util.find_spec("textual") is None:
        raise ConfigError(
            "cannot show the live screen: textual is not installed; install it with: pip install 'hpcsched[tui]'   "
            "(hmon --once prints the cluster as text without it)"
        )
    gc.disable()  # the import makes many objects, and no garbage
    from hpcsched.tui.app import MonitorApp  # textual takes longer to import than all else

    gc.freeze()  # a collection that looks at all of textual takes longer than a key may
    gc.enable()
    sys.setswitchinterval(SWITCH_S)
    app = MonitorApp(interval, job)
    app.run()
    return app.return_code or 0


def is_live() -> bool:
    """Return whether input and output are a terminal that can be redrawn, in UTF-8."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    encoding = (sys.stdout.encoding or "").lower()
    return (
        all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb" and encoding == "utf-8"
    )


def _print_once(job: str) -> int:
    from hpcsched.tui.reading import ClusterReader, first_of_mine
    from hpcsched.tui.views import plain_text

    reader = ClusterReader()
    screen = reader.look(job or None)
    if screen.controller is None:
        raise UnavailableError(screen.trouble)
    if not job and (number := first_of_mine(screen.queue)) is not None:
        screen = reader.look(number)
    click.echo(plain_text(screen), nl=False)
    return 0


def main() -> None:
    """Run `hmon` with the arguments of this process."""
    sys.exit(run(hmon, "hmon"))
