"""What must be true in the world for a job in its present state: derived from the job alone, safe to repeat.

`perform` (the controller) carries effects out after the commit, and again whenever a node comes back: so recovery needs
no code of its own.
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
    """`node`, which does not run the batch step, has claimed its part of the job: only then the batch step may start."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearNode:
    """`node` has nothing left of the job's attempts up to this one, and starts none of them."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """What `node` runs of the job stands still."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """What `node` runs of the job, which has been suspended before, runs."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAllocation:
    """The job's processes on `node` have heard of its present nodes, and of those that it is asked to keep."""

    node: NodeName
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimit:
    """The attempt's batch step on `node` is ended at the job's time limit, which is not the one that it was launched with."""

    node: NodeName
    job: Job


Effect = StartBatch | ClaimPart | ClearNode | Halt | GoOn | TellAllocation | SetLimit


def effects_of(job: Job) -> tuple[Effect, ...]:
    """Return what `job` needs done on its nodes now."""
    match job.state:
        case JobState.CONFIGURING if unclaimed := unclaimed_nodes(job):
            return tuple(ClaimPart(node=node, job=job) for node in unclaimed)
        case JobState.CONFIGURING if job.spec.has_script:
            return (StartBatch(node=job.shares[0].node, job=job),)
        case JobState.SUSPENDED:
            return (*_moves(job), *_limit(job), *(Halt(node=node, job=job) for node in job.held_nodes))
        case JobState.RUNNING:
            going: tuple[Effect, ...] = ()
            if job.suspended_s is not None:
                going = tuple(GoOn(node=node, job=job) for node in job.held_nodes)
            told = job.shares if job.generation else ()
            return (*_moves(job), *_limit(job), *going, *(TellAllocation(node=share.node, job=job) for share in told))
        case JobState.COMPLETING:
            return tuple(ClearNode(node=node, job=job) for node in job.held_nodes)
        case _:
            return ()


def _limit(job: Job) -> tuple[Effect, ...]:
    """Return what the node of the batch step must know if the time limit was changed while the job ran.

    A limit that was lowered so that it could start was so before the launch: to say it again does no harm.
    """
    if job.asked_limit_s is None or not job.spec.has_script:
        return ()
    return (SetLimit(node=job.shares[0].node, job=job),)


def _moves(job: Job) -> tuple[Effect, ...]:
    """Return what the nodes that a running job gets or loses must do."""
    claims = (ClaimPart(node=share.node, job=job) for share in job.joining)
    return (*claims, *(ClearNode(node=share.node, job=job) for share in job.leaving))


def unclaimed_nodes(job: Job) -> tuple[NodeName, ...]:
    """Return the nodes that must still claim their part before the job's batch step may be launched."""
    if job.state is not JobState.CONFIGURING or not job.spec.has_script:
        return ()
    return tuple(share.node for share in job.shares[1:] if share.node not in job.claimed_nodes)


def is_gathered(job: Job) -> bool:
    """Return whether something of the attempt may have been launched: not before every node has claimed its part."""
    if not job.spec.has_script or job.started_at_s is not None:
        return True
    return all(share.node in job.claimed_nodes for share in job.shares[1:])
