"""Ledger entries: the known tokens of a node, and their reports."""

from __future__ import annotations

import signal
from typing import Any, Dict, Iterator, Optional, Protocol, Set, Tuple

from hpcnode.os.account import UserAccount
from hpcnode.wire import protocol
from hpcnode.wire.protocol import Life, Token
from hpcnode.wire.shepherd_messages import FINAL_STATUSES

RESULT = (
    "codes",
    "signals",
    "timed_out",
    "out_of_memory",
    "why",
    "usage",
    "node_fault",
    "unexecuted",
    "output_full",
    "ran_s",
)


class ShepherdControl(Protocol):
    """The shepherds, as the ledger uses them."""

    def start(self, launch: protocol.Launch, account: UserAccount, suspended: bool) -> None: ...
    def try_to_start(self) -> None: ...  # raises OSError if this node cannot fork
    def adopt(self, token: str) -> None: ...
    def is_supervised(self, token: str) -> bool: ...
    def send(self, token: str, message: protocol.Message, blob: bytes = b"") -> None: ...
    def kill_remains(self, started: Dict[str, Any]) -> bool: ...
    def claim(self, launch: protocol.Launch, account: UserAccount) -> None: ...  # of a job without a step here yet
    def job_over(self, job: str, clean: bool) -> None: ...  # see `hpcnode.shepherd.confinement.job_name`


class Entry:
    """One token and its state on this node."""

    __slots__ = (
        "token",
        "key",
        "launch",
        "boot_id",
        "status",
        "record",
        "account",
        "supervised",
        "starts",
        "seq",
        "acked",
        "held",
        "clearing",
        "ending",
        "saving",
        "prepared",
        "renewed_s",
    )

    def __init__(self, token: str, key: Token, launch: Optional[protocol.Launch], boot_id: str) -> None:
        self.token = token
        self.key = key
        self.launch = launch
        self.boot_id = boot_id
        self.status = protocol.CLAIMED
        self.record: Dict[str, Any] = {}
        self.account: Optional[UserAccount] = None
        self.supervised = False  # a shepherd lives
        self.starts = 0
        self.seq = 0
        self.acked = False
        self.held = False  # over, but reported only after the other steps of its job
        self.clearing = False  # the epilog of its job ran when its end was reported
        self.ending: Optional[Tuple[float, str]] = None  # a requested end: grace in seconds, why
        self.saving = False  # the requested end was a signal to save state: SIGTERM was not sent yet
        self.prepared = False  # its tasks wait for Go
        self.renewed_s: Optional[float] = (
            None  # last renewal of its lease, boot clock; None: no lease yet, or none needed
        )

    @property
    def is_final(self) -> bool:
        return self.status in FINAL_STATUSES

    @property
    def ended_cleanly(self) -> bool:
        """Whether it ended without being killed: then the next job may have its sandbox."""
        return self.status == protocol.ENDED and not (self.record.get("out_of_memory") or self.record.get("killed"))

    @property
    def lease_s(self) -> float:
        """Seconds it may run without the controller; 0: no limit."""
        return self.launch.lease_s if self.launch is not None and self.launch.lease == protocol.KILL else 0.0

    def accepts_signal(self, signum: int) -> bool:
        """Return whether a signal for all steps of its job is sent to this one.

        Steps of a remote shell are daemons of mpirun. Many signals end them, and mpirun forwards signals to its ranks itself.
        """
        of_mpirun = self.launch is not None and self.launch.remote_shell
        return not of_mpirun or signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


