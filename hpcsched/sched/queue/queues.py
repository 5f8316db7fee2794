"""The lines in which jobs stand during one plan: one for each partition, and in it one for each reservation.

Each has the nodes that answer, and its *head* once there is one: the first of its jobs that does not fit.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from hpcsched.model.ids import JobId
from hpcsched.model.node import Partition
from hpcsched.model.reservation import Reservation
from hpcsched.sched.explain.reasons import partition_closed, partition_unknown
from hpcsched.sched.policy import Policy
from hpcsched.sched.queue.eligible import Eligibility, Wait
from hpcsched.sched.queue.reservations import not_now
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot, relaxed


@dataclass(slots=True)
class PartitionQueue:
    """One line: its nodes that answer, and its head."""

    partition: Partition
    nodes: list[int]
    reservation: str = ""
    head: PendingJob | None = None
    promised: int = 0  # so many of its jobs that wait have a promised start
    behind: Wait | None = None  # what all behind the head share


class PartitionQueues:
    """The lines of one plan, by partition and reservation."""

    def __init__(self, snapshot: Snapshot, reservations: Mapping[str, Reservation]) -> None:
        self._snapshot = snapshot
        self._reservations = reservations
        self._lanes = {
            (name, reservation): self._lane(partition, reservation)
            for reservation in sorted({"", *(job.reservation for job in snapshot.pending)})
            for name, partition in snapshot.partitions.items()
        }
        self._sets: dict[tuple[str, str], Set[int]] = {}

    def of(self, job: PendingJob) -> PartitionQueue:
        """Return the line of `job`."""
        return self.at(job.partition, job.reservation)

    def at(self, partition: str, reservation: str) -> PartitionQueue:
        """Return the line of the jobs of this partition and reservation."""
        lane = self._lanes.get((partition, reservation))
        if lane is None:  # of a reservation that no job which waits is in
            lane = self._lanes[partition, reservation] = self._lane(self._snapshot.partitions[partition], reservation)
        return lane

    def nodes_of(self, job: PendingJob) -> Set[int]:
        """Return the nodes of the job's line, as a set."""
        key = job.partition, job.reservation
        if key not in self._sets:
            self._sets[key] = frozenset(self.of(job).nodes)
        return self._sets[key]

    def beside(self, lane: PartitionQueue) -> list[PartitionQueue]:
        """Return the lines of the same reservation that have nodes in common with `lane`, itself among them."""
        alike = [other for other in self._lanes.values() if other.reservation == lane.reservation]
        return [other for other in alike if not set(other.nodes).isdisjoint(lane.nodes)]

    def _lane(self, partition: Partition, reservation: str) -> PartitionQueue:
        names = set(partition.nodes)
        if reservation in self._reservations:
            names &= set(self._reservations[reservation].nodes)
        nodes = [at for at, node in enumerate(self._snapshot.nodes) if node.name in names and node.usable]
        return PartitionQueue(partition=partition, nodes=nodes, reservation=reservation)

    def open_to(self, lane: PartitionQueue) -> Sequence[NodeView]:
        """Return the nodes, those that are not in the lane's reservation marked as such."""
        if not lane.reservation:
            return self._snapshot.nodes
        why = f"is not in reservation {lane.reservation!r}"
        its = set(self._reservations[lane.reservation].nodes)
        return [
            node if node.name in its or node.why_not else replace(node, why_not=why) for node in self._snapshot.nodes
        ]


# ----- who stands in line at all: the jobs that only resources and limits can keep waiting, each as it asks in each partition


STEP_JOBS = 1000  # are looked at in a step


def those_in_line(
    snapshot: Snapshot, policy: Policy, reservations: Mapping[str, Reservation], waits: dict[JobId, Wait]
) -> Generator[None, None, list[PendingJob]]:
    """Return, in steps, the jobs that only resources (and array limits) can keep waiting; note in `waits` why the others do."""
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
        views = (job, *job.others) if job.others else (job,)
        if job.request.shape.switches:
            views = tuple([relaxed(view, now_s, policy.max_switch_wait_s) for view in views])
        opened = [view for view in views if view.partition in partitions and view.partition not in closed]
        found += opened
        if not opened:
            name = job.partition
            waits[job.id] = closed.get(name) or closed.setdefault(name, partition_unknown(name))
    yield
    return found
