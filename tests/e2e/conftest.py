"""A cluster of three nodes behind real SSH servers, for the tests of one file; commands are run as programs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

from hpcsched.loopback.cluster import LocalCluster

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))  # for `preloaded`

QUICK = {"controller": {"requeue_delay_s": 0, "kill_wait_s": 2, "link_drops": 0}}  # nodes are lost on purpose


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # A short path: a unix socket's may have 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), settings=QUICK, server=ssh_server()) as started:
            yield started


def ssh_server() -> Any:
    """Return which SSH server to put before the nodes: in CI OpenSSH's, whose absence is then an error."""
    return "sshd" if os.environ.get("CI") == "true" else "auto"


@pytest.fixture
def sub(cluster: LocalCluster) -> Callable[..., int]:
    """Return a function that submits a script with hsub and returns the job's id."""

    def submit(script: str, *options: str) -> int:
        if not script.startswith("#!"):
            script = "#!/bin/bash\n" + script
        return int(cluster.run("hsub", "--parsable", *options, stdin=script).stdout)

    return submit


@pytest.fixture
def job(cluster: LocalCluster) -> Callable[[int], dict[str, Any]]:
    """Return a function that asks what the controller knows of a job."""
    return lambda job_id: cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]


@pytest.fixture
def ended(job: Callable[[int], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that waits until a job has ended, and returns it."""
    final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

    def wait(job_id: int, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        wait_until(lambda: job(job_id)["state"] in final, timeout_s, f"the end of job {job_id}")
        return job(job_id)

    return wait


@pytest.fixture
def running(job: Callable[[int], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that waits until a job runs, and returns it."""

    def wait(job_id: int, attempt: int = 0, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        def is_running() -> bool:
            found = job(job_id)
            return found["state"] == "RUNNING" and found["attempt"] == attempt

        wait_until(is_running, timeout_s, f"attempt {attempt} of job {job_id} to run")
        return job(job_id)

    return wait


@pytest.fixture
def output(cluster: LocalCluster) -> Callable[[int], str]:
    """Return a function that reads a job's output file, "" as long as there is none."""

    def read(job_id: int) -> str:
        path = cluster.share / f"slurm-{job_id}.out"
        return path.read_text() if path.exists() else ""

    return read
