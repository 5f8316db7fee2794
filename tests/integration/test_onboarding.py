"""Commands that take care of nodes, on a cluster of two nodes behind sshd: rename, sync."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

from hpcsched.cli.admin.lan import from_scan
from hpcsched.loopback.cluster import LocalCluster

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), names=("n1", "n2")) as started:
            yield started


def run(cluster: LocalCluster, *words: str, status: int = 0) -> str:
    """Return what the command printed, stderr included; its exit status must be `status`."""
    done: subprocess.CompletedProcess[str] = cluster.run(*words, check=False, timeout_s=PATIENCE_S)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def view(cluster: LocalCluster, name: str) -> dict[str, Any]:
    (found,) = [view for view in cluster.api("GET", "/v1/nodes")["nodes"] if view["name"] == name]
    return dict(found)


def state_of(cluster: LocalCluster, job: str) -> str:
    return run(cluster, "hqueue", "--all", "--noheader", "--format", "%T", "-j", job).strip()


def test_a_renamed_node_takes_its_waiting_jobs_along(cluster: LocalCluster) -> None:
    gate = cluster.share / "gate"
    holds = run(
        cluster, "hsub", "--parsable", "-w", "n1", "--wrap", f"while [ ! -e {gate} ]; do sleep 0.05; done"
    ).strip()
    wait_until(lambda: state_of(cluster, holds) == "RUNNING", what="the job to run")
    refused = run(cluster, "hpcsched", "node", "rename", "n1", "m1", status=1)
    assert f"cannot rename n1: it holds 1 job ({holds})" in refused
    assert "hctl drain n1" in refused
    assert view(cluster, "n1")["drained"] is False
    run(cluster, "hctl", "drain", "n1", "rename")
    where = cluster.share / "where"
    words = ("-w", "n1", "-o", str(where), "--wrap", "echo $SLURMD_NODENAME")
    waits = run(cluster, "hsub", "--parsable", *words).strip()
    gate.touch()
    wait_until(lambda: view(cluster, "n1")["jobs"] == [], what="the job to end")
    said = run(cluster, "hpcsched", "node", "rename", "n1", "m1")
    assert "n1 is called m1 now" in said
    assert "controller: node n1 is called m1 now" in said
    assert view(cluster, "m1")["drained_why"] == "rename"
    run(cluster, "hctl", "resume", "m1")
    wait_until(lambda: state_of(cluster, waits) == "COMPLETED", what="the waiting job to run on the renamed node")
    assert where.read_text() == "m1\n"
    assert run(cluster, "hacct", "-n", "-X", "-o", "NodeList", "-j", holds).strip() == "n1"
    run(cluster, "hpcsched", "node", "rename", "m1", "n1")
    wait_until(lambda: view(cluster, "n1")["link"] == "up", what="the node to answer by its first name")


def test_files_are_compared_shown_and_replaced_only_on_demand(cluster: LocalCluster, tmp_path: Path) -> None:
    wanted, there = tmp_path / "wanted", tmp_path / "there"
    wanted.write_text("new\n")
    wanted.chmod(0o640)
    there.write_text("old\n")
    there.chmod(0o600)
    words = ("hpcsched", "node", "sync", "n1", "--file", f"{wanted}:{there}", "--run", f"cat {there}; echo to you")
    assert "cannot change nodes unasked" in run(cluster, *words, status=1)
    said = run(cluster, *words, "--dry-run")
    old, new = (hashlib.sha256(data).hexdigest()[:12] for data in (b"old\n", b"new\n"))
    assert f"content {old} there, {new} here, mode 0600 there, 0640 here" in said
    assert there.read_text() == "old\n"
    before = there.stat().st_ino
    said = run(cluster, *words, "--yes")
    assert "changed: n1" in said
    assert "n1 (1), status 0" in said
    assert "new\nto you" in said
    assert (there.read_text(), there.stat().st_mode & 0o777) == ("new\n", 0o640)
    assert there.stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir() if "hpcsync" in path.name] == []
    again = run(cluster, *words, "--yes")
    assert "1 node with the same files: n1" in again
    assert "status" not in again
    record = cluster.api("GET", "/v1/audit?limit=1000")["records"][-1]
    assert record["action"] == "sync-nodes"
    assert str(there) in record["after"]


def test_nodes_with_the_same_answer_are_shown_once_and_a_failure_ends_alone(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    said = run(cluster, "hpcsched", "node", "sync", "--run", "echo same", "--yes")
    assert "n[1-2] (2), status 0\n---------------\nsame\n" in said
    link = tmp_path / "link"
    link.symlink_to("/etc/hostname")
    refused = run(
        cluster, "hpcsched", "node", "sync", "--file", f"/etc/hosts:{link}", "--yes", "--run", "true", status=1
    )
    assert f"! n1: {link}: it is a symbolic link there" in refused
    assert os.readlink(link) == "/etc/hostname"
    text = (cluster.config_dir / "nodes.d" / "n2.toml").read_text()
    assert cluster.machines is not None
    closed = text.replace(f"port = {cluster.machines.nodes['n2'].port}", "port = 1")
    (cluster.config_dir / "nodes.d" / "n2.toml").write_text(closed)
    found = json.loads(run(cluster, "hpcsched", "node", "sync", "--run", "echo up", "--yes", "--json", status=1))[
        "nodes"
    ]
    (cluster.config_dir / "nodes.d" / "n2.toml").write_text(text)
    assert (found["n1"]["status"], found["n1"]["output"], found["n1"]["error"]) == (0, "up\n", "")
    assert "cannot log in" in found["n2"]["error"]


def test_what_cannot_be_synced_is_said_before_any_node_is_asked(cluster: LocalCluster, tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((16 << 20) + 1)
    sync = ("hpcsched", "node", "sync", "--yes")
    assert "cannot sync nothing" in run(cluster, *sync, status=1)
    assert "longer than 16 MiB" in run(cluster, *sync, "--file", str(large), status=1)
    assert "not a regular file" in run(cluster, *sync, "--file", "/dev/zero", status=1)
    assert "wants an absolute path" in run(cluster, *sync, "--file", "/etc/../etc/hosts", status=1)
    assert "no node of that name" in run(cluster, *sync, "--run", "true", "n9", status=1)


def test_a_server_of_a_scan_is_a_candidate_until_it_is_a_node(cluster: LocalCluster) -> None:
    assert cluster.machines is not None
    port = cluster.machines.nodes["n1"].port
    (found,) = from_scan("127.0.0.1/32", port)
    assert (found.target, found.says[:8]) == (f"127.0.0.1:{port}", "SSH-2.0-")
    said = run(cluster, "hpcsched", "node", "discover", "--scan", "127.0.0.1/32", "--port", str(port))
    assert f"127.0.0.1:{port}" not in said
    path = cluster.config_dir / "nodes.d" / "n1.toml"
    text = path.read_text()
    path.unlink()
    said = run(cluster, "hpcsched", "node", "discover", "--scan", "127.0.0.1/32", "--port", str(port))
    path.write_text(text)
    assert f"to add: hpcsched node add 127.0.0.1:{port}" in said


def test_a_woken_node_is_waited_for(cluster: LocalCluster) -> None:
    words = ("hpcsched", "node", "wake", "n1", "--mac", "52:54:00:12:34:56", "--to", "127.0.0.1:9", "--wait")
    assert "n1 is up" in run(cluster, *words, "1m")
    assert cluster.machines is not None
    cluster.machines.power_off("n2")
    wait_until(lambda: view(cluster, "n2")["link"] != "up", what="the node to be off")
    off = run(cluster, *words[:3], "n2", *words[4:], "1s", status=1)
    assert "n2 does not answer" in off
    cluster.machines.power_on("n2")
    assert "n2 is up" in run(cluster, *words[:3], "n2", *words[4:], "2m")
