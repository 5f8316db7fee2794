"""`hpcsched top`: nodes, queue, and one job with its training curve and log, refreshed on a terminal.

Asks the controller as any user may, through its socket. Rules: a controller that does not answer is reported on the screen
and asked again, what was seen last stays; the output is plain text, once, if it is not a terminal that can be redrawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from hpcsched import client
from hpcsched.cli.admin.screen import ClusterScreen, MetricsReader, QueuedJob, picture, plain_text
from hpcsched.errors import HpcschedError, NotFoundError, UnavailableError
from hpcsched.listing.jobs import ACTIVE_STATES

TIMEOUT_S = 5.0
INTERVAL_S = 2.0
LOG_EVERY_S = 1.0
LOG_BYTES = 4000
SEPARATOR = "\x1f"  # never in a value: the controller replaces control characters
COLUMNS = SEPARATOR.join(("%A", "%i", "%j", "%u", "%T", "%M", "%R", "%r"))
ARROWS = {b"\x1b[A": "k", b"\x1b[B": "j", b"\x1bOA": "k", b"\x1bOB": "j"}


@click.command()
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
def top(job: str, once: bool, interval: float) -> int:
    """Show nodes, queue, and a job's training curve and log, live.

    Without JOB, the first of your running jobs is selected. Keys: j and k (or arrows) select another job, q quits.
    """
    console = Console(highlight=False)
    reader = ClusterReader()
    if once or not is_live(console):
        screen = reader.look(job or None)
        if screen.controller is None:
            raise UnavailableError(screen.trouble)
        click.echo(plain_text(screen), nl=False)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is restored on the way
    with contextlib.suppress(KeyboardInterrupt):
        _refresh(console, reader, job or None, interval)
    return 0


def is_live(console: Console) -> bool:
    """Return whether the output is a terminal that can be redrawn and shows our characters."""
    return console.is_terminal and not console.is_dumb_terminal and (console.encoding or "").lower() == "utf-8"


def _refresh(console: Console, reader: ClusterReader, chosen: str | int | None, interval_s: float) -> None:
    """Show the cluster until the user quits. Raises NotFoundError if `chosen` names no job."""
    with _keyboard() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
        screen, due_s = reader.look(chosen), time.monotonic() + interval_s
        while True:
            chosen = screen.job["id"] if screen.job is not None else chosen
            live.update(picture(screen, *console.size), refresh=True)
            key = next_key(due_s - time.monotonic())
            if key == "q":
                return
            if key in ("j", "k"):
                chosen = _neighbour(screen, 1 if key == "j" else -1)
            elif key:
                continue
            screen, due_s = reader.look(chosen), time.monotonic() + interval_s


def _neighbour(screen: ClusterScreen, step: int) -> int | None:
    """Return the job `step` lines below the selected one; None if there are no jobs."""
    numbers = [job.number for job in screen.queue]
    selected = screen.job["id"] if screen.job is not None else None
    at = numbers.index(selected) + step if selected in numbers else 0
    return numbers[max(0, min(len(numbers) - 1, at))] if numbers else None


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Give a function that waits some seconds for a key; it returns "" if none was pressed."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):

        def no_key(wait_s: float) -> str:
            time.sleep(max(0.0, wait_s))
            return ""

        yield no_key
        return

    pending = b""

    def next_key(wait_s: float) -> str:
        nonlocal pending
        if not pending:
            if not select.select([descriptor], [], [], max(0.0, wait_s))[0]:
                return ""
            pending = os.read(descriptor, 64)
        arrow = next((code for code in ARROWS if pending.startswith(code)), b"")
        key = ARROWS.get(arrow) or pending[:1].decode("latin-1").lower() or "q"  # the end of the input quits
        pending = pending[len(arrow) or 1 :]
        return key

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield next_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class ClusterReader:
    """Asks the controller for what a screen shows.

    `metrics` is the training's file, if the caller knows it.
    """

    def __init__(self, metrics: Path | None = None) -> None:
        self._metrics = metrics
        self._runs: dict[int, MetricsReader] = {}
        self._last = ClusterScreen()
        self._log_of: tuple[int, float] = (0, 0.0)

    def look(self, chosen: str | int | None = None) -> ClusterScreen:
        """Return the cluster as it is now, with the job `chosen`, by default our first running one.

        Raises NotFoundError if there is no job of a name that a user chose; a job's number may have been forgotten.
        """
        try:
            self._last = self._asked(chosen)
        except UnavailableError as error:
            self._last = dataclasses.replace(self._last, controller=None, trouble=str(error), now_s=time.time())
            if self._last.job is not None:  # its file may still grow
                self._last = dataclasses.replace(self._last, run=self._runs[self._last.job["id"]].read())
        return self._last

    def _asked(self, chosen: str | int | None) -> ClusterScreen:
        ping = client.call("GET", "/v1/ping", timeout_s=TIMEOUT_S)
        nodes = client.call("GET", "/v1/nodes", timeout_s=TIMEOUT_S)["nodes"]
        query = client.query("/v1/queue", format=COLUMNS, state="ALL", order="phase", fold="1", noheader="1")
        queue = _queue_of(client.fetch_text(query, timeout_s=TIMEOUT_S))
        job = self._job(chosen if chosen is not None else _first_of_mine(queue))
        screen = ClusterScreen(
            now_s=ping["now_s"],
            title="hpcsched top",
            subtitle=time.strftime("%H:%M:%S"),
            hint="j/k select a job, q quits",
            controller=ping,
            nodes=tuple(nodes),
            queue=queue,
            job=job,
        )
        return (
            screen if job is None else dataclasses.replace(screen, run=self._run(job).read(), log=self._log(job["id"]))
        )

    def _job(self, chosen: str | int | None) -> dict[str, Any] | None:
        if chosen is None:
            return None
        try:
            answer = client.call("GET", client.job_path(str(chosen)), timeout_s=TIMEOUT_S)
        except NotFoundError:
            if isinstance(chosen, str):
                raise
            return None
        job: dict[str, Any] = answer["jobs"][0]
        return job

    def _run(self, job: dict[str, Any]) -> MetricsReader:
        """Return the reader of the job's metrics file, or of its reports if that is not readable."""
        report = job.get("training") or {}
        path = self._metrics
        if path is None and report.get("directory"):
            path = Path(report["directory"]).parent / "metrics.jsonl"
        known = self._runs.get(job["id"])
        if known is None or known.path != path:
            known = self._runs[job["id"]] = MetricsReader(path)
        if report and (path is None or not os.access(path, os.R_OK)):
            known.add_report(report)
        return known

    def _log(self, number: int) -> tuple[str, ...]:
        """Return the last lines of the job's output.

        Those seen last if it cannot be read at the moment.
        """
        known_of, at_s = self._log_of
        known = self._last.log if known_of == number else ()
        if known_of == number and time.monotonic() < at_s + LOG_EVERY_S:
            return known
        self._log_of = number, time.monotonic()
        try:
            part = client.fetch_log(str(number), offset=-LOG_BYTES, timeout_s=TIMEOUT_S)
        except UnavailableError:
            return known
        except HpcschedError as error:
            return (str(error),)
        lines = part.data.decode("utf-8", "replace").splitlines()
        return tuple(lines[1:] if part.offset else lines)


def _queue_of(text: str) -> tuple[QueuedJob, ...]:
    """Return the jobs of the controller's lines."""
    jobs = []
    for line in text.splitlines():
        number, display_id, name, user, state, spent, where, reason = line.split(SEPARATOR)
        jobs.append(
            QueuedJob(
                number=int(number),
                display_id=display_id,
                name=name,
                user=user,
                state=state,
                time=spent,
                where=where,
                reason=reason,
            )
        )
    return tuple(jobs)


def _first_of_mine(queue: tuple[QueuedJob, ...]) -> int | None:
    """Return the job to select first: a running one of ours, else the first in the queue.

    None if there is none.
    """
    me = client.my_name()
    mine = [job for job in queue if job.user == me and job.state in ACTIVE_STATES]
    return next((job.number for job in (*mine, *queue)), None)
