"""The step service's interface to the controller, and the `Launch` of a step on a node.

It knows how a step is put into a message, but not when a message is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcnode.wire import protocol
from hpcsched.errors import InvariantError
from hpcsched.jobscript.patterns import PatternFacts, expand_job_pattern
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ExitStatus, Job
from hpcsched.state.transaction import StepRecord
from hpcsched.steps.environment import node_environment
from hpcsched.steps.files import pattern_facts
from hpcsched.steps.layout import NodeTasks
from hpcsched.steps.request import StepOptions
from hpcsched.steps.step import Origin, Step, StepPart


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Facts about a starting step, for `StepPorts.environment`."""

    number: int
    tasks: tuple[NodeTasks, ...]
    options: StepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPorts:
    """Callables that the service needs from the controller. None of them may call the service."""

    job: Callable[[JobId], Job | None]
    # To a node's agent; may be lost if the node is disconnected.
    send: Callable[[NodeName, protocol.Message, bytes], None]
    # To a step command; wrapped in ToStream if the command runs on a node.
    reply: Callable[[Origin, protocol.Message, bytes], None]
    # A job without a batch step for uid; may raise RequestError.
    allocate: Callable[[protocol.StepRequest, int], JobId]
    release: Callable[[JobId, ExitStatus], None]  # end that job
    record: Callable[[StepRecord], None]
    new_token: Callable[[Job, str, NodeName], str]
    environment: Callable[[Job, StepPlan], Mapping[str, str]]
    # `user` of a Launch on that node: "" if the agent can only run as itself
    account: Callable[[Job, NodeName], str]
    hosts: Callable[[Job], list[tuple[str, int]]]  # (node, slots) of the allocation
    same_machine: Callable[[Job], bool]
    # The highest step number of the job's attempt in the rows, -1 if none.
    last_step: Callable[[JobId, int], int]
    is_admin: Callable[[int], bool]
    epoch: Callable[[], int]
    now_s: Callable[[], float]
    grace_s: float  # from SIGTERM to SIGKILL
    propagate: frozenset[str]  # kinds of resource limits that tasks get from their step command
    # Shrink the job to that many nodes, for a uid; may raise RequestError.
    resize: Callable[[Job, int, int], None]
    # CUDA's names of the node's GPUs, if not their indices
    devices: Callable[[NodeName], Mapping[int, str]] = lambda node: {}
    allow_uid_below: Callable[[], int] = lambda: 1000  # of each Launch
    # It runs since before a restore: its nodes take no new steps.
    is_adopted: Callable[[Job], bool] = lambda job: False
    # All rows of the job's attempt.
    recorded: Callable[[JobId, int], Sequence[StepRecord]] = lambda job_id, attempt: ()


def _task_set(step: Step, tasks: NodeTasks, node_rank: int) -> protocol.TaskSet:
    return protocol.TaskSet(
        first_rank=tasks.first_rank,
        count=tasks.count,
        total=step.ntasks,
        node_rank=node_rank,
        nnodes=len(step.nodes),
        scattered=list(tasks.scattered),
    )


def _of_options(options: StepOptions, facts: PatternFacts) -> dict[str, Any]:
    """Return the fields of a launch that depend only on the step's options."""

    def path(pattern: str) -> str:
        return expand_job_pattern(pattern, facts) if pattern else ""

    return {
        "stdout": path(options.stdout),
        "stderr": path(options.stderr),
        "stdin": path(options.stdin),
        "append": options.append,
        "label": options.label,
        "limit_s": options.limit_s,
        "signum": options.signal.signum if options.signal else 0,
        "signal_before_s": float(options.signal.before_s) if options.signal else 0.0,
        "task_prolog": options.task_prolog,
        "task_epilog": options.task_epilog,
        "wait_for_children": options.wait_for_children,
        "kill_on_bad_exit": options.kill_on_bad_exit,
        "remote_shell": options.remote_shell,
    }


def launch_of(
    ports: StepPorts,
    step: Step,
    run: StepPart,
    node_rank: int,
    request: protocol.StepRequest,
    options: StepOptions,
    env: Mapping[str, str],
) -> protocol.Launch:
    """Return the message that starts the tasks `run` of `step` on its `node_rank`-th node."""
    job, place, origin = step.job, run.place, step.origin
    if place is None or origin is None:
        raise InvariantError(f"step {job.id}.{step.number} has no place or origin at its launch")
    own = node_environment(
        place.tasks,
        node_rank=node_rank,
        cpus=place.cpus,
        gpus=place.gpus,
        devices=ports.devices(run.node),
        gpus_per_task=options.gpus_per_task,
    )
    return protocol.Launch(
        token=run.token,
        job_id=job.id,
        attempt=job.attempt,
        step=str(step.number),
        epoch=ports.epoch(),
        user=ports.account(job, run.node),
        allow_uid_below=ports.allow_uid_below(),
        work_dir=request.work_dir,
        argv=list(request.argv),
        env={**env, **own},
        tasks=_task_set(step, place.tasks, node_rank),
        cpus=place.cpus,
        mem_mib=place.mem_mib,
        gpus=list(place.gpus),
        stream_to=protocol.Address(node=origin[0], stream=origin[1]),
        grace_s=ports.grace_s,
        **_of_options(options, pattern_facts(job, step.number)),
        lease=job.spec.lease,
        lease_s=job.lease_s or 0.0,
        hold=len(step.nodes) > 1,
        hosts=ports.hosts(job),
        same_machine=ports.same_machine(job),
    )
