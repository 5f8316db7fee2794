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
import errno
import os
import resource
import signal
from typing import Dict, List, NamedTuple, NoReturn, Optional, Sequence

from hpcnode import environment, files, loginshell, user
from hpcnode.process import die_with_parent

READY = b"R"
NOT_RELEASED = 127


class TaskPlan(NamedTuple):
    """One task: what it runs, as whom, and with which files."""

    rank: int
    argv: List[str]
    is_script: bool
    env: Dict[str, str]
    account: user.Account
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
    release_fd: int
    status_fd: int
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
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _enter(plan.work_dir)
        _place_files(plan)
        die_with_parent()  # after the change of user, which would undo it
    except (files.FilesError, user.UserError) as error:
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
        raise files.FilesError("cannot enter the job's directory %s: %s" % (work_dir, error.strerror)) from None


def _place_files(plan: TaskPlan) -> None:
    """Put the task's files at 0, 1 and 2."""
    sources = [plan.stdin_fd, plan.stdout_fd, plan.stderr_fd]
    if sources[0] is None:
        sources[0] = files.open_input(_path(plan.stdin))
    if sources[1] is None:
        sources[1] = files.open_output(_path(plan.stdout), plan.truncate_stdout)
    if sources[2] is None:
        same = plan.stderr in ("", plan.stdout)
        sources[2] = sources[1] if same else files.open_output(_path(plan.stderr), plan.truncate_stderr)
    for number, source in enumerate(sources):
        assert source is not None
        os.dup2(source, number, inheritable=True)  # the sources are above 2 and close at exec


def _path(text: str) -> str:
    return "/dev/null" if text in ("", "none") else text


def _execute(plan: TaskPlan) -> NoReturn:
    env = plan.env
    env["SLURM_TASK_PID"] = str(os.getpid())
    try:
        if plan.is_script:
            _execute_script(plan.argv, env)
        elif "/" in plan.argv[0]:
            os.execve(plan.argv[0], plan.argv, env)
        else:
            os.execvpe(plan.argv[0], plan.argv, env)
        code = errno.ENOEXEC
    except (OSError, ValueError) as error:
        code = getattr(error, "errno", None) or errno.EINVAL
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
    if loginshell.is_one(words):
        os.execve(words[0], loginshell.command(words, argv, environment.own_folders(env)), env)
    try:
        os.execve(argv[0], argv, env)
    except PermissionError:
        pass
    # The spool may be on a file system mounted noexec: do as the kernel would with the script's first line.
    if not words:
        raise OSError(errno.ENOEXEC, "no #! line")
    os.execve(words[0], words + argv, env)
