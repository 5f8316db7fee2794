"""A task's process, from its fork to the user's program.

    own session -> become the user -> umask, limits, directory, files, as the user -> report "ready" ->
    wait until the shepherd has put our identity on disk -> prolog -> exec

If the shepherd dies before the release, the release pipe ends and the task exits: without its record nothing runs. The task never
returns, raises or runs the shepherd's code. The kernel copies each page that it writes to, which takes longer than the work done
there. So signals are set by `_signal`, the C module below `signal`.

--task-prolog and --task-epilog run with the task's environment, directory and standard error. Of the prolog's standard output,
``export NAME=value`` and ``unset NAME`` change the environment, ``print TEXT`` goes to standard output, other lines are ignored.
As in Slurm, a task whose prolog failed does not start and ends with the prolog's status. A prolog that takes longer than PROLOG_S
has failed. For an epilog, and for --wait-for-children, the first process of the task stays, waits for prolog and program, runs
the epilog once and ends as the program did.

Sources: credentials(7), execve(2), signal(7), srun(1).
"""

from __future__ import annotations

import _signal
import _thread
import contextlib
import errno
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import time
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

from hpcnode.os import account as user
from hpcnode.os import cgroup, mounts, process, rlimits
from hpcnode.os.process import become_subreaper, die_with_parent
from hpcnode.shepherd import environment
from hpcnode.shepherd.confinement import StepConfinement

# ----- scripts whose first line asks for a login shell (``#!/bin/bash -l``)
# The profile of a login shell resets PATH, and our commands are lost. So our folders are put on PATH after the profile, and
# the shell reads the script then. Functions, options, arguments and ``$0`` are those of a script that it was started with.
#
# Source: bash(1), "INVOCATION"; /etc/profile of Debian.


_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def is_login_script(first_line: Sequence[str]) -> bool:
    """Return whether the first line of a script (program, argument) starts a login shell."""
    if len(first_line) != 2 or os.path.basename(first_line[0]) not in _SHELLS:
        return False
    flags = first_line[1]
    return flags == "--login" or (flags[:1] == "-" and flags[1:].isalpha() and "l" in flags and "c" not in flags)


def command(first_line: Sequence[str], argv: Sequence[str], folders: Sequence[str]) -> List[str]:
    """Return the command that runs the script `argv` with `folders` first on PATH."""
    from shlex import quote  # rarely needed

    return [*first_line, "-c", 'PATH=%s:"$PATH"; . "$0"' % quote(":".join(folders)), *argv]


# ----- the files of a task, opened as the job's user, so that no path reaches more than the user could
# A FIFO without a reader cannot block the launch. A missing output directory is created. `%t %n %N` are filled per task.


LOOK_S = 1.0
LEAST_BYTES = 64 << 10  # a file system with less counts as full

_PATTERN = re.compile(r"%(%|(\d{0,2})([tnN]))")


class FilesError(Exception):
    """A file of the task cannot be opened; the text is the reason."""


def fill(pattern: str, rank: int, node_rank: int, node: str) -> str:
    """Return `pattern` with %t (rank), %n (number of the node) and %N (its name) filled.

    A number pads: ``%3t``.
    """

    def value(match: re.Match[str]) -> str:
        if match.group(1) == "%":
            return "%"
        width, word = match.group(2), match.group(3)
        if word == "N":
            return node
        return str(rank if word == "t" else node_rank).zfill(int(width or 0))  # int: bounded

    return _PATTERN.sub(value, pattern)


def truncates(pattern: str, local_rank: int, node_rank: int) -> bool:
    """Return whether this task truncates the file: it is the first of the tasks that share it."""
    if fill(pattern, 1, 0, "a") != fill(pattern, 2, 0, "a"):
        return True
    one_per_node = fill(pattern, 0, 1, "a") != fill(pattern, 0, 2, "b")
    return local_rank == 0 and (one_per_node or node_rank == 0)


