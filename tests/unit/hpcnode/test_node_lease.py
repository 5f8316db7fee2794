"""Leases, claims without a program, held steps and full disks in the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from nodeworld import INCARNATION, World, token

from hpcnode.lease import Renewals, StepLease
from hpcnode.wire import protocol
from hpcnode.wire.shepherd_messages import EndTasks, ReleaseTasks, TasksEnded, record_of

KILL: dict[str, Any] = {"lease": "kill", "lease_s": 60.0, "grace_s": 10.0}


def test_a_launch_with_a_lease_starts_after_an_answer_of_the_controller() -> None:
    world = World()
    text = world.launch(token(), **KILL)
    assert world.shepherds.starts == []
    assert world.ledger.leases.waiting()
    world.ledger.renewed(499.0)
    assert world.shepherds.starts == [text]
    assert world.spool.renewals[text] == 499.0


def test_a_launch_that_waits_for_its_lease_dies_with_its_connection() -> None:
    """Its controller may have started the job elsewhere since."""
    world = World()
    text = world.launch(token(), **KILL)
    world.ledger.disconnected()
    assert world.statuses(text)[-1] == "revoked"
    world.ledger.renewed(501.0)
    world.launch(text, **KILL)
    assert world.shepherds.starts == []


def test_it_dies_with_its_agent_too() -> None:
    world = World()
    text = world.launch(token(), **KILL)
    world.restart()
    assert world.statuses(text)[-1] == "revoked"
    world.ledger.renewed(501.0)
    assert world.shepherds.starts == []


def test_a_recent_answer_on_the_same_connection_starts_a_lease() -> None:
    world = World()
    world.ledger.renewed(495.0)
    fresh = world.launch(token(job=1), **KILL)
    world.ledger.disconnected()
    other = world.launch(token(job=2), **KILL)
    world.ledger.renewed(500.0)
    world.now_s = 511.0
    stale = world.launch(token(job=3), **KILL)
    assert world.shepherds.starts == [fresh, other]
    world.ledger.renewed(511.0)
    assert world.shepherds.starts == [fresh, other, stale]


def test_a_lease_that_ran_out_is_not_renewed() -> None:
    world = World()
    early, late = world.launch(token(job=1), **KILL), world.launch(token(job=2), lease="kill", lease_s=100.0)
    world.ledger.renewed(500.0)
    world.now_s = 560.0
    world.ledger.renewed(559.0)
    assert (world.spool.renewals[early], world.spool.renewals[late]) == (500.0, 559.0)
    world.restart()
    world.ledger.renewed(560.0)
    assert (world.spool.renewals[early], world.spool.renewals[late]) == (500.0, 560.0)


def test_no_new_shepherd_starts_after_the_lease_is_over() -> None:
    world = World()
    text = world.launch(token(), **KILL)
    world.ledger.renewed(500.0)
    world.now_s = 560.0
    world.gone(text)
    assert (world.statuses(text)[-1], world.sent[-1].why) == ("revoked", protocol.LEASE_OVER)
    assert world.shepherds.starts == [text]


def test_how_often_the_controller_is_asked_follows_from_what_is_here() -> None:
    world = World()
    assert world.ledger.leases.renew_every_s is None
    world.launch(token(job=1))
    assert world.ledger.leases.renew_every_s is None
    text = world.launch(token(job=2), **KILL)
    assert world.ledger.leases.renew_every_s == 10.0
    world.ledger.renewed(500.0)
    world.started(text)
    world.ended(text)
    assert world.ledger.leases.renew_every_s is None


class Timers:
    """A loop that records the delays that it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def later(self, _delay_s: float, call: Any) -> Any:
        self.calls.append(call)
        return self

    def cancel(self) -> None:
        self.calls.clear()


