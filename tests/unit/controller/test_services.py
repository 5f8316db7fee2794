"""Services of the controller: their replicas are jobs of the owner, kept up at each tick and after a restart."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster
from jobs import spec

from hpcsched.controller.requests import services
from hpcsched.controller.usage_ledger import charged
from hpcsched.errors import (
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    RateLimitError,
    RequestError,
)
from hpcsched.lifecycle.node import NodeDrained, NodeResumed
from hpcsched.model.accounting import Account, Accounting, Limits, ServiceUse
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState
from hpcsched.model.service import Audience, Service
from hpcsched.sched.replicas import ReplicaLoad, ServiceLoad


def start(cluster: Cluster, name: str = "chat", least: int = 1, most: int = 1, **more: Any) -> Service:
    body = {"name": name, "model": "/models/tiny", "job": spec_to_json(spec()), "least": least, "most": most}
    made = cluster.ask(lambda tx: services.create(tx, ANN, body | more))
    cluster.tick()
    assert isinstance(made, Service)
    return cluster.state.services[name]


def say(cluster: Cluster, load: ServiceLoad) -> None:
    cluster.ask(lambda tx: services.note_loads(tx, cluster.controller.service_loads, {"chat": load}))


def jobs_of(cluster: Cluster) -> list[int]:
    return [one.job_id for one in cluster.state.services["chat"].replicas]


def test_a_replica_is_an_ordinary_job_of_the_owner_that_names_its_service() -> None:
    cluster = Cluster("n1")
    service = start(cluster)
    job = cluster.job(service.replicas[0].job_id)
    assert (job.uid, job.state, job.spec.comment) == (ANN.uid, JobState.CONFIGURING, "service chat@v1")


def test_a_replica_that_ends_is_replaced_and_one_that_fails_after_a_pause() -> None:
    cluster = Cluster("n1")
    first = start(cluster).replicas[0].job_id
    cluster.run(first)
    cluster.end(first, 3)
    cluster.gone(first, "n1")
    assert jobs_of(cluster) == []
    assert "job 1 of version v1 ended before it was ready: its script ended with exit code 3" in (
        cluster.state.services["chat"].problem
    )
    cluster.tick(4.0)
    assert jobs_of(cluster) == []
    cluster.tick(2.0)
    (second,) = jobs_of(cluster)
    cluster.run(second)
    cluster.tick(100.0)
    cluster.end(second, 3)
    cluster.gone(second, "n1")
    assert len(jobs_of(cluster)) == 1  # it had run for a while


def test_a_refused_replica_is_tried_again_and_its_service_says_why() -> None:
    cluster = Cluster("n1")
    start(cluster)
    job = cluster.job(jobs_of(cluster)[0])
    cluster.run(job.id)
    cluster.ask(lambda tx: services.scale(tx, ANN, {"name": "chat", "least": 2, "most": 2}))
    partition = cluster.state.partitions.pop("main")
    cluster.state.partitions["other"] = partition
    cluster.tick()
    cluster.state.partitions = {}
    cluster.ask(lambda tx: services.scale(tx, ANN, {"name": "chat", "least": 3, "most": 3}))
    cluster.tick()
    assert "a replica is refused: cannot submit a job: no partition" in cluster.state.services["chat"].problem
    cluster.state.partitions = {"main": partition}
    cluster.tick(29.0)
    assert len(jobs_of(cluster)) == 2
    cluster.tick(2.0)
    assert len(jobs_of(cluster)) == 3
    assert cluster.state.services["chat"].problem == ""


def test_replicas_are_drained_before_they_are_cancelled_and_waiting_ones_go_first() -> None:
    cluster = Cluster("n1")  # it has two cpus: of three replicas one waits
    start(cluster, least=3, most=3)
    first, second, third = jobs_of(cluster)
    for job_id in (first, second):
        cluster.run(job_id)
    assert cluster.job(third).state is JobState.PENDING
    cluster.ask(lambda tx: services.scale(tx, ANN, {"name": "chat", "least": 1, "most": 1}))
    cluster.tick()
    assert cluster.job(third).state is JobState.CANCELLED
    kept, drained = cluster.state.services["chat"].replicas
    assert (kept.job_id, kept.drained_at_s, drained.job_id, drained.drained_at_s > 0) == (first, 0.0, second, True)
    busy = {first: ReplicaLoad(ready=True), second: ReplicaLoad(ready=True, active=1)}
    cluster.tick(1.0)
    say(cluster, ServiceLoad(at_s=cluster.now_s, replicas=busy))
    assert cluster.job(second).state is JobState.RUNNING
    cluster.tick(1.0)
    say(cluster, ServiceLoad(at_s=cluster.now_s, replicas={**busy, second: ReplicaLoad(ready=True)}))
    assert cluster.job(second).state is JobState.COMPLETING


def test_a_service_and_its_replicas_are_known_after_a_restart(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    service = start(cluster, audience="all")
    assert cluster.store.load_services() == [service]
    assert service.audience is Audience.ALL


def test_stopping_a_service_cancels_its_jobs() -> None:
    cluster = Cluster("n1")
    (job_id,) = (one.job_id for one in start(cluster).replicas)
    cluster.run(job_id)
    cluster.ask(lambda tx: services.stop(tx, ANN, {"name": "chat"}))
    cluster.tick(100.0)
    assert cluster.job(job_id).state is JobState.COMPLETING
    assert cluster.state.services == {}
    assert cluster.store.load_services() == []


def test_a_service_of_another_is_neither_scaled_nor_stopped_nor_asked() -> None:
    cluster = Cluster("n1")
    start(cluster)
    for work in (services.scale, services.stop):
        with pytest.raises(PermissionDeniedError, match="it belongs to ann, you are bob"):
            cluster.ask(lambda tx, work=work: work(tx, BOB, {"name": "chat", "least": 0, "most": 1}))
    with pytest.raises(NotFoundError, match="no service of this name that you may use"):
        services.use(cluster.state, BOB, {"name": "chat"}, cluster.now_s)
    with pytest.raises(NotFoundError):
        services.use(cluster.state, ANN, {"name": ["chat"]}, cluster.now_s)
    assert services.use(cluster.state, ANN, {"name": "chat"}, cluster.now_s)["service"] == "chat"
    assert services.use(cluster.state, ROOT, {"name": "chat"}, cluster.now_s)["user"] == "root"


def test_the_gateway_reaches_running_replicas_of_the_named_service_alone() -> None:
    cluster = Cluster("n1")
    (replica,) = (one.job_id for one in start(cluster).replicas)
    other = cluster.submit()
    cluster.tick()
    with pytest.raises(NotFoundError, match=f"job {replica} does not run"):
        services.find_replica(cluster.state, {"name": "chat", "job": replica})
    for job_id in (replica, other):
        cluster.run(job_id)
    service, job = services.find_replica(cluster.state, {"name": "chat", "job": replica})
    assert (service.name, job.id) == ("chat", replica)
    for body in ({"name": "chat", "job": int(other)}, {"name": "none", "job": replica}, {"name": "chat", "job": "1"}):
        with pytest.raises(NotFoundError, match="the service has no such one"):
            services.find_replica(cluster.state, body)


def test_others_see_no_usage_model_or_problem_of_a_service() -> None:
    cluster = Cluster("n1")
    service = replace(start(cluster), problem="it ended")
    seen = [services.service_view(cluster.state, who, service, None) for who in (ANN, BOB)]
    assert [(one["problem"], one["versions"][0]["model"]) for one in seen] == [("it ended", "/models/tiny"), ("", None)]
    used = ServiceUse("chat", "ann", "lab", 0, 1, 1, 1)
    assert [services.sees_use(cluster.state, who, used) for who in (ANN, BOB, ROOT)] == [True, False, True]


def test_a_service_open_to_all_is_asked_by_all_and_managed_by_its_owner() -> None:
    cluster = Cluster("n1")
    start(cluster, audience="all")
    assert services.use(cluster.state, BOB, {}, cluster.now_s)["services"] == [
        {"name": "chat", "user": "ann", "made_at_s": cluster.now_s}
    ]
    assert services.use(cluster.state, BOB, {"name": "chat"}, cluster.now_s)["user"] == "bob"
    with pytest.raises(PermissionDeniedError):
        cluster.ask(lambda tx: services.stop(tx, BOB, {"name": "chat"}))


@pytest.mark.parametrize(("users", "may"), [(("ann", "bob"), True), (("ann",), False), ((), False)], ids=str)
def test_a_service_open_to_its_account_is_asked_by_users_of_that_account(users: tuple[str, ...], may: bool) -> None:
    cluster = Cluster("n1")
    if users:
        accounts = (Account(name="lab", users=users), Account(name="other", users=("bob",)))
        cluster.state.config = replace(cluster.state.config, accounting=Accounting(accounts=accounts))
    service = start(cluster, audience="account")
    assert service.account == ("lab" if users else "")
    assert services.may_use(cluster.state, BOB, service) is may
    assert services.may_use(cluster.state, ANN, service)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"name": "Chat"}, "cannot name a service 'Chat'"),
        ({"name": "a@v1"}, "cannot name a service"),
        ({"name": "../x"}, "cannot name a service"),
        ({"name": "a\nb"}, "cannot name a service"),
        ({"least": 2, "most": 1}, "cannot use these numbers of replicas"),
        ({"most": True}, "cannot use these numbers of replicas"),
        ({"most": 65}, "cannot use these numbers of replicas"),
        ({"model": "a\nb"}, "cannot serve this model"),
        ({"audience": "world"}, "cannot open a service to 'world'"),
    ],
)
def test_a_request_for_a_service_is_checked(body: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        start(Cluster("n1"), **({"name": "chat"} | body))


def test_a_name_is_given_once_and_a_user_has_few_services() -> None:
    cluster = Cluster("n1")
    start(cluster)
    with pytest.raises(ConflictError, match="there is one of this name"):
        start(cluster)
    for number in range(19):
        start(cluster, f"chat{number}", 0)
    with pytest.raises(RequestError, match="you have 20 of at most 20"):
        start(cluster, "more", 0)


# ----- rollouts, and what the gateway says


def roll(cluster: Cluster, identity: Any = ANN, **more: Any) -> Service:
    body = {"name": "chat", "model": "/models/new", "job": spec_to_json(spec())} | more
    made = cluster.ask(lambda tx: services.roll(tx, identity, body))
    cluster.tick()
    assert isinstance(made, Service)
    return cluster.state.services["chat"]


def test_a_rollout_starts_a_replica_beside_the_others_and_a_second_one_is_refused() -> None:
    cluster = Cluster("n1")
    start(cluster)
    service = roll(cluster)
    assert [one.version for one in service.replicas] == ["v1", "v2"]
    assert cluster.job(service.replicas[1].job_id).spec.comment == "service chat@v2"
    with pytest.raises(ConflictError, match="that of version v2 is under way"):
        roll(cluster)
    assert services.serving_view(cluster.state)[0]["weights"] == {"v1": 100, "v2": -1}
    taken_back = roll(cluster, back=True)
    assert (taken_back.rollout, taken_back.last_rollout) == (None, "version v2 was taken back: ann wanted it")
    with pytest.raises(RequestError, match="has no rollout now"):
        roll(cluster, back=True)


def test_a_rollout_without_a_job_has_that_of_the_present_version_with_the_new_model() -> None:
    cluster = Cluster("n1")
    script = "#!/bin/sh\nexec python3 -m hpcserve run '/models/a b' --name chat\n"
    start(cluster, model="/models/a b", job=spec_to_json(spec(script=script, cpus_per_task=2)))
    body = {"name": "chat", "model": "/models/it's new"}
    service = cluster.ask(lambda tx: services.roll(tx, ANN, body))
    job = spec_from_json(json.loads(service.version("v2").spec))
    assert (shlex.split(job.script)[6], job.cpus_per_task, job.comment) == ("/models/it's new", 2, "service chat@v2")


def test_a_rollout_without_a_job_is_refused_if_the_script_does_not_name_the_model() -> None:
    cluster = Cluster("n1")
    start(cluster)
    for model in ("/models/new", None, 3):
        with pytest.raises(RequestError, match="cannot put another model into the script of version v1"):
            cluster.ask(lambda tx, model=model: services.roll(tx, ANN, {"name": "chat", "model": model}))


def test_a_service_says_what_the_user_may_do_with_it() -> None:
    cluster = Cluster("n1")
    service = start(cluster, audience="all")
    found = [services.service_view(cluster.state, who, service, None)["may"] for who in (ANN, BOB, ROOT)]
    assert found == [["scale", "stop", "roll"], [], ["scale", "stop"]]


def test_nobody_but_the_owner_gives_a_service_a_job_that_runs_as_the_owner() -> None:
    cluster = Cluster("n1")
    start(cluster)
    for identity in (BOB, ROOT):
        with pytest.raises(PermissionDeniedError, match="it belongs to ann"):
            roll(cluster, identity)


@pytest.mark.parametrize(
    "body",
    [
        {"canary": 0},
        {"canary": 101},
        {"canary": True},
        {"max_errors": -1},
        {"max_ttft": "2"},
        {"checks": [1]},
        {"checks": {}},
    ],
    ids=str,
)
def test_the_limits_of_a_rollout_are_checked(body: dict[str, Any]) -> None:
    cluster = Cluster("n1")
    start(cluster)
    with pytest.raises(RequestError, match="cannot begin the rollout"):
        roll(cluster, **body)


def test_what_users_ask_is_added_up_by_day_and_account_on_disk() -> None:
    cluster = Cluster("n1")
    rows = [["chat", "bob", "lab", "requests", 1], ["chat", "bob", "lab", "prompt_tokens", 7]]
    for _ in range(2):
        used = services.read_used({"used": rows}, cluster.now_s)
        cluster.ask(lambda tx, used=used: services.note_loads(tx, cluster.controller.service_loads, {}, used))
    (found,) = cluster.store.load_service_uses(0)
    assert found[:4] == ("chat", "bob", "lab", int(cluster.now_s // 86_400))
    assert found[4:] == (2, 14, 0, 0.0)


@pytest.mark.parametrize(
    "body",
    [
        {"used": [["chat", "bob", "lab", "requests", -1]]},
        {"used": [["chat", "bob", 3, "requests", 1]]},
        {"used": [["chat", "bob", "lab", "money", 1]]},
        {"used": [["chat", "bob\ud800", "lab", "requests", 1]]},
        {"used": [["c" * 257, "bob", "lab", "requests", 1]]},
        {"used": [["chat", "bob", "lab", "requests", 1 << 49]] * 3},
        {"services": {"chat": {"replicas": 3}}},
        {"services": {"chat": {"checked": dict.fromkeys(map(str, range(257)), "ok")}}},
        {"used": {}},
        {"services": []},
        {"services": {"chat": {"replicas": {"x": {}}}}},
        {"services": {"chat": {"replicas": {"1": {"active": "many"}}}}},
    ],
    ids=lambda body: str(body)[:80],
)
def test_what_the_gateway_says_is_checked(body: dict[str, Any]) -> None:
    with pytest.raises((RequestError, ProtocolError)):
        services.read_loads(body, 0.0), services.read_used(body, 0.0)


# ----- tokens are charged to those who ask

PRICED = Accounting(half_life_s=None, token_billing=(("prompt", 0.5), ("completion", 2.0)))


def priced(accounting: Accounting = PRICED) -> Cluster:
    """Return a cluster with a replica of ann's that bob may ask, which costs one billing second a second."""
    cluster = Cluster("n1")
    cluster.state.config = replace(cluster.state.config, accounting=accounting)
    cluster.run(start(cluster, audience="all").replicas[0].job_id)
    asked(cluster, ANN.user, 0)
    cluster.tick(100.0)
    return cluster


