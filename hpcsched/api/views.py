"""Build the JSON of jobs, nodes, partitions, reservations and steps, version 1.

The API and `--json` return it, and the commands read it.

Values of a job that only its owner and admins may see (paths, command line, comment, script, environment) are null for other
users. The text of its reason is omitted for them, because it also contains paths: see `reason_detail`.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from hpcsched.auth.authorize import HIDEABLE, Action, Identity, Reach, allows, reach
from hpcsched.config.load import natural_order
from hpcsched.jobscript.patterns import JobFiles, job_files
from hpcsched.jobscript.values import terms_text
from hpcsched.lifecycle.job import (
    OUTPUT_FULL,
    can_do_without,
    cut_at_s,
    is_gathered,
    lease_end_s,
    limit_at_s,
    ran_s,
    refusal_words,
    suspended_s,
    unclaimed_nodes,
)
from hpcsched.listing.jobs import SPECIAL_EXIT, shown_state
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.job import (
    ACTIVE,
    FINAL,
    SHORT_CODES,
    Hold,
    Job,
    JobState,
    RankFailure,
    Reason,
    TrainingStatus,
    exit_words,
)
from hpcsched.model.node import OURSELVES, Link, Node, NodeState, Partition, Power, Share
from hpcsched.model.probation import CHECK, LINK_CHECK
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import JobSpec
from hpcsched.model.units import format_mem, format_time_s
from hpcsched.sched.decisions import Wait
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import StepRecord

VERSION = 1
_UNDECIDED = (
    "it runs from before the database was restored from a backup; an admin decides whether it continues: hctl strays"
)


def training_view(training: TrainingStatus | None) -> dict[str, Any] | None:
    """Return the progress that a training job's program has reported; None: it has not."""
    if training is None:
        return None
    return {
        "at_s": training.at_s,
        "attempt": training.attempt,
        "step": training.step,
        "total_steps": training.total_steps or None,
        "loss": training.loss,
        "samples_per_s": training.samples_per_s or None,
        "steps_per_s": training.steps_per_s or None,
        "ends_at_s": training.ends_at_s,
        "checkpoint_step": training.checkpoint_step or None,
        "checkpoint_at_s": training.checkpoint_at_s,
        "goodput": training.goodput,
        "note": training.note,
        "directory": training.directory,
    }


def failure_view(failure: RankFailure) -> dict[str, Any]:
    """Return the failure of a rank, as reported by the rank."""
    return {
        "rank": failure.rank,
        "ranks": failure.ranks,
        "node": failure.node,
        "at_s": failure.at_s,
        "echo": failure.echo,
        "text": failure.text,
    }


def reason_detail(job: Job, identity: Identity) -> str:
    """Return the recorded text of the job's reason, "" for other users.

    Nodes and users put paths into it.
    """
    return job.reason_detail if allows(identity, Action.VIEW_DETAILS, job) else ""


def _why_pending(job: Job, cluster: ClusterState, identity: Identity) -> tuple[Reason, str, float | None]:
    wait = cluster.waits.get(job.id)
    if wait is not None:
        again = wait.reason is Reason.BEGIN_TIME and job.restarts
        detail = _queued_again(job, identity) if again else wait_detail(wait, identity)
        if wait.reason is Reason.HELD_ADMIN and job.restarts and (before := reason_detail(job, identity)):
            detail += f" (attempt {job.attempt - 1}: {before})"
        if job.refusals and allows(identity, Action.VIEW_DETAILS, job):
            detail += f"; it could not be started {refused_on(job)}"
        return wait.reason, detail, wait.expected_start_s
    if job.hold is not Hold.NONE:
        return (Reason.HELD_ADMIN if job.hold is Hold.ADMIN else Reason.HELD_USER), "the job is held", None
    return Reason.NONE, "", None


def sees_everything(identity: Identity) -> bool:
    """Return whether [privacy] hides nothing from the identity."""
    return all(reach(identity, action) is Reach.ALL for action in HIDEABLE.values())


