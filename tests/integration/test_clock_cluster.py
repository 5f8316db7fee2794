"""A real controller whose clock is set, and one that is down when jobs end: how long they ran, and what becomes of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killable import PATIENCE_S, KillableCluster
from waiting import wait_until

# hpcschedd whose clock is off by what a file says.
CONTROLLER = """\
import asyncio, pathlib, sys, time
from hpcsched.config.load import load_config
from hpcsched.controller.__main__ import serve
off = pathlib.Path(sys.argv[2])
sys.exit(asyncio.run(serve(load_config(pathlib.Path(sys.argv[1])), lambda: time.time() + float(off.read_text()))))
"""
HOUR_S = 3600


class ClockCluster(KillableCluster):
    """One whose head node's clock can be set."""

    def set_clock(self, off_s: float) -> None:
        path = self.base / "clock-off"
        path.with_suffix(".new").write_text(str(off_s))
        os.replace(path.with_suffix(".new"), path)

    def start_controller(self, crash_at: str = "") -> None:
        if not (self.base / "clock-off").exists():
            self.set_clock(0.0)
        with open(self.base / "hpcschedd.log", "ab") as log:
            self._controller = subprocess.Popen(
                [sys.executable, "-c", CONTROLLER, str(self.config_dir), str(self.base / "clock-off")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd="/",
            )

    def state(self, job_id: int) -> str:
        return str(self.job(job_id).get("state"))


@pytest.fixture
def cluster() -> Iterator[ClockCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with ClockCluster(Path(directory), names=("n1", "n2")) as cluster:
            yield cluster


def submit(cluster: ClockCluster, script: str, *options: str) -> int:
    words = ("hsub", "--parsable", "-o", "/dev/null", *options)
    return int(cluster.run(*words, stdin=f"#!/bin/sh\n{script}\n").stdout)


def test_e5_jobs_outlive_a_clock_that_is_set_and_are_charged_right(cluster: ClockCluster) -> None:
    gates = [cluster.share / "first", cluster.share / "second"]
    first, second = (
        submit(cluster, f"while [ ! -e {gate} ]; do sleep 0.05; done", "-t", "30", "-N2") for gate in gates
    )
    wait_until(lambda: [cluster.state(one) for one in (first, second)] == ["RUNNING"] * 2, what="the jobs to run")
    cluster.set_clock(HOUR_S)
    short = submit(cluster, "true")  # whatever makes the controller look at its clock
    wait_until(lambda: cluster.state(short) == "COMPLETED", what="a job to end on the new clock")
    assert [cluster.state(one) for one in (first, second)] == ["RUNNING"] * 2
    story = cluster.run("hctl", "story", str(first)).stdout
    assert re.search(r"clock was set forward by (0:59:5\d|1:00:0\d)", story), story
    gates[0].touch()
    wait_until(lambda: cluster.state(first) == "COMPLETED", what="the first job to end")
    assert cluster.job(first)["elapsed_s"] < HOUR_S / 2

    cluster.kill_controller()
    gates[1].touch()
    spools = [cluster.agent_root(node) / "spool" for node in ("n1", "n2")]
    end = f"*.{second}.0.batch.*/final"
    wait_until(lambda: any(list(spool.glob(end)) for spool in spools), what="the second job's end on its node's disk")
    ended_s, down_s = time.monotonic(), 1.0
    wait_until(lambda: time.monotonic() > ended_s + down_s, what="the controller to have been down for a while")
    cluster.set_clock(-HOUR_S)  # while it is down
    cluster.up()
    wait_until(lambda: cluster.state(second) == "COMPLETED", PATIENCE_S, "the second job's end to be heard of")
    job = cluster.job(second)
    heard = next(
        event for event in cluster.json("hctl", "story", "--json", str(second))["events"] if event["kind"] == "Exited"
    )
    assert heard["at_s"] - job["ended_at_s"] > down_s
    assert 0 < job["elapsed_s"] < HOUR_S / 2