def asked(cluster: Cluster, user: str, completion_tokens: int, prompt_tokens: int = 0) -> None:
    """Tell the controller what a user asked, as the gateway does."""
    account = cluster.state.config.accounting.default_account(user)
    used = [ServiceUse("chat", user, account, 0, 1, prompt_tokens, completion_tokens)]
    cluster.ask(lambda tx: services.note_loads(tx, cluster.controller.service_loads, {}, used))


def billed(cluster: Cluster) -> dict[str, float]:
    owner = cluster.job(jobs_of(cluster)[0]).user  # of ann's uid on this machine
    found = charged(cluster.state, cluster.now_s)
    return {"ann" if user == owner else user: round(amount, 6) for (_, user), amount in found.items()}


def test_tokens_move_usage_from_the_owner_to_those_who_ask_and_the_sum_stays() -> None:
    cluster = priced()
    before = billed(cluster)["ann"]
    asked(cluster, "bob", 10, 4)
    assert billed(cluster) == {"ann": before - 22, "bob": 22}
    asked(cluster, "ann", 10)
    assert billed(cluster) == {"ann": before - 22, "bob": 22}  # the owner pays for the replica anyway
    cluster.tick(50.0)
    assert billed(cluster) == {"ann": before + 28, "bob": 22}
    assert {one.user: one.charged_s for one in cluster.store.load_service_uses(0)} == {"ann": 0, "bob": 22}


