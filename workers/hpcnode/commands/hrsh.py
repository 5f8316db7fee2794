"""hrsh: runs a command on a node of the job, as ssh would, but as a step.

Usage: hrsh [OPTIONS] HOST COMMAND...

mpirun starts its daemons with it. It accepts ssh's options (and ignores most), attaches stdin and output, and returns the exit
code. The command starts in the home directory, in a POSIX shell, with this environment, as srun's tasks do: Open MPI does not
pass on PATH or a virtual environment itself (see man/adr/0002). If hrsh gets a signal that ends it, the command gets SIGTERM, and
SIGKILL a little later. If hrsh is killed, its agent notices the closed connection and ends the command.

Sources: ssh(1); the use of ssh in PRRTE's plm/ssh and hydra's ssh launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from hpcnode.commands.output import LineStream, Outlet
from hpcnode.commands.step_client import ConnectionLost, Front, StepClient, as_text, is_open
from hpcnode.os import rlimits
from hpcnode.shepherd import mpi
from hpcnode.wire import protocol
from hpcnode.wire.sockets import connect, connect_to_agent

FAILED = 255  # as ssh: hrsh itself failed
KILL_AFTER_S = 5.0
_WITH_VALUE = "bBcDEeFIiJLlmOoPpQRSWw"
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)  # mpirun gets them as well, and forwards them


class HrshError(Exception):
    """The command line cannot be read."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run hrsh with these words (default: the command line's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options, host, command = parse(words)
        if "V" in options:
            sys.stderr.write("hrsh of hpcsched, launch protocol %d\n" % protocol.VERSION)
            return 0
        return Hrsh(host, command, os.environ, with_input="n" not in options).run()
    except (HrshError, ConnectionLost, protocol.WireError) as error:
        sys.stderr.write("hrsh: error: %s\n" % error)
        return FAILED


def parse(words: Sequence[str]) -> Tuple[str, str, str]:
    """Return the option letters, the host, and the command as text for a shell."""
    letters = ""
    rest: List[str] = list(words)
    host = ""
    while rest and (not host or rest[0].startswith("-")):  # ssh accepts options after the host, too
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            host = word
            continue
        for at, letter in enumerate(word[1:], start=1):
            letters += letter
            if letter in _WITH_VALUE:
                if at == len(word) - 1 and rest:
                    rest.pop(0)
                break
    if not host and rest:
        host = rest.pop(0)
    if "V" not in letters and not rest:
        raise HrshError("cannot open a login shell: usage: hrsh [OPTIONS] HOST COMMAND...")
    return letters, host.rpartition("@")[2], " ".join(rest)


class Hrsh(Front):
    """One run of hrsh."""

    def __init__(self, host: str, command: str, environ: Mapping[str, str], with_input: bool) -> None:
        self._host = host
        self._command, self._extra = mpi.daemon_command(command, host, environ)
        self._environ = environ
        self._with_input = with_input and is_open(0)
        self._ended_by = 0

    def run(self) -> int:
        """Run the command to its end and return its exit code."""
        job_id = self._environ.get("HPCSCHED_JOB_ID", "")
        path = self._environ.get("HPCSCHED_SOCKET", "")
        if not path or not job_id.isdigit():
            raise HrshError("cannot reach %s: hrsh works only in a job on a node" % self._host)
        request = self._request(int(job_id))
        self._ask(path, request)
        while self._client.must_ask_again:
            self._ask(path, request, self._client)
        return self._exit_code()

    def _ask(self, path: str, request: protocol.StepRequest, former: Optional[StepClient] = None) -> None:
        """Request the step of the command and run it to its end."""
        try:
            self._client = StepClient(connect_to_agent(path), self, lambda: connect(path))
        except OSError as error:
            raise HrshError("cannot reach the node's agent (%s: %s)" % (path, error.strerror)) from None
        if former is not None:
            self._client.take_input_of(former)
        self._client.catch(_ENDING)
        for signum in _FOR_RANKS:
            signal.signal(signum, signal.SIG_IGN)
        self._client.request(request)
        self._client.run()

    def _request(self, job_id: int) -> protocol.StepRequest:
        options: Dict[str, object] = {
            "nodelist": self._host,
            "nodes": "1",
            "ntasks": "1",
            "cpus-per-task": "1",
            "overcommit": True,
            "overlap": True,
            "job-name": "hrsh",
            "remote-shell": True,
        }
        if not self._with_input:
            options["input"] = os.devnull
        return protocol.StepRequest(
            version=protocol.VERSION,
            job_id=job_id,
            options=options,
            argv=["/bin/sh", "-c", "cd 2>/dev/null; " + _assignments(self._extra) + self._command],
            work_dir="/",
            env=as_text({**self._environ, rlimits.VARIABLE: rlimits.noted()}),
        )

    def on_started(self, said: protocol.StepStarted) -> None:
        for fd in (1, 2):
            outlet = Outlet(fd) if is_open(fd) else None
            self._client.outlets[fd] = _straight_to(outlet)
        self._client.input_fd = 0 if self._with_input else None

    def on_signal(self, signum: int) -> None:
        self._ended_by = self._ended_by or signum
        if self._client.started is None:
            self._client.give_up("cancelled while waiting")
            return
        self._client.signal_tasks(signal.SIGTERM)
        self._client.after(KILL_AFTER_S, lambda: self._client.signal_tasks(signal.SIGKILL))

    def _exit_code(self) -> int:
        ended = self._client.ended
        if self._ended_by:
            return 128 + self._ended_by
        if ended is None or ended.error or not ended.codes:
            raise ConnectionLost(ended.error if ended is not None and ended.error else self._client.given_up)
        return 128 + ended.signals[0] if ended.signals[0] else ended.codes[0]


def _straight_to(outlet: Optional[Outlet]) -> Callable[[int], LineStream]:
    """Return a function that gives each task an unbuffered stream to `outlet`."""
    return lambda task: LineStream(outlet, by_line=False)


def _assignments(variables: Mapping[str, str]) -> str:
    """Return shell text that sets these variables.

    In the environment the step's own variables would override them.
    """
    import shlex

    return "".join("export %s=%s; " % (name, shlex.quote(value)) for name, value in variables.items())


if __name__ == "__main__":
    sys.exit(main())