def open_output(path: str, truncate: bool, tmp: mounts.HostTmp) -> int:
    """Open or create an output file for appending. Raises FilesError."""
    at = tmp.place(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if truncate:
        flags |= os.O_TRUNC
    try:
        try:
            return _blocking(os.open(at, flags, 0o666))
        except FileNotFoundError:
            os.makedirs(os.path.dirname(at) or ".", exist_ok=True)
            return _blocking(os.open(at, flags, 0o666))
    except OSError as error:
        raise FilesError("cannot open output file %s: %s" % (path, error.strerror)) from None


def is_full(path: str) -> bool:
    """Return whether the file system of `path` is full.

    False if it does not answer within LOOK_S.

    A thread asks, because a share may hang.
    """
    found: List[bool] = []
    answered = _thread.allocate_lock()
    answered.acquire()

    def look() -> None:
        try:
            about = os.statvfs(path)
            found.append(about.f_blocks > 0 and about.f_bavail * about.f_frsize < LEAST_BYTES)
        except OSError:
            pass  # not readable, or gone: unknown
        answered.release()

    try:
        _thread.start_new_thread(look, ())
    except RuntimeError:
        return False  # this account cannot have more threads
    answered.acquire(timeout=LOOK_S)
    return found == [True]


def open_input(path: str, tmp: mounts.HostTmp) -> int:
    """Open an input file. Raises FilesError."""
    try:
        return _blocking(os.open(tmp.place(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        raise FilesError("cannot open input file %s: %s" % (path, error.strerror)) from None


def _blocking(fd: int) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.set_blocking(fd, True)
    return fd


READY = b"R"
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_ADVICE = "; use a directory that all nodes have (a share, or --chdir=DIR), or leave this node out (-x NODE)"
NOT_RELEASED = 127


class Helped(NamedTuple):
    """What the root helper is told besides the plan of a task."""

    job_id: int
    attempt: int
    step: str
    script: str


class TaskPlan(NamedTuple):
    """The program, the account, the files and the limits of one task."""

    rank: int
    argv: List[str]
    is_script: bool
    env: Dict[str, str]
    account: user.UserAccount
    work_dir: str
    stdin: str  # a path; "" if stdin_fd is set
    stdout: str
    stderr: str  # a path, "" for where stdout goes
    stdin_fd: Optional[int]
    stdout_fd: Optional[int]
    stderr_fd: Optional[int]
    truncate_stdout: bool
    truncate_stderr: bool
    umask: int
    limits: rlimits.Limits  # of the submitter
    release_fd: int
    status_fd: int
    prolog: str  # programs to run before and after its own; "" if none
    epilog: str
    wait_for_children: bool  # it is over when all processes that it started are
    confined: StepConfinement
    in_group: bool = False  # it was born in its cgroup of version 2
    helped: Optional[Helped] = None  # the root helper starts the task; this process stands for it


def run_task(plan: TaskPlan) -> NoReturn:
    """Become the task.

    Write READY, or the reason for a refusal, to the status pipe; later only a failed exec.
    """
    try:
        os.setsid()
        _restore_oom_score()
        if plan.helped is not None:
            die_with_parent()
            _stand_for_task(plan, plan.helped)
        tmp = _confine(plan)
        user.become(plan.account)
        os.umask(plan.umask)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        _enter(plan.work_dir)
        _place_files(plan, tmp)
        die_with_parent()  # after the change of user, which would undo it
    except (FilesError, user.UserError) as error:
        _refuse(plan, str(error))
    except OSError as error:
        _refuse(plan, "cannot prepare the task: %s" % error)
    os.write(plan.status_fd, READY)
    if os.read(plan.release_fd, 1) == b"":
        os._exit(NOT_RELEASED)
    _execute(plan)


def _confine(plan: TaskPlan) -> mounts.HostTmp:
    """Enter the job's groups and private directories; return the node's /tmp."""
    if plan.confined.group is not None:
        cgroup.enter(plan.confined.group, plan.in_group)
    tmp = mounts.HostTmp(plan.confined.cover)
    if not plan.confined.cover.is_empty:
        mounts.enter(plan.confined.cover)
    return tmp


# ----- the process that forks tasks
# After a fork, the kernel copies each page that parent or child writes to. A shepherd writes to a quarter of its memory during a
# short job, so it does not fork. Its *forker* does, a child that does nothing else. CLONE_PARENT makes the tasks children of the
# shepherd.
#
# Rules:
# - The exit signal of the forker is not SIGCHLD, so the kernel does not count it among the children that a shepherd waits for. A
#   task has the same exit signal until it executes a program.
# - Each order brings the lock of the spool entry, so a free lock means that no task waits for its release.
# - It has the descriptors of a step only during a fork, and ends with its shepherd.


EXIT_SIGNAL = signal.SIGURG  # ignored by default
_SIZE = struct.Struct("!I")
_ANSWER = struct.Struct("!i")  # a pid, or below 0 the error number of the fork
_MAX_FDS = 6
_CANNOT_CLONE = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG})  # a kernel before 5.3, or a filter


class TaskForker:
    """The forker of this shepherd, which is started again if somebody kills it."""

    def __init__(self) -> None:
        self._control: Optional[socket.socket] = None

    def start(self) -> None:
        """Start the forker early, before this process has written to much of its memory."""
        with contextlib.suppress(OSError):  # the first task tries again
            self._start()

    def fork(self, plan: TaskPlan, lock_fd: int, release_end: int) -> int:
        """Fork a task; return its pid. Raises OSError.

        `release_end`: the shepherd's end of the release pipe, which the task must not have.
        """
        try:
            return self._order(plan, lock_fd)
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
        pid = os.fork()
        if pid == 0:
            os.close(release_end)
            _reset_signals()
            run_task(plan)
        return pid

    def _order(self, plan: TaskPlan, lock_fd: int) -> int:
        fds = [lock_fd, plan.release_fd, plan.status_fd]
        fds += [fd for fd in (plan.stdin_fd, plan.stdout_fd, plan.stderr_fd) if fd is not None]
        control = self._send(json.dumps(plan).encode(), fds)
        answer = control.recv(_ANSWER.size)
        if not answer:
            self._drop()
            raise OSError(errno.EAGAIN, "the process that forks tasks was killed")
        pid: int = _ANSWER.unpack(answer)[0]
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _send(self, order: bytes, fds: List[int]) -> socket.socket:
        """Send an order, to a new forker if the old one is gone: it forks after the whole order."""
        for _ in range(2):
            control = self._control or self._start()
            try:
                socket.send_fds(control, [_SIZE.pack(len(order))], fds)
                control.sendall(order)
                return control
            except (BrokenPipeError, ConnectionResetError):
                self._drop()
        raise OSError(errno.EAGAIN, "the process that forks tasks is killed again and again")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                pid = process.clone(EXIT_SIGNAL)
            except OSError:
                ours.close()
                raise
            if pid == 0:
                _fork_tasks(theirs)
        process.set_apart(pid)
        self._control = ours
        return ours

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def _fork_tasks(control: socket.socket) -> NoReturn:
    """Fork tasks until the shepherd is gone."""
    try:
        die_with_parent()
        process.close_all_but([control.fileno()])
        _reset_signals()
        gc.disable()  # a collection writes to all memory
        while True:
            data, fds, _flags, _address = socket.recv_fds(control, _SIZE.size, _MAX_FDS)
            if not data:
                break
            for fd in fds:
                os.set_inheritable(fd, False)  # recv_fds of Python 3.11 ignores MSG_CMSG_CLOEXEC
            plan = _plan_of(control.recv(_SIZE.unpack(data)[0], socket.MSG_WAITALL), fds)
            try:
                pid, in_group = cgroup.fork_into(plan.confined.group, 0, process.CLONE_PARENT)
            except OSError as error:
                pid, in_group = -(error.errno or errno.EAGAIN), False
            if pid == 0:
                control.close()
                run_task(plan._replace(in_group=in_group))
            control.send(_ANSWER.pack(pid))
            for fd in fds:
                os.close(fd)
    finally:
        os._exit(NOT_RELEASED)


def _plan_of(order: bytes, fds: List[int]) -> TaskPlan:
    """Return the plan in an order, with the descriptors that came with it."""
    plan = TaskPlan(*json.loads(order))
    group, cover = plan.confined
    streams = iter(fds[3:])
    return plan._replace(
        account=user.UserAccount(*plan.account),
        confined=StepConfinement(None if group is None else cgroup.StepGroup(*group), mounts.Cover(*cover)),
        helped=None if plan.helped is None else Helped(*plan.helped),
        release_fd=fds[1],
        status_fd=fds[2],
        stdin_fd=None if plan.stdin_fd is None else next(streams),
        stdout_fd=None if plan.stdout_fd is None else next(streams),
        stderr_fd=None if plan.stderr_fd is None else next(streams),
    )


def _reset_signals() -> None:
    """Give all signals their default action: a program inherits those that are ignored."""
    signal.set_wakeup_fd(-1)
    for number in range(1, 32):
        if number not in _UNCHANGEABLE and _signal.getsignal(number) is not _signal.SIG_DFL:
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])


