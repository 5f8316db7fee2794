"""The child's side of a launch: from a fork of the shepherd to the user's program, in one order that matters.

own session, the shepherd's settings undone, pipes in place -> become the user -> limits, directory, files, all
as the user -> say "ready" -> wait until the shepherd has put on disk who we are -> exec.

If the shepherd dies before it releases us, the pipe that we wait on ends, and so do we: without its record nothing runs.
It never returns, raises or runs the shepherd's code. Each page of memory that it touches is copied by the kernel, and takes
longer than what is done there: so signals are set by the module in C below `signal`, which says what was set before as an enum.

Sources: credentials(7), execve(2), signal(7).
"""

from __future__ import annotations

import _signal
import _thread
import errno
import os
import re
import resource
import signal
import stat
import time
from typing import Dict, List, NamedTuple, NoReturn, Optional, Sequence

from hpcnode.os import account as user
from hpcnode.os import rlimits
from hpcnode.os.process import become_subreaper, die_with_parent
from hpcnode.shepherd import environment

# ----- scripts whose first line asks for a login shell (``#!/bin/bash -l``)
# Its profile sets a PATH anew that has not our commands.
# Where a cluster's commands are in /usr/bin nobody notices. So the shell is given the folders of ours behind its profile, and
# reads the script then: its functions, options, arguments and ``$0`` are those of a script that it was started with.
#
# Source: bash(1), "INVOCATION"; /etc/profile of Debian.


_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def is_one(first_line: Sequence[str]) -> bool:
    """Return whether the words of a script's first line (program and argument) start a login shell."""
    if len(first_line) != 2 or os.path.basename(first_line[0]) not in _SHELLS:
        return False
    flags = first_line[1]
    return flags == "--login" or (flags[:1] == "-" and flags[1:].isalpha() and "l" in flags and "c" not in flags)


def command(first_line: Sequence[str], argv: Sequence[str], folders: Sequence[str]) -> List[str]:
    """Return the words that run the script with its arguments, `argv`, with `folders` first on the PATH."""
    from shlex import quote  # few scripts need it

    return [*first_line, "-c", 'PATH=%s:"$PATH"; . "$0"' % quote(":".join(folders)), *argv]


# ----- the files of a task, opened as the job's user: whatever the path is, it can do no more than the user could
# A FIFO without a reader cannot block the launch, a missing output directory is made, `%t %n %N` are filled per task.


LOOK_S = 1.0
LEAST_BYTES = 64 << 10  # a file system with less is full

_PATTERN = re.compile(r"%(%|(\d{0,2})([tnN]))")


class FilesError(Exception):
    """A file of the task cannot be opened; the text says which and why."""


def fill(pattern: str, rank: int, node_rank: int, node: str) -> str:
    """Return `pattern` with %t (rank), %n (the node's number in the step) and %N (its name) filled; %3t pads."""

    def value(match: re.Match[str]) -> str:
        if match.group(1) == "%":
            return "%"
        width, word = match.group(2), match.group(3)
        if word == "N":
            return node
        return str(rank if word == "t" else node_rank).zfill(int(width or 0))  # int: bounded

    return _PATTERN.sub(value, pattern)


def truncates(pattern: str, local_rank: int, node_rank: int) -> bool:
    """Return whether this task is the one that empties the file: of those that share it, the first."""
    if fill(pattern, 1, 0, "a") != fill(pattern, 2, 0, "a"):
        return True
    one_per_node = fill(pattern, 0, 1, "a") != fill(pattern, 0, 2, "b")
    return local_rank == 0 and (one_per_node or node_rank == 0)


