"""One step as the controller follows it: its part on each node, how each part ended, and the row that is kept of it.

It knows neither the job's other steps nor who must be told. `StepService` alone changes these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcnode import protocol
from hpcsched.controller.measured import used
from hpcsched.controller.stepplace import Place
from hpcsched.controller.steprequest import StepOptions
from hpcsched.errors import ProtocolError
from hpcsched.launch.layout import NodeTasks
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, NodeName, Token
from hpcsched.model.job import Job, JobState
from hpcsched.store.rows import StepRow

Origin = tuple[NodeName, int]  # (node, stream of its agent); node "": a connection to the controller itself
HEAD = NodeName("")

_NOT_ITS_OWN = frozenset({JobState.CANCELLED, JobState.PREEMPTED, JobState.DEADLINE, JobState.NODE_FAIL})
_UNKNOWN_CODE = 1  # for tasks of which no exit status will ever be known


@dataclass(slots=True)
class Run:
    """A step on one node. `place` and `launch` are None for one that was found again after a restart."""

    node: NodeName
    token: str
    place: Place | None = None
    launch: protocol.Launch | None = None
    started: bool = False  # its launch has arrived
    ready: bool = False  # waits for Go, or has had it
    released: bool = False
    ended: bool = False
    barred: bool = False  # it never ran, and never will
    kept: int = 0  # the number of its node's report on its end, which the node keeps until the step command has the end
    codes: list[int] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    usage: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """A step and all its runs. `nodes` are in rank order; `runs` of a step found again may miss some of them."""

    job: Job
    number: int
    origin: Origin | None  # None: its step command is gone
    name: str
    nodes: tuple[NodeName, ...]
    ntasks: int
    started_at_s: float
    runs: dict[NodeName, Run] = field(default_factory=dict)
    kill_on_bad_exit: bool = False
    found: bool = False  # after a restart of the controller
    gone: bool = False  # its tasks were let go: all nodes were ready
    ending: bool = False
    left: bool = False  # its step command went away, as mpirun's daemons lose theirs when they have ended well
    finished: bool = False
    recorded: bool = False  # its row has an end
    error: str = ""
    again: bool = False  # nothing of it ran, for no reason that its command could know: it may ask once more
    state: str = ""  # why it ends, if not by itself: a job state's name

    @property
    def owns_job(self) -> bool:
        """Whether the job was made for this step and is over with it."""
        return not self.job.spec.script and self.number == 0

    def in_rank_order(self) -> list[Run]:
        """Return its runs, the one with rank 0 first."""
        return [self.runs[node] for node in self.nodes if node in self.runs]

    def started(self) -> protocol.StepStarted:
        """Return what a step command is told of it; all its runs have a place."""
        parts = [(run.place.tasks, run.token) for run in self.in_rank_order() if run.place is not None]
        scattered = [list(tasks.ranks) for tasks, _ in parts] if any(tasks.scattered for tasks, _ in parts) else []
        return protocol.StepStarted(
            job_id=self.job.id,
            step=self.number,
            tasks=[(tasks.node, tasks.first_rank, tasks.count, token) for tasks, token in parts],
            scattered=scattered,
        )

    def end(self) -> protocol.StepEnded:
        """Return what a step command is told of its end."""
        codes, signals = self.by_rank("codes"), self.by_rank("signals")
        return protocol.StepEnded(codes=codes, signals=signals, error=self.error, again=self.again)

    def by_rank(self, what: Literal["codes", "signals"]) -> list[int]:
        """Return the tasks' codes or signals by rank; for a step that was found again, by node and its ranks."""
        found = []
        for run in self.in_rank_order():
            values: list[int] = getattr(run, what)
            ranks = run.place.tasks.ranks if run.place is not None else range(len(found), len(found) + len(values))
            found += zip(ranks, values, strict=False)
        return [value for _, value in sorted(found)]

    def outcome(self) -> str:
        """Return as what it has ended, a job state's name: one that was left and yet ended well has completed."""
        bad = self.went_badly() or bool(self.error)
        if self.state and not (self.left and self.state == "CANCELLED" and not bad):
            return self.state
        return "FAILED" if bad else "COMPLETED"

    def went_badly(self) -> bool:
        """Return whether a task of it failed."""
        return any(any(run.codes) or any(run.signals) for run in self.runs.values())


