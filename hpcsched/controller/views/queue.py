"""Show the queue: its lines, priorities and shares, and why and when a job starts.

For squeue, selection is lenient: of several job ids it shows those that exist, and for an unknown name it shows no jobs. For
hpcsched's own commands it is strict, because an unknown name is more likely mistyped. Reads the cluster and changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

from hpcsched.api.connection_limits import AnswerPauses
from hpcsched.api.identity import is_account
from hpcsched.api.views import JobView, elapsed_s, job_view, jobs_text, json_text, wait_detail
from hpcsched.auth.authorize import AccessPolicy, Action, Identity, Reach, allows, reach
from hpcsched.controller.energy import EnergyLedger
from hpcsched.controller.requests.job_ids import MAX_TASKS, check_references, find_jobs, is_special, listed_of
from hpcsched.controller.usage_ledger import charged, used_now
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing import queue
from hpcsched.listing.formats import Look
from hpcsched.listing.jobs import SPECIAL_EXIT, index_ranges
from hpcsched.listing.queue import Listing, QueueRow, make_listing, ranks_of, row_of
from hpcsched.listing.text import DIM, painted, split_list
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.ids import JobId
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState, Reason, components_of
from hpcsched.model.units import whole_number
from hpcsched.sched.energy import advice, circuit_watts
from hpcsched.sched.explain import WhatIf, explain, in_words
from hpcsched.sched.fairshare import ShareUsage, UsedResources, share_usages
from hpcsched.sched.policy import Policy
from hpcsched.sched.preempt import full_plan
from hpcsched.sched.priority import Breakdown, breakdown_of, scale_of
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot, node_view
from hpcsched.state.cluster import ClusterState

Json = dict[str, Any]


# ----- why a job waits and when it will start, by the scheduler itself
# Pure: it works on a snapshot. It may run in its own thread, so that a long queue delays only the client that asked.


def first_waiting(jobs: Sequence[Job]) -> Job:
    """Return the array task to explain: the first that waits, if any."""
    return next((job for job in jobs if job.state is JobState.PENDING), jobs[0])


def why_words(snapshot: Snapshot, policy: Policy, job_id: JobId) -> Json:
    """Return why a job waits, as text lines and as values; empty if it would start now."""
    found = explain(snapshot, policy, full_plan(snapshot, policy), job_id)
    if found is None:
        return {}
    return {
        "lines": in_words(found, snapshot.now_s).splitlines(),
        "needs": found.needs,
        "position": found.position,
        "ahead": list(found.ahead),
        "nodes": dict(found.nodes),
        "nearest": list(found.nearest),
        "expected_start_s": found.expected_start_s,
        "expected_place": asdict(found.place) if found.place is not None else None,
        "smaller": list(found.smaller or ()),
        "cheaper": found.cheaper,
    }


def first_start(snapshot: Snapshot, policy: Policy, job_id: JobId, identity: Identity) -> Json:
    """Return when and where a job of the snapshot would start, and why not at once.

    The job was not submitted.
    """
    job = next(job for job in snapshot.pending if job.id == job_id)
    made = full_plan(snapshot, policy)
    answer: Json = {
        "job_id": job_id,
        "partition": job.partition,
        "start_s": None,
        "nodes": [],
        "node_list": "",
        "cpus": 0,
        "cheaper": advice(snapshot, job, job.request.time_limit_s),
    }
    for start in made.starts:
        if start.job_id == job_id:
            nodes = [share.node for share in start.shares]
            answer |= {"start_s": snapshot.now_s, "nodes": nodes, "node_list": compress_hostlist(nodes)}
            answer |= {"cpus": sum(share.cpus for share in start.shares), "partition": start.partition}
            text = f"would start at once on {answer['node_list']} in partition {start.partition}"
            return answer | {"reason": "None", "text": text}
    wait = made.waits[job_id]
    answer |= {"reason": wait.reason.value, "start_s": wait.expected_start_s}
    place = WhatIf(snapshot, policy, job).place() if wait.reason in (Reason.RESOURCES, Reason.PRIORITY) else None
    if place is not None:
        answer |= {"start_s": place.start_s, "nodes": list(place.nodes), "node_list": compress_hostlist(place.nodes)}
        answer |= {"cpus": place.cpus, "partition": place.partition}
    detail = wait_detail(wait, identity)
    return answer | {"text": f"would wait in partition {job.partition} ({wait.reason}): {detail}"}


# ----- priorities, licences and fair share as JSON (version 1), for `hprio`, `hctl` and `hshare`


WEIGHED = ("age", "assoc", "fairshare", "size", "partition", "qos")


def priority_views(snapshot: Snapshot, policy: Policy, wanted: Iterable[JobId]) -> Json:
    """Return the priority of each waiting job of `wanted`, with its components."""
    scale = scale_of(snapshot)
    ids = set(wanted)
    jobs = []
    for job in snapshot.pending:
        for view in (job, *job.others):
            if job.id in ids:
                parts = breakdown_of(view, snapshot.partitions.get(view.partition), scale, policy)
                jobs.append(_priority_view(view, parts))
    weights = {name: getattr(policy, f"weight_{name}") for name in ("site", *WEIGHED)}
    return {"jobs": jobs, "weights": {**weights, "tres": dict(policy.weights_tres)}}


def _priority_view(job: PendingJob, parts: Breakdown) -> Json:
    factors = dict(parts.factors)
    return {
        "id": job.id,
        "display_id": job.display_id,
        "user": job.user,
        "account": job.account,
        "qos": job.qos,
        "partition": job.partition,
        "priority": parts.total,
        "fixed": parts.fixed,
        "weighted": {name: getattr(parts, name) for name in ("site", *WEIGHED, "tres")},
        "nice": parts.nice,
        "factors": {name: factors[name] for name in WEIGHED if name in factors},
        "tres_factors": {name: part for name, part in factors.items() if name not in WEIGHED},
    }


def circuit_views(cluster: ClusterState, ledger: EnergyLedger, now_s: float) -> list[Json]:
    """Return the circuits: their budgets, what jobs count, and what their nodes take now.

    `measured_watts`: of the nodes of which it is known, by the named sources. `unknown`: nodes that count nothing, because their
    power is not declared.
    """
    if not cluster.config.circuits:
        return []
    nodes = [node_view(node) for node in cluster.nodes.values()]
    held = [(job.holding, job.spec.gpu_power) for job in cluster.active_jobs()]
    found = []
    for circuit, total, used in circuit_watts(cluster.config.circuits, nodes, held):
        mine = [node for node in nodes if circuit.feeds(node.name)]
        watts = [known for node in mine if (known := ledger.watts(node.name, now_s)) is not None]
        found.append(
            {
                "name": circuit.name,
                "budget_watts": circuit.budget_watts,
                "total_watts": total,
                "used_watts": used,
                "free_watts": max(0, total - used),
                "measured_watts": sum(value for value, _ in watts) if watts else None,
                "measured_nodes": len(watts),
                "sources": sorted({source for _, source in watts}),
                "nodes": compress_hostlist([node.name for node in mine]),
                "unknown": compress_hostlist([node.name for node in mine if _is_undeclared(node)]),
            }
        )
    return found


def _is_undeclared(node: NodeView) -> bool:
    return not node.peak_watts or bool(node.gpus and not node.gpu_watts)


def license_views(cluster: ClusterState) -> list[Json]:
    """Return the licences, with the number of each that jobs hold now."""
    used: Counter[str] = Counter()
    for job in cluster.active_jobs():
        used.update(dict(job.spec.licenses))
    return [
        {"name": name, "total": total, "used": used[name], "free": max(0, total - used[name])}
        for name, total in cluster.config.accounting.licenses
    ]


def share_views(cluster: ClusterState, identity: Identity, now_s: float) -> Json:
    """Return the tree of accounts and users, root first, with shares, usage and factors.

    If usage is private, only the user's own lines, and those of accounts that it coordinates.
    """
    accounting = cluster.config.accounting
    used = used_now(cluster, now_s)
    lines = share_usages(accounting, charged(cluster, now_s))
    if reach(identity, Action.VIEW_USAGE) is not Reach.ALL:
        lines = [line for line in lines if identity.user == line.user or line.account in identity.accounts]
    return {
        "algorithm": accounting.fairness.value,
        "half_life_s": accounting.half_life_s,
        "shares": [_share_view(line, used, cluster) for line in lines],
    }


def _share_view(line: ShareUsage, used: list[UsedResources], cluster: ClusterState) -> Json:
    view = asdict(line)
    # None (null in JSON) if nothing is used yet.
    view["level_fs"] = None if math.isinf(line.level_fs) else line.level_fs
    amounts: dict[str, float] = {}
    for row in used:
        if _is_usage_of(row, line, cluster):
            for name, amount in row.amounts:
                amounts[name] = amounts.get(name, 0.0) + amount
    return view | {"tres_seconds": amounts}


def _is_usage_of(row: UsedResources, line: ShareUsage, cluster: ClusterState) -> bool:
    if line.user:
        return (row.account, row.user) == line.association
    return not line.account or cluster.config.accounting.is_part_of(row.account, (line.account,))


# ----- cached rows of the queue's text: only rows of changed jobs are formatted again
#
# The row of a waiting or ended job changes only with the job, or with the fields of the last plan
# that it shows. A row that used the present time (a watched `Look` notices this) is formatted for
# each query. Most plans change most priorities, so cached rows are sorted by the new priority. The
# waiting tasks of an array share the row of the first one, which is formatted for each query too.
#
# Formatting a long queue takes long, so other requests are answered in between.


MOST_CACHED = 4  # layouts and users
JOBS_AT_ONCE = 256  # between two looks at the clock
MAX_ANSWER_CHARS = 32 << 20
MAX_TIME_FORMAT = 128
# Of a waiting job: fields that a plan may change.
_PLAN_FIELDS = ("reason", "reason_detail", "expected_start_s", "priority")


class _CachedRow(NamedTuple):
    """A cached row and its inputs; `shown` has the plan's fields that the row shows."""

    job: Job
    wait: object
    priority: int | None
    shown: tuple[tuple[str, Any], ...]
    row: QueueRow


