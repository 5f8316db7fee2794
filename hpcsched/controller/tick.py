"""Run a tick: apply all input in one transaction, then plan, commit, answer and act.

`Controller` is synchronous. Its only I/O is the store's commit. Everything else that it needs from
outside comes through `Ports`, which a simulation replaces. The caller reads the clock once per
tick.

The order is: commit, then answer, then act. A crash after the commit loses only effects. They are
derived from the state and are repeated at the next start. A crash before the commit loses only
changes that were not yet acknowledged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from hpcnode.wire import protocol
from hpcsched.auth.audit import AuditEntry
from hpcsched.auth.authorize import CONTROLLER, Action, Identity, authorize
from hpcsched.controller.energy import EnergyLedger, GpuLedger
from hpcsched.controller.memory import memory_of
from hpcsched.controller.metrics import ControllerMetrics
from hpcsched.controller.nodes import edits, messages, orphans
from hpcsched.controller.nodes.loss import (
    UnreachableNodes,
    end_silent,
    miss_node,
    note_condition,
    note_drop,
    rejoin_steady,
)
from hpcsched.controller.nodes.messages import Trainings
from hpcsched.controller.nodes.power import PowerKeeper, nodes_awaited, ordered, start_allocations
from hpcsched.controller.planning import (
    MANY_JOBS,
    SIGNATURE_LEFT_S,
    SLICE_S,
    ClockMark,
    Pace,
    Planning,
    Slice,
    Waits,
    end_overdue,
    keep_step,
    mark_of,
    next_time_s,
    warn_at_s,
)
from hpcsched.controller.preemption import carry_out, carry_out_resizes
from hpcsched.controller.requests import crontabs, reservations, services, triggers
from hpcsched.controller.requests.jobs import SignalJob
from hpcsched.controller.requests.submission import check_account, check_share_of_queue, place_of, settle
from hpcsched.controller.usage_ledger import UsageLedgerCache
from hpcsched.controller.views.queue import first_start
from hpcsched.errors import HpcschedError, InvariantError, NotFoundError, ProtocolError, UnavailableError, report_fault
from hpcsched.jobscript.signing import read_signature
from hpcsched.lifecycle.events import Allocated, LaunchRefused, Started, Submitted
from hpcsched.lifecycle.job import LAUNCHES, Effect, EffectKind, can, effects_of, submitted_jobs
from hpcsched.lifecycle.node import NodeDisconnected, NodeDown, NodeOrphansFound, NodeOrphansGone, NodeUp
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, JobId, LaunchToken, NodeName
from hpcsched.model.job import ACTIVE, Job, JobState, Reason
from hpcsched.model.node import Link, Power, Share, abilities_of
from hpcsched.model.spec import JobSpec
from hpcsched.model.trigger import Trigger
from hpcsched.sched.decisions import Plan, Start, Wait
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Promise, Snapshot, SnapshotCache, snapshot_of
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction, WriteBatch
from hpcsched.store.store import Store

log = logging.getLogger("hpcsched.controller")

PURGE_EVERY_S = 60.0
PURGE_SCRIPTS = 200  # per pass
PURGE_REQUESTS_EVERY_S = 600.0
REQUEST_S = 30 * 86400.0  # how long a request id or idempotency key is known
REQUESTS_OF_USER = 10_000  # known of a user at most
PURGE_REQUESTS = 20_000  # per pass and user
SEALED = Wait(
    reason=Reason.HELD_ADMIN,
    detail="held: its environment is sealed with a key that the controller does not have. An admin can bring back a copy of the "
    "key file and restart the controller (see hpcsched seal); or cancel the job and submit it again",
)
ENDED_JOBS = 10_000  # most in memory, of any age; the database keeps all

RETRY_S = 1.0  # after a failed commit
REFUSALS, REFUSALS_S = 20, 60.0  # refused requests of an account that are recorded each, in this time
PLAN_RETRY_S, PLAN_RETRY_MOST_S = 1.0, 60.0  # after a failed plan

Work = Callable[[Transaction], Any]
Done = Callable[[Any], None]


class _Item(NamedTuple):
    """An item of work for a tick."""

    work: Work
    done: Done
    keep: bool
    source: str


class _Asked:
    """An item in its tick: its result, and the highest ids that were assigned before it."""

    __slots__ = ("done", "ids", "keep", "result", "source", "work")

    def __init__(self, work: Work, done: Done, keep: bool, source: str) -> None:
        self.work = work
        self.done = done
        self.keep = keep
        self.source = source
        self.ids: tuple[int, int] | None = None  # None: not done yet
        self.result: Any = None


class _NotStarted(NamedTuple):
    """Why a job's start failed, and until when the job is held back."""

    until_s: float
    why: str


class _Turn(NamedTuple):
    """The results of a tick that are acted on after its commit."""

    clock_mark: ClockMark
    proof_in_s: float | None
    many: bool
    due: list[Trigger]


class Ports(Protocol):
    """What the controller needs from outside."""

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        """Send to the node's agent if it is connected; otherwise do nothing.

        Effects are repeated when the node connects.
        """

    def wake(self, after_s: float) -> None:
        """Ensure that `tick` is called within `after_s` seconds."""

    def nonce(self) -> str:
        """Return 128 random bits in hex."""

    def monotonic_s(self) -> float:
        """Return a monotonic time. It measures planning time and how long a node is silent."""

    def processor_s(self) -> float:
        """Return the processor time of this process.

        It measures how much planning takes from other work.
        """

    def run_trigger(self, trigger: Trigger) -> None:
        """Run the program of a trigger as the user who set it."""

    def switch_power(self, node: NodeName) -> None:
        """Switch the node off or on, as its state says, unless that is under way."""

    def boot_clock(self) -> tuple[str, float]:
        """Return the machine's boot id and the time since boot, including sleep.

        The boot id is "" if it is not known.
        """


