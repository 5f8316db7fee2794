"""Reject configuration edits that point a node's name elsewhere while jobs are held there.

A node's address, account, host key and directory decide which spool its name refers to. So does the cluster's name, which is
part of the directory. While jobs are held there, such an edit is rejected as a whole: at ``hctl reconfigure`` and SIGHUP
nothing is changed. A starting controller continues with the former values from its database, and reports this, because a
cluster that does not start because of one node would be worse.

A node without a file cannot be reached. At ``hctl reconfigure`` this edit is rejected as well. After a start, the node's jobs
are held like those of a node that does not answer (`hpcsched.controller.nodes.loss`).

A renamed node names its earlier names in its file (`formerly`), so that its state follows at the next reconfiguration or start,
however the command that renamed it has ended.

Knows nothing of connections. It is used before the controller answers, so it imports little.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hpcnode.wire import protocol
from hpcsched.config.load import Config
from hpcsched.lifecycle.events import NodesRenamed, Respecified
from hpcsched.lifecycle.job import can, names_nodes
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.cron import CronEntry
from hpcsched.model.frozen import replace as replace_spec
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import REACH, Node, NodeSpec
from hpcsched.model.spec import JobSpec
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction
from hpcsched.store.store import Store

NAMED_JOBS = 5


def jobs_held(jobs: Iterable[Job]) -> dict[NodeName, list[Job]]:
    """Return by node which of these jobs hold it."""
    held: dict[NodeName, list[Job]] = {}
    for job in jobs:
        for node in job.held_nodes:
            held.setdefault(node, []).append(job)
    return held


def words_for(jobs: Sequence[Job], singular: str = "", many: str = "") -> str:
    """Return the first jobs in words with a verb, such as ``jobs 12, 13 and 4 more run``.

    `singular` and `many` are the verb's forms for one job and for several.
    """
    shown = ", ".join(job.display_id for job in jobs[:NAMED_JOBS])
    more = f" and {len(jobs) - NAMED_JOBS} more" if len(jobs) > NAMED_JOBS else ""
    return f"job {shown} {singular}".rstrip() if len(jobs) == 1 else f"jobs {shown}{more} {many}".rstrip()


def held_there(jobs: Sequence[Job]) -> str:
    """Return ``job 12 is held there``."""
    return words_for(jobs, "is held there", "are held there")


def hold_nodes(held: Mapping[NodeName, Sequence[Job]]) -> str:
    """Return ``job 12 holds nodes`` for the result of `jobs_held`."""
    jobs = {job.id: job for of_node in held.values() for job in of_node}
    return words_for(list(jobs.values()), "holds nodes", "hold nodes")


def refused_edits(cluster: ClusterState, after: Config, same_machine: Collection[str] = ()) -> list[str]:
    """Return why the configuration `after` cannot be applied: a sentence per edit, or empty.

    `same_machine`: nodes that, according to an admin, only have a new address. Their spool is checked anyway.
    """
    held = jobs_held(cluster.active_jobs())
    specs = {spec.name: spec for spec in after.nodes}
    refused = []
    if after.name != cluster.config.name and held:
        refused.append(
            f"cluster.name is {cluster.config.name!r} and cannot become {after.name!r} while {hold_nodes(held)}: "
            "agents keep their jobs in directories of that name. Drain all nodes (hctl drain NODES WHY), wait for the jobs, "
            "then rename"
        )
    for name, jobs in held.items():
        known, spec = cluster.nodes[name].spec, specs.get(name)
        if name not in cluster.nodes:
            continue
        if spec is None:
            refused.append(
                f"node {name} has no file in nodes.d any more, and {held_there(jobs)}. Bring the file back, "
                f"or give the jobs up: hpcsched node remove --force {name}"
            )
        elif edited := _edited(known, spec, {"root"} if name in same_machine else REACH):
            refused.append(f"{edited} of node {name} cannot change while {held_there(jobs)}. " + _ways(name))
    return refused


def gone_notes(cluster: ClusterState) -> list[str]:
    """Return a sentence, with a remedy, for each node without a file on which jobs are held."""
    return [
        f"node {name} has no file in nodes.d any more, and {held_there(cluster.jobs_on(name))}. Bring the file back "
        f"(then hctl reconfigure), or, if the machine is dead, give them up: hctl fence {name}"
        for name in cluster.gone_nodes()
    ]


def _ways(name: NodeName) -> str:
    return (
        f"Wait until they have ended (hctl drain {name} WHY lets no new ones start), or, if the machine is dead, give them up "
        f"(hctl fence {name}); then hctl reconfigure. If it is the same machine at a new address: hctl reconfigure {name}"
    )


def _edited(before: NodeSpec, after: NodeSpec, keys: Collection[str]) -> str:
    """Return the keys whose values differ, with the values, in words; "" if none does."""
    found = [key for key in REACH if key in keys and getattr(before, key) != getattr(after, key)]
    return ", ".join(f"{key} ({_shown(getattr(before, key))} to {_shown(getattr(after, key))})" for key in found)


def _shown(value: object) -> str:
    text = "" if value is None else str(value)
    return repr(text if len(text) <= 60 else text[:28] + "..." + text[-28:])


def as_before(
    config: Config, former_name: str, stored: Mapping[str, Any], held: Mapping[NodeName, Sequence[Job]]
) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration to start with, and how and why it differs from the files.

    `former_name`, `stored`: the cluster's name and the rows of its nodes from the last run.
    """
    notes, nodes, name = [], [], config.name
    if held and former_name and former_name != config.name:
        name = former_name
        notes.append(
            f"cluster.name stays {former_name!r}, although hpcsched.toml says {config.name!r}: {hold_nodes(held)}"
        )
    for spec in config.nodes:
        row = stored.get(spec.name)
        before = _former(spec, row.reach) if row is not None and row.reach and held.get(spec.name) else spec
        if edited := _edited(before, spec, REACH):
            notes.append(
                f"node {spec.name} keeps its former description, although its file has another ({edited}): "
                f"{held_there(held[spec.name])}. {_ways(spec.name)}"
            )
        nodes.append(before)
    return replace(config, name=name, nodes=tuple(nodes)), tuple(notes)