def wait_detail(wait: Wait, identity: Identity) -> str:
    """Return why a job waits in words, without nodes and reservations that are private."""
    names_them = wait.reason in (Reason.NODES_UNAVAILABLE, Reason.RESERVATION)
    if names_them and not sees_everything(identity):
        return "nodes that it needs are not available" if wait.reason is Reason.NODES_UNAVAILABLE else "reserved"
    return wait.detail


def why_waiting(job: Job, cluster: ClusterState, identity: Identity, now_s: float) -> tuple[Reason, str, float | None]:
    """Return the reason, a sentence for `identity`, and the expected start of a waiting job.

    Also for an active job that has a problem, for example a lost node.
    """
    if job.state is JobState.PENDING:
        return _why_pending(job, cluster, identity)
    if job.state in ACTIVE:
        awaited = [name for name in job.held_nodes if cluster.nodes[name].power.is_off]
        if awaited and job.state is not JobState.COMPLETING:
            return job.reason, _awaiting(cluster.nodes[awaited[0]], awaited, cluster, now_s), None
        lost = [name for name in job.held_nodes if cluster.nodes[name].link is Link.DOWN]
        if lost:
            return Reason.NODE_LOST, _limbo(job, lost, cluster, now_s), None
        if job.state is JobState.CONFIGURING:
            return job.reason, _starting(job), None
        if job.state is JobState.SUSPENDED:
            return job.reason, _standing_still(job), None
        if any(cluster.job_of_former(launch.token) is job for launch in cluster.undecided_launches.values()):
            return job.reason, _UNDECIDED, None
    return job.reason, reason_detail(job, identity), None


def in_a_sentence(
    job: Job, cluster: ClusterState, identity: Identity, reason: Reason, detail: str, now_s: float
) -> str:
    """Return a sentence about the job; `reason` and `detail` are those of `why_waiting`."""
    if job.state is JobState.COMPLETING and reason is not Reason.NODE_LOST:
        return f"job {job.display_id} {_ending(job, cluster, identity)}"
    if job.state in (JobState.CONFIGURING, JobState.SUSPENDED) and detail and reason is not Reason.NODE_LOST:
        return f"job {job.display_id} {detail}"
    asked = f", and was asked to make do with {compress_hostlist(job.wanted_nodes)}" if job.wanted_nodes else ""
    if detail == OUTPUT_FULL:
        return f"job {job.display_id} is {job.state}{how_it_ended(job)}; {OUTPUT_FULL}"
    return detail or f"job {job.display_id} is {job.state}{_over_limit(job, cluster, now_s)}{how_it_ended(job)}{asked}"


def _over_limit(job: Job, cluster: ClusterState, now_s: float) -> str:
    """Return by how much a running job is over its time limit, and when it is killed.

    "" if it is not over its limit.
    """
    limit_s = limit_at_s(job) if job.state is JobState.RUNNING else None
    if limit_s is None or now_s < limit_s:
        return ""
    left_s = math.ceil(limit_s + cluster.config.controller.kill_wait_s - now_s)
    killed = f"is killed in {format_time_s(left_s)}" if left_s > 0 else "is being killed"
    return f", over its time limit by {format_time_s(int(now_s - limit_s))}: it has been told to end, and {killed}"


def how_it_ended(job: Job) -> str:
    """Return the end of a sentence with a job's exit numbers; "" if its state says it all."""
    if job.reason is Reason.LAUNCH_FAILED:
        return ": it could not be started"
    if job.state is JobState.TIMEOUT:
        return f": its time limit of {format_time_s(job.time_limit_s)} was reached"
    if job.state is JobState.OUT_OF_MEMORY:
        given = ", ".join(sorted({format_mem(share.mem_mib) for share in job.shares}))
        return f": it took more memory than the {given} that it was given on each node; see --mem, and MaxRSS in hacct"
    if job.state is not JobState.FAILED or job.exit is None:
        return ""
    words = exit_words(job.exit.code, job.exit.signal)
    if job.exit.signal:
        return f": its script was {words}"
    if not job.spec.has_script:
        return ""
    return f": its script ended with exit code {job.exit.code}" + (f" ({words})" if words else "")


