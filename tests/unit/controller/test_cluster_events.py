"""What those who follow events get besides jobs: nodes, reservations, the configuration; and who sees what of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster import ANN, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.auth.authorize import HIDEABLE
from hpcsched.controller.requests import reservations
from hpcsched.controller.views.routes import read_event_filters
from hpcsched.errors import RequestError
from hpcsched.lifecycle.events import MAX_TEXT, ClusterEvent, EventSubject
from hpcsched.lifecycle.node import NodeDown, NodeDrained, NodeLaunchSucceeded, NodeResumed
from hpcsched.model.ids import NodeName

N1 = NodeName("n1")
FAN = {"nodes": "n1", "starttime": "now", "duration": "60", "users": "root", "flags": "MAINT"}


def told(cluster: Cluster, after: int, *, identity: Any = ROOT, **filters: str) -> list[tuple[str, str, str]]:
    about, nodes = read_event_filters(filters)
    found = cluster.backend().events(identity, after, about, nodes)["events"]
    return [(event["about"], event["kind"], event.get("name", "")) for event in found]


def test_what_happens_to_nodes_is_told_in_order_with_jobs() -> None:
    cluster = Cluster("n1")
    last = cluster.store.last_event()
    cluster.ask(lambda tx: tx.record_node(NodeDrained(node=N1, at_s=tx.now_s, why="fan", by="root")))
    cluster.submit()
    for event in (
        NodeResumed(node=N1, at_s=1.0, by="root"),
        NodeLaunchSucceeded(node=N1, at_s=1.0, executed=True),  # of no interest to others
        NodeDown(node=N1, at_s=1.0, why="x" * 10_000),
    ):
        cluster.ask(lambda tx, event=event: tx.record_node(event))
    found = [one for one in told(cluster, last) if one[0] != "job"]
    assert found == [("node", "NodeDrained", "n1"), ("node", "NodeResumed", "n1"), ("node", "NodeDown", "n1")]
    assert told(cluster, last)[0][0] == "node"
    assert told(cluster, last)[1][0] == "job"
    events = cluster.backend().events(ROOT, last)["events"]
    assert (events[0]["text"], events[0]["by"], len(events[-1]["text"])) == ("fan", "root", MAX_TEXT)
    numbers = [event["seq"] for event in events]
    assert numbers == sorted(set(numbers))


def test_reservations_are_told_when_they_are_made_changed_and_deleted() -> None:
    cluster = Cluster("n1")
    last = cluster.store.last_event()
    cluster.ask(lambda tx: reservations.create(tx, ROOT, "fan", FAN))
    cluster.ask(lambda tx: reservations.update(tx, ROOT, "fan", {"duration": "120"}))
    cluster.ask(lambda tx: reservations.delete(tx, ROOT, "fan"))
    assert told(cluster, last) == [
        ("reservation", "ReservationCreated", "fan"),
        ("reservation", "ReservationChanged", "fan"),
        ("reservation", "ReservationDeleted", "fan"),
    ]


def test_a_request_that_fails_leaves_no_event() -> None:
    cluster = Cluster("n1")
    last = cluster.store.last_event()

    def fails(tx: Any) -> None:
        reservations.create(tx, ROOT, "fan", FAN)
        raise RequestError("no")

    with pytest.raises(RequestError):
        cluster.ask(fails)
    assert told(cluster, last) == []


def test_events_are_chosen_by_subject_and_node_and_the_place_moves_on() -> None:
    cluster = Cluster("n1", "n2")
    for name in ("n1", "n2"):
        cluster.ask(lambda tx, name=name: tx.record_node(NodeDown(node=NodeName(name), at_s=tx.now_s, why="")))
    cluster.submit()
    assert [name for _, kind, name in told(cluster, 0, node="n[2-3]") if kind == "NodeDown"] == ["n2"]
    assert {about for about, _, _ in told(cluster, 0, about="node")} == {"node"}
    assert {about for about, _, _ in told(cluster, 0, about="job")} == {"job"}
    about, nodes = read_event_filters({"about": "alert"})
    assert cluster.backend().events(ROOT, 0, about, nodes) == {"events": [], "next": cluster.store.last_event()}


@pytest.mark.parametrize("query", [{"about": "weather"}, {"node": "n[1-"}, {"node": "n[1-999999999]"}])
def test_filters_that_cannot_be_read_are_refused(query: dict[str, str]) -> None:
    with pytest.raises(RequestError):
        read_event_filters(query)


def test_a_user_sees_no_event_of_hidden_nodes_reservations_and_alerts_of_others() -> None:
    cluster = Cluster("n1")
    last = cluster.store.last_event()
    cluster.ask(lambda tx: tx.record_node(NodeDown(node=N1, at_s=tx.now_s, why="")))
    cluster.ask(lambda tx: reservations.create(tx, ROOT, "fan", FAN))

    def alerts(tx: Any) -> None:
        for uid, labels in ((None, {"node": "n1"}), (1001, {"job": "7"}), (1000, {"job": "8"})):
            tx.note_event(
                ClusterEvent(
                    about=EventSubject.ALERT,
                    kind="AlertFired",
                    name="JobWastes" if uid else "NodeDown",
                    at_s=tx.now_s,
                    more={"labels": labels, "severity": "info", "uid": uid, "user": "", "account": ""},
                )
            )

    cluster.ask(alerts)
    assert len(told(cluster, last)) == 5
    assert told(cluster, last, identity=replace(ANN, hidden=frozenset(HIDEABLE.values()))) == [
        ("alert", "AlertFired", "JobWastes")
    ]


def test_agents_that_can_are_told_the_format_of_their_logs() -> None:
    cluster = Cluster("n1", "n2", up=False)
    cluster.welcome("n1", facts={"log_formats": True})
    cluster.welcome("n2")
    assert cluster.sent(protocol.LogAs) == [("n1", protocol.LogAs("text"))]
    cluster.state.config = replace(cluster.state.config, log_format="ecs")
    cluster.controller.reconfigured()
    assert cluster.sent(protocol.LogAs) == [("n1", protocol.LogAs("ecs"))]
