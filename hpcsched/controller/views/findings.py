"""Judge what slows a running job down, and what holds up the queue.

The rules for jobs are those of `hpcsched.metrics.findings`. The samples of a job and its nodes are
asked of the recorder: a few series of the last half hour. The queue is judged from the cluster's
state. Nothing here waits for a node.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from hpcsched.api.views import asked_cpus, asked_gpus
from hpcsched.controller.metrics import MetricsView, NodeRow
from hpcsched.errors import NotFoundError
from hpcsched.listing.text import date_text
from hpcsched.metrics.findings import LEAST_LOOKS, Bottleneck, NodeWindow, Values, judge, looks
from hpcsched.metrics.series import TABLE, Group
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, Reason
from hpcsched.model.node import Link, Share
from hpcsched.model.units import format_mem
from hpcsched.state.cluster import ClusterState

Json = dict[str, Any]
Ask = Callable[[Json], Awaitable[bytes]]

WINDOW_S = 1800.0
MAX_NODES = 16  # of a job that are judged: the first ones
SERIES_OF_NODE = (
    "node_cpu_seconds_total",
    "node_pressure_seconds_total",
    "node_swap_in_pages_total",
    "node_swap_out_pages_total",
    "node_network_receive_bytes_total",
    "node_network_transmit_bytes_total",
    "node_tcp_retransmits_total",
    "node_tcp_segments_sent_total",
    "node_disk_read_bytes_total",
    "node_disk_written_bytes_total",
    "node_disk_busy_seconds_total",
    "node_throttled_total",
    "node_filesystem_answers",
)
SERIES_OF_GPUS = ("gpu_utilization_ratio", "gpu_processes", "gpu_throttle")
SERIES_OF_JOB = tuple(series.name for series in TABLE.values() if series.group is Group.JOB)


async def bottlenecks_of_job(ask: Ask, cluster: ClusterState, job: Job, now_s: float) -> tuple[list[Bottleneck], int]:
    """Return what slows a running job down, and how many looks at it there are.

    Raises UnavailableError if no history is kept.
    """
    shares = job.holding[:MAX_NODES]
    interval_s = max(1.0, cluster.config.metrics.interval_s)
    began_s = max(now_s - WINDOW_S, job.started_at_s or now_s)
    period = {"ask": "series", "of": "mean", "from_s": began_s, "to_s": now_s, "step_s": interval_s, "known_only": True}
    of_job, *of_nodes = await asyncio.gather(
        _series(ask, {**period, **_source("job", str(job.id)), "series": SERIES_OF_JOB}),
        *(_series(ask, {**period, **_source("node", share.node), "series": _names_for(share)}) for share in shares),
    )
    windows = [
        _window(cluster, job, share, interval_s, of_job, of_node)
        for share, of_node in zip(shares, of_nodes, strict=True)
    ]
    status = cluster.training.get(job.id)
    note = status.note if status is not None and status.attempt == job.attempt else ""
    return judge(windows, note), looks(windows)


async def findings_of_job(ask: Ask, cluster: ClusterState, job: Job, now_s: float) -> Json:
    """Return what slows a running job down, as JSON.

    Raises UnavailableError if no history is kept.
    """
    found, count = await bottlenecks_of_job(ask, cluster, job, now_s)
    interval_s = max(1.0, cluster.config.metrics.interval_s)
    several = len(job.holding) > 1
    return {
        "version": 1,
        "job": job.display_id,
        "looks": count,
        "looks_needed": LEAST_LOOKS,
        "step_s": interval_s,
        "nodes_left_out": max(0, len(job.holding) - MAX_NODES),
        "findings": [_view(finding) for finding in found],
        "text": _text_of_job(job, found, count, interval_s, several=several),
    }


def _view(finding: Bottleneck) -> Json:
    return {**asdict(finding), "cause": finding.cause.value}


def _text_of_job(job: Job, found: list[Bottleneck], count: int, interval_s: float, *, several: bool) -> str:
    if found:
        first = found[0]
        where = f" on {first.node}" if several and first.node else ""
        return f"{first.cause.value}{where}: {first.text}"
    if count < LEAST_LOOKS:
        left_s = (LEAST_LOOKS - count) * interval_s
        return f"cannot tell yet: there are {count} looks at it, and {LEAST_LOOKS} are needed, in about {left_s:.0f} s"
    return f"nothing slows job {job.display_id} down, as far as its last {count} looks show"


def _names_for(share: Share) -> tuple[str, ...]:
    """Return the series of a node that matter for a job's share of it."""
    return (*SERIES_OF_NODE, *(f"{name}:{gpu}" for name in SERIES_OF_GPUS for gpu in share.gpus))


