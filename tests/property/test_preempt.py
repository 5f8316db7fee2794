"""What holds of every preemption, whatever the world: nobody in vain, nobody of equal or higher rank, and it comes to an end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from property.test_plan import SMALL, worlds

from hpcsched.model.accounting import Accounting, Limits, PreemptMode, PreemptType, Qos
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Partition, Share
from hpcsched.sched.decisions import Plan
from hpcsched.sched.place.request import ResourceRequest
from hpcsched.sched.plan import as_running, plan
from hpcsched.sched.policy import Policy, PreemptRules
from hpcsched.sched.preempt import FEW_CANDIDATES, full_plan, lost_s, without
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot, UsageLedger

RANKS = ("low", "mid", "top")
MODES = st.sampled_from([PreemptMode.REQUEUE, PreemptMode.CANCEL, PreemptMode.CHECKPOINT, PreemptMode.SUSPEND])


LIMITS = st.sampled_from(
    [Limits()] * 3
    + [Limits(max_jobs=1), Limits(grp_jobs=2), Limits(grp_tres=(("cpu", 4),)), Limits(max_tres_per_job=(("node", 1),))]
)


@st.composite
def contests(draw: st.DrawFn) -> tuple[Snapshot, Policy]:
    """A world whose jobs have ranks, and the rules by which they preempt; some ranks have limits."""
    snapshot = draw(worlds())
    rank = st.sampled_from(RANKS)
    snapshot = replace(
        snapshot,
        running=tuple(
            replace(
                job, qos=draw(rank), runs=draw(st.sampled_from([True] * 4 + [False])), may_run_again=draw(st.booleans())
            )
            for job in snapshot.running
        ),
        pending=tuple(replace(job, qos=draw(rank)) for job in snapshot.pending),
    )
    qos = {
        name: Qos(name=name, preempt=RANKS[:at], preempt_mode=draw(MODES), limits=draw(LIMITS))
        for at, name in enumerate(RANKS)
    }
    snapshot = replace(snapshot, ledger=UsageLedger(accounting=Accounting(qos=tuple(qos.values()))))
    return snapshot, Policy(weight_age=0, preempt=PreemptRules(type=PreemptType.QOS, qos=qos))


@settings(max_examples=200, deadline=None)
@given(contests())
def test_every_victim_is_of_lower_rank_runs_and_is_not_preempted_in_vain(contest: tuple[Snapshot, Policy]) -> None:
    """When the victims have gone each beneficiary starts in the very next plan."""
    snapshot, policy = contest
    made = full_plan(snapshot, policy)
    running = {job.id: job for job in snapshot.running}
    waiting = {job.id: job for job in snapshot.pending}
    seen: set[int] = set()
    for item in made.preemptions:
        for victim in item.victims:
            its, mine = running[victim.job_id].qos, waiting[item.job_id].qos
            assert RANKS.index(its) < RANKS.index(mine)
            assert running[victim.job_id].runs
            assert victim.job_id not in seen
            seen.add(victim.job_id)
        assert item.victims
        assert not seen.isdisjoint(victim.job_id for victim in item.victims)
    assert full_plan(snapshot, policy) == made
    after = _apply(snapshot, made, policy)
    started = {start.job_id for start in full_plan(after, policy).starts}
    assert {item.job_id for item in made.preemptions} <= started


@settings(max_examples=200, deadline=None)
@given(contests())
def test_every_victim_of_a_job_that_waits_alone_is_needed(contest: tuple[Snapshot, Policy]) -> None:
    snapshot, policy = contest
    for job in snapshot.pending:
        alone = replace(snapshot, pending=(job,))
        for item in full_plan(alone, policy).preemptions:
            victims = {victim.job_id: victim for victim in item.victims}
            for spared in victims:
                gone = [other for other in snapshot.running if other.id in victims and other.id != spared]
                assert not full_plan(without(alone, policy, gone), Policy(weight_age=0)).starts


@settings(max_examples=100, deadline=None)
@given(contests())
def test_it_comes_to_an_end(contest: tuple[Snapshot, Policy]) -> None:
    """While nothing ends by itself, jobs start and make room a bounded number of times: none takes turns for ever."""
    snapshot, policy = contest
    jobs = len(snapshot.running) + len(snapshot.pending)
    for _ in range(jobs * jobs + 3):
        made = full_plan(snapshot, policy)
        if not made.starts and not made.preemptions and not made.resumes:
            return
        before, snapshot = snapshot, _apply(snapshot, made, policy)
        _check_limits(before, snapshot)
    raise AssertionError("it goes on for ever")


def _check_limits(before: Snapshot, after: Snapshot) -> None:
    """Check that no limit is broken, or more so than it was. Who stands still counts with what it gets back."""
    for qos in before.ledger.accounting.qos:
        old, new = ([job for job in world.running if job.qos == qos.name] for world in (before, after))
        for most in (qos.limits.max_jobs, qos.limits.grp_jobs):
            assert most is None or len(new) <= max(len(old), most)
        for _, most in qos.limits.grp_tres:
            assert _cpus(new) <= max(_cpus(old), most)


def _cpus(jobs: list[RunningJob]) -> int:
    return sum(share.cpus for job in jobs for share in job.lent_shares or job.shares)


def _apply(snapshot: Snapshot, made: Plan, policy: Policy) -> Snapshot:
    """Return the world once all that the plan decided has been done; who was preempted waits again if it may."""
    shares = {start.job_id: start.shares for start in made.starts}
    kept = {item.job_id: item.shares for item in made.preemptions}
    names = {victim.job_id for item in made.preemptions for victim in item.victims}
    victims = [job for job in snapshot.running if job.id in names]
    resumed = [
        replace(job, shares=job.lent_shares, lent_shares=(), runs=True) if job.id in made.resumes else job
        for job in without(snapshot, policy, victims).running
    ]
    started = [replace(as_running(job, shares[job.id], snapshot.now_s), runs=True) for job in _of(snapshot, shares)]
    gone = [job for job in victims if job.id not in {other.id for other in resumed} and job.may_run_again]
    waiting = [
        replace(job, reserved_shares=kept.get(job.id, () if job.id in made.given_up else job.reserved_shares))
        for job in snapshot.pending
        if job.id not in shares
    ]
    again = [_queued(job, snapshot.now_s) for job in gone]
    return replace(snapshot, running=(*resumed, *started), pending=(*waiting, *again))


def _of(snapshot: Snapshot, names: dict[int, object]) -> list[PendingJob]:
    return [job for job in snapshot.pending if job.id in names]


def _queued(job: RunningJob, now_s: float) -> PendingJob:
    """Return the job as it waits again: for as much as it had."""
    shape = replace(
        SMALL,
        nodes_min=len(job.shares),
        nodes_max=len(job.shares),
        cpus_per_task=max(share.cpus for share in job.shares),
    )
    return PendingJob(
        id=job.id,
        display_id=job.display_id,
        partition="a",
        request=ResourceRequest(shape=shape, time_limit_s=None),
        submitted_at_s=now_s,
        qos=job.qos,
    )


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Snapshot, Policy]:
    """A few nodes of four cpus full of low jobs that lose different amounts, and one job of rank that waits."""
    names = tuple(NodeName(f"n{at}") for at in range(draw(st.integers(2, 4))))
    free = dict.fromkeys(names, 4)
    running = []
    for at in range(1, draw(st.integers(4, FEW_CANDIDATES + 1))):
        cpus = draw(st.integers(1, 3))
        nodes = [name for name in draw(st.permutations(names))[: draw(st.integers(1, 2))] if free[name] >= cpus]
        free |= {name: free[name] - cpus for name in nodes}
        shares = tuple(Share(node=name, cpus=cpus, mem_mib=10) for name in nodes)
        began_s = -draw(st.integers(1, 20)) * 50.0
        running += [_low(at, shares, began_s)] if shares else []
    count = draw(st.integers(1, len(names)))
    shape = replace(SMALL, nodes_min=count, nodes_max=count, cpus_per_task=draw(st.integers(2, 4)))
    request = ResourceRequest(shape=shape, time_limit_s=600)
    job = PendingJob(id=JobId(99), display_id="99", partition="a", request=request, submitted_at_s=0.0, qos="top")
    qos = {"low": Qos(name="low"), "top": Qos(name="top", preempt=("low",))}
    snapshot = Snapshot(
        now_s=0.0,
        nodes=tuple(NodeView(name=name, cpus=4, mem_mib=1000) for name in names),
        partitions={"a": Partition(name="a", nodes=names, default=True)},
        running=tuple(running),
        pending=(job,),
    )
    return snapshot, Policy(weight_age=0, preempt=PreemptRules(type=PreemptType.QOS, qos=qos))


def _low(at: int, shares: tuple[Share, ...], began_s: float) -> RunningJob:
    return RunningJob(
        id=JobId(at), display_id=str(at), shares=shares, began_at_s=began_s, qos="low", partition="a", runs=True
    )


@settings(max_examples=200, deadline=None)
@given(crowds())
def test_no_set_of_victims_would_lose_less_and_none_is_overlooked(crowd: tuple[Snapshot, Policy]) -> None:
    """Try every set of those that may be preempted."""
    snapshot, policy = crowd
    if plan(snapshot, policy).starts:
        return
    preemptions = full_plan(snapshot, policy).preemptions
    names = {victim.job_id for item in preemptions for victim in item.victims}
    sets = [some for count in range(1, len(snapshot.running) + 1) for some in combinations(snapshot.running, count)]
    enough = [some for some in sets if plan(without(snapshot, policy, some), policy).starts]
    assert bool(enough) == bool(preemptions)
    if enough:
        chosen = [job for job in snapshot.running if job.id in names]
        assert _lost_s(chosen, policy) == min(_lost_s(some, policy) for some in enough)


def _lost_s(victims: Iterable[RunningJob], policy: Policy) -> float:
    return sum(lost_s(victim, policy.preempt, 0.0) for victim in victims)
