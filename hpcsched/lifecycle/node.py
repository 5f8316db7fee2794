"""The events of a node, and its transition table: (link, drained, event) -> node.

A triple without a row raises.

    UNKNOWN, UP, DOWN  -NodeUp->    UP        whether a node is drained is independent of its link:
    UNKNOWN, UP, DOWN  -NodeDown->  DOWN      available -NodeDrained-> drained -NodeResumed, NodeFaultCleared-> available
    UP -NodeDisconnected-> UNKNOWN

Whether it is switched on (`hpcsched.model.node.Power`) is independent of both, but for what `POWER_TABLE` says:

    ON -PowerDownOrdered-> POWERING_DOWN -PoweredDown-> POWERED_DOWN -PowerUpOrdered-> POWERING_UP -NodeUp-> ON
     ^----PowerDownFailed-----+                              |                             |
     ^------NodeUp: somebody has switched it on--------------+      PowerUpFailed: DOWN ---+

Knows nothing of jobs: the controller decides what a lost node means for them (`hpcsched.lifecycle.job`).

Rules: events are recorded in the same commit as the row of the node; replaying a node's events gives its row.
Only a node that does not answer can be fenced, because what an answering node runs is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from hpcsched.errors import InvariantError
from hpcsched.lifecycle.events import ClusterEvent, EventSubject
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Ability, LaunchFailure, Link, Node, Power
from hpcsched.model.probation import Probation

LAUNCH_FAILURES = 3  # different jobs that a node could not start, one after the other, before it is drained
FENCED_BOOT = "fenced"  # the boot id of a fenced node that never answered: any other is a reboot


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    node: NodeName
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp(NodeEvent):
    """The agent answered, on this boot of this machine.

    See `hpcsched.model.node.Node` for the fields.
    """

    boot_id: str
    machine_id: str
    spool: str
    hardware: str
    agent_version: str
    root_agent: bool
    abilities: tuple[Ability, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDisconnected(NodeEvent):
    """The controller closed the connection to a node that was up, and connects again."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDown(NodeEvent):
    """The node has not answered for longer than the configuration allows.

    On a DOWN node: its cause has changed.
    """

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained(NodeEvent):
    """No new job starts on the node; on a drained node, the reason is another now."""

    why: str
    by: str  # user name, or the part of hpcsched that drained it


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResumed(NodeEvent):
    """An administrator or a health check lets the node start jobs again.

    Its launch failures are forgotten.
    """

    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFoundWell(NodeEvent):
    """A health check found well the node that it had drained; it returns after a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFoundIll(NodeEvent):
    """A health check found ill again a node that was well, before it had returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFaultCleared(NodeEvent):
    """The node reports that it can take launches again; its launch failures still count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFenced(NodeEvent):
    """An administrator guarantees that the node runs nothing of ours any more."""

    by: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrphansFound(NodeEvent):
    """The node runs launches of an earlier incarnation of the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrphansGone(NodeEvent):
    """The node runs no launches of an earlier incarnation any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunchFailed(NodeEvent):
    """A job that the node could not start was started by another node."""

    failure: LaunchFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunchSucceeded(NodeEvent):
    """The node prepared a job; with `executed` it also executed the job's script."""

    executed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerDownOrdered(NodeEvent):
    """The node, which holds no jobs, is to be switched off."""

    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoweredDown(NodeEvent):
    """The node does not answer any more, and has had the time to switch itself off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerUpOrdered(NodeEvent):
    """The node is to be switched on."""

    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerDownFailed(NodeEvent):
    """The node still answers: it did not switch itself off."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerUpFailed(NodeEvent):
    """The node did not come back: it is DOWN."""

    why: str


NODE_EVENTS: dict[str, type[NodeEvent]] = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, NodeEvent) and value is not NodeEvent
}


def node_event_to_data(event: NodeEvent) -> dict[str, Any]:
    """Return the event's own fields as JSON values.

    Its kind, node and time have their own columns.
    """
    own = (field.name for field in fields(event) if field.name not in ("node", "at_s"))
    data = {name: getattr(event, name) for name in own}
    if isinstance(event, NodeLaunchFailed):
        data["failure"] = list(event.failure)
    if isinstance(event, NodeUp):
        data["abilities"] = [list(ability) for ability in event.abilities]
    return data


