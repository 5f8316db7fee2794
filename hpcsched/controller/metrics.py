"""Collect metrics in the controller, and make the pages that Prometheus reads.

Samples of nodes come here from the links, and are turned into lines of text at once, some microseconds
for each node. Ticks, plans, commits and requests are counted as they happen. When somebody asks, the
rest is counted from the cluster's state in slices, so that no tick waits, and the lines are joined.
No file and no node is asked then. The recorder gets the same samples (`listeners`).

Rules:
- A node says things of itself and of its jobs only. It is read at most `EARLY` times as often as asked.
- What `[privacy]` hides from an identity is not on its page: other nodes, other jobs, names, counts.
- The number of series is bounded: columns of a node, jobs on the page, routes.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import hpcsched
from hpcnode.wire import protocol
from hpcsched.api.connection_limits import AnswerPauses
from hpcsched.api.views import node_state, visible_nodes
from hpcsched.auth.authorize import Action, Identity, Reach, allows, reach
from hpcsched.errors import report_fault
from hpcsched.lifecycle.events import EndRequested, JobEvent, Started
from hpcsched.metrics import slurm
from hpcsched.metrics.exposition import Histogram, Page, family_of, number_text, prefix_of
from hpcsched.metrics.series import TABLE, Column, Group, JobRow, NodeSample, SampleReader, label_value
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, FINAL, Hold, Job, JobState, LiveUse
from hpcsched.model.node import Link, Node, NodeState
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import WriteBatch

log = logging.getLogger("hpcsched.metrics")

SLICE_S = 0.002  # of the event loop's time, at once
EARLY = 4  # samples may come this much more often than asked
LEAST_PAUSE_S = 0.2
OLD_INTERVALS = 3  # a sample that is older is not shown
MAX_ROUTES = 300
MAX_ENDED = 20_000  # ended jobs that are remembered, so that each counts once
COMPLAIN_S = 3600.0
ALLOCATIONS_S = 1.0  # between looks for jobs without a script
PROCESS_S = 10.0  # between looks at the controller's own memory
ERRORS_S, ERRORS_KEPT = 300.0, 13  # between counts of errors that are kept, for an hour
ERROR_COUNTS = frozenset({
    "node_ecc_errors_total", "node_network_errors_total", "node_network_carrier_changes_total", "node_throttled_total",
    "node_oom_kills_total", "gpu_ecc_errors_total",
})  # fmt: skip
CONDITIONS = frozenset({
    "node_filesystem_answers", "node_filesystem_read_only", "node_filesystem_free_inodes", "node_filesystem_free_bytes",
    "node_filesystem_size_bytes", "node_on_mains", "node_swap_used_bytes", "node_memory_total_bytes", "gpu_driver_answers",
    "gpu_throttle",
})  # fmt: skip

NO_PROCESS = (Column(TABLE["job_processes"], ()),)  # columns of a job of which nothing runs on a node


class _JobLook(NamedTuple):
    """What a job used on a node at a sample; `busy`: CPUs since the sample before."""

    attempt: int
    at_s: float
    values: dict[str, float]  # by series
    busy: float | None


class _Errors(NamedTuple):
    """The counts of errors of a node at a sample, by column."""

    at_s: float
    boot_id: str
    counts: dict[str, int | float]


@dataclass(slots=True)
class _OfNode:
    """What is kept of a node: its reader, its last sample, and that sample's lines by series."""

    reader: SampleReader
    sample: NodeSample | None = None
    prefixes: tuple[tuple[str, str], ...] = ()  # (series, beginning of the line) of each column
    lines: dict[str, str] = field(default_factory=dict)
    looks: dict[JobId, _JobLook] = field(default_factory=dict)  # not every sample has jobs
    errors: deque[_Errors] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    ahead_s: float | None = None  # the node's clock minus ours, at the last sample
    last_s: float = float("-inf")
    seen_rejected: int = 0
    complained_s: float = float("-inf")


