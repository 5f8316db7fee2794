"""The state of one scheduling pass: where and when jobs fit, starts and reserved slots.

`plan` and the policies decide the order. `SchedulingPass` applies each decision to the nodes, the licences, the power, the limits
and the reserved slots, so that every later decision of the pass includes it. `Placement` says where and when a job fits: now,
later, or never. It combines nodes over time (`place.timeline`, `place.groups`), licences, power, reserved slots and run times.

Within one pass, free resources only shrink. So a shape that did not fit is not tried again, and the seats of a shape are
updated only on nodes with a new start. This makes passes over long queues cheap.

Run times: a job is expected to run until its time limit, a lowered limit, or an earlier end. If requests are not trusted
(see `experience.Needed`), a plan uses the predicted run times of jobs. Reserved intervals stay closed to every job with a
limit that reaches into them: such a job counts with its limit.

Reserved slots: parts of nodes, and licences, that one pass reserves for waiting jobs. A job has at most one slot. A *promised*
slot is kept in later passes too (see `plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.model.node import Partition, Share
from hpcsched.model.reservation import NEVER_S, Closed, Reservation, ReservedInterval
from hpcsched.model.units import MINUTE_S, known_limit_s
from hpcsched.sched.decisions import Plan, Start, Wait
from hpcsched.sched.energy import PowerCounts, no_power
from hpcsched.sched.experience import Needed
from hpcsched.sched.limits import LimitCounts
from hpcsched.sched.place.feasible import impossible_shape, never_fits
from hpcsched.sched.place.fragmentation import mix_of
from hpcsched.sched.place.groups import ComponentGroup, ShapeGroup, ShapeGroups
from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.request import LicenseCounts, Shape, with_overcommit
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.policy import Backfill, Guard, Policy
from hpcsched.sched.pool import Steps
from hpcsched.sched.queues import (
    PartitionQueue,
    PartitionQueues,
    certain_until_s,
    cut_short_s,
    wait_for_reservation,
)
from hpcsched.sched.sentences import listed, needs, plural
from hpcsched.sched.snapshot import NodeView, PendingJob, Promise, PromisedPart, Snapshot, allows
from hpcsched.sched.tres import Held, held_by, held_of

SUM_ERROR_S = 1e-6  # more than the rounding error of a sum of Unix times


class RunTimes:
    """The expected run times of the jobs of one pass."""

    def __init__(
        self,
        policy: Policy,
        reservations: Mapping[str, Reservation],
        blocks: Sequence[ReservedInterval] = (),
        needed: Needed | None = None,
    ) -> None:
        self._policy = policy
        self._reservations = reservations
        self._blocks = blocks
        self._needed = needed

    def limit_s(self, job: PendingJob) -> int:
        """Return the time limit of `job`, in seconds."""
        return known_limit_s(job.request.time_limit_s) or self._policy.default_time_limit_s

    def needed_s(self, job: PendingJob, start_s: float) -> float:
        """Return how long `job` needs if it starts at `start_s`, in seconds.

        That is its time limit, or less if requests are not trusted.
        """
        limit_s = self.limit_s(job)
        if self._needed is None or job.lowers or job.reservation:
            return limit_s
        end_s = start_s + limit_s
        if self._blocks and any(block.start_s < end_s and block.end_s > start_s for block in self._blocks):
            return limit_s
        return self._needed.length_s(job.uid, limit_s)

    def least_s(self, job: PendingJob, start_s: float) -> float:
        """Return the least length of a slot of `job`, in seconds.

        That is the time that the job needs, or ``--time-min`` if its time limit may be lowered.
        """
        if job.lowers and job.time_min_s is not None:
            return min(self.limit_s(job), job.time_min_s)
        return self.needed_s(job, start_s)

    def cut_s(self, job: PendingJob) -> float:
        """Return when `job` is cut short, regardless of its start; `NEVER_S`: never."""
        return NEVER_S if job.free_to_go else cut_short_s(job, self._reservations)

    def end_s(self, job: PendingJob, start_s: float, limit_s: float | None = None) -> float:
        """Return the expected end of `job` if it starts at `start_s`.

        The job ends after the time that it needs, or when it is cut short.
        """
        end_s = start_s + (self.needed_s(job, start_s) if limit_s is None else limit_s)
        cut_s = self.cut_s(job)
        return min(end_s, cut_s) if start_s < cut_s else end_s


# ----- jobs with a time limit that may be lowered (``--time-min``): the longest time that fits now
# As in Slurm: a slot is as long as the least time, and a job that starts gets as much more, in whole minutes, as leaves the
# slots of others untouched. Source: sbatch(1), --time-min.


Found = TypeVar("Found")


def longest(fits: Callable[[float], Found | None], least_s: float, most_s: float) -> tuple[Found, float] | None:
    """Return the result of `fits` for the latest end that fits, and that end.

    None: `fits` returns None even for `least_s`. Ends are `most_s`, or `least_s` plus whole
    minutes. A job that fits also fits for less time, so the end is found by bisection.
    """
    found = fits(most_s)
    if found is not None or most_s <= least_s:
        return None if found is None else (found, most_s)
    found = fits(least_s)
    if found is None:
        return None
    low, high = 0, ceil((most_s - least_s) / MINUTE_S)
    while high - low > 1:
        middle = (low + high) // 2
        more = fits(least_s + middle * MINUTE_S)
        if more is None:
            high = middle
        else:
            low, found = middle, more
    return found, least_s + low * MINUTE_S


class FreeLicenses:
    """Free licences over time: `totals` minus `held`, each until its time."""

    def __init__(self, now_s: float, totals: Mapping[str, int], held: Iterable[tuple[LicenseCounts, float]]) -> None:
        self._now_s = now_s
        self._steps = {name: Steps(now_s, count) for name, count in totals.items()}
        for counts, end_s in held:
            self.take(counts, now_s, end_s)

    def take(self, counts: Iterable[tuple[str, int]], start_s: float, end_s: float) -> None:
        """Take `counts` over ``[start_s, end_s)``."""
        for name, count in counts:
            if name in self._steps:
                self._steps[name].add(start_s, end_s, -count)

    def give(self, counts: LicenseCounts, start_s: float, end_s: float) -> None:
        """Give back `counts`, which were taken over ``[start_s, end_s)``."""
        self.take([(name, -count) for name, count in counts], start_s, end_s)

    def free_now(self) -> dict[str, int]:
        """Return the number of free licences now, by name."""
        return {name: steps.free[0] for name, steps in self._steps.items()}

    def earliest(self, counts: LicenseCounts, length_s: float, from_s: float) -> float:
        """Return the first time at or after `from_s` with `counts` free for `length_s`.

        `NEVER_S`: never.
        """
        start_s = from_s
        while True:
            found_s = start_s
            for name, count in counts:
                steps = self._steps.get(name)
                found_s = steps.earliest(count, length_s, found_s) if steps is not None else NEVER_S
            if found_s in (start_s, NEVER_S):
                return found_s
            start_s = found_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedSlot:
    """Parts of nodes, and licences, that are reserved for a job over ``[start_s, end_s)``.

    Watts of circuits are among the licences.
    """

    partition: str
    start_s: float
    end_s: float
    parts: Sequence[NodePart]
    licenses: LicenseCounts


class ReservedSlots:
    """The reserved slots of one pass, at most one for each job.

    `promises`: the slots that later passes keep.
    """

    def __init__(self, timeline: Timeline, licenses: FreeLicenses, power: PowerCounts) -> None:
        self.promises: dict[JobId, Promise] = {}
        self._timeline = timeline
        self._licenses = licenses
        self._power = power
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
        counts = self._power.counts_of(job, parts)
        self._licenses.take(counts, start_s, end_s)
        self._slots[job.id] = ReservedSlot(
            partition=job.partition, start_s=start_s, end_s=end_s, parts=parts, licenses=counts
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

    def has_licenses(self, job: PendingJob, counts: LicenseCounts, limit_s: float) -> bool:
        """Say whether `counts` of licences are free now, including those of its own slot."""
        if not counts:
            return True
        now_s, slot, licenses = self._timeline.now_s, self._slots.get(job.id), self._licenses
        if slot is not None:
            licenses.give(slot.licenses, slot.start_s, slot.end_s)
        has = licenses.earliest(counts, limit_s, now_s) <= now_s
        if slot is not None:
            licenses.take(slot.licenses, slot.start_s, slot.end_s)
        return has


def _promised_part(timeline: Timeline, part: NodePart) -> PromisedPart:
    node = part.node
    return PromisedPart(timeline.nodes[node].name, part.tasks, part.use, timeline.types[node], part.component)


class Placement:
    """The free resources in one pass, on nodes and of licences, and the reserved slots."""

    def __init__(self, snapshot: Snapshot, policy: Policy, needed: Needed | None) -> None:
        reservations = {reservation.name: reservation for reservation in snapshot.reservations}
        self.reservations = reservations
        self.timeline = Timeline(snapshot, policy, needed)
        self.queues = PartitionQueues(snapshot, reservations)
        self.run_times = RunTimes(policy, reservations, snapshot.reserved_intervals, needed)
        certain_s = certain_until_s(snapshot.reservations, snapshot.now_s)
        self.timeline.sure_until_s = min(self.timeline.sure_until_s, certain_s)
        self.closed, mix = Closed(snapshot.reserved_intervals, self.timeline.index), mix_of(snapshot)
        self.groups = ShapeGroups(snapshot, self.timeline, self.closed, mix)
        self._unreserved = ShapeGroups(snapshot, self.timeline, Closed((), self.timeline.index), mix)
        self.power = PowerCounts(snapshot.circuits, snapshot.nodes)
        self._total_licenses = {**dict(snapshot.ledger.accounting.licenses), **self.power.totals}
        held = [
            (self.power.held_by(job), self.timeline.end_of(job))
            for job in snapshot.running
            if job.licenses or self.power
        ]
        self.licenses = FreeLicenses(snapshot.now_s, self._total_licenses, held)
        self.slots = ReservedSlots(self.timeline, self.licenses, self.power)
        self._short_of_power: dict[JobId, LicenseCounts] = {}  # jobs that fit on nodes now: the power that they lack
        self._snapshot = snapshot
        self._never: dict[ShapeGroup | ComponentGroup, Wait | None] = {}
        self._most_free_cpus: dict[str, tuple[int, int]] = {}  # by partition: starts when computed, cpus

    def group(self, job: PendingJob) -> ShapeGroup | ComponentGroup:
        """Return the group of jobs of the same shape, partition and reservation."""
        return self.groups.of(job, self.queues.of(job).nodes)

    def has_licenses(self, job: PendingJob, end_s: float) -> bool:
        """Say whether the licences of `job` are free from now until `end_s`."""
        return not job.licenses or self.slots.has_licenses(job, job.licenses, end_s - self.timeline.now_s)

    def _with_power(self, job: PendingJob, parts: list[NodePart] | None, end_s: float) -> list[NodePart] | None:
        """Return `parts` if there is power for them from now until `end_s`, else None."""
        if parts is None or not self.power:
            return parts
        counts = self.power.of_parts(parts, job.gpu_power)
        if self.slots.has_licenses(job, counts, end_s - self.timeline.now_s):
            self._short_of_power.pop(job.id, None)
            return parts
        self._short_of_power[job.id] = counts
        return None

    def least_end_s(self, job: PendingJob, start_s: float) -> float:
        """Return the end of a slot for `job` if it starts at `start_s`."""
        return self.run_times.end_s(job, start_s, self.run_times.least_s(job, start_s))

    # ----- now

    def now(self, job: PendingJob, end_s: float) -> tuple[list[NodePart] | None, float]:
        """Return the parts of `job` if it starts now, and its end.

        The end is `end_s`, or earlier if the time limit may be lowered.
        """
        if job.lowers:
            return self._now_until(job, end_s)
        group = self.group(job)
        parts = group.place(end_s)
        if parts is None:
            slot = self.slots.of(job)
            if slot is not None and slot.partition == job.partition:
                parts = group.place_with(slot.parts, slot.start_s, end_s)
        return self._with_power(job, parts, end_s), end_s

    def offer(self, job: PendingJob) -> list[NodePart] | None:
        """Return the parts of one more job that is next in the queue; None if it waits."""
        end_s = self.least_end_s(job, self.timeline.now_s)
        return self._with_power(job, self.group(job).place(end_s), end_s) if self.has_licenses(job, end_s) else None

    def _now_until(self, job: PendingJob, end_s: float) -> tuple[list[NodePart] | None, float]:
        """Return the parts of `job` now, and the latest possible end, at most `end_s`.

        The time limit of the job may be lowered.
        """

        def fits(until_s: float) -> list[NodePart] | None:
            parts = self.group(job).place(until_s) if self.has_licenses(job, until_s) else None
            return self._with_power(job, parts, until_s)

        now_s, aside = self.timeline.now_s, self.slots.put_aside(job.id)  # it may get more than its own slot
        found = longest(fits, min(end_s, now_s + self.run_times.least_s(job, now_s)), end_s)
        if found is None and aside is not None:
            slot = self.slots.put_back(job, aside)
            if self.slots.is_due(job.id) and slot.partition == job.partition:
                return list(slot.parts), slot.end_s
        return found or (None, end_s)

    def is_full(self, job: PendingJob, queue: PartitionQueue) -> bool:
        """Say whether every node of the partition has too few free cpus for `job`.

        This is a cheap test.
        """
        starts, most = self._most_free_cpus.get(job.partition, (-1, 0))
        if starts != len(self.timeline.changed):
            most = max((self.timeline.profiles[node].rooms[0][0] for node in queue.nodes), default=0)
            self._most_free_cpus[job.partition] = (len(self.timeline.changed), most)
        return most < job.request.shape.cpus_least

    # ----- later

    def earliest(self, job: PendingJob, from_s: float = 0.0) -> tuple[float, list[NodePart]] | None:
        """Return the earliest start of `job`, at `from_s` or later, and its parts.

        Nodes and licences are free then. None: never.
        """
        from_s = max(self.timeline.now_s, from_s)
        found = self._earliest_for(job, self.run_times.least_s(job, from_s), from_s)
        cut_s = self.run_times.cut_s(job)
        if cut_s == NEVER_S or (found is not None and found[0] < cut_s):
            return found
        return self._earliest_until(job, from_s, cut_s) or found

    def earliest_beside_others(self, job: PendingJob) -> float | None:
        """Return the earliest start of `job` if its own reserved slot is given up.

        The slots of other jobs stay. None: never.
        """
        aside = self.slots.put_aside(job.id)
        found = self.earliest(job)
        if aside is not None:
            self.slots.put_back(job, aside)
        return found[0] if found is not None else None

    def sure(self, start_s: float | None) -> float | None:
        """Return `start_s` if it is certain, else None.

        It is uncertain if it depends on jobs without a limit or on distant reservations.
        """
        return start_s if start_s is not None and start_s < self.timeline.sure_until_s else None

    def _earliest_until(self, job: PendingJob, from_s: float, cut_s: float) -> tuple[float, list[NodePart]] | None:
        """Return the earliest start of `job` if it is cut short at `cut_s`, and its parts.

        The start is found by bisection, because nodes only get freer.
        """
        from_s = max(from_s, cut_s - self.run_times.least_s(job, from_s))
        profiles = [self.timeline.profiles[node] for node in self.group(job).nodes]
        later = {at_s for profile in profiles for at_s in profile.times_s if from_s < at_s < cut_s}
        times_s = [from_s, *sorted(later)]
        found = None
        low, high = 0, len(times_s)
        while low < high:
            middle = (low + high) // 2
            at_s = times_s[middle]
            here = self._earliest_for(job, cut_s - at_s - SUM_ERROR_S, at_s)
            if here is not None and here[0] == at_s:
                found, high = here, middle
            else:
                low = middle + 1
        return found

    def _earliest_for(self, job: PendingJob, limit_s: float, from_s: float) -> tuple[float, list[NodePart]] | None:
        """Return the earliest start of `job` with nodes, licences and power free for `limit_s`.

        The start is at `from_s` or later. None: never.
        """
        group = self.group(job)
        while True:
            found = group.earliest(limit_s, from_s)
            counts = self.power.counts_of(job, found[1]) if found is not None else ()
            if found is None or not counts:
                return found
            from_s = self.licenses.earliest(counts, limit_s, found[0])
            if from_s == NEVER_S:
                return None
            if from_s == found[0]:
                return found

    # ----- why not

    def never(self, job: PendingJob, queue: PartitionQueue) -> Wait | None:
        """Return the wait of a `job` that cannot start on the answering nodes.

        None: it can start once other jobs end.
        """
        group = self.group(job)
        if group not in self._never:
            nodes = [self._snapshot.nodes[node] for node in group.nodes]
            never = never_fits(group.shape, nodes)
            views = self.queues.open_to(queue) if never else ()
            self._never[group] = not_available(group.shape, queue.partition, views) if never else None
        return self._never[group]

    def short_of_licenses(self, job: PendingJob) -> Wait | None:
        """Return the wait of `job` if its licences are not free now; None: they are."""
        if self.has_licenses(job, self.least_end_s(job, self.timeline.now_s)):
            return None
        return no_licenses(job.licenses, self.licenses.free_now(), self._total_licenses)

    def short_of_power(self, job: PendingJob) -> Wait | None:
        """Return the wait of `job` if only power has kept it from starting; None: other things."""
        lacking = self._short_of_power.get(job.id)
        return None if lacking is None else no_power(lacking, self.licenses.free_now(), self._total_licenses)

    def wait_for_reservation(self, job: PendingJob, queue: PartitionQueue) -> Wait | None:
        """Return the wait of `job` if only reservations keep it from starting now.

        None: other jobs are in its way.
        """
        if not self._snapshot.reserved_intervals:
            return None
        end_s = self.least_end_s(job, self.timeline.now_s)
        group = self._unreserved.of(replace(job, reservation=""), queue.nodes)
        if not self.has_licenses(job, end_s) or group.place(end_s) is None:
            return None
        return wait_for_reservation(self._snapshot, job, group.nodes, end_s)


def not_available(shape: Shape, partition: Partition, nodes: Sequence[NodeView]) -> Wait:
    """Return the wait of a job that does not fit even if the answering nodes are empty."""
    never = impossible_shape(shape, nodes, partition)
    if never is not None:  # the configuration has changed since the submission
        return Wait(reason=Reason.NODES_UNAVAILABLE, detail=never)
    names = set(partition.nodes)
    present = [node for node in nodes if node.name in names]
    away = [f"{node.name} {node.why_not}" for node in present if not node.usable and allows(shape, node)]
    of = f"of the {plural(len(present), 'node')} of partition {partition.name!r}"
    return Wait(reason=Reason.NODES_UNAVAILABLE, detail=f"needs {needs(shape)}; {of} {listed(away)}")


def no_licenses(wanted: LicenseCounts, free: Mapping[str, int], there: Mapping[str, int]) -> Wait:
    """Return the wait for licences: their names, and how many of each are free."""
    unknown = [name for name, _ in wanted if name not in there]
    if unknown:
        return Wait(reason=Reason.LICENSES, detail=f"the cluster has no licence {unknown[0]!r} any more")
    short = [
        f"{count} of the {there[name]} licences {name}, of which {max(0, free[name])} are free now"
        for name, count in wanted
        if free[name] < count
    ]
    text = f"needs {listed(short)}" if short else "needs licences that are promised to a job before it"
    return Wait(reason=Reason.LICENSES, detail=text)


class SchedulingPass:
    """A pass over the queue.

    `starts` lists the jobs that it has started so far. `waits` has the wait of each other job.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.guard, self.needed = _guard_of(snapshot, policy)
        self.placement = Placement(snapshot, policy, self.needed)
        self.limits = LimitCounts(snapshot)
        self.starts: list[Start] = []
        self.waits: dict[JobId, Wait] = {}
        self.priorities: dict[JobId, int] = {}
        self.started_ids: set[JobId] = set()  # started out of turn: by promise, by the policy, or by another plan
        self.starts_are_final = False  # all starts are decided; only the reasons of waiting jobs are missing
        self.looked_at = 0
        self._late_ids: set[JobId] = set()  # their slot begins after their latest start
        self._failed_tries = 0  # behind a head

    @property
    def queues(self) -> PartitionQueues:
        return self.placement.queues

    @property
    def run_times(self) -> RunTimes:
        return self.placement.run_times

    def result(self) -> Plan:
        """Return the plan, once the pass is over."""
        promises = self.placement.slots.promises
        return Plan(starts=tuple(self.starts), waits=self.waits, priorities=self.priorities, promises=promises)

    # ----- start

    def start_if_it_fits(self, job: PendingJob, *, first: bool = True) -> bool:
        """Start `job` if it fits now, and say whether it starts.

        If the job can never start on the answering nodes, that is recorded. The search is shorter
        for jobs behind a head and for jobs that are not the `first` to be tried.
        """
        placement, depth = self.placement, self.policy.backfill_depth
        queue = placement.queues.of(job)
        is_behind_head = queue.head is not None or not first
        hopeless = is_behind_head and not placement.slots.is_due(job.id) and self._is_hopeless(job, queue)
        if hopeless and 0 < depth <= len(placement.groups):
            return False
        parts: list[NodePart] | None = None
        end_s = placement.run_times.end_s(job, placement.timeline.now_s)
        if not hopeless and (job.lowers or placement.has_licenses(job, end_s)):
            parts, end_s = placement.now(job, end_s)
            self._failed_tries += parts is None and is_behind_head
        if parts is not None:
            return self.give(job, parts, end_s)
        never = placement.never(job, queue)
        if never is not None:
            self.waits[job.id] = never
        return False

    def start_now(self, job: PendingJob) -> bool:
        """Start `job`, regardless of its place in the queue; say whether it starts.

        It starts if it fits beside the slots of other jobs.
        """
        self.looked_at += 1
        self.waits.pop(job.id, None)
        wait = self.limits.why_not(job)
        if wait is not None:
            self.waits[job.id] = wait
        elif self.start_if_it_fits(job, first=False):
            self.started_ids.add(job.id)
            return True
        return False

    def give(self, job: PendingJob, parts: list[NodePart], end_s: float) -> bool:
        """Start `job` on `parts` until `end_s`; else record its wait.

        The job gets fewer nodes if its limits require that.
        """
        limits = self.limits
        held = self._held(job, parts) if limits.limited else {}
        breach = limits.why_not_there(job, held)
        while breach is not None and _can_do_with_less(job, parts):
            parts = parts[:-1]
            held = self._held(job, parts)
            breach = limits.why_not_there(job, held)
        if breach is not None:
            self.waits[job.id] = breach
            return False
        self._start(job, parts, held, end_s)
        return True

    def absorb(self, start: Start, job: PendingJob) -> None:
        """Add `job`, which another plan of a newer snapshot has started meanwhile."""
        placement, timeline = self.placement, self.placement.timeline
        end_s = placement.run_times.end_s(job, timeline.now_s, start.time_limit_s)
        placement.slots.release(job.id)
        for share in start.shares:
            timeline.absorb(share, end_s)
        nodes = {share.node: self.snapshot.nodes[timeline.index[share.node]] for share in start.shares}
        self.limits.started(job, held_by(start.shares, nodes, job.licenses) if self.limits.limited else {})
        placement.licenses.take(job.licenses, timeline.now_s, end_s)
        placement.licenses.take(placement.power.of_shares(start.shares, job.gpu_power), timeline.now_s, end_s)
        self.started_ids.add(job.id)

    def _start(self, job: PendingJob, parts: list[NodePart], held: Held, end_s: float) -> None:
        """Start `job` on `parts` until `end_s`, and update nodes, licences and limits."""
        placement, now_s = self.placement, self.placement.timeline.now_s
        placement.slots.release(job.id)
        shares = tuple([self._take(part, end_s) for part in parts])
        shares = with_overcommit(job.request.shape, shares)
        asked_s = placement.run_times.limit_s(job)
        limit_s = round(end_s - now_s) if job.lowers else asked_s
        time_limit_s = limit_s if limit_s < asked_s else None
        self.starts.append(Start(job_id=job.id, shares=shares, partition=job.partition, time_limit_s=time_limit_s))
        self.limits.started(job, held)
        placement.licenses.take(placement.power.counts_of(job, parts), now_s, end_s)

    def _take(self, part: NodePart, end_s: float) -> Share:
        grant = self.placement.timeline.start(part.node, end_s, part.use)
        name = self.snapshot.nodes[part.node].name
        cpus, mem_mib, _ = part.use
        return Share(
            node=name, cpus=cpus, mem_mib=mem_mib, tasks=part.tasks, component=part.component, **grant._asdict()
        )

    def short_of(self, job: PendingJob) -> Wait | None:
        """Return the wait of `job` if it lacks licences or power now; None: it does not."""
        return self.placement.short_of_licenses(job) or self.placement.short_of_power(job)

    def _held(self, job: PendingJob, parts: list[NodePart]) -> Held:
        """Return the resources of `job` with these parts, under the names of limits."""
        types = self.placement.timeline.types
        return held_of([(*part.use, types[part.node]) for part in parts], job.licenses)

    def _is_hopeless(self, job: PendingJob, queue: PartitionQueue) -> bool:
        """Say whether a job behind a head cannot start, or the search has reached its limit.

        This is a cheap test.
        """
        depth = self.policy.backfill_depth
        if self.policy.backfill is Backfill.NONE or 0 < depth <= self._failed_tries:
            return True
        return self.placement.is_full(job, queue)

    # ----- reserve

    def reserve(self, job: PendingJob, *, firm: bool = False, from_s: float = 0.0) -> float | None:
        """Reserve a slot for `job` at its earliest start; return the start, None if not here.

        The start is not before `from_s`. An existing slot stays, unless the job fits earlier in
        this partition. A `firm` slot is promised to later plans.
        """
        placement = self.placement
        slot = placement.slots.of(job)
        if slot is not None and slot.partition == job.partition:
            return placement.earliest_beside_others(job) if job.id in self._late_ids else slot.start_s
        found = placement.earliest(job, from_s)
        if found is None or (slot is not None and slot.start_s <= found[0]):
            return None
        start_s, parts = found
        placement.slots.release(job.id)
        placement.slots.reserve(job, start_s, placement.least_end_s(job, start_s), parts)
        if firm and placement.sure(start_s) is not None:
            placement.slots.promise(job)
        return start_s

    def reserve_from(self, job: PendingJob, from_s: float) -> bool:
        """Reserve a slot for `job` at `from_s` or later; say whether it has a slot.

        The slot begins at the first time from `from_s` on at which the job fits.
        """
        if job.id in self.started_ids or job.id in self.waits or self.limits.why_not(job) is not None:
            return False
        if from_s > self.placement.timeline.now_s:
            self._late_ids.add(job.id)
        return self.reserve(job, from_s=from_s) is not None

    # ----- questions about one more job

    def offer(self, job: PendingJob) -> list[NodePart] | None:
        """Return the parts of one more job that is next in the queue; None if it waits."""
        if self.queues.of(job).head is not None and self.policy.backfill is Backfill.NONE:
            return None
        if self.limits.why_not(job) is not None:
            return None
        parts = self.placement.offer(job)
        if parts is not None and self.limits.limited:
            return parts if self.limits.why_not_there(job, self._held(job, parts)) is None else None
        return parts

    def expected(self, job: PendingJob) -> tuple[float, list[NodePart]] | None:
        """Return the earliest start of one more job that is next in the queue, and its parts.

        None: the start is not known.
        """
        parts = self.offer(job)
        if parts is not None:
            return self.placement.timeline.now_s, parts
        found = self.placement.earliest(job)
        return found if found is not None and self.placement.sure(found[0]) is not None else None


def _can_do_with_less(job: PendingJob, parts: list[NodePart]) -> bool:
    """Say whether `job` may start without its last node.

    It has ``--nodes=MIN-MAX``, and all its nodes have equal shares.
    """
    shape = job.request.shape
    return len(parts) > shape.nodes_min and shape.ntasks is None and not (shape.gpus_total or shape.nodelist)


def _guard_of(snapshot: Snapshot, policy: Policy) -> tuple[Guard, Needed | None]:
    """Return the guard of a pass, and the expected run times if requests are not trusted."""
    guard, experience = policy.guard, snapshot.experience
    if policy.backfill is not Backfill.DEFAULT or not guard.distrusts(experience.request_use):
        return guard, None
    return guard.where_distrusted(), Needed(experience.longest_runs_s, guard.distrust_times)
