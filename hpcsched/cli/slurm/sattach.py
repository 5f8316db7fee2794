"""sattach: prints the output of a running step from now on, and exits with its status.

Its tasks get no input.

Source: sattach(1).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from hpcnode.commands.output import LineStream, Outlet
from hpcnode.commands.step_client import ConnectionLost, Front, ListeningClient
from hpcnode.wire import protocol, sockets
from hpcnode.wire.sockets import connect
from hpcsched.cli.slurm import run_face
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, UsageError, Words
from hpcsched.errors import RequestError, UnavailableError

SATTACH = Face(
    Command(
        "sattach",
        ("[OPTIONS] JOB.STEP",),
        "Show the output of a running step from now on, and end as the step does. Interrupting it does the step nothing.",
        (
            Option("error-filter", "e", "TASK", "show only the standard error of this task: a number, all or none"),
            Option("label", "l", help="begin each line with the task's number"),
            Option("layout", help="show which tasks run on which nodes, and end"),
            Option("output-filter", "o", "TASK", "show only the standard output of this task: a number, all or none"),
            Option("quiet", "Q", help="print errors only"),
            Option("verbose", "v", help="print more"),
            HELP,
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("input-filter", "i", "TASK")),
    ),
    "sattach: error",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SATTACH, _work, argv)


def _work(words: Words) -> int:
    if len(words.operands) != 1:
        raise UsageError("", getopt="error: Job step id is needed: sattach JOB.STEP")
    job_id, _, step = words.operands[0].partition(".")
    if not job_id.isdigit() or not step.isdigit():
        raise RequestError(
            f"Invalid job id specified: {words.operands[0][:40]}: a number, a dot and a number are needed"
        )
    try:
        sock = connect(sockets.steps_socket(os.environ, os.getuid()))
    except (OSError, sockets.NotFound) as error:
        raise UnavailableError(f"cannot reach the controller: {getattr(error, 'strerror', None) or error}") from None
    front = _Attached(words)
    client = front.client = ListeningClient(sock, front)
    client.catch((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    request = protocol.StepRequest(
        version=protocol.VERSION, job_id=int(job_id), options={"attach": step}, argv=[], work_dir="/", env={}
    )
    client.request(request)
    try:
        client.run()
    except ConnectionLost as error:
        raise UnavailableError(f"lost the connection to the controller: {error}") from None
    if client.ended is None:
        return 0
    if client.ended.error and not client.ended.codes:
        raise RequestError(client.ended.error)
    return max((128 + s if s else c for c, s in zip(client.ended.codes, client.ended.signals, strict=True)), default=0)


class _Attached(Front):
    client: ListeningClient

    def __init__(self, words: Words) -> None:
        self._label = words.has("label")
        self._layout = words.has("layout")
        self._filters = {1: words.last("output-filter") or "all", 2: words.last("error-filter") or "all"}

    def on_started(self, started: protocol.StepStarted) -> None:
        if self._layout:
            print(layout(started))
            self.client.give_up("that was all")
        width = len(str(sum(len(ranks) for _, ranks, _ in started.parts()) - 1))
        for fd, wanted in self._filters.items():
            # The layout does not include output of the tasks.
            self.client.outlets[fd] = self._streams(Outlet(fd), "none" if self._layout else wanted, width)

    def on_signal(self, signum: int) -> None:
        self.client.give_up("interrupted")

    def _streams(self, outlet: Outlet, wanted: str, width: int) -> Callable[[int], LineStream]:
        def stream_of(task: int) -> LineStream:
            label = b"%*d: " % (width, task) if self._label else b""
            return LineStream(outlet if wanted in ("all", str(task)) else None, label)

        return stream_of


def layout(started: protocol.StepStarted) -> str:
    """Return the tasks of each node, in Slurm's format."""
    parts = started.parts()
    nodes = " ".join(node for node, _, _ in parts)
    lines = [
        "Job step layout:",
        f"  {sum(len(ranks) for _, ranks, _ in parts)} tasks, {len(parts)} nodes ({nodes})",
        "",
    ]
    for number, (node, ranks, _) in enumerate(parts):
        lines.append(f"  Node {number} ({node}), {len(ranks)} task(s): {' '.join(map(str, ranks))}")
    return "\n".join(lines)
