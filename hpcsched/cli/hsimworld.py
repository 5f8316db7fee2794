"""hsim replay and hsim whatif: a saved or live world, planned again, or let go on under other conditions.

A world is what ``hctl snapshot`` wrote, or comes from the controller when no file is named. Nothing that is asked here changes
anything there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcsched import client, paths
from hpcsched.cli.options import UsageError, Words
from hpcsched.cli.output import clean, date_text, print_json
from hpcsched.client import Json
from hpcsched.errors import RequestError
from hpcsched.listing.table import columns
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.resources import Gpu
from hpcsched.model.units import format_time_s, parse_mem_mib
from hpcsched.sched.plan import Plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.preempt import full_plan
from hpcsched.sched.saved import world_from_json
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot
from hpcsched.sim.forecast import Forecast, forecast, with_nodes, without_nodes
from hpcsched.sim.planned import KINDS

NAMES = {kind: name for name, kind in KINDS.items()} | {Backfill.NONE: "fifo"}  # as the configuration calls them
TODAY = "as it is"
_NEW_NODES = re.compile(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,5}):(\d+[KMGT]?)(?::gpu:([^:\s]+):(\d{1,3}))?", re.IGNORECASE)


class Variant(namedtuple("Variant", "name snapshot policy")):
    """A world and a policy to let go on, and what to call them."""

    __slots__ = ()

    name: str
    snapshot: Snapshot
    policy: Policy


# ----- replay


def replay(words: Words, operands: Sequence[str]) -> int:
    """Print the plan of a saved world, and what would differ with another policy."""
    snapshot, policy = _world(words, operands, "replay")
    plans = [(policy, full_plan(snapshot, policy))]
    plans += [(other, full_plan(snapshot, other)) for other in _policies(words, policy)]
    views = [
        {
            "policy": NAMES[one.backfill],
            "jobs": _planned(made, snapshot),
            "preemptions": [
                {"job_id": item.job_id, "victims": [victim.job_id for victim in item.victims]}
                for item in made.preemptions
            ],
        }
        for one, made in plans
    ]
    if words.has("json"):
        differences = [_differences(views[0]["jobs"], view["jobs"]) for view in views[1:]]
        print_json({"now_s": snapshot.now_s, "plans": views, "differences": differences})
        return 0
    print(_plan_text(views[0], snapshot), end="")
    for view in views[1:]:
        changed = _differences(views[0]["jobs"], view["jobs"])
        print(f"\nWith policy {view['policy']} {len(changed)} of {len(snapshot.pending)} jobs fare differently:")
        rows = [(clean(one["job"]), clean(one["user"]), _fate(one["was"]), _fate(one["is"])) for one in changed]
        print(columns(("JOBID", "USER", "WAS", "IS"), rows), end="")
    return 0


def _planned(made: Plan, snapshot: Snapshot) -> list[Json]:
    """Return what the plan `made` says of each waiting job."""
    nodes = {start.job_id: [share.node for share in start.shares] for start in made.starts}
    found = []
    for job in snapshot.pending:
        view: Json = {"job_id": job.id, "job": job.display_id, "user": job.user, "start_s": None, "nodes": []}
        if job.id in nodes:
            view |= {"start_s": snapshot.now_s, "nodes": nodes[job.id], "reason": "None", "detail": ""}
        else:
            wait = made.waits[job.id]
            view |= {"start_s": wait.expected_start_s, "reason": wait.reason.value, "detail": wait.detail}
        found.append(view)
    return found


def _differences(before: Sequence[Json], after: Sequence[Json]) -> list[Json]:
    """Return the jobs that start in one plan alone, elsewhere, or at another time."""
    keys = ("start_s", "nodes", "reason")
    return [
        {"job_id": one["job_id"], "job": one["job"], "user": one["user"], "was": one, "is": other}
        for one, other in zip(before, after, strict=True)
        if any(one[key] != other[key] for key in keys)
    ]


def _plan_text(view: Json, snapshot: Snapshot) -> str:
    starting = sum(1 for job in view["jobs"] if job["reason"] == "None")
    head = (
        f"{date_text(snapshot.now_s)}, policy {view['policy']}: {starting} start, {len(view['jobs']) - starting} wait\n"
    )
    rows = [(clean(job["job"]), clean(job["user"]), _fate(job), clean(job["detail"])) for job in view["jobs"]]
    return head + columns(("JOBID", "USER", "PLAN", "WHY"), rows)


def _fate(job: Json) -> str:
    if job["reason"] == "None":
        return f"starts on {compress_hostlist(job['nodes'])}"
    when = f", {date_text(job['start_s'])}" if job["start_s"] is not None else ""
    return f"{job['reason']}{when}"


# ----- whatif


def whatif(words: Words, operands: Sequence[str]) -> int:
    """Print how today's queue would fare with other nodes and policies, beside how it will as things are."""
    snapshot, policy = _world(words, operands, "whatif")
    variants = _variants(words, snapshot, policy)
    found = [forecast(one.snapshot, one.policy, predict=words.has("predict")) for one in variants]
    shown = _shown(words, snapshot)
    if words.has("json"):
        jobs = [_starts(job, found) for job in shown]
        pairs = zip(variants, found, strict=True)
        print_json({"now_s": snapshot.now_s, "variants": [_figures(*pair) for pair in pairs], "jobs": jobs})
        return 0
    print(_table(variants, found), end="")
    if shown:
        rows = [(clean(job.display_id), clean(job.user), *(_start_text(job, one) for one in found)) for job in shown]
        print("\n" + columns(("JOBID", "USER", TODAY.upper(), *(one.name for one in variants[1:])), rows), end="")
    elif words.has("jobs"):
        print(f"\nNo job of {clean(words.last('jobs')[:60])} waits.")
    return 0


