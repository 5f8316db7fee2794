"""The plan with preemption: who is to be ended, or to stand still, so that whom can start; and what follows from it later.

    1. Jobs that others are making room for (`PendingJob.kept_shares`) start as soon as they fit. Until then nobody else gets
       what is kept for them. A job that could not start there any more (it was held, a node went down) gives it up.
    2. Jobs that stand still because others have their cpus go on when these are free again, before any job that could not
       preempt them starts; after those that could.
    3. The plan of all others.
    4. Who still waits for resources, and may preempt: see `victims`. A few of the first in line are looked at.

    5. Elastic jobs shrink and grow, if nobody is to make room in this plan: see `elastic`.

Of 4 and 5 nothing is done while a node is still awaited after the controller's start: what waits may find its place there.

A job that waits can be preempted for by no second one meanwhile, and is itself never a reason to end more than once. Pure and
deterministic as `plan` is, which does all the placing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.model.reservation import Reservation
from hpcsched.model.resources import Share
from hpcsched.model.units import known_limit_s
from hpcsched.sched.decisions import Plan, Preemption, Resize, Start, Victim
from hpcsched.sched.elastic import resizes
from hpcsched.sched.eligible import Wait
from hpcsched.sched.intervals import NEVER_S
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Policy
from hpcsched.sched.priority import in_order, scale_of
from hpcsched.sched.ranks import grace_s, mode_of, outranks
from hpcsched.sched.reservations import cut_short_s
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot
from hpcsched.sched.victims import Choice, Make, candidates_for, choose, without
from hpcsched.sched.words import listed

IN_LINE = frozenset({Reason.RESOURCES, Reason.PRIORITY})
MAX_TRIES = 5  # so many jobs in line are looked at in one plan


def full_plan(snapshot: Snapshot, policy: Policy, make: Make = plan) -> Plan:
    """Return what to start now, who is to make room or go on, and why the rest waits."""
    if is_plain(snapshot, policy):
        return make(snapshot, policy)
    return _Stages(snapshot, policy, make).plan()


def is_plain(snapshot: Snapshot, policy: Policy) -> bool:
    """Say whether nobody can have to make room or give nodes back, nor has had to: then `full_plan` is no more than `plan`."""
    kept = any(job.kept_shares for job in snapshot.pending)
    lent = any(job.lent_shares or job.elastic is not None for job in snapshot.running)
    return policy.preempt.type is PreemptType.NONE and not kept and not lent


def as_running(
    job: PendingJob,
    shares: tuple[Share, ...],
    now_s: float,
    reservations: Iterable[Reservation] = (),
    lowered_s: int | None = None,
) -> RunningJob:
    """Return the job as it is when it starts now on `shares`, its time limit `lowered_s`. It cannot be preempted at once."""
    limit_s = lowered_s if lowered_s is not None else known_limit_s(job.request.time_limit_s)
    limit_ends_s = now_s + limit_s if limit_s is not None else NEVER_S
    ends_s = min(limit_ends_s, cut_short_s(job, {one.name: one for one in reservations}))
    alike = {name: getattr(job, name) for name in _ALIKE}
    return RunningJob(
        **alike,
        shares=shares,
        began_at_s=now_s,
        ends_at_s=ends_s if ends_s < NEVER_S else None,
    )


_ALIKE = {field.name for field in fields(PendingJob)} & {field.name for field in fields(RunningJob)}


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
        preemptions = self._preempt(made)
        for preemption in preemptions:
            waits[preemption.job_id] = self._making_room(preemption, waits[preemption.job_id])
        return Plan(
            starts=(*starts, *made.starts),
            waits=waits,
            preemptions=tuple(preemptions),
            resumes=tuple(resumes),
            given_up=tuple(given_up),
            # `world` has what victims still hold as free: nodes that they leave idle are given away when they have ended.
            resizes=() if preemptions else self._resizes(made),
            priorities=made.priorities,
            promises=made.promises,
        )

    # ----- jobs that something is kept for

    def _start_kept(self) -> tuple[list[Start], dict[JobId, Wait], list[JobId]]:
        starts: list[Start] = []
        waits: dict[JobId, Wait] = {}
        given_up: list[JobId] = []
        kept = {job.id: job for job in self._in_order(job for job in self.world.pending if job.kept_shares)}
        now_s = self.world.now_s
        blocks = {job.id: as_running(job, job.kept_shares, now_s, self.world.reservations) for job in kept.values()}
        others = tuple(job for job in self.world.pending if job.id not in kept)
        running = self.world.running
        for job in kept.values():
            block = blocks.pop(job.id)
            world = replace(self.world, running=(*running, *blocks.values()), pending=(job,))
            start = _start_of(self.make(world, self.policy), job)
            if start is not None:
                starts.append(start)
                running = (*running, _started(self.world, job, start))
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
        return _start_of(self.make(lasting, self.policy), job) is not None

    def _waits_for_ends(self, job: PendingJob) -> Wait:
        nodes = {share.node for share in job.kept_shares}
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

    # ----- jobs that preempt

    def _preempt(self, made: Plan) -> list[Preemption]:
        self.world = self._with_starts(self.world, made)
        if self.policy.preempt.type is PreemptType.NONE or self._is_early():
            return []
        in_line = [job for job in self.world.pending if self._is_in_line(made, job)]
        found: list[Preemption] = []
        ahead: list[PendingJob] = []
        tries = 0
        able: dict[tuple[tuple[str, str], ...], bool] = {}
        for job in self._in_order(in_line):
            rank = tuple((view.qos, view.partition) for view in (job, *job.others))
            if rank not in able:
                able[rank] = bool(candidates_for(self.world, self.policy, job))
            if able[rank] and tries < MAX_TRIES:
                tries += 1
                choice = choose(self.world, self.policy, job, ahead, self.make)
                if choice is not None:
                    found.append(self._preemption(job, choice))
                    continue
            if made.waits[job.id].reason is Reason.RESOURCES:
                ahead.append(job)  # first of its partition: it has been promised a start
        return found

    def _is_in_line(self, made: Plan, job: PendingJob) -> bool:
        wait = made.waits.get(job.id)
        return wait is not None and wait.reason in IN_LINE

    def _preemption(self, job: PendingJob, choice: Choice) -> Preemption:
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

    # ----- elastic jobs

    def _resizes(self, made: Plan) -> tuple[Resize, ...]:
        if all(job.elastic is None for job in self.world.running) or self._is_early():
            return ()  # the line is not put in order for nobody
        in_line = self._in_order(job for job in self.world.pending if self._is_in_line(made, job))
        return resizes(self.world, self.policy, in_line, self.make)

    # ----- small things

    def _is_early(self) -> bool:
        """Return whether nodes are still awaited."""
        return any(node.awaited for node in self.world.nodes)

    def _in_order(self, jobs: Iterable[PendingJob]) -> list[PendingJob]:
        return in_order(list(jobs), self.world.partitions, scale_of(self.world), self.policy)

    def _with_starts(self, world: Snapshot, made: Plan) -> Snapshot:
        starts = {start.job_id: start for start in made.starts}
        started = [_started(world, job, starts[job.id]) for job in world.pending if job.id in starts]
        pending = tuple(job for job in world.pending if job.id not in starts)
        return replace(world, running=(*world.running, *started), pending=pending)


def _started(world: Snapshot, job: PendingJob, start: Start) -> RunningJob:
    return as_running(job, start.shares, world.now_s, world.reservations, start.time_limit_s)


def _start_of(made: Plan, job: PendingJob) -> Start | None:
    return next((start for start in made.starts if start.job_id == job.id), None)


def _has_room(world: Snapshot, job: RunningJob) -> bool:
    """Return whether the cpus that `job` gave are free on all of its nodes."""
    cpus = {node.name: node.cpus for node in world.nodes}
    for other in world.running:
        for share in other.shares:
            if share.node in cpus:
                cpus[share.node] -= share.cpus
    return all(cpus.get(share.node, 0) >= share.cpus for share in job.lent_shares)