_TOLD = (
    NodeUp, NodeDisconnected, NodeDown, NodeDrained, NodeResumed, NodeFaultCleared, NodeFenced, PowerDownOrdered, PoweredDown,
    PowerUpOrdered, PowerDownFailed, PowerUpFailed,
)  # fmt: skip


def cluster_event_of(event: NodeEvent) -> ClusterEvent | None:
    """Return the event for those who follow events; None: it is not for them."""
    if not isinstance(event, _TOLD):
        return None
    text = f"agent {event.agent_version}" if isinstance(event, NodeUp) else getattr(event, "why", "")
    return ClusterEvent(
        about=EventSubject.NODE,
        kind=type(event).__name__,
        name=event.node,
        at_s=event.at_s,
        text=text,
        by=getattr(event, "by", ""),
    )


def node_event_from_data(kind: str, node: str, at_s: float, data: dict[str, Any]) -> NodeEvent:
    """Return the event that was stored. Raises InvariantError if there is no such kind."""
    event_type = NODE_EVENTS.get(kind)
    if event_type is None:
        raise InvariantError(f"cannot read event {kind!r} of node {node}: no such kind")
    values = dict(data)
    if "failure" in values:
        values["failure"] = LaunchFailure(*values["failure"])
    if "abilities" in values:
        values["abilities"] = tuple(Ability(*ability) for ability in values["abilities"])
    return event_type(node=NodeName(node), at_s=at_s, **values)


def apply_to_node(node: Node, event: NodeEvent) -> Node:
    """Return the node after `event`.

    Raises InvariantError if the event cannot happen in its state.
    """
    transition = NODE_TABLE.get((node.link, node.drained, type(event)))
    if transition is None:
        drained = ", drained" if node.drained else ""
        raise InvariantError(f"cannot apply {type(event).__name__} to node {node.name}: it is {node.link}{drained}")
    if POWER_TABLE.get(type(event), node.power) is not node.power:
        raise InvariantError(f"cannot apply {type(event).__name__} to node {node.name}: its power is {node.power}")
    changed = transition(node, event)
    probation = probation_after(node.probation, event)
    return changed if probation is node.probation else replace(changed, probation=probation)


def probation_after(probation: Probation, event: NodeEvent) -> Probation:
    """Return what is known of the node's drains by checks after `event`."""
    match event:
        case NodeDrained(by="hhealth" | "hpcschedd/link"):
            return probation.drained(event.at_s)
        case NodeUp():
            return probation.linked(event.at_s)
        case NodeDown():
            return probation.ill().dropped(event.at_s)
        case NodeDisconnected() | PowerDownOrdered():
            return probation.unlinked()
        case NodeFoundWell():
            return probation.well(event.at_s)
        case NodeFoundIll() | NodeResumed(by="hhealth"):
            return probation.ill()
        case NodeResumed(by="hpcschedd/link"):
            return probation.steady()
        case NodeResumed():
            return probation.forgotten()
        case _:
            return probation


def _same(node: Node, event: NodeEvent) -> Node:
    return node


def _up(node: Node, event: NodeUp) -> Node:
    stays = node.power is Power.ON or (node.power is Power.POWERING_DOWN and node.boot_id == event.boot_id)
    return replace(
        node if stays else _switched(node, event, Power.ON),
        link=Link.UP,
        link_since_s=event.at_s,
        link_why="",
        boot_id=event.boot_id,
        machine_id=event.machine_id,
        spool=event.spool,
        hardware=event.hardware,
        agent_version=event.agent_version,
        root_agent=event.root_agent,
        abilities=event.abilities,
    )


def _disconnected(node: Node, event: NodeDisconnected) -> Node:
    return replace(node, link=Link.UNKNOWN, link_since_s=event.at_s, link_why=event.why)


def _down(node: Node, event: NodeDown) -> Node:
    return replace(node, link=Link.DOWN, link_since_s=event.at_s, link_why=event.why)


def _still_down(node: Node, event: NodeDown) -> Node:
    return replace(node, link_why=event.why)


def _switched(node: Node, event: NodeEvent, power: Power, by: str = "", why: str = "") -> Node:
    return replace(node, power=power, power_since_s=event.at_s, power_by=by, power_why=why)


