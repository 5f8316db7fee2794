"""One step as the controller follows it: its part on each node, its end, and its row.

It knows neither the job's other steps nor the recipients of messages. Only `StepService` changes these
values.
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

# ----- resource usage of a step as its nodes measured it, as columns of its row


_MOST = 2.0**53  # larger values from a node are rejected: inexact as floats, and sums must fit in SQLite


class Used(TypedDict):
    """Resource usage of a step, by column; None: no node has reported."""

    cpu_user_s: float | None
    cpu_system_s: float | None
    max_rss_kib: int | None
    disk_read_bytes: int | None
    disk_write_bytes: int | None


def used(usages: Iterable[Mapping[str, float]]) -> Used:
    """Return the step's resource usage, from the reports of its nodes."""
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
    told: bool = False  # its step command knows that the step has its nodes
    gone: bool = False  # its tasks were released: all nodes were ready
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
