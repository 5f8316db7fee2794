"""The head node's clock is set while jobs run: what is measured by it stays what it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jobs import T0
from unit.controller.cluster import Cluster

from hpcnode.wire import protocol
from hpcsched.controller.planning import ClockMark, mark_of
from hpcsched.controller.recovery import load_state
from hpcsched.controller.tick import PURGE_EVERY_S
from hpcsched.controller.views.history import story_of
from hpcsched.lifecycle.job import limit_at_s, ran_s
from hpcsched.model.job import JobState

HOUR_S = 3600.0


def booted(path: Path | None = None) -> Cluster:
    cluster = Cluster("n1", "n2", path=path)
    cluster.ports.boot = ("boot", 100.0)
    cluster.tick()
    return cluster


def passes(cluster: Cluster, seconds: float, step_s: float = 0.0) -> None:
    """Let time pass, and have the clock set by `step_s`."""
    boot_id, boot_s = cluster.ports.boot
    cluster.ports.boot = (boot_id, boot_s + seconds)
    cluster.tick(seconds + step_s)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, 50 * 365 * 86400.0])
def test_e5_a_step_ends_no_job_early_or_late_and_charges_nobody(step_s: float) -> None:
    cluster = booted()
    job_id = cluster.submit(script="", time_limit_s=600)  # an allocation: nobody but the controller ends it
    batch = cluster.submit(time_limit_s=600)
    for one in (job_id, batch):
        cluster.run(one)
    passes(cluster, 60.0)
    passes(cluster, 60.0, step_s)
    assert [cluster.job(one).state for one in (job_id, batch)] == [JobState.RUNNING] * 2
    assert ran_s(cluster.job(job_id), cluster.now_s) == pytest.approx(120.0)
    assert (limit_at_s(cluster.job(job_id)) or 0) - cluster.now_s == pytest.approx(480.0)
    passes(cluster, 479.0)
    assert cluster.job(job_id).state is JobState.RUNNING
    passes(cluster, 2.0)
    assert cluster.job(job_id).outcome is JobState.TIMEOUT
    cluster.end(batch)
    assert cluster.job(batch).charged_cpu_s == pytest.approx(601.0 * cluster.job(batch).shares[0].cpus)
    assert cluster.replayed(batch) == cluster.job(batch)
    told = [event["text"] for event in story_of(cluster.job(batch), cluster.store.load_events(batch))]
    assert any("clock was set" in text for text in told)


def test_clocks_that_go_together_change_nothing() -> None:
    cluster = booted()
    job_id = cluster.submit()
    cluster.run(job_id)
    before = cluster.job(job_id)
    passes(cluster, 8 * HOUR_S, 2.0)
    passes(cluster, 60.0, -4.0)
    assert cluster.job(job_id) == before


def test_a_step_while_the_controller_was_down_is_seen_if_the_machine_was_not_booted(tmp_path: Path) -> None:
    cluster = booted(tmp_path / "db")
    job_id = cluster.submit(script="", time_limit_s=600)
    cluster.run(job_id)
    passes(cluster, 60.0)
    cluster.store.close()
    again = Cluster("n1", "n2", path=tmp_path / "db", up=False)
    load_state(again.state, again.store, T0)
    again.now_s = cluster.now_s + 10.0 + HOUR_S
    again.ports.boot = ("boot", cluster.ports.boot[1] + 10.0)
    again.tick()
    assert again.job(job_id).state is JobState.RUNNING
    assert ran_s(again.job(job_id), again.now_s) == pytest.approx(70.0)


def test_after_a_boot_nothing_is_known_of_a_step() -> None:
    cluster = booted()
    job_id = cluster.submit()
    cluster.run(job_id)
    before = cluster.job(job_id)
    cluster.ports.boot = ("another", 5.0)
    cluster.tick(30.0)
    assert cluster.job(job_id) == before


def test_a_step_that_could_not_be_committed_is_seen_again() -> None:
    cluster = booted()
    job_id = cluster.submit(script="", time_limit_s=600)
    cluster.run(job_id)
    commit, cluster.store.commit = cluster.store.commit, _full  # type: ignore[method-assign]
    passes(cluster, 60.0, HOUR_S)
    cluster.store.commit = commit  # type: ignore[method-assign]
    passes(cluster, 1.0)
    assert cluster.job(job_id).state is JobState.RUNNING
    assert ran_s(cluster.job(job_id), cluster.now_s) == pytest.approx(61.0)


def test_the_pause_before_a_job_runs_again_is_no_time_of_day() -> None:
    cluster = booted()
    controller = replace(cluster.state.config.controller, requeue_delay_s=60)
    cluster.state.config = replace(cluster.state.config, controller=controller)
    job_id = cluster.submit(requeue=True)
    begin = cluster.submit(begin_at_s=cluster.now_s + 100.0)
    cluster.run(job_id)
    cluster.says("n1", cluster.report(job_id, protocol.LOST, why="gone"))
    waiting = cluster.job(job_id)
    assert (waiting.state, waiting.not_before_s) == (JobState.PENDING, cluster.now_s + 60)
    passes(cluster, 10.0, -HOUR_S)
    assert cluster.job(job_id).not_before_s == pytest.approx(cluster.now_s + 50)
    assert cluster.job(begin).not_before_s == T0 + 100.0


def test_e5_ended_jobs_are_forgotten_after_a_clock_that_was_years_ahead() -> None:
    cluster = booted()
    passes(cluster, 1.0, 50 * 365 * 86400.0)
    passes(cluster, 1.0, -50 * 365 * 86400.0)
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.end(job_id)
    passes(cluster, cluster.state.config.controller.min_job_age_s + PURGE_EVERY_S)
    assert job_id not in cluster.state.jobs


def test_a_mark_is_read_as_it_was_written() -> None:
    mark = ClockMark(boot_id="b-1", ahead_s=1.5e9)
    assert (mark_of(mark.text()), mark_of("")) == (mark, ClockMark())


def _full(_batch: object) -> None:
    from hpcsched.errors import UnavailableError

    raise UnavailableError("cannot write the database: disk is full")
