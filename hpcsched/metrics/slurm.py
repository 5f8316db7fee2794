"""The pages of Slurm 25.11's metrics: its names and labels, with our values.

Dashboards and exporters that were made for ``/metrics/{jobs,nodes,partitions,scheduler,jobs-users-accts}``
of slurmctld read ours. Values of things that do not exist here are 0, as they are there while unused.
Backfill is not a pass of its own here, so the ``bf_`` series are 0.

Sources: https://slurm.schedmd.com/metrics.html and slurmctld's statistics, for what each state counts as.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcsched.metrics.exposition import Family, Page, labels_text, number_text
from hpcsched.metrics.series import SeriesKind, label_value

PAGES = ("jobs", "nodes", "partitions", "scheduler", "jobs-users-accts")

# What follows "jobs_" in the names of job counts; "" is "jobs" itself.
JOB_COUNTS = (
    "", "bootfail", "cancelled", "completed", "completing", "configuring", "cpus_alloc", "deadline", "expediting",
    "failed", "fed_requeued", "finished", "gpus_alloc", "hold", "memory_alloc", "node_failed", "nodes_alloc",
    "outofmemory", "pending", "powerup_node", "preempted", "requeued", "resizing", "revoked", "running", "signaling",
    "stageout", "started", "suspended", "timeout",
)  # fmt: skip
PARTITION_JOB_COUNTS = (
    *(name for name in JOB_COUNTS if name != "nodes_alloc"),
    "max_job_nodes", "max_job_nodes_nohold", "min_job_nodes", "min_job_nodes_nohold", "wait_part_node_limit",
)  # fmt: skip
# Counts of nodes: the name at the cluster, and at a partition, where it differs.
NODE_COUNTS: Mapping[str, str] = dict.fromkeys(
    (
        "", "alloc", "blocked", "cloud", "down", "drain", "drained", "draining", "dyn_future", "dyn_normal",
        "external", "fail", "future", "idle", "invalid_reg", "maint", "mixed", "planned", "power_down", "power_up",
        "powered_down", "powering_up", "reboot_issued", "resv", "unknown",
    ),
    "",
) | {"completing": "cg", "noresp": "no_resp", "reboot_req": "reboot_requested"}  # fmt: skip
PARTITION_ONLY = ("powering_down",)
PARTITION_SUMS = (
    "nodes_cpus_alloc", "nodes_cpus_efctv", "nodes_cpus_idle", "nodes_mem_alloc", "nodes_mem_avail", "nodes_mem_free",
    "nodes_mem_tot", "cpus", "gpus",
)  # fmt: skip
NODE_VALUES = (
    "cpus", "cpus_alloc", "cpus_effective", "cpus_idle", "gpus", "gpus_alloc", "memory_alloc_bytes",
    "memory_effective_bytes", "memory_free_bytes", "memory_bytes",
)  # fmt: skip
SCHEDULER = (
    "agent_cnt", "agent_queue_size", "agent_thread_cnt", "bf_depth_mean", "bf_mean_cycle", "bf_mean_table_sz",
    "bf_queue_len_mean", "bf_try_depth_mean", "backfilled_het_jobs", "backfilled_jobs", "bf_active", "bf_cycle_cnt",
    "bf_cycle_last", "bf_cycle_max", "bf_cycle_tot", "bf_depth_tot", "bf_depth_try_tot", "bf_last_depth",
    "bf_last_depth_try", "bf_queue_len", "bf_queue_len_tot", "bf_table_size", "bf_table_size_tot",
    "bf_when_last_cycle", "sdiag_jobs_canceled", "sdiag_jobs_completed", "sdiag_jobs_failed", "sdiag_jobs_pending",
    "sdiag_jobs_running", "sdiag_jobs_started", "sdiag_jobs_submitted", "sdiag_job_states_ts", "last_backfilled_jobs",
    "sdiag_latency", "schedule_cycle_cnt", "schedule_cycle_depth", "schedule_cycle_last", "schedule_cycle_max",
    "schedule_cycle_tot", "schedule_queue_len", "sched_exit_end", "sched_exit_max_depth",
    "sched_exit_max_job_start", "sched_exit_lic", "sched_exit_rpc_cnt", "sched_exit_timeout", "bf_exit_end",
    "bf_exit_max_job_start", "bf_exit_max_job_test", "bf_exit_state_changed", "bf_exit_table_limit",
    "bf_exit_timeout", "sched_mean_cycle", "sched_mean_depth_cycle", "server_thread_cnt", "slurmdbd_queue_size",
    "last_proc_req_start", "sched_stats_timestamp",
)  # fmt: skip
_STATES = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUSPENDED": "suspended",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
    "NODE_FAIL": "node_failed",
    "OUT_OF_MEMORY": "outofmemory",
    "PREEMPTED": "preempted",
    "DEADLINE": "deadline",
    "BOOT_FAIL": "bootfail",
}
# As slurmctld sees our states: its base state, and flags.
_NODE_STATES = {
    "IDLE": ("idle",),
    "MIXED": ("mixed",),
    "ALLOCATED": ("alloc",),
    "DOWN": ("down", "noresp"),
    "UNKNOWN": ("unknown",),
    "DRAINED": ("idle", "drain", "drained"),
    "DRAINING": ("mixed", "draining"),
    "RESERVED": ("idle", "resv"),
    "MAINT": ("idle", "maint"),
    "POWERED_DOWN": ("idle", "powered_down"),
    "POWERING_UP": ("idle", "powering_up"),
    "POWERING_DOWN": ("idle", "powering_down"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What these pages need of a job. `state` is its base state in Slurm's words."""

    state: str
    user: str
    account: str
    partitions: tuple[str, ...]
    is_completing: bool = False
    is_configuring: bool = False
    is_held: bool = False
    is_resizing: bool = False
    nodes_min: int = 0
    nodes_max: int = 0
    cpus: int = 0
    gpus: float = 0
    memory_bytes: int = 0
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """What these pages need of a node. `free_bytes` None: not known."""

    name: str
    state: str
    cpus: int
    cpus_alloc: int
    gpus: int
    gpus_alloc: int
    memory_bytes: int
    memory_alloc_bytes: int
    free_bytes: int | None = None
    is_completing: bool = False