def test_all_users_together_pay_no_more_than_the_replicas_cost() -> None:
    cluster = priced()
    asked(cluster, "bob", 1 << 40)  # the owner's own program counts the tokens
    assert billed(cluster)["bob"] == 100
    asked(cluster, "bob", 1 << 40)
    assert billed(cluster)["bob"] == 100
    cluster.tick(20.0)
    asked(cluster, "bob", 1 << 40)
    assert billed(cluster)["bob"] == 120


def test_no_more_than_the_cost_of_the_last_hour_can_be_charged() -> None:
    cluster = priced()
    for _ in range(2):
        cluster.tick(3000.0)
        asked(cluster, "ann", 0)
    asked(cluster, "bob", 1 << 40)
    assert billed(cluster)["bob"] == 3600


def test_time_without_a_running_replica_costs_nothing_that_can_be_charged() -> None:
    cluster = priced()
    asked(cluster, "bob", 25)
    cluster.ask(lambda tx: tx.record_node(NodeDrained(node=NodeName("n1"), at_s=tx.now_s, why="fan", by="root")))
    (job_id,) = jobs_of(cluster)
    cluster.end(job_id)
    cluster.gone(job_id, "n1")
    cluster.tick(1000.0)
    asked(cluster, "ann", 0)
    cluster.ask(lambda tx: tx.record_node(NodeResumed(node=NodeName("n1"), at_s=tx.now_s, by="root")))
    cluster.tick()
    cluster.run(jobs_of(cluster)[0])
    cluster.tick(30.0)
    asked(cluster, "bob", 1 << 40)
    assert billed(cluster)["bob"] == 130