class StepListener(Protocol):
    """The step service. It is told when jobs start, begin to end, or end, and of step reports.

    It ensures that step reports are acknowledged.
    """

    def job_running(self, job: Job) -> None: ...

    def job_ending(self, job: Job) -> None: ...

    def job_ended(self, job_id: JobId) -> None: ...

    def step_reported(self, node: NodeName, report: protocol.Report) -> None: ...

    def act_on_step(self, job: Job, number: int, signum: int | None, by: str) -> bool: ...

    def signal_steps(self, job: Job, signum: int) -> None: ...

    def has_steps(self, job: Job) -> bool: ...


class LaunchGate(Protocol):
    """What must happen on the head before an attempt is launched, and after it has ended."""

    def may_launch(self, job: Job) -> bool: ...

    def changed(self, job: Job) -> None: ...

    @property
    def waits(self) -> list[str]: ...


class Controller:
    """The cluster state, and the work that each tick does on it."""

    def __init__(self, cluster: ClusterState, store: Store, ports: Ports, policy: Policy) -> None:
        self.cluster = cluster
        self.store = store
        self.policy = policy
        self.listener: StepListener | None = None
        self.gate: LaunchGate | None = None
        self.service_loads = services.ServiceLoads()
        self.on_commit: list[Callable[[WriteBatch], None]] = []  # called with what is on disk
        self.last_plan: Plan | None = None
        # From the last plan; recomputed after a restart.
        self._promises: Mapping[JobId, Promise] = {}
        self._ports = ports
        self._views = SnapshotCache()
        # Changed jobs: their views are built before the next plan.
        self._unprepared: dict[JobId, None] = {}
        self._usage_ledger = UsageLedgerCache(cluster)
        self._memory = memory_of(store, cluster, policy, self._views)
        self.metrics = ControllerMetrics(cluster)
        self.training = Trainings(cluster, self._keep)
        self.energy = EnergyLedger(cluster, self._keep, store.energy_marks())
        self.metrics.listeners += [self.energy.sampled, GpuLedger(cluster, self._keep).sampled]
        # (node, incarnation, job) -> the last attempt and stay there that is being ended
        self.orphans: dict[tuple[NodeName, str, int], tuple[int, int]] = {}
        self._log_nodes: set[NodeName] = set()  # whose agents know LogAs
        self._unreachable = UnreachableNodes(ports.monotonic_s)
        self._power = PowerKeeper()
        self._clock_mark = mark_of(store.clock())
        self._asked: dict[JobId, set[str]] = {}  # claims that nodes were asked for
        # Allocations that got --signal, and for which end time.
        self._warned: dict[JobId, float] = {}
        self._inbox: list[_Item] = []
        self._unwritable = ""  # why the last commit failed
        self._refusals: list[AuditEntry] = []  # for the audit log, not yet on disk
        self._refusals_recorded = 0  # how many of these are in the present transaction
        self._refused: dict[int, tuple[int, float]] = {}  # by uid: refusals, and since when they are counted
        self._plan_wanted = True
        self._planning = Planning(ports.monotonic_s)
        self._pace = Pace(ports.monotonic_s, ports.processor_s)
        self._waits = Waits()
        self._plan_failures = 0  # consecutive
        self._plan_again_s = 0.0  # when to plan again, monotonic
        self._not_started: dict[JobId, _NotStarted] = {}
        self._timer_at_s: float | None = None  # the next begin time or time limit
        self._next_purge_s = 0.0
        self._next_request_purge_s = 0.0
        # New jobs that the memory has not read yet, and when they changed.
        self._unnoted: list[tuple[Job, float]] = []
        self._unread: set[JobId] = set()  # jobs whose scripts could not be read from disk
        self._unreadable = ""  # why they could not be read
        self._unknown_deleted = False  # unused scripts from before this start are deleted

    # ----- incoming

    def ask(self, work: Work, done: Done, *, keep: bool = False, source: str = CONTROLLER.source) -> None:
        """Queue `work` for the next tick; `done` gets its result or error once it is on disk.

        If the commit fails, `done` gets the error. With `keep`, the work is retried until it
        succeeds; use it for work that a client would not request again. `source`: on whose word
        it is done, for the audit log, if it is not a request.
        """
        self._inbox.append(_Item(work, done, keep, source))
        self._ports.wake(0.0)

    def _keep(self, work: Work) -> None:
        """Do work of our own in the next tick, again until it succeeds."""
        self.ask(work, _log_failure, keep=True)

    def note_refusal(self, entry: AuditEntry) -> None:
        """Add a refused request to the audit log, in the next commit.

        Of an account that is refused often, only `REFUSALS` are recorded each in `REFUSALS_S`; the
        next one after that time says how many were left out.
        """
        count, since_s = self._refused.get(entry.uid, (0, entry.at_s))
        if not since_s <= entry.at_s < since_s + REFUSALS_S:
            left_out, count, since_s = count - REFUSALS, 0, entry.at_s
            if left_out > 0:
                entry = dataclasses.replace(entry, after=f'{{"left_out":{left_out}}}')
        self._refused[entry.uid] = (count + 1, since_s)
        if count < REFUSALS:
            self._refusals.append(entry)
            self._ports.wake(0.0)

    def node_up(self, node: NodeName, welcome: protocol.Welcome, now_s: float) -> str:
        """Record the agent's welcome and inventory; return why the agent is refused, or ""."""
        if why := edits.why_refused(self.cluster, node, welcome):
            return why
        self.cluster.spools[node] = edits.spool_of(welcome).id
        self.metrics.connected(node, samples=welcome.facts.get("samples") is True)
        (self._log_nodes.add if welcome.facts.get("log_formats") is True else self._log_nodes.discard)(node)
        self._unreachable.connected(node)
        self.ask(
            lambda tx: self._on_welcome(tx, node, welcome),
            lambda answer: self._node_is_up(node, answer),
            keep=True,
            source=f"node {node}",
        )
        return ""

    def disconnected(self, node: NodeName) -> None:
        """Record that the node is not connected: nothing is launched there until it is."""
        self.cluster.spools.pop(node, None)
        self._unreachable.disconnected(node)

    def node_redialled(self, node: NodeName, why: str) -> None:
        """Record that the controller closed the connection to the node and is reconnecting."""
        self.disconnected(node)

        def work(tx: Transaction) -> None:
            if tx.cluster.nodes[node].link is Link.UP:
                tx.record_node(NodeDisconnected(node=node, at_s=tx.now_s, why=why))

        self.ask(work, _log_failure, keep=True)

    def node_down(self, node: NodeName, why: str) -> None:
        """Record that the node does not answer.

        Its jobs keep their state, because silence does not prove that they ended.
        """
        self.disconnected(node)

        def work(tx: Transaction) -> None:
            known = tx.cluster.nodes[node]
            if known.link is not Link.DOWN or known.link_why != why:
                tx.record_node(NodeDown(node=node, at_s=tx.now_s, why=why))
                note_drop(tx, node)
            for job in tx.cluster.jobs_on(node):
                miss_node(tx, job, node)

        self.ask(work, _log_failure, keep=True)

    def node_says(self, node: NodeName, message: Any) -> None:
        """Queue a node's report for the next tick."""
        source = f"node {node}"
        match message:
            case protocol.Report():
                self.ask(
                    lambda tx: self._on_report(tx, node, message),
                    lambda answer: self._answer(node, answer),
                    keep=True,
                    source=source,
                )
            case protocol.Condition():
                self.ask(lambda tx: note_condition(tx, node, message.why), _log_failure, keep=True, source=source)
            case protocol.ScriptFailed():
                self.ask(
                    lambda tx: messages.on_script_failure(tx, node, message),
                    lambda result: self._answer(node, result or messages.Answer(acks=[message.seq])),
                    keep=True,
                    source=source,
                )
            case protocol.JobGone():
                self.ask(lambda tx: self._on_job_gone(tx, node, message), _log_failure, keep=True, source=source)
                ended = self.orphans.pop((node, message.incarnation, message.job_id), None)
                if orphans.forget(self.cluster, node, ended=message) or ended is not None:
                    self.replan()
            case _:
                raise ProtocolError(f"cannot take {type(message).__name__} from node {node}")

    def _on_report(
        self, tx: Transaction, node: NodeName, report: protocol.Report, answer: messages.Answer | None = None
    ) -> messages.Answer:
        answer = answer or messages.Answer()
        token = messages.read_token(report, node)
        waiting = len(tx.cluster.undecided_launches)
        if token.incarnation != tx.cluster.incarnation and orphans.take(tx, node, token, report, answer):
            return answer
        self._plan_wanted |= len(tx.cluster.undecided_launches) < waiting
        if token.step == BATCH_STEP:
            messages.on_batch_report(tx, node, token, report, answer)
        elif token.incarnation != tx.cluster.incarnation and not orphans.is_adopted(tx.cluster, token):
            messages.end_orphan(token, report, answer)
        elif token.step == ALLOC_STEP:
            messages.on_claim_report(tx, node, token, report, answer)
        else:
            answer.steps.append(report)
        # The plan of this tick must already know it: a job that is being ended must not start
        # elsewhere.
        self.orphans |= {(node, *key): life for key, life in answer.orphans.items()}
        return answer

    def end_orphans(self, ended: dict[NodeName, messages.Answer]) -> None:
        """Tell nodes to end the orphans that an admin wants to end."""
        for node, answer in ended.items():
            ending = {(node, *key): life for key, life in answer.orphans.items()}
            self.cluster.to_kill.update(ending)
            self.orphans |= ending
            self._answer(node, answer)

    def _on_welcome(self, tx: Transaction, node: NodeName, welcome: protocol.Welcome) -> messages.Answer:
        known, spool = tx.cluster.nodes[node], edits.spool_of(welcome)
        rebooted = bool(known.boot_id) and known.boot_id != welcome.boot_id
        tx.record_node(
            NodeUp(
                node=node,
                at_s=tx.now_s,
                boot_id=welcome.boot_id,
                machine_id=str(welcome.facts.get("machine_id", "")),
                spool=spool.id,
                hardware=spool.hardware,
                agent_version=welcome.agent_version,
                root_agent=bool(welcome.facts.get("is_root", False)),
                abilities=abilities_of(welcome.facts.get("abilities")),
            )
        )
        answer = messages.Answer()
        tokens: set[str] = set()
        # The inventory lists the remaining orphans. Messages about ended ones may have been lost
        # with the connection.
        self.orphans = {key: attempt for key, attempt in self.orphans.items() if key[0] != node}
        orphans.forget(tx.cluster, node)
        for item in welcome.inventory:
            report = protocol.read_as(protocol.Report, {"type": "Report", **item})
            tokens.add(report.token)
            self._on_report(tx, node, report, answer)
        # The present condition replaces any earlier refusal.
        note_condition(tx, node, str(welcome.facts.get("fault", "")))
        messages.on_inventory(tx, node, spool.id, rebooted, tokens, set(answer.orphans))
        messages.end_unknown_jobs(tx, node, welcome.facts.get("jobs_with_scripts"), answer)
        self._note_orphans(tx, node)
        start_allocations(tx, node)
        return answer

    def _note_orphans(self, tx: Transaction, node: NodeName) -> None:
        """Record on the node whether it runs launches from before the database was restored."""
        own = tx.cluster.incarnation
        left = any(name == node for name, _ in tx.cluster.undecided_launches)
        left = left or any(name == node and incarnation != own for name, incarnation, _ in self.orphans)
        if tx.cluster.nodes[node].has_orphans is not left:
            tx.record_node((NodeOrphansFound if left else NodeOrphansGone)(node=node, at_s=tx.now_s))

    def _on_job_gone(self, tx: Transaction, node: NodeName, gone: protocol.JobGone) -> None:
        messages.on_job_gone(tx, node, gone)
        self._note_orphans(tx, node)

    # ----- outgoing

    def _node_is_up(self, node: NodeName, answer: Any) -> None:
        self._answer(node, answer)
        if self.metrics.is_sampled(node):
            self._ports.send(node, self.metrics.order())
        if node in self._log_nodes:
            self._ports.send(node, protocol.LogAs(self.cluster.config.log_format))
        for job in self.cluster.jobs_on(node):
            self._perform(job, only=node)
        if self.cluster.nodes[node].power is Power.POWERING_DOWN:
            self._ports.switch_power(node)

    def _answer(self, node: NodeName, answer: Any) -> None:
        if isinstance(answer, Exception):
            log.warning("dropped a report of node %s: %s", node, answer)
            return
        if answer.acks:
            self._ports.send(node, protocol.Ack(seqs=answer.acks))
        for (incarnation, job_id), (attempt, stay) in answer.orphans.items():
            former = f" of incarnation {incarnation}" if incarnation != self.cluster.incarnation else ""
            log.warning("node %s has attempt %d of job %d%s, not ours: ending it", node, attempt, job_id, former)
            grace_s = self.cluster.config.controller.kill_wait_s
            self._ports.send(node, protocol.EndJob(incarnation, job_id, attempt, grace_s, stay=stay))
        for report in answer.steps:
            self._step_reported(node, report)

    def _step_reported(self, node: NodeName, report: protocol.Report) -> None:
        if self.listener is not None:
            self.listener.step_reported(node, report)
        else:
            self._ports.send(node, protocol.Ack(seqs=[report.seq]))

    def send_signals(self, signals: list[SignalJob]) -> None:
        """Send signals to the jobs' processes on all their nodes."""
        for item in signals:
            if not item.job.spec.has_script:
                if self.listener is not None:
                    self.listener.signal_steps(item.job, item.signum)
                continue
            for message, node in messages.signal_messages(
                item.job, item.signum, batch_only=item.batch_only, full=item.full
            ):
                self._ports.send(node, message)

    def _perform(self, job: Job, only: NodeName | None = None) -> None:
        for effect in effects_of(job):
            if only is not None and effect.node != only:
                continue
            if effect.kind in LAUNCHES and self.cluster.is_former(job):
                continue  # launches of an earlier incarnation are not sent
            if effect.kind in LAUNCHES and self.cluster.nodes[effect.node].power is not Power.ON:
                continue  # its `NodeUp` brings us here again
            if job.state is JobState.CONFIGURING and not self._may_launch(job):
                continue
            if effect.kind is EffectKind.CLAIM and not self._is_first(effect) and only is None:
                continue  # already asked on this connection; each claimed part brings us here again
            try:
                message, blob = messages.message_for(effect, self.cluster, self._script_of)
                self._ports.send(effect.node, message, blob)
            except InvariantError:
                raise
            except UnavailableError as error:
                if str(error) != self._unreadable:
                    log.error("cannot start job %s: %s", job.display_id, error)
                self._unreadable = str(error)
                self._unread.add(job.id)
                self._ports.wake(RETRY_S)
            except Exception as error:
                self._not_sent(effect, error)

    def _may_launch(self, job: Job) -> bool:
        return self.gate is None or self.gate.may_launch(job)

    def launch_again(self, job: Job) -> None:
        """Perform the effects of a job that had to wait for `gate`."""
        self._perform(job)
        if job.state is JobState.RUNNING and not job.spec.has_script and self.listener is not None:
            self._job_running(job)

    def _job_running(self, job: Job) -> None:
        if self.listener is not None and (job.spec.has_script or self._may_launch(job)):
            self.listener.job_running(job)

    def _not_sent(self, effect: Effect, error: Exception) -> None:
        """Fail a job whose launch message cannot be built: it is too long, or there is a bug."""
        known = isinstance(error, HpcschedError | protocol.WireError)
        why = str(error if known else report_fault(error, f"say what job {effect.job.id} needs"))
        if effect.kind not in LAUNCHES:
            log.error("cannot tell node %s of job %d: %s", effect.node, effect.job.id, why)
            return

        def refuse(tx: Transaction) -> None:
            job = tx.cluster.jobs.get(effect.job.id)
            if job is not None and job.attempt == effect.job.attempt and can(job, LaunchRefused):
                tx.record(LaunchRefused(job_id=job.id, at_s=tx.now_s, node=effect.node, why=why))

        self.ask(refuse, _log_failure, keep=True)

    def _script_of(self, job: Job) -> bytes:
        """Return the text of the job's script.

        Raises: UnavailableError, NotFoundError.
        """
        text = self.store.script(job.spec)
        if text is None:
            raise NotFoundError("its script is not in the database any more; submit it again")
        return text

    def _is_first(self, effect: Effect) -> bool:
        asked = self._asked.setdefault(effect.job.id, set())
        claim = messages.claim_token(effect.job, effect.node)
        is_first = claim not in asked
        asked.add(claim)
        return is_first

    # ----- the tick

    def tick(self, now_s: float) -> None:
        """Apply all incoming work, plan if something changed, commit, answer, and act.

        If an item, a job or the plan fails unexpectedly, only that part is undone, logged and
        answered.

        Raises: InvariantError.
        """
        self._note_new_jobs()
        inbox, self._inbox = [_Asked(*item) for item in self._inbox], []
        tx = Transaction(self.cluster, now_s)
        turn = self._do(tx, inbox)
        wrong = self._commit(tx, inbox)
        if isinstance(wrong, UnavailableError):
            self._put_off(tx, inbox, wrong)
            return
        if wrong is not None:
            tx, turn, inbox = self._commit_pieces(tx, inbox, wrong)
        _guarded("count what changed", partial(self.metrics.committed, tx.batch))
        for listener in self.on_commit:
            _guarded("tell what changed", partial(listener, tx.batch))
        del self._refusals[: self._refusals_recorded]
        if self._unwritable:
            log.info("the database can be written again")
            self._unwritable = ""
        self._clock_mark = turn.clock_mark
        for item in inbox:
            _guarded("answer a request", partial(item.done, item.result))
        self._run_triggers(turn.due, now_s)
        for node in ordered(tx):
            _guarded(f"switch node {node}", partial(self._ports.switch_power, node))
        if self._power.next_s is not None:
            self._ports.wake(max(0.0, self._power.next_s - now_s))
        if turn.many:  # answer a large request before the plan is made
            self._ports.wake(0.0)
        unread, self._unread = self._unread, set()
        self._act_on_changes(tx, later=turn.many)
        _guarded("warn jobs of their end", lambda: self._warn(now_s))
        for job_id in unread - tx.batch.jobs.keys() & self.cluster.active.keys():
            self._perform(self.cluster.jobs[job_id])
        _guarded("forget ended jobs", lambda: self._purge(now_s))
        if turn.proof_in_s is not None:
            self._ports.wake(turn.proof_in_s)
        if self._timer_at_s is not None and self._timer_at_s > now_s:
            self._ports.wake(self._timer_at_s - now_s)  # again: the clock may have been set back

    def _run_triggers(self, due: Sequence[Trigger], now_s: float) -> None:
        for trigger in due:
            _guarded(f"run trigger {trigger.id}", partial(self._ports.run_trigger, trigger))
        times_s = (
            crontabs.next_retry_s(self.cluster, now_s),
            triggers.next_time_s(self.cluster, now_s),
            services.next_service_s(self.cluster, now_s),
        )
        for at_s in times_s:
            if at_s is not None:
                self._ports.wake(at_s - now_s)

    def _do(self, tx: Transaction, inbox: list[_Asked]) -> _Turn:
        """Do the items and the timers' work, each in its own attempt.

        If an item is done again, it gets the same ids.
        """
        known = self._clock_mark
        mark = _guarded("read the clocks", lambda: keep_step(tx, known, *self._ports.boot_clock()))
        self._do_items(tx, inbox)
        if refusals := list(self._refusals):
            _log_failure(tx.attempt("record refusals", lambda one: one.batch.audit.extend(refusals)))
        self._refusals_recorded = len(refusals)
        _guarded("end jobs whose time is over", lambda: end_overdue(tx))
        _guarded("move reservations on", lambda: reservations.keep_up(tx))
        _guarded("keep crontabs up", lambda: crontabs.keep_up(tx))
        if tx.cluster.services:
            _guarded("keep services up", lambda: services.keep_up(tx, self.service_loads))
        rejoin_s = tx.attempt("resume nodes that stay connected", rejoin_steady)
        if isinstance(rejoin_s, float):
            self._ports.wake(max(0.0, rejoin_s - tx.now_s))
        due = _guarded("look at triggers", lambda: triggers.keep_up(tx)) or []
        if tx.batch.reservations or tx.batch.partitions:
            self._planning.forget()  # the plan does not know these changes
        proof_in_s = _guarded("end jobs of silent nodes", lambda: end_silent(tx, self._unreachable))
        timer_rang = self._timer_at_s is not None and self._timer_at_s <= tx.now_s
        self._plan_wanted = (
            self._plan_wanted
            or timer_rang
            or bool(tx.batch.jobs or tx.batch.nodes or tx.batch.reservations or tx.batch.partitions)
        )
        self._unprepared |= dict.fromkeys(tx.batch.jobs)
        many = len(tx.batch.jobs) >= MANY_JOBS
        if not many:
            self._note_ages(tx)
            self._plan_or_put_off(tx)
        self._save_power(tx)
        return _Turn(mark or known, proof_in_s, many, due)

    def _save_power(self, tx: Transaction) -> None:
        """Switch nodes off and on, for the jobs that hold nodes now."""
        if not self._power.is_used(tx):
            self._power.next_s = None
            return
        promises = self._promises.values()
        if tx.attempt("switch nodes off and on", lambda one: self._power.keep_up(one, promises)) is True:
            self.replan()

    def _do_items(self, tx: Transaction, inbox: list[_Asked]) -> None:
        """Do the items; leave those for the next tick that come after many changes."""
        for i, item in enumerate(inbox):
            if len(tx.batch.jobs) >= MANY_JOBS and item.ids is None:
                self._inbox = [
                    _Item(later.work, later.done, later.keep, later.source) for later in inbox[i:]
                ] + self._inbox
                self._ports.wake(0.0)
                del inbox[i:]
                break
            ids = (self.cluster.last_job_id, self.cluster.last_spec_id)
            if item.ids is None:
                item.ids = ids
            elif isinstance(item.result, Exception):
                continue  # failed the first time and was undone
            else:
                self.cluster.last_job_id, self.cluster.last_spec_id = map(max, ids, item.ids)
            item.result = tx.attempt("do what was asked", item.work, item.source)

    def _commit(self, tx: Transaction, inbox: list[_Asked]) -> Exception | None:
        """Commit the changes of the items and the plan; return the error, or None on success."""
        began_s = self._ports.monotonic_s()
        try:
            if tx.batch:
                self.store.commit(tx.batch)
                self.metrics.commit.observe(self._ports.monotonic_s() - began_s)
        except InvariantError:
            raise
        except Exception as error:
            return error
        return None

    def _commit_pieces(
        self, tx: Transaction, inbox: list[_Asked], wrong: Exception
    ) -> tuple[Transaction, _Turn, list[_Asked]]:
        """Do the tick again, and commit each piece by itself: some part can never be written.

        Return the new transaction, its results, and the items to answer.
        """
        log.warning("cannot commit a tick as a whole (%.300r): each piece is committed by itself", wrong)
        tx.undo()
        self._planning.forget()
        self._plan_wanted = True
        tx = Transaction(self.cluster, tx.now_s, commit=self.store.commit)
        turn = self._do(tx, inbox)
        again = [item for item in inbox if item.keep and isinstance(item.result, UnavailableError)]
        self._inbox = [_Item(item.work, item.done, True, item.source) for item in again] + self._inbox
        self._ports.wake(RETRY_S)
        return tx, turn, [item for item in inbox if item not in again]

    def _put_off(self, tx: Transaction, inbox: list[_Asked], error: UnavailableError) -> None:
        """Undo the tick because the store is not writable; retry items with `keep` later."""
        if str(error) != self._unwritable:
            log.error("%s", error)
        self._unwritable = str(error)
        tx.undo()
        self._planning.forget()  # its starts were undone
        self._plan_wanted = True
        self._inbox = [_Item(item.work, item.done, True, item.source) for item in inbox if item.keep] + self._inbox
        self._ports.wake(RETRY_S)
        for item in inbox:
            if not item.keep:
                _guarded("answer a request", partial(item.done, error))

    def _act_on_changes(self, tx: Transaction, *, later: bool) -> None:
        """Act on the changed jobs. With `later`, the memory reads new jobs in the next tick."""
        changed = [self.cluster.jobs.get(job.id, job) for job in tx.batch.jobs.values()]
        if later:
            new = {job.id: job for job in changed if _is_new(job)}
            self._unnoted = [(job, tx.now_s) for job in new.values()]
            changed = [job for job in changed if job.id not in new]
        for job in changed:
            _guarded(f"act on the change of job {job.id}", partial(self._after, job, tx.now_s))

    def _note_new_jobs(self) -> None:
        unnoted, self._unnoted = self._unnoted, []
        for job, at_s in unnoted:
            _guarded(f"note job {job.id}", partial(self._memory.note, job, at_s))

    def _after(self, job: Job, now_s: float) -> None:
        """Run the effects of a changed job, and tell its listeners."""
        self._memory.note(job, now_s)
        if _is_new(job):
            return  # no node or listener knows it yet
        self.training.changed(job)
        if job.state is not JobState.CONFIGURING:
            self._asked.pop(job.id, None)
        self._perform(job)
        if self.gate is not None:
            self.gate.changed(job)
        if self.listener is not None:
            if job.state is JobState.RUNNING:
                self._job_running(job)
            elif job.state is JobState.COMPLETING:
                self.listener.job_ending(job)
            elif job.state not in ACTIVE:
                self.listener.job_ended(job.id)

    def _warn(self, now_s: float) -> None:
        """Send the --signal signal to the steps of allocations that end soon.

        It is sent once, and once more after a restart.
        """
        due = {
            job.id: at_s for job in self.cluster.active_jobs() if (at_s := warn_at_s(job)) is not None and at_s <= now_s
        }
        for job_id in [job_id for job_id, at_s in due.items() if self._warned.get(job_id) != at_s]:
            wanted = self.cluster.jobs[job_id].spec.signal
            if self.listener is not None and wanted is not None:
                self.listener.signal_steps(self.cluster.jobs[job_id], wanted.signum)
        self._warned = due

    def _plan_or_put_off(self, tx: Transaction) -> None:
        """Plan if it is time; after a failed plan, wait for a pause that grows with each failure."""
        now_s = self._ports.monotonic_s()
        if self._plan_failures and now_s < self._plan_again_s:
            self._ports.wake(self._plan_again_s - now_s)
            return
        try:
            whole = self._plan_if_due(tx)
        except InvariantError:
            raise
        except Exception as error:
            report_fault(error, "plan")
            pause_s = min(PLAN_RETRY_S * 2 ** min(self._plan_failures, 10), PLAN_RETRY_MOST_S)
            self._plan_failures += 1
            self._plan_again_s = now_s + pause_s
            self._planning.forget()
            self._plan_wanted = True
            self._ports.wake(pause_s)
        else:
            if whole:
                self._plan_failures = 0

    def _plan_if_due(self, tx: Transaction) -> bool:
        """Plan for one turn if it is time; return whether a plan was finished."""
        wait_s = self._pace.begin_turn()
        if wait_s > 0.0:
            if self._plan_wanted or self._planning.under_way:
                self._ports.wake(wait_s)
            return False
        if self._plan_wanted and self._planning.may_begin and not self._begin_plan(tx.now_s):
            self._ports.wake(self._pace.end_turn())
            return False
        if not self._planning.under_way:
            return False
        held_back = self._held_back(tx.now_s)
        began_s = self._ports.monotonic_s()
        done = self._planning.go_on(self.cluster.jobs, self.cluster.nodes)
        self.metrics.planned(self._ports.monotonic_s() - began_s)
        for start in done.starts:
            if start.job_id not in held_back and self._are_connected(start.shares):
                self._try_to_start(tx, start)
        if done.plan is None:
            self._plan_wanted = self._plan_wanted or done.dropped > 0
        else:
            self._plan_wanted = self._plan_wanted or done.stale
            self._take_plan(tx, done, done.plan)
            self.cluster.waits |= held_back
            self._wake_for_timers(tx.now_s)
        pause_s = self._pace.end_turn(whole=done.plan is not None)
        if self._plan_wanted or self._planning.under_way:
            self._ports.wake(pause_s)
        return done.plan is not None

    def _take_plan(self, tx: Transaction, done: Slice, plan: Plan) -> None:
        """Record what a finished plan says of the jobs that do not start."""
        self.last_plan = plan
        self._promises = self._still_promised(plan)
        self.cluster.priorities = self._priorities(plan)
        if _must(tx.attempt("end jobs that can never start", lambda one: self._waits.note(one, done))):
            self.replan()  # other jobs may have waited for it to end
        self._note_ages(tx)
        _must(tx.attempt("resize jobs", lambda one: carry_out_resizes(one, plan)))
        if _must(tx.attempt("make room for jobs", lambda one: carry_out(one, plan))):
            self.replan()

    def _try_to_start(self, tx: Transaction, start: Start) -> None:
        """Start the job; if that fails, hold it back for a while so that others get its nodes."""
        job = self.cluster.jobs[start.job_id]
        result = tx.attempt(f"start job {job.id}", lambda one: self._start(one, job, start))
        if isinstance(result, Exception):
            self._not_started[job.id] = _NotStarted(self._ports.monotonic_s() + PLAN_RETRY_MOST_S, str(result))
            self._planning.forget()
            self._plan_wanted = True
            self._ports.wake(0.0)

    def _held_back(self, now_s: float) -> dict[JobId, Wait]:
        """Return the waiting jobs that must not start now, and why."""
        mono_s = self._ports.monotonic_s()
        self._not_started = {job_id: one for job_id, one in self._not_started.items() if one.until_s > mono_s}
        failed = {
            job_id: Wait(reason=Reason.LAUNCH_FAILED, detail=one.why)
            for job_id, one in self._not_started.items()
            if job_id in self.cluster.pending
        }
        sealed = dict.fromkeys(self.cluster.sealed_jobs(), SEALED)
        return failed | orphans.held_back(self.cluster, self.orphans) | sealed | self._unsigned(now_s)

    def _unsigned(self, now_s: float) -> dict[JobId, Wait]:
        """Return the waiting jobs that nodes would refuse for their signatures."""
        if not self.cluster.config.controller.sign_jobs:
            return {}
        jobs, until_s = self.cluster.jobs, now_s + SIGNATURE_LEFT_S
        return {
            job_id: _sign_again(jobs[job_id]) for job_id in self.cluster.pending if _is_unsigned(jobs[job_id], until_s)
        }

    def _are_connected(self, shares: Iterable[Share]) -> bool:
        """Return whether all these nodes are connected.

        Only then is it known which spools a launch would use. Those that are off have their last one.
        """
        cluster = self.cluster
        connected = all(share.node in cluster.spools or cluster.nodes[share.node].power.is_off for share in shares)
        self._plan_wanted = self._plan_wanted or not connected
        return connected

    def _note_ages(self, tx: Transaction) -> None:
        if self._waits.has_ages and tx.attempt("note since when jobs wait", self._waits.note_ages) is True:
            self._ports.wake(0.0)

    def _still_promised(self, made: Plan) -> dict[JobId, Promise]:
        """Return a whole plan's promises, and those to jobs whose starts were dropped.

        These jobs still wait.
        """
        dropped = {start.job_id for start in made.starts} & self._promises.keys() & self.cluster.pending.keys()
        return {**made.promises, **{job_id: self._promises[job_id] for job_id in dropped}}

    def _priorities(self, plan: Plan) -> dict[JobId, int]:
        """Return the priorities of waiting jobs, and of running jobs at the time they started."""
        before = self.cluster.priorities
        return {job_id: before[job_id] for job_id in self.cluster.active if job_id in before} | dict(plan.priorities)

    def _prepare_views(self) -> bool:
        """Build views of changed jobs while the turn has time; return whether all are built."""
        while self._unprepared:
            if self._pace.turn_s() >= SLICE_S:
                return False
            job_id, _ = self._unprepared.popitem()
            if job_id in self.cluster.pending:
                self._views.prepare(self.cluster.jobs[job_id], self.cluster.partitions)
        return True

    def _begin_plan(self, now_s: float) -> bool:
        """Begin a plan; return whether this turn has time left to continue it."""
        if not self._prepare_views():
            return False
        self._plan_wanted = False
        cluster, held_back = self.cluster, self._held_back(now_s)
        jobs = cluster.jobs_to_plan()
        snapshot = self.snapshot(jobs, now_s, self._views, held_back)
        planned = {job.id: job for job in jobs if job.id not in held_back}
        self._planning.begin(snapshot, self.policy, planned, cluster.nodes)
        return self._pace.turn_s() < SLICE_S

    def _start(self, tx: Transaction, job: Job, start: Start) -> None:
        shares = start.shares
        token = LaunchToken(
            incarnation=self.cluster.incarnation,
            job_id=job.id,
            attempt=job.attempt,
            step=BATCH_STEP,
            node=shares[0].node,
            nonce=self._ports.nonce(),
        )
        settings = self.cluster.config.controller
        job = tx.record(
            Allocated(
                job_id=job.id,
                at_s=tx.now_s,
                token=str(token),
                epoch=self.cluster.epoch,
                shares=shares,
                lease_s=settings.lease_s + settings.kill_wait_s if job.spec.lease == protocol.KILL else None,
                partition=start.partition if start.partition != job.partition else None,
                time_limit_s=start.time_limit_s,
            )
        )
        if not job.spec.has_script and not nodes_awaited(tx.cluster, job):
            tx.record(Started(job_id=job.id, at_s=tx.now_s))

    def _wake_for_timers(self, now_s: float) -> None:
        """Request a tick at the next time at which a plan is due."""
        self._timer_at_s = next_time_s(self.cluster, self.policy, self._promises.values(), now_s)
        if self._timer_at_s is not None:
            self._ports.wake(self._timer_at_s - now_s)

    def snapshot(
        self,
        jobs: Iterable[Job],
        now_s: float,
        cache: SnapshotCache | None = None,
        held_back: Container[JobId] = frozenset(),
    ) -> Snapshot:
        """Return the snapshot of the cluster with these `jobs` for a plan.

        Those `held_back` are not planned, but others may depend on them.
        """
        cluster = self.cluster
        ledger = self._usage_ledger.ledger(now_s, fairshare=bool(self.policy.weight_fairshare))
        return snapshot_of(
            jobs,
            cluster.open_nodes(),
            cluster.partitions.values(),
            now_s,
            cache,
            ledger,
            cluster.reservations.values(),
            self._promises,
            self._memory.experience(now_s),
            held_back,
            cluster.config.cost,
            cluster.config.circuits,
        )

    def rehearsal(self, identity: Identity, spec: JobSpec, now_s: float) -> Callable[[], dict[str, Any]]:
        """Return a function that computes when the job would start if it were submitted now.

        The function can run in any thread.

        Raises: RequestError.
        """
        authorize(identity, Action.SUBMIT)
        check_account(self.cluster, identity)
        spec = settle(self.cluster, identity.user, spec)
        check_share_of_queue(self.cluster, identity, spec)
        partitions, limit_s = place_of(self.cluster, identity, spec, now_s)
        submitted = Submitted(
            job_id=JobId(self.cluster.last_job_id + 1),
            at_s=now_s,
            spec_id=0,
            uid=identity.uid,
            user=identity.user,
            partition=",".join(partition.name for partition in partitions),
            time_limit_s=limit_s,
        )
        job = submitted_jobs(submitted, spec)[0]
        snapshot = self.snapshot([*self.cluster.jobs_to_plan(), job], now_s)
        return partial(first_start, snapshot, self.policy, job.id, identity)

    def reconfigured(self) -> None:
        """Discard what was derived from the old configuration, and replan."""
        self._views = SnapshotCache()
        self._usage_ledger.forget()
        self._planning.forget()
        self._memory.rehearse(self.cluster, self.policy, self._views)
        for node in filter(self.metrics.is_sampled, self.cluster.nodes):
            self._ports.send(node, self.metrics.order())
        for node in filter(self._log_nodes.__contains__, self.cluster.nodes):
            self._ports.send(node, protocol.LogAs(self.cluster.config.log_format))
        self.replan()

    def replan(self) -> None:
        """Plan at the next tick even if no job changed.

        For example, a node or the configuration changed, or a time has come.
        """
        self._plan_wanted = True
        self._ports.wake(0.0)

    def _purge(self, now_s: float) -> None:
        if _is_due(self._next_purge_s, PURGE_EVERY_S, now_s):
            self._next_purge_s = now_s + PURGE_EVERY_S
            self.cluster.forget_ended(now_s - self.cluster.config.controller.min_job_age_s)
            self.cluster.forget_oldest(ENDED_JOBS)
            self._purge_scripts(now_s, whole=True)
        if _is_due(self._next_request_purge_s, PURGE_REQUESTS_EVERY_S, now_s):
            self._next_request_purge_s = now_s + PURGE_REQUESTS_EVERY_S
            self.store.forget_requests(now_s - REQUEST_S, REQUESTS_OF_USER, PURGE_REQUESTS)
            self._purge_environments()
        elif len(self.cluster.ended) > ENDED_JOBS + ENDED_JOBS // 10:
            self.cluster.forget_oldest(ENDED_JOBS)
        elif self.cluster.scripts.let_go(self.cluster.config.scheduler.max_scripts_per_user << 20):
            self._purge_scripts(now_s)

    def _purge_environments(self) -> None:
        """Delete the environments of jobs that left memory: they cannot be requeued."""
        try:
            self.store.drop_environments({job.spec_id for job in self.cluster.jobs.values()})
        except UnavailableError as error:
            log.error("%s", error)  # the next purge tries again

    def _purge_scripts(self, now_s: float, *, whole: bool = False) -> None:
        """Delete some scripts that no job uses; with `whole`, also those from before this start."""
        scripts = self.cluster.scripts
        unused = scripts.take_unused()
        try:
            if whole and not self._unknown_deleted:
                unused = scripts.unknown(self.store.script_hashes())
                self._unknown_deleted = True
            if unused:
                self.store.delete_scripts(unused[:PURGE_SCRIPTS])
        except UnavailableError:  # the next commit reports it
            scripts.put_back(unused)
        else:
            scripts.put_back(unused[PURGE_SCRIPTS:])
            if unused[PURGE_SCRIPTS:]:
                self._next_purge_s = now_s + RETRY_S
                self._ports.wake(RETRY_S)


