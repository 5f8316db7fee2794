"""Find what is wrong with nodes, the head, the queue and running jobs: one table of rules.

Pure. The controller collects the facts. The rules are few on purpose: each tells something that
a person must do. None is about load. `hpcsched.model.alerting` has the table of rules; the limits that a
function gets are those of the table as hpcsched.toml changes them.

Sources: etc/prometheus/alerts.yml has the same rules for clusters with a Prometheus;
`hpcsched.metrics.hardware` and `hpcsched.metrics.findings` judge machines and jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcsched.alerts.state import AlertCondition, Inhibition
from hpcsched.listing.text import date_text
from hpcsched.metrics.findings import Bottleneck, SlowCause
from hpcsched.metrics.hardware import hardware_problems
from hpcsched.model.alerting import CRITICAL, DAY_S, HOUR_S, MINUTE_S, RULES, WARNING, AlertSeverity, RuleSettings
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.node import CHECKS
from hpcsched.model.units import format_time_s

FEW_NODES = 3  # with fewer, "most nodes" says nothing
VERY_SOON_S = 3 * DAY_S  # of a certificate
HEAD_VERY_FULL_MIB = 128
MAX_TEXT = 500
MAX_LABEL = 200
GPU_IDLE_S = 2 * HOUR_S  # JobWastes, if the job has processes

INHIBITIONS = (
    Inhibition("ControllerSilent", (), ()),
    Inhibition("MostNodesDown", ("NodeDown", "NodeSilent", "NodeUnsteady", "ShareHangs", "FileSystemHangs"), ()),
    Inhibition("ShareHangs", ("FileSystemHangs", "JobWastes"), ()),
    Inhibition("NodeDown", ("NodeSilent", "NodeUnsteady", "FileSystemHangs", "GpuDriverHangs"), ("node",)),
)


def condition(
    rule: str, text: str, remedy: str = "", *, severity: AlertSeverity | None = None, **labels: str
) -> AlertCondition:
    """Return a condition of a rule. Texts from outside become one short line."""
    known = RULES[rule]
    return AlertCondition(
        rule=rule,
        labels=tuple((name, one_line(value, MAX_LABEL)) for name, value in labels.items()),
        severity=known.severity if severity is None else severity,
        text=one_line(text, MAX_TEXT),
        remedy=one_line(remedy, MAX_TEXT),
        for_s=known.for_s,
    )


def one_line(text: str, most: int) -> str:
    """Return a text as one line without control and formatting characters, cut to a length.

    Unlike blanks of a terminal these could forge a header, or turn the direction of writing.
    """
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(char if char.isprintable() else " " for char in cut)


# ----- nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedNode:
    """What the controller knows of a node. `hardware`: of `ControllerMetrics.hardware`.

    `down_why`: None: it is connected, or was switched off, or was never connected. `silent_s`: since its
    last sample; None: it is not sampled. `slow`: what its assessment says. `clock_ahead_s`: its clock
    minus that of the head at its last sample, None: not known.
    """

    name: str
    down_why: str | None = None
    drained_by: str = ""  # "": it is not drained
    drained_why: str = ""
    drops: int = 0  # lost connections in the last half hour
    silent_s: float | None = None
    has_jobs: bool = False
    conditions: Mapping[str, float] | None = None
    errors: Mapping[str, float] | None = None
    slow: str = ""
    clock_ahead_s: float | None = None


def of_node(node: WatchedNode, share: str, limits: Mapping[str, float]) -> Iterator[AlertCondition]:
    """Yield what is wrong with a node. `share`: the path of the cluster's share."""
    name = node.name
    if node.down_why is not None:
        jobs = "; jobs hold it" if node.has_jobs else ""
        yield condition("NodeDown", f"{node.down_why}{jobs}", f"hpcsched doctor {name}", node=name)
    if node.drops >= limits["NodeUnsteady"]:
        text = f"the connection was lost {node.drops} times in half an hour"
        yield condition("NodeUnsteady", text, f"hpcsched doctor {name}", node=name)
    if node.drained_by in CHECKS:
        yield condition(
            "NodeDrained", f"drained by {node.drained_by}: {node.drained_why}", f"hctl resume {name}", node=name
        )
    if node.silent_s is not None and node.silent_s > limits["NodeSilent"]:
        text = f"it is connected, and its last sample is {format_time_s(node.silent_s)} old"
        yield condition("NodeSilent", text, f"hpcsched doctor {name}", node=name)
    if node.slow:
        yield condition("NodeSlow", node.slow, f"hpcsched node bench {name}", node=name)
    yield from _of_machine(node, share, limits)


_BY_SERIES = {
    "node_filesystem_answers": "FileSystemHangs",
    "node_filesystem_read_only": "FileSystemReadOnly",
    "node_filesystem_free_inodes": "FileSystemFull",
    "gpu_driver_answers": "GpuDriverHangs",
    "gpu_throttle": "NodeHot",
    "node_throttled_total": "NodeHot",
    "node_ecc_errors_total": "MemoryErrors",
    "gpu_ecc_errors_total": "MemoryErrors",
    "node_oom_kills_total": "OutOfMemory",
    "node_network_errors_total": "NetworkErrors",
    "node_network_carrier_changes_total": "NetworkErrors",
}