class _Watched(Look):
    """A `Look` that remembers whether its time was used."""

    @property
    def now_s(self) -> float:  # type: ignore[override]  # a field becomes a property
        self.__dict__["timed"] = True
        return self[0]


class QueueRows:
    """Cached rows of the last few layouts."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._cached: dict[tuple[object, ...], dict[int, _CachedRow]] = {}
        self._settings: tuple[object, ...] = ()

    async def rows(
        self, jobs: Sequence[Job], listing: Listing, layout: tuple[object, ...], identity: Identity, look: Look
    ) -> list[QueueRow]:
        """Return the rows of `jobs`; `layout` identifies the settings of `listing`."""
        table = self._table((*layout, identity, look.time_format))
        breaks, rows, size = AnswerPauses(), [], 0
        singles, folds = (jobs, []) if listing.array else await _folded(jobs, breaks, ended=listing.fold)
        for job in singles:
            rows.append(self._row(job, listing, table, identity, look))
            size = checked_size(size + sum(map(len, rows[-1].cells)))
            if breaks.due():
                await breaks.take()
        for tasks in folds:
            view = JobView(tasks[0], self._cluster, identity, look.now_s)
            view["folded"] = _indices(tasks)
            if tasks[0].state in FINAL:
                view["elapsed_s"] = max(elapsed_s(task, look.now_s) for task in tasks)
                nodes = {share.node for task in tasks for share in task.shares}
                listed = [name for name in self._cluster.nodes if name in nodes]
                view["node_list"] = compress_hostlist([*listed, *sorted(nodes.difference(listed))])
            rows.append(row_of(view, listing, look))
            size = checked_size(size + sum(map(len, rows[-1].cells)))
            await breaks.between()
        if listing.fit and rows:
            checked_size(
                len(rows) * sum(max(map(len, column)) for column in zip(*(row.cells for row in rows), strict=True))
            )
        return rows

    def _table(self, key: tuple[object, ...]) -> dict[int, _CachedRow]:
        settings = (self._cluster.config, self._cluster.partitions)
        if len(self._settings) != 2 or any(a is not b for a, b in zip(settings, self._settings, strict=True)):
            self._cached, self._settings = {}, settings
        table = self._cached.pop(key, {})
        if len(table) > 2 * len(self._cluster.jobs):  # most rows are of jobs that were purged
            table = {}
        while len(self._cached) >= MOST_CACHED:
            del self._cached[next(iter(self._cached))]
        self._cached[key] = table  # most recently used last
        return table

    def _row(
        self, job: Job, listing: Listing, table: dict[int, _CachedRow], identity: Identity, look: Look
    ) -> QueueRow:
        cluster = self._cluster
        view = JobView(job, cluster, identity, look[0])
        if job.state in ACTIVE:
            return row_of(view, listing, look)
        wait, priority = cluster.waits.get(job.id), cluster.priorities.get(job.id)
        known = table.get(job.id)
        if known is not None and known.job is not job:
            known = None
        if known is not None and known.wait is wait and known.priority == priority:
            return known.row
        if known is not None and all([view[name] == value for name, value in known.shown]):
            row = known.row._replace(ranks=ranks_of(view, listing, look))
            table[job.id] = known._replace(wait=wait, priority=priority, row=row)
            return row
        return self._written(view, wait, priority, listing, table, look)

    def _written(
        self,
        view: JobView,
        wait: object,
        priority: int | None,
        listing: Listing,
        table: dict[int, _CachedRow],
        look: Look,
    ) -> QueueRow:
        watched = _Watched(*look)
        row = row_of(view, listing, watched, ranked=False)
        shown = tuple([(name, view[name]) for name in _PLAN_FIELDS if name in view])
        if listing.order:
            row = row._replace(ranks=ranks_of(view, listing, watched))
        if "timed" not in watched.__dict__:
            table[view.job.id] = _CachedRow(view.job, wait, priority, shown, row)
        return row


def checked_size(chars: int) -> int:
    """Return the length of an answer. Raises RequestError if it is too long."""
    if chars > MAX_ANSWER_CHARS:
        raise RequestError(
            f"cannot show the jobs: the lines have more than {MAX_ANSWER_CHARS >> 20} MiB; ask for fewer columns or jobs"
        )
    return chars


async def _folded(jobs: Sequence[Job], breaks: AnswerPauses, *, ended: bool) -> tuple[list[Job], list[list[Job]]]:
    """Return the jobs with a row of their own, and the array tasks that share a row.

    Tasks share a row if they wait for their first start or, with `ended`, ended in the same way.
    """
    singles: list[Job] = []
    groups: dict[tuple[object, ...], list[Job]] = {}
    for at, job in enumerate(jobs):
        if ended and job.array_task_id is not None and job.state in FINAL:
            groups.setdefault((job.array_job_id, job.partition, job.state, job.reason), []).append(job)
        elif job.array_task_id is None or job.state is not JobState.PENDING or job.restarts or job.attempt:
            singles.append(job)
        else:
            key = (job.array_job_id, job.partition, job.hold, job.nice, job.time_limit_s)
            groups.setdefault(key, []).append(job)
        if at % JOBS_AT_ONCE == 0:
            await breaks.between()
    singles += [tasks[0] for tasks in groups.values() if len(tasks) == 1]
    return singles, [tasks for tasks in groups.values() if len(tasks) > 1]


def _indices(tasks: list[Job]) -> str:
    limit = tasks[0].array_limit if tasks[0].state is JobState.PENDING else 0
    return f"[{index_ranges([task.array_task_id or 0 for task in tasks])}{f'%{limit}' if limit else ''}]"


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
_LAYOUT = frozenset((
    "format", "long", "order", "array", "noheader", "dated", "time_format", "fit", "colour", "others", "ended",
    "fold", "width",
))  # fmt: skip
STRICT = {"state": "ALL", "strict": "1"}  # as hpcsched's own commands ask
_OTHER = frozenset({"id", "state", "nodes", "expected", "strict", "whose"})


async def queue_text(cluster: ClusterState, rows: QueueRows, identity: Identity, query: Query, now_s: float) -> str:
    """Return the lines for `query`. Raises: RequestError."""
    if len(query.get("time_format", "")) > MAX_TIME_FORMAT:
        raise RequestError(f"cannot write times: SLURM_TIME_FORMAT has more than {MAX_TIME_FORMAT} characters")
    listing = _listing(query)
    filters = {name: query[name] for name in query if name not in _LAYOUT}
    jobs = await selected_in_slices(cluster, identity, filters, AnswerPauses())
    ended: list[Job] = []
    if query.get("ended"):  # one line summarizes them
        ended, jobs = [job for job in jobs if job.state in FINAL], [job for job in jobs if job.state not in FINAL]
    look = Look(now_s, query.get("time_format", ""))
    layout = tuple(query.get(name, "") for name in ("format", "long", "order", "fit", "colour"))
    text = queue.queue_text(await rows.rows(jobs, listing, layout, identity, look), listing, look)
    text += _ended(cluster, ended, now_s, colour=listing.colour)
    seen = _sees_all(identity) and query.get("whose") == "default" or reach(identity, Action.VIEW_JOBS) is not Reach.ALL
    return text + (_others(cluster, [*jobs, *ended], colour=listing.colour) if query.get("others") and not seen else "")


def _ended(cluster: ClusterState, jobs: Sequence[Job], now_s: float, *, colour: bool) -> str:
    """Return the line that summarizes recently ended jobs; "" if there are none."""
    window_s = cluster.config.controller.min_job_age_s
    states = Counter(job.state for job in jobs if (job.ended_at_s or 0.0) >= now_s - window_s)
    count = states.total()
    if not count:
        return ""
    ended = f"{count} job{'s' * (count > 1)} ended in the last {_span(window_s)}"
    counts = " ".join(f"{number} {state}" for state, number in states.most_common())
    return painted(f"{ended}: {counts} (hqueue -a)", DIM if colour else "") + "\n"


def _span(seconds: float) -> str:
    """Return ``hour``, ``2 hours``, ``5 minutes`` or ``90 seconds``."""
    for unit, name in ((3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= unit and seconds % unit == 0:
            return name if seconds == unit else f"{seconds / unit:.0f} {name}s"
    return f"{seconds:g} seconds"


def _others(cluster: ClusterState, jobs: Iterable[Job], *, colour: bool) -> str:
    """Return the line about jobs that are not in `jobs`, for a user who sees only their own."""
    shown = {job.id for job in jobs}
    others = [job.state for job in cluster.jobs.values() if job.id not in shown]
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
        fold=query.get("fold") == "1",
        header=query.get("noheader") != "1",
        dated=query.get("dated") == "1",
        fit=query.get("fit") == "1",
        colour=query.get("colour") == "1",
        width=whole_number(query.get("width") or "0", "width"),
    )


def _components(jobs: Iterable[Job]) -> list[Job]:
    """Return all jobs, and each component of a heterogeneous one."""
    parts = (components_of(job) if job.spec.components else (job,) for job in jobs)
    return [component for components in parts for component in components]


def _sees_all(identity: Identity) -> bool:
    """Return whether hqueue shows all users' jobs by default: to users who act on them."""
    return reach(identity, Action.CANCEL) is Reach.ALL


