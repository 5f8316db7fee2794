"""hrun: starts tasks on the nodes of a job, and connects them to this terminal.

In a job it sends its request to the node's agent (`HPCSCHED_SOCKET`), elsewhere to the controller's steps.sock, which allocates a
job first. Options, file names and messages are handled here; the step itself by `StepClient`.

Rules:
- Options are sent as text, because the controller knows the job. The job's numbers of nodes and tasks are the defaults there, so
  the variables that repeat them are not read here.
- hrun writes files that all tasks share. The nodes write files with one name per task (%t %n %N).
- The exit code is the highest of the tasks', 128+n for signal n.

Sources: srun(1); exit codes, texts and layout as measured on Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import termios
import time
import tty
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hpcnode import __version__
from hpcnode.commands import options as stepoptions
from hpcnode.commands import pty
from hpcnode.commands.output import LineStream, Outlet, PartFiles, StreamTarget
from hpcnode.commands.step_client import ConnectionLost, Front, StepClient, exported, is_open, umask
from hpcnode.os import process, rlimits
from hpcnode.wire import protocol, sockets
from hpcnode.wire.sockets import connect, connect_to_agent

if TYPE_CHECKING:
    import socket


# ----- the terminal of `hrun --pty`: raw while the task runs, so that the task gets every key; restored after that


class Screen:
    """The terminal on a descriptor, if it is one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: Optional[List[Any]] = None

    def make_raw(self) -> None:
        """Pass on every key unchanged."""
        if os.isatty(self._fd) and self._before is None:
            self._before = termios.tcgetattr(self._fd)
            tty.setraw(self._fd, termios.TCSADRAIN)  # earlier input is for the task

    def restore(self) -> None:
        """Restore the settings."""
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None


# ----- the messages of srun about failed tasks


def failures(started: protocol.StepStarted, ended: protocol.StepEnded) -> List[str]:
    """Return a line for each group of tasks of a node that failed in the same way."""
    lines = []
    for node, ranks, _ in started.parts():
        groups: Dict[str, List[int]] = {}
        for task in (rank for rank in ranks if rank < len(ended.codes)):
            code, signum = ended.codes[task], ended.signals[task]
            if signum:
                groups.setdefault(_signal_text(signum), []).append(task)
            elif code:
                groups.setdefault("Exited with exit code %d" % code, []).append(task)
        lines += ["%s: %s: %s" % (node, task_list(tasks), how) for how, tasks in groups.items()]
    return lines


def _signal_text(signum: int) -> str:
    try:
        return signal.strsignal(signum) or "signal %d" % signum
    except ValueError:
        return "signal %d" % signum


def task_list(tasks: List[int]) -> str:
    """Return ``task 3``, or ``tasks 0-3,7``."""
    return ("tasks " if len(tasks) > 1 else "task ") + spans_text(tasks)


def spans_text(tasks: Sequence[int]) -> str:
    """Return ascending numbers as ``0-3,7``."""
    spans: List[List[int]] = []
    for task in tasks:
        if spans and spans[-1][1] == task - 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in spans)


QUIET_S = 0.5  # a shorter wait is not reported
AGAIN_S = 1.0  # two interrupts within this time end the step
IMMEDIATE_S = "5"
SCRIPT_S = 300.0  # after which the program of --prolog or --epilog is killed
FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGCONT,
)  # fmt: skip
_SENT = (
    "account", "begin", "comment", "constraint", "contiguous", "cpus-per-task", "deadline", "dependency", "distribution", "exact",
    "exclude", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "gres", "het-group", "hint", "hold", "job-name",
    "label", "licenses", "mem", "mem-per-cpu", "mincpus", "nice", "nodelist", "nodes", "ntasks", "ntasks-per-node",
    "open-mode", "overcommit", "overlap", "partition", "parts", "prefer", "preserve-env", "priority", "qos", "reservation",
    "resize", "signal", "spread-job", "switches", "task-epilog", "task-prolog", "test-only", "time", "time-min", "tmp",
    "wait-for-children",
)  # fmt: skip
_LETTER = re.compile(r"%(%|(\d{0,2})([jAJsxu]))")


