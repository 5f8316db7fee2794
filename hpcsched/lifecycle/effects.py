"""What must be true on nodes for a job in its present state: derived from the job alone, safe to repeat.

The controller performs the effects after the commit, and again whenever a node reconnects, so recovery needs no code of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBatch:
    """The attempt's batch step runs on `node`."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPart:
    """`node`, which does not run the batch step, has claimed its part of the job. The batch step starts only after that."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearNode:
    """`node` has no processes of the job's attempts up to this one, and starts none of them."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The processes of the job on `node` are stopped."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """The processes of the job on `node`, which has been suspended before, run."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAllocation:
    """The job's processes on `node` know its present nodes, and those that it is asked to keep."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimit:
    """The attempt's batch step on `node` is ended at the job's time limit, which changed after the launch."""

    node: NodeName
    job: Job


Effect = StartBatch | ClaimPart | ClearNode | Halt | GoOn | TellAllocation | SetLimit


def effects_of(job: Job) -> tuple[Effect, ...]:
    """Return the effects that the state of `job` requires."""
    match job.state:
        case JobState.CONFIGURING if unclaimed := unclaimed_nodes(job):
            return tuple(ClaimPart(node=node, job=job) for node in unclaimed)
        case JobState.CONFIGURING if job.spec.has_script:
            return (StartBatch(node=job.shares[0].node, job=job),)
        case JobState.SUSPENDED:
            return (*_moves(job), *_limit(job), *(Halt(node=node, job=job) for node in job.held_nodes))
        case JobState.RUNNING:
            resumed: tuple[Effect, ...] = ()
            if job.suspended_s is not None:
                resumed = tuple(GoOn(node=node, job=job) for node in job.held_nodes)
            informed = job.shares if job.generation else ()
            return (
                *_moves(job),
                *_limit(job),
                *resumed,
                *(TellAllocation(node=share.node, job=job) for share in informed),
            )
        case JobState.COMPLETING:
            return tuple(ClearNode(node=node, job=job) for node in job.held_nodes)
        case _:
            return ()


def _limit(job: Job) -> tuple[Effect, ...]:
    """Return the effect that gives the node of the batch step a time limit that was changed.

    A limit that was lowered for the start was set at the launch; to set it again does no harm.
    """
    if job.asked_limit_s is None or not job.spec.has_script:
        return ()
    return (SetLimit(node=job.shares[0].node, job=job),)


def _moves(job: Job) -> tuple[Effect, ...]:
    """Return the effects on nodes that a running job gets or loses."""
    claims = (ClaimPart(node=share.node, job=job) for share in job.joining)
    return (*claims, *(ClearNode(node=share.node, job=job) for share in job.leaving))


def unclaimed_nodes(job: Job) -> tuple[NodeName, ...]:
    """Return the nodes that must still claim their part before the job's batch step may be launched."""
    if job.state is not JobState.CONFIGURING or not job.spec.has_script:
        return ()
    return tuple(share.node for share in job.shares[1:] if share.node not in job.claimed_nodes)


def is_gathered(job: Job) -> bool:
    """Return whether a part of the attempt may have been launched: all nodes have claimed their parts."""
    if not job.spec.has_script or job.started_at_s is not None:
        return True
    return all(share.node in job.claimed_nodes for share in job.shares[1:])
