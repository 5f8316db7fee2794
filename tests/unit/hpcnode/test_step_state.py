"""The states of a step under its shepherd, and the events that they allow."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodeworld import ACCOUNT, launch, token

from hpcnode.os.faults import CrashPoints
from hpcnode.os.loop import Loop
from hpcnode.os.process import ProcessIdentity
from hpcnode.shepherd.assignment import Assignment, Own, Setting
from hpcnode.shepherd.shepherd import Shepherd
from hpcnode.shepherd.step_state import (
    BEFORE_RELEASE,
    NEXT,
    RUNNING,
    StepEvent,
    StepState,
    TransitionError,
    after,
    allows,
)
from hpcnode.shepherd.task import TaskForker
from hpcnode.spool import Spool
from hpcnode.wire import protocol
from hpcnode.wire.shepherd_messages import EndCommitted, TasksStarted

OVER = frozenset(StepState) - BEFORE_RELEASE - RUNNING


def test_a_step_passes_through_all_states_in_order() -> None:
    state, passed = StepState.PREPARING, [StepState.PREPARING]
    for event in (
        StepEvent.TASKS_READY,
        StepEvent.RELEASE,
        StepEvent.END,
        StepEvent.TREE_EMPTY,
        StepEvent.RECORD,
        StepEvent.REPORT,
        StepEvent.ACKNOWLEDGE,
        StepEvent.LEAVE,
    ):
        state = after(state, event)
        passed.append(state)
    assert passed == list(StepState)


def test_every_state_is_reached_and_every_event_is_used() -> None:
    reached = {StepState.PREPARING} | {state for row in NEXT.values() for state in row.values()}
    assert reached == set(NEXT) == set(StepState)
    assert {event for row in NEXT.values() for event in row} == set(StepEvent)


@pytest.mark.parametrize("state", StepState)
def test_a_transition_that_the_table_does_not_have_raises(state: StepState) -> None:
    for event in StepEvent:
        if not allows(state, event):
            with pytest.raises(TransitionError, match=f"{event.name} is not allowed while the step is {state.value}"):
                after(state, event)


def test_nothing_goes_back_to_an_earlier_part_of_its_life() -> None:
    parts = (BEFORE_RELEASE, RUNNING, OVER)
    for number, part in enumerate(parts):
        later = frozenset().union(*parts[number:])
        assert all(set(NEXT[state].values()) <= later for state in part)


def test_only_ready_steps_are_released_and_only_recorded_ends_are_reported() -> None:
    assert {state for state in StepState if allows(state, StepEvent.RELEASE)} == {StepState.READY}
    assert {state for state in StepState if allows(state, StepEvent.REPORT)} == {StepState.RECORDED}
    assert {state for state in StepState if StepState.RECORDED in NEXT[state].values()} == {
        StepState.OVER,
        StepState.RECORDED,
        StepState.REPORTED,
    }


def test_an_end_may_be_requested_until_the_step_is_gone() -> None:
    assert {state for state in StepState if not allows(state, StepEvent.END)} == {StepState.GONE}


def test_a_new_agent_hears_the_end_again() -> None:
    assert after(StepState.REPORTED, StepEvent.RECONNECT) is StepState.RECORDED
    assert after(StepState.ACKNOWLEDGED, StepEvent.RECONNECT) is StepState.ACKNOWLEDGED


class FullSpool(Spool):
    """A spool whose disk is full as long as `full` says so."""

    full = True

    def write_final(self, token: str, record: dict[str, Any]) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write_final(token, record)


@pytest.fixture
def shepherd(tmp_path: Path) -> Iterator[Shepherd]:
    """A shepherd whose step runs, without a process."""
    spool, text = FullSpool(str(tmp_path), CrashPoints()), token(1)
    spool.claim(launch(text), b"#!/bin/sh\n", "boot", (os.geteuid(), os.getegid()))
    setting = Setting(spool, CrashPoints(), "boot", "n1", str(tmp_path / "sock"), False)
    job = Assignment(launch(text), ACCOUNT, {}, 0, False, lock_fd=-1)
    ours, theirs = socket.socketpair()
    made = Shepherd(setting, job, theirs, Loop(), Own(ProcessIdentity(1, 1, "boot"), TaskForker()))
    made._started = TasksStarted(7, 1.0, 1.0, [(7, 1, "boot")], (1, 1, "boot"), "boot", 1.0, 1001)
    made.state = StepState.RELEASED
    yield made
    ours.close()
    theirs.close()


def test_words_that_the_state_does_not_allow_are_logged_and_dropped(
    shepherd: Shepherd, capsys: pytest.CaptureFixture[str]
) -> None:
    shepherd._handle(EndCommitted())
    assert shepherd.state is StepState.RELEASED
    assert capsys.readouterr().err == f"the end is committed dropped: step {shepherd.token} is released\n"


def test_an_end_request_does_not_lose_an_end_that_the_full_disk_does_not_take(shepherd: Shepherd) -> None:
    shepherd._close(StepEvent.TREE_EMPTY, shepherd._end_record())
    assert shepherd.state is StepState.OVER
    shepherd.terminate()
    assert shepherd.state is StepState.OVER
    assert not shepherd.loop.stopped
    shepherd.setting.spool.full = False  # type: ignore[attr-defined]
    shepherd._write_final()
    assert shepherd.state is StepState.GONE
    found = shepherd.setting.spool.read(shepherd.token).final
    assert found is not None
    assert found["status"] == protocol.ENDED


def test_a_step_that_is_over_is_left_alone_by_its_timers(shepherd: Shepherd) -> None:
    shepherd.setting.spool.full = False  # type: ignore[attr-defined]
    shepherd._suspension.begin()
    shepherd._set_time_limit(0.0)
    shepherd._close(StepEvent.TREE_EMPTY, shepherd._end_record())
    gone = shepherd.state
    for _ in range(3):
        shepherd.loop.later(0.0, lambda: None)
        shepherd.loop.turn()
    assert shepherd.state is gone
    shepherd._watch_lease()
    shepherd._watch_memory()
    shepherd._refuse("a task died")
    assert shepherd._why == ""
