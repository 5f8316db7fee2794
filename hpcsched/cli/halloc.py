"""halloc: a job whose nodes are held while a command runs here, on the head: a shell, or what is named.

The command has the job's environment, so `hrun` in it starts steps on the nodes. When it ends, or halloc does, the job is over;
when the job is ended (its time limit, hcancel), the command is hung up. Options are those of `hrun` that ask for a job.

Source: salloc(1), and its texts.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
from collections import namedtuple
from collections.abc import Mapping, Sequence

import hpcsched
from hpcnode import headsocket, protocol, stepoptions
from hpcnode.agentsocket import connect

_JOB = (
    "account", "begin", "chdir", "comment", "constraint", "cpus-per-task", "exclude", "exclusive", "gpus",
    "gpus-per-node", "gpus-per-task", "gres", "help", "hint", "job-name", "mem", "mem-per-cpu", "mincpus",
    "nodelist", "nodes", "ntasks", "ntasks-per-node", "partition", "prefer", "qos", "quiet", "reservation",
    "switches", "time", "tmp", "verbose", "version",
)  # fmt: skip
_DOES = {"chdir": "run the command in DIR; default: here", "job-name": "name of the job; default: the command's"}
_HERE_ONLY = {"chdir", "help", "version", "quiet", "verbose"}  # of these the controller is not told
_OF_STEPS = {"label", "mpi", "unbuffered", "wait", "kill-on-bad-exit", "external-launcher", "no-kill", "overcommit"}
OPTIONS = tuple(
    option._replace(help=_DOES.get(option.name, option.help), env=())
    for option in stepoptions.OPTIONS
    if option.name in _JOB or (option.accepted and option.name not in _OF_STEPS)
) + tuple(
    stepoptions.Option(name, short, kind, "", "accepted", (), True)
    for name, short, kind in (
        ("bell", "", stepoptions.FLAG),
        ("distribution", "m", stepoptions.VALUE),
        ("kill-command", "K", stepoptions.OPTIONAL),
        ("no-bell", "", stepoptions.FLAG),
        ("wait-all-nodes", "", stepoptions.VALUE),
    )
)
_RESERVED = re.compile(r"HPCSCHED_(?!CONFIG\Z|API\Z)|SLURM_(?!TIME_FORMAT\Z|CONF\Z)|SLURMD_")
_SAID_AFTER_S = 0.5
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU)

Face = namedtuple(
    "Face", "name version usage_code refused"
)  # refused: what is said first of a job that was, of the error
HALLOC = Face("halloc", None, 2, lambda text: "")


class HallocError(Exception):
    """It cannot go on; the text is for the user."""


def main(argv: Sequence[str] | None = None, face: Face = HALLOC) -> int:
    """Run the command and return its exit status: that of what ran in the job."""
    try:
        values, command = _parse(sys.argv[1:] if argv is None else argv)
    except stepoptions.UsageError as error:
        return _complain(face, str(error), face.usage_code)
    if values.get("help"):
        line = f"{face.name} [OPTIONS] [: OPTIONS]... [COMMAND [ARGUMENT...]]"
        sys.stdout.write(
            stepoptions.usage(line, "Hold the nodes of a job while a command (or a shell) runs here.", OPTIONS)
        )
        return 0
    if values.get("version"):
        print(face.version or f"hpcsched {hpcsched.__version__}")
        return 0
    try:
        return _Allocation(face, values, command).run()
    except (HallocError, headsocket.NotFound, protocol.WireError) as error:
        return _complain(face, str(error), 1)


def _parse(argv: Sequence[str]) -> tuple[stepoptions.Values, list[str]]:
    """Return the options and the command; of A : B the components behind the first one as an option. Raises UsageError."""
    values, command = stepoptions.parse(argv, OPTIONS)
    components = []
    while command[:1] == [":"]:
        own, command = stepoptions.parse(command[1:], OPTIONS)
        own = {
            name: value
            for name, value in own.items()
            if value != values.get(name) or name in stepoptions.OF_A_COMPONENT
        }
        strange = [name for name in own if name not in stepoptions.OF_A_COMPONENT]
        if strange:
            raise stepoptions.UsageError(
                f"cannot give component {len(components) + 1} of the job its own --{strange[0]}: all components have that of the "
                "first one; leave it out"
            )
        components.append({name: True if name == "exclusive" else value for name, value in own.items()})
    return ({**values, "components": json.dumps(components)} if components else values), command


class _Allocation:
    """One run: ask, wait, run the command, let go."""

    def __init__(self, face: Face, values: stepoptions.Values, command: Sequence[str]) -> None:
        self._face = face
        self._values = values
        self._quiet = values.get("quiet") is True
        self._is_shell = not command
        self._command = list(command) or [os.environ.get("SHELL") or "/bin/sh"]
        self._work_dir = os.path.abspath(str(values.get("chdir", "")) or os.getcwd())
        self._framer = protocol.Framer()
        self._wakeup, wakeup_in = socket.socketpair()
        self._wakeup_in = wakeup_in  # kept open
        for end in (self._wakeup, wakeup_in):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_in.fileno(), warn_on_full_buffer=False)
        self._signals: list[int] = []
        self._child = 0

    def run(self) -> int:
        path = headsocket.steps_socket(os.environ, os.getuid())
        try:
            self._sock = connect(path)
        except OSError as error:
            text = f"Unable to contact hpcsched controller ({path}: {error.strerror}): start it with 'hpcsched up'"
            raise HallocError(text) from None
        for number in (*_ENDING, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda got, _frame: self._signals.append(got))
        self._sock.sendall(protocol.encode(self._request()))
        allocated = self._wait_for_nodes()
        self._say(f"Granted job allocation {allocated.job_id}")
        try:
            return self._hold(allocated)
        finally:
            self._say(f"Relinquishing job allocation {allocated.job_id}")
            self._sock.close()

    def _request(self) -> protocol.StepRequest:
        options = {
            option.name: self._values[option.name]
            for option in OPTIONS
            if option.name in self._values and option.name not in _HERE_ONLY and not option.accepted
        }
        if "exclusive" in options:
            options["exclusive"] = True
        if "components" in self._values:
            options["components"] = self._values["components"]
        if self._is_shell:
            options.setdefault("job-name", "interactive")
        return protocol.StepRequest(
            version=protocol.VERSION,
            job_id=0,
            options={**options, "shell": True},
            argv=self._command,
            work_dir=self._work_dir,
            env={},
        )

    def _wait_for_nodes(self) -> protocol.Allocated:
        text, timeout_s = "", None
        while True:
            said = self._next(timeout_s)
            if isinstance(said, protocol.Allocated):
                return said
            if isinstance(said, protocol.StepEnded):
                first = self._face.refused(said.error)
                if first:
                    _complain(self._face, first, 1)
                raise HallocError(said.error)
            if isinstance(said, protocol.StepWaiting):
                text, timeout_s = said.text, _SAID_AFTER_S
            elif said is None and text:
                self._say(text)
                text, timeout_s = "", None
            if any(number != signal.SIGCHLD for number in self._signals):
                raise HallocError("cancelled while waiting for the job's nodes")

    def _next(self, timeout_s: float | None) -> protocol.Message | None:
        """Return what the controller says next; None: a signal came, or the time is over."""
        ready, _, _ = select.select([self._sock, self._wakeup], [], [], timeout_s)
        if self._wakeup in ready:
            self._wakeup.recv(512)
        if self._sock not in ready:
            return None
        data = self._sock.recv(1 << 16)
        if not data:
            self._hang_up()
            raise HallocError("lost the connection to the controller: the job is ended with it")
        said = [message for message, _ in self._framer.feed(data)]
        return next(
            (message for message in said if not isinstance(message, protocol.StepWaiting)), said[0] if said else None
        )

    def _hold(self, allocated: protocol.Allocated) -> int:
        """Run the command to its end, and return its exit status."""
        env = {name: value for name, value in os.environ.items() if _RESERVED.match(name) is None}
        self._child = self._start({**env, **allocated.env})
        for number in _TERMINAL:
            signal.signal(number, signal.SIG_IGN)  # the terminal's signals are the command's
        revoked = False
        while True:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return 1 if revoked else code if code >= 0 else 128 - code
            for number in [number for number in self._signals if number in _ENDING]:
                os.kill(self._child, number)
            self._signals.clear()
            said = None if revoked else self._next(None)
            if revoked:
                select.select([self._wakeup], [], [])
                self._wakeup.recv(512)
            if isinstance(said, protocol.StepEnded):
                revoked = True
                _complain(self._face, said.error, 1)
                self._hang_up()

    def _start(self, env: Mapping[str, str]) -> int:
        try:
            os.chdir(self._work_dir)
            ours = (*_ENDING, signal.SIGINT, signal.SIGCHLD)
            return os.posix_spawnp(self._command[0], self._command, env, setsigdef=ours)
        except OSError as error:
            raise HallocError(f"cannot run {self._command[0]}: {error.strerror}") from None

    def _hang_up(self) -> None:
        if self._child:
            os.kill(self._child, signal.SIGHUP)
            os.kill(self._child, signal.SIGCONT)

    def _say(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"{self._face.name}: {text}\n")
            sys.stderr.flush()


def _complain(face: Face, text: str, code: int) -> int:
    sys.stderr.write(f"{face.name}: error: {text}\n")
    return code