# ----- a task that the root helper starts: this process forwards signals to it, and ends as it did. If this process is killed,
# the helper kills the task and all below it.


def _stand_for_task(plan: TaskPlan, helped: Helped) -> NoReturn:
    """Have the helper start the task. Raises OSError."""
    if plan.prolog or plan.epilog or plan.wait_for_children:
        raise FilesError(
            "cannot run a task prolog or epilog, or wait for children: the root helper of this node does not"
        )
    passed = [plan.status_fd, plan.release_fd]
    passed += [fd for fd in (plan.stdin_fd, plan.stdout_fd, plan.stderr_fd) if fd is not None]
    data = json.dumps(_order_for_helper(plan, helped)).encode("utf-8", "surrogateescape")
    helper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    helper.connect(user.HELPER_SOCKET)
    for number in range(1, 32):
        if number not in _LEFT_ALONE:
            signal.signal(number, lambda signum, _frame: helper.send(bytes([signum])))
    socket.send_fds(helper, [struct.pack("!I", len(data))], passed)
    helper.sendall(data)
    for fd in passed:
        os.close(fd)
    answer = helper.recv(4)
    if len(answer) < 4:
        os._exit(NOT_RELEASED)
    status: int = struct.unpack("!I", answer)[0]
    _end_as(status)


