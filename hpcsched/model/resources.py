"""What a node has and what a job holds of it: cpus, memory, GPUs by type.

GPUs are counted by type here; which of a node's GPUs (their indices) a job got is part of its `Share`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.model.ids import NodeName

ANY_GPU = ""  # a request that does not name a type


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node: its index there (as nvidia-smi counts) and its type, e.g. ``a100``."""

    index: int
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """`count` GPUs of one type; `type` is ANY_GPU where the user named none."""

    count: int
    type: str = ANY_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of one node that one attempt of a job holds."""

    node: NodeName
    cpus: int
    mem_mib: int
    gpus: tuple[int, ...] = ()  # indices
    tasks: int = 1  # how many of the job's tasks run here by default
