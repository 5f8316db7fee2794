"""hsim: replay a job log under scheduling policies, and plan a snapshot again."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcsched import client, paths
from hpcsched.cli.output import note, print_json, run_command
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean, columns, date_text
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.units import format_time_s
from hpcsched.sched.decisions import Plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.preempt import full_plan
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot, snapshot_from_json
from hpcsched.sim.forecast import NEW_NODES, Forecast, forecast, new_nodes, with_nodes, without_nodes
from hpcsched.sim.policies import KINDS, PLAN, POLICIES, POOL, Simulation, json_of, simulate
from hpcsched.sim.swf import Trace, read_trace

# fmt: off
COMMAND = Command(
    "hsim",
    (
        "run [OPTIONS] TRACE",
        "compare [OPTIONS] TRACE POLICY...",
        "replay [OPTIONS] SNAPSHOT",
        "whatif [OPTIONS] [SNAPSHOT]",
        "whatif [OPTIONS] --database=FILE",
    ),
    "Replay the log of a machine (Standard Workload Format, also gzip'ed) with a policy of the scheduler: run prints how "
    "it went, compare sets policies side by side. replay makes the plan of a snapshot that hctl snapshot saved; whatif lets the "
    "queue as it is, or was then, continue with other nodes and policies: when does which job start?",
    (
        Option("policy", "p", "POLICY",
               "use this policy (run); replay, whatif: also try this policy, or each of a list"),
        Option("engine", "", "ENGINE",
               "what decides (run): pool (default), fast code for one pool of processors, or plan, as in hpcschedd"),
        Option("nodes", "N", "COUNT", "use this many nodes instead of the number in the trace"),
        Option("cpus", "c", "COUNT", "processors of each of these nodes; default: 1"),
        Option("schedule-out", "", "FILE", "write job_id,submit,start,end of every job to this file (run)"),
        Option("plot", "", "BASE", "draw utilization, waits and the first policy's schedule to BASE.png and BASE.svg"),
        Option("add-nodes", "", "NODES",
               "add COUNTxCPUS:MEM[:gpu:TYPE:N], as 2x16:64G:gpu:a100:4, to all partitions (whatif)"),
        Option("remove-node", "", "NODES", "start no more jobs on these nodes (whatif)"),
        Option("database", "", "FILE",
               "the queue of this database, as hctl backup writes, with the configuration as it is (replay, whatif)"),
        Option("predict", help="let jobs run as long as the last jobs of their users, not to their limits (whatif)"),
        Option("jobs", "", "USERS", "list when the jobs of these users start: names, me or all (whatif)"),
        Option("json", help="print the figures as JSON"),
        HELP,
        VERSION,
    ),
    ("Policies: " + "; ".join(f"{name} ({says})" for name, (_, says) in POLICIES.items()) + ".",),
)
# fmt: on


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    what, *rest = words.operands or [""]
    if what == "run":
        return _run(words, rest)
    if what == "compare":
        return _compare(words, rest)
    if what in ("replay", "whatif"):
        return _of_a_snapshot(words, what, rest)
    raise UsageError(
        f"cannot tell what to do: begin with run, compare, replay or whatif, not {what[:60]!r}; see hsim --help"
    )


_ONLY_WHATIF = ("add-nodes", "remove-node", "predict", "jobs")
_OF_A_SNAPSHOT = {"replay": ("policy", "database", "json"), "whatif": ("policy", "database", "json", *_ONLY_WHATIF)}


def _of_a_snapshot(words: Words, what: str, operands: Sequence[str]) -> int:
    for option in words.given:
        if option not in _OF_A_SNAPSHOT[what]:
            raise UsageError(f"cannot use --{option} with {what}: it takes --{', --'.join(_OF_A_SNAPSHOT[what])}")
    if what == "whatif":
        return whatif(words, operands)
    if not operands and not words.has("database"):
        raise UsageError("cannot tell which snapshot: hsim replay wants a file of hctl snapshot; see hsim --help")
    return replay(words, operands)


def _run(words: Words, operands: Sequence[str]) -> int:
    _refuse(words, "run", (*_ONLY_WHATIF, "database"), "whatif")
    if len(operands) != 1:
        raise UsageError("cannot tell which trace: hsim run wants one; see hsim --help")
    policy = _policy(words.last("policy", "default"))
    engine = words.last("engine", POOL)
    if engine not in (POOL, PLAN):
        raise UsageError(f"cannot let {engine[:60]!r} decide: --engine is {POOL} or {PLAN}")
    picture = _picture(words)
    done = simulate(_trace(operands[0]), policy, _procs(words), engine)
    _report_left_out(done)
    if words.has("schedule-out"):
        write_schedule(done, Path(words.last("schedule-out")))
    if picture is not None:
        _draw([done], picture)
    if words.has("json"):
        print_json(_json(done))
    else:
        print("\n".join(f"{name:<26}{value}" for name, value in _json(done).items() if not isinstance(value, list)))
    return 0


def _refuse(words: Words, what: str, options: Sequence[str], whose: str) -> None:
    for option in options:
        if words.has(option):
            raise UsageError(f"cannot use --{option} with {what}: it is for {whose}")


def _compare(words: Words, operands: Sequence[str]) -> int:
    _refuse(words, "compare", (*_ONLY_WHATIF, "database"), "whatif")
    if len(operands) < 2:
        raise UsageError("cannot compare: hsim compare wants a trace and policies; see hsim --help")
    _refuse(words, "compare", ("policy", "engine", "schedule-out"), "run")
    policies, picture = [_policy(name) for name in operands[1:]], _picture(words)
    trace, procs = _trace(operands[0]), _procs(words)
    done = [simulate(trace, policy, procs) for policy in policies]
    _report_left_out(done[0])
    if picture is not None:
        _draw(done, picture)
    if words.has("json"):
        print_json({"trace": trace.name, "policies": [_json(job) for job in done]})
    else:
        print(_table(done), end="")
    return 0


def write_schedule(done: Simulation, path: Path) -> None:
    """Write when each job was submitted, started and ended, in the order of submission.

    Raises RequestError.
    """
    try:
        with path.open("w", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(("job_id", "submit", "start", "end"))
            for job, start_s in zip(done.jobs, done.starts_s, strict=True):
                out.writerow((job.id, job.submit_s, start_s, start_s + job.run_s))
    except OSError as error:
        raise RequestError(f"cannot write the schedule to {str(path)!r}: {error.strerror}") from error


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise UsageError(f"cannot follow policy {name[:60]!r}: known are {', '.join(POLICIES)}")
    return name


def _trace(name: str) -> Trace:
    return read_trace(Path(name))


def _procs(words: Words) -> int:
    """Return the size of the machine that was asked for; 0: none was."""
    if words.has("cpus") and not words.has("nodes"):
        raise UsageError("cannot take --cpus alone: say with --nodes how many nodes have them")
    return int(words.number("nodes", 0, at_least=1)) * int(words.number("cpus", 1, at_least=1))


def _report_left_out(done: Simulation) -> None:
    if done.too_big:
        note("hsim", f"left out {done.too_big} jobs that need more than {done.procs} processors")


def _picture(words: Words) -> Path | None:
    """Return the beginning of the picture's path, None if none is to be drawn."""
    base = Path(words.last("plot"))
    if words.has("plot") and base.name in ("", ".."):
        raise UsageError(f"cannot draw to {str(base)!r}: it names no file; --plot=week makes week.png and week.svg")
    return base if words.has("plot") else None


