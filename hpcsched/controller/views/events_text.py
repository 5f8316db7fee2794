"""Tell the history of a job in sentences, for `hctl story`.

`SENTENCES` has one row for each kind of event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hpcsched.api.identity import user_name
from hpcsched.jobscript.dependency import terms_text
from hpcsched.lifecycle.events import (
    Adopted,
    Allocated,
    BecameEligible,
    Changed,
    Claimed,
    ClockStepped,
    EndRequested,
    Exited,
    Held,
    JobEvent,
    LaunchRefused,
    NodeCleared,
    NodeLost,
    NodesAdded,
    NodeSilent,
    NodesReleased,
    NodesReserved,
    NodesUnreserved,
    Released,
    Requeued,
    Respecified,
    Resumed,
    ShrinkAsked,
    SpoolFound,
    Started,
    Submitted,
    Suspended,
)
from hpcsched.lifecycle.job import CHANGEABLE, OUTPUT_FULL
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.job import Job, exit_words
from hpcsched.model.resources import Share
from hpcsched.model.units import format_time_s
from hpcsched.sched.sentences import plural


def tell(job: Job, events: list[JobEvent]) -> list[dict[str, Any]]:
    """Return the events, each with its time, its kind and a sentence."""
    told = []
    # True if the attempt was ended without a requeue: then a lost node does not requeue the job.
    ending = False
    for event in events:
        if isinstance(event, EndRequested):
            ending = not event.requeue
        elif isinstance(event, Requeued | Allocated):
            ending = False
        told.append({"at_s": event.at_s, "kind": type(event).__name__, "text": sentence(job, event, ending)})
    return told


def sentence(job: Job, event: JobEvent, ending: bool) -> str:
    """Return a sentence about `event` of `job`.

    `ending`: the attempt was being ended without a requeue.
    """
    match event:
        case NodeLost():
            return _node_lost(job, event, ending)
        case NodeSilent():
            return event.why + ("; it will go back to the queue" if event.requeue and not ending else "")
        case Submitted():
            what = "as part of an array " if job.array_job_id is not None else ""
            return f"submitted {what}by {event.user} to partition {event.partition}"
    return SENTENCES[type(event)](event)


def _node_lost(job: Job, event: NodeLost, ending: bool) -> str:
    back = "; it goes back to the queue" if event.requeue and not ending else ""
    if event.node in job.left_nodes:
        back = "; it continues without that node"
    return f"lost on {event.node}: {event.why}{back}"


def _respecified(event: Respecified) -> str:
    changes = ", ".join(f"{name} = {value}" for name, value in event.changes.items())
    return f"changed by {user_name(event.by_uid)}: {changes}"


def _allocated(event: Allocated) -> str:
    cpus = sum(share.cpus for share in event.shares)
    limit_s = event.time_limit_s
    lowered = "" if limit_s is None else f", its time limit lowered to {format_time_s(limit_s)}"
    return f"given {_nodes(event.shares)} ({plural(cpus, 'cpu')}){lowered}"


def _suspended(event: Suspended) -> str:
    if event.by_uid is None:
        return f"suspended so that job {event.for_job} has its cpus"
    return f"suspended by {user_name(event.by_uid)}"


def _shrink_asked(event: ShrinkAsked) -> str:
    waiting = f", job {event.for_job} waits for the others" if event.for_job is not None else ""
    return f"asked to make do with {compress_hostlist(event.nodes)}{waiting}"


def _end_requested(event: EndRequested) -> str:
    requeue = ", to be queued again" if event.requeue else ""
    grace = "" if event.save_s is None else f"; it has {event.save_s:g} s to save a checkpoint"
    return f"to be ended as {event.outcome}{requeue}: {event.why or 'its step is over'}{grace}"


def _exited(event: Exited) -> str:
    if event.unexecuted:
        return f"{event.node} could not execute its script: {event.unexecuted}{_elsewhere(event.requeue)}"
    cause = " at its time limit" if event.timed_out else " because it ran out of memory" if event.out_of_memory else ""
    words = exit_words(event.exit.code, event.exit.signal)
    text = f"its script ended on {event.node}{cause} with exit code {event.exit}{f' ({words})' if words else ''}"
    if event.saved_step is not None:
        text += f"; a rank was killed, and it is requeued to resume from step {event.saved_step}"
    return text + (f"; {OUTPUT_FULL}" if event.output_full else "")


def _adopted(event: Adopted) -> str:
    by = "" if event.by_uid is None else f" by {user_name(event.by_uid)}"
    return f"adopted{by} after the database was restored: it continues to run"


def _clock_stepped(event: ClockStepped) -> str:
    direction = "forward" if event.by_s > 0 else "back"
    by = format_time_s(round(abs(event.by_s)))
    return f"the head node's clock was set {direction} by {by}: the job's times were moved along"


SENTENCES: dict[type[JobEvent], Callable[[Any], str]] = {
    Adopted: _adopted,
    Allocated: _allocated,
    BecameEligible: lambda event: "eligible: it waits only for other jobs and for resources",
    Changed: lambda event: f"changed by {user_name(event.by_uid)}: {_changes(event)}",
    Claimed: lambda event: f"{event.node} has taken its part",
    ClockStepped: _clock_stepped,
    EndRequested: _end_requested,
    Exited: _exited,
    Held: lambda event: f"held by {user_name(event.by_uid)}",
    LaunchRefused: lambda event: f"{event.node} could not start it: {event.why}{_elsewhere(event.requeue)}",
    NodeCleared: lambda event: f"{event.node} has nothing left of it",
    NodesAdded: lambda event: f"is given {_nodes(event.shares)} as well",
    NodesReleased: lambda event: f"gives {compress_hostlist(event.nodes)} back",
    NodesReserved: lambda event: f"{_nodes(event.shares)} is reserved for it: its resources there are being freed",
    NodesUnreserved: lambda event: f"nothing is reserved for it any more: {event.why}",
    Released: lambda event: f"released by {user_name(event.by_uid)}",
    Requeued: lambda event: f"requeued by {user_name(event.by_uid)}",
    Respecified: _respecified,
    Resumed: lambda event: "resumed" if event.by_uid is None else f"resumed by {user_name(event.by_uid)}",
    ShrinkAsked: _shrink_asked,
    SpoolFound: lambda event: f"found on {event.node} after an upgrade of hpcsched",
    Started: lambda event: "started on its first node",
    Suspended: _suspended,
}


def _nodes(shares: Iterable[Share]) -> str:
    return compress_hostlist(share.node for share in shares)


def _elsewhere(requeue: bool) -> str:
    return "; it is tried on another node" if requeue else ""


def _changes(event: Changed) -> str:
    values = {name: getattr(event, name) for name in CHANGEABLE if name not in ("dependency", "dependency_any")}
    if event.dependency is not None:
        values["dependency"] = terms_text(event.dependency, any_one=bool(event.dependency_any)) or "none"
    return ", ".join(f"{name} = {value}" for name, value in values.items() if value is not None)
