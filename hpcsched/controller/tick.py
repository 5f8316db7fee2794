"""The tick: everything that came in since the last one, in one transaction; then the plan; commit; answers; effects.

`Controller` is synchronous and has no I/O of its own but the store's commit: what it needs of the world outside are the
`Ports`, which a simulation replaces. The clock is read once per tick by whoever calls it.

Order, and why: commit, then answer, then act. A crash after the commit loses only effects, which are derived from
state and asked for again at the next start; a crash before it loses only what nobody was told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from hpcnode import protocol
from hpcsched.controller import messages, reports, reserving, strays
from hpcsched.controller.books import Books
from hpcsched.controller.clockstep import keep_step, mark_of
from hpcsched.controller.memory import memory_of
from hpcsched.controller.overdue import end_overdue
from hpcsched.controller.pace import Pace
from hpcsched.controller.planning import SLICE_S, Planning
from hpcsched.controller.preemption import carry_out
from hpcsched.controller.requests import SignalJob, miss_node, note_condition
from hpcsched.controller.resizing import carry_out_resizes
from hpcsched.controller.silence import Silences, end_silent
from hpcsched.controller.timers import next_time_s
from hpcsched.controller.training import Trainings
from hpcsched.controller.waits import MANY_JOBS, Waits
from hpcsched.errors import HpcschedError, ProtocolError, UnavailableError
from hpcsched.lifecycle.effects import ClaimPart, StartBatch, effects_of
from hpcsched.lifecycle.events import Allocated, Started
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, JobId, NodeName, Token
from hpcsched.model.job import ACTIVE, Job, JobState
from hpcsched.model.node import Link
from hpcsched.sched.decisions import Plan, Start
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Promise, Snapshot, SnapshotCache, snapshot_of
from hpcsched.store.store import Store
from hpcsched.store.world import Transaction, World

log = logging.getLogger("hpcsched.controller")

PURGE_EVERY_S = 60.0

RETRY_S = 1.0  # after a commit that failed

Work = Callable[[Transaction], Any]
Done = Callable[[Any], None]


class _Item(NamedTuple):
    """Something to be done in a tick."""

    work: Work
    done: Done
    keep: bool


class Ports(Protocol):
    """What the controller needs of the world."""

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        """Send to the node's agent if it is connected; else do nothing (effects are repeated when it is)."""

    def wake(self, after_s: float) -> None:
        """See to it that `tick` is called in `after_s` seconds at the latest."""

    def nonce(self) -> str:
        """Return 128 random bits in hex."""

    def monotonic_s(self) -> float:
        """Return a clock that knows no steps: for how long planning takes, and for how long a node is silent."""

    def boot_clock(self) -> tuple[str, float]:
        """Return the name of this boot of the machine, and for how long it has lasted, sleep included; "": not known."""


class Listener(Protocol):
    """Who minds the steps (the step service): told of jobs that began, are being ended, or ended, and of reports on steps.

    It sees to it that those are acknowledged.
    """

    def job_running(self, job: Job) -> None: ...

    def job_ending(self, job: Job) -> None: ...

    def job_ended(self, job_id: JobId) -> None: ...

    def step_reported(self, node: NodeName, report: protocol.Report) -> None: ...

    def act_on_step(self, job: Job, number: int, signum: int | None, by: str) -> bool: ...


