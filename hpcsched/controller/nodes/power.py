"""Record when nodes are switched off to save power, and when they are switched on again.

`hpcsched.sched.power` decides, `hpcsched.controller.power_switch` switches. In each tick, `PowerKeeper` makes the values for
the decision, and records it as events. Persons switch nodes by `power_down` and `power_up`.

Rules:
- Only a node that holds no job is switched off. A job that is placed on a node which is off holds it from then on.
- Nothing of a job has begun on a node that is off: nothing is launched there before its `NodeUp` is committed. So its jobs start
  elsewhere if it does not come back, and a job that is ended meanwhile gives it back at once.
- When nodes were busy last is kept in memory. A restart of the controller begins the idle time of all nodes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpcsched.auth.authorize import Action, Identity, authorize
from hpcsched.config.keys import LOCAL_HOST
from hpcsched.config.load import Config
from hpcsched.controller.nodes.loss import give_back
from hpcsched.controller.requests.jobs import find_nodes
from hpcsched.errors import RequestError
from hpcsched.lifecycle.events import NodeCleared, Started
from hpcsched.lifecycle.node import (
    PowerDownFailed,
    PowerDownOrdered,
    PoweredDown,
    PowerUpFailed,
    PowerUpOrdered,
)
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import POWER_SAVING, Link, Node, NodeSpec, Power
from hpcsched.model.units import format_time_s
from hpcsched.sched.power import PowerNode, PowerPlan, PowerRules, power_plan
from hpcsched.sched.snapshot import Promise
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction


def suspend_after_s(config: Config, spec: NodeSpec) -> float:
    """Return how long the node may be idle before it is switched off; 0: it stays on."""
    if why_not_switchable(config, spec):
        return 0.0
    return config.power.suspend_after if spec.suspend_after is None else spec.suspend_after


def why_not_switchable(config: Config, spec: NodeSpec) -> str:
    """Return why the node cannot be switched off and on again, "" if it can."""
    if spec.host == LOCAL_HOST:
        return "it is this machine, on which the controller runs"
    if not spec.mac and not config.power.resume_program:
        return (
            f"nothing could switch it on again: the address of its network card is not known (hpcsched node probe {spec.name}), "
            "and [power] has no resume_program"
        )
    return ""


class PowerKeeper:
    """When nodes were busy last, and when the next decision is due."""

    def __init__(self) -> None:
        self.next_s: float | None = None
        self._born_s: float | None = None  # of the first tick
        self._busy_s: dict[NodeName, float] = {}
        self._were_busy: set[NodeName] = set()
        self._config: Config | None = None
        self._is_used = False

    def is_used(self, tx: Transaction) -> bool:
        """Return whether nodes are switched off to save power, or one is off."""
        cluster = tx.cluster
        if tx.batch.nodes or self._config is not cluster.config:
            self._config, after_s = cluster.config, cluster.config.power.suspend_after
            self._is_used = any(
                after_s or node.spec.suspend_after or node.power is not Power.ON for node in cluster.nodes.values()
            )
        return self._is_used

    def keep_up(self, tx: Transaction, promises: Iterable[Promise]) -> bool:
        """Record what is decided now; return whether a node is switched."""
        born_s = self._born_s = tx.now_s if self._born_s is None else self._born_s
        cluster = tx.cluster
        self._note_busy(cluster, tx.now_s)
        wanted = _wanted(cluster, promises, tx.now_s)
        nodes = [self._view(cluster, node, wanted.get(name), born_s) for name, node in cluster.nodes.items()]
        keep_on = {frozenset(part.nodes): part.keep_on for part in cluster.partitions.values() if part.keep_on}
        settings = cluster.config.power
        rules = PowerRules(
            suspend_timeout_s=settings.suspend_timeout,
            resume_timeout_s=settings.resume_timeout,
            min_on_s=settings.min_on,
        )
        plan = power_plan(nodes, keep_on, rules, tx.now_s)
        self.next_s = plan.next_s
        _give_back_ended(tx)
        return _carry_out(tx, plan)

    def _view(self, cluster: ClusterState, node: Node, wanted_at_s: float | None, born_s: float) -> PowerNode:
        idle_since_s = max(self._busy_s.get(node.name, 0.0), node.link_since_s, born_s)
        return PowerNode(
            name=node.name,
            power=node.power,
            since_s=node.power_since_s if node.power is Power.ON else max(node.power_since_s, born_s),
            answers=node.link is Link.UP,
            drained=node.drained,
            idle_since_s=None if node.name in self._were_busy else idle_since_s,
            wanted_at_s=wanted_at_s,
            suspend_after_s=suspend_after_s(cluster.config, node.spec),
            is_by_hand=node.power_by not in ("", POWER_SAVING),
        )

    def _note_busy(self, cluster: ClusterState, now_s: float) -> None:
        """Note which nodes are busy: with jobs, drained, or with launches from before a restore."""
        busy = {node for job in cluster.active_jobs() for node in job.held_nodes}
        busy |= {name for name, node in cluster.nodes.items() if node.drained or node.has_orphans}
        busy |= {name for name, _ in cluster.undecided_launches}
        self._busy_s |= dict.fromkeys(busy | self._were_busy, now_s)
        self._were_busy = busy


def _wanted(cluster: ClusterState, promises: Iterable[Promise], now_s: float) -> dict[NodeName, float]:
    """Return when each node is needed that jobs hold or are promised, or that is reserved."""
    found: dict[NodeName, float] = {}

    def note(name: NodeName, at_s: float) -> None:
        found[name] = min(at_s, found.get(name, at_s))

    for job in cluster.active_jobs():
        for name in job.held_nodes if job.state is not JobState.COMPLETING else ():
            note(name, now_s)
    for promise in promises:
        for part in promise.parts:
            note(part.node, promise.start_s)
    for reservation in cluster.reservations.values():
        for name in reservation.nodes if now_s < reservation.end_s else ():
            if not cluster.nodes[name].drained:
                note(name, reservation.start_s)
    return found


def _give_back_ended(tx: Transaction) -> None:
    """Have jobs that are being ended give back nodes that are off: nothing of them is there."""
    for job in tx.cluster.active_jobs():
        if job.state is JobState.COMPLETING:
            for name in job.held_nodes:
                if tx.cluster.nodes[name].power.is_off:
                    tx.record(NodeCleared(job_id=job.id, at_s=tx.now_s, node=name))


def _carry_out(tx: Transaction, plan: PowerPlan) -> bool:
    settings = tx.cluster.config.power
    for name in plan.off:
        tx.record_node(PoweredDown(node=name, at_s=tx.now_s))
    for name in plan.still_on:
        why = f"it still answers {format_time_s(settings.suspend_timeout)} after it was told to switch itself off"
        tx.record_node(PowerDownFailed(node=name, at_s=tx.now_s, why=why))
    for name in plan.not_back:
        give_up(
            tx, name, f"it did not come back within {format_time_s(settings.resume_timeout)} after it was switched on"
        )
    for name in plan.suspend:
        tx.record_node(PowerDownOrdered(node=name, at_s=tx.now_s, by=POWER_SAVING))
    for name in plan.resume:
        tx.record_node(PowerUpOrdered(node=name, at_s=tx.now_s, by=POWER_SAVING))
    return any((plan.off, plan.still_on, plan.not_back, plan.suspend, plan.resume))


def give_up(tx: Transaction, name: NodeName, why: str) -> None:
    """Record that the node could not be switched on, and have its jobs start elsewhere."""
    tx.record_node(PowerUpFailed(node=name, at_s=tx.now_s, why=why))
    for job in tx.cluster.jobs_on(name):
        give_back(tx, job, name, f"node {name} could not be switched on: {why}")


def switching_failed(tx: Transaction, name: NodeName, since_s: float, why: str) -> None:
    """Record that the order of `since_s` has failed, if it is still the node's last one."""
    known = tx.cluster.nodes[name]
    if known.power_since_s != since_s:
        return
    if known.power is Power.POWERING_DOWN:
        tx.record_node(PowerDownFailed(node=name, at_s=tx.now_s, why=why))
    elif known.power is Power.POWERING_UP:
        give_up(tx, name, why)


