"""What holds of every plan with reservations, and of what a waiting job is told: found in small worlds by Hypothesis."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from property.test_plan import POLICIES, POLICY, worlds

from hpcsched.model.reservation import Flag, Reservation, clash, occurrences, reserved_intervals_of
from hpcsched.model.units import UNLIMITED_S, parse_time_s
from hpcsched.sched.decisions import Plan
from hpcsched.sched.explain import WhatIf, smaller_requests
from hpcsched.sched.place.request import ResourceRequest
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import PendingJob, Snapshot

FAR_S = 1e12


@st.composite
def reservations(draw: st.DrawFn, snapshot: Snapshot, name: str) -> Reservation:
    start_s = int(snapshot.now_s) + draw(st.integers(-2000, 4000))
    nodes = draw(st.lists(st.sampled_from([node.name for node in snapshot.nodes]), min_size=1, unique=True))
    flags = draw(st.sampled_from([(), (), (Flag.DAILY,), (Flag.MAINT,), (Flag.OVERLAP,), (Flag.WEEKLY, Flag.MAINT)]))
    end_s = start_s + draw(st.integers(1, 6000))
    return Reservation(name=name, start_s=start_s, end_s=end_s, nodes=tuple(nodes), users=("ann",), flags=flags)


@st.composite
def reserved_worlds(draw: st.DrawFn) -> Snapshot:
    """A world with up to three reservations that may be side by side, and jobs in some of them."""
    snapshot = draw(worlds())
    found: list[Reservation] = []
    for name in ("r", "s", "t")[: draw(st.integers(1, 3))]:
        one = draw(reservations(snapshot, name))
        if one.may_overlap or not any(clash(one, other, snapshot.now_s) for other in found):
            found.append(one)
    names = ["", "", *(one.name for one in found)]
    pending = [
        replace(job, reservation=(name := draw(st.sampled_from(names))), free_to_go=job.free_to_go and not name)
        for job in snapshot.pending
    ]
    return replace(
        snapshot,
        pending=tuple(pending),
        reservations=tuple(found),
        reserved_intervals=reserved_intervals_of(found, snapshot.now_s),
    )


def _end_s(snapshot: Snapshot, job: PendingJob, lowered_s: int | None) -> float:
    own = [one.end_s for one in snapshot.reservations if one.name == job.reservation]
    return min([snapshot.now_s + (lowered_s or job.request.time_limit_s or UNLIMITED_S), *own])


@given(reserved_worlds(), POLICIES)
@settings(max_examples=200, deadline=None)
def test_a_plan_keeps_reservations_to_their_jobs_nodes_and_times(snapshot: Snapshot, policy: Policy) -> None:
    """All that holds of one plan, checked of the same plan: to draw a world and to plan it are what takes time."""
    made = plan(snapshot, policy)
    check_nothing_starts_or_runs_into_a_reservation_that_it_is_not_in(snapshot, made)
    check_jobs_of_reservations_are_on_their_nodes_within_their_time(snapshot, made)
    check_a_plan_with_reservations_is_deterministic_and_whole(snapshot, policy, made)
    check_no_start_is_expected_within_a_reservation_of_others(snapshot, made)


def check_nothing_starts_or_runs_into_a_reservation_that_it_is_not_in(snapshot: Snapshot, made: Plan) -> None:
    jobs = {job.id: job for job in snapshot.pending}
    by_name = {one.name: one for one in snapshot.reservations}
    for start in made.starts:
        job = jobs[start.job_id]
        if job.reservation and by_name[job.reservation].may_overlap:
            continue
        nodes = {share.node for share in start.shares}
        for one in snapshot.reservations:
            if one.name != job.reservation and not nodes.isdisjoint(one.nodes):
                until_s = min(_end_s(snapshot, job, start.time_limit_s), snapshot.now_s + 10 * 86_400)
                assert not list(occurrences(one, snapshot.now_s, until_s))


def check_jobs_of_reservations_are_on_their_nodes_within_their_time(snapshot: Snapshot, made: Plan) -> None:
    jobs = {job.id: job for job in snapshot.pending}
    by_name = {one.name: one for one in snapshot.reservations}
    for start in made.starts:
        job = jobs[start.job_id]
        if job.reservation:
            mine = by_name[job.reservation]
            assert {share.node for share in start.shares} <= set(mine.nodes)
            assert mine.start_s <= snapshot.now_s < mine.end_s


def check_a_plan_with_reservations_is_deterministic_and_whole(snapshot: Snapshot, policy: Policy, made: Plan) -> None:
    shuffled = replace(
        snapshot,
        pending=snapshot.pending[::-1],
        running=snapshot.running[::-1],
        reservations=snapshot.reservations[::-1],
        reserved_intervals=snapshot.reserved_intervals[::-1],
    )
    again = plan(shuffled, policy)
    assert (again.starts, again.waits) == (made.starts, made.waits)
    assert sorted([start.job_id for start in made.starts] + list(made.waits)) == [job.id for job in snapshot.pending]


def check_no_start_is_expected_within_a_reservation_of_others(snapshot: Snapshot, made: Plan) -> None:
    """Told of a job that may use but one node, where the expected start says all."""
    for job in snapshot.pending:
        wait, names = made.waits.get(job.id), snapshot.partitions[job.partition].nodes
        shape = job.request.shape
        if wait is None or wait.expected_start_s is None or job.reservation or len(shape.nodelist) != shape.nodes_max:
            continue
        assert set(shape.nodelist) <= set(names)
        limit_s = min(job.request.time_limit_s or UNLIMITED_S, 10 * 86_400)
        limit_s = min(limit_s, job.time_min_s) if job.lowers and job.time_min_s is not None else limit_s
        for one in snapshot.reservations:
            if not set(shape.nodelist).isdisjoint(one.nodes):
                assert not list(occurrences(one, wait.expected_start_s, wait.expected_start_s + limit_s))


@given(reserved_worlds())
@settings(max_examples=200, deadline=None)
def test_what_would_start_is_what_the_plan_starts(snapshot: Snapshot) -> None:
    """Of a job at its turn, and of each request that a waiting job is told would start now."""
    made = plan(snapshot, POLICY)
    started = {start.job_id for start in made.starts}
    for job in snapshot.pending:
        if job.id in started or _of_size(made, job):
            what_if = WhatIf(snapshot, POLICY, job)
            assert what_if.starts(job.request) == (job.id in started)
            if job.id not in started:
                check_each_smaller_request_starts(snapshot, job, what_if)


def check_each_smaller_request_starts(snapshot: Snapshot, job: PendingJob, what_if: WhatIf) -> None:
    for option in smaller_requests(what_if, job.request):
        changed = replace(job, request=_with(job.request, option))
        pending = tuple(changed if other.id == job.id else other for other in snapshot.pending)
        starts = plan(replace(snapshot, pending=pending), POLICY).starts
        assert job.id in {start.job_id for start in starts}, option


@given(reserved_worlds(), POLICIES, st.data())
@settings(max_examples=120, deadline=None)
def test_a_job_of_several_partitions_starts_once_in_one_of_them(
    snapshot: Snapshot, policy: Policy, data: st.DataObject
) -> None:
    names = sorted(snapshot.partitions)
    pending = []
    for job in snapshot.pending:
        others = [name for name in names if name != job.partition and data.draw(st.booleans())]
        pending.append(replace(job, others=tuple(replace(job, partition=name) for name in others)))
    snapshot = replace(snapshot, pending=tuple(pending))
    jobs = {job.id: job for job in pending}
    made = plan(snapshot, policy)
    assert sorted([start.job_id for start in made.starts] + list(made.waits)) == [job.id for job in pending]
    for start in made.starts:
        job = jobs[start.job_id]
        assert start.partition in {job.partition, *(other.partition for other in job.others)}
        assert {share.node for share in start.shares} <= set(snapshot.partitions[start.partition].nodes)


def _of_size(made: Plan, job: PendingJob) -> bool:
    return made.waits[job.id].reason in ("Resources", "Priority")


def _with(request: ResourceRequest, option: str) -> ResourceRequest:
    """Return the request with the option that was told."""
    shape = request.shape
    if option.startswith("without"):
        field = option.removeprefix("without --")
        empty = {"exclusive": {"exclusive": False}, "constraint": {"features": (), "constraint": ""}}
        return replace(request, shape=replace(shape, **empty.get(field, {field: ()})))
    name, value = re.fullmatch(r"--([a-z-]+)=(.*)", option).groups()  # type: ignore[union-attr]
    if name == "time":
        return replace(request, time_limit_s=parse_time_s(value))
    number = int(re.sub(r"^.*:|M$", "", value))
    kind = value.rpartition(":")[0]
    low, high = min(shape.nodes_min, number), max(1, min(shape.nodes_max, number))
    made = {
        "nodes": {"nodes_min": number, "nodes_max": number},
        "ntasks": {"ntasks": number, "nodes_min": low, "nodes_max": high},
        "cpus-per-task": {"cpus_per_task": number},
        "gpus-per-node": {"gpus_per_node": ((kind, number),)},
        "gpus": {"gpus_total": ((kind, number),), "nodes_max": high},
        "mem": {"mem_per_node_mib": number},
    }
    return replace(request, shape=replace(shape, **made[name]))