def _former(spec: NodeSpec, reach: str) -> NodeSpec:
    known = json.loads(reach)
    return replace(spec, **{key: value for key, value in known.items() if key in REACH})


# ----- renamed nodes: what the earlier name means is moved to the new one


def renamed_nodes(specs: Sequence[NodeSpec]) -> dict[str, NodeName]:
    """Return the present name by earlier name.

    Without names that a node has now, or that two nodes had.
    """
    taken = {str(spec.name) for spec in specs}
    found: dict[str, NodeName] = {}
    for spec in specs:
        for name in spec.formerly:
            if name in found:
                taken.add(name)
            found[name] = spec.name
    return {name: spec for name, spec in found.items() if name not in taken}


def move_renamed(config: Config, store: Store, held: Mapping[NodeName, Sequence[Job]]) -> list[str]:
    """Give the stored state of renamed nodes their new names. Return the changes in words.

    Nodes on which jobs are held keep their old name in the store: their jobs are those of a node without a file.
    """
    stored, specs = store.load_nodes(), {spec.name: spec for spec in config.nodes}
    moved = []
    for former, name in renamed_nodes(config.nodes).items():
        row = stored.get(former)
        if row is not None and not held.get(NodeName(former)) and _is_reached_as(row.reach, specs[name]):
            store.rename_node(former, name)
            moved.append(f"node {former} is called {name} now")
    return moved


def _is_reached_as(reach: str, spec: NodeSpec) -> bool:
    """Return whether the stored address is the node's: the row may be that of another machine."""
    known = json.loads(reach) if reach else {}
    return all(getattr(spec, key) == value for key, value in known.items() if key in REACH and key != "root")


def follow_renames(tx: Transaction, by_uid: int) -> list[str]:
    """Have reservations, triggers, crontabs and jobs name renamed nodes by their new names.

    Signed jobs are not changed, because their signature would not fit. Return a note for each that names an old name.
    """
    names = renamed_nodes([node.spec for node in tx.cluster.nodes.values()])
    if not names:
        return []
    for reservation in list(tx.cluster.reservations.values()):
        if not names.keys().isdisjoint(reservation.nodes):
            nodes = tuple(names.get(node, node) for node in reservation.nodes)
            tx.set_reservation(reservation.name, replace(reservation, nodes=nodes))
    for trigger in list(tx.cluster.triggers.values()):
        if trigger.target in names and not trigger.is_of_job:
            tx.set_trigger(trigger.id, replace(trigger, target=names[trigger.target]))
    for job in list(tx.cluster.jobs.values()):
        if names_nodes(job, names) and can(job, NodesRenamed):
            tx.record(NodesRenamed(job_id=job.id, at_s=tx.now_s, names=dict(names)))
    notes, made = _follow_in_crontabs(tx, names), dict[int, int]()
    for job in [job for job in tx.cluster.jobs.values() if can(job, Respecified)]:
        spec = _following(job.spec, names)
        if spec is job.spec:
            continue
        if spec.signed:
            notes.append(f"job {job.display_id} is signed for {', '.join(names)}, which has another name now")
            continue
        whole = spec_to_json(spec)
        changes = {name: whole[name] for name in _NODE_LISTS if getattr(spec, name) != getattr(job.spec, name)}
        made[job.spec_id] = tx.respecify(job, changes, by_uid=by_uid, spec_id=made.get(job.spec_id)).spec_id
    return notes