def count_job(found: Counter[str], job: SlurmJob) -> None:
    """Add a job to counts by what follows "jobs_"."""
    base = _STATES.get(job.state, "")
    is_over = base not in ("", "pending", "running", "suspended")
    found[base] += 1
    found[""] += not is_over or job.is_completing
    found["finished"] += is_over
    found["started"] += base != "pending"
    found["completing"] += job.is_completing
    found["configuring"] += job.is_configuring
    found["hold"] += job.is_held
    found["resizing"] += job.is_resizing
    if base in ("running", "suspended"):
        found["cpus_alloc"] += job.cpus
        found["gpus_alloc"] += int(job.gpus)
        found["memory_alloc"] += job.memory_bytes
        found["nodes_alloc"] += job.nodes


def count_waiting(found: Counter[str], job: SlurmJob) -> None:
    """Add to a partition's counts what its waiting jobs ask for."""
    if job.state != "PENDING":
        return
    for name, value in (("max_job_nodes", job.nodes_max), ("min_job_nodes", job.nodes_min)):
        found[name] = max(found[name], value)
        if not job.is_held:
            found[name + "_nohold"] = max(found[name + "_nohold"], value)


def _put(page: Page, name: str, value: float, labels: str = "") -> None:
    words = name.removeprefix("slurm_").replace("_", " ").strip()
    family = Family(name, SeriesKind.GAUGE, f"As slurmctld's: {words}.")
    page.chunk(family, f"{name}{labels} {number_text(value)}\n")


def _name(*parts: str) -> str:
    return "_".join(("slurm", *(part for part in parts if part)))


def jobs_page(counts: Counter[str]) -> Page:
    """Return the page of jobs."""
    page = Page()
    for name in JOB_COUNTS:
        _put(page, _name("jobs", name), counts[name])
    return page


