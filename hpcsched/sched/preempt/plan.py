"""The plan with preemption: who is to be ended, or to stand still, so that whom can start; and what follows from it later.

    1. Jobs that others are making room for (`PendingJob.reserved_shares`) start as soon as they fit. Until then nobody else gets
       what is kept for them. A job that could not start there any more (it was held, a node went down) gives it up.
    2. Jobs that stand still because others have their cpus go on when these are free again, before any job that could not
       preempt them starts; after those that could.
    3. The plan of all others.
    4. Elastic jobs give nodes back for who still waits for resources: see `elastic`. A few of the first in line are looked at,
       and of those that may preempt.
    5. Who may preempt, and gets nothing by that: see `victims`. A few of the first in line are looked at.
    6. Elastic jobs grow, if nobody waits.

From 4 on nothing is done while a node is still awaited after the controller's start: what waits may find its place there.

A job that waits can be preempted for by no second one meanwhile, and is itself never a reason to end more than once. Pure and
deterministic as `plan` is, which does all the placing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.sched.decisions import Plan, Preemption, Resize, Start, Victim, Wait
from hpcsched.sched.explain.sentences import listed
from hpcsched.sched.explain.what_would_start import Make, as_running, start_of, started
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Policy
from hpcsched.sched.preempt.elastic import Shrinking, elastic_jobs, grows, withdrawn
from hpcsched.sched.preempt.rules import grace_s, mode_of, outranks
from hpcsched.sched.preempt.victims import VictimSet, candidates_for, choose, without
from hpcsched.sched.queue.priority import in_order, scale_of
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot

IN_LINE = frozenset({Reason.RESOURCES, Reason.PRIORITY})
MAX_TRIES = 5  # so many jobs in line are looked at in one plan


def full_plan(snapshot: Snapshot, policy: Policy, make: Make = plan) -> Plan:
    """Return what to start now, who is to make room or go on, and why the rest waits."""
    if is_plain(snapshot, policy):
        return make(snapshot, policy)
    return _Stages(snapshot, policy, make).plan()


def is_plain(snapshot: Snapshot, policy: Policy) -> bool:
    """Say whether nobody can have to make room or give nodes back, nor has had to: then `full_plan` is no more than `plan`."""
    kept = any(job.reserved_shares for job in snapshot.pending)
    lent = any(job.lent_shares or job.elastic is not None for job in snapshot.running)
    return policy.preempt.type is PreemptType.NONE and not kept and not lent


@dataclass(slots=True)
class _Stages:
    """One plan being made: `world` is the snapshot with what has been decided so far."""

    world: Snapshot
    policy: Policy
    make: Make

    def plan(self) -> Plan:
        starts, waits, given_up = self._start_kept()
        resumes = self._resume_lent()
        made = self.make(self.world, self.policy)
        waits = {**made.waits, **waits}
        self.world = self._with_starts(self.world, made)
        in_line = self._in_line(made)
        able = self._first_able(in_line)
        resizes = self._resizes(made, in_line, able)
        preemptions = self._preempt(made, in_line, able)
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

    # ----- jobs that something is kept for

    def _start_kept(self) -> tuple[list[Start], dict[JobId, Wait], list[JobId]]:
        starts: list[Start] = []
        waits: dict[JobId, Wait] = {}
        given_up: list[JobId] = []
        kept = {job.id: job for job in self._in_order(job for job in self.world.pending if job.reserved_shares)}
        now_s = self.world.now_s
        blocks = {job.id: as_running(job, job.reserved_shares, now_s, self.world.reservations) for job in kept.values()}
        others = tuple(job for job in self.world.pending if job.id not in kept)
        running = self.world.running
        for job in kept.values():
            block = blocks.pop(job.id)
            world = replace(self.world, running=(*running, *blocks.values()), pending=(job,))
            start = start_of(self.make(world, self.policy), job.id)
            if start is not None:
                starts.append(start)
                running = (*running, started(self.world, job, start))
            elif self._will_fit(world, job):
                waits[job.id] = self._waits_for_ends(job)
                blocks[job.id] = block
            else:
                given_up.append(job.id)
                others = (*others, job)
        self.world = replace(self.world, running=(*running, *blocks.values()), pending=others)
        return starts, waits, given_up

    def _will_fit(self, world: Snapshot, job: PendingJob) -> bool:
        """Return whether `job` starts once all that is being ended has ended."""
        lasting = replace(world, running=tuple(other for other in world.running if not other.ending))
        return start_of(self.make(lasting, self.policy), job.id) is not None

    def _waits_for_ends(self, job: PendingJob) -> Wait:
        nodes = {share.node for share in job.reserved_shares}
        ending = [
            other.display_id
            for other in self.world.running
            if other.ending and any(share.node in nodes for share in other.shares)
        ]
        who = f"job {ending[0]}" if len(ending) == 1 else f"{len(ending)} jobs"
        detail = f"{who} {'makes' if len(ending) == 1 else 'make'} room for it on {listed(sorted(nodes))}"
        return Wait(reason=Reason.RESOURCES, detail=detail, expected_start_s=self.world.now_s)

    # ----- jobs that stand still

    def _resume_lent(self) -> list[JobId]:
        found: list[JobId] = []
        rules = self.policy.preempt
        for job in sorted(
            (job for job in self.world.running if job.lent_shares), key=lambda job: (job.began_at_s, job.id)
        ):
            rivals = tuple(
                other
                for other in self.world.pending
                if any(outranks(view, job, rules, self.world.partitions) for view in (other, *other.others))
            )
            world = self.world
            if rivals:
                world = self._with_starts(world, self.make(replace(world, pending=rivals), self.policy))
            if _has_room(world, job):
                found.append(job.id)
                back = replace(job, shares=job.lent_shares, lent_shares=(), runs=True)
                running = tuple(back if other is job else other for other in self.world.running)
                self.world = replace(self.world, running=running)
        return found

    # ----- elastic jobs

    def _resizes(self, made: Plan, in_line: Sequence[PendingJob], able: Collection[JobId]) -> list[Resize]:
        """Return what elastic jobs are asked for and get. Who waits for what they give back has started in `world` then."""
        if not elastic_jobs(self.world) or self._is_early():
            return []
        if not in_line:
            return [*withdrawn(self.world), *grows(self.world, self.policy, self.make)]
        shrinking = Shrinking(self.world, self.policy, self.make)
        ahead: list[PendingJob] = []
        for at, job in enumerate(in_line):
            if (at < MAX_TRIES or job.id in able) and shrinking.make_room(job, ahead):
                continue
            if self._is_promised(made, job):
                ahead.append(job)
        self.world = shrinking.world
        return shrinking.resizes()

    # ----- jobs that preempt

    def _preempt(self, made: Plan, in_line: Sequence[PendingJob], able: Collection[JobId]) -> list[Preemption]:
        found: list[Preemption] = []
        ahead: list[PendingJob] = []
        waiting = {job.id for job in self.world.pending}
        for job in in_line:
            if job.id not in waiting:
                continue  # elastic jobs make room for it
            choice = choose(self.world, self.policy, job, ahead, self.make) if job.id in able else None
            if choice is not None:
                found.append(self._preemption(job, choice))
            elif self._is_promised(made, job):
                ahead.append(job)
        return found

    def _first_able(self, in_line: Sequence[PendingJob]) -> set[JobId]:
        """Return the first few in line that may preempt somebody who runs."""
        found: set[JobId] = set()
        known: dict[tuple[tuple[str, str], ...], bool] = {}
        for job in in_line if self.policy.preempt.type is not PreemptType.NONE else ():
            rank = tuple((view.qos, view.partition) for view in (job, *job.others))
            if rank not in known:
                known[rank] = bool(candidates_for(self.world, self.policy, job))
            if known[rank]:
                found.add(job.id)
            if len(found) == MAX_TRIES:
                break
        return found

    def _is_promised(self, made: Plan, job: PendingJob) -> bool:
        """Say whether `job`, which waits, has been promised a start, as the first of its partition is."""
        return made.waits[job.id].reason is Reason.RESOURCES or job.id in made.promises

    def _preemption(self, job: PendingJob, choice: VictimSet) -> Preemption:
        """Take note that the victims make room for `job`."""
        rules = self.policy.preempt
        block = as_running(job, choice.start.shares, self.world.now_s, self.world.reservations)
        after = without(self.world, self.policy, choice.victims)
        pending = tuple(other for other in self.world.pending if other.id != job.id)
        self.world = replace(after, running=(*after.running, block), pending=pending)
        victims = []
        for victim in choice.victims:
            mode = mode_of(victim, rules)
            save_s = None if mode is PreemptMode.SUSPEND else grace_s(victim, rules)
            victims.append(Victim(job_id=victim.id, mode=mode, save_s=save_s))
        return Preemption(job_id=job.id, shares=choice.start.shares, victims=tuple(victims))

    def _making_room(self, preemption: Preemption, wait: Wait) -> Wait:
        names = {job.id: job.display_id for job in self.world.running}
        who = [f"job {names.get(victim.job_id, victim.job_id)}" for victim in preemption.victims]
        longest_s = max((victim.save_s or 0.0 for victim in preemption.victims), default=0.0)
        detail = f"{listed(who)} {'makes' if len(who) == 1 else 'make'} room for it"
        return replace(wait, reason=Reason.RESOURCES, detail=detail, expected_start_s=self.world.now_s + longest_s)

    # ----- small things

    def _in_line(self, made: Plan) -> list[PendingJob]:
        """Return who waits for resources alone, in order; nobody while that may be because nodes are still awaited."""
        nobody_asks = self.policy.preempt.type is PreemptType.NONE and not elastic_jobs(self.world)
        if nobody_asks or self._is_early():
            return []
        waits = made.waits
        return self._in_order(job for job in self.world.pending if job.id in waits and waits[job.id].reason in IN_LINE)

    def _is_early(self) -> bool:
        """Return whether nodes are still awaited."""
        return any(node.awaited for node in self.world.nodes)

    def _in_order(self, jobs: Iterable[PendingJob]) -> list[PendingJob]:
        return in_order(list(jobs), self.world.partitions, scale_of(self.world), self.policy)

    def _with_starts(self, world: Snapshot, made: Plan) -> Snapshot:
        starts = {start.job_id: start for start in made.starts}
        running = [started(world, job, starts[job.id]) for job in world.pending if job.id in starts]
        pending = tuple(job for job in world.pending if job.id not in starts)
        return replace(world, running=(*world.running, *running), pending=pending)


def _has_room(world: Snapshot, job: RunningJob) -> bool:
    """Return whether the cpus that `job` gave are free on all of its nodes."""
    cpus = {node.name: node.cpus for node in world.nodes}
    for other in world.running:
        for share in other.shares:
            if share.node in cpus:
                cpus[share.node] -= share.cpus
    return all(cpus.get(share.node, 0) >= share.cpus for share in job.lent_shares)
