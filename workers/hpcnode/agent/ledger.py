"""The ledger: the state of every token on this node, and the answers to orders.

    unknown --Launch--> claimed --shepherd--> started --> ended | lost
       |                   +--> refused | revoked
       +--EndStep, EndJob--> revoked

It does no I/O except through the spool (disk), the shepherds (`ShepherdControl`) and `send` (the controller). It reads no clock
except through its arguments. So tests can drive it on simulated ones.

Rules:
- A token starts at most once. The claim is exclusive. A second shepherd is started only if the lock of the first is free and it
  has not written `started`, because then nothing was released.
- The start of a batch step is reported a moment later (`report_starts`), so that a very short one is reported once, as ended.
- A final state never changes. A batch step's end is reported after all other steps of its job on this node have ended.
- An older attempt is gone before a newer attempt of the same job starts here.
- Nothing of a job starts before its prolog has succeeded, and it is not gone before its epilog is over (`job_scripts`).
- A launch with a lease starts only under a lease that was renewed on the connection that brought the launch (see `lease`).
"""

from __future__ import annotations

import errno
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from hpcnode.agent.job_scripts import GO, ScriptControl, ScriptRecords, is_of_job
from hpcnode.agent.launch_check import LaunchCheck
from hpcnode.entry import Entries, Entry, ShepherdControl, mismatch, report_of
from hpcnode.lease import Leases
from hpcnode.os.account import UserAccount, UserError
from hpcnode.os.process import NO_PROCESS, boot_clock_s
from hpcnode.shepherd.confinement import job_name
from hpcnode.spool import Epochs, Found, Spool, token_of
from hpcnode.wire import protocol
from hpcnode.wire.protocol import Life, Token, read_token
from hpcnode.wire.shepherd_messages import (
    EndCommitted,
    EndTasks,
    ReleaseTasks,
    SignalTasks,
    SuspendTasks,
    TasksEnded,
    TasksStarted,
    record_of,
)

# ----- the controller that this node accepts
# A controller of a lower epoch, or of an incarnation that was replaced, is refused.


ADVICE = ": another controller runs, or the database is an older copy. To use an older copy, run 'hpcsched restore'"


class SeenEpochs:
    """The incarnations and epochs of controllers that this node has seen, on disk."""

    def __init__(self, spool: Spool, log: Callable[[str], None]) -> None:
        self._spool = spool
        try:
            self.seen = spool.epochs()
        except ValueError as error:
            log("%s. The next controller is accepted, as on a new node; what has run here runs no more" % error)
            self.seen = Epochs("", 0, ())

    def begin(self, incarnation: str, epoch: int, start: str = "") -> str:
        """Accept a controller durably; return "" or why it is refused."""
        why = self.why_refused(incarnation, epoch, start)
        seen = self.seen
        if not why and (incarnation, epoch, start) != (seen.incarnation, seen.epoch, seen.start):
            former = seen.former
            if seen.incarnation not in ("", incarnation):
                former = (*former, seen.incarnation)
            begun = Epochs(incarnation, epoch, former, start)
            try:
                self._spool.store_epochs(begun)
            except OSError as error:
                return "cannot write to the spool %s: %s" % (self._spool.path, error.strerror)
            self.seen = begun
        return why

    def why_refused(self, incarnation: str, epoch: int, start: str) -> str:
        """Return why a controller is refused, "" if it is not."""
        seen = self.seen
        if incarnation in seen.former:
            return "this node has accepted the later incarnation %s; %s is in the past%s" % (
                seen.incarnation,
                incarnation,
                ADVICE,
            )
        if incarnation == seen.incarnation and epoch < seen.epoch:
            return "this node has accepted epoch %d; %d is in the past%s" % (seen.epoch, epoch, ADVICE)
        is_same = (incarnation, epoch) == (seen.incarnation, seen.epoch)
        if is_same and seen.start and start != seen.start:
            return "this node has accepted another controller of epoch %d on a copy of the database%s" % (epoch, ADVICE)
        return ""

    def is_past(self, incarnation: str, epoch: int) -> bool:
        """Return whether an order with these is from another controller than the accepted one."""
        return epoch < self.seen.epoch or incarnation != self.seen.incarnation