def users_page(users: Mapping[str, Counter[str]], accounts: Mapping[str, Counter[str]]) -> Page:
    """Return the page of jobs by user and by account."""
    page = Page()
    for kind, label, found in (("user", "username", users), ("account", "account", accounts)):
        for name in JOB_COUNTS:
            for whose in sorted(filter(None, found)):
                labels = labels_text((label,), (label_value(whose),))
                _put(page, _name(kind, "jobs", name), found[whose][name], labels)
    return page


def node_values(node: SlurmNode) -> dict[str, int]:
    """Return the values of a node by `NODE_VALUES`; an unknown one is absent."""
    found = {
        "cpus": node.cpus,
        "cpus_alloc": node.cpus_alloc,
        "cpus_effective": node.cpus,
        "cpus_idle": max(0, node.cpus - node.cpus_alloc),
        "gpus": node.gpus,
        "gpus_alloc": node.gpus_alloc,
        "memory_alloc_bytes": node.memory_alloc_bytes,
        "memory_effective_bytes": node.memory_bytes,
        "memory_bytes": node.memory_bytes,
    }
    return found if node.free_bytes is None else found | {"memory_free_bytes": node.free_bytes}


def count_nodes(nodes: Iterable[SlurmNode]) -> Counter[str]:
    """Return counts of nodes by what follows "nodes_"."""
    found: Counter[str] = Counter()
    for node in nodes:
        found[""] += 1
        found.update(_NODE_STATES.get(node.state, ("unknown",)))
        found["completing"] += node.is_completing
    return found


def nodes_page(nodes: Iterable[SlurmNode]) -> Page:
    """Return the page of nodes."""
    page, every = Page(), list(nodes)
    values = [(labels_text(("node",), (label_value(node.name),)), node_values(node)) for node in every]
    for name in NODE_VALUES:
        for labels, found in values:
            if name in found:
                _put(page, _name("node", name), found[name], labels)
    counts = count_nodes(every)
    for name in NODE_COUNTS:
        _put(page, _name("nodes", name), counts[name])
    return page


def partitions_page(jobs: Mapping[str, Counter[str]], nodes: Mapping[str, list[SlurmNode]]) -> Page:
    """Return the page of partitions. Both arguments have all of them by name."""
    page = Page()
    _put(page, _name("partitions"), len(nodes))
    rows: dict[str, list[tuple[str, int]]] = {}
    for partition, theirs in nodes.items():
        labels = labels_text(("partition",), (label_value(partition),))
        values = [node_values(node) for node in theirs]
        counts = count_nodes(theirs)
        sums = {
            "nodes_cpus_alloc": sum(one["cpus_alloc"] for one in values),
            "nodes_cpus_efctv": sum(one["cpus_effective"] for one in values),
            "nodes_cpus_idle": sum(one["cpus_idle"] for one in values),
            "nodes_mem_alloc": sum(one["memory_alloc_bytes"] for one in values),
            "nodes_mem_avail": sum(one["memory_effective_bytes"] for one in values),
            "nodes_mem_free": sum(one.get("memory_free_bytes", 0) for one in values),
            "nodes_mem_tot": sum(one["memory_bytes"] for one in values),
            "cpus": sum(one["cpus"] for one in values),
            "gpus": sum(one["gpus"] for one in values),
        }
        for name in PARTITION_JOB_COUNTS:
            rows.setdefault(_name("partition", "jobs", name), []).append((labels, jobs[partition][name]))
        for name, other in NODE_COUNTS.items():
            rows.setdefault(_name("partition", "nodes", other or name), []).append((labels, counts[name]))
        for name in PARTITION_ONLY:
            rows.setdefault(_name("partition", "nodes", name), []).append((labels, 0))
        for name in PARTITION_SUMS:
            rows.setdefault(_name("partition", name), []).append((labels, sums[name]))
    for name, lines in rows.items():
        for labels, value in lines:
            _put(page, name, value, labels)
    return page


def scheduler_page(values: Mapping[str, float]) -> Page:
    """Return the page of the scheduler; what `values` lacks is 0."""
    page = Page()
    for name in SCHEDULER:
        _put(page, _name(name), int(values.get(name, 0)))
    return page
