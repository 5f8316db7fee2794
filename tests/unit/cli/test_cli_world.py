"""hctl snapshot, and hsim over what it wrote or over what the controller answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_api import FakeApi
from unit.controller.cluster import BOB, ROOT, Cluster

from hpcsched.cli import hctl, hsim
from hpcsched.lifecycle.node import NodeDown
from hpcsched.model.ids import NodeName
from hpcsched.sched.snapshot import snapshot_from_json
from hpcsched.store.backup import back_up

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"


def test_the_world_is_handed_out_without_scripts_and_read_again(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster("n1")
    cluster.run(cluster.submit(ntasks=2, script="#!/bin/sh\necho secret\n", env=(("PASSWORD", "secret"),)))
    waits = cluster.submit(BOB, ntasks=2, script="#!/bin/sh\necho secret\n", env=(("PASSWORD", "secret"),))
    backend = cluster.backend()
    api.answers["GET /v1/snapshot"] = lambda body, given: asyncio.run(backend.snapshot(ROOT))
    assert hctl.main(["snapshot", str(tmp_path / "world")]) == 0
    text = (tmp_path / "world").read_text()
    assert "secret" not in text
    snapshot, policy = snapshot_from_json(json.loads(text))
    assert [job.id for job in snapshot.pending] == [waits]
    assert policy == cluster.controller.policy
    assert hctl.main(["snapshot", str(tmp_path / "no" / "world")]) == 1
    assert "cannot write the snapshot" in capsys.readouterr().err
    assert hsim.main(["whatif", "--jobs", "bob", "--json"]) == 0  # asks the controller itself
    answer = json.loads(capsys.readouterr().out)
    assert [job["job_id"] for job in answer["jobs"]] == [waits]


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of nodes n1 and n2 with two cpus each."""
    directory = tmp_path / "etc"
    (directory / "nodes.d").mkdir(parents=True)
    (directory / "hpcsched.toml").write_text("[scheduler]\npolicy = 'conservative'\n[partitions.main]\nnodes = 'all'\n")
    for name in ("n1", "n2"):
        text = f"host = '{name}'\nhost_key = '{HOST_KEY}'\ncpus = 2\nmemory = '1G'\n"
        (directory / "nodes.d" / f"{name}.toml").write_text(text)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    monkeypatch.setenv("HPCSCHED_CONFIG", str(directory))
    return directory


def test_a_backup_is_asked_instead_of_the_controller(
    configured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster("n1", "n2", path=tmp_path / "h.db")
    cluster.run(cluster.submit(ntasks=2, time_limit_s=3600))
    cluster.ask(lambda tx: tx.record_node(NodeDown(node=NodeName("n2"), at_s=tx.now_s, why="no answer")))
    soon, late = cluster.submit(BOB, ntasks=2), cluster.submit(BOB, nodes_min=2, nodes_max=2, ntasks=4)
    back_up(tmp_path / "h.db", tmp_path / "copy")
    before = (tmp_path / "copy").read_bytes()
    cluster.store.close()
    assert hsim.main(["whatif", "--database", str(tmp_path / "copy"), "--jobs", "all", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (today,) = answer["variants"]
    assert (answer["now_s"], today["policy"], today["started"]) == (cluster.now_s, "conservative", 2)
    started_s = cluster.job(cluster.state.last_job_id - 2).started_at_s
    starts_s = {job["job_id"]: job["starts_s"] for job in answer["jobs"]}
    assert starts_s[soon] == [cluster.now_s]  # nodes count as answering
    assert started_s is not None
    assert starts_s[late][0] >= started_s + 3600
    assert (tmp_path / "copy").read_bytes() == before
    assert hsim.main(["replay", "--database", str(tmp_path / "copy")]) == 0
    assert "policy conservative: 1 start, 1 wait" in capsys.readouterr().out


def test_what_is_no_database_is_refused_and_so_are_two_worlds(
    configured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    assert hsim.main(["whatif", "--database", str(tmp_path / "text")]) == 1
    assert hsim.main(["whatif", "--database", str(tmp_path / "nothing")]) == 1
    assert hsim.main(["whatif", "world.json", "--database", str(tmp_path / "text")]) == 2
    assert hsim.main(["run", "log.swf", "--database", str(tmp_path / "text")]) == 2
    said = capsys.readouterr().err
    for words in ("file is not a database", "there is no such file", "not both", "it is for whatif"):
        assert words in said
