"""`hwhy --slow` on a cluster: an allocation without a process, with and without a GPU, and a program that does nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import FakeGpu, GpuCluster
from waiting import wait_until

from hpcsched.metrics.findings import SlowCause

pytestmark = pytest.mark.timeout(400)
PATIENCE_S = 240.0  # ten looks at jobs, each second at most


@pytest.fixture(scope="module")
def cluster() -> Iterator[GpuCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        settings: dict[str, dict[str, object]] = {"metrics": {"interval_s": 1.0}}
        with GpuCluster(Path(directory), ["n1"], [FakeGpu("fake")], cpus=3, settings=settings) as started:
            yield started


def held(cluster: GpuCluster, *options: str) -> str:
    said = cluster.run("halloc", "--no-shell", *options).stderr
    return next(word for word in said.split() if word.isdigit())


def finding(cluster: GpuCluster, job: str) -> dict[str, Any]:
    """Return the first finding about a job, once there are enough looks at it and one."""

    def found() -> list[dict[str, Any]]:
        answer: dict[str, Any] = json.loads(cluster.run("hwhy", "--slow", "--json", job).stdout)
        return answer["findings"] if answer["looks"] >= answer["looks_needed"] else []

    return wait_until(found, PATIENCE_S, f"a finding about job {job}")[0]


def test_what_holds_resources_and_does_nothing_is_named(cluster: GpuCluster) -> None:
    empty = held(cluster, "-c1")
    with_gpu = held(cluster, "-c1", "--gres=gpu:fake:1")
    asleep = cluster.run("hsub", "--parsable", "-c1", "--wrap", "sleep 600").stdout.strip()
    for job, cause, words in (
        (empty, SlowCause.HELD_EMPTY, "holds 1 CPU, and no process of the job runs there"),
        (with_gpu, SlowCause.HELD_EMPTY, "holds 1 CPU and 1 GPU, and no process of the job runs there"),
        (asleep, SlowCause.IDLE, "uses none of the 1 CPU it holds"),
    ):
        told = finding(cluster, job)
        assert told["cause"] == cause.value
        assert words in told["text"]
    assert f"{SlowCause.HELD_EMPTY.value} on n1: holds 1 CPU" in cluster.run("hwhy", "--slow", empty).stdout
    cluster.run("hcancel", empty, with_gpu, asleep)
