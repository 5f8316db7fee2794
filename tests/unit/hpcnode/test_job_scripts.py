"""Prolog and epilog on a node: what waits for them, what they hold, and what the next agent does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nodeworld import INCARNATION, World, token

from hpcnode.agent.job_scripts import NO_EPILOG
from hpcnode.wire import protocol

BOTH = protocol.JobScripts(prolog="/p", epilog="/e", limit_s=9.0)


class NotedScripts:
    """Scripts that run until the test ends them."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, str]] = []
        self.over: dict[str, Callable[[str], None]] = {}

    def run(self, name: str, state: str, scripts: protocol.JobScripts, over: Callable[[str], None]) -> None:
        self.runs.append((name, state))
        self.over[state] = over

    def forget(self, name: str) -> None:
        pass

    def ends(self, state: str, why: str = "") -> None:
        self.over.pop(state)(why)

    @property
    def states(self) -> list[str]:
        return [state for _, state in self.runs]


@pytest.fixture
def scripts() -> NotedScripts:
    return NotedScripts()


@pytest.fixture
def world(scripts: NotedScripts) -> World:
    return World(scripts)


def end_job(world: World, attempt: int = 0) -> None:
    world.ledger.end_job(protocol.EndJob(INCARNATION, 1, attempt, 5.0))


def gone(world: World) -> int:
    return sum(isinstance(message, protocol.JobGone) for message in world.sent)


def failures(world: World) -> list[str]:
    return [message.why for message in world.sent if isinstance(message, protocol.ScriptFailed)]


def test_nothing_starts_before_the_prolog_and_the_epilog_comes_last(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token(), scripts=BOTH)
    assert (scripts.states, world.shepherds.starts) == (["prolog"], [])
    scripts.ends("prolog")
    assert world.shepherds.starts == [batch]
    world.started(batch)
    world.ended(batch)
    assert scripts.states == ["prolog", "epilog"]
    (end,) = [message for message in world.sent if isinstance(message, protocol.Report) and message.status == "ended"]
    assert end.clearing
    end_job(world)
    assert gone(world) == 0
    scripts.ends("epilog")
    assert (gone(world), world.spool.script_notes) == (1, {})


def test_without_scripts_nothing_is_written(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token())
    world.started(batch)
    world.ended(batch)
    assert (world.spool.script_notes, scripts.runs) == ({}, [])
    assert not any(message.clearing for message in world.sent if isinstance(message, protocol.Report))


def test_a_claim_is_answered_when_its_prolog_has_succeeded(world: World, scripts: NotedScripts) -> None:
    claim = world.launch(token(step="alloc"), scripts=BOTH)
    world.launch(claim, scripts=BOTH)
    assert (world.statuses(claim), world.ledger.inventory()) == ([], [])
    scripts.ends("prolog")
    assert world.statuses(claim) == ["claimed"]


def test_a_prolog_that_fails_refuses_the_launch_and_is_told_until_it_is_noted(
    world: World, scripts: NotedScripts
) -> None:
    batch = world.launch(token(), scripts=BOTH)
    scripts.ends("prolog", "p ended with status 1")
    assert world.statuses(batch) == ["refused"]
    assert failures(world) == ["prolog p ended with status 1"]
    assert scripts.states == ["prolog", "epilog"]
    scripts.ends("epilog")
    world.ledger.repeat()
    assert len(failures(world)) == 2
    world.restart()
    world.ledger.repeat()
    assert len(failures(world)) >= 3
    world.ledger.ack([message.seq for message in world.sent if isinstance(message, protocol.ScriptFailed)])
    assert world.spool.script_notes == {}


def test_a_job_that_ends_during_its_prolog_never_starts_and_has_its_epilog(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token(), scripts=BOTH)
    end_job(world)
    assert (world.statuses(batch)[-1], gone(world), scripts.states) == ("revoked", 0, ["prolog"])
    scripts.ends("prolog")
    assert (world.shepherds.starts, scripts.states, gone(world)) == ([], ["prolog", "epilog"], 0)
    scripts.ends("epilog")
    assert gone(world) == 1


def test_steps_share_the_prolog_and_the_epilog_comes_when_the_job_ends(world: World, scripts: NotedScripts) -> None:
    for step in ("0", "1"):
        text = world.launch(token(step=step), scripts=BOTH)
        if step == "0":
            scripts.ends("prolog")
        world.started(text)
        world.ended(text)
    world.ack_all()
    assert (world.ledger.entries, scripts.states) == ({}, ["prolog"])
    assert world.ledger.jobs_with_scripts() == [(INCARNATION, 1, 0, 0)]
    end_job(world)
    scripts.ends("epilog")
    assert (scripts.states, gone(world)) == (["prolog", "epilog"], 1)


def test_a_later_attempt_waits_for_the_epilog_of_the_one_before(world: World, scripts: NotedScripts) -> None:
    first = world.launch(token(), scripts=BOTH)
    scripts.ends("prolog")
    world.started(first)
    world.ended(first)
    second = world.launch(token(attempt=1), scripts=BOTH)
    assert scripts.states == ["prolog", "epilog"]
    scripts.ends("epilog")
    assert scripts.states == ["prolog", "epilog", "prolog"]
    scripts.ends("prolog")
    assert world.shepherds.starts == [first, second]


