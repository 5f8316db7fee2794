"""The queue as text, for squeue: which jobs are meant, and the lines that show them.

Unlike the routes for our own commands it is lenient as squeue is: of several numbers those that there are, and nobody's
jobs for a name that nobody has.
"""

from __future__ import annotations

from hpcsched.api.identity import Asker
from hpcsched.controller.queuerows import QueueRows
from hpcsched.controller.references import find_jobs
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing.formats import Look
from hpcsched.listing.queue import Listing, make_listing, queue_lines
from hpcsched.listing.text import split_list
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.job import Job, JobState
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
_LAYOUT = frozenset({"format", "long", "order", "array", "noheader", "dated", "time_format"})
_OTHER = frozenset({"id", "state", "nodes", "expected"})


def queue_text(world: World, kept: QueueRows, asker: Asker, query: Query, now_s: float) -> str:
    """Return the lines that `query` asks for. Raises RequestError."""
    unknown = set(query) - _LAYOUT - _OTHER - set(_FILTERS)
    if unknown:
        raise RequestError(f"cannot list jobs by {', '.join(sorted(unknown))}")
    listing = _listing(query)
    jobs = selected(world, asker, query)
    if query.get("expected"):
        jobs = [job for job in jobs if job.state is JobState.PENDING]
    look = Look(now_s, query.get("time_format", ""))
    layout = tuple(query.get(name, "") for name in ("format", "long", "order"))
    lines = queue_lines(kept.rows(jobs, listing, layout, asker, look), listing, look)
    return "".join([f"{line}\n" for line in lines])


def _listing(query: Query) -> Listing:
    return make_listing(
        query.get("format", ""),
        long=query.get("long") == "1",
        order=query.get("order", ""),
        array=query.get("array") == "1",
        header=query.get("noheader") != "1",
        dated=query.get("dated") == "1",
    )


def selected(world: World, asker: Asker, query: Query) -> list[Job]:
    """Return the jobs that squeue's filters ask for. Raises NotFoundError, RequestError."""
    jobs = _numbered(world, asker, query["id"]) if query.get("id") else list(world.jobs.values())
    states = _states(query.get("state", ""))
    jobs = [job for job in jobs if job.state in states]
    for name, values_of in _FILTERS.items():
        if query.get(name):
            wanted = set(query[name].split(","))
            jobs = [job for job in jobs if not wanted.isdisjoint(values_of(job))]
    if query.get("nodes"):
        nodes = _nodes(world, query["nodes"])
        jobs = [job for job in jobs if any(share.node in nodes for share in job.shares)]
    return jobs


def _numbered(world: World, asker: Asker, text: str) -> list[Job]:
    references = split_list(text)
    found: dict[int, Job] = {}
    for reference in references:
        try:
            found |= {job.id: job for job in find_jobs(world, reference, asker.uid)}
        except NotFoundError:
            if len(references) == 1:  # as squeue: of several it shows those that there are
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
