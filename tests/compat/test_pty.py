"""srun --pty: a program on a node that has a terminal, whose other end is here."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clientrun import Client
from waiting import PATIENCE_S, wait_until

from hpcsched.cli.admin.shell import ensure_directory
from hpcsched.loopback.cluster import LocalCluster


class Terminal:
    """A terminal that somebody sits at, with a command in it."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.fd = fd
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def shows(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until it shows this, and forget what came before."""
        deadline_s = time.monotonic() + timeout_s
        while text.encode() not in self.shown:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self.fd, 4096)
        self.shown = self.shown.partition(text.encode())[2]

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def at_terminal(cluster: LocalCluster, *command: str) -> Iterator[Terminal]:
    env = {**cluster.env, "PATH": f"{ensure_directory()}{os.pathsep}{cluster.env['PATH']}", "TERM": "vt100"}
    here, there = os.openpty()
    terminal = Terminal(None, here)  # type: ignore[arg-type]
    terminal.resize(31, 99)

    def take_it() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal.process = subprocess.Popen(
        command, env=env, stdin=there, stdout=there, stderr=there, start_new_session=True, preexec_fn=take_it
    )
    os.close(there)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(here)


def test_a_shell_at_a_terminal(cluster: LocalCluster) -> None:
    with at_terminal(cluster, "srun", "-w", "n2", "--pty", "env", "PS1=ready:", "sh", "-i") as terminal:
        terminal.type("stty size; echo on-$SLURMD_NODENAME\n")
        terminal.shows("31 99")
        terminal.shows("on-n2")
        terminal.resize(40, 120)
        terminal.type("while [ \"$(stty size)\" = '31 99' ]; do sleep 0.05; done; stty size\n")
        terminal.shows("40 120")
        # A shell of its own, which is in the foreground when it prints: Ctrl-C in the moment before is for the shell above.
        terminal.type("sh -c 'echo begun-$((3 * 3)); exec sleep 600'\n")
        terminal.shows("begun-9")
        terminal.type("\x03")
        terminal.shows("ready:")
        terminal.type("echo again-$((1+1))\n")
        terminal.shows("again-2")
        terminal.type("exit 5\n")
        assert terminal.process.wait(timeout=PATIENCE_S) == 5


def test_input_that_is_no_terminal_ends_the_program(slurm: Client) -> None:
    done = slurm("srun", "--pty", "sh", "-c", "tty; read word; echo got $word; exec cat", stdin="hello\n", check=False)
    assert done.returncode == 0, done
    assert "/dev/pts/" in done.stdout
    assert "got hello" in done.stdout


def test_a_program_that_is_killed_or_missing(slurm: Client) -> None:
    assert slurm("srun", "--pty", "sh", "-c", "kill -9 $$", check=False).returncode == 137
    assert slurm("srun", "--pty", "no-such-program", check=False).returncode == 2


def test_a_shell_on_a_node_of_a_running_job(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "-N2", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%t").stdout == "R\n", what="the job to run")
    done = cluster.run(
        "hsh", job_id, "n2", "--", "sh", "-c", "echo $SLURM_JOB_ID $SLURMD_NODENAME; exit 3", check=False
    )
    assert (done.returncode, done.stdout.split()) == (3, [job_id, "n2"]), done
    with at_terminal(cluster, "hsh", job_id) as terminal:
        terminal.type("echo on-$SLURMD_NODENAME; exit\n")
        terminal.shows("on-n1")
        assert terminal.process.wait(timeout=PATIENCE_S) == 0
    slurm("scancel", job_id)
