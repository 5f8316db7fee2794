"""Which edits of the configuration wait until no job is held, and what a controller starts with instead."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from cluster import ANN, ROOT, Cluster
from jobs import partition, spec

from hpcnode.wire import protocol
from hpcsched.controller.nodes.edits import (
    as_before,
    follow_renames,
    jobs_held,
    move_renamed,
    refused_edits,
    renamed_nodes,
)
from hpcsched.controller.nodes.loss import LEAVING, lose_gone_nodes, remove_node
from hpcsched.controller.recovery import node_of
from hpcsched.controller.requests import crontabs
from hpcsched.controller.requests.jobs import drain, fence, requeue, resume_nodes
from hpcsched.controller.requests.reservations import create
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.metrics.links import LinkRun
from hpcsched.model.codec import spec_to_json
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState
from hpcsched.model.node import OURSELVES, Link, NodeSpec, reach_of

N1 = NodeName("n1")


def running(*names: str, **fields: Any) -> tuple[Cluster, int]:
    cluster = Cluster(*names)
    job_id = cluster.submit(requeue=True, **fields)
    cluster.tick()
    cluster.run(job_id)
    return cluster, job_id


def specs(cluster: Cluster, **changes: Any) -> tuple[NodeSpec, ...]:
    first, *others = (node.spec for node in cluster.state.nodes.values())
    return (replace(first, **changes), *others)


@pytest.mark.parametrize(
    ("key", "value"), [("host", "h2"), ("port", 23), ("user", "ben"), ("host_key", "ssh-ed25519 B"), ("root", "/r")]
)
def test_what_says_where_a_node_is_cannot_change_while_a_job_is_held(key: str, value: object) -> None:
    cluster, job_id = running("n1")
    state = cluster.state
    after = replace(state.config, nodes=specs(cluster, **{key: value}))
    (why,) = refused_edits(state, after)
    assert why.startswith(key)
    assert f"of node n1 cannot change while job {job_id} is held there" in why
    assert bool(refused_edits(state, after, ["n1"])) == (key == "root")
    cluster.end(job_id)
    assert refused_edits(state, after) == []


def test_what_a_node_has_can_change_while_a_job_is_held() -> None:
    cluster, _ = running("n1")
    after = replace(cluster.state.config, nodes=specs(cluster, cpus=1, weight=9, python="/usr/bin/python3"))
    assert refused_edits(cluster.state, after) == []


def test_the_clusters_name_and_a_nodes_file_stay_while_a_job_is_held() -> None:
    cluster, job_id = running("n1", "n2")
    state = cluster.state
    held = state.jobs[job_id].held_nodes[0]  # type: ignore[index]
    gone = tuple(node.spec for node in state.nodes.values() if node.name != held)
    renamed, fileless = refused_edits(state, replace(state.config, name="other", nodes=gone))
    assert "cannot become 'other'" in renamed
    assert f"job {job_id} holds nodes" in renamed
    assert f"hpcsched node remove --force {held}" in fileless
    kept = tuple(node.spec for node in state.nodes.values() if node.name == held)
    assert refused_edits(state, replace(state.config, nodes=kept)) == []


def test_a_controller_starts_with_what_it_had_where_jobs_are_held() -> None:
    cluster, job_id = running("n1", "n2")
    state = cluster.state
    held = jobs_held(state.active_jobs())
    (busy,) = held
    rows = {name: Mock(reach=json.dumps(reach_of(node.spec))) for name, node in state.nodes.items()}
    edited = tuple(replace(node.spec, host="elsewhere", cpus=1) for node in state.nodes.values())
    config, notes = as_before(replace(state.config, name="other", nodes=edited), "cluster", rows, held)
    assert config.name == "cluster"
    assert {spec.name: spec.host for spec in config.nodes} == {
        name: state.nodes[name].spec.host if name == busy else "elsewhere" for name in state.nodes
    }
    assert [spec.cpus for spec in config.nodes] == [1, 1]
    assert len(notes) == 2
    assert f"job {job_id}" in notes[0]
    assert f"node {busy} keeps its former description" in notes[1]
    assert as_before(replace(state.config, name="other", nodes=edited), "cluster", rows, {})[1] == ()
    assert as_before(replace(state.config, nodes=edited), "", {}, held)[1] == ()


def test_a_node_that_answers_ends_its_jobs_before_it_goes() -> None:
    cluster, job_id = running("n1")
    with pytest.raises(RequestError, match=f"job {job_id} is held there"):
        cluster.ask(lambda tx: remove_node(tx, ROOT, N1, force=False))
    answer = cluster.ask(lambda tx: remove_node(tx, ROOT, N1, force=True))
    assert answer == {"ending": [str(job_id)], "became": []}
    assert cluster.job(job_id).state is JobState.COMPLETING
    cluster.gone(job_id, "n1")
    assert cluster.ask(lambda tx: remove_node(tx, ROOT, N1, force=True)) == {"ending": [], "became": []}
    assert cluster.job(job_id).state is JobState.PENDING
    node = cluster.state.nodes[N1]
    assert (node.drained_by, node.drained_why) == (OURSELVES, LEAVING)  # nothing new starts before its file goes
    cluster.tick(60.0)
    assert cluster.job(job_id).state is JobState.PENDING


def test_a_silent_node_is_given_up_with_its_jobs() -> None:
    cluster, job_id = running("n1")
    cluster.controller.node_down(N1, "lost")
    answer = cluster.ask(lambda tx: remove_node(tx, ROOT, N1, force=True))
    assert answer["ending"] == []
    assert answer["became"] == [f"job {job_id} goes back to the queue"]


def test_what_an_admin_drained_stays_drained_by_the_admin() -> None:
    cluster = Cluster("n1")
    cluster.ask(lambda tx: drain(tx, ROOT, "n1", "loud fan", ""))
    cluster.ask(lambda tx: remove_node(tx, ROOT, N1, force=False))
    assert cluster.state.nodes[N1].drained_why == "loud fan"
    assert cluster.ask(lambda tx: remove_node(tx, ROOT, NodeName("n9"), force=False)) == {"ending": [], "became": []}


@pytest.mark.parametrize("given_up", [{}, {"n1": "root"}])
def test_jobs_of_a_node_without_a_file_are_held_until_an_admins_word(given_up: dict[str, str]) -> None:
    cluster, job_id = running("n1")
    del cluster.state.nodes[N1]
    backend = cluster.backend()
    assert backend.job(ROOT, str(job_id))["jobs"][0]["state"] == "RUNNING"  # before it is settled, too
    assert f"job {job_id} is held there" in str(backend.ping(ROOT)["not_taken"])
    with pytest.raises(RequestError, match="hctl fence n1"):
        cluster.ask(lambda tx: remove_node(tx, ROOT, N1, force=False))
    said = cluster.ask(lambda tx: lose_gone_nodes(tx, given_up))
    assert ("node n1 is not in the configuration any more" in str(said)) is bool(given_up)
    if not given_up:
        assert cluster.job(job_id).state is JobState.RUNNING
        cluster.ask(lambda tx: requeue(tx, ROOT, [str(job_id)]))
        assert cluster.job(job_id).state is JobState.COMPLETING
        cluster.tick(3600.0)
        assert cluster.ask(lambda tx: fence(tx, ROOT, "n1", "")).became
    job = cluster.job(job_id)
    assert job.state is JobState.PENDING
    assert cluster.ask(lambda tx: lose_gone_nodes(tx, given_up)) == []
    assert backend.ping(ROOT)["not_taken"] == []
    with pytest.raises(NotFoundError, match="n1"):
        cluster.ask(lambda tx: fence(tx, ROOT, "n1", ""))
    assert cluster.replayed(job_id) == job
    assert "n1" in str(backend.story(ROOT, str(job_id)))


def test_word_of_a_node_that_left_is_dropped() -> None:
    cluster, _ = running("n1")
    del cluster.state.nodes[N1]
    cluster.controller.node_down(N1, "late")
    cluster.controller.node_redialled(N1, "late")
    cluster.tick()
    assert N1 not in cluster.state.nodes


def renamed(cluster: Cluster, name: str, former: str) -> None:
    """Give a node another name as a reconfiguration does."""
    state = cluster.state
    specs = {node.spec.name: node.spec for node in state.nodes.values()}
    specs[NodeName(name)] = replace(specs.pop(NodeName(former)), name=NodeName(name), formerly=(former,))
    config = replace(state.config, nodes=tuple(specs.values()))
    assert move_renamed(config, cluster.store, jobs_held(state.active_jobs())) == [
        f"node {former} is called {name} now"
    ]
    stored = cluster.store.load_nodes()
    state.nodes.clear()
    state.nodes.update({spec.name: node_of(spec, stored.get(spec.name)) for spec in config.nodes})
    state.config = config
    state.set_partitions([partition(*specs)])


def test_the_state_of_a_renamed_node_follows_its_name() -> None:
    cluster = Cluster("n1", "n2")
    cluster.ask(lambda tx: drain(tx, ROOT, "n1", "loud fan", ""))
    cluster.ask(lambda tx: tx.note_links([LinkRun(one="n2", other="n1", at_s=1.0)]))
    renamed(cluster, "m1", "n1")
    node = cluster.state.nodes[NodeName("m1")]
    assert (node.drained_why, node.boot_id, node.link) == ("loud fan", "boot-1", Link.UNKNOWN)
    assert cluster.replayed_node("m1").drained_why == "loud fan"
    assert set(cluster.store.load_nodes()) == {"m1", "n2"}
    assert [run.pair for run in cluster.store.load_links()] == [("n2", "m1")]
    assert move_renamed(cluster.state.config, cluster.store, {}) == []


def test_jobs_do_not_forget_which_renamed_nodes_refused_them_or_were_given_back() -> None:
    """A node that is asked again under its new name would take an earlier launch for this one."""
    cluster = Cluster("n1", "n2")
    refused = cluster.submit()
    first = cluster.job(refused).shares[0].node
    cluster.says(first, cluster.report(refused, protocol.REFUSED, why="no such directory"))
    assert [refusal.node for refusal in cluster.job(refused).refusals] == [first]
    renamed(cluster, "m1", str(first))
    assert cluster.ask(lambda tx: follow_renames(tx, 0)) == []
    assert [refusal.node for refusal in cluster.job(refused).refusals] == ["m1"]
    assert cluster.replayed(refused).refusals == cluster.job(refused).refusals
    assert "is called m1 now" in str(cluster.backend().story(ROOT, str(refused)))


def test_the_jobs_of_a_crontab_name_a_renamed_node_by_its_new_name() -> None:
    cluster = Cluster("n1", "n2")
    specs = [spec_to_json(spec(nodelist=("n1",))), spec_to_json(spec())]
    cluster.ask(lambda tx: crontabs.install(tx, ANN, "#SCRON -w n1\n@daily true\n@daily true\n", specs))
    cluster.ask(lambda tx: drain(tx, ROOT, "n1,n2", "wait", ""))
    renamed(cluster, "m1", "n1")
    (note,) = cluster.ask(lambda tx: follow_renames(tx, 0))
    assert note.startswith("the crontab of ann names n1; ")
    first, second = cluster.state.crontabs[ANN.uid].entries
    assert json.loads(first.spec)["nodelist"] == ["m1"]
    assert second.spec == json.dumps(specs[1])
    assert cluster.store.load_crontabs() == [cluster.state.crontabs[ANN.uid]]
    assert cluster.ask(lambda tx: follow_renames(tx, 0)) == []


def test_reservations_triggers_and_waiting_jobs_name_a_renamed_node_by_its_new_name() -> None:
    cluster = Cluster("n1", "n2")
    cluster.ask(lambda tx: drain(tx, ROOT, "n1,n2", "wait", ""))
    wants = cluster.submit(nodelist=("n1",), time_limit_s=60)
    avoids, other = cluster.submit(exclude=("n1",), time_limit_s=60), cluster.submit()
    changes = {"Nodes": "n1", "Users": "ann", "StartTime": "now+1hour", "Duration": "60"}
    cluster.ask(lambda tx: create(tx, ROOT, "r1", changes))
    renamed(cluster, "m1", "n1")
    assert cluster.ask(lambda tx: follow_renames(tx, 0)) == []
    assert cluster.job(wants).spec.nodelist == ("m1",)
    assert cluster.job(avoids).spec.exclude == ("m1",)
    assert cluster.job(other).spec_id == other
    assert cluster.state.reservations["r1"].nodes == ("m1",)
    assert cluster.store.load_reservations()[0].nodes == ("m1",)
    assert cluster.replayed(wants).state is cluster.job(wants).state
    cluster.welcome("m1")
    cluster.ask(lambda tx: resume_nodes(tx, ROOT, "m1", ""))
    assert cluster.job(wants).held_nodes == ("m1",)
    assert cluster.job(avoids).state is JobState.PENDING


def test_a_row_of_another_machine_does_not_follow() -> None:
    cluster = Cluster("n1", "n2")
    cluster.ask(lambda tx: drain(tx, ROOT, "n1", "loud fan", ""))
    (_, second) = (node.spec for node in cluster.state.nodes.values())
    config = replace(cluster.state.config, nodes=(replace(second, host="elsewhere", formerly=("n1",)),))
    assert move_renamed(config, cluster.store, {}) == []


def test_a_name_that_a_node_has_or_two_had_is_no_earlier_name() -> None:
    first, second = (node.spec for node in Cluster("n1", "n2").state.nodes.values())
    assert renamed_nodes([replace(first, formerly=("a", "n2")), second]) == {"a": "n1"}
    assert renamed_nodes([replace(first, formerly=("a",)), replace(second, formerly=("a", "b"))]) == {"b": "n2"}
