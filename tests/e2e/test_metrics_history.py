"""`hctl metrics` on a cluster whose nodes are sampled each second: the recorder dies meanwhile, and the controller."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster


@pytest.fixture(scope="module")
def sampled() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        settings = {"metrics": {"interval_s": 1}}
        with LocalCluster(Path(directory), settings=settings) as started:
            yield started


def values_of(cluster: LocalCluster, target: str, series: str) -> list[float]:
    """Return the known values of the last minutes, [] if there are none yet."""
    said = cluster.run("hctl", "metrics", target, series, "--since=5m", "--step=1s", "--json", check=False)
    if said.returncode:
        return []
    return [value for row in json.loads(said.stdout)["series"] for value in row["values"] if value is not None]


def recorder_of(cluster: LocalCluster) -> int:
    """Return the process id of the recorder of this cluster's controller, 0 if it does not run."""
    controller = cluster.json("hctl", "ping", "--json")["pid"]
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"hpcsched.recorder" in words and parent == str(controller):
            return int(path.name)
    return 0


def test_a_node_has_a_history_that_survives_a_killed_recorder(sampled: LocalCluster) -> None:
    wait_until(lambda: len(values_of(sampled, "n1", "load1")) >= 3)
    listed = sampled.run("hctl", "metrics", "--list").stdout.split()
    assert "n1" in listed
    series = sampled.run("hctl", "metrics", "n1").stdout
    assert "node_memory_available_bytes" in series
    table = sampled.run("hctl", "metrics", "n1", "memory_available,cpu", "--since=5m", "--step=1s").stdout.splitlines()
    assert table[0].split()[:2] == ["TIME", "node_memory_available_bytes"]
    csv = sampled.run("hctl", "metrics", "n1", "load1", "--since=5m", "--csv").stdout.splitlines()
    assert csv[0] == "time,node_load1"
    plot = sampled.run("hctl", "metrics", "n1", "load1", "--since=5m", "--plot").stdout
    assert "node_load1  of n1  mean" in plot
    assert max(map(len, plot.splitlines())) <= 80
    wrong = sampled.run("hctl", "metrics", "n1", "lode1", check=False)
    assert (wrong.returncode, "did you mean node_load1" in wrong.stderr) == (1, True)
    first = wait_until(lambda: recorder_of(sampled))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: recorder_of(sampled) not in (0, first))
    wait_until(lambda: len(values_of(sampled, "n1", "load1")) >= 3)
