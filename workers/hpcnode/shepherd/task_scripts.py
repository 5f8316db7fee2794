"""The programs of --task-prolog and --task-epilog: what a task runs, as its user, before its own program and after it.

Both have the task's environment, directory and standard error. The prolog's standard output is read line by line: ``export
NAME=value`` and ``unset NAME`` change the task's environment, ``print TEXT`` is written to its standard output, the rest is
dropped. A prolog that fails is told of on standard error, and the task runs all the same. For an epilog, and for
--wait-for-children, the task's first process stays, waits for the program, runs the epilog and ends as the program has ended.

Source: srun(1).
"""

from __future__ import annotations

import _signal
import os
import time
from typing import Dict, NoReturn

from hpcnode.os.process import become_subreaper, die_with_parent

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


def stay(epilog: str, env: Dict[str, str], wait_for_children: bool) -> None:
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