class ControllerMetrics:
    """The controller's metrics. `listeners` are called with each sample that was accepted."""

    def __init__(self, cluster: ClusterState, started_s: float = 0.0) -> None:
        self._cluster = cluster
        cluster.live_use = self.live_use
        self._nodes: dict[NodeName, _OfNode] = {}
        self.listeners: list[Callable[[NodeSample], None]] = []
        self.step_nodes: Callable[[JobId], Collection[NodeName]] | None = None  # where steps of the job run
        self.started_s = started_s
        self._accepted = self._rejected = 0
        self.tick = Histogram(TABLE["tick_seconds"].buckets)
        self.plan = Histogram(TABLE["plan_seconds"].buckets)
        self.last_plan_s = self.longest_plan_s = 0.0
        self.commit = Histogram(TABLE["commit_seconds"].buckets)
        self._requests: dict[tuple[str, str], Histogram] = {}
        self.submitted = self.preempted = self.requeued = self.started = 0
        self.ended: Counter[tuple[str, str]] = Counter()
        self._waits: dict[str, Histogram] = {}
        self._runs: dict[str, Histogram] = {}
        self._launches = Histogram(TABLE["job_launch_seconds"].buckets)
        self._allocations: dict[NodeName, list[Job]] = {}  # running jobs without a script by node
        self._allocations_s = float("-inf")
        self._over: OrderedDict[JobId, None] = OrderedDict()  # a dict searches for its first key behind deleted ones
        self._restarts = {job.id: job.restarts for job in cluster.jobs.values() if job.restarts}
        self._process: dict[str, float] = {}
        self._process_s = float("-inf")
        self._page_s = 0.0

    # ----- what happens

    def planned(self, took_s: float) -> None:
        """Count a part of a scheduling pass."""
        self.plan.observe(took_s)
        self.last_plan_s, self.longest_plan_s = took_s, max(took_s, self.longest_plan_s)

    def request(self, route: str, status: int, took_s: float) -> None:
        """Count an answered request."""
        key = (route, str(status))
        found = self._requests.get(key)
        if found is None and len(self._requests) < MAX_ROUTES:
            found = self._requests[key] = Histogram(TABLE["http_request_seconds"].buckets)
        if found is not None:
            found.observe(took_s)

    def committed(self, batch: WriteBatch) -> None:
        """Count what a commit changed."""
        self.submitted += sum(map(len, batch.submitted))
        for event in batch.events:
            self._happened(event, batch.jobs.get(event.job_id))
        for job in batch.jobs.values():
            if job.restarts > self._restarts.get(job.id, 0):
                self.requeued += job.restarts - self._restarts.get(job.id, 0)
                self._restarts[job.id] = job.restarts
            if job.state in FINAL and job.id not in self._over:
                self._has_ended(job)

    def _happened(self, event: JobEvent, job: Job | None) -> None:
        if isinstance(event, EndRequested) and event.for_job is not None:
            self.preempted += 1
        if not isinstance(event, Started) or job is None or job.started_at_s is None:
            return
        self.started += 1
        if job.attempt <= 1 and not job.restarts:
            _of(self._waits, job.partition, "job_wait_seconds").observe(max(0.0, job.started_at_s - job.submitted_at_s))
        if job.allocated_at_s is not None:
            self._launches.observe(max(0.0, job.started_at_s - job.allocated_at_s))

    def _has_ended(self, job: Job) -> None:
        self._over[job.id] = None
        if len(self._over) > MAX_ENDED:
            self._over.popitem(last=False)
        self._restarts.pop(job.id, None)
        self.ended[job.state.value, job.partition] += 1
        if job.started_at_s is not None and job.ended_at_s is not None:
            ran_s = job.ended_at_s - job.started_at_s - (job.suspended_s or 0.0)
            _of(self._runs, job.partition, "job_run_seconds").observe(max(0.0, ran_s))

    def look_at_process(self, now_s: float) -> None:
        """Read the controller's own memory and files now and then."""
        if 0.0 <= now_s - self._process_s < PROCESS_S:
            return
        self._process_s = now_s
        page = resource.getpagesize()
        virtual, resident = Path("/proc/self/statm").read_text().split()[:2]
        self._process = {
            "process_virtual_memory_bytes": int(virtual) * page,  # int: the kernel's
            "process_resident_memory_bytes": int(resident) * page,  # int: the kernel's
            "process_open_fds": len(os.listdir("/proc/self/fd")),
        }

    # ----- samples of nodes

    def order(self) -> protocol.SampleEvery:
        """Return what nodes are asked for."""
        settings = self._cluster.config.metrics
        mounts = [self._cluster.config.share] if self._cluster.config.share else []
        return protocol.SampleEvery(settings.interval_s, mounts, settings.jobs)

    def connected(self, node: NodeName, *, samples: bool) -> None:
        """Begin anew with the columns of a node. `samples`: whether its agent can send any."""
        before = self._nodes.pop(node, None)
        if samples:
            self._nodes[node] = _OfNode(SampleReader(node))
            if before is not None:  # a node does not come by a turn by connecting again
                self._nodes[node].last_s, self._nodes[node].complained_s = before.last_s, before.complained_s

    def is_sampled(self, node: NodeName) -> bool:
        """Return whether the node's agent can send samples."""
        return node in self._nodes

    def sampled(self, node: NodeName, sample: protocol.Sample, now_s: float) -> None:
        """Take a sample of a node, or drop it: nothing that a node sends raises."""
        kept = self._nodes.get(node)
        interval_s = self._cluster.config.metrics.interval_s
        if kept is None or node not in self._cluster.nodes or interval_s <= 0:
            self._rejected += 1
            return
        pause_s = now_s - kept.last_s
        if 0.0 <= pause_s < max(LEAST_PAUSE_S, interval_s / EARLY):
            kept.reader.rejected += 1
            kept.reader.why = "come too often"
            self._complain(node, kept, now_s)
            return
        kept.last_s = now_s
        known = kept.sample
        found = kept.reader.read(sample, self._cluster.nodes[node].boot_id, now_s, lambda *key: self._holds(node, *key))
        self._complain(node, kept, now_s)
        if found is None:
            return
        self._accepted += 1
        found = self._with_empty_jobs(node, found)
        if known is None or found.columns is not known.columns:
            kept.prefixes = tuple(
                (column.series.name, prefix_of(column.series, (node, *column.labels))) for column in found.columns
            )
        kept.sample = found
        kept.lines = _lines_of(kept.prefixes, found.values)
        kept.ahead_s = _clock_ahead_s(found)
        _count_errors(kept.errors, found)
        if found.jobs:
            looks = {row.job_id: _next_look(kept.looks.get(row.job_id), row, now_s) for row in found.jobs}
            held = {job_id: look for job_id, look in kept.looks.items() if self._holds(node, job_id, look.attempt)}
            kept.looks = held | looks
        for listener in self.listeners:
            try:
                listener(found)
            except Exception as error:
                report_fault(error, f"hand on a sample of node {node}")

    def sample_age_s(self, node: NodeName, now_s: float) -> float | None:
        """Return how old the last sample of a node is; None: there is none."""
        kept = self._nodes.get(node)
        if kept is None or kept.sample is None or self._cluster.config.metrics.interval_s <= 0:
            return None
        return max(0.0, now_s - kept.sample.received_at_s)

    def clock_ahead_s(self, node: NodeName, now_s: float) -> float | None:
        """Return how far the node's clock was ahead of ours when its last sample came.

        None: there is no fresh sample. What came before a step of our clock is not compared with the time after it.
        """
        kept = self._nodes.get(node)
        if kept is None or kept.sample is None or not self._is_fresh(kept.sample, now_s):
            return None
        return kept.ahead_s

    def hardware(self, node: NodeName, now_s: float) -> dict[str, Any] | None:
        """Return the node's conditions and errors of the last hour; None: no fresh sample."""
        kept = self._nodes.get(node)
        if kept is None or kept.sample is None or not self._is_fresh(kept.sample, now_s):
            return None
        columns = zip(kept.sample.columns, kept.sample.values, strict=True)
        conditions = {
            column.key: value for column, value in columns if value is not None and column.series.name in CONDITIONS
        }
        first, last = kept.errors[0], kept.errors[-1]
        now = _error_counts(kept.sample)
        grown = {key: value - first.counts[key] for key, value in now.items() if key in first.counts}
        return {"conditions": conditions, "errors": grown, "hours": (last.at_s - first.at_s) / 3600}

    def live_use(self, job: Job) -> LiveUse | None:
        """Return what a running job uses, None if it does not run or was not sampled yet."""
        looks: list[_JobLook] = []
        ratios: list[float] = []
        for share in job.holding if job.state in ACTIVE else ():
            kept = self._nodes.get(share.node)
            look = kept.looks.get(job.id) if kept is not None else None
            if kept is None or look is None or look.attempt != job.attempt:
                continue
            looks.append(look)
            if share.gpus and kept.sample is not None:
                ratios += _of_gpus(kept.sample, {str(index) for index in share.gpus}, {})
        if not looks:
            return None
        rates = [look.busy for look in looks if look.busy is not None]

        def total(series: str) -> float:
            return sum(look.values.get(series, 0.0) for look in looks)

        return LiveUse(
            at_s=max(look.at_s for look in looks),
            cpu_s=total("job_cpu_seconds_total"),
            busy_cpus=sum(rates) if rates else None,
            memory_bytes=total("job_memory_bytes"),
            processes=total("job_processes"),
            gpu_ratio=sum(ratios) / len(ratios) if ratios else None,
        )

    def _with_empty_jobs(self, node: NodeName, found: NodeSample) -> NodeSample:
        """Add the jobs that hold the node and have no process there.

        A job without a script has nothing on a node but its steps, so that the node does not know it between them.
        """
        if self.step_nodes is None or not self._cluster.config.metrics.jobs:
            return found
        told = {row.job_id for row in found.jobs}
        empty = [
            JobRow(job_id=job.id, attempt=job.attempt, columns=NO_PROCESS, values=(0,))
            for job in self._without_script(found.received_at_s).get(node, ())
            if job.id not in told and self._holds(node, job.id, job.attempt) and node not in self.step_nodes(job.id)
        ]
        return replace(found, jobs=(*found.jobs, *empty)) if empty else found

    def _without_script(self, now_s: float) -> dict[NodeName, list[Job]]:
        """Return the running jobs without a script by node, as they were at most a second ago."""
        if not 0.0 <= now_s - self._allocations_s < ALLOCATIONS_S:
            self._allocations, self._allocations_s = {}, now_s
            for job in self._cluster.active_jobs():
                for node in job.held_nodes if job.state is JobState.RUNNING and not job.spec.has_script else ():
                    self._allocations.setdefault(node, []).append(job)
        return self._allocations

    def _holds(self, node: NodeName, job_id: int, attempt: int) -> bool:
        job = self._cluster.jobs.get(JobId(job_id))
        return job is not None and job.attempt == attempt and node in job.held_nodes

    def _complain(self, node: NodeName, kept: _OfNode, now_s: float) -> None:
        """Log once an hour that samples of a node were rejected."""
        more = kept.reader.rejected - kept.seen_rejected
        self._rejected += more
        kept.seen_rejected = kept.reader.rejected
        if more and now_s - kept.complained_s > COMPLAIN_S:
            kept.complained_s = now_s
            log.warning("dropped what node %s sampled: its samples %s", node, kept.reader.why)

    # ----- the page

    async def page(self, identity: Identity, now_s: float, *, open_metrics: bool = False) -> bytes:
        """Return the page of metrics that this identity may see."""
        began_s = time.perf_counter()
        view = await MetricsView.of(self._cluster, identity)
        page = Page()
        self._own(page)
        self._queue(page, view, now_s)
        await self._capacity(page, view, now_s)
        await self._samples(page, view, now_s)
        if self._cluster.config.metrics.jobs:
            await self._jobs(page, view, now_s)
        slices, parts = AnswerPauses(SLICE_S), []
        for part in page.parts(open_metrics=open_metrics):
            parts.append(part.encode("utf-8", "replace"))
            await slices.between()
        self._page_s = time.perf_counter() - began_s
        return b"".join(parts)

    def _own(self, page: Page) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        put = page.add
        put(TABLE["build_info"], (hpcsched.__version__,), 1)
        put(TABLE["controller_start_time_seconds"], (), self.started_s)
        put(TABLE["controller_epoch"], (), self._cluster.epoch)
        if (backup := self._cluster.backup) is not None:
            put(TABLE["backup_newest_time_seconds"], (), backup.newest_at_s)
            put(TABLE["backup_interval_seconds"], (), self._cluster.config.backup.every)
            put(TABLE["backup_failed"], (), int(bool(backup.why)))
        for name, found in (("tick_seconds", self.tick), ("plan_seconds", self.plan), ("commit_seconds", self.commit)):
            page.histogram(TABLE[name], (), found)
        for key, found in list(self._requests.items()):
            page.histogram(TABLE["http_request_seconds"], key, found)
        put(TABLE["metrics_snapshot_seconds"], (), self._page_s)
        put(TABLE["node_samples_total"], (), self._accepted)
        put(TABLE["node_samples_rejected_total"], (), self._rejected)
        put(TABLE["process_cpu_seconds_total"], (), usage.ru_utime + usage.ru_stime)
        for name, value in self._process.items():
            put(TABLE[name], (), value)
        put(TABLE["process_start_time_seconds"], (), self.started_s)

    def _queue(self, page: Page, view: MetricsView, now_s: float) -> None:
        put = page.add
        for (state, partition), count in sorted(view.by_state.items()):
            put(TABLE["jobs"], (state, partition), count)
        for reason, count in sorted(view.by_reason.items()):
            put(TABLE["jobs_pending"], (reason,), count)
        for partition, since_s in sorted(view.oldest_s.items()):
            put(TABLE["oldest_pending_seconds"], (partition,), max(0.0, now_s - since_s))
        used: Counter[str] = Counter()
        for job in self._cluster.active_jobs():
            used.update(dict(job.spec.licenses))
        for name, total in self._cluster.config.accounting.licenses:
            put(TABLE["licenses"], (label_value(name),), total)
            put(TABLE["licenses_used"], (label_value(name),), used[name])
        if view.sees_reservations:
            for one in self._cluster.reservations.values():
                put(TABLE["reservation_active"], (label_value(one.name),), 1 if one.is_active(now_s) else 0)
        if not view.sees_all_jobs:
            return  # of all jobs, even as sums
        put(TABLE["jobs_submitted_total"], (), self.submitted)
        for key, count in sorted(self.ended.items()):
            put(TABLE["jobs_ended_total"], key, count)
        for name, found in (("job_wait_seconds", self._waits), ("job_run_seconds", self._runs)):
            for partition, histogram in sorted(found.items()):
                page.histogram(TABLE[name], (partition,), histogram)
        page.histogram(TABLE["job_launch_seconds"], (), self._launches)
        put(TABLE["preemptions_total"], (), self.preempted)
        put(TABLE["requeues_total"], (), self.requeued)

    async def _capacity(self, page: Page, view: MetricsView, now_s: float) -> None:
        slices = AnswerPauses(SLICE_S)
        for row in view.node_rows(now_s):
            name = (row.node.name,)
            page.add(TABLE["node_up"], name, int(row.node.link is Link.UP))
            page.add(TABLE["node_state"], (*name, row.state.value.lower()), 1)
            page.add(TABLE["node_cpus"], name, row.node.spec.cpus)
            page.add(TABLE["node_cpus_allocated"], name, row.cpus)
            page.add(TABLE["node_memory_bytes"], name, row.node.spec.mem_mib << 20)
            page.add(TABLE["node_memory_allocated_bytes"], name, row.mem_mib << 20)
            page.add(TABLE["node_gpus"], name, len(row.node.spec.gpus))
            page.add(TABLE["node_gpus_allocated"], name, len(row.gpus))
            kept = self._nodes.get(row.node.name)
            if kept is not None and kept.sample is not None:
                page.add(TABLE["node_sample_age_seconds"], name, max(0.0, now_s - kept.sample.received_at_s))
            await slices.between()

    async def slurm_page(self, identity: Identity, which: str, now_s: float, *, open_metrics: bool = False) -> bytes:
        """Return one of the pages of Slurm's metrics: a name of `slurm.PAGES`."""
        cluster = self._cluster
        view = await MetricsView.of(cluster, identity)
        if which == "scheduler":
            page = slurm.scheduler_page(self._schedulers(view, now_s))
        elif which == "nodes":
            page = slurm.nodes_page(self._slurm_nodes(view, now_s).values())
        else:
            page = await self._slurm_jobs(view, identity, which, now_s)
        return page.text(open_metrics=open_metrics).encode("utf-8", "replace")

    async def _slurm_jobs(self, view: MetricsView, identity: Identity, which: str, now_s: float) -> Page:
        """Count the jobs in memory, with those that ended lately."""
        everywhere: Counter[str] = Counter()
        users: dict[str, Counter[str]] = {}
        accounts: dict[str, Counter[str]] = {}
        parts: dict[str, Counter[str]] = {name: Counter() for name in self._cluster.partitions}
        async for job in jobs_in_slices(self._cluster, tuple(self._cluster.jobs)):
            if not view.sees_all_jobs and not allows(identity, Action.VIEW_JOBS, job):
                continue
            made = slurm_job(job)
            for counts in (
                everywhere,
                users.setdefault(job.user, Counter()),
                accounts.setdefault(job.account, Counter()),
            ):
                slurm.count_job(counts, made)
            for name in made.partitions:
                if name in parts:
                    slurm.count_job(parts[name], made)
                    slurm.count_waiting(parts[name], made)
        if which == "jobs":
            return slurm.jobs_page(everywhere)
        if which == "jobs-users-accts":
            return slurm.users_page(users, accounts)
        nodes = self._slurm_nodes(view, now_s)
        in_them = {
            one.name: [nodes[name] for name in one.nodes if name in nodes] for one in self._cluster.partitions.values()
        }
        return slurm.partitions_page(parts, in_them)

    def _slurm_nodes(self, view: MetricsView, now_s: float) -> dict[NodeName, slurm.SlurmNode]:
        free = {
            kept.sample.node: kept.sample.known().get("node_memory_available_bytes")
            for kept in self.fresh(view, now_s)
            if kept.sample is not None
        }
        completing = {
            node for job in self._cluster.active_jobs() if job.state is JobState.COMPLETING for node in job.held_nodes
        }
        made = {}
        for row in view.node_rows(now_s):
            name, spec = row.node.name, row.node.spec
            known = free.get(name)
            made[name] = slurm.SlurmNode(
                name=name,
                state=row.state.value,
                cpus=spec.cpus,
                cpus_alloc=row.cpus,
                gpus=len(spec.gpus),
                gpus_alloc=len(row.gpus),
                memory_bytes=spec.mem_mib << 20,
                memory_alloc_bytes=row.mem_mib << 20,
                free_bytes=None if known is None else round(known),
                is_completing=name in completing,
            )
        return made

    def _schedulers(self, view: MetricsView, now_s: float) -> dict[str, float]:
        """Return the figures of the scheduler that exist here. Slurm's times are microseconds."""
        states: Counter[str] = Counter()
        for (state, _), count in view.by_state.items():
            states[state] += count
        found: dict[str, float] = {
            "server_thread_cnt": 1,
            "sched_stats_timestamp": now_s,
            "sdiag_job_states_ts": now_s,
            "last_proc_req_start": self.started_s,
            "sdiag_jobs_pending": states["pending"],
            "sdiag_jobs_running": states["running"],
            "schedule_queue_len": states["pending"],
            "schedule_cycle_cnt": self.plan.count,
            "schedule_cycle_tot": 1e6 * self.plan.total,
            "schedule_cycle_last": 1e6 * self.last_plan_s,
            "schedule_cycle_max": 1e6 * self.longest_plan_s,
            "sched_mean_cycle": 1e6 * self.plan.total / max(1, self.plan.count),
            "sched_exit_end": self.plan.count,
        }
        if view.sees_all_jobs:
            ended: Counter[str] = Counter()
            for (state, _), count in self.ended.items():
                ended["canceled" if state == "CANCELLED" else "completed" if state == "COMPLETED" else "failed"] += (
                    count
                )
            found |= {f"sdiag_jobs_{name}": count for name, count in ended.items()}
            found |= {"sdiag_jobs_submitted": self.submitted, "sdiag_jobs_started": self.started}
        return found

    def fresh(self, view: MetricsView, now_s: float) -> list[_OfNode]:
        """Return what is kept of the visible nodes whose sample is not too old."""
        return [
            kept
            for name in view.nodes
            if (kept := self._nodes.get(name)) is not None
            and kept.sample is not None
            and self._is_fresh(kept.sample, now_s)
        ]

    def _is_fresh(self, sample: NodeSample, now_s: float) -> bool:
        return sample.received_at_s >= now_s - OLD_INTERVALS * max(1.0, self._cluster.config.metrics.interval_s)

    async def _samples(self, page: Page, view: MetricsView, now_s: float) -> None:
        slices, fresh = AnswerPauses(SLICE_S), self.fresh(view, now_s)
        for series in TABLE.values():
            if series.group in (Group.NODE, Group.GPU):
                lines = [kept.lines[series.name] for kept in fresh if series.name in kept.lines]
                if lines:
                    page.chunk(family_of(series), *lines)
                await slices.between()

    async def _jobs(self, page: Page, view: MetricsView, now_s: float) -> None:
        """Add the jobs that have run for longest, up to `max_jobs`."""
        slices = AnswerPauses(SLICE_S)
        running = sorted(view.running, key=lambda job: (job.started_at_s or now_s, job.id))
        for job in running[: self._cluster.config.metrics.max_jobs]:
            labels = (job.display_id,)
            names = (job.user, job.account, job.partition, job.spec.name)
            page.add(TABLE["job_info"], (*labels, *map(label_value, names)), 1)
            for series, value in self._of_job(job, now_s).items():
                page.add(TABLE[series], labels, value)
            await slices.between()

    def _of_job(self, job: Job, now_s: float) -> dict[str, float]:
        """Return the values of a running job, summed over its nodes."""
        holding = job.holding
        found: dict[str, float] = {
            "job_memory_limit_bytes": sum(share.mem_mib for share in holding) << 20,
            "job_cpus": sum(share.cpus for share in holding),
            "job_gpus": sum(share.gpu_amount for share in holding),
        }
        ratios: list[float] = []
        for share in holding:
            kept = self._nodes.get(share.node)
            if kept is None or kept.sample is None:
                continue
            for row in kept.sample.jobs:
                if (row.job_id, row.attempt) == (job.id, job.attempt):
                    for column, value in zip(row.columns, row.values, strict=True):
                        if value is not None:
                            found[column.series.name] = found.get(column.series.name, 0) + value
            if share.gpus:
                ratios += _of_gpus(kept.sample, {str(index) for index in share.gpus}, found)
        if ratios:
            found["job_gpu_utilization_ratio"] = sum(ratios) / len(ratios)
        return found | self._training(job, now_s)

    def _training(self, job: Job, now_s: float) -> dict[str, float]:
        status = self._cluster.training.get(job.id)
        if status is None or status.attempt != job.attempt:
            return {}
        known: dict[str, float | None] = {
            "job_training_step": status.step,
            "job_training_steps": status.total_steps or None,
            "job_training_samples_per_second": status.samples_per_s or None,
            "job_training_loss": status.loss,
            "job_training_goodput_ratio": status.goodput,
            "job_training_checkpoint_step": status.checkpoint_step or None,
            "job_training_report_age_seconds": max(0.0, now_s - status.at_s),
        }
        return {name: value for name, value in known.items() if value is not None}


