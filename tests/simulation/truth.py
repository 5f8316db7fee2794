"""What really ran, and what must never be: the invariants, looked at whenever something that they speak of changes.

    I1  a token is executed at most once
    I2  two attempts of a job never run at the same time; what runs is of the attempt that the ledger has, on a node it holds
    I3  a submission that was acknowledged has its row, after any crash
    I4  a job whose cancellation was acknowledged is never given nodes again; nothing of it runs when the ledger says it is over
    I5  a final state never changes (but by a request to queue the job again)
    I6  what the ledger's jobs hold of a node is never more than it has (but for the grace of one that stood still for another
        and is ended: it has to go on to end by itself)
    I7  the same request id gives the same jobs
    I8  replaying a job's events gives its row
    I9  users are charged what their jobs are, once
    I10 a job is charged what it held for as long as it held it, event by event: not while it was suspended, nor for the time
        between its end and the controller's hearing of it, nor for a step of the controller's clock
    I11 what the attempts of a job held, by its events, is what it is charged
    end a job that is COMPLETED has run to its end, once; what a shepherd has put on disk of an end is what is recorded of it,
        and no word of its node makes that a loss (an admin's word, a lease that ran out, or a restored database may)
    bar what a node was heard to have revoked never runs there
    epilog a prolog that was begun has its epilog
    prolog nothing of a job runs before its prolog has ended well there, nor after its epilog has begun
    kill  nothing is killed for a step that it is not of

The programs themselves count their executions; the ledger is read from the committed batches, and at each start of a
controller, and at the end, from the database.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcnode.wire import protocol
from hpcsched.lifecycle.events import (
    Allocated,
    ClockStepped,
    EndRequested,
    Exited,
    JobEvent,
    NodeLost,
    NodesAdded,
    Requeued,
    Resumed,
    Submitted,
    Suspended,
)
from hpcsched.lifecycle.job import apply, submitted_jobs
from hpcsched.model.ids import JobId, LaunchToken
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState
from hpcsched.sched.fairshare import UsedResources
from hpcsched.state.transaction import WriteBatch
from simulation.machine import Machine, Program

if TYPE_CHECKING:
    from hpcsched.store.store import Store
    from simulation.head import Head
    from simulation.stage import Simulation


# In the reasons for a loss that are not the node's word.
BY_ADMIN = ("was fenced", "lease there ran out", "was removed by")


class Violation(BaseException):  # so that no barrier of the controller takes it for its own
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(invariant, text)
        self.invariant = invariant

    def __str__(self) -> str:
        return ": ".join(self.args)


def as_violation(error: BaseException) -> Violation:
    """Return the violation that `error` is: what production code did not expect is one as well."""
    if isinstance(error, Violation):
        return error
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Violation("crash", f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})")


@dataclass(slots=True)
class Execution:
    """A program that ran, or runs."""

    token: LaunchToken
    machine: str
    live: int = 0  # processes
    code: int | None = None  # of the main one, if it ended by itself


class Truth:
    """The checker of one world."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.executions: dict[str, Execution] = {}
        self._live: dict[str, Execution] = {}
        self.rows: dict[JobId, Job] = {}  # as committed
        self._acknowledged: dict[str, list[JobId]] = {}
        self._cancelled: set[JobId] = set()  # not queued again since
        self._ever_cancelled: set[JobId] = set()
        self.orphans: set[str] = set()  # incarnations before the present one
        self._kept: dict[
            str, tuple[Machine, dict[str, Any]]
        ] = {}  # token -> how it ended, as this machine's disk has it
        self._woken: set[tuple[JobId, int]] = set()  # attempts that are ended while another job has their cpus: see I6
        self._revoked: set[str] = set()  # tokens that a controller was told are revoked
        self._held_cpu_s: dict[JobId, float] = {}  # what each job has held
        self._counted_s: dict[JobId, tuple[float, float]] = {}  # until when that was counted, and can not be less

    def broken(self, invariant: str, text: str) -> None:
        """Raise the Violation."""
        raise Violation(invariant, text)

    # ----- programs

    def program_runs(self, machine: Machine, program: Program) -> None:
        """A program's first instruction."""
        token = LaunchToken.parse(program.token)
        self._sim.tell(f"{self._sim.words(program.token)} runs on {machine.name} (pid {program.pid})")
        if program.token in self.executions:
            self.broken("I1", f"{program.token} is executed a second time")
        if program.token in self._revoked:
            self.broken("revoke", f"{program.token} runs on {machine.name}, which has said that it never will")
        self._check_scripts(machine, token)
        execution = Execution(token, machine.name, 0)
        self.executions[program.token] = self._live[program.token] = execution
        for other in self._live.values():
            same = (other.token.incarnation, other.token.job_id) == (token.incarnation, token.job_id)
            if same and other.token.attempt != token.attempt:
                self.broken("I2", f"attempts {other.token.attempt} and {token.attempt} of job {token.job_id} run")
        self._check_known(execution)

    def _check_scripts(self, machine: Machine, token: LaunchToken) -> None:
        if not self._sim.config.controller.prolog:
            return
        name = f"{token.incarnation}.{token.job_id}.{token.attempt}.{token.stay}"
        if (name, "prolog") not in machine.scripts_over:
            self.broken("prolog", f"{token} runs on {machine.name} without a prolog")
        if (name, "epilog") in machine.scripts:
            self.broken("prolog", f"{token} runs on {machine.name} after its epilog has begun")

    def program_over(self, machine: Machine, program: Program, code: int, signum: int) -> None:
        """A program, or what it left behind, is gone."""
        execution = self._live.get(program.token)
        if execution is None:
            return
        if program.is_main:
            how = f"signal {signum}" if signum else f"code {code}"
            self._sim.tell(f"{self._sim.words(program.token)} is over on {machine.name}: {how}")
            if not signum:
                execution.code = code
        if not any(one.token == program.token for one in machine.programs.values()):
            self._live.pop(program.token)

    def end_kept(self, machine: Machine, token: str, final: dict[str, Any]) -> None:
        """A shepherd believes that it has put the end of what it started on its disk, durably."""
        self._kept.setdefault(token, (machine, final))

    def heard(self, machine: Machine, report: protocol.Report) -> None:
        """A controller hears a report. What a full disk could not keep of a refusal, the next agent may not know."""
        if report.status == protocol.REVOKED and not machine.disk.refused:
            self._revoked.add(report.token)

    def killed_for(self, token: str, program: Program) -> None:
        """A program is about to be killed as what is left of `token`."""
        if program.token != token:
            self.broken("kill", f"{program.token} is killed as what is left of {token}")

    def _check_known(self, execution: Execution) -> None:
        token = execution.token
        if token.incarnation in self.orphans:
            return  # of before the restore: to be ended, not to be known
        job = self.rows.get(token.job_id)
        if job is None or job.attempt != token.attempt or job.state not in ACTIVE:
            what = "it has no row" if job is None else f"its job is {job.state}, attempt {job.attempt}"
            invariant = "I4" if job is not None and job.id in self._cancelled else "I2"
            self.broken(invariant, f"{token} runs on {execution.machine} unseen: {what}")
        elif token.node not in job.held_nodes:
            self.broken("I6", f"{token} runs on {token.node}, which its job does not hold any more")
        elif token.stay != job.stay_on(token.node):
            self.broken("I6", f"{token} runs on {token.node}, which its job has given back and been given again")

    # ----- the ledger

    def committed(self, batch: WriteBatch) -> None:
        """A batch is on disk."""
        rows = self.rows
        for event in batch.events:
            self._sim.tell(f"recorded: job {event.job_id} {type(event).__name__}")
            if isinstance(event, Submitted):
                for job in submitted_jobs(event, batch.specs[event.spec_id]):
                    rows[job.id] = job
                continue
            before = rows.get(event.job_id)
            if before is None:
                self.broken("I8", f"{type(event).__name__} of job {event.job_id}, which was never submitted")
                return
            if before.state in FINAL and not isinstance(event, Requeued):
                self.broken("I5", f"job {before.id} is {before.state}, and then {type(event).__name__}")
            if isinstance(event, Allocated) and before.id in self._cancelled:
                self.broken("I4", f"job {before.id} was cancelled, and is given nodes")
            if isinstance(event, Requeued):
                self._cancelled.discard(before.id)
            if isinstance(event, EndRequested) and event.by_uid is not None and not event.requeue:
                self._cancelled.add(before.id)
                self._ever_cancelled.add(before.id)
            self._check_end_known(before, event)
            after = rows[event.job_id] = apply(before, event)
            self._count_held(before, event, after)
            if before.suspended_for is not None and after.state is JobState.COMPLETING:
                self._woken.add((after.id, after.attempt))
        for job in batch.jobs.values():
            if rows.get(job.id) != job:
                self.broken("I8", f"job {job.id}: its events give {rows.get(job.id)}, its row is {job}")
            if job.state is JobState.COMPLETED and job.spec.has_script:
                self._check_completed(job)
        for execution in self._live.values():
            self._check_known(execution)
        self._check_held()

    def _count_held(self, before: Job, event: JobEvent, after: Job) -> None:
        """Count what the job held since its last event; nothing after the end that is heard of now."""
        since_s, least_s = self._counted_s.get(before.id, (event.at_s, event.at_s))
        if isinstance(event, ClockStepped):
            since_s, least_s = since_s + event.by_s, least_s + event.by_s
        until_s = event.at_s
        if isinstance(event, Exited):
            until_s = max(least_s, min(until_s, after.ended_at_s or until_s))
        if before.suspended_at_s is None and before.held_nodes:
            cpus = sum(share.cpus for share in before.holding)
            self._held_cpu_s[before.id] = self._held_cpu_s.get(before.id, 0.0) + cpus * (until_s - since_s)
        if (
            isinstance(event, Allocated | Suspended | Resumed | NodesAdded | Exited)
            or before.suspended_at_s is not None
        ):
            least_s = event.at_s
        self._counted_s[before.id] = event.at_s, least_s
        if before.held_nodes and not after.held_nodes:
            held = self._held_cpu_s[before.id]
            if abs(after.charged_cpu_s - held) > 1e-6 * max(1.0, held):
                self.broken("I10", f"job {after.id} held {held} cpu-seconds, and is charged {after.charged_cpu_s}")

    def _check_end_known(self, job: Job, event: JobEvent) -> None:
        kept = self._kept.get(job.token)
        if kept is None or LaunchToken.parse(job.token).incarnation in self.orphans:
            return
        machine, final = kept
        if isinstance(event, Exited):
            signum = max(final["signals"], default=0)
            code = 0 if signum else max(final["codes"], default=0)
            if (event.exit.code, event.exit.signal) != (code, signum):
                self.broken("end", f"{job.token} ended with {(code, signum)}, and {event.exit} is recorded")
        elif isinstance(event, NodeLost) and event.node == LaunchToken.parse(job.token).node:
            by_its_node = not any(words in event.why for words in BY_ADMIN)
            if by_its_node and self._sim.machines[event.node] is machine:  # else its name leads to another disk
                self.broken("end", f"{job.token} has ended, its node's disk says how, and it is lost: {event.why}")

    def _check_completed(self, job: Job) -> None:
        execution = self.executions.get(job.token)
        if execution is None or execution.code != 0:
            self.broken("end", f"job {job.id} is COMPLETED, but {job.token} has not run to its end")

    def _check_held(self) -> None:
        held: dict[str, int] = {}
        for job in self.rows.values():
            if job.state in ACTIVE and (job.id, job.attempt) not in self._woken:
                for share in job.holding:
                    held[share.node] = held.get(share.node, 0) + share.cpus
        for node, cpus in held.items():
            if cpus > self._sim.machines[node].cpus:
                self.broken("I6", f"{cpus} cpus of {node} are held")

    def head_starts(self, head: Head) -> None:
        """A controller has loaded the database: it must have what was committed and acknowledged."""
        self._check_rows(head.state.jobs)
        self._check_charged(head.state.usage.values())

    def check_end(self, head: Head) -> None:
        """Look at all that is stored, and replay every job's events."""
        store = head.controller.store
        stored = {job.id: job for job in store.load_jobs(-1.0)}
        self._check_rows(stored)
        self._check_charged(store.load_usage())
        for machine in self._sim.machines.values():
            left = sorted(name for name, _ in machine.scripts if (name, "epilog") not in machine.scripts)
            if left and all(job.state in FINAL for job in stored.values()):
                self.broken("epilog", f"{machine.name} has not begun the epilogs of {left}")
        for row in stored.values():
            job: Job | None = None
            for event in store.load_events(row.id):
                if isinstance(event, Submitted):
                    job = next(one for one in submitted_jobs(event, row.spec) if one.id == row.id)
                elif job is not None:
                    job = apply(job, event)
            if job != row:
                self.broken("I8", f"job {row.id}: its events give {job}, its row is {row}")
        self._check_attempts(store, list(stored.values()))

    def _check_attempts(self, store: Store, rows: list[Job]) -> None:
        ended = [row for row in rows if not row.held_nodes]
        for job_id, attempts in store.attempts(ended).items():
            held = [one for attempt in attempts or () for one in attempt.holdings]
            cpu_s = sum(one.cpus * ((one.until_s or 0.0) - one.since_s) for one in held)
            charged_s = self.rows[JobId(job_id)].charged_cpu_s
            if attempts is None or abs(cpu_s - charged_s) > 1e-6 * max(1.0, charged_s):
                self.broken("I11", f"job {job_id} held {cpu_s} cpu-seconds, and is charged {charged_s}: {held}")

    def _check_rows(self, stored: dict[JobId, Job]) -> None:
        if stored != self.rows:
            wrong = sorted(i for i in {*stored, *self.rows} if stored.get(i) != self.rows.get(i))
            self.broken("I3", f"jobs {wrong} are not as they were committed")
        for name, ids in self._acknowledged.items():
            if not all(job_id in stored for job_id in ids):
                self.broken("I3", f"submission {name} was acknowledged as {ids}, and is not there")

    def _check_charged(self, usage: Iterable[UsedResources]) -> None:
        """Users are charged what their jobs are, once: a crash loses and doubles nothing."""
        charged = sum(dict(row.amounts).get("cpu", 0.0) for row in usage)
        held = sum(job.charged_cpu_s for job in self.rows.values())
        if abs(charged - held) > 1e-6 * max(1.0, held):
            self.broken("I9", f"users were charged {charged} cpu-seconds, their jobs {held}")

    def restored(self, head_incarnation: str, rows: dict[JobId, Job]) -> None:
        """The database is yesterday's: what was acknowledged since is gone, and is not held against anybody."""
        self.orphans.add(head_incarnation)
        self.rows = rows
        self._acknowledged = {
            name: ids for name, ids in self._acknowledged.items() if all(job_id in rows for job_id in ids)
        }
        self._cancelled = {job_id for job_id in self._cancelled if job_id in rows and rows[job_id].state in FINAL}
        self._ever_cancelled.clear()
        self._held_cpu_s = {job.id: job.charged_cpu_s for job in rows.values()}
        since_s = {job.id: job.charged_until_s or job.allocated_at_s for job in rows.values()}
        self._counted_s = {job_id: (at_s, at_s) for job_id, at_s in since_s.items() if at_s is not None}

    # ----- what people were told

    def submit_acknowledged(self, name: str, ids: list[JobId]) -> None:
        """A client is told the numbers of its jobs."""
        if not self._sim.database.has_jobs(list(ids)):
            self.broken("I3", f"submission {name} is acknowledged as {ids} before it is on disk")
        if self._acknowledged.setdefault(name, ids) != ids:
            self.broken("I7", f"submission {name} gave {self._acknowledged[name]}, and then {ids}")

    def cancel_acknowledged(self, ids: list[int]) -> None:
        """A client is told that these jobs are cancelled."""
        for job_id in ids:
            if job_id not in self._ever_cancelled:
                self.broken("I4", f"the cancellation of job {job_id} is acknowledged before it is on disk")

    @property
    def running(self) -> list[str]:
        """The tokens of which something runs."""
        return list(self._live)