class HrunError(Exception):
    """hrun cannot continue; the text is for the user."""


class TooLate(HrunError):
    """The step has not started within the time of --immediate."""


class CommandStyle(NamedTuple):
    """The name under which hrun runs, and what depends on it."""

    name: str = "hrun"
    version: Optional[str] = None  # output of --version; None: ours
    usage_code: int = 2  # exit code for an invalid command line
    refused: Callable[[int, str], str] = lambda job_id, text: ""  # first line about a refused step or job
    is_slurm: bool = False  # --verbose prints Slurm's lines


HRUN = CommandStyle()


def option_lines(values: stepoptions.Values) -> List[str]:
    """Return the lines in which srun --verbose lists the given options."""
    rule = "-" * 20
    given = ["%-20s: %s" % (name, "set" if value is True else value) for name, value in sorted(values.items())]
    return ["defined options", rule + " " + rule, *given, rule + " " + rule, "end of defined options"]


def launch_lines(started: protocol.StepStarted, environ: Mapping[str, str], cpus_per_task: int) -> List[str]:
    """Return the lines of srun --verbose about the nodes of a step."""
    parts = started.parts()
    nodes = environ.get("SLURM_JOB_NODELIST") or ",".join(node for node, _, _ in parts)
    count = environ.get("SLURM_JOB_NUM_NODES") or str(len(parts))
    cpus = environ.get("SLURM_JOB_CPUS_PER_NODE") or ",".join(str(len(ranks) * cpus_per_task) for _, ranks, _ in parts)
    cpus = ",".join(each if "(" in each else each + "(x1)" for each in cpus.split(","))
    lines = ["jobid %d: nodes(%s):`%s', cpu counts: %s" % (started.job_id, count, nodes, cpus)]
    for node, ranks, _ in parts:
        spans = spans_text(sorted(ranks))
        tasks = "[%s]" % spans if len(ranks) > 1 else spans
        lines.append(
            "launching StepId=%d.%d on host %s, %d tasks: %s" % (started.job_id, started.step, node, len(ranks), tasks)
        )
    return lines


