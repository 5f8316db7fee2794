"""How long a user waits for an answer while the controller plans for a long queue.

A controller with 1,000 pretended nodes and 10,000 jobs, whose ends keep plans going; a second process asks as hqueue does. The
floor is the same question while nothing is planned: to a controller that has no job waiting.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpcsched import client
from tests.bench.figures import Figure, from_samples

PAUSE_S = 0.02


def run(quick: bool) -> list[Figure]:
    """Measure with each of the policies."""
    for_s = 10.0 if quick else 40.0
    figures = []
    floor = _percentile(_asked("easy", 1_000, 1, 5.0)[0], 0.99)
    cases = [(policy, 1_000, 10_000) for policy in ("easy", "slurm-like", "conservative", "easy+preemption")]
    for policy, nodes, jobs in (*cases, ("easy+preemption", 300, 2_000)):
        answers_ms, told = _asked(policy, nodes, jobs, for_s)
        what = f"{policy}, {nodes:,} nodes, {jobs:,} jobs"
        figures.append(
            Figure(
                name=f"{what}: one job asked for, p99",
                value=_percentile(answers_ms, 0.99),
                unit="ms",
                bar="<= 50 ms",
                floor=floor,
                floor_name="when idle",
                samples=[round(one, 2) for one in sorted(answers_ms)[:: max(1, len(answers_ms) // 100)]],
            )
        )
        figures.append(Figure(name=f"{what}: longest answer", value=max(answers_ms), unit="ms"))
        ticks_ms = [took_s * 1000 for took_s in told["ticks_s"]]
        figures.append(from_samples(f"{what}: ticks", ticks_ms[:: max(1, len(ticks_ms) // 100)], "ms"))
        figures.append(Figure(name=f"{what}: longest tick", value=max(ticks_ms), unit="ms"))
        figures.append(Figure(name=f"{what}: jobs started", value=told["started"], unit=""))
    return figures


def _asked(policy: str, nodes: int, jobs: int, for_s: float) -> tuple[list[float], dict[str, Any]]:
    """Return how long each answer took in ms, and what the controller says of its ticks."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "api.sock"
        command = [sys.executable, "-m", "tests.bench.planning_head", str(path), str(nodes), str(jobs), policy]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
            assert head.stdout is not None
            if head.stdout.readline().strip() != "ready":
                raise RuntimeError("the controller did not start")
            answers_ms = []
            until_s = time.monotonic() + for_s
            while time.monotonic() < until_s:
                began_s = time.perf_counter()
                client.call("GET", client.query("/v1/jobs", id="1"), where=path)
                answers_ms.append((time.perf_counter() - began_s) * 1000)
                time.sleep(PAUSE_S)
            told, _ = head.communicate("stop\n", timeout=60)
            return answers_ms, json.loads(told)


def _percentile(samples: list[float], part: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(part * len(samples)))]
