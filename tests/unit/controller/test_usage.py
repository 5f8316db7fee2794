"""What jobs use is charged once, to whom it belongs, and is on disk with the event that gave it back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.controller.cluster import BOB, ROOT, Cluster

from hpcsched.api.views import job_view
from hpcsched.controller import usage_ledger
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs
from hpcsched.controller.usage_ledger import UsageLedgerCache, charged, used_now
from hpcsched.controller.views.queue import priority_views
from hpcsched.errors import PermissionDeniedError, RequestError, UnavailableError
from hpcsched.model.accounting import Account, Accounting, Limits, Qos
from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.sched.fairshare import integral

HALF_LIFE_S = 1000.0
LAB = Accounting(
    accounts=(Account(name="physics", users=("ann",), qos=("normal", "double")), Account(name="guests", users=("*",))),
    qos=(Qos(name="normal"), Qos(name="double", usage_factor=2.0)),
    half_life_s=HALF_LIFE_S,
)


def with_accounts(cluster: Cluster, accounting: Accounting = LAB) -> Cluster:
    cluster.state.config = replace(cluster.state.config, accounting=accounting)
    return cluster


def billed(cluster: Cluster) -> dict[tuple[str, str], float]:
    return charged(cluster.state, cluster.now_s)


def whole_life(cluster: Cluster, job: JobId, lasting_s: float) -> None:
    cluster.run(job)
    cluster.tick(lasting_s)
    cluster.end(job)


def test_a_job_is_charged_as_it_runs_and_its_end_changes_nothing() -> None:
    cluster = with_accounts(Cluster("n1"), replace(LAB, half_life_s=None))
    job = cluster.submit(nodes_min=1, ntasks=2)
    cluster.run(job)
    cluster.tick(100.0)
    assert billed(cluster) == {("physics", "ann"): pytest.approx(200.0)}
    assert cluster.state.usage == {}
    cluster.end(job)
    assert billed(cluster) == {("physics", "ann"): pytest.approx(200.0)}
    cluster.tick(1e6)
    assert billed(cluster) == {("physics", "ann"): pytest.approx(200.0)}


def test_usage_halves_in_one_half_life() -> None:
    cluster = with_accounts(Cluster("n1"))
    whole_life(cluster, cluster.submit(), 10.0)
    before = billed(cluster)[("physics", "ann")]
    cluster.tick(HALF_LIFE_S)
    assert billed(cluster)[("physics", "ann")] == pytest.approx(before / 2, rel=1e-9)


def test_users_accounts_and_qos_have_rows_of_their_own() -> None:
    cluster = with_accounts(Cluster("n1", "n2"), replace(LAB, half_life_s=None))
    whole_life(cluster, cluster.submit(), 10.0)
    whole_life(cluster, cluster.submit(qos="double"), 10.0)
    whole_life(cluster, cluster.submit(BOB), 5.0)
    found = {used.key: round(dict(used.amounts)["billing"]) for used in used_now(cluster.state, cluster.now_s)}
    assert found == {("physics", "ann", "normal"): 10, ("physics", "ann", "double"): 20, ("guests", "bob", "normal"): 5}


def test_without_accounts_everyone_is_charged_at_the_root_whatever_the_label() -> None:
    cluster = Cluster("n1")
    whole_life(cluster, cluster.submit(account="anything"), 10.0)
    assert set(billed(cluster)) == {("", "ann")}


def test_it_is_there_again_after_a_restart_and_what_ran_meanwhile_is_charged(tmp_path: Path) -> None:
    before = with_accounts(Cluster("n1", path=tmp_path / "h.db"), replace(LAB, half_life_s=None))
    whole_life(before, before.submit(), 10.0)
    job = before.submit()
    before.run(job)
    before.tick(20.0)
    before.store.close()
    after = with_accounts(Cluster("n1", path=tmp_path / "h.db", up=False), replace(LAB, half_life_s=None))
    after.now_s = before.now_s
    load_state(after.state, after.store, after.now_s)
    assert billed(after) == billed(before) == {("physics", "ann"): pytest.approx(30.0)}


def test_a_commit_that_fails_charges_nothing_and_the_next_try_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = with_accounts(Cluster("n1"), replace(LAB, half_life_s=None))
    whole_life(cluster, cluster.submit(), 10.0)
    job = cluster.submit()
    cluster.run(job)
    cluster.tick(30.0)
    commit = cluster.store.commit

    def full(batch: object) -> None:
        raise UnavailableError("the disk is full")

    monkeypatch.setattr(cluster.store, "commit", full)
    cluster.end(job)
    assert dict(cluster.state.usage[("physics", "ann", "normal")].amounts)["billing"] == pytest.approx(10.0)
    monkeypatch.setattr(cluster.store, "commit", commit)
    cluster.tick()
    assert billed(cluster) == {("physics", "ann"): pytest.approx(40.0)}
    assert {used.key: used for used in cluster.store.load_usage()} == cluster.state.usage


def test_the_ledger_ranks_whoever_waits_and_is_made_anew_after_a_while() -> None:
    cluster = with_accounts(Cluster("n1"))
    usage_ledger = UsageLedgerCache(cluster.state)
    whole_life(cluster, cluster.submit(), 100.0)
    cluster.submit(BOB, hold=True)
    first = usage_ledger.ledger(cluster.now_s, fairshare=True)
    assert dict(first.fairshare) == {("guests", "bob"): 1.0, ("physics", "ann"): 0.5}
    whole_life(cluster, cluster.submit(BOB, priority=None), 3.0)
    assert usage_ledger.ledger(cluster.now_s, fairshare=True).fairshare is first.fairshare
    cluster.tick(1000.0)
    later = usage_ledger.ledger(cluster.now_s, fairshare=True)
    assert later.fairshare is not first.fairshare
    assert usage_ledger.ledger(cluster.now_s, fairshare=False).fairshare == ()
    assert later.used == ()


def test_the_ledger_has_what_was_used_where_a_limit_asks_for_it() -> None:
    account = Account(name="physics", users=("ann",), limits=Limits(grp_tres_mins=(("cpu", 2),)))
    cluster = with_accounts(Cluster("n1"), Accounting(accounts=(account,), half_life_s=HALF_LIFE_S))
    whole_life(cluster, cluster.submit(time_limit_s=60), 60.0)
    second, third = cluster.submit(time_limit_s=60), cluster.submit(time_limit_s=60)
    states = [cluster.job(job).state.value for job in (second, third)]
    assert states == ["CONFIGURING", "PENDING"]
    assert cluster.state.waits[third].reason == "AssocGrpCPUMinutesLimit"
    (used,) = UsageLedgerCache(cluster.state).ledger(cluster.now_s, fairshare=False).used
    assert (used.at_s, used.key) == (cluster.now_s, ("physics", "ann", ""))


def test_who_has_had_less_starts_first() -> None:
    cluster = with_accounts(Cluster("n1"))
    cluster.controller.policy = replace(cluster.controller.policy, weight_fairshare=10_000)
    whole_life(cluster, cluster.submit(), 100.0)
    running = cluster.submit(ntasks=2)
    cluster.run(running)
    ann, bob = cluster.submit(ntasks=2), cluster.submit(BOB, ntasks=2)
    cluster.tick(10.0)
    cluster.end(running)
    assert (cluster.job(ann).state.value, cluster.job(bob).state.value) == ("PENDING", "CONFIGURING")


def test_the_time_that_a_job_is_suspended_is_charged_to_nobody() -> None:
    cluster = with_accounts(Cluster("n1"), replace(LAB, half_life_s=None))
    job = cluster.submit()
    cluster.run(job)
    cluster.tick(10.0)
    cluster.ask(lambda tx: jobs.suspend(tx, ROOT, [str(job)]))
    cluster.tick(1000.0)
    assert billed(cluster) == {("physics", "ann"): pytest.approx(10.0)}
    cluster.ask(lambda tx: jobs.resume(tx, ROOT, [str(job)]))
    cluster.tick(5.0)
    assert billed(cluster) == {("physics", "ann"): pytest.approx(15.0)}
    cluster.end(job)
    assert billed(cluster) == {("physics", "ann"): pytest.approx(15.0)}


def test_a_job_shows_the_priority_that_the_last_plan_in_which_it_was_in_line_gave_it() -> None:
    cluster = with_accounts(Cluster("n1"))
    cluster.controller.policy = replace(cluster.controller.policy, weight_fairshare=10_000)
    running, waiting, held = cluster.submit(ntasks=2), cluster.submit(ntasks=2), cluster.submit(ntasks=2, hold=True)
    before = cluster.state.priorities[running]
    cluster.tick()
    cluster.controller.replan()
    cluster.tick(60.0)  # a plan in which the first is no more in line
    shown = {
        job: job_view(cluster.job(job), cluster.state, ROOT, cluster.now_s)["priority"]
        for job in (running, waiting, held)
    }
    parts = priority_views(
        cluster.controller.snapshot(cluster.state.jobs_to_plan(), cluster.now_s), cluster.controller.policy, [waiting]
    )
    assert shown == {running: before, waiting: parts["jobs"][0]["priority"], held: 0}


def test_what_is_reset_counts_no_more_and_what_runs_counts_from_then_on() -> None:
    cluster = with_accounts(Cluster("n1", "n2"))
    whole_life(cluster, cluster.submit(qos="double"), 100.0)
    cluster.run(job := cluster.submit())
    bobs = cluster.submit(BOB)
    cluster.run(bobs)
    cluster.tick(50.0)
    found = cluster.ask(lambda tx: usage_ledger.reset(tx, ROOT, (), ("ann",)))
    assert found == [("physics", "ann")]
    assert billed(cluster) == {("physics", "ann"): 0.0, ("guests", "bob"): pytest.approx(integral(50.0, HALF_LIFE_S))}
    cluster.tick(30.0)
    assert billed(cluster)["physics", "ann"] == pytest.approx(integral(30.0, HALF_LIFE_S))
    cluster.end(job)
    assert billed(cluster)["physics", "ann"] == pytest.approx(integral(30.0, HALF_LIFE_S))
    assert sum(dict(used.amounts)["billing"] for used in cluster.store.load_usage() if used.user == "ann") == (
        pytest.approx(integral(30.0, HALF_LIFE_S))
    )


def test_usage_is_reset_below_an_account_by_admins_and_of_whom_there_is() -> None:
    parts = (Account(name="lasers", parent="physics", users=("ann",)), *LAB.accounts)
    cluster = with_accounts(Cluster("n1"), replace(LAB, accounts=parts))
    whole_life(cluster, cluster.submit(account="lasers"), 100.0)
    with pytest.raises(RequestError, match="no such|there is none .did you mean physics"):
        cluster.ask(lambda tx: usage_ledger.reset(tx, ROOT, ("phisics",), ()))
    with pytest.raises(RequestError, match="user 'zoe': there is none; known are .*ann"):
        cluster.ask(lambda tx: usage_ledger.reset(tx, ROOT, (), ("zoe",)))
    with pytest.raises(PermissionDeniedError):
        cluster.ask(lambda tx: usage_ledger.reset(tx, BOB, (), ()))
    assert billed(cluster)["lasers", "ann"] > 90
    assert cluster.ask(lambda tx: usage_ledger.reset(tx, ROOT, ("guests",), ())) == []
    assert cluster.ask(lambda tx: usage_ledger.reset(tx, ROOT, ("physics",), ())) == [("lasers", "ann")]
    assert billed(cluster) == {("lasers", "ann"): 0.0}


@pytest.mark.parametrize(
    ("fields", "command"),
    [
        ({"script": "#!/bin/sh\n", "script_path": "/home/ann/job.sh", "script_args": ("a",)}, "/home/ann/job.sh a"),
        ({"script": "#!/bin/sh\n"}, None),  # it came from standard input
        ({"script": "", "name": "hostname"}, "hostname"),  # hrun's
    ],
)
def test_the_command_of_a_job_is_its_scripts_path(fields: dict[str, Any], command: str | None) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(**fields)
    assert job_view(cluster.job(job_id), cluster.state, ROOT, cluster.now_s)["command"] == command


def test_the_age_of_a_job_counts_while_it_is_over_a_limit() -> None:
    limited = Account(name="lab", users=("*",), limits=Limits(max_jobs=1))
    cluster = with_accounts(Cluster("n1"), Accounting(accounts=(limited,)))
    first, second = cluster.submit(), cluster.submit(hold=True)
    cluster.run(first)
    cluster.now_s += 60.0
    cluster.ask(lambda tx: jobs.release(tx, ROOT, [str(second)]))
    released_s = cluster.now_s
    assert cluster.state.waits[second].reason is Reason.ASSOC_MAX_JOBS_LIMIT
    cluster.tick(600.0)
    assert cluster.job(second).eligible_at_s == released_s
