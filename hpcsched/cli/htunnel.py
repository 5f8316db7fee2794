"""htunnel: forwards a local port to a node of a running job, through a step of the job."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from hpcnode.commands import hrun, tunnel
from hpcnode.os.loop import READ, Loop, Stream, wake_on_signals
from hpcsched import client
from hpcsched.cli.output import complain, note, run_command
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.errors import RequestError

COMMAND = Command(
    "htunnel",
    ("[OPTIONS] JOB PORT",),
    "Forward a port of this machine to a port on a node of a running job (by default its first), until interrupted or until the "
    "job ends. Use it for a notebook or a dashboard served by a job.",
    (
        Option("host", "", "HOST", "the host that the node connects to; default: localhost"),
        Option("local", "l", "PORT", "the local port; default: the same number, or another one if that is in use"),
        Option("node", "w", "NODE", "the node; default: the job's first"),
        HELP,
        VERSION,
    ),
    ("A JOB is a number, a task of an array (10_3), the name of one of your jobs, or 'last'.",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if len(words.operands) != 2:
        raise UsageError("cannot tell what to reach: name a job and a port; see htunnel --help")
    client.must_be_local(COMMAND.name)
    reference, port = words.operands[0], _port(words.operands[1])
    listener = _listen(_port(words.last("local")) if words.has("local") else None, port)
    job = client.call("GET", client.job_path(reference))["jobs"][0]
    node = [f"--nodelist={words.last('node')}"] if words.has("node") else []
    step = [f"--jobid={job['id']}", "--overlap", "--overcommit", "-N1", "-n1", "--job-name=htunnel", "--chdir=/", *node]
    return _serve(
        listener, [*step, "htun", words.last("host") or "localhost", str(port)], f"port {port} of job {reference}"
    )


def _serve(listener: socket.socket, step: list[str], what: str) -> int:
    """Forward the connections of `listener` through the step until it ends.

    Return its exit status.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        listener.close()
        ours.close()
        _run_step(step, theirs)
    theirs.close()
    loop = Loop()
    stream = Stream(loop, ours, lambda data: carrier.feed(data) if data else _stop(loop))
    carrier = tunnel.Tunnel(loop, stream.send)
    address = f"{listener.getsockname()[0]}:{listener.getsockname()[1]}"

    def ready() -> None:
        loop.watch(listener.fileno(), READ, lambda _events: carrier.add(listener.accept()[0]))
        print(f"http://{address} is {what}; interrupt to end it", flush=True)

    carrier.on_ready = ready
    carrier.on_refused = lambda why: note(COMMAND.name, f"cannot connect to {what}: {why}")
    interrupted = []

    def interrupt() -> None:
        interrupted.append(True)
        _stop(loop)

    wake_on_signals(loop, {signal.SIGINT: interrupt, signal.SIGTERM: interrupt, signal.SIGHUP: interrupt})
    try:
        loop.run()
    except tunnel.TunnelError as error:
        complain(COMMAND.name, f"cannot continue: {error}")
    stream.close()  # the end of its input ends the step
    status = os.waitpid(child, 0)[1]
    return 0 if interrupted else os.waitstatus_to_exitcode(status)


def _stop(loop: Loop) -> None:
    loop.stopped = True


def _run_step(words: list[str], sock: socket.socket) -> NoReturn:
    """Become hrun, with the tunnel as stdin and stdout, in a session without Ctrl-C."""
    code = 1
    try:
        os.setsid()
        os.dup2(sock.fileno(), 0)
        os.dup2(sock.fileno(), 1)
        sock.close()
        code = hrun.main(words, hrun.CommandStyle(COMMAND.name))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _listen(local: int | None, port: int) -> socket.socket:
    """Return a socket that listens on localhost: at `local`, else at `port` or any free port."""
    for wanted in (local,) if local is not None else (port, 0):
        try:
            return socket.create_server(("127.0.0.1", wanted))
        except OSError as error:
            refused = error
    raise RequestError(f"cannot listen at port {local or port}: {refused.strerror}; choose another one with --local")


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise UsageError(f"cannot read port {text[:20]!r}: a number from 1 to 65535 is needed")
    return int(text)
