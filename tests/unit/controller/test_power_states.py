"""Idle nodes are switched off, and on again for the jobs that are placed on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, ROOT, Cluster, config, full_disk

from hpcnode.wire import protocol
from hpcsched.api.views import in_a_sentence, node_views, why_waiting
from hpcsched.config.load import build_config
from hpcsched.controller.nodes.power import power_down, power_up, switching_failed
from hpcsched.controller.recovery import node_of
from hpcsched.controller.requests import jobs as requests
from hpcsched.errors import ConfigError, PermissionDeniedError, RequestError
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState
from hpcsched.model.node import POWER_SAVING, Link, Power
from hpcsched.store.store import Store

N1, N2 = NodeName("n1"), NodeName("n2")
AFTER_S = 600.0
FACTS = {"spool": {"id": "a", "machine": "m", "inode": 1, "hardware": ["mac"]}}
MAC = "52:54:00:12:34:56"


def saving(*names: str, keep_on: int = 0, **power: Any) -> Cluster:
    """Return a cluster that switches idle nodes off, and remembers which were to be switched."""
    cluster = Cluster(*names)
    settings = config().power
    settings = replace(settings, suspend_after=AFTER_S, min_on=60.0, **power)
    cluster.state.config = replace(cluster.state.config, power=settings)
    for name, node in cluster.state.nodes.items():
        cluster.state.nodes[name] = replace(node, spec=replace(node.spec, host="10.0.0.1", mac=MAC))
    parts = cluster.state.partitions
    parts |= {name: replace(part, keep_on=keep_on) for name, part in parts.items()}
    cluster.switched = []  # type: ignore[attr-defined]
    cluster.ports.switch_power = cluster.switched.append  # type: ignore[attr-defined]
    cluster.controller._unreachable._monotonic_s = lambda: cluster.now_s
    for name in names:
        cluster.welcome(name, facts=FACTS)
    return cluster


def power_of(cluster: Cluster, name: str) -> Power:
    return cluster.state.nodes[NodeName(name)].power


def turn_off(cluster: Cluster, *names: str) -> None:
    """Wait until these nodes are switched off."""
    cluster.tick(AFTER_S)
    for name in names:
        assert power_of(cluster, name) is Power.POWERING_DOWN
        cluster.controller.node_down(NodeName(name), "lost the agent")
    cluster.tick(cluster.state.config.power.suspend_timeout)
    assert [power_of(cluster, name) for name in names] == [Power.POWERED_DOWN] * len(names)


def sentence(cluster: Cluster, job_id: int) -> str:
    job = cluster.job(job_id)
    reason, detail, _ = why_waiting(job, cluster.state, ANN, cluster.now_s)
    return in_a_sentence(job, cluster.state, ANN, reason, detail, cluster.now_s)


def test_an_idle_node_is_switched_off_and_on_for_a_job_which_then_runs() -> None:
    cluster = saving("n1")
    cluster.tick(AFTER_S - 1)
    assert power_of(cluster, "n1") is Power.ON
    turn_off(cluster, "n1")
    assert node_views(cluster.state, cluster.now_s)[0]["state"] == "POWERED_DOWN"
    job_id = cluster.submit()
    cluster.tick()
    assert cluster.job(job_id).state is JobState.CONFIGURING
    assert power_of(cluster, "n1") is Power.POWERING_UP
    assert cluster.switched == [N1, N1]  # type: ignore[attr-defined]
    assert "waits for n1 to come back" in sentence(cluster, job_id)
    cluster.tick(300.0)
    assert cluster.job(job_id).held_nodes == (N1,)  # longer than a silent node has to take its part
    assert not cluster.sent(protocol.Launch)
    cluster.welcome("n1", boot_id="boot-2", facts=FACTS)
    assert power_of(cluster, "n1") is Power.ON
    assert [node for node, _ in cluster.sent(protocol.Launch)] == [N1]
    cluster.run(job_id)
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.RUNNING, 0)
    assert cluster.replayed_node("n1").power is Power.ON
    assert cluster.replayed(job_id) == cluster.job(job_id)


def test_a_node_that_does_not_come_back_is_down_and_its_job_starts_elsewhere() -> None:
    cluster = saving("n1", "n2")
    busy = cluster.submit(cpus_per_task=2, nodelist=(N2,))
    cluster.tick()
    cluster.run(busy)
    turn_off(cluster, "n1")
    job_id = cluster.submit(cpus_per_task=2, requeue=True)
    cluster.tick()
    cluster.tick(cluster.state.config.power.resume_timeout)
    known = cluster.state.nodes[N1]
    assert (known.power, known.link) == (Power.ON, Link.DOWN)
    assert "did not come back within 10:00" in known.link_why
    assert cluster.job(job_id).state is JobState.PENDING
    cluster.end(busy)
    cluster.tick(10.0)
    assert cluster.job(job_id).held_nodes == (N2,)
    assert cluster.replayed_node("n1").link_why == known.link_why


def test_a_node_that_somebody_switches_on_is_taken_back() -> None:
    cluster = saving("n1")
    turn_off(cluster, "n1")
    cluster.welcome("n1", boot_id="boot-2", facts=FACTS)
    assert (power_of(cluster, "n1"), cluster.state.nodes[N1].link) == (Power.ON, Link.UP)
    job_id = cluster.submit()
    cluster.tick()
    assert cluster.job(job_id).held_nodes == (N1,)


def test_a_node_that_still_answers_was_not_switched_off() -> None:
    cluster = saving("n1")
    cluster.tick(AFTER_S)
    job_id = cluster.submit()
    cluster.tick()
    assert cluster.job(job_id).state is JobState.PENDING  # it may be off in a moment
    cluster.tick(cluster.state.config.power.suspend_timeout)
    assert "still answers" in cluster.state.nodes[N1].power_why
    cluster.tick()
    assert cluster.job(job_id).held_nodes == (N1,)


def test_short_jobs_do_not_switch_a_node_off_and_on_all_the_time() -> None:
    cluster = saving("n1")
    cluster.state.config = replace(
        cluster.state.config, power=replace(cluster.state.config.power, suspend_after=1.0, min_on=3600.0)
    )
    cluster.state.nodes[N1] = replace(cluster.state.nodes[N1], power_since_s=cluster.now_s)
    for _ in range(20):
        job_id = cluster.submit()
        cluster.tick()
        cluster.run(job_id)
        cluster.end(job_id)
        cluster.tick(100.0)
        assert power_of(cluster, "n1") is Power.ON
    cluster.tick(3600.0)
    assert power_of(cluster, "n1") is Power.POWERING_DOWN


def test_a_node_is_idle_from_the_end_of_its_last_job() -> None:
    cluster = saving("n1")
    job_id = cluster.submit()
    cluster.tick()
    cluster.run(job_id)
    cluster.now_s += 10 * AFTER_S  # nothing happens meanwhile
    cluster.end(job_id)
    cluster.tick(AFTER_S - 1)
    assert power_of(cluster, "n1") is Power.ON
    cluster.tick(2.0)
    assert power_of(cluster, "n1") is Power.POWERING_DOWN


def test_a_partition_keeps_nodes_on() -> None:
    cluster = saving("n1", "n2", keep_on=1)
    cluster.tick(AFTER_S)
    assert [power_of(cluster, name).name for name in ("n1", "n2")] == ["POWERING_DOWN", "ON"]


def test_a_node_of_which_the_file_says_so_stays_on() -> None:
    cluster = saving("n1", "n2", "n3", keep_on=1)
    n3 = cluster.state.nodes[NodeName("n3")]
    cluster.state.nodes[n3.name] = replace(n3, spec=replace(n3.spec, suspend_after=0.0))
    cluster.tick(AFTER_S)
    assert [power_of(cluster, name).name for name in ("n1", "n2", "n3")] == ["POWERING_DOWN", "POWERING_DOWN", "ON"]


def test_a_node_that_is_on_is_preferred_to_one_that_is_off() -> None:
    cluster = saving("n1", "n2", keep_on=1)
    turn_off(cluster, "n1")
    cluster.tick()
    job_id = cluster.submit()
    cluster.tick()
    assert cluster.job(job_id).held_nodes == (N2,)
    assert power_of(cluster, "n1") is Power.POWERED_DOWN


def test_an_allocation_without_a_script_starts_when_its_nodes_are_back() -> None:
    cluster = saving("n1")
    turn_off(cluster, "n1")
    job_id = cluster.submit(script="")
    cluster.tick()
    assert cluster.job(job_id).state is JobState.CONFIGURING
    cluster.welcome("n1", boot_id="boot-2", facts=FACTS)
    assert cluster.job(job_id).state is JobState.RUNNING


def test_a_job_that_is_cancelled_meanwhile_gives_the_node_back_at_once() -> None:
    cluster = saving("n1")
    turn_off(cluster, "n1")
    job_id = cluster.submit()
    cluster.tick()
    cluster.ask(lambda tx: requests.cancel(tx, ANN, [str(job_id)], {}))
    cluster.tick()
    assert cluster.job(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize("state", ["POWERING_DOWN", "POWERED_DOWN", "POWERING_UP"])
def test_a_controller_that_starts_again_continues(state: str) -> None:
    cluster = saving("n1")
    cluster.tick(AFTER_S)
    job_id = 0
    if state != "POWERING_DOWN":
        cluster.controller.node_down(N1, "lost")
        cluster.tick(200.0)
    if state == "POWERING_UP":
        job_id = cluster.submit()
        cluster.tick()
    assert power_of(cluster, "n1") is Power[state]
    row = Store(cluster.store.connection).load_nodes()["n1"]
    again = node_of(cluster.state.nodes[N1].spec, row)
    known = cluster.state.nodes[N1]
    assert (again.power, again.power_since_s, again.power_by) == (known.power, known.power_since_s, POWER_SAVING)
    cluster.state.nodes[N1] = again
    cluster.state.spools.clear()
    cluster.tick()
    cluster.welcome("n1", boot_id="boot-1" if state == "POWERING_DOWN" else "boot-2", facts=FACTS)
    if state == "POWERING_DOWN":
        assert cluster.switched == [N1, N1]  # type: ignore[attr-defined]  # it is told once more
    else:
        assert power_of(cluster, "n1") is Power.ON
    if job_id:
        assert cluster.sent(protocol.Launch)


def test_an_order_that_fails_counts_only_while_it_is_the_last_one() -> None:
    cluster = saving("n1")
    cluster.tick(AFTER_S)
    since_s = cluster.state.nodes[N1].power_since_s
    cluster.ask(lambda tx: switching_failed(tx, N1, since_s - 1, "old"))
    assert power_of(cluster, "n1") is Power.POWERING_DOWN
    cluster.ask(lambda tx: switching_failed(tx, N1, since_s, "jobs are on the node: 7"))
    known = cluster.state.nodes[N1]
    assert (known.power, known.power_why) == (Power.ON, "jobs are on the node: 7")


def test_nothing_is_switched_before_it_is_on_disk() -> None:
    cluster = saving("n1")
    with full_disk(cluster):
        cluster.tick(AFTER_S)
        assert cluster.switched == []  # type: ignore[attr-defined]
        assert power_of(cluster, "n1") is Power.ON
    cluster.tick(1.0)
    assert cluster.switched == [N1]  # type: ignore[attr-defined]


def test_nodes_are_switched_by_hand() -> None:
    cluster = saving("n1", "n2")
    with pytest.raises(PermissionDeniedError):
        cluster.ask(lambda tx: power_down(tx, ANN, "n1"))
    job_id = cluster.submit(nodelist=(N2,))
    cluster.tick()
    cluster.run(job_id)
    with pytest.raises(RequestError, match="it holds 1 jobs"):
        cluster.ask(lambda tx: power_down(tx, ROOT, "n[1-2]"))
    assert cluster.ask(lambda tx: power_down(tx, ROOT, "n1")) == ["n1"]
    with pytest.raises(RequestError, match="it is being switched off"):
        cluster.ask(lambda tx: power_up(tx, ROOT, "n1"))
    cluster.controller.node_down(N1, "lost")
    cluster.tick(200.0)
    cluster.tick(10 * AFTER_S)
    assert power_of(cluster, "n1") is Power.POWERED_DOWN
    assert cluster.ask(lambda tx: power_up(tx, ROOT, "n[1-2]")) == ["n1"]
    assert cluster.state.nodes[N1].power_by == "root"


@pytest.mark.parametrize(
    ("spec", "why"),
    [({"host": "local"}, "it is this machine"), ({"mac": ""}, "nothing could switch it on again")],
)
def test_a_node_that_could_not_be_switched_on_again_stays_on(spec: dict[str, Any], why: str) -> None:
    cluster = saving("n1")
    node = cluster.state.nodes[N1]
    cluster.state.nodes[N1] = replace(node, spec=replace(node.spec, **spec))
    with pytest.raises(RequestError, match=why):
        cluster.ask(lambda tx: power_down(tx, ROOT, "n1"))
    cluster.tick(10 * AFTER_S)
    assert power_of(cluster, "n1") is Power.ON


def test_a_node_that_is_switched_off_is_off_and_one_that_does_not_come_back_is_down() -> None:
    cluster = saving("n1")
    turn_off(cluster, "n1")
    cluster.tick(1000.0)
    assert [outage.kind for outage in cluster.store.outages(0.0, cluster.now_s)] == ["off"]
    cluster.submit()
    cluster.tick()
    cluster.tick(cluster.state.config.power.resume_timeout)
    off, down = cluster.store.outages(0.0, cluster.now_s + 1)
    assert (off.kind, off.end_s, down.kind, down.start_s) == ("off", cluster.now_s, "down", cluster.now_s)


def test_the_time_to_switch_off_is_longer_than_a_node_has_to_answer() -> None:
    tables = {"controller": {"node_down_after_s": 200}, "power": {"suspend_after": "30m"}}
    with pytest.raises(ConfigError, match="is not longer than node_down_after_s"):
        build_config(tables, [], config_dir=Path("/nonexistent"), environ={})


def test_a_job_on_several_nodes_waits_until_all_are_back() -> None:
    cluster = saving("n1", "n2", keep_on=1)
    turn_off(cluster, "n1")
    job_id = cluster.submit(nodes_min=2)
    cluster.tick()
    for _ in range(3):
        cluster.tick(100.0)  # longer than a silent node has to take its part
        assert cluster.job(job_id).state is JobState.CONFIGURING
    cluster.welcome("n1", boot_id="boot-2", facts=FACTS)
    assert {node for node, _ in cluster.sent(protocol.Launch)} == {N1, N2} - {cluster.job(job_id).shares[0].node}
