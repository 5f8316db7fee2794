"""Preemption through the controller: what is recorded, what nodes are told, and that a crash at any point loses nothing."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.api.views import in_a_sentence, job_view, node_views, why_waiting
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs
from hpcsched.controller.views.history import story_of
from hpcsched.model.accounting import PreemptMode, PreemptType, Qos
from hpcsched.model.job import JobState
from hpcsched.model.spec import SignalSpec
from hpcsched.sched.policy import Policy, PreemptRules


def cluster_of(
    *nodes: str, mode: PreemptMode = PreemptMode.REQUEUE, path: Path | None = None, up: bool = True, **rules: Any
) -> Cluster:
    """Return a cluster of nodes with two cpus each, where jobs of QOS high preempt those of QOS low."""
    cluster = Cluster(*nodes, path=path, up=up)
    qos = {"low": Qos(name="low", preempt_mode=mode), "high": Qos(name="high", preempt=("low",))}
    cluster.controller.policy = Policy(preempt=PreemptRules(type=PreemptType.QOS, qos=qos, **rules))
    return cluster


def submit(cluster: Cluster, qos: str, **fields: Any) -> int:
    return cluster.submit(qos=qos, cpus_per_task=2, **fields)


def start_low(cluster: Cluster, **fields: Any) -> int:
    job_id = submit(cluster, "low", **fields)
    cluster.run(job_id)
    cluster.sent(protocol.Launch)
    return job_id


def states(cluster: Cluster, *job_ids: int) -> list[str]:
    return [cluster.job(job_id).state.value for job_id in job_ids]


def test_the_victim_is_queued_again_and_the_winner_has_its_node() -> None:
    cluster = cluster_of("n1")
    low = start_low(cluster)
    high, other = submit(cluster, "high"), submit(cluster, "low")
    assert states(cluster, low, high) == ["COMPLETING", "PENDING"]
    ((to, order),) = cluster.sent(protocol.EndJob)
    assert (to, order.signum, order.grace_s) == ("n1", 0, 30.0)
    view = job_view(cluster.job(low), cluster.state, ROOT, cluster.now_s)
    assert (view["preempted_by"], view["reason_detail"]) == (high, f"preempted by job {high} of ann")
    cluster.gone(low, "n1")
    assert states(cluster, low, high, other) == ["PENDING", "CONFIGURING", "PENDING"]
    assert (cluster.job(low).attempt, cluster.job(low).preempted_by) == (1, high)
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(other)], {}))
    cluster.run(high)
    cluster.end(high)
    cluster.tick(after_s=100.0)
    assert states(cluster, low, high) == ["CONFIGURING", "COMPLETED"]
    assert cluster.job(low).preempted_by is None


def test_a_preempted_job_gets_its_signal_to_save_and_is_requeued_as_soon_as_it_ends() -> None:
    cluster = cluster_of("n1", mode=PreemptMode.CHECKPOINT, grace_s=120.0)
    low = start_low(cluster, signal=SignalSpec(signum=signal.SIGUSR1, before_s=60, batch_only=True))
    high = submit(cluster, "high")
    ((_, order),) = cluster.sent(protocol.EndJob)
    assert (order.signum, order.batch_only, order.grace_s) == (signal.SIGUSR1, True, 120.0)
    cluster.end(low, code=75)
    assert states(cluster, low, high) == ["PENDING", "CONFIGURING"]
    steps = cluster.store.load_steps([low])
    assert [(step.attempt, step.state, step.exit_code) for step in steps] == [(0, "PREEMPTED", 75)]


def test_a_job_that_completes_while_it_may_save_what_it_has_is_completed() -> None:
    cluster = cluster_of("n1", mode=PreemptMode.CHECKPOINT)
    low = start_low(cluster)
    high = submit(cluster, "high")
    cluster.end(low, code=0)
    assert states(cluster, low, high) == ["COMPLETED", "CONFIGURING"]


@pytest.mark.parametrize("requeue", [None, False])
def test_what_is_cancelled_is_preempted_for_good(requeue: bool | None) -> None:
    cluster = cluster_of("n1", mode=PreemptMode.CANCEL if requeue is None else PreemptMode.REQUEUE)
    low = start_low(cluster, requeue=requeue)
    high = submit(cluster, "high")
    cluster.end(low, code=0)
    assert states(cluster, low, high) == ["PREEMPTED", "CONFIGURING"]


def test_one_that_is_suspended_goes_on_afterwards_and_its_node_is_never_overbooked() -> None:
    cluster = cluster_of("n1", mode=PreemptMode.SUSPEND)
    low = start_low(cluster, mem_per_node_mib=100)
    high = submit(cluster, "high", mem_per_node_mib=100)
    assert states(cluster, low) == ["SUSPENDED"]
    victim = cluster.job(low)
    reason, detail, _ = why_waiting(victim, cluster.state, ROOT, cluster.now_s)
    assert in_a_sentence(victim, cluster.state, ROOT, reason, detail, cluster.now_s).startswith(
        f"job {low} is suspended: job {high} has its CPUs"
    )
    cluster.tick()  # it was asked for by the tick that suspended it
    assert states(cluster, low, high) == ["SUSPENDED", "CONFIGURING"]
    assert [message.on for _, message in cluster.sent(protocol.SuspendJob)] == [True]
    assert node_views(cluster.state, cluster.now_s)[0]["cpus_alloc"] == 2
    refused = cluster.ask(lambda tx: jobs.resume(tx, ROOT, [str(low)]))
    assert f"job {high} has its CPUs" in refused.errors[0]["error"]
    cluster.run(high)
    cluster.end(high)
    assert states(cluster, low, high) == ["RUNNING", "COMPLETED"]
    assert [message.on for _, message in cluster.sent(protocol.SuspendJob)] == [False]


@pytest.mark.parametrize("what", ["cancel", "hold"])
def test_when_the_winner_goes_away_others_get_what_was_kept_for_it(what: str) -> None:
    cluster = cluster_of("n1")
    low = start_low(cluster)
    high, other = submit(cluster, "high"), submit(cluster, "low")
    if what == "cancel":
        cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(high)], {}))
    else:
        cluster.ask(lambda tx: jobs.hold(tx, ANN, [str(high)]))
    assert cluster.job(high).reserved_shares == ()
    cluster.gone(low, "n1")
    assert states(cluster, low, other) == ["PENDING", "CONFIGURING"]


def test_a_victim_that_is_cancelled_meanwhile_does_not_come_back() -> None:
    cluster = cluster_of("n1")
    low = start_low(cluster)
    high = submit(cluster, "high")
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(low)], {}))
    cluster.gone(low, "n1")
    assert states(cluster, low, high) == ["CANCELLED", "CONFIGURING"]


def test_a_job_is_preempted_as_soon_as_it_is_no_longer_exempt() -> None:
    cluster = cluster_of("n1", exempt_s=60.0)
    low = start_low(cluster)
    submit(cluster, "high")
    assert states(cluster, low) == ["RUNNING"]
    assert 60.0 in cluster.ports.wakes
    cluster.tick(after_s=60.0)
    assert states(cluster, low) == ["COMPLETING"]


def test_the_stories_say_who_made_room_for_whom() -> None:
    cluster = cluster_of("n1", mode=PreemptMode.CHECKPOINT)
    low = start_low(cluster)
    high = submit(cluster, "high")
    told = {
        job: [line["text"] for line in story_of(cluster.job(job), cluster.store.load_events(job))]
        for job in (low, high)
    }
    wanted = f"to be ended as PREEMPTED, to be queued again: preempted by job {high} of ann; it has 60 s to save a checkpoint"
    assert told[low][-1] == wanted
    assert told[high][-1] == "n1 is reserved for it: its resources there are being freed"


@pytest.mark.parametrize("mode", [PreemptMode.REQUEUE, PreemptMode.CHECKPOINT, PreemptMode.SUSPEND])
@pytest.mark.parametrize("crash", ["before the order", "after the order", "before the start"])
def test_a_crash_in_the_midst_of_a_preemption_loses_nothing(tmp_path: Path, mode: PreemptMode, crash: str) -> None:
    """The controller is killed after the commit and before the kill; after the kill; before the winner's launch."""
    cluster = cluster_of("n1", mode=mode, path=tmp_path / "db")
    low = start_low(cluster, mem_per_node_mib=100)
    started = cluster.report(low, protocol.STARTED)
    if crash == "before the order":
        cluster.ports.send = lambda *_: None  # type: ignore[method-assign]
    high = submit(cluster, "high", mem_per_node_mib=100)
    other = submit(cluster, "low")
    inventory: tuple[protocol.Report, ...] = (started,)
    if crash == "before the start" and mode is not PreemptMode.SUSPEND:
        cluster.ports.send = lambda *_: None  # type: ignore[method-assign]
        cluster.gone(low, "n1")
        inventory = ()
    cluster.store.close()
    again = cluster_of("n1", mode=mode, path=tmp_path / "db", up=False)
    again.now_s = cluster.now_s + 1.0
    load_state(again.state, again.store, again.now_s)
    for job_id in (low, high):
        assert again.job(job_id) == cluster.job(job_id)
    again.welcome("n1", inventory=inventory)
    again.tick()
    if mode is PreemptMode.SUSPEND:
        assert True in [message.on for _, message in again.sent(protocol.SuspendJob)]
    elif inventory:
        assert [message.job_id for _, message in again.sent(protocol.EndJob)] == [low]
        again.gone(low, "n1")
    launched = [message.job_id for _, message in again.sent(protocol.Launch)]
    assert (launched, states(again, high)) == ([high], ["CONFIGURING"])
    again.ask(lambda tx: jobs.cancel(tx, ANN, [str(other)], {}))
    again.run(high)
    again.end(high)
    again.tick(after_s=100.0)
    assert states(again, low)[0] in ("RUNNING", "CONFIGURING")
    for job_id in (low, high):
        assert replace(again.replayed(job_id), expected_start_s=None) == again.job(job_id)


def test_nothing_is_kept_for_a_job_that_has_started() -> None:
    cluster = cluster_of("n1")
    low = start_low(cluster)
    high = submit(cluster, "high")
    assert cluster.job(high).reserved_shares
    cluster.gone(low, "n1")
    assert (cluster.job(high).state, cluster.job(high).reserved_shares) == (JobState.CONFIGURING, ())
