"""What may become of a node: every cell of the transition table, and the values that each event sets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpcsched.errors import InvariantError
from hpcsched.lifecycle.node import (
    FENCED_BOOT,
    LAUNCH_FAILURES,
    NODE_EVENTS,
    NODE_TABLE,
    POWER_TABLE,
    NodeDisconnected,
    NodeDown,
    NodeDrained,
    NodeEvent,
    NodeFaultCleared,
    NodeFenced,
    NodeFoundIll,
    NodeFoundWell,
    NodeLaunchFailed,
    NodeLaunchSucceeded,
    NodeOrphansFound,
    NodeOrphansGone,
    NodeResumed,
    NodeUp,
    PowerDownFailed,
    PowerDownOrdered,
    PoweredDown,
    PowerUpFailed,
    PowerUpOrdered,
    apply_to_node,
    node_event_from_data,
    node_event_to_data,
)
from hpcsched.model.ids import NodeName
from hpcsched.model.node import LaunchFailure, Link, Node, NodeSpec, Power
from hpcsched.model.probation import CHECK

N1 = NodeName("n1")
T = 1000.0
FAILURE = LaunchFailure(job_id=7, uid=1001, by_admin=False, of_exec=True, why="no such directory")
UP = NodeUp(
    node=N1,
    at_s=T,
    boot_id="b2",
    machine_id="m",
    spool="s",
    hardware="h",
    agent_version="0.1",
    root_agent=True,
)
EVENTS: tuple[NodeEvent, ...] = (
    UP,
    NodeDisconnected(node=N1, at_s=T, why="no answer for 3 s"),
    NodeDown(node=N1, at_s=T, why="no route to host"),
    NodeDrained(node=N1, at_s=T, why="disk", by="ann"),
    NodeResumed(node=N1, at_s=T, by="ann"),
    NodeFoundWell(node=N1, at_s=T),
    NodeFoundIll(node=N1, at_s=T),
    NodeFaultCleared(node=N1, at_s=T),
    NodeFenced(node=N1, at_s=T, by="ann", why="switched off"),
    NodeOrphansFound(node=N1, at_s=T),
    NodeOrphansGone(node=N1, at_s=T),
    NodeLaunchFailed(node=N1, at_s=T, failure=FAILURE),
    NodeLaunchSucceeded(node=N1, at_s=T, executed=True),
    PowerDownOrdered(node=N1, at_s=T, by="ann"),
    PoweredDown(node=N1, at_s=T),
    PowerUpOrdered(node=N1, at_s=T, by="ann"),
    PowerDownFailed(node=N1, at_s=T, why="it still answers"),
    PowerUpFailed(node=N1, at_s=T, why="it did not come back"),
)
# Rows: events. Columns: unknown, up, down; each available, then drained. "." is the same state, "x" raises.
CELLS = """
NodeUp               up   up*  .    .    up   up*
NodeDisconnected     x    x    unk  unk* x    x
NodeDown             down down* down down* .   .
NodeDrained          unk* .    up*  .    down* .
NodeResumed          .    unk  .    up   .    down
NodeFoundWell        x    .    x    .    x    .
NodeFoundIll         x    .    x    .    x    .
NodeFaultCleared     x    unk  x    up   x    down
NodeFenced           .    .    x    x    .    .
NodeOrphansFound     .    .    .    .    .    .
NodeOrphansGone      .    .    .    .    .    .
NodeLaunchFailed     .    .    .    .    .    .
NodeLaunchSucceeded  .    .    .    .    .    .
PowerDownOrdered     x    x    .    .    x    x
PoweredDown          .    .    x    x    .    .
PowerUpOrdered       .    .    x    x    .    .
PowerDownFailed      .    .    .    .    .    .
PowerUpFailed        down down* x   x    .    .
"""
STATES = tuple((link, drained) for link in Link for drained in (False, True))


def node(link: Link = Link.UP, drained: bool = False) -> Node:
    made = Node(
        spec=NodeSpec(name=N1, host="h", host_key="ssh-ed25519 AAAA", cpus=4, mem_mib=1000),
        link=link,
        link_since_s=1.0,
        boot_id="b1",
    )
    return replace(made, drained=True, drained_why="old", drained_by="bob", drained_at_s=2.0) if drained else made


def cells() -> list[tuple[NodeEvent, Link, bool, str]]:
    rows = dict(zip((type(event).__name__ for event in EVENTS), EVENTS, strict=True))
    found = []
    for line in CELLS.strip().splitlines():
        name, *outcomes = line.split()
        found += [(rows[name], *state, outcome) for state, outcome in zip(STATES, outcomes, strict=True)]
    return found


@pytest.mark.parametrize(("event", "link", "drained", "outcome"), cells())
def test_each_cell_of_the_table(event: NodeEvent, link: Link, drained: bool, outcome: str) -> None:
    before = replace(node(link, drained), power=POWER_TABLE.get(type(event), Power.ON))
    if outcome == "x":
        with pytest.raises(InvariantError, match=f"cannot apply {type(event).__name__} to node n1: it is {link}"):
            apply_to_node(before, event)
        return
    after = apply_to_node(before, event)
    links = {"unk": Link.UNKNOWN, "up": Link.UP, "down": Link.DOWN}
    expected = (link, drained) if outcome == "." else (links[outcome.rstrip("*")], outcome.endswith("*"))
    assert (after.link, after.drained) == expected


def test_the_cells_name_every_event_and_no_other() -> None:
    assert [type(event) for event in EVENTS] == list(NODE_EVENTS.values())
    assert len(cells()) == len(NODE_EVENTS) * len(STATES)
    assert len(NODE_TABLE) == sum(outcome != "x" for *_, outcome in cells())


def test_an_answer_sets_what_is_known_of_the_machine_and_since_when() -> None:
    after = apply_to_node(replace(node(Link.DOWN), link_why="no route"), UP)
    assert (after.link_since_s, after.link_why) == (T, "")
    assert (after.boot_id, after.machine_id, after.spool, after.hardware) == ("b2", "m", "s", "h")
    assert (after.agent_version, after.root_agent) == ("0.1", True)


def test_a_node_that_stays_down_keeps_the_time_and_takes_the_new_cause() -> None:
    after = apply_to_node(node(Link.DOWN), NodeDown(node=N1, at_s=T, why="host key changed"))
    assert (after.link_since_s, after.link_why) == (1.0, "host key changed")


def test_draining_a_drained_node_replaces_reason_author_and_time() -> None:
    after = apply_to_node(node(drained=True), NodeDrained(node=N1, at_s=T, why="disk", by="ann"))
    assert (after.drained_why, after.drained_by, after.drained_at_s) == ("disk", "ann", T)


def test_resume_forgets_launch_failures_and_a_cleared_fault_does_not() -> None:
    before = replace(node(drained=True), launch_failures=(FAILURE,))
    resumed = apply_to_node(before, NodeResumed(node=N1, at_s=T, by="ann"))
    cleared = apply_to_node(before, NodeFaultCleared(node=N1, at_s=T))
    assert (resumed.drained_why, resumed.drained_by, resumed.drained_at_s) == ("", "", None)
    assert (resumed.launch_failures, cleared.launch_failures) == ((), (FAILURE,))


@pytest.mark.parametrize(("boot_id", "expected"), [("b1", "b1"), ("", FENCED_BOOT)])
def test_a_fenced_node_has_no_orphans_and_a_boot_id(boot_id: str, expected: str) -> None:
    before = replace(node(Link.DOWN), boot_id=boot_id, has_orphans=True)
    after = apply_to_node(before, NodeFenced(node=N1, at_s=T, by="ann", why=""))
    assert (after.boot_id, after.has_orphans) == (expected, False)


def test_orphans_are_noted_until_they_are_gone() -> None:
    found = apply_to_node(node(), NodeOrphansFound(node=N1, at_s=T))
    assert found.has_orphans
    assert not apply_to_node(found, NodeOrphansGone(node=N1, at_s=T)).has_orphans


def test_only_the_latest_launch_failures_are_kept() -> None:
    after = node()
    for number in range(LAUNCH_FAILURES + 1):
        after = apply_to_node(after, NodeLaunchFailed(node=N1, at_s=T, failure=FAILURE._replace(job_id=number)))
    assert [failure.job_id for failure in after.launch_failures] == list(range(1, LAUNCH_FAILURES + 1))


@pytest.mark.parametrize(("executed", "left"), [(True, []), (False, [True])])
def test_a_prepared_launch_leaves_failures_of_exec_and_an_executed_one_none(executed: bool, left: list[bool]) -> None:
    before = replace(node(), launch_failures=(FAILURE, FAILURE._replace(of_exec=False)))
    after = apply_to_node(before, NodeLaunchSucceeded(node=N1, at_s=T, executed=executed))
    assert [failure.of_exec for failure in after.launch_failures] == left


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_survives_its_json_form(event: NodeEvent) -> None:
    data = json.loads(json.dumps(node_event_to_data(event)))
    assert node_event_from_data(type(event).__name__, "n1", T, data) == event


def test_an_unknown_kind_of_event_raises() -> None:
    with pytest.raises(InvariantError, match="cannot read event 'NodeLent' of node n1: no such kind"):
        node_event_from_data("NodeLent", "n1", T, {})


def by_check(*events: tuple[str, float]) -> Node:
    """Return a node after drains, resumes and looks of the health check, each a word and its time."""
    made = node()
    for word, at_s in events:
        event = {
            "drained": NodeDrained(node=N1, at_s=at_s, why="disk", by=CHECK),
            "well": NodeFoundWell(node=N1, at_s=at_s),
            "ill": NodeFoundIll(node=N1, at_s=at_s),
            "resumed": NodeResumed(node=N1, at_s=at_s, by=CHECK),
            "by ann": NodeResumed(node=N1, at_s=at_s, by="ann"),
            "down": NodeDown(node=N1, at_s=at_s, why="no route"),
        }[word]
        made = apply_to_node(made, event)
    return made


@pytest.mark.parametrize(
    ("events", "returns_at_s"),
    [
        ([("drained", 0)], None),
        ([("drained", 0), ("well", 10)], 110),
        ([("drained", 0), ("well", 10), ("well", 50)], 110),
        ([("drained", 0), ("well", 10), ("ill", 20)], None),
        ([("drained", 0), ("well", 10), ("ill", 20), ("well", 30)], 130),
        ([("drained", 0), ("well", 10), ("down", 20), ("well", 30)], 130),
        ([("drained", 0), ("well", 0), ("resumed", 100), ("drained", 200), ("well", 300)], 500),
        ([("drained", 0), ("resumed", 1), ("drained", 2), ("resumed", 3), ("drained", 4), ("well", 5)], 405),
        ([("drained", 0), ("by ann", 1), ("drained", 2), ("well", 3)], 103),
        ([("drained", 0), ("resumed", 1), ("drained", 90_000), ("well", 90_010)], 90_110),
    ],
)
def test_a_node_that_a_check_has_drained_returns_when_it_was_well_for_long_enough(
    events: list[tuple[str, float]], returns_at_s: float | None
) -> None:
    assert by_check(*events).probation.returns_at_s(100) == returns_at_s


def test_the_time_doubles_up_to_a_bound_and_0_is_at_once() -> None:
    flapping = by_check(*[(word, at_s) for at_s in range(20) for word in ("drained", "resumed")], ("drained", 20))
    assert flapping.probation.hold_s(100) == 1600
    assert by_check(("drained", 0), ("well", 5)).probation.returns_at_s(0) == 5


# ----- power


POWER_EVENTS = EVENTS[-5:]


@pytest.mark.parametrize("power", Power)
@pytest.mark.parametrize("event", POWER_EVENTS, ids=lambda event: type(event).__name__)
def test_each_event_of_power_has_one_state_in_which_it_can_happen(event: NodeEvent, power: Power) -> None:
    expected = {
        PowerDownOrdered: (Power.ON, Power.POWERING_DOWN),
        PoweredDown: (Power.POWERING_DOWN, Power.POWERED_DOWN),
        PowerDownFailed: (Power.POWERING_DOWN, Power.ON),
        PowerUpOrdered: (Power.POWERED_DOWN, Power.POWERING_UP),
        PowerUpFailed: (Power.POWERING_UP, Power.ON),
    }[type(event)]
    link = Link.UP if isinstance(event, PowerDownOrdered) else Link.DOWN
    before = replace(node(link), power=power)
    if power is not expected[0]:
        with pytest.raises(InvariantError, match=f"its power is {power}"):
            apply_to_node(before, event)
        return
    after = apply_to_node(before, event)
    assert (after.power, after.power_since_s) == (expected[1], T)


@pytest.mark.parametrize(
    ("power", "boot_id", "after"),
    [
        (Power.ON, "b2", Power.ON),
        (Power.POWERING_DOWN, "b1", Power.POWERING_DOWN),  # its connection was lost before it was off
        (Power.POWERING_DOWN, "b2", Power.ON),
        (Power.POWERED_DOWN, "b2", Power.ON),  # somebody has switched it on
        (Power.POWERING_UP, "b2", Power.ON),
    ],
)
def test_an_answer_ends_being_off(power: Power, boot_id: str, after: Power) -> None:
    assert apply_to_node(replace(node(Link.DOWN), power=power), replace(UP, boot_id=boot_id)).power is after


def test_a_node_that_does_not_come_back_is_down_with_the_reason() -> None:
    after = apply_to_node(replace(node(Link.UNKNOWN), power=Power.POWERING_UP), EVENTS[-1])
    assert (after.link, after.link_why, after.power_why) == (Link.DOWN, "it did not come back", "it did not come back")
