"""An explanation of why a job waits, in sentences with numbers.

The explanation has the needs of the job, the jobs ahead of it, the resources that each node lacks,
and the expected start with its cause.

Reads a snapshot and the plan of that snapshot; decides nothing. For each node it shows the
resources that are free now. A node that is free for a waiting job is reserved for a job ahead of
it. `what_would_start` asks the scheduler itself which smaller request would start now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.model.units import UNLIMITED_S, format_time_s
from hpcsched.sched.decisions import Plan
from hpcsched.sched.explain.sentences import lacks, listed, needs
from hpcsched.sched.explain.what_would_start import ExpectedPlace, WhatIf, smaller_requests
from hpcsched.sched.place.request import ResourceRequest
from hpcsched.sched.place.reserved_intervals import ReservedInterval
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.queue.priority import in_order, scale_of
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot

_IN_QUEUE = frozenset({Reason.RESOURCES, Reason.PRIORITY, Reason.RESERVATION})
NEAREST = 3
# Reasons that do not apply to every request of the user.
_DEPENDS_ON_REQUEST = frozenset({*_IN_QUEUE, Reason.NODES_UNAVAILABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of one waiting job.

    `position`: its place among the jobs that wait for resources in its partition (0: none).
    """

    job_id: JobId
    reason: Reason
    detail: str
    needs: str
    position: int = 0
    ahead: tuple[str, ...] = ()  # display ids, in order
    nodes: Mapping[str, str]  # the resources that each node that it may use lacks now; "": the node has room
    nearest: tuple[str, ...] = ()  # the nodes that lack the least
    expected_start_s: float | None = None
    firm: bool = False  # it starts no later if running jobs run to their time limits
    place: ExpectedPlace | None = None  # the nodes of that start, and the jobs that end before it
    smaller: tuple[str, ...] | None = None  # smaller requests that would start now; None: its size is not the reason


def explain(snapshot: Snapshot, policy: Policy, the_plan: Plan, job_id: JobId) -> Explanation | None:
    """Explain why job `job_id` waits, by `the_plan` of `snapshot`; None if it does not wait."""
    wait, job = the_plan.waits.get(job_id), _pending(snapshot, job_id)
    if wait is None or job is None:
        return None
    reason = None if _is_early(job, snapshot) else wait.reason
    ahead = _ahead(snapshot, policy, the_plan, job) if reason in _IN_QUEUE else None
    what_if = WhatIf(snapshot, policy, job) if reason in _DEPENDS_ON_REQUEST else None
    place = what_if.place() if what_if is not None else None
    lacking = _lacking(snapshot, policy, job)
    expected_s = wait.expected_start_s
    if expected_s is None and place is not None:
        expected_s = place.start_s
    return Explanation(
        job_id=job_id,
        reason=wait.reason,
        detail=wait.detail,
        needs=_needs(job.request),
        position=len(ahead) + 1 if ahead is not None else 0,
        ahead=tuple(map(_display_id, ahead or ())),
        nodes={name: listed(missing) for name, missing in lacking.items()},
        nearest=tuple(sorted(lacking, key=lambda name: len(lacking[name]))[:NEAREST]),
        expected_start_s=expected_s,
        firm=wait.reason is Reason.RESOURCES and policy.backfill is not Backfill.DEFAULT,
        place=place,
        smaller=smaller_requests(what_if, job.request) if what_if is not None else None,
    )


def in_words(explanation: Explanation, now_s: float) -> str:
    """Return the explanation as text: one line for each fact, nodes last."""
    lines = [f"{explanation.reason}: {explanation.detail}.", f"It needs {explanation.needs}."]
    if explanation.position:
        ahead = f", behind {listed(explanation.ahead)}" if explanation.ahead else ", the first"
        lines.append(f"Number {explanation.position} in line for its partition{ahead}.")
    lines.append(_start_words(explanation, now_s))
    if explanation.smaller:
        lines.append(f"It would start now {_either(explanation.smaller)}.")
    elif explanation.smaller is not None:
        lines.append("Nothing that is smaller in one thing alone would start now.")
    lines += [f"  {name} {verdict or 'has room now'}" for name, verdict in explanation.nodes.items()]
    return "\n".join(lines)


def _either(options: tuple[str, ...]) -> str:
    """Return ``with --nodes=1, --time=30:00 or without --exclusive``."""
    less = [option for option in options if not option.startswith("without")]
    more = [option for option in options if option.startswith("without")]
    words = ([f"with {less[0]}", *less[1:]] if less else []) + more
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _pending(snapshot: Snapshot, job_id: JobId) -> PendingJob | None:
    return next((job for job in snapshot.pending if job.id == job_id), None)


