"""The room that one plan keeps for jobs that wait: what plans before it promised them, and what it promises itself.

A promise is a start, and what of which nodes the job gets then. With `conservative` a plan begins with all promises of the plan
before it, in the order of their starts, before anything else is given away. So none is put off while running jobs keep to
their limits: a job starts by then, or as soon as it fits beside the promises to the others, its own taken back.

If a job outlasts its limit, or is slow to end, a promise lies later for the time being, on its nodes; its start is
remembered as it was promised, so that a little time lost is not lost for good. A promise lapses if its job asks for something
else now or is kept waiting by other things, and if a node of its own has gone.

Source: Mu'alem and Feitelson, "Utilization, predictability, workloads, and user runtime estimates in scheduling the IBM SP2
with backfilling" (2001): conservative backfill. There freed room is given out in the order of arrival; here in the order of
the queue. Knows nothing of that order, nor of who starts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hpcsched.model.ids import JobId
from hpcsched.sched.limits.licenses import FreeLicenses
from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.request import LicenseCounts, ResourceRequest
from hpcsched.sched.place.reserved_intervals import NEVER_S, Closed, Interval
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.snapshot import PendingJob, Promise, PromisedPart, Snapshot, allows


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedSlot:
    """What is kept for a job over ``[start_s, end_s)``."""

    partition: str
    start_s: float
    end_s: float
    parts: Sequence[NodePart]
    licenses: LicenseCounts


class ReservedSlots:
    """The room that is kept in one plan, by job: for each job in one place. `promises` are those that hold after it."""

    def __init__(self, snapshot: Snapshot, timeline: Timeline, counted: FreeLicenses, closed: Closed) -> None:
        self.promises: dict[JobId, Promise] = {}
        self._snapshot = snapshot
        self._timeline = timeline
        self._counted = counted
        self._rooms: dict[JobId, ReservedSlot] = {}
        self._closed = closed

    def of(self, job: PendingJob) -> ReservedSlot | None:
        """Return what is kept for `job`, in whichever partition."""
        return self._rooms.get(job.id)

    def is_due(self, job_id: JobId) -> bool:
        """Say whether what is kept for the job is so from now on."""
        room = self._rooms.get(job_id)
        return room is not None and room.start_s <= self._timeline.now_s

    def in_the_way(self, job: PendingJob, nodes: Collection[int], until_s: float) -> list[JobId]:
        """Return for which other jobs something is kept on `nodes` before `until_s`, the first ones first."""
        rooms = sorted(self._rooms.items(), key=lambda item: item[1].start_s)
        return [
            job_id
            for job_id, room in rooms
            if job_id != job.id and room.start_s < until_s and any(part.node in nodes for part in room.parts)
        ]

    def keep(self, job: PendingJob, start_s: float, end_s: float, parts: Sequence[NodePart]) -> None:
        """Keep `parts` for `job`, for which nothing is kept yet."""
        for part in parts:
            self._timeline.reserve(part.node, start_s, end_s, part.use)
        self._counted.take(job.licenses, start_s, end_s)
        self._rooms[job.id] = ReservedSlot(
            partition=job.partition, start_s=start_s, end_s=end_s, parts=parts, licenses=job.licenses
        )

    def promise(self, job: PendingJob) -> None:
        """Have what is kept for `job` hold for the plans after this one."""
        room, timeline = self._rooms[job.id], self._timeline
        self.promises[job.id] = Promise(
            job_id=job.id,
            partition=job.partition,
            request=job.request,
            start_s=room.start_s,
            parts=tuple(
                [
                    PromisedPart(
                        timeline.nodes[part.node].name, part.tasks, part.use, timeline.types[part.node], part.component
                    )
                    for part in room.parts
                ]
            ),
        )

    def take_back(self, job_id: JobId) -> None:
        """Keep nothing for the job any more."""
        self.promises.pop(job_id, None)
        room = self._rooms.pop(job_id, None)
        if room is not None:
            for part in room.parts:
                self._timeline.take_back(part.node, room.start_s, room.end_s, part.use)
            self._counted.give(room.licenses, room.start_s, room.end_s)

    def put_aside(self, job_id: JobId) -> tuple[ReservedSlot, Promise | None] | None:
        """Keep nothing for the job for the time being; what is returned can be `put_back`."""
        room, promise = self._rooms.get(job_id), self.promises.get(job_id)
        self.take_back(job_id)
        return None if room is None else (room, promise)

    def put_back(self, job: PendingJob, aside: tuple[ReservedSlot, Promise | None]) -> ReservedSlot:
        """Keep again what was `put_aside`, and return it."""
        room, promise = aside
        for part in room.parts:
            self._timeline.reserve(part.node, room.start_s, room.end_s, part.use)
        self._counted.take(room.licenses, room.start_s, room.end_s)
        self._rooms[job.id] = room
        if promise is not None:
            self.promises[job.id] = promise
        return room

    def has_licenses(self, job: PendingJob, limit_s: float) -> bool:
        """Say whether the licences of `job` are free now, those that are kept for itself among them."""
        if not job.licenses:
            return True
        now_s, room, counted = self._timeline.now_s, self._rooms.get(job.id), self._counted
        if room is not None:
            counted.give(room.licenses, room.start_s, room.end_s)
        has = counted.earliest(job.licenses, limit_s, now_s) <= now_s
        if room is not None:
            counted.take(room.licenses, room.start_s, room.end_s)
        return has

    # ----- promises of the plan before

    def still_possible(
        self, job: PendingJob, promise: Promise, nodes: Collection[int], limit_s: float
    ) -> tuple[float, list[NodePart]] | None:
        """Return when `job` can have what it was promised, not before it was to, and its parts; None: not any more."""
        index, types = self._timeline.index, self._timeline.types
        parts = [
            NodePart(node=index.get(one.node, -1), tasks=one.tasks, use=one.use, component=one.component)
            for one in promise.parts
        ]
        if not _asks_alike(job.request, promise.request):
            return None
        for part, one in zip(parts, promise.parts, strict=True):
            if part.node not in nodes or types[part.node] != one.slots:
                return None
            if not allows(job.request.shape.each[part.component], self._snapshot.nodes[part.node]):
                return None
        start_s = self._free_from(job, parts, limit_s, max(promise.start_s, self._timeline.now_s))
        return (start_s, parts) if start_s < NEVER_S else None

    def _free_from(self, job: PendingJob, parts: Sequence[NodePart], limit_s: float, from_s: float) -> float:
        """Return from when on, `from_s` at the earliest, `job` can have just these parts and its licences."""
        closed, profiles = self._closed.to(job.reservation), self._timeline.profiles
        start_s = from_s
        while start_s < NEVER_S:
            found_s = start_s
            for part in parts:
                found_s = profiles[part.node].earliest(part.use, limit_s, found_s)
                found_s = _opens_s(closed.get(part.node, ()), limit_s, found_s)
            found_s = self._counted.earliest(job.licenses, limit_s, found_s)
            if found_s == start_s:
                break
            start_s = found_s
        return start_s


def _asks_alike(asked: ResourceRequest, promised: ResourceRequest) -> bool:
    """Say whether what was `promised` does for a job; how few switches it wants may have changed as it waited."""
    if asked is promised or asked == promised:
        return True
    return asked.time_limit_s == promised.time_limit_s and asked.shape == replace(promised.shape, switches=0)


def _opens_s(closed: Sequence[Interval], length_s: float, from_s: float) -> float:
    """Return from when on, `from_s` at the earliest, none of `closed` (ascending) is met for `length_s`."""
    for closed_s, opens_s in sorted(closed):
        if closed_s < from_s + length_s and opens_s > from_s:
            from_s = opens_s
    return from_s