def main(
    argv: Optional[Sequence[str]] = None, face: CommandStyle = HRUN, environ: Optional[Mapping[str, str]] = None
) -> int:
    """Run hrun with these arguments (default: the command line) and environment.

    Return its exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    environ = os.environ if environ is None else environ
    try:
        values, command = stepoptions.parse(words)
    except stepoptions.OptionError as error:
        _complain(face, error.text(face.name))
        return _code(environ, "SLURM_EXIT_ERROR", face.usage_code)
    return start(values, command, face, environ)


def start(values: stepoptions.Values, command: List[str], face: CommandStyle, environ: Mapping[str, str]) -> int:
    """Run hrun with these options, completed from the environment, and return its exit code."""
    try:
        values = _completed(values, environ)
        text = _immediate_answer(values, face)
        if text is not None:
            sys.stdout.write(text)
            return 0
        if not command and "resize" not in values:
            raise stepoptions.OptionError("no command given: %s [OPTIONS] COMMAND [ARGUMENT...]" % face.name)
    except stepoptions.OptionError as error:
        _complain(face, error.text(face.name))
        return _code(environ, "SLURM_EXIT_ERROR", face.usage_code)
    try:
        return _run_step(values, command, face, environ)
    except TooLate as error:
        _complain(face, str(error))
        return _code(environ, "SLURM_EXIT_IMMEDIATE", 1)
    except (HrunError, ConnectionLost, protocol.WireError) as error:
        _complain(face, str(error))
        return _code(environ, "SLURM_EXIT_ERROR", 1)


def _completed(values: stepoptions.Values, environ: Mapping[str, str]) -> stepoptions.Values:
    """Return the options with those of the environment, checked. Raises OptionError."""
    values = stepoptions.with_defaults(values, environ)
    if "propagate" in values:
        values["propagate"] = stepoptions.resource_limits(_text(values["propagate"], rlimits.ALL))
    if "open-mode" in values:
        values["open-mode"] = stepoptions.output_mode(str(values["open-mode"]))
    return values


def _run_step(values: stepoptions.Values, command: List[str], face: CommandStyle, environ: Mapping[str, str]) -> int:
    """Run the step, in a job that is made for it if need be, and return the exit code."""
    if face.is_slurm and values.get("verbose"):
        for line in option_lines(values):
            _say(face, line)
    if "uid" in values or "gid" in values:
        _change_user(values)
    if values.get("no-allocate"):
        raise HrunError(_no_allocate())
    has_scripts = bool({"bcast", "prolog", "epilog"} & set(values))
    if not has_scripts or values.get("test-only") or "resize" in values:
        return Hrun(values, command, environ, face).run()
    if _job_id(values, environ):
        return _with_scripts(values, command, face, environ)
    return _in_allocation(values, command, face, environ)


def _change_user(values: stepoptions.Values) -> None:
    from hpcnode.os import account  # for root only

    try:
        if "gid" in values:
            account.refuse_group()
        _socket_path(os.environ, in_job=False)  # imports modules that the other user may not be able to read
        account.change(str(values.pop("uid")))
    except account.UserError as error:
        raise HrunError(str(error)) from None


def _no_allocate() -> str:
    if os.getuid() != 0:
        return "--no-allocate only permitted by root user"
    return "cannot start tasks without a job, because each step is accounted to one: leave out --no-allocate"


def _in_allocation(
    values: stepoptions.Values, command: List[str], face: CommandStyle, environ: Mapping[str, str]
) -> int:
    """Execute halloc with this command, because its scripts need the job's nodes."""
    if "parts" in values:
        raise HrunError("cannot use --bcast, --prolog or --epilog with A : B outside a job: use them in a job")
    values.setdefault("job-name", os.path.basename(command[0]))
    words = _words(values)
    of_job = [word for name, word in words.items() if name in stepoptions.OF_A_JOB]
    own = [word for name, word in words.items() if name not in ("exclusive", "immediate", "signal", "time", "begin")]
    run = "import sys; from hpcsched.cli.halloc import hold_for_step; sys.exit(hold_for_step())"
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-c", run, face.name, "--quiet", *of_job, os.path.abspath(sys.argv[0]), *own, *command],
        dict(environ),
    )


def _words(values: stepoptions.Values) -> Dict[str, str]:
    return {name: "--" + name if value is True else "--%s=%s" % (name, value) for name, value in values.items()}


def _with_scripts(
    values: stepoptions.Values, command: List[str], face: CommandStyle, environ: Mapping[str, str]
) -> int:
    """Run the step of a job with --bcast, --prolog and --epilog."""
    bcast_to, prolog, epilog = (values.pop(name, "") for name in ("bcast", "prolog", "epilog"))
    given = command
    try:
        if _run_script("prolog", _text(prolog, ""), given, face, environ):
            return 1  # as srun: a step whose prolog failed does not start
        if bcast_to:
            values.setdefault("job-name", os.path.basename(command[0]))
            command, code = _broadcast(_text(bcast_to, ""), values, command, face, environ)
            if code:
                return code
        return Hrun(values, command, environ, face).run()
    finally:
        _run_script("epilog", _text(epilog, ""), given, face, environ)


def _run_script(what: str, program: str, command: List[str], face: CommandStyle, environ: Mapping[str, str]) -> int:
    """Run a program here, for SCRIPT_S at most, and return its status.

    "" and "none": no program.
    """
    if program in ("", "none"):
        return 0
    try:
        pid = os.posix_spawn(program, [program, *command], dict(environ))
    except OSError as error:
        _complain(face, "cannot run the %s %s: %s" % (what, program, error.strerror))
        return 127
    end_s = time.monotonic() + SCRIPT_S
    status = process.end_of(pid, end_s)
    if status and time.monotonic() > end_s:
        _complain(face, "the %s %s took longer than %g seconds and was killed" % (what, program, SCRIPT_S))
    elif status:
        _complain(face, "the %s %s failed: status %d" % (what, program, status >> 8 or status))
    return status


