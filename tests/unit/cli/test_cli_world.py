"""hctl snapshot, and hsim over what it wrote or over what the controller answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_api import FakeApi
from unit.controller.world import BOB, Cluster

from hpcsched.cli import hctl, hsim
from hpcsched.sched.saved import world_from_json


def test_the_world_is_handed_out_without_scripts_and_read_again(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster("n1")
    cluster.run(cluster.submit(ntasks=2, script="#!/bin/sh\necho secret\n", env=(("PASSWORD", "secret"),)))
    waits = cluster.submit(BOB, ntasks=2, script="#!/bin/sh\necho secret\n", env=(("PASSWORD", "secret"),))
    backend = cluster.backend()
    api.answers["GET /v1/snapshot"] = lambda body, given: asyncio.run(backend.snapshot())
    assert hctl.main(["snapshot", str(tmp_path / "world")]) == 0
    text = (tmp_path / "world").read_text()
    assert "secret" not in text
    snapshot, policy = world_from_json(json.loads(text))
    assert [job.id for job in snapshot.pending] == [waits]
    assert policy == cluster.controller.policy
    assert hctl.main(["snapshot", str(tmp_path / "no" / "world")]) == 1
    assert "cannot write the snapshot" in capsys.readouterr().err
    assert hsim.main(["whatif", "--jobs", "bob", "--json"]) == 0  # asks the controller itself
    answer = json.loads(capsys.readouterr().out)
    assert [job["job_id"] for job in answer["jobs"]] == [waits]
