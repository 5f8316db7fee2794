"""How long hreport takes over 100,000 jobs, its memory, and how long the controller lets others wait meanwhile."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from hpcsched import paths
from hpcsched.config.load import load_config
from hpcsched.loopback.cluster import LocalCluster
from tests.bench.figures import Figure, from_samples

JOBS, QUICK_JOBS = 100_000, 10_000
PING_S = 0.02
EVERY_S = 20.0  # a job; so 100,000 are 23 days
OF_A_JOB = {"jobs": "id", "events": "job_id", "steps": "job_id"}
TIMES = {
    "jobs": ("submitted_at_s", "eligible_at_s", "allocated_at_s", "started_at_s", "ended_at_s", "charged_until_s"),
    "events": ("at_s",),
    "steps": ("started_at_s", "ended_at_s"),
}


def run(quick: bool) -> list[Figure]:
    """Run one job, store it many times over a month, and report that."""
    count = QUICK_JOBS if quick else JOBS
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory), ("n1",)) as cluster:
        cluster.run("hsub", "--wait", "--wrap", "true")
        cluster.down()
        _multiply(load_config(cluster.config_dir).controller.state_dir / paths.DATABASE_FILE, count)
        cluster.up()
        cluster.wait_for_nodes()
        times, sizes, waits = [], [], []
        for _ in range(1 if quick else 3):
            took_s, mib, ping_ms = _reported(cluster)
            times.append(took_s)
            sizes.append(mib)
            waits += ping_ms
        waits.sort()
        return [
            from_samples(f"hreport of {count} jobs", times, "s", bar="<= 10 s"),
            from_samples("  its memory", sizes, "MiB", bar="<= 256 MiB"),
            Figure(
                name="  a ping meanwhile, 99 of 100", value=waits[int(0.99 * len(waits))], unit="ms", bar="<= 100 ms"
            ),
        ]


def _multiply(database: Path, count: int) -> None:
    """Store the last job `count` times, each somewhat earlier than the one before."""
    with sqlite3.connect(database) as connection:
        for table, key in OF_A_JOB.items():
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            columns = [name for name in names if name != "seq"]
            values = [
                f"{key} + n" if name == key else f"{name} - n * {EVERY_S}" if name in TIMES[table] else name
                for name in columns
            ]
            connection.execute(
                f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}) "  # noqa: S608
                f"INSERT INTO {table} ({', '.join(columns)}) "
                f"SELECT {', '.join(values)} FROM numbers, {table} WHERE {key} = (SELECT min(id) FROM jobs)"
            )
    connection.close()


def _reported(cluster: LocalCluster) -> tuple[float, float, list[float]]:
    """Return the seconds and MiB that hreport took, and the pings meanwhile in milliseconds."""
    ended, pings = threading.Event(), []

    def ping() -> None:
        while not ended.wait(PING_S):
            began_s = time.perf_counter()
            cluster.api("GET", "/v1/ping")
            pings.append(1000 * (time.perf_counter() - began_s))

    thread = threading.Thread(target=ping)
    thread.start()
    began_s = time.perf_counter()
    words = ["--csv", "--by=user", "-S", "now-60days", "use", "waits", "waste"]
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; from hpcsched.cli.hreport import main; sys.exit(main())", *words],
        env=cluster.env,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    took_s = time.perf_counter() - began_s
    child.returncode = os.waitstatus_to_exitcode(status)
    ended.set()
    thread.join()
    assert child.returncode == 0
    return took_s, usage.ru_maxrss / 1024, pings
