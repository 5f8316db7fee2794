"""Charge jobs for the energy that they cause on their nodes, sample after sample.

`hpcsched.metrics.energy` decides what a node used and which part of it is of which job. The ledger keeps what it needs between
samples, and writes increments to the database once a minute, and soon after a job has ended. What was not written when the
controller is killed is lost: a minute at most.

A node looks at its jobs less often than at itself. The energy of the samples between is split at the next look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpcsched.metrics.energy import DeclaredPower, JobKey, JobPart, interval_energy, split
from hpcsched.metrics.series import JobRow, NodeSample
from hpcsched.model.accounting import EnergyUse
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, Job
from hpcsched.model.node import Node
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

WRITE_EVERY_S = 60.0
RECENT_S = 180.0
_Use = tuple[JobId, int, NodeName, str]  # job, attempt, node and source


@dataclass(slots=True)
class _Metered:
    """A node: its last sample that was split, and the processor time of its jobs then."""

    sample: NodeSample
    cpu_s: dict[JobKey, float] = field(default_factory=dict)


class EnergyLedger:
    """The energy of jobs that is not written yet.

    `keep` runs a transaction, and retries it until it succeeds.
    """

    def __init__(self, cluster: ClusterState, keep: Callable[[Callable[[Transaction], Any]], None]) -> None:
        self._cluster = cluster
        self._keep = keep
        self._nodes: dict[NodeName, _Metered] = {}
        self._unwritten: dict[_Use, float] = {}
        self._written_s = float("-inf")
        self._watts: dict[NodeName, tuple[float, float, str]] = {}  # time, mean power since the look before, source

    def watts(self, node: NodeName, now_s: float) -> tuple[float, str] | None:
        """Return the power of a node by its last samples, and its source; None: not known."""
        at_s, watts, source = self._watts.get(node, (float("-inf"), 0.0, ""))
        return (watts, source) if source and abs(now_s - at_s) <= RECENT_S else None

    def sampled(self, sample: NodeSample) -> None:
        """Split the energy of a node since its last sample among its jobs."""
        node = self._cluster.nodes.get(sample.node)
        if node is None:
            self._nodes.pop(sample.node, None)
            self._watts.pop(sample.node, None)
            return
        last = self._nodes.get(sample.node)
        if last is None or last.sample.boot_id != sample.boot_id:
            self._nodes[sample.node] = _Metered(sample, _cpu_times(sample))
        elif sample.jobs or not any(self._job(key, sample.node) for key in last.cpu_s):
            self._split(node, last, sample)
            self._nodes[sample.node] = _Metered(sample, _cpu_times(sample))
        if self._is_due(sample.received_at_s):
            self._write(sample.received_at_s)

    def _split(self, node: Node, last: _Metered, sample: NodeSample) -> None:
        declared = DeclaredPower(idle_watts=node.spec.idle_watts, peak_watts=node.spec.peak_watts)
        energy = interval_energy(last.sample, sample, declared)
        if energy is None:
            return
        self._watts[sample.node] = sample.received_at_s, energy.joules / energy.lasted_s, energy.source
        parts = [part for row in sample.jobs if (part := self._part(row, last, sample.node)) is not None]
        for key, joules in split(energy, parts, node.spec.cpus, declared).jobs_j.items():
            use = JobId(key[0]), key[1], sample.node, energy.source
            self._unwritten[use] = self._unwritten.get(use, 0.0) + joules

    def _part(self, row: JobRow, last: _Metered, node: NodeName) -> JobPart | None:
        key = row.job_id, row.attempt
        job = self._job(key, node)
        share = next((share for share in job.holding if share.node == node), None) if job is not None else None
        if job is None or share is None:
            return None
        before_s = last.cpu_s.get(key)
        if before_s is None:  # it has begun since the last look, or was not seen then
            is_new = (job.allocated_at_s or 0.0) >= last.sample.received_at_s
            before_s = 0.0 if is_new else _cpu_time(row)
        part = share.shards / share.shards_of if share.shards else 1.0
        gpus = {str(index): part for index in share.gpus}
        return JobPart(key=key, cpu_s=max(0.0, _cpu_time(row) - before_s), cpus=share.cpus, gpus=gpus)

    def _job(self, key: JobKey, node: NodeName) -> Job | None:
        """Return the job if that attempt holds the node."""
        job = self._cluster.jobs.get(JobId(key[0]))
        return job if job is not None and job.attempt == key[1] and node in job.held_nodes else None

    def _is_due(self, now_s: float) -> bool:
        if not self._unwritten:
            return False
        if not 0.0 <= now_s - self._written_s < WRITE_EVERY_S:  # or the clock was set back
            return True
        jobs = (self._cluster.jobs.get(job_id) for job_id, _, _, _ in self._unwritten)
        return any(job is None or job.state not in ACTIVE for job in jobs)

    def _write(self, now_s: float) -> None:
        uses = [EnergyUse(*use, joules) for use, joules in self._unwritten.items() if joules > 0]
        self._unwritten.clear()
        self._written_s = now_s
        if uses:
            self._keep(lambda tx: tx.put_energy(uses))


def _cpu_times(sample: NodeSample) -> dict[JobKey, float]:
    return {(row.job_id, row.attempt): _cpu_time(row) for row in sample.jobs}


def _cpu_time(row: JobRow) -> float:
    for column, value in zip(row.columns, row.values, strict=True):
        if column.series.name == "job_cpu_seconds_total" and value is not None:
            return float(value)
    return 0.0