def _draw(done: Sequence[Simulation], base: Path) -> None:
    from hpcsched.sim.plot import draw  # only this needs matplotlib

    try:
        draw(done, base)
    except OSError as error:
        raise RequestError(f"cannot write the picture to {str(base)!r}: {error.strerror}") from error


def _json(done: Simulation) -> Json:
    return {
        "policy": done.policy,
        "procs": done.procs,
        **json_of(done.metrics),
        "left_out_too_big": done.too_big,
        "simulated_jobs_per_s": round(done.jobs_per_s, 1),
    }


def _table(done: Sequence[Simulation]) -> str:
    headers = ("POLICY", "SLOWDOWN", "WAIT_MEAN", "WAIT_P95", "WAIT_MAX", "UTILIZATION", "FAIRNESS", "JOBS/S")
    rows = [
        (
            job.policy,
            f"{job.metrics.bounded_slowdown_mean:.2f}",
            f"{job.metrics.wait_mean_s:.0f}",
            f"{job.metrics.wait_p95_s:.0f}",
            f"{job.metrics.wait_max_s:.0f}",
            f"{job.metrics.utilization * 100:.2f}%",
            f"{job.metrics.user_fairness_jain:.3f}",
            f"{job.jobs_per_s:.0f}",
        )
        for job in done
    ]
    return columns(headers, rows, right=range(1, 8))


