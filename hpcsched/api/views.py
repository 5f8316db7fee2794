"""Build the JSON of jobs, nodes and partitions (version 1), for `--json` and the commands.

Values of a job that only its owner and admins may see (paths, command line, comment, script,
environment) are null for other users. The text of its reason is omitted for them, because it also
contains paths: see `reason_detail`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from hpcsched.api.identity import Asker
from hpcsched.config.load import natural_order
from hpcsched.lifecycle.clocks import limit_at_s
from hpcsched.lifecycle.effects import is_gathered, unclaimed_nodes
from hpcsched.lifecycle.job import OUTPUT_FULL, can_do_without, lease_end_s, refusal_words
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.job import ACTIVE, FINAL, Hold, Job, JobState, RankFailure, Reason, TrainingStatus, exit_words
from hpcsched.model.node import OURSELVES, Link, Node, NodeState, Partition
from hpcsched.model.reservation import Reservation
from hpcsched.model.units import format_mem, format_time_s
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import StepRecord

VERSION = 1
_UNDECIDED = (
    "it runs from before the database was restored from a backup; an admin decides whether it goes on: hctl strays"
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


def reason_detail(job: Job, asker: Asker) -> str:
    """Return the recorded text of the job's reason, "" for other users.

    Nodes and users put paths into it.
    """
    return job.reason_detail if asker.owns(job) else ""


def why_waiting(job: Job, cluster: ClusterState, asker: Asker, now_s: float) -> tuple[Reason, str, float | None]:
    """Return the reason, a sentence for `asker`, and the expected start of a waiting job.

    Also for an active job that has a problem, for example a lost node.
    """
    if job.state is JobState.PENDING:
        wait = cluster.waits.get(job.id)
        if wait is not None:
            detail = _queued_again(job, asker) if wait.reason is Reason.BEGIN_TIME and job.restarts else wait.detail
            if job.refusals and asker.owns(job):
                detail += f"; it could not be started {refused_on(job)}"
            return wait.reason, detail, wait.expected_start_s
        if job.hold is not Hold.NONE:
            return (Reason.HELD_ADMIN if job.hold is Hold.ADMIN else Reason.HELD_USER), "the job is held", None
        return Reason.NONE, "", None
    if job.state in ACTIVE:
        lost = [name for name in job.held_nodes if cluster.nodes[name].link is Link.DOWN]
        if lost:
            return Reason.NODE_LOST, _limbo(job, lost, cluster, now_s), None
        if job.state is JobState.CONFIGURING:
            return job.reason, _starting(job), None
        if job.state is JobState.SUSPENDED:
            return job.reason, _standing_still(job), None
        if any(cluster.job_of_former(kept.token) is job for kept in cluster.undecided_launches.values()):
            return job.reason, _UNDECIDED, None
    return job.reason, reason_detail(job, asker), None


def in_a_sentence(job: Job, cluster: ClusterState, asker: Asker, reason: Reason, detail: str, now_s: float) -> str:
    """Return a sentence about the job; `reason` and `detail` are those of `why_waiting`."""
    if job.state is JobState.COMPLETING and reason is not Reason.NODE_LOST:
        return f"job {job.display_id} {_ending(job, cluster, asker)}"
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


def _queued_again(job: Job, asker: Asker) -> str:
    detail = reason_detail(job, asker)
    why = f" ({detail})" if detail else ""
    at = time.strftime("%H:%M:%S", time.localtime(job.not_before_s))
    return f"was queued again after its attempt {job.attempt - 1}{why}, and may start from {at} on"


def _starting(job: Job) -> str:
    unclaimed = unclaimed_nodes(job)
    if unclaimed:
        return f"waits for {compress_hostlist(unclaimed)} to take its part of the job"
    return f"is being started on {job.shares[0].node}" if job.spec.has_script else ""


def _standing_still(job: Job) -> str:
    if job.suspended_for is None:
        return "is suspended until somebody resumes it: hctl resume " + job.display_id
    return f"is suspended: job {job.suspended_for} has its cpus, it goes on when they are free"


def _ending(job: Job, cluster: ClusterState, asker: Asker) -> str:
    detail = reason_detail(job, asker)
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
        fate = "goes on without the node"
    return f"{silent}; the job may still run there, and goes on when the node answers. It {fate} when the node {proof}"


def node_state(node: Node, cpus_alloc: int, reserved: Reservation | None = None) -> NodeState:
    """Return a node's state in sinfo's terms; `reserved`: its present reservation."""
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


def node_views(cluster: ClusterState, now_s: float) -> list[dict[str, Any]]:
    """Return all nodes, with the allocated resources and the reservation of each."""
    active = sorted(
        (one for one in cluster.reservations.values() if one.is_active(now_s)), key=lambda one: one.is_maintenance
    )
    reserved = {name: one for one in active for name in one.nodes}  # maintenance overrides the others
    shares = [(job.id, share) for job in cluster.active_jobs() for share in job.holding]
    return [
        _node_view(node, [item for item in shares if item[1].node == node.name], cluster, reserved.get(node.name))
        for node in sorted(cluster.open_nodes(), key=lambda node: natural_order(node.name))
    ]


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
        "drained_why": node.drained_why,
        "drained_by": node.drained_by,
        "drained_at_s": node.drained_at_s,
        "launch_failures": len(node.launch_failures),
        "launch_failure": node.launch_failures[-1].why if node.launch_failures else "",
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
        "features": list(node.spec.features),
        "partitions": [p.name for p in cluster.partitions.values() if node.name in p.nodes],
        "jobs": [job_id for job_id, _ in shares],
        "boot_id": node.boot_id,
        "agent_version": node.agent_version,
        "weight": node.spec.weight,
        "switch": node.spec.switch,
        "speed": node.spec.speed,
        "link_mbps": node.spec.link_mbps,
        "tmp_mib": node.spec.tmp_mib,
        "facts": None,
    }


def reservation_view(one: Reservation, cluster: ClusterState, now_s: float) -> dict[str, Any]:
    """Return a reservation, with the jobs that use it."""
    return {
        "name": one.name,
        "state": "ACTIVE" if one.is_active(now_s) else "INACTIVE",
        "start_s": one.start_s,
        "end_s": one.end_s,
        "duration_s": one.duration_s,
        "nodes": list(one.nodes),
        "node_list": compress_hostlist(one.nodes),
        "cpus": sum(cluster.nodes[name].spec.cpus for name in one.nodes if name in cluster.nodes),
        "node_count": one.node_count,
        "features": one.features,
        "partition": one.partition,
        "users": list(one.users),
        "accounts": list(one.accounts),
        "flags": [flag.value for flag in one.flags],
        "made_by": one.made_by,
        "made_at_s": one.made_at_s,
        "jobs": [job.id for job in cluster.using(one.name)],
    }


def partition_views(cluster: ClusterState, now_s: float) -> list[dict[str, Any]]:
    """Return all partitions, with the number of their nodes in each state."""
    nodes = {view["name"]: view for view in node_views(cluster, now_s)}
    return [_partition_view(partition, nodes) for partition in cluster.partitions.values()]


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
