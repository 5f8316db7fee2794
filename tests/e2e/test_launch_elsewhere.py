"""Three machines, one of them without a directory that the others have: jobs submitted from there run on the others."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

from hpcsched.loopback.cluster import LocalCluster, LoopbackNode

UNSHARE = [shutil.which("unshare") or "unshare", "--mount"]


class UnlikeMachines(LocalCluster):
    """A cluster whose node n3 has an empty directory in place of `home`."""

    @property
    def home(self) -> Path:
        return self.base / "home"

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        values = super().node_values(node)
        if node.name == "n3":
            wrapper = self.base / "python-of-n3"
            hide = f'mount -t tmpfs -o size=1m none {shlex.quote(str(self.home))} && exec {shlex.quote(sys.executable)} "$@"'
            wrapper.write_text(f'#!/bin/sh\nexec {" ".join(UNSHARE)} sh -c {shlex.quote(hide)} sh "$@"\n')
            wrapper.chmod(0o755)
            values["python"] = str(wrapper)
        return values


def can_unshare() -> bool:
    done = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    if not can_unshare():
        pytest.skip("a machine with other directories needs a mount namespace: run as root")
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        (Path(directory) / "home" / "jobs").mkdir(parents=True)
        with UnlikeMachines(
            Path(directory), settings={"controller": {"requeue_delay_s": 0, "kill_wait_s": 2}}
        ) as started:
            yield started


def test_a_directory_that_one_node_lacks_costs_no_job_and_drains_that_node(cluster: UnlikeMachines) -> None:
    jobs = cluster.home / "jobs"
    first = int(
        cluster.run(
            "hsub", "--parsable", "--array=1-30", f"--chdir={jobs}", "--wrap", "echo $SLURM_ARRAY_TASK_ID"
        ).stdout
    )

    def tasks() -> list[dict[str, Any]]:
        return list(cluster.api("GET", f"/v1/job/{first}")["jobs"])

    wait_until(lambda: all(task["state"] not in ("PENDING", "CONFIGURING", "RUNNING") for task in tasks()), PATIENCE_S)
    assert {task["state"] for task in tasks()} <= {"COMPLETED", "COMPLETING"}
    outputs = sorted(int(path.read_text()) for path in jobs.glob("*.out"))
    assert outputs == list(range(1, 31))
    shown = cluster.run("hinfo", "-R").stdout
    assert "could not be started here, and could elsewhere: cannot enter the job's directory" in shown
    assert "n3" in shown
    health = cluster.run("hhealth", check=False).stdout
    assert "n3: launches" in health


def test_a_job_for_that_node_alone_is_told_the_ways_out(cluster: UnlikeMachines) -> None:
    cluster.run("hctl", "resume", "n3")
    jobs = cluster.home / "jobs"
    for command in (
        ["hrun", "-w", "n3", f"--chdir={jobs}", "true"],
        ["hsub", "--wait", "-w", "n3", f"--chdir={jobs}", "--wrap", "true"],
    ):
        done = cluster.run(*command, check=False)
        assert done.returncode
        assert "No such file or directory" in done.stderr + done.stdout
        assert "--chdir=DIR" in done.stderr + done.stdout


def test_a_full_file_system_is_said_in_the_job(cluster: UnlikeMachines) -> None:
    words = ["-w", "n3", f"--chdir={cluster.home}", "--output=full.out", "--wrap", "yes | head -c 3000000"]
    job_id = int(cluster.run("hsub", "--parsable", *words).stdout)

    def ended() -> bool:
        state = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]["state"]
        return state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    wait_until(ended, PATIENCE_S)
    said = "the file system of its output file was full when it ended"
    assert said in cluster.run("hwhy", str(job_id)).stdout
    assert said in cluster.run("hacct", "-j", str(job_id)).stdout
    assert said in cluster.run("hlogs", str(job_id)).stderr


def test_adding_such_a_machine_warns_about_its_home(cluster: UnlikeMachines, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcsched.cli.admin import node
    from hpcsched.config.load import load_config

    monkeypatch.setattr(node, "users_home", lambda: str(cluster.home))
    config = load_config(cluster.config_dir)
    found = {spec.name: list(node.describe(spec, node.look_at(config, spec), "")) for spec in config.nodes}
    assert not any("home" in line for line in found["n1"])
    assert any(line.startswith(f"! home     {cluster.home} is not the same there") for line in found["n3"])
