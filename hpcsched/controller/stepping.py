"""Connect the step service to the controller.

Requests for steps, reports on steps, and jobs that begin or end are handled inside a tick's
transaction. Messages that the service sends meanwhile are kept, and sent after the commit. Output,
input, acknowledgements and signals change no row, so they pass at once. The exception is a node
that has just connected: its messages wait until its steps were matched with the inventory.

`Shells` are the jobs that a command on the head (halloc, salloc) holds while it runs. Such a job
has nodes, and runs only the steps that the command starts. It belongs to the stream that requested
it, and ends when the stream closes, also while it waits. With --no-shell it belongs to no stream
once it has its nodes. Nothing of this is stored on disk: after a restart of the controller no
stream claims the job, and the step service releases it. Source: salloc(1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcnode.os import rlimits
from hpcnode.wire import protocol
from hpcsched import paths
from hpcsched.api.identity import identity_of
from hpcsched.auth.authorize import CONTROLLER, Action, Identity, authorize
from hpcsched.controller import preemption
from hpcsched.controller.nodes import messages
from hpcsched.controller.requests import submission
from hpcsched.controller.tick import Controller, Ports
from hpcsched.errors import HpcschedError, InvariantError, ProtocolError, RequestError, report_fault
from hpcsched.lifecycle.events import EndRequested, Submitted
from hpcsched.lifecycle.job import can
from hpcsched.listing.text import start_words
from hpcsched.model.ids import JobId, LaunchToken, NodeName
from hpcsched.model.job import ACTIVE, ExitStatus, Job, JobState
from hpcsched.state.transaction import StepRecord, Transaction
from hpcsched.steps.environment import step_environment
from hpcsched.steps.request import read_allocation
from hpcsched.steps.service import StepPlan, StepPorts, StepService
from hpcsched.steps.step import HEAD, Origin

log = logging.getLogger("hpcsched.stepping")

Send = Callable[[], None]
SHELL_OPTION = "shell"  # marks a StepRequest that asks for a job without a step


class Stepping:
    """The connection between the step service and the controller."""

    def __init__(
        self,
        controller: Controller,
        ports: Ports,
        *,
        clock: Callable[[], float],
        reply_head: Callable[[int, protocol.Message, bytes], None],
    ) -> None:
        self._controller = controller
        self._cluster = controller.cluster
        self._ports = ports
        self._clock = clock
        self._reply_head = reply_head
        self._tx: Transaction | None = None
        self._outbox: list[Send] = []
        self._rehearsals: set[asyncio.Task[None]] = set()
        # Nodes whose step messages wait until their inventory is processed.
        self._unsettled: set[NodeName] = set()
        self.service = StepService(self._step_ports())
        self.shells = Shells(
            ShellPorts(
                allocate=self._allocate,
                release=self._release,
                reply=self._reply,
                environment=lambda job: messages.allocation_environment(job, self._cluster),
            )
        )
        controller.listener = self
        controller.metrics.step_nodes = self.service.nodes_of_steps

    def _step_ports(self) -> StepPorts:
        store, settings = self._controller.store, self._cluster.config.controller
        return StepPorts(
            job=lambda job_id: self._cluster.jobs.get(job_id),
            send=self._send,
            reply=self._reply,
            allocate=self._allocate,
            resize=self._resize,
            release=self._release_of_step,
            record=self._record,
            new_token=self._new_token,
            environment=self._environment,
            account=lambda job, node: messages.account(job, self._cluster, node),
            hosts=messages.hosts,
            confinement=lambda job, node: messages.confinement(job, self._cluster, node),
            scripts=lambda job, node: messages.job_scripts(job, self._cluster, node),
            same_machine=lambda job: messages.same_machine(job, self._cluster),
            devices=lambda node: messages.devices_of(self._cluster.nodes[node]),
            last_step=lambda job_id, attempt: store.last_step(job_id, attempt),
            authorize=lambda uid, job: authorize(
                self._identity(uid), Action.RUN_STEP, job, f"start a step in job {job.display_id}"
            ),
            epoch=lambda: self._cluster.epoch,
            now_s=self._clock,
            allow_uid_below=lambda: self._cluster.config.controller.allow_uid_below,
            sign_jobs=lambda: self._cluster.config.controller.sign_jobs,
            is_adopted=lambda job: job.token in self._cluster.adopted,
            recorded=store.attempt_steps,
            grace_s=settings.kill_wait_s,
            propagate=rlimits.names(settings.propagate),
        )

    # ----- incoming

    def on_from_stream(self, node: NodeName, said: protocol.FromStream, blob: bytes) -> None:
        """Handle a message of a step command.

        Only a request for a step, and messages after it, wait for the tick.
        """
        given = said.message.get("options") if said.message.get("type") == "StepRequest" else None
        options = given if isinstance(given, dict) else {}
        origin = (node, said.stream)
        if options.get("test-only") and node == HEAD and not said.message.get("job_id"):
            task = asyncio.get_running_loop().create_task(self._rehearse(origin, said))
            self._rehearsals.add(task)
            task.add_done_callback(self._rehearsals.discard)
        elif SHELL_OPTION in options:
            self._in_tick(lambda: self.shells.request(origin, said.uid, said.message), origin)
        elif said.message.get("type") in ("StepRequest", "StepAsked") or node in self._unsettled:
            self._in_tick(lambda: self.service.on_from_stream(node, said, blob), origin)
        else:
            try:
                self.service.on_from_stream(node, said, blob)
            except InvariantError:
                raise
            except Exception as error:
                self._give_up(origin, str(report_fault(error, f"serve a step command on {node or 'the head'}")))

    async def _rehearse(self, origin: Origin, said: protocol.FromStream) -> None:
        """Answer a --test-only request: when and where the job would start."""
        text, error = "", ""
        try:
            request = protocol.from_json(said.message)
            if not isinstance(request, protocol.StepRequest) or request.version != protocol.VERSION:
                raise ProtocolError("cannot test the request: this hrun and the controller are of different versions")
            now_s = self._clock()
            rehearsal = self._controller.rehearsal(self._identity(said.uid), read_allocation(request, now_s), now_s)
            text = start_words(await asyncio.to_thread(rehearsal))
        except (HpcschedError, protocol.WireError) as refused:
            error = str(refused)
        except Exception as failed:
            error = str(report_fault(failed, "test a request"))
        if text:
            self._reply(origin, protocol.StepWaiting(job_id=0, text=text), b"")
        self._reply(origin, protocol.StepEnded(codes=[], signals=[], error=error), b"")

    def on_stream_closed(self, origin: Origin) -> None:
        """Record that a step command disconnected."""

        def work() -> None:
            self.shells.stream_closed(origin)
            self.service.on_stream_closed(origin)

        self._in_tick(work)

    def on_output(self, node: NodeName, message: protocol.Output | protocol.InputAck, blob: bytes) -> None:
        """Pass output, or an acknowledgement of input, from a node to its step command."""

        def work() -> None:
            origin = self.service.output_origin(node, message)
            if origin is not None:
                self._reply(origin, message, blob)

        if node in self._unsettled:
            self._in_tick(work)
        else:
            work()

    def step_reported(self, node: NodeName, report: protocol.Report) -> None:
        """Handle a report on a step, and acknowledge it once it is on disk."""

        def work() -> None:
            self.service.on_report(node, report)
            self._send(node, protocol.Ack(seqs=[report.seq]), b"")

        self._in_tick(work)

    def act_on_step(self, job: Job, number: int, signum: int | None, by: str) -> bool:
        """Send a signal to the tasks of a running step, or end it if `signum` is None.

        Return whether there is such a step.
        """
        return self.service.act_on(job, number, signum, by)

    def signal_steps(self, job: Job, signum: int) -> None:
        """Send a signal to the tasks of all running steps of the job."""
        for number, *_ in self.service.running(job.id):
            self.service.act_on(job, number, signum, "")

    def has_steps(self, job: Job) -> bool:
        """Return whether a step of the job is running."""
        return bool(self.service.running(job.id))

    def node_welcome(self, node: NodeName, inventory: list[dict[str, Any]]) -> None:
        """Compare the steps known here with the node's inventory."""
        mine = [item for item in inventory if str(item.get("token")).startswith(self._cluster.incarnation + ".")]
        self._unsettled.add(node)

        def work() -> None:
            self.service.node_welcome(node, mine)
            self._later(lambda: self._unsettled.discard(node))

        self._in_tick(work)

    def job_running(self, job: Job) -> None:
        """Handle a job that got its nodes.

        A job without a batch step was created for a step only.
        """
        if self.shells.holds(job.id):
            self._in_tick(lambda: self.shells.job_running(job) if self.shells.holds(job.id) else None)
        elif not job.spec.has_script:
            self._in_tick(lambda: self.service.job_running(job))

    def job_ending(self, job: Job) -> None:
        """Handle a job that is being ended."""
        if self.service.concerns(job.id):
            self._in_tick(lambda: self.service.job_ending(job))

    def job_ended(self, job_id: JobId) -> None:
        """Handle a job whose attempt has ended."""
        if self.service.concerns(job_id):
            self._in_tick(lambda: self.service.job_ended(job_id))
        if self.shells.holds(job_id):
            self._in_tick(lambda: self.shells.job_ended(job_id) if self.shells.holds(job_id) else None)

    def _in_tick(self, work: Callable[[], object], origin: Origin | None = None) -> None:
        """Run `work` in the next tick; its messages are sent after the commit.

        A failed commit does not undo the service's own state. So `work` runs once, and only its
        database changes are retried. If they fail permanently, the request of `origin` is ended,
        and `origin` gets the error.
        """
        outbox: list[Send] = []
        first: Transaction | None = None
        failed: Exception | None = None

        def inside(tx: Transaction) -> None:
            nonlocal first, failed
            if failed is not None:
                raise failed
            self._tx, self._outbox = tx, outbox
            try:
                if first is None:
                    first = tx
                    work()
                else:
                    self._repeat(first, tx)
            except Exception as error:
                failed = error
                raise
            finally:
                self._tx, self._outbox = None, []

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                log.error("cannot continue a step: %s", result)
                if origin is not None:
                    self._give_up(origin, str(result))
                return
            for send in outbox:
                try:
                    send()
                except Exception as error:  # one message failed: send the others
                    report_fault(error, "send what a step needs")

        source = CONTROLLER.source if origin is None else "socket" if origin[0] == HEAD else f"node {origin[0]}"
        self._controller.ask(inside, done, keep=True, source=source)

    def _give_up(self, origin: Origin, why: str) -> None:
        """End the request of `origin` after an internal failure, and report the error to it."""
        self.on_stream_closed(origin)
        self._in_tick(lambda: self._reply(origin, protocol.StepEnded(codes=[], signals=[], error=why), b""))

    def _repeat(self, first: Transaction, tx: Transaction) -> None:
        """Apply the changes of `first`, which was undone, to the cluster again."""
        for row in first.batch.steps.values():
            tx.put_step(row)
        for event in first.batch.events:
            job = tx.cluster.jobs.get(event.job_id)
            if isinstance(event, Submitted) and event.job_id == tx.cluster.last_job_id + 1:
                self._submit_again(event, first, tx)
            elif isinstance(event, Submitted):  # its id may belong to another job now
                self.service.job_ended(event.job_id, "it could not be written to the database; ask again")
            elif job is not None and can(job, type(event)):
                tx.record(event)

    def _submit_again(self, event: Submitted, first: Transaction, tx: Transaction) -> None:
        spec = first.batch.specs[event.spec_id]
        limit_s = event.time_limit_s
        tx.submit(spec, uid=event.uid, user=event.user, partition=event.partition, time_limit_s=limit_s)

    # ----- the service's ports

    def _send(self, node: NodeName, message: protocol.Message, blob: bytes) -> None:
        self._later(lambda: self._send_now(node, message, blob))

    def _send_now(self, node: NodeName, message: protocol.Message, blob: bytes) -> None:
        try:
            self._ports.send(node, message, blob)
        except protocol.WireError as error:  # too long for a message
            if not isinstance(message, protocol.Launch):
                raise
            now_s = self._clock()
            refused = protocol.Report(seq=0, token=message.token, status=protocol.REFUSED, at_s=now_s, why=str(error))
            self._in_tick(lambda: self.service.on_report(node, refused))

    def _reply(self, origin: Origin, message: protocol.Message, blob: bytes) -> None:
        node, stream = origin
        if node == HEAD:
            self._later(lambda: self._reply_head(stream, message, blob))
        else:
            wrapped = protocol.ToStream(stream=stream, message=protocol.to_json(message))
            self._later(lambda: self._ports.send(node, wrapped, blob))

    def _later(self, send: Send) -> None:
        if self._tx is None:
            send()
        else:
            self._outbox.append(send)

    def _allocate(self, request: protocol.StepRequest, uid: int) -> JobId:
        assert self._tx is not None
        spec = read_allocation(request, self._clock())
        made = submission.submit(self._tx, self._identity(uid), "", [spec], lambda *_: None)
        return JobId(made[0]["job_id"])

    def _resize(self, job: Job, count: int, uid: int) -> None:
        assert self._tx is not None
        preemption.shrink(self._tx, job, count, uid)

    def _release_of_step(self, job_id: JobId, exit_status: ExitStatus) -> None:
        if not self.shells.holds(job_id):
            self._release(job_id, exit_status)

    def _release(self, job_id: JobId, exit_status: ExitStatus) -> None:
        job = self._cluster.jobs.get(job_id)
        if job is None or job.state not in ACTIVE | {JobState.PENDING} or job.state is JobState.COMPLETING:
            return
        failed = exit_status.code or exit_status.signal
        outcome = JobState.FAILED if failed else JobState.COMPLETED
        if job.state is JobState.PENDING:
            outcome = JobState.CANCELLED
        self._record_event(
            job, EndRequested(job_id=job_id, at_s=self._clock(), outcome=outcome, by_uid=None, why="", exit=exit_status)
        )

    def _record_event(self, job: Job, event: EndRequested) -> None:
        if self._tx is not None:
            self._tx.record(event)
            return

        def work(tx: Transaction) -> None:
            if can(tx.cluster.jobs[job.id], EndRequested):
                tx.record(event)

        self._controller.ask(work, _ignore, keep=True)

    def _record(self, row: StepRecord) -> None:
        if self._tx is not None:
            self._tx.put_step(row)
        else:
            self._controller.ask(lambda tx: tx.put_step(row), _ignore, keep=True)

    def _new_token(self, job: Job, step: str, node: NodeName) -> str:
        return str(
            LaunchToken(
                incarnation=self._cluster.incarnation,
                job_id=job.id,
                attempt=job.attempt,
                step=step,
                node=node,
                nonce=self._ports.nonce(),
                stay=job.stay_on(node),
            )
        )

    def _environment(self, job: Job, step: StepPlan) -> Mapping[str, str]:
        config, options = self._cluster.config, step.options
        of_attempt = messages.job_key(job, self._cluster) | messages.node_speeds(job, self._cluster)
        return of_attempt | step_environment(
            job,
            step.number,
            step.tasks,
            cluster=config.name,
            conf=str(config.config_dir / paths.CONFIG_FILE),
            share_dir=config.share,
            master_addr=messages.address(self._cluster.nodes[step.tasks[0].node]),
            cpus_per_task=options.shape.cpus_per_task if options.cpus_given else None,
            ntasks_per_node=options.shape.ntasks_per_node,
            distribution="arbitrary" if options.shape.hosts else options.distribution,
        )

    def _identity(self, uid: int) -> Identity:
        return identity_of(uid, self._cluster.config.access)


