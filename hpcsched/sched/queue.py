"""Who stands in line at all: the jobs that only resources and limits can keep waiting, each as it asks in each partition."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsched.model.ids import JobId
from hpcsched.model.reservation import Reservation
from hpcsched.sched.eligible import Eligibility, Wait
from hpcsched.sched.policy import Policy
from hpcsched.sched.reasons import partition_down, partition_unknown
from hpcsched.sched.reservations import not_now
from hpcsched.sched.snapshot import PendingJob, Snapshot, relaxed


def those_in_line(
    snapshot: Snapshot, policy: Policy, reservations: Mapping[str, Reservation], waits: dict[JobId, Wait]
) -> list[PendingJob]:
    """Return the jobs that only resources (and array limits) can keep waiting; note in `waits` why the others do."""
    eligibility, now_s, partitions = Eligibility(snapshot), snapshot.now_s, snapshot.partitions
    closed = {name: partition_down(name) for name, part in partitions.items() if not part.up}
    found = []
    for job in snapshot.pending:
        wait = None if job.free_to_go else eligibility.why_not(job) or not_now(job, reservations, now_s)
        if wait is not None:
            waits[job.id] = wait
            continue
        views = (job, *job.others) if job.others else (job,)
        if job.request.shape.switches:
            views = tuple([relaxed(view, now_s, policy.max_switch_wait_s) for view in views])
        opened = [view for view in views if view.partition in partitions and view.partition not in closed]
        found += opened
        if not opened:
            name = job.partition
            waits[job.id] = closed.get(name) or closed.setdefault(name, partition_unknown(name))
    return found