def _of(found: dict[str, Histogram], partition: str, name: str) -> Histogram:
    if partition not in found:
        found[partition] = Histogram(TABLE[name].buckets)
    return found[partition]


def _lines_of(prefixes: Sequence[tuple[str, str]], values: Iterable[float | None]) -> dict[str, str]:
    """Return the lines of a node's sample by series."""
    lines: dict[str, str] = {}
    for (name, prefix), value in zip(prefixes, values, strict=True):
        if value is not None:
            lines[name] = f"{lines.get(name, '')}{prefix}{number_text(value)}\n"
    return lines


def _error_counts(sample: NodeSample) -> dict[str, int | float]:
    columns = zip(sample.columns, sample.values, strict=True)
    return {column.key: value for column, value in columns if value is not None and column.series.name in ERROR_COUNTS}


def _clock_ahead_s(sample: NodeSample) -> float | None:
    for column, value in zip(sample.columns, sample.values, strict=True):
        if column.series.name == "node_time_seconds" and value is not None:
            return value - sample.received_at_s
    return None


def _count_errors(errors: deque[_Errors], sample: NodeSample) -> None:
    """Keep the counts of errors every few minutes; forget those before a restart."""
    if errors and errors[0].boot_id != sample.boot_id:
        errors.clear()
    if not errors or abs(sample.received_at_s - errors[-1].at_s) >= ERRORS_S:
        errors.append(_Errors(sample.received_at_s, sample.boot_id, _error_counts(sample)))


