"""The lines in which jobs stand during one plan: one for each partition, and in it one for each reservation.

Each has the nodes that answer, and its *head* once there is one: the first of its jobs that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from hpcsched.model.node import Partition
from hpcsched.model.reservation import Reservation
from hpcsched.sched.eligible import Wait
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot


@dataclass(slots=True)
class Lane:
    """One line: its nodes that answer, and its head."""

    partition: Partition
    nodes: list[int]
    reservation: str = ""
    head: PendingJob | None = None
    promised: int = 0  # so many of its jobs that wait have a promised start
    behind: Wait | None = None  # what all behind the head share


class Lanes:
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

    def of(self, job: PendingJob) -> Lane:
        """Return the line of `job`."""
        return self.at(job.partition, job.reservation)

    def at(self, partition: str, reservation: str) -> Lane:
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

    def beside(self, lane: Lane) -> list[Lane]:
        """Return the lines of the same reservation that have nodes in common with `lane`, itself among them."""
        alike = [other for other in self._lanes.values() if other.reservation == lane.reservation]
        return [other for other in alike if not set(other.nodes).isdisjoint(lane.nodes)]

    def _lane(self, partition: Partition, reservation: str) -> Lane:
        names = set(partition.nodes)
        if reservation in self._reservations:
            names &= set(self._reservations[reservation].nodes)
        nodes = [at for at, node in enumerate(self._snapshot.nodes) if node.name in names and node.usable]
        return Lane(partition=partition, nodes=nodes, reservation=reservation)

    def open_to(self, lane: Lane) -> Sequence[NodeView]:
        """Return the nodes, those that are not in the lane's reservation marked as such."""
        if not lane.reservation:
            return self._snapshot.nodes
        why = f"is not in reservation {lane.reservation!r}"
        its = set(self._reservations[lane.reservation].nodes)
        return [
            node if node.name in its or node.why_not else replace(node, why_not=why) for node in self._snapshot.nodes
        ]
