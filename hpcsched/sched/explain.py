"""Why does my job wait? In words with numbers: what it needs, who is ahead, what each node lacks, when it may start.

Reads a snapshot and the plan that was made of it; decides nothing. Node by node it asks what is free now; a node that is free
for a job which still waits is kept for one ahead of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.model.units import format_time_s
from hpcsched.sched.plan import Plan
from hpcsched.sched.policy import Policy
from hpcsched.sched.priority import in_order, scale_of
from hpcsched.sched.snapshot import PendingJob, Snapshot
from hpcsched.sched.timeline import Timeline
from hpcsched.sched.words import lacks, listed, needs

_IN_LINE = frozenset({Reason.RESOURCES, Reason.PRIORITY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job waits. `position` is its place among those that wait for resources in its partition (0: it is not in line)."""

    job_id: JobId
    reason: Reason
    detail: str
    needs: str
    position: int = 0
    ahead: tuple[str, ...] = ()  # display ids, first one first
    nodes: Mapping[str, str]  # what each node of its partition lacks now; empty: it could take a share
    expected_start_s: float | None = None


def explain(snapshot: Snapshot, policy: Policy, the_plan: Plan, job_id: JobId) -> Explanation | None:
    """Return why job `job_id` waits by `the_plan` of `snapshot`; None if it does not wait."""
    wait = the_plan.waits.get(job_id)
    job = next((job for job in snapshot.pending if job.id == job_id), None)
    if wait is None or job is None:
        return None
    ahead = _ahead(snapshot, policy, the_plan, job) if wait.reason in _IN_LINE else None
    return Explanation(
        job_id=job_id,
        reason=wait.reason,
        detail=wait.detail,
        needs=needs(job.request.shape),
        position=len(ahead) + 1 if ahead is not None else 0,
        ahead=tuple(other.display_id for other in ahead or ()),
        nodes=_verdicts(snapshot, policy, job),
        expected_start_s=wait.expected_start_s,
    )


def in_words(explanation: Explanation, now_s: float) -> str:
    """Return the explanation as text: one line for each thing, nodes last."""
    lines = [f"{explanation.reason}: {explanation.detail}.", f"It needs {explanation.needs}."]
    if explanation.position:
        ahead = f", behind {listed(explanation.ahead)}" if explanation.ahead else ", the first"
        lines.append(f"Number {explanation.position} in line for its partition{ahead}.")
    lines.append(_start_words(explanation, now_s))
    lines += [f"  {name} {verdict or 'could take a share now'}" for name, verdict in explanation.nodes.items()]
    return "\n".join(lines)


def _start_words(explanation: Explanation, now_s: float) -> str:
    if explanation.expected_start_s is None:
        return "When it will start is not known."
    in_s = max(0.0, explanation.expected_start_s - now_s)
    basis = "at the latest" if explanation.reason is Reason.RESOURCES else "or so"
    if explanation.reason is Reason.BEGIN_TIME:
        return f"It may start in {format_time_s(in_s)}."
    return f"It starts in {format_time_s(in_s)} {basis}, if running jobs last to their time limits."


def _ahead(snapshot: Snapshot, policy: Policy, the_plan: Plan, job: PendingJob) -> list[PendingJob]:
    in_line = [
        other
        for other in snapshot.pending
        if other.partition == job.partition
        and (wait := the_plan.waits.get(other.id)) is not None
        and wait.reason in _IN_LINE
    ]
    ordered = in_order(in_line, snapshot.partitions, scale_of(snapshot), policy)
    return ordered[: next(at for at, other in enumerate(ordered) if other.id == job.id)]


def _verdicts(snapshot: Snapshot, policy: Policy, job: PendingJob) -> dict[str, str]:
    timeline = Timeline(snapshot, policy)
    partition = snapshot.partitions.get(job.partition)
    names = set(partition.nodes) if partition is not None else set()
    verdicts: dict[str, str] = {}
    for at, node in enumerate(snapshot.nodes):
        if node.name not in names:
            continue
        missing = lacks(job.request.shape, node, timeline.types[at], timeline.profiles[at].rooms[0])
        verdicts[node.name] = node.why_not or listed(missing)
    return verdicts
