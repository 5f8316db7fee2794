"""Why does my job wait? In words with numbers: what it needs, who is ahead, what each node lacks, when it may start and why then.

Reads a snapshot and the plan that was made of it; decides nothing. Node by node it asks what is free now; a node that is free
for a job which still waits is kept for one ahead of it. What smaller request would start now is asked of the scheduler
itself (`turn`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.model.units import UNLIMITED_S, format_time_s
from hpcsched.sched.decisions import Plan
from hpcsched.sched.explain.sentences import lacks, listed, needs
from hpcsched.sched.explain.what_would_start import ExpectedPlace, WhatIf, smaller_requests
from hpcsched.sched.place.request import ResourceRequest
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.queue.priority import in_order, scale_of
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot

_IN_LINE = frozenset({Reason.RESOURCES, Reason.PRIORITY, Reason.RESERVATION})
# Waits that another request might not have had.
_OF_REQUEST = frozenset({*_IN_LINE, Reason.NODES_UNAVAILABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job waits. `position` is its place among those that wait for resources in its partition (0: it is not in line)."""

    job_id: JobId
    reason: Reason
    detail: str
    needs: str
    position: int = 0
    ahead: tuple[str, ...] = ()  # display ids, first one first
    nodes: Mapping[str, str]  # what each node that it may get lacks now; empty: it could take a share
    nearest: tuple[str, ...] = ()  # of these nodes, those that lack least
    expected_start_s: float | None = None
    firm: bool = False  # it starts no later than that if running jobs last to their time limits
    place: ExpectedPlace | None = None  # what that start is based on
    smaller: tuple[str, ...] | None = None  # what would start now instead; None: was not asked, it is no matter of size


def explain(snapshot: Snapshot, policy: Policy, the_plan: Plan, job_id: JobId) -> Explanation | None:
    """Return why job `job_id` waits by `the_plan` of `snapshot`; None if it does not wait."""
    wait = the_plan.waits.get(job_id)
    job = next((job for job in snapshot.pending if job.id == job_id), None)
    if wait is None or job is None:
        return None
    early = _is_early(job, snapshot)
    ahead = _ahead(snapshot, policy, the_plan, job) if wait.reason in _IN_LINE and not early else None
    turn = WhatIf(snapshot, policy, job) if wait.reason in _OF_REQUEST and not early else None
    place = turn.place() if turn is not None else None
    verdicts = _verdicts(snapshot, policy, job)
    expected_s = wait.expected_start_s
    return Explanation(
        job_id=job_id,
        reason=wait.reason,
        detail=wait.detail,
        needs=_needs(job.request),
        position=len(ahead) + 1 if ahead is not None else 0,
        ahead=tuple(other.display_id for other in ahead or ()),
        nodes={name: listed(missing) for name, missing in verdicts.items()},
        nearest=tuple(sorted(verdicts, key=lambda name: len(verdicts[name]))[:NEAREST]),
        expected_start_s=place.start_s if expected_s is None and place is not None else expected_s,
        firm=wait.reason is Reason.RESOURCES and policy.backfill is not Backfill.DEFAULT,
        place=place,
        smaller=smaller_requests(turn, job.request) if turn is not None else None,
    )


NEAREST = 3


def in_words(explanation: Explanation, now_s: float) -> str:
    """Return the explanation as text: one line for each thing, nodes last."""
    lines = [f"{explanation.reason}: {explanation.detail}.", f"It needs {explanation.needs}."]
    if explanation.position:
        ahead = f", behind {listed(explanation.ahead)}" if explanation.ahead else ", the first"
        lines.append(f"Number {explanation.position} in line for its partition{ahead}.")
    lines.append(_start_words(explanation, now_s))
    if explanation.smaller:
        lines.append(f"It would start now {_either(explanation.smaller)}.")
    elif explanation.smaller is not None:
        lines.append("Nothing that is smaller in one thing alone would start now.")
    lines += [f"  {name} {verdict or 'could take a share now'}" for name, verdict in explanation.nodes.items()]
    return "\n".join(lines)


def _either(options: tuple[str, ...]) -> str:
    """Return ``with --nodes=1, --time=30:00 or without --exclusive``."""
    less = [option for option in options if not option.startswith("without")]
    more = [option for option in options if option.startswith("without")]
    words = ([f"with {less[0]}", *less[1:]] if less else []) + more
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _needs(request: ResourceRequest) -> str:
    limit_s = request.time_limit_s
    return f"{needs(request.shape)} for {format_time_s(limit_s)}" if limit_s else needs(request.shape)


