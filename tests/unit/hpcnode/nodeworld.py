"""A node without disk and processes: the ledger with a spool in memory and fake shepherds."""

from __future__ import annotations

import errno
import secrets
from typing import Any

from hpcnode.agent.job_scripts import ScriptControl
from hpcnode.agent.launch_check import LaunchCheck
from hpcnode.agent.ledger import Ledger
from hpcnode.os.account import UserAccount, UserError
from hpcnode.spool import Epochs, Found
from hpcnode.wire import protocol
from hpcnode.wire.protocol import Life, Token, read_token
from hpcnode.wire.shepherd_messages import SuspendTasks, TasksEnded, TasksStarted, record_of

INCARNATION = "feedc0de"
ACCOUNT = UserAccount("ann", 1001, 1001, [1001], "/home/ann", "/bin/sh")


def token(job: int = 1, attempt: int | str = 0, step: str = "batch") -> str:
    return f"{INCARNATION}.{job}.{attempt}.{step}.n1.{secrets.token_hex(16)}"


def launch(text: str, epoch: int = 1, **fields: Any) -> protocol.Launch:
    _, job, attempt, step, _, _ = text.split(".")
    return protocol.Launch(
        token=text,
        job_id=int(job),
        attempt=int(attempt.partition("-")[0]),
        step=step,
        epoch=epoch,
        user=fields.pop("user", "ann"),
        work_dir="/",
        argv=[] if step in ("batch", "alloc") else ["true"],
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
        self.floors: dict[tuple[str, int], Life] = {}
        self.full = False
        self.done_log = self
        self.renewals: dict[str, float] = {}
        self.script_notes: dict[str, dict[str, Any]] = {}

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

    def revoke(self, text: str, final: dict[str, Any]) -> bool:
        self._write()
        if text in self.entries:
            return False
        self.entries[text] = {"final": final}
        return True

    def write_final(self, text: str, final: dict[str, Any]) -> None:
        self._write()
        self.entries[text].setdefault("final", final)

    def invalidate(self, text: str) -> None:
        if text in self.entries:
            self.entries[text]["launch"] = None

    def read(self, text: str) -> Found:
        entry = self.entries[text]
        return Found(text, entry.get("launch"), entry.get("boot_id", ""), entry.get("started"), entry.get("final"))

    def note_scripts(self, name: str, record: dict[str, Any], durably: bool) -> None:
        self._write()
        self.script_notes[name] = record

    def forget_scripts(self, name: str) -> None:
        self.script_notes.pop(name, None)

    def script_records(self) -> list[tuple[str, list[dict[str, Any]]]]:
        return [(name, [record]) for name, record in self.script_notes.items()]

    def renew(self, text: str, asked_s: float) -> None:
        self.renewals[text] = asked_s

    def renewed_s(self, text: str) -> float | None:
        return self.renewals.get(text)

    def try_to_write(self) -> None:
        self._write()

    def load(self) -> list[Found]:
        return [self.read(text) for text in self.entries]

    def note_finished(self, tokens: list[str]) -> None:
        self._write()
        self.over.update(tokens)
        for text in tokens:
            key = read_token(text)
            if key is not None and key.step == "batch":
                self.end_attempts(key.job, key.life)
            del self.entries[text]

    def is_over(self, key: Token) -> bool:
        return key in map(read_token, self.over) or key.life <= self.floors.get(key.job, (-1, 0))

    def end_attempts(self, job: tuple[str, int], life: Life) -> None:
        self.floors[job] = max(life, self.floors.get(job, (-1, 0)))


class NotedShepherds:
    """Shepherds that do nothing by themselves; the test drives them."""

    def __init__(self) -> None:
        self.living: set[str] = set()
        self.starts: list[str] = []
        self.sent: list[tuple[str, protocol.Message]] = []
        self.tree_left = False
        self.fails = False
        self.no_process = False

    def try_to_start(self) -> None:
        if self.no_process:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def start(self, spec: protocol.Launch, account: UserAccount, suspended: bool) -> None:
        self.try_to_start()
        if self.fails:
            raise OSError("no more processes")
        assert spec.token not in self.living
        self.living.add(spec.token)
        if suspended:  # the order itself says so
            self.sent.append((spec.token, SuspendTasks(True)))
        self.starts.append(spec.token)

    def adopt(self, text: str) -> None:
        assert text in self.living

    def is_supervised(self, text: str) -> bool:
        return text in self.living

    def send(self, text: str, message: protocol.Message, blob: bytes = b"") -> None:
        self.sent.append((text, message))

    def claim(self, launch: protocol.Launch, account: UserAccount) -> None:
        pass

    def job_over(self, job: str, clean: bool) -> None:
        pass

    def kill_remains(self, started: dict[str, Any]) -> bool:
        return not self.tree_left


class World:
    """One node: a spool, shepherds, and the agents that come one after the other."""

    def __init__(self, scripts: ScriptControl | None = None, check: LaunchCheck | None = None) -> None:
        self.scripts, self.check = scripts, check
        self.spool = MemorySpool()
        self.shepherds = NotedShepherds()
        self.sent: list[protocol.Message] = []
        self.logged: list[str] = []
        self.boot_id = "boot"
        self.now_s = 500.0
        self.restart()
        assert self.ledger.epochs.begin(INCARNATION, 1) == ""

    def restart(self) -> None:
        self.ledger = Ledger(
            node="n1",
            boot_id=self.boot_id,
            spool=self.spool,  # type: ignore[arg-type]
            shepherds=self.shepherds,
            send=self.sent.append,
            find_account=self.find_account,
            log=self.logged.append,
            scripts=self.scripts,
            check=self.check,
            wall_s=lambda: 1000.0,
            boot_s=lambda: self.now_s,
        )
        self.ledger.recover()

    def find_account(self, name: str, allow_uid_below: int) -> UserAccount:
        if name != "ann":
            raise UserError(f"cannot run as {name}: this node has no such account")
        return ACCOUNT

    def launch(self, text: str, **fields: Any) -> str:
        self.ledger.launch(launch(text, **fields), b"#!/bin/sh\n" if ".batch." in text else b"")
        return text

    def started(self, text: str, reported: bool = True) -> None:
        identity = (7, 1, self.boot_id)
        record = TasksStarted(7, 999.0, 999.0, [identity], identity, self.boot_id, self.now_s, 1001)
        self.spool.entries[text]["started"] = record_of(record)
        self.ledger.shepherd_started(text, record)
        if reported:
            self.ledger.report_starts()

    def ended(self, text: str, code: int = 0) -> None:
        record = TasksEnded("ended", 1001.0, "", pid=7, started_at_s=999.0, codes=[code], signals=[0])
        self.spool.entries[text]["final"] = record_of(record)
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
