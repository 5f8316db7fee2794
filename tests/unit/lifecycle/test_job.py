"""What may become of a job: each test is one path through the transition table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import T0, job, share, spec

from hpcsched.errors import InvariantError
from hpcsched.lifecycle.events import (
    Allocated,
    BecameEligible,
    Changed,
    EndRequested,
    Exited,
    Held,
    JobEvent,
    LaunchRefused,
    NodeCleared,
    NodeLost,
    NodeSilent,
    Released,
    Requeued,
    Started,
    Submitted,
    from_data,
    to_data,
)
from hpcsched.lifecycle.job import TABLE, apply, can, submitted_jobs
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, FINAL, ExitStatus, Hold, Job, JobState, Reason
from hpcsched.model.spec import ArraySpec

ONE = JobId(1)
N1, N2 = NodeName("n1"), NodeName("n2")


def allocated(*nodes: str, at_s: float = T0) -> Allocated:
    return Allocated(job_id=ONE, at_s=at_s, token="t", epoch=1, shares=tuple(share(name) for name in nodes))


def exited(node: NodeName = N1, code: int = 0, **fields: object) -> Exited:
    return Exited(job_id=ONE, at_s=T0 + 9, node=node, exit=ExitStatus(code=code), **fields)  # type: ignore[arg-type]


def end(outcome: JobState = JobState.CANCELLED, requeue: bool = False) -> EndRequested:
    return EndRequested(job_id=ONE, at_s=T0 + 5, outcome=outcome, by_uid=7, why="because", requeue=requeue)


STARTED = Started(job_id=ONE, at_s=T0 + 1)


def after(*events: JobEvent) -> Job:
    result = job()
    for event in events:
        result = apply(result, event)
    return result


def test_a_job_on_one_node_is_over_when_its_script_has_ended() -> None:
    done = after(allocated("n1"), STARTED, exited())
    assert (done.state, done.held_nodes, done.ended_at_s) == (JobState.COMPLETED, (), T0 + 9)


def test_a_job_ends_when_its_last_node_is_clear_at_the_time_its_script_ended() -> None:
    ending = after(allocated("n1", "n2"), STARTED, exited())
    assert (ending.state, ending.held_nodes) == (JobState.COMPLETING, (N2,))
    done = apply(ending, NodeCleared(job_id=ONE, at_s=T0 + 20, node=N2))
    assert (done.state, done.ended_at_s) == (JobState.COMPLETED, T0 + 9)


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (exited(code=3), JobState.FAILED),
        (exited(timed_out=True), JobState.TIMEOUT),
        (exited(code=1, out_of_memory=True), JobState.OUT_OF_MEMORY),
        (Exited(job_id=ONE, at_s=T0, node=N1, exit=ExitStatus(code=0, signal=9)), JobState.FAILED),
        (LaunchRefused(job_id=ONE, at_s=T0, node=N1, why="no such directory"), JobState.FAILED),
    ],
)
def test_how_it_ended_decides_its_state(event: JobEvent, outcome: JobState) -> None:
    assert after(allocated("n1"), *([] if isinstance(event, LaunchRefused) else [STARTED]), event).state is outcome


def test_a_pending_job_is_cancelled_at_once_and_a_running_one_when_nodes_are_clear() -> None:
    assert after(end()).state is JobState.CANCELLED
    ending = after(allocated("n1"), STARTED, end())
    assert (ending.state, ending.outcome, ending.ended_by_uid) == (JobState.COMPLETING, JobState.CANCELLED, 7)
    assert apply(ending, exited(code=1)).state is JobState.CANCELLED


def test_a_job_with_a_lost_node_is_requeued_only_when_all_its_nodes_are_clear() -> None:
    lost = NodeLost(job_id=ONE, at_s=T0 + 5, node=N2, why="rebooted", requeue=True, not_before_s=T0 + 15)
    ending = after(allocated("n1", "n2"), STARTED, lost)
    assert (ending.state, ending.held_nodes, ending.attempt) == (JobState.COMPLETING, (N1,), 0)
    again = apply(ending, NodeCleared(job_id=ONE, at_s=T0 + 6, node=N1))
    assert (again.state, again.attempt, again.restarts, again.not_before_s) == (JobState.PENDING, 1, 1, T0 + 15)
    assert (again.token, again.exit) == ("", None)


def test_an_elastic_job_goes_on_without_a_lost_node_as_long_as_enough_are_left() -> None:
    job = after(allocated("n1", "n2"), STARTED)
    lost = NodeLost(job_id=ONE, at_s=T0 + 50, node=N2, why="rebooted", requeue=True)
    elastic = replace(job, spec=replace(job.spec, elastic=True, nodes_min=1))
    left = apply(elastic, lost)
    assert (left.state, left.held_nodes, left.left_nodes) == (JobState.RUNNING, (N1,), (N2,))
    assert left.generation == job.generation + 1, "its processes hear of it"
    assert left.charged_cpu_s == 50.0
    assert apply(elastic, replace(lost, node=N1)).state is JobState.COMPLETING, "its script ran there"
    assert apply(replace(elastic, spec=replace(elastic.spec, nodes_min=2)), lost).state is JobState.COMPLETING


def test_a_script_that_fails_beside_a_lost_node_is_not_to_blame() -> None:
    failed = after(allocated("n1", "n2"), STARTED, exited(code=1))
    lost = NodeLost(job_id=ONE, at_s=T0 + 20, node=N2, why="rebooted", requeue=True)
    assert (apply(failed, lost).state, apply(failed, lost).attempt) == (JobState.PENDING, 1)
    silent = NodeSilent(job_id=ONE, at_s=T0 + 20, node=N2, why="no answer", requeue=True)
    waiting = apply(failed, silent)
    assert (waiting.state, waiting.held_nodes) == (JobState.COMPLETING, (N2,))
    assert apply(waiting, NodeCleared(job_id=ONE, at_s=T0 + 30, node=N2)).attempt == 1
    succeeded = after(allocated("n1", "n2"), STARTED, exited(code=0))
    assert apply(succeeded, lost).state is JobState.COMPLETED
    assert apply(after(allocated("n1", "n2"), STARTED, end(), exited(code=1)), lost).state is JobState.CANCELLED


def test_a_lost_node_ends_a_job_that_is_not_to_be_requeued() -> None:
    lost = NodeLost(job_id=ONE, at_s=T0 + 5, node=N1, why="rebooted", requeue=False)
    assert after(allocated("n1"), STARTED, lost).state is JobState.NODE_FAIL


def test_a_cancel_keeps_a_job_from_going_back_to_the_queue() -> None:
    lost = NodeLost(job_id=ONE, at_s=T0 + 5, node=N2, why="rebooted", requeue=True)
    cancelled = after(allocated("n1", "n2"), STARTED, lost, end())
    assert apply(cancelled, NodeCleared(job_id=ONE, at_s=T0 + 6, node=N1)).state is JobState.CANCELLED


def test_every_second_that_a_part_of_a_node_was_held_is_charged_across_attempts() -> None:
    lost = NodeLost(job_id=ONE, at_s=T0 + 100, node=N2, why="rebooted", requeue=True)
    first = apply(after(allocated("n1", "n2"), STARTED, lost), NodeCleared(job_id=ONE, at_s=T0 + 130, node=N1))
    assert (first.charged_cpu_s, first.charged_mem_mib_s) == (230.0, 23000.0)
    second = apply(apply(first, allocated("n1", at_s=T0 + 200)), STARTED)
    done = apply(second, Exited(job_id=ONE, at_s=T0 + 210, node=N1, exit=ExitStatus(code=0)))
    assert (done.state, done.charged_cpu_s) == (JobState.COMPLETED, 240.0)


def test_an_ended_job_can_be_put_back_and_nothing_else() -> None:
    done = after(allocated("n1"), STARTED, exited(code=1))
    assert {event for state, event in TABLE if state in FINAL} == {Requeued}
    again = apply(done, Requeued(job_id=ONE, at_s=T0 + 50, by_uid=7))
    assert (again.state, again.attempt) == (JobState.PENDING, 1)


def test_what_cannot_happen_raises() -> None:
    with pytest.raises(InvariantError, match="cannot apply Started to job 1: it is PENDING"):
        apply(job(), STARTED)


def test_an_array_becomes_one_job_for_each_index_with_consecutive_ids() -> None:
    event = Submitted(job_id=JobId(40), at_s=T0, spec_id=3, uid=1000, user="ann", partition="main", time_limit_s=None)
    tasks = submitted_jobs(event, spec(array=ArraySpec(indices=(1, 5, 9))))
    assert [(task.id, task.display_id) for task in tasks] == [(40, "40_1"), (41, "40_5"), (42, "40_9")]


ANY_EVENT = st.sampled_from(
    [
        EndRequested(job_id=ONE, at_s=T0, outcome=JobState.TIMEOUT, by_uid=None, why="its limit"),
        Held(job_id=ONE, at_s=T0, hold=Hold.USER, by_uid=1),
        Released(job_id=ONE, at_s=T0, by_uid=1),
        Changed(job_id=ONE, at_s=T0, by_uid=1, nice=5),
        BecameEligible(job_id=ONE, at_s=T0),
        allocated("n1", "n2"),
        STARTED,
        end(),
        end(requeue=True),
        exited(N1),
        exited(N1, code=2),
        LaunchRefused(job_id=ONE, at_s=T0, node=N1, why="x"),
        NodeCleared(job_id=ONE, at_s=T0, node=N1),
        NodeCleared(job_id=ONE, at_s=T0, node=N2),
        NodeLost(job_id=ONE, at_s=T0, node=N1, why="x", requeue=True),
        NodeLost(job_id=ONE, at_s=T0, node=N2, why="x", requeue=False),
        NodeSilent(job_id=ONE, at_s=T0, node=N2, why="x", requeue=True),
        Requeued(job_id=ONE, at_s=T0, by_uid=1),
    ]
)


@given(st.lists(ANY_EVENT, max_size=30))
def test_whatever_happens_a_job_holds_nodes_exactly_while_it_is_active(events: list[JobEvent]) -> None:
    state = job()
    for event in events:
        if isinstance(event, NodeCleared | LaunchRefused) and state.state in (JobState.RUNNING, JobState.SUSPENDED):
            with pytest.raises(InvariantError, match="it has not given it back"):
                apply(state, event)  # a job that runs is rid only of nodes that it is about to get or to lose
        elif can(state, type(event)):
            attempt = state.attempt
            state = apply(state, event)
            assert (state.state in ACTIVE) == bool(state.held_nodes)
            assert (state.state is JobState.COMPLETING) <= (state.outcome is not None or state.requeue_wanted)
            assert state.attempt in (attempt, attempt + 1)


SUBMITTED = Submitted(job_id=ONE, at_s=T0, spec_id=1, uid=1, user="ann", partition="main", time_limit_s=None)


@given(ANY_EVENT | st.just(SUBMITTED))
def test_an_event_survives_being_stored(event: JobEvent) -> None:
    assert from_data(type(event).__name__, event.job_id, event.at_s, to_data(event)) == event


def test_a_job_ends_when_its_script_did_however_late_we_hear_of_it() -> None:
    late = Exited(job_id=ONE, at_s=T0 + 3600, node=N1, exit=ExitStatus(code=0), ran_s=3.0)
    done = after(allocated("n1"), STARTED, late)
    assert (done.started_at_s, done.ended_at_s) == (T0 + 1, T0 + 4)
    unheard = after(allocated("n1"), late)  # nor of its start
    assert (unheard.started_at_s, unheard.ended_at_s) == (T0 + 3597, T0 + 3600)


def test_a_job_has_run_since_its_script_was_started_however_late_we_hear_of_it() -> None:
    started = after(allocated("n1"), Started(job_id=ONE, at_s=T0 + 100, ran_s=90.0))
    assert (started.allocated_at_s, started.started_at_s) == (T0, T0 + 10)
    late = Exited(job_id=ONE, at_s=T0 + 110, node=N1, exit=ExitStatus(code=0), ran_s=105.0, ago_s=0.0)
    ended = apply(started, late)
    assert (ended.started_at_s, ended.ended_at_s) == (T0 + 5, T0 + 110)


def test_no_job_starts_before_it_has_its_nodes_whatever_their_clock_says() -> None:
    started = after(allocated("n1"), Started(job_id=ONE, at_s=T0 + 100, ran_s=1e9))
    assert started.started_at_s == started.allocated_at_s
    future = after(allocated("n1"), Started(job_id=ONE, at_s=T0 + 100, ran_s=-1e9))
    assert future.started_at_s == T0 + 100


def test_nobody_is_charged_for_the_time_between_a_jobs_end_and_our_hearing_of_it() -> None:
    late = Exited(job_id=ONE, at_s=T0 + 3600, node=N1, exit=ExitStatus(code=0), ran_s=3.0, ago_s=600.0)
    done = after(allocated("n1"), STARTED, late)
    held_s = (T0 + 3000) - (done.allocated_at_s or 0.0)
    assert (done.ended_at_s, done.charged_cpu_s) == (T0 + 3000, pytest.approx(held_s * done.shares[0].cpus))
    unheard = after(allocated("n1"), late)
    assert (unheard.started_at_s, unheard.ended_at_s) == (T0 + 2997, T0 + 3000)


def test_other_nodes_are_charged_until_the_end_and_again_from_the_report_of_it() -> None:
    late = Exited(job_id=ONE, at_s=T0 + 3600, node=N1, exit=ExitStatus(code=0), ran_s=3.0, ago_s=600.0)
    done = after(allocated("n1", "n2"), STARTED, late, NodeCleared(job_id=ONE, at_s=T0 + 3602, node=NodeName("n2")))
    held_s = (T0 + 3000) - (done.allocated_at_s or 0.0)
    first, second = done.shares
    assert done.charged_cpu_s == pytest.approx(held_s * first.cpus + (held_s + 2) * second.cpus)


@pytest.mark.parametrize(("code", "outcome"), [(0, JobState.COMPLETED), (3, JobState.FAILED)])
def test_a_job_of_a_silent_node_that_had_ended_in_time_did_not_time_out(code: int, outcome: JobState) -> None:
    ended = EndRequested(job_id=ONE, at_s=T0 + 100, outcome=JobState.TIMEOUT, by_uid=None, why="its time limit")
    limit = Changed(job_id=ONE, at_s=T0, by_uid=7, time_limit_s=60)

    def late(ran_s: float) -> Exited:
        return Exited(job_id=ONE, at_s=T0 + 500, node=N1, exit=ExitStatus(code=code), ran_s=ran_s, ago_s=450.0)

    done = after(limit, allocated("n1"), STARTED, ended, late(40.0))
    assert (done.state, done.reason_detail) == (outcome, "")
    over = after(limit, allocated("n1"), STARTED, ended, late(61.0))
    assert (over.state, over.reason) == (JobState.TIMEOUT, Reason.TIME_LIMIT)


@pytest.mark.parametrize("ago_s", [-100.0, 1e9])
def test_an_end_is_never_before_the_start_or_in_the_future(ago_s: float) -> None:
    done = after(allocated("n1"), STARTED, exited(ran_s=3.0, ago_s=ago_s))
    assert T0 <= (done.started_at_s or 0) <= (done.ended_at_s or 0) <= T0 + 9


@pytest.mark.parametrize("ran_s", [-100.0, 1e9])
def test_a_clock_that_jumps_on_the_node_ends_no_job_before_it_began_or_in_the_future(ran_s: float) -> None:
    done = after(allocated("n1"), STARTED, exited(ran_s=ran_s))
    assert T0 + 1 <= (done.ended_at_s or 0) <= T0 + 9