def _broadcast(
    destination: str, values: stepoptions.Values, command: List[str], face: CommandStyle, environ: Mapping[str, str]
) -> Tuple[List[str], int]:
    """Copy the command's program to the nodes of the job.

    Return the command that runs the copy, and an exit code.
    """
    if values.get("multi-prog") or "parts" in values:
        raise HrunError("cannot use --bcast with several programs: it copies one")
    job_id = _text(values.get("jobid"), "")
    target = shell_target(destination, str(_job_id(values, environ)))
    try:
        words = step_words(program_path(command[0], environ), target, job_id, environ)
    except OSError as error:
        raise HrunError("cannot copy %s: %s" % (command[0], error.strerror)) from None
    code = main(words, face, environ)
    if not target.endswith(OF_NODE):
        return [destination, *command[1:]], code
    return ["sh", "-c", 'exec %s "$@"' % target, command[0], *command[1:]], code


def _signed(request: protocol.StepRequest) -> protocol.StepRequest:
    """Return the request, signed by this user with the head's code. Raises HrunError."""
    import json  # rarely needed
    import subprocess

    files = [str(request.options.get(name, "")) for name in ("input", "output", "error")]
    asked: Dict[str, Any] = {"argv": request.argv, "work_dir": request.work_dir, "env": request.env, "files": files}
    asked["job_id"] = request.job_id
    run = "from hpcsched.cli.halloc import sign_step; sign_step()"
    done = subprocess.run([sys.executable, "-P", "-c", run], input=json.dumps(asked).encode(), stdout=subprocess.PIPE)
    if done.returncode:
        raise HrunError("cannot sign the step")
    return protocol.changed(request, env={**request.env, **json.loads(done.stdout)})


