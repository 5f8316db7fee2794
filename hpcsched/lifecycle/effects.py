"""What must be true on nodes for a job in its present state: derived from the job alone, safe to repeat.

The controller performs the effects after the commit, and again whenever a node reconnects, so recovery needs no code of its
own.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, JobState


class EffectKind(Enum):
    """What an effect requires of its node."""

    BATCH_STEP = auto()  # the attempt's batch step runs there
    CLAIM = auto()  # it has claimed its part of the job; the batch step, on another node, starts only after that
    CLEAR = auto()  # it has no processes of the job's attempts up to this one, and starts none of them
    HALT = auto()  # the processes of the job there are stopped
    CONTINUE = auto()  # the processes of the job there, which has been suspended before, run
    ALLOCATION = auto()  # the job's processes there know its present nodes, and those that it is asked to keep
    LIMIT = auto()  # the attempt's batch step there is ended at the job's time limit, which changed after the launch


LAUNCHES = frozenset({EffectKind.BATCH_STEP, EffectKind.CLAIM})


class Effect(NamedTuple):
    kind: EffectKind
    node: NodeName
    job: Job


def effects_of(job: Job) -> tuple[Effect, ...]:
    """Return the effects that the state of `job` requires."""
    match job.state:
        case JobState.CONFIGURING if unclaimed := unclaimed_nodes(job):
            return tuple(Effect(EffectKind.CLAIM, node, job) for node in unclaimed)
        case JobState.CONFIGURING if job.spec.has_script:
            return (Effect(EffectKind.BATCH_STEP, job.shares[0].node, job),)
        case JobState.SUSPENDED:
            return (*_moves(job), *_limit(job), *(Effect(EffectKind.HALT, node, job) for node in job.held_nodes))
        case JobState.RUNNING:
            resumed: tuple[Effect, ...] = ()
            if job.suspended_s is not None:
                resumed = tuple(Effect(EffectKind.CONTINUE, node, job) for node in job.held_nodes)
            informed = job.shares if job.generation else ()
            return (
                *_moves(job),
                *_limit(job),
                *resumed,
                *(Effect(EffectKind.ALLOCATION, share.node, job) for share in informed),
            )
        case JobState.COMPLETING:
            return tuple(Effect(EffectKind.CLEAR, node, job) for node in job.held_nodes)
        case _:
            return ()


def _limit(job: Job) -> tuple[Effect, ...]:
    """Return the effect that gives the node of the batch step a time limit that was changed.

    A limit that was lowered for the start was set at the launch; to set it again does no harm.
    """
    if job.asked_limit_s is None or not job.spec.has_script:
        return ()
    return (Effect(EffectKind.LIMIT, job.shares[0].node, job),)


def _moves(job: Job) -> tuple[Effect, ...]:
    """Return the effects on nodes that a running job gets or loses."""
    claims = (Effect(EffectKind.CLAIM, share.node, job) for share in job.joining)
    return (*claims, *(Effect(EffectKind.CLEAR, share.node, job) for share in job.leaving))


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