def _of_machine(node: WatchedNode, share: str, limits: Mapping[str, float]) -> Iterator[AlertCondition]:
    """Yield what the last samples of a node show."""
    conditions, errors = node.conditions or {}, node.errors or {}
    for problem in hardware_problems(conditions, errors):
        rule = _BY_SERIES.get(problem.series)
        is_share = rule == "FileSystemHangs" and problem.label == share
        if rule is None or is_share:
            continue
        if rule == "NodeHot" and not node.has_jobs:
            continue
        if rule == "OutOfMemory" and errors.get(problem.series, 0) < limits["OutOfMemory"]:
            continue
        if rule == "FileSystemReadOnly" and problem.label == "/":
            continue  # as images of nodes and containers have it
        labels = {"mount": problem.label} if rule.startswith("FileSystem") else {"part": problem.label}
        severity = CRITICAL if problem.is_critical and rule != "FileSystemFull" else WARNING
        yield condition(rule, problem.text, f"hpcsched doctor {node.name}", severity=severity, node=node.name, **labels)
    for key, size in conditions.items():
        series, _, mount = key.partition(":")
        free = conditions.get(f"node_filesystem_free_bytes:{mount}")
        if (
            series == "node_filesystem_size_bytes"
            and size > 0
            and free is not None
            and free < limits["FileSystemFull"] / 100 * size
        ):
            text = f"{mount} has {free / 2**30:.1f} GiB free, {free / size:.1%}"
            yield condition("FileSystemFull", text, "delete files, or move them", node=node.name, mount=mount)


# ----- the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedCluster:
    """What the controller knows of the rest.

    `backup`: age, interval, why the last one failed. `circuits`: name, watts by meters, budget.
    """

    backup: tuple[float | None, float, str] | None = None  # an age of None: there is none yet
    unplanned: int = 0  # waiting jobs of which no plan says anything
    circuits: Sequence[tuple[str, float, float]] = ()


def of_cluster(
    facts: WatchedCluster, nodes: Sequence[WatchedNode], share: str, limits: Mapping[str, float]
) -> Iterator[AlertCondition]:
    """Yield what is wrong with the cluster as a whole."""
    down = [node.name for node in nodes if node.down_why is not None]
    if len(nodes) >= FEW_NODES and 100 * len(down) > limits["MostNodesDown"] * len(nodes):
        text = f"{len(down)} of {len(nodes)} nodes are not connected: {_names(down)}"
        yield condition("MostNodesDown", text, "look at the network and the power of the head: hpcsched doctor")
    yield from _of_clocks(nodes, limits["ClockOff"])
    hanging = [node.name for node in nodes if _hangs(node, share)]
    if hanging:
        text = f"{share} does not answer on {_names(hanging)}"
        yield condition("ShareHangs", text, "look at its server: hpcsched doctor", mount=share)
    if facts.backup is not None:
        age_s, every_s, why = facts.backup
        if age_s is not None and age_s > limits["BackupOld"] * every_s:
            text = f"the newest backup is {format_time_s(age_s)} old" + (f"; the last attempt: {why}" if why else "")
            yield condition("BackupOld", text, "hhealth shows more")
        elif age_s is None and why:
            yield condition("BackupOld", f"there is no backup yet; the last attempt: {why}", "hhealth shows more")
    if facts.unplanned:
        text = f"no plan says what {facts.unplanned} waiting jobs wait for"
        yield condition("QueueStuck", text, "see the log of the controller for a plan that failed")
    for name, watts, budget in facts.circuits:
        if watts > budget:
            text = f"the nodes take {watts:.0f} W, and the budget is {budget:.0f} W"
            remedy = "cancel or suspend a job; peak_watts or gpu_watts of a node may be too low: hctl show power"
            yield condition("PowerOverBudget", text, remedy, circuit=name or "all")


