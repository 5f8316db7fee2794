"""The steps of running jobs: start them, queue them, follow them to their end.

`StepService` supervises every step except the batch step. It does no I/O: it acts through the callables in `StepPorts`, its
interface to the controller. It does not know how a job gets its nodes, what a process is, or how a row is stored on disk.

Rules:

- A step belongs to the stream of the step command (hrun, hrsh) that requested it: its *origin*. If
  that stream closes, the step ends. Only the origin may send input, signal or acknowledge. Only the
  node for which a token was made may report on it.
- A step on several nodes is prepared on all of them before any task starts: `Go` follows the last
  READY. If one node cannot prepare it, no task starts.
- Steps of a job that need the same CPUs run one after the other, in the order of their requests.
  `overlap` steps are exempt.
- Every call is idempotent. `record` is called before the `send`s that depend on it: the caller
  commits in between.
- After a restart of the controller, steps are recovered from three sources: the nodes' reports
  (`node_welcome`), the requests of step commands' agents (`StepAsked`), and the rows of the steps.
  If no task of a step has run or will run, its step command requests it again. If a node does not
  know a launch and has not ended it, the launch is first revoked there.

Sources: srun(1); the launch protocol in hpcnode.wire.protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcnode.wire import protocol
from hpcsched.errors import (
    HpcschedError,
    InvariantError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    RequestError,
)
from hpcsched.jobscript.patterns import PatternFacts, expand_job_pattern, pattern_facts
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, JobId, LaunchToken, NodeName
from hpcsched.model.job import ACTIVE, ExitStatus, Job, JobState
from hpcsched.model.spec import SIGNED_REQUEST
from hpcsched.model.units import whole_number
from hpcsched.state.transaction import StepRecord
from hpcsched.steps.environment import PRESERVED, node_environment, with_propagated, with_users
from hpcsched.steps.layout import NodeTasks
from hpcsched.steps.request import StepOptions, read_options, request_bytes
from hpcsched.steps.step import (
    ASK_AGAIN,
    HALF_THERE,
    HEAD,
    UNKNOWN_END,
    Origin,
    Place,
    Step,
    StepPart,
    StepQueues,
    StepTable,
    Waiting,
    blame_job,
    no_word,
    place_step,
    row_of,
    take_end,
)

# ----- permissions: who may start a step, in which job, and when
# Only the job's owner, root or an admin may add a step. On the head, the kernel reports the uid of
# the caller. On a node, the agent vouches for the owner of the job: uids of another machine have no
# meaning here.


UNSIGNED = (
    "cannot start the step: steps from the head are signed by their users on this cluster (sign_jobs in hpcsched.toml); use the "
    "hrun or srun of the head"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Facts about a starting step, for `StepPorts.environment`."""

    number: int
    tasks: tuple[NodeTasks, ...]
    options: StepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPorts:
    """Callables that the service needs from the controller. None of them may call the service."""

    job: Callable[[JobId], Job | None]
    # To a node's agent; may be lost if the node is disconnected.
    send: Callable[[NodeName, protocol.Message, bytes], None]
    # To a step command; wrapped in ToStream if the command runs on a node.
    reply: Callable[[Origin, protocol.Message, bytes], None]
    # A job without a batch step for uid; may raise RequestError.
    allocate: Callable[[protocol.StepRequest, int], JobId]
    release: Callable[[JobId, ExitStatus], None]  # end that job
    record: Callable[[StepRecord], None]
    new_token: Callable[[Job, str, NodeName], str]
    environment: Callable[[Job, StepPlan], Mapping[str, str]]
    # `user` of a Launch on that node: "" if the agent can only run as itself
    account: Callable[[Job, NodeName], str]
    hosts: Callable[[Job], list[tuple[str, int]]]  # (node, slots) of the allocation
    same_machine: Callable[[Job], bool]
    # The highest step number of the job's attempt in the rows, -1 if none.
    last_step: Callable[[JobId, int], int]
    authorize: Callable[[int, Job], None]  # a step in the job; raises PermissionDeniedError
    epoch: Callable[[], int]
    now_s: Callable[[], float]
    grace_s: float  # from SIGTERM to SIGKILL
    propagate: frozenset[str]  # kinds of resource limits that tasks get from their step command
    # Shrink the job to that many nodes, for a uid; may raise RequestError.
    resize: Callable[[Job, int, int], None]
    # CUDA's names of the node's GPUs, if not their indices
    devices: Callable[[NodeName], Mapping[int, str]] = lambda node: {}
    allow_uid_below: Callable[[], int] = lambda: 1000  # of each Launch
    # The job's share of that node, and which parts of it the node enforces.
    confinement: Callable[[Job, NodeName], protocol.Confinement] = lambda job, node: protocol.Confinement()
    # The prolog and epilog of the job on that node.
    scripts: Callable[[Job, NodeName], protocol.JobScripts] = lambda job, node: protocol.JobScripts()
    sign_jobs: Callable[[], bool] = lambda: False  # users sign what the nodes' root helpers start
    # It runs since before a restore: its nodes take no new steps.
    is_adopted: Callable[[Job], bool] = lambda job: False
    # All rows of the job's attempt.
    recorded: Callable[[JobId, int], Sequence[StepRecord]] = lambda job_id, attempt: ()


