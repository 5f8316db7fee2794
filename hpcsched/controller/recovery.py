"""Load the controller's state at a start: database rows, configured nodes and partitions.

Recovery consists of this and the ordinary ticks that follow. Knows no planner and no connections:
it runs before they exist.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from hpcsched.api.identity import is_account
from hpcsched.config.load import Config
from hpcsched.controller.nodes.edits import as_before, jobs_held, move_renamed
from hpcsched.lifecycle.node import probation_after
from hpcsched.metrics.links import last_runs
from hpcsched.model.accounting import EVERYBODY, Accounting, PreemptMode, PreemptType
from hpcsched.model.ids import JobId
from hpcsched.model.job import TrainingStatus
from hpcsched.model.node import LaunchFailure, Link, Node, NodeSpec, Power
from hpcsched.model.probation import DAY_S
from hpcsched.sched.policy import DEFAULT_GUARD, Backfill, Policy, PreemptRules
from hpcsched.state.cluster import ClusterState
from hpcsched.store.engine import adopts_known, asks_about_orphans, incarnation, raise_epoch, restored_last_id, start_id
from hpcsched.store.store import Store

# ----- convert the configuration: nodes with their remembered state, and the planner's policy


def node_of(spec: NodeSpec, row: Any) -> Node:
    """Return the configured node with the state that the store remembers."""
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
        spool=row.spool,
        hardware=row.hardware,
        launch_failures=tuple(LaunchFailure(*failure) for failure in json.loads(row.launch_failures)),
        has_orphans=bool(row.has_orphans),
        power=Power(row.power or Power.ON),
        power_since_s=row.power_since_s or 0.0,
        power_by=row.power_by or "",
        power_why=row.power_why or "",
    )


def policy_of(config: Config) -> Policy:
    """Return the planner's policy as configured."""
    scheduler = config.scheduler
    return Policy(
        max_switch_wait_s=scheduler.max_switch_wait,
        guard=replace(DEFAULT_GUARD, short=replace(DEFAULT_GUARD.short, wait_part=scheduler.wait_guard)),
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
    """Return the changed settings in words, by section, except nodes and partitions."""
    changed = [] if before.accounting == after.accounting else ["accounts, QOS, licenses, fair share: reloaded"]
    old, new = before.scheduler, after.scheduler
    sections = {
        "cluster": _differ(before, after, ("name", "share")),
        "controller": _differ(before.controller, after.controller),
        "scheduler": _differ(replace(old, weights=new.weights), new),
        "scheduler.weights": _differ(old.weights, new.weights),
        "roles": _differ(before.access, after.access, ("admins", "operators", "viewers", "services", "default")),
        "privacy": ["hide"] if before.access.hidden != after.access.hidden else [],
        "audit": _differ(before.audit, after.audit),
        "power": _differ(before.power, after.power),
        "gateway": _differ(before.gateway, after.gateway),
    }
    return changed + [f"[{name}] {', '.join(keys)}" for name, keys in sections.items() if keys]


def unknown_users(accounting: Accounting) -> list[str]:
    """Return a note per section of accounts and users that names unknown machine accounts."""
    named = [(f"[accounts.{one.name}] users", one.users) for one in accounting.accounts]
    named += [(f"[users.{one.name}]", (one.name,)) for one in accounting.users]
    notes = []
    for where, names in named:
        unknown = [name for name in names if name != EVERYBODY and not is_account(name)]
        if unknown:
            notes.append(
                f"{where}: this machine has no account {', '.join(unknown[:5])}; such users cannot submit jobs"
            )
    return notes


def _differ(before: Any, after: Any, keys: Sequence[str] = ()) -> list[str]:
    """Return which fields of two dataclasses differ; `keys` limits the fields compared."""
    names = keys or [field.name for field in fields(after)]
    return [name for name in names if getattr(before, name) != getattr(after, name)]


def begin_epoch(config: Config, store: Store, now_s: float) -> ClusterState:
    """Raise the epoch and return the cluster from the store and the configuration."""
    database = store.connection
    cluster = ClusterState(config=config, incarnation=incarnation(database), epoch=raise_epoch(database))
    cluster.start = start_id(database)
    cluster.restored_last_id = restored_last_id(database)
    cluster.ask_about_orphans = asks_about_orphans(database)
    cluster.adopts_known = adopts_known(database)
    load_state(cluster, store, now_s)
    held = jobs_held(cluster.active_jobs())
    move_renamed(config, store, held)
    stored, former_name = store.load_nodes(), store.cluster()
    config, cluster.not_taken = as_before(config, former_name, stored, held)
    if config.name != former_name:
        store.put_cluster(config.name)
    for spec in config.nodes:
        cluster.nodes[spec.name] = node_of(spec, stored.get(spec.name))
    load_probations(cluster, store, now_s)
    load_assessments(cluster, store)
    cluster.set_partitions(config.partitions)
    cluster.config = config
    return cluster


def load_probations(cluster: ClusterState, store: Store, now_s: float) -> None:
    """Read what the events of the last two days say of drains by health checks."""
    for event in store.recent_node_events(now_s - 2 * DAY_S):
        node = cluster.nodes.get(event.node)
        if node is not None:
            cluster.nodes[event.node] = replace(node, probation=probation_after(node.probation, event))


def load_assessments(cluster: ClusterState, store: Store) -> None:
    """Have the nodes of `cluster` be as their last assessments in the store say."""
    cluster.benches = {run.node: run for run in store.load_benches() if not run.busy}
    cluster.links = last_runs(run for run in store.load_links() if not run.busy and not run.why)
    cluster.nodes.update(cluster.measured_again())


def load_state(cluster: ClusterState, store: Store, now_s: float) -> None:
    """Fill `cluster` with the state from the store."""
    cluster.last_job_id, cluster.last_spec_id = store.last_ids()
    cluster.last_job_id += sum(len(job.spec.components) for job in store.jobs([cluster.last_job_id]))
    cluster.adopted = store.adopted()
    cluster.partition_states = store.partition_states()
    for job in store.load_jobs(now_s - cluster.config.controller.min_job_age_s):
        cluster.put(job)
    cluster.unopened_specs = store.unopened
    cluster.jobs_secret = store.keys.oldest.jobs_secret
    cluster.ended = dict.fromkeys(sorted(cluster.ended, key=lambda job_id: cluster.jobs[job_id].ended_at_s or 0.0))
    cluster.scripts.keep_only(set(store.script_hashes()))
    cluster.usage = {used.key: used for used in store.load_usage()}
    cluster.crontabs = {crontab.uid: crontab for crontab in store.load_crontabs()}
    cluster.credentials = {credential.id: credential for credential in store.load_credentials()}
    cluster.triggers = {trigger.id: trigger for trigger in store.load_triggers()}
    cluster.services = {service.name: service for service in store.load_services()}
    cluster.reservations = {reservation.name: reservation for reservation in store.load_reservations()}
    cluster.training = _told_before(cluster, store)


def _told_before(cluster: ClusterState, store: Store) -> dict[JobId, TrainingStatus]:
    """Return the training status of running jobs from before this start."""
    told = store.load_training(cluster.active)
    return {
        job.id: told[job.id] for job in cluster.active_jobs() if job.id in told and told[job.id].attempt == job.attempt
    }
