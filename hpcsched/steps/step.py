"""The steps of a controller: their place in the job, parts on nodes, end, and row.

Only `StepService` changes these values.

Rules: concurrent steps never share a CPU. They never share a GPU that one of them requested by number. Overlapping steps
(srun's --overlap) are exempt. A step that requests no GPUs sees all GPUs that the job has on its nodes. A finished step is
still found by its tokens and its origin until that stream closes, because output may still arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypedDict

from hpcnode.wire import protocol
from hpcsched.errors import RequestError
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import Share
from hpcsched.state.transaction import StepRecord
from hpcsched.steps.layout import NodeTasks, lay_out
from hpcsched.steps.request import StepOptions

_MOST = 2.0**53  # larger values from a node are rejected: inexact as floats, and sums must fit in SQLite


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A step's part of one node; other steps cannot use the `held_*` resources meanwhile."""

    tasks: NodeTasks
    cpus: int
    mem_mib: int
    gpus: tuple[int, ...]
    held_cpus: int
    held_gpus: tuple[int, ...]


def place_step(job: Job, options: StepOptions, busy: Sequence[Place]) -> tuple[Place, ...] | None:
    """Return the step's place in `job` beside the `busy` places of its running steps.

    None: the step must wait.

    Raises: RequestError: it would not fit even if no other step of the job ran.
    """
    full = lay_out(job.shares, options.shape)
    alone = _places(job.shares, full, options, {})
    if options.overlap:
        return alone
    used_cpus: dict[NodeName, int] = {}
    used_gpus: dict[NodeName, set[int]] = {}
    for place in busy:
        node = place.tasks.node
        used_cpus[node] = used_cpus.get(node, 0) + place.held_cpus
        used_gpus.setdefault(node, set()).update(place.held_gpus)
    free = [replace(share, cpus=max(0, share.cpus - used_cpus.get(share.node, 0))) for share in job.shares]
    try:
        layout = lay_out(free, options.shape)
        if sum(part.count for part in layout) != sum(part.count for part in full):
            return None
        return _places(job.shares, layout, options, used_gpus)
    except RequestError:
        return None


def _places(
    shares: Sequence[Share], layout: Sequence[NodeTasks], options: StepOptions, used_gpus: Mapping[NodeName, set[int]]
) -> tuple[Place, ...]:
    by_node = {share.node: share for share in shares}
    places = []
    left = options.gpus_total
    for part in layout:
        share = by_node[part.node]
        cpus = min(part.cpus or part.count * options.shape.cpus_per_task, share.cpus)
        free = [gpu for gpu in share.gpus if gpu not in used_gpus.get(part.node, ())]
        wanted = options.gpus_per_node if options.gpus_per_task is None else options.gpus_per_task * part.count
        if wanted is None and left is not None:
            wanted = min(left, len(free))
            left -= wanted
        own = _own_gpus(share, free, wanted)
        places.append(
            Place(
                tasks=part,
                cpus=cpus,
                mem_mib=_memory(options, share, cpus),
                gpus=share.gpus if own is None else own,
                held_cpus=0 if options.overlap else cpus,
                held_gpus=() if options.overlap else own or (),
            )
        )
    if left:
        held = sum(len(share.gpus) for share in shares)
        raise RequestError(f"cannot give the step {options.gpus_total} GPUs: the job has {held}")
    return tuple(places)


def _own_gpus(share: Share, free: list[int], wanted: int | None) -> tuple[int, ...] | None:
    """Return the first `wanted` of the `free` GPUs of `share`; None: none is requested."""
    if wanted is None:
        return None
    if wanted > len(free):
        raise RequestError(f"cannot give the step {wanted} GPUs on {share.node}: the job has {len(share.gpus)} there")
    return tuple(free[:wanted])


def _memory(options: StepOptions, share: Share, cpus: int) -> int:
    wanted = options.mem_mib
    if wanted is None and options.mem_per_cpu_mib is not None:
        wanted = options.mem_per_cpu_mib * cpus
    if wanted is not None and share.mem_mib and wanted > share.mem_mib:
        raise RequestError(f"cannot give the step {wanted} MiB on {share.node}: the job has {share.mem_mib} MiB there")
    return wanted or share.mem_mib


class Used(TypedDict):
    """Resource usage of a step, by column; None: no node has reported."""

    cpu_user_s: float | None
    cpu_system_s: float | None
    max_rss_kib: int | None
    disk_read_bytes: int | None
    disk_write_bytes: int | None


