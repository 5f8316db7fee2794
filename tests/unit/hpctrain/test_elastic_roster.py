"""Who takes part in an elastic run: small worlds, and any order of events (a property)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.elastic.roster import Member, MemberChoice, MemberState, Roster, RosterSettings


def run_of(count: int, *, want: int | None = None, least: int = 1) -> Roster:
    """A run of `count` members that have all said that they are ready."""
    roster = Roster(RosterSettings(least=least, want=want or count), 0.0)
    for slot in range(count):
        member = roster.join(slot, 0.0)
        roster.ready(member.number, {"port": 1000 + slot}, 0.0)
    return roster


def said(orders: list[tuple[int, dict[str, object]]]) -> list[tuple[int, object]]:
    return [(number, order["type"]) for number, order in orders]


def members_of(orders: list[tuple[int, dict[str, object]]]) -> list[int]:
    """The members of the generation that is announced, in the order of their ranks."""
    news = next(order for _, order in orders if order["type"] == "generation")
    return [member["number"] for member in news["members"]]  # type: ignore[attr-defined]


def test_the_first_generation_waits_for_all_or_for_a_while() -> None:
    roster = run_of(2, want=3)
    assert roster.settle(59.0) == []
    orders = roster.settle(60.0)
    assert members_of(orders) == [0, 1]
    assert roster.generation == 0


def test_a_lost_member_breaks_the_generation_and_the_others_are_the_next_one() -> None:
    roster = run_of(3)
    roster.settle(0.0)
    roster.lose(0, "its connection ended", 5.0)
    assert said(roster.settle(5.0)) == [(1, "broken"), (2, "broken")]
    roster.leave_generation(1, 0, 5.1, failed=False)
    assert roster.settle(5.1) == [], "told once, and 2 has not parted"
    roster.leave_generation(2, 0, 5.2, failed=False)
    orders = roster.settle(5.2)
    assert members_of(orders) == [1, 2]
    assert orders[0][1]["lost"] == [{"number": 0, "why": "its connection ended", "unheard_s": 5.0}]


def test_spares_are_ready_members_while_the_generation_is_complete() -> None:
    def spares() -> list[int]:
        return [member.number for member in roster.spares()]

    roster = run_of(3, want=2)
    assert spares() == [], "it has not begun"
    roster.settle(0.0)
    assert spares() == [2]
    roster.lose(0, "its connection ended", 5.0)
    assert spares() == [], "it is about to step in"
    roster.leave_generation(1, 0, 5.1, failed=False)
    assert members_of(roster.settle(5.1)) == [1, 2]
    assert spares() == []
    newcomer = roster.join(0, 6.0)
    assert spares() == [], "it is being started"
    roster.ready(newcomer.number, {}, 7.0)
    assert spares() == [newcomer.number]
    roster.resize(2, {0})
    assert spares() == [], "it is to leave"


def test_a_computing_member_is_waited_for_until_its_heartbeats_stop() -> None:
    roster = run_of(2)
    roster.settle(0.0)
    roster.leave_generation(0, 0, 1.0, failed=False)
    assert roster.settle(1.0) == []
    roster.heartbeat(0, 3.9)
    assert [member.number for member in roster.silent(4.0)] == [1]


def test_a_failed_exchange_ends_the_generation_for_all_members() -> None:
    roster = run_of(3)
    roster.settle(0.0)
    roster.leave_generation(0, 0, 1.0, failed=True)
    assert said(roster.settle(1.0)) == [(1, "broken"), (2, "broken")]
    roster.leave_generation(1, 0, 1.1, failed=True)
    roster.leave_generation(2, 0, 1.1, failed=False)
    assert members_of(roster.settle(1.1)) == [0, 1, 2]
    roster.leave_generation(0, 0, 2.0, failed=True)
    assert roster.settle(2.0) == [], "that was another generation"


def test_no_member_is_silent_while_the_roster_did_not_listen() -> None:
    roster = run_of(2)
    roster.settle(0.0)
    roster.heartbeat(0, 2.0)
    roster.heartbeat(1, 12.0)
    roster.extend_deadlines(9.8, 12.0)
    assert roster.silent(12.0) == []
    assert [member.number for member in roster.silent(15.1)] == [0, 1]
    assert [member.number for member in roster.silent(14.9)] == [0], "who was heard meanwhile is not excused twice"


def test_a_spare_replaces_a_lost_member_after_those_with_the_state() -> None:
    roster = run_of(3, want=2)
    assert members_of(roster.settle(0.0)) == [0, 1]
    roster.lose(0, "killed", 1.0)
    roster.settle(1.0)
    roster.leave_generation(1, 0, 1.0, failed=False)
    assert members_of(roster.settle(1.0)) == [1, 2]


def test_a_late_member_joins_between_two_steps() -> None:
    roster = run_of(1, want=2)
    roster.settle(60.0)
    late = roster.join(1, 61.0)
    roster.ready(late.number, {}, 62.0)
    assert said(roster.settle(62.0)) == [(0, "changing")]
    roster.leave_generation(0, 0, 63.0, failed=False)
    assert members_of(roster.settle(63.0)) == [0, late.number]


def test_nothing_is_sent_once_the_reason_for_a_change_is_gone() -> None:
    roster = run_of(1, want=2)
    roster.settle(60.0)
    late = roster.join(1, 61.0)
    roster.ready(late.number, {}, 62.0)
    assert said(roster.settle(62.0)) == [(0, "changing")]
    roster.lose(late.number, "its connection ended", 63.0)
    assert roster.settle(63.0) == []


def test_members_of_slots_that_are_given_back_leave_between_two_steps() -> None:
    roster = run_of(3)
    roster.settle(0.0)
    roster.resize(2, {1})
    assert said(roster.settle(1.0)) == [(0, "changing"), (1, "changing"), (2, "changing")]
    for number in range(3):
        roster.leave_generation(number, 0, 2.0, failed=False)
    orders = roster.settle(2.0)
    assert (1, "leave") in said(orders)
    assert members_of(orders) == [0, 2]
    assert roster.settle(3.0) == [], "while it is on its way out nothing changes any more"


def test_a_waiting_member_in_a_returned_slot_leaves() -> None:
    roster = run_of(1, want=2)
    roster.settle(60.0)
    late = roster.join(1, 61.0)
    roster.ready(late.number, {}, 61.0)
    roster.resize(1, {1})
    assert said(roster.settle(61.0)) == [(late.number, "leave")]


def test_a_starting_member_may_be_silent_for_longer() -> None:
    roster = run_of(1)
    late = roster.join(1, 0.0)
    roster.heartbeat(0, 59.0)
    assert roster.silent(60.0) == []
    roster.ready(late.number, {}, 60.0)
    assert [member.number for member in roster.silent(64.0)] == [0, late.number]


def test_too_few_wait_for_more() -> None:
    roster = run_of(2, least=2)
    roster.settle(0.0)
    roster.lose(1, "killed", 1.0)
    roster.settle(1.0)
    roster.leave_generation(0, 0, 1.0, failed=False)
    assert roster.settle(1.0) == []
    again = roster.join(1, 2.0)
    roster.ready(again.number, {}, 2.0)
    assert members_of(roster.settle(2.0)) == [0, again.number]


def test_after_a_member_has_finished_no_new_member_is_accepted() -> None:
    roster = run_of(3)
    roster.settle(0.0)
    roster.leave(0)
    roster.close()
    late = roster.join(3, 1.0)
    roster.ready(late.number, {}, 1.0)
    roster.leave_generation(1, 0, 1.0, failed=False)
    assert said(roster.settle(1.0)) == [(late.number, "leave")]
    roster.leave_generation(2, 0, 1.0, failed=False)
    assert members_of(roster.settle(1.0)) == [1, 2]


def test_when_one_has_finished_the_rest_finish_however_few_they_are() -> None:
    roster = run_of(3, least=3)
    roster.settle(0.0)
    roster.leave(0)
    roster.close()
    roster.lose(1, "killed", 1.0)
    roster.settle(1.0)
    roster.leave_generation(2, 0, 1.0, failed=True)
    assert members_of(roster.settle(1.0)) == [2]


@given(st.data())
def test_lost_members_never_come_back_and_survivors_keep_their_order(data: st.DataObject) -> None:
    """Random events; members do as they are told. A generation's members are alive, and old ones lead it."""
    roster = run_of(data.draw(st.integers(1, 4)), want=3)
    lost: set[int] = set()
    present: list[int] = []
    now_s = 60.0
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += 1.0
        able = sorted(roster.members)
        match data.draw(st.sampled_from(["lose", "join", "obey"])):
            case "lose" if able:
                number = data.draw(st.sampled_from(able))
                roster.lose(number, "killed", now_s)
                lost.add(number)
            case "join":
                roster.ready(roster.join(9, now_s).number, {}, now_s)
            case _:
                for number in able:
                    if roster.members[number].requested:
                        roster.leave_generation(number, roster.generation, now_s, failed=False)
        for _, order in roster.settle(now_s):
            if order["type"] == "generation":
                chosen = [member["number"] for member in order["members"]]  # type: ignore[attr-defined]
                assert not lost & set(chosen)
                kept = [number for number in present if number in roster.members]
                assert chosen[: len(kept)] == kept or chosen == present
                present = chosen
    inside = [m for m in roster.members.values() if m.state in (MemberState.IN, MemberState.LEFT)]
    assert {member.number for member in inside} == set(present) - lost


