"""Show the past: jobs and outages from the database, and a job's story in sentences.

Also reads the cluster of a database file.

A search may read every job ever submitted. This takes SQLite longer than other requests should wait, so a thread reads through
its own connection, and the answer is made in parts. `SENTENCES` has one row for each kind of event.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hpcsched.api.connection_limits import AnswerPauses
from hpcsched.api.identity import user_name
from hpcsched.api.views import job_view, jobs_text, json_text, step_view, training_view
from hpcsched.auth.authorize import Action, Identity, Reach, allows, reach
from hpcsched.config.load import Config
from hpcsched.controller.recovery import load_state, node_of, policy_of
from hpcsched.controller.tick import Controller
from hpcsched.errors import RequestError
from hpcsched.jobscript.values import terms_text
from hpcsched.lifecycle.attempts import Attempt
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
    NodesRenamed,
    NodesReserved,
    NodesUnreserved,
    Released,
    Requeued,
    Respecified,
    Resumed,
    ShrinkAsked,
    Started,
    Submitted,
    Suspended,
)
from hpcsched.lifecycle.job import CHANGEABLE, OUTPUT_FULL
from hpcsched.model.accounting import EnergyUse, GpuUse
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.job import ACTIVE, MAX_COMPONENTS, Job, TrainingStatus, components_of, exit_words
from hpcsched.model.node import Link, Share
from hpcsched.model.tariff import JOULES_PER_KWH, LATEST_S, MAX_PERIOD_S, Tariff, prices_of, steps_of
from hpcsched.model.trigger import Trigger
from hpcsched.model.units import format_time_s, number, whole_number
from hpcsched.sched.policy import Policy
from hpcsched.sched.sentences import plural
from hpcsched.sched.snapshot import Snapshot
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import StepRecord
from hpcsched.store.backup import back_up, contents_of
from hpcsched.store.engine import incarnation, open_database, open_read_only
from hpcsched.store.store import OUTAGES, HistoryQuery, Store

PART_JOBS = 500  # read at a time

Json = dict[str, Any]
_NOT_OF_A_NUMBER = re.compile(r"[_.+]")
_COUNTED = ("id", "display_id", "user", "account", "partition", "qos")
_counted_values = attrgetter(*_COUNTED)


class _Extras(NamedTuple):
    """What is told of jobs on request."""

    attempts: bool
    energy: bool


class _HistorySlice(NamedTuple):
    """Some of the jobs, with their steps and other rows.

    `attempts`: None: not asked for, and not needed for the prices of energy.
    """

    jobs: list[Job]
    steps: list[StepRecord]
    training: dict[int, TrainingStatus]
    attempts: dict[int, tuple[Attempt, ...] | None] | None
    energy: dict[int, list[EnergyUse]] | None
    gpu_uses: dict[int, list[GpuUse]]
    step_figures: dict[int, list[Json]]  # with `attempts`, instead of `steps`
    extras: _Extras


def outages_of(database: Path, query: Json) -> Json:
    """Return the outages of nodes in the period of the query, and when each was first seen.

    They are of the kinds that it names, without kinds those in which a node did not answer. Raises RequestError,
    UnavailableError.
    """
    kinds = [word for word in query.get("kinds", "down").split(",") if word]
    if unknown := sorted(set(kinds).difference(OUTAGES)):
        raise RequestError(f"cannot read outages of kind {unknown[0][:60]!r}: there are {', '.join(OUTAGES)}")
    after_s, before_s = _period_of(query, "outages")
    store = Store(open_read_only(database))
    try:
        found = [outage._asdict() for outage in store.outages(after_s, before_s) if outage.kind in kinds]
        return {"outages": found, "first_seen_s": store.first_seen()}
    finally:
        store.close()


def tariff_of(tariff: Tariff, query: Json) -> Json:
    """Return [cost] with the prices of energy over the period of the query.

    Raises RequestError. Each is a list of times with the price from then on.
    """
    start_s, end_s = _period_of(query, "the tariff")
    if not 0 <= start_s <= end_s <= min(start_s + MAX_PERIOD_S, LATEST_S):
        raise RequestError("cannot read the tariff: a period must end after its start, and have at most 11 years")
    prices = prices_of(tariff, start_s, end_s)
    shown = {name: getattr(tariff, name) for name in ("currency", "cpu_hour", "gpu_hour")}
    return shown | {"kwh": prices.kwh.steps, "gco2_per_kwh": prices.gco2_per_kwh.steps}


def _period_of(query: Json, what: str) -> tuple[float, float]:
    """Return `start_s` and `end_s` of the query. Raises RequestError."""
    try:
        return number(query["start_s"], "start_s"), number(query["end_s"], "end_s")
    except KeyError as missing:
        raise RequestError(f"cannot read {what}: the query has no {missing.args[0]}") from None


async def history_text(database: Path, cluster: ClusterState, identity: Identity, query: Json, now_s: float) -> bytes:
    """Return the jobs that match `query`; unfinished jobs are shown in their present state.

    A page has the newest jobs, or the newest of those before the cursor, by id. With `attempts` each job has only what reports
    count: what it held, and when. With `energy` it has the energy that it caused, if any.

    Raises: RequestError, and UnavailableError if the database cannot be read.
    """
    wanted, extras = _history_query(query), _Extras(query.get("attempts") == "1", query.get("energy") == "1")
    breaks, texts = AnswerPauses(), []
    loop = asyncio.get_running_loop()
    store = Store(open_read_only(database))
    thread = ThreadPoolExecutor(1, "history")
    try:
        ids = await loop.run_in_executor(thread, _ids, store, wanted)
        for at in range(0, len(ids), PART_JOBS):
            part = await loop.run_in_executor(
                thread, _read, store, ids[at : at + PART_JOBS], extras, cluster.config.cost
            )
            for view in _views(part, cluster, identity, now_s):
                texts.append(json_text(view))
                if breaks.due():
                    await breaks.take()
    finally:
        thread.submit(store.close)  # after its present read, if the client has disconnected
        thread.shutdown(wait=False)
    return jobs_text(now_s, texts, str(ids[0]) if len(ids) >= wanted.limit else "")


def _ids(store: Store, query: HistoryQuery) -> list[int]:
    """Return the ids of the requested jobs.

    A number may be that of a component of a heterogeneous job.
    """
    found = store.history_ids(query)
    for job_id in set(query.job_ids).difference(found):
        before = store.history_ids(replace(query, job_ids=tuple(range(job_id - MAX_COMPONENTS + 1, job_id))))
        found += [job.id for job in store.jobs(before) if job_id <= job.id + len(job.spec.components)]
    return sorted(set(found))


def _read(store: Store, ids: Sequence[int], extras: _Extras, tariff: Tariff) -> _HistorySlice:
    found = store.counted_jobs(ids) if extras.attempts else store.jobs(ids)
    energy = store.load_energies(ids) if extras.energy else None
    attempts = store.attempts(found) if extras.attempts else None
    if attempts is None and energy and (tariff.kwh.windows or tariff.gco2_per_kwh.windows):
        attempts = store.attempts([job for job in found if job.id in energy])
    training = {} if extras.attempts else store.load_training(ids)
    steps = [] if extras.attempts else store.load_steps(ids)
    gpu_uses = store.load_gpu_uses(ids) if extras.attempts else {}
    figures = store.step_figures(ids) if extras.attempts else {}
    return _HistorySlice(found, steps, training, attempts, energy, gpu_uses, figures, extras)


def _views(part: _HistorySlice, cluster: ClusterState, identity: Identity, now_s: float) -> Iterator[Json]:
    steps: dict[int, list[Json]] = {}
    for step in part.steps:
        steps.setdefault(step.job_id, []).append(step_view(step))
    sees_all = reach(identity, Action.VIEW_JOBS) is reach(identity, Action.VIEW_USAGE) is Reach.ALL
    for job in part.jobs:
        if not (sees_all or allows(identity, Action.VIEW_JOBS, job)):
            continue
        energy = _energy_views((part.energy or {}).get(job.id, []), (part.attempts or {}).get(job.id), cluster, now_s)
        if part.extras.attempts:
            if sees_all or allows(identity, Action.VIEW_USAGE, job):
                yield _use_view(job, part, cluster) | ({"energy": energy} if energy else {})
            continue
        for component in components_of(cluster.jobs.get(job.id, job)):
            view = job_view(component, cluster, identity, now_s)
            view["steps"] = [
                step for step in steps.get(job.id, []) if component.component is None or _is_in(step, component)
            ]
            if view["training"] is None and allows(identity, Action.VIEW_DETAILS, job):
                view["training"] = training_view(part.training.get(job.id))
            if part.energy is not None:
                view["energy"] = [] if component.component else energy
            yield view


def _use_view(job: Job, part: _HistorySlice, cluster: ClusterState) -> Json:
    """Return what reports count of a job; of a year there may be very many."""
    known = cluster.jobs.get(job.id, job)
    live = cluster.live_use(known) if known.state in ACTIVE else None
    return {
        **dict(zip(_COUNTED, _counted_values(known), strict=True)),
        "state": known.state.value,
        "use": None if live is None else {"cpu_s": live.cpu_s, "memory_bytes": live.memory_bytes},
        "steps": part.step_figures.get(job.id, []),
        "gpu_use": [[use.attempt, use.node, use.seen_s, use.busy_s] for use in part.gpu_uses.get(job.id, ())],
        "attempts": _attempt_views((part.attempts or {})[job.id]),
    }


def _attempt_views(attempts: tuple[Attempt, ...] | None) -> list[Json] | None:
    """Return the attempts of a job; None: they are not known."""
    if attempts is None:
        return None
    return [
        {
            "attempt": attempt.number,
            "waited_s": attempt.waited_s,
            "allocated_at_s": attempt.allocated_at_s,
            "ended_at_s": attempt.ended_at_s,
            "requeued": attempt.is_requeued,
            "holdings": [holding._asdict() for holding in attempt.holdings],
        }
        for attempt in attempts
    ]


def _energy_views(
    uses: Sequence[EnergyUse], attempts: Sequence[Attempt] | None, cluster: ClusterState, now_s: float
) -> list[Json]:
    """Return the energy of a job with its price and CO2, None without a tariff.

    The prices are those of the time for which each attempt held the node, else those outside of windows.
    """
    if not uses:
        return []
    tariff = cluster.config.cost
    held: dict[tuple[int, str], tuple[float, float]] = {}
    for attempt in attempts or ():
        for one in attempt.holdings:
            until_s = now_s if one.until_s is None else one.until_s
            first_s, last_s = held.get((attempt.number, one.node), (one.since_s, until_s))
            held[attempt.number, one.node] = min(first_s, one.since_s), max(last_s, until_s)
    found = []
    for use in uses:
        period = held.get((use.attempt, use.node))
        kwh, co2 = (
            (price.default if period is None else steps_of(price, *period).mean(*period)) * use.joules / JOULES_PER_KWH
            for price in (tariff.kwh, tariff.gco2_per_kwh)
        )
        found.append(
            use._asdict() | {"cost": kwh if tariff.kwh else None, "co2_g": co2 if tariff.gco2_per_kwh else None}
        )
    return found


def _is_in(step: Json, component: Job) -> bool:
    """Return whether a step of a heterogeneous job ran in that component.

    Also true if it is not known in which component the step ran.
    """
    names = {share.node for share in component.shares}
    return not names.isdisjoint(step["nodes"]) or not (step["nodes"] or component.component)


def _history_query(query: Json) -> HistoryQuery:
    def words(name: str) -> tuple[str, ...]:
        return tuple(word for word in query.get(name, "").split(",") if word)

    unknown = set(query) - {"id", "user", "state", "name", "start_s", "end_s", "limit", "after", "attempts", "energy"}
    if unknown:
        raise RequestError(f"cannot search the history by {', '.join(sorted(unknown))}")
    return HistoryQuery(
        job_ids=tuple(whole_number(_NOT_OF_A_NUMBER.split(word)[0], "a job id") for word in words("id")),
        users=words("user"),
        states=tuple(word.upper() for word in words("state")),
        names=words("name"),
        start_s=number(query["start_s"], "start_s") if query.get("start_s") else None,
        end_s=number(query["end_s"], "end_s") if query.get("end_s") else None,
        limit=max(1, min(whole_number(query.get("limit") or "10000", "limit"), 100_000)),
        before_id=whole_number(query["after"], "cursor") if query.get("after") else None,
    )


# ----- the history of a job in sentences, for `hctl story`


def story_of(job: Job, events: list[JobEvent]) -> list[dict[str, Any]]:
    """Return the events, each with its time, its kind and a sentence."""
    lines = []
    # True if the attempt was ended without a requeue: then a lost node does not requeue the job.
    ending = False
    for event in events:
        if isinstance(event, EndRequested):
            ending = not event.requeue
        elif isinstance(event, Requeued | Allocated):
            ending = False
        lines.append({"at_s": event.at_s, "kind": type(event).__name__, "text": sentence(job, event, ending)})
    return lines


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
    if "signed" in event.changes:
        return f"signed again by {user_name(event.by_uid)}"
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
    NodesRenamed: lambda event: ", ".join(
        f"node {former} is called {name} now" for former, name in event.names.items()
    ),
    NodesReserved: lambda event: f"{_nodes(event.shares)} is reserved for it: its resources there are being freed",
    NodesUnreserved: lambda event: f"nothing is reserved for it any more: {event.why}",
    Released: lambda event: f"released by {user_name(event.by_uid)}",
    Requeued: lambda event: f"requeued by {user_name(event.by_uid)}",
    Respecified: _respecified,
    Resumed: lambda event: "resumed" if event.by_uid is None else f"resumed by {user_name(event.by_uid)}",
    ShrinkAsked: _shrink_asked,
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


# ----- the cluster in a database file, as the planner saw it at the last event
# For questions about a backup, or about the database of a controller that is down. Nodes and partitions are those of the
# configuration; a node answers unless it was drained. The file is only read: a temporary copy is opened.


class _Nowhere:
    """Ports of a controller that answers questions and never acts."""

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None: ...

    def wake(self, after_s: float) -> None: ...

    def nonce(self) -> str:
        return ""

    def run_trigger(self, trigger: Trigger) -> None: ...

    def switch_power(self, node: NodeName) -> None: ...

    def processor_s(self) -> float:
        return 0.0

    def monotonic_s(self) -> float:
        return 0.0

    def boot_clock(self) -> tuple[str, float]:
        return "", 0.0


def archived(database: Path, config: Config) -> tuple[Snapshot, Policy]:
    """Return the cluster in the file `database` and the policy of `config`.

    Raises: ConfigError if the file is not an hpcsched database, UnavailableError if it cannot be read.
    """
    now_s = contents_of(database).last_event_at_s
    with TemporaryDirectory() as directory:
        copy = Path(directory) / database.name
        back_up(database, copy)
        store = Store(open_database(copy))
        try:
            return _cluster(store, config, now_s)
        finally:
            store.close()


def _cluster(store: Store, config: Config, now_s: float) -> tuple[Snapshot, Policy]:
    cluster = ClusterState(config=config, incarnation=incarnation(store.connection), epoch=0)
    rows = store.load_nodes()
    for spec in config.nodes:
        cluster.nodes[spec.name] = replace(node_of(spec, rows.get(spec.name)), link=Link.UP)
    cluster.partitions = {partition.name: partition for partition in config.partitions}
    load_state(cluster, store, now_s)
    policy = policy_of(config)
    return Controller(cluster, store, _Nowhere(), policy).snapshot(cluster.jobs_to_plan(), now_s), policy
