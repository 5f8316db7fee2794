"""Decide what a node's reports, its silence, its removal and its loss mean for jobs.

The attempt ends, starts elsewhere, or is requeued. Knows no message: reports, ticks and requests call it. Every change is
an event.

Rules:
- A job starts again only on proof that its last attempt cannot run any more.
- A node that fails to start jobs which other nodes can start is drained.
- Silence proves something in two cases only:
  - A job with a lease (`--lease=kill`): the node ends it by its own clock, `Job.lease_s` after the node last sent a request that
    the controller answered. The node sent that request before its connection ended, and the controller counts from that end, or
    from its own start. So after `Job.lease_s` and a margin nothing of the job is left there. The margin (`lease_end_s`) covers
    clocks that differ, and the time to kill a process tree.
  - A job whose parts are not all claimed (`is_gathered`): nothing of it has been launched on any node.
- Silence is measured on this machine's monotonic clock and kept in memory only. So a step of the wall clock cannot shorten it,
  and after a restart it begins again. If the head node sleeps, it counts too little, never too much.
- ``hpcsched node remove --force`` is an admin's decision. A node that answers is first told to end its jobs, as if it were lost.
  A node that does not answer is fenced. Only then its file is deleted.
- A node whose file was deleted while the controller was down has left the cluster at the next start. If ``node remove --force``
  deleted the file, its jobs are given up. Otherwise the machine may still run them: it counts as a node that does not answer,
  and its jobs are held until the file is restored or an admin fences the node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hpcsched.api.identity import identity_of
from hpcsched.auth.authorize import Action, Identity, Reach, authorize, reach
from hpcsched.controller.nodes.edits import held_there
from hpcsched.errors import RequestError
from hpcsched.lifecycle.events import EndRequested, NodeLost, NodeSilent, NodesReleased
from hpcsched.lifecycle.job import can, can_do_without, is_gathered, lease_end_s
from hpcsched.lifecycle.node import (
    LAUNCH_FAILURES,
    NodeDrained,
    NodeFaultCleared,
    NodeLaunchFailed,
    NodeLaunchSucceeded,
    NodeResumed,
)
from hpcsched.model.ids import NodeName
from hpcsched.model.job import ACTIVE, Job, JobState, Refusal
from hpcsched.model.node import LAUNCH_CHECK, OURSELVES, LaunchFailure, Link
from hpcsched.model.probation import DROPS_S, LINK_CHECK
from hpcsched.model.units import format_time_s
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
        return f"job {job.display_id} continues without it"
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


def note_drop(tx: Transaction, node: NodeName) -> None:
    """Drain a node whose connection is lost again and again: it gets no jobs in between."""
    known, most = tx.cluster.nodes[node], tx.cluster.config.controller.link_drops
    count = len(known.probation.drops_s)
    if most and count >= most and not known.drained:
        why = (
            f"its connection was lost {count} times in {format_time_s(DROPS_S)}; it returns when it has stayed connected for "
            f"a while, or by hctl resume {node}"
        )
        tx.record_node(NodeDrained(node=node, at_s=tx.now_s, why=why, by=LINK_CHECK))


def rejoin_steady(tx: Transaction) -> float | None:
    """Resume nodes that have stayed connected; return when the next one may be due."""
    hold_s, times_s = tx.cluster.config.controller.health_hold, list[float]()
    for name, node in list(tx.cluster.nodes.items()):
        at_s = node.probation.rejoins_at_s(hold_s) if node.drained and node.drained_by == LINK_CHECK else None
        if at_s is not None and at_s <= tx.now_s:
            tx.record_node(NodeResumed(node=name, at_s=tx.now_s, by=LINK_CHECK))
        elif at_s is not None:
            times_s.append(at_s)
    return min(times_s, default=None)


def can_start_elsewhere(tx: Transaction, job: Job, node: NodeName) -> bool:
    """Return whether another available node can be tried after `node` failed to start the job.

    A job without a script is not tried again, because a command waits for its nodes.
    """
    if not job.spec.has_script or len(job.refusals) + 1 >= LAUNCH_TRIES:
        return False
    cluster = tx.cluster
    tried = {node, *(refusal.node for refusal in job.refusals)}
    reservation = cluster.reservations.get(job.reservation) if job.reservation else None
    left = set(cluster.nodes if reservation is None else reservation.nodes) - tried
    open_nodes = [
        candidate
        for name, candidate in cluster.nodes.items()
        if name in left and (candidate.link is Link.UP or candidate.power.is_off) and not candidate.drained
    ]
    for name in (job.partition_asked or job.partition).split(","):
        partition = cluster.partitions.get(name)
        if partition is not None:
            members = set(partition.nodes)
            views = [node_view(candidate) for candidate in open_nodes if candidate.spec.name in members]
            if impossible_shape(shape_of(job.spec, partition), views, partition) is None:
                return True
    return False


def note_launch(tx: Transaction, job: Job, node: NodeName, *, executed: bool) -> None:
    """Record that `node` prepared the attempt, or (`executed`) that its script was executed.

    Recent refusals of this job by other nodes then count against those nodes, because the job is not the cause. A node is
    drained after `LAUNCH_FAILURES` refusals of different jobs with no started job in between. The jobs must be of two users, or
    one of them an admin's, because a single user could choose a directory that other nodes do not have.
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
        by_admin=reach(identity_of(job.uid, tx.cluster.config.access), Action.DRAIN) is Reach.ALL,
        of_exec=refusal.of_exec,
        why=without_paths(refusal.why),
    )
    node = tx.record_node(NodeLaunchFailed(node=refusal.node, at_s=tx.now_s, failure=failure))
    failures = node.launch_failures
    credible = any(failed.by_admin for failed in failures) or len({failed.uid for failed in failures}) > 1
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