def _task_set(step: Step, tasks: NodeTasks, node_rank: int) -> protocol.TaskSet:
    return protocol.TaskSet(
        first_rank=tasks.first_rank,
        count=tasks.count,
        total=step.ntasks,
        node_rank=node_rank,
        nnodes=len(step.nodes),
        scattered=list(tasks.scattered),
    )


def _of_options(options: StepOptions, facts: PatternFacts) -> dict[str, Any]:
    """Return the fields of a launch that depend only on the step's options."""

    def path(pattern: str) -> str:
        return expand_job_pattern(pattern, facts) if pattern else ""

    return {
        "stdout": path(options.stdout),
        "stderr": path(options.stderr),
        "stdin": path(options.stdin),
        "append": options.append,
        "label": options.label,
        "limit_s": options.limit_s,
        "signum": options.signal.signum if options.signal else 0,
        "signal_before_s": float(options.signal.before_s) if options.signal else 0.0,
        "task_prolog": options.task_prolog,
        "task_epilog": options.task_epilog,
        "wait_for_children": options.wait_for_children,
        "kill_on_bad_exit": options.kill_on_bad_exit,
        "remote_shell": options.remote_shell,
    }


def launch_of(
    ports: StepPorts,
    step: Step,
    run: StepPart,
    node_rank: int,
    request: protocol.StepRequest,
    options: StepOptions,
    env: Mapping[str, str],
) -> protocol.Launch:
    """Return the message that starts the tasks `run` of `step` on its `node_rank`-th node."""
    job, place, origin = step.job, run.place, step.origin
    if place is None or origin is None:
        raise InvariantError(f"step {job.id}.{step.number} has no place or origin at its launch")
    own = node_environment(
        place.tasks,
        node_rank=node_rank,
        cpus=place.cpus,
        gpus=place.gpus,
        devices=ports.devices(run.node),
        gpus_per_task=options.gpus_per_task,
    )
    return protocol.Launch(
        token=run.token,
        job_id=job.id,
        attempt=job.attempt,
        step=str(step.number),
        epoch=ports.epoch(),
        user=ports.account(job, run.node),
        allow_uid_below=ports.allow_uid_below(),
        work_dir=request.work_dir,
        argv=list(request.argv),
        env={**env, **own},
        tasks=_task_set(step, place.tasks, node_rank),
        cpus=place.cpus,
        mem_mib=place.mem_mib,
        gpus=list(place.gpus),
        stream_to=protocol.Address(node=origin[0], stream=origin[1]),
        grace_s=ports.grace_s,
        **_of_options(options, pattern_facts(job, step.number)),
        lease=job.spec.lease,
        lease_s=job.lease_s or 0.0,
        hold=len(step.nodes) > 1,
        confine=ports.confinement(job, run.node),
        hosts=ports.hosts(job),
        same_machine=ports.same_machine(job),
        scripts=ports.scripts(job, run.node),
    )


def permitted_job(ports: StepPorts, origin: Origin, envelope: protocol.FromStream, job_id: JobId) -> Job:
    """Return the job if the step command behind `origin` may start a step in it now.

    Raises the reason for a refusal.
    """
    job = ports.job(job_id)
    if job is None:
        raise NotFoundError(f"cannot start a step in job {job_id}: Invalid job id specified")
    in_job = origin[0] != HEAD and envelope.job_id == job_id
    if in_job and envelope.attempt != job.attempt:
        raise RequestError(f"cannot start a step in attempt {envelope.attempt} of job {job_id}: it is over")
    if not in_job:
        ports.authorize(asking_uid(ports, origin, envelope), job)
    if ports.is_adopted(job):
        raise RequestError(f"cannot start a step in job {job_id}: it runs from before the database was restored")
    # The node may report the start of the batch step after the first hrun of its script.
    # Nodes of a suspended job prepare the step now, and start it when the job resumes.
    if job.state is not JobState.RUNNING and not (in_job and may_launch(job)):
        raise RequestError(f"cannot start a step in job {job_id}: it is {job.state}, not RUNNING")
    return job


def check_helped(request: protocol.StepRequest) -> None:
    """Refuse options that root helpers of nodes do not carry out. Raises RequestError."""
    for name in ("task-prolog", "task-epilog", "wait-for-children"):
        if request.options.get(name):
            raise RequestError(
                f"cannot start the step with --{name}: the root helpers of this cluster's nodes start the signed command alone "
                "(sign_jobs in hpcsched.toml); put all of it into one command: sh -c 'BEFORE; COMMAND; AFTER'"
            )


def asking_uid(ports: StepPorts, origin: Origin, envelope: protocol.FromStream) -> int:
    """Return the caller's uid on the head. Raises PermissionDeniedError."""
    if origin[0] == HEAD:
        return envelope.uid
    home = ports.job(JobId(envelope.job_id))
    if home is None or home.attempt != envelope.attempt:
        raise PermissionDeniedError(
            f"cannot start a step from {origin[0]}: this command runs in no job there; run it on the head node"
        )
    return home.uid


def may_launch(job: Job, node: NodeName | None = None) -> bool:
    """Return whether the job has its nodes, `node` among them, and is not ending."""
    running = job.state in (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)
    return running and (node is None or node in job.held_nodes)