def _next_look(before: _JobLook | None, row: JobRow, now_s: float) -> _JobLook:
    named = zip(row.columns, row.values, strict=True)
    values = {column.series.name: float(value) for column, value in named if value is not None}
    busy = None
    if before is not None and before.attempt == row.attempt and now_s > before.at_s:
        used_s = values.get("job_cpu_seconds_total", 0.0) - before.values.get("job_cpu_seconds_total", 0.0)
        busy = used_s / (now_s - before.at_s) if used_s >= 0 else None
    return _JobLook(row.attempt, now_s, values, busy)


def _of_gpus(sample: NodeSample, gpus: set[str], found: dict[str, float]) -> list[float]:
    """Add the memory of these GPUs of a node to `found`; return how busy each is."""
    ratios = []
    for column, value in zip(sample.columns, sample.values, strict=True):
        if value is None or not column.labels or column.labels[0] not in gpus:
            continue
        if column.series.name == "gpu_utilization_ratio":
            ratios.append(float(value))
        elif column.series.name == "gpu_memory_used_bytes":
            found["job_gpu_memory_used_bytes"] = found.get("job_gpu_memory_used_bytes", 0) + value
    return ratios


def slurm_job(job: Job) -> slurm.SlurmJob:
    """Return what Slurm's pages need of a job."""
    base = job.state
    if base is JobState.CONFIGURING:
        base = JobState.RUNNING  # with a flag, as in Slurm
    elif base is JobState.COMPLETING:
        base = job.outcome or JobState.COMPLETED
    holding = job.holding
    return slurm.SlurmJob(
        state=base.value,
        user=job.user,
        account=job.account,
        partitions=tuple(job.partition.split(",")),
        is_completing=job.state is JobState.COMPLETING,
        is_configuring=job.state is JobState.CONFIGURING,
        is_held=base is JobState.PENDING and job.hold is not Hold.NONE,
        is_resizing=bool(job.joining or job.leaving),
        nodes_min=job.spec.nodes_min,
        nodes_max=job.spec.nodes_max or job.spec.nodes_min,
        cpus=sum(share.cpus for share in holding),
        gpus=sum(share.gpu_amount for share in holding),
        memory_bytes=sum(share.mem_mib for share in holding) << 20,
        nodes=len({share.node for share in holding}),
    )


