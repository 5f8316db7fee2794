"""Create, change and delete reservations for admins, with scontrol's field names.

Each reservation is checked against the others and against running jobs. When a job is submitted,
`check_use` checks whether it may use the reservation. Source: scontrol(1), "RESERVATIONS".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hpcsched.auth.authorize import Action, Identity, authorize
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError
from hpcsched.lifecycle.job import cut_at_s, suspended_s
from hpcsched.model.dates import parse_when
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.ids import NODE_NAME, NodeName
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import Link
from hpcsched.model.reservation import MAX_PERIOD_S, REPEATS, Flag, Reservation, at, clash, first_day, may_use
from hpcsched.model.units import DAY_S, UNLIMITED_S, format_time_s, parse_time_s, whole_number
from hpcsched.sched.place.features import matches, parse_features
from hpcsched.sched.sentences import plural
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

# ----- parse an admin's changes to a reservation: ``StartTime=now+1hour Duration=2:00:00 Users+=ben
# Flags=DAILY``
#
# Does not know the cluster: whether the reservation is possible is checked below. Source:
# scontrol(1), "RESERVATIONS".


KEYS = {  # scontrol's name in lower case: the field that it changes
    "starttime": "start", "endtime": "end", "duration": "duration", "nodes": "nodes", "nodecnt": "node_count",
    "features": "features", "partitionname": "partition", "partition": "partition", "users": "users", "user": "users",
    "accounts": "accounts", "account": "accounts", "flags": "flags",
}  # fmt: skip
NODES_NAMED = "SPEC_NODES"  # shown if the nodes were named; has no effect in a request
LISTS = ("users", "accounts", "flags", "nodes")  # lists that += adds to and -= removes from
LONGEST_S = 365 * DAY_S  # the duration of UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationOptions:
    """The requested changes; None is no change. `signs` has + or - for changes to lists."""

    start_s: int | None = None
    end_s: int | None = None
    duration_s: int | None = None
    nodes: tuple[str, ...] | None = None
    node_count: int | None = None
    features: str | None = None
    partition: str | None = None
    users: tuple[str, ...] | None = None
    accounts: tuple[str, ...] | None = None
    flags: tuple[str, ...] | None = None
    signs: Mapping[str, str]


def read_options(changes: Mapping[str, str], now_s: float) -> ReservationOptions:
    """Return what the changes ask for. Raises: RequestError."""
    values: dict[str, str] = {}
    signs: dict[str, str] = {}
    for word, value in changes.items():
        sign = word[-1:] if word[-1:] in ("+", "-") else ""
        name = KEYS.get(word.removesuffix(sign).lower().replace("_", "") if sign else word.lower().replace("_", ""))
        if name is None:
            known = "StartTime EndTime Duration Nodes NodeCnt Features PartitionName Users Accounts Flags"
            raise RequestError(f"cannot give a reservation {word[:60]!r}: it has {known}")
        if sign and name not in LISTS:
            raise RequestError(f"cannot write {word[:60]}=: only users, accounts, nodes and flags are added to")
        values[name] = value
        signs |= {name: sign} if sign else {}
    return ReservationOptions(
        start_s=int(parse_when(values["start"], now_s)) if "start" in values else None,
        end_s=int(parse_when(values["end"], now_s)) if "end" in values else None,
        duration_s=_duration_s(values["duration"]) if "duration" in values else None,
        node_count=_count(values["node_count"]) if "node_count" in values else None,
        features=values.get("features"),
        partition=values.get("partition"),
        nodes=_node_words(values["nodes"]) if "nodes" in values else None,
        users=_words(values["users"]) if "users" in values else None,
        accounts=_words(values["accounts"]) if "accounts" in values else None,
        flags=tuple(word.upper() for word in _words(values["flags"])) if "flags" in values else None,
        signs=signs,
    )


def _duration_s(text: str) -> int:
    found_s = parse_time_s(text, whole_minutes=False)
    return LONGEST_S if found_s is None else found_s


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and text.strip("0") and len(text) < 9):
        raise RequestError(f"cannot reserve {text[:60]!r} nodes: NodeCnt= is a number, at least 1")
    return whole_number(text)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word.startswith("-"):
            raise RequestError(f"cannot except {word[1:60]!r}: name those who may use the reservation")
    return words


def _node_words(text: str) -> tuple[str, ...]:
    return ("ALL",) if text.strip().upper() == "ALL" else tuple(expand_hostlist(text))


def with_options(known: Reservation, options: ReservationOptions) -> Reservation:
    """Return `known` with the changes of `options`, except for its nodes."""
    flags = [flag for flag in combined([flag.value for flag in known.flags], options, "flags") if flag != NODES_NAMED]
    unknown = [flag for flag in flags if flag not in Flag.__members__]
    if unknown:
        raise RequestError(f"cannot set flag {unknown[0][:60]!r}: there are {', '.join(Flag)}")
    return replace(
        known,
        users=combined(known.users, options, "users"),
        accounts=combined(known.accounts, options, "accounts"),
        flags=tuple(Flag(flag) for flag in flags),
        partition=options.partition if options.partition is not None else known.partition,
        features=options.features if options.features is not None else known.features,
        node_count=0 if options.nodes is not None else options.node_count or known.node_count,
    )


def combined(known: Sequence[str], options: ReservationOptions, name: str) -> tuple[str, ...]:
    """Return a list after the change: unchanged, replaced, extended or reduced."""
    given: tuple[str, ...] | None = getattr(options, name)
    if given is None:
        return tuple(known)
    if options.signs.get(name) == "+":
        return tuple(dict.fromkeys((*known, *given)))
    return tuple(word for word in known if word not in given) if options.signs.get(name) == "-" else given


MAX_RESERVATIONS = 1_000
SHOWN = 5


def create(tx: Transaction, identity: Identity, name: str, changes: Mapping[str, str]) -> Reservation:
    """Create a reservation; without a `name` it gets one that is derived from its creator's."""
    authorize(identity, Action.RESERVE, what="create a reservation")
    cluster = tx.cluster
    name = name or _free_name(cluster, identity.user)
    if NODE_NAME.match(name) is None:
        raise RequestError(f"cannot create reservation {name[:60]!r}: a name has letters, digits, _ and - alone")
    if name in cluster.reservations:
        raise RequestError(f"cannot create reservation {name!r}: there is one of that name already")
    if len(cluster.reservations) >= MAX_RESERVATIONS:
        raise RequestError(f"cannot create a reservation: there are {MAX_RESERVATIONS}, which is the most")
    options = read_options(changes, tx.now_s)
    if options.signs:
        raise RequestError("cannot create a reservation with += or -=: they change one that is there")
    start_s = int(options.start_s if options.start_s is not None else tx.now_s)
    if options.end_s is None and options.duration_s is None:
        raise RequestError("cannot create a reservation: say how long, Duration=2:00:00, or until when, EndTime=")
    end_s = options.end_s if options.end_s is not None else start_s + (options.duration_s or 0)
    made = Reservation(name=name, start_s=start_s, end_s=end_s, nodes=(), made_by=identity.user, made_at_s=tx.now_s)
    return _settle(tx, with_options(made, options), options)