# ----- the stored row of a step, for later controllers: its origin and its progress on each node
# With it, the next controller supervises the step as its own. That controller knows how reported
# and acknowledged tasks ended, and that a launch unknown to all nodes never ran. The row is kept
# until the job ends, because the step command may not have received the end yet, and output may
# still arrive.
#
# The format is JSON, because only controllers read it.


_STATE_FIELDS = ("kill_on_bad_exit", "finished", "again", "error")


def with_state(step: Step, row: StepRecord) -> StepRecord:
    """Return `row` with the state of `step` to keep.

    `row` is unchanged if the step is known only from its nodes' reports.
    """
    if step.asked_by is None or any(run.place is None for run in step.runs.values()):
        return row
    state: dict[str, Any] = {"asked_by": step.asked_by, "runs": [_run_fields(run) for run in step.in_rank_order()]}
    for name in _STATE_FIELDS:
        if getattr(step, name):
            state[name] = getattr(step, name)
    return replace(row, kept=json.dumps(state, separators=(",", ":")))


def asked_by(row: StepRecord) -> Origin | None:
    """Return the origin of the step of `row`; None: it was not kept."""
    if row.kept is None:
        return None
    node, stream = json.loads(row.kept)["asked_by"]
    return NodeName(node), stream


def restored(job: Job, row: StepRecord) -> Step | None:
    """Return the step of a previous controller from its row; None if the row keeps no state."""
    origin = asked_by(row)
    if row.kept is None or origin is None:
        return None
    state = json.loads(row.kept)
    is_gone = origin[0] == HEAD  # connections to the head ended with the controller that held them
    runs = [_run_of(fields) for fields in state["runs"]]
    return Step(
        job=job,
        number=int(row.step),  # int: of our own row
        origin=None if is_gone else origin,
        asked_by=origin,
        name=row.name,
        nodes=tuple(NodeName(node) for node in row.nodes),
        ntasks=row.ntasks,
        started_at_s=row.started_at_s or 0.0,
        runs={run.node: run for run in runs},
        found=True,
        ending=is_gone,
        state="CANCELLED" if is_gone else "",
        **{name: state[name] for name in _STATE_FIELDS if name in state},
    )


def _run_fields(run: StepPart) -> dict[str, Any]:
    assert run.place is not None
    fields: dict[str, Any] = {"token": run.token, "place": asdict(run.place)}
    if run.ended:
        fields |= {"codes": run.codes, "signals": run.signals, "usage": run.usage, "revoked": run.revoked}
    return fields


def _run_of(fields: dict[str, Any]) -> StepPart:
    tasks = fields["place"]["tasks"]
    place = fields["place"] | {
        "tasks": NodeTasks(**tasks | {"node": NodeName(tasks["node"]), "scattered": tuple(tasks["scattered"])}),
        "gpus": tuple(fields["place"]["gpus"]),
        "held_gpus": tuple(fields["place"]["held_gpus"]),
    }
    ended = {name: fields[name] for name in ("codes", "signals", "usage", "revoked") if name in fields}
    return StepPart(
        node=NodeName(tasks["node"]), token=fields["token"], place=Place(**place), ended=bool(ended), **ended
    )


# ----- steps of previous controllers: recovered from nodes' reports and step commands' requests
# These functions rebuild the steps from their rows and put them into the table. `StepService`
# decides what happens to them.


def step_reports(inventory: Iterable[Mapping[str, Any]]) -> list[protocol.Report]:
    """Return the reports in an agent's inventory, except those on the batch step.

    Raises ProtocolError for an invalid report.
    """
    try:
        reports = [protocol.read_as(protocol.Report, {**fields, "type": "Report"}) for fields in inventory]
    except protocol.WireError as error:
        raise ProtocolError(str(error)) from None
    return [report for report in reports if LaunchToken.parse(report.token).step not in (BATCH_STEP, ALLOC_STEP)]


def find_again(ports: StepPorts, steps: StepTable, node: NodeName, report: protocol.Report) -> None:
    """Add the step that `node` reports to `steps` if its attempt runs; else have it ended."""
    token = LaunchToken.parse(report.token)
    if token.node != node:
        return
    job = ports.job(token.job_id)
    if job is None or job.attempt != token.attempt or job.state not in ACTIVE:
        if report.status in (protocol.CLAIMED, protocol.READY, protocol.STARTED):
            ports.send(node, protocol.EndStep(report.token, ports.grace_s, "its job is over"), b"")
        return
    step = steps.running(job.id, job.attempt, int(token.step))  # int: of a token
    if step is None and report.stream_to is None:
        return  # no step command can be waiting for it
    if step is None:
        step = _recovered(ports, job, token.step, report)
    if step.found and not step.finished and node not in step.runs:
        step.runs[node] = StepPart(node=node, token=report.token)
    steps.add(step)


def _recovered(ports: StepPorts, job: Job, number: str, report: protocol.Report) -> Step:
    """Return the step of this number of `job`, and greet its step command.

    It is made from its row, or else from `report`.
    """
    row = next((row for row in ports.recorded(job.id, job.attempt) if row.step == number), None)
    step = restored(job, row) if row is not None else None
    step = step or _reported_step(job, int(number), report, row)  # int: of a token
    # An agent answers with CloseStream if that stream no longer exists.
    if step.origin is not None and not step.finished:
        ports.reply(step.origin, protocol.StepWaiting(job_id=job.id, text=""), b"")
    return step