# ----- hsim replay and hsim whatif: a saved or live snapshot, planned again, or continued under other conditions
# A snapshot is a file written by ``hctl snapshot``. If no file is named, it comes from the controller, which it does not change.


NAMES = {kind: name for name, kind in KINDS.items()} | {Backfill.NONE: "fifo"}  # as the configuration calls them
TODAY = "as it is"


class Variant(namedtuple("Variant", "name snapshot policy")):
    """A snapshot that continues under a policy, and its name."""

    __slots__ = ()

    name: str
    snapshot: Snapshot
    policy: Policy


# ----- replay


def replay(words: Words, operands: Sequence[str]) -> int:
    """Print the plan of a saved snapshot, and what would differ with another policy."""
    snapshot, policy = _load_snapshot(words, operands, "replay")
    plans = [(policy, full_plan(snapshot, policy))]
    plans += [(other, full_plan(snapshot, other)) for other in _policies(words, policy)]
    views: list[Json] = [
        {
            "policy": NAMES[plan.backfill],
            "jobs": _planned(made, snapshot),
            "preemptions": [
                {"job_id": item.job_id, "victims": [victim.job_id for victim in item.victims]}
                for item in made.preemptions
            ],
        }
        for plan, made in plans
    ]
    if words.has("json"):
        differences = [_differences(views[0]["jobs"], view["jobs"]) for view in views[1:]]
        print_json({"now_s": snapshot.now_s, "plans": views, "differences": differences})
        return 0
    print(_plan_text(views[0], snapshot), end="")
    for view in views[1:]:
        changed = _differences(views[0]["jobs"], view["jobs"])
        print(f"\nWith policy {view['policy']} {len(changed)} of {len(snapshot.pending)} jobs fare differently:")
        rows = [
            (clean(change["job"]), clean(change["user"]), _fate(change["was"]), _fate(change["is"]))
            for change in changed
        ]
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
        {"job_id": job["job_id"], "job": job["job"], "user": job["user"], "was": job, "is": other}
        for job, other in zip(before, after, strict=True)
        if any(job[key] != other[key] for key in keys)
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
    """Print a forecast of the queue as it is, and with other nodes and policies."""
    snapshot, policy = _load_snapshot(words, operands, "whatif")
    variants = _variants(words, snapshot, policy)
    found = [forecast(variant.snapshot, variant.policy, predict=words.has("predict")) for variant in variants]
    shown = _shown(words, snapshot)
    if words.has("json"):
        jobs = [_starts(job, found) for job in shown]
        pairs = zip(variants, found, strict=True)
        print_json({"now_s": snapshot.now_s, "variants": [_figures(*pair) for pair in pairs], "jobs": jobs})
        return 0
    print(_variants_table(variants, found), end="")
    if shown:
        rows = [
            (clean(job.display_id), clean(job.user), *(_start_text(job, outcome) for outcome in found)) for job in shown
        ]
        print(
            "\n" + columns(("JOBID", "USER", TODAY.upper(), *(variant.name for variant in variants[1:])), rows), end=""
        )
    elif words.has("jobs"):
        print(f"\nNo job of {clean(words.last('jobs')[:60])} waits.")
    return 0