def resumes_words(job: Job, training: TrainingStatus | None) -> str:
    """Return a sentence about where another attempt of an ended training job resumes.

    "" if that is not known, or the training is complete.
    """
    done = job.state not in FINAL or job.state is JobState.COMPLETED
    if done or training is None or not training.checkpoint_step:
        return ""
    return f"Queued again it resumes from step {training.checkpoint_step}: hctl requeue {job.display_id}"


def refused_on(job: Job) -> str:
    """Return the end of a sentence that says which nodes could not start the job, and why."""
    words = refusal_words(job.refusals)
    return f"on {job.refusals[0].node}: {words}" if len(job.refusals) == 1 else words


def _queued_again(job: Job, identity: Identity) -> str:
    detail = reason_detail(job, identity)
    why = f" ({detail})" if detail else ""
    at = time.strftime("%H:%M:%S", time.localtime(job.not_before_s))
    return f"was queued again after its attempt {job.attempt - 1}{why}, and may start from {at} on"


def _starting(job: Job) -> str:
    unclaimed = unclaimed_nodes(job)
    if unclaimed:
        return f"waits for {compress_hostlist(unclaimed)} to take its part of the job"
    return f"is being started on {job.shares[0].node}" if job.spec.has_script else ""


def _awaiting(node: Node, awaited: Sequence[NodeName], cluster: ClusterState, now_s: float) -> str:
    """Return which nodes of a job are being switched on, and what happens if they stay away."""
    limit = format_time_s(cluster.config.power.resume_timeout)
    since = format_time_s(max(0.0, now_s - node.power_since_s))
    began = f", for {since} now" if node.power is Power.POWERING_UP else ""
    return (
        f"waits for {compress_hostlist(awaited)} to come back: switched off to save power, and being switched on{began}. If that "
        f"takes longer than {limit}, it starts elsewhere"
    )


def _standing_still(job: Job) -> str:
    if job.suspended_for is None:
        return "is suspended until somebody resumes it: hctl resume " + job.display_id
    return f"is suspended: job {job.suspended_for} has its CPUs; it continues when they are free"


def _ending(job: Job, cluster: ClusterState, identity: Identity) -> str:
    detail = reason_detail(job, identity)
    why = f" ({detail})" if detail else ""
    unfit = [node for name in job.held_nodes if (node := cluster.nodes[name]).drained and node.drained_by == OURSELVES]
    hindered = f"; node {unfit[0].name}: {unfit[0].drained_why}" if unfit else ""
    return f"{_fate(job)}{why} when nothing of it is left on {compress_hostlist(job.held_nodes)}{hindered}"


def _fate(job: Job) -> str:
    return "goes back to the queue" if job.requeue_wanted else f"ends as {job.outcome}"


def _limbo(job: Job, lost: list[NodeName], cluster: ClusterState, now_s: float) -> str:
    node = cluster.nodes[lost[0]]
    silent = f"node {node.name} does not answer ({node.link_why})"
    if not is_gathered(job):
        return f"{silent}; the job has not been started anywhere, and goes back to the queue if the node stays away"
    proof = "has been rebooted"
    lease_s = lease_end_s(job)
    if lease_s is not None and node.name in cluster.silent_since_s and not cluster.is_former(job):
        left_s = max(0.0, cluster.silent_since_s[node.name] + lease_s - now_s)
        proof += f", in {math.ceil(left_s)} s when the job's lease there has run out for certain"
    proof += f", or an admin says that it is gone: hctl fence {node.name}"
    if job.state is JobState.COMPLETING:
        return (
            f"{silent}; something of the job may still run there. The job {_fate(job)} when the node answers, {proof}"
        )
    fate = "goes back to the queue" if cluster.requeues(job) else "ends as NODE_FAIL"
    if can_do_without(job, node.name):
        fate = "continues without the node"
    return (
        f"{silent}; the job may still run there, and continues when the node answers. It {fate} when the node {proof}"
    )


