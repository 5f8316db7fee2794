"""What faults cost: times since the last word of who is lost, and steps that are taken again."""

from __future__ import annotations

import pytest

from hpctrain.elastic.roster import Loss
from hpctrain.elastic.serve import SHOWN, RunAccount


def loss(number: int, heard_at_s: float, missed_at_s: float) -> Loss:
    return Loss(number=number, slot=number, why="killed", heard_at_s=heard_at_s, missed_at_s=missed_at_s)


def run_of_three() -> RunAccount:
    """Three members have taken ten steps of a second each."""
    account = RunAccount(0.0)
    account.form([0, 1, 2], 3, 1.0)
    account.note_step(10, 10.0, 11.0)
    return account


def test_a_lost_rank_costs_the_time_to_the_next_step_and_to_full_strength() -> None:
    account = run_of_three()
    account.lose(loss(1, 11.9, 12.0))
    account.note_step(11, 0.0, 12.1)  # under way before it was lost
    account.form([0, 2], 3, 12.2)
    account.note_step(12, 1.0, 13.4)
    account.form([0, 2, 3], 3, 14.9)
    assert account.facts(20.0)["faults"] == [
        {
            "step": 10,
            "lost": [{"member": 1, "slot": 1, "why": "killed"}],
            "missed_s": pytest.approx(0.1),
            "next_step_s": pytest.approx(1.5),
            "full_strength_s": pytest.approx(3.0),
            "lost_steps": 0,
        }
    ]
    assert account.facts(20.0)["goodput"] == pytest.approx(0.55)
    assert account.describe(20.0) == [
        "fault after step 10 in slot 1 (killed): missed after 0.10 s, next step after 1.50 s, full strength after 3.00 s, "
        "0 steps lost",
        "goodput 55.0%: 11.0 s of steps in 20.0 s; 1 faults, 0 steps lost, missed after 0.10 s (worst 0.10), "
        "next step after 1.50 s (worst 1.50), full strength after 3.00 s (worst 3.00)",
    ]


def test_ranks_that_are_lost_before_the_next_step_are_one_fault() -> None:
    account = run_of_three()
    account.lose(loss(1, 12.0, 12.0))
    account.form([0, 2], 3, 12.1)
    account.lose(loss(2, 12.2, 15.2))
    account.form([0], 3, 15.3)
    account.note_step(11, 1.0, 16.0)
    (fault,) = account.faults
    assert (fault.missed_s, fault.next_step_s, fault.full_s) == (pytest.approx(3.0), pytest.approx(4.0), None)


def test_without_members_the_steps_since_the_checkpoint_are_lost() -> None:
    account = run_of_three()
    for number in range(3):
        account.lose(loss(number, 12.0, 12.0))
    account.form([3, 4, 5], 3, 15.0)
    account.note_step(-1, 0.0, 15.1)  # a heartbeat of one who has taken none yet
    account.note_step(8, 1.0, 16.0)
    assert (account.step, account.faults[0].lost_steps) == (8, 3)
    assert account.faults[0].next_step_s == pytest.approx(4.0)
    account.note_step(11, 3.0, 19.0)
    assert account.facts(20.0)["lost_steps"] == 3


def test_members_that_come_and_go_in_an_orderly_way_are_no_fault() -> None:
    account = run_of_three()
    account.form([0, 1], 2, 12.0)
    account.note_step(11, 1.0, 13.0)
    assert account.describe(14.0) == ["goodput 78.6%: 11.0 s of steps in 14.0 s"]


def test_of_many_faults_the_last_ones_are_shown() -> None:
    account = run_of_three()
    for number in range(SHOWN + 2):
        account.lose(loss(number, 20.0 + number, 20.0 + number))
        account.form([100, number + 1], 2, 20.5 + number)
        account.note_step(11 + number, 0.5, 20.9 + number)
    lines = account.describe(60.0)
    assert lines[0] == "2 earlier faults (see --report)"
    assert len(lines) == SHOWN + 2
