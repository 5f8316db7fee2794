"""Nodes that vanish, half-started jobs, full disks and upgrades, as users see them: a cluster with short times of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import hpcnode
from hpcsched.loopback.cluster import LocalCluster

SETTINGS = {
    "controller": {
        "requeue_delay_s": 0,
        "kill_wait_s": 1,
        "lease_s": 6,  # long enough for a command on a busy machine
        "heartbeat_s": 0.5,
        "node_down_after_s": 5,
    }
}
BEAT = "while :; do echo $HPCSCHED_ATTEMPT $(date +%s.%N) >> beats; sleep 0.05; done"
Sub = Callable[..., int]
Job = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), settings=SETTINGS) as started:
            yield started


@pytest.fixture(autouse=True)
def clean(cluster: LocalCluster) -> None:
    cluster.run("hcancel", "--user", os.environ.get("USER", "root"), check=False)
    for path in cluster.share.iterdir():
        path.unlink()


def beats(cluster: LocalCluster) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    path = cluster.share / "beats"
    for line in path.read_text().splitlines() if path.exists() else ():
        attempt, _, at = line.partition(" ")
        if at:
            found.setdefault(attempt, []).append(float(at))
    return found


def ssh_processes(cluster: LocalCluster, node: str) -> list[int]:
    """Return what connects the node with the world: its SSH server, and what the controller's session runs."""
    assert cluster.machines is not None
    found = []
    for pid in cluster.machines.processes(node):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if b"sshd" in words or b"embedded" in words or b"attach" in words:
            found.append(pid)
    return found


def test_a_job_with_a_lease_runs_elsewhere_without_anybodys_word(
    cluster: LocalCluster, sub: Sub, job: Job, running: Any
) -> None:
    assert cluster.machines is not None
    job_id = sub(BEAT, "--lease=kill", "--requeue")
    node = running(job_id)["nodes"][0]
    wait_until(lambda: "0" in beats(cluster), what="the first attempt to run")
    cluster.machines.power_off(node)
    wait_until(lambda: job(job_id)["reason"] == "NodeDown", what="the node to be missed")
    said = cluster.run("hwhy", str(job_id)).stdout
    assert "lease there has run out for certain" in said or job(job_id)["attempt"] == 1  # this machine is slow
    assert running(job_id, attempt=1)["nodes"] != [node]
    assert "lease there ran out" in cluster.run("hctl", "story", str(job_id)).stdout
    cluster.run("hcancel", str(job_id))
    cluster.machines.power_on(node)
    cluster.wait_for_nodes()


def test_behind_a_cut_cable_the_old_attempt_has_ended_before_the_new_one_starts(
    cluster: LocalCluster, sub: Sub, job: Job, running: Any
) -> None:
    job_id = sub(BEAT, "--lease=kill", "--requeue")
    node = running(job_id)["nodes"][0]
    wait_until(lambda: "0" in beats(cluster), what="the first attempt to run")
    stopped = ssh_processes(cluster, node)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        running(job_id, attempt=1)
        wait_until(lambda: "1" in beats(cluster), what="the second attempt to run")
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    cluster.wait_for_nodes()
    cluster.run("hcancel", str(job_id))
    wait_until(lambda: job(job_id)["state"] == "CANCELLED")
    seen = beats(cluster)
    assert max(seen["0"]) < min(seen["1"])