def asked_before(ports: StepPorts, origin: Origin, envelope: protocol.FromStream) -> Step | None:
    """Return the step that a previous controller started for `origin`; None: there is none.

    The step may have ended. Raises RequestError: its job has ended.
    """
    job = ports.job(JobId(envelope.job_id))
    if job is None or job.attempt != envelope.attempt or job.state not in ACTIVE:
        raise RequestError(f"job {envelope.job_id} has ended")
    row = next((row for row in ports.recorded(job.id, job.attempt) if asked_by(row) == origin), None)
    return restored(job, row) if row is not None else None


def _reported_step(job: Job, number: int, report: protocol.Report, row: StepRecord | None) -> Step:
    """Return a step that is known only from a node's report and its row."""
    assert report.stream_to is not None
    origin = (NodeName(report.stream_to.node), report.stream_to.stream)
    is_gone = origin[0] == HEAD  # connections to the head ended with the controller that held them
    nodes = row.nodes if row is not None else [share.node for share in job.shares]
    return Step(
        job=job,
        number=number,
        origin=None if is_gone else origin,
        name=row.name if row is not None else "",
        nodes=tuple(NodeName(node) for node in nodes),
        ntasks=row.ntasks if row is not None else 0,
        started_at_s=(row.started_at_s if row is not None else None) or report.at_s,
        found=True,
        ending=is_gone,
        state="CANCELLED" if is_gone else "",
    )


# ----- other requests of a step command: shrink its job, and receive another step's output


def resize(ports: StepPorts, origin: Origin, envelope: protocol.FromStream, request: protocol.StepRequest) -> None:
    """Shrink the job to the requested number of nodes.

    Raises RequestError and the errors of `permitted_job`.
    """
    if not request.job_id:
        raise RequestError("cannot resize a job: run hrun --resize in one, or name it with --jobid")
    job = permitted_job(ports, origin, envelope, JobId(request.job_id))
    count = str(request.options["resize"])
    if not (count.isascii() and count.isdigit()):
        raise RequestError(f"cannot resize job {job.display_id} to {count[:20]!r} nodes: that is not a whole number")
    ports.resize(job, whole_number(count, "a number of nodes"), asking_uid(ports, origin, envelope))
    ports.reply(origin, protocol.StepEnded(codes=[], signals=[]), b"")


def attachable(
    ports: StepPorts, steps: StepTable, origin: Origin, envelope: protocol.FromStream, request: protocol.StepRequest
) -> Step:
    """Return the running step whose output `origin` may receive.

    Raises NotFoundError and the errors of `permitted_job`.
    """
    job = permitted_job(ports, origin, envelope, JobId(request.job_id))
    number = str(request.options["attach"])
    step = (
        steps.running(job.id, job.attempt, whole_number(number, "a step"))
        if number.isascii() and number.isdigit()
        else None
    )
    if step is None or not step.is_whole:
        raise NotFoundError(
            f"Invalid job id specified: no step {job.id}.{number[:20]} is running that can be attached to"
        )
    return step


# ----- listeners to a running step, besides its own step command (sattach)
# Output is copied to listeners as it arrives from the nodes. A listener acknowledges nothing and
# delays no other client. The owner of its connection disconnects a listener that reads too slowly.
# It knows neither permissions nor the messages to a step.


class Watching:
    """All listeners, by their connections."""

    def __init__(self, send: Callable[[NodeName, protocol.Message, bytes], None]) -> None:
        self._send = send
        self._steps: dict[Origin, Step] = {}

    def __contains__(self, origin: Origin) -> bool:
        return origin in self._steps

    def add(self, origin: Origin, step: Step) -> None:
        """Send the step's output to `origin` from now on."""
        self._steps[origin] = step
        self._watch_output(origin, step, on=True)

    def drop(self, origin: Origin) -> None:
        """Remove `origin`: its connection has closed."""
        step = self._steps.pop(origin, None)
        if step is not None:
            self._watch_output(origin, step, on=False)

    def is_watching(self, origin: Origin, step: Step) -> bool:
        """Return whether `origin` listens to the step."""
        return self._steps.get(origin) is step

    def over(self, step: Step) -> list[Origin]:
        """Remove the listeners of a step that has ended, and return them."""
        origins = [origin for origin, watched in self._steps.items() if watched is step]
        for origin in origins:
            del self._steps[origin]
        return origins

    def _watch_output(self, origin: Origin, step: Step, on: bool) -> None:
        to = protocol.Address(node=origin[0], stream=origin[1])
        for run in step.runs.values():
            if not run.ended:
                self._send(run.node, protocol.WatchOutput(token=run.token, to=to, on=on), b"")


_SIGKILL = 9
MAX_WAITING_BYTES = 64 << 20  # of the requests of one account's waiting steps
MOST_STEPS = 40_000  # of an attempt, as Slurm's MaxStepCount
_BUSY = "step creation temporarily disabled, retrying (Requested nodes are busy)"


