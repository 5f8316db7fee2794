"""Record what a plan decides about running jobs: preempt, suspend, resume and resize.

Only records. The messages to nodes follow from the jobs' states after the commit, and again after a
crash.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcsched.auth.authorize import Action
from hpcsched.errors import RequestError
from hpcsched.jobscript.values import parse_nodes
from hpcsched.lifecycle.events import (
    EndRequested,
    NodesAdded,
    NodesReleased,
    NodesReserved,
    NodesUnreserved,
    Resumed,
    ShrinkAsked,
    Suspended,
)
from hpcsched.lifecycle.job import can
from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.job import Job, JobState
from hpcsched.sched.decisions import Plan, Preemption, Victim
from hpcsched.sched.policy import PreemptRules
from hpcsched.sched.preempt import answer_s, exempt_s
from hpcsched.sched.sentences import plural
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction


def carry_out(tx: Transaction, made: Plan) -> bool:
    """Record these decisions; return whether a job may start at once as a result.

    In that case the next plan should come soon.
    """
    jobs = tx.cluster.jobs
    for job_id in made.given_up:
        if can(jobs[job_id], NodesUnreserved):
            tx.record(NodesUnreserved(job_id=job_id, at_s=tx.now_s, why=made.waits[job_id].detail))
    for job_id in made.resumes:
        tx.record(Resumed(job_id=job_id, at_s=tx.now_s, by_uid=None))
    soon = False
    for preemption in made.preemptions:
        if can(jobs[preemption.job_id], NodesReserved):  # otherwise it has ended within this tick
            tx.record(NodesReserved(job_id=preemption.job_id, at_s=tx.now_s, shares=preemption.shares))
            for victim in preemption.victims:
                _make_room(tx, preemption, victim)
            soon = soon or any(victim.mode is PreemptMode.SUSPEND for victim in preemption.victims)
    return soon


def _make_room(tx: Transaction, preemption: Preemption, victim: Victim) -> None:
    winner = tx.cluster.jobs[preemption.job_id]
    if victim.mode is PreemptMode.SUSPEND:
        tx.record(Suspended(job_id=victim.job_id, at_s=tx.now_s, by_uid=None, for_job=winner.id))
        return
    again = victim.mode is not PreemptMode.CANCEL
    is_private = Action.VIEW_JOBS in tx.cluster.config.access.hidden  # its user reads this
    tx.record(
        EndRequested(
            job_id=victim.job_id,
            at_s=tx.now_s,
            outcome=JobState.PREEMPTED,
            by_uid=None,
            why=f"preempted by job {winner.display_id}{'' if is_private else f' of {winner.user}'}",
            requeue=again,
            not_before_s=tx.now_s + tx.cluster.config.controller.requeue_delay_s if again else None,
            for_job=winner.id,
            save_s=victim.save_s,
        )
    )


def exempt_until_s(cluster: ClusterState, rules: PreemptRules) -> Iterator[float]:
    """Yield from when on each running job can be preempted. A plan is due then."""
    if rules.type is PreemptType.NONE or not cluster.pending:
        return
    for job in cluster.active_jobs():
        if job.state is JobState.RUNNING and job.started_at_s is not None:
            yield job.started_at_s + exempt_s(job.qos, rules)


def unanswered_at_s(cluster: ClusterState, rules: PreemptRules) -> Iterator[float]:
    """Yield when the time to answer ends for each elastic job that was asked to return nodes.

    A plan is due then.
    """
    if not cluster.pending:
        return
    for job in cluster.active_jobs():
        if job.wanted_at_s is not None:
            yield job.wanted_at_s + answer_s(job.qos, rules)


# ----- resize running jobs: on request of their users, and by a plan. Only records
#
# The messages to nodes and to the job follow from the job's state after the commit.


def check_size(job: Job, text: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes that ``NumNodes=MIN[-MAX]`` asks for.

    Raises: RequestError if the running job cannot have such a size.
    """
    low, high = parse_nodes(text)
    if not can(job, NodesReleased):
        raise RequestError(f"cannot take nodes from job {job.display_id}: it is {job.state}, not RUNNING")
    has = len(job.shares)
    if low > has and job.spec.elastic:
        raise RequestError(
            f"cannot have job {job.display_id} run on at least {low} nodes: it has {has} now, and gets more by itself when "
            f"nodes are idle; say NumNodes={has}-{high}"
        )
    if low > has:
        more = "; only an elastic job (hsub --elastic) gets more, by itself, when nodes are idle"
        raise RequestError(f"cannot leave job {job.display_id} {text} nodes: it has {has}{more}")
    if has <= high < has + len(job.joining):
        raise RequestError(f"cannot leave job {job.display_id} {text} nodes: it is just being given more; try again")
    return low, high


def keep_within(tx: Transaction, job: Job, low: int, high: int, by_uid: int) -> Job:
    """Limit the job to `low` to `high` of its present nodes.

    If it has more than `high`, it keeps the first ones.
    """
    if len(job.shares) > high:
        return shrink(tx, job, high, by_uid)
    asked_too_much = bool(job.wanted_nodes) and len(job.wanted_nodes) < low
    return shrink(tx, job, len(job.shares), by_uid) if asked_too_much else job


def shrink(tx: Transaction, job: Job, count: int, by_uid: int) -> Job:
    """Shrink the job to `count` of its nodes.

    It keeps the nodes that it was asked to keep if there are `count` of them, else its first ones.
    If `count` is the present number, it keeps all nodes, and the earlier resize request is
    withdrawn.
    """
    if not can(job, NodesReleased):
        raise RequestError(f"cannot take nodes from job {job.display_id}: it is {job.state}, not RUNNING")
    nodes = [share.node for share in job.shares]
    if not 1 <= count <= len(nodes):
        more = "; only an elastic job (hsub --elastic) gets more, by itself, when nodes are idle" if count > 0 else ""
        raise RequestError(f"cannot leave job {job.display_id} {plural(count, 'node')}: it has {len(nodes)}{more}")
    if count == len(nodes):
        return tx.record(ShrinkAsked(job_id=job.id, at_s=tx.now_s, nodes=tuple(nodes))) if job.wanted_nodes else job
    keep = job.wanted_nodes if len(job.wanted_nodes) == count else tuple(nodes[:count])
    released = tuple(node for node in nodes if node not in keep)
    return tx.record(NodesReleased(job_id=job.id, at_s=tx.now_s, nodes=released, by_uid=by_uid))


def carry_out_resizes(tx: Transaction, made: Plan) -> None:
    """Record the resize requests to elastic jobs, and the nodes that they get."""
    for resize in made.resizes:
        job = tx.cluster.jobs[resize.job_id]
        connected = all(share.node in tx.cluster.spools for share in resize.add)
        if resize.add and connected and can(job, NodesAdded):
            tx.record(NodesAdded(job_id=job.id, at_s=tx.now_s, shares=resize.add))
        elif resize.keep and can(job, ShrinkAsked):
            tx.record(ShrinkAsked(job_id=job.id, at_s=tx.now_s, nodes=resize.keep, for_job=resize.for_job))