def test_a_job_on_several_nodes_starts_on_all_or_goes_back(
    cluster: LocalCluster, sub: Sub, job: Job, ended: Any
) -> None:
    assert cluster.machines is not None
    cluster.machines.freeze("n3")
    try:
        job_id = sub("echo ran $HPCSCHED_ATTEMPT >> ran", "-N3", "--no-requeue")
        wait_until(lambda: job(job_id)["state"] == "CONFIGURING")

        def waits_for_n3_alone() -> bool:
            said = cluster.run("hwhy", str(job_id)).stdout
            missed = "n3 does not answer" in said or job(job_id)["state"] == "PENDING"  # this machine is slow
            return missed or "waits for n3 to take its part" in said

        wait_until(waits_for_n3_alone, what="the other nodes to take their parts")
        wait_until(lambda: job(job_id)["state"] == "PENDING", what="the job to go back to the queue")
        assert "n3 did not answer before the job could start" in cluster.run("hctl", "story", str(job_id)).stdout
        assert not (cluster.share / "ran").exists()
    finally:
        cluster.machines.thaw("n3")
    assert ended(job_id)["state"] == "COMPLETED"
    assert (cluster.share / "ran").read_text() == "ran 1\n"


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A directory with a newer hpcnode, for PYTHONPATH."""
    shutil.copytree(Path(hpcnode.__file__).parent, tmp_path / "hpcnode", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "hpcnode" / "__init__.py", "a") as file:
        file.write("# a newer version\n")
    return tmp_path


def test_a_newer_version_takes_over_under_running_jobs(
    cluster: LocalCluster, sub: Sub, job: Job, running: Any, ended: Any, newer: Path
) -> None:
    def versions() -> set[str]:
        return {node["agent_version"] for node in cluster.api("GET", "/v1/nodes")["nodes"]}

    wait = "until [ -e go ]; do sleep 0.05; done"
    plain = sub(f"echo $$ >> pids; {wait}; echo plain done")
    task = f"echo $$ >> steps; {wait}; echo said after it; exit 3"
    stepping = sub(f"hrun -N2 -n2 sh -c '{task}'; echo hrun $?; echo script done", "-N2")
    running(plain)
    running(stepping)
    wait_until(lambda: (cluster.share / "steps").exists() and len((cluster.share / "steps").read_text().split()) == 2)
    old = versions()
    cluster.down()
    cluster.run("hpcsched", "up", env={"PYTHONPATH": str(newer)})
    try:
        cluster.wait_for_nodes()
        assert not versions() & old
        said = cluster.share / f"slurm-{stepping}.out"
        (cluster.share / "go").touch()
        for job_id in (plain, stepping):
            assert (ended(job_id)["state"], ended(job_id)["attempt"]) == ("COMPLETED", 0)
        assert len((cluster.share / "pids").read_text().split()) == 1
        assert len((cluster.share / "steps").read_text().split()) == 2
        assert said.read_text().startswith("said after it\nsaid after it\n")
        assert said.read_text().endswith("hrun 3\nscript done\n")
    finally:
        cluster.down()
        cluster.up()
        cluster.wait_for_nodes()
    assert versions() == old


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_node_whose_disk_is_full_gets_no_jobs_until_there_is_room(tmp_path_factory: Any) -> None:
    base = Path(tempfile.mkdtemp(prefix="hpc"))
    base.chmod(0o755)
    small = base / "nodes" / "n1" / "agent"
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=711", "hpcsched-test", str(small)], check=True)
    try:
        with LocalCluster(base, names=("n1", "n2"), settings=SETTINGS) as cluster:
            # What the agent unpacks at its start would go again for want of room, and leave some.
            wait_until(lambda: [p for p in small.glob("steps-*") if "." not in p.name], what="the unpacked modules")
            fill(small / "filler")
            job_id = int(cluster.run("hsub", "--parsable", "-w", "n1", stdin="#!/bin/sh\necho ran\n").stdout)

            def job() -> dict[str, Any]:
                return cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]  # type: ignore[no-any-return]

            def node() -> dict[str, Any]:
                return cluster.api("GET", "/v1/nodes")["nodes"][0]  # type: ignore[no-any-return]

            wait_until(lambda: node()["state"] == "DRAINED", what="the node to be drained")
            wait_until(lambda: job()["state"] == "PENDING", what="the job to go back to the queue")
            assert "No space left on device" in cluster.run("hwhy", str(job_id)).stdout
            assert "No space left on device" in cluster.run("hinfo", "-R").stdout
            attempts = job()["attempt"]
            elsewhere = cluster.run("hsub", "--wait", stdin="#!/bin/sh\ntrue\n")
            assert elsewhere.returncode == 0
            assert job()["attempt"] == attempts == 1
            (small / "filler").unlink()
            wait_until(lambda: job()["state"] == "COMPLETED", what="the job to run")
            assert not node()["drained"]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
        shutil.rmtree(base, ignore_errors=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