class Entries(Dict[str, Entry]):
    """All entries of a node by token. Change them through `add` and `remove` only."""

    def __init__(self) -> None:
        super().__init__()
        self._of_job: Dict[Tuple[str, int], Set[str]] = {}

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        self[entry.token] = entry
        self._of_job.setdefault(entry.key.job, set()).add(entry.token)

    def remove(self, token: str) -> Entry:
        """Remove an entry and return it."""
        entry = self.pop(token)
        siblings = self._of_job[entry.key.job]
        siblings.discard(token)
        if not siblings:
            del self._of_job[entry.key.job]
        return entry

    def of_job(self, job: Tuple[str, int], up_to: Optional[Life] = None) -> Iterator[Entry]:
        """Yield the job's entries, up to that attempt and stay or all.

        The caller may remove them meanwhile.
        """
        for token in tuple(self._of_job.get(job, ())):
            entry = self[token]
            if up_to is None or entry.key.life <= up_to:
                yield entry

    def batch_is_over(self, key: Token) -> bool:
        """Return whether the attempt's batch step has ended here. Its report frees the node."""
        batches = (e for e in self.of_job(key.job) if e.key.step == protocol.BATCH)
        return any(batch.is_final and batch.key.attempt >= key.attempt for batch in batches)

    def is_over(self, key: Token) -> bool:
        """Return whether nothing of the attempt runs here, or will, or claims this node."""
        return all(entry.is_final for entry in self.of_job(key.job) if entry.key.attempt == key.attempt)

    def may_report(self, entry: Entry) -> bool:
        """Return whether its state may be reported: a batch step's end only after other steps."""
        if not entry.is_final or entry.key.step != protocol.BATCH:
            return True
        return all(e.is_final for e in self.of_job(entry.key.job, entry.key.life))


def report_of(entry: Entry, now_s: float, boot_id: str, boot_s: float) -> protocol.Report:
    """Return the report of an entry under its number. A held entry is reported as running.

    `boot_id`, `boot_s`: this boot, and its age in seconds.
    """
    record = entry.record
    start = {"pid": record.get("pid", 0), "started_at_s": record.get("started_at_s", 0.0)}
    if "started_boot_s" in record and record.get("boot_id") == boot_id:
        start["ran_s"] = max(0.0, boot_s - record["started_boot_s"])
    at_s = record.get("at_s", now_s)
    if entry.held:
        return protocol.Report(entry.seq, entry.token, protocol.STARTED, at_s, stream_to=_stream_to(entry), **start)
    result = {key: record[key] for key in RESULT if key in record}
    if "ended_boot_s" in record and record.get("boot_id") == boot_id:
        result["ago_s"] = max(0.0, boot_s - record["ended_boot_s"])
    if entry.clearing:
        result["clearing"] = True
    status = protocol.READY if entry.prepared and entry.status == protocol.CLAIMED else entry.status
    return protocol.Report(entry.seq, entry.token, status, at_s, stream_to=_stream_to(entry), **start, **result)


def _stream_to(entry: Entry) -> Optional[protocol.Address]:
    stored = entry.record.get("stream_to")
    if stored:
        return protocol.Address(**stored)
    return entry.launch.stream_to if entry.launch is not None else None


def mismatch(launch: protocol.Launch, key: Token, script: bytes) -> str:
    """Return why the launch contradicts its token or cannot run, or ""."""
    if (launch.job_id, launch.attempt, launch.step) != (key.job_id, key.attempt, key.step):
        return "the launch is of another step than its token says"
    if launch.step == protocol.BATCH and not script.startswith(b"#!"):
        return "cannot run the batch script: it does not begin with #!"
    if launch.step not in (protocol.BATCH, protocol.ALLOC) and not launch.argv:
        return "cannot run the step: it has no command"
    if not 1 <= launch.tasks.count <= 4096:
        return "cannot run %d tasks on one node" % launch.tasks.count
    if launch.tasks.scattered and len(launch.tasks.scattered) != launch.tasks.count:
        return "cannot run %d tasks with %d ranks" % (launch.tasks.count, len(launch.tasks.scattered))
    bad = [name for name, value in launch.env.items() if not name or "=" in name or "\0" in name + value]
    if bad:
        return "cannot run with a variable named %.60r: names have no '=' and nothing has a NUL byte" % bad[0]
    return ""