# ----- writes that a full or broken disk did not take; they are retried, and the controller is told about the fault
# A spool that cannot be written, and a node that cannot fork, are faults of the node, not of the job. While a fault lasts
# the node gets no launches; otherwise it would soon have refused every job of the queue.


class PendingWrites:
    """Writes that the spool of this node did not take yet, and the fault of the node."""

    def __init__(
        self,
        spool: Spool,
        shepherds: ShepherdControl,
        send: Callable[[protocol.Message], object],
        log: Callable[[str], None],
        check: Optional[LaunchCheck],
    ) -> None:
        self._spool = spool
        self._shepherds = shepherds
        self._send = send
        self._log = log
        self._check = check
        self.fault = ""  # why this node can start nothing
        self._tombstones: Dict[str, Dict[str, Any]] = {}
        self._ended: List[protocol.EndJob] = []

    @property
    def waits(self) -> bool:
        """Whether `retry` has something to write."""
        return bool(self._tombstones or self._ended)

    # ----- the node's fault

    def is_unwell(self, why: str) -> None:
        """Note and report that this node can start nothing."""
        if why != self.fault:
            self._log(why)
        self.fault = why
        self._send(protocol.Condition(why))

    def look_again(self) -> None:
        """Check whether the fault is still there; report when it is gone."""
        if not self.fault:
            return
        try:
            self._spool.try_to_write()
            self._shepherds.try_to_start()
        except OSError as error:
            self._log("cannot start anything here yet: %s" % error)
            return
        why = "" if self._check is None else self._check.why_still()
        if why:
            self.is_unwell(why)
            return
        self.fault = ""
        self._send(protocol.Condition(""))

    # ----- the writes

    def write_tombstone(self, token: str, record: Dict[str, Any]) -> None:
        """Make durable that the token never runs here; until the disk takes it, `has` is true."""
        try:
            if not self._spool.revoke(token, record):
                self._spool.write_final(token, record)
            self._tombstones.pop(token, None)
        except OSError as error:
            if token not in self._tombstones:
                self.is_unwell("cannot write a tombstone in the spool %s: %s" % (self._spool.path, error.strerror))
            self._tombstones[token] = record

    def has(self, token: str) -> bool:
        """Return whether the token's tombstone is not on disk yet."""
        return token in self._tombstones

    def drop(self, token: str) -> None:
        """Stop retrying to write the token's tombstone."""
        del self._tombstones[token]

    def note_ended(self, order: protocol.EndJob) -> bool:
        """Make durable that nothing of the job may start.

        Return False if it is retried and answered later.
        """
        try:
            self._spool.done_log.end_attempts((order.incarnation, order.job_id), (order.attempt, order.stay))
        except OSError as error:
            if order not in self._ended:
                self._ended.append(order)
                self.is_unwell(
                    "cannot record in the spool %s that a job is over: %s" % (self._spool.path, error.strerror)
                )
            return False
        if order in self._ended:
            self._ended.remove(order)
        return True

    def retry(self) -> List[protocol.EndJob]:
        """Retry the tombstones; return the EndJob orders that the caller must repeat."""
        for token, record in list(self._tombstones.items()):
            self.write_tombstone(token, record)
        return list(self._ended)


# ----- reports to the controller: numbers, repetition, acknowledgement
# Rules:
# - Each report has a higher number than all earlier reports, including those of earlier agents.
# - A report is repeated until its number is acknowledged. A newer report of the same token replaces the older one.
# - A `held` entry is reported in the inventory only, as running.


