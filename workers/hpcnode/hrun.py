"""hrun: start tasks on the nodes of a job, be their terminal, and end as they do.

In a job it asks the node's agent (`HPCSCHED_SOCKET`), elsewhere the controller's steps.sock, which allocates a job first.
It knows options, file names and what is printed; the step itself is `StepClient`'s.

Rules: the text of options goes to the controller as it is, which knows the job; the job's own numbers of nodes and tasks are
the defaults there, so the variables that repeat them are not read here. A file that all tasks share is written by hrun,
one per task (%t %n %N) by the node that runs it. Exit code: the highest of the tasks', 128+n for signal n.

Sources: srun(1); exit codes, texts and layout as measured on Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from types import ModuleType
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from hpcnode import __version__, headsocket, protocol, stepoptions, terminal
from hpcnode.agentsocket import connect, connect_to_agent
from hpcnode.screen import Screen
from hpcnode.stepclient import ConnectionLost, Front, StepClient, is_open
from hpcnode.streamout import LineStream, Outlet
from hpcnode.targets import PartFiles, Target
from hpcnode.taskwords import failures, task_list
from hpcnode.userenv import exported, umask

QUIET_S = 0.5  # a shorter wait is not worth a word
AGAIN_S = 1.0  # two interrupts within this time end the step
IMMEDIATE_S = "5"
FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGCONT,
)  # fmt: skip
_SENT = (
    "account", "begin", "comment", "constraint", "cpus-per-task", "distribution", "exact", "exclude", "exclusive", "gpus",
    "gpus-per-node", "gpus-per-task", "gres", "het-group", "hint", "job-name", "label", "mem", "mem-per-cpu", "mincpus",
    "nodelist",
    "nodes", "ntasks", "ntasks-per-node", "open-mode", "overcommit", "overlap", "partition", "parts", "prefer", "qos",
    "reservation", "resize", "switches", "time", "tmp",
)  # fmt: skip
_LETTER = re.compile(r"%(%|(\d{0,2})([jAJsxu]))")


class HrunError(Exception):
    """hrun cannot go on; the text is for the user."""


class Face(NamedTuple):
    """Under which name hrun runs, and what depends on it."""

    name: str = "hrun"
    version: Optional[str] = None  # what --version says; None: ours
    usage_code: int = 2  # for a command line that cannot be read
    refused: Callable[[int, str], str] = lambda job_id, text: ""  # what is said first of a step or job that was refused


HRUN = Face()


def main(argv: Optional[Sequence[str]] = None, face: Face = HRUN, environ: Optional[Mapping[str, str]] = None) -> int:
    """Run hrun with these words (default: the command line's) in this environment, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    environ = os.environ if environ is None else environ
    try:
        values, command = stepoptions.parse(words)
    except stepoptions.UsageError as error:
        _complain(face, str(error))
        return face.usage_code
    return start(values, command, face, environ)


def start(values: stepoptions.Values, command: List[str], face: Face, environ: Mapping[str, str]) -> int:
    """Run hrun with these options, completed from the environment, and return its exit code."""
    try:
        values = stepoptions.with_defaults(values, environ)
        said = _answer_at_once(values, face)
        if said is not None:
            sys.stdout.write(said)
            return 0
        if not command and "resize" not in values:
            raise stepoptions.UsageError("no command given: %s [OPTIONS] COMMAND [ARGUMENT...]" % face.name)
    except stepoptions.UsageError as error:
        _complain(face, str(error))
        return face.usage_code
    try:
        return Hrun(values, command, environ, face).run()
    except (HrunError, ConnectionLost, protocol.WireError) as error:
        _complain(face, str(error))
        return 1


class Hrun(Front):
    """One run of hrun."""

    def __init__(
        self, values: stepoptions.Values, command: List[str], environ: Mapping[str, str], face: Face = HRUN
    ) -> None:
        self._face = face
        self._values = values
        self._command = command
        self._environ = environ
        self._quiet = values.get("quiet") is True
        self._work_dir = os.path.abspath(str(values.get("chdir", "")) or os.getcwd())
        self._job_id = _job_id(values, environ)
        self._at_terminal = values.get("pty") is True
        self._screen = Screen(0)
        self._unsaid: List[str] = []  # what will be said of the wait if it turns out to be long
        self._talks = False
        self._interrupted_s: Optional[float] = None
        if values.get("multi-prog"):
            self._take_programs(command)
        streams = {name: str(values.get(name, "")) for name in ("output", "error")}
        self._part_files = PartFiles.read(_text(values.get("part-files"), ""), streams)
        self._output, self._error = (Target(name, "" if self._part_files else text) for name, text in streams.items())
        self._input = Target("input", str(values.get("input", "")))

    def run(self) -> int:
        """Ask for the step, be there while it runs, return the exit code."""
        path = _socket_path(self._environ, in_job=self._job_id != 0)
        request = self._request()
        self._ask(path, request)
        while self._client.must_ask_again:
            self._ask(path, request, self._client)
        return self._exit_code()

    def _ask(self, path: str, request: protocol.StepRequest, former: Optional[StepClient] = None) -> None:
        """Ask for the step, and be there while it runs."""
        self._client = StepClient(_connect(path), self, None if _on_the_head(path) else lambda: connect(path))
        if former is not None:
            self._client.take_input_of(former)
        self._client.catch((*FORWARDED, signal.SIGWINCH) if self._at_terminal else FORWARDED)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background of a terminal: no input instead of a stop
        self._client.request(request)
        if "immediate" in self._values:
            limit_s = float(_number("immediate", _text(self._values["immediate"], IMMEDIATE_S)))
            self._client.after(limit_s, self._too_late)
        try:
            self._client.run()
        except ConnectionLost as error:
            what = "the node's agent" if self._job_id else "the controller"
            raise HrunError(
                "lost the connection to %s: %s. The step is ended with it; it cannot be taken up again" % (what, error)
            ) from None
        finally:
            self._screen.restore()

    # ----- the request

    def _request(self) -> protocol.StepRequest:
        options: Dict[str, object] = {name: self._values[name] for name in _SENT if name in self._values}
        if options.get("distribution") == "plane":  # as the variable says it
            options["distribution"] = "plane=" + self._environ.get("SLURM_DIST_PLANESIZE", "")
        if "/" in str(options.get("nodelist", "")) or str(options.get("distribution", "")).startswith("arbitrary"):
            self._settle_hosts(lambda hosts: hosts.settle(options, self._environ))
        if "relative" in self._values:
            self._settle_hosts(lambda hosts: hosts.leave_out(options, str(self._values["relative"]), self._environ))
        if "exclusive" in options:
            options["exclusive"] = True
        if self._at_terminal:
            options.setdefault("job-name", os.path.basename(self._command[0]))
            if not {"ntasks", "nodes", "ntasks-per-node"} & set(options):
                options.update(ntasks="1", nodes="1")
        options["kill-on-bad-exit"] = _switch(self._values.get("kill-on-bad-exit", "0"))
        for target in (self._output, self._error, self._input):
            if target.node_file:
                options[target.name] = target.node_file
        if self._output.node_file and self._error.local_file:
            options["error"] = protocol.STREAMED
        if self._input.is_default and not is_open(0):
            options["input"] = os.devnull
        elif self._input.to_all:
            options["input"] = "all"
        elif self._input.task is not None:
            options["input"] = str(self._input.task)
        return protocol.StepRequest(
            version=protocol.VERSION,
            job_id=self._job_id,
            options=options,
            argv=["hpty", "%dx%d" % terminal.size_of(0), *self._command] if self._at_terminal else self._command,
            work_dir=self._work_dir,
            env={**exported(_text(self._values.get("export"), "ALL"), self._environ), "SLURM_UMASK": umask()},
        )

    def _settle_hosts(self, settle: Callable[[ModuleType], None]) -> None:
        from hpcnode import hostfile  # few need it

        try:
            settle(hostfile)
        except hostfile.HostFileError as error:
            raise HrunError(str(error)) from None

    def _take_programs(self, command: List[str]) -> None:
        from hpcnode import multiprog  # few need it

        if len(command) > 1:
            raise HrunError("cannot take arguments with --multi-prog: they stand in %s" % command[0])
        self._values.setdefault("job-name", os.path.basename(command[0]))
        try:
            self._command = multiprog.command_of(command[0])
        except multiprog.MultiProgError as error:
            raise HrunError(str(error)) from None

    # ----- what happens to the step

    def on_waiting(self, said: protocol.StepWaiting) -> None:
        if not said.text or self._quiet:
            return
        if self._talks:
            self._say(said.text)
        elif not self._unsaid:
            self._client.after(QUIET_S, self._talk)
        self._unsaid.append(said.text)

    def on_started(self, said: protocol.StepStarted) -> None:
        self._unsaid.clear()
        if self._values.get("verbose"):
            nodes = " ".join("%s(%d)" % (node, count) for node, _, count, _ in said.tasks)
            self._say(
                "step %d.%d: %d tasks on %s" % (said.job_id, said.step, sum(part[2] for part in said.tasks), nodes)
            )
        self._open_outputs(said)
        self._open_input(said)
        if self._at_terminal:
            self._client.wrap_input = lambda data: terminal.frame(terminal.TYPED, data)
            self._client.feed(terminal.window_frame(0))
            self._screen.make_raw()

    def on_task_over(self, task: int) -> None:
        wait_s = float(_number("wait", _text(self._values.get("wait"), "0")))
        if wait_s and len(self._client.over_tasks()) == 1:
            self._client.after(wait_s, self._end_rest)

    def on_signal(self, signum: int) -> None:
        if self._client.started is None:
            if signum not in (signal.SIGCONT, signal.SIGWINCH):
                self._client.give_up("cancelled by signal %d while waiting" % signum)
        elif signum == signal.SIGWINCH:
            self._client.feed(terminal.window_frame(0))
        elif signum != signal.SIGINT:
            self._client.signal_tasks(signum)
        else:
            self._on_interrupt(time.monotonic())

    def _on_interrupt(self, now_s: float) -> None:
        if self._interrupted_s is not None and now_s - self._interrupted_s <= AGAIN_S:
            self._say("forcing the step to end")
            self._client.signal_tasks(signal.SIGKILL)
            return
        self._interrupted_s = now_s
        self._say("interrupt (one more within 1 sec to abort)")
        self._tell_tasks()

    def _tell_tasks(self) -> str:
        """Say which tasks run and which are over; return the step's name."""
        started = self._client.started
        assert started is not None
        name = "StepId=%d.%d" % (started.job_id, started.step)
        over = set(self._client.over_tasks())
        running = [task for task in range(_total(started)) if task not in over]
        for tasks, state in ((running, "running"), (sorted(over), "exited")):
            if tasks:
                self._say("%s %s: %s" % (name, task_list(tasks), state))
        return name

    def _talk(self) -> None:
        if self._client.started is None:
            self._talks = True
            for text in self._unsaid:
                self._say(text)

    def _too_late(self) -> None:
        if self._client.started is None:
            self._client.give_up("cannot start the step at once, as --immediate asks")

    def _end_rest(self) -> None:
        if not self._quiet:
            self._say("First task exited %ss ago" % self._values["wait"])
            self._say("Terminating %s" % self._tell_tasks())
        self._client.signal_tasks(signal.SIGKILL)

    # ----- files

    def _open_outputs(self, started: protocol.StepStarted) -> None:
        opened: Dict[str, Outlet] = {}
        if self._part_files:
            for fd, patterns in self._part_files.patterns(started).items():
                self._client.outlets[fd] = self._streams(self._of_parts(fd, patterns, started, opened), started)
            return
        out = self._outlet(self._output, 1, started, opened)
        err = self._outlet(self._error, 2, started, opened)
        if self._error.is_default and self._output.local_file:
            err = out
        if not self._output.node_file:
            self._client.outlets[1] = self._streams(lambda task: out if self._output.wants(task) else None, started)
        if not self._error.node_file and not (self._error.is_default and self._output.node_file):
            self._client.outlets[2] = self._streams(lambda task: err if self._error.wants(task) else None, started)

    def _of_parts(
        self, fd: int, patterns: Mapping[int, str], started: protocol.StepStarted, opened: Dict[str, Outlet]
    ) -> Callable[[int], Optional[Outlet]]:
        usual = Outlet(fd) if is_open(fd) else None
        files = {task: self._file(pattern, started, opened) for task, pattern in patterns.items() if pattern}
        return lambda task: files.get(task, usual)

    def _outlet(
        self, target: Target, fd: int, started: protocol.StepStarted, opened: Dict[str, Outlet]
    ) -> Optional[Outlet]:
        if not target.local_file:
            return Outlet(fd) if is_open(fd) else None
        return self._file(target.local_file, started, opened)

    def _file(self, pattern: str, started: protocol.StepStarted, opened: Dict[str, Outlet]) -> Outlet:
        """Return the outlet to the file of that name, opened at its first mention."""
        path = os.path.join(self._work_dir, self._fill(pattern, started))
        if path not in opened:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            flags |= os.O_APPEND if self._values.get("open-mode") == "append" else os.O_TRUNC
            opened[path] = Outlet(self._open(path, flags))
        return opened[path]

    def _streams(
        self, outlet_of: Callable[[int], Optional[Outlet]], started: protocol.StepStarted
    ) -> Callable[[int], Optional[LineStream]]:
        total = _total(started)
        width = len(str(total - 1))
        by_line = total > 1 and not self._values.get("unbuffered") and not self._at_terminal

        def stream_of(task: int) -> LineStream:
            label = b"%*d: " % (width, task) if self._values.get("label") else b""
            return LineStream(outlet_of(task), label, by_line or bool(label))

        return stream_of

    def _open_input(self, started: protocol.StepStarted) -> None:
        if self._input.node_file or (self._input.is_default and not is_open(0)):
            return
        self._client.input_task = protocol.ALL_TASKS if self._input.to_all else self._input.task or 0
        if self._client.input_task >= _total(started):
            raise HrunError("cannot feed task %d: the step has %d" % (self._client.input_task, _total(started)))
        if self._client.input_fd is not None:
            return  # read already, for a step that was asked for again
        if self._input.local_file:
            path = os.path.join(self._work_dir, self._fill(self._input.local_file, started))
            self._client.input_fd = self._open(path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._client.input_fd = 0

    def _open(self, path: str, flags: int) -> int:
        try:
            if flags & os.O_CREAT:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            return os.open(path, flags, 0o666)
        except OSError as error:
            raise HrunError("cannot open %s: %s" % (path, error.strerror)) from None

    def _fill(self, pattern: str, started: protocol.StepStarted) -> str:
        facts = {
            "j": str(started.job_id),
            "A": self._environ.get("SLURM_ARRAY_JOB_ID", str(started.job_id)),
            "J": "%d.%d" % (started.job_id, started.step),
            "s": str(started.step),
            "x": _text(self._values.get("job-name"), self._environ.get("HPCSCHED_JOB_NAME", self._command[0])),
            "u": self._environ.get("USER", str(os.getuid())),
        }

        def value(match: re.Match[str]) -> str:
            if match.group(1) == "%":
                return "%"
            text = facts[match.group(3)].replace("/", "_")
            return text.zfill(int(match.group(2) or 0)) if text.isdigit() else text

        return _LETTER.sub(value, pattern)

    # ----- the end

    def _exit_code(self) -> int:
        client = self._client
        if client.ended is None:
            raise HrunError(client.given_up)
        ended = client.ended
        if ended.error:
            self._refused(ended.error)
        if client.given_up and not ended.error:
            self._complain(client.given_up)
        exits = [128 + signum if signum else code for code, signum in zip(ended.codes, ended.signals)]
        if client.started is not None and not ended.error:
            for line in failures(client.started, ended):
                self._complain(line)
        return max([1 if ended.error or client.given_up else 0, *exits])

    def _refused(self, error: str) -> None:
        first = self._face.refused(self._job_id, error) if self._client.started is None else ""
        for line in filter(None, (first, error)):
            self._complain(line)

    def _say(self, text: str) -> None:
        _say(self._face, text)

    def _complain(self, text: str) -> None:
        _complain(self._face, text)


def _total(started: protocol.StepStarted) -> int:
    return sum(count for _, _, count, _ in started.tasks)


def _answer_at_once(values: stepoptions.Values, face: Face) -> Optional[str]:
    """Return what to print for options that start no step. Raises UsageError."""
    if values.get("help"):
        return stepoptions.usage("%s [OPTIONS] COMMAND [ARGUMENT...]" % face.name, "Start tasks on the nodes of a job.")
    if values.get("version"):
        return "%s\n" % (face.version or "hpcsched " + __version__)
    mpi = _text(values.get("mpi"), "none")
    if mpi == "list":
        return "MPI plugin types are...\n\tnone\n"
    if mpi != "none":
        raise stepoptions.UsageError(
            "cannot start tasks with --mpi=%s: only none is there. Start MPI programs with mpirun, which uses the "
            "whole allocation" % mpi[:40]
        )
    for name in ("wait", "immediate"):
        if name in values:
            _number(name, _text(values[name], "0"))
    _switch(values.get("kill-on-bad-exit", "0"))
    return None


def _job_id(values: stepoptions.Values, environ: Mapping[str, str]) -> int:
    given = _text(values.get("jobid"), "")
    if not given and environ.get("HPCSCHED_SOCKET"):
        given = environ.get("HPCSCHED_JOB_ID") or environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    given = given or environ.get("HPCSCHED_JOB_ID", "")
    if given and not given.isdigit():
        raise HrunError("cannot start a step in job %r: give the job's number" % given[:40])
    return int(given or 0)


def _socket_path(environ: Mapping[str, str], in_job: bool) -> str:
    if in_job and environ.get("HPCSCHED_SOCKET"):
        return environ["HPCSCHED_SOCKET"]
    try:
        return headsocket.steps_socket(environ, os.getuid())
    except headsocket.NotFound as error:
        raise HrunError(str(error)) from None


def _connect(path: str):  # type: ignore[no-untyped-def]  # socket.socket, whose module nobody else needs here
    try:
        return connect(path) if _on_the_head(path) else connect_to_agent(path)
    except OSError as error:
        if _on_the_head(path):
            raise HrunError(
                "Unable to contact hpcsched controller (%s: %s): start it with 'hpcsched up'" % (path, error.strerror)
            ) from None
        raise HrunError("cannot reach the node's agent (%s: %s): is the job over?" % (path, error.strerror)) from None


def _on_the_head(path: str) -> bool:
    return os.path.basename(path) == headsocket.STEPS_SOCKET


def _switch(value: object) -> bool:
    if value is True or value in ("1", "yes"):
        return True
    if value in ("0", "no", False):
        return False
    raise stepoptions.UsageError("cannot read %r: 0 or 1 is needed" % value)


def _number(name: str, text: str) -> int:
    if not text.isdigit() or len(text) > 9:
        raise stepoptions.UsageError("cannot read --%s=%s: a number of seconds is needed" % (name, text[:40]))
    return int(text)


def _text(value: object, default: str) -> str:
    """Return the text of an option; `default` where there is none."""
    return value if isinstance(value, str) and value else default


def _say(face: Face, text: str) -> None:
    sys.stderr.write("%s: %s\n" % (face.name, text))
    sys.stderr.flush()


def _complain(face: Face, text: str) -> None:
    _say(face, "error: " + text)


if __name__ == "__main__":
    sys.exit(main())
