"""The thin clients: wall time beside that of an empty Python, jobs per second through the command line, a large array.

Pairs run one after the other, so that a noisy machine is noisy for both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path

from hpcsched.loopback.cluster import LocalCluster
from tests.bench.figures import Figure, from_samples

EMPTY = (sys.executable, "-I", "-S", "-c", "pass")
BIN = Path(sys.executable).parent
SHELLS = 8


def run(quick: bool) -> list[Figure]:
    """Measure hsub, hqueue and hcancel against a cluster of four nodes."""
    rounds = 20 if quick else 100
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(Path(directory), ("n1", "n2", "n3", "n4"), cpus=8) as cluster,
    ):
        script = cluster.share / "job.sh"
        script.write_text("#!/bin/sh\n#SBATCH -o /dev/null\n")
        hold = (str(BIN / "hsub"), "--hold", str(script))
        return [
            _beside_python("hsub of one script", hold, cluster.env, rounds),
            _beside_python("hqueue", (str(BIN / "hqueue"),), cluster.env, rounds),
            _beside_python(
                "hcancel of one job", (str(BIN / "hcancel"),), cluster.env, rounds, map(str, range(1, rounds + 1))
            ),
            _in_a_row(hold, cluster, 200 if quick else 1000),
            _array(script, cluster, 5 if quick else 20),
            _while_they_run(script, cluster, 160 if quick else 800),
        ]


def _beside_python(
    name: str, command: Sequence[str], env: Mapping[str, str], rounds: int, operands: Iterator[str] | None = None
) -> Figure:
    words = operands or repeat("")
    floors, times = [], []
    for _ in range(rounds):
        floors.append(_wall_ms(EMPTY, os.environ))
        times.append(_wall_ms([*command, *filter(None, [next(words)])], env))
    floor = from_samples("", floors, "ms").value
    return from_samples(name, times, "ms", bar="<= 1.5x", floor=floor, floor_name="python -I -S -c pass")


def _in_a_row(command: Sequence[str], cluster: LocalCluster, count: int) -> Figure:
    """Return how many jobs a second one shell submits, one `hsub` after the other."""
    loop = f'i=0; while [ $i -lt {count} ]; do "$@" >/dev/null; i=$((i+1)); done'
    took_ms = _wall_ms(["sh", "-c", loop, "sh", *command], cluster.env)
    return Figure(
        name=f"{count} hsubs one after the other", value=count / took_ms * 1000, unit="jobs/s", bar=">= 192 /s"
    )


def _array(script: Path, cluster: LocalCluster, rounds: int) -> Figure:
    words = (str(BIN / "hsub"), "--hold", "--array=0-9999", str(script))
    times = []
    for _ in range(rounds):
        times.append(_wall_ms(words, cluster.env))
        cluster.api("POST", "/v1/cancel", {"jobs": [], "filters": {"state": "PENDING"}})
    return from_samples("hsub of an array of 10,000", times, "ms", bar="<= 30 ms")


def _while_they_run(script: Path, cluster: LocalCluster, count: int) -> Figure:
    """Return how many jobs a second go from `hsub` in one of several shells to their recorded end."""
    loop = f'i=0; while [ $i -lt {count // SHELLS} ]; do "$@" >/dev/null; i=$((i+1)); done'
    words = ["sh", "-c", loop, "sh", str(BIN / "hsub"), str(script)]
    shells = [
        threading.Thread(target=subprocess.run, args=(words,), kwargs={"env": cluster.env}) for _ in range(SHELLS)
    ]
    started_s = time.perf_counter()
    for shell in shells:
        shell.start()
    for shell in shells:
        shell.join()
    while True:
        counts = cluster.api("GET", "/v1/ping")["counts"]
        if not any(counts.get(state) for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")):
            break
        time.sleep(0.01)
    rate = count / (time.perf_counter() - started_s)
    return Figure(name=f"{count} jobs by {SHELLS} shells, while they run", value=rate, unit="jobs/s", bar="> 62 /s")


def _wall_ms(command: Sequence[str], env: Mapping[str, str]) -> float:
    started_s = time.perf_counter()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - started_s) * 1000
