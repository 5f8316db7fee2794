"""Preemption, one sketch for each rule: who makes room for whom, and that nobody does in vain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.sched.world import World, world

from hpcsched.model.accounting import PreemptMode, PreemptType, Qos
from hpcsched.model.job import Hold, JobState, Reason
from hpcsched.model.node import Link
from hpcsched.sched.decisions import Preemption
from hpcsched.sched.policy import PreemptRules

LOW = Qos(name="low")


def by_qos(low: Qos = LOW, **rules: Any) -> PreemptRules:
    """Return rules by which jobs of QOS high preempt those of QOS low, and those of QOS top both."""
    high, top = Qos(name="high", preempt=("low",)), Qos(name="top", preempt=("low", "high"))
    return PreemptRules(type=PreemptType.QOS, qos={"low": low, "high": high, "top": top}, **rules)


def victims(made: World) -> dict[int, list[int]]:
    """Return who makes room for whom."""
    return {item.job_id: [victim.job_id for victim in item.victims] for item in made.full_plan().preemptions}


def only(made: World) -> Preemption:
    (item,) = made.full_plan().preemptions
    return item


def test_a_job_of_lower_rank_makes_room_and_what_it_gives_is_kept() -> None:
    made = world("2x4", ["1: n1 4c q=low", "2: n2 4c q=high"], ["3: 4c 60s q=high"], preempt=by_qos())
    item = only(made)
    assert [(victim.job_id, victim.mode, victim.save_s) for victim in item.victims] == [(1, PreemptMode.REQUEUE, None)]
    assert [(share.node, share.cpus) for share in item.shares] == [("n1", 4)]
    assert "job 1 makes room for it" in made.full_plan().waits[3].detail


def test_nobody_makes_room_while_a_node_is_awaited_after_the_controllers_start() -> None:
    made = world("3x4", ["1: n1 4c q=low", "2: n2 4c q=high"], ["3: 4c 60s q=high"], preempt=by_qos())
    made.change_node("n3", link=Link.UNKNOWN)
    assert victims(made) == {}
    assert victims(made.change_node("n3", drained=True)) == {3: [1]}
    assert victims(made.change_node("n3", drained=False, link=Link.DOWN)) == {3: [1]}


@pytest.mark.parametrize("rank", ["low", "high", "top", ""])
def test_nobody_is_preempted_by_one_of_its_own_or_a_lower_rank(rank: str) -> None:
    made = world("1x4", [f"1: n1 4c q={rank}" if rank else "1: n1 4c"], ["2: 4c 60s q=high"], preempt=by_qos())
    assert victims(made) == ({2: [1]} if rank == "low" else {})


def test_two_qos_that_list_each_other_preempt_neither() -> None:
    rules = PreemptRules(
        type=PreemptType.QOS, qos={"a": Qos(name="a", preempt=("b",)), "b": Qos(name="b", preempt=("a",))}
    )
    assert victims(world("1x4", ["1: n1 4c q=a"], ["2: 4c q=b"], preempt=rules)) == {}


def test_a_partition_of_a_higher_tier_preempts_on_the_nodes_that_they_share() -> None:
    made = world(
        "2x4",
        ["1: n1 4c p=slow", "2: n2 4c p=slow"],
        ["3: 4c 60s p=fast"],
        partitions={"slow": "n1,n2", "fast": "n2"},
        preempt=PreemptRules(type=PreemptType.PARTITION),
    )
    made.jobs = [replace(job, partition=job.spec.partition) for job in made.jobs]
    assert victims(made) == {}
    made.partitions[1] = replace(made.partitions[1], priority_tier=2)
    assert victims(made) == {3: [2]}


def test_nobody_is_preempted_in_vain() -> None:
    for waiting in ("3: 2 nodes 4c q=high", "3: 5c q=high", "3: 4c +gpu q=high", "3: 4c n2 q=high"):
        made = world("2x4", ["1: n1 4c q=low", "2: n2 4c q=high"], [waiting], preempt=by_qos())
        assert victims(made) == {}, waiting


def test_nobody_is_preempted_for_what_is_free() -> None:
    assert victims(world("2x4", ["1: n1 4c q=low"], ["3: 4c 60s q=high"], preempt=by_qos())) == {}


def test_the_last_work_that_is_lost_and_the_fewest_victims() -> None:
    made = world("2x4", ["1: n1 4c q=low", "2: n2 4c q=low"], ["3: 4c 60s q=high"], preempt=by_qos())
    made.now_s = 1000.0
    made.change(1, started_at_s=100.0)
    assert victims(made) == {3: [1]}
    assert victims(made.change(2, started_at_s=900.0)) == {3: [2]}
    small = world(
        "2x4",
        ["1: n1 2c q=low", "2: n1 2c q=low", "4: n2 4c q=low"],
        ["3: 4c 60s q=high"],
        preempt=by_qos(),
        backfill="easy",
    )
    small.now_s = 1000.0
    assert victims(small) == {3: [4]}  # the same work is lost: then fewest
    assert victims(small.change(1, started_at_s=500.0)) == {3: [1, 2]}


def test_in_a_large_world_the_cheapest_nodes_are_found() -> None:
    running = [f"{at}: n{at} 4c q={'high' if at % 3 == 0 else 'low'}" for at in range(1, 101)]
    made = world(
        "100x4", running, ["300: 2 nodes 4c 60s q=high", "301: n97,n98 2 nodes 4c 60s q=high"], preempt=by_qos()
    )
    made.now_s = 1000.0
    for at in (31, 61, 91):
        made.change(at, started_at_s=990.0)
    assert victims(made) == {300: [31, 61], 301: [97, 98]}


def test_only_who_is_needed_is_preempted() -> None:
    made = world(
        "3x4", ["1: n1 1c q=low", "2: n2 4c q=low", "4: n3 4c q=low"], ["3: 2 nodes 3c q=high"], preempt=by_qos()
    )
    assert victims(made) == {3: [2]}


def test_who_was_only_in_the_way_of_a_cheap_choice_is_spared() -> None:
    running = ["1: n1 1c q=low", "2: n1 1c q=low", "4: n1 3c q=low", "5: n2 8c q=low"]
    made = world("1x5 1x8", running, ["3: 4c 60s q=high"], preempt=by_qos())
    made.now_s = 1000.0
    for job_id in (1, 2, 4):
        made.change(job_id, started_at_s=900.0)
    assert victims(made) == {3: [1, 4]}


def test_nobody_makes_room_for_one_ahead_that_could_not_have_asked_for_it() -> None:
    running = ["1: n1 1c q=low", "2: n1 1c q=low"]
    made = world("1x2", running, ["10: 1c 1M q=low", "14: 1c 1M q=high"], preempt=by_qos())
    assert victims(made) == {14: [1]}


def test_one_victim_on_several_nodes_makes_room_on_all_of_them() -> None:
    made = world("3x4", ["1: n1,n2 4c q=low", "2: n3 4c q=high"], ["3: 2 nodes 4c q=high"], preempt=by_qos())
    assert victims(made) == {3: [1]}


def test_nobody_gets_what_a_victim_still_has() -> None:
    made = world("3x4", ["1: n1,n2 4c 100s q=low", "2: n3 4c 100s q=high"], ["3: 4c 10s q=high"], preempt=by_qos())
    made.change(2, elastic=True, nodes_min=1, nodes_max=3, nodelist=(), started_at_s=0)
    assert victims(made) == {3: [1]}
    assert made.full_plan().resizes == ()  # one of the victim's nodes will be idle when it has ended


def test_two_jobs_take_the_places_of_two() -> None:
    made = world("2x4", ["1: n1 4c q=low", "2: n2 4c q=low"], ["3: 4c q=high", "4: 4c q=high"], preempt=by_qos())
    assert victims(made) == {3: [1], 4: [2]}


def test_a_job_is_exempt_for_a_while() -> None:
    made = world("1x4", ["1: n1 4c q=low"], ["3: 4c q=high"], preempt=by_qos(exempt_s=60.0))
    made.now_s = 59.0
    assert victims(made) == {}
    made.now_s = 60.0
    assert victims(made) == {3: [1]}


@pytest.mark.parametrize("state", [JobState.CONFIGURING, JobState.SUSPENDED, JobState.COMPLETING])
def test_only_what_runs_is_preempted(state: JobState) -> None:
    made = world("1x4", ["1: n1 4c q=low"], ["3: 4c q=high"], preempt=by_qos()).change(1, state=state)
    assert victims(made) == {}


def test_modes_of_the_victim_s_qos_and_of_the_cluster() -> None:
    def mode(low: Qos, requeue: bool | None = None, **rules: Any) -> tuple[PreemptMode, float | None]:
        made = world("1x4", ["1: n1 4c q=low"], ["3: 4c q=high"], preempt=by_qos(low, **rules))
        (victim,) = only(made.change(1, requeue=requeue)).victims
        return victim.mode, victim.save_s

    assert mode(LOW, mode=PreemptMode.CANCEL) == (PreemptMode.CANCEL, None)
    assert mode(LOW, requeue=False) == (PreemptMode.CANCEL, None)
    assert mode(LOW, **{"requeue": False}) == (PreemptMode.CANCEL, None)
    checkpoint = replace(LOW, preempt_mode=PreemptMode.CHECKPOINT)
    assert mode(checkpoint) == (PreemptMode.CHECKPOINT, 60.0)
    assert mode(replace(checkpoint, grace_time_s=5.0)) == (PreemptMode.CHECKPOINT, 5.0)
    off = replace(LOW, preempt_mode=PreemptMode.OFF)
    assert victims(world("1x4", ["1: n1 4c q=low"], ["3: 4c q=high"], preempt=by_qos(off))) == {}


def test_one_that_stands_still_gives_its_cpus_but_neither_memory_nor_gpus() -> None:
    rules = by_qos(mode=PreemptMode.SUSPEND)
    assert victims(world("1x4", ["1: n1 4c 400M q=low"], ["3: 4c 600M q=high"], preempt=rules)) == {3: [1]}
    assert victims(world("1x4", ["1: n1 4c 400M q=low"], ["3: 4c 601M q=high"], preempt=rules)) == {}
    assert victims(world("1x4/1xa100", ["1: n1 4c 1g 1M q=low"], ["3: 4c 1g 1M q=high"], preempt=rules)) == {}


def standing_still(**policy: Any) -> World:
    made = world("1x4", ["1: n1 4c 100M q=low", "2: n1 4c 100M q=high"], preempt=by_qos(), **policy)
    return made.change(1, state=JobState.SUSPENDED, suspended_at_s=5.0, suspended_for=2)


def test_it_goes_on_when_its_cpus_are_free_again() -> None:
    made = standing_still()
    assert made.full_plan().resumes == ()
    made.jobs = [made.job(1)]
    assert made.full_plan().resumes == (1,)


def test_it_goes_on_after_who_outranks_it_and_before_who_does_not() -> None:
    for rank, starts, resumes in (("high", [3], ()), ("low", [], (1,))):
        made = standing_still()
        made.jobs = [made.job(1), *world("1x4", waiting=[f"3: 4c 100M q={rank}"]).jobs]
        found = made.full_plan()
        assert ([start.job_id for start in found.starts], found.resumes) == (starts, resumes)


def test_a_job_that_a_person_suspended_keeps_its_cpus_and_is_not_resumed() -> None:
    made = world("1x4", ["1: n1 4c q=low"], ["3: 4c q=high"], preempt=by_qos())
    made.change(1, state=JobState.SUSPENDED, suspended_at_s=5.0)
    found = made.full_plan()
    assert (found.starts, found.preemptions, found.resumes) == ((), (), ())


def kept(victim: JobState = JobState.COMPLETING, **policy: Any) -> World:
    """Return a world where job 1 makes room for job 3 on n1, and job 4 would like the node just as well."""
    made = world(
        "2x4",
        ["1: n1 4c q=low", "2: n2 4c q=high"],
        ["4: 4c 60s q=top", "3: 4c 60s q=high"],
        preempt=by_qos(),
        **policy,
    )
    shares = made.full_plan().preemptions[0].shares if made.full_plan().preemptions else ()
    return made.change(1, state=victim).change(3, reserved_shares=shares or made.job(1).shares)


def test_what_is_kept_for_a_job_nobody_else_gets_meanwhile() -> None:
    made = kept()
    made.policy = replace(made.policy, preempt=replace(made.policy.preempt, type=PreemptType.NONE))
    found = made.full_plan()
    assert (found.starts, found.given_up) == ((), ())
    assert "makes room for it on n1" in found.waits[3].detail
    made.jobs = [job for job in made.jobs if job.id != 1]
    assert [start.job_id for start in made.full_plan().starts] == [3]


def test_a_part_that_is_free_already_is_kept_until_the_rest_is() -> None:
    made = world("2x4", ["1: n1,n2 4c q=low"], ["3: 2 nodes 4c q=high", "4: 4c 1s q=top"], preempt=by_qos())
    made.change(3, reserved_shares=made.job(1).shares)
    made.change(1, state=JobState.COMPLETING, held_nodes=("n2",))
    assert made.full_plan().starts == ()
    made.jobs = [job for job in made.jobs if job.id != 1]
    assert [start.job_id for start in made.full_plan().starts] == [3]


def test_it_is_not_preempted_for_twice() -> None:
    assert [item.job_id for item in kept().full_plan().preemptions] == [4]  # which outranks job 2, on the other node


@pytest.mark.parametrize("what", ["held", "node", "other"])
def test_what_cannot_be_used_any_more_is_given_up(what: str) -> None:
    made = kept()
    if what == "held":
        made.change(3, hold=Hold.USER)
    elif what == "node":
        made.change_node("n1", link=Link.DOWN)
    else:
        made.change(1, state=JobState.RUNNING)  # somebody else's work is not going to end
    found = made.full_plan()
    assert found.given_up == (3,)
    assert found.waits[3].reason is not Reason.NONE


def test_without_rules_the_plan_is_the_plain_one() -> None:
    made = world("1x4", ["1: n1 4c q=low"], ["3: 4c q=high"])
    assert made.full_plan() == made.plan()