def _variants(words: Words, snapshot: Snapshot, policy: Policy) -> list[Variant]:
    changed, said = snapshot, []
    if words.has("remove-node"):
        names = _known(expand_hostlist(",".join(words.given["remove-node"])), snapshot)
        changed = without_nodes(changed, names)
        said.append(f"-{compress_hostlist(sorted(names))}")
    for text in words.given.get("add-nodes", ()):
        changed = with_nodes(changed, _new_nodes(text, changed))
        said.append(f"+{text}")
    found = [Variant(TODAY, snapshot, policy)]
    if said:
        found.append(Variant(" ".join(said), changed, policy))
    for other in _policies(words, policy):
        found.append(Variant(" ".join([*said, NAMES[other.backfill]]), changed, other))
    return found


def _known(names: Sequence[str], snapshot: Snapshot) -> set[NodeName]:
    there = {node.name for node in snapshot.nodes}
    for name in names:
        if name not in there:
            raise RequestError(
                f"cannot remove node {name[:60]!r}: there are {compress_hostlist(sorted(there)) or 'none'}"
            )
    return {NodeName(name) for name in names}


def _new_nodes(text: str, snapshot: Snapshot) -> list[NodeView]:
    match = _NEW_NODES.fullmatch(text)
    if match is None:
        raise UsageError(
            f"cannot add nodes {text[:60]!r}: write COUNTxCPUS:MEM or COUNTxCPUS:MEM:gpu:TYPE:N, as 2x16:64G:gpu:a100:4"
        )
    count, cpus, mem, kind, gpus = match.groups()
    taken = {node.name for node in snapshot.nodes}
    free = (name for number in range(1, 1_000_000) if (name := NodeName(f"new{number}")) not in taken)
    return [
        NodeView(
            name=next(free),
            cpus=int(cpus),
            mem_mib=parse_mem_mib(mem),
            gpus=tuple(Gpu(index=index, type=kind) for index in range(int(gpus or 0))),
        )
        for _ in range(int(count or 1))
    ]


def _shown(words: Words, snapshot: Snapshot) -> list[PendingJob]:
    """Return the jobs of which the starts are to be shown."""
    users = {client.my_name() if user == "me" else user for user in words.listed("jobs")}
    return [job for job in snapshot.pending if "all" in users or job.user in users]