def visible(identity: Identity, jobs: list[Job], reference: str) -> list[Job]:
    """Return the jobs that the user may see. Raises: NotFoundError if there is none."""
    found = [job for job in jobs if allows(identity, Action.VIEW_JOBS, job)]
    if not found:
        raise NotFoundError(f"Invalid job id specified: {reference[:60]}")
    return found


def selected(cluster: ClusterState, identity: Identity, query: Query) -> list[Job]:
    """Return the jobs that match the filters. Raises: NotFoundError, RequestError."""
    jobs, choose = _selection(cluster, identity, query)
    return choose(jobs)


async def selected_in_slices(
    cluster: ClusterState, identity: Identity, query: Query, breaks: AnswerPauses
) -> list[Job]:
    """Return what `selected` returns; a long queue is looked through in slices."""
    jobs, choose = _selection(cluster, identity, query)
    found: list[Job] = []
    for at in range(0, len(jobs), JOBS_AT_ONCE):
        found += choose(jobs[at : at + JOBS_AT_ONCE])
        await breaks.between()
    return found


def _selection(
    cluster: ClusterState, identity: Identity, query: Query
) -> tuple[list[Job], Callable[[Iterable[Job]], list[Job]]]:
    """Return the jobs that may match the filters, and the function that returns those that do."""
    unknown = set(query) - _OTHER - set(_FILTERS)
    if unknown:
        raise RequestError(f"cannot list jobs by {', '.join(sorted(unknown))}")
    strict, is_numbered = query.get("strict") == "1", bool(query.get("id"))
    candidates = (
        _numbered(cluster, identity, query["id"], strict=strict) if is_numbered else list(cluster.jobs.values())
    )
    states = frozenset({JobState.PENDING}) if query.get("expected") else _states(query.get("state", ""))
    wants_special = SPECIAL_EXIT in query.get("state", "").upper().split(",")
    if strict:
        _check_users(cluster, query.get("user", ""))
    filters = [(set(query[name].split(",")), values_of) for name, values_of in _FILTERS.items() if query.get(name)]
    nodes = _nodes(cluster, query["nodes"]) if query.get("nodes") else None
    is_own = query.get("whose") == "default" and not _sees_all(identity)
    sees_all = reach(identity, Action.VIEW_JOBS) is Reach.ALL

    def choose(some: Iterable[Job]) -> list[Job]:
        jobs = list(some) if is_numbered else _components(some)
        jobs = [job for job in jobs if job.state in states or (wants_special and is_special(job))]
        if not sees_all:
            jobs = [job for job in jobs if allows(identity, Action.VIEW_JOBS, job)]
        if is_own:
            jobs = [job for job in jobs if job.uid == identity.uid]
        for wanted, values_of in filters:
            jobs = [job for job in jobs if not wanted.isdisjoint(values_of(job))]
        if nodes is not None:
            jobs = [job for job in jobs if any(share.node in nodes for share in job.shares)]
        return jobs

    return candidates, choose


