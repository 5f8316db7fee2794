"""Decide which idle nodes to switch off to save power, and which to switch on again.

Values in, values out: no clock, no node. `hpcsched.controller.nodes.power` makes the values and records the decisions,
`hpcsched.controller.power_switch` carries them out.

Rules:
- A node is switched off when it has been idle for its `suspend_after_s`, and on for `min_on_s`. It stays on if it is wanted
  within `min_on_s` after it could be back.
- A node is switched on for the jobs that hold it, in time for when it is wanted, if it is to stay on by a later configuration,
  and if a partition would have fewer nodes on than it keeps.
- A node that a person has switched off is switched on only if it is wanted. A drained node is not switched off, and is switched
  on only for the jobs that hold it.
- A node has its time for each. If it still answers then, it was not switched off; if it does not, it has failed to come back.

Source: slurm.conf(5): SuspendTime, SuspendTimeout, ResumeTimeout, SuspendExcNodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcsched.model.ids import NodeName
from hpcsched.model.node import Power


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerRules:
    """Seconds; see [power] of hpcsched.toml(5)."""

    suspend_timeout_s: float
    resume_timeout_s: float
    min_on_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerNode:
    """What the decision needs to know of a node."""

    name: NodeName
    power: Power
    since_s: float  # when it came into this state of power
    answers: bool
    drained: bool = False
    idle_since_s: float | None = None  # None: it is not idle, or cannot be switched off
    wanted_at_s: float | None = None  # when a job, promise or reservation needs it; None: none does
    suspend_after_s: float = 0.0  # 0: it stays on
    is_by_hand: bool = False  # a person has switched it off

    @property
    def is_on(self) -> bool:
        """Return whether jobs can use the node now or soon."""
        on = self.answers if self.power is Power.ON else self.power is Power.POWERING_UP
        return on and not self.drained


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPlan:
    """The decisions. `next_s`: when time alone leads to another one; None: never."""

    suspend: tuple[NodeName, ...] = ()
    resume: tuple[NodeName, ...] = ()
    off: tuple[NodeName, ...] = ()  # have had the time to switch themselves off
    still_on: tuple[NodeName, ...] = ()  # still answer after that time
    not_back: tuple[NodeName, ...] = ()  # have not come back in time
    next_s: float | None = None


def power_plan(
    nodes: Sequence[PowerNode], keep_on: Mapping[frozenset[NodeName], int], rules: PowerRules, now_s: float
) -> PowerPlan:
    """Return what to do with the power of `nodes`.

    `keep_on`: how many of each set of nodes stay on.
    """
    due = {node.name: at_s for node in nodes if (at_s := _timeout_s(node, rules)) is not None}
    over = [node for node in nodes if due.get(node.name, now_s + 1.0) <= now_s]
    off = [node.name for node in over if node.power is Power.POWERING_DOWN and not node.answers]
    still_on = [node.name for node in over if node.power is Power.POWERING_DOWN and node.answers]
    not_back = [node.name for node in over if node.power is Power.POWERING_UP]
    resume = [node.name for node in nodes if _is_to_resume(node, rules, now_s)]
    on = {node.name for node in nodes if node.is_on and node.name not in not_back} | set(resume)
    resume += _to_keep_on(nodes, keep_on, on, set(resume))
    suspend: list[NodeName] = []
    times_s = [at_s for name, at_s in due.items() if at_s > now_s]
    for node in sorted(nodes, key=lambda one: one.idle_since_s or 0.0):
        suspends_at_s = _suspends_at_s(node, rules)
        if suspends_at_s is None or _is_wanted_within(node, rules.resume_timeout_s + rules.min_on_s, now_s):
            continue
        if suspends_at_s > now_s:
            times_s.append(suspends_at_s)
        elif all(len(on & group) > count for group, count in keep_on.items() if node.name in group):
            suspend.append(node.name)
            on.discard(node.name)
    times_s += [
        node.wanted_at_s - rules.resume_timeout_s
        for node in nodes
        if node.power is Power.POWERED_DOWN and node.wanted_at_s is not None
    ]
    return PowerPlan(
        suspend=tuple(suspend),
        resume=tuple(resume),
        off=tuple(off),
        still_on=tuple(still_on),
        not_back=tuple(not_back),
        next_s=min((at_s for at_s in times_s if at_s > now_s), default=None),
    )


def _timeout_s(node: PowerNode, rules: PowerRules) -> float | None:
    """Return when the time for being switched is over; None: the node is not being switched."""
    if node.power is Power.POWERING_DOWN:
        return node.since_s + rules.suspend_timeout_s
    return node.since_s + rules.resume_timeout_s if node.power is Power.POWERING_UP else None


def _suspends_at_s(node: PowerNode, rules: PowerRules) -> float | None:
    """Return when the node may be switched off if it stays idle; None: it may not."""
    can = node.power is Power.ON and node.answers and not node.drained and node.suspend_after_s > 0
    if not can or node.idle_since_s is None:
        return None
    return max(node.idle_since_s + node.suspend_after_s, node.since_s + rules.min_on_s if node.since_s else 0.0)


def _is_wanted_within(node: PowerNode, within_s: float, now_s: float) -> bool:
    return node.wanted_at_s is not None and node.wanted_at_s - now_s <= within_s


def _is_to_resume(node: PowerNode, rules: PowerRules, now_s: float) -> bool:
    if node.power is not Power.POWERED_DOWN:
        return False
    if node.wanted_at_s is not None and node.wanted_at_s <= now_s:
        return True  # jobs hold it, also if it was drained since
    if node.drained:
        return False
    stays_on = not node.suspend_after_s and not node.is_by_hand
    return stays_on or _is_wanted_within(node, rules.resume_timeout_s, now_s)


def _to_keep_on(
    nodes: Sequence[PowerNode], keep_on: Mapping[frozenset[NodeName], int], on: set[NodeName], resumed: set[NodeName]
) -> list[NodeName]:
    """Return the nodes to switch on so that enough are on; adds them to `on`."""
    found: list[NodeName] = []
    for group, count in keep_on.items():
        for node in nodes:
            if len(on & group) >= count:
                break
            is_off = node.power is Power.POWERED_DOWN and not node.drained and not node.is_by_hand
            if is_off and node.name in group and node.name not in resumed and node.name not in on:
                found.append(node.name)
                on.add(node.name)
    return found
