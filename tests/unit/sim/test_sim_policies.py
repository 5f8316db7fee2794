"""Each policy on small traces checked by hand, and against the planner's general way on drawn ones."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from unit.sim.brute import brute_starts
from unit.sim.traces import PROCS, SMALL, job, traces

from hpcsched.errors import RequestError
from hpcsched.sched.experience import Needed, RequestUse, ShadowEasy
from hpcsched.sched.guard import Candidate
from hpcsched.sched.policy import Backfill, Guard, ShortJobs
from hpcsched.sched.pool import ConservativePool, Waiting
from hpcsched.sim.policies import PLAN, POLICIES, GuardedPool, PlannedLine, PoolCapacity, replay, simulate
from hpcsched.sim.swf import Trace, TraceJob, trace_of


def starts(policy: str, jobs: Sequence[TraceJob]) -> list[float]:
    return list(simulate(Trace(name="t", jobs=tuple(jobs), procs=PROCS), policy).starts_s)


@pytest.mark.parametrize(
    ("policy", "at_s"),
    [
        ("fcfs", [0, 60, 60, 80, 110]),
        ("easy", [0, 60, 2, 3, 110]),
        ("easy-sjbf", [0, 60, 2, 3, 110]),
        ("conservative", [0, 60, 2, 3, 110]),
        ("slurm-like", [0, 60, 2, 3, 110]),
    ],
)
def test_the_small_trace_goes_as_worked_out_by_hand(policy: str, at_s: list[float]) -> None:
    assert list(simulate(trace_of(SMALL.splitlines(), "small"), policy).starts_s) == at_s


def test_sjbf_prefers_the_shorter_of_two_that_fit() -> None:
    longer_first = [job(1, 0, 10, 8), job(2, 0, 50, 2), job(3, 1, 50, 10), job(4, 2, 30, 8), job(5, 3, 10, 8)]
    assert starts("easy", longer_first) == [0, 0, 50, 10, 40]
    assert starts("easy-sjbf", longer_first) == [0, 0, 50, 20, 10]


@pytest.mark.parametrize("policy", ["easy", "easy-sjbf"])
def test_what_one_takes_of_the_extra_processors_the_next_cannot_have(policy: str) -> None:
    # Until 20 five are free; the head needs seven and leaves three. Two jobs of two outlast its promise: one may.
    jobs = [job(1, 0, 20, 5), job(2, 1, 50, 7), job(3, 2, 20, 5), job(4, 3, 90, 2), job(5, 4, 100, 2), job(6, 5, 90, 1)]
    jobs[2] = job(3, 2, 12, 5)  # ends by 20, and at its end the pass has both before it
    assert starts(policy, jobs) == [0, 20, 2, 14, 70, 14]


def test_default_lets_the_user_of_short_jobs_go_first() -> None:
    # Both ask for 100 s; the second user's jobs have always been short.
    jobs = [job(1, 0, 2, 10, 100, 2), job(2, 10, 90, 10, 100, 1), job(3, 11, 90, 10, 100, 1), job(4, 12, 2, 10, 100, 2)]
    assert starts("easy", jobs) == [0, 10, 100, 190]
    assert starts("default", jobs) == [0, 10, 102, 100]


NO_SHORT_JOBS = ShortJobs(share=0)
ALWAYS = 2.0  # no machine's jobs use twice of what they ask for: requests are never trusted


def guarded_pool(jobs: Sequence[TraceJob], guard: Guard) -> GuardedPool:
    return GuardedPool(
        PROCS, [one.procs for one in jobs], [one.asked_s for one in jobs], [one.user for one in jobs], guard
    )


def guarded(jobs: Sequence[TraceJob], guard: Guard) -> list[float]:
    return replay(jobs, guarded_pool(jobs, guard))


def test_a_job_that_asked_for_no_time_holds_nothing() -> None:
    # Its limit is up at the second at which it starts, so what it takes is free for the next in the very same pass.
    jobs = [job(1, 0, 10, 10), job(2, 1, 0, 6), job(3, 2, 5, 10), job(4, 3, 0, 10)]
    for policy in ("fcfs", "easy", "easy-sjbf"):
        assert starts(policy, jobs) == [0, 10, 10, 15], policy


@given(traces(most=40))
@settings(max_examples=200, deadline=None)
def test_default_is_plain_easy_if_everybody_is_old(jobs: list[TraceJob]) -> None:
    assert guarded(
        jobs, Guard(overdue_part=0, least_easy_wait_s=0, learning_s=0, promises=1, short=NO_SHORT_JOBS)
    ) == starts("easy", jobs)


@given(traces(most=40))
@settings(max_examples=100, deadline=None)
def test_the_guard_lets_every_job_start_whatever_its_numbers(jobs: list[TraceJob]) -> None:
    for guard in (Guard(learning_s=0), Guard(least_easy_wait_s=20, learning_s=0), Guard(learning_s=5), Guard()):
        assert all(at_s >= one.submit_s for one, at_s in zip(jobs, guarded(jobs, guard), strict=True))


def test_nothing_that_begins_before_a_job_is_old_keeps_it_waiting_after() -> None:
    # Job 2 needs all and is old at 45. Job 3 would run until 102; job 4 is over by then.
    jobs = [job(1, 0, 30, 5), job(2, 1, 10, 10), job(3, 2, 100, 5), job(4, 3, 20, 5)]
    guard = Guard(
        short=NO_SHORT_JOBS,
        promises=1,
        overdue_part=0.5,
        least_easy_wait_s=100,
        first=1,
        first_part=0.5,
        wide=2,
        learning_s=0,
    )
    assert guarded(jobs, guard) == [0, 30, 40, 3]
    assert guarded(jobs, replace(guard, first=0)) == [0, 102, 2, 30]
    wide = replace(guard, first=0, wide=0.8, wide_part=0.5)
    assert guarded(jobs, wide) == [0, 30, 40, 3]


def test_of_the_old_the_wide_one_counts_as_having_waited_longer() -> None:
    # Both are old at 30. Job 3 needs all, which counts as 10 s more; job 2 half, which counts as 5 s more.
    jobs = [job(1, 0, 30, 10), job(2, 1, 30, 5), job(3, 2, 10, 10)]
    guard = Guard(short=NO_SHORT_JOBS, promises=1, overdue_part=0.1, least_easy_wait_s=100, wide_bonus=1, learning_s=0)
    assert guarded(jobs, guard) == [0, 40, 30]
    assert guarded(jobs, replace(guard, wide_bonus=0)) == [0, 30, 60]


def test_a_wide_one_is_old_before_a_narrow_one_that_came_with_it() -> None:
    # At 8 job 2 is old for its size, having come at 1, and job 3, which is shorter, is not.
    jobs = [job(1, 0, 8, 10, 8, 1), job(2, 1, 50, 10, 50, 2), job(3, 1, 10, 5, 10, 3)]
    guard = Guard(
        short=NO_SHORT_JOBS,
        promises=1,
        overdue_part=0.1,
        least_easy_wait_s=100,
        wide_bonus=0.5,
        first=0,
        wide=2,
        learning_s=0,
    )
    assert guarded(jobs, guard) == [0, 8, 58]
    assert guarded(jobs, replace(guard, wide_bonus=0)) == [0, 18, 8]


def test_long_jobs_are_not_overtaken_for_their_length_once_somebody_has_waited_long() -> None:
    jobs = [job(1, 0, 100, 10, 100, 1), job(2, 10, 50, 8, 1000, 2), job(3, 20, 50, 8, 100, 3)]
    guard = Guard(
        short=NO_SHORT_JOBS,
        promises=1,
        overdue_part=0.9,
        least_easy_wait_s=10_000,
        first=0,
        wide=2,
        learning_s=0,
        long_least_s=10,
        long_per_calm=1,
    )
    assert guarded(jobs, guard) == [0, 150, 100]
    assert guarded(jobs, replace(guard, calm_part=0.009)) == [0, 100, 150]  # 90 s are waited for, so none are left


def test_a_quick_job_goes_ahead_of_the_first_in_line() -> None:
    # All are old, so all else is EASY's. Job 3 asks for 5 s of 2 processors: 1 s of the machine.
    jobs = [job(1, 0, 30, 10), job(2, 1, 50, 10), job(3, 2, 4, 2, 5)]
    short = ShortJobs(limit_s=5, work_s=1, share=0.2, wait_part=0.03)
    at = lambda short: guarded(  # noqa: E731
        jobs, Guard(overdue_part=0, least_easy_wait_s=1000, learning_s=0, promises=1, short=short)
    )
    assert at(short) == [0, 34, 30]
    for never in ({"limit_s": 4}, {"work_s": 0.9}, {"share": 0.1}, {"wait_part": 0.028}):  # job 2 has waited for 29 s
        assert at(replace(short, **never)) == [0, 30, 80], never


@given(traces(most=40))
@settings(max_examples=200, deadline=None)
def test_those_that_went_ahead_hold_no_more_than_their_share(jobs: list[TraceJob]) -> None:
    line = guarded_pool(
        jobs,
        Guard(overdue_part=0, least_easy_wait_s=60, learning_s=0, short=ShortJobs(limit_s=10, work_s=5, share=0.4)),
    )
    has_for_short = PoolCapacity.has_for_short

    def watched(room: PoolCapacity, one: Candidate[Waiting]) -> bool:
        allowed = has_for_short(room, one)
        held = sum(jobs[at].procs for at, end_s in line.ends_of.items() if line.is_short(at) and end_s > room.now_s)
        assert not allowed or held + one.amount <= 0.4 * PROCS
        return allowed

    with mock.patch.object(PoolCapacity, "has_for_short", watched):
        replay(jobs, line)


def test_where_requests_are_not_trusted_short_jobs_of_long_requests_fill_holes() -> None:
    # Until 400 half is free; job 3 needs all. Job 4 asks for 5000 s, and its user's job before it ran for 100 s.
    jobs = [
        job(1, 0, 100, 5, 5000, 1),
        job(2, 0, 400, 5, 400, 2),
        job(3, 150, 50, 10, 50, 3),
        job(4, 160, 100, 5, 5000, 1),
    ]
    guard = Guard(
        overdue_part=0,
        least_easy_wait_s=0,
        learning_s=0,
        promises=1,
        short=NO_SHORT_JOBS,
        distrust_part=0,
        distrust_times=2,
    )
    assert guarded(jobs, guard) == [0, 0, 400, 450]
    assert guarded(jobs, replace(guard, distrust=ALWAYS)) == [0, 0, 400, 160]
    assert guarded(jobs, replace(guard, distrust=ALWAYS, distrust_times=3)) == [0, 0, 400, 450]  # it may need 300 s


def test_a_job_that_outlasts_its_prediction_is_expected_to_run_as_long_again() -> None:
    needed = Needed({1: 100.0}, times=2)
    assert needed.length_s(1, 1000.0) == 200.0
    assert needed.length_s(1, 150.0) == 150.0  # never more than it asks for
    assert needed.length_s(2, 1000.0) == 1000.0  # nothing is known of its user
    assert needed.end_s(1, 50.0, 1050.0, now_s=60.0) == 250.0
    assert needed.end_s(1, 50.0, 1050.0, now_s=250.0) == 450.0
    assert needed.end_s(1, 50.0, 1050.0, now_s=950.0) == 1050.0
    assert Needed({1: 0.0}, times=2).length_s(1, 1000.0) == 60.0


def test_the_use_of_requests_is_known_after_some_jobs_and_forgets() -> None:
    use = RequestUse()
    for _ in range(199):
        use.record(10.0, 100.0, 4)
    assert use.part == 1.0
    use.record(10.0, 100.0, 4)
    assert use.part == pytest.approx(0.1)
    for _ in range(50_000):
        use.record(90.0, 100.0, 1)
    assert use.part == pytest.approx(0.9, abs=0.01)


def test_requests_are_trusted_again_once_jobs_use_them() -> None:
    # 210 jobs run for 1 s of the 1000 that they ask for, 60 more for all of it: together for 0.22 of it.
    short = [job(at, 20 * at, 1, 10, 1000, at % 10) for at in range(210)]
    exact = [job(at, 20 * at, 1000, 10, 1000, at % 10) for at in range(210, 270)]
    line = guarded_pool(short, Guard())
    replay(short, line)
    assert line.guard.distrusts(line.request_use.part)
    line = guarded_pool([*short, *exact], Guard())
    replay([*short, *exact], line)
    assert not line.guard.distrusts(line.request_use.part)


@given(traces(most=40))
@settings(max_examples=200, deadline=None)
def test_exact_predictions_are_as_good_as_exact_requests(jobs: list[TraceJob]) -> None:
    # Each job has a user of its own whose run time is known: then to distrust requests is EASY with exact requests.
    jobs = [one._replace(user=at, run_s=max(60, one.run_s)) for at, one in enumerate(jobs)]
    jobs = [one._replace(asked_s=max(one.asked_s, one.run_s)) for one in jobs]
    guard = Guard(overdue_part=0, least_easy_wait_s=0, learning_s=0, promises=1, short=NO_SHORT_JOBS)
    line = guarded_pool(jobs, replace(guard, distrust=ALWAYS, distrust_part=0, distrust_times=1))
    line.history.longest_s = {at: one.run_s for at, one in enumerate(jobs)}
    exact = [one._replace(asked_s=one.run_s) for one in jobs]
    assert replay(jobs, line) == starts("easy", exact)


def test_a_job_that_takes_no_time_is_not_passed_for_ever() -> None:
    # It needs all; the others take turns on half of the machine each, and their limits are up together at no time.
    jobs = [job(1, 0, 10, 5), job(2, 1, 0, 10)] + [job(3 + at, 2 + 5 * at, 10, 5) for at in range(20)]
    assert guarded(jobs, Guard(overdue_part=0, least_easy_wait_s=0, learning_s=0))[1] == 10
    assert guarded(jobs, Guard(overdue_part=0.1, least_easy_wait_s=50, learning_s=0))[1] < 30


@given(traces())
@settings(max_examples=150, deadline=None)
def test_the_quick_way_decides_as_the_planner_does(jobs: list[TraceJob]) -> None:
    trace = Trace(name="t", jobs=tuple(jobs), procs=PROCS)
    for policy in ("fcfs", "easy", "easy-sjbf", "slurm-like"):
        assert starts(policy, jobs) == list(simulate(trace, policy, engine=PLAN).starts_s), policy


GUARDS = (
    Guard(),
    Guard(learning_s=0),
    Guard(learning_s=40, learning_overdue_s=30, least_easy_wait_s=30),
    Guard(learning_s=0, least_easy_wait_s=20, short=ShortJobs(limit_s=10, work_s=5, share=0.4)),
    Guard(learning_s=0, least_easy_wait_s=60, overdue_part=0.3, first_part=0.2, promises=1, long_s=30, long_least_s=10),
    Guard(learning_s=0, least_easy_wait_s=20, distrust=ALWAYS),
    Guard(
        learning_s=20,
        least_easy_wait_s=20,
        distrust=ALWAYS,
        distrust_times=1,
        short=ShortJobs(limit_s=10, work_s=5, share=0.4),
    ),
)


@given(traces(most=30))
@settings(max_examples=150, deadline=None)
def test_default_is_the_same_on_a_pool_and_in_a_plan(jobs: list[TraceJob]) -> None:
    for guard in GUARDS:
        assert guarded(jobs, guard) == replay(jobs, PlannedLine(jobs, Backfill.DEFAULT, PROCS, guard)), guard


@given(traces(most=40, asks=(0, 0.5)))
@settings(max_examples=300, deadline=None)
def test_the_definition_taken_at_its_word_decides_alike(jobs: list[TraceJob]) -> None:
    for policy in ("fcfs", "easy", "easy-sjbf"):
        assert starts(policy, jobs) == brute_starts(jobs, PROCS, policy), policy


class Promised(PlannedLine):
    """Writes down the start that the first plan to look at a job promises it."""

    def __init__(self, jobs: Sequence[TraceJob]) -> None:
        super().__init__(jobs, Backfill.CONSERVATIVE, PROCS)
        self.first_s: dict[int, float] = {}

    def submit(self, at: int, now_s: float) -> Sequence[int]:
        return self.noted(super().submit(at, now_s))

    def end(self, at: int, now_s: float) -> Sequence[int]:
        return self.noted(super().end(at, now_s))

    def noted(self, started: Sequence[int]) -> Sequence[int]:
        for at, wait in self.last_plan.waits.items():
            if wait.expected_start_s is not None:
                self.first_s.setdefault(at, wait.expected_start_s)
        return started


@given(traces())
@settings(max_examples=150, deadline=None)
def test_no_start_that_the_plan_promises_slips_while_jobs_last_as_long_as_they_asked(jobs: list[TraceJob]) -> None:
    jobs = [one._replace(run_s=one.asked_s) for one in jobs]
    line = Promised(jobs)
    at_s = replay(jobs, line)
    assert all(at_s[at] <= first_s for at, first_s in line.first_s.items())


@given(traces())
@settings(max_examples=100, deadline=None)
def test_no_policy_gives_a_processor_twice_or_forgets_a_job(jobs: list[TraceJob]) -> None:
    for policy in POLICIES:
        at_s = starts(policy, jobs)
        assert all(start_s >= one.submit_s for one, start_s in zip(jobs, at_s, strict=True))
        for moment_s in at_s:
            held = sum(
                one.procs for one, start_s in zip(jobs, at_s, strict=True) if start_s <= moment_s < start_s + one.run_s
            )
            assert held <= PROCS, policy


class Watched(ConservativePool):
    """Writes down what was promised to each job first, and that no promise is worse than the one before."""

    def __init__(self, jobs: Sequence[TraceJob]) -> None:
        super().__init__(PROCS, [one.procs for one in jobs], [one.asked_s for one in jobs])
        self.first_s: dict[int, float] = {}

    def submit(self, at: int, now_s: float) -> Sequence[int]:
        started = super().submit(at, now_s)
        self.first_s[at] = now_s if started else self.promises[at]
        return started


def test_a_promise_to_a_job_that_asked_for_no_time_keeps_others_out() -> None:
    # Job 2 is promised 5, when job 1 is at its limit; job 3 would have half of the machine until 7.
    jobs = [job(1, 0, 2, 5, 5), job(2, 1, 0, 10), job(3, 1, 6, 5)]
    assert starts("conservative", jobs) == [0, 2, 2]


@given(traces(asks=(0, 0.5)))
@settings(max_examples=200, deadline=None)
def test_no_promised_start_slips(jobs: list[TraceJob]) -> None:
    line = Watched(jobs)
    at_s = replay(jobs, line)
    assert all(start_s <= line.first_s[at] for at, start_s in enumerate(at_s))


@given(traces(most=40))
@settings(max_examples=150, deadline=None)
def test_the_shadow_schedule_never_claims_more_than_easy_did_and_in_the_end_as_much(jobs: list[TraceJob]) -> None:
    truth_s = max(start_s - one.submit_s for one, start_s in zip(jobs, starts("easy", jobs), strict=True))
    procs, limits_s = [one.procs for one in jobs], [one.asked_s for one in jobs]
    shadow = ShadowEasy(PROCS)

    class Heard(ConservativePool):
        def submit(self, at: int, now_s: float) -> Sequence[int]:
            shadow.submitted(procs[at], limits_s[at], now_s)
            shadow.advance(now_s, more_may_come=True)
            return self.heard(super().submit(at, now_s), now_s)

        def end(self, at: int, now_s: float) -> Sequence[int]:
            shadow.ended(at, now_s)
            shadow.advance(now_s, more_may_come=False)
            assert shadow.longest_wait_s <= truth_s
            return self.heard(super().end(at, now_s), now_s)

        def heard(self, started: Sequence[int], now_s: float) -> Sequence[int]:
            for at in started:
                shadow.started(at, now_s)
            return started

    replay(jobs, Heard(PROCS, procs, limits_s))
    shadow.advance(1e9, more_may_come=False)
    assert shadow.longest_wait_s == truth_s


def test_the_shadow_schedule_forgets_a_job_that_has_started_there_and_ended_here() -> None:
    shadow = ShadowEasy(PROCS)
    sizes = []
    for at in range(200):
        at_s = 10.0 * at
        number = shadow.submitted(PROCS, 10.0, at_s)
        shadow.started(number, at_s)
        shadow.ended(number, at_s + 5)
        shadow.advance(at_s + 6, more_may_come=False)
        sizes.append(len(pickle.dumps(shadow)))
    assert sizes[-1] < sizes[20] + 64


def test_what_is_too_big_or_unknown_is_told() -> None:
    trace = Trace(name="t", jobs=(job(1, 0, 5, 11), job(2, 0, 5, 1)), procs=PROCS)
    assert simulate(trace, "easy").too_big == 1
    assert simulate(trace, "easy", procs=11).too_big == 0
    with pytest.raises(RequestError, match="known are fcfs, easy"):
        simulate(trace, "magic")
    with pytest.raises(RequestError, match="no MaxProcs"):
        simulate(Trace(name="t", jobs=(), procs=0), "easy")


def test_a_trace_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(RequestError, match="none of its 2 jobs fits on 10 processors, the smallest needs 11"):
        simulate(Trace(name="t", jobs=(job(1, 0, 5, 12), job(2, 0, 5, 11)), procs=PROCS), "easy")
    with pytest.raises(RequestError, match="no job that ran"):
        simulate(Trace(name="t", jobs=(), procs=PROCS), "easy")
