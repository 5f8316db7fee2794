"""The plan with preemption and elastic jobs, in this order:

    1. Jobs with reserved shares (`PendingJob.reserved_shares`) start as soon as they fit. Other jobs were preempted for them.
       Until the start, no other job gets these shares. If the job can no longer start there (it is held, or a node is down),
       the shares are released.
    2. Suspended jobs resume when their cpus are free again: after the jobs that could preempt them, before all others.
    3. All other jobs are planned.
    4. Elastic jobs give nodes back for jobs that wait for resources (see `elastic`): for the first few in the queue, and for
       jobs that may preempt.
    5. Running jobs are preempted for jobs that may preempt and still wait (see `victims`): for the first few in the queue.
    6. Elastic jobs grow, if no job waits.

Steps 4 to 6 do nothing until all nodes have answered after the controller's start, because waiting jobs may fit on them.

A running job is preempted for at most one waiting job at a time. Pure and deterministic, like `plan`, which places all jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.sched.decisions import Plan, Preemption, Resize, Start, Victim, Wait
from hpcsched.sched.plan import Make, as_running, plan, start_of, started
from hpcsched.sched.policy import Policy
from hpcsched.sched.preempt.elastic import Shrinking, elastic_jobs, grows, withdrawn
from hpcsched.sched.preempt.victims import VictimSet, candidates_for, choose, grace_s, mode_of, outranks, without
from hpcsched.sched.queue.priority import in_order, scale_of
from hpcsched.sched.sentences import listed
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot

IN_QUEUE = frozenset({Reason.RESOURCES, Reason.PRIORITY})
MAX_TRIES = 5  # number of jobs of the queue that are considered in one plan


def full_plan(snapshot: Snapshot, policy: Policy, make: Make = plan) -> Plan:
    """Return the starts, waits, preemptions, resumes and resizes of one pass."""
    if is_plain(snapshot, policy):
        return make(snapshot, policy)
    return _Stages(snapshot, policy, make).plan()


def is_plain(snapshot: Snapshot, policy: Policy) -> bool:
    """Say whether nothing is, or can be, preempted or resized.

    Then `full_plan` is the same as `plan`.
    """
    reserved = any(job.reserved_shares for job in snapshot.pending)
    lent = any(job.lent_shares or job.elastic is not None for job in snapshot.running)
    return policy.preempt.type is PreemptType.NONE and not reserved and not lent


@dataclass(slots=True)
class _Stages:
    """The stages of one plan; `snapshot` includes the decisions so far."""

    snapshot: Snapshot
    policy: Policy
    make: Make

    def plan(self) -> Plan:
        starts, waits, given_up = self._start_reserved()
        resumes = self._resume_suspended()
        made = self.make(self.snapshot, self.policy)
        waits = {**made.waits, **waits}
        self.snapshot = self._with_starts(self.snapshot, made)
        queue = self._waiting_for_resources(made)
        able = self._first_able(queue)
        resizes = self._resizes(made, queue, able)
        preemptions = self._preempt(made, queue, able)
        for preemption in preemptions:
            waits[preemption.job_id] = self._making_room(preemption, waits[preemption.job_id])
        return Plan(
            starts=(*starts, *made.starts),
            waits=waits,
            preemptions=tuple(preemptions),
            resumes=tuple(resumes),
            given_up=tuple(given_up),
            resizes=tuple(resizes),
            priorities=made.priorities,
            promises=made.promises,
        )

    def _start_reserved(self) -> tuple[list[Start], dict[JobId, Wait], list[JobId]]:
        starts: list[Start] = []
        waits: dict[JobId, Wait] = {}
        given_up: list[JobId] = []
        reserved = {job.id: job for job in self._in_order(job for job in self.snapshot.pending if job.reserved_shares)}
        now_s = self.snapshot.now_s
        reserved_for = {
            job.id: as_running(job, job.reserved_shares, now_s, self.snapshot.reservations) for job in reserved.values()
        }
        others = tuple(job for job in self.snapshot.pending if job.id not in reserved)
        running = self.snapshot.running
        for job in reserved.values():
            block = reserved_for.pop(job.id)
            snapshot = replace(self.snapshot, running=(*running, *reserved_for.values()), pending=(job,))
            start = start_of(self.make(snapshot, self.policy), job.id)
            if start is not None:
                starts.append(start)
                running = (*running, started(self.snapshot, job, start))
            elif self._will_fit(snapshot, job):
                waits[job.id] = self._waits_for_ends(job)
                reserved_for[job.id] = block
            else:
                given_up.append(job.id)
                others = (*others, job)
        self.snapshot = replace(self.snapshot, running=(*running, *reserved_for.values()), pending=others)
        return starts, waits, given_up

    def _will_fit(self, snapshot: Snapshot, job: PendingJob) -> bool:
        """Say whether `job` starts once all ending jobs have ended."""
        after = replace(snapshot, running=tuple(other for other in snapshot.running if not other.ending))
        return start_of(self.make(after, self.policy), job.id) is not None

    def _waits_for_ends(self, job: PendingJob) -> Wait:
        nodes = {share.node for share in job.reserved_shares}
        ending = [
            other.display_id
            for other in self.snapshot.running
            if other.ending and any(share.node in nodes for share in other.shares)
        ]
        jobs = f"job {ending[0]}" if len(ending) == 1 else f"{len(ending)} jobs"
        detail = f"{jobs} {'makes' if len(ending) == 1 else 'make'} room for it on {listed(sorted(nodes))}"
        return Wait(reason=Reason.RESOURCES, detail=detail, expected_start_s=self.snapshot.now_s)

    def _resume_suspended(self) -> list[JobId]:
        found: list[JobId] = []
        rules = self.policy.preempt
        for job in sorted(
            (job for job in self.snapshot.running if job.lent_shares), key=lambda job: (job.began_at_s, job.id)
        ):
            rivals = tuple(
                other
                for other in self.snapshot.pending
                if any(outranks(view, job, rules, self.snapshot.partitions) for view in (other, *other.others))
            )
            snapshot = self.snapshot
            if rivals:
                snapshot = self._with_starts(snapshot, self.make(replace(snapshot, pending=rivals), self.policy))
            if _has_room(snapshot, job):
                found.append(job.id)
                back = replace(job, shares=job.lent_shares, lent_shares=(), runs=True)
                running = tuple(back if other is job else other for other in self.snapshot.running)
                self.snapshot = replace(self.snapshot, running=running)
        return found

    def _resizes(self, made: Plan, queue: Sequence[PendingJob], able: Collection[JobId]) -> list[Resize]:
        """Return the resizes of elastic jobs.

        Jobs that wait for the returned nodes then count as started in `snapshot`.
        """
        if not elastic_jobs(self.snapshot) or self._is_early():
            return []
        if not queue:
            return [*withdrawn(self.snapshot), *grows(self.snapshot, self.policy, self.make)]
        shrinking = Shrinking(self.snapshot, self.policy, self.make)
        ahead: list[PendingJob] = []
        for at, job in enumerate(queue):
            if (at < MAX_TRIES or job.id in able) and shrinking.make_room(job, ahead):
                continue
            if self._is_promised(made, job):
                ahead.append(job)
        self.snapshot = shrinking.snapshot
        return shrinking.resizes()

    def _preempt(self, made: Plan, queue: Sequence[PendingJob], able: Collection[JobId]) -> list[Preemption]:
        found: list[Preemption] = []
        ahead: list[PendingJob] = []
        waiting = {job.id for job in self.snapshot.pending}
        for job in queue:
            if job.id not in waiting:
                continue  # elastic jobs make room for it
            choice = choose(self.snapshot, self.policy, job, ahead, self.make) if job.id in able else None
            if choice is not None:
                found.append(self._preemption(job, choice))
            elif self._is_promised(made, job):
                ahead.append(job)
        return found

    def _first_able(self, queue: Sequence[PendingJob]) -> set[JobId]:
        """Return the first few jobs of the queue that may preempt a running job."""
        found: set[JobId] = set()
        known: dict[tuple[tuple[str, str], ...], bool] = {}
        for job in queue if self.policy.preempt.type is not PreemptType.NONE else ():
            rank = tuple((view.qos, view.partition) for view in (job, *job.others))
            if rank not in known:
                known[rank] = bool(candidates_for(self.snapshot, self.policy, job))
            if known[rank]:
                found.add(job.id)
            if len(found) == MAX_TRIES:
                break
        return found

    def _is_promised(self, made: Plan, job: PendingJob) -> bool:
        """Say whether the waiting `job` has a promised start, as the head of a partition has."""
        return made.waits[job.id].reason is Reason.RESOURCES or job.id in made.promises

    def _preemption(self, job: PendingJob, choice: VictimSet) -> Preemption:
        """Return the preemption of the victims for `job`, and include it in `snapshot`."""
        rules = self.policy.preempt
        block = as_running(job, choice.start.shares, self.snapshot.now_s, self.snapshot.reservations)
        after = without(self.snapshot, self.policy, choice.victims)
        pending = tuple(other for other in self.snapshot.pending if other.id != job.id)
        self.snapshot = replace(after, running=(*after.running, block), pending=pending)
        victims = []
        for victim in choice.victims:
            mode = mode_of(victim, rules)
            save_s = None if mode is PreemptMode.SUSPEND else grace_s(victim, rules)
            victims.append(Victim(job_id=victim.id, mode=mode, save_s=save_s))
        return Preemption(job_id=job.id, shares=choice.start.shares, victims=tuple(victims))

    def _making_room(self, preemption: Preemption, wait: Wait) -> Wait:
        names = {job.id: job.display_id for job in self.snapshot.running}
        jobs = [f"job {names.get(victim.job_id, victim.job_id)}" for victim in preemption.victims]
        longest_s = max((victim.save_s or 0.0 for victim in preemption.victims), default=0.0)
        detail = f"{listed(jobs)} {'makes' if len(jobs) == 1 else 'make'} room for it"
        return replace(wait, reason=Reason.RESOURCES, detail=detail, expected_start_s=self.snapshot.now_s + longest_s)

    def _waiting_for_resources(self, made: Plan) -> list[PendingJob]:
        """Return the jobs that wait only for resources, in order.

        The list is empty until all nodes have answered.
        """
        not_needed = self.policy.preempt.type is PreemptType.NONE and not elastic_jobs(self.snapshot)
        if not_needed or self._is_early():
            return []
        waits = made.waits
        return self._in_order(
            job for job in self.snapshot.pending if job.id in waits and waits[job.id].reason in IN_QUEUE
        )

    def _is_early(self) -> bool:
        """Say whether some nodes have not answered yet since the controller started."""
        return any(node.awaited for node in self.snapshot.nodes)

    def _in_order(self, jobs: Iterable[PendingJob]) -> list[PendingJob]:
        return in_order(list(jobs), self.snapshot.partitions, scale_of(self.snapshot), self.policy)

    def _with_starts(self, snapshot: Snapshot, made: Plan) -> Snapshot:
        starts = {start.job_id: start for start in made.starts}
        running = [started(snapshot, job, starts[job.id]) for job in snapshot.pending if job.id in starts]
        pending = tuple(job for job in snapshot.pending if job.id not in starts)
        return replace(snapshot, running=(*snapshot.running, *running), pending=pending)


def _has_room(snapshot: Snapshot, job: RunningJob) -> bool:
    """Say whether the cpus of suspended `job` are free on all of its nodes."""
    cpus = {node.name: node.cpus for node in snapshot.nodes}
    for other in snapshot.running:
        for share in other.shares:
            if share.node in cpus:
                cpus[share.node] -= share.cpus
    return all(cpus.get(share.node, 0) >= share.cpus for share in job.lent_shares)