class Hrun(Front):
    """One run of hrun."""

    def __init__(
        self, values: stepoptions.Values, command: List[str], environ: Mapping[str, str], face: CommandStyle = HRUN
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
        self._held_messages: List[str] = []  # messages about the wait, shown if it is long
        self._is_long_wait = False
        self._interrupted_s: Optional[float] = None
        self._is_too_late = False
        if values.get("multi-prog"):
            self._take_programs(command)
        streams = {name: str(values.get(name, "")) for name in ("output", "error")}
        self._part_files = PartFiles.read(_text(values.get("part-files"), ""), streams)
        self._output, self._error = (
            StreamTarget(name, "" if self._part_files else text) for name, text in streams.items()
        )
        self._input = StreamTarget("input", str(values.get("input", "")))

    def run(self) -> int:
        """Run the step to its end and return the exit code."""
        self._note_options_without_effect()
        process.set_name(self._face.name)  # the batch step's shepherd recognizes it by this name
        path = _socket_path(self._environ, in_job=self._job_id != 0)
        request = self._request()
        self._ask(path, request)
        if self._client.ended is not None and self._client.ended.unsigned and _on_the_head(path):
            request = _signed(request)
            self._ask(path, request)
        while self._client.must_ask_again:
            self._ask(path, request, self._client)
        return self._exit_code()

    def _ask(self, path: str, request: protocol.StepRequest, former: Optional[StepClient] = None) -> None:
        """Request the step and run it to its end."""
        self._client = StepClient(_connect(path), self, None if _on_the_head(path) else lambda: connect(path))
        if former is not None:
            self._client.take_input_of(former)
        self._client.catch((*FORWARDED, signal.SIGWINCH) if self._at_terminal else FORWARDED)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background of a terminal: no input, instead of a stop
        self._client.request(request)
        if "immediate" in self._values:
            limit_s = float(_number("immediate", _text(self._values["immediate"], IMMEDIATE_S)))
            self._client.after(limit_s, self._too_late)
        try:
            self._client.run()
        except ConnectionLost as error:
            what = "the node's agent" if self._job_id else "the controller"
            raise HrunError(
                "lost the connection to %s: %s. The step is ended; it cannot be resumed" % (what, error)
            ) from None
        finally:
            self._screen.restore()

    # ----- the request

    def _request(self) -> protocol.StepRequest:
        options: Dict[str, object] = {name: self._values[name] for name in _SENT if name in self._values}
        self._choose_hosts(options)
        if "exclusive" in options:
            options["exclusive"] = True
        if options.get("nice") is True:
            options["nice"] = "100"
        if self._at_terminal:
            options.setdefault("job-name", os.path.basename(self._command[0]))
            if not {"ntasks", "nodes", "ntasks-per-node"} & set(options):
                options.update(ntasks="1", nodes="1")
        options["kill-on-bad-exit"] = _switch(self._values.get("kill-on-bad-exit", "0"))
        self._choose_streams(options)
        return protocol.StepRequest(
            version=protocol.VERSION,
            job_id=self._job_id,
            options=options,
            argv=["hpty", "%dx%d" % pty.size_of(0), *self._command] if self._at_terminal else self._command,
            work_dir=self._work_dir,
            env={
                **exported(_text(self._values.get("export"), "ALL"), self._environ),
                "SLURM_UMASK": umask(),
                rlimits.VARIABLE: rlimits.noted(str(self._values.get("propagate", ""))),
            },
        )

    def _choose_hosts(self, options: Dict[str, object]) -> None:
        """Complete the options that choose nodes from the environment and from host files."""
        if options.get("distribution") == "plane":  # SLURM_DISTRIBUTION has no size
            options["distribution"] = "plane=" + self._environ.get("SLURM_DIST_PLANESIZE", "")
        if self._environ.get("SLURM_HOSTFILE") and not options.get("nodelist") and "parts" not in options:
            options["distribution"] = "arbitrary"
        if "/" in str(options.get("nodelist", "")) or str(options.get("distribution", "")).startswith("arbitrary"):
            self._with_host_files(lambda hosts: hosts.settle(options, self._environ))
            if options.get("hosts") and not self._job_id:
                self._with_host_files(lambda hosts: hosts.ask_for(options))
        if "relative" in self._values:
            self._with_host_files(lambda hosts: hosts.leave_out(options, str(self._values["relative"]), self._environ))

    def _choose_streams(self, options: Dict[str, object]) -> None:
        """Tell the controller which files the nodes write and read, and where the input goes."""
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

    def _note_options_without_effect(self) -> None:
        """Warn about placement options without effect, on a terminal or with --verbose."""
        if self._quiet or not (self._values.get("verbose") or (is_open(2) and os.isatty(2))):
            return
        for name in stepoptions.NOT_HONOURED:
            if name in self._values:
                self._say("--%s has no effect: it is not taken into account" % name)

    def _with_host_files(self, settle: Callable[[ModuleType], None]) -> None:
        from hpcnode.commands import scontrol  # rarely needed

        try:
            settle(scontrol)
        except scontrol.HostFileError as error:
            raise HrunError(str(error)) from None

    def _take_programs(self, command: List[str]) -> None:
        from hpcnode.commands import multi_prog  # rarely needed

        if len(command) > 1:
            raise HrunError("cannot use arguments with --multi-prog: they are in %s" % command[0])
        self._values.setdefault("job-name", os.path.basename(command[0]))
        try:
            self._command = multi_prog.command_of(command[0])
        except multi_prog.MultiProgError as error:
            raise HrunError(str(error)) from None

    # ----- what happens to the step

    def on_waiting(self, said: protocol.StepWaiting) -> None:
        if self._values.get("test-only"):
            self._say(said.text)
            return
        if not said.text or self._quiet:
            return
        if self._is_long_wait:
            self._say(said.text)
        elif not self._held_messages:
            self._client.after(QUIET_S, self._show_messages)
        self._held_messages.append(said.text)

    def on_started(self, said: protocol.StepStarted) -> None:
        self._held_messages.clear()
        if self._values.get("verbose") and self._face.is_slurm:
            cpus_per_task = int(_number("cpus-per-task", _text(self._values.get("cpus-per-task"), "1")))
            for line in launch_lines(said, self._environ, cpus_per_task):
                self._say(line)
        elif self._values.get("verbose"):
            nodes = " ".join("%s(%d)" % (node, count) for node, _, count, _ in said.tasks)
            self._say(
                "step %d.%d: %d tasks on %s" % (said.job_id, said.step, sum(part[2] for part in said.tasks), nodes)
            )
        self._open_outputs(said)
        self._open_input(said)
        if self._at_terminal:
            self._client.wrap_input = lambda data: pty.frame(pty.TYPED, data)
            self._client.feed(pty.window_frame(0))
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
            self._client.feed(pty.window_frame(0))
        elif signum != signal.SIGINT:
            self._client.signal_tasks(signum)
        else:
            self._on_interrupt(time.monotonic())

    def _on_interrupt(self, now_s: float) -> None:
        again = self._interrupted_s is not None and now_s - self._interrupted_s <= AGAIN_S
        if again or self._values.get("quit-on-interrupt"):
            self._say("forcing the step to end")
            self._client.signal_tasks(signal.SIGKILL)
            return
        self._interrupted_s = now_s
        self._say("interrupt (one more within 1 sec to abort)")
        self._print_tasks()

    def _print_tasks(self) -> str:
        """Print which tasks run and which are over; return the step's name."""
        started = self._client.started
        assert started is not None
        name = "StepId=%d.%d" % (started.job_id, started.step)
        over = set(self._client.over_tasks())
        running = [task for task in range(_total(started)) if task not in over]
        for tasks, state in ((running, "running"), (sorted(over), "exited")):
            if tasks:
                self._say("%s %s: %s" % (name, task_list(tasks), state))
        return name

    def _show_messages(self) -> None:
        if self._client.started is None:
            self._is_long_wait = True
            for text in self._held_messages:
                self._say(text)

    def _too_late(self) -> None:
        if self._client.started is None:
            self._is_too_late = True
            self._client.give_up("cannot start the step at once, as --immediate asks")

    def _end_rest(self) -> None:
        if not self._quiet:
            self._say("First task exited %ss ago" % self._values["wait"])
            self._say("Terminating %s" % self._print_tasks())
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
        self, target: StreamTarget, fd: int, started: protocol.StepStarted, opened: Dict[str, Outlet]
    ) -> Optional[Outlet]:
        if not target.local_file:
            return Outlet(fd) if is_open(fd) else None
        return self._file(target.local_file, started, opened)

    def _file(self, pattern: str, started: protocol.StepStarted, opened: Dict[str, Outlet]) -> Outlet:
        """Return the outlet to the file of that name; open it at the first use."""
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
            return  # open already, for a step that is requested again
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
            raise (TooLate if self._is_too_late else HrunError)(client.given_up)
        ended = client.ended
        if ended.error:
            self._refused(ended.error)
        if client.given_up and not ended.error:
            self._complain(client.given_up)
        exits = [128 + signum if signum else code for code, signum in zip(ended.codes, ended.signals)]
        if client.started is not None and not ended.error:
            for line in failures(client.started, ended):
                self._complain(line)
        failed = _code(self._environ, "SLURM_EXIT_ERROR", 1) if ended.error or client.given_up else 0
        return max([failed, *exits])

    def _refused(self, error: str) -> None:
        first = self._face.refused(self._job_id, error) if self._client.started is None else ""
        for line in filter(None, (first, error)):
            self._complain(line)

    def _say(self, text: str) -> None:
        _say(self._face, text)

    def _complain(self, text: str) -> None:
        _complain(self._face, text)


