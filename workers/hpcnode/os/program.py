"""Run a program of the administrator, within bounds.

A program runs without a shell, in a session of its own, in "/", without input. Its environment is PATH and variables of the
scheduler: another one, such as LD_PRELOAD, could change what runs. It is bounded in time, processes and output. What it leaves
behind is killed.

It does not know what the program is for. Call `run` in a process that does nothing else and has no other children: it
becomes a subreaper, so that processes which detach themselves are found, too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import Dict, List, Sequence

from hpcnode.os import process, trust

MAX_PROCESSES = 256
KEPT_BYTES = 4096  # the end of its output
LINE_CHARS = 200
LOOK_S = 0.2
TERM_S = 5.0  # from SIGTERM to SIGKILL
OURS = ("HPCSCHED_", "SLURM")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run(program: str, env: Dict[str, str], limit_s: float, args: Sequence[str] = ()) -> str:
    """Run a program; return "" if its exit status is 0, else why it failed, in one line."""
    name = os.path.basename(program)
    try:
        trust.check_path(program, os.geteuid())
        process.become_subreaper()
        child = subprocess.Popen(  # noqa: S603 - the administrator's, and checked
            [program, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**{name: value for name, value in env.items() if name.startswith(OURS)}, "PATH": PATH},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return cleaned("cannot run %s: %s" % (name, getattr(error, "strerror", None) or error))
    output, stopped = _watch(child, limit_s)
    status = child.wait()
    end_rest()
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


def end_rest() -> None:
    """Kill all that is left below this process, and wait some seconds until it is gone."""
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
    """Run ``LIMIT_S PROGRAM [ARG...]`` with this process's environment; print why it failed."""
    why = run(words[1], dict(os.environ), float(words[0]), words[2:])
    sys.stdout.write(why)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