def test_a_member_that_stays_in_a_broken_generation_is_stuck_after_the_limit() -> None:
    roster = Roster(RosterSettings(least=1, want=2, leave_s=5.0), 0.0)
    for slot in range(2):
        roster.ready(roster.join(slot, 0.0).number, {}, 0.0)
    roster.settle(0.0)
    roster.leave_generation(0, 0, 1.0, failed=True)
    assert said(roster.settle(1.0)) == [(1, "broken")]
    roster.heartbeat(1, 6.1)
    assert roster.stuck(6.0) == []
    assert [member.number for member in roster.stuck(6.1)] == [1], "its heartbeats are not progress"


def test_an_arrangement_chooses_members_and_their_order() -> None:
    def last_two(inside: Sequence[Member], ready: Sequence[Member], patient: bool) -> MemberChoice | None:
        known = sorted([*inside, *ready], key=lambda member: -member.number)
        return MemberChoice(members=known[:2], facts={"parts": 2}) if len(known) > 1 else None

    roster = Roster(RosterSettings(least=1, want=3), 0.0, last_two)
    for slot in range(2):
        roster.ready(roster.join(slot, 0.0).number, {}, 0.0)
    orders = roster.settle(0.0)
    assert members_of(orders) == [1, 0]
    assert orders[0][1]["parts"] == 2
    roster.ready(roster.join(2, 1.0).number, {}, 1.0)
    assert said(roster.settle(1.0)) == [(0, "changing"), (1, "changing")]
    for number in (0, 1):
        roster.leave_generation(number, 0, 2.0, failed=False)
    assert members_of(roster.settle(2.0)) == [2, 1]
    assert roster.members[0].state is MemberState.READY, "it can be of use later"