def _order_for_helper(plan: TaskPlan, helped: Helped) -> Dict[str, Any]:
    env = dict(plan.env)
    ours = environment.bin_dir(env[environment.AGENT_ROOT])  # the controller's; the helper adds the administrator's
    env["PATH"] = ":".join(folder for folder in env["PATH"].split(":") if folder not in (ours, ours + "/slurm"))
    stderr = "" if plan.stderr in ("", plan.stdout) else _path(plan.stderr)
    return {
        "user": plan.account.name,
        "job": helped.job_id,
        "attempt": helped.attempt,
        "step": helped.step,
        "script": helped.script,
        "args": plan.argv[1:] if plan.is_script else [],
        "argv": [] if plan.is_script else plan.argv,
        "env": env,
        "work_dir": plan.work_dir,
        "files": [
            None if plan.stdin_fd is not None else _path(plan.stdin),
            None if plan.stdout_fd is not None else _path(plan.stdout),
            None if plan.stderr_fd is not None else stderr,
        ],
        "truncate": [plan.truncate_stdout, plan.truncate_stderr],
        "umask": plan.umask,
        "limits": [list(limit) for limit in plan.limits],
    }


def _refuse(plan: TaskPlan, why: str) -> NoReturn:
    os.write(plan.status_fd, why.encode("utf-8", "surrogateescape")[:4000])
    os._exit(NOT_RELEASED)


