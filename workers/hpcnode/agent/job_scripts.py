"""The administrator's prolog and epilog of each job on this node.

    prolog --0--> ready --the job is over here--> epilog --> (gone)
       +--else--> refused ---------^

A limit of the power of the job's GPUs (`gpu_power`) is set before the prolog, and set back after the epilog. A limit that cannot
be set is the fault of the job and not of the node.

The prolog runs before anything of the job starts here, the epilog after all of it has ended, both as the account of the agent
and outside of the job's sandbox (`hpcnode.os.program`). Nothing of the job starts without a prolog that has succeeded. The
epilog runs wherever a prolog was begun, whatever became of it, and the node is not clear before it has ended.

A job with scripts has a record, ``ROOT/scripts/INCARNATION.JOB.ATTEMPT.STAY``: durable before the prolog begins, removed when
the epilog is over. So after a crash each runs at least once. They run in a child that outlives the agent, holds the lock of the
record, and writes its result beside it; only if the child itself was killed, the next agent runs the script again. Records of
an earlier boot have only their epilog left. A job without scripts costs nothing here.

The outcome of a damaged record is unknown. What the launches of that life say replaces it: a prolog runs again unless
something has started, and the epilog runs at the end. If no launch is left, the epilog cannot run: the controller is told, which
drains the node.

`ScriptRecords` decides, and does no I/O but through the spool. `ScriptRunner` runs.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Protocol, Tuple

from hpcnode.agent import gpu_power
from hpcnode.agent.gpu_watch import LIBRARY
from hpcnode.agent.helpers import ask_child
from hpcnode.os.account import why_not_as_root
from hpcnode.os.durable import read_object, to_bytes, write_plainly
from hpcnode.os.faults import CrashPoints
from hpcnode.os.loop import Loop
from hpcnode.spool import SCRIPT_LOCK, SCRIPT_POWER, SCRIPT_RESULT, Found, Spool, remove_file, token_of
from hpcnode.wire import protocol
from hpcnode.wire.message import WireError, from_fields, to_fields
from hpcnode.wire.protocol import Life, Token, read_token

PROLOG, READY, REFUSED, EPILOG, OVER = "prolog", "ready", "refused", "epilog", "over"
STATES = (PROLOG, READY, REFUSED, EPILOG, OVER)
CONTEXTS = {PROLOG: "prolog_slurmd", EPILOG: "epilog_slurmd"}  # as in Slurm
GO = ""
STORED = {"state": str, "claims": bool, "closing": bool, "why": str, "failures": list}
NO_EPILOG = "epilog cannot run: its record is damaged"
LOOK_S = 0.1
MARGIN_S = 60.0  # for what ends the script
Job = Tuple[str, int]


class ScriptControl(Protocol):
    """What runs the scripts, as the records use it."""

    def run(self, name: str, state: str, scripts: protocol.JobScripts, over: Callable[[str], None]) -> None: ...
    def forget(self, name: str) -> None: ...


class _Record:
    """A job with scripts, for one of its lives on this node."""

    def __init__(self, token: str, key: Token, scripts: protocol.JobScripts, boot_id: str) -> None:
        self.token = token  # of the launch that came first
        self.key = key
        self.scripts = scripts
        self.boot_id = boot_id
        self.state = PROLOG
        self.claims = False  # the job claims the node, so it is over when all that is here has ended
        self.closing = False  # the job is over here
        self.why = ""  # why the prolog failed
        self.failures: List[str] = []  # that the controller has not acknowledged

    @property
    def name(self) -> str:
        return "%s.%d.%d.%d" % (*self.key.job, *self.key.life)


class ScriptRecords:
    """The jobs with scripts on this node. Without a folder there are none."""

    def __init__(
        self,
        spool: Spool,
        runner: Optional[ScriptControl],
        boot_id: str,
        send: Callable[[protocol.Message], object],
        new_seq: Callable[[], int],
        log: Callable[[str], None],
    ) -> None:
        self._log = log
        self._spool = spool
        self._runner = runner
        self._boot_id = boot_id
        self._send = send
        self._new_seq = new_seq
        self._records: Dict[Tuple[Job, Life], _Record] = {}
        self._reported: Dict[int, Tuple[_Record, str]] = {}
        self.changed: Callable[[Job], None] = lambda _job: None  # called when a script is over

    def load(self, entries: Iterable[Found]) -> None:
        """Read the records of earlier agents, and continue them.

        `entries`: the launches that are here.
        """
        for name, objects in self._spool.script_records():
            read = (_read_record(name, obj) for obj in objects)
            record = next((each for each in read if each is not None), None)
            if record is None:
                record = self._rebuilt(name, entries)
            if record is not None:
                self._records[record.key.job, record.key.life] = record
        for each in list(self._records.values()):
            self._continue(each)

    def _rebuilt(self, name: str, entries: Iterable[Found]) -> Optional[_Record]:
        """Return what the launches of the same life say instead of a damaged record.

        None: `name` is not the name of a record.
        """
        life, _, stay = name.rpartition(".")
        text = "%s.batch.none.%s" % (life if stay == "0" else "%s-%s" % (life, stay), "0" * 32)
        key = read_token(text)
        if key is None or _Record(text, key, protocol.JobScripts(), "").name != name:
            self._log("ignored %.200r among the records of scripts: it is not the name of a record" % name)
            return None
        found = [each for each in entries if token_of(each).job == key.job and token_of(each).life == key.life]
        launches = [(each, each.launch) for each in found if each.launch is not None]
        self._log("the record of scripts %s is damaged; launches that are left: %d" % (name, len(launches)))
        if not launches:
            record = _Record(text, key, protocol.JobScripts(), self._boot_id)
            record.state, record.closing, record.failures = READY, True, [NO_EPILOG]
            return record
        entry, launch = launches[0]
        record = _Record(entry.token, token_of(entry), launch.scripts, entry.boot_id)
        record.claims = any(each.step in (protocol.BATCH, protocol.ALLOC) for _, each in launches)
        if not _has_work(launch.scripts, PROLOG) or any(each.started or each.final for each in found):
            record.state = READY
        return record

    def _continue(self, record: _Record) -> None:
        for why in record.failures:
            self._report(record, why)
        if record.boot_id != self._boot_id and record.state in (PROLOG, READY, REFUSED):
            record.state, record.closing, record.why = REFUSED, True, "the node was rebooted"
        if record.state in (PROLOG, EPILOG):
            self._run(record)
        elif record.state == OVER and not record.failures:
            self._forget(record)
        elif record.closing and record.state != OVER:
            self._begin_epilog(record)

    # ----- what the ledger asks

    def may_start(self, key: Token, launch: protocol.Launch) -> Optional[str]:
        """Return GO if a launch may start, None if it must wait, else why it never may.

        Raises OSError if the record cannot be written.
        """
        scripts = launch.scripts
        if not self._records and not _has_any(scripts):
            return GO
        for older in self._of(key.job):
            if older.key.life < key.life:
                self._close(older)
        if any(older.key.life < key.life and older.state != OVER for older in self._of(key.job)):
            return None
        claims = launch.step in (protocol.BATCH, protocol.ALLOC)
        record = self._records.get((key.job, key.life))
        if record is None:
            if not _has_any(scripts):
                return GO
            record = self._begin(key, launch, claims)
        elif claims and not record.claims:
            record.claims = True
            self._write(record)
        if record.state in (PROLOG, EPILOG):  # that epilog is of a claim that a power failure took: the job begins anew
            return None
        return {READY: GO, REFUSED: record.why}.get(record.state, "the job's epilog has begun here")

    def _begin(self, key: Token, launch: protocol.Launch, claims: bool) -> _Record:
        record = _Record(launch.token, key, launch.scripts, self._boot_id)
        record.claims = claims
        self._write(record, durably=True)
        self._records[key.job, key.life] = record
        if _has_work(launch.scripts, PROLOG):
            self._run(record)
        else:
            record.state = READY
            self._write(record)
        return record

    def all_ended(self, key: Token) -> None:
        """Note that everything of a life has ended here. A job that claims the node is over then."""
        record = self._records.get((key.job, key.life))
        if record is not None and record.claims:
            self._close(record)

    def over(self, job: Job, up_to: Life) -> None:
        """Note that the job, up to this life, is over here."""
        for record in self._of(job):
            if record.key.life <= up_to:
                self._close(record)

    def holds(self, job: Job, up_to: Life) -> bool:
        """Return whether the node is not clear of the job, up to this life: a script is not over."""
        return any(record.key.life <= up_to and record.state != OVER for record in self._of(job))

    def jobs(self) -> List[Tuple[str, int, int, int]]:
        """Return incarnation, job, attempt and stay of the jobs whose epilog is still to come."""
        return [(*record.key.job, *record.key.life) for record in self._records.values() if record.state != OVER]

    def claimed(self) -> List[Token]:
        """Return a token of each life that claims the node and is not over."""
        return [record.key for record in self._records.values() if record.claims and record.state != OVER]

    @property
    def is_busy(self) -> bool:
        """Whether a script is running."""
        return any(record.state in (PROLOG, EPILOG) for record in self._records.values())

    def repeat(self) -> None:
        """Repeat the failures that the controller has not acknowledged."""
        for seq, (record, why) in self._reported.items():
            self._send(protocol.ScriptFailed(seq, record.key.job_id, why))

    def acknowledged(self, seqs: Iterable[int]) -> None:
        """Note that the controller has committed these failures."""
        for record, why in [self._reported.pop(seq) for seq in seqs if seq in self._reported]:
            record.failures.remove(why)
            if record.state == OVER and not record.failures:
                self._forget(record)
            else:
                self._write(record)

    # ----- the states

    def _of(self, job: Job) -> Iterator[_Record]:
        return (record for record in tuple(self._records.values()) if record.key.job == job)

    def _close(self, record: _Record) -> None:
        if not record.closing:
            record.closing = True
            if record.state != PROLOG:
                self._begin_epilog(record)

    def _begin_epilog(self, record: _Record) -> None:
        record.state = EPILOG
        if not _has_work(record.scripts, EPILOG):
            self._end(record)
            return
        self._write(record)
        self._run(record)

    def _run(self, record: _Record) -> None:
        assert self._runner is not None
        self._runner.run(record.name, record.state, record.scripts, lambda why: self._script_over(record, why))

    def _script_over(self, record: _Record, why: str) -> None:
        if why and not is_of_job(why):
            why = "%s %s" % (record.state, why)
            record.failures.append(why)
            self._report(record, why)
        if record.state == EPILOG:
            self._end(record)
        else:
            record.state, record.why = (REFUSED, why) if why else (READY, "")
            self._write(record)
            if record.closing:
                self._begin_epilog(record)
        self.changed(record.key.job)

    def _end(self, record: _Record) -> None:
        record.state = OVER
        if record.failures:
            self._write(record)
        else:
            self._forget(record)

    def _report(self, record: _Record, why: str) -> None:
        seq = self._new_seq()
        self._reported[seq] = (record, why)
        self._send(protocol.ScriptFailed(seq, record.key.job_id, why))

    def _forget(self, record: _Record) -> None:
        self._records.pop((record.key.job, record.key.life), None)
        if self._runner is not None:
            self._runner.forget(record.name)
        try:
            self._spool.forget_scripts(record.name)
        except OSError as error:  # the next agent finds it again
            self._log("cannot remove the record of scripts %s: %s" % (record.name, error.strerror))

    def _write(self, record: _Record, durably: bool = False) -> None:
        """Note a state for the next agent.

        Without it, or after a power failure, that agent runs a script again.
        """
        obj: Dict[str, Any] = {"token": record.token, "scripts": to_fields(record.scripts), "boot_id": record.boot_id}
        obj.update({field: getattr(record, field) for field in STORED})
        try:
            self._spool.note_scripts(record.name, obj, durably)
        except OSError as error:
            if durably:
                raise
            self._log("cannot note the %s of %s: %s" % (record.state, record.name, error.strerror))


def is_of_job(why: str) -> bool:
    """Return whether a launch is refused for what its job has requested, and not for the node."""
    return why.startswith(gpu_power.GPU_POWER)


def _has_any(scripts: protocol.JobScripts) -> bool:
    return bool(scripts.prolog or scripts.epilog or scripts.gpu_power)


def _has_work(scripts: protocol.JobScripts, state: str) -> bool:
    return bool((scripts.prolog if state == PROLOG else scripts.epilog) or scripts.gpu_power)


class ScriptRunner:
    """Runs scripts in children that outlive the agent."""

    def __init__(self, loop: Loop, folder: str, faults: CrashPoints, library: str = LIBRARY) -> None:
        self._loop = loop
        self._folder = folder
        self._faults = faults
        self._library = library

    def run(self, name: str, state: str, scripts: protocol.JobScripts, over: Callable[[str], None]) -> None:
        """Run the script of this state, or wait for one that an earlier agent has begun."""
        path = os.path.join(self._folder, name)
        try:
            lock_fd = os.open(path + SCRIPT_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._cannot(error, over)
            return
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = _result(path, state)
            if found is not None:
                self._loop.later(0.0, lambda: over(found))
            else:
                self._fork(path, state, scripts, lock_fd, over)
        except BlockingIOError:
            self._loop.later(LOOK_S, lambda: self.run(name, state, scripts, over))
        except OSError as error:
            self._cannot(error, over)
        finally:
            os.close(lock_fd)

    def _cannot(self, error: OSError, over: Callable[[str], None]) -> None:
        self._loop.later(0.0, lambda: over("cannot be started: %s" % error.strerror))

    def forget(self, name: str) -> None:
        """Remove what is beside the record."""
        for end in (SCRIPT_RESULT, SCRIPT_LOCK, SCRIPT_POWER):
            with suppress(OSError):  # what is left there is of no later job
                remove_file(os.path.join(self._folder, name) + end)

    def _fork(
        self, path: str, state: str, scripts: protocol.JobScripts, lock_fd: int, over: Callable[[str], None]
    ) -> None:
        env = dict(scripts.env, SLURM_SCRIPT_CONTEXT=CONTEXTS[state], HPCSCHED_SCRIPT_CONTEXT=CONTEXTS[state])

        def work() -> bytes:
            why = self._done(path, state, scripts, env)
            self._faults.reached("%s.ran" % state)
            write_plainly(path + SCRIPT_RESULT + ".new", to_bytes({"state": state, "why": why}), 0o600, new=False)
            os.rename(path + SCRIPT_RESULT + ".new", path + SCRIPT_RESULT)
            return b"."

        def done(_data: bytes) -> None:
            found = _result(path, state)
            over("was killed before its end was known" if found is None else found)

        ask_child(self._loop, work, done, scripts.limit_s + MARGIN_S, keep=(lock_fd,))

    def _done(self, path: str, state: str, scripts: protocol.JobScripts, env: Dict[str, str]) -> str:
        """Do the work of a state, in a child; return why it failed, "" if it did not."""
        from hpcnode.os.program import run  # in a child; see `agent` on the cost of imports

        program = scripts.prolog if state == PROLOG else scripts.epilog
        why = ""
        if scripts.gpu_power and state == PROLOG:
            why = gpu_power.limit(path + SCRIPT_POWER, scripts.gpus, scripts.gpu_power, self._library)
        if program and not why:
            why = why_not_as_root(program) or run(program, env, scripts.limit_s)
        if scripts.gpu_power and state == EPILOG:
            why = "; ".join(filter(None, (why, gpu_power.restore(path + SCRIPT_POWER, self._library))))
        return why


def _result(path: str, state: str) -> Optional[str]:
    """Return why the script of this state failed, "" if it did not; None if that is not known."""
    try:
        found = read_object(path + SCRIPT_RESULT)
    except OSError:
        return None
    return str(found.get("why")) if found is not None and found.get("state") == state else None


def _read_record(name: str, obj: Dict[str, Any]) -> Optional[_Record]:
    """Return a stored record, None if it is damaged or of another name."""
    token, scripts, boot_id = (obj.get(field) for field in ("token", "scripts", "boot_id"))
    key = read_token(token) if isinstance(token, str) else None
    if key is None or not isinstance(scripts, dict) or not isinstance(boot_id, str):
        return None
    if obj.get("state") not in STATES or not all(isinstance(obj.get(field), kind) for field, kind in STORED.items()):
        return None
    if not all(isinstance(why, str) for why in obj["failures"]):
        return None
    try:
        record = _Record(str(token), key, from_fields(protocol.JobScripts, scripts), boot_id)
    except WireError:
        return None
    for field in STORED:
        setattr(record, field, obj[field])
    return record if record.name == name else None