def _figures(variant: Variant, found: Forecast) -> Json:
    waits_s = found.waits_s
    return {
        "name": variant.name,
        "policy": NAMES[variant.policy.backfill],
        "started": len(waits_s),
        "left": len(found.left),
        "wait_mean_s": sum(waits_s) / len(waits_s) if waits_s else 0.0,
        "wait_max_s": max(waits_s, default=0.0),
        "empty_at_s": found.empty_at_s,
        "ended_at_s": found.ended_at_s,
        "utilization": found.utilization,
    }


def _starts(job: PendingJob, found: Sequence[Forecast]) -> Json:
    starts_s = [one.starts_s.get(job.id) for one in found]
    reasons = [one.left[job.id].reason.value if job.id in one.left else None for one in found]
    return {"job_id": job.id, "job": job.display_id, "user": job.user, "starts_s": starts_s, "left": reasons}


def _start_text(job: PendingJob, found: Forecast) -> str:
    start_s = found.starts_s.get(job.id)
    if start_s is None:
        return f"never ({found.left[job.id].reason.value})"
    return "now" if start_s <= found.now_s else date_text(start_s)


def _table(variants: Sequence[Variant], found: Sequence[Forecast]) -> str:
    headers = ("VARIANT", "START", "LEFT", "WAIT_MEAN", "WAIT_MAX", "EMPTY_IN", "ENDED_IN", "UTILIZATION")
    rows = []
    for variant, one in zip(variants, found, strict=True):
        figures = _figures(variant, one)
        spans_s = (
            figures["wait_mean_s"],
            figures["wait_max_s"],
            one.empty_at_s - one.now_s,
            one.ended_at_s - one.now_s,
        )
        used = f"{one.utilization * 100:.1f}%" if one.utilization is not None else "-"
        name = f"{variant.name} ({figures['policy']})" if variant.name == TODAY else variant.name
        rows.append((name, str(figures["started"]), str(figures["left"]), *map(_span, spans_s), used))
    return columns(headers, rows, right=range(1, len(headers)))


def _span(seconds: float) -> str:
    return format_time_s(round(seconds))


# ----- both


def _policies(words: Words, policy: Policy) -> list[Policy]:
    """Return the policies that were named, all else as in `policy`."""
    names = {**KINDS, "fifo": Backfill.NONE}
    found = []
    for name in words.listed("policy"):
        if name not in names:
            raise UsageError(f"cannot follow policy {name[:60]!r}: known are {', '.join(names)}")
        found.append(replace(policy, backfill=names[name]))
    return found


def _world(words: Words, operands: Sequence[str], what: str) -> tuple[Snapshot, Policy]:
    """Return the world of the file that was named, or as the controller sees it now."""
    if words.has("database"):
        return _archived(words.last("database"), operands)
    if len(operands) > 1:
        raise UsageError(
            f"cannot tell which world: hsim {what} takes one file of hctl snapshot, or none for the queue as it is"
        )
    if not operands:
        return world_from_json(client.call("GET", "/v1/snapshot")["world"])
    try:
        text = sys.stdin.read() if operands[0] == "-" else Path(operands[0]).read_text(encoding="utf-8")
        return world_from_json(json.loads(text))
    except OSError as error:
        raise RequestError(f"cannot read {operands[0][:200]!r}: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"cannot read {operands[0][:200]!r}: it is no JSON ({error})") from error


def _archived(database: str, operands: Sequence[str]) -> tuple[Snapshot, Policy]:
    """Return the world in a database file, with the nodes, partitions and policy of the configuration."""
    if operands:
        raise UsageError("cannot tell which world: name a file of hctl snapshot, or --database=FILE, not both")
    from hpcsched.config import load_config  # only this needs the controller's code
    from hpcsched.controller.archived import archived

    return archived(Path(database), load_config(paths.find_config_dir(os.environ, os.getuid())))
