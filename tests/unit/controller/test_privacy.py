"""[privacy]: of jobs, nodes, usage and reservations of others, users see nothing; coordinators their accounts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster

from hpcsched.auth.authorize import HIDEABLE, Action, Identity, Role
from hpcsched.errors import HpcschedError, NotFoundError, PermissionDeniedError
from hpcsched.model.trigger import Trigger, TriggerEvent

ALL = frozenset(HIDEABLE.values())
BOSS = Identity(uid=1002, user="cleo", role=Role.COORDINATOR, accounts=frozenset({"physics"}))
SERVICE = Identity(uid=1003, user="prom", role=Role.SERVICE)
OPERATOR = Identity(uid=1004, user="olga", role=Role.OPERATOR)


def private(identity: Identity, kinds: Iterable[Action] = ALL) -> Identity:
    return replace(identity, hidden=frozenset(kinds))


@pytest.fixture
def cluster(tmp_path: Any) -> Cluster:
    """Jobs 1 and 3 of ann, 3 in the account physics; job 2 of bob."""
    cluster = Cluster("n1", "n2", path=tmp_path / "hpcsched.db")
    cluster.submit(ANN, name="secret-ann")
    cluster.submit(BOB, name="secret-bob")
    cluster.submit(ANN, name="shared", account="physics")
    return cluster


def listed(cluster: Cluster, identity: Identity) -> list[int]:
    return sorted(job["id"] for job in json.loads(asyncio.run(cluster.backend().jobs(identity, {})))["jobs"])


@pytest.mark.parametrize(
    ("identity", "seen"),
    [(BOB, [2]), (ANN, [1, 3]), (BOSS, [3]), (OPERATOR, [1, 2, 3]), (SERVICE, [1, 2, 3]), (ROOT, [1, 2, 3])],
)
def test_a4_private_jobs_are_listed_for_those_who_may_see_them(
    cluster: Cluster, identity: Identity, seen: list[int]
) -> None:
    assert listed(cluster, identity) == [1, 2, 3]
    assert listed(cluster, private(identity)) == seen
    history = json.loads(asyncio.run(cluster.backend().history(private(identity), {})))["jobs"]
    assert sorted(job["id"] for job in history) == seen


def test_a4_a_private_job_does_not_exist_for_others(cluster: Cluster) -> None:
    backend, bob = cluster.backend(), private(BOB)
    calls: list[Any] = [
        lambda: backend.job(bob, "1"),
        lambda: asyncio.run(backend.why(bob, "1")),
        lambda: asyncio.run(backend.story(bob, "1")),
        lambda: asyncio.run(backend.log(bob, "1", "out", 0, 10)),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="Invalid job id specified: 1"):
            call()


def test_a4_no_answer_names_the_private_jobs_of_others(cluster: Cluster) -> None:
    backend, bob = cluster.backend(), private(BOB)
    text = " ".join(
        [
            asyncio.run(backend.queue(bob, {"state": "all"})),
            repr(asyncio.run(backend.jobs(bob, {}))),
            repr(asyncio.run(backend.why(bob, "2"))),
            repr(backend.priorities(bob, {})),
            repr(backend.shares(bob)),
            repr(asyncio.run(backend.nodes(bob, {}))),
        ]
    )
    assert "secret-bob" in text
    assert "secret-ann" not in text
    assert "ann" not in text.replace("cannot", "")


def test_private_nodes_are_those_of_ones_own_jobs(cluster: Cluster) -> None:
    def names(identity: Identity) -> list[str]:
        return sorted(node["name"] for node in asyncio.run(cluster.backend().nodes(identity, {}))["nodes"])

    holder = cluster.job(2).shares[0].node
    assert names(BOB) == ["n1", "n2"]
    assert names(private(BOB)) == [holder]
    assert names(private(Identity(uid=77, user="eve", role=Role.USER))) == []
    assert names(private(OPERATOR)) == ["n1", "n2"]


def test_private_kinds_hide_the_snapshot(cluster: Cluster) -> None:
    for kind in ALL:
        with pytest.raises(PermissionDeniedError, match=f"hides it from users .{kind.value}."):
            asyncio.run(cluster.backend().snapshot(private(ANN, [kind])))
    assert asyncio.run(cluster.backend().snapshot(private(ROOT)))["snapshot"]


def test_private_triggers_are_ones_own(cluster: Cluster) -> None:
    trigger = Trigger(
        id=1,
        uid=ANN.uid,
        user="ann",
        event=TriggerEvent.JOB_END,
        target="1",
        offset_s=0,
        program=("/bin/x",),
        is_permanent=False,
    )
    cluster.ask(lambda tx: tx.set_trigger(1, trigger))
    backend = cluster.backend()
    assert [len(backend.triggers(who)["triggers"]) for who in (BOB, private(BOB), private(ANN))] == [1, 0, 1]


def test_a_refusal_does_not_name_the_owner_of_a_private_job(cluster: Cluster) -> None:
    body = {"jobs": ["1"]}
    answer = asyncio.run(_act(cluster, private(BOB), body))
    assert "another user" in answer or "Invalid job id" in answer
    assert "ann" not in answer.replace("cannot", "")


async def _act(cluster: Cluster, identity: Identity, body: dict[str, Any]) -> str:
    asked = asyncio.ensure_future(cluster.backend().act(identity, "hold", body))
    while not asked.done():
        await asyncio.sleep(0)
        cluster.tick()
    try:
        return repr(await asked)
    except HpcschedError as error:
        return str(error)