def _window(
    cluster: ClusterState, job: Job, share: Share, interval_s: float, of_job: list[Json], of_node: list[Json]
) -> NodeWindow:
    """Return the samples of a job on one node."""
    node = cluster.nodes[share.node]
    return NodeWindow(
        node=share.node,
        step_s=interval_s,
        cpus=share.cpus,
        node_cpus=node.spec.cpus,
        others_cpus=others_cpus(cluster, job, share),
        gpus=share.gpus,
        memory_limit_bytes=share.mem_mib << 20,
        link_bytes_per_s=node.spec.link_mbps * 1e6 / 8,
        job=_values(of_job, share.node),
        machine=_values(of_node, share.node),
    )


def others_cpus(cluster: ClusterState, job: Job, share: Share) -> int:
    """Return the CPUs that jobs hold on the machine of a share, without those of the share.

    Several nodes may be on one machine, whose counters are those of all of them.
    """
    machine = cluster.nodes[share.node].machine_id
    here = {name for name, node in cluster.nodes.items() if machine and node.machine_id == machine} | {share.node}
    held = [(one.id, part) for one in cluster.active_jobs() for part in one.holding if part.node in here]
    return sum(part.cpus for number, part in held if (number, part.node) != (job.id, share.node))


def _source(kind: str, name: str) -> Json:
    return {"kind": kind, "name": name, "target": name}


async def _series(ask: Ask, question: Json) -> list[Json]:
    """Return the series that the recorder has: of a job, for each of its nodes."""
    try:
        found: list[Json] = json.loads(await ask(question))["series"]
    except NotFoundError:
        return []
    return found


def _values(series: list[Json], node: NodeName) -> dict[str, Values]:
    """Return the values of each series on a node, by its key."""
    return {one["key"]: one["values"] for one in series if one.get("node", node) == node}


# ----- the queue


def findings_of_queue(cluster: ClusterState, view: MetricsView, now_s: float) -> Json:
    """Return what holds up the queue although resources are free."""
    waiting = [cluster.jobs[job_id] for job_id in cluster.pending]
    usable = {node.name for node in cluster.open_nodes() if node.link is Link.UP and not node.drained}
    rows = [row for row in view.node_rows(now_s) if row.node.name in usable]
    found = [*_licenses(cluster, waiting, rows), *_reservations(cluster, waiting, rows, now_s)]
    found += _fragmentation(cluster, waiting, rows)
    idle = "nothing holds up the queue but jobs that run" if waiting else "no job waits"
    text = found[0]["text"] if found else idle
    return {"version": 1, "waiting": len(waiting), "findings": found, "text": text}


def _of_queue(cause: str, text: str, remedy: str) -> Json:
    return {"cause": cause, "node": "", "text": text, "remedy": remedy}


def _waits_for(cluster: ClusterState, job: Job, *reasons: Reason) -> bool:
    wait = cluster.waits.get(job.id)
    return wait is not None and wait.reason in reasons


def _free_cpus(rows: list[NodeRow]) -> int:
    return sum(max(0, row.node.spec.cpus - row.cpus) for row in rows)


