"""The ledger with a spool in memory and fake shepherds: starts, answers, removals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodeworld import INCARNATION, World, launch, token

from hpcnode.agent.ledger import MAX_STARTS
from hpcnode.wire import protocol
from hpcnode.wire.protocol import read_token
from hpcnode.wire.shepherd_messages import EndTasks, SuspendTasks, TasksEnded


def test_a_launch_is_claimed_started_reported_and_forgotten() -> None:
    world = World()
    text = world.launch(token())
    assert world.shepherds.starts == [text]
    world.started(text)
    world.ended(text, code=3)
    assert world.statuses(text) == ["started", "ended"]
    assert world.sent[-1].codes == [3]
    world.ack_all()
    assert (world.ledger.entries, world.spool.entries) == ({}, {})
    world.launch(text)
    assert (world.statuses(text)[-1], world.shepherds.starts) == ("revoked", [text])


def test_a_batch_step_that_ends_at_once_is_reported_once() -> None:
    world = World()
    short, longer = world.launch(token()), world.launch(token(job=2))
    world.started(short, reported=False)
    world.started(longer, reported=False)
    assert world.ledger.has_unreported_starts
    world.ended(short)
    world.ledger.report_starts()
    assert (world.statuses(short), world.statuses(longer)) == (["ended"], ["started"])
    assert not world.ledger.has_unreported_starts


def test_every_report_has_a_higher_number_also_after_a_restart() -> None:
    world = World()
    text = world.launch(token())
    world.started(text)
    world.launch(text)
    world.restart()
    world.ledger.inventory()
    world.launch(text)
    seqs = [m.seq for m in world.sent]
    assert seqs == sorted(set(seqs))


def test_an_entry_stays_until_the_report_of_its_end_is_acknowledged() -> None:
    world = World()
    text = world.launch(token())
    world.started(text)
    world.ack_all()
    world.ended(text)
    world.ledger.forget_some()
    assert text in world.spool.entries
    world.restart()
    assert [(r["token"], r["status"]) for r in world.ledger.inventory()] == [(text, "ended")]


def test_reports_are_repeated_until_they_are_acknowledged() -> None:
    world = World()
    text = world.launch(token())
    world.started(text)
    world.ledger.repeat()
    assert world.statuses(text) == ["started"]  # a whole interval has not passed
    world.ledger.repeat()
    assert world.statuses(text) == ["started", "started"]
    world.ack_all()
    world.ledger.repeat()
    world.ledger.repeat()
    assert world.statuses(text) == ["started", "started"]


def test_a_late_start_report_has_the_run_time_of_the_script() -> None:
    world = World()
    text = world.launch(token())
    world.started(text)
    world.now_s += 40.0
    world.ledger.repeat()
    world.ledger.repeat()
    assert [m.ran_s for m in world.sent if m.status == "started"] == [0.0, 40.0]


def test_a_shepherd_that_died_before_the_start_is_replaced_a_few_times() -> None:
    world = World()
    text = world.launch(token())
    for _ in range(MAX_STARTS):
        world.gone(text)
    assert world.shepherds.starts == [text] * MAX_STARTS
    assert world.statuses(text) == ["refused"]


def test_a_step_whose_shepherd_died_is_lost_when_its_tree_is_gone() -> None:
    world = World()
    text = world.launch(token())
    world.started(text)
    world.shepherds.tree_left = True
    world.gone(text)
    assert (world.statuses(text), world.ledger.waits, world.ledger.is_idle) == (["started"], True, False)
    world.shepherds.tree_left = False
    world.ledger.tick()
    assert world.statuses(text) == ["started", "lost"]
    assert not world.ledger.waits


@pytest.mark.parametrize(("was_started", "expected"), [(False, "revoked"), (True, "lost")])
def test_after_a_reboot_nothing_is_started_again(was_started: bool, expected: str) -> None:
    world = World()
    text = world.launch(token())
    if was_started:
        world.started(text)
    world.shepherds.living.clear()
    world.boot_id = "another boot"
    world.restart()
    assert [r["status"] for r in world.ledger.inventory()] == [expected]
    world.launch(text)
    assert world.shepherds.starts == [text]


def test_after_a_reboot_no_end_starts_a_step_and_no_lost_launch_blocks_one() -> None:
    world = World()
    texts = [world.launch(token(step=str(step))) for step in range(4)]
    world.started(texts[0])
    world.started(texts[3])
    world.spool.entries[texts[1]]["launch"] = None  # the power failure took it
    world.shepherds.living.clear()
    world.boot_id = "another boot"
    world.restart()
    assert [r["status"] for r in world.ledger.inventory()] == ["lost", "revoked", "revoked", "lost"]
    assert world.shepherds.starts == texts


def test_an_end_that_waits_for_disk_space_starts_no_other_step() -> None:
    world = World()
    first, second = world.launch(token(step="0")), world.launch(token(step="1"))
    world.started(first)
    world.ledger.end_step(protocol.EndStep(second, 1.0, "cancelled"))
    world.spool.full = True
    world.gone(second)
    world.ended(first)
    assert world.shepherds.starts == [first, second]
    world.spool.full = False
    world.ledger.tick()
    assert world.statuses(second) == ["revoked"]


def test_a_claim_is_ended_although_the_disk_was_full_at_first() -> None:
    world = World()
    claim = world.launch(token(step="alloc"))
    world.spool.full = True
    world.ledger.end_job(protocol.EndJob(INCARNATION, 1, 0, 1.0))
    world.spool.full = False
    world.ledger.tick()
    assert world.statuses(claim) == ["claimed", "revoked"]
    assert protocol.JobGone(INCARNATION, 1, 0) in world.sent


def test_an_end_before_the_launch_revokes_it() -> None:
    world = World()
    text = token()
    world.ledger.end_step(protocol.EndStep(text, 1.0, "cancelled"))
    world.launch(text)
    world.restart()
    world.launch(text)
    assert set(world.statuses(text)) == {"revoked"}
    assert world.shepherds.starts == []


def test_an_end_reaches_the_shepherd_and_revokes_without_one() -> None:
    world = World()
    text = world.launch(token())
    world.ledger.end_step(protocol.EndStep(text, 2.0, "cancelled"))
    assert world.shepherds.sent == [(text, EndTasks(2.0, "cancelled"))]
    world.gone(text)
    assert world.statuses(text) == ["revoked"]


def test_a_batch_step_is_over_only_with_the_rest_of_its_job() -> None:
    world = World()
    batch, step = world.launch(token()), world.launch(token(step="0"))
    world.started(batch)
    world.started(step)
    world.ended(batch, code=2)
    assert world.shepherds.sent == [(step, EndTasks(30.0, "the job's batch step is over"))]
    assert world.statuses(batch) == ["started"]
    assert {r["token"]: r["status"] for r in world.ledger.inventory()} == {batch: "started", step: "started"}
    world.ended(step)
    assert world.statuses(batch) == ["started", "ended"]


def test_a_batch_step_that_ended_without_an_agent_ends_the_other_steps() -> None:
    world = World()
    batch, step = world.launch(token()), world.launch(token(step="0"))
    world.started(batch)
    world.started(step)
    world.spool.write_final(batch, {"status": protocol.ENDED, "at_s": 3.0, "codes": [1], "signals": [0]})
    world.shepherds.living.discard(batch)
    world.restart()
    assert world.shepherds.sent == [(step, EndTasks(30.0, "the job's batch step is over"))]
    world.ended(step)
    assert world.statuses(batch)[-1] == "ended"


@pytest.mark.parametrize("acknowledged", ["before", "after"])
def test_the_acknowledged_start_of_a_batch_step_does_not_acknowledge_its_end(acknowledged: str) -> None:
    world = World()
    batch, step = world.launch(token()), world.launch(token(step="0"))
    world.started(batch)
    world.started(step)
    if acknowledged == "before":
        world.ack_all()
    world.ended(batch, code=2)
    world.ack_all()
    world.ended(step)
    assert world.statuses(batch)[-1] == "ended"
    world.ledger.forget_some()
    world.restart()
    assert batch in world.ledger.entries
    world.ack_all()
    assert batch not in world.ledger.entries


def test_an_ended_job_is_answered_when_all_of_it_is_gone() -> None:
    world = World()
    first, second = world.launch(token(attempt=1)), world.launch(token(attempt=1, step="3"))
    other = world.launch(token(job=2))
    for text in (first, second, other):
        world.started(text)
    world.ledger.end_job(protocol.EndJob(INCARNATION, 1, 1, 1.0))
    assert {text for text, message in world.shepherds.sent if isinstance(message, EndTasks)} == {first, second}
    gone = protocol.JobGone(INCARNATION, 1, 1)
    world.ended(first)
    assert gone not in world.sent
    world.ended(second)
    assert world.sent[-1] == gone
    late = world.launch(token(attempt=0))
    assert world.statuses(late) == ["revoked"]
    assert world.launch(token(attempt=2)) == world.shepherds.starts[-1]


def test_a_node_in_a_new_stay_accepts_its_launches_and_no_late_ones_of_the_old() -> None:
    world = World()
    first = world.launch(token(attempt=1, step="alloc"))
    end = protocol.EndJob(INCARNATION, 1, 1, 1.0)
    world.ledger.end_job(end)
    assert world.sent[-1] == protocol.JobGone(INCARNATION, 1, 1)
    again, step = world.launch(first.replace(".1.alloc", ".1-1.alloc")), world.launch(token(attempt="1-1", step="5"))
    assert (world.statuses(again), world.shepherds.starts) == (["claimed"], [step])
    world.started(step)
    world.ledger.end_job(end)  # comes twice
    assert world.sent[-1] == protocol.JobGone(INCARNATION, 1, 1), "not of the stay that it is at"
    assert world.statuses(again) == ["claimed"]
    late = world.launch(token(attempt=1, step="4"))
    assert (world.statuses(late), world.shepherds.starts) == (["revoked"], [step])
    world.ledger.end_job(protocol.changed(end, stay=1))
    assert world.statuses(again) == ["claimed", "revoked"]
    world.ended(step)
    assert world.sent[-1] == protocol.JobGone(INCARNATION, 1, 1, stay=1)
    assert world.statuses(world.launch(token(attempt="1-1", step="6"))) == ["revoked"]


def test_a_newer_attempt_waits_until_the_older_one_is_gone() -> None:
    world = World()
    old = world.launch(token())
    world.started(old)
    new = world.launch(token(attempt=1))
    assert world.shepherds.starts == [old]
    assert (old, EndTasks(0.0, "attempt 1 of the job starts here")) in world.shepherds.sent
    world.ended(old)
    assert world.shepherds.starts == [old, new]


def test_commands_of_an_older_epoch_or_another_incarnation_are_dropped() -> None:
    world = World()
    assert world.ledger.epochs.begin(INCARNATION, 5) == ""
    assert "epoch 5" in world.ledger.epochs.begin(INCARNATION, 4)
    world.launch(token(), epoch=4)
    assert (world.sent, world.shepherds.starts) == ([], [])
    assert "dropped" in world.logged[-1]
    assert world.ledger.epochs.begin("0123456789", 1) == ""
    assert "in the past" in world.ledger.epochs.begin(INCARNATION, 9)
    world.launch(token(), epoch=9)
    assert world.shepherds.starts == []


def test_a_full_disk_starts_nothing_and_is_reported() -> None:
    world = World()
    world.spool.full = True
    text = world.launch(token())
    assert world.statuses(text) == ["refused"]
    assert "No space left" in world.sent[-1].why
    world.spool.full = False
    world.launch(text)
    assert world.shepherds.starts == []
    world.ledger.tick()
    assert world.spool.entries[text]["final"]["status"] == "refused"


@pytest.mark.parametrize("by", ["agent", "shepherd"])
def test_the_next_agent_does_not_start_a_launch_refused_on_a_full_disk(by: str) -> None:
    world = World()
    world.shepherds.fails = by == "agent"
    take = world.spool.claim

    def claim(*args: Any) -> bool:
        claimed = take(*args)
        world.spool.full = True
        return claimed

    world.spool.claim = claim  # type: ignore[method-assign]
    text = world.launch(token())
    if by == "shepherd":
        world.ledger.shepherd_ended(text, TasksEnded("refused", 1.0, "cannot record the start"))
        world.gone(text)
    assert world.statuses(text) == ["refused"]
    starts = len(world.shepherds.starts)
    world.spool.full = world.shepherds.fails = False
    world.restart()
    world.ledger.tick()
    assert len(world.shepherds.starts) == starts
    assert world.statuses(text)[-1] == "revoked"


def test_a_full_disk_does_not_make_an_end_be_forgotten() -> None:
    world = World()
    text = world.launch(token())
    world.started(text)
    world.ended(text)
    world.spool.full = True
    world.ledger.ack([m.seq for m in world.sent])
    assert world.ledger.forget_some() == []
    world.spool.full = False
    assert world.ledger.forget_some() == [text]


def test_no_step_starts_where_the_jobs_batch_step_is_over() -> None:
    world = World()
    batch = world.launch(token())
    world.started(batch)
    world.ended(batch)
    late = world.launch(token(step="0"))
    assert (world.statuses(late), world.shepherds.starts) == (["revoked"], [batch])
    world.ack_all()
    assert world.statuses(world.launch(token(step="1"))) == ["revoked"]
    newer = world.launch(token(attempt=1, step="0"))
    assert newer in world.shepherds.living


def test_refusals_have_their_reason() -> None:
    world = World()
    cases = {
        "no such account": launch(token(), user="eve"),
        "of another step": protocol.from_json({**protocol.to_json(launch(token())), "attempt": 4}),
        "tasks on one node": protocol.from_json(
            {**protocol.to_json(launch(token())), "tasks": protocol.TaskSet(0, 0, 1, 0, 1).__dict__}
        ),
        "NUL": protocol.from_json({**protocol.to_json(launch(token())), "env": {"A": "b\0c"}}),
        "names have no '='": protocol.from_json({**protocol.to_json(launch(token())), "env": {"A=B": "c"}}),
    }
    for why, message in cases.items():
        world.ledger.launch(message, b"#!/bin/sh\n")
        assert (world.sent[-1].status, why in world.sent[-1].why) == ("refused", True), world.sent[-1]
    world.shepherds.fails = True
    world.launch(token())
    assert "no more processes" in world.sent[-1].why


MOVES = ["launch", "end", "job", "start", "finish", "die", "ack", "agent", "reboot"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 5))))
def test_a_token_is_released_once_and_a_final_state_never_changes(moves: list[tuple[str, int]]) -> None:
    world = World()
    tokens = [token(job=1 + n % 2, attempt=n // 4, step="batch" if n % 2 else "0") for n in range(6)]
    released: list[str] = []
    finals: dict[str, str] = {}
    for move, number in moves:
        text = tokens[number]
        entry = world.ledger.entries.get(text)
        living = text in world.shepherds.living
        if move == "launch":
            world.launch(text)
        elif move == "end":
            world.ledger.end_step(protocol.EndStep(text, 1.0, "cancelled"))
        elif move == "job":
            key = read_token(text)
            assert key is not None
            world.ledger.end_job(protocol.EndJob(INCARNATION, key.job_id, key.attempt, 1.0))
        elif move == "start" and living and entry is not None and entry.status == "claimed":
            released.append(text)
            world.started(text)
        elif move == "finish" and living and entry is not None and entry.status == "started":
            world.ended(text)
        elif move == "die" and living:
            world.gone(text)
        elif move == "ack":
            world.ack_all()
        elif move == "agent":
            world.restart()
        elif move == "reboot":
            world.shepherds.living.clear()
            world.boot_id += "x"
            world.restart()
        for message in world.sent:
            if isinstance(message, protocol.Report) and message.status in ("ended", "lost", "refused"):
                assert finals.setdefault(message.token, message.status) == message.status
    assert len(released) == len(set(released))


def test_a_suspension_reaches_all_steps_of_a_job_and_later_ones() -> None:
    world = World()
    first, other = world.launch(token(step="0")), world.launch(token(job=2, step="0"))
    world.ledger.suspend_job(protocol.SuspendJob(INCARNATION, 1, 0, True))
    second, newer = world.launch(token(step="1")), world.launch(token(job=3, attempt=1, step="0"))
    assert world.shepherds.sent == [(first, SuspendTasks(True)), (second, SuspendTasks(True))]
    world.ledger.suspend_job(protocol.SuspendJob(INCARNATION, 1, 0, False))
    world.launch(token(step="2"))
    assert set(world.shepherds.sent[2:]) == {(first, SuspendTasks(False)), (second, SuspendTasks(False))}
    assert {other, newer}.isdisjoint(text for text, _ in world.shepherds.sent)


def test_steps_that_save_their_state_end_with_their_batch_step() -> None:
    world = World()
    batch, step = world.launch(token()), world.launch(token(step="0"), grace_s=7.0)
    world.started(batch)
    world.started(step)
    world.ledger.end_job(protocol.EndJob(INCARNATION, 1, 0, 60.0, 10, True))
    saving = EndTasks(60.0, "the job is over", 10, True)
    assert set(world.shepherds.sent) == {(batch, saving), (step, saving)}
    world.ended(batch, code=75)
    assert world.shepherds.sent[2:] == [(step, EndTasks(7.0, "the job's batch step is over"))]
