"""What the step service needs of the controller, and the `Launch` of a step on one of its nodes.

It knows how a step's facts are put into a message, not when one is sent.
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
    """What `StepPorts.environment` is told of a step that starts."""

    number: int
    tasks: tuple[NodeTasks, ...]
    options: StepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPorts:
    """What the service needs of the controller. None of these may call the service back."""

    job: Callable[[JobId], Job | None]
    send: Callable[[NodeName, protocol.Message, bytes], None]  # to a node's agent; may be lost if the node is away
    reply: Callable[[Origin, protocol.Message, bytes], None]  # to a step command; in ToStream where that is on a node
    allocate: Callable[[protocol.StepRequest, int], JobId]  # a job without a batch step for uid; may raise RequestError
    release: Callable[[JobId, ExitStatus], None]  # that job is over
    record: Callable[[StepRecord], None]
    new_token: Callable[[Job, str, NodeName], str]
    environment: Callable[[Job, StepPlan], Mapping[str, str]]
    account: Callable[[Job, NodeName], str]  # `user` of a Launch there: "" where the agent is nobody but itself
    hosts: Callable[[Job], list[tuple[str, int]]]  # (node, slots) of the allocation
    same_machine: Callable[[Job], bool]
    last_step: Callable[[JobId, int], int]  # the highest step number of the job's attempt in the rows, -1 if none
    is_admin: Callable[[int], bool]
    epoch: Callable[[], int]
    now_s: Callable[[], float]
    grace_s: float  # from TERM to KILL
    propagate: frozenset[str]  # kinds of resource limits that tasks get from their step command
    resize: Callable[[Job, int, int], None]  # have the job go on with so many nodes, for a uid; may raise RequestError
    devices: Callable[[NodeName], Mapping[int, str]] = lambda node: {}  # what CUDA calls its GPUs, if not their indices
    allow_uid_below: Callable[[], int] = lambda: 1000  # of each Launch
    is_adopted: Callable[[Job], bool] = lambda job: False  # it runs from before a restore: its nodes take no new steps
    recorded: Callable[[JobId, int], Sequence[StepRecord]] = lambda job_id, attempt: ()  # all rows of the job's attempt


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
    """Return the fields of a launch that follow from the step's options alone."""

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
    """Return the order to start the tasks of `step` that are `run`, on the `node_rank`-th of its nodes."""
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