def _variants(words: Words, snapshot: Snapshot, policy: Policy) -> list[Variant]:
    changed, title = snapshot, []
    if words.has("remove-node"):
        names = _known(expand_hostlist(",".join(words.given["remove-node"])), snapshot)
        changed = without_nodes(changed, names)
        title.append(f"-{compress_hostlist(sorted(names))}")
    for text in words.given.get("add-nodes", ()):
        changed = with_nodes(changed, _new_nodes(text, changed))
        title.append(f"+{text}")
    found = [Variant(TODAY, snapshot, policy)]
    if title:
        found.append(Variant(" ".join(title), changed, policy))
    for other in _policies(words, policy):
        found.append(Variant(" ".join([*title, NAMES[other.backfill]]), changed, other))
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
    found = new_nodes(text, {node.name for node in snapshot.nodes})
    if found is None:
        raise UsageError(f"cannot add nodes {text[:60]!r}: write {NEW_NODES}")
    return found


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
    starts_s = [outcome.starts_s.get(job.id) for outcome in found]
    reasons = [outcome.left[job.id].reason.value if job.id in outcome.left else None for outcome in found]
    return {"job_id": job.id, "job": job.display_id, "user": job.user, "starts_s": starts_s, "left": reasons}


def _start_text(job: PendingJob, found: Forecast) -> str:
    start_s = found.starts_s.get(job.id)
    if start_s is None:
        return f"never ({found.left[job.id].reason.value})"
    return "now" if start_s <= found.now_s else date_text(start_s)


def _variants_table(variants: Sequence[Variant], found: Sequence[Forecast]) -> str:
    headers = ("VARIANT", "START", "LEFT", "WAIT_MEAN", "WAIT_MAX", "EMPTY_IN", "ENDED_IN", "UTILIZATION")
    rows = []
    for variant, outcome in zip(variants, found, strict=True):
        figures = _figures(variant, outcome)
        spans_s = (
            figures["wait_mean_s"],
            figures["wait_max_s"],
            outcome.empty_at_s - outcome.now_s,
            outcome.ended_at_s - outcome.now_s,
        )
        used = f"{outcome.utilization * 100:.1f}%" if outcome.utilization is not None else "-"
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


def _load_snapshot(words: Words, operands: Sequence[str], what: str) -> tuple[Snapshot, Policy]:
    """Return the snapshot of the file that was named, or as the controller sees it now."""
    if words.has("database"):
        return _archived(words.last("database"), operands)
    if len(operands) > 1:
        raise UsageError(
            f"cannot tell which snapshot: hsim {what} takes one file of hctl snapshot, or none for the queue as it is"
        )
    if not operands:
        return snapshot_from_json(client.call("GET", "/v1/snapshot")["snapshot"])
    try:
        text = sys.stdin.read() if operands[0] == "-" else Path(operands[0]).read_text(encoding="utf-8")
        return snapshot_from_json(json.loads(text))
    except OSError as error:
        raise RequestError(f"cannot read {operands[0][:200]!r}: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"cannot read {operands[0][:200]!r}: it is not JSON ({error})") from error


def _archived(database: str, operands: Sequence[str]) -> tuple[Snapshot, Policy]:
    """Return the snapshot in a database file, and the policy of the configuration."""
    if operands:
        raise UsageError("cannot tell which snapshot: name a file of hctl snapshot, or --database=FILE, not both")
    from hpcsched.config.load import load_config  # only this needs the controller's code
    from hpcsched.controller.views.history import archived

    return archived(Path(database), load_config(paths.find_config_dir(os.environ, os.getuid())))