def _power_down_ordered(node: Node, event: PowerDownOrdered) -> Node:
    return _switched(node, event, Power.POWERING_DOWN, event.by)


def _powered_down(node: Node, event: PoweredDown) -> Node:
    return _switched(node, event, Power.POWERED_DOWN, node.power_by)


def _power_up_ordered(node: Node, event: PowerUpOrdered) -> Node:
    return _switched(node, event, Power.POWERING_UP, event.by)


def _power_down_failed(node: Node, event: PowerDownFailed) -> Node:
    return _switched(node, event, Power.ON, why=event.why)


def _power_up_failed(node: Node, event: PowerUpFailed) -> Node:
    failed = _switched(node, event, Power.ON, why=event.why)
    return replace(failed, link=Link.DOWN, link_since_s=event.at_s, link_why=event.why)


# The only state of power in which each of these events can happen.
POWER_TABLE: dict[type[NodeEvent], Power] = {
    PowerDownOrdered: Power.ON,
    PoweredDown: Power.POWERING_DOWN,
    PowerDownFailed: Power.POWERING_DOWN,
    PowerUpOrdered: Power.POWERED_DOWN,
    PowerUpFailed: Power.POWERING_UP,
}


def _drained(node: Node, event: NodeDrained) -> Node:
    return replace(node, drained=True, drained_why=event.why, drained_by=event.by, drained_at_s=event.at_s)


def _resumed(node: Node, event: NodeResumed) -> Node:
    return replace(_available(node, event), launch_failures=())


def _available(node: Node, event: NodeFaultCleared | NodeResumed) -> Node:
    return replace(node, drained=False, drained_why="", drained_by="", drained_at_s=None)


def _fenced(node: Node, event: NodeFenced) -> Node:
    return replace(node, boot_id=node.boot_id or FENCED_BOOT, has_orphans=False)


def _orphans_found(node: Node, event: NodeOrphansFound) -> Node:
    return replace(node, has_orphans=True)


def _orphans_gone(node: Node, event: NodeOrphansGone) -> Node:
    return replace(node, has_orphans=False)


def _launch_failed(node: Node, event: NodeLaunchFailed) -> Node:
    return replace(node, launch_failures=(*node.launch_failures, event.failure)[-LAUNCH_FAILURES:])


def _launch_succeeded(node: Node, event: NodeLaunchSucceeded) -> Node:
    failures = () if event.executed else tuple(failure for failure in node.launch_failures if failure.of_exec)
    return replace(node, launch_failures=failures)


NodeTransition = Callable[[Node, Any], Node]


def _table() -> dict[tuple[Link, bool, type[NodeEvent]], NodeTransition]:
    every = tuple(Link)
    both = (False, True)
    rows: list[tuple[tuple[Link, ...], tuple[bool, ...], type[NodeEvent], NodeTransition]] = [
        (every, both, NodeUp, _up),
        ((Link.UP,), both, NodeDisconnected, _disconnected),
        ((Link.UNKNOWN, Link.UP), both, NodeDown, _down),
        ((Link.DOWN,), both, NodeDown, _still_down),
        (every, both, NodeDrained, _drained),
        (every, both, NodeResumed, _resumed),
        (every, (True,), NodeFoundWell, _same),
        (every, (True,), NodeFoundIll, _same),
        (every, (True,), NodeFaultCleared, _available),
        ((Link.UNKNOWN, Link.DOWN), both, NodeFenced, _fenced),
        (every, both, NodeOrphansFound, _orphans_found),
        (every, both, NodeOrphansGone, _orphans_gone),
        (every, both, NodeLaunchFailed, _launch_failed),
        (every, both, NodeLaunchSucceeded, _launch_succeeded),
        ((Link.UP,), both, PowerDownOrdered, _power_down_ordered),
        ((Link.UNKNOWN, Link.DOWN), both, PoweredDown, _powered_down),
        (every, both, PowerDownFailed, _power_down_failed),
        ((Link.UNKNOWN, Link.DOWN), both, PowerUpOrdered, _power_up_ordered),
        ((Link.UNKNOWN, Link.DOWN), both, PowerUpFailed, _power_up_failed),
    ]
    return {
        (link, drained, event): transition
        for links, admin_states, event, transition in rows
        for link in links
        for drained in admin_states
    }


NODE_TABLE = _table()