def _restore_oom_score() -> None:
    if os.geteuid() == 0:  # an agent of root protects itself and its shepherds, not the jobs
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, b"0")
            os.close(fd)
        except OSError:
            pass  # a container may forbid it; the agent's score stays then


def _enter(work_dir: str) -> None:
    try:
        os.chdir(work_dir)
    except OSError as error:
        why = "cannot enter the job's directory %s: %s" % (work_dir, error.strerror)
        raise FilesError(why + (_ADVICE if error.errno in _MISSING else "")) from None


def _place_files(plan: TaskPlan, tmp: mounts.HostTmp) -> None:
    """Put the task's files at descriptors 0, 1 and 2; files below /tmp are those of the node."""
    sources = [plan.stdin_fd, plan.stdout_fd, plan.stderr_fd]
    if sources[0] is None:
        sources[0] = open_input(_path(plan.stdin), tmp)
    if sources[1] is None:
        sources[1] = open_output(_path(plan.stdout), plan.truncate_stdout, tmp)
    if sources[2] is None:
        same = plan.stderr in ("", plan.stdout)
        sources[2] = sources[1] if same else open_output(_path(plan.stderr), plan.truncate_stderr, tmp)
    for number, source in enumerate(sources):
        assert source is not None
        os.dup2(source, number, inheritable=True)  # the sources are above 2 and close at exec


def _path(text: str) -> str:
    return "/dev/null" if text in ("", "none") else text


def _execute(plan: TaskPlan) -> NoReturn:
    env = plan.env
    env["SLURM_TASK_PID"] = str(os.getpid())
    try:
        if plan.epilog or plan.wait_for_children:
            stay_for_epilog(plan.epilog, dict(env), plan.wait_for_children)
            env["SLURM_TASK_PID"] = str(os.getpid())
        if plan.prolog:
            run_prolog(plan.prolog, env)
        rlimits.apply(plan.limits)
        if plan.is_script:
            _execute_script(plan.argv, env)
        elif "/" in plan.argv[0]:
            os.execve(plan.argv[0], plan.argv, env)
        else:
            os.execvpe(plan.argv[0], plan.argv, env)
        code = errno.ENOEXEC
    except (OSError, ValueError, MemoryError) as error:
        rlimits.lift_memory(plan.limits)
        code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None) or errno.EINVAL
    why = "cannot execute %s: %s" % (plan.argv[0], os.strerror(code))
    if plan.is_script and code == errno.ENOENT:
        why += _interpreter_of(plan.argv[0])
    os.write(plan.status_fd, why.encode("utf-8", "surrogateescape")[:4000])
    try:
        os.write(2, ("hpcsched: error: %s\n" % why).encode("utf-8", "surrogateescape"))
    except OSError:
        pass  # no reader; the report has it, too
    os._exit(min(code, 125))  # as Slurm: the error number, such as 2 for a missing program


def _interpreter_of(script: str) -> str:
    """Return an addition to the reason: the interpreter that an existing script lacks, or ""."""
    try:
        with open(script, "rb") as file:
            words = os.fsdecode(file.readline(4096)[2:].strip()).split(None, 1)
    except OSError:
        return ""
    return ": its interpreter %.200s is not on this node" % words[0] if words and not os.path.exists(words[0]) else ""


def _execute_script(argv: List[str], env: Dict[str, str]) -> None:
    with open(argv[0], "rb") as script:
        first = script.readline(4096)
    words = os.fsdecode(first[2:].strip()).split(None, 1) if first.startswith(b"#!") else []
    if is_login_script(words):
        os.execve(words[0], command(words, argv, environment.own_folders(env)), env)
    try:
        os.execve(argv[0], argv, env)
    except PermissionError:
        pass
    # The spool may be mounted noexec: do what the kernel would do with the first line.
    if not words:
        raise OSError(errno.ENOEXEC, "no #! line")
    os.execve(words[0], words + argv, env)


