"""Results of node assessments, and which node is slower than its class or its own past.

Pure. A run is what a node measured at one time (`hpcnode.agent.bench`). Nodes with the same cpus, GPUs
and nearly the same memory are one class. The rules:

- A run that was busy, and a test whose rounds differ by more than `MOST_SPREAD`, is shown and never
  judged, and no other is judged by it.
- Class: of at least `LEAST_NODES` nodes the mean, without values that are more than 5 % worse than it,
  again and again until none is. A value is slow if it is worse by more than 5 % and by more than three
  scaled median absolute deviations. The second such run of a node in turn confirms it.
- Past: a value worse than 0.93 of the median of the node's last runs, at least `LEAST_RUNS`.
- Placement uses the last runs that were not busy. A run of other hardware than the configured one says nothing, and a speed
  that was set in the node's file after a run is newer than that run.

Sources: SuperBench (Xiong et al., USENIX ATC 2024), `fix_threshold_outlier_detection` of its baseline
generation; Hampel, The influence curve and its role in robust estimation (1974), on 1.4826.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from hpcsched.errors import ProtocolError
from hpcsched.metrics.links import WIFI, LinkRun, NearNodes, best_rates, ends, near_nodes, slow_nodes
from hpcsched.model.node import MeasuredNode, NodeSpec

LEAST_NODES = 3
LEAST_RUNS = 5
MOST_SPREAD = 0.10
WORSE = 0.05
SCALED_MAD = 3 * 1.4826
PAST_WORSE = 0.93
SAME_MEMORY = 0.9
MAX_TESTS, MAX_NAME, MAX_TEXT = 100, 20, 300


class BenchTest(NamedTuple):
    """A test: its unit, and whether less is better."""

    unit: str
    less_is_better: bool = False


TESTS: dict[str, BenchTest] = {
    "cpu": BenchTest("GB/s"),
    "cpus": BenchTest("GB/s"),
    "memory": BenchTest("GB/s"),
    "disk_write": BenchTest("MB/s"),
    "disk_read": BenchTest("MB/s"),
    "fsync": BenchTest("ms", less_is_better=True),
    "fsync_p95": BenchTest("ms", less_is_better=True),
}
_PRODUCT = BenchTest("GFLOP/s")
_COPY = BenchTest("GB/s")


def bench_test(name: str) -> BenchTest:
    """Return the test of this name; those of GPUs are as many as there are GPUs."""
    return TESTS.get(name) or (_COPY if name.endswith("_copy") else _PRODUCT)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """What a node measured at one time. `busy`: what else used it, "" for nothing."""

    node: str
    at_s: float
    how: str
    cpu_model: str
    cpus: int
    mem_mib: int
    gpus: tuple[str, ...] = ()
    busy: str = ""
    throttled: float = 0.0
    took_s: float = 0.0
    battery: bool = False
    file_speed: float = 0.0  # the speed in the node's file then
    values: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def is_judged(self, test: str) -> bool:
        """Return whether the value of the test says something."""
        return not self.busy and test in self.values and self.spread.get(test, 0.0) <= MOST_SPREAD


class SlowTest(NamedTuple):
    """A test in which a node is slow.

    `part`: of the usual speed; `versus` is "class" or "past".
    """

    test: str
    value: float
    usual: float
    part: float
    versus: str
    confirmed: bool


def run_of(answer: object, spec: NodeSpec, *, at_s: float, busy: str = "") -> BenchRun:
    """Return the run from a node's answer, which may be anything. Raises ProtocolError."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("values"), Mapping):
        raise ProtocolError(f"cannot use the measurements of node {spec.name}: it sent no values")
    values = _numbers(answer["values"])
    return BenchRun(
        node=spec.name,
        at_s=at_s,
        how=_text(answer.get("how")),
        cpu_model=_text(answer.get("cpu_model")),
        cpus=spec.cpus,
        mem_mib=spec.mem_mib,
        gpus=_gpu_types(spec),
        battery=answer.get("battery") is True,
        file_speed=spec.speed,
        busy=busy or _text(answer.get("busy")),
        throttled=_number(answer.get("throttled")) or 0.0,
        took_s=_number(answer.get("took_s")) or 0.0,
        values={name: value for name, value in values.items() if value > 0},
        spread=_numbers(answer.get("spread")),
        notes={name: _text(why) for name, why in _named(answer.get("notes"))},
    )


def _gpu_types(spec: NodeSpec) -> tuple[str, ...]:
    return tuple(sorted(gpu.type for gpu in spec.gpus))


def run_text(run: BenchRun) -> str:
    """Return the run as JSON."""
    return json.dumps(asdict(run))


def run_from(text: str) -> BenchRun:
    """Return the run from its JSON."""
    return run_from_json(json.loads(text))


def run_from_json(values: Mapping[str, Any]) -> BenchRun:
    """Return the run from the object of its JSON."""
    return BenchRun(**{**values, "gpus": tuple(values["gpus"])})


def _numbers(found: object) -> dict[str, float]:
    numbers = {name: _number(value) for name, value in _named(found)}
    return {name: value for name, value in numbers.items() if value is not None}