class Reports:
    """The reports of one agent."""

    def __init__(
        self,
        *,
        spool: Spool,
        send: Callable[[protocol.Message], object],
        boot_id: str,
        wall_s: Callable[[], float],
        boot_s: Callable[[], float],
    ) -> None:
        self._spool = spool
        self._send = send
        self._boot_id = boot_id
        self._wall_s = wall_s
        self._boot_s = boot_s
        self._unanswered: Dict[int, Entry] = {}
        self._next_seq, self._seq_end = spool.reserve_seqs()
        self._repeat_below = 0

    def send(self, entry: Entry) -> None:
        """Report the entry's state under a new number."""
        self._number(entry)
        self._send(self._report(entry))

    def report_over(self, token: str, why: str) -> None:
        """Report that a token without an entry never runs."""
        self._send(protocol.Report(self.new_seq(), token, protocol.REVOKED, self._wall_s(), why=why))

    def inventory(self, entries: Iterable[Entry]) -> List[Dict[str, Any]]:
        """Return a report of each entry, for `Welcome`."""
        reports = []
        for entry in entries:
            if not entry.seq:
                self._number(entry)
            report = protocol.to_json(self._report(entry))
            del report["type"]
            reports.append(report)
        return reports

    def acknowledged(self, seqs: Iterable[int]) -> List[Entry]:
        """Note that these reports are committed.

        Return the entries whose last report is among them.
        """
        entries = [self._unanswered.pop(seq) for seq in seqs if seq in self._unanswered]
        for entry in entries:
            entry.acked = True
        return entries

    def repeat(self) -> None:
        """Repeat the reports that were sent before the last call and not acknowledged."""
        for seq, entry in tuple(self._unanswered.items()):
            if seq < self._repeat_below and not entry.held:
                self._send(self._report(entry))
        self._repeat_below = self._next_seq

    def forget(self, entry: Entry) -> None:
        """Stop repeating the report of this entry."""
        self._unanswered.pop(entry.seq, None)

    def _report(self, entry: Entry) -> protocol.Report:
        return report_of(entry, self._wall_s(), self._boot_id, self._boot_s())

    def _number(self, entry: Entry) -> None:
        self.forget(entry)
        entry.seq, entry.acked = self.new_seq(), False
        self._unanswered[entry.seq] = entry

    def new_seq(self) -> int:
        """Return a number for a new report."""
        if self._next_seq >= self._seq_end:
            self._next_seq, self._seq_end = self._spool.reserve_seqs(self._next_seq)
        self._next_seq += 1
        return self._next_seq - 1


MAX_STARTS = 3
REPEAT_S = 10.0
FORGET_AT_ONCE = 256  # acknowledged entries to remove with one fsync
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


class _Gone(NamedTuple):
    """An EndJob that was not answered yet."""

    job: Tuple[str, int]
    life: Life