def folded(jobs: Iterable[Job]) -> dict[int, Json]:
    """Return which tasks, and how many, a list shows as one job, by the number of the first.

    They are those of one array in one state. A job that is not a task of an array is shown for itself.
    """
    groups: dict[tuple[int, JobState | None], list[Job]] = {}
    for job in jobs:
        array = job.array_job_id
        groups.setdefault((job.number, None) if array is None else (array, job.state), []).append(job)
    found: dict[int, Json] = {}
    for tasks in groups.values():
        indices = [task.array_task_id for task in tasks if task.array_task_id is not None]
        found[tasks[0].number] = {"tasks": index_ranges(indices), "count": len(tasks)}
    return found


def _page(jobs: list[Job], query: Query) -> tuple[list[Job], bool]:
    """Return the jobs of the query's page, by number, and whether there are more."""
    if "limit" not in query and "after" not in query:
        return jobs, False
    after = whole_number(query.get("after") or "0", "cursor")
    limit = max(1, whole_number(query.get("limit") or "1000", "limit"))
    rest = sorted((job for job in jobs if job.number > after), key=lambda job: job.number)
    return rest[:limit], len(rest) > limit


def _check_users(cluster: ClusterState, text: str) -> None:
    """Reject an unknown user name, because it is more likely mistyped than idle."""
    for name in dict.fromkeys(text.split(",")) if text else ():
        if not name.isdigit() and not is_account(name) and not any(job.user == name for job in cluster.jobs.values()):
            raise RequestError(f"Invalid user: {name}")