def used(usages: Iterable[Mapping[str, float]]) -> Used:
    """Return the step's resource usage, from the reports of its nodes."""
    reported = list(usages)

    def values(name: str) -> list[float]:
        return [usage[name] for usage in reported if name in usage and 0 <= usage[name] <= _MOST]

    return Used(
        cpu_user_s=float(sum(found)) if (found := values("cpu_user_s")) else None,
        cpu_system_s=float(sum(found)) if (found := values("cpu_system_s")) else None,
        max_rss_kib=int(max(found)) if (found := values("max_rss_kib")) else None,  # int: bounded
        disk_read_bytes=int(sum(found)) if (found := values("disk_read_bytes")) else None,  # int: bounded
        disk_write_bytes=int(sum(found)) if (found := values("disk_write_bytes")) else None,  # int: bounded
    )


Origin = tuple[NodeName, int]  # (node, stream of its agent); node "": a connection to the controller itself
HEAD = NodeName("")

_NOT_ITS_OWN = frozenset({JobState.CANCELLED, JobState.PREEMPTED, JobState.DEADLINE, JobState.NODE_FAIL})
HALF_THERE = "the controller was restarted before all its nodes were ready"
UNKNOWN_END = "the controller was restarted: how some of the tasks ended is not known"
ASK_AGAIN = protocol.StepEnded(
    codes=[], signals=[], error="the controller was restarted before it could start the step", again=True
)
_UNKNOWN_CODE = 1  # for tasks whose exit status is lost


@dataclass(slots=True)
class StepPart:
    """A step on one node. `launch` is None after a restart; `place` too if it was not kept."""

    node: NodeName
    token: str
    place: Place | None = None
    launch: protocol.Launch | None = None
    started: bool = False  # its launch has arrived
    ready: bool = False  # waits for Go, or has received it
    released: bool = False
    ended: bool = False
    revoked: bool = False  # no task of it has run or will run
    codes: list[int] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    usage: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """A step and its runs. `nodes` are in rank order; a recovered step may lack some `runs`."""

    job: Job
    number: int
    origin: Origin | None  # None: its step command has closed its stream
    name: str
    nodes: tuple[NodeName, ...]
    ntasks: int
    started_at_s: float
    asked_by: Origin | None = None  # its origin, kept after the origin has gone; None: not known
    runs: dict[NodeName, StepPart] = field(default_factory=dict)
    kill_on_bad_exit: bool = False
    found: bool = False  # recovered after a restart of the controller
    announced: bool = False  # its step command knows that the step has its nodes
    released: bool = False  # its tasks were released: all nodes were ready
    ending: bool = False
    # Its step command has gone, as with mpirun's daemons, which lose theirs after a normal end.
    left: bool = False
    finished: bool = False
    again: bool = False  # finished, and to be requested again
    error: str = ""
    state: str = ""  # why it ends, if not by itself: name of a job state

    @property
    def is_whole(self) -> bool:
        """Return whether the node of each of its tasks is known."""
        return len(self.runs) == len(self.nodes) and all(run.place is not None for run in self.runs.values())

    def finish(self) -> None:
        """Mark the step as finished.

        If only a restart of the controller prevented its start, the step command requests it again.
        """
        self.finished = True
        revoked = [run.revoked for run in self.runs.values()]
        if not self.found or not any(revoked) or self.error or self.state:
            return
        if self.is_whole and all(revoked):
            self.again, self.state = True, "CANCELLED"
        else:
            self.error = HALF_THERE

    def end(self) -> protocol.StepEnded:
        """Return the message to the step command about the step's end."""
        if self.again:
            return ASK_AGAIN
        return protocol.StepEnded(codes=self.by_rank("codes"), signals=self.by_rank("signals"), error=self.error)

    @property
    def owns_job(self) -> bool:
        """Return whether the job was made for this step and ends with it."""
        return not self.job.spec.has_script and self.number == 0 and not self.job.spec.no_shell

    def in_rank_order(self) -> list[StepPart]:
        """Return its runs, in the order of their first rank."""
        return [self.runs[node] for node in self.nodes if node in self.runs]

    def started(self) -> protocol.StepStarted:
        """Return the message to the step command that it has started; all its runs have a place."""
        parts = [(run.place.tasks, run.token) for run in self.in_rank_order() if run.place is not None]
        scattered = [list(tasks.ranks) for tasks, _ in parts] if any(tasks.scattered for tasks, _ in parts) else []
        return protocol.StepStarted(
            job_id=self.job.id,
            step=self.number,
            tasks=[(tasks.node, tasks.first_rank, tasks.count, token) for tasks, token in parts],
            scattered=scattered,
        )

    def by_rank(self, what: Literal["codes", "signals"]) -> list[int]:
        """Return the tasks' codes or signals by rank; by node if the step was recovered.

        In a recovered step, each node's tasks are in the order of their ranks.
        """
        found: list[tuple[int, int]] = []
        for run in self.in_rank_order():
            values: list[int] = getattr(run, what)
            ranks = run.place.tasks.ranks if run.place is not None else range(len(found), len(found) + len(values))
            found += zip(ranks, values, strict=False)
        return [value for _, value in sorted(found)]

    def outcome(self) -> str:
        """Return the name of the job state in which it ended.

        A step whose step command left, but which ended with success, is COMPLETED.
        """
        bad = self.went_badly() or bool(self.error)
        if self.state and not (self.left and self.state == "CANCELLED" and not bad):
            return self.state
        return "FAILED" if bad else "COMPLETED"

    def went_badly(self) -> bool:
        """Return whether one of its tasks failed."""
        return any(any(run.codes) or any(run.signals) for run in self.runs.values())


