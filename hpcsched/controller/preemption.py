"""What a plan decides of jobs that run already, as events: who makes room for whom, who stands still, who goes on.

Only records; what nodes are told follows from the jobs' states after the commit, and again after a crash.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcsched.lifecycle.events import EndRequested, NodesGivenUp, NodesKept, Resumed, Suspended
from hpcsched.lifecycle.job import can
from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.job import JobState
from hpcsched.sched.decisions import Plan, Preemption, Victim
from hpcsched.sched.policy import PreemptRules
from hpcsched.sched.ranks import answer_s, exempt_s
from hpcsched.store.world import Transaction, World


def carry_out(tx: Transaction, made: Plan) -> bool:
    """Record all that; return whether a job may start at once because of it, so that the next plan should come soon."""
    jobs = tx.world.jobs
    for job_id in made.given_up:
        if can(jobs[job_id], NodesGivenUp):
            tx.record(NodesGivenUp(job_id=job_id, at_s=tx.now_s, why=made.waits[job_id].detail))
    for job_id in made.resumes:
        tx.record(Resumed(job_id=job_id, at_s=tx.now_s, by_uid=None))
    soon = False
    for preemption in made.preemptions:
        if can(jobs[preemption.job_id], NodesKept):  # else it has come to its end within this tick
            tx.record(NodesKept(job_id=preemption.job_id, at_s=tx.now_s, shares=preemption.shares))
            for victim in preemption.victims:
                _make_room(tx, preemption, victim)
            soon = soon or any(victim.mode is PreemptMode.SUSPEND for victim in preemption.victims)
    return soon


def _make_room(tx: Transaction, preemption: Preemption, victim: Victim) -> None:
    winner = tx.world.jobs[preemption.job_id]
    if victim.mode is PreemptMode.SUSPEND:
        tx.record(Suspended(job_id=victim.job_id, at_s=tx.now_s, by_uid=None, for_job=winner.id))
        return
    again = victim.mode is not PreemptMode.CANCEL
    tx.record(
        EndRequested(
            job_id=victim.job_id,
            at_s=tx.now_s,
            outcome=JobState.PREEMPTED,
            by_uid=None,
            why=f"preempted by job {winner.display_id} of {winner.user}",
            requeue=again,
            not_before_s=tx.now_s + tx.world.config.controller.requeue_delay_s if again else None,
            for_job=winner.id,
            save_s=victim.save_s,
        )
    )


def exempt_until_s(world: World, rules: PreemptRules) -> Iterator[float]:
    """Yield when each running job can be preempted from: a plan is due then."""
    if rules.type is PreemptType.NONE or not world.pending:
        return
    for job in world.active_jobs():
        if job.state is JobState.RUNNING and job.started_at_s is not None:
            yield job.started_at_s + exempt_s(job.qos, rules)


def unanswered_at_s(world: World, rules: PreemptRules) -> Iterator[float]:
    """Yield when each elastic job that was asked to give nodes back has had time to answer: a plan is due then."""
    if not world.pending:
        return
    for job in world.active_jobs():
        if job.wanted_at_s is not None:
            yield job.wanted_at_s + answer_s(job.qos, rules)
