"""Run a program of the administrator: who may have written it, and its bounds.

A program runs without a shell, in a session of its own, with a given environment, in "/", without input. It is bounded in time,
processes and output. What it leaves behind is killed.

It does not know what the program is for. Call `run` in a process that does nothing else and has no other children: it
becomes a subreaper, so that processes which detach themselves are found, too.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import time
from typing import Dict, List, Union

from hpcnode.os import process

MAX_COMPONENTS = 256  # directories and links that lead to a program
MAX_PROCESSES = 256
KEPT_BYTES = 4096  # the end of its output
LINE_CHARS = 200
LOOK_S = 0.2
TERM_S = 5.0  # from SIGTERM to SIGKILL
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def check_program(program: Union[str, os.PathLike[str]], uid: int) -> None:
    """Check that only root and the user can replace the program, as sshd's StrictModes does.

    Each directory and link on the way belongs to one of the two; in a directory that others may write, with a sticky bit, they
    cannot rename what is not theirs.

    Raises: PermissionError, another OSError if there is no such program.
    """
    program = os.fspath(program)
    left, at = program.split("/")[::-1], "/"
    for _ in range(MAX_COMPONENTS):
        status = os.lstat(at)
        is_link = stat.S_ISLNK(status.st_mode)
        if status.st_uid not in (0, uid):
            raise PermissionError(
                "%s belongs to user %d, who could replace the program %s" % (at, status.st_uid, program)
            )
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if not is_link and status.st_mode & 0o022 and not is_sticky:
            raise PermissionError(
                "others may write %s, and so replace the program %s; run: chmod go-w %s" % (at, program, at)
            )
        if is_link:
            target = os.readlink(at)
            at = "/" if target.startswith("/") else os.path.dirname(at)
            left += target.split("/")[::-1]
        part = next_part(left)
        if not part:
            return
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)
    raise PermissionError("the path of the program %s has more than %d parts and links" % (program, MAX_COMPONENTS))


def next_part(left: List[str]) -> str:
    """Take the next name off a path in reverse order; "" if none is left."""
    while left:
        part = left.pop()
        if part not in ("", "."):
            return part
    return ""


def run(program: str, env: Dict[str, str], limit_s: float) -> str:
    """Run a program; return "" if its exit status is 0, else why it failed, in one line."""
    name = os.path.basename(program)
    try:
        check_program(program, os.geteuid())
        process.become_subreaper()
        child = subprocess.Popen(  # noqa: S603 - the administrator's, and checked
            [program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": PATH, **env},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return cleaned("cannot run %s: %s" % (name, getattr(error, "strerror", None) or error))
    output, stopped = _watch(child, limit_s)
    status = child.wait()
    _end_rest()
    if not stopped and status == 0:
        return ""
    ended = stopped or ("ended with status %d" % status if status > 0 else "was killed by signal %d" % -status)
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return cleaned("%s %s%s" % (name, ended, ": " + lines[-1].strip() if lines else ""))


def _watch(child: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, str]:
    """Wait for the program; return the end of its output, and why it was stopped, if it was."""
    assert child.stdout is not None
    pipe, ended, output = child.stdout.fileno(), os.pidfd_open(child.pid), b""
    os.set_blocking(pipe, False)
    waits_for, deadline_s, stopped = [pipe, ended], time.monotonic() + limit_s, ""
    try:
        while True:
            ready = select.select(waits_for, [], [], LOOK_S)[0]
            if pipe in ready:
                data = os.read(pipe, 65536)
                output = (output + data)[-KEPT_BYTES:]
                waits_for = waits_for if data else [ended]
            elif ended in ready:
                return output, stopped
            now_s = time.monotonic()
            if now_s >= deadline_s:
                if stopped:
                    _kill_below()
                else:
                    process.signal_group(child.pid, signal.SIGTERM)
                stopped = stopped or "was stopped after %g s" % limit_s
                deadline_s = now_s + TERM_S
            elif not stopped and len(process.quick_descendants(os.getpid())) > MAX_PROCESSES:
                _kill_below()
                stopped = "was stopped: it had more than %d processes" % MAX_PROCESSES
    finally:
        os.close(ended)


def _kill_below() -> None:
    process.signal_all(process.stop_all_below(os.getpid()), signal.SIGKILL)


def _end_rest() -> None:
    """Kill what the program has left, and wait until it is gone, for some seconds at most."""
    until_s = time.monotonic() + TERM_S
    while process.quick_descendants(os.getpid()) and time.monotonic() < until_s:
        _kill_below()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def cleaned(text: str) -> str:
    """Return one line of printable text, of bounded length."""
    return "".join(char if char.isprintable() else "?" for char in text[:LINE_CHARS])


def main(words: List[str]) -> int:
    """Run ``LIMIT_S PROGRAM`` with this process's environment; print why it failed."""
    env = {name: value for name, value in os.environ.items() if name.startswith(("HPCSCHED_", "SLURM"))}
    why = run(words[1], env, float(words[0]))
    sys.stdout.write(why)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