def _numbered(cluster: ClusterState, identity: Identity, text: str, *, strict: bool) -> list[Job]:
    references = list(dict.fromkeys(split_list(text)))
    check_references(references, {})
    found: dict[int, Job] = {}
    named = 0
    for reference in references:
        if named > MAX_TASKS:
            raise RequestError(f"cannot list jobs: the request names more than {MAX_TASKS}")
        try:
            meant = find_jobs(cluster, reference, identity.uid)
            named += len(meant)
            found |= {component.number: component for job in meant for component in listed_of(job, reference)}
        except NotFoundError:
            if strict or len(references) == 1:  # of several ids, squeue shows those that exist
                raise
    return list(found.values())


def _states(text: str) -> frozenset[JobState]:
    words = set(text.upper().split(",")) - {""}
    if words == {SPECIAL_EXIT}:
        return frozenset()
    words.discard(SPECIAL_EXIT)
    if "ALL" in words:
        return frozenset(JobState)
    unknown = words - {state.value for state in JobState}
    if unknown:
        raise RequestError(f"Invalid job state specified: {', '.join(sorted(unknown))}")
    return frozenset(map(JobState, words)) or _SHOWN


def _nodes(cluster: ClusterState, text: str) -> frozenset[str]:
    names = expand_hostlist(text)
    for name in names:
        if name not in cluster.nodes:
            raise RequestError(f"Invalid node name specified: {name}")
    return frozenset(names)


