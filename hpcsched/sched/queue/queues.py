"""The queues of one pass: one for each partition and reservation.

A queue has its answering nodes and its *head*: the first of its jobs that does not fit.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from hpcsched.model.ids import JobId
from hpcsched.model.node import Partition
from hpcsched.model.reservation import Reservation
from hpcsched.sched.decisions import Wait
from hpcsched.sched.explain.reasons import partition_closed, partition_unknown
from hpcsched.sched.policy import Policy
from hpcsched.sched.queue.eligible import Eligibility
from hpcsched.sched.queue.reservations import not_now
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot, relaxed

STEP_JOBS = 1000  # jobs that are considered in one step


@dataclass(slots=True)
class PartitionQueue:
    """The queue of one partition and reservation: its answering nodes, and its head."""

    partition: Partition
    nodes: list[int]
    reservation: str = ""
    head: PendingJob | None = None
    slots: int = 0  # waiting jobs with a reserved slot
    wait_behind_head: Wait | None = None  # shared by all jobs behind the head


class PartitionQueues:
    """The queues of one pass, by partition and reservation."""

    def __init__(self, snapshot: Snapshot, reservations: Mapping[str, Reservation]) -> None:
        self._snapshot = snapshot
        self._reservations = reservations
        self._queues = {
            (name, reservation): self._make(partition, reservation)
            for reservation in sorted({"", *(job.reservation for job in snapshot.pending)})
            for name, partition in snapshot.partitions.items()
        }
        self._node_sets: dict[tuple[str, str], Set[int]] = {}

    def of(self, job: PendingJob) -> PartitionQueue:
        """Return the queue of `job`."""
        return self.at(job.partition, job.reservation)

    def at(self, partition: str, reservation: str) -> PartitionQueue:
        """Return the queue of this partition and reservation; make it if it is missing."""
        queue = self._queues.get((partition, reservation))
        if queue is None:
            made = self._make(self._snapshot.partitions[partition], reservation)
            queue = self._queues[partition, reservation] = made
        return queue

    def nodes_of(self, job: PendingJob) -> Set[int]:
        """Return the nodes of the queue of `job`, as a set."""
        key = job.partition, job.reservation
        if key not in self._node_sets:
            self._node_sets[key] = frozenset(self.of(job).nodes)
        return self._node_sets[key]

    def sharing_nodes(self, queue: PartitionQueue) -> list[PartitionQueue]:
        """Return the queues of the same reservation that share nodes with `queue`.

        `queue` itself is included.
        """
        alike = [other for other in self._queues.values() if other.reservation == queue.reservation]
        return [other for other in alike if not set(other.nodes).isdisjoint(queue.nodes)]

    def open_to(self, queue: PartitionQueue) -> Sequence[NodeView]:
        """Return all nodes; nodes outside the reservation of `queue` are marked as unusable."""
        if not queue.reservation:
            return self._snapshot.nodes
        why = f"is not in reservation {queue.reservation!r}"
        reserved = set(self._reservations[queue.reservation].nodes)
        return [
            node if node.name in reserved or node.why_not else replace(node, why_not=why)
            for node in self._snapshot.nodes
        ]

    def _make(self, partition: Partition, reservation: str) -> PartitionQueue:
        names = set(partition.nodes)
        if reservation in self._reservations:
            names &= set(self._reservations[reservation].nodes)
        nodes = [at for at, node in enumerate(self._snapshot.nodes) if node.name in names and node.usable]
        return PartitionQueue(partition=partition, nodes=nodes, reservation=reservation)


def eligible_jobs(
    snapshot: Snapshot, policy: Policy, reservations: Mapping[str, Reservation], waits: dict[JobId, Wait]
) -> Generator[None, None, list[PendingJob]]:
    """Return, in steps, the eligible jobs, once for each partition that they request.

    Only resources and limits keep these jobs waiting. The waits of the other jobs are added to
    `waits`.
    """
    eligibility, now_s, partitions = Eligibility(snapshot), snapshot.now_s, snapshot.partitions
    closed = {name: partition_closed(part) for name, part in partitions.items() if not part.state.starts_jobs}
    found = []
    for number, job in enumerate(snapshot.pending, 1):
        if number % STEP_JOBS == 0:
            yield
        wait = None if job.free_to_go else eligibility.why_not(job) or not_now(job, reservations, now_s)
        if wait is not None:
            waits[job.id] = wait
            continue
        opened = [
            view for view in _views(job, policy, now_s) if view.partition in partitions and view.partition not in closed
        ]
        found += opened
        if not opened:
            name = job.partition
            waits[job.id] = closed.get(name) or closed.setdefault(name, partition_unknown(name))
    yield
    return found


def _views(job: PendingJob, policy: Policy, now_s: float) -> tuple[PendingJob, ...]:
    """Return `job` with its current request, once for each of its partitions."""
    views = (job, *job.others) if job.others else (job,)
    if not job.request.shape.switches:
        return views
    return tuple([relaxed(view, now_s, policy.max_switch_wait_s) for view in views])
