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
from hpcsched.controller.requests import reservations, triggers
from hpcsched.errors import HpcschedError, NotFoundError, PermissionDeniedError
from hpcsched.model.ids import JobId
from hpcsched.model.spec import Dependency, DependencyKind
from hpcsched.model.trigger import Trigger, TriggerEvent

ALL = frozenset(HIDEABLE.values())
RESERVATION = {"StartTime": "now", "Duration": "10", "Nodes": "n1", "Flags": "IGNORE_JOBS"}
BOSS = Identity(uid=1002, user="cleo", role=Role.COORDINATOR, accounts=frozenset({"physics"}))
EVE = Identity(uid=77, user="eve", role=Role.USER)
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


def hide_all(cluster: Cluster) -> None:
    state = cluster.state
    state.config = replace(state.config, access=replace(state.config.access, hidden=ALL))


def after(job: int) -> tuple[Dependency, ...]:
    return (Dependency(kind=DependencyKind.AFTER_OK, job_ids=(JobId(job),)),)


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


def test_a4_counts_tell_nothing_of_private_jobs_and_nodes(cluster: Cluster) -> None:
    backend, eve = cluster.backend(), private(EVE)
    assert backend.ping(eve) | {"counts": {}, "nodes": {}} == backend.ping(eve)
    assert sum(backend.ping(private(BOB))["counts"].values()) == 1
    assert sum(backend.ping(private(ROOT))["counts"].values()) == 3
    assert sum(backend.ping(private(ROOT))["nodes"].values()) == 2
    others = {"whose": "default", "others": "1"}
    assert "others: 2" in asyncio.run(backend.queue(BOB, others))
    assert "others" not in asyncio.run(backend.queue(private(BOB), others))
    (partition,) = backend.partitions(eve)["partitions"]
    assert [partition[key] for key in ("nodes", "node_list", "state_counts", "cpus", "cpus_alloc")] == [
        [],
        "",
        {},
        0,
        0,
    ]
    (partition,) = backend.partitions(private(ROOT))["partitions"]
    assert partition["node_list"] == "n[1-2]"


def test_a4_views_of_nodes_and_reservations_have_no_private_jobs(cluster: Cluster) -> None:
    cluster.ask(lambda tx: reservations.create(tx, ROOT, "secret", RESERVATION | {"Users": "ann,bob"}))
    cluster.submit(ANN, reservation="secret")
    backend, hidden = cluster.backend(), [Action.VIEW_JOBS]
    for who, seen in ((BOB, {1, 2, 3, 4}), (private(BOB, hidden), {2}), (private(ROOT, hidden), {1, 2, 3, 4})):
        nodes = asyncio.run(backend.nodes(who, {}))["nodes"]
        assert {job for node in nodes for job in node["jobs"]} <= seen
        (reservation,) = backend.reservations(who)["reservations"]
        assert reservation["jobs"] == [job for job in (4,) if job in seen]
    assert {job for node in nodes for job in node["jobs"]} == {1, 2, 3}
    for who, name in ((EVE, "secret"), (private(EVE, [Action.VIEW_RESERVATIONS]), ""), (private(ANN), "secret")):
        assert asyncio.run(backend.nodes(who, {}))["nodes"][0]["reservation"] == name


def test_a4_a_private_reservation_is_not_named(cluster: Cluster) -> None:
    cluster.ask(lambda tx: reservations.create(tx, ROOT, "secret", RESERVATION | {"Users": "ann"}))
    hide_all(cluster)
    said = []
    for name in ("secret", "nosuch"):
        with pytest.raises(HpcschedError) as refusal:
            cluster.submit(private(BOB), reservation=name)
        said.append(str(refusal.value).replace(name, "NAME"))
    assert said[0] == said[1]
    assert "secret" not in said[1]
    assert "ann" not in said[1].replace("cannot", "")


def test_a4_a_job_cannot_depend_on_a_private_job(cluster: Cluster) -> None:
    hide_all(cluster)
    for job in (1, 99):
        with pytest.raises(HpcschedError, match=f"cannot depend on job {job}: there is no such job"):
            cluster.submit(private(BOB), dependency=after(job))
    cluster.submit(private(BOB), dependency=after(2))


def test_private_nodes_are_those_of_ones_own_jobs(cluster: Cluster) -> None:
    def names(identity: Identity) -> list[str]:
        return sorted(node["name"] for node in asyncio.run(cluster.backend().nodes(identity, {}))["nodes"])

    holder = cluster.job(2).shares[0].node
    assert names(BOB) == ["n1", "n2"]
    assert names(private(BOB)) == [holder]
    assert names(private(EVE)) == []
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


def test_a4_the_words_of_a_trigger_s_program_are_its_user_s(cluster: Cluster) -> None:
    """They are a command line, and may have a secret."""
    cluster.ask(lambda tx: triggers.create(tx, ANN, {"event": "down", "program": ["/bin/x", "--password=secret"]}))
    shown = [cluster.backend().triggers(who)["triggers"][0]["program"] for who in (ANN, ROOT, BOB, SERVICE, BOSS)]
    assert shown == [["/bin/x", "--password=secret"]] * 2 + [None] * 3


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


def test_a4_why_a_job_waits_names_no_private_reservation(cluster: Cluster) -> None:
    words = {"StartTime": "now+60days", "Duration": "10", "Nodes": "n[1-2]", "Users": "ann"}
    cluster.ask(lambda tx: reservations.create(tx, ROOT, "quiet", words | {"Flags": "IGNORE_JOBS,MAINT"}))
    backend, job = cluster.backend(), cluster.submit(BOB)
    wanted = cluster.job(job).spec
    for who, is_named in ((BOB, True), (private(BOB), False)):
        said = repr(asyncio.run(backend.why(who, str(job)))) + asyncio.run(backend.queue(who, {"format": "%R"}))
        said += repr(asyncio.run(backend.test(who, wanted))) + repr(json.loads(asyncio.run(backend.jobs(who, {}))))
        assert ("n1 and n2 are reserved" in said, "quiet" in said) == (is_named, is_named)
