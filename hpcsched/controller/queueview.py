"""The queue for whoever asks: which jobs are meant, and the lines that show them.

For squeue it is lenient: of several numbers those that there are, and nobody's jobs for a name that nobody has. For our own
commands it is strict: what is not there is more likely mistyped.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched.api.identity import Asker, is_account
from hpcsched.controller.queuerows import QueueRows
from hpcsched.controller.references import find_jobs, listed_of
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing import queue
from hpcsched.listing.formats import Look
from hpcsched.listing.queue import Listing, make_listing
from hpcsched.listing.table import DIM, painted
from hpcsched.listing.text import split_list
from hpcsched.model.components import components_of
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.job import ACTIVE, Job, JobState
from hpcsched.store.world import World

Query = dict[str, str]

_SHOWN = frozenset({JobState.PENDING, JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING})
_FILTERS = {
    "user": lambda job: (job.user, str(job.uid)),
    "name": lambda job: (job.spec.name,),
    "partition": lambda job: job.partition.split(","),
    "account": lambda job: (job.account,),
    "qos": lambda job: (job.qos or "normal",),
    "reservation": lambda job: (job.reservation,),
    "license": lambda job: tuple(name for name, _ in job.spec.licenses),
}
_LAYOUT = frozenset({"format", "long", "order", "array", "noheader", "dated", "time_format", "fit", "colour", "others"})
_OTHER = frozenset({"id", "state", "nodes", "expected", "strict"})


async def queue_text(world: World, kept: QueueRows, asker: Asker, query: Query, now_s: float) -> str:
    """Return the lines that `query` asks for. Raises RequestError."""
    listing = _listing(query)
    jobs = selected(world, asker, {name: query[name] for name in query if name not in _LAYOUT})
    look = Look(now_s, query.get("time_format", ""))
    layout = tuple(query.get(name, "") for name in ("format", "long", "order", "fit", "colour"))
    text = queue.queue_text(await kept.rows(jobs, listing, layout, asker, look), listing, look)
    return text + (_others(world, jobs, colour=listing.colour) if query.get("others") else "")


def _others(world: World, jobs: Iterable[Job], *, colour: bool) -> str:
    """Return the line about the jobs that are not among `jobs`, for a person who sees their own alone."""
    shown = {job.id for job in jobs}
    others = [job.state for job in world.jobs.values() if job.id not in shown]
    running, waiting = sum(state in ACTIVE for state in others), others.count(JobState.PENDING)
    if not running and not waiting:
        return ""
    return painted(f"others: {running} running, {waiting} waiting (hqueue -a)", DIM if colour else "") + "\n"


def _listing(query: Query) -> Listing:
    return make_listing(
        query.get("format", ""),
        long=query.get("long") == "1",
        order=query.get("order", ""),
        array=query.get("array") == "1",
        header=query.get("noheader") != "1",
        dated=query.get("dated") == "1",
        fit=query.get("fit") == "1",
        colour=query.get("colour") == "1",
    )


def selected(world: World, asker: Asker, query: Query) -> list[Job]:
    """Return the jobs that the filters ask for. Raises NotFoundError, RequestError."""
    unknown = set(query) - _OTHER - set(_FILTERS)
    if unknown:
        raise RequestError(f"cannot list jobs by {', '.join(sorted(unknown))}")
    strict = query.get("strict") == "1"
    if query.get("id"):
        jobs = _numbered(world, asker, query["id"], strict=strict)
    else:
        jobs = [one for job in world.jobs.values() for one in (components_of(job) if job.spec.components else (job,))]
    states = frozenset({JobState.PENDING}) if query.get("expected") else _states(query.get("state", ""))
    jobs = [job for job in jobs if job.state in states]
    if strict:
        _check_users(world, query.get("user", ""))
    for name, values_of in _FILTERS.items():
        if query.get(name):
            wanted = set(query[name].split(","))
            jobs = [job for job in jobs if not wanted.isdisjoint(values_of(job))]
    if query.get("nodes"):
        nodes = _nodes(world, query["nodes"])
        jobs = [job for job in jobs if any(share.node in nodes for share in job.shares)]
    return jobs


def _check_users(world: World, text: str) -> None:
    """Refuse the name of a user of whom nobody has heard: it is more likely mistyped than idle."""
    for name in text.split(",") if text else ():
        if not name.isdigit() and not is_account(name) and not any(job.user == name for job in world.jobs.values()):
            raise RequestError(f"Invalid user: {name}")


def _numbered(world: World, asker: Asker, text: str, *, strict: bool) -> list[Job]:
    references = split_list(text)
    found: dict[int, Job] = {}
    for reference in references:
        try:
            meant = find_jobs(world, reference, asker.uid)
            found |= {one.number: one for job in meant for one in listed_of(job, reference)}
        except NotFoundError:
            if strict or len(references) == 1:  # squeue shows of several those that there are
                raise
    return list(found.values())


def _states(text: str) -> frozenset[JobState]:
    words = set(text.upper().split(",")) - {""}
    if "ALL" in words:
        return frozenset(JobState)
    unknown = words - {state.value for state in JobState}
    if unknown:
        raise RequestError(f"Invalid job state specified: {', '.join(sorted(unknown))}")
    return frozenset(map(JobState, words)) or _SHOWN


def _nodes(world: World, text: str) -> frozenset[str]:
    names = expand_hostlist(text)
    for name in names:
        if name not in world.nodes:
            raise RequestError(f"Invalid node name specified: {name}")
    return frozenset(names)
