"""The spool on a disk that loses unsynced data: no step runs twice, no report is revoked."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_client import FINAL, INCARNATION, launch_of, new_token
from losing_disk import LosingDisk, remains, why_not

from hpcnode.agent.ledger import Ledger
from hpcnode.os.account import find_account
from hpcnode.os.faults import CrashPoints
from hpcnode.spool import Spool
from hpcnode.wire import protocol
from hpcnode.wire.shepherd_messages import TasksEnded, TasksStarted, record_of

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SCRIPT = b"#!/bin/sh\n"


class Node:
    """A node's ledger and spool; its shepherds write records, and run nothing."""

    def __init__(self, root: Path, boot_id: str) -> None:
        self.promises: list[str] = []  # said since the last look
        self.reports: list[protocol.Report] = []
        self.released: list[str] = []
        self.spool = Spool(str(root), CrashPoints())
        self.ledger = Ledger(
            node="n1",
            boot_id=boot_id,
            spool=self.spool,
            shepherds=self,
            send=self._send,
            find_account=lambda _name, _allow_uid_below: find_account("", os.geteuid()),
            log=lambda _text: None,
        )
        self.ledger.recover()

    def _send(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Report):
            self.reports.append(message)
            self.promises.append(f"said {message.token} {message.status} {message.seq}")
        elif isinstance(message, protocol.JobGone):
            self.promises.append(f"gone {message.job_id}")

    # ----- what the ledger asks of shepherds

    def try_to_start(self) -> None:
        pass

    def start(self, launch: protocol.Launch, _account: Any, _suspended: bool) -> None:
        boot_id = self.ledger.boot_id
        started = TasksStarted(1, 1.0, 1.0, [], (1, 1, boot_id), boot_id, 1.0, os.geteuid())
        self.spool.write_started(launch.token, record_of(started))
        self.released.append(launch.token)
        self.promises.append(f"released {launch.token}")

    def finish(self, token: str) -> None:
        """Have the shepherd of the token record and report its end."""
        final = TasksEnded(protocol.ENDED, 2.0, "", codes=[0], signals=[0])
        self.spool.write_final(token, record_of(final))
        self.ledger.entries[token].supervised = False
        self.ledger.shepherd_ended(token, final)

    def adopt(self, token: str) -> None: ...

    def is_supervised(self, token: str) -> bool:
        return False

    def send(self, token: str, message: protocol.Message, blob: bytes = b"") -> None: ...

    def claim(self, launch: protocol.Launch, account: Any) -> None:
        pass

    def job_over(self, job: str, clean: bool) -> None:
        pass

    def kill_remains(self, started: dict[str, Any]) -> bool:
        return True


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LosingDisk]:
    with LosingDisk(tmp_path / "disk") as disk:
        yield disk


def test_g6_no_power_failure_runs_a_step_twice_or_revokes_a_report(disk: LosingDisk, tmp_path: Path) -> None:
    tokens = [new_token(job=job) for job in range(1, 7)]
    ended, acknowledged, running, revoked, over, later = tokens
    node = Node(disk.path / "root", "boot-1")

    def did(what: str = "") -> None:
        for promise in [*node.promises, *([what] if what else [])]:
            disk.mark(promise)
        node.promises.clear()

    assert node.ledger.epochs.begin(INCARNATION, 1) == ""
    did("epoch 1")
    for token in (ended, acknowledged, running):
        node.ledger.launch(launch_of(token, epoch=1), SCRIPT)
        did()
    for token in (ended, acknowledged):
        node.finish(token)
        did()
    disk.mark(f"acknowledged {acknowledged}")
    node.ledger.ack([report.seq for report in node.reports if report.token == acknowledged])
    node.ledger.forget_some()
    node.ledger.end_step(protocol.EndStep(revoked, 0.0, "cancelled"))
    did()
    node.ledger.end_job(protocol.EndJob(INCARNATION, 5, 0, 0.0))
    did()
    assert node.ledger.epochs.begin(INCARNATION, 2) == ""
    did("epoch 2")
    node.ledger.launch(launch_of(later, epoch=2), SCRIPT)
    did()
    log = disk.log()
    rng = random.Random(2)
    looks = 0
    for end in range(1, len(log) + 1):
        for left in ("synced", "some", "some", "all"):
            target = tmp_path / "left"
            marks = [mark.split() for mark in remains(log[:end], left, rng, target)]
            check(target / "root", marks, tokens, over, f"after change {end} of {len(log)}, with {left} left")
            shutil.rmtree(target)
            looks += 1
    assert looks > 200


def check(root: Path, marks: list[list[str]], tokens: list[str], over: str, where: str) -> None:
    """Boot the node on what is left, repeat all launches, and check all promises."""
    root.mkdir(exist_ok=True)
    after = Node(root, "boot-2")
    epoch = max((int(mark[1]) for mark in marks if mark[0] == "epoch"), default=0)
    if epoch > 1:
        assert "in the past" in after.ledger.epochs.begin(INCARNATION, epoch - 1), where
    assert after.ledger.epochs.begin(INCARNATION, 9) == "", where
    for token in tokens:
        after.ledger.launch(launch_of(token, epoch=9), SCRIPT)
    released = {mark[1] for mark in marks if mark[0] == "released"}
    assert not released & set(after.released), where
    if ["gone", "5"] in marks:
        assert over not in after.released, where
    told = {report.token: report for report in after.reports}
    acknowledged = {mark[1] for mark in marks if mark[0] == "acknowledged"}
    for _, token, status, seq in (mark for mark in marks if mark[0] == "said"):
        assert told[token].seq > int(seq), where
        if status in FINAL:
            assert token not in after.released, where
            assert told[token].status == status or token in acknowledged, where
