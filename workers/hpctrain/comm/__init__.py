"""Communication between ranks.

One interface over MPI, torch.distributed, elastic groups and a single process.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.comm.base import Communicator, SingleCommunicator, Work
from hpctrain.comm.elastic_group import ElasticCommunicator
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.torch_dist import TorchCommunicator
from hpctrain.elastic.member import Membership, is_elastic
from hpctrain.env import LauncherKind, RankInfo, rank_info
from hpctrain.errors import TrainError
from hpctrain.peers import encryption_wanted

# ----- the backend: the option's, else by launcher and hardware


BACKENDS = ("auto", "mpi", "gloo", "nccl", "single")


def connect(backend: str, environ: Mapping[str, str]) -> Communicator:
    """Join the group of ranks that the launcher started; all ranks call it.

    Raises:
        TrainError: the backend does not exist, is not installed, or does not fit the launcher.
    """
    if is_elastic(environ):
        if backend not in ("auto", "gloo"):
            raise TrainError(
                f"cannot use backend {backend!r} in an elastic run: its members make their own ring, or use gloo"
            )
        return ElasticCommunicator(Membership(environ), by_gloo=backend == "gloo")
    here = rank_info(environ)
    if here.launcher is not LauncherKind.NOBODY and encryption_wanted(environ):
        raise TrainError(
            "cannot encrypt the connections of MPI, gloo and nccl, which are their own: start the ranks with python3 -m "
            "hpctrain.elastic, or leave out HPCTRAIN_ENCRYPT=1"
        )
    match choose(backend, here):
        case "mpi":
            return MpiCommunicator(here)
        case "gloo" | "nccl" as name:
            return TorchCommunicator(name, here, environ)
        case "torch":
            return TorchCommunicator(None, here, environ)
        case _:
            return SingleCommunicator()


def choose(backend: str, here: RankInfo) -> str:
    """Return the backend for a launcher.

    `auto` is MPI under mpirun, else chosen by agreement of the ranks.
    """
    if backend not in BACKENDS:
        raise TrainError(f"cannot use backend {backend!r}: the known ones are {', '.join(BACKENDS)}")
    if backend == "single" and here.world > 1:
        raise TrainError(f"cannot use backend 'single': the launcher started {here.world} ranks")
    if backend != "auto":
        return backend
    match here.launcher:
        case LauncherKind.MPI:
            return "mpi"
        case LauncherKind.TORCH if here.world > 1:
            return "torch"
        case _:
            return "single"


__all__ = ["BACKENDS", "Communicator", "Work", "connect"]
