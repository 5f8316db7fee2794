"""What the configuration says, as the controller holds it: nodes with what is remembered of them, the policy of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from hpcsched.config import Config
from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.node import Link, Node, NodeSpec
from hpcsched.sched.policy import Backfill, Policy, PreemptRules


def node_of(spec: NodeSpec, row: Any) -> Node:
    """Return the node of the configuration with what the store remembers of it."""
    if row is None:
        return Node(spec=spec)
    return Node(
        spec=spec,
        link=Link.UNKNOWN,
        link_since_s=row.link_since_s,
        drained=bool(row.drained),
        drained_why=row.drained_why,
        drained_by=row.drained_by,
        drained_at_s=row.drained_at_s,
        boot_id=row.boot_id,
        machine_id=row.machine_id,
    )


def policy_of(config: Config) -> Policy:
    """Return the planner's policy as configured."""
    scheduler = config.scheduler
    return Policy(
        max_switch_wait_s=scheduler.max_switch_wait,
        backfill=Backfill(scheduler.policy) if scheduler.policy != "fifo" else Backfill.NONE,
        weight_age=scheduler.weights.age,
        weight_partition=scheduler.weights.partition,
        weight_size=scheduler.weights.size,
        weight_fairshare=scheduler.weights.fairshare,
        weight_qos=scheduler.weights.qos,
        weight_assoc=scheduler.weights.assoc,
        weights_tres=scheduler.weights.tres,
        favor_small=scheduler.favor_small,
        small_relative_to_time=scheduler.small_relative_to_time,
        accrue_always=scheduler.accrue_always,
        age_max_s=scheduler.age_max_s,
        preempt=PreemptRules(
            type=PreemptType(scheduler.preempt_type),
            mode=PreemptMode(scheduler.preempt_mode),
            grace_s=scheduler.preempt_grace_time_s,
            exempt_s=scheduler.preempt_exempt_time_s,
            requeue=config.controller.requeue,
            qos={qos.name: qos for qos in config.accounting.qos},
        ),
    )


def settings_changed(before: Config, after: Config) -> list[str]:
    """Return in words what differs but for nodes and partitions: each section with its keys that do."""
    changed = [] if before.accounting == after.accounting else ["accounts, QOS, licences or fair share"]
    old, new = before.scheduler, after.scheduler
    sections = {
        "cluster": _differ(before, after, ("name", "share")),
        "controller": _differ(before.controller, after.controller),
        "scheduler": _differ(replace(old, weights=new.weights), new),
        "scheduler.weights": _differ(old.weights, new.weights),
    }
    return changed + [f"[{name}] {', '.join(keys)}" for name, keys in sections.items() if keys]


def _differ(before: Any, after: Any, keys: Sequence[str] = ()) -> list[str]:
    """Return which of `keys`, of all fields without them, two dataclasses have different values of."""
    names = keys or [field.name for field in fields(after)]
    return [name for name in names if getattr(before, name) != getattr(after, name)]