def node_state(node: Node, cpus_alloc: int, reserved: Reservation | None = None) -> NodeState:
    """Return a node's state in sinfo's terms; `reserved`: its present reservation."""
    if node.power is not Power.ON:
        return NodeState[node.power.name]
    if node.drained:  # as in Slurm, also for a node that is down: it does not return by itself
        return NodeState.DRAINING if cpus_alloc else NodeState.DRAINED
    if node.link is Link.DOWN:
        return NodeState.DOWN
    if node.link is Link.UNKNOWN:
        return NodeState.UNKNOWN
    if not cpus_alloc:
        if reserved is not None:
            return NodeState.MAINT if reserved.is_maintenance else NodeState.RESERVED
        return NodeState.IDLE
    return NodeState.ALLOCATED if cpus_alloc >= node.spec.cpus else NodeState.MIXED


def visible_nodes(cluster: ClusterState, identity: Identity) -> set[NodeName]:
    """Return the nodes that the user may see: all, or those that jobs of their own hold."""
    if reach(identity, Action.VIEW_NODES) is Reach.ALL:
        return set(cluster.nodes)
    mine = (job for job in cluster.active_jobs() if allows(identity, Action.VIEW_NODES, job))
    return {node for job in mine for node in job.held_nodes}


def node_views(cluster: ClusterState, now_s: float) -> list[dict[str, Any]]:
    """Return all nodes, with the allocated resources and the reservation of each."""
    active = sorted(
        (reservation for reservation in cluster.reservations.values() if reservation.is_active(now_s)),
        key=lambda reservation: reservation.is_maintenance,
    )
    reserved = {
        name: reservation for reservation in active for name in reservation.nodes
    }  # maintenance overrides the others
    shares: dict[str, list[tuple[int, Share]]] = {}
    for job in cluster.active_jobs():
        for share in job.holding:
            shares.setdefault(share.node, []).append((job.id, share))
    return [
        _node_view(node, shares.get(node.name, []), cluster, reserved.get(node.name))
        for node in sorted(cluster.open_nodes(), key=lambda node: natural_order(node.name))
    ]


def _returns_at_s(node: Node, cluster: ClusterState) -> float | None:
    """Return when a node that a check has drained returns if it stays well."""
    hold_s = cluster.config.controller.health_hold
    if node.drained and node.drained_by == LINK_CHECK:
        return node.probation.rejoins_at_s(hold_s)
    return node.probation.returns_at_s(hold_s) if node.drained and node.drained_by == CHECK else None


def _why_drained(node: Node, cluster: ClusterState) -> str:
    returns_at_s = _returns_at_s(node, cluster)
    if returns_at_s is None:
        return node.drained_why
    at = time.strftime("%H:%M", time.localtime(returns_at_s))
    return f"{node.drained_why}; returns at {at} if it stays well (hctl resume {node.name}: now)"


def _node_view(node: Node, shares: list[Any], cluster: ClusterState, reserved: Reservation | None) -> dict[str, Any]:
    cpus_alloc = sum(share.cpus for _, share in shares)
    return {
        "name": node.name,
        "state": node_state(node, cpus_alloc, reserved).value,
        "reservation": reserved.name if reserved is not None else "",
        "link": node.link.value,
        "link_since_s": node.link_since_s,
        "link_why": node.link_why,
        "drained": node.drained,
        "drained_why": _why_drained(node, cluster),
        "drained_by": node.drained_by,
        "returns_at_s": _returns_at_s(node, cluster),
        "drained_at_s": node.drained_at_s,
        "power": node.power.value,
        "power_since_s": node.power_since_s or None,
        "power_by": node.power_by,
        "power_why": node.power_why,
        "launch_failures": len(node.launch_failures),
        "launch_failure": node.launch_failures[-1].why if node.launch_failures else "",
        "added_at_s": node.spec.added,
        "formerly": list(node.spec.formerly),
        "host": node.spec.host,
        "port": node.spec.port,
        "cpus": node.spec.cpus,
        "cpus_alloc": cpus_alloc,
        "mem_mib": node.spec.mem_mib,
        "mem_alloc_mib": sum(share.mem_mib for _, share in shares),
        "gpus": [
            {"index": gpu.index, "type": gpu.type, "shards": gpu.shards, "device": gpu.device} for gpu in node.spec.gpus
        ],
        "gpus_alloc": len({index for _, share in shares for index in share.gpus}),
        "shards_alloc": sum(share.shards for _, share in shares),
        "features": list(node.features),
        "partitions": [p.name for p in cluster.partitions.values() if node.name in p.nodes],
        "jobs": [job_id for job_id, _ in shares],
        "boot_id": node.boot_id,
        "agent_version": node.agent_version,
        "weight": node.spec.weight,
        "switch": node.spec.switch,
        "speed": node.speed,
        "link_mbps": node.spec.link_mbps,
        "tmp_mib": node.spec.tmp_mib,
        "abilities": [ability._asdict() for ability in node.abilities],
        "not_enforced": [ability.word for ability in node.not_enforced(cluster.config.controller.confine)],
        "facts": None,
    }


