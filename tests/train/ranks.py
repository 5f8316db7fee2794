"""Start ranks in tests: under the MPI of this environment, or as plain processes with RANK and WORLD_SIZE.

Every launch has its own session and a hard time limit, and leaves no process behind.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from preloaded import command as python

HERE = Path(__file__).parent
MPIRUN = Path(sys.executable).with_name("mpirun")
LIMIT_S = 200.0
# What scripts of these libraries import of them: see `preloaded`.
LIBRARIES = {"lightning": ("lightning.pytorch",), "transformers": ("transformers.trainer", "accelerate")}
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a launch left: its exit status and everything that it printed."""

    status: int
    output: str


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without what an outer launcher or scheduler may have set."""
    dropped = ("OMPI_", "PMI", "PMIX", "MPI_", "HPCSCHED_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    kept |= {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | dict(extra or {})


@contextmanager
def started(
    command: Sequence[str | Path], extra: Mapping[str, str] | None = None, output: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own and kill what is left of that at the end."""
    process = subprocess.Popen(
        [str(part) for part in command],
        env=clean_environment(extra),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in session_members(process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.communicate()


def session_members(session: int) -> list[int]:
    """List the processes of a session (hydra puts its ranks into process groups of their own)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(entry.name))
    return members


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Ended:
    """Wait for the end, and fail the test if that takes too long."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{process.args} has not ended within {limit_s:g} s")
    return Ended(status=process.returncode, output=output)


def mpirun(count: int, *arguments: str | Path) -> list[str | Path]:
    """Return the command that runs Python with these arguments on `count` ranks."""
    return [MPIRUN, "-n", str(count), *python(), *arguments]


def run_mpi(count: int, *arguments: str | Path, extra: Mapping[str, str] | None = None) -> Ended:
    """Run Python on `count` ranks under mpirun, to its end."""
    with started(mpirun(count, *arguments), extra) as process:
        return finish(process)


def run_plain(count: int, *arguments: str | Path, extra: Sequence[Mapping[str, str]] = ()) -> list[Ended]:
    """Run Python `count` times with the variables that torch.distributed reads, as hrun does.

    `extra`: more variables of each rank.
    """
    port = str(free_port())
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    more = extra or [{}] * count
    with _all(
        started([*python(), *arguments], shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), **more[rank]})
        for rank in range(count)
    ) as processes:
        return [finish(process) for process in processes]


def free_port() -> int:
    """Return a port that is free, and that the kernel gives to nobody who asks it for just any port."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # Linux takes those from 32768 (ip_local_port_range)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def _all(contexts: Iterator) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        yield [stack.enter_context(context) for context in contexts]
