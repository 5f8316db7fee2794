"""What a node has and what a job holds of it: cpus, memory, GPUs by type, shards of GPUs.

Requests count GPUs by type; the indices of the GPUs that a job got are in its `Share`. A MIG device is a GPU
whose type is its profile (``1g.10gb``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpcsched.model.ids import NodeName

ANY_GPU = ""  # a request that does not name a type


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node: its index there (as nvidia-smi counts) and its type, e.g. ``a100``.

    With `shards` above 1 that many jobs, or fewer that take more of it, may share it; nothing keeps them from each other's
    part of its memory. `device` is what CUDA_VISIBLE_DEVICES calls it where that is not its index: ``MIG-<uuid>``.
    """

    index: int
    type: str
    shards: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """`count` GPUs (or shards of one GPU) of one type; `type` is ANY_GPU if the user named none."""

    count: int
    type: str = ANY_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of one node that one attempt of a job holds.

    With `shards` it holds so many of the `shards_of` shards of its one GPU; 0: its GPUs are its alone.
    """

    node: NodeName
    cpus: int
    mem_mib: int
    gpus: tuple[int, ...] = ()  # indices
    tasks: int = 1  # how many of the job's tasks run here by default
    shards: int = 0
    shards_of: int = 0
    component: int = 0  # of a heterogeneous job: whose node this is
    spool: str = ""  # into which the attempt is launched there; "": not known

    @property
    def gpu_amount(self) -> float:
        """Return how many GPUs it holds, shards as their part of one."""
        return self.shards / self.shards_of if self.shards else float(len(self.gpus))


def without_cpus(shares: Iterable[Share]) -> tuple[Share, ...]:
    """Return the shares of a job that is suspended so that another job has its cpus."""
    return tuple(replace(share, cpus=0) for share in shares)
