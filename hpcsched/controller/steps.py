"""The steps of running jobs: where the tasks go, which step waits, how it ends. Who may start one: `steprights`.

`StepService` minds every step but the batch step. It does no I/O: it speaks through the callables in
`StepPorts`. It does not know how a job gets its nodes, what a process is, or what a row looks like on disk.

Rules:

- A step belongs to the stream of the step command (hrun, hrsh) that asked for it: its *origin*. If that stream closes,
  the step ends. Only the origin may feed, signal or acknowledge; only the node that a token was made for may report
  on it.
- A step on several nodes is prepared on all of them before a task starts on any: `Go` follows the last READY. If one cannot,
  none starts.
- Steps of a job that need the same cpus run one after the other, in the order of their requests, except `overlap` ones.
- Every call may be repeated. `record` is called before the `send`s that rely on it: the caller commits in between.
- After a restart of the controller, steps are found again by what the nodes say (`node_welcome`) and by their rows: a
  step is over when all its nodes have spoken and nothing of it runs. What it held is not known any more, so it holds
  nothing.

Sources: srun(1); the launch protocol in hpcnode.protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcnode import protocol
from hpcsched.controller.stepbeside import attachable, end_of_unknown, resize
from hpcsched.controller.stepplace import Place, place_step
from hpcsched.controller.stepports import StepPlan, StepPorts, launch_of
from hpcsched.controller.stepqueue import StepQueues, Waiting
from hpcsched.controller.steprequest import StepOptions, read_options
from hpcsched.controller.steprights import may_launch, permitted_job
from hpcsched.controller.stepstate import (
    HEAD,
    Origin,
    Run,
    Step,
    blame_job,
    found_again,
    new_step,
    no_word,
    row_of,
    step_reports,
    take_end,
)
from hpcsched.controller.watching import Watching
from hpcsched.errors import HpcschedError, ProtocolError, RequestError
from hpcsched.launch.environment import with_users
from hpcsched.model.ids import JobId, NodeName, Token
from hpcsched.model.job import ACTIVE, ExitStatus, Job

_SIGKILL = 9
_GOING = (protocol.CLAIMED, protocol.READY, protocol.STARTED)
_BUSY = "step creation temporarily disabled, retrying (Requested nodes are busy)"


class StepService:
    """All steps that wait or run. See the module's rules."""

    def __init__(self, ports: StepPorts) -> None:
        self._ports = ports
        self._steps: dict[tuple[JobId, int, int], Step] = {}
        self._by_token: dict[str, tuple[Step, Run]] = {}
        self._by_origin: dict[Origin, Step] = {}  # kept after the end, until the stream closes: output may still come
        self._queues = StepQueues()
        self._held: dict[JobId, Waiting] = {}  # waits for its own job to run
        self._said_again: dict[
            Origin, protocol.FromStream
        ] = {}  # requests that wait until all nodes have told what they have
        self._watching = Watching(ports.send)
        self._numbers: dict[tuple[JobId, int], int] = {}
        self._welcomed: set[NodeName] = set()
        self._unclaimed: set[JobId] = set()  # allocations that run, and nobody known asked for

    # ----- what step commands say

    def on_from_stream(self, node: NodeName, said: protocol.FromStream, blob: bytes) -> None:
        """Act on what the step command on a stream of `node` (HEAD: of the controller) said.

        A refusal is answered with StepEnded and its error; nothing is raised.
        """
        origin = (node, said.stream)
        try:
            message = protocol.from_json(said.message)
            match message:
                case protocol.StepRequest():
                    self._on_request(origin, said, message)
                case protocol.Input() | protocol.OutputAck():
                    self._pass_on(origin, message, blob)
                case protocol.StepSignal():
                    self._on_signal(origin, message.signum)
                case _:
                    raise ProtocolError(f"cannot take {type(message).__name__} from a step command")
        except (HpcschedError, protocol.WireError) as error:
            self._refuse(origin, str(error))

    def on_stream_closed(self, origin: Origin) -> None:
        """End what the step command behind `origin` had asked for: it is gone."""
        for job_id in self._queues.drop(origin):
            self._start_waiting(job_id)
        for job_id, waiting in list(self._held.items()):
            if waiting.origin == origin:
                del self._held[job_id]
                self._ports.release(job_id, ExitStatus(code=1))
        self._watching.drop(origin)
        self._said_again.pop(origin, None)
        step = self._by_origin.pop(origin, None)
        if step is None:
            return
        step.origin = None
        if step.finished:
            self._forget(step)
        else:
            step.left = True
            self._end(step, "its step command went away", state="CANCELLED")

    # ----- what nodes say

    def on_report(self, node: NodeName, report: protocol.Report) -> bool:
        """Take in a report on a step's token; return whether the node must keep it, to tell it again.

        That is so for the ends of a step until its step command has left, which it does when it knows them, or its job is over:
        whatever is killed before that, they are found again.
        """
        found = self._by_token.get(report.token)
        if found is None or found[1].node != node:
            return False
        step, run = found
        self._take(step, run, report)
        job = self._ports.job(step.job.id)
        over = job is None or job.attempt != step.job.attempt or job.state not in ACTIVE
        if over or report.status in _GOING or report.token not in self._by_token:
            return False
        run.kept = report.seq
        return True

    def _take(self, step: Step, run: Run, report: protocol.Report) -> None:
        if run.ended or step.finished:
            return
        if report.status in _GOING:
            run.started = True
            run.ready = run.ready or report.status != protocol.CLAIMED
            run.released = run.released or report.status == protocol.STARTED
            self._go_if_ready(step, [run] if step.gone else step.runs.values())
            return
        take_end(step, run, report)
        if step.error or (step.kill_on_bad_exit and step.went_badly()):
            self._end(step, "failed elsewhere" if step.error else "bad exit")
        self._finish_if_over(step)
        self._start_waiting(step.job.id)

    def output_origin(self, node: NodeName, output: protocol.Output | protocol.InputAck) -> Origin | None:
        """Return where `output`, which came from `node`, must go; None: nobody wants it (drop it)."""
        found = self._by_token.get(output.token)
        if found is None or found[1].node != node:
            return None
        origin = NodeName(output.to.node), output.to.stream
        return origin if found[0].origin == origin or self._watching.hears(origin, found[0]) else None

    def node_welcome(self, node: NodeName, inventory: Iterable[Mapping[str, Any]]) -> None:
        """Compare what `node` knows (its `Welcome.inventory`) with what is known here, after every connection.

        Steps that nobody here knows are found again if their job's attempt runs, and ended if it does not. Launches
        that did not arrive are sent again, and so are orders to end. Each step command there is said an empty word: of one
        whose connection ended with an agent that was killed, the agent answers that it is gone.
        """
        self._welcomed.add(node)
        known = [*((origin, step.job.id) for origin, step in self._by_origin.items()), *self._queues.origins()]
        for origin, job_id in known:
            if origin[0] == node:
                self._say(origin, job_id, "")
        said = {report.token: report for report in step_reports(inventory)}
        for report in said.values():
            if report.token not in self._by_token:
                self._find_again(node, report)
            self.on_report(node, report)
        for step in list(self._steps.values()):
            run = step.runs.get(node)
            if run is None or run.ended:
                continue
            if run.token not in said:
                self._absent(step, run)
            elif step.ending:
                self._ports.send(node, self._end_step(run, "ending"), b"")
        for step in list(self._steps.values()):
            self._end_if_half_there(step)
            self._finish_if_over(step)
        self._release_unclaimed()
        waiting, self._said_again = self._said_again, {}
        for origin, asked in waiting.items():
            self.on_from_stream(origin[0], asked, b"")

    # ----- what becomes of jobs

    def job_running(self, job: Job) -> None:
        """Start the step that `job` was allocated for. Call it when a job without a batch step has its nodes.

        At a restart of the controller call it again for each that runs: one that nobody asks for any more is released.
        """
        waiting = self._held.pop(job.id, None)
        if waiting is None:
            self._unclaimed.add(job.id)
            self._release_unclaimed()
            return
        self._say(waiting.origin, job.id, f"job {job.id} has been allocated resources")
        try:
            self._enqueue(waiting.origin, waiting.request, job)
        except HpcschedError as error:
            self._refuse(waiting.origin, str(error))
            self._ports.release(job.id, ExitStatus(code=1))

    def job_ending(self, job: Job) -> None:
        """Note of the job's steps what their tasks are being ended for."""
        for step in self._steps.values():
            if (step.job.id, step.job.attempt) == (job.id, job.attempt):
                blame_job(step, job)

    def job_ended(self, job_id: JobId, why: str = "") -> None:
        """End every step of the job's attempt, waiting or not: nothing of it is left on its nodes."""
        text = f"job {job_id} has ended" + (f": {why}" if why else "")
        self._unclaimed.discard(job_id)
        waiting = self._queues.take_all(job_id)
        if job_id in self._held:
            waiting.append(self._held.pop(job_id))
        for each in waiting:
            self._refuse(each.origin, text)
        for step in [step for step in self._steps.values() if step.job.id == job_id]:
            step.error = step.error or text
            step.state = step.state or "CANCELLED"
            for run in step.runs.values():
                run.ended = True
            self._finish(step)

    def act_on(self, job: Job, number: int, signum: int | None, by: str) -> bool:
        """Send a signal to the tasks of the job's running step, or (None) end it; return whether there is one."""
        step = self._steps.get((job.id, job.attempt, number))
        if step is not None and signum is not None:
            self._signal(step, signum)
        elif step is not None:
            step.error = step.error or f"step {job.display_id}.{number} is ended: cancelled by {by}"
            self._end(step, "cancelled", state="CANCELLED")
        return step is not None

    def concerns(self, job_id: JobId) -> bool:
        """Return whether a step of the job waits or runs here, or one is awaited."""
        known = job_id in self._queues or job_id in self._held or job_id in self._unclaimed
        return known or any(step.job.id == job_id for step in self._steps.values())

    def running(self, job_id: JobId) -> list[tuple[int, str, tuple[NodeName, ...]]]:
        """Return number, name and nodes of the job's steps that run."""
        return [(s.number, s.name, tuple(s.runs)) for s in self._steps.values() if s.job.id == job_id]

    # ----- requests

    def _on_request(self, origin: Origin, said: protocol.FromStream, request: protocol.StepRequest) -> None:
        if request.version != protocol.VERSION:
            raise RequestError(
                f"cannot start the step: this hrun speaks version {request.version}, the controller {protocol.VERSION}"
            )
        if request.again and self._is_answered(origin, said, request):
            return
        if self._is_busy(origin):
            raise ProtocolError("cannot start a second step on one connection")
        if "resize" in request.options:
            resize(self._ports, origin, said, request)
            return
        if "attach" in request.options:
            self._attach(origin, said, request)
            return
        if request.job_id:
            self._enqueue(origin, request, permitted_job(self._ports, origin, said, JobId(request.job_id)))
            return
        if origin[0] != HEAD:
            raise RequestError("cannot allocate a job from a node: run hrun in a job, or on the head node")
        job_id = self._ports.allocate(request, said.uid)
        self._held[job_id] = Waiting(origin, request)
        self._say(origin, job_id, f"job {job_id} queued and waiting for resources")

    def _is_answered(self, origin: Origin, said: protocol.FromStream, request: protocol.StepRequest) -> bool:
        """Say (again) what there is to say to a request that is said again; return whether that was all.

        What an earlier controller may have started for it, the nodes of its job know: before all have told, it waits.
        """
        step, job = self._by_origin.get(origin), self._ports.job(JobId(request.job_id))
        if step is not None and request.step is None:
            if any(run.place is None for run in step.runs.values()):
                raise RequestError(
                    "the controller was restarted before it could say that the step has started: ask again"
                )
            self._ports.reply(origin, step.started(), b"")
        if step is not None and step.finished:
            self._ports.reply(origin, step.end(), b"")
        if self._is_busy(origin):
            return True
        if job is not None and not self._welcomed.issuperset(job.held_nodes):
            self._said_again[origin] = said
            return True
        if request.step is not None and "attach" not in request.options:
            self._ports.reply(origin, end_of_unknown(self._ports, said, request.step), b"")
            return True
        return False

    def _attach(self, origin: Origin, said: protocol.FromStream, request: protocol.StepRequest) -> None:
        """Have `origin` hear the output of a running step."""
        step = attachable(self._ports, self._steps, origin, said, request)
        self._ports.reply(origin, step.started(), b"")
        self._watching.add(origin, step)

    def _is_busy(self, origin: Origin) -> bool:
        waiting = {each for each, _ in self._queues.origins()} | {each.origin for each in self._held.values()}
        return origin in waiting or origin in self._by_origin or origin in self._watching

    def _enqueue(self, origin: Origin, request: protocol.StepRequest, job: Job) -> None:
        options = read_options(request, job)
        waiting = Waiting(origin, request, options)
        place_step(job, options, ())  # refused now rather than after a wait
        if job.id not in self._queues or options.overlap:
            place = place_step(job, options, self._busy(job))
            if place is not None:
                self._start(waiting, options, job, place)
                return
        self._queues.add(job.id, waiting)
        self._say(origin, job.id, f"Job {job.id} {_BUSY}")

    def _busy(self, job: Job) -> list[Place]:
        runs = [run for step in self._steps.values() if step.job.id == job.id for run in step.runs.values()]
        return [run.place for run in runs if run.place is not None and not run.ended]

    def _start_waiting(self, job_id: JobId) -> None:
        """Start, in their order, the waiting steps of the job that fit now."""
        job = self._ports.job(job_id)
        while job is not None and may_launch(job) and (waiting := self._queues.first(job_id)) is not None:
            assert waiting.options is not None
            place = place_step(job, waiting.options, self._busy(job))
            if place is None:
                return
            self._queues.take_first(job_id)
            self._start(waiting, waiting.options, job, place, has_waited=True)

    # ----- start and end

    def _start(
        self,
        waiting: Waiting,
        options: StepOptions,
        job: Job,
        places: tuple[Place, ...],
        *,
        has_waited: bool = False,
    ) -> None:
        nodes = tuple(place.tasks for place in places)
        step = new_step(job, self._next_number(job), waiting.origin, options, nodes, self._ports.now_s())
        plan = StepPlan(number=step.number, tasks=nodes, options=options)
        env = with_users(waiting.request.env, self._ports.environment(job, plan))
        for node_rank, place in enumerate(places):
            node = place.tasks.node
            run = Run(node=node, token=self._ports.new_token(job, str(step.number), node), place=place)
            run.launch = launch_of(self._ports, step, run, node_rank, waiting.request, options, env)
            step.runs[node] = run
        self._keep(step)
        self._ports.record(row_of(step))
        if has_waited:
            self._say(waiting.origin, job.id, f"Step created for StepId={job.id}.{step.number}")
        self._ports.reply(waiting.origin, step.started(), b"")
        for run in step.runs.values():
            self._ports.send(run.node, run.launch, b"")

    def _go_if_ready(self, step: Step, runs: Iterable[Run]) -> None:
        """Let these tasks go if all nodes of the step are ready (or beyond that); may be said again."""
        if step.ending or step.finished or len(step.nodes) < 2 or set(step.runs) != set(step.nodes):
            return
        step.gone = all(run.ready or run.ended for run in step.runs.values())
        for run in runs if step.gone else ():
            if not run.released and not run.ended:
                self._ports.send(run.node, protocol.Go(token=run.token), b"")

    def _end_if_half_there(self, step: Step) -> None:
        """End a step of a controller before us that is not on all its nodes, and so would wait for ever."""
        if not step.found or len(step.runs) == len(step.nodes) or not self._welcomed.issuperset(step.nodes):
            return
        if any(not run.released and not run.ended for run in step.runs.values()):
            self._end(step, "the controller was restarted before all its nodes were ready")

    def _next_number(self, job: Job) -> int:
        key = (job.id, job.attempt)
        if key not in self._numbers:
            self._numbers[key] = self._ports.last_step(*key)
        self._numbers[key] += 1
        return self._numbers[key]

    def _keep(self, step: Step) -> None:
        self._steps[(step.job.id, step.job.attempt, step.number)] = step
        for run in step.runs.values():
            self._by_token[run.token] = (step, run)
        if step.origin is not None:
            self._by_origin[step.origin] = step

    def _end(self, step: Step, why: str, *, grace_s: float | None = None, state: str = "") -> None:
        if step.ending and grace_s is None:
            return
        step.ending = True
        step.state = step.state or state
        for run in step.runs.values():
            if not run.ended:
                self._ports.send(run.node, self._end_step(run, why, grace_s), b"")

    def _end_step(self, run: Run, why: str, grace_s: float | None = None) -> protocol.EndStep:
        return protocol.EndStep(token=run.token, grace_s=self._ports.grace_s if grace_s is None else grace_s, why=why)

    def _finish_if_over(self, step: Step) -> None:
        if step.finished or not all(run.ended for run in step.runs.values()):
            return
        if step.found and not self._welcomed.issuperset(step.nodes):
            return
        if len(step.runs) < len(step.nodes):
            step.again = all(run.barred for run in step.runs.values())  # the other nodes were never told of it
            step.error = step.error or "the controller was restarted: how some of the tasks ended is not known"
        self._finish(step)

    def _finish(self, step: Step) -> None:
        step.finished = True
        self._steps.pop((step.job.id, step.job.attempt, step.number), None)
        row = row_of(step, ended_at_s=self._ports.now_s())
        if not step.recorded:
            self._ports.record(row)
        for listener in self._watching.over(step):
            self._ports.reply(listener, step.end(), b"")
        if step.origin is None:
            self._forget(step)
        else:
            self._ports.reply(step.origin, step.end(), b"")
        if step.owns_job:
            self._ports.release(step.job.id, ExitStatus(code=row.exit_code or 0, signal=row.exit_signal or 0))

    def _forget(self, step: Step) -> None:
        for run in step.runs.values():
            self._by_token.pop(run.token, None)
            if run.kept:
                self._ports.send(run.node, protocol.Ack(seqs=[run.kept]), b"")

    def _say(self, origin: Origin, job_id: JobId, text: str) -> None:
        """Tell a step command what it waits for; with no text: that it is known here (again)."""
        self._ports.reply(origin, protocol.StepWaiting(job_id=job_id, text=text), b"")

    def _refuse(self, origin: Origin, error: str) -> None:
        self._ports.reply(origin, protocol.StepEnded(codes=[], signals=[], error=error), b"")

    # ----- streams and signals

    def _pass_on(self, origin: Origin, message: protocol.Input | protocol.OutputAck, blob: bytes) -> None:
        found = self._by_token.get(message.token)
        if found is not None and found[0].origin != origin:
            raise ProtocolError("cannot reach a task of another's step")
        if found is not None:  # else it is over, or not found again yet: what is missed then is asked for again
            self._ports.send(found[1].node, message, blob)

    def _on_signal(self, origin: Origin, signum: int) -> None:
        if not 1 <= signum <= 64:
            raise ProtocolError(f"cannot send signal {signum}: there is none of that number")
        step = self._by_origin.get(origin)
        if step is not None and not step.finished:
            self._signal(step, signum)

    def _signal(self, step: Step, signum: int) -> None:
        if signum == _SIGKILL:
            self._end(step, "killed", grace_s=0.0, state="CANCELLED")
            return
        for run in step.runs.values():
            if not run.ended:
                self._ports.send(run.node, protocol.SignalStep(token=run.token, signum=signum), b"")

    # ----- after a loss of connection

    def _absent(self, step: Step, run: Run) -> None:
        """Deal with a run that its node does not know: its launch was lost on the way, or its record is lost."""
        job = self._ports.job(step.job.id)
        held = job is not None and job.attempt == step.job.attempt and may_launch(job, run.node)
        if run.launch is not None and not run.started and not step.ending and held:
            self._ports.send(run.node, run.launch, b"")
            return
        if not run.started:  # bars it for ever, wherever its launch may still be
            self._ports.send(run.node, self._end_step(run, "ending"), b"")
            return
        no_word(step, run, f"{run.node} knows nothing of the step any more")
        self._end(step, "lost on another node")

    def _find_again(self, node: NodeName, report: protocol.Report) -> None:
        token = Token.parse(report.token)
        if token.node != node:
            return
        job = self._ports.job(token.job_id)
        if job is None or job.attempt != token.attempt or job.state not in ACTIVE:
            if report.status in _GOING:
                self._ports.send(node, protocol.EndStep(report.token, self._ports.grace_s, "its job is over"), b"")
            return
        step = self._steps.get((job.id, job.attempt, int(token.step)))
        if step is None and report.stream_to is None:
            return  # nobody can be waiting for it
        if step is None:
            step = self._found_step(job, int(token.step), report)
        if not step.found or node in step.runs:
            return
        step.runs[node] = Run(node=node, token=report.token)
        self._keep(step)

    def _found_step(self, job: Job, number: int, report: protocol.Report) -> Step:
        row = next((row for row in self._ports.recorded(job.id, job.attempt) if row.step == str(number)), None)
        step = found_again(job, number, report, row)
        if step.origin is not None:  # an agent answers with CloseStream if that stream is no more
            self._say(step.origin, job.id, "")
        return step

    def _release_unclaimed(self) -> None:
        for job_id in sorted(self._unclaimed):
            job = self._ports.job(job_id)
            if job is not None and not self._welcomed.issuperset(share.node for share in job.shares):
                continue
            self._unclaimed.discard(job_id)
            if job is not None and not any(step.job.id == job_id for step in self._steps.values()):
                self._ports.release(job_id, ExitStatus(code=1))
