"""Find what slows a running job down.

Pure: rules over the last samples of the job and of its nodes. A rule looks at one node of a job, has
a few thresholds, and gives a sentence with numbers and what to do. It says nothing before it has
`LEAST_LOOKS` values, and nothing of what the node cannot measure. A cause that explains another one
hides it (`EXPLAINS`): a job that swaps also waits for the disk.

Counters are rates per second here, as the recorder answers them.

Sources: the thresholds for idle GPUs are those of Princeton's jobstats, those of pressure (PSI) follow
https://docs.kernel.org/accounting/psi.html; the others were set by trials on loaded nodes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import correlation, fmean, linear_regression

from hpcsched.model.ids import NodeName
from hpcsched.model.units import format_mem, format_time_s

Values = Sequence[float | None]

LEAST_LOOKS = 10  # values below which a rule says nothing
RECENT = 30  # looks that most rules judge: five minutes of the usual interval
FIT_LOOKS = 60  # looks that a forecast of memory needs
MOST = 0.6  # part of the looks in which something must be so
BUSY = 0.85  # of a CPU, a link or a disk: saturated
SOON_S = 2 * 3600.0  # a limit that is reached so soon is told
FAULTS_PER_S = 100.0  # page faults that read from disk
PAGES_PER_S = 50.0  # swapped
LOST = 0.01  # of the TCP segments
LATE_PART = 0.15  # of a step that the others wait for a rank


class SlowCause(enum.Enum):
    """A cause of slow or wasted work. The order is that of the answer."""

    HELD_EMPTY = "held and empty"
    GPU_UNUSED = "GPU unused"
    THROTTLED = "throttled"
    SWAPPING = "swapping"
    CACHE_THRASH = "page cache thrash"
    MEMORY_LIMIT = "memory limit"
    OUTSIDE_LOAD = "load from outside"
    OVERSUBSCRIBED = "oversubscribed CPUs"
    DATA_STARVED = "starved by data"
    SHARE_SLOW = "slow share"
    DISK_SATURATED = "disk saturated"
    NETWORK_SATURATED = "network saturated"
    NETWORK_LOSS = "network losses"
    STRAGGLER = "straggler"
    ONE_THREAD = "one thread"
    IDLE = "idle"


# What a cause brings about by itself, on the same node.
EXPLAINS: dict[SlowCause, frozenset[SlowCause]] = {
    SlowCause.HELD_EMPTY: frozenset({SlowCause.GPU_UNUSED, SlowCause.IDLE}),
    SlowCause.GPU_UNUSED: frozenset({SlowCause.IDLE, SlowCause.ONE_THREAD}),
    SlowCause.SWAPPING: frozenset(
        {SlowCause.CACHE_THRASH, SlowCause.DISK_SATURATED, SlowCause.SHARE_SLOW, SlowCause.IDLE}
    ),
    SlowCause.CACHE_THRASH: frozenset(
        {SlowCause.DISK_SATURATED, SlowCause.SHARE_SLOW, SlowCause.IDLE, SlowCause.MEMORY_LIMIT}
    ),
    SlowCause.OUTSIDE_LOAD: frozenset({SlowCause.ONE_THREAD}),
    SlowCause.DATA_STARVED: frozenset({SlowCause.DISK_SATURATED, SlowCause.SHARE_SLOW, SlowCause.ONE_THREAD}),
    SlowCause.SHARE_SLOW: frozenset({SlowCause.IDLE}),
    SlowCause.DISK_SATURATED: frozenset({SlowCause.IDLE}),
    SlowCause.NETWORK_SATURATED: frozenset({SlowCause.IDLE, SlowCause.NETWORK_LOSS}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """A cause, on one node, in a sentence with numbers, and what to do about it."""

    cause: SlowCause
    node: NodeName
    text: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWindow:
    """The last looks at a job's part of a node, oldest first, one value for each step.

    `job` and `machine` have the values by the series' key, None where nothing was measured.
    `others_cpus`: CPUs of its machine that jobs hold besides.
    """

    node: NodeName
    step_s: float
    cpus: int
    node_cpus: int
    others_cpus: int = 0
    gpus: tuple[int, ...] = ()
    memory_limit_bytes: int = 0
    link_bytes_per_s: float = 0.0  # of the node's network; 0: not known
    job: Mapping[str, Values] = field(default_factory=dict)
    machine: Mapping[str, Values] = field(default_factory=dict)

    def of_job(self, name: str) -> list[float]:
        """Return the recent values of a series of the job; empty if they are too few."""
        return _recent(self.job.get(name, ()))

    def of_node(self, key: str) -> list[float]:
        """Return the recent values of a series of the node; empty if they are too few."""
        return _recent(self.machine.get(key, ()))

    def labels(self, name: str) -> list[str]:
        """Return the labels of a series of the node, as in its keys."""
        return [key.partition(":")[2] for key in self.machine if key.partition(":")[0] == name]


def judge(windows: Sequence[NodeWindow], note: str = "") -> list[Bottleneck]:
    """Return the findings, the worst first.

    `note`: what the training program says of itself, such as the rank that the others wait for.
    """
    found: list[Bottleneck] = []
    for window in windows:
        here = [judged for rule in _RULES for judged in rule(window)]
        hidden = frozenset[SlowCause]().union(*(EXPLAINS.get(cause, frozenset()) for cause, _, _ in here))
        found += [
            Bottleneck(cause=cause, node=window.node, text=text, remedy=remedy)
            for cause, text, remedy in here
            if cause not in hidden
        ]
    if _is_late(note):
        found.append(_straggler(note, found))
    order = list(SlowCause)
    return sorted(found, key=lambda finding: order.index(finding.cause))


def looks(windows: Sequence[NodeWindow]) -> int:
    """Return the number of looks at the job that there are, of the node with most."""
    return max((len(_known(values)) for window in windows for values in window.job.values()), default=0)


_WAITS_FOR = re.compile(r"the others wait for .{1,300}: (\d{1,9}) ms of a step's (\d{1,9})\Z")


def _is_late(note: str) -> bool:
    """Return whether a step waits for a rank; ranks always differ a little."""
    match = _WAITS_FOR.match(note)
    return match is not None and float(match[1]) >= LATE_PART * float(match[2]) > 0.0


def _straggler(note: str, found: Sequence[Bottleneck]) -> Bottleneck:
    """Return the finding about a slow rank, with the cause on its node if that is known."""
    node = next((finding.node for finding in found if finding.node in note.replace(":", " ").split()), NodeName(""))
    cause = next((finding for finding in found if finding.node == node), None) if node else None
    why = f"; there: {cause.cause.value}" if cause is not None else ""
    remedy = "let --shares auto give that rank less, or leave its node out (--exclude)"
    return Bottleneck(cause=SlowCause.STRAGGLER, node=node, text=note + why, remedy=remedy)


# ----- values


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None]


def _recent(values: Values) -> list[float]:
    known = _known(values[-RECENT:])
    return known if len(known) >= LEAST_LOOKS else []


def _part(values: Sequence[float], is_so: Callable[[float], bool]) -> float:
    """Return the part of the values for which something is so, 0 of none."""
    return sum(map(is_so, values)) / len(values) if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def _busy_cpus(window: NodeWindow) -> float:
    """Return how many CPUs of the machine are busy."""
    modes = ("user", "nice", "system", "irq", "steal")
    return sum(_mean(window.of_node(f"node_cpu_seconds_total:{mode}")) for mode in modes)


def _pressure(window: NodeWindow, resource: str, kind: str = "some") -> list[float]:
    return window.of_node(f"node_pressure_seconds_total:{resource}:{kind}")


# ----- rules


Judged = Iterator[tuple[SlowCause, str, str]]  # of one node: cause, text and remedy of a `Bottleneck`


def _held_empty(window: NodeWindow) -> Judged:
    processes = window.of_job("job_processes")
    if processes and not any(processes):
        yield (
            SlowCause.HELD_EMPTY,
            f"holds {_cpus(window.cpus)}{_gpus(window)}, and no process of the job runs there",
            "end the job, or give the node back: hctl update JOB num_nodes=N",
        )


def _gpu_unused(window: NodeWindow) -> Judged:
    idle = []
    for gpu in window.gpus:
        busy = window.of_node(f"gpu_utilization_ratio:{gpu}")
        if busy and max(busy) < 0.05:
            idle.append(gpu)
    if not idle:
        return
    counted = [window.of_node(f"gpu_processes:{gpu}") for gpu in idle]  # nvidia-smi counts none
    processes = sum(_quantile(values, 1.0) for values in counted)
    which = f"GPU {', '.join(map(str, idle))}" if len(idle) < len(window.gpus) or len(idle) == 1 else "its GPUs"
    how = ": a program has it open and computes nothing" if processes else ": no process uses it" * all(counted)
    yield (
        SlowCause.GPU_UNUSED,
        f"{which} of {len(window.gpus)} was below 5 % all the time{how}",
        "see whether the program finds its GPUs (CUDA_VISIBLE_DEVICES, a CPU build of torch), or ask for fewer",
    )


def _throttled(window: NodeWindow) -> Judged:
    for kind in window.labels("node_throttled_total"):
        part = _part(window.of_node(f"node_throttled_total:{kind}"), lambda rate: rate > 0)
        if part > 0.2:
            yield (
                SlowCause.THROTTLED,
                f"its CPUs were slowed down for heat in {part:.0%} of the looks",
                "have the node's fans and dust looked at; hctl drain it until then",
            )
            break
    for gpu in window.gpus:
        part = _part(window.of_node(f"gpu_throttle:{gpu}:heat"), bool)
        if part > 0.2:
            yield (
                SlowCause.THROTTLED,
                f"GPU {gpu} was slowed down for heat in {part:.0%} of the looks",
                "have its cooling looked at, or set a lower power limit",
            )


def _swapping(window: NodeWindow) -> Judged:
    rates = [window.of_node(f"node_swap_{way}_pages_total") for way in ("in", "out")]
    pages = sum(_quantile(rate, 0.5) for rate in rates)
    if pages > PAGES_PER_S:
        yield (
            SlowCause.SWAPPING,
            f"swaps {pages:.0f} pages/s: the programs there need more memory than it has",
            "ask for more nodes or less memory; an administrator: lower memory = in the node's file",
        )


def _cache_thrash(window: NodeWindow) -> Judged:
    faults = _quantile(window.of_job("job_major_faults_total"), 0.5)
    stalled, limit = _mean(_pressure(window, "memory")), window.memory_limit_bytes
    is_full = bool(limit) and _mean(window.of_job("job_memory_bytes")) > 0.85 * limit
    if faults > FAULTS_PER_S and stalled > (0.01 if is_full else 0.05):
        held = f"the {format_mem(window.memory_limit_bytes >> 20)} it holds" if window.memory_limit_bytes else "memory"
        yield (
            SlowCause.CACHE_THRASH,
            f"reads pages of files from disk again, {faults:.0f} faults/s: they do not fit into {held}",
            "ask for more memory (--mem), or read in order and only once",
        )


def _memory_limit(window: NodeWindow) -> Judged:
    limit, used = window.memory_limit_bytes, window.of_job("job_memory_anonymous_bytes")
    if not limit or not used:
        return
    most = max(used[-LEAST_LOOKS:])
    if most > 1.02 * limit:
        return  # pages of several processes, counted more than once
    if min(used[-LEAST_LOOKS:]) > 0.9 * limit:
        text = f"uses {most / limit:.0%} of the {format_mem(limit >> 20)} it holds: it is killed at the limit"
    else:
        left_s = _reaches_s(window.job["job_memory_anonymous_bytes"], window.step_s, limit)
        if left_s is None or left_s > SOON_S:
            return
        text = (
            f"grows, and reaches the {format_mem(limit >> 20)} it holds in about {format_time_s(max(1, round(left_s)))}"
        )
    remedy = "write a checkpoint now and ask for more memory (--mem), or look for what grows"
    yield SlowCause.MEMORY_LIMIT, text, remedy


def _reaches_s(values: Values, step_s: float, limit: float) -> float | None:
    """Return when a steady growth reaches the limit, None if nothing grows steadily."""
    points = [(place * step_s, value) for place, value in enumerate(values) if value is not None]
    if len(points) < FIT_LOOKS:
        return None
    slopes = []
    for part in (points, points[len(points) // 2 :], points[3 * len(points) // 4 :]):
        times, sizes = zip(*part, strict=True)
        if max(sizes) == min(sizes) or correlation(times, sizes) ** 2 < 0.9:
            return None
        slopes.append(linear_regression(times, sizes).slope)
    # A program that loads its data grows fast, then slowly: its last part counts.
    if slopes[0] <= 0 or slopes[-1] < 0.5 * slopes[0]:
        return None
    return max(0.0, limit - points[-1][1]) / slopes[-1]


def _outside_load(window: NodeWindow) -> Judged:
    used = window.of_job("job_cpu_seconds_total")
    if not used or not _busy_cpus(window):
        return
    outside = _busy_cpus(window) - _mean(used) - window.others_cpus
    if outside > max(0.5, 0.15 * window.node_cpus) and _mean(_pressure(window, "cpu")) > 0.25:
        yield (
            SlowCause.OUTSIDE_LOAD,
            f"programs that belong to no job use {outside:.1f} of its {_cpus(window.node_cpus)}",
            "ask their owners, or an administrator: hctl drain, or cpus = fewer in the node's file",
        )


def _oversubscribed(window: NodeWindow) -> Judged:
    threads, used = _mean(window.of_job("job_threads_runnable")), _mean(window.of_job("job_cpu_seconds_total"))
    if threads > max(1.5 * window.cpus, window.cpus + 1) and used > 0.5 * window.cpus:
        yield (
            SlowCause.OVERSUBSCRIBED,
            f"{threads:.0f} threads of the job want to run at once on the {_cpus(window.cpus)} it holds",
            f"OMP_NUM_THREADS={window.cpus}, fewer workers, or more --cpus-per-task",
        )


def _data_starved(window: NodeWindow) -> Judged:
    for gpu in window.gpus:
        busy = window.of_node(f"gpu_utilization_ratio:{gpu}")
        if not busy or not 0.05 <= _mean(busy) <= 0.8:
            continue
        uneven = _quantile(busy, 0.1) < 0.5 * _mean(busy) and _quantile(busy, 0.9) > 1.3 * _mean(busy)
        used = _mean(window.of_job("job_cpu_seconds_total"))
        waits = _mean(_pressure(window, "io")) > 0.1 or _mean(window.of_job("job_processes_blocked")) > 0.5
        if waits:
            why = "its programs wait for files"
        elif used > 0.9 * window.cpus:
            why = f"its {_cpus(window.cpus)} are busy with preparing data"
        elif window.cpus > 1 and 0.85 < used < 1.15 and uneven:
            why = f"one thread prepares the data, and {_cpus(window.cpus - 1)} do nothing"
        else:
            continue
        yield (
            SlowCause.DATA_STARVED,
            f"GPU {gpu} computes {_mean(busy):.0%} of the time: {why}",
            "more loader workers (--workers), more --cpus-per-task, or copy the data to the node (--stage)",
        )
        return


def _slow_files(window: NodeWindow) -> Judged:
    """Find a job that waits for a network file system or for a saturated disk."""
    hung = _hung_mount(window)
    if hung:
        remedy = "look at its server and the network; hhealth and hpcsched doctor NODE tell more"
        yield SlowCause.SHARE_SLOW, f"{hung} does not answer", remedy
    labels = window.labels("node_disk_busy_seconds_total")
    disks = {one: window.of_node(f"node_disk_busy_seconds_total:{one}") for one in labels}
    full = [one for one, busy in disks.items() if _part(busy, lambda rate: rate > BUSY) >= MOST]
    waits = _part(window.of_job("job_processes_blocked"), bool)
    if full and (waits > 0.3 or _mean(_pressure(window, "io")) > 0.2):
        ways = ("read", "written")
        whole = sum(_mean(window.of_node(f"node_disk_{way}_bytes_total:{full[0]}")) for way in ways)
        own = sum(_mean(window.of_job(f"job_{way}_bytes_total")) for way in ways)
        whose = "by this job" if own > 0.5 * whole else "mostly by others"
        yield (
            SlowCause.DISK_SATURATED,
            f"disk {full[0]} is busy all the time, {whose}: {_rate(whole)}",
            "write less often and in larger pieces; put temporary files into /dev/shm if memory allows",
        )
    elif waits >= MOST and not any(_mean(busy) > 0.5 for busy in disks.values()) and not hung:
        yield (
            SlowCause.SHARE_SLOW,
            f"a process of the job waited for a network file system in {waits:.0%} of the looks",
            "copy the data to the node first (--stage, sbcast); hctl metrics NODE and hhealth show the share",
        )


def _hung_mount(window: NodeWindow) -> str:
    """Return a mount that does not answer while the job does little; "" if there is none."""
    used = window.of_job("job_cpu_seconds_total")
    for mount in window.labels("node_filesystem_answers"):
        hung = _part(window.of_node(f"node_filesystem_answers:{mount}"), lambda answers: not answers)
        if hung > 0.3 and used and _mean(used) < 0.5 * window.cpus:
            return mount
    return ""


def _network(window: NodeWindow) -> Judged:
    bound = BUSY * window.link_bytes_per_s
    for device in window.labels("node_network_receive_bytes_total"):
        for way, word in (("receive", "receives"), ("transmit", "sends")):
            rates = window.of_node(f"node_network_{way}_bytes_total:{device}")
            if device != "virtual" and bound and _part(rates, lambda rate: rate > bound) >= MOST:
                yield (
                    SlowCause.NETWORK_SATURATED,
                    f"{word} {_rate(_mean(rates))} by {device}, of {_rate(window.link_bytes_per_s)} that its link can",
                    "exchange less often (--sync auto), or choose nodes with faster links (--prefer)",
                )
                return
    sent = _quantile(window.of_node("node_tcp_segments_sent_total"), 0.5)
    again = _quantile(window.of_node("node_tcp_retransmits_total"), 0.5)
    if sent > 100 and again > LOST * sent:
        yield (
            SlowCause.NETWORK_LOSS,
            f"sends {again / sent:.1%} of its TCP segments again: its link loses packets",
            "look at cable, port and Wi-Fi: hpcsched doctor NODE",
        )


def _few_cpus(window: NodeWindow) -> Judged:
    """Find a job that uses one of several CPUs, or none."""
    used = window.of_job("job_cpu_seconds_total")
    if not used or window.gpus:
        return
    moved = sum(_mean(window.of_job(f"job_{way}_bytes_total")) for way in ("read", "written"))
    if _quantile(used, 0.9) < 0.02 * window.cpus and moved < 1e5 and not any(window.of_job("job_processes_blocked")):
        yield (
            SlowCause.IDLE,
            f"uses none of the {_cpus(window.cpus)} it holds: it waits, or hangs",
            "see what it waits for (hsh JOB, hlogs JOB), or end it",
        )
    elif window.cpus > 1 and _quantile(used, 0.1) > BUSY and _quantile(used, 0.9) < 1.15:
        yield (
            SlowCause.ONE_THREAD,
            f"one thread computes, and {_cpus(window.cpus - 1)} of the job do nothing",
            "ask for --cpus-per-task=1, or start the program with more threads or processes",
        )


_RULES: tuple[Callable[[NodeWindow], Judged], ...] = (
    _held_empty,
    _gpu_unused,
    _throttled,
    _swapping,
    _cache_thrash,
    _memory_limit,
    _outside_load,
    _oversubscribed,
    _data_starved,
    _slow_files,
    _network,
    _few_cpus,
)


def _cpus(count: int) -> str:
    return f"{count} CPU{'s' * (count != 1)}"


def _gpus(window: NodeWindow) -> str:
    return f" and {len(window.gpus)} GPU{'s' * (len(window.gpus) != 1)}" if window.gpus else ""


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.0f} MB/s"
