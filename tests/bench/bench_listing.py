"""How long squeue and hqueue take with 0, 1,000 and 10,000 jobs waiting, and how many polls a second are answered."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from hpcsched import client
from hpcsched.loopback.cluster import LocalCluster
from tests.bench.bench_commands import _wall_ms
from tests.bench.bench_recovery import CPUS, RUNNING, _counts, _cpu_s, _spec, _submit, _until
from tests.bench.figures import Figure, from_samples

BARS = {0: "<= 60 ms", 1_000: "<= 65 ms", 10_000: "<= 120 ms"}
CLIENTS = 16
REST_S = 2.0  # what the planner does after so many submissions is not measured here


def run(quick: bool) -> list[Figure]:
    """Fill a cluster of three nodes step by step."""
    rounds = 5 if quick else 15
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory), cpus=CPUS) as cluster:
        _submit(cluster, [_spec(cluster, "sleep 1000") for _ in range(RUNNING)])
        _until(lambda: _counts(cluster).get("RUNNING") == RUNNING)
        squeue = Path(cluster.run("hpcsched", "slurm-path").stdout.strip()) / "squeue"
        figures, waiting = [], 0
        for target in BARS:
            if target > waiting:
                _submit(cluster, [_spec(cluster, f"echo {i}", cpus_per_task=CPUS) for i in range(waiting, target)])
                waiting = target
                time.sleep(REST_S)
            for name, command in (("squeue", [str(squeue)]), ("hqueue -a", ["hqueue", "-a"])):
                times = [_wall_ms(command, cluster.env) for _ in range(rounds)]
                figures.append(from_samples(f"{name}, {waiting} waiting", times, "ms", bar=BARS[target]))
        figures += polls(cluster, 2.0 if quick else 10.0)
        cluster.api("POST", "/v1/cancel", {"jobs": [], "filters": {"state": "RUNNING"}})
        return figures


def polls(cluster: LocalCluster, for_s: float) -> list[Figure]:
    """Return how often a second `squeue -h -j ID -o "%i %t"` is answered by the API, asked by 16 clients at once."""
    job = cluster.api("GET", "/v1/jobs?state=PENDING")["jobs"][-1]["id"]
    path = client.query("/v1/queue", id=job, format="%i %t", noheader="1")
    answered = [0] * CLIENTS
    pid = cluster.api("GET", "/v1/ping")["pid"]
    until_s = time.monotonic() + for_s

    def poll(at: int) -> None:
        while time.monotonic() < until_s:
            response = client.request("GET", path, where=cluster.api_socket)
            assert response.body == f"{job} PD\n".encode(), response
            answered[at] += 1

    before_s = _cpu_s(pid)
    threads = [threading.Thread(target=poll, args=(at,)) for at in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    share = (_cpu_s(pid) - before_s) / for_s
    return [
        Figure(name=f"polls of one job, {CLIENTS} clients", value=sum(answered) / for_s, unit="/s", bar=">= 500 /s"),
        Figure(name="  for each second of the controller's processor", value=sum(answered) / for_s / share, unit="/s"),
    ]