def nodes_awaited(cluster: ClusterState, job: Job) -> list[NodeName]:
    """Return the nodes of a job that are off, or on their way back."""
    return [name for name in job.held_nodes if cluster.nodes[name].power.is_off]


def start_allocations(tx: Transaction, node: NodeName) -> None:
    """Record the start of allocations without a script that have waited for `node`."""
    for job in tx.cluster.jobs_on(node):
        if job.state is JobState.CONFIGURING and not job.spec.has_script and not nodes_awaited(tx.cluster, job):
            tx.record(Started(job_id=job.id, at_s=tx.now_s))


# ----- by hand


def power_down(tx: Transaction, identity: Identity, nodes: str) -> list[str]:
    """Order that these nodes are switched off; return those that are not off already.

    Raises: RequestError if one holds jobs, does not answer, or could not be switched on again.
    """
    authorize(identity, Action.POWER, what="switch a node off")
    names = [name for name in find_nodes(tx.cluster, nodes) if tx.cluster.nodes[name].power is Power.ON]
    for name in names:
        if why := _why_stays_on(tx.cluster, tx.cluster.nodes[name]):
            raise RequestError(f"cannot switch node {name} off: {why}")
    for name in names:
        tx.record_node(PowerDownOrdered(node=name, at_s=tx.now_s, by=identity.user))
    return list(names)


def _why_stays_on(cluster: ClusterState, node: Node) -> str:
    if why := why_not_switchable(cluster.config, node.spec):
        return why
    if node.link is not Link.UP:
        return "it does not answer; hctl fence says that it is switched off"
    if jobs := cluster.jobs_on(node.name):
        return f"it holds {len(jobs)} jobs; let them end (hctl drain {node.name} WHY), and try again"
    return "it runs launches from before the database was restored: hctl strays" if node.has_orphans else ""


def power_up(tx: Transaction, identity: Identity, nodes: str) -> list[str]:
    """Order that these nodes are switched on; return those that are off.

    Raises: RequestError if one is being switched off, or was not switched off by the controller.
    """
    authorize(identity, Action.POWER, what="switch a node on")
    names = find_nodes(tx.cluster, nodes)
    for name in names:
        node = tx.cluster.nodes[name]
        if node.power is Power.POWERING_DOWN:
            raise RequestError(
                f"cannot switch node {name} on: it is being switched off; try again when it is POWERED_DOWN"
            )
        if node.power is Power.ON and node.link is Link.DOWN:
            raise RequestError(
                f"cannot switch node {name} on: the controller has not switched it off ({node.link_why}); "
                f"to wake it: hpcsched node wake {name}"
            )
    off = [name for name in names if tx.cluster.nodes[name].power is Power.POWERED_DOWN]
    for name in off:
        tx.record_node(PowerUpOrdered(node=name, at_s=tx.now_s, by=identity.user))
    return list(off)


def ordered(tx: Transaction) -> Iterator[NodeName]:
    """Yield the nodes that this transaction has ordered to be switched."""
    for event in tx.batch.node_events:
        if isinstance(event, PowerDownOrdered | PowerUpOrdered):
            yield event.node
