"""Where and when a job fits in a scheduling pass: now, later, or never.

Combines nodes over time (`place.timeline`, `place.groups`), licences, reserved slots and run times.
This module only answers questions. `scheduling_pass` applies starts and reservations.

Knows nothing of order, limits and policies.
"""

from __future__ import annotations

from dataclasses import replace

from hpcsched.sched.decisions import Wait
from hpcsched.sched.explain.reasons import no_licenses, not_available
from hpcsched.sched.guard.predict import Needed
from hpcsched.sched.limits.licenses import FreeLicenses
from hpcsched.sched.place.feasible import never_fits
from hpcsched.sched.place.fragmentation import mix_of
from hpcsched.sched.place.groups import ComponentGroup, ShapeGroup, ShapeGroups
from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.reserved_intervals import NEVER_S, Closed
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.policy import Policy
from hpcsched.sched.queue.queues import PartitionQueue, PartitionQueues
from hpcsched.sched.queue.reservations import certain_until_s, wait_for_reservation
from hpcsched.sched.reserved_slots import ReservedSlots
from hpcsched.sched.run_time import RunTimes, longest
from hpcsched.sched.snapshot import PendingJob, Snapshot

SUM_ERROR_S = 1e-6  # more than the rounding error of a sum of Unix times


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
        self._total_licenses = dict(snapshot.ledger.accounting.licenses)
        held = [(job.licenses, self.timeline.end_of(job)) for job in snapshot.running if job.licenses]
        self.licenses = FreeLicenses(snapshot.now_s, self._total_licenses, held)
        self.slots = ReservedSlots(self.timeline, self.licenses)
        self._snapshot = snapshot
        self._never: dict[ShapeGroup | ComponentGroup, Wait | None] = {}
        self._most_free_cpus: dict[str, tuple[int, int]] = {}  # by partition: starts when computed, cpus

    def group(self, job: PendingJob) -> ShapeGroup | ComponentGroup:
        """Return the group of jobs of the same shape, partition and reservation."""
        return self.groups.of(job, self.queues.of(job).nodes)

    def has_licenses(self, job: PendingJob, end_s: float) -> bool:
        """Say whether the licences of `job` are free from now until `end_s`."""
        return not job.licenses or self.slots.has_licenses(job, end_s - self.timeline.now_s)

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
        return parts, end_s

    def offer(self, job: PendingJob) -> list[NodePart] | None:
        """Return the parts of one more job that is next in the queue; None if it waits."""
        end_s = self.least_end_s(job, self.timeline.now_s)
        return self.group(job).place(end_s) if self.has_licenses(job, end_s) else None

    def _now_until(self, job: PendingJob, end_s: float) -> tuple[list[NodePart] | None, float]:
        """Return the parts of `job` now, and the latest possible end, at most `end_s`.

        The time limit of the job may be lowered.
        """

        def fits(until_s: float) -> list[NodePart] | None:
            return self.group(job).place(until_s) if self.has_licenses(job, until_s) else None

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
        """Return the earliest start of `job` with nodes and licences free for `limit_s`.

        The start is at `from_s` or later. None: never.
        """
        group = self.group(job)
        while True:
            found = group.earliest(limit_s, from_s)
            if found is None or not job.licenses:
                return found
            from_s = self.licenses.earliest(job.licenses, limit_s, found[0])
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
