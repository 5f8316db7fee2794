"""The plan: which waiting jobs start now and on what, and why each of the others waits.

Jobs are looked at in order (see `priority`). One that fits starts. The first of a partition that does not fit is its
*head*: it gets a reservation at the earliest time at which it will fit if every running job lasts to its limit (its *shadow
time*). With EASY backfill a later job may start if it fits now and leaves every reservation untouched: it ends before, or
takes what the heads do not need. On one pool of equal processors this is EASY as Lifka and Feitelson define it, job by job.
`easy-sjbf` tries the later ones shortest first; `conservative` and `slurm-like` reserve for more than the heads; with `default`
`guard` decides who starts, and who is promised what. Without backfill nothing behind a head starts on the nodes of its partition.

Within one plan free resources only dwindle. So a shape that did not fit need not be tried again, and the seats
of a shape on the nodes are kept and only mended where something started: that makes large queues cheap.

Pure and deterministic: equal snapshot and policy give an equal plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpcsched.model.ids import JobId
from hpcsched.model.job import Hold, Reason
from hpcsched.model.resources import Share
from hpcsched.sched.decisions import Plan, Start
from hpcsched.sched.explain.reasons import behind_head, no_licenses, not_available, shortfall
from hpcsched.sched.guard.on_nodes import guarded, trusting
from hpcsched.sched.limits.licenses import FreeLicenses
from hpcsched.sched.limits.quota import LimitCounts
from hpcsched.sched.limits.tres import Held, held_by, held_of
from hpcsched.sched.place.feasible import never_fits
from hpcsched.sched.place.fragmentation import mix_of
from hpcsched.sched.place.groups import ComponentGroup, ShapeGroup, ShapeGroups
from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.request import LicenseCounts, with_overcommit
from hpcsched.sched.place.reserved_intervals import NEVER_S, Closed
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.queue.eligible import Wait
from hpcsched.sched.queue.priority import putting_in_order, scale_of
from hpcsched.sched.queue.queues import PartitionQueue, PartitionQueues, those_in_line
from hpcsched.sched.queue.reservations import certain_until_s, kept_by
from hpcsched.sched.reserved_slots import ReservedSlots
from hpcsched.sched.run_time import RunTimes, longest
from hpcsched.sched.snapshot import PendingJob, Snapshot

_SUM_ERROR_S = 1e-6  # more than sums of Unix times are off by


def plan(snapshot: Snapshot, policy: Policy) -> Plan:
    """Return what to start now, and why the rest waits."""
    return Planner(snapshot, policy).plan()


class Planner:
    """One plan being made, in `steps` for those who have little time at once; `starts` has what it has started so far.

    Afterwards it can be asked what further jobs would get (`offer`, `expected`).
    """

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.guard, self.needed = trusting(snapshot, policy)
        self.timeline = Timeline(snapshot, policy, self.needed)
        self.starts: list[Start] = []
        self.waits: dict[JobId, Wait] = {}
        self.priorities: dict[JobId, int] = {}
        self.reservations = {one.name: one for one in snapshot.reservations}
        self.lanes = PartitionQueues(snapshot, self.reservations)
        self.lasting = RunTimes(policy, self.reservations, snapshot.reserved_intervals, self.needed)
        certain_s = certain_until_s(snapshot.reservations, snapshot.now_s)
        self.timeline.sure_until_s = min(self.timeline.sure_until_s, certain_s)
        closed, mix = Closed(snapshot.reserved_intervals, self.timeline.index), mix_of(snapshot)
        self.groups = ShapeGroups(snapshot, self.timeline, closed, mix)
        # Where jobs would fit but for reservations.
        self.unreserved = ShapeGroups(snapshot, self.timeline, Closed((), self.timeline.index), mix)
        self.never: dict[ShapeGroup | ComponentGroup, Wait | None] = {}
        self.tally = LimitCounts(snapshot)
        self.counted = FreeLicenses(snapshot.now_s, dict(snapshot.ledger.accounting.licenses), self._held_licenses())
        self.kept = ReservedSlots(snapshot, self.timeline, self.counted, closed)
        self.keeps_promises = policy.backfill is Backfill.CONSERVATIVE
        self.in_vain = 0
        self.late: set[JobId] = set()  # for these room is kept for later than they may start
        self.decided = False  # who starts: what is left is to say why the others wait
        # So many jobs of each partition are promised a start: the head, and with some policies more.
        self.promises = {
            Backfill.CONSERVATIVE: policy.conservative_depth,
            Backfill.SLURM_LIKE: policy.promises,
        }.get(policy.backfill, 1)
        self.several = {job.id for job in snapshot.pending if job.others}
        self.placed: set[JobId] = set()  # of these, those that have been started in their turn
        self.most_free_cpus: dict[str, tuple[int, int]] = {}
        self.looked_at = 0
        self.steps = self._make()
        self.gone: set[JobId] = (
            set()
        )  # what has been started before its turn, because that was promised or by another plan

    def plan(self) -> Plan:
        """Take all steps that are left, and return the plan."""
        for _ in self.steps:
            pass
        return Plan(
            starts=tuple(self.starts), waits=self.waits, priorities=self.priorities, promises=self.kept.promises
        )

    def _make(self) -> Iterator[None]:
        """Make the plan; each step takes a few milliseconds at most, but to sort a long queue."""
        eligible = yield from those_in_line(self.snapshot, self.policy, self.reservations, self.waits)
        scale = scale_of(self.snapshot)
        in_line = {job.id for job in eligible}
        others = [job for job in self.snapshot.pending if job.id not in in_line and job.hold is Hold.NONE]
        if others:  # begin time, dependency, limits: they have a priority all the same
            yield from putting_in_order(others, self.snapshot.partitions, scale, self.policy, self.priorities)
        queue = yield from putting_in_order(eligible, self.snapshot.partitions, scale, self.policy, self.priorities)
        yield from self._keep_promises(queue)
        if self.policy.backfill is Backfill.DEFAULT:
            yield from guarded(self, queue)
            self.decided = True
        behind: list[PendingJob] = []
        later: list[PendingJob] = []
        for job in queue:
            if self.policy.backfill is Backfill.EASY_SJBF and self.lanes.of(job).head is not None:
                later.append(job)
            else:
                self._look_at(job, behind)
                yield
        for job in sorted(later, key=self.lasting.limit_s):  # stable: equals stay in their order
            self._look_at(job, behind)
            yield
        for job in behind:  # give them an expected start, as if each had a reservation
            if job.id in self.waits:  # else it has started since, in another of its partitions
                self._expect(job, firm=False)
                yield

    def absorb(self, start: Start, job: PendingJob) -> None:
        """Take account of `job`, which another plan with a younger view of the world has started meanwhile."""
        now_s = self.timeline.now_s
        end_s = self.lasting.end_s(job, now_s, start.time_limit_s)
        self.kept.take_back(job.id)
        for share in start.shares:
            self.timeline.absorb(share, end_s)
        nodes = {share.node: self.snapshot.nodes[self.timeline.index[share.node]] for share in start.shares}
        self.tally.started(job, held_by(start.shares, nodes, job.licenses) if self.tally.limited else {})
        self.counted.take(job.licenses, now_s, end_s)
        self.gone.add(job.id)

    def _look_at(self, job: PendingJob, behind: list[PendingJob]) -> None:
        """Start `job`, or note why it waits. One that asked for several partitions is looked at in each."""
        self.looked_at += 1
        if job.id in self.gone:
            return
        if self.several and job.id in self.several:
            self._look_again(job, behind)
        else:
            self._look_once(job, behind)

    def _look_again(self, job: PendingJob, behind: list[PendingJob]) -> None:
        """Look at a job in one of its partitions; of two waits the one that ends earlier is kept."""
        if job.id in self.placed:
            return
        before = self.waits.pop(job.id, None)
        self._look_once(job, behind)
        after = self.waits.get(job.id)
        if after is None:
            self.placed.add(job.id)
        elif before is not None:
            self.waits[job.id] = min(before, after, key=_hope)

    def _look_once(self, job: PendingJob, behind: list[PendingJob]) -> None:
        wait = self.tally.why_not(job)
        if wait is not None:
            self.waits[job.id] = wait
        elif (self.decided or not self._start_if_it_fits(job)) and job.id not in self.waits:
            self._queue(job, behind)

    def start_now(self, job: PendingJob) -> bool:
        """Start `job`, wherever it stands in line, if it fits and touches no promise but its own; say whether it does."""
        self.looked_at += 1
        self.waits.pop(job.id, None)
        wait = self.tally.why_not(job)
        if wait is not None:
            self.waits[job.id] = wait
        elif self._start_if_it_fits(job, first=False):
            self.gone.add(job.id)
            return True
        return False

    def keep_from(self, job: PendingJob, from_s: float) -> bool:
        """Keep room for `job` from the first time at or after `from_s` at which it fits; say whether something is kept for it."""
        if job.id in self.gone or job.id in self.waits or self.tally.why_not(job) is not None:
            return False
        if from_s > self.timeline.now_s:
            self.late.add(job.id)
        return self._reserve(job, from_s=from_s) is not None

    def _keep_promises(self, queue: Sequence[PendingJob]) -> Iterator[None]:
        """Keep what was promised by the plan before to those of `queue`; start what is due."""
        promises = self.snapshot.promises.values() if self.keeps_promises else ()
        views = {(job.id, job.partition): job for job in queue} if promises else {}
        for promise in sorted(promises, key=lambda promise: (promise.start_s, promise.job_id)):
            job = views.get((promise.job_id, promise.partition))
            if job is None or job.id in self.gone or self.tally.why_not(job) is not None:
                continue
            due_s = max(promise.start_s, self.timeline.now_s)
            limit_s = self.lasting.end_s(job, due_s, self.lasting.least_s(job, due_s)) - due_s
            found = self.kept.still_possible(job, promise, self.lanes.nodes_of(job), limit_s)
            if found is not None:
                start_s, parts = found
                end_s = self.lasting.end_s(job, start_s, self.lasting.least_s(job, start_s))
                if end_s > start_s + limit_s + _SUM_ERROR_S:
                    pass  # it was to be cut short by a reservation, and is late for that
                elif (
                    start_s <= self.timeline.now_s and not job.lowers
                ):  # that one is looked at in its turn: it may get more
                    if self._give(job, parts, end_s):
                        self.gone.add(job.id)
                elif self._sure(start_s) is not None:
                    self.kept.keep(job, start_s, end_s, parts)
                    self.kept.promises[job.id] = promise
            yield

    def offer(self, job: PendingJob) -> list[NodePart] | None:
        """Return what one more job would get now if it came next; None: it would wait."""
        if self.lanes.of(job).head is not None and self.policy.backfill is Backfill.NONE:
            return None
        end_s = self.lasting.end_s(job, self.timeline.now_s, self._least_s(job))
        if self.tally.why_not(job) is not None or not self._has_licenses(job, end_s):
            return None
        parts = self._group(job).place(end_s)
        if parts is None or (self.tally.limited and self.tally.why_not_there(job, self._held(job, parts)) is not None):
            return None
        return parts

    def expected(self, job: PendingJob) -> tuple[float, list[NodePart]] | None:
        """Return when one more job that came next can start at the earliest, and on what; None: not known."""
        parts = self.offer(job)
        if parts is not None:
            return self.timeline.now_s, parts
        found = self._earliest(job)
        return found if found is not None and found[0] < self.timeline.sure_until_s else None

    # ----- does it start

    def _start_if_it_fits(self, job: PendingJob, *, first: bool = True) -> bool:
        """Start `job` if it fits now; if it does not and never will on the nodes that answer, note that.

        We look less far for those behind a head, and for those that are not `first` to be tried.
        """
        lane = self.lanes.of(job)
        behind = lane.head is not None or not first
        due = self.kept.is_due(job.id)
        hopeless = behind and not due and self._is_hopeless(job, lane)
        if hopeless and 0 < self.policy.backfill_depth <= len(self.groups):
            return False
        group = self._group(job)
        end_s = self.lasting.end_s(job, self.timeline.now_s)
        parts = None
        if not hopeless and job.lowers:
            parts, end_s = self._lowered(job, end_s)
            self.in_vain += parts is None and behind
        elif not hopeless and self._has_licenses(job, end_s):
            parts = group.place(end_s)
            room = self.kept.of(job)
            if parts is None and room is not None and room.partition == job.partition:
                parts = group.place_with(room.parts, room.start_s, end_s)
            self.in_vain += parts is None and behind
        if parts is None:
            never = self._never(group, lane)
            if never is not None:
                self.waits[job.id] = never
            return False
        return self._give(job, parts, end_s)

    def _lowered(self, job: PendingJob, end_s: float) -> tuple[list[NodePart] | None, float]:
        """Return what `job`, whose time limit may be lowered, would get now, and until when: `end_s` or less."""

        def fits(until_s: float) -> list[NodePart] | None:
            return self._group(job).place(until_s) if self._has_licenses(job, until_s) else None

        now_s, kept = self.timeline.now_s, self.kept.put_aside(job.id)  # it may have more than is kept for it
        found = longest(fits, min(end_s, now_s + self.lasting.least_s(job, now_s)), end_s)
        if found is None and kept is not None:
            room = self.kept.put_back(job, kept)
            if self.kept.is_due(job.id) and room.partition == job.partition:
                return list(room.parts), room.end_s
        return found or (None, end_s)

    def _give(self, job: PendingJob, parts: list[NodePart], end_s: float) -> bool:
        """Start `job` on `parts` until `end_s`, or with fewer nodes, if its limits allow that; else note why not."""
        held = self._held(job, parts) if self.tally.limited else {}
        over = self.tally.why_not_there(job, held)
        while over is not None and self._can_do_with_less(job, parts):
            parts = parts[:-1]
            held = self._held(job, parts)
            over = self.tally.why_not_there(job, held)
        if over is not None:
            self.waits[job.id] = over
            return False
        self._start(job, parts, held, end_s)
        return True

    def _can_do_with_less(self, job: PendingJob, parts: list[NodePart]) -> bool:
        """Say whether `job` may start without its last node: with ``--nodes=MIN-MAX`` and each node's share alike."""
        shape = job.request.shape
        return len(parts) > shape.nodes_min and shape.ntasks is None and not (shape.gpus_total or shape.nodelist)

    def _held(self, job: PendingJob, parts: list[NodePart]) -> Held:
        """Return what `job` would have with these parts, in the names of limits."""
        return held_of([(*part.use, self.timeline.types[part.node]) for part in parts], job.licenses)

    def _start(self, job: PendingJob, parts: list[NodePart], held: Held, end_s: float) -> None:
        """Start `job` on `parts` until `end_s`, and count what it takes of all that is counted."""
        self.kept.take_back(job.id)
        shares = tuple([self._take(part, end_s) for part in parts])
        shares = with_overcommit(job.request.shape, shares)
        lowered_s = round(end_s - self.timeline.now_s) if job.lowers else self.lasting.limit_s(job)
        limit_s = lowered_s if lowered_s < self.lasting.limit_s(job) else None
        self.starts.append(Start(job_id=job.id, shares=shares, partition=job.partition, time_limit_s=limit_s))
        self.tally.started(job, held)
        if job.licenses:
            self.counted.take(job.licenses, self.timeline.now_s, end_s)

    def _least_s(self, job: PendingJob) -> float:
        return self.lasting.least_s(job, self.timeline.now_s)

    def _has_licenses(self, job: PendingJob, end_s: float) -> bool:
        return not job.licenses or self.kept.has_licenses(job, end_s - self.timeline.now_s)

    def _short_of_licenses(self, job: PendingJob) -> Wait | None:
        """Return that `job` waits for licences, if it does."""
        if self._has_licenses(job, self.lasting.end_s(job, self.timeline.now_s, self._least_s(job))):
            return None
        return no_licenses(job.licenses, self.counted.free_now(), dict(self.snapshot.ledger.accounting.licenses))

    def _held_licenses(self) -> list[tuple[LicenseCounts, float]]:
        return [(job.licenses, self.timeline.end_of(job)) for job in self.snapshot.running if job.licenses]

    def _is_hopeless(self, job: PendingJob, lane: PartitionQueue) -> bool:
        """Say cheaply of a job behind a head that it cannot start, or that we have looked far enough."""
        if self.policy.backfill is Backfill.NONE or 0 < self.policy.backfill_depth <= self.in_vain:
            return True
        known, most = self.most_free_cpus.get(job.partition, (-1, 0))
        if known != len(self.timeline.changed):
            most = max((self.timeline.profiles[at].rooms[0][0] for at in lane.nodes), default=0)
            self.most_free_cpus[job.partition] = (len(self.timeline.changed), most)
        return most < job.request.shape.cpus_least

    def _group(self, job: PendingJob) -> ShapeGroup | ComponentGroup:
        return self.groups.of(job, self.lanes.of(job).nodes)

    def _never(self, group: ShapeGroup | ComponentGroup, lane: PartitionQueue) -> Wait | None:
        """Return why jobs of `group` cannot start on the nodes that answer, whatever ends; None: in time they can."""
        if group not in self.never:
            nodes = [self.snapshot.nodes[at] for at in group.nodes]
            never = never_fits(group.shape, nodes)
            self.never[group] = not_available(group.shape, lane.partition, self.lanes.open_to(lane)) if never else None
        return self.never[group]

    def _take(self, part: NodePart, end_s: float) -> Share:
        grant = self.timeline.start(part.node, end_s, part.use)
        name = self.snapshot.nodes[part.node].name
        return Share(
            node=name,
            cpus=part.use[0],
            mem_mib=part.use[1],
            tasks=part.tasks,
            component=part.component,
            **grant._asdict(),
        )

    # ----- why it waits

    def _queue(self, job: PendingJob, behind: list[PendingJob]) -> None:
        """Note that `job` waits for resources: as its partition's head, which gets a reservation, or behind it."""
        lane = self.lanes.of(job)
        if lane.head is None:
            self._make_head(job, lane)
            return
        if lane.behind is None:
            lane.behind = behind_head(lane.head.display_id, job.partition)
        self.waits[job.id] = self._short_of_licenses(job) or lane.behind
        if lane.promised < self.promises or self.kept.of(job) is not None:
            lane.promised += 1
            self._expect(job)
        elif len(behind) < self.policy.estimate_depth:
            behind.append(job)

    def _make_head(self, job: PendingJob, lane: PartitionQueue) -> None:
        reserved = self._reserved_from(job, lane) if self.snapshot.reserved_intervals else None
        short = self._short_of_licenses(job)
        start_s = self._reserve(job)
        group = self._group(job)
        seats = group.seats_now()
        missing = group.required.difference(seat.node for seat in seats)
        names = sorted(self.snapshot.nodes[at].name for at in missing)
        end_s = self.lasting.end_s(job, self.timeline.now_s, self._least_s(job))
        others = set(self.kept.in_the_way(job, {seat.node for seat in seats}, end_s))
        promised_to = [other.display_id for other in self.snapshot.pending if other.id in others] if others else []
        lacks = shortfall(group.shape, seats, names, promised_to)
        wait = reserved or short or Wait(reason=Reason.RESOURCES, detail=lacks)
        self.waits[job.id] = replace(wait, expected_start_s=self._sure(start_s))
        lane.head = job
        lane.promised = 1
        if self.policy.backfill is Backfill.NONE:
            for other in self.lanes.beside(lane):
                if other.head is None:
                    other.head = job

    def _reserved_from(self, job: PendingJob, lane: PartitionQueue) -> Wait | None:
        """Return the wait of a job that would fit now if nothing were reserved for others; None: it would not either."""
        end_s = self.lasting.end_s(job, self.timeline.now_s, self._least_s(job))
        group = self.unreserved.of(replace(job, reservation=""), lane.nodes)
        if not self._has_licenses(job, end_s) or group.place(end_s) is None:
            return None
        return kept_by(self.snapshot, job, group.nodes, end_s)

    def _reserve(self, job: PendingJob, *, firm: bool = True, from_s: float = 0.0) -> float | None:
        """Keep room for `job` from when it fits, `from_s` at the earliest, and return that time; None: not in this partition.

        What was promised stays, and what is kept now is promised for later plans if it is `firm`. Of several partitions room is
        kept in the one where it fits earliest.
        """
        room = self.kept.of(job)
        if room is not None and room.partition == job.partition:
            return self._without_its_own(job) if job.id in self.late else room.start_s
        found = self._earliest(job, from_s)
        if found is None or (room is not None and room.start_s <= found[0]):
            return None
        start_s, parts = found
        self.kept.take_back(job.id)
        self.kept.keep(job, start_s, self.lasting.end_s(job, start_s, self.lasting.least_s(job, start_s)), parts)
        if firm and self.keeps_promises and self._sure(start_s) is not None:
            self.kept.promise(job)
        return start_s

    def _without_its_own(self, job: PendingJob) -> float | None:
        """Return when `job`, for which room is kept, may start at the earliest beside what is kept for others."""
        aside = self.kept.put_aside(job.id)
        found = self._earliest(job)
        if aside is not None:
            self.kept.put_back(job, aside)
        return found[0] if found is not None else None

    def _earliest(self, job: PendingJob, from_s: float = 0.0) -> tuple[float, list[NodePart]] | None:
        """Return from when on, `from_s` or later, nodes and licences are free for `job`, and what it would get; None: never."""
        from_s = max(self.timeline.now_s, from_s)
        found = self._earliest_for(job, self.lasting.least_s(job, from_s), from_s)
        cut_s = self.lasting.cut_s(job)
        if cut_s == NEVER_S or (found is not None and found[0] < cut_s):
            return found
        return self._earliest_until(job, from_s, cut_s) or found

    def _earliest_until(self, job: PendingJob, from_s: float, cut_s: float) -> tuple[float, list[NodePart]] | None:
        """Return from when on all is free for `job` until it is cut short: by halving, as nodes only get freer."""
        from_s = max(from_s, cut_s - self.lasting.least_s(job, from_s))
        profiles = [self.timeline.profiles[node] for node in self._group(job).nodes]
        later = {at_s for profile in profiles for at_s in profile.times_s if from_s < at_s < cut_s}
        times_s = [from_s, *sorted(later)]
        found = None
        low, high = 0, len(times_s)
        while low < high:
            middle = (low + high) // 2
            at_s = times_s[middle]
            here = self._earliest_for(job, cut_s - at_s - _SUM_ERROR_S, at_s)
            if here is not None and here[0] == at_s:
                found, high = here, middle
            else:
                low = middle + 1
        return found

    def _earliest_for(self, job: PendingJob, limit_s: float, from_s: float) -> tuple[float, list[NodePart]] | None:
        """Return from when on, `from_s` or later, nodes and licences are free for so long; None: never."""
        group = self._group(job)
        while True:
            found = group.earliest(limit_s, from_s)
            if found is None or not job.licenses:
                return found
            from_s = self.counted.earliest(job.licenses, limit_s, found[0])
            if from_s == NEVER_S:
                return None
            if from_s == found[0]:
                return found

    def _sure(self, start_s: float | None) -> float | None:
        return start_s if start_s is not None and start_s < self.timeline.sure_until_s else None

    def _expect(self, job: PendingJob, *, firm: bool = True) -> None:
        """Keep room for `job`, which waits behind a head, and note when it is expected to start."""
        start_s = self._sure(self._reserve(job, firm=firm))
        known = self.waits.get(job.id)
        if start_s is not None and known is not None:
            self.waits[job.id] = min(known, replace(known, expected_start_s=start_s), key=_hope)


def _hope(wait: Wait) -> tuple[bool, float]:
    """Order waits of one job: those that will end first, the earlier ones of them first."""
    for_good = wait.reason in (Reason.NODES_UNAVAILABLE, Reason.PARTITION_DOWN, Reason.PARTITION_INACTIVE)
    return for_good, wait.expected_start_s if wait.expected_start_s is not None else float("inf")
