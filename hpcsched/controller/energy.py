"""Charge jobs for their energy, and note how busy their GPUs are, sample after sample.

`hpcsched.metrics.energy` decides what a node used and which part of it is of which job. The ledger keeps what it needs between
samples, and writes increments to the database once a minute, and soon after a job has ended. With them it writes what the meters
of the nodes showed then. The counters of nodes continue while no controller runs, so the next one splits what was used since.
Only the energy of jobs that ended meanwhile is not charged from the last write on, nor is that of a gap of more than an hour.

A node looks at its jobs less often than at itself. The energy of the samples between is split at the next look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcsched.metrics.energy import SERIES, DeclaredPower, JobKey, JobPart, interval_energy, split
from hpcsched.metrics.series import SAMPLED, JobRow, NodeSample, read_column
from hpcsched.model.accounting import EnergyUse, GpuUse
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, Job
from hpcsched.model.node import Node
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

WRITE_EVERY_S = 60.0
LONGEST_SAMPLE_S = 180.0  # GPUs are not known for longer than that after a sample
RECENT_S = 180.0
_MARKED = frozenset({*SERIES, "node_cpu_seconds_total"})
_Use = tuple[JobId, int, NodeName, str]  # job, attempt, node and source


@dataclass(slots=True)
class _Metered:
    """A node: its last sample that was split, and the processor time of its jobs then."""

    sample: NodeSample
    cpu_s: dict[JobKey, float] = field(default_factory=dict)


class EnergyLedger:
    """The energy of jobs that is not written yet.

    `keep` runs a transaction, and retries it until it succeeds. `marks`: of the previous controller, by node.
    """

    def __init__(
        self,
        cluster: ClusterState,
        keep: Callable[[Callable[[Transaction], Any]], None],
        marks: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._keep = keep
        self._marks = dict(marks or {})
        self._changed: set[NodeName] = set()  # nodes that were split since the last write
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
        last = self._nodes.get(sample.node) or _marked(sample.node, self._marks.pop(sample.node, ""))
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
        self._changed.add(sample.node)
        if energy is None:
            return
        self._watts[sample.node] = sample.received_at_s, energy.joules / energy.lasted_s, energy.source
        parts = [part for row in sample.jobs if (part := self._part(row, last, sample)) is not None]
        for key, joules in split(energy, parts, node.spec.cpus, declared).jobs_j.items():
            use = JobId(key[0]), key[1], sample.node, energy.source
            self._unwritten[use] = self._unwritten.get(use, 0.0) + joules

    def _part(self, row: JobRow, last: _Metered, sample: NodeSample) -> JobPart | None:
        key, node = (row.job_id, row.attempt), sample.node
        job = self._job(key, node)
        share = next((share for share in job.holding if share.node == node), None) if job is not None else None
        if job is None or share is None:
            return None
        before_s = last.cpu_s.get(key)
        if before_s is None:  # it has begun since the last look, or was not seen then
            is_new = (job.allocated_at_s or 0.0) >= last.sample.received_at_s
            before_s = 0.0 if is_new else _cpu_time(row)
        gpus = {str(index): share.gpu_part for index in share.gpus}
        lasted_s = max(1e-3, sample.received_at_s - last.sample.received_at_s)
        held_s = min(lasted_s, max(0.0, sample.received_at_s - (job.allocated_at_s or 0.0)))
        cpus = share.cpus * held_s / lasted_s
        return JobPart(key=key, cpu_s=max(0.0, _cpu_time(row) - before_s), cpus=cpus, gpus=gpus)

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
        marks = {str(name): _mark(self._nodes[name]) for name in self._changed if name in self._nodes}
        self._changed.clear()
        if uses:
            self._keep(lambda tx: tx.put_energy(uses, marks))


def _mark(metered: _Metered) -> str:
    """Return what the next controller needs of a node's meters."""
    sample = metered.sample
    values = {
        column.key: value
        for column, value in zip(sample.columns, sample.values, strict=True)
        if column.series.name in _MARKED and value is not None
    }
    cpu_s = [[*key, seconds] for key, seconds in metered.cpu_s.items()]
    return json.dumps({"boot_id": sample.boot_id, "at_s": sample.received_at_s, "values": values, "cpu_s": cpu_s})


def _marked(node: NodeName, mark: str) -> _Metered | None:
    """Return what a mark says, None if there is none or it is damaged."""
    try:
        read = json.loads(mark)
        known = [(read_column(key, SAMPLED), float(value)) for key, value in read["values"].items()]
        sample = NodeSample(
            node=node,
            boot_id=str(read["boot_id"]),
            received_at_s=float(read["at_s"]),
            columns=tuple([column for column, _ in known if column is not None]),
            values=tuple([value for column, value in known if column is not None]),
        )
        return _Metered(sample, {(job_id, attempt): float(seconds) for job_id, attempt, seconds in read["cpu_s"]})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _cpu_times(sample: NodeSample) -> dict[JobKey, float]:
    return {(row.job_id, row.attempt): _cpu_time(row) for row in sample.jobs}


def _cpu_time(row: JobRow) -> float:
    for column, value in zip(row.columns, row.values, strict=True):
        if column.series.name == "job_cpu_seconds_total" and value is not None:
            return float(value)
    return 0.0


class GpuLedger:
    """The GPU time of jobs, and its busy part, from samples; written as the energy is."""

    def __init__(self, cluster: ClusterState, keep: Callable[[Callable[[Transaction], Any]], None]) -> None:
        self._cluster = cluster
        self._keep = keep
        self._seen_s: dict[NodeName, float] = {}  # the last sample with GPUs
        self._unwritten: dict[tuple[JobId, int, NodeName], tuple[float, float]] = {}
        self._written_s = float("-inf")

    def sampled(self, sample: NodeSample) -> None:
        """Count what jobs held of the GPUs since the last sample, and how busy these are now."""
        busy = {
            column.labels[0]: min(1.0, max(0.0, value))
            for column, value in zip(sample.columns, sample.values, strict=True)
            if value is not None and column.series.name == "gpu_utilization_ratio"
        }
        if busy:
            last_s = self._seen_s.get(sample.node)
            self._seen_s[sample.node] = sample.received_at_s
            lasted_s = 0.0 if last_s is None else sample.received_at_s - last_s
            if 0.0 < lasted_s <= LONGEST_SAMPLE_S:
                self._count(sample.node, busy, sample.received_at_s, lasted_s)
        now_s = sample.received_at_s
        if self._unwritten and not 0.0 <= now_s - self._written_s < WRITE_EVERY_S:  # or the clock was set back
            self._write(now_s)

    def _count(self, node: NodeName, busy: Mapping[str, float], now_s: float, lasted_s: float) -> None:
        for job in self._cluster.jobs_on(node):
            share = next((share for share in job.holding if share.node == node), None)
            if share is None or not share.gpus or job.allocated_at_s is None or job.suspended_at_s is not None:
                continue
            seen_s = share.gpu_part * min(lasted_s, max(0.0, now_s - job.allocated_at_s))
            ratios = [busy[str(index)] for index in share.gpus if str(index) in busy]
            use = job.id, job.attempt, node
            before = self._unwritten.get(use, (0.0, 0.0))
            self._unwritten[use] = before[0] + seen_s * len(ratios), before[1] + seen_s * sum(ratios)

    def _write(self, now_s: float) -> None:
        uses = [GpuUse(*use, *times) for use, times in self._unwritten.items() if times[0] > 0]
        self._unwritten.clear()
        self._written_s = now_s
        if uses:
            self._keep(lambda tx: tx.put_gpu_use(uses))