MAX_OUTPUT = 1 << 20  # of a prolog
PROLOG_S = 300.0  # after which a prolog is killed
EPILOG_S = 10.0  # after which an epilog is killed
_UNCHANGEABLE = (_signal.SIGKILL, _signal.SIGSTOP)
_LEFT_ALONE = (*_UNCHANGEABLE, _signal.SIGCHLD)


def run_prolog(program: str, env: Dict[str, str]) -> None:
    """Run the prolog, and change `env` by its output; if it fails, end as it did."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.dup2(write_end, 1)
        _become(program, env)
    os.close(write_end)
    output, status = _output_of(pid, read_end)
    if status:
        _report_failure("prolog", program, status)
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    for line in output.decode("utf-8", "surrogateescape").split("\n"):
        _take(line.strip("\r"), env)


def _output_of(pid: int, read_end: int) -> Tuple[bytes, int]:
    """Return a prolog's output and the status of its end; its children may keep the pipe."""
    output, done, status = b"", 0, 0
    end_s = time.monotonic() + PROLOG_S
    while True:
        is_readable = bool(select.select([read_end], [], [], process.END_LOOK_S)[0])
        data = os.read(read_end, 1 << 16) if is_readable else b""
        output += data
        if len(output) > MAX_OUTPUT or (is_readable and not data) or (done and not is_readable):
            break
        if not done:
            done, status = os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > end_s:
            break
    os.close(read_end)  # a prolog that writes more gets SIGPIPE
    return output[:MAX_OUTPUT], status if done else process.end_of(pid, end_s)


def _take(line: str, env: Dict[str, str]) -> None:
    verb, _, rest = line.strip().partition(" ")
    name, equals, value = rest.strip().partition("=")
    if "\0" in rest or not name:
        return
    if verb == "export" and equals:
        env[name] = value
    elif verb == "unset" and not equals:
        env.pop(name, None)
    elif verb == "print":
        try:
            os.write(1, (rest + "\n").encode("utf-8", "surrogateescape"))
        except OSError:
            pass  # no reader


def stay_for_epilog(epilog: str, env: Dict[str, str], wait_for_children: bool) -> None:
    """Fork.

    Return in the child, which becomes the program, and run the epilog in this process after it.

    With `wait_for_children`, after all processes that the program has started.
    """
    if wait_for_children:
        become_subreaper()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, range(1, 32))  # until this process ignores them
    pid = os.fork()
    if pid == 0:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
        die_with_parent()
        return
    for number in range(1, 32):
        if number not in _LEFT_ALONE:
            _signal.signal(number, _signal.SIG_IGN)  # signals of the task are for its program
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    status = os.waitpid(pid, 0)[1]
    if wait_for_children:
        _wait_for_all()
    if epilog:
        _run_epilog(epilog, env)
    _end_as(status)


def _wait_for_all() -> None:
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _run_epilog(program: str, env: Dict[str, str]) -> None:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # or a signal that ends the task, forwarded by its step command, would end the epilog
        for number in range(1, 32):
            if number not in _LEFT_ALONE:
                _signal.signal(number, _signal.SIG_DFL)
        _become(program, env)
    _report_failure("epilog", program, process.end_of(pid, time.monotonic() + EPILOG_S))


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def _become(program: str, env: Dict[str, str]) -> NoReturn:
    try:
        os.execve(program, [program], env)
    except (OSError, ValueError) as error:
        os.write(2, ("hpcsched: error: cannot execute %s: %s\n" % (program, error)).encode("utf-8", "surrogateescape"))
    os._exit(127)


def _report_failure(what: str, program: str, status: int) -> None:
    if status:
        how = "signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else "status %d" % os.WEXITSTATUS(status)
        text = "hpcsched: error: the task %s %s ended with %s\n" % (what, program, how)
        try:
            os.write(2, text.encode("utf-8", "surrogateescape"))
        except OSError:
            pass  # no reader
