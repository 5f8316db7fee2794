"""Elastic jobs, one sketch for each rule: who is asked for what, who gets what."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import World, world

from hpcsched.model.accounting import PreemptType, Qos
from hpcsched.model.job import JobState
from hpcsched.model.node import Link
from hpcsched.sched.policy import Backfill, PreemptRules

RULES = PreemptRules(
    type=PreemptType.QOS, qos={"low": Qos(name="low"), "high": Qos(name="high", preempt=("low",))}, grace_s=60.0
)


def elastic(
    nodes: str, running: list[str], waiting: tuple[str, ...] | list[str] = (), low: int = 1, high: int = 9
) -> World:
    """Return a world whose running jobs are elastic."""
    made = world(nodes, running, waiting)
    for at, text in enumerate(running):
        made.change(int(text.split(":")[0]), elastic=True, nodes_min=low, nodes_max=high, nodelist=(), started_at_s=at)
    return made


def shrinks(made: World) -> dict[int, str]:
    return {resize.job_id: " ".join(resize.keep) for resize in made.full_plan().resizes if resize.keep}


def grows(made: World) -> dict[int, str]:
    return {
        resize.job_id: " ".join(f"{share.node}:{share.cpus}" for share in resize.add)
        for resize in made.full_plan().resizes
        if resize.add
    }


def test_a_job_is_asked_for_as_few_nodes_as_another_needs() -> None:
    made = elastic("4x4", ["1: n1,n2,n3,n4 4c 100s"], ["2: 2 nodes 4c 10s"])
    assert shrinks(made) == {1: "n1 n2"}
    assert made.full_plan().resizes[0].for_job == 2


def test_nobody_is_asked_while_a_node_is_awaited_after_the_controllers_start() -> None:
    made = elastic("5x4", ["1: n1,n2,n3,n4 4c 100s"], ["2: 2 nodes 4c 10s"]).change_node("n5", link=Link.UNKNOWN)
    assert shrinks(made) == {}
    assert shrinks(made.change_node("n5", link=Link.DOWN)) == {1: "n1 n2"}


def test_never_below_what_it_must_have_and_never_in_vain() -> None:
    assert shrinks(elastic("3x4", ["1: n1,n2,n3 4c 100s"], ["2: 2 nodes 4c 10s"], low=2)) == {}
    assert shrinks(elastic("3x4", ["1: n1,n2,n3 4c 100s"], ["2: 1 nodes 5c 10s"])) == {}
    assert shrinks(elastic("3x4", ["1: n1,n2,n3 4c 100s"], ["2: n1 4c 10s"])) == {}  # its first node stays


def test_no_elastic_job_shrinks_for_a_job_that_waits_for_anothers_promise() -> None:
    made = elastic("5x4", ["1: n1,n2,n3,n4 4c 100s"], ["2: 5 nodes 4c 10s", "3: 2 nodes 4c 1000s"], low=2)
    assert shrinks(made) == {}
    assert shrinks(made.change(3, time_limit_s=100)) == {1: "n1 n2 n3"}


def test_nobody_is_asked_for_one_that_would_delay_any_promised_start() -> None:
    waiting = ["2: n6 4c 10s", "3: 4 nodes 4c 10s", "4: 2 nodes 4c 1000s"]
    made = elastic("6x4", ["1: n1,n2,n3,n4 4c 100s", "9: n6 4c 1000s"], waiting, low=3).change(9, elastic=False)
    assert shrinks(made) == {1: "n1 n2 n3"}  # EASY's promise is to job 2 alone
    made.policy = replace(made.policy, backfill=Backfill.CONSERVATIVE)
    assert shrinks(made) == {}


def test_nobody_is_asked_for_what_is_free_or_has_been_asked_for() -> None:
    made = elastic("4x4", ["1: n1,n2,n3 4c 100s"], ["2: 4c 10s"])
    assert shrinks(made) == {}
    made = elastic("3x4", ["1: n1,n2,n3 4c 100s"], ["2: 4c 10s"]).change(1, wanted_nodes=("n1", "n2"))
    assert shrinks(made) == {}
    two = elastic("4x4", ["1: n1,n2 4c 100s", "3: n3,n4 4c 100s"], ["2: 4c 10s"]).change(3, wanted_nodes=("n3",))
    assert shrinks(two) == {}


def test_the_job_that_began_last_is_asked_first() -> None:
    assert shrinks(elastic("4x4", ["1: n1,n2 4c 100s", "3: n3,n4 4c 100s"], ["2: 4c 10s"])) == {3: "n3"}
    both = elastic("4x4", ["1: n1,n2 4c 100s", "3: n3,n4 4c 100s"], ["2: 2 nodes 4c 10s"])
    assert shrinks(both) == {1: "n1", 3: "n3"}


def test_an_idle_node_goes_to_the_job_that_began_first_when_nobody_is_in_line() -> None:
    made = elastic("5x4", ["1: n1 4c 100s", "3: n2 4c 100s"], high=3)
    assert grows(made) == {1: "n3:4 n4:4", 3: "n5:4"}
    assert grows(elastic("3x4", ["1: n1 4c 100s"], ["2: 4 nodes 4c"], high=3)) == {1: "n2:4 n3:4"}  # job 2 never fits
    assert grows(elastic("3x4", ["1: n1 4c 100s"], ["2: 3 nodes 4c 10s"], high=3)) == {}


def test_it_grows_no_further_than_it_wants_nor_onto_what_refused_it() -> None:
    assert grows(elastic("3x4", ["1: n1,n2 4c 100s"], high=2)) == {}
    assert grows(elastic("3x4", ["1: n1 4c 100s"]).change(1, barred_nodes=("n2",))) == {1: "n3:4"}
    assert grows(elastic("2x4", ["1: n1 4c 100s"]).change(1, left_nodes=("n2",))) == {1: "n2:4"}
    assert grows(elastic("3x4", ["1: n1 4c 100s"]).change(1, leaving=made_share())) == {}


def made_share() -> tuple[object, ...]:
    return elastic("3x4", ["1: n3 4c 100s"]).job(1).shares


def test_what_it_was_asked_for_is_withdrawn_when_nobody_is_in_line() -> None:
    made = elastic("2x4", ["1: n1,n2 4c 100s"], high=2).change(1, wanted_nodes=("n1",))
    assert shrinks(made) == {1: "n1 n2"}


def test_a_job_that_does_not_run_is_left_alone() -> None:
    made = elastic("3x4", ["1: n1,n2,n3 4c 100s"], ["2: 4c 10s"])
    assert shrinks(made.change(1, state=JobState.COMPLETING)) == {}


def preemptions(made: World) -> dict[int, list[int]]:
    return {one.job_id: [victim.job_id for victim in one.victims] for one in made.full_plan().preemptions}


def ranked(nodes: str, running: list[str], waiting: list[str], low: int = 1) -> World:
    """Return a world of elastic jobs in which QOS high preempts QOS low."""
    made = elastic(nodes, running, waiting, low=low)
    made.policy = replace(made.policy, preempt=RULES)
    return made


def test_an_elastic_job_is_asked_to_shrink_where_that_is_enough_and_not_preempted() -> None:
    made = ranked("4x4", ["1: n1,n2,n3,n4 4c 100s q=low"], ["2: 2 nodes 4c 10s q=high"])
    assert (shrinks(made), preemptions(made)) == ({1: "n1 n2"}, {})


def test_an_elastic_job_is_preempted_where_it_could_not_shrink_so_far() -> None:
    made = ranked("4x4", ["1: n1,n2,n3,n4 4c 100s q=low"], ["2: 4 nodes 4c 10s q=high"])
    assert (shrinks(made), preemptions(made)) == ({}, {2: [1]})


def test_an_elastic_job_has_its_grace_period_to_answer_before_it_is_preempted() -> None:
    made = ranked("4x4", ["1: n1,n2,n3,n4 4c 100s q=low"], ["2: 2 nodes 4c 10s q=high"])
    made.change(1, wanted_nodes=("n1", "n2"), wanted_at_s=5.0)
    made.now_s = 64.0
    assert (shrinks(made), preemptions(made)) == ({}, {})
    made.now_s = 65.0
    assert (shrinks(made), preemptions(made)) == ({}, {2: [1]})


def test_others_are_asked_when_one_has_not_answered_in_time() -> None:
    made = elastic("4x4", ["1: n1,n2 4c 100s", "3: n3,n4 4c 100s"], ["2: 4c 10s"])
    made.change(3, wanted_nodes=("n3",), wanted_at_s=5.0)
    made.now_s = 65.0
    assert shrinks(made) == {1: "n1"}


def test_nobody_makes_room_for_one_that_gets_the_nodes_which_are_being_given_back() -> None:
    made = ranked("4x4", ["1: n1,n2 4c 100s q=low", "3: n3,n4 4c 100s q=low"], ["2: 4c 10s q=high"])
    share = made.job(3).shares[1]
    made.change(3, shares=made.job(3).shares[:1], leaving=(share,))
    assert (shrinks(made), preemptions(made)) == ({}, {})


def test_a_job_that_was_asked_already_is_asked_for_more_when_somebody_else_needs_it() -> None:
    made = ranked("4x4", ["1: n1,n2,n3,n4 4c 100s q=low"], ["2: 4c 10s q=low", "3: 2 nodes 4c 10s q=high nice=1"])
    made.change(1, wanted_nodes=("n1", "n2", "n3"), wanted_at_s=0.0)
    assert (shrinks(made), preemptions(made)) == ({1: "n1"}, {})


def test_room_that_one_job_gets_is_not_given_to_the_next_as_well() -> None:
    made = elastic("5x4", ["1: n1,n2,n3,n4 4c 100s"], ["2: 2 nodes 4c 10s", "3: 2 nodes 4c 10s"])
    assert shrinks(made) == {1: "n1"}  # the idle node and one more for the first, two more for the second
