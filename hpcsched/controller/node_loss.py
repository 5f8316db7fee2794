"""Decide what a node's reports and its loss mean for jobs.

The attempt ends, starts elsewhere, or is requeued. Knows no request and no message: reports, ticks
and requests call it. Every change is an event.

Rules: a job starts again only on proof that its last attempt cannot run any more. A node that fails
to start jobs which other nodes can start is drained.
"""

from __future__ import annotations

import re

from hpcsched.api.identity import asker_of
from hpcsched.lifecycle.events import EndRequested, NodeLost, NodeSilent
from hpcsched.lifecycle.node import (
    LAUNCH_FAILURES,
    NodeDrained,
    NodeFaultCleared,
    NodeLaunchFailed,
    NodeLaunchSucceeded,
)
from hpcsched.model.ids import NodeName
from hpcsched.model.job import ACTIVE, Job, JobState, Refusal
from hpcsched.model.node import LAUNCH_CHECK, OURSELVES, LaunchFailure, Link
from hpcsched.sched.place.feasible import impossible_shape
from hpcsched.sched.place.request import shape_of
from hpcsched.sched.snapshot import node_view
from hpcsched.state.transaction import Transaction

LAUNCH_TRIES = 8  # nodes on which a job is tried before it fails


def what_became(job: Job) -> str:
    """Return what becomes of a job that has lost a node, in words."""
    again = job.requeue_wanted or job.state is JobState.PENDING
    if job.state is JobState.COMPLETING:
        rest = "goes back to the queue" if again else f"ends as {job.outcome}"
        return f"job {job.display_id} {rest} when its other nodes are clear"
    if job.state in ACTIVE:
        return f"job {job.display_id} goes on without it"
    return f"job {job.display_id} " + ("goes back to the queue" if again else f"has ended as {job.state}")


def lose_node(tx: Transaction, job: Job, node: NodeName, why: str) -> Job:
    """Record the proof that the job's attempt does not run on `node` any more."""
    again, not_before_s = _requeue_after_loss(tx, job)
    return tx.record(
        NodeLost(job_id=job.id, at_s=tx.now_s, node=node, why=why, requeue=again, not_before_s=not_before_s)
    )


def give_back(tx: Transaction, job: Job, node: NodeName, why: str) -> Job:
    """Record that the attempt was never launched on `node`, through no fault of the job.

    The job is started elsewhere.
    """
    _, not_before_s = _requeue_after_loss(tx, job)
    again = job.spec.has_script
    return tx.record(
        NodeLost(job_id=job.id, at_s=tx.now_s, node=node, why=why, requeue=again, not_before_s=not_before_s)
    )


def note_condition(tx: Transaction, node: NodeName, why: str) -> None:
    """Record the node's report that it cannot take launches, or ("") that it can again.

    A node that an admin drained stays drained.
    """
    known = tx.cluster.nodes[node]
    if why and (not known.drained or (known.drained_by == OURSELVES and known.drained_why != why)):
        tx.record_node(NodeDrained(node=node, at_s=tx.now_s, why=why, by=OURSELVES))
    elif not why and known.drained and known.drained_by == OURSELVES:
        tx.record_node(NodeFaultCleared(node=node, at_s=tx.now_s))


def can_start_elsewhere(tx: Transaction, job: Job, node: NodeName) -> bool:
    """Return whether another available node can be tried after `node` failed to start the job.

    A job without a script is not tried again, because a command waits for its nodes.
    """
    if not job.spec.has_script or len(job.refusals) + 1 >= LAUNCH_TRIES:
        return False
    cluster = tx.cluster
    tried = {node, *(refusal.node for refusal in job.refusals)}
    reservation = cluster.reservations.get(job.reservation) if job.reservation else None
    for name in (job.partition_asked or job.partition).split(","):
        partition = cluster.partitions.get(name)
        if partition is None:
            continue
        names = [name for name in partition.nodes if reservation is None or name in reservation.nodes]
        left = [cluster.nodes[name] for name in names if name in cluster.nodes and name not in tried]
        open_nodes = [node_view(one) for one in left if one.link is Link.UP and not one.drained]
        if impossible_shape(shape_of(job.spec, partition), open_nodes, partition) is None:
            return True
    return False


def note_launch(tx: Transaction, job: Job, node: NodeName, *, executed: bool) -> None:
    """Record that `node` prepared the attempt, or (`executed`) that its script was executed.

    Recent refusals of this job by other nodes then count against those nodes, because the job is
    not the cause. A node is drained after `LAUNCH_FAILURES` refusals of different jobs with no
    started job in between. The jobs must be of two users, or one of them an admin's, because a
    single user could choose a directory that other nodes do not have.
    """
    if tx.cluster.nodes[node].launch_failures:
        tx.record_node(NodeLaunchSucceeded(node=node, at_s=tx.now_s, executed=executed))
    for at, refusal in enumerate(reversed(job.refusals), 1):
        if refusal.attempt != job.attempt - at:
            break  # from before an attempt that was started
        if refusal.node in tx.cluster.nodes and (executed or not refusal.of_exec):
            _count_failure(tx, job, refusal)


def without_paths(why: str) -> str:
    """Return the node's launch error without paths, which only the job's user may see."""
    return re.sub(r"/\S*", "...", re.sub(r"/.*(?=: )", "...", why.partition(";")[0]))


def _count_failure(tx: Transaction, job: Job, refusal: Refusal) -> None:
    node = tx.cluster.nodes[refusal.node]
    if any(failure.job_id == job.id for failure in node.launch_failures):
        return
    failure = LaunchFailure(
        job_id=job.id,
        uid=job.uid,
        by_admin=asker_of(job.uid, tx.cluster.config.controller.admins).admin,
        of_exec=refusal.of_exec,
        why=without_paths(refusal.why),
    )
    node = tx.record_node(NodeLaunchFailed(node=refusal.node, at_s=tx.now_s, failure=failure))
    failures = node.launch_failures
    credible = any(one.by_admin for one in failures) or len({one.uid for one in failures}) > 1
    if len(failures) == LAUNCH_FAILURES and credible and not node.drained:
        why = f"{LAUNCH_FAILURES} jobs in a row (the last: {job.display_id}) could not be started here, and could elsewhere: "
        why += failure.why
        tx.record_node(NodeDrained(node=refusal.node, at_s=tx.now_s, why=why, by=LAUNCH_CHECK))


def end_lost(tx: Transaction, job: Job, why: str) -> Job:
    """End the job's attempt as if its node had been lost, through no fault of the job."""
    again, not_before_s = _requeue_after_loss(tx, job)
    return tx.record(
        EndRequested(
            job_id=job.id,
            at_s=tx.now_s,
            outcome=JobState.NODE_FAIL,
            by_uid=None,
            why=why,
            requeue=again,
            not_before_s=not_before_s,
        )
    )


def miss_node(tx: Transaction, job: Job, node: NodeName) -> None:
    """Record that `node` does not answer, if this explains how the job's script ended."""
    if job.state is JobState.COMPLETING and job.outcome is JobState.FAILED and node in job.held_nodes:
        why = f"its script failed while node {node} did not answer ({tx.cluster.nodes[node].link_why})"
        again, not_before_s = _requeue_after_loss(tx, job)
        tx.record(
            NodeSilent(job_id=job.id, at_s=tx.now_s, node=node, why=why, requeue=again, not_before_s=not_before_s)
        )


def _requeue_after_loss(tx: Transaction, job: Job) -> tuple[bool, float]:
    return tx.cluster.requeues(job), tx.now_s + tx.cluster.config.controller.requeue_delay_s
