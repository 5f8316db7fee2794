"""Build the messages to nodes for effects and signals. Pure: the cluster in, messages out."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import replace

from hpcnode.os import rlimits
from hpcnode.wire import protocol
from hpcsched import paths
from hpcsched.jobscript.patterns import job_file_patterns
from hpcsched.lifecycle.job import Effect, EffectKind, cut_at_s
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, LaunchToken, NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import Node, address_of
from hpcsched.model.spec import SIGNED_REQUEST
from hpcsched.state.cluster import ClusterState
from hpcsched.steps.environment import allocation_facts, job_environment, with_propagated


def message_for(
    effect: Effect, cluster: ClusterState, script_of: Callable[[Job], bytes]
) -> tuple[protocol.Message, bytes]:
    """Return the message (and its blob) for `effect`.

    `script_of` returns the text of a job's script.
    """
    node, job = effect.node, effect.job
    match effect.kind:
        case EffectKind.BATCH_STEP:
            return launch_batch(job, cluster, node), script_of(job)
        case EffectKind.CLAIM:
            return claim_part(job, cluster, node), b""
        case EffectKind.CLEAR:
            return end_job(job, cluster, node), b""
        case EffectKind.ALLOCATION:
            message = protocol.Allocation(
                incarnation=_incarnation(job, cluster),
                job_id=job.id,
                attempt=job.attempt,
                generation=job.generation,
                nodes=[share.node for share in job.shares],
                wanted=list(job.wanted_nodes),
            )
            return message, b""
        case EffectKind.LIMIT:
            return protocol.TimeLimit(token=job.token, limit_s=_limit_s(job)), b""
        case EffectKind.HALT | EffectKind.CONTINUE:
            halt = effect.kind is EffectKind.HALT
            return protocol.SuspendJob(_incarnation(job, cluster), job.id, job.attempt, halt), b""


def end_job(job: Job, cluster: ClusterState, node: NodeName) -> protocol.EndJob:
    """Return the order to end the job's attempt on `node`.

    A job that may still save its state gets its own signal (``--signal``).
    """
    order = protocol.EndJob(
        incarnation=_incarnation(job, cluster),
        job_id=job.id,
        attempt=job.attempt,
        grace_s=float(cluster.config.controller.kill_wait_s),
        stay=job.stay_on(node),
    )
    if job.save_s is None:
        return order
    wanted = job.spec.signal
    if wanted is None:
        return protocol.changed(order, grace_s=job.save_s)
    return protocol.changed(order, grace_s=job.save_s, signum=wanted.signum, batch_only=wanted.batch_only)


def _incarnation(job: Job, cluster: ClusterState) -> str:
    return LaunchToken.parse(job.token).incarnation if job.token else cluster.incarnation


def allocation_environment(job: Job, cluster: ClusterState) -> dict[str, str]:
    """Return the environment for a command on the head that holds the job."""
    return allocation_facts(_environment(job, cluster))


def _environment(job: Job, cluster: ClusterState) -> dict[str, str]:
    first = cluster.nodes[job.shares[0].node]
    return job_key(job, cluster) | job_environment(
        job,
        cluster=cluster.config.name,
        conf=str(cluster.config.config_dir / paths.CONFIG_FILE),
        master_addr=address(first),
        share_dir=cluster.config.share,
        devices=devices_of(first),
        cut_at_s=cut_at_s(job, cluster.reservations.get(job.reservation)),
    )


def job_key(job: Job, cluster: ClusterState) -> dict[str, str]:
    """Return the variable with the key of the job's attempt.

    Its ranks know each other by it. It is the same for all steps of the attempt, and is not stored.
    """
    if not cluster.jobs_secret:
        return {}
    return {"HPCSCHED_JOB_KEY": hmac.digest(cluster.jobs_secret, job.token.encode(), "sha256").hex()}


def launch_batch(job: Job, cluster: ClusterState, node: NodeName) -> protocol.Launch:
    """Return the launch of the job's batch step on its first node."""
    spec, share, files = job.spec, job.shares[0], job_file_patterns(job)
    env = with_propagated(_environment(job, cluster), rlimits.names(cluster.config.controller.propagate))
    if spec.signed:
        env[SIGNED_REQUEST] = spec.signed
    return protocol.Launch(
        token=job.token,
        job_id=job.id,
        attempt=job.attempt,
        step=BATCH_STEP,
        epoch=cluster.epoch,
        user=account(job, cluster, node),
        allow_uid_below=cluster.config.controller.allow_uid_below,
        work_dir=spec.work_dir,
        argv=list(spec.script_args),
        env=env,
        tasks=protocol.TaskSet(first_rank=0, count=1, total=1, node_rank=0, nnodes=1),
        cpus=share.cpus,
        mem_mib=share.mem_mib,
        gpus=list(share.gpus),
        stdout=files.stdout,
        stderr=files.stderr,
        stdin=files.stdin,
        append=spec.open_mode == "append" or (spec.open_mode != "truncate" and job.restarts > 0),
        limit_s=_limit_s(job),
        grace_s=float(cluster.config.controller.kill_wait_s),
        signum=spec.signal.signum if spec.signal else 0,
        signal_before_s=float(spec.signal.before_s) if spec.signal else 0.0,
        signal_batch_only=spec.signal.batch_only if spec.signal else False,
        lease=spec.lease,
        lease_s=job.lease_s or 0.0,
        confine=confinement(job, cluster, node),
        hosts=hosts(job),
        same_machine=same_machine(job, cluster),
    )


