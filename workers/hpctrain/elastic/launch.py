"""The processes of an elastic run: on this host, or as steps of a job.

In a job each process is a step of its own (`hrun` with one task), so that its end does not affect the others. Does not know the
roster, nor why a process is started or ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import TrainError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """A place for a rank; `node` is None outside of a job."""

    number: int
    node: str | None
    spare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNodes:
    """The nodes of a job, the nodes to keep (None: all), and the ranks per node."""

    nodes: tuple[str, ...]
    wanted: tuple[str, ...] | None
    per_node: int


def allocation(environ: Mapping[str, str]) -> JobNodes | None:
    """Return the current nodes of the job; None outside of a job.

    Raises:
        TrainError: the job's nodes cannot be found.
    """
    if "HPCSCHED_JOB_ID" not in environ:
        return None
    nodes, wanted = _changed(Path(environ["HPCSCHED_ALLOCATION_FILE"])) or (_at_first(environ), ())
    per_node = int(environ.get("HPCSCHED_NTASKS_PER_NODE") or 1)
    return JobNodes(nodes=nodes, wanted=wanted or None, per_node=per_node)


def _changed(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the nodes and the nodes to keep, if they have changed since the job began."""
    try:
        facts = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return tuple(facts["nodes"]), tuple(facts.get("wanted") or ())


def _at_first(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Ask each node for its name."""
    command = ["hrun", "--ntasks-per-node=1", "--overlap", "printenv", "HPCSCHED_NODENAME"]
    asked = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise TrainError(f"cannot tell which nodes the job has: {asked.stderr.strip()}")
    return tuple(sorted(asked.stdout.split()))


def own_address(environ: Mapping[str, str]) -> str:
    """Return the address of this host for ranks on other nodes."""
    return environ["HPCSCHED_MASTER_ADDR"] if "HPCSCHED_JOB_ID" in environ else "127.0.0.1"


class RankLauncher:
    """The processes of a run, by slot."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command, self._environ = list(command), dict(environ)
        self._in_job = "HPCSCHED_JOB_ID" in environ
        if self._in_job and shutil.which("hrun", path=environ.get("PATH")) is None:
            raise TrainError("cannot start ranks: there is no hrun on PATH in this job")
        self.processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, slot: RankSlot, facts: Mapping[str, str]) -> None:
        """Start a process in a slot."""
        argv = self._command
        if slot.node is not None:
            # A waiting step (a spare's for cpus, any step's for a node that is down) would block the job's later steps.
            place = ["--nodes=1", "--ntasks=1", f"--nodelist={slot.node}", "--overlap"]
            argv = ["hrun", *place, "--quiet", "--unbuffered", *argv]
        self.processes[slot.number] = await asyncio.create_subprocess_exec(
            *argv, env=self._environ | dict(facts), stdin=asyncio.subprocess.DEVNULL
        )

    @property
    def all_ended(self) -> bool:
        """Return whether no process runs."""
        return all(process.returncode is not None for process in self.processes.values())

    def signal_all(self, number: signal.Signals) -> None:
        """Forward a signal to all ranks."""
        for slot in self.processes:
            self.signal(slot, number)

    def signal(self, slot: int, number: signal.Signals) -> None:
        """Send a signal to the process in a slot, if one runs."""
        process = self.processes.get(slot)
        if process is not None and process.returncode is None:
            # Not `send_signal`: it may take the exit status from asyncio, which then invents one.
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    async def end(self, slot: int) -> None:
        """End the process in a slot; the end of hrun is the end of its step."""
        self.signal(slot, signal.SIGKILL)
        process = self.processes.pop(slot, None)
        if process is not None:
            await process.wait()

    async def resize_job(self, nodes: int) -> bool:
        """Give back all but so many nodes of the job; return whether the controller accepts."""
        process = await asyncio.create_subprocess_exec("hrun", f"--resize={nodes}", env=self._environ)
        return await process.wait() == 0


def was_killed(status: int) -> bool:
    """Return whether a signal ended the process; hrun reports that as 128 and more."""
    return status < 0 or status > 128


def ending(status: int) -> str:
    """Return how a process ended, as text."""
    number = -status if status < 0 else status - 128
    if was_killed(status) and number in set(signal.Signals):
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with status {status}"