def _display_id(job: PendingJob) -> str:
    return job.display_id


def _needs(request: ResourceRequest) -> str:
    limit_s = request.time_limit_s
    return f"{needs(request.shape)} for {format_time_s(limit_s)}" if limit_s else needs(request.shape)


def _start_words(explanation: Explanation, now_s: float) -> str:
    if explanation.expected_start_s is None:
        return "When it will start is not known."
    in_s = max(0.0, explanation.expected_start_s - now_s)
    basis = "at the latest" if explanation.firm else "or so"
    place = explanation.place
    if explanation.reason not in _IN_QUEUE or (explanation.reason is Reason.RESERVATION and place is None):
        return f"It may start in {format_time_s(in_s)}."
    if place is not None and place.start_s == explanation.expected_start_s:
        return f"It starts in {format_time_s(in_s)} {basis}, on {listed(place.nodes)}, {_basis(place, explanation, now_s)}."
    return f"It starts in {format_time_s(in_s)} {basis}, if running jobs last to their time limits."


def _basis(place: ExpectedPlace, explanation: Explanation, now_s: float) -> str:
    """Name the jobs that must end before the start."""
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
    """Say whether the job is in a reservation that has not begun.

    Until the reservation begins, no request starts.
    """
    own = next((each for each in snapshot.reservations if each.name == job.reservation), None)
    return bool(job.reservation) and (own is None or not own.is_active(snapshot.now_s))


def _ahead(snapshot: Snapshot, policy: Policy, the_plan: Plan, job: PendingJob) -> list[PendingJob]:
    in_line = [
        other
        for other in snapshot.pending
        if (other.partition, other.reservation) == (job.partition, job.reservation)
        and (wait := the_plan.waits.get(other.id)) is not None
        and wait.reason in _IN_QUEUE
    ]
    ordered = in_order(in_line, snapshot.partitions, scale_of(snapshot), policy)
    return ordered[: next(at for at, other in enumerate(ordered) if other.id == job.id)]


def _lacking(snapshot: Snapshot, policy: Policy, job: PendingJob) -> dict[str, list[str]]:
    """Return the resources that each node that the job may use lacks for one share."""
    timeline = Timeline(snapshot, policy)
    found: dict[str, list[str]] = {}
    for view in (job, *job.others):
        partition = snapshot.partitions.get(view.partition)
        names = set(partition.nodes) if partition is not None else set()
        if len(view.request.shape.nodelist) == view.request.shape.nodes_max:
            names &= set(view.request.shape.nodelist)  # it cannot use another node
        for at, node in enumerate(snapshot.nodes):
            if node.name in names and node.name not in found:
                missing = lacks(view.request.shape, node, timeline.types[at], timeline.profiles[at].rooms[0])
                found[node.name] = [node.why_not] if node.why_not else missing + _reserved(view, node, snapshot)
    return found


def _reserved(job: PendingJob, node: NodeView, snapshot: Snapshot) -> list[str]:
    """Return the reservation that keeps the job off the node, in words.

    The result is a list of one sentence; it is empty if no reservation does.
    """
    now_s = snapshot.now_s
    own = [interval for interval in snapshot.reserved_intervals if interval.name == job.reservation]
    if job.reservation and (text := _outside_own(job, node, own, now_s)):
        return [text]
    if any(interval.overrides for interval in own):
        return []
    ends_s = min([now_s + (job.request.time_limit_s or UNLIMITED_S), *(interval.end_s for interval in own)])
    others = [
        interval
        for interval in snapshot.reserved_intervals
        if interval.name != job.reservation and node.name in interval.nodes and interval.start_s < ends_s
    ]
    if not others:
        return []
    first = min(others, key=lambda interval: interval.start_s)
    if first.start_s <= now_s:
        return [f"is reserved ({first.name}) for another {format_time_s(int(first.end_s - now_s))}"]
    in_s = format_time_s(int(first.start_s - now_s))
    return [f"is reserved ({first.name}) in {in_s}, before the job would have ended"]


def _outside_own(job: PendingJob, node: NodeView, own: Sequence[ReservedInterval], now_s: float) -> str:
    """Explain why the node is not in the job's `own` reservation, or not yet; "" if it is."""
    if not any(node.name in interval.nodes for interval in own):
        return f"is not in reservation {job.reservation}"
    begins_s = min((i.start_s for i in own if node.name in i.nodes and i.end_s > now_s), default=now_s)
    return f"is not reserved for it yet: in {format_time_s(int(begins_s - now_s))}" if begins_s > now_s else ""
