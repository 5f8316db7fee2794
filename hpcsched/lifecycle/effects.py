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
class ClearNode:
    """`node` has nothing left of the job's attempts up to this one, and starts none of them."""

    node: NodeName
    job: Job


Effect = StartBatch | ClearNode


def effects_of(job: Job) -> tuple[Effect, ...]:
    """Return what `job` needs done on its nodes now."""
    match job.state:
        case JobState.CONFIGURING if job.spec.script:
            return (StartBatch(node=job.shares[0].node, job=job),)
        case JobState.COMPLETING:
            return tuple(ClearNode(node=node, job=job) for node in job.held_nodes)
        case _:
            return ()