def test_spares_get_the_facts_of_each_generation_once() -> None:
    def first_two(inside: Sequence[Member], ready: Sequence[Member], patient: bool) -> MemberChoice | None:
        return MemberChoice(members=[*inside, *ready][:2], facts={"parts": 2})

    roster = Roster(RosterSettings(least=1, want=2), 0.0, first_two)
    for slot in range(3):
        roster.ready(roster.join(slot, 0.0).number, {}, 0.0)
    assert roster.settle(0.0)[2:] == [(2, {"type": "prepare", "parts": 2})]
    assert roster.settle(1.0) == []
    roster.ready(roster.join(3, 2.0).number, {}, 2.0)
    assert roster.settle(2.0) == [(3, {"type": "prepare", "parts": 2})]
    roster.lose(0, "killed", 3.0)
    roster.leave_generation(1, 0, 3.0, failed=True)
    assert said(roster.settle(3.0)) == [(1, "generation"), (2, "generation"), (3, "prepare")]


# ----- members that reach the roster, but not each other


def part(roster: Roster, now_s: float, *pairs: tuple[int, int]) -> list[tuple[int, dict[str, object]]]:
    """Let all members leave the generation; the first of each pair reports that it did not reach the second one."""
    orders = []
    for member in roster.inside():
        unreached = [other for number, other in pairs if number == member.number]
        roster.leave_generation(member.number, roster.generation, now_s, failed=True, unreached=unreached)
        orders += roster.settle(now_s)
    return orders