def _follow_in_crontabs(tx: Transaction, names: Mapping[str, NodeName]) -> list[str]:
    """Have the jobs of crontabs name renamed nodes by their new names; return a note for each.

    The text is its user's, and says so at the next `scrontab`.
    """
    notes = []
    for crontab in list(tx.cluster.crontabs.values()):
        entries = tuple(_following_entry(entry, names) for entry in crontab.entries)
        if entries != crontab.entries:
            tx.set_crontab(crontab.uid, replace(crontab, entries=entries))
            notes.append(
                f"the crontab of {crontab.user} names {', '.join(names)}; its jobs use the new names, its text does not"
            )
    return notes


def _following_entry(entry: CronEntry, names: Mapping[str, NodeName]) -> CronEntry:
    spec = spec_from_json(json.loads(entry.spec))
    followed = _following(spec, names)
    if followed is spec or spec.signed:
        return entry
    return replace(entry, spec=json.dumps(spec_to_json(followed)))


_NODE_LISTS = ("nodelist", "exclude", "components")


def _following(spec: JobSpec, names: Mapping[str, NodeName]) -> JobSpec:
    """Return the specification with the new names; the same object if it has no old one."""
    parts = tuple(_following(part, names) for part in spec.components)
    named = {name: tuple(names.get(node, node) for node in getattr(spec, name)) for name in _NODE_LISTS[:2]}
    if all(named[name] == getattr(spec, name) for name in named) and parts == spec.components:
        return spec
    return replace_spec(spec, **named, components=parts)


# ----- which spool a node's name refers to, and whether its agent is accepted
#
# Each share of a job names the spool that its attempt was launched into (`Share.spool`). An edit of
# the configuration, a name server or a replaced machine can point a node's name to another spool.
# The inventory of that spool proves nothing: the attempt may run on the former machine. So its
# agent is refused, and nothing is sent there, until no job is held at the former spool. The job's
# node counts as one that does not answer.
#
# Proof that nothing runs any more is the inventory of the same spool, or a reboot of the same
# machine. An admin's word (``hctl fence NODE``) is accepted as well.


class SpoolIdentity(NamedTuple):
    """The spool identity in an agent's welcome (see `hpcnode.spool`).

    The texts are hashes; "" if the agent does not send one.
    """

    id: str = ""
    hardware: str = ""


def spool_of(welcome: protocol.Welcome) -> SpoolIdentity:
    """Return the spool of an agent; an agent without identities does not name one."""
    spool = welcome.facts.get("spool")
    if not isinstance(spool, Mapping) or not spool.get("id"):
        return SpoolIdentity()
    machine, hardware = spool.get("machine"), spool.get("hardware")
    return SpoolIdentity(
        id=_digest(spool["id"], machine, spool.get("inode")),
        hardware=_digest(machine, hardware) if hardware else "",
    )


def why_refused(cluster: ClusterState, node: NodeName, welcome: protocol.Welcome) -> str:
    """Return why the agent is not accepted for `node`, or "" if it is."""
    spool, known = spool_of(welcome), cluster.nodes[node]
    if was_rebooted(known, spool, welcome.boot_id):
        return ""
    others = [job for job in cluster.jobs_on(node) if job.spool_on(node) != spool.id]
    if others:
        return (
            f"another spool answers than the one that holds {words_for(others)}: node {node} leads to another machine or "
            f"directory than before, or its directory was deleted"
        )
    if (known.has_orphans or node in cluster.unseen_nodes()) and known.spool != spool.id:
        return (
            f"another spool answers than before the database was restored: node {node} leads to another machine or "
            f"directory, or its directory was deleted"
        )
    return ""


def was_rebooted(known: Node, spool: SpoolIdentity, boot_id: str) -> bool:
    """Return whether this is the machine that answered last, rebooted since."""
    return bool(known.hardware and known.boot_id) and known.hardware == spool.hardware and known.boot_id != boot_id


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(["hpcsched spool", *values], sort_keys=True).encode()).hexdigest()[:32]