def open_output(path: str, truncate: bool) -> int:
    """Open (or make) an output file for appending. Raises FilesError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if truncate:
        flags |= os.O_TRUNC
    try:
        try:
            return _blocking(os.open(path, flags, 0o666))
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            return _blocking(os.open(path, flags, 0o666))
    except OSError as error:
        raise FilesError("cannot open output file %s: %s" % (path, error.strerror)) from None


def is_full(path: str) -> bool:
    """Return whether nothing more fits on the file system of `path`; False if it does not say so within LOOK_S.

    A share that hangs must not keep the caller, so a thread asks it.
    """
    found: List[bool] = []
    answered = _thread.allocate_lock()
    answered.acquire()

    def look() -> None:
        try:
            about = os.statvfs(path)
            found.append(about.f_blocks > 0 and about.f_bavail * about.f_frsize < LEAST_BYTES)
        except OSError:
            pass  # not ours to look at, or gone: nothing is known
        answered.release()

    try:
        _thread.start_new_thread(look, ())
    except RuntimeError:
        return False  # this account can have no more threads
    answered.acquire(timeout=LOOK_S)
    return found == [True]


def open_input(path: str) -> int:
    """Open an input file. Raises FilesError."""
    try:
        return _blocking(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        raise FilesError("cannot open input file %s: %s" % (path, error.strerror)) from None


def _blocking(fd: int) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.set_blocking(fd, True)
    return fd


READY = b"R"
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_WAYS_OUT = "; use a directory that all nodes have (a share, or --chdir=DIR), or leave this node out (-x NODE)"
NOT_RELEASED = 127


class TaskPlan(NamedTuple):
    """One task: what it runs, as whom, and with which files."""

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
    limits: rlimits.Limits  # those of the submitter
    release_fd: int
    status_fd: int
    prolog: str  # programs that it runs before its own, and after it; "" if none
    epilog: str
    wait_for_children: bool  # it is over when all that it has started is
    signals: Sequence[int]  # those to be put back to what a program begins with: see `touched_signals`


def touched_signals() -> List[int]:
    """Return the signals that this process, and so what it forks, handles or ignores.

    To be asked once: Python takes longer to say it of all than a task takes otherwise from its fork to its program.
    """
    numbers = (number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP))
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_DFL]


def run_task(plan: TaskPlan) -> NoReturn:
    """Become the task. Writes READY, or why not, to the status pipe; after the release writes only if exec fails."""
    try:
        os.setsid()
        _reset_signals(plan.signals)
        _restore_oom_score()
        user.become(plan.account)
        os.umask(plan.umask)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        _enter(plan.work_dir)
        _place_files(plan)
        die_with_parent()  # after the change of user, which would undo it
    except (FilesError, user.UserError) as error:
        _refuse(plan, str(error))
    except OSError as error:
        _refuse(plan, "cannot prepare the task: %s" % error)
    os.write(plan.status_fd, READY)
    if os.read(plan.release_fd, 1) == b"":
        os._exit(NOT_RELEASED)
    _execute(plan)


def _refuse(plan: TaskPlan, why: str) -> NoReturn:
    os.write(plan.status_fd, why.encode("utf-8", "surrogateescape")[:4000])
    os._exit(NOT_RELEASED)


def _reset_signals(touched: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in touched:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])


def _restore_oom_score() -> None:
    if os.geteuid() == 0:  # a root agent protects itself and its shepherds, not the jobs
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, b"0")
            os.close(fd)
        except OSError:
            pass  # a container may forbid it; the score is then what the agent's is


def _enter(work_dir: str) -> None:
    try:
        os.chdir(work_dir)
    except OSError as error:
        why = "cannot enter the job's directory %s: %s" % (work_dir, error.strerror)
        raise FilesError(why + (_WAYS_OUT if error.errno in _MISSING else "")) from None


def _place_files(plan: TaskPlan) -> None:
    """Put the task's files at 0, 1 and 2."""
    sources = [plan.stdin_fd, plan.stdout_fd, plan.stderr_fd]
    if sources[0] is None:
        sources[0] = open_input(_path(plan.stdin))
    if sources[1] is None:
        sources[1] = open_output(_path(plan.stdout), plan.truncate_stdout)
    if sources[2] is None:
        same = plan.stderr in ("", plan.stdout)
        sources[2] = sources[1] if same else open_output(_path(plan.stderr), plan.truncate_stderr)
    for number, source in enumerate(sources):
        assert source is not None
        os.dup2(source, number, inheritable=True)  # the sources are above 2 and close at exec


def _path(text: str) -> str:
    return "/dev/null" if text in ("", "none") else text


def _execute(plan: TaskPlan) -> NoReturn:
    env = plan.env
    env["SLURM_TASK_PID"] = str(os.getpid())
    try:
        if plan.prolog:
            run_prolog(plan.prolog, env)
        if plan.epilog or plan.wait_for_children:
            stay_for_epilog(plan.epilog, dict(env), plan.wait_for_children)
            env["SLURM_TASK_PID"] = str(os.getpid())
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
        pass  # nobody reads it; the report says it too
    os._exit(min(code, 125))  # as Slurm: the error's number, 2 for a program that is not there


def _interpreter_of(script: str) -> str:
    """Return the end of a sentence: what a script that is there misses is the program of its first line."""
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
    if is_one(words):
        os.execve(words[0], command(words, argv, environment.own_folders(env)), env)
    try:
        os.execve(argv[0], argv, env)
    except PermissionError:
        pass
    # The spool may be on a file system mounted noexec: do as the kernel would with the script's first line.
    if not words:
        raise OSError(errno.ENOEXEC, "no #! line")
    os.execve(words[0], words + argv, env)


MAX_OUTPUT = 1 << 20  # of a prolog
EPILOG_S = 10.0  # then it is killed
LOOK_S = 0.02
_LEFT_ALONE = (_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD)


def run_prolog(program: str, env: Dict[str, str]) -> None:
    """Run the prolog, and do to `env` what it says."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.dup2(write_end, 1)
        _become(program, env)
    os.close(write_end)
    said = b""
    while len(said) <= MAX_OUTPUT:
        data = os.read(read_end, 1 << 16)
        if not data:
            break
        said += data
    os.close(read_end)  # one that says more gets a SIGPIPE
    _tell("prolog", program, os.waitpid(pid, 0)[1])
    for line in said[:MAX_OUTPUT].decode("utf-8", "surrogateescape").split("\n"):
        _take(line.strip("\r"), env)


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
            pass  # nobody reads the task's output


def stay_for_epilog(epilog: str, env: Dict[str, str], wait_for_children: bool) -> None:
    """Return in a new process, which is to become the task's program; this one runs the epilog when that is over.

    With `wait_for_children` that is when nothing is left of what the program has started.
    """
    if wait_for_children:
        become_subreaper()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        return
    for number in range(1, 32):
        if number not in _LEFT_ALONE:
            _signal.signal(number, _signal.SIG_IGN)  # signals for the task are for its program
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
        for number in range(1, 32):
            if number not in _LEFT_ALONE:
                _signal.signal(number, _signal.SIG_DFL)
        _become(program, env)
    end_s = time.monotonic() + EPILOG_S
    done, ended = os.waitpid(pid, os.WNOHANG)
    while not done:
        if time.monotonic() > end_s:
            os.kill(pid, _signal.SIGKILL)
        time.sleep(LOOK_S)
        done, ended = os.waitpid(pid, os.WNOHANG)
    _tell("epilog", program, ended)


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


def _tell(what: str, program: str, status: int) -> None:
    if status:
        how = "signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else "status %d" % os.WEXITSTATUS(status)
        text = "hpcsched: error: the task %s %s ended with %s\n" % (what, program, how)
        try:
            os.write(2, text.encode("utf-8", "surrogateescape"))
        except OSError:
            pass  # nobody reads it
