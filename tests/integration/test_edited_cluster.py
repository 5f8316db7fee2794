"""Edits of the configuration while jobs run, with real SSH servers: no job runs twice, and every command goes on working."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from killable import KillableCluster
from waiting import wait_until

from hpcsched.config.load import render_node


@pytest.fixture
def cluster() -> Iterator[KillableCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        server = "sshd" if os.environ.get("CI") == "true" else "auto"
        with KillableCluster(Path(directory), names=("n1", "n2"), server=server) as cluster:
            yield cluster


def running(cluster: KillableCluster, nodelist: tuple[str, ...] = ("n1",)) -> int:
    """Return a job that runs until there is a gate, and would be queued again if its node were lost."""
    gate = f"while [ ! -e {cluster.share}/gate ]; do sleep 0.05; done\n"
    (job,) = cluster.submit(cluster.spec(gate, nodelist=nodelist, requeue=True))
    wait_until(lambda: cluster.ran()[(job, 0)], what="the job to run")
    wait_until(lambda: cluster.job(job)["state"] == "RUNNING", what="the controller to know it")
    return job


def node_file(cluster: KillableCluster, name: str) -> Path:
    return cluster.config_dir / "nodes.d" / f"{name}.toml"


def edit(path: Path, key: str, value: str) -> None:
    text = path.read_text()
    edited = re.sub(rf"^{key} = .*$", f'{key} = "{value}"', text, count=1, flags=re.MULTILINE)
    assert edited != text
    path.write_text(edited)


def lead_to(cluster: KillableCluster, name: str, other: str) -> str:
    """Have the file of node `name` describe the machine of `other`, which leaves the cluster; return the file before."""
    assert cluster.machines is not None
    path = node_file(cluster, name)
    before = path.read_text()
    path.write_text(render_node(name, cluster.node_values(cluster.machines.nodes[other])))
    return before


def end_all(cluster: KillableCluster) -> None:
    (cluster.share / "gate").touch()
    wait_until(cluster.all_ended, what="all jobs to end")
    wait_until(lambda: not cluster.leftovers(), what="the nodes to be empty")


def restart(cluster: KillableCluster) -> None:
    cluster.kill_controller()
    cluster.up()


def commands_work(cluster: KillableCluster, job: int) -> None:
    """Run what broke when a job named a node that is gone."""
    number = str(job)
    for words in (
        ("hqueue", "-a"),
        ("hacct", "-a"),
        ("hwhy", number),
        ("hctl", "show", "job", number),
        ("hinfo", "-N"),
    ):
        cluster.run(*words)
    assert "n1" in cluster.run("hctl", "story", number).stdout
    cluster.run("hcancel", number, check=False)


def test_a_renamed_cluster_keeps_its_name_while_jobs_run(cluster: KillableCluster) -> None:
    job = running(cluster)
    edit(cluster.config_dir / "hpcsched.toml", "name", "biglab")
    refused = cluster.run("hctl", "reconfigure", check=False)
    assert (refused.returncode, f"while job {job} " in refused.stderr) == (1, True)
    restart(cluster)
    cluster.wait_for_nodes()
    assert cluster.job(job)["state"] == "RUNNING"
    assert "stays 'demo'" in cluster.run("hpcsched", "status").stdout
    assert "stays 'demo'" in cluster.run("hhealth", check=False).stdout
    end_all(cluster)
    assert "[cluster] name" in cluster.run("hctl", "reconfigure").stdout
    assert "cluster biglab" in cluster.run("hpcsched", "status").stdout
    assert cluster.ran() == {(job, 0): 1}
    cluster.wait_for_nodes()
    (other,) = cluster.submit(cluster.one_task(0))
    wait_until(cluster.all_ended, what="a job under the new name")
    assert cluster.ran() == {(job, 0): 1, (other, 0): 1}


@pytest.mark.parametrize("how", ["reconfigure", "restart"])
def test_a_moved_directory_is_refused_or_not_taken_while_jobs_run(cluster: KillableCluster, how: str) -> None:
    job = running(cluster)
    before = cluster.agent_root("n1")
    edit(node_file(cluster, "n1"), "root", f"{before}2")
    if how == "reconfigure":
        refused = cluster.run("hctl", "reconfigure", check=False)
        assert refused.returncode == 1
        assert f"root ('{before}' to '{before}2') of node n1 cannot change while job {job} is held" in refused.stderr
        assert "hctl drain n1 WHY" in refused.stderr
        assert cluster.run("hctl", "reconfigure", "n1", check=False).returncode == 1  # nor is it a new address
    else:
        restart(cluster)
        cluster.wait_for_nodes()
        assert "node n1 keeps its former description" in cluster.run("hpcsched", "status").stdout
        assert "node n1 keeps its former description" in cluster.log_tail()
    end_all(cluster)
    assert "node n1 changed" in cluster.run("hctl", "reconfigure").stdout
    cluster.wait_for_nodes()
    assert cluster.ran() == {(job, 0): 1}


def test_a_name_that_leads_to_another_machine_is_refused(cluster: KillableCluster) -> None:
    job = running(cluster)
    node_file(cluster, "n2").unlink()
    cluster.run("hctl", "reconfigure")
    lead_to(cluster, "n1", "n2")
    refused = cluster.run("hctl", "reconfigure", check=False)
    assert refused.returncode == 1
    assert f"of node n1 cannot change while job {job} is held there" in refused.stderr
    assert "hctl fence n1" in refused.stderr
    restart(cluster)
    cluster.wait_for_nodes()
    assert cluster.job(job)["state"] == "RUNNING"
    end_all(cluster)
    assert "node n1 changed" in cluster.run("hctl", "reconfigure").stdout
    cluster.wait_for_nodes()
    assert cluster.ran() == {(job, 0): 1}


def test_another_spool_behind_the_same_address_starts_nothing_before_an_admins_word(cluster: KillableCluster) -> None:
    job = running(cluster)
    root = cluster.agent_root("n1")
    agent = cluster.agent_pid("n1")
    assert agent is not None
    root.rename(root.with_name("former"))  # as if the machine had been replaced, or its disk
    cluster.kill_controller()
    cluster.up()
    wait_until(lambda: "another spool" in cluster.job(job)["reason_detail"], what="the other one not to be believed")
    assert "another spool answers than the one that holds job" in cluster.run("hhealth", check=False).stdout
    assert "hctl fence n1" in cluster.run("hwhy", str(job)).stdout
    (other,) = cluster.submit(cluster.spec("", nodelist=("n1",)))
    assert cluster.job(job)["state"] == "RUNNING"
    assert cluster.ran() == {(job, 0): 1}
    assert cluster.machines is not None
    cluster.machines.power_off("n1")
    cluster.machines.power_on("n1")  # what ran there is gone
    cluster.run("hctl", "fence", "n1", "replaced")
    wait_until(lambda: cluster.ran()[(job, 1)] and cluster.ran()[(other, 0)], what="the jobs to run on the new one")
    end_all(cluster)
    assert cluster.ran() == {(job, 0): 1, (job, 1): 1, (other, 0): 1}


def test_a_machine_at_a_new_address_goes_on_with_its_job(cluster: KillableCluster) -> None:
    job = running(cluster)
    edit(node_file(cluster, "n1"), "host", "localhost")
    assert cluster.run("hctl", "reconfigure", check=False).returncode == 1
    assert "node n1 changed" in cluster.run("hctl", "reconfigure", "n1").stdout
    cluster.wait_for_nodes()
    assert cluster.job(job)["state"] == "RUNNING"
    end_all(cluster)
    assert cluster.ran() == {(job, 0): 1}


def test_a_node_that_answers_ends_its_jobs_before_it_is_removed(cluster: KillableCluster) -> None:
    job = running(cluster)
    refused = cluster.run("hpcsched", "node", "remove", "n1", check=False)
    assert refused.returncode == 1
    assert f"job {job} is held there" in refused.stderr
    assert "hctl fence n1" in refused.stderr
    assert node_file(cluster, "n1").exists()
    cluster.run("hctl", "update", f"JobId={job}", "nodelist=", check=False)
    said = cluster.run("hpcsched", "node", "remove", "--force", "n1").stdout
    assert f"waiting for jobs to end on n1: {job}" in said
    assert not node_file(cluster, "n1").exists()
    assert not cluster.leftovers()
    assert cluster.run("hctl", "reconfigure").stdout == "nothing has changed\n"
    commands_work(cluster, job)
    assert cluster.ran() == {(job, 0): 1}


def test_a_dead_node_is_given_up_and_removed_in_one(cluster: KillableCluster) -> None:
    job = running(cluster)
    assert cluster.machines is not None
    cluster.machines.power_off("n1")
    wait_until(lambda: "DOWN" in cluster.run("hinfo", "-N").stdout, what="the node to be down")
    said = cluster.run("hpcsched", "node", "remove", "--force", "n1").stdout
    assert f"job {job} goes back to the queue" in said
    commands_work(cluster, job)
    assert "was removed by" in cluster.run("hctl", "story", str(job)).stdout


def test_a_node_removed_by_force_without_a_controller_leaves_commands_working(
    cluster: KillableCluster,
) -> None:
    job = running(cluster)
    cluster.kill_controller()
    refused = cluster.run("hpcsched", "node", "remove", "n1", check=False)
    assert (refused.returncode, f"({job})" in refused.stderr) == (1, True)
    cluster.run("hpcsched", "node", "remove", "--force", "n1")
    cluster.up()
    wait_until(lambda: cluster.job(job)["state"] == "PENDING", what="the job to be settled")
    commands_work(cluster, job)
    restart(cluster)
    commands_work(cluster, job)
    assert cluster.ran() == {(job, 0): 1}
    end_all_but_the_old(cluster)


def deleted_by_hand(cluster: KillableCluster) -> tuple[int, str]:
    """Return a job that may run on n2 as well and runs on n1, whose file was deleted while no controller ran, and that file."""
    cluster.run("hctl", "drain", "n2", "so that it starts on n1")
    job = running(cluster, nodelist=())
    cluster.run("hctl", "resume", "n2")
    text = node_file(cluster, "n1").read_text()
    cluster.kill_controller()
    node_file(cluster, "n1").unlink()
    cluster.up()
    cluster.wait_for_nodes()
    return job, text


def test_a_job_whose_nodes_file_was_deleted_does_not_start_beside_itself(cluster: KillableCluster) -> None:
    job, _ = deleted_by_hand(cluster)
    cluster.run("hctl", "requeue", str(job), check=False)
    (other,) = cluster.submit(cluster.one_task(1))
    wait_until(lambda: cluster.job(other)["state"] == "COMPLETED", what="a job that was asked for after the requeue")
    restart(cluster)
    cluster.wait_for_nodes()
    (other,) = cluster.submit(cluster.one_task(2))
    wait_until(lambda: cluster.job(other)["state"] == "COMPLETED", what="a job after the restart")
    assert (job, 1) not in cluster.ran()
    assert "hctl fence n1" in cluster.run("hwhy", str(job)).stdout
    assert "hctl fence n1" in cluster.run("hhealth", check=False).stdout
    assert "hctl fence n1" in cluster.run("hpcsched", "status").stdout
    refused = cluster.run("hpcsched", "node", "remove", "n1", check=False)
    assert (refused.returncode, "hctl fence n1" in refused.stderr) == (1, True)
    assert cluster.machines is not None
    cluster.machines.power_off("n1")
    assert f"job {job} goes back to the queue" in cluster.run("hctl", "fence", "n1", "it is off").stdout
    wait_until(lambda: cluster.ran()[(job, 1)], what="the job to run on n2")
    assert "n1" not in cluster.run("hpcsched", "status").stdout
    end_all_but_the_old(cluster)
    assert cluster.job(job)["state"] == "COMPLETED"


def test_a_job_whose_nodes_file_was_deleted_continues_when_the_file_is_back(cluster: KillableCluster) -> None:
    job, text = deleted_by_hand(cluster)
    assert cluster.job(job)["state"] == "RUNNING"
    node_file(cluster, "n1").write_text(text)
    cluster.run("hctl", "reconfigure")
    cluster.wait_for_nodes()
    end_all(cluster)
    assert cluster.job(job)["state"] == "COMPLETED"
    assert cluster.ran()[(job, 0)] == 1


def end_all_but_the_old(cluster: KillableCluster) -> None:
    (cluster.share / "gate").touch()
    wait_until(cluster.all_ended, what="all jobs to end")


def test_a_node_without_its_file_is_kept_while_jobs_run_and_can_be_removed(cluster: KillableCluster) -> None:
    job = running(cluster)
    text = node_file(cluster, "n1").read_text()
    node_file(cluster, "n1").unlink()
    refused = cluster.run("hctl", "reconfigure", check=False)
    assert (refused.returncode, "hpcsched node remove --force n1" in refused.stderr) == (1, True)
    assert cluster.job(job)["state"] == "RUNNING"
    cluster.run("hpcsched", "node", "remove", "--force", "n1")
    assert "n1" not in cluster.run("hinfo", "-N").stdout
    commands_work(cluster, job)
    node_file(cluster, "n1").write_text(text)  # it comes back: nothing is left there, and it takes jobs
    cluster.run("hctl", "reconfigure")
    cluster.wait_for_nodes()
    (other,) = cluster.submit(cluster.spec("", nodelist=("n1",)))
    wait_until(lambda: cluster.job(other)["state"] == "COMPLETED", what="a job on the node that is back")
    end_all(cluster)


def test_a_drained_node_that_is_added_again_is_said_to_be_drained(cluster: KillableCluster) -> None:
    assert cluster.machines is not None
    node = cluster.machines.nodes["n1"]
    cluster.run("hctl", "drain", "n1", "loud fan")
    cluster.run("hpcsched", "node", "remove", "n1")
    words = ("--name", "n1", "--identity", str(node.identity_file), "--yes", "--root", str(node.root / "agent"))
    said = cluster.run("hpcsched", "node", "add", *words, f"{node.user}@{node.host}:{node.port}").stdout
    assert "n1 is still drained" in said
    assert "loud fan" in said
    assert "hctl resume n1" in said
    cluster.run("hpcsched", "node", "remove", "n1")
    words = (*words, "--burn-in", "1s", f"{node.user}@{node.host}:{node.port}")
    assert "somebody else drained or resumed it meanwhile" in cluster.run("hpcsched", "node", "add", *words).stdout
    assert [view["drained_why"] for view in cluster.api("GET", "/v1/nodes")["nodes"] if view["name"] == "n1"] == [
        "loud fan"
    ]


def test_a_new_node_is_tested_before_it_gets_jobs(cluster: KillableCluster) -> None:
    assert cluster.machines is not None
    node = cluster.machines.nodes["n1"]
    words = ("--name", "n1", "--identity", str(node.identity_file), "--yes", "--root", str(node.root / "agent"))
    target = f"{node.user}@{node.host}:{node.port}"
    cluster.run("hpcsched", "node", "remove", "n1")
    for wrong in ("0", "8-0", "soon", "UNLIMITED"):
        refused = cluster.run("hpcsched", "node", "add", *words, "--burn-in", wrong, target, check=False)
        assert refused.returncode != 0
        assert "time" in refused.stderr
    failed = cluster.run(
        "hpcsched", "node", "add", *words, "--cpus", "4096", "--burn-in", "1s", target, check=False
    )  # more than it has
    assert failed.returncode != 0
    assert "n1 has NOT passed its burn-in, and gets no jobs: resources: it has only" in failed.stderr
    (view,) = [view for view in cluster.api("GET", "/v1/nodes")["nodes"] if view["name"] == "n1"]
    assert view["drained_why"].startswith("TESTING: burn-in failed: resources: it has only")
    cluster.run("hpcsched", "node", "remove", "n1")
    (job,) = cluster.submit(cluster.spec("", nodelist=("n2",)))
    said = cluster.run("hpcsched", "node", "add", *words, "--burn-in", "1s", target).stdout
    assert "n1: TESTING for 1 s" in said
    assert "n1 has passed its burn-in" in said
    (view,) = [view for view in cluster.api("GET", "/v1/nodes")["nodes"] if view["name"] == "n1"]
    assert not view["drained"]
    assert {run["node"] for run in cluster.api("GET", "/v1/benches")["benches"]} == {"n1"}
    wait_until(lambda: cluster.job(job)["state"] == "COMPLETED", what="a job on the other node")
    (job,) = cluster.submit(cluster.spec("", nodelist=("n1",)))
    wait_until(lambda: cluster.job(job)["state"] == "COMPLETED", what="a job on the tested node")
