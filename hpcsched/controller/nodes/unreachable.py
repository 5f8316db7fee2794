"""Measure how long each node has been silent, and what that proves about its jobs.

A silence proves something in two cases only:
- A job with a lease (`--lease=kill`): the node ends it by its own clock, `Job.lease_s` after the
  node last sent a request that the controller answered. The node sent that request before its
  connection ended, and the controller counts from that end, or from its own start. So after
  `Job.lease_s` and a margin nothing of the job is left there. The margin (`lease_end_s`) covers
  clocks that differ, and the time to kill a process tree.
- A job whose parts are not all claimed (`is_gathered`): nothing of it has been launched on any
  node.

Silences are measured on this machine's monotonic clock and kept in memory only. So a step of the
wall clock cannot shorten a silence, and after a restart it begins again. If the head node sleeps,
it counts too little, never too much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from hpcsched.controller.node_loss import give_back, lose_node
from hpcsched.lifecycle.effects import is_gathered
from hpcsched.lifecycle.job import lease_end_s
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.state.transaction import Transaction

GATHER_S = 10.0  # how long a job waits for a silent node's claim before it is requeued


class Silences:
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
        """Return the silences of the silent nodes among `nodes`."""
        found = {node: self.silent_s(node) for node in nodes}
        return {node: silent_s for node, silent_s in found.items() if silent_s is not None}


def end_silent(tx: Transaction, silences: Silences) -> float | None:
    """Remove from silent nodes the jobs that are proven not to run there.

    Return in how many seconds the next proof is due.
    """
    cluster = tx.cluster
    silent = silences.of([*cluster.nodes, *cluster.gone_nodes()])
    cluster.silent_since_s = {node: tx.now_s - silent_s for node, silent_s in silent.items()}
    due_s: list[float] = []
    for job in cluster.active_jobs() if silent else ():
        for node in job.held_nodes if not cluster.is_former(job) else ():
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
