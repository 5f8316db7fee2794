"""Replay past jobs on other nodes, and draw the weeks ahead from the weeks before.

Two answers, kept apart. *The past again*: the jobs that were really submitted, with more nodes. It needs no forecast. *The
weeks ahead*: each draw takes whole days of the past, each day one with the same weekday, and replays them after the present
load. The same draws serve all variants, so their differences are not due to chance. The range of the draws is the answer: one
number would not be better than "as last month" (see `backtest`).

All days of a draw come from `SPAN_DAYS` successive days at a random place in the history. Draws over the whole history differ
too little from each other, because busy and quiet weeks then average out within each draw.

What no draw knows: more room brings more jobs, and a job runs on another machine as long as on its own.

The scheduler is EASY backfill on unequal nodes in the order of arrival: heads start while they fit; the first job that does
not fit is promised its shadow time; a later job starts if it ends by then, or takes only what that promise leaves over.
On one node this is `sched.pool.EasyPool`, start by start (a property test compares them).

Users choose how many jobs there are, and of how many sizes. So a pass over the queue looks at fewer of the waiting jobs, and of
their sizes, the more jobs are replayed (Slurm's bf_max_job_test): a replay takes half a minute at most.

Pure. Knows no database and no clock. Source: Lifka, "The ANL/IBM SP scheduling system" (1995).
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import NamedTuple

from hpcsched.sched.pool import EasyPool
from hpcsched.sim.policies import Engine, quantile_of, replay

DAY_S = 86400.0
WEEK_DAYS = 7
HISTORY_DAYS = 84  # of them the draws are made
SPAN_DAYS = 14  # of it, from which one draw takes its days
LEAST_DAYS = 28  # of history, for a forecast
AHEAD_DAYS = 28
WARM_DAYS = 7  # of real jobs before the days that count, so that the cluster is not empty at their start
DRAWS = 40
BAND = (0.1, 0.9)  # quantiles: 80 % of the draws are between them
PROMPT_S = 1.0  # a job that waited less started at once
MOST_LOOKS = 40_000_000  # at waiting jobs, in a replay
MOST_NODE_LOOKS = 200_000_000  # at nodes, for them
LEAST_DEPTH, LEAST_SIZES = 100, 10  # in a pass: waiting jobs, and different sizes of jobs that do not fit


class Arrival(NamedTuple):
    """A job of the past; `limit_s` is at least `run_s`.

    Memory, cpus and GPUs are of each of its `nodes` nodes.
    """

    submit_s: float
    run_s: float
    limit_s: float
    nodes: int
    cpus: int
    mem_mib: int
    gpus: int = 0
    gpu_type: str = ""  # "": any
    partition: str = ""
    user: str = ""
    cpu_used_s: float | None = None  # processor time of all its processes; None: not known
    began_s: float | None = None  # when it really started, and on which nodes
    on: tuple[str, ...] = ()


class PlanNode(NamedTuple):
    """A node: what it has, and the partitions that it is in (none: all)."""

    name: str
    cpus: int
    mem_mib: int
    gpus: int = 0
    gpu_type: str = ""
    partitions: frozenset[str] = frozenset()


PlanNodes = tuple[PlanNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFigures:
    """How long some jobs waited, in seconds. `prompt`: how many started at once."""

    jobs: int = 0
    mean_s: float = 0.0
    p90_s: float = 0.0
    total_s: float = 0.0
    prompt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A schedule of past jobs. `left_out`: jobs that these machines can never run."""

    waits: WaitFigures
    gpu_waits: WaitFigures
    by_partition: Mapping[str, WaitFigures]
    by_user: Mapping[str, WaitFigures]
    utilization: float  # of the cpus, within the days that count
    gpu_utilization: float
    left_out: int = 0


class Band(NamedTuple):
    """The median of the draws, and the quantiles `BAND` of them."""

    median: float
    low: float
    high: float


# ----- the scheduler: EASY backfill on unequal nodes


class Room(NamedTuple):
    """What is free on each node."""

    cpus: list[int]
    mem_mib: list[int]
    gpus: list[int]

    def copy(self) -> Room:
        return Room(self.cpus.copy(), self.mem_mib.copy(), self.gpus.copy())

    def fits(self, job: Arrival, at: int) -> bool:
        """Return whether a part of `job` fits on a node."""
        return self.cpus[at] >= job.cpus and self.mem_mib[at] >= job.mem_mib and self.gpus[at] >= job.gpus

    def change(self, job: Arrival, nodes: Iterable[int], sign: int) -> None:
        """Add (`sign` 1) or take away (-1) what `job` uses on `nodes`."""
        for at in nodes:
            self.cpus[at] += sign * job.cpus
            self.mem_mib[at] += sign * job.mem_mib
            self.gpus[at] += sign * job.gpus