def new_step(
    job: Job, number: int, origin: Origin, options: StepOptions, tasks: tuple[NodeTasks, ...], now_s: float
) -> Step:
    """Return a step that begins, with these tasks on its nodes; it has no runs yet."""
    return Step(
        job=job,
        number=number,
        origin=origin,
        name=options.name,
        nodes=tuple(part.node for part in tasks),
        ntasks=sum(part.count for part in tasks),
        started_at_s=now_s,
        kill_on_bad_exit=options.kill_on_bad_exit,
    )


def found_again(job: Job, number: int, report: protocol.Report, row: StepRow | None) -> Step:
    """Return the step of a controller before us of which a node reports; `row`: what that one has kept of it."""
    assert report.stream_to is not None
    origin = (NodeName(report.stream_to.node), report.stream_to.stream)
    gone = origin[0] == HEAD  # connections to the head ended with the controller that held them
    nodes = row.nodes if row is not None else [share.node for share in job.shares]
    return Step(
        job=job,
        number=number,
        origin=None if gone else origin,
        name=row.name if row is not None else "",
        nodes=tuple(NodeName(node) for node in nodes),
        ntasks=row.ntasks if row is not None else 0,
        started_at_s=(row.started_at_s if row is not None else None) or report.at_s,
        found=True,
        recorded=row is not None and row.ended_at_s is not None,
        ending=gone,
        state="CANCELLED" if gone else "",
    )


def blame_job(step: Step, job: Job) -> None:
    """Note in `step` why its job is being ended, unless that is for the end of its script alone."""
    if job.outcome is JobState.TIMEOUT:
        step.state = step.state or "TIMEOUT"
        step.error = step.error or f"job {job.display_id} is ended: its time limit was reached"
    elif job.requeue_wanted or job.outcome in _NOT_ITS_OWN:
        step.state = step.state or "CANCELLED"
        step.error = step.error or f"job {job.display_id} is ended: {job.reason_detail or job.outcome}"


def take_end(step: Step, run: Run, report: protocol.Report) -> None:
    """Put the final `report` on `run` into it and into `step`."""
    run.ended = True
    run.barred = report.status == protocol.BARRED
    match report.status:
        case protocol.ENDED:
            _take_codes(step, run, report)
        case protocol.REFUSED:
            no_word(step, run, f"cannot start the step on {run.node}: {report.why or 'refused'}")
        case protocol.BARRED if step.ending:
            no_word(step, run, "")
        case protocol.BARRED:
            no_word(step, run, f"cannot start the step on {run.node}: its job is being ended there")
        case _:
            no_word(step, run, f"cannot tell how the tasks on {run.node} ended: {report.why or 'their minder died'}")


def no_word(step: Step, run: Run, why: str) -> None:
    """Note that the tasks of `run` have no exit status, and in `step` why that is."""
    count = run.place.tasks.count if run.place is not None else 1
    run.ended = True
    run.codes, run.signals = [_UNKNOWN_CODE] * count, [0] * count
    step.error = step.error or why


def row_of(step: Step, ended_at_s: float | None = None) -> StepRow:
    """Return the step's row for accounting; without `ended_at_s`, of a step that runs."""
    runs = step.in_rank_order()
    code = max((code for run in runs for code in run.codes), default=0)
    signal = max((signal for run in runs for signal in run.signals), default=0)
    ended = ended_at_s is not None
    return StepRow(
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


def step_reports(inventory: Iterable[Mapping[str, Any]]) -> list[protocol.Report]:
    """Return the reports in an agent's inventory that are of steps other than the batch step.

    Raises ProtocolError for what is no report.
    """
    try:
        reports = [protocol.from_json({**fields, "type": "Report"}) for fields in inventory]
    except protocol.WireError as error:
        raise ProtocolError(str(error)) from None
    return [report for report in reports if Token.parse(report.token).step not in (BATCH_STEP, ALLOC_STEP)]


def _take_codes(step: Step, run: Run, report: protocol.Report) -> None:
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
