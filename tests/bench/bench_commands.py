"""How long a person waits for a command: wall time beside that of `python3 -c pass`, in pairs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path

from hpcsched.cli.admin.shell import COMMANDS, ensure_directory
from hpcsched.loopback.cluster import LocalCluster
from tests.bench.figures import Figure, from_samples

INSTALLED = (
    "hsub", "hqueue", "hcancel", "hinfo", "hprio", "hshare", "hwhy", "hlogs", "hacct", "hctl", "hhealth", "hrun", "halloc",
    "hsh", "hsim", "hpcsched",
)  # fmt: skip


def run(quick: bool) -> list[Figure]:
    """Time hsub, hqueue and the others against an idle cluster, each in turn with an empty Python."""
    rounds = 10 if quick else 40
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory)) as cluster:
        script = cluster.share / "job.sh"
        script.write_text("#!/bin/sh\ntrue\n")
        bin_dir = Path(sys.executable).parent
        commands = {
            "hsub of one script": [str(bin_dir / "hsub"), "--hold", str(script)],
            "hqueue": [str(bin_dir / "hqueue")],
            "hinfo": [str(bin_dir / "hinfo")],
            "hcancel of one job": [str(bin_dir / "hcancel")],
        }
        places = {name: bin_dir for name in INSTALLED} | dict.fromkeys(COMMANDS, ensure_directory())
        starts = {f"{name} --version": [str(place / name), "--version"] for name, place in places.items()}
        return [
            *(
                _beside_python(name, command, cluster.env, rounds, _waiting(cluster) if "of one job" in name else None)
                for name, command in commands.items()
            ),
            *(_beside_python(name, command, cluster.env, rounds // 2) for name, command in starts.items()),
        ]


def _waiting(cluster: LocalCluster) -> Iterator[list[str]]:
    """Yield the ids of the jobs that wait, one by one."""
    for job in cluster.api("GET", "/v1/jobs?state=PENDING")["jobs"]:
        yield [job["display_id"]]


def _beside_python(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    rounds: int,
    operands: Iterator[list[str]] | None = None,
) -> Figure:
    """Return how long `command`, each time with the next of `operands`, takes beside an empty Python run before it."""
    operands = operands or repeat([])
    floors, times = [], []
    for _ in range(rounds):
        floors.append(_wall_ms([sys.executable, "-c", "pass"], os.environ))
        times.append(_wall_ms([*command, *next(operands)], env))
    floor = from_samples("", floors, "ms").value
    return from_samples(name, times, "ms", bar="<= 6x", floor=floor, floor_name="python3 -c pass")


def _wall_ms(command: Sequence[str], env: Mapping[str, str]) -> float:
    started_s = time.perf_counter()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - started_s) * 1000
