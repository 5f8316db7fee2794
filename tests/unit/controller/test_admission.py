"""Who is let in: accounts and QOS, limits that a job breaks by itself, jobs that are one too many."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
from jobs import spec
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcsched.auth.authorize import Identity, Role
from hpcsched.controller.requests import jobs
from hpcsched.controller.requests.update import update
from hpcsched.controller.views.queue import license_views
from hpcsched.errors import PermissionDeniedError, RequestError
from hpcsched.model.accounting import Account, Accounting, Limits, Qos, UserRules
from hpcsched.model.spec import ArraySpec


def cluster(accounting: Accounting, **partition_limits: object) -> Cluster:
    made = Cluster("n1", "n2")
    made.state.config = replace(made.state.config, accounting=accounting)
    limits = Limits(**partition_limits)  # type: ignore[arg-type]
    made.state.partitions = {"main": replace(made.state.partitions["main"], limits=limits)}
    return made


def lab(**limits: object) -> Accounting:
    account = Account(name="lab", users=("ann", "bob"), limits=Limits(**limits))  # type: ignore[arg-type]
    return Accounting(accounts=(Account(name="top", qos=("normal", "high")), replace(account, parent="top")))


def refusal(made: Cluster, identity: Identity = ANN, **fields: object) -> str:
    with pytest.raises(RequestError) as caught:
        made.submit(identity, **fields)
    return str(caught.value)


def _with_limits(made: Cluster, **scheduler: object) -> Cluster:
    made.state.config = replace(made.state.config, scheduler=replace(made.state.config.scheduler, **scheduler))  # type: ignore[arg-type]
    return made


def test_a_user_may_have_a_tenth_of_the_queue() -> None:
    made = _with_limits(Cluster("n1"), max_jobs=50, max_array_size=20)
    array = ArraySpec(indices=(0, 1, 2))
    first = made.submit(array=array, hold=True)
    why = refusal(made, array=array)
    assert "3 jobs of user 'ann' wait or run, and 3 more are too many: one user may have 5" in why
    assert "max_submit_jobs in hpcsched.toml" in why
    for _ in range(2):
        made.submit(hold=True)
    assert "one more is too many" in refusal(made)
    made.submit(BOB)
    made.submit(ROOT, array=ArraySpec(indices=tuple(range(20))))
    made.ask(lambda tx: jobs.cancel(tx, ANN, [str(first)], {}))
    made.submit(array=array, hold=True)
    assert made.state.queued == {"ann": 5, "bob": 1, "root": 20}


def test_an_admin_sets_how_much_of_the_queue_a_user_may_have() -> None:
    made = _with_limits(Cluster("n1"), max_jobs=50, max_submit_jobs=1)
    made.submit()
    assert "one user may have 1" in refusal(made)
    own = UserRules(name="ann", limits=Limits(max_submit_jobs=3))
    made.state.config = replace(made.state.config, accounting=replace(lab(), users=(own,)))
    made.submit()
    made.submit()
    assert "allows each user 3 jobs that wait or run" in refusal(made)
    made.submit(BOB)
    assert "one user may have 1" in refusal(made, BOB)


def test_a_job_gets_the_account_and_qos_that_it_is_charged_to() -> None:
    made = cluster(replace(lab(), qos=(Qos(name="normal"), Qos(name="high"))))
    spec = made.job(made.submit()).spec
    assert (spec.account, spec.qos) == ("lab", "normal")
    assert made.job(made.submit(qos="high", account="lab")).spec.qos == "high"
    assert "Invalid account" in refusal(made, account="top")
    assert "Invalid qos specification" in refusal(made, qos="huge")


@pytest.mark.parametrize(
    ("limits", "fields", "why"),
    [
        (
            {"max_tres_per_job": (("cpu", 2),)},
            {"ntasks": 3},
            "AssocMaxCpuPerJobLimit: account 'lab' allows a job 2 cpus, and",
        ),
        (
            {"grp_tres": (("node", 1),)},
            {"nodes_min": 2},
            "AssocGrpNodeLimit: account 'lab' allows all jobs together 1 node",
        ),
        ({"max_wall_s": 600}, {"time_limit_s": 660}, "a time limit of 10:00, and this one has 11:00"),
        ({"max_jobs": 0}, {}, "AssocMaxJobsLimit: account 'lab' allows each user 0 jobs"),
        (
            {"max_tres_mins_per_job": (("cpu", 100),)},
            {"time_limit_s": 6060},
            "100 cpu-minutes, and this job asks for 101",
        ),
        ({"grp_tres_mins": (("cpu", 100),)}, {}, "this job has no time limit"),
        (
            {"max_tres_per_user": (("mem", 1024),)},
            {"mem_per_node_mib": 2048},
            "1G memory, and this job asks for 2G memory",
        ),
    ],
)
def test_what_breaks_a_limit_by_itself_is_refused(limits: dict, fields: dict, why: str) -> None:
    text = refusal(cluster(lab(**limits)), **fields)
    assert "Job violates accounting/QOS policy" in text
    assert why in text


def gpu_lab() -> Cluster:
    """A partition that takes all, and one that takes the account `top` and what is below it, with QOS high."""
    accounts = (*lab().accounts, Account(name="guests", users=("bob",), qos=("normal", "high")))
    made = cluster(Accounting(accounts=accounts, qos=(Qos(name="normal"), Qos(name="high"))))
    main = made.state.partitions["main"]
    gpu = replace(main, name="gpu", default=False, allow_accounts=("top",), allow_qos=("high",))
    made.state.partitions = {"main": main, "gpu": gpu}
    return made


def test_a_partition_takes_only_jobs_of_the_accounts_and_qos_that_it_allows() -> None:
    made = gpu_lab()
    assert made.job(made.submit(partition="gpu", qos="high")).partition == "gpu"  # of lab, which is below top
    text = refusal(made, partition="gpu")
    assert (
        "partition 'gpu': Invalid qos specification: it takes only jobs of the QOS high, and this one's is 'normal'"
        in text
    )
    assert "only jobs of the account top, and this one's is 'guests'" in refusal(
        made, BOB, partition="gpu", account="guests", qos="high"
    )
    assert made.job(made.submit(partition="gpu,main")).partition == "main"


def test_a_job_that_waits_is_moved_only_to_where_it_is_let_in() -> None:
    made = gpu_lab()
    job = made.submit(hold=True)
    assert "only jobs of the QOS high" in changed(made, ANN, job, partition="gpu")[0]
    assert changed(made, ANN, job, partition="gpu", qos="high") == []
    assert (made.job(job).partition, made.job(job).qos) == ("gpu", "high")
    assert "only jobs of the QOS high" in changed(made, ANN, job, qos="normal")[0]


def test_a_waiting_job_is_not_moved_to_a_partition_whose_limits_it_breaks_alone() -> None:
    made = cluster(Accounting())
    main = made.state.partitions["main"]
    made.state.partitions["small"] = replace(main, name="small", limits=Limits(max_tres_per_job=(("cpu", 1),)))
    job = made.submit(ntasks=2, hold=True)
    assert "QOSMaxCpuPerJobLimit: partition 'small' allows a job 1 cpu" in changed(made, ANN, job, partition="small")[0]
    assert made.job(job).partition == "main"


def test_a_job_that_is_one_too_many_in_one_partition_comes_into_the_other() -> None:
    made = cluster(Accounting(), max_submit_jobs=1)
    made.state.partitions["open"] = replace(made.state.partitions["main"], name="open", default=False, limits=Limits())
    assert made.job(made.submit(hold=True)).partition == "main"
    assert made.job(made.submit(partition="main,open", hold=True)).partition == "open"
    assert "there are 1, and one more is too many" in refusal(made)


def test_a_job_without_a_time_limit_gets_the_longest_that_it_may_have() -> None:
    made = cluster(lab(max_wall_s=600))
    assert made.job(made.submit()).time_limit_s == 600


def test_one_job_too_many_is_refused_and_counts_by_user_and_by_account() -> None:
    made = cluster(lab(max_submit_jobs=2, grp_submit_jobs=3))
    made.submit(array=ArraySpec(indices=(1, 2)))
    text = refusal(made)
    assert "AssocMaxSubmitJobLimit: account 'lab' allows each user 2 jobs that wait or run; there are 2" in text
    made.submit(BOB)
    assert "AssocGrpSubmitJobsLimit" in refusal(made, BOB)
    assert len(made.state.jobs) == 3


def test_qos_and_partitions_have_limits_of_their_own_in_the_qos_s_words() -> None:
    high = Qos(name="high", limits=Limits(max_submit_jobs=1))
    made = cluster(
        Accounting(qos=(high,), users=(UserRules(name="ann", qos=("high",)),)), max_tres_per_job=(("cpu", 1),)
    )
    assert "QOSMaxCpuPerJobLimit: partition 'main' allows a job 1 cpu" in refusal(made, ntasks=2)
    made.submit(qos="high")
    assert "QOSMaxSubmitJobPerUserLimit: QOS 'high'" in refusal(made, qos="high")
    made.submit()


def test_a_user_s_own_limit_stands_in_the_place_of_the_account_s() -> None:
    rules = UserRules(name="ann", limits=Limits(max_wall_s=1200))
    made = cluster(replace(lab(max_wall_s=600, max_tres_per_job=(("cpu", 2),)), users=(rules,)))
    made.submit(time_limit_s=1200)
    assert "account 'lab'" in refusal(made, BOB, time_limit_s=1200)
    assert "AssocMaxCpuPerJobLimit" in refusal(made, ntasks=3)


def test_licences_that_the_cluster_does_not_have_are_refused() -> None:
    made = cluster(Accounting(licenses=(("matlab", 2),)))
    assert "Invalid license specification (did you mean matlab?)" in refusal(made, licenses=(("matlb", 1),))
    assert "the cluster has 2" in refusal(made, licenses=(("matlab", 3),))


def test_account_and_qos_of_a_job_that_waits_can_be_changed() -> None:
    high = Qos(name="high", limits=Limits(max_tres_per_job=(("cpu", 1),)))
    accounting = replace(lab(), qos=(Qos(name="normal"), high), users=(UserRules(name="bob", qos=("normal",)),))
    made = cluster(accounting)
    job, wide, other = made.submit(hold=True), made.submit(hold=True, ntasks=2), made.submit(BOB, hold=True)
    assert changed(made, ANN, job, qos="high") == []
    assert (made.job(job).qos, made.job(job).account, made.job(job).spec.qos) == ("high", "lab", "normal")
    assert "QOSMaxCpuPerJobLimit" in changed(made, ANN, wide, qos="high")[0]
    assert "bob may use normal" in changed(made, BOB, other, qos="high")[0]
    assert "Invalid account" in changed(made, ANN, job, account="top")[0]
    running = made.submit()
    made.run(running)
    assert "it is RUNNING" in changed(made, ANN, running, qos="high")[0]
    assert {one.id: one.qos for one in made.store.load_jobs(0.0)}[job] == "high"


def test_a_job_whose_account_is_gone_can_be_given_another() -> None:
    made = cluster(Accounting())
    job = made.submit(account="label", qos="label", hold=True)
    made.state.config = replace(made.state.config, accounting=replace(lab(), qos=(Qos(name="normal"),)))
    assert changed(made, ANN, job, account="lab") == []
    assert (made.job(job).account, made.job(job).qos) == ("lab", "normal")


def changed(made: Cluster, identity: Identity, job: int, **changes: str) -> list[str]:
    """Change a job as ``hctl update`` does, and return what was refused."""
    return [error["error"] for error in made.ask(lambda tx: update(tx, identity, [str(job)], changes)).errors]


def test_licences_are_shown_with_what_is_free() -> None:
    made = cluster(Accounting(licenses=(("matlab", 3), ("stata", 1))))
    made.run(made.submit(licenses=(("matlab", 2),)))
    made.submit(licenses=(("stata", 1),), hold=True)
    assert license_views(made.state) == [
        {"name": "matlab", "total": 3, "used": 2, "free": 1},
        {"name": "stata", "total": 1, "used": 0, "free": 1},
    ]


def test_a_time_limit_is_changed_by_so_much() -> None:
    made = Cluster("n1")
    job, endless = made.submit(hold=True, time_limit_s=3600), made.submit(hold=True)
    for change, limit_s in (("-30", 1800), ("+10", 2400), ("1:00:00", 3600)):
        assert made.ask(lambda tx, change=change: update(tx, ROOT, [str(job)], {"time_limit": change})).errors == []
        assert made.job(job).time_limit_s == limit_s
    for which, change, says in ((job, "-60", "nothing would be left"), (endless, "+5", "it has none")):
        refused = made.ask(
            lambda tx, which=which, change=change: update(tx, ROOT, [str(which)], {"time_limit": change})
        )
        assert says in refused.errors[0]["error"]


def test_who_has_no_account_is_told_so_where_jobs_run_as_their_submitters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    backend = Cluster("n1").backend()
    nobody = Identity(uid=3_999_999, user="3999999", role=Role.USER)
    with pytest.raises(PermissionDeniedError, match="cannot submit: uid 3999999 has no account on this machine"):
        asyncio.run(backend.submit(nobody, "", [spec()]))