def _of_clocks(nodes: Sequence[WatchedNode], limit_s: float) -> Iterator[AlertCondition]:
    """Yield whose clock is wrong: that of the head if most nodes differ from it, or of nodes.

    So a step of the head's clock is one condition, and not one of each node.
    """
    ahead_s = {node.name: node.clock_ahead_s for node in nodes if node.clock_ahead_s is not None}
    most_s = sorted(ahead_s.values())[len(ahead_s) // 2] if len(ahead_s) >= FEW_NODES else 0.0
    if abs(most_s) > limit_s:
        text = f"the clock of the head is {_apart(-most_s)} those of most nodes"
        yield condition("ClockOff", text, "set the clock of the head: chronyc tracking, timedatectl")
    else:
        most_s = 0.0
    for name, one_s in ahead_s.items():
        if abs(one_s - most_s) > limit_s:
            text = f"its clock is {_apart(one_s - most_s)} that of {'most nodes' if most_s else 'the head'}"
            yield condition("ClockOff", text, "let the node set its clock by NTP: timedatectl", node=name)


def _apart(ahead_s: float) -> str:
    return f"{format_time_s(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"


def _hangs(node: WatchedNode, share: str) -> bool:
    return bool(share) and (node.conditions or {}).get(f"node_filesystem_answers:{share}") == 0


def _names(names: Collection[str]) -> str:
    return compress_hostlist(list(names))


# ----- the head, as the child that tells the alerts sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedHead:
    """What the child sees. None: not known, or there is no such thing."""

    controller_silent_s: float = 0.0
    free_mib: int | None = None
    state_dir: str = ""
    certificate_left_s: float | None = None
    certificate: str = ""


def of_head(facts: WatchedHead, limits: Mapping[str, float]) -> Iterator[AlertCondition]:
    """Yield what is wrong with the head."""
    if facts.controller_silent_s > MINUTE_S:
        text = f"it runs, and has said nothing for {format_time_s(facts.controller_silent_s)}"
        yield condition("ControllerSilent", text, "see its log; hpcsched doctor")
    if facts.free_mib is not None and facts.free_mib < limits["HeadDiskFull"]:
        severity = CRITICAL if facts.free_mib < HEAD_VERY_FULL_MIB else WARNING
        text = f"{facts.state_dir} has {facts.free_mib} MiB free; without room no job can be submitted or started"
        yield condition("HeadDiskFull", text, "delete files on that disk", severity=severity)
    left_s = facts.certificate_left_s
    if left_s is not None and left_s < limits["CertificateExpires"]:
        ends = "has expired" if left_s <= 0 else f"expires in {format_time_s(left_s)}"
        severity = CRITICAL if left_s < VERY_SOON_S else WARNING
        yield condition(
            "CertificateExpires", f"{facts.certificate} {ends}", "renew it, and restart the gateway", severity=severity
        )


# ----- running jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """A running job: whose it is, what its samples say, and when it will end."""

    display_id: str
    key: str  # of the job, for ever
    uid: int
    user: str
    account: str = ""
    mail_to: str = ""
    limit_at_s: float | None = None
    ends_at_s: float | None = None
    bottlenecks: Sequence[Bottleneck] = ()


def of_job(job: WatchedJob, now_s: float) -> Iterator[AlertCondition]:
    """Yield what the user of a job should know; at most one condition of each rule."""
    found: dict[str, tuple[str, str, float]] = {}
    if job.limit_at_s is not None and job.ends_at_s is not None and job.ends_at_s > job.limit_at_s:
        late_s = job.ends_at_s - job.limit_at_s
        text = f"its time limit ends it at {date_text(job.limit_at_s)}; at its present rate it needs {format_time_s(late_s)} more"
        found["JobWillHitLimit"] = text, "ask an administrator for more time, or let it save its state", 0.0
    for bottleneck in job.bottlenecks:
        where = f" on {bottleneck.node}" if bottleneck.node else ""
        text = f"{bottleneck.cause.value}{where}: {bottleneck.text}"
        match bottleneck.cause:
            case SlowCause.MEMORY_LIMIT:
                found.setdefault("JobWillHitLimit", (text, bottleneck.remedy, 0.0))
            case SlowCause.HELD_EMPTY:
                found.setdefault("JobWastes", (text, bottleneck.remedy, RULES["JobWastes"].for_s))
            case SlowCause.GPU_UNUSED:
                found.setdefault("JobWastes", (text, bottleneck.remedy, GPU_IDLE_S))
            case _:
                pass
    for rule, (text, remedy, for_s) in found.items():
        made = condition(rule, text, remedy, job=job.display_id)
        yield _owned(made, job, for_s)


def _owned(made: AlertCondition, job: WatchedJob, for_s: float) -> AlertCondition:
    return replace(
        made,
        for_s=for_s,
        uid=job.uid,
        user=job.user,
        account=job.account,
        mail_to=job.mail_to,
        told_once=f"{job.key}.{made.rule}",
    )


def adjusted(conditions: Iterable[AlertCondition], settings: Iterable[RuleSettings]) -> list[AlertCondition]:
    """Return the conditions as the configuration wants their rules, without those off.

    A condition that must last longer than its rule says, as that of idle GPUs, still does.
    """
    changes = {one.name: one for one in settings}
    return [
        _changed(made, changes[made.rule]) if made.rule in changes else made
        for made in conditions
        if made.rule not in changes or changes[made.rule].enabled
    ]


def _changed(made: AlertCondition, change: RuleSettings) -> AlertCondition:
    severity = made.severity if change.severity is None else AlertSeverity(change.severity)
    for_s = made.for_s if change.for_s is None else change.for_s
    if made.for_s > RULES[made.rule].for_s:
        for_s = max(for_s, made.for_s)
    return replace(made, severity=severity, for_s=for_s)