# ----- the reader: what the API's first routes need, and all that a starting controller has


class Reading:
    """Answers queue queries from the state. `under_way` is the number of answers in progress."""

    def __init__(self, cluster: ClusterState, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._rows = QueueRows(cluster)
        self.under_way = 0

    def access(self) -> AccessPolicy:
        """Return the configured roles and what is private."""
        return self._cluster.config.access

    def selected(self, identity: Identity, query: dict[str, str]) -> list[Job]:
        """Return the jobs that a query of hpcsched's own commands asks for.

        Raises: NotFoundError, RequestError.
        """
        return selected(self._cluster, identity, STRICT | query)

    async def jobs(self, identity: Identity, query: dict[str, str]) -> bytes:
        """Return the jobs as the text of a JSON object. Raises the errors of `selected`."""
        with self._counted():
            now_s = self._clock()
            breaks, texts = AnswerPauses(), []
            filters = {name: value for name, value in query.items() if name not in ("after", "limit", "fold")}
            jobs = await selected_in_slices(self._cluster, identity, STRICT | filters, breaks)
            folds = folded(jobs) if query.get("fold") == "1" else {}
            found, more = _page([job for job in jobs if job.number in folds] if folds else jobs, query)
            for job in found:
                view = job_view(job, self._cluster, identity, now_s)
                texts.append(json_text(view | {"folded": folds[job.number]} if folds else view))
                if breaks.due():
                    await breaks.take()
            return jobs_text(now_s, texts, str(found[-1].number) if more else "")

    async def queue(self, identity: Identity, query: dict[str, str]) -> str:
        """Return the jobs as text lines. Raises the errors of `selected`, and UsageError."""
        with self._counted():
            return await queue_text(self._cluster, self._rows, identity, query, self._clock())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
