"""When reservations are: once or again and again, by the local calendar; which of them clash; who may use them."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

from zones import zone_fixture

from hpcsched.model.ids import NodeName
from hpcsched.model.reservation import Flag, Reservation, at, clash, first_day, may_use, occurrences

HOUR = 3600


berlin = zone_fixture("Europe/Berlin")


def local(*moment: int) -> int:
    return int(datetime(*moment).timestamp())


def reservation(start_s: int, length_s: int, *flags: Flag, nodes: str = "n1 n2") -> Reservation:
    names = tuple(NodeName(name) for name in nodes.split())
    return Reservation(name="r", start_s=start_s, end_s=start_s + length_s, nodes=names, users=("ann",), flags=flags)


def days(one: Reservation, count: int) -> list[str]:
    spans = islice(occurrences(one, one.start_s, one.start_s + 60 * 24 * HOUR), count)
    return [datetime.fromtimestamp(start_s).strftime("%a %d %H:%M") for start_s, _ in spans]


def test_what_repeats_begins_at_the_same_hour_of_its_days() -> None:
    friday = local(2027, 1, 22, 9)
    assert days(reservation(friday, HOUR, Flag.DAILY), 3) == ["Fri 22 09:00", "Sat 23 09:00", "Sun 24 09:00"]
    assert days(reservation(friday, HOUR, Flag.WEEKLY), 2) == ["Fri 22 09:00", "Fri 29 09:00"]
    assert days(reservation(friday, HOUR, Flag.WEEKDAY), 3) == ["Fri 22 09:00", "Mon 25 09:00", "Tue 26 09:00"]
    saturday = local(2027, 1, 23, 9)
    assert days(reservation(saturday, HOUR, Flag.WEEKEND), 3) == ["Sat 23 09:00", "Sun 24 09:00", "Sat 30 09:00"]
    assert days(reservation(friday, HOUR), 3) == ["Fri 22 09:00"]


def test_nine_is_nine_when_the_clocks_are_changed() -> None:
    before = local(2027, 3, 27, 9)  # the clocks go forward in the night to the 28th
    (first, _), (second, _) = islice(occurrences(reservation(before, HOUR, Flag.DAILY), before, before + 3 * 86400), 2)
    assert second - first == 23 * HOUR
    assert datetime.fromtimestamp(second).hour == 9


def test_times_that_only_touch_a_reservation_have_none_of_it() -> None:
    one = reservation(local(2026, 3, 2, 9), HOUR)
    spans = [(one.start_s, one.end_s)]
    assert list(occurrences(one, one.start_s - HOUR, one.start_s)) == []
    assert list(occurrences(one, one.end_s, one.end_s + HOUR)) == []
    assert list(occurrences(one, one.start_s - HOUR, one.start_s + 1)) == spans
    assert list(occurrences(one, one.end_s - 1, one.end_s + HOUR)) == spans


def test_one_that_repeats_moves_on_when_it_is_over_and_others_do_not() -> None:
    start_s = local(2027, 1, 22, 9)
    daily = reservation(start_s, HOUR, Flag.DAILY)
    assert at(daily, start_s + HOUR - 1) == daily
    assert at(daily, start_s + HOUR).start_s == local(2027, 1, 23, 9)
    assert at(daily, local(2027, 2, 10, 12)).start_s == local(2027, 2, 11, 9)
    once = reservation(start_s, HOUR)
    assert at(once, start_s + HOUR) == once
    assert (once.is_over(start_s + HOUR), daily.is_over(start_s + HOUR)) == (True, False)
    assert [once.is_active(start_s + more) for more in (-1, 0, HOUR - 1, HOUR)] == [False, True, True, False]


def test_a_first_day_on_which_it_does_not_repeat_gives_way_to_the_next_that_is() -> None:
    saturday = local(2027, 1, 23, 9)
    assert first_day(reservation(saturday, HOUR, Flag.WEEKDAY)).start_s == local(2027, 1, 25, 9)
    assert first_day(reservation(saturday, HOUR, Flag.WEEKEND)).start_s == saturday
    assert first_day(reservation(saturday, HOUR)).start_s == saturday


def test_two_clash_where_they_have_a_node_and_a_time_in_common() -> None:
    nine = local(2027, 1, 22, 9)
    once = reservation(nine, 2 * HOUR)
    assert clash(once, reservation(nine + HOUR, 2 * HOUR), nine) == (nine + HOUR, nine + 2 * HOUR)
    assert clash(once, reservation(nine + 2 * HOUR, HOUR), nine) is None
    assert clash(once, reservation(nine + HOUR, HOUR, nodes="n3"), nine) is None
    assert clash(once, reservation(nine + HOUR, HOUR, nodes="n2 n3"), nine) is not None


def test_two_that_repeat_are_followed_until_they_meet() -> None:
    monday, friday = local(2027, 1, 25, 9), local(2027, 1, 22, 9)
    daily, weekly = reservation(friday, HOUR, Flag.DAILY), reservation(monday, HOUR, Flag.WEEKLY)
    assert clash(daily, weekly, friday) == clash(weekly, daily, friday) == (monday, monday + HOUR)
    later = reservation(local(2027, 6, 1, 9), HOUR)
    assert clash(daily, later, friday) == (later.start_s, later.end_s)
    assert (
        clash(reservation(friday, HOUR, Flag.WEEKDAY), reservation(friday + 86400, HOUR, Flag.WEEKEND), friday) is None
    )


def test_who_may_use_it() -> None:
    of_ann = reservation(0, 1)
    assert [may_use(of_ann, user, "") for user in ("ann", "ben")] == [True, False]
    both = Reservation(name="r", start_s=0, end_s=1, nodes=(), users=("ann",), accounts=("physics",))
    assert [may_use(both, *who) for who in (("ann", "physics"), ("ann", "chemistry"), ("ben", "physics"))] == [
        True,
        False,
        False,
    ]
    account = Reservation(name="r", start_s=0, end_s=1, nodes=(), accounts=("physics",))
    assert may_use(account, "anybody", "physics")
