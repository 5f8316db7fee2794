"""The state of one scheduling pass, with its two actions: start a job, reserve a slot.

`plan` and the policies decide the order. This module applies each decision to the nodes, the licences, the limits and the
reserved slots, so that every later decision of the pass includes it.

Within one pass, free resources only shrink. So a shape that did not fit is not tried again, and the seats of a shape are
updated only on nodes with a new start. This makes passes over long queues cheap.
"""

from __future__ import annotations

from hpcsched.model.ids import JobId
from hpcsched.model.resources import Share
from hpcsched.sched.decisions import Plan, Start, Wait
from hpcsched.sched.guard.on_nodes import trusting
from hpcsched.sched.limits import LimitCounts
from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.request import with_overcommit
from hpcsched.sched.placement import Placement, RunTimes
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.queues import PartitionQueue, PartitionQueues
from hpcsched.sched.snapshot import PendingJob, Snapshot
from hpcsched.sched.tres import Held, held_by, held_of


class SchedulingPass:
    """A pass over the queue.

    `starts` lists the jobs that it has started so far. `waits` has the wait of each other job.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.guard, self.needed = trusting(snapshot, policy)
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
        if job.licenses:
            placement.licenses.take(job.licenses, now_s, end_s)

    def _take(self, part: NodePart, end_s: float) -> Share:
        grant = self.placement.timeline.start(part.node, end_s, part.use)
        name = self.snapshot.nodes[part.node].name
        cpus, mem_mib, _ = part.use
        return Share(
            node=name, cpus=cpus, mem_mib=mem_mib, tasks=part.tasks, component=part.component, **grant._asdict()
        )

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
