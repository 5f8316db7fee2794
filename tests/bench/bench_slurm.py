"""Throughput beside Slurm's, in turns on this machine: no-op jobs through the command line, each time 64 slots on 8 nodes.

Slurm's controller answers before its state is on disk, ours after. Without Slurm here (see `slurm_cluster`), nothing is
measured.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpcsched.loopback.cluster import LocalCluster
from tests.bench import slurm_cluster
from tests.bench.bench_queue import EIGHT, _machine_cpu_s
from tests.bench.figures import Figure, from_samples

SHELLS = 8
ARRAY = 10_000


class Peer(NamedTuple):
    """A batch system that runs here."""

    name: str
    submit: str  # the command
    release: tuple[str, ...]
    cancel: tuple[str, ...]
    env: dict[str, str]
    ended: Callable[[], int]  # how many jobs have ended


def run(quick: bool) -> list[Figure]:
    """Return figures of both."""
    if not slurm_cluster.is_installed():
        print("no Slurm here (Debian: slurm-wlm, munge), or not root: nothing is measured")
        return []
    rounds, jobs = (1, 300) if quick else (3, 1000)
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, figures in (("hpcsched", _ours(jobs)), ("Slurm", _theirs(jobs))):
            for what, value in figures.items():
                samples.setdefault((what, name), []).append(value)
    return [
        from_samples(f"{what}: {name}", values, what.rpartition(", ")[2])
        for (what, name), values in sorted(samples.items())
    ]


def _ours(jobs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder), EIGHT, cpus=8, mem_mib=8192) as cluster:

        def ended() -> int:
            counts = cluster.api("GET", "/v1/ping")["counts"]
            return int(counts.get("COMPLETED", 0)) + int(counts.get("CANCELLED", 0))

        return _measure(
            Peer("hpcsched", "hsub", ("hctl", "release"), ("hcancel",), cluster.env, ended), Path(folder), jobs
        )


def _theirs(jobs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, slurm_cluster.SlurmCluster(Path(folder)) as cluster:
        ended = lambda: cluster.ended  # noqa: E731
        return _measure(
            Peer("Slurm", "sbatch", ("scontrol", "release"), ("scancel",), cluster.env, ended), Path(folder), jobs
        )


def _measure(peer: Peer, folder: Path, jobs: int) -> dict[str, float]:
    script = folder / "job.sh"
    script.write_text("#!/bin/sh\n")
    submit = (peer.submit, "-o", "/dev/null", "-e", "/dev/null")
    found: dict[str, float] = {}
    # held, one after the other; then released
    started_s = time.perf_counter()
    for _ in range(jobs):
        _call(peer, *submit, "--hold", str(script))
    found["submissions one after the other, jobs/s"] = jobs / (time.perf_counter() - started_s)
    before = peer.ended()
    cpu_s, started_s = _machine_cpu_s(), time.perf_counter()
    first = 1
    _call(peer, *peer.release, ",".join(map(str, range(first, first + jobs))))
    _until(lambda: peer.ended() - before >= jobs)
    took_s, used_s = time.perf_counter() - started_s, _machine_cpu_s() - cpu_s
    found[f"{jobs} queued jobs, jobs/s"] = jobs / took_s
    found[f"{jobs} queued jobs: CPU of each, ms"] = used_s / jobs * 1000
    found[f"{jobs} queued jobs: processors busy, %"] = 100 * used_s / took_s / (os.cpu_count() or 1)
    before, started_s = peer.ended(), time.perf_counter()
    shells = [
        threading.Thread(target=lambda: [_call(peer, *submit, str(script)) for _ in range(jobs // SHELLS)])
        for _ in range(SHELLS)
    ]
    for shell in shells:
        shell.start()
    for shell in shells:
        shell.join()
    live = jobs // SHELLS * SHELLS
    _until(lambda: peer.ended() - before >= live)
    found[f"submitted by {SHELLS} shells and run, jobs/s"] = live / (time.perf_counter() - started_s)
    started_s = time.perf_counter()
    number = _call(peer, *submit, "--hold", "--parsable", "--array", f"1-{ARRAY}", str(script)).strip()
    found[f"array of {ARRAY:,} submitted, ms"] = 1000 * (time.perf_counter() - started_s)
    _call(peer, *peer.cancel, number)
    return found


def _call(peer: Peer, *command: str) -> str:
    return subprocess.run(command, env=peer.env, capture_output=True, text=True, check=True).stdout


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.05)