def test_of_two_members_that_do_not_reach_each_other_the_later_is_left_out() -> None:
    roster = run_of(3)
    roster.settle(0.0)
    assert members_of(part(roster, 1.0, (1, 0))) == [0, 2]
    assert roster.members[1].state is MemberState.READY


def test_the_member_that_reaches_fewest_others_is_left_out() -> None:
    roster = run_of(4)
    roster.settle(0.0)
    assert members_of(part(roster, 1.0, (1, 0), (2, 1), (1, 3))) == [0, 2, 3]


def test_a_spare_replaces_a_member_that_is_left_out() -> None:
    roster = run_of(3, want=2)
    roster.settle(0.0)
    assert members_of(part(roster, 1.0, (0, 1))) == [0, 2]


def test_members_are_kept_apart_longer_each_time_they_fail_again() -> None:
    roster = run_of(2)
    roster.settle(0.0)
    assert members_of(part(roster, 1.0, (0, 1))) == [0]
    assert roster.settle(30.9) == []
    assert said(roster.settle(31.1)) == [(0, "changing")]
    assert members_of(part(roster, 32.0)) == [0, 1]
    assert members_of(part(roster, 37.0, (1, 0))) == [0]
    assert roster.settle(96.9) == []
    assert said(roster.settle(97.1)) == [(0, "changing")]
    assert members_of(part(roster, 98.0)) == [0, 1]
    assert members_of(part(roster, 500.0, (1, 0))) == [0], "it worked in between"
    assert said(roster.settle(530.1)) == [(0, "changing")]


def test_a_member_that_is_lost_meanwhile_is_not_kept_apart_when_it_returns() -> None:
    roster = run_of(2)
    roster.settle(0.0)
    roster.leave_generation(0, 0, 1.0, failed=True, unreached=[1])
    roster.lose(1, "no heartbeat", 1.1)
    assert members_of(roster.settle(1.1)) == [0]
    roster.ready(roster.join(1, 2.0).number, {}, 2.0)
    assert said(roster.settle(2.0)) == [(0, "changing")]


def test_a_broken_link_is_tried_again_soon_if_nothing_works_without_it() -> None:
    roster = run_of(2, least=2)
    roster.settle(0.0)
    assert said(part(roster, 1.0, (0, 1))) == [(1, "broken")]
    assert roster.settle(10.9) == []
    assert members_of(roster.settle(11.1)) == [0, 1]


def test_the_member_is_left_out_without_which_a_generation_is_possible() -> None:
    def with_the_second(inside: Sequence[Member], ready: Sequence[Member], patient: bool) -> MemberChoice | None:
        known = [*inside, *ready]
        return MemberChoice(members=known) if any(member.slot == 1 for member in known) else None

    roster = Roster(RosterSettings(least=1, want=2), 0.0, with_the_second)
    for slot in range(2):
        roster.ready(roster.join(slot, 0.0).number, {}, 0.0)
    roster.settle(0.0)
    assert members_of(part(roster, 1.0, (0, 1))) == [1]


def test_unreached_members_of_no_generation_are_ignored() -> None:
    roster = run_of(3, want=2)
    roster.settle(0.0)
    assert members_of(part(roster, 1.0, (0, 2), (0, 99), (1, 1))) == [0, 1]