def _limit_s(job: Job) -> float | None:
    return None if job.time_limit_s is None else float(job.time_limit_s)


def claim_part(job: Job, cluster: ClusterState, node: NodeName) -> protocol.Launch:
    """Return the claim of the job's part on another of its nodes.

    A claim holds the resources and runs nothing.
    """
    every = (*job.shares, *job.joining)
    rank = next(i for i, share in enumerate(every) if share.node == node)
    share = every[rank]
    return protocol.Launch(
        token=claim_token(job, node),
        job_id=job.id,
        attempt=job.attempt,
        step=ALLOC_STEP,
        epoch=cluster.epoch,
        user=account(job, cluster, node),
        allow_uid_below=cluster.config.controller.allow_uid_below,
        work_dir="/",
        argv=[],
        env={},
        tasks=protocol.TaskSet(first_rank=0, count=1, total=1, node_rank=rank, nnodes=len(every)),
        cpus=share.cpus,
        mem_mib=share.mem_mib,
        gpus=list(share.gpus),
        confine=confinement(job, cluster, node),
    )


def confinement(job: Job, cluster: ClusterState, node: NodeName) -> protocol.Confinement:
    """Return the job's share of `node`, and which parts of it the node enforces."""
    spec, settings = cluster.nodes[node].spec, cluster.config.controller
    share = next((share for share in (*job.shares, *job.joining) if share.node == node), None)
    if share is None:
        return protocol.Confinement()
    words = settings.confine if spec.confine is None else spec.confine
    has_parts = any(gpu.device.startswith("MIG-") for gpu in spec.gpus)  # several of them are one device file
    return protocol.Confinement(
        words=[word for word in words if not (word == "gpus" and (has_parts or not spec.gpus))],
        cpus=share.cpus,
        mem_mib=share.mem_mib,
        gpus=list(share.gpus),
        gpu_files=list(spec.gpu_files),
        max_processes=settings.max_processes,
    )


def claim_token(job: Job, node: NodeName) -> str:
    """Return the token of the claim on `node`, derived from the attempt's batch step token."""
    return str(replace(LaunchToken.parse(job.token), step=ALLOC_STEP, node=node, stay=job.stay_on(node)))


def signal_messages(
    job: Job, signum: int, *, batch_only: bool, full: bool
) -> list[tuple[protocol.SignalStep, NodeName]]:
    """Return the messages, with their nodes, that signal the processes of a job with a script.

    Without `batch_only` and `full`, only the job's steps get the signal. Steps on other nodes are
    found by the claims there.
    """
    node = job.shares[0].node
    batch = protocol.SignalStep(
        token=job.token, signum=signum, batch_only=batch_only, steps=not (batch_only or full), full=full
    )
    if batch_only:
        return [(batch, node)]
    there = protocol.SignalStep(token="", signum=signum, steps=True)
    others = [share.node for share in job.shares[1:]]
    return [(batch, node), *((protocol.changed(there, token=claim_token(job, other)), other) for other in others)]


def account(job: Job, cluster: ClusterState, node: NodeName) -> str:
    """Return the account that the job's processes run as on `node`.

    This is the submitter's account if the agent can switch to it.
    """
    return job.user if cluster.nodes[node].root_agent else ""


def devices_of(node: Node) -> dict[int, str]:
    """Return the CUDA names of the node's GPUs that CUDA does not know by index."""
    return {gpu.index: gpu.device for gpu in node.spec.gpus if gpu.device}


def hosts(job: Job) -> list[tuple[str, int]]:
    """Return the nodes of the allocation with their MPI slots: the number of tasks there."""
    return [(share.node, share.tasks) for share in job.shares]


def same_machine(job: Job, cluster: ClusterState) -> bool:
    """Return whether several of the job's nodes are the same machine.

    MPI has to be told in that case.
    """
    machines = [cluster.nodes[share.node].machine_id for share in job.shares]
    return len(machines) > len(set(machines)) and "" not in machines


def address(node: Node) -> str:
    """Return the address at which other nodes reach this node."""
    return address_of(node.spec)
