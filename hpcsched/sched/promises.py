"""Conservative backfill over several passes: a pass first keeps earlier promises.

A promise is a start time, and the parts of nodes that the job gets then. A pass begins with all
promises of the previous pass, in the order of their starts, before it starts other jobs. So no
promise is delayed while running jobs keep to their limits: a job starts at the promised time, or as
soon as it fits beside the promises to other jobs.

If a job outlasts its limit, or ends slowly, a promise moves to a later time on the same nodes. Its
original start is remembered, so that the delay ends with its cause. A promise lapses if its job
changes its request, if the job waits for another reason, or if one of its nodes is removed.

Source: Mu'alem and Feitelson, "Utilization, predictability, workloads, and user runtime estimates
in scheduling the IBM SP2 with backfilling" (2001). There, freed resources are assigned in the order
of arrival; here in the order of the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.request import ResourceRequest
from hpcsched.sched.place.reserved_intervals import NEVER_S, Interval
from hpcsched.sched.placement import SUM_ERROR_S, Placement
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import NodeView, PendingJob, Promise, allows


def keep_promises(current: SchedulingPass, queue: Sequence[PendingJob]) -> Iterator[None]:
    """Reserve the promises of the previous pass for the jobs of `queue`.

    Jobs with a promise that is due start.
    """
    promises = current.snapshot.promises.values()
    views = {(job.id, job.partition): job for job in queue} if promises else {}
    for promise in sorted(promises, key=lambda promise: (promise.start_s, promise.job_id)):
        job = views.get((promise.job_id, promise.partition))
        if job is not None and job.id not in current.started_ids and current.limits.why_not(job) is None:
            _keep(current, job, promise)
            yield


def _keep(current: SchedulingPass, job: PendingJob, promise: Promise) -> None:
    placement, now_s = current.placement, current.snapshot.now_s
    due_s = max(promise.start_s, now_s)
    limit_s = placement.least_end_s(job, due_s) - due_s
    found = _still_possible(placement, current.snapshot.nodes, job, promise, limit_s)
    if found is None:
        return
    start_s, parts = found
    end_s = placement.least_end_s(job, start_s)
    if end_s > start_s + limit_s + SUM_ERROR_S:
        return  # the promise assumed that a reservation cuts the job short, and this is no longer true
    if start_s <= now_s and not job.lowers:  # a job with --time-min is considered in its turn: it may get more
        if current.give(job, parts, end_s):
            current.started_ids.add(job.id)
    elif placement.sure(start_s) is not None:
        placement.slots.reserve(job, start_s, end_s, parts)
        placement.slots.promises[job.id] = promise


def _still_possible(
    placement: Placement, nodes: Sequence[NodeView], job: PendingJob, promise: Promise, limit_s: float
) -> tuple[float, list[NodePart]] | None:
    """Return the time at which the promise to `job` can be kept, and the parts.

    The time is not before the promised start. None: the promise cannot be kept.
    """
    if not _asks_the_same(job.request, promise.request):
        return None
    index, types = placement.timeline.index, placement.timeline.types
    usable = placement.queues.nodes_of(job)
    parts = []
    for promised in promise.parts:
        node = index.get(promised.node, -1)
        if node not in usable or types[node] != promised.slots:
            return None
        if not allows(job.request.shape.each[promised.component], nodes[node]):
            return None
        parts.append(NodePart(node=node, tasks=promised.tasks, use=promised.use, component=promised.component))
    start_s = _free_from(placement, job, parts, limit_s, max(promise.start_s, placement.timeline.now_s))
    return (start_s, parts) if start_s < NEVER_S else None


def _free_from(
    placement: Placement, job: PendingJob, parts: Sequence[NodePart], limit_s: float, from_s: float
) -> float:
    """Return the first time at which `job` can have exactly these parts and its licences.

    The time is not before `from_s`. `NEVER_S`: never.
    """
    closed, profiles = placement.closed.to(job.reservation), placement.timeline.profiles
    start_s = from_s
    while start_s < NEVER_S:
        found_s = start_s
        for part in parts:
            found_s = profiles[part.node].earliest(part.use, limit_s, found_s)
            found_s = _opens_s(closed.get(part.node, ()), limit_s, found_s)
        found_s = placement.licenses.earliest(job.licenses, limit_s, found_s)
        if found_s == start_s:
            break
        start_s = found_s
    return start_s


def _asks_the_same(asked: ResourceRequest, promised: ResourceRequest) -> bool:
    """Say whether the `promised` request satisfies `asked`.

    After some time, a waiting job accepts more switches.
    """
    if asked is promised or asked == promised:
        return True
    return asked.time_limit_s == promised.time_limit_s and asked.shape == replace(promised.shape, switches=0)


def _opens_s(closed: Sequence[Interval], length_s: float, from_s: float) -> float:
    """Return the first time from which `length_s` seconds overlap no interval of `closed`.

    The time is not before `from_s`.
    """
    for closed_s, opens_s in sorted(closed):
        if closed_s < from_s + length_s and opens_s > from_s:
            from_s = opens_s
    return from_s