def _start_words(explanation: Explanation, now_s: float) -> str:
    if explanation.expected_start_s is None:
        return "When it will start is not known."
    in_s = max(0.0, explanation.expected_start_s - now_s)
    basis = "at the latest" if explanation.firm else "or so"
    place = explanation.place
    if explanation.reason not in _IN_LINE or (explanation.reason is Reason.RESERVATION and place is None):
        return f"It may start in {format_time_s(in_s)}."
    if place is not None and place.start_s == explanation.expected_start_s:
        return f"It starts in {format_time_s(in_s)} {basis}, on {listed(place.nodes)}, {_basis(place, explanation, now_s)}."
    return f"It starts in {format_time_s(in_s)} {basis}, if running jobs last to their time limits."


def _basis(place: ExpectedPlace, explanation: Explanation, now_s: float) -> str:
    """Return whose ends the start waits for."""
    ids = [display_id for display_id, _ in place.until_ended]
    if not ids:
        if explanation.ahead:
            return "when its turn comes, if all jobs last to their time limits"
        return "when they are not reserved any more"
    jobs = f"job {ids[0]} has" if len(ids) == 1 else f"jobs {listed(ids)} have"
    last_s = place.until_ended[0][1]
    then = f", the last in {format_time_s(max(0.0, last_s - now_s))}" if len(ids) > 1 else ""
    return f"when {jobs} ended by {'its' if len(ids) == 1 else 'their'} time limit{'s' if len(ids) > 1 else ''}{then}"


def _is_early(job: PendingJob, snapshot: Snapshot) -> bool:
    """Say whether the job is in a reservation that has not begun: until then no request would start."""
    mine = next((one for one in snapshot.reservations if one.name == job.reservation), None)
    return bool(job.reservation) and (mine is None or not mine.is_active(snapshot.now_s))


def _ahead(snapshot: Snapshot, policy: Policy, the_plan: Plan, job: PendingJob) -> list[PendingJob]:
    in_line = [
        other
        for other in snapshot.pending
        if (other.partition, other.reservation) == (job.partition, job.reservation)
        and (wait := the_plan.waits.get(other.id)) is not None
        and wait.reason in _IN_LINE
    ]
    ordered = in_order(in_line, snapshot.partitions, scale_of(snapshot), policy)
    return ordered[: next(at for at, other in enumerate(ordered) if other.id == job.id)]


def _verdicts(snapshot: Snapshot, policy: Policy, job: PendingJob) -> dict[str, list[str]]:
    """Return what each node that it may get of its partitions lacks for a share of it."""
    timeline = Timeline(snapshot, policy)
    found: dict[str, list[str]] = {}
    for view in (job, *job.others):
        partition = snapshot.partitions.get(view.partition)
        names = set(partition.nodes) if partition is not None else set()
        if len(view.request.shape.nodelist) == view.request.shape.nodes_max:
            names &= set(view.request.shape.nodelist)  # they are all that it wants
        for at, node in enumerate(snapshot.nodes):
            if node.name in names and node.name not in found:
                missing = lacks(view.request.shape, node, timeline.types[at], timeline.profiles[at].rooms[0])
                found[node.name] = [node.why_not] if node.why_not else missing + _reserved(view, node, snapshot)
    return found


def _reserved(job: PendingJob, node: NodeView, snapshot: Snapshot) -> list[str]:
    """Return in words which reservation keeps the job from the node, as a list of one; empty: none does."""
    now_s = snapshot.now_s
    ends_s = now_s + (job.request.time_limit_s or UNLIMITED_S)
    own = [block for block in snapshot.reserved_intervals if block.name == job.reservation]
    ends_s = min([ends_s, *(block.end_s for block in own)])
    if job.reservation and not any(node.name in block.nodes for block in own):
        return [f"is not in reservation {job.reservation}"]
    mine = [block for block in own if node.name in block.nodes and block.end_s > now_s]
    if mine and (begins_s := min(block.start_s for block in mine)) > now_s:
        return [f"is not reserved for it yet: in {format_time_s(int(begins_s - now_s))}"]
    if any(block.overrides for block in own):
        return []
    blocks = [
        block for block in snapshot.reserved_intervals if block.name != job.reservation and node.name in block.nodes
    ]
    first = min((block for block in blocks if block.start_s < ends_s), key=lambda block: block.start_s, default=None)
    if first is None:
        return []
    if first.start_s <= now_s:
        return [f"is reserved ({first.name}) for another {format_time_s(int(first.end_s - now_s))}"]
    return [
        f"is reserved ({first.name}) in {format_time_s(int(first.start_s - now_s))}, before the job would have ended"
    ]