# ----- the cluster as one identity sees it


@dataclass(slots=True)
class NodeRow:
    """A node with what jobs hold of it."""

    node: Node
    state: NodeState
    cpus: int
    mem_mib: int
    gpus: set[int]


@dataclass(slots=True)
class MetricsView:
    """Counts of jobs and nodes that an identity may see."""

    cluster: ClusterState
    sees_all_jobs: bool
    sees_reservations: bool
    nodes: list[NodeName] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    by_state: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    oldest_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    async def of(cls, cluster: ClusterState, identity: Identity) -> MetricsView:
        """Count in slices; the cluster may change meanwhile."""
        made = cls(
            cluster,
            sees_all_jobs=reach(identity, Action.VIEW_JOBS) is Reach.ALL,
            sees_reservations=reach(identity, Action.VIEW_RESERVATIONS) is Reach.ALL,
        )
        async for job in jobs_in_slices(cluster, (*cluster.active, *cluster.pending)):
            if made.sees_all_jobs or allows(identity, Action.VIEW_JOBS, job):
                made._count(job)
        visible = visible_nodes(cluster, identity)
        made.nodes = [name for name in cluster.nodes if name in visible]
        return made

    def _count(self, job: Job) -> None:
        self.by_state[job.state.value.lower(), job.partition] += 1
        if job.state is JobState.PENDING:
            wait = self.cluster.waits.get(job.id)
            self.by_reason[wait.reason.value if wait is not None else "None"] += 1
            self.oldest_s[job.partition] = min(self.oldest_s.get(job.partition, job.submitted_at_s), job.submitted_at_s)
        elif job.started_at_s is not None:
            self.running.append(job)

    def node_rows(self, now_s: float) -> list[NodeRow]:
        """Return the visible nodes with their state and what all jobs hold of them."""
        cluster = self.cluster
        active = [one for one in cluster.reservations.values() if one.is_active(now_s)]
        active.sort(key=lambda one: one.is_maintenance)
        reserved = {name: one for one in active for name in one.nodes}
        held: dict[NodeName, list[int]] = {}
        gpus: dict[NodeName, set[int]] = {}
        for job in cluster.active_jobs():
            for share in job.holding:
                sums = held.setdefault(share.node, [0, 0])
                sums[0] += share.cpus
                sums[1] += share.mem_mib
                gpus.setdefault(share.node, set()).update(share.gpus)
        rows = []
        for name in self.nodes:
            node = cluster.nodes[name]
            cpus, mem_mib = held.get(name, (0, 0))
            state = node_state(node, cpus, reserved.get(name))
            rows.append(NodeRow(node, state, cpus, mem_mib, gpus.get(name, set())))
        return rows


async def jobs_in_slices(cluster: ClusterState, job_ids: Sequence[JobId]) -> AsyncIterator[Job]:
    """Yield the jobs of these ids that still exist."""
    slices = AnswerPauses(SLICE_S)
    for place, job_id in enumerate(job_ids):
        job = cluster.jobs.get(job_id)
        if job is not None:
            yield job
        if place % 100 == 99:
            await slices.between()
