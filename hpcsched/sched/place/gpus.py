"""The GPUs of one node: pools of whole GPUs by type, and GPUs divided into shards.

The *slots* of a node are fixed. A vector of *units*, one number for each slot, has the free or the taken amounts. So resources
can be added, subtracted and compared without knowledge of units. In a pool, a unit is one GPU. A GPU with shards is a slot of
its own, and its units are the shards; a job that takes the whole GPU takes all shards.

Knows nothing of time, of jobs and of preferences among nodes. Source: gres.conf(5), sharing GRES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcsched.model.node import ANY_GPU, Gpu, Share
from hpcsched.sched.place.request import GpuCounts

Units = tuple[int, ...]


class GpuSlot(NamedTuple):
    """A pool of GPUs of one type (`gpu_index` -1), or one GPU in `shards` shards."""

    type: str
    shards: int = 1
    gpu_index: int = -1


class Grant(NamedTuple):
    """The GPUs that a job gets on a node.

    Whole GPUs are given by index; otherwise it is `shards` of the `shards_of` of one GPU.
    """

    gpus: tuple[int, ...] = ()
    shards: int = 0
    shards_of: int = 0


def gpu_slots(gpus: Sequence[Gpu]) -> tuple[GpuSlot, ...]:
    """Return the slots of a node with these GPUs, in their order."""
    return tuple(dict.fromkeys(_slot_of(gpu) for gpu in gpus))


def all_units(gpus: Sequence[Gpu], slots: tuple[GpuSlot, ...]) -> Units:
    """Return the units of an empty node."""
    counts = [0] * len(slots)
    for gpu in gpus:
        counts[slots.index(_slot_of(gpu))] += gpu.shards
    return tuple(counts)


def whole_gpus(slots: tuple[GpuSlot, ...], units: Units, kind: str = ANY_GPU) -> int:
    """Return how many whole GPUs of type `kind` the units are."""
    return sum([count // slot.shards for slot, count in zip(slots, units, strict=True) if kind in (ANY_GPU, slot.type)])


def gpus_taken(asked: GpuCounts, slots: tuple[GpuSlot, ...], free: Units) -> Units | None:
    """Return the units of `free` that give the whole GPUs `asked`; None if too few.

    GPUs without a named type come from one type if one has enough (the type with the fewest), else from several.
    """
    left = list(free)
    for kind, count in asked:  # named types come first
        for at in _slots_for(kind, count, slots, left):
            given = min(count, left[at] // slots[at].shards)
            left[at] -= given * slots[at].shards
            count -= given
        if count:
            return None
    return tuple([a - b for a, b in zip(free, left, strict=True)])


def has_gpus(asked: GpuCounts, slots: tuple[GpuSlot, ...], free: Units) -> bool:
    """Say whether `gpus_taken` finds the GPUs `asked`."""
    if len(asked) == 1:
        kind, count = asked[0]
        return whole_gpus(slots, free, kind) >= count
    return gpus_taken(asked, slots, free) is not None


def units_of(slots: tuple[GpuSlot, ...], at: int, count: int) -> Units:
    """Return `count` units of the slot with index `at`, and none of the others."""
    return tuple([count if slot == at else 0 for slot in range(len(slots))])


def shard_choices(asked: GpuCounts, slots: tuple[GpuSlot, ...], free: Units) -> list[int]:
    """Return the indices of the slots that can give the shards `asked`."""
    kind, count = asked[0]
    return [
        at
        for at, slot in enumerate(slots)
        if slot.gpu_index >= 0 and free[at] >= count and kind in (ANY_GPU, slot.type)
    ]


def _slot_of(gpu: Gpu) -> GpuSlot:
    return GpuSlot(gpu.type.lower(), gpu.shards, gpu.index) if gpu.shards > 1 else GpuSlot(gpu.type.lower())


def _slots_for(kind: str, count: int, slots: tuple[GpuSlot, ...], free: Sequence[int]) -> list[int]:
    """Return the indices of the slots from which `count` GPUs of `kind` are taken, in order."""
    every = range(len(slots))
    if kind != ANY_GPU:
        return [at for at in every if slots[at].type == kind]
    has: dict[str, int] = {}
    for at in every:
        has[slots[at].type] = has.get(slots[at].type, 0) + free[at] // slots[at].shards
    enough = [type_ for type_, number in has.items() if number >= count]
    if not enough:
        return list(every)
    best = min(enough, key=has.__getitem__)
    return [at for at in every if slots[at].type == best]


class FreeGpus:
    """The free GPUs of one node, by index."""

    __slots__ = ("_left", "_pool", "_slots")

    def __init__(self, gpus: Sequence[Gpu], slots: tuple[GpuSlot, ...]) -> None:
        self._slots = slots
        self._pool = {gpu.index: gpu.type.lower() for gpu in gpus if gpu.shards <= 1}
        self._left = {gpu.index: gpu.shards for gpu in gpus if gpu.shards > 1}

    def grant(self, units: Units) -> Grant:
        """Take `units`, and return their GPUs: those with the lowest indices."""
        if not any(units):
            return Grant()
        gpus: list[int] = []
        for slot, count in zip(self._slots, units, strict=True):
            if slot.gpu_index < 0:
                found = sorted(index for index, kind in self._pool.items() if kind == slot.type)[:count]
                for index in found:
                    del self._pool[index]
                gpus += found
            elif count:
                self._left[slot.gpu_index] -= count
                if count < slot.shards:
                    return Grant((slot.gpu_index,), count, slot.shards)
                gpus.append(slot.gpu_index)
        return Grant(tuple(sorted(gpus)))

    def hold(self, share: Share) -> Units:
        """Take the GPUs of `share`, and return their units.

        GPUs that the node no longer has count as none.
        """
        counts = [0] * len(self._slots)
        for at, slot in enumerate(self._slots):
            if slot.gpu_index < 0:
                for index in share.gpus:
                    if self._pool.get(index) == slot.type:
                        del self._pool[index]
                        counts[at] += 1
            elif slot.gpu_index in share.gpus:
                # If the GPU had another number of shards when the job got them, they count as the same part of it.
                part = -(-share.shards * slot.shards // share.shards_of) if share.shards else slot.shards
                counts[at] = min(part, self._left[slot.gpu_index])
                self._left[slot.gpu_index] -= counts[at]
        return tuple(counts)