def reservation_view(reservation: Reservation, cluster: ClusterState, now_s: float) -> dict[str, Any]:
    """Return a reservation, with the jobs that use it."""
    return {
        "name": reservation.name,
        "state": "ACTIVE" if reservation.is_active(now_s) else "INACTIVE",
        "start_s": reservation.start_s,
        "end_s": reservation.end_s,
        "duration_s": reservation.duration_s,
        "nodes": list(reservation.nodes),
        "node_list": compress_hostlist(reservation.nodes),
        "cpus": sum(cluster.nodes[name].spec.cpus for name in reservation.nodes if name in cluster.nodes),
        "node_count": reservation.node_count,
        "features": reservation.features,
        "partition": reservation.partition,
        "users": list(reservation.users),
        "accounts": list(reservation.accounts),
        "flags": [flag.value for flag in reservation.flags],
        "made_by": reservation.made_by,
        "made_at_s": reservation.made_at_s,
        "jobs": [job.id for job in cluster.using(reservation.name)],
    }


def partition_views(cluster: ClusterState, nodes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all partitions, with those of the `nodes` that are theirs."""
    by_name = {view["name"]: view for view in nodes}
    return [_partition_view(partition, by_name) for partition in cluster.partitions.values()]


def _partition_view(partition: Partition, nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    mine = [nodes[name] for name in partition.nodes if name in nodes]
    return {
        "name": partition.name,
        "default": partition.default,
        "up": partition.state.starts_jobs,
        "state": partition.state.value,
        "nodes": [node["name"] for node in mine],
        "node_list": compress_hostlist(node["name"] for node in mine),
        "max_time_s": partition.max_time_s,
        "default_time_s": partition.default_time_s,
        "priority_tier": partition.priority_tier,
        "priority_job_factor": partition.priority_job_factor,
        "allow_accounts": list(partition.allow_accounts),
        "allow_qos": list(partition.allow_qos),
        "state_counts": dict(Counter(node["state"] for node in mine)),
        "cpus": sum(node["cpus"] for node in mine),
        "cpus_alloc": sum(node["cpus_alloc"] for node in mine),
    }


def step_view(step: StepRecord) -> dict[str, Any]:
    """Return a step as `hacct` shows it."""
    return {
        "step": step.step,
        "attempt": step.attempt,
        "name": step.name,
        "nodes": list(step.nodes),
        "ntasks": step.ntasks,
        "state": step.state,
        "started_at_s": step.started_at_s,
        "ended_at_s": step.ended_at_s,
        "exit_code": step.exit_code,
        "exit_signal": step.exit_signal,
        "cpu_user_s": step.cpu_user_s,
        "cpu_system_s": step.cpu_system_s,
        "max_rss_kib": step.max_rss_kib,
        "disk_read_bytes": step.disk_read_bytes,
        "disk_write_bytes": step.disk_write_bytes,
    }


# ----- jobs: each value, and its source in the cluster state
# The queue is requested often and shows few values of each job. `JobView` therefore builds each value separately.


# Values of an answer contain no reference cycles, so the encoder need not check for them.
json_text = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def jobs_text(now_s: float, jobs: Iterable[str], next_cursor: str = "") -> bytes:
    """Return the answer with these jobs, each already JSON.

    `next_cursor`: "" if there are no more.
    """
    more = f',"next_cursor":{json_text(next_cursor)}' if next_cursor else ""
    return f'{{"version":{VERSION},"now_s":{json_text(now_s)},"jobs":[{",".join(jobs)}]{more}}}'.encode()


LEAST_PRIORITY = 1  # of a job before its first scheduling pass: 0 means held


class JobView(dict[str, Any]):
    """A job as `identity` may see it; each value is built on first access and kept."""

    __slots__ = ("_files", "_why", "cluster", "identity", "job", "now_s", "shares", "shows_details")

    def __init__(self, job: Job, cluster: ClusterState, identity: Identity, now_s: float) -> None:
        self.job = job
        self.cluster = cluster
        self.identity = identity
        self.shows_details = allows(identity, Action.VIEW_DETAILS, job)
        self.now_s = now_s
        # The job's present or last allocation by node; empty while it waits.
        self.shares: tuple[Share, ...] = job.shares if job.state is not JobState.PENDING else ()
        self._files: JobFiles | None = None
        self._why: tuple[Reason, str, float | None] | None = None

    def __missing__(self, name: str) -> Any:
        made = self[name] = VALUES[name](self)
        return made

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, built if needed.

        For a name that is not a job's value: the value that was set, or `default`.
        """
        return self[name] if name in VALUES else super().get(name, default)

    @property
    def why(self) -> tuple[Reason, str, float | None]:
        """Return the reason, a sentence for users, and the expected start."""
        if self._why is None:
            self._why = why_waiting(self.job, self.cluster, self.identity, self.now_s)
        return self._why

    @property
    def files(self) -> JobFiles:
        """Return the paths of input and output."""
        if self._files is None:
            self._files = job_files(self.job)
        return self._files


def job_view(
    job: Job, cluster: ClusterState, identity: Identity, now_s: float, *, whole: bool = False, script: str | None = None
) -> dict[str, Any]:
    """Return the job as `identity` may see it.

    `whole` adds its environment, its `script` (None: deleted) and its signed request.
    """
    view = JobView(job, cluster, identity, now_s)
    made = _ALL.copy()
    made.update(zip(_PATHS, _fields_of(view), strict=True))
    for name, value in _MADE.items():
        made[name] = value(view)
    if whole and allows(identity, Action.VIEW_DETAILS, job):
        made |= {"script": script, "script_args": list(job.spec.script_args), "env": dict(job.spec.env)}
        made |= {"signed": job.spec.signed} if job.spec.signed else {}
    return made


_Value = Callable[[JobView], Any]


def _plains(*names: str) -> dict[str, str]:
    return {name: f"job.{name}" for name in names}


def _askeds(*names: str) -> dict[str, str]:
    return {name: f"job.spec.{name}" for name in names}


def _private(value: _Value) -> _Value:
    """Return `value` for the owner and admins only."""
    return lambda view: value(view) if view.shows_details else None


def _unless_waiting(name: str) -> _Value:
    """Return a time of the attempt; a waiting job has none."""
    return lambda view: None if view.job.state is JobState.PENDING else getattr(view.job, name)


# Source of each value of a `JobView`: the attribute's path, or the function that builds it.
_SOURCES: dict[str, str | _Value] = {
    **_plains("array_job_id", "array_task_id"),
    "id": "job.number",
    "het_job_id": lambda view: view.job.id if view.job.component is not None else None,
    "het_offset": "job.component",
    "het_job_ids": lambda view: (
        f"{view.job.id}-{view.job.id + len(view.job.spec.components)}" if view.job.component is not None else None
    ),
    "array_limit": lambda view: view.job.array_limit if view.job.spec.array else None,
    "display_id": lambda view: view.job.display_id,
    **_askeds("name"),
    **_plains("user", "uid", "account", "partition", "qos"),
    "licenses": lambda view: dict(view.job.spec.licenses),
    "state": lambda view: view.job.state.value,
    "state_short": lambda view: "SE" if shown_state(view) == SPECIAL_EXIT else SHORT_CODES[view.job.state],
    "reason": lambda view: view.why[0].value,
    "reason_detail": lambda view: view.why[1],
    "hold": lambda view: view.job.hold.value,
    "priority": lambda view: _priority(view.job, view.cluster),
    **_plains("nice", "site", "attempt", "restarts", "submitted_at_s", "eligible_at_s"),
    **_plains("accrued_from_s", "not_before_s"),
    "expected_start_s": lambda view: view.why[2],
    **_plains("allocated_at_s"),
    "started_at_s": _unless_waiting("started_at_s"),
    "ended_at_s": _unless_waiting("ended_at_s"),
    "elapsed_s": lambda view: elapsed_s(view.job, view.now_s),
    "suspended_s": lambda view: suspended_s(view.job, view.now_s),
    **_plains("suspended_for"),
    "elastic": lambda view: _elastic(view.job.spec),
    "wanted_nodes": lambda view: list(view.job.wanted_nodes),
    **_plains("preempted_by", "time_min_s"),
    "time_limit_s": lambda view: _time_limit_s(view.job),
    "cut_at_s": lambda view: _cut_at_s(view),
    "nodes": lambda view: [share.node for share in view.shares],
    "node_list": lambda view: compress_hostlist(view["nodes"]) if view.shares else "",
    "num_nodes": lambda view: len(view.shares) or view.job.spec.nodes_min,
    "num_cpus": lambda view: sum(share.cpus for share in view.shares) if view.shares else asked_cpus(view.job),
    "num_tasks": lambda view: sum(share.tasks for share in view.shares) if view.shares else asked_tasks(view.job),
    **_askeds("cpus_per_task", "ntasks_per_node"),
    "mem_mib": lambda view: (
        sum(share.mem_mib for share in view.shares) if view.shares else view.job.spec.mem_per_node_mib
    ),
    "gpus": lambda view: _gpus(view),
    "shards": lambda view: sum(share.shards for share in view.shares) if view.shares else asked_shards(view.job),
    "shares": lambda view: [_share(share) | _not_enforced(share, view.cluster) for share in view.shares],
    "exit_code": lambda view: view.job.exit.code if view.job.exit else None,
    "exit_signal": lambda view: view.job.exit.signal if view.job.exit else None,
    **_plains("ended_by_uid"),
    "charged": lambda view: {
        "cpu_s": view.job.charged_cpu_s,
        "mem_mib_s": view.job.charged_mem_mib_s,
        "gpu_s": view.job.charged_gpu_s,
    },
    "requeue": lambda view: (
        view.job.spec.requeue if view.job.spec.requeue is not None else view.cluster.config.controller.requeue
    ),
    **_askeds("exclusive", "constraint", "prefer", "switches", "contiguous"),
    "hints": lambda view: list(view.job.spec.hints),
    "dependency": lambda view: _dependency(view.job),
    **_plains("deadline_at_s", "reservation"),
    **_askeds("cheap_by_s", "gpu_power"),
    **_askeds("mincpus", "tmp_mib", "mem_per_cpu_mib"),
    "asked_nodes": lambda view: list(view.job.spec.nodelist),
    "excluded_nodes": lambda view: list(view.job.spec.exclude),
    **_askeds("submit_host"),
    "priority_tier": lambda view: _priority_tier(view),
    "work_dir": _private(lambda view: view.job.spec.work_dir),
    "stdout": _private(lambda view: view.files.stdout),
    "stderr": _private(lambda view: view.files.stderr),
    "stdin": _private(lambda view: view.files.stdin),
    "submit_line": _private(lambda view: view.job.spec.submit_line),
    "comment": _private(lambda view: view.job.spec.comment),
    "command": _private(lambda view: _command(view.job.spec)),
    "use": lambda view: None if (use := view.cluster.live_use(view.job)) is None else asdict(use),
    "training": _private(lambda view: training_view(view.cluster.training.get(view.job.id))),
}


VALUES: dict[str, _Value] = {
    name: attrgetter(source) if isinstance(source, str) else source for name, source in _SOURCES.items()
}
# For tens of thousands of jobs: values that are plain attributes are fetched by one call for each
# job.
_PATHS = {name: source for name, source in _SOURCES.items() if isinstance(source, str)}
_MADE = {name: source for name, source in _SOURCES.items() if not isinstance(source, str)}
_ALL: dict[str, Any] = dict.fromkeys(_SOURCES)
_fields_of = attrgetter(*_PATHS.values())


def _not_enforced(share: Share, cluster: ClusterState) -> dict[str, Any]:
    """Return what the share's node cannot keep the job to."""
    node = cluster.nodes.get(share.node)
    missing = node.not_enforced(cluster.config.controller.confine) if node is not None else ()
    return {"not_enforced": [ability.word for ability in missing]}


def _share(share: Share) -> dict[str, Any]:
    return {
        "node": share.node,
        "cpus": share.cpus,
        "mem_mib": share.mem_mib,
        "gpus": list(share.gpus),
        "tasks": share.tasks,
        "shards": share.shards,
    }


def _elastic(spec: JobSpec) -> list[int] | None:
    return [spec.nodes_min, spec.nodes_max or spec.nodes_min] if spec.elastic else None


def _cut_at_s(view: JobView) -> float | None:
    job = view.job
    return cut_at_s(job, view.cluster.reservations.get(job.reservation)) if job.state in ACTIVE else None


def _gpus(view: JobView) -> int:
    if view.shares:
        return sum(len(share.gpus) for share in view.shares if not share.shards)
    return asked_gpus(view.job)


def _dependency(job: Job) -> str:
    return terms_text(job.dependency, any_one=job.dependency_any) if job.dependency else ""


def _priority_tier(view: JobView) -> int | None:
    partitions = view.cluster.partitions
    only = partitions.get(view.job.partition)
    if only is not None:
        return only.priority_tier
    names = view.job.partition.split(",")
    return max((partitions[name].priority_tier for name in names if name in partitions), default=None)


def _command(spec: JobSpec) -> str | None:
    """Return the script's path and its arguments; None if it was not in a file.

    A job of hrun has its program as its name.
    """
    program = spec.script_path or (spec.name if not spec.has_script else "")
    return " ".join((program, *spec.script_args)) if program else None


def asked_tasks(job: Job) -> int:
    """Return the minimum number of tasks of the job."""
    if job.spec.ntasks is not None:
        return job.spec.ntasks
    return job.spec.nodes_min * (job.spec.ntasks_per_node or 1)


def asked_cpus(job: Job) -> int:
    """Return the minimum number of CPUs of the job."""
    tasks = job.spec.nodes_min if job.spec.overcommit else asked_tasks(job)
    return tasks * job.spec.cpus_per_task


def asked_gpus(job: Job) -> int:
    """Return the minimum number of GPUs of the job."""
    spec = job.spec
    if not (spec.gpus_total or spec.gpus_per_node or spec.gpus_per_task):
        return 0
    total = sum(request.count for request in spec.gpus_total)
    per_node = sum(request.count for request in spec.gpus_per_node) * spec.nodes_min
    per_task = sum(request.count for request in spec.gpus_per_task) * asked_tasks(job)
    return max(total, per_node, per_task)


def asked_shards(job: Job) -> int:
    """Return the minimum number of GPU shards of the job."""
    asked = job.spec.shards_per_node
    return sum(request.count for request in asked) * job.spec.nodes_min if asked else 0


def elapsed_s(job: Job, now_s: float) -> float:
    """Return the run time of the present or last attempt, without time in suspension."""
    if job.state is JobState.PENDING:
        return 0.0
    return ran_s(job, job.ended_at_s if job.ended_at_s is not None and job.state not in ACTIVE else now_s)


def _time_limit_s(job: Job) -> int | None:
    """Return the job's time limit; without one, the time until its deadline, if any.

    For a waiting job this counts, as in Slurm, from its submission or its begin time.
    """
    if job.deadline_at_s is None or job.spec.time_limit_s is not None:
        return job.time_limit_s
    from_s = max(job.submitted_at_s, job.spec.begin_at_s or 0.0)
    if job.state is not JobState.PENDING and job.started_at_s is not None:
        from_s = job.started_at_s
    left_s = max(1, round(job.deadline_at_s - from_s))
    return left_s if job.time_limit_s is None else min(job.time_limit_s, left_s)


def _priority(job: Job, cluster: ClusterState) -> int | None:
    """Return the job's fixed priority, else that of the last pass; 0: held, None: unknown."""
    if job.state is not JobState.PENDING:
        return job.priority_set if job.priority_set is not None else cluster.priorities.get(job.id)
    if job.hold is not Hold.NONE:
        return 0
    return job.priority_set if job.priority_set is not None else cluster.priorities.get(job.id, LEAST_PRIORITY)
