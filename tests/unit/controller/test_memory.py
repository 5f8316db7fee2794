"""What the controller remembers of ended jobs, for the policy `default`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcsched.controller.requests import jobs as requests
from hpcsched.sched.experience import Experience
from hpcsched.sched.policy import Backfill


def experience(cluster: Cluster) -> Experience:
    return cluster.controller.snapshot((), cluster.now_s).experience


def ran(cluster: Cluster, seconds: float, identity=ANN) -> int:
    """Have a job of a whole node run for so long."""
    job = cluster.submit(identity, ntasks=2)
    cluster.run(job)
    cluster.now_s += seconds
    cluster.end(job)
    cluster.gone(job, "n1")
    return job


def test_the_longest_of_each_users_last_three_runs_is_remembered() -> None:
    cluster = Cluster("n1")
    for seconds in (900.0, 30.0, 60.0, 20.0):
        ran(cluster, seconds)
    ran(cluster, 5.0, BOB)
    assert experience(cluster).longest_runs_s == {ANN.uid: 60.0, BOB.uid: 5.0}


def test_the_longest_wait_is_remembered_and_all_of_it_after_a_restart(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    began_s = cluster.now_s
    first, second = cluster.submit(ntasks=2), cluster.submit(ntasks=2)
    for job in (first, second):
        cluster.run(job)
        cluster.now_s += 40.0
        cluster.end(job)
        cluster.gone(job, "n1")
    assert experience(cluster) == Experience(longest_runs_s={ANN.uid: 40.0}, easy_wait_s=40.0, began_s=began_s)
    cluster.store.close()
    assert experience(Cluster("n1", path=tmp_path / "db", up=False)) == experience(cluster)


def test_the_use_of_requests_is_remembered_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsched.sched.experience.LEAST_JOBS", 3)
    cluster = Cluster("n1", path=tmp_path / "db")
    for asked_s in (100, 400, 100):
        job = cluster.submit(ntasks=2, time_limit_s=asked_s)
        cluster.run(job)
        cluster.now_s += 20.0
        cluster.end(job)
        cluster.gone(job, "n1")
    assert experience(cluster).request_use == pytest.approx(60 / 600, rel=1e-3)
    cluster.store.close()
    again = experience(Cluster("n1", path=tmp_path / "db", up=False))
    assert again.request_use == experience(cluster).request_use


def test_a_cancelled_job_says_nothing_of_the_next() -> None:
    cluster = Cluster("n1")
    job = cluster.submit(ntasks=2)
    cluster.run(job)
    cluster.now_s += 40.0
    cluster.ask(lambda tx: requests.cancel(tx, ANN, [str(job)], {}))
    cluster.end(job)
    cluster.gone(job, "n1")
    assert experience(cluster).longest_runs_s == {}


def test_with_the_policy_default_users_of_short_jobs_come_first_behind_the_head() -> None:
    cluster = Cluster("n1")  # of two cpus
    ran(cluster, 500.0, ANN)
    ran(cluster, 5.0, BOB)
    cluster.controller.policy = replace(cluster.controller.policy, backfill=Backfill.DEFAULT, weight_age=0)
    cluster.run(cluster.submit(ntasks=1, time_limit_s=36_000))
    head = cluster.submit(ntasks=2)
    jobs = [cluster.submit(identity, ntasks=1, time_limit_s=3000, hold=True) for identity in (ANN, BOB)]
    cluster.ask(lambda tx: [requests.release(tx, ROOT, [str(job)]) for job in jobs])
    assert [bool(cluster.job(job).shares) for job in (head, *jobs)] == [False, False, True]


def rehearsing() -> Cluster:
    cluster = Cluster("n1")  # of two cpus
    cluster.controller.policy = replace(cluster.controller.policy, backfill=Backfill.DEFAULT, weight_age=0)
    cluster.controller.reconfigured()
    return cluster


def easy_wait_s(cluster: Cluster) -> float:
    return experience(cluster).easy_wait_s


def ended(cluster: Cluster, job: int) -> None:
    cluster.end(job)
    cluster.gone(job, "n1")


def test_with_the_policy_default_waits_are_measured_against_plain_easy() -> None:
    cluster = rehearsing()
    first, second = cluster.submit(ntasks=1), cluster.submit(ntasks=1)
    cluster.run(first)
    cluster.run(second)
    third = cluster.submit(ntasks=2)
    cluster.now_s += 40.0
    ended(cluster, first)
    assert easy_wait_s(cluster) == 0.0  # when job 2 ends nobody knows
    cluster.now_s += 10.0
    ended(cluster, second)
    cluster.run(third)
    assert easy_wait_s(cluster) == 40.0  # job 3 still waited when job 1 ended; more is not looked at in this second
    cluster.now_s += 1.0
    assert easy_wait_s(cluster) == 50.0
    cluster.controller.reconfigured()
    assert easy_wait_s(cluster) == 50.0  # what was known is not forgotten


def test_a_job_that_is_cancelled_or_queued_again_does_not_stop_the_rehearsal() -> None:
    cluster = rehearsing()
    first, second, third = (cluster.submit(ntasks=2) for _ in range(3))
    cluster.run(first)
    cluster.now_s += 20.0
    cluster.ask(lambda tx: requests.cancel(tx, ANN, [str(second)], {}))
    cluster.now_s += 10.0
    ended(cluster, first)
    cluster.run(third)
    cluster.now_s += 1.0
    assert easy_wait_s(cluster) == 30.0
    cluster.ask(lambda tx: requests.requeue(tx, ROOT, [str(third)]))
    ended(cluster, third)
    cluster.now_s += 100.0
    cluster.tick()
    cluster.run(third)
    last = cluster.submit(ntasks=2)
    cluster.now_s += 60.0
    ended(cluster, third)
    cluster.run(last)
    cluster.now_s += 1.0
    assert easy_wait_s(cluster) == 60.0