# ----- silent nodes


GATHER_S = 10.0  # how long a job waits for a silent node's claim before it is requeued


class UnreachableNodes:
    """The connected nodes, and since when the others are not connected."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._born_s = monotonic_s()
        self._since_s: dict[NodeName, float] = {}
        self._connected: set[NodeName] = set()

    def connected(self, node: NodeName) -> None:
        """Record a connection to the node."""
        self._connected.add(node)

    def disconnected(self, node: NodeName) -> None:
        """Record that the connection has ended; further failed attempts change nothing."""
        if node in self._connected:
            self._connected.discard(node)
            self._since_s[node] = self._monotonic_s()

    def silent_s(self, node: NodeName) -> float | None:
        """Return how long the node has been disconnected, in seconds; None if it is connected."""
        if node in self._connected:
            return None
        return self._monotonic_s() - self._since_s.get(node, self._born_s)

    def of(self, nodes: Iterable[NodeName]) -> dict[NodeName, float]:
        """Return for how many seconds each silent node of `nodes` has been silent."""
        found = {node: self.silent_s(node) for node in nodes}
        return {node: silent_s for node, silent_s in found.items() if silent_s is not None}


def end_silent(tx: Transaction, unreachable: UnreachableNodes) -> float | None:
    """Remove from silent nodes the jobs that are proven not to run there.

    Return in how many seconds the next proof is due.
    """
    cluster = tx.cluster
    silent = unreachable.of([*cluster.nodes, *cluster.gone_nodes()])
    cluster.silent_since_s = {node: tx.now_s - silent_s for node, silent_s in silent.items()}
    due_s: list[float] = []
    for job in cluster.active_jobs() if silent else ():
        for node in job.held_nodes if not cluster.is_former(job) else ():
            if cluster.nodes[node].power.is_off:
                continue  # it has its own time limit: see `hpcsched.controller.nodes.power`
            proof_s = proof_after_s(job, node) if node in silent else None
            if proof_s is None:
                continue
            if silent[node] >= proof_s:
                tx.attempt(f"take job {job.id} from node {node}", partial(_lose, job=job, node=node))
            else:
                due_s.append(proof_s - silent[node])
    return min(due_s, default=None)


def _lose(tx: Transaction, job: Job, node: NodeName) -> None:
    lose = lose_node if _may_have_begun(job, node) else give_back
    lose(tx, job, node, _why_lost(job, node))


def proof_after_s(job: Job, node: NodeName) -> float | None:
    """Return how long `node` must be silent to prove that nothing of the attempt is left.

    None if no silence proves it.
    """
    if not _may_have_begun(job, node):
        return GATHER_S
    return lease_end_s(job)


def _may_have_begun(job: Job, node: NodeName) -> bool:
    """Return whether a part of the job may have been launched on `node`.

    Nothing is launched before all nodes, or this one, have claimed their parts.
    """
    return is_gathered(job) and not any(share.node == node for share in job.joining)


def _why_lost(job: Job, node: NodeName) -> str:
    if not _may_have_begun(job, node):
        return f"node {node} did not answer before the job could start"
    return f"node {node} does not answer, and the job's lease there ran out"


# ----- removed nodes


LEAVING = "it is being removed"


def remove_node(tx: Transaction, identity: Identity, node: NodeName, *, force: bool) -> dict[str, Any]:
    """Free the node of jobs, so that its file can be deleted.

    Return ``ending`` (jobs to wait for) and ``became``. Repeat the request until no job is ending.

    Raises: RequestError if jobs are held there and `force` is not given.
    """
    authorize(identity, Action.REMOVE_NODE)
    jobs = tx.cluster.jobs_on(node)
    known = tx.cluster.nodes[node]
    if jobs and not force:
        raise RequestError(
            f"cannot remove node {node}: {held_there(jobs)}. Let them end (hctl drain {node} WHY lets no new "
            f"ones start); for a dead node: hctl fence {node}; or give them up with the node: hpcsched node remove --force {node}"
        )
    if not known.drained:
        tx.record_node(NodeDrained(node=node, at_s=tx.now_s, why=LEAVING, by=OURSELVES))
    why = f"node {node} was removed by {identity.user}"
    became = []
    for job in jobs:
        if known.link is Link.UP:
            _end_on(tx, identity, job, node, why)
        else:
            became.append(what_became(lose_node(tx, job, node, why)))
    if known.link is not Link.UP:
        tx.decided([key for key in tx.cluster.undecided_launches if key[0] == node])
    return {"ending": [job.display_id for job in tx.cluster.jobs_on(node)], "became": became}


def _end_on(tx: Transaction, identity: Identity, job: Job, node: NodeName, why: str) -> None:
    """Tell the node to end its part of the job, unless it is already ending."""
    if can_do_without(job, node):
        tx.record(NodesReleased(job_id=job.id, at_s=tx.now_s, nodes=(node,), by_uid=identity.uid))
    elif can(job, EndRequested) and job.state is not JobState.COMPLETING:
        end_lost(tx, job, why)


def lose_gone_nodes(tx: Transaction, given_up: Mapping[str, str]) -> list[str]:
    """Remove from jobs the nodes that an admin removed while no controller ran.

    Return what became of each job. `given_up` maps these nodes to the admin who removed them.
    """
    became = []
    for node in tx.cluster.gone_nodes():
        for job in tx.cluster.jobs_on(node) if node in given_up else ():
            lost = lose_node(tx, job, node, f"node {node} was removed by {given_up[node]}")
            became.append(f"node {node} is not in the configuration any more: {what_became(lost)}")
    return became
