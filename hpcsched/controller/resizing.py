"""Running jobs that give nodes back or get more: on request of their users, and as a plan says. Only records.

What nodes and the job itself are told follows from the job's state after the commit.
"""

from __future__ import annotations

from hpcsched.errors import RequestError
from hpcsched.jobscript.values import parse_nodes
from hpcsched.lifecycle.events import NodesAdded, NodesReleased, ShrinkAsked
from hpcsched.lifecycle.job import can
from hpcsched.model.job import Job
from hpcsched.sched.decisions import Plan
from hpcsched.store.world import Transaction


def check_size(job: Job, text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes that ``NumNodes=MIN[-MAX]`` leaves a job that runs.

    Raises RequestError for what it cannot be left with.
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
    """Have the job go on with `low` to `high` of its nodes, which it has: the first ones, if it has more."""
    if len(job.shares) > high:
        return shrink(tx, job, high, by_uid)
    asked_too_much = bool(job.wanted_nodes) and len(job.wanted_nodes) < low
    return shrink(tx, job, len(job.shares), by_uid) if asked_too_much else job


def shrink(tx: Transaction, job: Job, count: int, by_uid: int) -> Job:
    """Have the job go on with `count` of its nodes: those that it was asked to keep, if they are so many, else its first.

    With as many as it has it keeps them all, and what it was asked for is withdrawn.
    """
    if not can(job, NodesReleased):
        raise RequestError(f"cannot take nodes from job {job.display_id}: it is {job.state}, not RUNNING")
    nodes = [share.node for share in job.shares]
    if not 1 <= count <= len(nodes):
        more = "; only an elastic job (hsub --elastic) gets more, by itself, when nodes are idle" if count > 0 else ""
        raise RequestError(f"cannot leave job {job.display_id} {count} nodes: it has {len(nodes)}{more}")
    if count == len(nodes):
        return tx.record(ShrinkAsked(job_id=job.id, at_s=tx.now_s, nodes=tuple(nodes))) if job.wanted_nodes else job
    keep = job.wanted_nodes if len(job.wanted_nodes) == count else tuple(nodes[:count])
    released = tuple(node for node in nodes if node not in keep)
    return tx.record(NodesReleased(job_id=job.id, at_s=tx.now_s, nodes=released, by_uid=by_uid))


def carry_out_resizes(tx: Transaction, made: Plan) -> None:
    """Record what elastic jobs are asked for, and what they get."""
    for resize in made.resizes:
        job = tx.world.jobs[resize.job_id]
        if resize.add and can(job, NodesAdded):
            tx.record(NodesAdded(job_id=job.id, at_s=tx.now_s, shares=resize.add))
        elif resize.keep and can(job, ShrinkAsked):
            tx.record(ShrinkAsked(job_id=job.id, at_s=tx.now_s, nodes=resize.keep, for_job=resize.for_job))