class Controller:
    """The ledger and what happens to it."""

    def __init__(self, world: World, store: Store, ports: Ports, policy: Policy) -> None:
        self.world = world
        self.store = store
        self.policy = policy
        self.listener: Listener | None = None
        self.last_plan: Plan | None = None
        self._promises: Mapping[JobId, Promise] = {}  # by the last plan; after a restart they are made anew
        self._ports = ports
        self._views = SnapshotCache()
        self._books = Books(world)
        self._memory = memory_of(store, world, policy, self._views)
        self.training = Trainings(world, lambda work: self.ask(work, _log_failure, keep=True))
        # (node, incarnation, job) -> the last attempt, and stay, there that is being ended
        self.strays: dict[tuple[NodeName, str, int], tuple[int, int]] = {}
        self._silences = Silences(ports.monotonic_s)
        self._clock_mark = mark_of(store.clock())
        self._asked: dict[JobId, set[str]] = {}  # claims that nodes were asked for
        self._inbox: list[_Item] = []
        self._unwritable = ""  # why the last commit failed
        self._plan_wanted = True
        self._planning = Planning(ports.monotonic_s)
        self._pace = Pace(ports.monotonic_s)
        self._waits = Waits()
        self._timer_at_s: float | None = None  # when a begin time or a time limit comes round
        self._next_purge_s = 0.0

    # ----- what comes in

    def ask(self, work: Work, done: Done, *, keep: bool = False) -> None:
        """Have `work` done in the next tick; `done` gets its result, or its error, once it is on disk.

        If that cannot be, `done` is told so; with `keep`, for what nobody would ask again, it is tried until it can.
        """
        self._inbox.append(_Item(work, done, keep))
        self._ports.wake(0.0)

    def node_up(self, node: NodeName, welcome: protocol.Welcome, now_s: float) -> None:
        """Take note that the node's agent answers, and of all that it knows."""
        self._silences.connected(node)
        self.ask(
            lambda tx: self._on_welcome(tx, node, welcome), lambda answer: self._node_is_up(node, answer), keep=True
        )

    def node_down(self, node: NodeName, why: str) -> None:
        """Take note that the node does not answer. Its jobs stay as they are: that is no proof of anything yet."""
        self._silences.disconnected(node)

        def work(tx: Transaction) -> None:
            if tx.world.nodes[node].link is not Link.DOWN:
                tx.set_node(node, link=Link.DOWN, link_since_s=tx.now_s, link_why=why)
            elif tx.world.nodes[node].link_why != why:
                tx.set_node(node, link_why=why)
            for job in tx.world.jobs_on(node):
                miss_node(tx, job, node)

        self.ask(work, _log_failure, keep=True)

    def node_says(self, node: NodeName, message: Any) -> None:
        """Take a report from a node."""
        match message:
            case protocol.Report():
                self.ask(
                    lambda tx: self._on_report(tx, node, message), lambda answer: self._answer(node, answer), keep=True
                )
            case protocol.Condition():
                self.ask(lambda tx: note_condition(tx, node, message.why), _log_failure, keep=True)
            case protocol.JobGone():
                self.ask(lambda tx: reports.on_job_gone(tx, node, message), _log_failure, keep=True)
                ended = self.strays.pop((node, message.incarnation, message.job_id), None)
                if strays.forget(self.world, node, gone=message) or ended is not None:
                    self.replan()
            case _:
                raise ProtocolError(f"cannot take {type(message).__name__} from node {node}")

    def _on_report(
        self, tx: Transaction, node: NodeName, report: protocol.Report, answer: reports.Answer | None = None
    ) -> reports.Answer:
        answer = answer or reports.Answer()
        token = reports.read_token(report, node)
        waiting = len(tx.world.kept)
        if token.incarnation != tx.world.incarnation and strays.take(tx.world, node, token, report, answer):
            return answer
        self._plan_wanted |= len(tx.world.kept) < waiting
        if token.step == BATCH_STEP:
            reports.on_batch_report(tx, node, token, report, answer)
        elif token.incarnation != tx.world.incarnation and not strays.is_adopted(tx.world, token):
            reports.end_stray(token, report, answer)
        elif token.step == ALLOC_STEP:
            reports.on_claim_report(tx, node, token, report, answer)
        else:
            answer.steps.append(report)
        # Known before the plan of this very tick: a job that is being ended must not start elsewhere.
        self.strays |= {(node, *key): life for key, life in answer.strays.items()}
        return answer

    def end_strays(self, ended: dict[NodeName, reports.Answer]) -> None:
        """Tell nodes to end what an admin wants ended."""
        for node, answer in ended.items():
            ending = {(node, *key): life for key, life in answer.strays.items()}
            self.world.doomed.update(ending)
            self.strays |= ending
            self._answer(node, answer)

    def _on_welcome(self, tx: Transaction, node: NodeName, welcome: protocol.Welcome) -> reports.Answer:
        known = tx.world.nodes[node]
        rebooted = bool(known.boot_id) and known.boot_id != welcome.boot_id
        tx.set_node(
            node,
            link=Link.UP,
            link_since_s=tx.now_s,
            link_why="",
            boot_id=welcome.boot_id,
            machine_id=str(welcome.facts.get("machine_id", "")),
            agent_version=welcome.agent_version,
            root_agent=bool(welcome.facts.get("is_root", False)),
        )
        answer = reports.Answer()
        tokens: set[str] = set()
        # What is left of them is in the inventory; word of what has gone may have been lost with the last connection.
        self.strays = {key: attempt for key, attempt in self.strays.items() if key[0] != node}
        strays.forget(tx.world, node)
        for item in welcome.inventory:
            report = protocol.from_json({"type": "Report", **item})
            tokens.add(report.token)
            self._on_report(tx, node, report, answer)
        note_condition(tx, node, str(welcome.facts.get("fault", "")))  # whatever it had to refuse once
        reports.on_inventory(tx, node, rebooted, tokens, set(answer.strays))
        return answer

    # ----- what goes out

    def _node_is_up(self, node: NodeName, answer: Any) -> None:
        self._answer(node, answer)
        for job in self.world.jobs_on(node):
            self._perform(job, only=node)

    def _answer(self, node: NodeName, answer: Any) -> None:
        if isinstance(answer, Exception):
            log.warning("dropped a report of node %s: %s", node, answer)
            return
        if answer.acks:
            self._ports.send(node, protocol.Ack(seqs=answer.acks))
        for (incarnation, job_id), (attempt, stay) in answer.strays.items():
            former = f" of incarnation {incarnation}" if incarnation != self.world.incarnation else ""
            log.warning("node %s has attempt %d of job %d%s, not ours: ending it", node, attempt, job_id, former)
            grace_s = self.world.config.controller.kill_wait_s
            self._ports.send(node, protocol.EndJob(incarnation, job_id, attempt, grace_s, stay=stay))
        for report in answer.steps:
            self._step_reported(node, report)

    def _step_reported(self, node: NodeName, report: protocol.Report) -> None:
        if self.listener is not None:
            self.listener.step_reported(node, report)
        else:
            self._ports.send(node, protocol.Ack(seqs=[report.seq]))

    def send_signals(self, signals: list[SignalJob]) -> None:
        """Pass signals on to the jobs' processes, on all their nodes."""
        for item in signals:
            for message, node in messages.signal_messages(item.job, item.signum, item.batch_only, item.steps_too):
                self._ports.send(node, message)

    def _perform(self, job: Job, only: NodeName | None = None) -> None:
        for effect in effects_of(job):
            if only is not None and effect.node != only:
                continue
            if isinstance(effect, StartBatch | ClaimPart) and self.world.is_former(job):
                continue  # nothing of a former incarnation is launched
            if isinstance(effect, ClaimPart) and not self._is_first(effect) and only is None:
                continue  # it was asked on this connection; each part that is claimed brings us here again
            message, blob = messages.message_for(effect, self.world)
            self._ports.send(effect.node, message, blob)

    def _is_first(self, effect: ClaimPart) -> bool:
        asked = self._asked.setdefault(effect.job.id, set())
        claim = messages.claim_token(effect.job, effect.node)
        is_first = claim not in asked
        asked.add(claim)
        return is_first

    # ----- the tick

    def tick(self, now_s: float) -> None:
        """Do all that has come in, plan if something changed, commit, answer, and act."""
        inbox, self._inbox = self._inbox, []
        tx = Transaction(self.world, now_s)
        answers: list[tuple[_Item, Any]] = []
        clock_mark = keep_step(tx, self._clock_mark, *self._ports.boot_clock())
        for item in inbox:
            inner = tx.savepoint()
            try:
                result = item.work(inner)
            except (HpcschedError, protocol.WireError) as error:
                inner.undo()
                result = error
            else:
                tx.merge(inner)
            answers.append((item, result))
        end_overdue(tx)
        reserving.keep_up(tx)
        if tx.batch.reservations:
            self._planning.forget()  # it knows nothing of them
        proof_in_s = end_silent(tx, self._silences)
        timer_rang = self._timer_at_s is not None and self._timer_at_s <= now_s
        self._plan_wanted = (
            self._plan_wanted or timer_rang or bool(tx.batch.jobs or tx.batch.nodes or tx.batch.reservations)
        )
        many = len(tx.batch.jobs) >= MANY_JOBS
        if not many:
            self._note_ages(tx)
            self._plan_if_due(tx)
        if not self._commit(tx, answers):
            return
        self._clock_mark = clock_mark
        for item, result in answers:
            item.done(result)
        if many:  # who asked for so much need not wait for the plan as well: it comes behind the answer
            self._ports.wake(0.0)
        for job in tx.batch.jobs.values():
            self._after(self.world.jobs.get(job.id, job), now_s)
        self._purge(now_s)
        if proof_in_s is not None:
            self._ports.wake(proof_in_s)
        if self._timer_at_s is not None and self._timer_at_s > now_s:
            self._ports.wake(self._timer_at_s - now_s)  # again: the clock may have been set back since

    def _commit(self, tx: Transaction, answers: list[tuple[_Item, Any]]) -> bool:
        if not tx.batch:
            return True
        try:
            self.store.commit(tx.batch)
        except UnavailableError as error:
            if str(error) != self._unwritable:
                log.error("%s", error)
            self._unwritable = str(error)
            tx.undo()
            self._planning.forget()  # what it started has not been
            self._plan_wanted = True
            self._inbox = [item for item, _ in answers if item.keep] + self._inbox
            self._ports.wake(RETRY_S)
            for item, _ in answers:
                if not item.keep:
                    item.done(error)
            return False
        if self._unwritable:
            log.info("the database can be written again")
            self._unwritable = ""
        return True

    def _after(self, job: Job, now_s: float) -> None:
        """Act on a job that has changed."""
        self._memory.note(job, now_s)
        if job.state is JobState.PENDING and not job.attempt:
            return  # nobody has heard of it yet
        self.training.changed(job)
        if job.state is not JobState.CONFIGURING:
            self._asked.pop(job.id, None)
        self._perform(job)
        if self.listener is not None:
            if job.state is JobState.RUNNING:
                self.listener.job_running(job)
            elif job.state is JobState.COMPLETING:
                self.listener.job_ending(job)
            elif job.state not in ACTIVE:
                self.listener.job_ended(job.id)

    def _plan_if_due(self, tx: Transaction) -> None:
        """Plan for a while, if it is time for that."""
        wait_s = self._pace.begin_turn()
        if wait_s > 0.0:
            if self._plan_wanted or self._planning.under_way:
                self._ports.wake(wait_s)
            return
        if self._plan_wanted and self._planning.may_begin:
            self._plan_wanted = False
            self._begin_plan(tx.now_s)
            if self._pace.turn_s() >= SLICE_S:  # enough for this tick
                self._ports.wake(self._pace.end_turn())
                return
        if not self._planning.under_way:
            return
        held_back = strays.held_back(self.world, self.strays)
        done = self._planning.go_on(self.world.jobs, self.world.nodes)
        for start in done.starts:
            if start.job_id not in held_back:
                self._start(tx, self.world.jobs[start.job_id], start)
        if done.plan is None:
            self._plan_wanted = self._plan_wanted or done.dropped > 0
        else:
            self._plan_wanted = self._plan_wanted or done.stale
            self.last_plan = done.plan
            self._promises = self._still_promised(done.plan)
            self.world.priorities = self._priorities(done.plan)
            if self._waits.note(tx, done):
                self.replan()  # others may have waited for its end
            self._note_ages(tx)
            carry_out_resizes(tx, done.plan)
            if carry_out(tx, done.plan):
                self.replan()
            self.world.waits |= held_back
            self._wake_for_timers(tx.now_s)
        pause_s = self._pace.end_turn(whole=done.plan is not None)
        if self._plan_wanted or self._planning.under_way:
            self._ports.wake(pause_s)

    def _note_ages(self, tx: Transaction) -> None:
        if self._waits.note_ages(tx):
            self._ports.wake(0.0)

    def _still_promised(self, made: Plan) -> dict[JobId, Promise]:
        """Return what a whole plan promised, and the promises to those jobs whose starts were dropped: they still wait."""
        dropped = {start.job_id for start in made.starts} & self._promises.keys() & self.world.pending.keys()
        return {**made.promises, **{job_id: self._promises[job_id] for job_id in dropped}}

    def _priorities(self, plan: Plan) -> dict[JobId, int]:
        """Return the priorities of the jobs in line, and those with which the ones that run were started."""
        before = self.world.priorities
        return {job_id: before[job_id] for job_id in self.world.active if job_id in before} | dict(plan.priorities)

    def _begin_plan(self, now_s: float) -> None:
        world, held_back = self.world, strays.held_back(self.world, self.strays)
        jobs = [job for job in world.jobs_to_plan() if job.id not in held_back]
        snapshot = self.snapshot(jobs, now_s, self._views)
        self._planning.begin(snapshot, self.policy, {job.id: job for job in jobs}, world.nodes)

    def _start(self, tx: Transaction, job: Job, start: Start) -> None:
        shares = start.shares
        token = Token(
            incarnation=self.world.incarnation,
            job_id=job.id,
            attempt=job.attempt,
            step=BATCH_STEP,
            node=shares[0].node,
            nonce=self._ports.nonce(),
        )
        settings = self.world.config.controller
        job = tx.record(
            Allocated(
                job_id=job.id,
                at_s=tx.now_s,
                token=str(token),
                epoch=self.world.epoch,
                shares=shares,
                lease_s=settings.lease_s + settings.kill_wait_s if job.spec.lease == protocol.KILL else None,
                partition=start.partition if start.partition != job.partition else None,
                time_limit_s=start.time_limit_s,
            )
        )
        if not job.spec.script:
            tx.record(Started(job_id=job.id, at_s=tx.now_s))

    def _wake_for_timers(self, now_s: float) -> None:
        """Ask for a tick when the next time comes round at which a plan is due."""
        self._timer_at_s = next_time_s(self.world, self.policy, self._promises.values(), now_s)
        if self._timer_at_s is not None:
            self._ports.wake(self._timer_at_s - now_s)

    def snapshot(self, jobs: Iterable[Job], now_s: float, cache: SnapshotCache | None = None) -> Snapshot:
        """Return the world with these `jobs` as a plan sees it."""
        world = self.world
        ledger = self._books.ledger(now_s, fairshare=bool(self.policy.weight_fairshare))
        return snapshot_of(
            jobs,
            world.open_nodes(),
            world.partitions.values(),
            now_s,
            cache,
            ledger,
            world.reservations.values(),
            self._promises,
            self._memory.experience(now_s),
        )

    def reconfigured(self) -> None:
        """Forget what was derived from the old configuration, and plan anew."""
        self._views = SnapshotCache()
        self._books.forget()
        self._planning.forget()
        self._memory.rehearse(self.world, self.policy, self._views)
        self.replan()

    def replan(self) -> None:
        """Plan at the next tick even if no job changed (a node or the configuration did, or a time has come)."""
        self._plan_wanted = True
        self._ports.wake(0.0)

    def _purge(self, now_s: float) -> None:
        if now_s >= self._next_purge_s:
            self._next_purge_s = now_s + PURGE_EVERY_S
            self.world.forget_ended(now_s - self.world.config.controller.min_job_age_s)


def _log_failure(result: Any) -> None:
    if isinstance(result, Exception):
        log.error("%s", result)
