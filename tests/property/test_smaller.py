"""What hwhy says would start now instead: it does, and nothing larger of the same kind would have; tried by plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from property.test_plan import POLICIES, worlds

from hpcsched.model.job import Reason
from hpcsched.model.units import MINUTE_S, format_time_s
from hpcsched.sched.explain import explain
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import PendingJob, Snapshot

MOST_MINUTES = 3


def smaller(request: ResourceRequest) -> Iterator[tuple[str, list[tuple[str, ResourceRequest]]]]:
    """Yield what can be asked for less of: the option, and what would be written, the largest first."""
    shape, limit_s = request.shape, request.time_limit_s

    def with_shape(shape: Shape) -> ResourceRequest:
        return replace(request, shape=shape)

    if limit_s and MINUTE_S < limit_s <= (MOST_MINUTES + 1) * MINUTE_S:
        minutes = range((limit_s - 1) // MINUTE_S, 0, -1)
        yield (
            "--time=",
            [(f"--time={format_time_s(n * MINUTE_S)}", replace(request, time_limit_s=n * MINUTE_S)) for n in minutes],
        )
    cpus = range(shape.cpus_per_task - 1, 0, -1)
    yield "--cpus-per-task=", [(f"--cpus-per-task={n}", with_shape(replace(shape, cpus_per_task=n))) for n in cpus]
    if shape.ntasks is None:
        nodes = range(shape.nodes_min - 1, 0, -1)
        yield "--nodes=", [(f"--nodes={n}", with_shape(replace(shape, nodes_min=n, nodes_max=n))) for n in nodes]
    if shape.exclusive:
        yield "without --exclusive", [("without --exclusive", with_shape(replace(shape, exclusive=False)))]
    if shape.exclude:
        yield "without --exclude", [("without --exclude", with_shape(replace(shape, exclude=())))]


def starts(snapshot: Snapshot, policy: Policy, job: PendingJob, request: ResourceRequest) -> bool:
    changed = tuple(replace(other, request=request) if other is job else other for other in snapshot.pending)
    made = plan(replace(snapshot, pending=changed), policy)
    return any(start.job_id == job.id for start in made.starts)


@settings(max_examples=250, deadline=None)
@given(worlds(), POLICIES)
def test_what_is_told_is_the_most_that_would_start(snapshot: Snapshot, policy: Policy) -> None:
    made = plan(snapshot, policy)
    for job in snapshot.pending:
        if job.id not in made.waits or made.waits[job.id].reason not in (Reason.RESOURCES, Reason.PRIORITY):
            continue
        explanation = explain(snapshot, policy, made, job.id)
        assert explanation is not None
        assert explanation.smaller is not None
        for option, requests in smaller(job.request):
            told = [words for words in explanation.smaller if words.startswith(option)]
            most = [words for words, request in requests if starts(snapshot, policy, job, request)][:1]
            assert told == most
