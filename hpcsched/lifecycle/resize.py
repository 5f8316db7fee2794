"""How the allocation of a running job changes: it gives nodes back, gets more, or is asked to give some back.

    shares   its allocation                   leaving   given back, until the node reports that it is clear
    joining  given, until the node has claimed its part (then it is one of `shares`)

    left     once for each time that a node was given back or lost: its next allocation there is another stay (see `model.ids`)

A node may be given to the same attempt again, unless it has refused its part. Each change that the job must know of raises
`generation`; what its nodes are sent (see `effects`) carries it, so that repeating it has no effect. The first node, where
the batch step runs, stays.
"""

from __future__ import annotations

from hpcsched.errors import InvariantError
from hpcsched.lifecycle.clocks import charged, settled
from hpcsched.lifecycle.events import (
    Claimed,
    LaunchRefused,
    NodeCleared,
    NodeLost,
    NodesAdded,
    NodesReleased,
    ShrinkAsked,
)
from hpcsched.model.frozen import replace
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, JobState


def shrink_asked(job: Job, event: ShrinkAsked) -> Job:
    """Return the job that is asked to keep only these nodes (all of its nodes: the request is withdrawn)."""
    wanted = () if len(event.nodes) == len(job.shares) else event.nodes
    wanted_at_s = event.at_s if wanted else None
    return replace(job, wanted_nodes=wanted, wanted_at_s=wanted_at_s, generation=job.generation + 1)


def nodes_released(job: Job, event: NodesReleased) -> Job:
    """Return the job without these nodes; it holds them until they are clear."""
    return _without(job, event.nodes)


def _without(job: Job, nodes: tuple[NodeName, ...]) -> Job:
    lost = set(nodes)
    first, *others = job.shares
    if first.node in lost or not lost <= {share.node for share in others}:
        raise InvariantError(f"cannot take {', '.join(nodes)} from job {job.id}: these are not among its other nodes")
    left = tuple(share for share in others if share.node in lost)
    return replace(
        job,
        shares=(first, *(share for share in others if share.node not in lost)),
        leaving=job.leaving + left,
        claimed_nodes=tuple(name for name in job.claimed_nodes if name not in lost),
        wanted_nodes=(),
        wanted_at_s=None,
        generation=job.generation + 1,
    )


def nodes_added(job: Job, event: NodesAdded) -> Job:
    """Return the job with these joining shares: charged from now on, usable when their nodes have claimed them."""
    job = settled(job, event.at_s)
    names = tuple(share.node for share in event.shares)
    if set(names) & {*job.held_nodes, *job.barred_nodes}:
        raise InvariantError(f"cannot give job {job.id} {', '.join(names)}: it has them, or they have refused")
    return replace(job, joining=job.joining + event.shares, held_nodes=job.held_nodes + names)


def claimed_later(job: Job, event: Claimed) -> Job:
    """Return the running job with a share that its node has claimed."""
    joined = tuple(share for share in job.joining if share.node == event.node)
    return replace(
        job,
        joining=tuple(share for share in job.joining if share.node != event.node),
        shares=job.shares + joined,
        claimed_nodes=(*job.claimed_nodes, event.node),
        generation=job.generation + 1,
    )


def is_moving(job: Job, node: NodeName) -> bool:
    """Return whether the job is about to get or to lose `node`, so that it can continue without it."""
    return any(share.node == node for share in (*job.leaving, *job.joining))


def can_do_without(job: Job, node: NodeName) -> bool:
    """Return whether an elastic job continues when it loses `node`: it is not the first, and enough nodes are left."""
    others = {share.node for share in job.shares[1:]}
    return job.spec.elastic and job.state is JobState.RUNNING and node in others and len(others) >= job.spec.nodes_min


def lost_one(job: Job, event: NodeLost) -> Job:
    """Return the elastic job without a node that is lost, as if it had given it back."""
    return given_back(_without(job, (event.node,)), event)


def refused_later(job: Job, event: LaunchRefused) -> Job:
    """Return the running job without a node that refused its part; it is not given to the job again."""
    return replace(given_back(job, event), barred_nodes=(*job.barred_nodes, event.node))


def given_back(job: Job, event: NodeCleared | NodeLost | LaunchRefused) -> Job:
    """Return the running job without a node that it was about to get or to lose."""
    if not is_moving(job, event.node):
        raise InvariantError(f"cannot take {event.node} from job {job.id}: it has not given it back")
    job = charged(job, event.node, event.at_s)
    return replace(
        job,
        held_nodes=tuple(name for name in job.held_nodes if name != event.node),
        leaving=tuple(share for share in job.leaving if share.node != event.node),
        joining=tuple(share for share in job.joining if share.node != event.node),
        left_nodes=(*job.left_nodes, event.node),
    )