def _ignore(result: Any) -> None:
    """Do nothing with the result, because nothing waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellPorts:
    """What this module needs of the controller. These functions must not call back."""

    # Creates a job without a batch step for uid; may raise RequestError.
    allocate: Callable[[protocol.StepRequest, int], JobId]
    release: Callable[[JobId, ExitStatus], None]
    reply: Callable[[Origin, protocol.Message, bytes], None]
    environment: Callable[[Job], Mapping[str, str]]  # for the command that holds the job


class Shells:
    """The jobs that commands on the head hold, waiting or running."""

    def __init__(self, ports: ShellPorts) -> None:
        self._ports = ports
        self._jobs: dict[JobId, Origin] = {}

    def holds(self, job_id: JobId) -> bool:
        """Return whether the job is one of these."""
        return job_id in self._jobs

    def request(self, origin: Origin, uid: int, request: Mapping[str, object]) -> None:
        """Request a job; a refusal is answered with StepEnded and its error."""
        try:
            message = protocol.from_json(request)
            if not isinstance(message, protocol.StepRequest) or message.version != protocol.VERSION:
                raise ProtocolError("cannot allocate a job: this command and the controller are of different versions")
            if origin[0] != HEAD:
                raise RequestError("cannot allocate a job from a node: run this on the head node")
            if origin in self._jobs.values():
                raise ProtocolError("cannot allocate a second job on one connection")
            job_id = self._ports.allocate(message, uid)
        except (HpcschedError, protocol.WireError) as error:
            self._ports.reply(origin, protocol.StepEnded(codes=[], signals=[], error=str(error)), b"")
            return
        self._jobs[job_id] = origin
        waiting = protocol.StepWaiting(job_id=job_id, text=f"job {job_id} queued and waiting for resources")
        self._ports.reply(origin, waiting, b"")

    def stream_closed(self, origin: Origin) -> None:
        """End the job of a command that has disconnected."""
        for job_id, owner in list(self._jobs.items()):
            if owner == origin:
                del self._jobs[job_id]
                self._ports.release(job_id, ExitStatus(code=0))

    def job_running(self, job: Job) -> None:
        """Tell the command that the job has its nodes."""
        env = dict(self._ports.environment(job))
        self._ports.reply(self._jobs[job.id], protocol.JobAllocated(job_id=job.id, env=env), b"")
        if job.spec.no_shell:
            del self._jobs[job.id]

    def job_ended(self, job_id: JobId) -> None:
        """Handle a job that was cancelled or reached its time limit."""
        origin = self._jobs.pop(job_id)
        error = f"Job allocation {job_id} has been revoked."
        self._ports.reply(origin, protocol.StepEnded(codes=[], signals=[], error=error), b"")
