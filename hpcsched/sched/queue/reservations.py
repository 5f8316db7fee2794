"""Reservations in a pass: the waits of jobs inside and outside of a reservation.

`place.reserved_intervals` has the times at which nodes are closed. This module has the reasons, in
words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpcsched.model.ids import NodeName
from hpcsched.model.job import Reason
from hpcsched.model.reservation import MAX_PERIOD_S, Interval, Reservation, occurrences
from hpcsched.model.units import format_time_s
from hpcsched.sched.decisions import Wait
from hpcsched.sched.explain.sentences import listed
from hpcsched.sched.place.reserved_intervals import HORIZON_S, NEVER_S
from hpcsched.sched.snapshot import PendingJob, Snapshot


def not_now(job: PendingJob, reservations: Mapping[str, Reservation], now_s: float) -> Wait | None:
    """Return the wait of `job` if it cannot start in its reservation now; None if it can.

    Free resources do not matter. A job without a reservation has no such wait.
    """
    if not job.reservation:
        return None
    reservation = reservations.get(job.reservation)
    if reservation is None or reservation.is_over(now_s):
        gone = f"its reservation {job.reservation!r} is over or was deleted"
        way = f"hctl update {job.display_id} ReservationName= lets it run without"
        return Wait(reason=Reason.RESERVATION_DELETED, detail=f"{gone}; {way}")
    if now_s < reservation.start_s:
        detail = f"its reservation {job.reservation!r} begins in {format_time_s(int(reservation.start_s - now_s))}"
        return Wait(reason=Reason.RESERVATION, detail=detail, expected_start_s=reservation.start_s)
    return None


def cut_short_s(job: PendingJob, reservations: Mapping[str, Reservation]) -> float:
    """Return when `job` is ended before its time limit; `NEVER_S`: only its limit ends it.

    That is the end of the current or next occurrence of its reservation. If it requested no time
    limit, its deadline counts too.
    """
    cut_s = reservations[job.reservation].end_s if job.reservation in reservations else NEVER_S
    if job.deadline_at_s is not None and job.time_min_s is not None:
        cut_s = min(cut_s, job.deadline_at_s)
    return cut_s


def wait_for_reservation(snapshot: Snapshot, job: PendingJob, nodes: Sequence[int], end_s: float) -> Wait | None:
    """Return the wait for the first reservation that keeps `job` off `nodes`.

    The reservation begins before `end_s`. None: no reservation does.
    """
    now_s = snapshot.now_s
    wanted = {snapshot.nodes[node].name for node in nodes}
    for reservation in sorted(snapshot.reservations, key=lambda reservation: (reservation.start_s, reservation.name)):
        interval = next(occurrences(reservation, now_s, end_s), None)
        if reservation.name != job.reservation and interval and not wanted.isdisjoint(reservation.nodes):
            return _reserved(reservation, sorted(wanted.intersection(reservation.nodes)), interval, now_s)
    return None


def certain_until_s(reservations: Iterable[Reservation], now_s: float) -> float:
    """Return the time up to which expected starts are certain.

    Later starts may overlap occurrences of repeating reservations that are not known yet.
    """
    return now_s + HORIZON_S - MAX_PERIOD_S if any(reservation.repeats for reservation in reservations) else NEVER_S


def _reserved(reservation: Reservation, nodes: list[NodeName], interval: Interval, now_s: float) -> Wait:
    from_s = max(now_s, interval[0])
    which = f"{listed(nodes)} {'is' if len(nodes) == 1 else 'are'} reserved"
    when = f"in {format_time_s(int(from_s - now_s))}" if from_s > now_s else "now"
    end = f"{when}, for {format_time_s(int(interval[1] - from_s))} ({reservation.name})"
    if reservation.is_maintenance:
        return Wait(reason=Reason.NODES_UNAVAILABLE, detail=f"{which} for maintenance {end}")
    return Wait(reason=Reason.RESERVATION, detail=f"{which} {end}")
