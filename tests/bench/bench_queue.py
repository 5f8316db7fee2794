"""The controller under load and at rest: submissions, launches, latency, idle cost.

A queue of no-op jobs shows whether anything waits that could run: all nodes are on this machine, so its processors should be
busy until the queue is empty. The floor of a job's processor time is a shell that does nothing.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from hpcsched import client
from hpcsched.controller.views.routes import MAX_JOBS
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import ArraySpec, JobSpec
from tests.bench.bench_node import shell_cost
from tests.bench.figures import Figure, from_samples

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NODES = ("n1", "n2", "n3", "n4")
EIGHT = tuple(f"n{number}" for number in range(1, 9))


def run(quick: bool) -> list[Figure]:
    """Measure a cluster of four nodes."""
    count = 200 if quick else 1000
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(Path(directory), EIGHT, cpus=8, mem_mib=8192) as cluster,
    ):
        queue = [queued(cluster, 1000) for _ in range(1 if quick else 3)]
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory), NODES, cpus=8) as cluster:
        return [
            *queue_figures(queue),
            *idle(cluster, 5.0 if quick else 20.0),
            latency(cluster, 10 if quick else 30),
            *submissions(cluster, 400 if quick else 1000),
            *throughput(cluster, f"{count} no-op jobs", [_noop(cluster) for _ in range(count)], count),
            *throughput(cluster, f"array of {count} no-ops", [_noop(cluster, array=_array(count))], count),
        ]


class Drain(NamedTuple):
    """What it took to run a queue of jobs."""

    jobs_per_s: float
    busy: float  # the part of the processors' time
    cpu_ms: float  # of a job, on the whole machine


def queued(cluster: LocalCluster, count: int) -> Drain:
    """Release `count` no-op jobs that are queued, and wait for their end."""
    first = cluster.api("GET", "/v1/ping")["counts"].get("COMPLETED", 0) + 1
    _submit(cluster, [_noop(cluster, hold=True) for _ in range(count)])
    cpu_before_s, started_s = _machine_cpu_s(), time.perf_counter()
    cluster.run("hctl", "release", *map(str, range(first, first + count)))
    _wait_until_idle(cluster)
    took_s, cpu_s = time.perf_counter() - started_s, _machine_cpu_s() - cpu_before_s
    return Drain(jobs_per_s=count / took_s, busy=cpu_s / took_s / (os.cpu_count() or 1), cpu_ms=cpu_s / count * 1000)


def queue_figures(drains: list[Drain]) -> list[Figure]:
    """Return the figures of queues that were run."""
    what = "1,000 no-op jobs queued, 8 nodes"
    shell_ms = shell_cost() * 1000
    return [
        from_samples(f"{what}: released -> ended", [one.jobs_per_s for one in drains], "jobs/s", bar=">= 250 /s"),
        from_samples(f"{what}: processors busy", [100 * one.busy for one in drains], "%", bar=">= 90 %"),
        from_samples(
            f"{what}: CPU of each",
            [one.cpu_ms for one in drains],
            "ms",
            bar="<= 7 ms",
            floor=shell_ms,
            floor_name=f"a shell that does nothing ({shell_ms:.2f} ms)",
        ),
    ]


def idle(cluster: LocalCluster, for_s: float) -> list[Figure]:
    """Return the controller's share of a core and its memory while nothing happens."""
    pid = cluster.api("GET", "/v1/ping")["pid"]
    before = _cpu_s(pid)
    time.sleep(for_s)
    share = (_cpu_s(pid) - before) / for_s * 100
    return [
        Figure(name=f"idle controller, {len(NODES)} nodes: CPU", value=share, unit="% of a core", bar="<= 2 %"),
        Figure(name=f"idle controller, {len(NODES)} nodes: RSS", value=_rss_mb(pid), unit="MB", bar="<= 160 MB"),
    ]


def latency(cluster: LocalCluster, rounds: int) -> Figure:
    """Return the time from the call of hsub to the first line of the script, on an idle node."""
    samples = []
    for i in range(rounds):
        stamp = cluster.share / f"stamp-{i}"
        # Python's clock on one side and the file's change time on the other: one machine, one clock.
        script = f"#!/bin/sh\n: > {stamp}\n"
        started_s = time.time()
        cluster.run("hsub", "-o", "/dev/null", stdin=script)
        while not stamp.exists():
            time.sleep(0.001)
        samples.append((stamp.stat().st_mtime_ns / 1e9 - started_s) * 1000)
        _wait_until_idle(cluster)
    return from_samples("hsub called -> first line of the script, idle", samples, "ms", bar="<= 60 ms, reach 25")


def submissions(cluster: LocalCluster, count: int) -> list[Figure]:
    """Return how many jobs a second eight clients of the API submit, each durable before it is answered."""
    per_client = count // 8

    def one_client() -> None:
        for _ in range(per_client):
            _submit(cluster, [_noop(cluster, hold=True)])

    threads = [threading.Thread(target=one_client) for _ in range(8)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = per_client * 8 / (time.perf_counter() - started_s)
    started_s = time.perf_counter()
    _submit(cluster, [_noop(cluster, hold=True) for _ in range(count)])
    bulk = count / (time.perf_counter() - started_s)
    cluster.api("POST", "/v1/cancel", {"jobs": [], "filters": {"state": "PENDING"}})
    return [
        Figure(name="submissions, 8 clients, durable", value=rate, unit="jobs/s", bar=">= 1,000 /s, reach 3,000"),
        Figure(name=f"submissions, {count} in one call", value=bulk, unit="jobs/s", bar=">= 1,000 /s"),
    ]


def throughput(cluster: LocalCluster, what: str, specs: list[JobSpec], count: int) -> list[Figure]:
    """Return how many of `count` no-op jobs a second go from submission to their recorded end."""
    cpu_before_s, started_s = _machine_cpu_s(), time.perf_counter()
    _submit(cluster, specs)
    _wait_until_idle(cluster)
    took_s = time.perf_counter() - started_s
    cpu_ms = (_machine_cpu_s() - cpu_before_s) * 1000 / count
    return [
        Figure(
            name=f"{what}, submitted -> ended",
            value=count / took_s,
            unit="jobs/s",
            bar=">= 150 /s, reach 300",
        ),
        Figure(name=f"{what}: CPU of each, whole machine", value=cpu_ms, unit="ms", bar="<= 10, reach 5"),
    ]


def _array(count: int) -> ArraySpec:
    return ArraySpec(indices=tuple(range(count)))


def _noop(cluster: LocalCluster, **fields: object) -> JobSpec:
    return JobSpec(
        name="noop",
        script="#!/bin/sh\n",
        work_dir=str(cluster.share),
        stdout="/dev/null",
        **fields,  # type: ignore[arg-type]
    )


def _submit(cluster: LocalCluster, specs: list[JobSpec]) -> None:
    for first in range(0, len(specs), MAX_JOBS):
        jobs = [spec_to_json(spec) for spec in specs[first : first + MAX_JOBS]]
        client.call("POST", "/v1/submit", {"request_id": uuid.uuid4().hex, "jobs": jobs}, where=cluster.api_socket)


def _wait_until_idle(cluster: LocalCluster) -> None:
    while True:
        counts = cluster.api("GET", "/v1/ping")["counts"]
        if not any(counts.get(state) for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")):
            return
        time.sleep(0.01)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _machine_cpu_s() -> float:
    """Return the busy time of all processors."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_PER_S


def _rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