class Ledger:
    """All tokens of this node."""

    def __init__(
        self,
        *,
        node: str,
        boot_id: str,
        spool: Spool,
        shepherds: ShepherdControl,
        send: Callable[[protocol.Message], object],
        find_account: Callable[[str, int], UserAccount],
        log: Callable[[str], None],
        scripts: Optional[ScriptControl] = None,
        check: Optional[LaunchCheck] = None,
        wall_s: Callable[[], float] = time.time,
        boot_s: Callable[[], float] = boot_clock_s,
    ) -> None:
        self.node = node
        self.boot_id = boot_id
        self.entries = Entries()
        self.epochs = SeenEpochs(spool, log)
        self._spool = spool
        self._shepherds = shepherds
        self._send = send
        self._find_account = find_account
        self._log = log
        self._wall_s = wall_s
        self._reports = Reports(spool=spool, send=send, boot_id=boot_id, wall_s=wall_s, boot_s=boot_s)
        self._scripts = ScriptRecords(spool, scripts, boot_id, send, self._reports.new_seq, log)
        self._scripts.changed = self._scripts_changed
        self._waiting: Set[str] = set()  # for a script
        self._pending_writes = PendingWrites(spool, shepherds, send, log, check)
        self._check = check
        self.leases = Leases(spool, log, boot_s)
        self._gone: List[_Gone] = []
        self._suspended: Dict[Tuple[str, int], int] = {}  # job -> its suspended attempt
        self._to_forget: Dict[str, None] = {}
        self._unreported: Dict[
            str, None
        ] = {}  # batch steps whose start is reported soon, unless they have ended by then
        self._stuck: Set[str] = set()  # neither final nor supervised: `tick` checks again

    # ----- start

    def recover(self) -> None:
        """Read the entries of earlier agents from the spool."""
        entries = self._spool.load()
        self._scripts.load(entries)
        for found in entries:
            entry = self._add(Entry(found.token, token_of(found), found.launch, found.boot_id))
            self._learn(entry, found)
        for entry in list(self.entries.values()):
            if entry.supervised:
                self._shepherds.adopt(entry.token)
            elif entry.lease_s and entry.renewed_s is None and entry.status == protocol.CLAIMED:
                self._write_end(entry, protocol.REVOKED, "its lease had not begun when the agent ended")
            elif not entry.is_final:
                self.shepherd_gone(entry.token)
            else:
                self._publish(entry)
        for entry in list(self.entries.values()):
            if entry.is_final and entry.key.step == protocol.BATCH:
                self._end_other_steps(entry)  # the earlier agent may have been killed before it could
        for key in self._scripts.claimed():
            self._note_if_over(key)

    def _learn(self, entry: Entry, found: Found) -> None:
        entry.supervised = found.boot_id in ("", self.boot_id) and self._shepherds.is_supervised(entry.token)
        if found.started is not None:
            entry.status, entry.record = protocol.STARTED, found.started
        if entry.lease_s:
            entry.renewed_s = self._spool.renewed_s(entry.token)
        # A living shepherd reports the end itself, after the output.
        if found.final is not None and not entry.supervised:
            entry.status, entry.record = found.final["status"], found.final

    def _add(self, entry: Entry) -> Entry:
        self.entries.add(entry)
        self.leases.add(entry)
        return entry

    @property
    def fault(self) -> str:
        """Why this node can start nothing; "" if it can."""
        return self._pending_writes.fault

    @property
    def is_idle(self) -> bool:
        """Whether no step lives and nothing is left to do. A claim without tasks needs no agent."""
        if self._gone or self.waits or self._scripts.is_busy:
            return False
        return not any(
            entry.supervised or not (entry.is_final or entry.key.step == protocol.ALLOC)
            for entry in self.entries.values()
        )

    # ----- the connection to the controller

    def renewed(self, asked_s: float) -> None:
        """Renew all valid leases: the controller has answered a Ping of that time (boot clock)."""
        for entry in self.leases.renewed(asked_s):
            self._start(entry)

    def disconnected(self) -> None:
        """End what waits for its first lease: the connection is gone."""
        for entry in self.leases.disconnected():
            self._write_end(entry, protocol.REVOKED, "the connection to the controller ended before its lease began")

    def is_forgotten(self, token: str) -> bool:
        """Return whether the token is over, reported and acknowledged, and its output was taken."""
        return token not in self.entries and self._spool.done_log.is_noted(token)

    def inventory(self) -> List[Dict[str, Any]]:
        """Return a report of every entry, but of claims that still wait."""
        waiting = self._waiting | self._stuck
        known = (e for e in self.entries.values() if e.key.step != protocol.ALLOC or e.token not in waiting)
        return self._reports.inventory(known)

    def jobs_with_scripts(self) -> List[Tuple[str, int, int, int]]:
        """Return incarnation, job, attempt and stay of the jobs whose epilog is still to come."""
        return self._scripts.jobs()

    # ----- orders of the controller

    def launch(self, launch: protocol.Launch, script: bytes) -> None:
        """Claim the token and start it, once; answer with its present state."""
        key = read_token(launch.token)
        if key is None or key.node != self.node:
            self._log("launch dropped: %.200r is not a token of node %s" % (launch.token, self.node))
            return
        if self.epochs.is_past(key.incarnation, launch.epoch):
            self._log(
                "launch of %s dropped: it is of epoch %d, the controller of epoch %d"
                % (launch.token, launch.epoch, self.epochs.seen.epoch)
            )
            return
        entry = self.entries.get(launch.token)
        if entry is not None:
            is_late = entry.token in self._stuck or entry.token in self._waiting  # for an older attempt, or a script
            if not (entry.key.step == protocol.ALLOC and is_late):
                self._publish(entry)
            return
        if self._spool.done_log.is_over(key):
            self._reports.report_over(launch.token, "it is over and was acknowledged, or its attempt is")
            return
        if any(each.key.life > key.life for each in self.entries.of_job(key.job)):
            self._reports.report_over(launch.token, "a later attempt of the job is here")
            return
        if key.step != protocol.BATCH and self.entries.batch_is_over(key):
            self._reports.report_over(launch.token, "the job's batch step is over")
            return
        self._claim(launch, key, script)

    def _claim(self, launch: protocol.Launch, key: Token, script: bytes) -> None:
        entry = Entry(launch.token, key, launch, self.boot_id)
        try:
            why = mismatch(launch, key, script)
            account = self._find_account(launch.user, launch.allow_uid_below)
            entry.account = account
        except UserError as error:
            why, account = str(error), None
        if why or account is None:
            self._revoke(launch.token, key, protocol.REFUSED, why)
            return
        try:
            if not self._spool.claim(launch, script, self.boot_id, (account.uid, account.gid)):
                self._learn(self._add(entry), self._spool.read(launch.token))
                self._publish(entry)
                return
        except OSError as error:
            self._add(entry)
            why = "cannot write to the spool %s: %s" % (self._spool.path, error.strerror)
            self._refuse(entry, why, node_fault=True)
            return
        self._add(entry)
        self.leases.begin(entry)
        self._start(entry)

    def _start(self, entry: Entry) -> None:
        """Start the shepherd of a claimed entry, after older attempts and under its lease."""
        if entry.lease_s and entry.renewed_s is None:
            return  # `renewed` comes back to it
        older = [e for e in self.entries.of_job(entry.key.job) if e.key.life < entry.key.life and not e.is_final]
        for other in older:
            self._end(other, 0.0, "attempt %d of the job starts here" % entry.key.attempt)
        if older:
            self._stuck.add(entry.token)
            return
        launch = entry.launch
        assert launch is not None
        if entry.lease_s and not self.leases.holds(entry):
            self._write_end(entry, protocol.REVOKED, protocol.LEASE_OVER)
            return
        why = self._why_unfit(entry, launch)
        if why:
            self._refuse(entry, why, node_fault=True)
            return
        try:
            if not self._has_prolog(entry, launch):
                return
            if entry.account is None:
                entry.account = self._find_account(launch.user, launch.allow_uid_below)
            entry.starts += 1
            if launch.step == protocol.ALLOC:
                self._shepherds.claim(launch, entry.account)
                self._publish(entry)
                return
            # Part of the order: a quick shepherd would have released its tasks before a second message.
            suspended = self._suspended.get(entry.key.job) == entry.key.attempt
            self._shepherds.start(launch, entry.account, suspended)
            entry.supervised = True
        except UserError as error:
            self._refuse(entry, str(error))
        except OSError as error:
            node_fault = error.errno in DISK_ERRORS | NO_PROCESS
            self._refuse(entry, "cannot start a shepherd: %s" % error, node_fault=node_fault)

    def _why_unfit(self, entry: Entry, launch: protocol.Launch) -> str:
        """Return why the node is not fit for a job that has nothing here yet."""
        if self._check is None or any(
            other is not entry for other in self.entries.of_job(entry.key.job, entry.key.life)
        ):
            return ""
        # Parts of GPUs, and GPUs with names, have other numbers than the driver's; a claim does not say.
        other_numbers = (
            launch.step == protocol.ALLOC or "HPCSCHED_GPU_DEVICES" in launch.env or launch.confine.gpu_files
        )
        return self._check.why_unfit([] if other_numbers else launch.gpus)

    def _has_prolog(self, entry: Entry, launch: protocol.Launch) -> bool:
        """Return whether the launch may start; if its prolog has failed, refuse it.

        Raises OSError.
        """
        why = self._scripts.may_start(entry.key, launch)
        self._waiting.discard(entry.token)
        if why is None:
            self._waiting.add(entry.token)
        elif why != GO:
            self._refuse(entry, why, node_fault=not is_of_job(why))
        return why == GO

    def _scripts_changed(self, job: Tuple[str, int]) -> None:
        for entry in self.entries.of_job(job):
            if entry.token in self._waiting and entry.status == protocol.CLAIMED and entry.ending is None:
                self._start(entry)
            elif entry.held:
                self._publish(entry)
        self._answer_gone()

    def go(self, order: protocol.Go) -> None:
        """Release the tasks of a launch with `hold`."""
        self._shepherds.send(order.token, ReleaseTasks())

    def signal_step(self, order: protocol.SignalStep) -> None:
        """Signal a step, or the steps of its job."""
        entry = self.entries.get(order.token)
        if entry is None:
            return
        if not order.steps:
            self._shepherds.send(entry.token, SignalTasks(order.signum, order.batch_only, order.full))
        if order.steps or order.full:
            self.signal_steps(entry, order.signum)

    def signal_job(self, incarnation: str, job_id: int, attempt: int, signum: int) -> None:
        """Signal all running steps of the job's attempt here, and its batch shell."""
        for entry in self.entries.of_job((incarnation, job_id)):
            if entry.key.attempt == attempt and entry.status == protocol.STARTED:
                self._shepherds.send(entry.token, SignalTasks(signum))
                if entry.key.step == protocol.BATCH:
                    self._shepherds.send(entry.token, SignalTasks(signum, batch_only=True))

    def signal_steps(self, batch: Entry, signum: int) -> None:
        """Signal the other steps of the batch step's attempt on this node."""
        for other in self.entries.of_job(batch.key.job, batch.key.life):
            if other is not batch and other.status == protocol.STARTED and other.accepts_signal(signum):
                self._shepherds.send(other.token, SignalTasks(signum))

    def end_step(self, order: protocol.EndStep) -> None:
        """Revoke the token or end its step. The answer is its final report."""
        key = read_token(order.token)
        if key is None or key.node != self.node:
            self._log("end dropped: %.200r is not a token of node %s" % (order.token, self.node))
            return
        entry = self.entries.get(order.token)
        if entry is None:
            if self._spool.done_log.is_over(key):
                self._reports.report_over(order.token, "it was over before")
            else:
                self._revoke(order.token, key, protocol.REVOKED, order.why)
        elif entry.is_final:
            self._shepherds.send(entry.token, EndTasks(0.0, order.why))  # its output is not wanted any more
            self._publish(entry)
        else:
            self._end(entry, order.grace_s, order.why)

    def end_job(self, order: protocol.EndJob) -> None:
        """End all attempts of the job up to this one. The answer is JobGone."""
        if not protocol.is_incarnation(order.incarnation):  # it becomes a part of a line of the done log
            self._log("end dropped: %.60r is not an incarnation" % order.incarnation)
            return
        job = (order.incarnation, order.job_id)
        durable = self._pending_writes.note_ended(order)
        self._suspended.pop(job, None)
        life = order.attempt, order.stay
        for entry in self.entries.of_job(job, life):
            if not entry.is_final:
                batch_only = order.batch_only or not entry.accepts_signal(order.signum)
                self._end(entry, order.grace_s, "the job is over", order.signum, batch_only)
        if durable:
            self._gone.append(_Gone(job, life))
            self._answer_gone()

    def suspend_job(self, order: protocol.SuspendJob) -> None:
        """Suspend or resume the job's attempt here, including later launches of it."""
        job = (order.incarnation, order.job_id)
        if order.on:
            self._suspended[job] = order.attempt
        elif self._suspended.get(job) == order.attempt:
            del self._suspended[job]
        for entry in self.entries.of_job(job):
            if entry.key.attempt == order.attempt and not entry.is_final:
                self._shepherds.send(entry.token, SuspendTasks(order.on))

    def ack(self, seqs: List[int]) -> None:
        """Note that the controller has committed these reports."""
        self._scripts.acknowledged(seqs)
        for entry in self._reports.acknowledged(seqs):
            if entry.is_final and not entry.held:  # the acknowledged report of a held entry is its start
                self._shepherds.send(entry.token, EndCommitted())
                self._forget_if_over(entry)

    # ----- the shepherds

    def shepherd_started(self, token: str, started: TasksStarted) -> None:
        """Note that the shepherd has released its tasks."""
        entry = self.entries.get(token)
        if entry is not None and entry.status == protocol.CLAIMED:
            entry.status, entry.record = protocol.STARTED, record_of(started)
            if entry.key.step == protocol.BATCH:
                self._unreported[token] = None
            else:
                self._publish(entry)

    @property
    def has_unreported_starts(self) -> bool:
        """Whether `report_starts` has something to report."""
        return bool(self._unreported)

    def report_starts(self) -> None:
        """Report the batch steps that have started since the last call and have not ended."""
        tokens, self._unreported = self._unreported, {}
        for token in tokens:
            entry = self.entries.get(token)
            if entry is not None and entry.status == protocol.STARTED:
                self._publish(entry)

    def shepherd_ready(self, token: str) -> None:
        """Note that all tasks are ready and wait for Go."""
        entry = self.entries.get(token)
        if entry is not None and entry.status == protocol.CLAIMED:
            entry.prepared = True
            self._publish(entry)

    def shepherd_ended(self, token: str, ended: TasksEnded) -> None:
        """Note how the step ended."""
        entry = self.entries.get(token)
        if entry is None or entry.is_final:
            return
        record = record_of(ended)
        if ended.status in (protocol.REFUSED, protocol.REVOKED):
            self._finish_unstarted(entry, record)  # the shepherd may have failed to record it on a full disk
        else:
            self._finish(entry, record)

    def shepherd_gone(self, token: str) -> None:
        """Decide by the spool what to do with a token whose shepherd does not live."""
        entry = self.entries.get(token)
        if entry is None:
            return
        entry.supervised = entry.prepared = False
        if entry.is_final:
            self._forget_if_over(entry)
            return
        found = self._spool.read(token)
        if found.final is not None:
            self._finish(entry, found.final)
        elif found.started is not None:
            self._lose(entry, found.started)
        elif entry.ending is not None:
            self._write_end(entry, protocol.REVOKED, entry.ending[1])
        elif found.launch is None or found.boot_id != self.boot_id:
            self._write_end(entry, protocol.REVOKED, "the node was rebooted before it could start")
        elif entry.starts >= MAX_STARTS:
            self._write_end(entry, protocol.REFUSED, "its shepherd died %d times before it could start" % entry.starts)
        else:
            entry.launch = found.launch
            self._start(entry)

    def _lose(self, entry: Entry, started: Dict[str, Any]) -> None:
        entry.status, entry.record = protocol.STARTED, started
        if not self._shepherds.kill_remains(dict(started, token=entry.token)):
            self._stuck.add(entry.token)
            return
        rebooted = started.get("boot_id") != self.boot_id
        why = "the node was rebooted" if rebooted else "its shepherd was killed"
        self._write_end(entry, protocol.LOST, why, started)

    # ----- time

    def tick(self) -> None:
        """Retry ends that wait for processes to go, or for room on the disk."""
        for token in tuple(self._stuck):
            self._look_again(token)
        for order in self._pending_writes.retry():
            self.end_job(order)

    def _look_again(self, token: str) -> None:
        self._stuck.discard(token)
        entry = self.entries.get(token)
        if entry is not None and not entry.supervised:
            self.shepherd_gone(token)

    @property
    def waits(self) -> bool:
        """Whether `tick` has something to retry."""
        return bool(self._stuck) or self._pending_writes.waits

    def repeat(self) -> None:
        """Repeat unacknowledged reports; check whether a fault is still there."""
        self._scripts.repeat()
        self._reports.repeat()
        self._pending_writes.look_again()  # after the refusals, so that the recovery is the last message

    def forget_some(self) -> List[str]:
        """Drop entries that are over and acknowledged, with one fsync.

        Return those to remove from disk.
        """
        tokens = list(self._to_forget)
        try:
            self._spool.note_finished(tokens)
        except OSError as error:
            self._log("cannot record finished tokens: %s" % error)
            return []
        self._to_forget.clear()
        for token in tokens:
            self._reports.forget(self.entries.remove(token))
        return tokens

    @property
    def to_forget(self) -> int:
        """How many entries `forget_some` would drop."""
        return len(self._to_forget)

    # ----- ends

    def _end(self, entry: Entry, grace_s: float, why: str, signum: int = 0, batch_only: bool = False) -> None:
        entry.ending, entry.saving = (grace_s, why), signum != 0
        if entry.supervised:
            self._shepherds.send(entry.token, EndTasks(grace_s, why, signum, batch_only))
        elif entry.status == protocol.CLAIMED:
            self._write_end(entry, protocol.REVOKED, why)

    def _revoke(self, token: str, key: Token, status: str, why: str) -> None:
        """Record and report that a token without an entry never runs here."""
        entry = self._add(Entry(token, key, None, self.boot_id))
        record = self._final(status, why)
        self._pending_writes.write_tombstone(token, record)
        self._finish(entry, record)

    def _refuse(self, entry: Entry, why: str, node_fault: bool = False) -> None:
        record = self._final(protocol.REFUSED, why)
        if node_fault:
            record["node_fault"] = True
        self._finish_unstarted(entry, record)

    def _finish_unstarted(self, entry: Entry, record: Dict[str, Any]) -> None:
        """Report that it never runs, once no later agent could start it."""
        self._pending_writes.write_tombstone(entry.token, record)
        if self._pending_writes.has(entry.token):
            try:
                self._spool.invalidate(entry.token)
            except OSError as error:
                self._log("cannot take back the claim of %s: %s" % (entry.token, error))
                self._pending_writes.drop(entry.token)
                entry.ending = (0.0, record["why"])
                self._stuck.add(entry.token)  # not reported before it is durable
                return
        self._finish(entry, record)

    def _write_end(self, entry: Entry, status: str, why: str, started: Optional[Dict[str, Any]] = None) -> None:
        record = self._final(status, why)
        if started is not None:
            record.update({key: started[key] for key in ("pid", "started_at_s", "stream_to") if key in started})
        try:
            self._spool.write_final(entry.token, record)
        except OSError as error:
            self._log("cannot record the end of %s: %s" % (entry.token, error))
            self._stuck.add(entry.token)
            return
        self._finish(entry, record)

    def _final(self, status: str, why: str) -> Dict[str, Any]:
        return {"status": status, "at_s": self._wall_s(), "why": why}

    def _finish(self, entry: Entry, record: Dict[str, Any]) -> None:
        entry.status, entry.record = record["status"], record
        if record.get("node_fault"):
            self._pending_writes.is_unwell(record["why"])
        if entry.key.step == protocol.BATCH:
            self._end_other_steps(entry)
        self._waiting.discard(entry.token)
        self._note_if_over(entry.key)
        if self.entries.is_over(entry.key):
            steps = [each for each in self.entries.of_job(entry.key.job) if each.key.attempt == entry.key.attempt]
            clean = all(each.ended_cleanly for each in steps)
            self._shepherds.job_over(job_name(entry.token, entry.key.job_id, entry.key.attempt), clean)
        self._publish(entry)
        for other in self.entries.of_job(entry.key.job):
            if other is entry:
                continue
            if other.held:
                self._publish(other)  # a batch step that waited for this one
            elif other.token in self._stuck and other.status == protocol.CLAIMED:
                self._look_again(other.token)  # perhaps a newer attempt that waited for this one
        self._answer_gone()

    def _note_if_over(self, key: Token) -> None:
        """Begin the epilog of a job that claimed this node and has nothing here any more."""
        if all(entry.is_final for entry in self.entries.of_job(key.job) if entry.key.life == key.life):
            self._scripts.all_ended(key)

    def _end_other_steps(self, batch: Entry) -> None:
        for other in self.entries.of_job(batch.key.job, batch.key.life):
            if not other.is_final and (other.ending is None or other.saving):
                grace_s = other.launch.grace_s if other.launch is not None else 0.0
                self._end(other, grace_s, "the job's batch step is over")

    def _answer_gone(self) -> None:
        for gone in tuple(self._gone):
            if not all(entry.is_final for entry in self.entries.of_job(gone.job, gone.life)):
                continue
            self._scripts.over(gone.job, gone.life)
            if not self._scripts.holds(gone.job, gone.life) and gone in self._gone:
                self._gone.remove(gone)
                self._send(protocol.JobGone(*gone.job, *gone.life))

    def _forget_if_over(self, entry: Entry) -> None:
        reported = entry.is_final and entry.acked and not entry.held
        if reported and not entry.supervised and not self._pending_writes.has(entry.token):
            self._to_forget[entry.token] = None

    # ----- reports

    def _publish(self, entry: Entry) -> None:
        """Report the entry's state under a new number."""
        entry.held = not self.entries.may_report(entry)
        if entry.key.step == protocol.BATCH and self._scripts.holds(entry.key.job, entry.key.life):
            entry.clearing = entry.status == protocol.ENDED
            entry.held = entry.held or entry.status == protocol.LOST
        if not entry.held:
            self._reports.send(entry)
