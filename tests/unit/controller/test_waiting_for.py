"""Dependencies, deadlines and several partitions in the controller: checked when asked for, followed to their ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, ROOT, Cluster
from jobs import partition

from hpcnode.wire import protocol
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests.jobs import hold, release
from hpcsched.controller.requests.update import update
from hpcsched.controller.views.history import story_of
from hpcsched.controller.views.queue import first_waiting
from hpcsched.errors import RequestError
from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState, Reason
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind
from hpcsched.model.units import UNLIMITED_S
from hpcsched.state.transaction import Transaction

KIND = DependencyKind


def after(*job_ids: int, kind: DependencyKind = KIND.AFTER_OK, **more: Any) -> tuple[Dependency, ...]:
    return (Dependency(kind=kind, job_ids=job_ids, **more),)


def change(cluster: Cluster, reference: str, **changes: str) -> Job:
    """Change a job as its owner; raise what was refused."""
    outcome = cluster.ask(lambda tx: update(tx, ANN, [reference], changes))
    if outcome.errors:
        raise RequestError(outcome.errors[0]["error"])
    return cluster.job(outcome.jobs[0])


def update_as_root(tx: Transaction, job_id: int, **changes: str) -> None:
    outcome = update(tx, ROOT, [str(job_id)], changes)
    if outcome.errors:
        raise RequestError(outcome.errors[0]["error"])


def finish(cluster: Cluster, job_id: int, code: int = 0) -> None:
    cluster.run(job_id)
    cluster.end(job_id, code)


def reason(cluster: Cluster, job_id: int) -> Reason:
    return cluster.state.waits[JobId(job_id)].reason


def test_a_dependency_on_a_task_starts_when_that_task_has_completed() -> None:
    cluster = Cluster("n1")
    array = cluster.submit(array=ArraySpec(indices=(3, 4)))
    last = cluster.submit(dependency=after(array, task=4))
    assert reason(cluster, last) is Reason.DEPENDENCY
    finish(cluster, array)
    assert reason(cluster, last) is Reason.DEPENDENCY
    finish(cluster, array + 1)
    assert cluster.job(last).state is JobState.CONFIGURING


def test_a_dependency_on_what_there_is_not_is_refused() -> None:
    cluster = Cluster("n1")
    array = cluster.submit(array=ArraySpec(indices=(3, 4)))
    with pytest.raises(RequestError, match="there is no such job"):
        cluster.submit(dependency=after(77))
    with pytest.raises(RequestError, match=f"cannot depend on job {array}_5: job {array} has no such task"):
        cluster.submit(dependency=after(array, task=5))
    assert len(cluster.state.jobs) == 2


def test_a_delay_after_a_start_wakes_the_planner() -> None:
    cluster = Cluster("n1")
    first = cluster.submit()
    second = cluster.submit(dependency=after(first, kind=KIND.AFTER, delay_s=300))
    cluster.run(first)
    cluster.tick(100.0)
    assert cluster.job(second).state is JobState.PENDING
    assert 200.0 in cluster.ports.wakes
    cluster.tick(200.0)
    assert cluster.job(second).state is JobState.CONFIGURING


def test_a_changed_dependency_holds_and_outlives_a_restart(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    first, second = cluster.submit(), cluster.submit(hold=True)
    third = cluster.submit(dependency=after(first))
    change(cluster, str(third), dependency=f"afterany:{second}?singleton")
    expected = (Dependency(kind=KIND.AFTER_ANY, job_ids=(second,)), Dependency(kind=KIND.SINGLETON))
    assert (cluster.job(third).dependency, cluster.job(third).dependency_any) == (expected, True)
    again = Cluster("n1", path=tmp_path / "h.db", up=False)
    load_state(again.state, again.store, again.now_s)
    assert again.state.jobs[third] == cluster.job(third)
    change(cluster, str(third), dependency="")
    assert cluster.job(third).state is JobState.CONFIGURING


def test_a_circle_is_refused_with_the_way_round() -> None:
    cluster = Cluster("n1")
    first = cluster.submit(hold=True)
    second = cluster.submit(dependency=after(first))
    third = cluster.submit(dependency=after(second))
    with pytest.raises(
        RequestError, match=f"wait for job {third} which waits for job {second} which waits for job {first}"
    ):
        change(cluster, str(first), dependency=f"afterok:{third}")
    with pytest.raises(RequestError, match="circle"):
        change(cluster, str(first), dependency=f"afterok:{first}")
    assert cluster.job(first).dependency == ()
    change(cluster, str(third), dependency=f"afterok:{first}")


def test_of_a_task_only_the_jobs_that_wait_for_that_task_make_a_circle() -> None:
    cluster = Cluster("n1")
    array = cluster.submit(array=ArraySpec(indices=(0, 1)), hold=True)
    second = cluster.submit(dependency=after(array, task=1))
    change(cluster, f"{array}_0", dependency=f"afterok:{second}")
    with pytest.raises(RequestError, match="circle"):
        change(cluster, f"{array}_1", dependency=f"afterok:{second}")


@pytest.mark.parametrize(("kill", "state"), [(True, JobState.CANCELLED), (False, JobState.PENDING)])
def test_a_dependency_that_can_never_come_true_ends_the_job_that_says_so(kill: bool, state: JobState) -> None:
    cluster = Cluster("n1")
    first = cluster.submit()
    second = cluster.submit(dependency=after(first), kill_on_invalid_dep=kill)
    third = cluster.submit(dependency=after(second, kind=KIND.AFTER_ANY))
    finish(cluster, first, code=1)
    assert cluster.job(second).state is state
    cluster.tick()
    assert cluster.job(third).state is (JobState.CONFIGURING if kill else JobState.PENDING)
    if kill:
        assert "cannot happen any more" in cluster.job(second).reason_detail


def test_a_job_that_waits_too_long_for_its_deadline_ends() -> None:
    cluster = Cluster("n1")
    cluster.submit(cpus_per_task=2)
    job_id = cluster.submit(time_limit_s=60, deadline_at_s=int(cluster.now_s) + 100)
    cluster.tick(39.0)
    assert cluster.job(job_id).state is JobState.PENDING
    assert any(1.0 <= wake < 1.1 for wake in cluster.ports.wakes)
    cluster.tick(1.1)
    assert cluster.job(job_id).state is JobState.DEADLINE
    assert "cannot end by its deadline" in cluster.job(job_id).reason_detail


def test_a_deadline_that_cannot_be_kept_is_refused_and_one_can_be_taken_back() -> None:
    cluster = Cluster("n1")
    now_s = int(cluster.now_s)
    with pytest.raises(RequestError, match="may run for 1:00, and 0:50 is left"):
        cluster.submit(time_limit_s=60, deadline_at_s=now_s + 50)
    with pytest.raises(RequestError, match="and 0:50 is left"):
        cluster.submit(time_limit_s=60, deadline_at_s=now_s + 100, begin_at_s=now_s + 50)
    with pytest.raises(RequestError, match="no time is left"):
        cluster.submit(deadline_at_s=now_s)
    with pytest.raises(RequestError, match="for a job of unlimited time"):
        cluster.submit(time_limit_s=UNLIMITED_S, deadline_at_s=now_s + 100)
    cluster.submit(cpus_per_task=2)
    job_id = cluster.submit(time_limit_s=60, deadline_at_s=now_s + 100)
    with pytest.raises(RequestError, match="may run for 2:00, and 1:40 is left"):
        cluster.ask(lambda tx: update_as_root(tx, job_id, time_limit="2"))
    assert change(cluster, str(job_id), deadline="none").deadline_at_s is None
    cluster.tick(500.0)
    assert cluster.job(job_id).state is JobState.PENDING


def test_a_begin_time_and_a_limit_that_leave_no_time_until_the_deadline_are_refused() -> None:
    cluster = Cluster("n1")
    now_s = int(cluster.now_s)
    cluster.submit(cpus_per_task=2)
    job_id = cluster.submit(time_limit_s=60, deadline_at_s=now_s + 3600)
    for changes in (
        {"begin": "now+1hour"},
        {"begin": "now+30minutes", "time_limit": "31"},
        {"begin": "now+2minutes", "deadline": "now+2minutes"},
    ):
        with pytest.raises(RequestError, match="cannot end by the deadline"):
            cluster.ask(lambda tx, changes=changes: update_as_root(tx, job_id, **changes))
    with pytest.raises(RequestError, match="for a job of unlimited time"):
        cluster.ask(lambda tx: update_as_root(tx, job_id, time_limit="0"))
    cluster.ask(lambda tx: update_as_root(tx, job_id, begin="now+2minutes", deadline="now+1hour", time_limit="30"))


def test_of_an_array_the_first_task_that_waits_is_asked_about() -> None:
    cluster = Cluster("n1")
    array = cluster.submit(array=ArraySpec(indices=(0, 1, 2), limit=1))
    tasks = [cluster.job(array + at) for at in range(3)]
    assert [task.state.value for task in tasks] == ["CONFIGURING", "PENDING", "PENDING"]
    assert first_waiting(tasks) is tasks[1]
    assert first_waiting(tasks[:1]) is tasks[0]


def test_a_limit_of_nought_is_none() -> None:
    cluster = Cluster("n1")
    cluster.submit(cpus_per_task=2)
    job_id = cluster.submit(time_limit_s=60)
    cluster.ask(lambda tx: update_as_root(tx, job_id, time_limit="0"))
    assert cluster.job(job_id).time_limit_s == UNLIMITED_S


def test_a_job_that_asked_for_no_limit_may_run_until_its_deadline() -> None:
    cluster = Cluster("n1")
    now_s = int(cluster.now_s)
    job_id = cluster.submit(cpus_per_task=2, deadline_at_s=now_s + 100)
    cluster.run(job_id)
    soon = cluster.submit(deadline_at_s=now_s + 95)
    cluster.tick(96.0)
    assert cluster.job(soon).state is JobState.DEADLINE
    cluster.tick(4.0)
    job = cluster.job(job_id)
    assert (job.state, job.outcome, job.reason_detail) == (
        JobState.COMPLETING,
        JobState.DEADLINE,
        "its deadline was reached",
    )


def test_a_job_starts_with_less_than_a_minute_left_and_ends_at_its_deadline() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(deadline_at_s=int(cluster.now_s) + 40)
    cluster.run(job_id)
    cluster.tick(39.0)
    assert cluster.job(job_id).state is JobState.RUNNING
    cluster.tick(1.0)
    assert cluster.job(job_id).outcome is JobState.DEADLINE


def test_a_throttle_is_changed_while_the_array_runs() -> None:
    cluster = Cluster("n1")
    array = cluster.submit(array=ArraySpec(indices=(0, 1, 2), limit=1))
    assert [cluster.job(array + i).state.value for i in range(2)] == ["CONFIGURING", "PENDING"]
    change(cluster, str(array), array_task_throttle="2")
    assert cluster.job(array + 1).state is JobState.CONFIGURING
    with pytest.raises(RequestError, match="must be 0 to"):
        change(cluster, str(array), array_task_throttle="-1")
    with pytest.raises(RequestError, match="it is not an array"):
        change(cluster, str(cluster.submit()), array_task_throttle="1")


def test_a_job_of_two_partitions_has_one_while_it_runs_and_both_when_requeued() -> None:
    cluster = Cluster("n1", "n2")
    cluster.state.partitions = {"a": partition("n1", name="a"), "b": partition("n2", name="b", default=False)}
    cluster.controller.reconfigured()
    cluster.submit(partition="a", cpus_per_task=2)
    job_id = cluster.submit(partition="a,b", requeue=True)
    assert (cluster.job(job_id).partition, cluster.job(job_id).partition_asked) == ("b", "a,b")
    cluster.run(job_id)
    cluster.welcome("n2", boot_id="boot-2")
    assert (cluster.job(job_id).state, cluster.job(job_id).partition) == (JobState.PENDING, "a,b")


def test_of_two_partitions_only_those_count_that_can_run_the_job_at_all() -> None:
    cluster = Cluster("n1", "n2")
    cluster.state.partitions = {"a": partition("n1", name="a"), "b": partition("n1", "n2", name="b", default=False)}
    cluster.controller.reconfigured()
    assert cluster.job(cluster.submit(partition="a,b", nodes_min=2)).partition == "b"
    with pytest.raises(RequestError, match="partition 'a' has 1"):
        cluster.submit(partition="a,b", nodes_min=3)
    with pytest.raises(RequestError, match="cannot submit to partition 'c': invalid partition name specified"):
        cluster.submit(partition="a,c")


def lowered(cluster: Cluster) -> JobId:
    """Return a job of an hour that has started with half of it, so that it makes its deadline; it may run again."""
    deadline_s = int(cluster.now_s) + 1800
    job_id = cluster.submit(time_limit_s=3600, time_min_s=600, deadline_at_s=deadline_s, requeue=True)
    cluster.run(job_id)
    return JobId(job_id)


def test_a_lowered_limit_is_the_jobs_limit_and_the_nodes() -> None:
    cluster = Cluster("n1")
    job = cluster.job(lowered(cluster))
    assert (job.time_limit_s, job.asked_limit_s) == (1800, 3600)
    ((_, launch),) = cluster.sent(protocol.Launch)
    assert launch.limit_s == 1800.0
    told = [item["text"] for item in story_of(job, cluster.store.load_events(job.id))]
    assert any("its time limit lowered to 30:00" in text for text in told)


def test_a_lowered_limit_is_as_it_was_when_the_job_is_queued_again() -> None:
    cluster = Cluster("n1")
    job_id = lowered(cluster)
    cluster.welcome("n1", boot_id="boot-2")
    job = cluster.job(job_id)
    assert (job.attempt, job.time_limit_s, job.asked_limit_s) == (1, 3600, None)
    assert cluster.replayed(job_id).time_limit_s == 3600


def test_a_least_time_is_changed_while_the_job_waits_and_never_above_its_limit() -> None:
    cluster = Cluster("n1")
    cluster.submit(cpus_per_task=2)
    job_id = cluster.submit(time_limit_s=3600)
    assert change(cluster, str(job_id), time_min="30").time_min_s == 1800
    with pytest.raises(RequestError, match="cannot lower the time limit of 10:00 to --time-min=30:00"):
        change(cluster, str(job_id), time_limit="10")
    assert change(cluster, str(job_id), time_min="none", time_limit="10").time_min_s is None
    with pytest.raises(RequestError, match="cannot lower the time limit of 10:00"):
        change(cluster, str(job_id), time_min="11")


def test_a_least_time_above_the_partitions_default_is_refused() -> None:
    cluster = Cluster("n1")
    cluster.state.partitions = {"main": partition("n1", default_time_s=600)}
    with pytest.raises(RequestError, match="cannot lower the time limit of 10:00"):
        cluster.submit(time_min_s=601)


def test_the_age_of_a_held_job_stands_still() -> None:
    cluster = Cluster("n1")
    cluster.submit(cpus_per_task=2)
    job_id = cluster.submit()
    cluster.tick(100.0)
    cluster.ask(lambda tx: hold(tx, ANN, [str(job_id)]))
    assert cluster.job(job_id).accrued_from_s is None
    cluster.tick(1000.0)
    cluster.ask(lambda tx: release(tx, ANN, [str(job_id)]))
    cluster.tick(10.0)
    job = cluster.job(job_id)
    assert job.accrued_from_s is not None
    assert cluster.now_s - job.accrued_from_s == pytest.approx(110.0, abs=2.0)
    change(cluster, str(job_id), begin="now+1hour")
    cluster.tick(1800.0)
    assert cluster.job(job_id).accrued_from_s is None
    assert cluster.job(job_id).aged_s == pytest.approx(110.0, abs=2.0)


def test_numbers_that_are_no_nice_priority_or_site_factor_are_refused() -> None:
    cluster = Cluster("n1")
    cluster.submit(cpus_per_task=2)
    job_id = cluster.submit()
    for name in ("nice", "priority", "site_factor"):
        with pytest.raises(RequestError, match="it must be"):
            cluster.ask(lambda tx, name=name: update_as_root(tx, job_id, **{name: str(2**63)}))
    with pytest.raises(RequestError, match="set a site factor"):
        change(cluster, str(job_id), site_factor="5")
    cluster.ask(lambda tx: update_as_root(tx, job_id, site_factor="-5"))
    assert cluster.job(job_id).site == -5
