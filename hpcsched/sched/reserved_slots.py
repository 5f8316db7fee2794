"""The slots that one pass reserves for waiting jobs: parts of nodes, and licences.

A job has at most one slot. A *promised* slot is kept in later passes too (see `promises`).

Knows nothing of the order and the starts of jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hpcsched.model.ids import JobId
from hpcsched.sched.limits.licenses import FreeLicenses
from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.request import LicenseCounts
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.snapshot import PendingJob, Promise, PromisedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedSlot:
    """Parts of nodes, and licences, that are reserved for a job over ``[start_s, end_s)``."""

    partition: str
    start_s: float
    end_s: float
    parts: Sequence[NodePart]
    licenses: LicenseCounts


class ReservedSlots:
    """The reserved slots of one pass, at most one for each job.

    `promises`: the slots that later passes keep.
    """

    def __init__(self, timeline: Timeline, licenses: FreeLicenses) -> None:
        self.promises: dict[JobId, Promise] = {}
        self._timeline = timeline
        self._licenses = licenses
        self._slots: dict[JobId, ReservedSlot] = {}

    def of(self, job: PendingJob) -> ReservedSlot | None:
        """Return the slot of `job`, in any of its partitions; None: it has none."""
        return self._slots.get(job.id)

    def is_due(self, job_id: JobId) -> bool:
        """Say whether the job has a slot that begins now."""
        slot = self._slots.get(job_id)
        return slot is not None and slot.start_s <= self._timeline.now_s

    def in_the_way(self, job: PendingJob, nodes: Collection[int], until_s: float) -> list[JobId]:
        """Return the other jobs with slots on `nodes` that begin before `until_s`.

        They are in the order of their starts.
        """
        slots = sorted(self._slots.items(), key=lambda item: item[1].start_s)
        return [
            job_id
            for job_id, slot in slots
            if job_id != job.id and slot.start_s < until_s and any(part.node in nodes for part in slot.parts)
        ]

    def reserve(self, job: PendingJob, start_s: float, end_s: float, parts: Sequence[NodePart]) -> None:
        """Reserve `parts` for `job`, which has no slot yet."""
        for part in parts:
            self._timeline.reserve(part.node, start_s, end_s, part.use)
        self._licenses.take(job.licenses, start_s, end_s)
        self._slots[job.id] = ReservedSlot(
            partition=job.partition, start_s=start_s, end_s=end_s, parts=parts, licenses=job.licenses
        )

    def promise(self, job: PendingJob) -> None:
        """Promise its slot to `job`, in later passes too."""
        slot, timeline = self._slots[job.id], self._timeline
        self.promises[job.id] = Promise(
            job_id=job.id,
            partition=job.partition,
            request=job.request,
            start_s=slot.start_s,
            parts=tuple([_promised_part(timeline, part) for part in slot.parts]),
        )

    def release(self, job_id: JobId) -> None:
        """Give up the slot of the job and its promise, if it has any."""
        self.promises.pop(job_id, None)
        slot = self._slots.pop(job_id, None)
        if slot is not None:
            for part in slot.parts:
                self._timeline.take_back(part.node, slot.start_s, slot.end_s, part.use)
            self._licenses.give(slot.licenses, slot.start_s, slot.end_s)

    def put_aside(self, job_id: JobId) -> tuple[ReservedSlot, Promise | None] | None:
        """Release the slot of the job until `put_back` reserves it again; None: it has none."""
        slot, promise = self._slots.get(job_id), self.promises.get(job_id)
        self.release(job_id)
        return None if slot is None else (slot, promise)

    def put_back(self, job: PendingJob, aside: tuple[ReservedSlot, Promise | None]) -> ReservedSlot:
        """Reserve the slot that `put_aside` returned again, and return it."""
        slot, promise = aside
        for part in slot.parts:
            self._timeline.reserve(part.node, slot.start_s, slot.end_s, part.use)
        self._licenses.take(slot.licenses, slot.start_s, slot.end_s)
        self._slots[job.id] = slot
        if promise is not None:
            self.promises[job.id] = promise
        return slot

    def has_licenses(self, job: PendingJob, limit_s: float) -> bool:
        """Say whether the licences of `job` are free now, including those of its own slot."""
        if not job.licenses:
            return True
        now_s, slot, licenses = self._timeline.now_s, self._slots.get(job.id), self._licenses
        if slot is not None:
            licenses.give(slot.licenses, slot.start_s, slot.end_s)
        has = licenses.earliest(job.licenses, limit_s, now_s) <= now_s
        if slot is not None:
            licenses.take(slot.licenses, slot.start_s, slot.end_s)
        return has


def _promised_part(timeline: Timeline, part: NodePart) -> PromisedPart:
    node = part.node
    return PromisedPart(timeline.nodes[node].name, part.tasks, part.use, timeline.types[node], part.component)