def blame_job(step: Step, job: Job) -> None:
    """Record in `step` why its job is being ended, unless only because its script has ended."""
    if job.outcome is JobState.TIMEOUT:
        step.state = step.state or "TIMEOUT"
        step.error = step.error or f"job {job.display_id} is ended: its time limit was reached"
    elif job.requeue_wanted or job.outcome in _NOT_ITS_OWN:
        step.state = step.state or "CANCELLED"
        step.error = step.error or f"job {job.display_id} is ended: {job.reason_detail or job.outcome}"


def take_end(step: Step, run: StepPart, report: protocol.Report) -> None:
    """Copy the final `report` on `run` into `run` and `step`."""
    run.ended = True
    match report.status:
        case protocol.ENDED:
            _take_codes(step, run, report)
        case protocol.REFUSED:
            no_word(step, run, f"cannot start the step on {run.node}: {report.why or 'refused'}")
        case protocol.REVOKED:
            run.revoked = True
            ended_for = "" if step.ending or step.found else "its job is being ended there"
            no_word(step, run, ended_for and f"cannot start the step on {run.node}: {ended_for}")
        case _:
            no_word(step, run, f"cannot tell how the tasks on {run.node} ended: {report.why or 'their shepherd died'}")


def no_word(step: Step, run: StepPart, why: str) -> None:
    """Record that the tasks of `run` have no exit status, and the reason in `step`."""
    count = run.place.tasks.count if run.place is not None else 1
    run.ended = True
    run.codes, run.signals = [_UNKNOWN_CODE] * count, [0] * count
    step.error = step.error or why


def row_of(step: Step, ended_at_s: float | None = None) -> StepRecord:
    """Return the step's accounting row; without `ended_at_s`, that of a running step."""
    runs = step.in_rank_order()
    code = max((code for run in runs for code in run.codes), default=0)
    signal = max((signal for run in runs for signal in run.signals), default=0)
    ended = ended_at_s is not None
    return StepRecord(
        job_id=step.job.id,
        attempt=step.job.attempt,
        step=str(step.number),
        name=step.name,
        nodes=tuple(step.nodes),
        ntasks=step.ntasks,
        state=step.outcome() if ended else "RUNNING",
        started_at_s=step.started_at_s,
        ended_at_s=ended_at_s,
        exit_code=code if ended else None,
        exit_signal=signal if ended else None,
        **used(run.usage for run in runs),
    )


def _take_codes(step: Step, run: StepPart, report: protocol.Report) -> None:
    count = run.place.tasks.count if run.place is not None else len(report.codes)
    fits = len(report.codes) == len(report.signals) == count
    if not fits or not all(0 <= n <= 255 for n in (*report.codes, *report.signals)):
        no_word(step, run, f"cannot tell how {count} tasks on {run.node} ended: it sent {len(report.codes)} exit codes")
        return
    run.codes, run.signals = list(report.codes), list(report.signals)
    run.usage = dict(report.usage)
    if report.timed_out:
        step.state = step.state or "TIMEOUT"
        step.error = step.error or f"the step was ended on {run.node}: its time limit was reached"
    if report.out_of_memory:
        step.state = step.state or "OUT_OF_MEMORY"
        step.error = step.error or f"the step was ended on {run.node}: it used more memory than it has there"


