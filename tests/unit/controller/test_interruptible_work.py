"""Work in turns: it goes on only while it is waited for, comes to the same, and ends when nobody does any more."""

from __future__ import annotations

import itertools
from threading import enumerate as all_threads

import pytest

from hpcsched.controller.planning import InterruptibleWork, Pause


def clock(step_s: float):  # type: ignore[no-untyped-def]
    count = itertools.count()
    return lambda: next(count) * step_s


def is_going_on() -> bool:
    return any(thread.name == "plan" for thread in all_threads())


def test_each_turn_does_some_of_it_and_nothing_is_done_in_between() -> None:
    done: list[int] = []

    def work(pause: Pause) -> None:
        for part in range(10):
            done.append(part)
            pause()

    counts = []
    for _ in InterruptibleWork(work, clock(0.006), 0.015).steps():
        counts.append(len(done))
    assert counts == [3, 6, 9]
    assert done == list(range(10))
    assert not is_going_on()


def test_what_takes_less_than_a_turn_is_done_at_the_first_step() -> None:
    done: list[int] = []
    assert list(InterruptibleWork(lambda pause: done.append(1), clock(0.0), 0.015).steps()) == []
    assert done == [1]


def test_what_it_raises_is_raised_where_it_is_waited_for() -> None:
    def work(pause: Pause) -> None:
        pause()
        raise ValueError("broken")

    steps = InterruptibleWork(work, clock(1.0), 0.015).steps()
    next(steps)
    with pytest.raises(ValueError, match="broken"):
        next(steps)
    assert not is_going_on()


def test_it_ends_when_it_is_dropped() -> None:
    ended: list[str] = []

    def work(pause: Pause) -> None:
        try:
            while True:
                pause()
        finally:
            ended.append("dropped")

    steps = InterruptibleWork(work, clock(1.0), 0.015).steps()
    next(steps)
    assert is_going_on()
    steps.close()  # type: ignore[attr-defined]
    assert ended == ["dropped"]
    assert not is_going_on()
