"""Reject configuration edits that point a node's name elsewhere while jobs are held there.

A node's address, account, host key and directory decide which spool its name refers to. So does the cluster's name, which is
part of the directory. While jobs are held there, such an edit is rejected as a whole: at ``hctl reconfigure`` and SIGHUP
nothing is changed. A starting controller continues with the former values from its database, and reports this, because a
cluster that does not start because of one node would be worse.

A node without a file cannot be reached. At ``hctl reconfigure`` this edit is rejected as well. After a start, the node's jobs
are held like those of a node that does not answer (`hpcsched.controller.requests.nodes`).

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
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import REACH, Node, NodeSpec
from hpcsched.state.cluster import ClusterState

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
