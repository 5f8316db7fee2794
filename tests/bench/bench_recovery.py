"""The controller with 10,000 jobs waiting: killed and back, at rest, and asked for many things at once."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcsched import client
from hpcsched.controller.views.routes import MAX_JOBS
from hpcsched.errors import UnavailableError
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import ArraySpec, JobSpec
from tests.bench.figures import Figure, from_samples

CPUS = 8
RUNNING = 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run(quick: bool) -> list[Figure]:
    """Measure a cluster of three nodes on which 20 jobs run and many wait for them."""
    waiting = 2_000 if quick else 10_000
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory), cpus=CPUS) as cluster:
        _submit(cluster, [_spec(cluster, "sleep 1000") for _ in range(RUNNING)])
        _until(lambda: _counts(cluster).get("RUNNING") == RUNNING)
        # Each a script of its own, as if 10,000 different ones had been submitted.
        _submit(cluster, [_spec(cluster, f"echo {i}", cpus_per_task=CPUS) for i in range(waiting)])
        figures = [*recovery(cluster, waiting, 3 if quick else 5), *at_rest(cluster, waiting, 5.0 if quick else 20.0)]
        figures.append(cancel_all(cluster, waiting))
        figures.append(array(cluster, waiting, 3 if quick else 5))
        cluster.api("POST", "/v1/cancel", {"jobs": [], "filters": {"state": "RUNNING"}})
        return figures


def recovery(cluster: LocalCluster, waiting: int, rounds: int) -> list[Figure]:
    """Return how long after `kill -9` and a new start the controller lists all jobs; what runs must not notice.

    From the start of its process until a client has the whole queue: all of each job as JSON, read, and the lines that a
    user sees. Beside it the processor time that the controller had used by then: what the wait is on a machine that does
    nothing else.
    """
    what = f"{waiting} waiting, {RUNNING} running"
    return [
        *_restarts(cluster, f"kill -9 -> the whole queue as JSON, {what}", waiting, rounds, _as_json),
        *_restarts(cluster, f"kill -9 -> hqueue --all, {what}", waiting, rounds, _as_lines),
    ]


def _restarts(
    cluster: LocalCluster, name: str, waiting: int, rounds: int, asked: Callable[[LocalCluster], int]
) -> list[Figure]:
    answered, cpu, floor = [], [], []
    for _ in range(rounds):
        before = _running(cluster)
        pid = cluster.api("GET", "/v1/ping")["pid"]
        os.kill(pid, signal.SIGKILL)
        _until(lambda: not _answers(cluster))
        started_s = time.perf_counter()
        pid = _start(cluster)
        assert _first_answer(cluster, asked) == waiting + RUNNING
        answered.append(time.perf_counter() - started_s)
        cpu.append(_cpu_s(pid))
        _until(lambda: all(node["link"] == "up" for node in cluster.api("GET", "/v1/nodes")["nodes"]))
        assert _running(cluster) == before
        floor.append(_python_start_s())
    python_s = statistics.median(floor)
    return [
        from_samples(name, answered, "s", bar="<= 1 s, reach 0.3", floor=python_s, floor_name="python3 -c pass"),
        from_samples("  of which the controller's processor time", cpu, "s"),
    ]


def _first_answer(cluster: LocalCluster, asked: Callable[[LocalCluster], int]) -> int:
    while True:
        try:
            return asked(cluster)
        except UnavailableError:
            time.sleep(0.005)


def _as_json(cluster: LocalCluster) -> int:
    return len(cluster.api("GET", "/v1/jobs")["jobs"])


def _as_lines(cluster: LocalCluster) -> int:
    return cluster.run("hqueue", "--all", "--noheader").stdout.count("\n")


def _python_start_s() -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started_s


def at_rest(cluster: LocalCluster, waiting: int, for_s: float) -> list[Figure]:
    """Return the controller's memory and its share of a core while nothing happens."""
    pid = cluster.api("GET", "/v1/ping")["pid"]
    time.sleep(2.0)
    before_s = _cpu_s(pid)
    time.sleep(for_s)
    share = (_cpu_s(pid) - before_s) / for_s * 100
    return [
        Figure(name=f"at rest, {waiting} waiting: CPU", value=share, unit="% of a core", bar="<= 2 %"),
        Figure(name=f"{waiting} waiting: RSS", value=_rss_mb(pid), unit="MB", bar="<= 160 MB"),
    ]


def cancel_all(cluster: LocalCluster, waiting: int) -> Figure:
    """Return how long one request to cancel all waiting jobs takes, durable."""
    started_s = time.perf_counter()
    done = cluster.api("POST", "/v1/cancel", {"jobs": [], "filters": {"state": "PENDING"}})
    took_s = time.perf_counter() - started_s
    assert len(done["jobs"]) == waiting
    return Figure(name=f"cancel {waiting} waiting jobs", value=took_s, unit="s", bar="<= 1 s")


def array(cluster: LocalCluster, tasks: int, rounds: int) -> Figure:
    """Return how long the submission of an array takes, durable."""
    samples = []
    for _ in range(rounds):
        spec = _spec(cluster, "true", cpus_per_task=CPUS, array=ArraySpec(indices=tuple(range(tasks))))
        started_s = time.perf_counter()
        _submit(cluster, [spec])
        samples.append((time.perf_counter() - started_s) * 1000)
        cluster.api("POST", "/v1/cancel", {"jobs": [], "filters": {"state": "PENDING"}})
        time.sleep(1.0)  # the planner's pause
    return from_samples(f"array of {tasks} tasks: submitted and acknowledged", samples, "ms", bar="<= 100 ms")


def _start(cluster: LocalCluster) -> int:
    with open(cluster.base / "hpcschedd.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcsched.controller", "--config", str(cluster.config_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=cluster.env,
            cwd="/",
            start_new_session=True,
        )
    return process.pid


def _answers(cluster: LocalCluster) -> bool:
    try:
        cluster.api("GET", "/v1/ping")
    except UnavailableError:
        return False
    return True


def _running(cluster: LocalCluster) -> list[tuple[int, int, float]]:
    jobs = cluster.api("GET", "/v1/jobs?state=RUNNING")["jobs"]
    return [(job["id"], job["attempt"], job["started_at_s"]) for job in jobs]


def _counts(cluster: LocalCluster) -> dict[str, int]:
    counts: dict[str, int] = cluster.api("GET", "/v1/ping")["counts"]
    return counts


def _spec(cluster: LocalCluster, script: str, **fields: Any) -> JobSpec:
    return JobSpec(
        name="bench",
        script=f"#!/bin/sh\n{script}\n",
        work_dir=str(cluster.share),
        stdout="/dev/null",
        mem_per_node_mib=10,
        **fields,
    )


def _submit(cluster: LocalCluster, specs: list[JobSpec]) -> None:
    for at in range(0, len(specs), MAX_JOBS):
        body = {"request_id": uuid.uuid4().hex, "jobs": [spec_to_json(spec) for spec in specs[at : at + MAX_JOBS]]}
        client.call("POST", "/v1/submit", body, where=cluster.api_socket)


def _until(cond: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not cond():
        if time.monotonic() > deadline_s:
            raise AssertionError("waited too long")
        time.sleep(0.005)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