def test_a_renewal_counts_from_its_ping_on_the_same_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    world, timers = World(), Timers()
    clock = iter([10.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr("hpcnode.lease.boot_clock_s", lambda: next(clock))
    renewals = Renewals(timers, world.ledger.leases, world.sent.append)  # type: ignore[arg-type]
    renewals.keep_on(True)
    assert world.sent == []
    world.launch(token(), **KILL)
    renewals.keep_on(True)
    renewals.keep_on(True)
    timers.calls.pop()()
    assert world.sent == [protocol.Ping(1), protocol.Ping(2)]
    assert renewals.answered(2) == 20.0
    assert renewals.answered(1) is None
    assert renewals.answered(7) is None
    renewals.keep_on(True)  # asks a third time: the launch still waits
    renewals.forget()
    renewals.keep_on(True)
    assert renewals.answered(3) is None
    assert renewals.answered(4) == 40.0
    renewals.keep_on(False)
    assert timers.calls == []


def test_a_step_is_told_to_end_in_time_for_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    now, noted = [500.0], [500.0]
    monkeypatch.setattr("hpcnode.lease.boot_clock_s", lambda: now[0])
    world = World()
    world.launch(text := token(), **KILL)
    lease = StepLease(world.ledger.entries[text].launch, lambda: noted[0])  # type: ignore[arg-type]
    assert lease.left_s() == 50.0  # and then its grace of 10
    now[0], noted[0] = 549.0, 540.0
    assert lease.left_s() == 1.0  # nobody looks at the file before it has to
    now[0] = 551.0
    assert lease.left_s() == 39.0
    now[0] = 600.0
    assert lease.left_s() == -10.0


def test_a_claim_without_a_program_is_kept_and_given_back() -> None:
    world = World()
    text = world.launch(token(step="alloc"))
    assert (world.statuses(text), world.shepherds.starts) == (["claimed"], [])
    world.launch(text)
    world.restart()
    assert world.ledger.is_idle
    assert world.ledger.inventory()[0]["status"] == "claimed"
    world.sent.clear()
    world.ledger.end_job(protocol.EndJob(INCARNATION, 1, 0, 5.0))
    assert world.statuses(text) == ["revoked"]
    assert protocol.JobGone(INCARNATION, 1, 0) in world.sent
    world.launch(token(step="alloc"))
    assert world.statuses(text)[-1] == "revoked"


def test_the_end_of_a_step_does_not_report_claims_again() -> None:
    world = World()
    claim, step = world.launch(token(step="alloc")), world.launch(token(step="0"))
    world.started(step)
    world.ended(step)
    assert world.statuses(claim) == ["claimed"]


def test_a_claim_waits_for_what_is_left_of_an_older_attempt() -> None:
    world = World()
    old = world.launch(token(step="3"))
    world.started(old)
    claim = world.launch(token(attempt=1, step="alloc"))
    world.launch(claim)
    assert world.statuses(claim) == []
    world.ended(old)
    world.ledger.tick()
    assert world.statuses(claim) == ["claimed"]


def test_a_claim_does_not_outlive_the_machine() -> None:
    world = World()
    text = world.launch(token(step="alloc"))
    world.boot_id = "another boot"
    world.restart()
    assert world.statuses(text)[-1] == "revoked"


def test_an_unknown_user_claims_nothing() -> None:
    world = World()
    text = world.launch(token(step="alloc"), user="eve")
    assert world.statuses(text) == ["refused"]
    assert not world.sent[-1].node_fault


def test_a_step_that_waits_for_go_is_ready_first() -> None:
    world = World()
    text = world.launch(token(step="0"), hold=True)
    world.ledger.shepherd_ready(text)
    assert world.statuses(text) == ["ready"]
    world.ledger.go(protocol.Go(text))
    assert world.shepherds.sent[-1] == (text, ReleaseTasks())
    world.started(text)
    assert world.statuses(text) == ["ready", "started"]


def test_a_full_disk_is_the_nodes_fault_until_there_is_room() -> None:
    world = World()
    world.spool.full = True
    text = world.launch(token())
    assert world.statuses(text) == ["refused"]
    assert world.sent[-1].node_fault
    said = [message.why for message in world.sent if isinstance(message, protocol.Condition)]
    assert said
    assert all("No space left" in why for why in said)
    world.ledger.repeat()
    assert world.ledger.fault
    world.spool.full = False
    world.ledger.repeat()
    assert (world.ledger.fault, world.sent[-1]) == ("", protocol.Condition(""))


def test_a_node_that_cannot_fork_refuses_launches_until_it_can() -> None:
    world = World()
    world.shepherds.no_process = True
    text = world.launch(token())
    assert world.statuses(text) == ["refused"]
    assert any(isinstance(message, protocol.Report) and message.node_fault for message in world.sent)
    world.ledger.repeat()
    assert "cannot start a shepherd" in world.ledger.fault
    world.shepherds.no_process = False
    world.ledger.repeat()
    assert (world.ledger.fault, world.sent[-1]) == ("", protocol.Condition(""))


def test_a_start_that_the_disk_did_not_take_is_the_nodes_fault() -> None:
    world = World()
    text = world.launch(token())
    record = TasksEnded("refused", 1.0, "cannot record the start: No space left", node_fault=True)
    world.spool.entries[text]["final"] = record_of(record)
    world.ledger.shepherd_ended(text, record)
    assert world.sent[-1].node_fault
    assert "No space left" in world.ledger.fault


def test_a_full_disk_delays_the_report_that_a_job_is_gone_not_its_end() -> None:
    world = World()
    text = world.launch(token())
    world.started(text)
    noted = world.spool.end_attempts
    world.spool.end_attempts = lambda *_: world.spool.revoke("", {})  # type: ignore[method-assign,assignment]
    world.spool.full = True
    gone = protocol.JobGone(INCARNATION, 1, 0)
    world.ledger.end_job(protocol.EndJob(INCARNATION, 1, 0, 5.0))
    assert world.shepherds.sent == [(text, EndTasks(5.0, "the job is over"))]
    world.ended(text)
    world.ledger.tick()
    assert world.ledger.waits
    assert gone not in world.sent
    world.spool.full, world.spool.end_attempts = False, noted  # type: ignore[method-assign]
    world.ledger.tick()
    assert gone in world.sent
    assert not world.ledger.waits


def test_a_controller_whose_epoch_cannot_be_stored_is_refused() -> None:
    world = World()

    def fail(_epochs: Any) -> None:
        raise OSError(28, "No space left on device")

    world.spool.store_epochs = fail  # type: ignore[method-assign]
    assert "No space left on device" in world.ledger.epochs.begin(INCARNATION, 2)
    assert world.ledger.epochs.seen.epoch == 1
