"""A job's events in words: what happened to it, in order, for `hctl story`."""

from __future__ import annotations

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
    Event,
    Exited,
    Held,
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
from hpcsched.model.exitcode import exit_words
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.job import Job
from hpcsched.model.units import format_time_s
from hpcsched.sched.explain.sentences import plural


def tell(job: Job, events: list[Event]) -> list[dict[str, Any]]:
    """Return the events with a sentence each."""
    told = []
    ending = False  # its attempt is being ended for good: what happens meanwhile brings it back no more
    for event in events:
        if isinstance(event, EndRequested):
            ending = not event.requeue
        elif isinstance(event, Requeued | Allocated):
            ending = False
        told.append({"at_s": event.at_s, "kind": type(event).__name__, "text": sentence(job, event, ending)})
    return told


def sentence(job: Job, event: Event, ending: bool) -> str:
    """Return what `event` did to `job`, in words; `ending`: its attempt was being ended for good."""
    match event:
        case Submitted():
            what = "as part of an array " if job.array_job_id is not None else ""
            return f"submitted {what}by {event.user} to partition {event.partition}"
        case Held():
            return f"held by {user_name(event.by_uid)}"
        case Released():
            return f"released by {user_name(event.by_uid)}"
        case Changed():
            return f"changed by {user_name(event.by_uid)}: {_changes(event)}"
        case Respecified():
            said = ", ".join(f"{name} = {value}" for name, value in event.changes.items())
            return f"changed by {user_name(event.by_uid)}: {said}"
        case BecameEligible():
            return "nothing but other jobs and resources keeps it waiting from now on"
        case Allocated():
            nodes = compress_hostlist(share.node for share in event.shares)
            cpus = sum(share.cpus for share in event.shares)
            less = (
                "" if event.time_limit_s is None else f", its time limit lowered to {format_time_s(event.time_limit_s)}"
            )
            return f"given {nodes} ({plural(cpus, 'cpu')}){less}"
        case Claimed():
            return f"{event.node} has taken its part"
        case Started():
            return "started on its first node"
        case Suspended():
            who = (
                f"by {user_name(event.by_uid)}"
                if event.by_uid is not None
                else f"so that job {event.for_job} has its cpus"
            )
            return f"suspended {who}"
        case Resumed():
            return "goes on" if event.by_uid is None else f"goes on: resumed by {user_name(event.by_uid)}"
        case NodesReserved():
            nodes = compress_hostlist(share.node for share in event.shares)
            return f"{nodes} is kept for it: what it needs there is being freed"
        case ShrinkAsked():
            who = f", job {event.for_job} waits for the others" if event.for_job is not None else ""
            return f"asked to make do with {compress_hostlist(event.nodes)}{who}"
        case NodesReleased():
            return f"gives {compress_hostlist(event.nodes)} back"
        case NodesAdded():
            return f"is given {compress_hostlist(share.node for share in event.shares)} as well"
        case NodesUnreserved():
            return f"nothing is kept for it any more: {event.why}"
        case EndRequested():
            back = ", to be queued again" if event.requeue else ""
            save = "" if event.save_s is None else f"; it has {event.save_s:g} s to save what it has"
            return f"to be ended as {event.outcome}{back}: {event.why or 'its step is over'}{save}"
        case Exited():
            extra = " at its time limit" if event.timed_out else " for want of memory" if event.out_of_memory else ""
            if event.unexecuted:
                return f"{event.node} could not execute its script: {event.unexecuted}{_elsewhere(event.requeue)}"
            words = exit_words(event.exit.code, event.exit.signal)
            told = (
                f"its script ended on {event.node}{extra} with exit code {event.exit}{f' ({words})' if words else ''}"
            )
            if event.saved_step is not None:
                told += f"; a rank was killed, and it is requeued to resume from step {event.saved_step}"
            return told + (f"; {OUTPUT_FULL}" if event.output_full else "")
        case LaunchRefused():
            return f"{event.node} could not start it: {event.why}{_elsewhere(event.requeue)}"
        case NodeCleared():
            return f"{event.node} has nothing left of it"
        case NodeLost():
            back = "; it goes back to the queue" if event.requeue and not ending else ""
            if event.node in job.left_nodes:
                back = "; it goes on without that node"
            return f"lost on {event.node}: {event.why}{back}"
        case NodeSilent():
            back = "; it will go back to the queue" if event.requeue and not ending else ""
            return f"{event.why}{back}"
        case Adopted():
            by = "" if event.by_uid is None else f" by {user_name(event.by_uid)}"
            return f"adopted{by} after the database was restored: it runs on"
        case SpoolFound():
            return f"found on {event.node} after an upgrade of hpcsched"
        case ClockStepped():
            how = "forward" if event.by_s > 0 else "back"
            by = format_time_s(round(abs(event.by_s)))
            return f"the head node's clock was set {how} by {by}: the job's times were moved along"
        case Requeued():
            return f"put back into the queue by {user_name(event.by_uid)}"
        case _:
            return type(event).__name__


def _elsewhere(requeue: bool) -> str:
    return "; it is tried on another node" if requeue else ""


def _changes(event: Changed) -> str:
    values = {name: getattr(event, name) for name in CHANGEABLE if name not in ("dependency", "dependency_any")}
    if event.dependency is not None:
        values["dependency"] = terms_text(event.dependency, any_one=bool(event.dependency_any)) or "none"
    return ", ".join(f"{name} = {value}" for name, value in values.items() if value is not None)