def test_without_a_price_the_owner_pays_for_all() -> None:
    cluster = priced(replace(PRICED, token_billing=()))
    before = billed(cluster)
    asked(cluster, "bob", 1000)
    assert billed(cluster) == before


def test_a_user_whose_account_has_spent_its_minutes_asks_no_service_of_others() -> None:
    accounts = (Account(name="lab", users=("ann", "*")), Account(name="guests", users=("bob",)))
    priced_accounts = replace(PRICED, accounts=accounts, half_life_s=1000.0)
    cluster = priced(priced_accounts)
    limited = tuple(replace(one, limits=Limits(grp_tres_mins=(("billing", 1),))) for one in accounts)
    cluster.state.config = replace(cluster.state.config, accounting=replace(priced_accounts, accounts=limited))
    asked(cluster, "bob", 29)
    assert services.use(cluster.state, BOB, {"name": "chat"}, cluster.now_s)["account"] == "guests"
    asked(cluster, "bob", 1)
    why = "account 'guests' allows 1 billing-minutes, and 1 billing-minutes are used"
    with pytest.raises(RateLimitError, match=why):
        services.use(cluster.state, BOB, {"name": "chat"}, cluster.now_s)
    assert services.use(cluster.state, BOB, {"name": "chat"}, cluster.now_s + 100)["account"] == "guests"  # it decays
    asked(cluster, "ann", 1000)
    cluster.ask(lambda tx: tx.add_usage(("lab", "ann", ""), (("billing", 200.0),), tx.now_s))  # of other jobs
    assert services.use(cluster.state, ANN, {"name": "chat"}, cluster.now_s)["account"] == "lab"
