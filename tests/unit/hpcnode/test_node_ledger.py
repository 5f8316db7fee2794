"""The ledger on a spool in memory and with shepherds that are only noted: what is started, answered and forgotten."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcnode import protocol
from hpcnode.ledger import MAX_STARTS, Ledger
from hpcnode.spool import Epochs, Found
from hpcnode.tokens import Token, read_token
from hpcnode.user import Account, UserError

INCARNATION = "feedc0de"
ACCOUNT = Account("ann", 1001, 1001, [1001], "/home/ann", "/bin/sh")


def token(job: int = 1, attempt: int = 0, step: str = "batch") -> str:
    return f"{INCARNATION}.{job}.{attempt}.{step}.n1.{secrets.token_hex(16)}"


def launch(text: str, epoch: int = 1, **fields: Any) -> protocol.Launch:
    _, job, attempt, step, _, _ = text.split(".")
    return protocol.Launch(
        token=text,
        job_id=int(job),
        attempt=int(attempt),
        step=step,
        epoch=epoch,
        user=fields.pop("user", "ann"),
        work_dir="/",
        argv=[] if step == "batch" else ["true"],
        env={},
        tasks=protocol.TaskSet(0, 1, 1, 0, 1),
        cpus=1,
        mem_mib=0,
        gpus=[],
        **fields,
    )


class MemorySpool:
    """A spool that survives its agent, without a disk; `full` refuses every write."""

    path = "/spool"

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.known = Epochs("", 0, ())
        self.end = 1
        self.over: set[str] = set()
        self.floors: dict[tuple[str, int], int] = {}
        self.full = False
        self.done = self

    def _write(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")

    def epochs(self) -> Epochs:
        return self.known

    def store_epochs(self, epochs: Epochs) -> None:
        self.known = epochs

    def reserve_seqs(self, used_below: int = 0) -> tuple[int, int]:
        first = max(self.end, used_below)
        self.end = first + 100
        return first, self.end

    def claim(self, spec: protocol.Launch, script: bytes, boot: str, owner: tuple[int, int]) -> bool:
        if spec.token in self.entries:
            return False
        self._write()
        self.entries[spec.token] = {"launch": spec, "boot_id": boot}
        return True

    def bar(self, text: str, final: dict[str, Any]) -> bool:
        self._write()
        if text in self.entries:
            return False
        self.entries[text] = {"final": final}
        return True

    def write_final(self, text: str, final: dict[str, Any]) -> None:
        self._write()
        self.entries[text].setdefault("final", final)

    def read(self, text: str) -> Found:
        entry = self.entries[text]
        return Found(text, entry.get("launch"), entry.get("boot_id", ""), entry.get("started"), entry.get("final"))

    def load(self) -> list[Found]:
        return [self.read(text) for text in self.entries]

    def note_finished(self, tokens: list[str]) -> None:
        self._write()
        self.over.update(tokens)
        for text in tokens:
            key = read_token(text)
            if key is not None and key.step == "batch":
                self.end_attempts(key.job, key.attempt)
            del self.entries[text]

    def is_over(self, key: Token) -> bool:
        text = f"{key.incarnation}.{key.job_id}.{key.attempt}.{key.step}.{key.node}.{key.nonce}"
        return text in self.over or key.attempt <= self.floors.get(key.job, -1)

    def end_attempts(self, job: tuple[str, int], attempt: int) -> None:
        self.floors[job] = max(attempt, self.floors.get(job, -1))


class NotedShepherds:
    """Shepherds that do nothing by themselves: the test moves them."""

    def __init__(self) -> None:
        self.living: set[str] = set()
        self.starts: list[str] = []
        self.said: list[tuple[str, list[Any]]] = []
        self.tree_left = False
        self.fails = False

    def start(self, spec: protocol.Launch, account: Account) -> None:
        if self.fails:
            raise OSError("no more processes")
        assert spec.token not in self.living
        self.living.add(spec.token)
        self.starts.append(spec.token)

    def adopt(self, text: str) -> None:
        assert text in self.living

    def is_minded(self, text: str) -> bool:
        return text in self.living

    def say(self, text: str, words: list[Any], blob: bytes = b"") -> None:
        self.said.append((text, words))

    def kill_remains(self, started: dict[str, Any]) -> bool:
        return not self.tree_left


class World:
    """One node: a spool, shepherds, and the agents that come one after the other."""

    def __init__(self) -> None:
        self.spool = MemorySpool()
        self.shepherds = NotedShepherds()
        self.sent: list[protocol.Message] = []
        self.logged: list[str] = []
        self.boot_id = "boot"
        self.restart()
        assert self.ledger.hello(INCARNATION, 1) == ""

    def restart(self) -> None:
        self.ledger = Ledger(
            node="n1",
            boot_id=self.boot_id,
            spool=self.spool,  # type: ignore[arg-type]
            minders=self.shepherds,
            send=self.sent.append,
            find_account=self.find_account,
            log=self.logged.append,
            wall_s=lambda: 1000.0,
        )
        self.ledger.recover()

    def find_account(self, name: str) -> Account:
        if name != "ann":
            raise UserError(f"cannot run as {name}: this node has no such account")
        return ACCOUNT

    def launch(self, text: str, **fields: Any) -> str:
        self.ledger.launch(launch(text, **fields), b"#!/bin/sh\n" if ".batch." in text else b"")
        return text

    def started(self, text: str) -> None:
        record = {"status": "started", "pid": 7, "started_at_s": 999.0, "boot_id": self.boot_id}
        self.spool.entries[text]["started"] = record
        self.ledger.shepherd_started(text, record)

    def ended(self, text: str, code: int = 0) -> None:
        record = {"status": "ended", "at_s": 1001.0, "codes": [code], "signals": [0], "pid": 7, "started_at_s": 999.0}
        self.spool.entries[text]["final"] = record
        self.ledger.shepherd_ended(text, record)
        self.gone(text)

    def gone(self, text: str) -> None:
        self.shepherds.living.discard(text)
        self.ledger.shepherd_gone(text)

    def statuses(self, text: str) -> list[str]:
        return [m.status for m in self.sent if isinstance(m, protocol.Report) and m.token == text]

    def ack_all(self) -> None:
        self.ledger.ack([m.seq for m in self.sent if isinstance(m, protocol.Report)])
        self.ledger.forget_some()


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
    assert (world.statuses(text)[-1], world.shepherds.starts) == ("barred", [text])


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


def test_a_shepherd_that_died_before_the_start_is_replaced_a_few_times() -> None:
    world = World()
    text = world.launch(token())
    for _ in range(MAX_STARTS):
        world.gone(text)
    assert world.shepherds.starts == [text] * MAX_STARTS
    assert world.statuses(text) == ["refused"]


def test_a_shepherd_that_died_after_the_start_is_lost_once_its_tree_is_gone() -> None:
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


@pytest.mark.parametrize(("was_started", "expected"), [(False, "barred"), (True, "lost")])
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


def test_an_end_before_the_launch_bars_it() -> None:
    world = World()
    text = token()
    world.ledger.end_step(protocol.EndStep(text, 1.0, "cancelled"))
    world.launch(text)
    world.restart()
    world.launch(text)
    assert set(world.statuses(text)) == {"barred"}
    assert world.shepherds.starts == []


def test_an_end_reaches_the_shepherd_and_a_dead_one_is_barred() -> None:
    world = World()
    text = world.launch(token())
    world.ledger.end_step(protocol.EndStep(text, 2.0, "cancelled"))
    assert world.shepherds.said == [(text, ["end", 2.0, "cancelled"])]
    world.gone(text)
    assert world.statuses(text) == ["barred"]


def test_a_batch_step_is_over_only_with_the_rest_of_its_job() -> None:
    world = World()
    batch, step = world.launch(token()), world.launch(token(step="0"))
    world.started(batch)
    world.started(step)
    world.ended(batch, code=2)
    assert world.shepherds.said == [(step, ["end", 30.0, "the job's batch step is over"])]
    assert world.statuses(batch) == ["started"]
    assert {r["token"]: r["status"] for r in world.ledger.inventory()} == {batch: "started", step: "started"}
    world.ended(step)
    assert world.statuses(batch) == ["started", "ended"]


def test_an_ended_job_is_answered_when_all_of_it_is_gone() -> None:
    world = World()
    first, second = world.launch(token(attempt=1)), world.launch(token(attempt=1, step="3"))
    other = world.launch(token(job=2))
    for text in (first, second, other):
        world.started(text)
    world.ledger.end_job(protocol.EndJob(INCARNATION, 1, 1, 1.0))
    assert {text for text, words in world.shepherds.said if words[0] == "end"} == {first, second}
    gone = protocol.JobGone(INCARNATION, 1, 1)
    world.ended(first)
    assert gone not in world.sent
    world.ended(second)
    assert world.sent[-1] == gone
    late = world.launch(token(attempt=0))
    assert world.statuses(late) == ["barred"]
    assert world.launch(token(attempt=2)) == world.shepherds.starts[-1]


def test_a_newer_attempt_waits_until_the_older_one_is_gone() -> None:
    world = World()
    old = world.launch(token())
    world.started(old)
    new = world.launch(token(attempt=1))
    assert world.shepherds.starts == [old]
    assert (old, ["end", 0.0, "attempt 1 of the job starts here"]) in world.shepherds.said
    world.ended(old)
    assert world.shepherds.starts == [old, new]


def test_commands_of_an_older_epoch_or_another_incarnation_are_dropped() -> None:
    world = World()
    assert world.ledger.hello(INCARNATION, 5) == ""
    assert "epoch 5" in world.ledger.hello(INCARNATION, 4)
    world.launch(token(), epoch=4)
    assert (world.sent, world.shepherds.starts) == ([], [])
    assert "dropped" in world.logged[-1]
    assert world.ledger.hello("0123456789", 1) == ""
    assert "of the past" in world.ledger.hello(INCARNATION, 9)
    world.launch(token(), epoch=9)
    assert world.shepherds.starts == []


def test_a_full_disk_starts_nothing_and_is_said() -> None:
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
    assert (world.statuses(late), world.shepherds.starts) == (["barred"], [batch])
    world.ack_all()
    assert world.statuses(world.launch(token(step="1"))) == ["barred"]
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
def test_whatever_happens_a_token_is_released_once_and_a_final_state_stays(moves: list[tuple[str, int]]) -> None:
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