class StepTable:
    """All steps. Iteration gives a copy of the running ones: the table may change meanwhile."""

    def __init__(self) -> None:
        self._running: dict[tuple[JobId, int, int], Step] = {}
        self._by_token: dict[str, tuple[Step, StepPart]] = {}
        self._by_origin: dict[Origin, Step] = {}

    def __iter__(self) -> Iterator[Step]:
        return iter(list(self._running.values()))

    def add(self, step: Step) -> None:
        """Add a step; call it again when the step gets another run."""
        if not step.finished:
            self._running[(step.job.id, step.job.attempt, step.number)] = step
        for run in step.runs.values():
            self._by_token[run.token] = (step, run)
        if step.origin is not None:
            self._by_origin[step.origin] = step

    def is_over(self, step: Step) -> None:
        """Mark the step as no longer running."""
        self._running.pop((step.job.id, step.job.attempt, step.number), None)
        if step.origin is None:
            self.forget(step)

    def forget(self, step: Step) -> None:
        """Remove the step: no more messages can arrive for it."""
        for run in step.runs.values():
            self._by_token.pop(run.token, None)

    def leave(self, origin: Origin) -> Step | None:
        """Remove the origin that has gone, and return its step."""
        return self._by_origin.pop(origin, None)

    def running(self, job_id: JobId, attempt: int, number: int) -> Step | None:
        """Return the running step of this number."""
        return self._running.get((job_id, attempt, number))

    def of_job(self, job_id: JobId) -> list[Step]:
        """Return the job's running steps."""
        return [step for step in self if step.job.id == job_id]

    def find(self, token: str) -> tuple[Step, StepPart] | None:
        """Return the step of a token, and its run."""
        return self._by_token.get(token)

    def of_token(self, node: NodeName, token: str) -> tuple[Step, StepPart] | None:
        """Return the step of a token and its run, if the token was made for this node."""
        found = self.find(token)
        return found if found is not None and found[1].node == node else None

    def of_origin(self, origin: Origin) -> Step | None:
        """Return the step that `origin` requested, even if it has finished."""
        return self._by_origin.get(origin)

    def asked_for(self, node: NodeName) -> list[tuple[Origin, Step]]:
        """Return the steps requested on `node` or with tasks there, with their origins."""
        return [(origin, step) for origin, step in self._by_origin.items() if origin[0] == node or node in step.runs]


# ----- queues of steps that wait for CPUs of their job, in the order of their requests
# `StepService` decides which step may start.


class Waiting(NamedTuple):
    """A request of the step command behind `origin`.

    `options` None: they are read when its job has its nodes. `size`: of the request, in bytes.
    """

    origin: Origin
    request: protocol.StepRequest
    options: StepOptions | None = None
    uid: int = 0  # of its job
    size: int = 0


class StepQueues:
    """A queue for each job that has waiting steps."""

    def __init__(self) -> None:
        self._queues: dict[JobId, deque[Waiting]] = {}

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._queues

    def add(self, job_id: JobId, waiting: Waiting) -> None:
        """Add a step at the end of its job's queue."""
        self._queues.setdefault(job_id, deque()).append(waiting)

    def first(self, job_id: JobId) -> Waiting | None:
        """Return the first waiting step of the job; None: no step of the job waits."""
        return self._queues[job_id][0] if job_id in self._queues else None

    def take_first(self, job_id: JobId) -> None:
        """Remove the first step from the job's queue, which must not be empty."""
        self._queues[job_id].popleft()
        self._clear(job_id)

    def take_all(self, job_id: JobId) -> list[Waiting]:
        """Remove all steps of the job from its queue and return them."""
        return list(self._queues.pop(job_id, ()))

    def drop(self, origin: Origin) -> list[JobId]:
        """Remove the waiting steps of `origin`; return their jobs."""
        jobs = list(dict.fromkeys(job_id for at, job_id in self.origins() if at == origin))
        for job_id in jobs:
            self._queues[job_id] = deque(waiting for waiting in self._queues[job_id] if waiting.origin != origin)
            self._clear(job_id)
        return jobs

    def size_of(self, uid: int) -> int:
        """Return the bytes of the requests of the account's waiting steps."""
        return sum(waiting.size for queue in self._queues.values() for waiting in queue if waiting.uid == uid)

    def origins(self) -> list[tuple[Origin, JobId]]:
        """Return the origins of waiting steps, each with its job."""
        return [(waiting.origin, job_id) for job_id, queue in self._queues.items() for waiting in queue]

    def _clear(self, job_id: JobId) -> None:
        if not self._queues[job_id]:
            del self._queues[job_id]
