"""Machines and daemons that die while people work: what the commands say, and what becomes of the jobs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from waiting import PATIENCE_S, wait_until

from hpcsched.loopback.cluster import LocalCluster

Sub = Callable[..., int]
Ended = Callable[..., dict[str, Any]]


def kill_controller(cluster: LocalCluster) -> None:
    pid = cluster.api("GET", "/v1/ping")["pid"]
    os.kill(pid, signal.SIGKILL)

    def refuses() -> bool:
        """Its memory goes first, its sockets later: until then a request is taken, and lost."""
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(cluster.api_socket)) != 0

    wait_until(refuses, what="the controller's end")


def test_jobs_run_on_while_the_controller_is_dead_and_are_found_again(
    cluster: LocalCluster, sub: Sub, running: Any, ended: Ended
) -> None:
    gate = cluster.share / "gate"
    script = f"echo run >> runs; while [ ! -e {gate} ]; do sleep 0.05; done; exit 7"
    first, waiting = sub(script, "-N2"), sub("true", "-N3", "--exclusive")
    running(first)
    kill_controller(cluster)
    down = cluster.run("hqueue", check=False)
    assert down.returncode == 1
    assert "Unable to contact hpcsched controller" in down.stderr
    assert "hpcsched up" in down.stderr
    gate.touch()
    cluster.up()
    assert (ended(first)["state"], ended(first)["exit_code"], ended(first)["attempt"]) == ("FAILED", 7, 0)
    assert ended(waiting)["state"] == "COMPLETED"
    assert (cluster.share / "runs").read_text() == "run\n"


def test_a_job_whose_node_loses_power_waits_for_it_and_runs_again_when_it_has_booted(
    cluster: LocalCluster, sub: Sub, job: Any, running: Any, ended: Ended
) -> None:
    assert cluster.machines is not None
    job_id = sub("echo $HPCSCHED_ATTEMPT >> tries; [ $HPCSCHED_ATTEMPT = 1 ] || sleep 600", "-N2", "--requeue")
    node = running(job_id)["nodes"][0]
    wait_until(lambda: (cluster.share / "tries").exists())
    cluster.machines.power_off(node)
    wait_until(lambda: job(job_id)["reason"] == "NodeDown", what="the node to be missed")
    assert f"hctl fence {node}" in cluster.run("hwhy", str(job_id)).stdout
    shown = cluster.run("hinfo", "-N").stdout
    assert "down" in shown.lower()
    cluster.machines.power_on(node)
    assert (ended(job_id)["state"], ended(job_id)["attempt"]) == ("COMPLETED", 1)
    assert (cluster.share / "tries").read_text() == "0\n1\n"


def test_a_fenced_node_gives_its_job_back(
    cluster: LocalCluster, sub: Sub, job: Any, running: Any, ended: Ended
) -> None:
    assert cluster.machines is not None
    job_id = sub("[ $HPCSCHED_ATTEMPT = 1 ] || sleep 600", "--requeue", "-w", "n1")
    running(job_id)
    cluster.machines.power_off("n1")
    wait_until(lambda: job(job_id)["reason"] == "NodeDown", what="the node to be missed")
    cluster.run("hctl", "fence", "n1", "it burnt")
    assert job(job_id)["attempt"] == 1
    cluster.run("hcancel", str(job_id))
    cluster.machines.power_on("n1")
    cluster.wait_for_nodes()


def test_g3_a_second_controller_says_who_holds_the_database(cluster: LocalCluster) -> None:
    pid = cluster.api("GET", "/v1/ping")["pid"]
    second = subprocess.run(
        [sys.executable, "-m", "hpcsched.controller", "--config", str(cluster.config_dir)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert second.returncode == 1
    assert f"process {pid}" in second.stderr
    assert cluster.api("GET", "/v1/ping")["pid"] == pid


def test_a_lost_database_is_not_replaced_by_an_empty_one(cluster: LocalCluster, sub: Sub, running: Any) -> None:
    job_id = sub("sleep 600")
    running(job_id)
    cluster.down()
    database = cluster.config_dir / "state" / "hpcsched.db"
    away = database.with_name("away.db")
    database.rename(away)
    try:
        refused = cluster.run("hpcsched", "up", check=False)
        assert refused.returncode == 1
        assert f"{database}: it is not there" in refused.stderr
        assert "hpcsched restore FILE" in refused.stderr
        assert not database.exists()
    finally:
        away.rename(database)
    refused = cluster.run("hpcsched", "init", "--database", check=False)
    assert (refused.returncode, "it is there already" in refused.stderr) == (1, True)
    cluster.up()
    running(job_id)
    cluster.run("hcancel", str(job_id))


def test_an_unknown_key_in_the_configuration_is_named_with_the_known_ones(cluster: LocalCluster) -> None:
    path = cluster.config_dir / "hpcsched.toml"
    text = path.read_text()
    path.write_text(text.replace("[controller]", "[controller]\nheartbeet_s = 3\n", 1))
    try:
        refused = cluster.run("hctl", "reconfigure", check=False)
    finally:
        path.write_text(text)
    assert refused.returncode == 1
    assert "heartbeet_s" in refused.stderr
    assert "heartbeat_s" in refused.stderr