def _named(found: object) -> list[tuple[str, Any]]:
    if not isinstance(found, Mapping):
        return []
    items = [(name, value) for name, value in found.items() if isinstance(name, str)]
    return [(name, value) for name, value in items if name.isidentifier() and len(name) <= MAX_NAME][:MAX_TESTS]


def _number(value: object) -> float | None:
    """Return a finite number from 0 to 1e12, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e12:
        return None
    return float(value)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])


# ----- baselines


def is_same_class(one: BenchRun, other: BenchRun) -> bool:
    """Return whether two nodes have the same hardware; memory may differ by a tenth."""
    same = (one.cpu_model, one.cpus, one.gpus) == (other.cpu_model, other.cpus, other.gpus)
    less, more = sorted((one.mem_mib, other.mem_mib))
    return same and less >= SAME_MEMORY * more


def speed_part(value: float, usual: float, *, less_is_better: bool) -> float:
    """Return which part of the usual speed a value is; above 1 is faster."""
    return usual / value if less_is_better else value / usual


def baseline(values: Sequence[float], *, less_is_better: bool = False) -> float | None:
    """Return the mean without values that are more than 5 % worse than it.

    None for fewer than `LEAST_NODES` values.
    """
    if len(values) < LEAST_NODES:
        return None
    kept = list(values)
    while True:
        mean = fmean(kept)
        good = [one for one in kept if speed_part(one, mean, less_is_better=less_is_better) >= 1 - WORSE]
        if len(good) == len(kept) or not good:
            return mean
        kept = good


def is_outlier(value: float, values: Sequence[float], *, less_is_better: bool = False) -> bool:
    """Return whether `value` is slow among the values of its class."""
    usual = baseline(values, less_is_better=less_is_better)
    if usual is None:
        return False
    middle = median(values)
    deviation = SCALED_MAD * median(abs(one - middle) for one in values) / middle
    return speed_part(value, usual, less_is_better=less_is_better) < 1 - max(WORSE, deviation)


def slow_tests(node: str, runs: Iterable[BenchRun]) -> list[SlowTest]:
    """Return the tests in which the last run of `node` is slow, by its class and by its past."""
    by_node: dict[str, list[BenchRun]] = {}
    for run in sorted(runs, key=lambda run: run.at_s):
        by_node.setdefault(run.node, []).append(run)
    mine = by_node.get(node, [])
    if not mine:
        return []
    peers = [run for runs_of in by_node.values() for run in runs_of if is_same_class(run, mine[-1])]
    found = []
    for name in mine[-1].values:
        if mine[-1].is_judged(name):
            past = [run for run in mine if run.is_judged(name) and is_same_class(run, mine[-1])]
            found += [*_by_class(name, past, peers), *_by_past(name, past)]
    return found


def _by_class(name: str, past: Sequence[BenchRun], peers: Sequence[BenchRun]) -> Iterator[SlowTest]:
    less = bench_test(name).less_is_better
    # The last good run of each other node.
    last = {run.node: run.values[name] for run in peers if run.is_judged(name) and run.node != past[-1].node}

    def is_slow(run: BenchRun) -> bool:
        return is_outlier(run.values[name], [*last.values(), run.values[name]], less_is_better=less)

    usual = baseline([*last.values(), past[-1].values[name]], less_is_better=less)
    if usual is not None and is_slow(past[-1]):
        value = past[-1].values[name]
        confirmed = len(past) > 1 and is_slow(past[-2])
        part = speed_part(value, usual, less_is_better=less)
        yield SlowTest(name, value, usual, part, "class", confirmed)


def _by_past(name: str, past: Sequence[BenchRun]) -> Iterator[SlowTest]:
    less = bench_test(name).less_is_better

    def part(at: int) -> tuple[float, float] | None:
        before = [run.values[name] for run in past[:at]][-2 * LEAST_RUNS :]
        if len(before) < LEAST_RUNS:
            return None
        usual = median(before)
        return usual, speed_part(past[at].values[name], usual, less_is_better=less)

    now, then = part(len(past) - 1), part(len(past) - 2) if len(past) > 1 else None
    if now is not None and now[1] < PAST_WORSE:
        confirmed = then is not None and then[1] < PAST_WORSE
        yield SlowTest(name, past[-1].values[name], now[0], now[1], "past", confirmed)


# ----- roles

MEMORY_RICH = 1.5  # of the median of all nodes
FAST_CPU, SLOW_CPU = 1.2, 0.8
FAST_DISK = 2.0
FAST_LINK = 0.5  # of the best node


class NodeRole(NamedTuple):
    """What a node is good for: its feature for `--constraint`, "" for none, and why."""

    feature: str
    text: str


def roles(runs: Mapping[str, BenchRun], links: Sequence[LinkRun] = ()) -> dict[str, list[NodeRole]]:
    """Return what each node is good for; a node that is like the median has no role.

    `runs`: the last run of each node; `links`: of each pair. Fewer than `LEAST_NODES` nodes are not compared.
    """
    ends_of, slow = ends(links), slow_nodes(links)
    memory = _usual([float(run.mem_mib) for run in runs.values()])
    cpus = _usual([run.values["cpu"] for run in runs.values() if run.is_judged("cpu")])
    disks = _usual([run.values["disk_read"] for run in runs.values() if run.is_judged("disk_read")])
    found: dict[str, list[NodeRole]] = {}
    for name in dict.fromkeys((*runs, *ends_of)):
        run = runs.get(name, BenchRun(node=name, at_s=0.0, how="", cpu_model="", cpus=0, mem_mib=0))
        cpu = run.values["cpu"] / cpus if cpus and run.is_judged("cpu") else 1.0
        disk = run.values["disk_read"] / disks if disks and run.is_judged("disk_read") else 1.0
        is_wifi = name in ends_of and ends_of[name].kind == WIFI
        told = (
            (bool(run.gpus), NodeRole("", "GPU: training and serving")),
            (
                memory > 0 and run.mem_mib >= MEMORY_RICH * memory,
                NodeRole("big-memory", "memory-rich: parameter or KV node"),
            ),
            (cpu >= FAST_CPU, NodeRole("fast-cpu", "fast CPU: jobs of one CPU first")),
            (cpu <= SLOW_CPU, NodeRole("slow-cpu", "slow CPU: not in synchronous training with the others")),
            (disk >= FAST_DISK, NodeRole("fast-disk", "fast disk: staged data and checkpoints")),
            (is_wifi, NodeRole("wifi", "Wi-Fi: single-node jobs only")),
            (not is_wifi and name in slow, NodeRole("slow-link", "slow link: single-node jobs only")),
            (run.battery, NodeRole("battery", "battery: short jobs, because its user may take it away")),
        )
        if mine := [role for is_so, role in told if is_so]:
            found[name] = mine
    return found


def _usual(values: Sequence[float]) -> float:
    """Return the median; 0 if there are too few values to compare one with."""
    return median(values) if len(values) >= LEAST_NODES else 0.0


# ----- what placement uses


def measured_nodes(
    specs: Iterable[NodeSpec], runs: Mapping[str, BenchRun], links: Iterable[LinkRun]
) -> dict[str, MeasuredNode]:
    """Return what the assessments say of the nodes; a node without any is left out.

    `runs`: the last run of each node that was not busy; `links`: of each pair.
    """
    by_name = {str(spec.name): spec for spec in specs}
    good = {name: run for name, run in runs.items() if name in by_name and _is_of(run, by_name[name])}
    used = [run for run in links if not run.why and not run.busy and by_name.keys() >= set(run.pair)]
    role_of, near, fast = roles(good, used), near_nodes(used), _fast_links(used)
    found = {}
    for name in dict.fromkeys((*good, *ends(used))):
        run, words = good.get(name), [role.feature for role in role_of.get(name, []) if role.feature]
        is_new = run is not None and run.is_judged("cpu") and run.file_speed == by_name[name].speed
        peers = near.get(name, NearNodes((), 0))
        found[name] = MeasuredNode(
            features=(*_parts(run, words), *words, *(["fast-link"] if name in fast else [])),
            cpu_speed=run.values["cpu"] if run is not None and is_new else 0.0,
            gemm_gflops=_gemm_gflops(run),
            near=peers.near,
            link_bit=peers.link_bit,
        )
    return found


def _is_of(run: BenchRun, spec: NodeSpec) -> bool:
    """Return whether the run is of the node as it is configured now."""
    less, more = sorted((run.mem_mib, spec.mem_mib))
    return (run.cpus, run.gpus) == (spec.cpus, _gpu_types(spec)) and less >= SAME_MEMORY * more


def _fast_links(links: Sequence[LinkRun]) -> set[str]:
    """Return the wired nodes with at least `FAST_LINK` of the best rate."""
    kinds = ends(links)
    best = {name: rate for name, rate in best_rates(links).items() if kinds[name].kind != WIFI}
    return {name for name, rate in best.items() if rate >= FAST_LINK * max(best.values())}


_PART = {"cpu": "cpu", "cpus": "cpu", "memory": "memory", "disk_write": "disk", "disk_read": "disk", "fsync": "disk"}


def _parts(run: BenchRun | None, words: Sequence[str]) -> list[str]:
    """Return a feature for each part of the node that was measured, and is not slow."""
    names = [name for name in run.values if run.is_judged(name)] if run is not None else []
    parts = {_PART.get(name, "gpu" if name.startswith("gpu") else "") for name in names} - {""}
    return [f"bench.{part}" for part in sorted(parts) if f"slow-{part}" not in words]


def _gemm_gflops(run: BenchRun | None) -> float:
    """Return the rate of the slowest GPU, in a precision that all have; 0: not measured."""
    if run is None:
        return 0.0
    for kind in ("bf16", "fp32"):
        rates = [run.values.get(f"gpu{number}_{kind}", 0.0) for number in range(len(run.gpus))]
        if rates and all(rates):
            return min(rates)
    return 0.0