class EasyNodes:
    """Decides as `sim.policies.Engine`. `jobs` must fit on `machines` when these are empty."""

    def __init__(self, machines: PlanNodes, jobs: Sequence[Arrival]) -> None:
        self._jobs = jobs
        self._machines = machines
        self._free = Room(
            [machine.cpus for machine in machines],
            [machine.mem_mib for machine in machines],
            [machine.gpus for machine in machines],
        )
        self._places: dict[int, tuple[int, ...]] = {}  # of running jobs
        self._ends: list[tuple[float, int]] = []  # by time limit, ascending
        self._limit_ends_s: dict[int, float] = {}  # the same by job
        self._queue: list[int] = []
        # the promise of the head: its time, and what it leaves over then
        self._shadow: tuple[float, Room] | None = None
        self._hosts: dict[tuple[object, ...], tuple[int, ...]] = {}
        passes = 2 * max(1, len(jobs))
        self._depth = max(LEAST_DEPTH, MOST_LOOKS // passes)
        self._sizes = max(LEAST_SIZES, MOST_NODE_LOOKS // (passes * max(1, len(machines))))

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        """Add `job` to the queue, and return the jobs to start."""
        expired = self._expire(now_s)
        seats = self._seats(self._free, self._jobs[job])
        if seats is not None and not self._queue:
            self._start(job, seats, now_s)
            return (job,)
        self._queue.append(job)
        if seats is None:
            return ()
        return self._choose(now_s) if expired else self._backfill((job,), now_s)

    def end(self, job: int, now_s: float) -> Sequence[int]:
        """Release the nodes of `job`, which has ended, and return the jobs to start."""
        if job in self._places:
            self._free.change(self._jobs[job], self._places.pop(job), 1)
            del self._ends[bisect_left(self._ends, (self._limit_ends_s.pop(job), job))]
        self._expire(now_s)
        self._shadow = None
        return self._choose(now_s)

    def _expire(self, now_s: float) -> bool:
        """Release the nodes of jobs at their time limits; return whether there was one."""
        expired = False
        while self._ends and self._ends[0][0] <= now_s:
            _, job = self._ends.pop(0)
            del self._limit_ends_s[job]
            self._free.change(self._jobs[job], self._places.pop(job), 1)
            self._shadow = None
            expired = True
        return expired

    def _choose(self, now_s: float) -> list[int]:
        """Start jobs from the front of the queue while they fit, then backfill."""
        started: list[int] = []
        while self._queue and (seats := self._seats(self._free, self._jobs[self._queue[0]])) is not None:
            job = self._queue.pop(0)
            self._start(job, seats, now_s)
            started.append(job)
        if len(self._queue) > 1:
            started += self._backfill(tuple(self._queue[1 : 1 + self._depth]), now_s)
        return started

    def _start(self, job: int, seats: tuple[int, ...], now_s: float) -> None:
        self._free.change(self._jobs[job], seats, -1)
        self._places[job] = seats
        self._limit_ends_s[job] = now_s + self._jobs[job].limit_s
        insort(self._ends, (self._limit_ends_s[job], job))

    def _backfill(self, jobs: Sequence[int], now_s: float) -> list[int]:
        """Start those of `jobs` that do not delay the head of the queue."""
        started = []
        most = max(self._free.cpus)
        too_large: set[tuple[object, ...]] = set()  # there is less and less room in a pass
        for number in jobs:
            job = self._jobs[number]
            if job.cpus > most:
                continue
            shadow_s, left = self._promise()
            late = now_s + job.limit_s > shadow_s
            size = (late, job.nodes, *_size_of(job))
            if size in too_large:
                continue
            if len(too_large) >= self._sizes:
                break
            room = self._free
            if late:
                room = Room(*(list(map(min, free, rest)) for free, rest in zip(self._free, left, strict=True)))
            seats = self._seats(room, job)
            if seats is None:
                too_large.add(size)
                continue
            if late:
                left.change(job, seats, -1)
            self._queue.remove(number)
            self._start(number, seats, now_s)
            started.append(number)
            most = max(self._free.cpus)
        return started

    def _promise(self) -> tuple[float, Room]:
        """Return the shadow time of the head of the queue, and what it leaves over at that time."""
        if self._shadow is None:
            head, room = self._jobs[self._queue[0]], self._free.copy()
            possible = set(self._possible(head))
            fitting = {at for at in possible if room.fits(head, at)}
            at = 0
            while len(fitting) < head.nodes:
                end_s = self._ends[at][0]
                while at < len(self._ends) and self._ends[at][0] == end_s:
                    number = self._ends[at][1]
                    room.change(self._jobs[number], self._places[number], 1)
                    fitting.update(node for node in self._places[number] if node in possible and room.fits(head, node))
                    at += 1
            seats = self._seats(room, head)
            assert seats is not None
            room.change(head, seats, -1)
            self._shadow = self._ends[at - 1][0], room
        return self._shadow

    def _seats(self, room: Room, job: Arrival) -> tuple[int, ...] | None:
        """Return the nodes for `job` that it would fill most, None if it does not fit in `room`."""
        cpus, mem_mib, gpus = room
        need_cpus, need_mib, need_gpus = job.cpus, job.mem_mib, job.gpus
        fits = [
            (gpus[at], cpus[at], at)
            for at in self._possible(job)
            if cpus[at] >= need_cpus and mem_mib[at] >= need_mib and gpus[at] >= need_gpus
        ]
        if len(fits) < job.nodes:
            return None
        if job.nodes == 1:
            return (min(fits)[2],)
        return tuple(at for _, _, at in sorted(fits)[: job.nodes])

    def _possible(self, job: Arrival) -> tuple[int, ...]:
        key = _size_of(job)
        if key not in self._hosts:
            self._hosts[key] = hosts(self._machines, job)
        return self._hosts[key]


def _size_of(job: Arrival) -> tuple[object, ...]:
    """Return what decides on which nodes a job fits."""
    return (job.partition, job.gpu_type, job.cpus, job.mem_mib, job.gpus)


def hosts(machines: PlanNodes, job: Arrival) -> tuple[int, ...]:
    """Return the indexes of the machines that can run a part of `job` when they are empty."""
    return tuple(
        at
        for at, machine in enumerate(machines)
        if machine.cpus >= job.cpus
        and machine.mem_mib >= job.mem_mib
        and machine.gpus >= job.gpus
        and (not job.gpus or job.gpu_type in ("", machine.gpu_type))
        and (not machine.partitions or not job.partition or job.partition in machine.partitions)
    )


# ----- the past again


def replayed(machines: PlanNodes, jobs: Iterable[Arrival], from_s: float, to_s: float) -> ReplayResult:
    """Return the schedule of `jobs` on `machines`.

    Only the jobs submitted within ``[from_s, to_s)`` count.
    """
    ordered = sorted(jobs)
    known: dict[tuple[object, ...], bool] = {}
    fit = []
    for job in ordered:
        key = (*job[3:9],)
        if key not in known:
            known[key] = len(hosts(machines, job)) >= job.nodes
        if known[key]:
            fit.append(job)
    starts_s = replay(fit, _engine(machines, fit))
    counted = [(job, at_s) for job, at_s in zip(fit, starts_s, strict=True) if from_s <= job.submit_s < to_s]
    groups: dict[tuple[str, str], list[float]] = {}
    for job, at_s in counted:
        for name in (("partition", job.partition), ("user", job.user)):
            groups.setdefault(name, []).append(at_s - job.submit_s)
    busy = busy_s(zip(fit, starts_s, strict=True), from_s, to_s)
    return ReplayResult(
        waits=wait_figures([at_s - job.submit_s for job, at_s in counted]),
        gpu_waits=wait_figures([at_s - job.submit_s for job, at_s in counted if job.gpus]),
        by_partition={
            name: wait_figures(waits) for (kind, name), waits in sorted(groups.items()) if kind == "partition"
        },
        by_user={name: wait_figures(waits) for (kind, name), waits in sorted(groups.items()) if kind == "user"},
        utilization=_part(busy[0], sum(machine.cpus for machine in machines) * (to_s - from_s)),
        gpu_utilization=_part(busy[1], sum(machine.gpus for machine in machines) * (to_s - from_s)),
        left_out=sum(from_s <= job.submit_s < to_s for job in ordered) - len(counted),
    )


def _engine(machines: PlanNodes, jobs: Sequence[Arrival]) -> Engine:
    """Return the scheduler.

    `EasyPool` gives the same starts on one node and is six times as fast.
    """
    if len(machines) == 1 and not any(job.mem_mib or job.gpus for job in jobs):
        return EasyPool(machines[0].cpus, [job.cpus for job in jobs], [job.limit_s for job in jobs])
    return EasyNodes(machines, jobs)


def wait_figures(waits_s: list[float]) -> WaitFigures:
    """Return the figures of these waits, which are sorted."""
    if not waits_s:
        return WaitFigures()
    waits_s.sort()
    return WaitFigures(
        jobs=len(waits_s),
        mean_s=sum(waits_s) / len(waits_s),
        p90_s=quantile_of(waits_s, 0.9),
        total_s=sum(waits_s),
        prompt=sum(wait_s < PROMPT_S for wait_s in waits_s),
    )


def busy_s(starts: Iterable[tuple[Arrival, float]], from_s: float, to_s: float) -> tuple[float, float]:
    """Return the cpu seconds and the GPU seconds that jobs hold within ``[from_s, to_s)``."""
    cpu_s = gpu_s = 0.0
    for job, at_s in starts:
        held_s = max(0.0, min(to_s, at_s + job.run_s) - max(from_s, at_s)) * job.nodes
        cpu_s += held_s * job.cpus
        gpu_s += held_s * job.gpus
    return cpu_s, gpu_s


def _part(some: float, whole: float) -> float:
    return some / whole if whole > 0 else 0.0


# ----- the days: local dates, because people work by local time


Days = Mapping[int, Sequence[Arrival]]  # by the ordinal of the date; submit_s counts from its midnight


def days_of(jobs: Iterable[Arrival], local: bool) -> Days:
    """Return the jobs by day, each submitted so many seconds after the midnight of its day.

    `local`: dates of the local time zone; else days of 24 hours, for times that count from the start of a trace.
    """
    found: dict[int, list[Arrival]] = {}
    for job in jobs:
        day = day_of(job.submit_s, local)
        found.setdefault(day, []).append(job._replace(submit_s=job.submit_s - midnight_s(day, local)))
    return found


def day_of(at_s: float, local: bool) -> int:
    """Return the ordinal of the day at `at_s`."""
    return datetime.fromtimestamp(at_s).toordinal() if local else int(at_s // DAY_S)


def midnight_s(day: int, local: bool) -> float:
    """Return when the day with this ordinal begins.

    A day on which the clocks change has 23 or 25 hours.
    """
    return datetime.combine(date.fromordinal(day), time()).timestamp() if local else day * DAY_S


def jobs_of(days: Days, wanted: Iterable[int], local: bool) -> list[Arrival]:
    """Return the jobs of these days, at their times."""
    return [job for day in wanted for job in moved(days.get(day, ()), midnight_s(day, local))]


def moved(jobs: Iterable[Arrival], by_s: float) -> list[Arrival]:
    """Return the jobs as submitted `by_s` seconds later."""
    return [job._replace(submit_s=job.submit_s + by_s) for job in jobs]


# ----- the weeks ahead


Value = Callable[[ReplayResult], float]


def mean_wait_s(replay: ReplayResult) -> float:
    """Return the mean wait of all jobs."""
    return replay.waits.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The draws of the weeks ahead: of each, the schedule with each variant of the machines."""

    draws: tuple[tuple[ReplayResult, ...], ...]

    def band(self, variant: int, value: Value = mean_wait_s) -> Band:
        """Return the band of `value` with a variant."""
        return band_of([value(draw[variant]) for draw in self.draws])

    def gain(self, variant: int, value: Value = mean_wait_s) -> Band:
        """Return the band by how much `value` is less with `variant` than with variant 0."""
        return band_of([value(draw[0]) - value(draw[variant]) for draw in self.draws])


def ahead(
    variants: Sequence[PlanNodes],
    days: Days,
    first: int,
    local: bool,
    *,
    count: int = AHEAD_DAYS,
    draws: int = DRAWS,
    seed: int = 1,
) -> Ahead:
    """Draw the `count` days from day `first` on, and replay them with each variant.

    They are drawn from the `HISTORY_DAYS` before. The jobs of the last `WARM_DAYS` load the machines at their begin.
    Raises ValueError if there are fewer than `LEAST_DAYS` of history.
    """
    history = range(max(first - HISTORY_DAYS, min(days, default=first)), first)
    if len(history) < LEAST_DAYS:
        raise ValueError(f"{len(history)} days of history are too few for a forecast: it needs {LEAST_DAYS}")
    before = jobs_of(days, range(first - WARM_DAYS, first), local)
    from_s, to_s = midnight_s(first, local), midnight_s(first + count, local)
    chance = random.Random(seed)
    found = []
    for _ in range(draws):
        jobs = before.copy()
        begin = chance.randrange(history.start, history.stop - SPAN_DAYS + 1)
        for day in range(first, first + count):
            same = [then for then in range(begin, begin + SPAN_DAYS) if (then - day) % WEEK_DAYS == 0]
            jobs += moved(days.get(chance.choice(same), ()), midnight_s(day, local))
        found.append(tuple(replayed(machines, jobs, from_s, to_s) for machines in variants))
    return Ahead(draws=tuple(found))


def band_of(values: Iterable[float]) -> Band:
    """Return the band of the values, which must not be empty."""
    ordered = sorted(values)
    return Band(*(quantile(ordered, part) for part in (0.5, *BAND)))


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of ascending values, interpolated linearly."""
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Backtest(NamedTuple):
    """Of `windows` periods that are over, in how many the true value was within the band."""

    windows: int
    wait_within: int
    gain_within: int
    sign_right: int


def backtest(
    machines: PlanNodes,
    more: PlanNodes,
    days: Days,
    local: bool,
    *,
    count: int = AHEAD_DAYS,
    draws: int = DRAWS,
    seed: int = 1,
) -> Backtest:
    """Forecast each period of `count` days that is over from the days before, and compare.

    The true mean wait is that of the replay of the jobs that came, with `machines` and with `more`.
    """
    first, last = min(days, default=0), max(days, default=-1)
    windows = wait_within = gain_within = sign_right = 0
    for begin in range(first + HISTORY_DAYS, last - count + 1, count):
        real = jobs_of(days, range(begin - WARM_DAYS, begin + count), local)
        span = midnight_s(begin, local), midnight_s(begin + count, local)
        now_s, with_s = (replayed(each, real, *span).waits.mean_s for each in (machines, more))
        found = ahead((machines, more), days, begin, local, count=count, draws=draws, seed=seed)
        wait, gain = found.band(0), found.gain(1)
        windows += 1
        wait_within += wait.low <= now_s <= wait.high
        gain_within += gain.low <= now_s - with_s <= gain.high
        sign_right += (now_s > with_s) == (gain.median > 0)
    return Backtest(windows, wait_within, gain_within, sign_right)


# ----- cheaper than a machine: what else would shorten the waits


def with_memory(machines: PlanNodes, names: Collection[str], factor: int = 2) -> PlanNodes:
    """Return the machines, these with `factor` times the memory."""
    return tuple(
        machine._replace(mem_mib=machine.mem_mib * factor) if machine.name in names else machine for machine in machines
    )


def short_limits(jobs: Iterable[Arrival], factor: float = 1.25) -> list[Arrival]:
    """Return the jobs with time limits of at most `factor` times what they ran."""
    return [job._replace(limit_s=min(job.limit_s, max(60.0, job.run_s * factor))) for job in jobs]


IDLE_PART = 0.02  # of its cpus: below, a job only holds them
IDLE_LEAST_S = 3600.0


def without_idle(jobs: Iterable[Arrival]) -> list[Arrival]:
    """Return the jobs that did not only hold their nodes."""
    return [job for job in jobs if not is_idle(job)]


def is_idle(job: Arrival) -> bool:
    """Return whether `job` held cpus for an hour or longer and used less than `IDLE_PART`."""
    held_s = job.run_s * job.nodes * job.cpus
    return job.cpu_used_s is not None and job.run_s >= IDLE_LEAST_S and job.cpu_used_s < IDLE_PART * held_s


def memory_bound(machines: PlanNodes, jobs: Sequence[Arrival], from_s: float, to_s: float) -> list[str]:
    """Return the machines of the class whose doubled memory shortens the waits most.

    None, if the waits are not shorter by a twentieth.
    """
    now = replayed(machines, jobs, from_s, to_s).waits.total_s
    best: tuple[float, list[str]] = (now * 0.95, [])
    for size in sorted({(machine.cpus, machine.mem_mib, machine.gpus) for machine in machines}):
        names = [machine.name for machine in machines if (machine.cpus, machine.mem_mib, machine.gpus) == size]
        total_s = replayed(with_memory(machines, names), jobs, from_s, to_s).waits.total_s
        best = min(best, (total_s, names))
    return best[1]
