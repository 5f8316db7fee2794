"""A request for thousands of jobs is done in parts, a part in each tick; the jobs that have ended do not fill the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from cluster import ANN, BOB, Cluster
from jobs import spec

from hpcsched.auth.authorize import Identity
from hpcsched.controller import daemon, tick
from hpcsched.controller.memory import Memory
from hpcsched.controller.requests import jobs, submission
from hpcsched.controller.requests.jobs import JOBS_PER_TICK
from hpcsched.errors import RateLimitError, RequestError
from hpcsched.model.job import JobState
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind

MANY = 2 * JOBS_PER_TICK + 100


def array(size: int = MANY) -> ArraySpec:
    return ArraySpec(indices=tuple(range(size)))


async def ticking(cluster: Cluster, ask: Callable[[], Awaitable[Any]], seen: list[int]) -> Any:
    """Return the answer; `seen` gets the number of waiting jobs after each tick that it took."""
    asked = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    while not asked.done():
        await asyncio.sleep(0)
        cluster.tick()
        seen.append(len(cluster.state.pending))
        for _ in range(5):
            await asyncio.sleep(0)
    return asked.result()


def test_a_large_cancel_changes_a_part_of_the_jobs_in_each_tick() -> None:
    cluster = Cluster("n1")
    first = cluster.submit(array=array(), hold=True)
    seen: list[int] = []
    answer = asyncio.run(ticking(cluster, lambda: cluster.backend().act(ANN, "cancel", {"jobs": [str(first)]}), seen))
    assert sorted(answer["jobs"]) == list(range(first, first + MANY))
    assert answer["errors"] == []
    steps = [before - after for before, after in zip([MANY, *seen], seen, strict=False)]
    assert max(steps) == JOBS_PER_TICK
    assert sum(steps) == MANY


def test_a_large_submission_is_answered_before_the_memory_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, float]] = []
    monkeypatch.setattr(Memory, "note", lambda memory, job, now_s: noted.append((job.id, now_s)))
    cluster = Cluster("n1")
    first = cluster.submit(array=array(), hold=True)
    submitted_s = cluster.now_s
    assert len(cluster.state.pending) == len(cluster.store.load_jobs(0.0)) == MANY
    assert noted == []
    cluster.tick(1.0)
    assert noted == [(job_id, submitted_s) for job_id in range(first, first + MANY)]
    cluster.tick(1.0)
    assert len(noted) == MANY


def test_a_request_by_filter_is_done_in_parts_too() -> None:
    cluster = Cluster("n1")
    cluster.submit(array=array(), hold=True)
    other = cluster.submit(BOB, hold=True)
    body = {"jobs": [], "filters": {"state": "PENDING"}}
    answer = asyncio.run(ticking(cluster, lambda: cluster.backend().act(ANN, "cancel", body), []))
    assert len(answer["jobs"]) == MANY
    assert list(cluster.state.pending) == [other]


def test_all_parts_are_done_if_the_client_leaves_after_the_first() -> None:
    cluster = Cluster("n1")
    first = cluster.submit(array=array(), hold=True)

    async def leave() -> None:
        backend = cluster.backend()
        asked = asyncio.ensure_future(backend.act(ANN, "cancel", {"jobs": [str(first)]}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cluster.tick()
        asked.cancel()
        while backend._changing:
            await asyncio.sleep(0)
            cluster.tick()

    asyncio.run(leave())
    assert not cluster.state.pending


def test_a_job_that_is_named_and_refused_in_a_later_part_is_an_error() -> None:
    cluster = Cluster("n1")
    first = cluster.submit(array=array(JOBS_PER_TICK), hold=True)
    ended = cluster.submit(hold=True)
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(ended)], {}))
    body = {"jobs": [str(first), str(ended)]}
    answer = asyncio.run(ticking(cluster, lambda: cluster.backend().act(ANN, "cancel", body), []))
    assert len(answer["jobs"]) == JOBS_PER_TICK
    assert [error["job"] for error in answer["errors"]] == [str(ended)]


def test_each_part_of_a_request_is_continued_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOBS_PER_TICK", 1)
    cluster = Cluster("n1")
    ids = [cluster.submit() for _ in range(2)]
    cluster.tick()
    for job_id in ids:
        cluster.run(job_id)
    references = [str(job_id) for job_id in ids]
    outcome = jobs.Outcome()
    for batch in (False, True):  # the steps of the jobs, then their batch scripts
        outcome.add(cluster.ask(lambda tx, batch=batch: jobs.signal(tx, ANN, references, {}, 10, batch, False)))
    while outcome.remaining:
        part = cluster.ask(lambda tx: jobs.continued(tx, outcome))
        outcome.remaining = []
        outcome.add(part)
    assert sorted((sent.job.id, sent.batch_only) for sent in outcome.signals) == [
        (job_id, batch) for job_id in ids for batch in (False, True)
    ]


def test_a_change_of_thousands_of_tasks_reaches_each_of_them() -> None:
    cluster = Cluster("n1")
    first = cluster.submit(array=array(), hold=True)
    body = {"jobs": [str(first)], "changes": {"comment": "new"}}
    answer = asyncio.run(ticking(cluster, lambda: cluster.backend().act(ANN, "update", body), []))
    assert len(answer["jobs"]) == MANY
    assert {cluster.job(job_id).spec.comment for job_id in cluster.state.pending} == {"new"}


def test_two_large_requests_have_a_tick_each() -> None:
    cluster = Cluster("n1")
    answers: list[Any] = []
    for _ in range(2):
        one = jobs_of(cluster, array())
        cluster.controller.ask(one, answers.append)
    cluster.tick()
    assert len(answers) == 1
    assert len(cluster.state.pending) == MANY
    cluster.tick()
    assert len(answers) == 2
    assert len(cluster.state.pending) == 2 * MANY


def jobs_of(cluster: Cluster, of: ArraySpec) -> Any:
    return lambda tx: submission.submit(tx, ANN, "", [spec(array=of, hold=True)], cluster.store.request_jobs)


def test_ended_jobs_beyond_the_limit_leave_the_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tick, "ENDED_JOBS", 100)
    monkeypatch.setattr(jobs, "JOBS_PER_TICK", 500)
    cluster = Cluster("n1")
    needed = cluster.submit(hold=True)
    cluster.submit(hold=True, dependency=(Dependency(kind=DependencyKind.AFTER_NOT_OK, job_ids=(needed,)),))
    first = cluster.submit(array=array(300), hold=True)
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(needed)], {}))
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(first)], {}))
    ended = sorted(job.id for job in cluster.state.jobs.values() if job.state is JobState.CANCELLED)
    assert ended == [needed, *range(first + 200, first + 300)]  # the last to end, and what a job waits for


def test_between_long_ticks_the_loop_answers_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "LONG_TICK_S", 0.0)

    async def turns_between_ticks() -> list[int]:
        at: list[int] = []
        turns = 0

        def tick() -> None:
            at.append(turns)
            alarm.wake(0.0)

        alarm = daemon.Alarm(tick)
        alarm.wake(0.0)
        while len(at) < 3:
            await asyncio.sleep(0)
            turns += 1
        return at

    first, second, third = asyncio.run(turns_between_ticks())
    assert second - first > daemon.PASSES
    assert third - second > daemon.PASSES


def test_a_part_of_a_request_looks_at_none_of_the_jobs_of_later_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOBS_PER_TICK", 1)
    cluster = Cluster("n1")
    ids = [str(cluster.submit(hold=True)) for _ in range(20)]
    looked_at: list[int] = []
    change_each = jobs._change_each
    monkeypatch.setattr(
        jobs, "_change_each", lambda tx, some, *more: looked_at.append(len(some)) or change_each(tx, some, *more)
    )
    answer = asyncio.run(ticking(cluster, lambda: cluster.backend().act(ANN, "cancel", {"jobs": ids}), []))
    assert len(answer["jobs"]) == 20
    assert sum(looked_at) == 20 + 19  # all at first, and each of the others in its own part


def test_a_user_who_has_submitted_very_many_jobs_waits_and_others_do_not() -> None:
    """The database keeps all jobs, also of arrays that are cancelled at once."""
    cluster = Cluster("n1")
    config = cluster.state.config
    limits = replace(config.controller, submit_rate=0.01, submit_burst=10)
    cluster.state.config = replace(config, controller=limits)
    backend = cluster.backend()
    backend._serves_all = False  # these accounts are not on this machine

    def submit(identity: Identity, size: int) -> Any:
        return asyncio.run(
            ticking(cluster, lambda: backend.submit(identity, "", [spec(array=array(size), hold=True)]), [])
        )

    with pytest.raises(RequestError, match="max_submit_jobs"):
        submit(ANN, 1_000_000)  # what is refused does not count
    assert len(submit(ANN, 9)["jobs"]) == 1
    assert len(submit(ANN, 8)["jobs"]) == 1  # one may be left over, and is borrowed
    with pytest.raises(
        RateLimitError, match=r"submitted 10 jobs, and more than 0\.01 per second.*submit_rate"
    ) as refused:
        submit(ANN, 1)
    assert 700 < refused.value.wait_s <= 800
    assert len(submit(BOB, 5)["jobs"]) == 1
    cluster.state.config = replace(config, controller=replace(limits, submit_rate=0))
    assert len(submit(ANN, 5)["jobs"]) == 1
