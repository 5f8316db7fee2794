"""One step as the controller follows it: its part on each node, how each part ended, and the row that is kept of it.

It knows neither the job's other steps nor who must be told. `StepService` alone changes these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from hpcnode.wire import protocol
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, JobState
from hpcsched.state.transaction import StepRecord
from hpcsched.steps.placement import Place

# ----- what nodes have measured of a step, as the columns of its row


_MOST = (
    2.0**53
)  # of a node that sends what cannot be: beyond this nothing is exact, and SQLite has no larger integers to spare


class Used(TypedDict):
    """What a step has used, by column; None: no node has said."""

    cpu_user_s: float | None
    cpu_system_s: float | None
    max_rss_kib: int | None
    disk_read_bytes: int | None
    disk_write_bytes: int | None


def used(usages: Iterable[Mapping[str, float]]) -> Used:
    """Return what the step has used by the word of each of its nodes."""
    told = list(usages)

    def values(name: str) -> list[float]:
        return [one[name] for one in told if name in one and 0 <= one[name] <= _MOST]

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
_UNKNOWN_CODE = 1  # for tasks of which no exit status will ever be known


@dataclass(slots=True)
class StepPart:
    """A step on one node. `launch` is None after a restart, and `place` if the controller before had not kept it."""

    node: NodeName
    token: str
    place: Place | None = None
    launch: protocol.Launch | None = None
    started: bool = False  # its launch has arrived
    ready: bool = False  # waits for Go, or has had it
    released: bool = False
    ended: bool = False
    revoked: bool = False  # no task of it has run or will
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
    asked_by: Origin | None = None  # its origin, also when that is gone; None: not known any more
    runs: dict[NodeName, StepPart] = field(default_factory=dict)
    kill_on_bad_exit: bool = False
    found: bool = False  # after a restart of the controller
    told: bool = False  # its step command knows that it has its nodes
    gone: bool = False  # its tasks were let go: all nodes were ready
    ending: bool = False
    left: bool = False  # its step command went away, as mpirun's daemons lose theirs when they have ended well
    finished: bool = False
    again: bool = False  # finished, and to be asked for again
    error: str = ""
    state: str = ""  # why it ends, if not by itself: a job state's name

    @property
    def is_whole(self) -> bool:
        """Whether it is known where each of its tasks is."""
        return len(self.runs) == len(self.nodes) and all(run.place is not None for run in self.runs.values())

    def finish(self) -> None:
        """It is over. One whose start a restart of the controller has prevented, and nothing else, is asked for again."""
        self.finished = True
        revoked = [run.revoked for run in self.runs.values()]
        if not self.found or not any(revoked) or self.error or self.state:
            return
        if self.is_whole and all(revoked):
            self.again, self.state = True, "CANCELLED"
        else:
            self.error = HALF_THERE

    def end(self) -> protocol.StepEnded:
        """Return what a step command is told of its end."""
        if self.again:
            return ASK_AGAIN
        return protocol.StepEnded(codes=self.by_rank("codes"), signals=self.by_rank("signals"), error=self.error)

    @property
    def owns_job(self) -> bool:
        """Whether the job was made for this step and is over with it."""
        return not self.job.spec.has_script and self.number == 0 and not self.job.spec.no_shell

    def in_rank_order(self) -> list[StepPart]:
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

    def by_rank(self, what: Literal["codes", "signals"]) -> list[int]:
        """Return the tasks' codes or signals by rank; for a step that was found again, by node and its ranks."""
        found: list[tuple[int, int]] = []
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


def blame_job(step: Step, job: Job) -> None:
    """Note in `step` why its job is being ended, unless that is for the end of its script alone."""
    if job.outcome is JobState.TIMEOUT:
        step.state = step.state or "TIMEOUT"
        step.error = step.error or f"job {job.display_id} is ended: its time limit was reached"
    elif job.requeue_wanted or job.outcome in _NOT_ITS_OWN:
        step.state = step.state or "CANCELLED"
        step.error = step.error or f"job {job.display_id} is ended: {job.reason_detail or job.outcome}"


def take_end(step: Step, run: StepPart, report: protocol.Report) -> None:
    """Put the final `report` on `run` into it and into `step`."""
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
    """Note that the tasks of `run` have no exit status, and in `step` why that is."""
    count = run.place.tasks.count if run.place is not None else 1
    run.ended = True
    run.codes, run.signals = [_UNKNOWN_CODE] * count, [0] * count
    step.error = step.error or why


def row_of(step: Step, ended_at_s: float | None = None) -> StepRecord:
    """Return the step's row for accounting; without `ended_at_s`, of a step that runs."""
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
