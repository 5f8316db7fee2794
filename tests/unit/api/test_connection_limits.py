"""What one account may have at the controller's sockets, in connections, bytes and requests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hpcnode.wire.connection_limits import Bounds, ConnectionLimits, Rates
from hpcsched.api.connection_limits import SocketLimits, bounds

WIDE = Bounds(10, 100, 1000, 10_000, 1000, 10_000)


@dataclass(eq=False)
class One:
    """A connection."""

    is_busy: bool = False
    is_lasting: bool = False
    unread_bytes: int = 0
    dropped: bool = False

    def drop(self) -> None:
        self.dropped = True


def test_one_more_closes_the_one_that_was_silent_longest_and_is_not_busy() -> None:
    limits = ConnectionLimits(WIDE._replace(connections=3))
    busy, heard, silent = One(is_busy=True), One(), One()
    for one in (busy, heard, silent):
        assert limits.comes(1, one)
    limits.is_heard(1, heard)
    assert limits.comes(1, One())
    assert [one.dropped for one in (busy, heard, silent)] == [False, False, True]
    assert limits.comes(1, One(is_busy=True))
    assert heard.dropped
    assert len(limits) == 3


def test_a_connection_whose_end_would_end_a_step_is_kept() -> None:
    limits = ConnectionLimits(WIDE._replace(connections=2))
    step, answer = One(is_busy=True, is_lasting=True), One(is_busy=True)
    assert limits.comes(1, step)
    assert limits.comes(1, answer)
    assert limits.comes(1, One(is_busy=True, is_lasting=True))
    assert answer.dropped
    assert not limits.comes(1, One())
    assert not step.dropped
    assert limits.comes(2, One())


def test_of_too_many_in_all_the_account_with_most_gives_one_up() -> None:
    limits = ConnectionLimits(WIDE._replace(all_connections=5))
    many = [One() for _ in range(4)]
    few = One()
    for uid, one in [(1, one) for one in many] + [(2, few)]:
        assert limits.comes(uid, one)
    assert limits.comes(3, One())
    assert [one.dropped for one in many] == [True, False, False, False]
    assert not few.dropped
    assert len(limits) == 5


def test_unfinished_requests_are_bounded_by_account_and_in_sum() -> None:
    limits = ConnectionLimits(WIDE._replace(unparsed_bytes=100, all_unparsed_bytes=250))
    first, second, other, third = One(), One(), One(), One()
    for uid, one in ((1, first), (1, second), (2, other), (3, third)):
        limits.comes(uid, one)
    assert limits.may_hold(1, first, 60)
    assert not limits.may_hold(1, second, 60)
    limits.goes(1, second)
    assert limits.may_hold(1, first, 100)
    assert limits.may_hold(2, other, 90)
    assert limits.may_hold(3, third, 50)
    assert limits.may_hold(3, third, 80)  # 270 in all: the one with most goes
    assert [one.dropped for one in (first, other, third)] == [True, False, False]
    assert limits.may_hold(2, other, 0)


def test_an_account_that_has_most_is_refused_itself() -> None:
    limits = ConnectionLimits(WIDE._replace(unparsed_bytes=1000, all_unparsed_bytes=100))
    large, small = One(), One()
    limits.comes(1, large)
    limits.comes(2, small)
    assert limits.may_hold(2, small, 10)
    assert not limits.may_hold(1, large, 95)
    assert not small.dropped


def test_answers_that_were_read_meanwhile_do_not_count() -> None:
    limits = ConnectionLimits(WIDE._replace(unread_bytes=100, all_unread_bytes=150))
    one = One()
    limits.comes(1, one)
    for _ in range(50):
        assert limits.may_send(1, one, 80)
    one.unread_bytes = 80
    assert not limits.may_send(1, one, 80)


def test_an_account_may_have_one_answer_of_any_size_and_others_are_closed_for_it() -> None:
    limits = ConnectionLimits(WIDE._replace(unread_bytes=100, all_unread_bytes=150))
    stalled, small, reader = One(unread_bytes=100), One(unread_bytes=10), One()
    for uid, one in ((1, stalled), (2, small), (3, reader)):
        limits.comes(uid, one)
        assert limits.may_send(uid, one, one.unread_bytes)
    assert limits.may_send(3, reader, 130)
    assert stalled.dropped
    assert not small.dropped
    assert limits.may_send(2, small, 10)


def test_tokens_come_back_with_time() -> None:
    now = [0.0]
    rates = Rates(10, 3, lambda: now[0])
    assert [rates.wait_s(1) for _ in range(3)] == [None] * 3
    assert rates.wait_s(1) == pytest.approx(0.1)
    assert rates.wait_s(2) is None
    now[0] = 0.1
    assert rates.wait_s(1) is None
    assert rates.wait_s(1) == pytest.approx(0.1)
    now[0] = 100.0
    assert [rates.wait_s(1) for _ in range(4)] == [None, None, None, pytest.approx(0.1)]
    assert rates.wait_s(3, cost=23) is None
    assert rates.wait_s(3) == pytest.approx(2.1)


def test_buckets_that_are_full_again_are_forgotten() -> None:
    now = [0.0]
    rates = Rates(10, 3, lambda: now[0])
    for uid in range(5000):
        now[0] += 1.0
        rates.wait_s(uid)
    assert len(rates._buckets) <= 1000


def test_root_and_the_controllers_own_account_ask_as_often_as_they_like() -> None:
    socket_limits = SocketLimits(bounds(), exempt=frozenset({0, 7}), clock=lambda: 0.0)
    socket_limits.set_rate(1, 2)
    assert all(socket_limits.request_wait_s(uid) is None and socket_limits.lets_in(uid) for uid in (0, 7) * 50)
    assert [socket_limits.request_wait_s(8) is None for _ in range(3)] == [True, True, False]
    assert sum(socket_limits.lets_in(8) for _ in range(50)) == 2
    socket_limits.set_rate(0, 1)
    assert all(socket_limits.request_wait_s(8) is None for _ in range(50))


def test_a_process_with_few_files_keeps_half_of_them() -> None:
    assert (bounds(1024).connections, bounds(1024).all_connections) == (128, 512)
    assert (bounds(65_536).connections, bounds(65_536).all_connections) == (512, 32_768)