@pytest.mark.parametrize("when", ["prolog", "ready", "epilog"])
def test_the_next_agent_continues(world: World, scripts: NotedScripts, when: str) -> None:
    batch = world.launch(token(), scripts=BOTH)
    if when == "prolog":
        world.restart()
        scripts.ends("prolog")
    else:
        scripts.ends("prolog")
    assert world.shepherds.starts == [batch]
    world.started(batch)
    if when == "ready":
        world.restart()
    world.ended(batch)
    if when == "epilog":
        world.restart()
    end_job(world)
    scripts.ends("epilog")
    assert gone(world) == 1


def test_after_a_reboot_only_the_epilog_runs(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token(), scripts=BOTH)
    scripts.ends("prolog")
    world.started(batch)
    world.shepherds.living.clear()
    world.boot_id = "another"
    world.restart()
    assert scripts.states == ["prolog", "epilog"]
    assert world.statuses(batch)[-1] != "lost"  # it holds the node
    scripts.ends("epilog")
    assert world.statuses(batch)[-1] == "lost"


def test_a_claim_that_a_power_failure_took_begins_anew_after_the_epilog(world: World, scripts: NotedScripts) -> None:
    claim = world.launch(token(step="alloc"), scripts=BOTH)
    scripts.ends("prolog")
    del world.spool.entries[claim]
    world.boot_id = "another"
    world.restart()
    world.launch(claim, scripts=BOTH)
    assert (scripts.states, world.statuses(claim)) == (["prolog", "epilog"], ["claimed"])
    scripts.ends("epilog")
    scripts.ends("prolog")
    assert (scripts.states[2:], world.statuses(claim)) == (["prolog"], ["claimed", "claimed"])


def test_a_state_that_cannot_be_written_stops_nothing(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token(), scripts=BOTH)
    world.spool.full = True
    scripts.ends("prolog")
    assert world.shepherds.starts == [batch]
    assert "No space left" in world.logged[-1]


DAMAGE: dict[str, dict[str, Any]] = {
    "nothing is left": {"token": None},
    "a number as its token": {"token": 5},
    "no scripts": {"scripts": None},
    "scripts with a number": {"scripts": {"prolog": 5}},
    "an unknown state": {"state": "later"},
    "a list as its state": {"state": [1]},
    "words as a truth": {"closing": "no"},
    "nothing as its boot": {"boot_id": None},
    "a number as its failures": {"failures": 5},
    "numbers among its failures": {"failures": [5]},
    "the record of another job": {"token": token(job=2)},
}


def damage(world: World, fields: dict[str, Any]) -> None:
    for record in world.spool.script_notes.values():
        record.update(fields)


@pytest.mark.parametrize("fields", DAMAGE.values(), ids=DAMAGE)
def test_an_agent_starts_with_a_damaged_record_and_the_prolog_runs_again(
    world: World, scripts: NotedScripts, fields: dict[str, Any]
) -> None:
    batch = world.launch(token(), scripts=BOTH)
    damage(world, fields)
    world.restart()
    assert (scripts.states, world.shepherds.starts) == (["prolog", "prolog"], [])
    assert "is damaged" in world.logged[0]
    scripts.ends("prolog")
    assert world.shepherds.starts == [batch]
    world.started(batch)
    world.ended(batch)
    end_job(world)
    assert (scripts.states[2:], gone(world)) == (["epilog"], 0)
    scripts.ends("epilog")
    assert (gone(world), world.spool.script_notes) == (1, {})


def test_a_job_that_runs_with_a_damaged_record_continues_and_has_its_epilog(
    world: World, scripts: NotedScripts
) -> None:
    batch = world.launch(token(), scripts=BOTH)
    scripts.ends("prolog")
    world.started(batch)
    damage(world, {"token": None})
    world.restart()
    assert scripts.states == ["prolog"]
    world.ended(batch)
    assert scripts.states == ["prolog", "epilog"]


def test_a_damaged_record_without_a_launch_holds_nothing_and_is_told(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token(), scripts=BOTH)
    damage(world, {"scripts": 5})
    world.spool.script_notes["x"] = {}
    del world.spool.entries[batch]
    world.restart()
    assert (failures(world), world.ledger.is_idle, world.ledger.jobs_with_scripts()) == ([NO_EPILOG], True, [])
    assert any("not the name of a record" in line for line in world.logged)
    world.ledger.ack([message.seq for message in world.sent if isinstance(message, protocol.ScriptFailed)])
    assert list(world.spool.script_notes) == ["x"]


def test_a_record_that_cannot_be_removed_stops_nothing(
    world: World, scripts: NotedScripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = world.launch(token(), scripts=BOTH)
    scripts.ends("prolog")
    world.started(batch)
    world.ended(batch)
    monkeypatch.setattr(world.spool, "forget_scripts", lambda _name: world.spool._write())
    world.spool.full = True
    scripts.ends("epilog")
    assert "cannot remove the record" in world.logged[-1]
