"""The attempts of a job: what each held, on which node, and when, from the job's events.

Knows no periods, prices or users: `hpcsched.metrics.usage_report` counts by these.

The events are replayed by the transition table, and a holding begins and ends where the job is charged for it. So the holdings
of all attempts add up to what the job is charged (`Job.charged_cpu_s`): suspended time is not in them, nor is the time between
the end of a script and a late report of it. A step of the clock moves what is held, not what was given back before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcsched.lifecycle.events import Allocated, ClockStepped, Exited, JobEvent, Submitted
from hpcsched.lifecycle.job import apply
from hpcsched.model.ids import NodeName
from hpcsched.model.job import FINAL, Job, JobState


class Holding(NamedTuple):
    """What an attempt held of a node, in Unix seconds; `until_s` None: it still holds it."""

    node: NodeName
    since_s: float
    until_s: float | None
    cpus: int
    mem_mib: int
    gpus: float  # shards count as their part of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One life of a job, from its allocation to its end.

    `waited_s`: how long it waited for resources before. `is_requeued`: it ended, and another attempt follows.
    """

    number: int
    waited_s: float
    allocated_at_s: float
    ended_at_s: float | None = None
    is_requeued: bool = False
    holdings: tuple[Holding, ...] = ()


# The kinds of events of a job that waited, ran once to its end on one node, and was never changed.
_ORDINARY = frozenset(
    (*waits, "Allocated", *claims, "Started", "Exited")
    for waits in ((), ("BecameEligible",))
    for claims in ((), ("Claimed",))
)


def ordinary_attempts(job: Job, course: Sequence[tuple[str, float]]) -> tuple[Attempt, ...] | None:
    """Return what `attempts_of` does, from kinds and times of the events alone.

    None: they must be replayed.

    Nearly all jobs are like that, and a replay takes ten times as long.
    """
    if tuple([kind for kind, _ in course]) not in _ORDINARY or len(job.shares) != 1 or job.ended_at_s is None:
        return None
    if job.state not in FINAL or job.suspended_s or job.spec.components:
        return None
    at_s = dict(course)
    since_s, exited_s = at_s["Allocated"], at_s["Exited"]
    waited_s = since_s - at_s.get("BecameEligible", job.submitted_at_s)
    until_s = min(exited_s, job.ended_at_s)
    held = job.shares[0]
    holding = Holding(held.node, since_s, until_s, held.cpus, held.mem_mib, held.gpu_amount)
    return (
        Attempt(
            number=0,
            waited_s=max(0.0, waited_s),
            allocated_at_s=since_s,
            ended_at_s=until_s,
            holdings=(holding,) if until_s > since_s else (),
        ),
    )


def attempts_of(job: Job, events: Iterable[JobEvent]) -> tuple[Attempt, ...]:
    """Return the attempts of `job`, whose events these are, all but `Submitted`.

    Raises InvariantError if the events cannot be those of the job.
    """
    now = Job(
        id=job.id,
        spec_id=job.spec_id,
        spec=job.spec,
        uid=job.uid,
        user=job.user,
        submitted_at_s=job.submitted_at_s,
        array_job_id=job.array_job_id,
        array_task_id=job.array_task_id,
        partition=job.partition,
    )
    found: list[Attempt] = []
    held: list[Holding] = []
    for event in events:
        if isinstance(event, Submitted):
            continue
        before, now = now, apply(now, event)
        if isinstance(event, Allocated):
            held = []
            found.append(_begun(before, event))
        elif before.held_nodes and not isinstance(event, ClockStepped):
            held += _given_back(before, now, event)
            if not now.held_nodes:
                found[-1] = replace(
                    found[-1],
                    ended_at_s=_until_s(now, event),
                    is_requeued=now.state is JobState.PENDING,
                    holdings=_joined(held),
                )
    if now.held_nodes:
        found[-1] = replace(found[-1], holdings=_joined([*held, *_still_held(now)]))
    return tuple(found)


def _begun(before: Job, event: Allocated) -> Attempt:
    since_s = before.submitted_at_s if before.accrued_from_s is None else before.accrued_from_s
    return Attempt(number=before.attempt, waited_s=max(0.0, event.at_s - since_s), allocated_at_s=event.at_s)


def _until_s(after: Job, event: JobEvent) -> float:
    """Return until when resources are charged that `event` takes from the job."""
    is_exit = isinstance(event, Exited) and after.ended_at_s is not None
    return min(event.at_s, after.ended_at_s) if is_exit and after.ended_at_s is not None else event.at_s


def _given_back(before: Job, after: Job, event: JobEvent) -> list[Holding]:
    """Return what the job is charged for by this event.

    That is all that it held since the last charge, or what it held of nodes that it gives back.
    """
    since_s = before.charged_until_s if before.charged_until_s is not None else before.allocated_at_s
    if since_s is None or before.suspended_at_s is not None:
        return []
    is_settled = after.charged_until_s != before.charged_until_s
    nodes = before.held_nodes if is_settled else set(before.held_nodes).difference(after.held_nodes)
    until_s = _until_s(after, event)
    return _holdings(before, nodes, since_s, until_s) if until_s > since_s else []


def _still_held(job: Job) -> list[Holding]:
    since_s = job.charged_until_s if job.charged_until_s is not None else job.allocated_at_s
    if since_s is None or job.suspended_at_s is not None:
        return []
    return _holdings(job, job.held_nodes, since_s, None)


def _holdings(job: Job, nodes: Iterable[NodeName], since_s: float, until_s: float | None) -> list[Holding]:
    shares = {share.node: share for share in (*job.joining, *job.leaving, *job.shares)}
    return [
        Holding(node, since_s, until_s, shares[node].cpus, shares[node].mem_mib, shares[node].gpu_amount)
        for node in nodes
    ]


def _joined(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    """Return the holdings, of which those that continue each other are one, by node and time."""
    found: list[Holding] = []
    for one in sorted(holdings, key=lambda holding: (holding.node, holding.since_s)):
        last = found[-1] if found else None
        if last is not None and last.until_s == one.since_s and last[0] == one[0] and last[3:] == one[3:]:
            found[-1] = last._replace(until_s=one.until_s)
        else:
            found.append(one)
    return tuple(found)