def reserve_for_bench(
    tx: Transaction, identity: Identity, reservation: str, names: Sequence[str], duration_s: float, *, now: bool
) -> Reservation:
    """Reserve nodes for their assessment, so that no job starts there.

    `now`: although jobs run there. The reservation ends by itself if the controller does not delete it.
    """
    authorize(identity, Action.BENCH_NODES, what="measure nodes")
    for name in names:
        if name not in tx.cluster.nodes:
            raise NotFoundError(f"cannot measure {name[:60]!r}: there is no node of that name")
    if reservation in tx.cluster.reservations:
        shown = compress_hostlist(names)
        raise RequestError(f"cannot measure {shown}: it is being measured (reservation {reservation})")
    jobs = {job.id: job for name in names for job in tx.cluster.jobs_on(NodeName(name))}
    if jobs and not now:
        held = compress_hostlist([name for name in names if tx.cluster.jobs_on(NodeName(name))])
        raise RequestError(
            f"cannot measure {held}: it has jobs: {_named(jobs.values())}; wait for them, or measure beside them, which "
            "is not compared with other runs: --now"
        )
    changes = {"Duration": str(int(duration_s) // 60 + 1), "StartTime": "now", "Users": identity.user}
    changes |= {"Nodes": ",".join(names)} | ({"Flags": "IGNORE_JOBS,OVERLAP"} if now else {})
    return create(tx, identity, reservation, changes)


def end_bench(tx: Transaction, reservation: str) -> None:
    """Delete the reservation of an assessment, if it is still there."""
    if reservation in tx.cluster.reservations:
        tx.set_reservation(reservation, None)


def update(tx: Transaction, identity: Identity, name: str, changes: Mapping[str, str]) -> Reservation:
    """Change a reservation; fields that are not named stay as they are."""
    authorize(identity, Action.RESERVE, what="change a reservation")
    known = find(tx.cluster, name)
    options = read_options(changes, tx.now_s)
    if not changes:
        raise RequestError(f"cannot change reservation {name!r}: say what, as EndTime=now+2hours")
    start_s = int(options.start_s) if options.start_s is not None else known.start_s
    if options.end_s is not None:
        end_s = options.end_s
    elif options.duration_s is not None:
        end_s = start_s + options.duration_s
    else:
        end_s = known.end_s if options.start_s is None else start_s + known.duration_s
    return _settle(tx, with_options(replace(known, start_s=start_s, end_s=end_s), options), options)


def delete(tx: Transaction, identity: Identity, name: str) -> None:
    """Delete a reservation that no job uses."""
    authorize(identity, Action.RESERVE, what="delete a reservation")
    find(tx.cluster, name)
    users = tx.cluster.using(name)
    if users:
        raise RequestError(
            f"cannot delete reservation {name!r}: Requested reservation is in use: by {_named(users)}; "
            "cancel them, or hctl update JOB ReservationName="
        )
    tx.set_reservation(name, None)


def keep_up(tx: Transaction) -> None:
    """Move repeating reservations to their next occurrence, and delete expired ones."""
    for name, reservation in list(tx.cluster.reservations.items()):
        if reservation.end_s > tx.now_s:
            continue
        tx.attempt(f"move reservation {name} on", partial(_keep_up_one, reservation=reservation))


def _keep_up_one(tx: Transaction, reservation: Reservation) -> None:
    running = [job for job in tx.cluster.using(reservation.name) if job.state is not JobState.PENDING]
    if reservation.repeats:
        tx.set_reservation(reservation.name, at(reservation, tx.now_s))
    elif not running:
        tx.set_reservation(reservation.name, None)


def next_turn_s(cluster: ClusterState, now_s: float) -> float | None:
    """Return when the next reservation begins or ends, or None."""
    times_s = (
        time_s for reservation in cluster.reservations.values() for time_s in (reservation.start_s, reservation.end_s)
    )
    return min((time_s for time_s in times_s if time_s > now_s), default=None)


def find(cluster: ClusterState, name: str) -> Reservation:
    """Return the reservation of that name."""
    known = cluster.reservations.get(name)
    if known is None:
        there = ", ".join(cluster.reservations) or "none"
        raise NotFoundError(
            f"Requested reservation is invalid: there is no reservation {name[:60]!r}; there are: {there}"
        )
    return known


def check_use(cluster: ClusterState, user: str, account: str, name: str, now_s: float) -> Reservation:
    """Return the reservation `name` if jobs of `user` and `account` may use it, now or later.

    Raises: RequestError otherwise.
    """
    mine = [one.name for one in cluster.reservations.values() if may_use(one, user, account)]
    if name not in cluster.reservations or (
        name not in mine and Action.VIEW_RESERVATIONS in cluster.config.access.hidden
    ):
        raise NotFoundError(
            f"Requested reservation is invalid: there is no reservation {name[:60]!r} that you may use; there are: "
            f"{', '.join(mine) or 'none'}"
        )
    reservation = cluster.reservations[name]
    if reservation.is_over(now_s):
        raise RequestError(f"cannot run in reservation {name!r}: Requested reservation is invalid: it is over")
    if not may_use(reservation, user, account):
        allowed = [f"users {', '.join(reservation.users)}"] if reservation.users else []
        allowed += [f"accounts {', '.join(reservation.accounts)}"] if reservation.accounts else []
        raise PermissionDeniedError(
            f"cannot run in reservation {name!r}: Access denied to requested reservation; it is for {' of '.join(allowed)}, "
            f"you are {user}{f' of account {account}' if reservation.accounts and account else ''}"
        )
    return reservation


# ----- check whether a reservation is possible


def _settle(tx: Transaction, wanted: Reservation, options: ReservationOptions) -> Reservation:
    """Check the whole reservation, choose its nodes, and record it."""
    cluster, before = tx.cluster, tx.cluster.reservations.get(wanted.name)
    _check_people(cluster, wanted)
    wanted = _check_times(wanted, before, tx.now_s)
    wanted = replace(wanted, nodes=_nodes(cluster, wanted, before, options, tx.now_s))
    moved = before is None or (before.nodes, before.start_s, before.end_s) != (
        wanted.nodes,
        wanted.start_s,
        wanted.end_s,
    )
    other = _overlapped(cluster, wanted, tx.now_s) if moved or (before and before.flags != wanted.flags) else ""
    if other:
        raise RequestError(f"cannot reserve {compress_hostlist(wanted.nodes)}: Requested nodes are busy: {other}")
    busy = _busy(cluster, wanted, tx.now_s) if moved and Flag.IGNORE_JOBS not in wanted.flags else {}
    if busy:
        nodes = compress_hostlist(name for name in wanted.nodes if name in busy)
        jobs = _named({job.id: job for on_node in busy.values() for job in on_node}.values())
        raise RequestError(
            f"cannot reserve {nodes}: Requested nodes are busy: {jobs} may run beyond the beginning; Flags=IGNORE_JOBS "
            "reserves them anyway"
        )
    _check_own_jobs(cluster, wanted)
    tx.set_reservation(wanted.name, wanted)
    return wanted


def _check_people(cluster: ClusterState, wanted: Reservation) -> None:
    if not wanted.users and not wanted.accounts:
        raise RequestError(
            "cannot reserve without a user or account: give Users= or Accounts= (Users=root for maintenance)"
        )
    accounting = cluster.config.accounting
    for name in wanted.accounts:
        if accounting.accounts and accounting.account(name) is None:
            raise RequestError(f"cannot reserve for account {name[:60]!r}: there is no such account")
    if wanted.partition and wanted.partition not in cluster.partitions:
        raise RequestError(f"cannot reserve in partition {wanted.partition[:60]!r}: invalid partition name specified")
    parse_features(wanted.features)


def _check_times(wanted: Reservation, before: Reservation | None, now_s: float) -> Reservation:
    """Reject impossible times.

    If the reservation does not repeat on its first day, it begins on the next day on which it does.
    """
    if wanted.duration_s <= 0:
        raise RequestError("cannot reserve: the end is not after the beginning")
    if wanted.end_s <= now_s and not wanted.repeats:
        raise RequestError("cannot reserve: Requested time is over")
    if before is None and wanted.start_s < int(now_s):
        raise RequestError(
            "cannot reserve: Invalid time specified: the beginning has passed; StartTime=now begins at once"
        )
    if before is not None and before.is_active(now_s) and wanted.start_s > max(before.start_s, now_s):
        raise RequestError(f"cannot put off the beginning of reservation {wanted.name!r}: it has begun")
    repeats = REPEATS.intersection(wanted.flags)
    if len(repeats) > 1:
        raise RequestError(f"cannot repeat in two ways: {' and '.join(sorted(repeats))}")
    period_s = MAX_PERIOD_S if Flag.WEEKLY in repeats else DAY_S
    if repeats and wanted.duration_s > period_s:
        raise RequestError(
            f"cannot repeat {min(repeats)} what lasts {format_time_s(wanted.duration_s)}: it would overlap itself"
        )
    return first_day(wanted)


def _nodes(
    cluster: ClusterState, wanted: Reservation, before: Reservation | None, options: ReservationOptions, now_s: float
) -> tuple[NodeName, ...]:
    """Return the reservation's nodes: the named ones, or as many available ones as requested."""
    candidates = [*cluster.nodes] if not wanted.partition else [*cluster.partitions[wanted.partition].nodes]
    if options.nodes is not None and options.node_count is not None:
        raise RequestError("cannot take both Nodes= and NodeCnt=: name the nodes, or say how many")
    if options.nodes is not None:
        return _named_nodes(candidates, wanted, before, options)
    if options.node_count is None and before is not None and not (options.features or options.partition):
        return before.nodes
    if not wanted.node_count:
        raise RequestError("cannot reserve: say which nodes, Nodes=n[1-2] or Nodes=ALL, or how many, NodeCnt=2")
    return _chosen_nodes(cluster, candidates, wanted, before, now_s)


def _named_nodes(
    candidates: Sequence[NodeName], wanted: Reservation, before: Reservation | None, options: ReservationOptions
) -> tuple[NodeName, ...]:
    words = (
        tuple(candidates) if options.nodes == ("ALL",) else combined(before.nodes if before else (), options, "nodes")
    )
    for name in words:
        if name not in candidates:
            where = f"partition {wanted.partition!r} does not have it" if wanted.partition else "there is no such node"
            raise NotFoundError(f"cannot reserve node {name[:60]}: Invalid node name specified: {where}")
    if not words:
        raise RequestError("cannot reserve no node at all")
    return tuple(name for name in candidates if name in words)


def _chosen_nodes(
    cluster: ClusterState, candidates: Iterable[NodeName], wanted: Reservation, before: Reservation | None, now_s: float
) -> tuple[NodeName, ...]:
    """Choose nodes that answer, have the features, and are not reserved by others.

    Nodes that the reservation already had come first.
    """
    features = parse_features(wanted.features)
    candidates = [name for name in candidates if matches(features, cluster.nodes[name].features)]
    what = f"{plural(wanted.node_count, 'node')}{f' with feature {wanted.features}' if wanted.features else ''}"
    if len(candidates) < wanted.node_count:
        where = f"partition {wanted.partition!r}" if wanted.partition else "the cluster"
        raise RequestError(f"cannot reserve {what}: Node count specification invalid: {where} has {len(candidates)}")
    able: list[tuple[bool, int, int, NodeName]] = []
    lacks: list[str] = []
    for place, name in enumerate(candidates):
        node = cluster.nodes[name]
        alone = replace(wanted, nodes=(name,))
        is_down = node.link is Link.DOWN and not node.power.is_off
        if is_down or node.drained:
            lacks.append(f"{name} is {'down' if is_down else 'drained'}")
        elif other := _overlapped(cluster, alone, now_s):
            lacks.append(other)
        elif Flag.IGNORE_JOBS not in wanted.flags and (busy := _busy(cluster, alone, now_s)):
            lacks.append(f"{name} has {_named(busy[name])}")
        else:
            able.append((before is None or name not in before.nodes, node.spec.weight, place, name))
    if len(able) < wanted.node_count:
        why = f"; {'; '.join(lacks[:SHOWN])}" if lacks else ""
        raise RequestError(f"cannot reserve {what}: Requested nodes are busy: {len(able)} can be reserved then{why}")
    chosen = {name for *_, name in sorted(able)[: wanted.node_count]}
    return tuple(name for name in candidates if name in chosen)


def _overlapped(cluster: ClusterState, wanted: Reservation, now_s: float) -> str:
    """Return the conflicting reservation that `wanted` overlaps, in words, or ""."""
    if wanted.may_overlap:
        return ""
    for other in cluster.reservations.values():
        if other.name != wanted.name and clash(wanted, other, now_s):
            common = compress_hostlist(sorted(set(wanted.nodes).intersection(other.nodes)))
            return f"{common} reserved ({other.name}); Flags=OVERLAP allows it"
    return ""


def _busy(cluster: ClusterState, wanted: Reservation, now_s: float) -> dict[NodeName, list[Job]]:
    """Return by node the other jobs that may run into the reservation.

    These are jobs whose time limit is too long, and jobs without a limit.
    """
    mine = set(wanted.nodes)
    found: dict[NodeName, list[Job]] = {}
    for job in cluster.active_jobs():
        began_s = job.started_at_s if job.started_at_s is not None else job.allocated_at_s
        limit_s = job.time_limit_s if job.time_limit_s is not None else UNLIMITED_S
        cut_s = cut_at_s(job, cluster.reservations.get(job.reservation))
        ends_s = (began_s or now_s) + suspended_s(job, now_s) + limit_s
        if job.reservation == wanted.name or min(ends_s, ends_s if cut_s is None else cut_s) <= wanted.start_s:
            continue
        for name in mine.intersection(job.held_nodes):
            found.setdefault(name, []).append(job)
    return found


def _check_own_jobs(cluster: ClusterState, wanted: Reservation) -> None:
    """Reject a change that would leave jobs which run in the reservation outside of it."""
    for job in cluster.using(wanted.name):
        left_out = [name for name in job.held_nodes if name not in wanted.nodes]
        if job.state is not JobState.PENDING and left_out:
            raise RequestError(
                f"cannot take {compress_hostlist(left_out)} out of reservation {wanted.name!r}: Requested reservation is in use: "
                f"{_named([job])} runs there"
            )


# ----- helpers


def _named(jobs: Iterable[Job]) -> str:
    ids = [job.display_id for job in jobs]
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return f"job{'s' if len(ids) > 1 else ''} {', '.join(ids[:SHOWN])}{more}"


def _free_name(cluster: ClusterState, user: str) -> str:
    return next(
        name for number in range(1, MAX_RESERVATIONS + 2) if (name := f"{user}_{number}") not in cluster.reservations
    )
