"""How far a training job is: shown while it runs, over a restart of the controller, and in the history when it is over."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, Cluster

from hpcnode.wire import protocol
from hpcsched.controller.nodes.messages import MAX_FAILURES, WRITE_EVERY_S
from hpcsched.controller.recovery import load_state
from hpcsched.errors import ProtocolError
from hpcsched.model.ids import NodeName


def says(cluster: Cluster, job_id: int, step: int, *, node: str = "n1", **fields: Any) -> None:
    attempt = fields.pop("attempt", 0)
    inner = protocol.to_json(protocol.Progress(job_id=job_id, step=step, **fields))
    said = protocol.FromStream(stream=0, uid=1000, job_id=job_id, attempt=attempt, message=inner)
    cluster.controller.training.told(NodeName(node), said, cluster.now_s)
    cluster.tick()


def fails(cluster: Cluster, job_id: int, rank: int, **fields: Any) -> None:
    inner = protocol.to_json(protocol.Failure(job_id=job_id, rank=rank, ranks=4, text=f"why {rank}", **fields))
    said = protocol.FromStream(stream=0, uid=1000, job_id=job_id, attempt=0, message=inner)
    cluster.controller.training.told(NodeName("n1"), said, cluster.now_s)
    cluster.tick()


def failures(cluster: Cluster, job_id: int, identity: Any = ANN) -> Any:
    return cluster.backend().job(identity, str(job_id))["jobs"][0].get("failures")


def shown(cluster: Cluster, job_id: int, identity: Any = ANN) -> Any:
    return cluster.backend().job(identity, str(job_id))["jobs"][0]["training"]


def past(cluster: Cluster, job_id: int, identity: Any = ANN) -> Any:
    text = asyncio.run(cluster.backend().history(identity, {"id": str(job_id)}))
    return json.loads(text)["jobs"][0]["training"]


def a_job(cluster: Cluster) -> int:
    job_id = cluster.submit()
    cluster.tick()
    cluster.run(job_id)
    return job_id


def test_what_a_program_says_is_shown_to_its_owner_with_when_it_will_be_done(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    job_id = a_job(cluster)
    assert shown(cluster, job_id) is None
    says(
        cluster, job_id, 20, total_steps=100, loss=1.5, samples_per_s=640, steps_per_s=4, age_s=2, checkpoint_step=10,
        checkpoint_age_s=3, goodput=0.97, note="rank 1 is slow",
        directory="/share/run1/checkpoints",
    )  # fmt: skip
    told = shown(cluster, job_id)
    at_s = cluster.now_s - 2
    assert told == {
        "at_s": at_s, "attempt": 0, "step": 20, "total_steps": 100, "loss": 1.5, "samples_per_s": 640, "steps_per_s": 4,
        "ends_at_s": at_s + 20, "checkpoint_step": 10, "checkpoint_at_s": at_s - 3, "goodput": 0.97,
        "note": "rank 1 is slow", "directory": "/share/run1/checkpoints",
    }  # fmt: skip
    assert shown(cluster, job_id, BOB) is None
    assert past(cluster, job_id) == told
    assert past(cluster, job_id, BOB) is None


def test_what_is_not_known_is_not_made_up() -> None:
    cluster = Cluster("n1")
    job_id = a_job(cluster)
    says(cluster, job_id, 20)
    told = shown(cluster, job_id)
    unknown = (
        "total_steps", "loss", "samples_per_s", "steps_per_s", "ends_at_s", "checkpoint_step", "checkpoint_at_s", "goodput",
    )  # fmt: skip
    assert [told[name] for name in unknown] == [None] * 8


def test_a_steady_talker_costs_one_commit_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")
    job_id = a_job(cluster)
    commits = []
    real = cluster.store.commit
    monkeypatch.setattr(cluster.store, "commit", lambda batch: (commits.append(batch), real(batch))[1])
    for step in range(60):
        says(cluster, job_id, step)
        cluster.tick(2 * WRITE_EVERY_S / 60)
    assert len([batch for batch in commits if batch.training]) == 2
    assert shown(cluster, job_id)["step"] == 59


def test_the_last_word_is_kept_when_the_job_ends(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    job_id = a_job(cluster)
    says(cluster, job_id, 1, loss=2.0)
    says(cluster, job_id, 2, loss=1.0)
    cluster.end(job_id)
    cluster.gone(job_id, "n1")
    assert not cluster.state.training
    assert shown(cluster, job_id)["step"] == past(cluster, job_id)["step"] == 2
    says(cluster, job_id, 3)  # it was on its way when the job ended
    assert shown(cluster, job_id)["step"] == 3
    assert past(cluster, job_id)["step"] == 3


def test_it_survives_the_controller(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    job_id = a_job(cluster)
    says(cluster, job_id, 5)
    cluster.store.close()
    again = Cluster("n1", path=tmp_path / "db", up=False)
    load_state(again.state, again.store, again.now_s)
    assert shown(again, job_id)["step"] == 5


@pytest.mark.parametrize(("attempt", "node"), [(1, "n1"), (0, "n2")])
def test_a_word_of_another_attempt_or_from_elsewhere_changes_nothing(attempt: int, node: str) -> None:
    cluster = Cluster("n1", "n2")
    job_id = a_job(cluster)
    with pytest.raises(ProtocolError, match="is not on node"):
        says(cluster, job_id, 5, attempt=attempt, node=node)
    assert shown(cluster, job_id) is None


def test_the_first_cause_is_the_earliest_that_is_no_echo() -> None:
    cluster = Cluster("n1")
    job_id = a_job(cluster)
    fails(cluster, job_id, 0, echo=True, age_s=3)
    fails(cluster, job_id, 1, age_s=1)
    fails(cluster, job_id, 2, age_s=2)
    fails(cluster, job_id, 2, age_s=9)  # a rank fails once
    cluster.end(job_id, 1)
    cluster.gone(job_id, "n1")
    fails(cluster, job_id, 3)  # it was on its way when the job ended
    assert [one["rank"] for one in failures(cluster, job_id)] == [2, 1, 3, 0]
    assert failures(cluster, job_id)[0] == {
        "rank": 2, "ranks": 4, "node": "n1", "at_s": cluster.now_s - 2, "echo": False, "text": "why 2",
    }  # fmt: skip
    assert failures(cluster, job_id, BOB) is None


def test_an_attempt_does_not_fail_without_end() -> None:
    cluster = Cluster("n1")
    job_id = a_job(cluster)
    for rank in range(MAX_FAILURES + 5):
        fails(cluster, job_id, rank)
    assert len(failures(cluster, job_id)) == MAX_FAILURES
