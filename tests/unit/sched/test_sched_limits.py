"""Limits and licences in a plan: who waits, in Slurm's words, and that nobody else is held up by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.sched.world import World, world

from hpcsched.model.accounting import Account, Accounting, Limits, Qos, UserRules
from hpcsched.model.job import JobState
from hpcsched.model.node import Partition
from hpcsched.sched.decisions import Plan
from hpcsched.sched.fairshare import UsedResources
from hpcsched.sched.plan import plan
from hpcsched.sched.preempt import full_plan
from hpcsched.sched.snapshot import UsageLedger

MINUTE_S = 60.0


def lab(limits: Limits, **more: object) -> Accounting:
    accounts = (
        Account(name="top"),
        Account(name="lab", parent="top", users=("ann", "bob"), limits=limits),
        Account(name="sub", parent="lab", users=("ann",)),
        Account(name="other", users=("cat",)),
    )
    return Accounting(accounts=accounts, **more)  # type: ignore[arg-type]


def whose(sketch: World, **jobs: str) -> World:
    """Give jobs to users: ``j1="ann lab high"`` is user, account, QOS."""
    for name, text in jobs.items():
        user, account, qos = [*text.split(), "", ""][:3]
        sketch.change(int(name[1:]), user=user, account=account, qos=qos)
    return sketch


def made(sketch: World, accounting: Accounting, *used: UsedResources) -> Plan:
    snapshot = replace(sketch.snapshot(), ledger=UsageLedger(accounting=accounting, used=used))
    return plan(snapshot, sketch.policy)


def starts(made: Plan) -> set[int]:
    return {start.job_id for start in made.starts}


def waits(made: Plan) -> dict[int, str]:
    return {job_id: str(wait.reason) for job_id, wait in made.waits.items()}


def test_one_user_s_jobs_are_bounded_and_the_next_user_s_start() -> None:
    sketch = world("2x4", running=["1: n1 1c"], waiting=["2: 1c", "3: 1c", "4: 1c"])
    whose(sketch, j1="ann lab", j2="ann lab", j3="ann lab", j4="bob lab")
    found = made(sketch, lab(Limits(max_jobs=2)))
    assert starts(found) == {2, 4}
    assert waits(found) == {3: "AssocMaxJobsLimit"}
    assert found.waits[3].detail == "account 'lab' allows each user 2 running jobs, and 2 run"


def test_an_account_s_group_limits_count_its_subaccounts_and_not_its_siblings() -> None:
    sketch = world("3x4", running=["1: n1 3c"], waiting=["2: 1c", "3: 1c", "4: 4c"])
    whose(sketch, j1="ann sub", j2="bob lab", j3="bob lab", j4="cat other")
    found = made(sketch, lab(Limits(grp_tres=(("cpu", 4),))))
    assert (starts(found), waits(found)) == ({2, 4}, {3: "AssocGrpCpuLimit"})
    assert (
        found.waits[3].detail
        == "account 'lab' allows all jobs together 4 cpus; its jobs have 4 cpus, and this one needs 1 cpu"
    )
    jobs = made(sketch, lab(Limits(grp_jobs=2)))
    assert (starts(jobs), waits(jobs)) == ({2, 4}, {3: "AssocGrpJobsLimit"})


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(max_jobs=1), "QOSMaxJobsPerUserLimit"),
        (Limits(grp_jobs=1), "QOSGrpJobsLimit"),
        (Limits(max_tres_per_user=(("cpu", 2),)), "QOSMaxCpuPerUserLimit"),
        (Limits(max_tres_per_user=(("node", 1),)), "QOSMaxNodePerUserLimit"),
        (Limits(max_tres_per_user=(("mem", 500),)), "QOSMaxMemoryPerUser"),
        (Limits(max_tres_per_user=(("gres/gpu", 1),)), "QOSMaxGRESPerUser"),
        (Limits(grp_tres=(("gres/gpu:a100", 1),)), "QOSGrpGRES"),
        (Limits(grp_tres=(("billing", 2),)), "QOSGrpBilling"),
        (Limits(max_tres_per_job=(("cpu", 1),)), "QOSMaxCpuPerJobLimit"),
        (Limits(max_tres_per_job=(("mem", 1),)), "QOSMaxMemoryPerJob"),
        (Limits(max_tres_per_job=(("gres/gpu", 0),)), "QOSMaxGRESPerJob"),
        (Limits(max_wall_s=60), "QOSMaxWallDurationPerJobLimit"),
        (Limits(max_tres_mins_per_job=(("cpu", 1),)), "QOSMaxCpuMinutesPerJobLimit"),
        (Limits(grp_tres_mins=(("gres/gpu", 15),)), "QOSGrpGRESMinutes"),
    ],
)
def test_each_limit_of_a_qos_has_its_word(limits: Limits, reason: str) -> None:
    sketch = world(
        "2x4/1000/4xa100", running=["1: n1 2c 400M 1g 600s"], waiting=["2: 2c 400M 1g 600s", "3: 2c 400M 1g 600s"]
    )
    whose(sketch, j1="ann - high", j2="ann - high", j3="ann - low")
    found = made(sketch, Accounting(qos=(Qos(name="high", limits=limits), Qos(name="low"))))
    assert (starts(found), waits(found)) == ({3}, {2: reason})


def test_a_partition_s_limits_are_its_own_jobs() -> None:
    partitions = [Partition(name="a", nodes=("n1",), limits=Limits(max_jobs=1)), Partition(name="b", nodes=("n1",))]
    sketch = world(
        "1x4", running=["1: n1 1c p=b"], waiting=["2: 1c p=a", "3: 1c p=a", "4: 1c p=b"], partitions=partitions
    )
    whose(sketch, j1="ann", j2="ann", j3="ann", j4="ann")
    found = made(sketch, Accounting())
    assert (starts(found), waits(found)) == ({2, 4}, {3: "QOSMaxJobsPerUserLimit"})


def test_who_waits_for_a_limit_is_not_the_head_and_holds_nothing_free() -> None:
    sketch = world("1x4", running=["1: n1 2c 100s"], waiting=["2: 4c 100s", "3: 2c 1000s"])
    whose(sketch, j1="ann lab", j2="ann lab", j3="cat other")
    found = made(sketch, lab(Limits(max_jobs=1)))
    assert (starts(found), waits(found)) == ({3}, {2: "AssocMaxJobsLimit"})


def test_what_a_job_gets_counts_not_only_what_it_asked_for() -> None:
    """An exclusive job has all of its node's cpus; memory that nobody asked for is an even part of the node's."""
    sketch = world("1x4", waiting=["1: 1c exclusive", "2: 1c"])
    whose(sketch, j1="ann lab", j2="ann lab")
    found = made(sketch, lab(Limits(max_tres_per_user=(("cpu", 3),))))
    assert (starts(found), waits(found)) == ({2}, {1: "AssocGrpCpuLimit"})
    found = made(sketch, lab(Limits(max_tres_per_job=(("mem", 249),))))
    assert waits(found) == {1: "AssocMaxMemPerJob", 2: "AssocMaxMemPerJob"}


@pytest.mark.parametrize("resource", [("cpu", 6), ("mem", 1500), ("gres/gpu", 3)])
def test_who_would_get_more_than_the_limit_is_not_promised_it_while_nodes_are_busy(resource: tuple[str, int]) -> None:
    sketch = world("2x4/2xa100", running=["1: n1 2c 100s"], waiting=["2: 2 nodes 1c exclusive 100s", "3: 1c 1000s"])
    whose(sketch, j1="cat other", j2="ann lab", j3="cat other")
    found = made(sketch, lab(Limits(grp_tres=(resource,))))
    assert starts(found) == {3}
    assert waits(found)[2].startswith("AssocGrp")


def test_what_stands_still_for_another_counts_with_the_cpus_that_it_gets_back() -> None:
    sketch = world("1x4", ["1: n1 4c 100M q=low", "2: n1 2c 100M q=high"], ["3: 2c 100M q=low", "4: 2c 100M q=low"])
    sketch.change(1, state=JobState.SUSPENDED, suspended_at_s=5.0, suspended_for=2)
    for most, expected in ((6, {3}), (5, set())):
        qos = (Qos(name="high"), Qos(name="low", limits=Limits(grp_tres=(("cpu", most),))))
        assert starts(made(sketch, Accounting(qos=qos))) == expected


def test_a_user_s_own_limits_count_in_all_accounts() -> None:
    sketch = world("1x4", running=["1: n1 1c"], waiting=["2: 1c", "3: 1c"])
    whose(sketch, j1="ann lab", j2="ann sub", j3="bob lab")
    rules = (UserRules(name="ann", limits=Limits(max_jobs=1)),)
    assert waits(made(sketch, lab(Limits(max_jobs=5), users=rules))) == {2: "AssocMaxJobsLimit"}


def test_minutes_are_what_was_used_what_runs_may_use_and_what_the_job_asks_for() -> None:
    sketch = world("1x4", running=["1: n1 1c 600s"], waiting=["2: 1c 600s", "3: 1c 60s"])
    whose(sketch, j1="ann lab", j2="bob lab", j3="bob sub")
    used = UsedResources(account="sub", user="ann", qos="", at_s=0.0, amounts=(("cpu", 5 * MINUTE_S),))
    other = UsedResources(account="other", user="cat", qos="", at_s=0.0, amounts=(("cpu", 500 * MINUTE_S),))
    limited = lab(Limits(grp_tres_mins=(("cpu", 20),)))
    found = made(sketch, limited, used, other)
    assert (starts(found), waits(found)) == ({3}, {2: "AssocGrpCPUMinutesLimit"})
    assert "have used, or may yet use, 15 cpu-minutes, and this one needs 10 cpu-minutes" in found.waits[2].detail
    assert starts(made(sketch, limited, other)) == {2}  # 10 + 10; then 1 more is too many
    free = lab(Limits(grp_tres_mins=(("cpu", 20),)), qos=(Qos(name="free", usage_factor=0.0),))
    whose(sketch, j2="bob lab free")
    assert starts(made(sketch, free, used)) == {2, 3}


def test_an_account_or_qos_that_is_gone_keeps_its_jobs_waiting() -> None:
    sketch = world("1x4", waiting=["1: 1c", "2: 1c", "3: 1c"])
    whose(sketch, j1="ann closed", j2="ann lab huge", j3="ann")
    found = made(sketch, lab(Limits(), qos=(Qos(name="normal"),)))
    assert (starts(found), waits(found)) == ({3}, {1: "InvalidAccount", 2: "InvalidQOS"})


# ----- licences


def test_a_partition_that_lets_in_only_some_keeps_the_jobs_of_others_waiting() -> None:
    sketch = world("1x8", waiting=["1: 1c", "2: 1c", "3: 1c"])
    whose(sketch, j1="ann sub high", j2="cat other high", j3="ann lab")
    sketch.partitions = [replace(sketch.partitions[0], allow_accounts=("top",), allow_qos=("high",))]
    found = made(sketch, lab(Limits(), qos=(Qos(name="high"),)))
    assert starts(found) == {1}
    assert waits(found) == {2: "AccountNotAllowed", 3: "QOSNotAllowed"}
    assert found.waits[2].detail == "partition 'main' takes only jobs of top, and this one is of other"


def test_licences_are_counted_with_what_runs_and_what_starts() -> None:
    sketch = world("2x4", running=["1: n1 1c 100s"], waiting=["2: 1c 60s", "3: 1c 60s", "4: 1c 60s"])
    for job_id, count in ((1, 1), (2, 2), (3, 1)):
        sketch.change(job_id, licenses=(("matlab", count),))
    found = made(sketch, Accounting(licenses=(("matlab", 2),)))
    assert (starts(found), waits(found)) == ({3, 4}, {2: "Licenses"})
    assert found.waits[2].detail == "needs 2 of the 2 licences matlab, of which 1 are free now"
    assert found.waits[2].expected_start_s == 100.0
    assert starts(made(sketch, Accounting(licenses=(("matlab", 3),)))) == {2, 4}
    assert starts(made(sketch, Accounting(licenses=(("matlab", 4),)))) == {2, 3, 4}


def test_backfill_leaves_the_licences_of_the_first_in_line_alone() -> None:
    sketch = world("2x4", running=["1: n1 1c 100s"], waiting=["2: 1c 60s", "3: 1c 50s", "4: 1c 500s"])
    for job_id, count in ((1, 1), (2, 2), (3, 1), (4, 1)):
        sketch.change(job_id, licenses=(("matlab", count),))
    found = made(sketch, Accounting(licenses=(("matlab", 2),)))
    assert (starts(found), waits(found)) == ({3}, {2: "Licenses", 4: "Licenses"})
    assert found.waits[4].detail in (
        "needs 1 of the 2 licences matlab, of which 0 are free now",
        "needs licences that are promised to a job before it",
    )


def test_a_licence_that_is_no_longer_configured_is_said_to_be_gone() -> None:
    sketch = world("1x4", waiting=["1: 1c"])
    sketch.change(1, licenses=(("matlab", 1),))
    found = made(sketch, Accounting())
    assert found.waits[1].detail == "the cluster has no licence 'matlab' any more"


# ----- elastic jobs


@pytest.mark.parametrize(
    ("limits", "gets"),
    [
        (Limits(max_jobs=1, grp_jobs=1), 3),
        (Limits(max_tres_per_job=(("node", 3),)), 2),
        (Limits(max_tres_per_user=(("cpu", 8),)), 1),
        (Limits(grp_tres=(("node", 1),)), 0),
    ],
)
def test_an_elastic_job_grows_within_its_limits_and_is_no_further_job(limits: Limits, gets: int) -> None:
    sketch = world("4x4", running=["1: n1 4c 100s"])
    whose(sketch, j1="ann lab")
    sketch.change(1, elastic=True, nodes_min=1, nodes_max=9, nodelist=(), licenses=(("matlab", 1),))
    for most in range(1, 4):
        sketch.change(1, nodes_max=1 + most)
        snapshot = replace(sketch.snapshot(), ledger=UsageLedger(accounting=lab(limits, licenses=(("matlab", 1),))))
        found = full_plan(snapshot, sketch.policy).resizes
        assert [len(resize.add) for resize in found] == [min(most, gets)] * (gets > 0)


def test_a_job_that_takes_as_many_nodes_as_there_are_takes_as_many_as_it_may() -> None:
    sketch = world("4x4", waiting=["1: 1-4 nodes 4c", "2: 3-4 nodes 4c"])
    whose(sketch, j1="ann lab", j2="bob lab")
    found = made(sketch, lab(Limits(max_tres_per_user=(("cpu", 8),))))
    assert [len(start.shares) for start in found.starts] == [2]
    assert waits(found) == {2: "AssocGrpCpuLimit"}
