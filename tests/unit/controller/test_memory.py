"""What the controller remembers of ended jobs, for the policy `default`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unit.controller.world import ANN, BOB, ROOT, Cluster

from hpcsched.controller import requests
from hpcsched.sched.policy import Backfill
from hpcsched.sched.predict import Experience


def experience(cluster: Cluster) -> Experience:
    return cluster.controller.snapshot((), cluster.now_s).experience


def ran(cluster: Cluster, seconds: float, asker=ANN) -> int:
    """Have a job of a whole node run for so long."""
    job = cluster.submit(asker, ntasks=2)
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
    first, second = cluster.submit(ntasks=2), cluster.submit(ntasks=2)
    for job in (first, second):
        cluster.run(job)
        cluster.now_s += 40.0
        cluster.end(job)
        cluster.gone(job, "n1")
    assert experience(cluster) == Experience(longest_runs_s={ANN.uid: 40.0}, longest_wait_s=40.0)
    cluster.store.close()
    assert experience(Cluster("n1", path=tmp_path / "db", up=False)) == experience(cluster)


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
    jobs = [cluster.submit(asker, ntasks=1, time_limit_s=3000, hold=True) for asker in (ANN, BOB)]
    cluster.ask(lambda tx: [requests.release(tx, ROOT, [str(job)]) for job in jobs])
    assert [bool(cluster.job(job).shares) for job in (head, *jobs)] == [False, False, True]
