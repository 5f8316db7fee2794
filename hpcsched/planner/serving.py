"""The facts of a cluster's nodes as the planner of served models reads them.

Pure: the API's nodes, assessments and links come in, a document for `hserve plan --nodes FILE` goes out. Does not know models:
`hpcserve.plan` plans. Rules:

- A node needs a measured memory bandwidth and a partition that takes the user's jobs; without one it is left out, and a named
  node is an error.
- Free memory is what no job holds, and no more than is free on the node now.
- A run that was busy is used only if there is no other one.
- Whatever is estimated or left out is said in a note.

Sources: `hpcnode.agent.bench` and `hpcnode.agent.link_speed` for what the values are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcsched.errors import NotFoundError, RequestError
from hpcsched.metrics.bench import BenchRun
from hpcsched.metrics.links import LinkRun, last_runs
from hpcsched.model.accounting import Accounting
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.node import NodeState

Json = dict[str, Any]
NO_JOBS = frozenset({NodeState.DOWN, NodeState.UNKNOWN, NodeState.DRAINED, NodeState.DRAINING, NodeState.MAINT})
FP32_PART = 0.4  # of the speed of bf16 kernels
GFLOPS_OF_HASH = 400.0  # of bf16 kernels, for each GB/s of hashes: of CPUs with instructions for bf16


def serving_document(
    views: Sequence[Json], runs: Iterable[BenchRun], links: Iterable[LinkRun], why_not: Mapping[str, str], named: bool
) -> Json:
    """Return the nodes and links of a plan, with notes on what is missing or estimated.

    `why_not`: the nodes that get none of the user's jobs, and why. `named`: the user has named these nodes.

    Raises:
        RequestError: no node, or not every named one, can be used.
    """
    last = best_runs(runs)
    wrong = {view["name"]: why for view in views if (why := why_not.get(view["name"]) or why_unfit(view, last))}
    if wrong and named:
        name, why = next(iter(wrong.items()))
        raise RequestError(f"cannot plan with node {name!r}: {why}; or describe it: --nodes {name}:free=GIB,bw=GB_S")
    good = [view for view in views if view["name"] not in wrong]
    if not good:
        reasons = "; ".join(told_by_reason(wrong)) or "the cluster has none"
        raise RequestError(
            f"cannot plan: no node can be used: {reasons}. Nodes can also be described: --nodes n1:free=GIB,bw=GB_S"
        )
    names = {view["name"] for view in good}
    guessed = [view["name"] for view in good if not matrix_gflops(last[view["name"]])]
    notes = [f"{text}: not considered" for text in told_by_reason(wrong)]
    if guessed:
        notes.append(
            f"the speed of {compress_hostlist(guessed)} in batches is a guess by its CPUs; measure it: "
            f"hpcsched node bench --python=PATH {compress_hostlist(guessed)}"
        )
    if busy := [name for name in sorted(names) if last[name].busy]:
        notes.append(f"{compress_hostlist(busy)} had other work while the memory bandwidth was measured")
    return {
        "nodes": [node_facts(view, last[view["name"]]) for view in good],
        "links": [
            link_facts(run) for run in last_runs(links).values() if names.issuperset(run.pair) and is_usable(run)
        ],
        "notes": notes,
    }


def chosen(views: Sequence[Json], names: Sequence[str]) -> list[Json]:
    """Return the named nodes, or all if none is named. Raises NotFoundError."""
    by_name = {view["name"]: view for view in views}
    for name in names:
        if name not in by_name:
            raise NotFoundError(f"cannot plan with node {name[:60]!r}: there is no node of that name; see hinfo")
    return [by_name[name] for name in dict.fromkeys(names)] or list(views)


def why_no_jobs(views: Iterable[Json], partitions: Iterable[Json], accounting: Accounting, user: str) -> dict[str, str]:
    """Return the nodes on which no job of the user can start, and why."""
    accounts = accounting.accounts_of(user)
    opened = {
        name
        for partition in partitions
        for name in partition["nodes"]
        if partition["up"] and takes_jobs(partition["allow_accounts"], accounting, accounts)
    }
    found = {}
    for view in views:
        takes_none = view["state"] in NO_JOBS
        if takes_none or view["drained"]:  # a node without power may be drained, too
            state = view["state"] if takes_none else NodeState.DRAINED
            found[view["name"]] = f"its state is {state.lower()}"
        elif view["name"] not in opened:
            found[view["name"]] = "no open partition with it takes your jobs"
    return found


def takes_jobs(allowed: Sequence[str], accounting: Accounting, accounts: Sequence[str]) -> bool:
    """Return whether a partition with these allowed accounts takes the user's jobs."""
    return not allowed or any(accounting.is_part_of(account, allowed) for account in accounts)


def why_unfit(view: Json, last: Mapping[str, BenchRun]) -> str:
    """Return why a node cannot be planned with; "" if it can."""
    if view["name"] not in last:
        return "its memory bandwidth is not measured ('hpcsched node bench' measures it)"
    return "" if free_mib(view) > 0 else "jobs hold all of its memory"


def told_by_reason(wrong: Mapping[str, str]) -> list[str]:
    """Return one text for each reason, with the nodes that it is about."""
    by_reason: dict[str, list[str]] = {}
    for name, why in wrong.items():
        by_reason.setdefault(why, []).append(name)
    return [f"{compress_hostlist(names)}: {why}" for why, names in by_reason.items()]


def best_runs(runs: Iterable[BenchRun]) -> dict[str, BenchRun]:
    """Return the last run of each node with its memory, if possible beside no other work."""
    found: dict[str, BenchRun] = {}
    for run in sorted(runs, key=lambda run: (not run.busy, run.at_s)):
        if run.values.get("memory", 0.0) > 0:
            found[run.node] = run
    return found


def free_mib(view: Json) -> int:
    """Return the memory that a job could get on a node."""
    free = int(view["mem_mib"]) - int(view["mem_alloc_mib"])
    now = (view.get("facts") or {}).get("mem_free_mib")
    return max(0, min(free, now) if isinstance(now, int) else free)


def matrix_gflops(run: BenchRun) -> float:
    """Return the measured speed of products of bf16 matrices; 0: not measured."""
    return run.values.get("gemm_bf16", 0.0) or run.values.get("gemm_fp32", 0.0) / FP32_PART


def node_facts(view: Json, run: BenchRun) -> Json:
    """Return a node in the units of `hserve plan --nodes`."""
    gflops = matrix_gflops(run) or GFLOPS_OF_HASH * run.values.get("cpus", 0.0)
    facts = {"name": view["name"], "free": free_mib(view) / 1024, "bw": run.values["memory"], "cores": view["cpus"]}
    return facts | ({"flops": gflops} if gflops > 0 else {})


def is_usable(run: LinkRun) -> bool:
    """Return whether a link was measured, and carries anything."""
    return not run.why and run.mbps > 0 and run.rtt_us > 0


def link_facts(run: LinkRun) -> Json:
    """Return a link in the units of `hserve plan --nodes`: one way, and the slower direction."""
    return {"nodes": list(run.pair), "ms": run.rtt_us / 2000, "gbit": (run.alone_mbps or run.mbps) / 1000}