def _is_due(at_s: float, every_s: float, now_s: float) -> bool:
    """Return whether the time has come, or the clock was set back to before `at_s` was set."""
    return not at_s - every_s <= now_s < at_s


def _is_unsigned(job: Job, until_s: float) -> bool:
    """Return whether a node would refuse the next attempt at `until_s`."""
    spec = job.spec
    if not spec.signed:
        return False
    return spec.signed_until_s <= until_s or (job.attempt > 0 and job.attempt >= read_signature(spec.signed).attempts)


def _sign_again(job: Job) -> Wait:
    number = job.id if job.array_job_id is None else job.array_job_id
    return Wait(
        reason=Reason.HELD_USER,
        detail="held: the signature that nodes demand has expired, or allows no further attempt. Its user can sign it again on "
        f"the head: hctl sign {number}",
    )


def _is_new(job: Job) -> bool:
    return job.state is JobState.PENDING and not job.attempt


def _guarded(what: str, work: Callable[[], Any]) -> Any:
    """Do `work` and return its result, or None if it fails. The failure is logged."""
    try:
        return work()
    except InvariantError:
        raise
    except Exception as error:
        report_fault(error, what)
        return None


def _must(result: Any) -> Any:
    """Return the result of an attempt, or raise its error."""
    if isinstance(result, Exception):
        raise result
    return result


def _log_failure(result: Any) -> None:
    if isinstance(result, Exception):
        log.error("%s", result)