def _licenses(cluster: ClusterState, waiting: list[Job], rows: list[NodeRow]) -> Iterator[Json]:
    """Find a licence that all of is in use while jobs wait for it and CPUs are free."""
    short = [job for job in waiting if _waits_for(cluster, job, Reason.LICENSES)]
    free = _free_cpus(rows)
    if not short or not free:
        return
    for name, total in cluster.config.accounting.licenses:
        held: Counter[str] = Counter()
        for job in cluster.active_jobs():
            held[job.user] += dict(job.spec.licenses).get(name, 0)
        waits = sum(name in dict(job.spec.licenses) for job in short)
        if not waits or not sum(held.values()):
            continue
        holders = ", ".join(f"{user} {count}" for user, count in held.most_common(3) if count)
        yield _of_queue(
            "licence",
            f"{waits} jobs wait for licence {name} while {free} CPUs are free: "
            f"{sum(held.values())} of {total} are in use ({holders})",
            f"squeue --licenses={name} shows the jobs that hold it",
        )


def _reservations(cluster: ClusterState, waiting: list[Job], rows: list[NodeRow], now_s: float) -> Iterator[Json]:
    """Find a reservation that keeps nodes idle while jobs wait for nodes."""
    short = [job for job in waiting if _waits_for(cluster, job, Reason.RESOURCES, Reason.PRIORITY, Reason.RESERVATION)]
    outside = [job for job in short if not job.reservation]
    for one in cluster.reservations.values():
        kept = [row for row in rows if row.node.name in one.nodes]
        free, whole = _free_cpus(kept), sum(row.node.spec.cpus for row in kept)
        if outside and one.is_active(now_s) and not one.is_maintenance and whole and free > 0.5 * whole:
            owners = ", ".join((*one.users, *one.accounts)[:3])
            yield _of_queue(
                "reservation",
                f"reservation {one.name} keeps {compress_hostlist([row.node.name for row in kept])} for {owners} until "
                f"{date_text(one.end_s)}; {free} of its {whole} CPUs are idle, and {len(outside)} jobs wait",
                f"ask {owners}, or give its nodes back: hctl delete reservation {one.name}",
            )


class _Room(NamedTuple):
    """Free resources, or those that a job needs on a node."""

    cpus: int
    mem_mib: int
    gpus: int

    @classmethod
    def of(cls, row: NodeRow) -> _Room:
        spec = row.node.spec
        return cls(spec.cpus - row.cpus, spec.mem_mib - row.mem_mib, len(spec.gpus) - len(row.gpus))

    @classmethod
    def needed(cls, job: Job) -> _Room:
        """Return what a job needs on each of its nodes."""
        nodes = max(1, job.spec.nodes_min)
        cpus, gpus = math.ceil(asked_cpus(job) / nodes), math.ceil(asked_gpus(job) / nodes)
        return cls(cpus, max(job.spec.mem_per_node_mib or 0, cpus * (job.spec.mem_per_cpu_mib or 0)), gpus)

    def fits(self, room: _Room) -> bool:
        return all(need <= free for need, free in zip(self, room, strict=True))

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.cpus} CPUs{gpus} and {format_mem(self.mem_mib)} of memory"


def _fragmentation(cluster: ClusterState, waiting: list[Job], rows: list[NodeRow]) -> Iterator[Json]:
    """Find the first job for which all free resources suffice, and those of no node."""
    short = [job for job in waiting if _waits_for(cluster, job, Reason.RESOURCES)]
    for job in sorted(short, key=lambda job: (job.submitted_at_s, job.id)):
        nodes, need = max(1, job.spec.nodes_min), _Room.needed(job)
        partitions = [cluster.partitions[name] for name in job.partition.split(",") if name in cluster.partitions]
        places = {name for partition in partitions for name in partition.nodes}
        free = [room for row in rows if row.node.name in places and any(room := _Room.of(row))]
        whole = _Room(*map(sum, zip(*free, strict=True))) if free else _Room(0, 0, 0)
        fitting = sum(need.fits(room) for room in free)
        if job.spec.exclusive or job.reservation or fitting >= nodes:
            continue
        if _Room(*(nodes * part for part in need)).fits(whole):
            where = "one node" if nodes == 1 else f"each of {nodes} nodes"
            yield _of_queue(
                "fragmentation",
                f"{whole} are free, in pieces on {len(free)} nodes; job {job.display_id} needs {need} on {where}",
                f"hwhy {job.display_id} tells when it starts; a job of smaller parts fits now (--nodes, --cpus-per-task)",
            )
            return