class StepService:
    """All waiting and running steps. See the module's rules."""

    def __init__(self, ports: StepPorts) -> None:
        self._ports = ports
        self._steps = StepTable()
        self._queues = StepQueues()
        self._held: dict[JobId, Waiting] = {}  # waits for its own job to run
        self._watching = Watching(ports.send)
        self._numbers: dict[tuple[JobId, int], int] = {}
        self._welcomed: set[NodeName] = set()
        self._unclaimed: set[JobId] = set()  # running allocations without a known step command

    # ----- messages from step commands

    def on_from_stream(self, node: NodeName, envelope: protocol.FromStream, blob: bytes) -> None:
        """Handle a message of the step command on a stream of `node` (HEAD: of the controller).

        A refusal is answered with StepEnded and its error. No exception is raised.
        """
        origin = (node, envelope.stream)
        try:
            message = protocol.from_json(envelope.message)
            match message:
                case protocol.StepRequest():
                    self._on_request(origin, envelope, message)
                case protocol.StepAsked():
                    self._on_asked(origin, envelope)
                case protocol.Input() | protocol.OutputAck():
                    self._pass_on(origin, message, blob)
                case protocol.StepSignal():
                    self._on_signal(origin, message.signum)
                case _:
                    raise ProtocolError(f"cannot take {type(message).__name__} from a step command")
        except (HpcschedError, protocol.WireError) as error:
            self._refuse(origin, str(error))

    def on_stream_closed(self, origin: Origin) -> None:
        """End the request of the step command behind `origin`: its stream has closed."""
        for job_id in self._queues.drop(origin):
            self._start_waiting(job_id)
        for job_id, waiting in list(self._held.items()):
            if waiting.origin == origin:
                del self._held[job_id]
                self._ports.release(job_id, ExitStatus(code=1))
        self._watching.drop(origin)
        step = self._steps.leave(origin)
        if step is None:
            return
        step.origin = None
        if step.finished:
            self._steps.forget(step)
        else:
            step.left = True
            self._end(step, "its step command went away", state="CANCELLED")

    # ----- messages from nodes

    def on_report(self, node: NodeName, report: protocol.Report) -> bool:
        """Handle a report on a step's token; return whether the step is known here."""
        found = self._steps.of_token(node, report.token)
        if found is None:
            return False
        step, run = found
        if run.ended or step.finished:
            return True
        if report.status in (protocol.CLAIMED, protocol.READY, protocol.STARTED):
            run.started = True
            run.ready = run.ready or report.status != protocol.CLAIMED
            run.released = run.released or report.status == protocol.STARTED
            self._go_if_ready(step, [run] if step.released else step.runs.values())
            self._announce_start(step)
            return True
        take_end(step, run, report)
        if step.error or (step.kill_on_bad_exit and step.went_badly()):
            self._end(step, "failed elsewhere" if step.error else "bad exit")
        self._finish_if_over(step)
        if not step.finished:
            self._record(step)  # this commit acknowledges the report: the next controller will not receive it
        self._start_waiting(step.job.id)
        return True

    def output_origin(self, node: NodeName, output: protocol.Output | protocol.InputAck) -> Origin | None:
        """Return the destination of `output` from `node`; None: it has none (drop it)."""
        found = self._steps.of_token(node, output.token)
        if found is None:
            return None
        origin = NodeName(output.to.node), output.to.stream
        return origin if found[0].origin == origin or self._watching.is_watching(origin, found[0]) else None

    def node_welcome(self, node: NodeName, inventory: Iterable[Mapping[str, Any]]) -> None:
        """Compare the inventory of `node` (`Welcome.inventory`) with the steps known here.

        Call it after every connection. Unknown steps are recovered if their job's attempt runs, and ended if it does not.
        Launches that did not arrive are sent again, and so are orders to end. Each step command there, or with tasks there,
        gets an empty message: it asks for output that was not delivered. If a step command ended together with a killed agent,
        the next agent answers that the step command no longer exists.
        """
        self._welcomed.add(node)
        for origin, job_id in self._streams_of(node):
            self._ports.reply(origin, _waiting(job_id, ""), b"")
        reported = {report.token: report for report in step_reports(inventory)}
        for report in reported.values():
            if self._steps.of_token(node, report.token) is None:
                find_again(self._ports, self._steps, node, report)
            self.on_report(node, report)
        for step in self._steps:
            run = step.runs.get(node)
            if run is None or run.ended:
                continue
            if run.token not in reported:
                self._absent(step, run)
            elif step.ending:
                self._ports.send(node, self._end_step(run, "ending"), b"")
        for step in self._steps:
            self._end_if_half_there(step)
            self._finish_if_over(step)
        self._release_unclaimed()

    # ----- events of jobs

    def job_running(self, job: Job) -> None:
        """Start the step for which `job`, a job without a batch step, was allocated.

        Call it when the job has its nodes. After a restart of the controller, call it again for
        each such running job. A job that no step command requests any more is released.
        """
        waiting = self._held.pop(job.id, None)
        if waiting is None and job.spec.no_shell:
            return
        if waiting is None:
            self._unclaimed.add(job.id)
            self._release_unclaimed()
            return
        self._ports.reply(waiting.origin, _waiting(job.id, f"job {job.id} has been allocated resources"), b"")
        try:
            self._enqueue(waiting.origin, waiting.request, job)
        except HpcschedError as error:
            self._refuse(waiting.origin, str(error))
            self._ports.release(job.id, ExitStatus(code=1))

    def job_ending(self, job: Job) -> None:
        """Record in the job's steps why their tasks are being ended."""
        for step in self._steps.of_job(job.id):
            if step.job.attempt == job.attempt:
                blame_job(step, job)

    def job_ended(self, job_id: JobId, why: str = "") -> None:
        """End every step of the job's attempt, waiting or running: none is left on its nodes."""
        text = f"job {job_id} has ended" + (f": {why}" if why else "")
        self._unclaimed.discard(job_id)
        waiting = self._queues.take_all(job_id)
        if job_id in self._held:
            waiting.append(self._held.pop(job_id))
        for each in waiting:
            self._refuse(each.origin, text)
        for step in self._steps.of_job(job_id):
            step.error = step.error or text
            step.state = step.state or "CANCELLED"
            for run in step.runs.values():
                run.ended = True
            self._finish(step)

    def act_on(self, job: Job, number: int, signum: int | None, by: str) -> bool:
        """Signal or (None) end the job's running step; return whether it exists."""
        step = self._steps.running(job.id, job.attempt, number)
        if step is not None and signum is not None:
            self._signal(step, signum)
        elif step is not None:
            step.error = step.error or f"step {job.display_id}.{number} is ended: cancelled by {by}"
            self._end(step, "cancelled", state="CANCELLED")
        return step is not None

    def concerns(self, job_id: JobId) -> bool:
        """Return whether the job has a waiting, running or expected step here."""
        known = job_id in self._queues or job_id in self._held or job_id in self._unclaimed
        return known or bool(self._steps.of_job(job_id))

    def running(self, job_id: JobId) -> list[tuple[int, str, tuple[NodeName, ...]]]:
        """Return number, name and nodes of the job's running steps."""
        return [(step.number, step.name, tuple(step.runs)) for step in self._steps.of_job(job_id)]

    def nodes_of_steps(self, job_id: JobId) -> set[NodeName]:
        """Return the nodes on which a step of the job may have processes."""
        return {node for step in self._steps.of_job(job_id) for node, run in step.runs.items() if not run.ended}

    # ----- requests

    def _on_request(self, origin: Origin, envelope: protocol.FromStream, request: protocol.StepRequest) -> None:
        if request.version != protocol.VERSION:
            raise RequestError(
                f"cannot start the step: this hrun speaks version {request.version}, the controller {protocol.VERSION}"
            )
        if self._is_busy(origin):
            raise ProtocolError("cannot start a second step on one connection")
        if self._ports.sign_jobs() and not {"resize", "attach", "test-only"} & request.options.keys():
            check_helped(request)
            if origin[0] == HEAD and SIGNED_REQUEST not in request.env:
                self._ports.reply(origin, protocol.StepEnded(codes=[], signals=[], error=UNSIGNED, unsigned=True), b"")
                return
        if "resize" in request.options:
            resize(self._ports, origin, envelope, request)
        elif "attach" in request.options:
            self._attach(origin, envelope, request)
        elif request.job_id and "test-only" in request.options:
            self._test(origin, request, permitted_job(self._ports, origin, envelope, JobId(request.job_id)))
        elif request.job_id:
            self._enqueue(origin, request, permitted_job(self._ports, origin, envelope, JobId(request.job_id)))
        elif origin[0] == HEAD:
            size = self._checked_size(request, envelope.uid)
            job_id = self._ports.allocate(request, envelope.uid)
            self._held[job_id] = Waiting(origin, request, uid=envelope.uid, size=size)
            self._ports.reply(origin, _waiting(job_id, f"job {job_id} queued and waiting for resources"), b"")
        else:
            raise RequestError("cannot allocate a job from a node: run hrun in a job, or on the head node")

    def _test(self, origin: Origin, request: protocol.StepRequest, job: Job) -> None:
        """Tell `origin` where a step of a running job would start, without starting it."""
        options = read_options(request, job)
        places = place_step(job, options, self._busy(job)) or ()
        nodes = ",".join(place.tasks.node for place in places)
        text = f"a step of job {job.id} " + (
            f"would start at once on {nodes}" if nodes else "would wait for other steps"
        )
        self._ports.reply(origin, _waiting(job.id, text), b"")
        self._refuse(origin, "")

    def _attach(self, origin: Origin, envelope: protocol.FromStream, request: protocol.StepRequest) -> None:
        """Send the output of a running step to `origin`."""
        step = attachable(self._ports, self._steps, origin, envelope, request)
        self._ports.reply(origin, step.started(), b"")
        self._watching.add(origin, step)

    def _is_busy(self, origin: Origin) -> bool:
        waiting = {each for each, _ in self._queues.origins()} | {each.origin for each in self._held.values()}
        return origin in waiting or self._steps.of_origin(origin) is not None or origin in self._watching

    def _enqueue(self, origin: Origin, request: protocol.StepRequest, job: Job) -> None:
        if self._last_number(job) >= MOST_STEPS - 1:  # each is a row, in memory for whoever looks at the job's history
            raise RequestError(
                f"cannot start a step in job {job.id}: it has had {MOST_STEPS} steps, as many as a job may have; start more "
                "programs in each step, or submit another job"
            )
        options = read_options(request, job)
        waiting = Waiting(origin, request, options)
        place_step(job, options, ())  # an impossible step is refused now, not after a wait
        if job.id not in self._queues or options.overlap:
            place = place_step(job, options, self._busy(job))
            if place is not None:
                self._start(waiting, job, place)
                return
        self._queues.add(job.id, waiting._replace(uid=job.uid, size=self._checked_size(request, job.uid)))
        self._ports.reply(origin, _waiting(job.id, f"Job {job.id} {_BUSY}"), b"")

    def _checked_size(self, request: protocol.StepRequest, uid: int) -> int:
        """Return the size of a request that is to wait. Raises RequestError if it may not."""
        size = request_bytes(request)
        held = sum(waiting.size for waiting in self._held.values() if waiting.uid == uid)
        if self._queues.size_of(uid) + held + size > MAX_WAITING_BYTES:
            raise RequestError(
                f"cannot have the step wait: the waiting steps of your jobs have more than {MAX_WAITING_BYTES >> 20} MiB of "
                "environments and arguments; wait until some have started, or use --export=NONE"
            )
        return size

    def _busy(self, job: Job) -> list[Place]:
        runs = [run for step in self._steps.of_job(job.id) for run in step.runs.values()]
        return [run.place for run in runs if run.place is not None and not run.ended]

    def _start_waiting(self, job_id: JobId) -> None:
        """Start the waiting steps of the job that fit now, in their order."""
        job = self._ports.job(job_id)
        while job is not None and may_launch(job) and (waiting := self._queues.first(job_id)) is not None:
            assert waiting.options is not None
            place = place_step(job, waiting.options, self._busy(job))
            if place is None:
                return
            self._queues.take_first(job_id)
            self._start(waiting, job, place, has_waited=True)

    # ----- start and end

    def _start(self, waiting: Waiting, job: Job, places: tuple[Place, ...], *, has_waited: bool = False) -> None:
        options = waiting.options
        assert options is not None
        step = Step(
            job=job,
            number=self._next_number(job),
            origin=waiting.origin,
            name=options.name,
            nodes=tuple(place.tasks.node for place in places),
            ntasks=sum(place.tasks.count for place in places),
            started_at_s=self._ports.now_s(),
            asked_by=waiting.origin,
            announced=True,
            kill_on_bad_exit=options.kill_on_bad_exit,
        )
        plan = StepPlan(number=step.number, tasks=tuple(place.tasks for place in places), options=options)
        env = with_users(waiting.request.env, self._ports.environment(job, plan))
        if options.preserve_env:
            env |= {name: value for name, value in waiting.request.env.items() if name in PRESERVED}
        env = with_propagated(env, self._ports.propagate)
        if job.spec.signed:
            env.setdefault(SIGNED_REQUEST, job.spec.signed)
        launches: list[tuple[NodeName, protocol.Launch]] = []
        for node_rank, place in enumerate(places):
            node = place.tasks.node
            run = StepPart(node=node, token=self._ports.new_token(job, str(step.number), node), place=place)
            run.launch = launch_of(self._ports, step, run, node_rank, waiting.request, options, env)
            step.runs[node] = run
            launches.append((node, run.launch))
        self._steps.add(step)
        self._record(step)
        if has_waited:
            self._ports.reply(waiting.origin, _waiting(job.id, f"Step created for StepId={job.id}.{step.number}"), b"")
        self._ports.reply(waiting.origin, step.started(), b"")
        for node, launch in launches:
            self._ports.send(node, launch, b"")

    def _go_if_ready(self, step: Step, runs: Iterable[StepPart]) -> None:
        """Start these tasks if all nodes of the step are ready or running; may be repeated."""
        if step.ending or step.finished or len(step.nodes) < 2 or set(step.runs) != set(step.nodes):
            return
        step.released = all(run.ready or run.ended for run in step.runs.values())
        for run in runs if step.released else ():
            if not run.released and not run.ended:
                self._ports.send(run.node, protocol.Go(token=run.token), b"")

    def _announce_start(self, step: Step) -> None:
        """Tell the step command of a recovered step that it runs.

        This happens once the step cannot be requested again.
        """
        sure = (
            step.released or step.finished or (len(step.nodes) < 2 and any(run.started for run in step.runs.values()))
        )
        if step.announced or step.again or not sure or step.origin is None or not step.is_whole:
            return
        step.announced = True
        self._ports.reply(step.origin, step.started(), b"")

    def _record(self, step: Step) -> None:
        self._ports.record(with_state(step, row_of(step, ended_at_s=self._ports.now_s() if step.finished else None)))

    def _last_number(self, job: Job) -> int:
        key = (job.id, job.attempt)
        if key not in self._numbers:
            self._numbers[key] = self._ports.last_step(*key)
        return self._numbers[key]

    def _next_number(self, job: Job) -> int:
        number = self._last_number(job) + 1
        self._numbers[job.id, job.attempt] = number
        return number

    def _end(self, step: Step, why: str, *, grace_s: float | None = None, state: str = "") -> None:
        if step.ending and grace_s is None:
            return
        step.ending = True
        step.state = step.state or state
        for run in step.runs.values():
            if not run.ended:
                self._ports.send(run.node, self._end_step(run, why, grace_s), b"")

    def _end_step(self, run: StepPart, why: str, grace_s: float | None = None) -> protocol.EndStep:
        return protocol.EndStep(token=run.token, grace_s=self._ports.grace_s if grace_s is None else grace_s, why=why)

    def _finish_if_over(self, step: Step) -> None:
        if step.finished or not all(run.ended for run in step.runs.values()):
            return
        if len(step.runs) < len(step.nodes):  # the previous controller kept no state of the other nodes
            if not self._welcomed.issuperset(step.nodes):
                return
            step.error = step.error or UNKNOWN_END
        self._finish(step)

    def _finish(self, step: Step) -> None:
        step.finish()
        self._steps.is_over(step)
        self._record(step)
        for listener in self._watching.over(step):
            self._ports.reply(listener, step.end(), b"")
        if step.origin is not None:
            self._announce_start(step)
            self._ports.reply(step.origin, step.end(), b"")
        if step.owns_job:
            row = row_of(step, ended_at_s=self._ports.now_s())
            self._ports.release(step.job.id, ExitStatus(code=row.exit_code or 0, signal=row.exit_signal or 0))

    def _refuse(self, origin: Origin, error: str) -> None:
        self._ports.reply(origin, protocol.StepEnded(codes=[], signals=[], error=error), b"")

    # ----- streams and signals

    def _pass_on(self, origin: Origin, message: protocol.Input | protocol.OutputAck, blob: bytes) -> None:
        found = self._steps.find(message.token)
        if found is not None and found[0].origin != origin:
            raise ProtocolError("cannot reach a task of another's step")
        if isinstance(message, protocol.OutputAck) and message.again:
            message = protocol.changed(message, to=protocol.Address(node=origin[0], stream=origin[1]))
        # Else it has ended or is not recovered yet: missed messages are requested again.
        if found is not None:
            self._ports.send(found[1].node, message, blob)

    def _on_signal(self, origin: Origin, signum: int) -> None:
        if not 1 <= signum <= 64:
            raise ProtocolError(f"cannot send signal {signum}: there is none of that number")
        step = self._steps.of_origin(origin)
        if step is not None and not step.finished:
            self._signal(step, signum)

    def _signal(self, step: Step, signum: int) -> None:
        if signum == _SIGKILL:
            self._end(step, "killed", grace_s=0.0, state="CANCELLED")
            return
        for run in step.runs.values():
            if not run.ended:
                self._ports.send(run.node, protocol.SignalStep(token=run.token, signum=signum), b"")

    # ----- after a lost connection

    def _absent(self, step: Step, run: StepPart) -> None:
        """Handle a run that its node does not know: its launch or its record was lost."""
        job = self._ports.job(step.job.id)
        held = job is not None and job.attempt == step.job.attempt and may_launch(job, run.node)
        if run.launch is not None and not run.started and not step.ending and held:
            self._ports.send(run.node, run.launch, b"")
            return
        # All nodes had it then, this one too.
        began = step.found and any(other.released for other in step.runs.values())
        if not run.started and step.found and not step.ending and not began:
            self._end(step, HALF_THERE)
            return
        if not run.started and not began:  # revokes it permanently, even if its launch arrives later
            self._ports.send(run.node, self._end_step(run, "ending"), b"")
            return
        no_word(step, run, f"{run.node} knows nothing of the step any more")
        self._end(step, "lost on another node")

    def _end_if_half_there(self, step: Step) -> None:
        """End a recovered step if a node has reported and does not know its part."""
        known = [run for run in step.runs.values() if run.node in self._welcomed and not run.ended]
        missing = next((run for run in known if not run.started), None)
        if step.found and not step.ending and missing is not None:
            self._absent(step, missing)

    def _on_asked(self, origin: Origin, envelope: protocol.FromStream) -> None:
        """Tell a step command that reconnects the state of its request."""
        step = self._steps.of_origin(origin)
        if step is None and self._is_busy(origin):
            return
        if step is None:
            step = asked_before(self._ports, origin, envelope)
            if step is None:
                self._ports.reply(origin, ASK_AGAIN, b"")
                return
            self._steps.add(step)
            self._end_if_half_there(step)
            self._finish_if_over(step)
        if step.finished:
            self._announce_start(step)
            self._ports.reply(origin, step.end(), b"")
        elif step.announced:
            self._ports.reply(origin, step.started(), b"")
        else:
            self._announce_start(step)

    def _streams_of(self, node: NodeName) -> list[tuple[Origin, JobId]]:
        """Return the step commands that use `node`, each with its job.

        They wait for a step there, or their step has tasks there.
        """
        waiting = [(origin, job_id) for origin, job_id in self._queues.origins() if origin[0] == node]
        return [(origin, step.job.id) for origin, step in self._steps.asked_for(node)] + waiting

    def _release_unclaimed(self) -> None:
        for job_id in sorted(self._unclaimed):
            job = self._ports.job(job_id)
            if job is not None and not self._welcomed.issuperset(share.node for share in job.shares):
                continue
            self._unclaimed.discard(job_id)
            if job is not None and not self._steps.of_job(job_id):
                self._ports.release(job_id, ExitStatus(code=1))


def _waiting(job_id: JobId, text: str) -> protocol.StepWaiting:
    return protocol.StepWaiting(job_id=job_id, text=text)
