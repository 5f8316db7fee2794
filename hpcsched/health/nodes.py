"""Checks of the nodes, from the controller's data and their agents' present facts. Pure.

`view` is one node of the API's ``GET /v1/nodes?probe=1``: its configuration, the state of its link,
and in `facts` the results of hpcnode.agent.probe, with the controller's times of the request and
the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcsched.health.report import Check, Status, above, below
from hpcsched.sched.sentences import plural

View = Mapping[str, Any]

DISK_WARN_MIB, DISK_CRITICAL_MIB = 2048, 256
TMP_WARN_MIB, TMP_CRITICAL_MIB = 1024, 64
MEMORY_TOLERANCE = 0.98  # a kernel update may take a little
CLOCK_WARN_S, CLOCK_CRITICAL_S = 2.0, 60.0
LOAD_WARN = 2.0  # per CPU


def check_node(view: View, now_s: float) -> Iterator[Check]:
    """Yield all checks of one node; those that need its agent only if the agent answers."""
    link = _check_link(view, now_s)
    yield link
    if view.get("launch_failures"):
        yield _check_launches(view)
    facts = view.get("facts")
    if link.status is not Status.OK or not facts:
        return
    yield _check_clock(view, facts)
    yield _check_resources(view, facts)
    yield _check_space(view, "disk", facts, facts.get("root", "its root"), DISK_WARN_MIB, DISK_CRITICAL_MIB)
    yield _check_space(view, "tmp", facts, "/tmp", TMP_WARN_MIB, TMP_CRITICAL_MIB)  # noqa: S108 - only its free space is looked at
    yield _check_load(view, facts)
    yield _check_leftovers(view, facts)
    if "share_error" in view:
        yield _check_share(view)


def _check(view: View, name: str, status: Status, text: str, **numbers: float) -> Check:
    return Check(name=name, status=status, text=text, node=str(view["name"]), numbers=numbers)


def _check_link(view: View, now_s: float) -> Check:
    since_s = max(0.0, now_s - float(view["link_since_s"] or now_s))
    if view["link"] == "down":
        text = f"down for {_duration(since_s)}: {view['link_why']}"
        return _check(view, "link", Status.CRITICAL, text, down_s=since_s)
    if view["link"] != "up":
        return _check(view, "link", Status.UNKNOWN, "not heard of since the controller started")
    if view.get("facts_error"):
        return _check(view, "link", Status.CRITICAL, f"its agent does not answer: {view['facts_error']}")
    if view.get("facts") is None:
        return _check(view, "link", Status.UNKNOWN, "its agent was not asked")
    return _check(view, "link", Status.OK, f"up for {_duration(since_s)}, agent {view['agent_version']}")


def _check_launches(view: View) -> Check:
    count = int(view["launch_failures"])
    jobs = "the last job" if count == 1 else f"the last {count} jobs"
    status = Status.CRITICAL if view["drained"] else Status.WARN
    text = f"{jobs} could not be started here, and could elsewhere: {view['launch_failure']}"
    return _check(view, "launches", status, text, failures=count)


def _check_clock(view: View, facts: Mapping[str, Any]) -> Check:
    asked_s, answered_s = float(facts["asked_at_s"]), float(facts["answered_at_s"])
    ahead_s = float(facts["time_s"]) - (asked_s + answered_s) / 2
    doubt_s = (answered_s - asked_s) / 2
    certain_s = max(0.0, abs(ahead_s) - doubt_s)
    text = f"{abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} the head's (known to {doubt_s:.2f} s)"
    return _check(view, "clock", above(certain_s, CLOCK_WARN_S, CLOCK_CRITICAL_S), text, ahead_s=ahead_s)


def _check_resources(view: View, facts: Mapping[str, Any]) -> Check:
    """Check that the node has the resources that its configuration promises to jobs.

    A node with fewer resources is CRITICAL; a full node is not.
    """
    lacks = []
    if facts["cpus"] < view["cpus"]:
        lacks.append(f"{facts['cpus']} of {plural(view['cpus'], 'cpu')}")
    memory_mib = facts.get("mem_mib", view["mem_mib"])
    if memory_mib < view["mem_mib"] * MEMORY_TOLERANCE:
        lacks.append(f"{memory_mib} MiB memory of {view['mem_mib']}")
    gpus = facts.get("gpus", [])
    if len(gpus) < len(view["gpus"]):
        lacks.append(f"{len(gpus)} of {plural(len(view['gpus']), 'GPU')}")
    free_mib = facts.get("mem_free_mib", 0)
    if lacks:
        return _check(view, "resources", Status.CRITICAL, f"it has only {', '.join(lacks)}", mem_free_mib=free_mib)
    text = f"{plural(facts['cpus'], 'cpu')}, {memory_mib} MiB memory ({free_mib} MiB free), {plural(len(gpus), 'GPU')}"
    return _check(view, "resources", Status.OK, text, mem_free_mib=free_mib)


def _check_space(
    view: View, name: str, facts: Mapping[str, Any], where: str, warn_mib: float, critical_mib: float
) -> Check:
    free_mib = facts.get(f"{name}_free_mib")
    if free_mib is None:
        return _check(view, name, Status.UNKNOWN, f"it does not say how much is free in {where}")
    total_mib = facts.get(f"{name}_total_mib", free_mib)
    # A small disk is not full merely because it is small.
    status = below(free_mib, min(warn_mib, total_mib / 4), min(critical_mib, total_mib / 20))
    return _check(view, name, status, f"{free_mib} MiB free in {where}", free_mib=free_mib)


def _check_load(view: View, facts: Mapping[str, Any]) -> Check:
    load = float(facts["load"][0])
    cpus = max(int(facts["cpus"]), 1)
    text = f"{load:.1f} on {plural(cpus, 'cpu')}, {view['cpus_alloc']} of {view['cpus']} given to jobs"
    return _check(view, "load", above(load / cpus, LOAD_WARN, float("inf")), text, load=load)


def _check_leftovers(view: View, facts: Mapping[str, Any]) -> Check:
    found = facts.get("leftovers", [])
    if not found:
        return _check(view, "leftovers", Status.OK, "no processes of ended jobs", processes=0)
    jobs = sorted({each["job"] for each in found})
    text = f"{len(found)} processes of ended jobs {', '.join(map(str, jobs[:8]))}: pids {_some(found)}"
    return _check(view, "leftovers", Status.WARN, text, processes=len(found))


def _some(found: list[Mapping[str, int]]) -> str:
    pids = [str(each["pid"]) for each in found]
    return ", ".join(pids[:8]) + (", ..." if len(pids) > 8 else "")


def _check_share(view: View) -> Check:
    error = view["share_error"]
    return _check(view, "share", Status.CRITICAL if error else Status.OK, error or "is the head's")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


# ----- which nodes to drain and which to resume, from their checks. Pure
# Rules: a failing node is drained, with its failures as the reason. A drained node is not changed.
# A node that does not answer is not changed either: it is DOWN, and gets no jobs. Only nodes that
# hhealth itself drained are resumed, and only when all their checks are complete and none is worse
# than WARN.


BY = "hhealth"


def to_drain(views: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> dict[str, str]:
    """Return the nodes to drain, each with the reason."""
    found = {}
    for view in views:
        bad = [check for check in checks if check.node == view["name"] and check.status is Status.CRITICAL]
        if bad and view["link"] == "up" and not view["drained"]:
            found[str(view["name"])] = f"{BY}: " + "; ".join(f"{check.name}: {check.text}" for check in bad)
    return found


def to_resume(views: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> list[str]:
    """Return the nodes that hhealth drained and that are healthy again."""
    found = []
    for view in views:
        mine = [check.status for check in checks if check.node == view["name"]]
        well = bool(mine) and all(status in (Status.OK, Status.WARN) for status in mine)
        if view["drained"] and view["drained_by"] == BY and view["link"] == "up" and well:
            found.append(str(view["name"]))
    return found