def _code(environ: Mapping[str, str], name: str, usual: int) -> int:
    """Return the exit code that a variable sets, else `usual`."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= 255 else usual


def _total(started: protocol.StepStarted) -> int:
    return sum(count for _, _, count, _ in started.tasks)


def _immediate_answer(values: stepoptions.Values, face: CommandStyle) -> Optional[str]:
    """Return the text for options that start no step, None if a step is to start.

    Raises OptionError.
    """
    stepoptions.refuse_windows(values)
    if values.get("help"):
        return stepoptions.usage(face.name, "COMMAND [ARGUMENT...]", "Start tasks on the nodes of a job.")
    if values.get("usage"):
        return stepoptions.short_usage(face.name, "COMMAND [ARGUMENT...]")
    if values.get("version"):
        return "%s\n" % (face.version or "hpcsched " + __version__)
    mpi = _text(values.get("mpi"), "none")
    if mpi == "list":
        return "MPI plugin types are...\n\tnone\n"
    if mpi != "none":
        raise stepoptions.OptionError(
            "cannot start tasks with --mpi=%s: only none exists. Start MPI programs with mpirun, which uses the "
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
        return sockets.steps_socket(environ, os.getuid())
    except sockets.NotFound as error:
        raise HrunError(str(error)) from None


def _connect(path: str) -> socket.socket:
    try:
        return connect(path) if _on_the_head(path) else connect_to_agent(path)
    except OSError as error:
        if _on_the_head(path):
            raise HrunError(
                "Unable to contact hpcsched controller (%s: %s): start it with 'hpcsched up'; "
                "'hpcsched doctor' says what is wrong" % (path, error.strerror)
            ) from None
        raise HrunError("cannot reach the node's agent (%s: %s): is the job over?" % (path, error.strerror)) from None


def _on_the_head(path: str) -> bool:
    return os.path.basename(path) == sockets.STEPS_SOCKET


def _switch(value: object) -> bool:
    if value is True or value in ("1", "yes"):
        return True
    if value in ("0", "no", False):
        return False
    raise stepoptions.OptionError("cannot read %r: 0 or 1 is needed" % value)


def _number(name: str, text: str) -> int:
    if not text.isdigit() or len(text) > 9:
        raise stepoptions.OptionError("cannot read --%s=%s: a number of seconds is needed" % (name, text[:40]))
    return int(text)


def _text(value: object, default: str) -> str:
    """Return the text of an option, else `default`."""
    return value if isinstance(value, str) and value else default


def _say(face: CommandStyle, text: str) -> None:
    sys.stderr.write("%s: %s\n" % (face.name, text))
    sys.stderr.flush()


def _complain(face: CommandStyle, text: str) -> None:
    _say(face, "error: " + text)


# ----- a step that copies a file to all nodes of a job, for sbcast and `srun --bcast`

# It needs no share. The file is written beside its target and renamed, so that it is never seen incomplete. Nodes that share
# the directory write the same file in turn. Sources: sbcast(1); srun(1), --bcast.
OF_NODE = '"_$SLURMD_NODENAME"'


def step_words(
    source: str, target: str, job_id: str, environ: Mapping[str, str], *, force: bool = True, keep_times: bool = False
) -> List[str]:
    """Return hrun's arguments for a step that copies `source` to `target` (shell text).

    Raises OSError.
    """
    facts = os.stat(source)
    beside = target + '".bcast.$SLURMD_NODENAME"'
    script = "cat > %s && chmod %o %s && " % (beside, facts.st_mode & 0o777, beside)
    if keep_times:
        script += "touch -d @%r %s && " % (facts.st_mtime, beside)
    if not force:
        script = "test ! -e %s || { echo %s: File exists >&2; exit 1; }; %s" % (target, target, script)
    script += "mv -f %s %s" % (beside, target)
    nodes = environ.get("SLURM_JOB_NUM_NODES", "") if job_id in ("", environ.get("SLURM_JOB_ID")) else ""
    return [
        *(["--nodes=" + nodes, "--ntasks=" + nodes] if nodes else []),
        *(["--jobid=" + job_id] if job_id else []),
        "--ntasks-per-node=1", "--cpus-per-task=1", "--overlap", "--kill-on-bad-exit=1", "--quiet", "--input=" + source,
        "--output=all", "--error=all", "sh", "-c", script,
    ]  # fmt: skip


def program_path(program: str, environ: Mapping[str, str]) -> str:
    """Return the path of a command's program. Raises FileNotFoundError."""
    if "/" in program:
        return program
    for folder in environ.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FileNotFoundError(2, os.strerror(2), program)


def shell_target(destination: str, job_id: str) -> str:
    """Return the target of --bcast=DESTINATION as shell text.

    In a directory the node's name makes it unique.
    """
    if destination and not destination.endswith("/"):
        return shlex.quote(destination)
    return shlex.quote(os.path.join(destination or os.getcwd(), "slurm_bcast_%s.%d" % (job_id, os.getpid()))) + OF_NODE


if __name__ == "__main__":
    sys.exit(main())
