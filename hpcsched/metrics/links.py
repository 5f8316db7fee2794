"""Links between nodes: who is measured with whom, and what the results say.

Pure. A run is what a pair of nodes measured at one time (`hpcnode.agent.link_speed`). The rules:

- A tournament: in each of n-1 rounds (n if n is odd) a node is in at most one pair, and after all rounds each pair was measured.
- The rate of a node is the best of its pairs: a slow peer does not make it slow. It is slow if that is less than `SLOW_PART` of
  the median of all nodes.
- A pair that is slower than `SHARED_PART` of what both nodes reach with others is measured again alone. If it is faster then, it
  shares something with the others: an uplink or an access point.
- Past: a pair is slower than it was if it is below `PAST_PART` of the median of its earlier runs, at least `LEAST_PAST`.

Sources: the circle method of round-robin tournaments (Kirkman 1847).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import log
from operator import or_
from statistics import median
from typing import Any, NamedTuple

from hpcsched.errors import ProtocolError

WIFI, WIRED, VIRTUAL = KINDS = ("wifi", "wired", "virtual")
MOST_LINKED = 64  # nodes of one tournament
PAIR_S = 12.0  # at most
ALONE_S = 4.0  # for all pairs that are measured again
SLOW_PART = 0.5
SHARED_PART = 0.8
PAST_PART, LEAST_PAST = 0.7, 3
MOST_LOST = 0.01
MAX_DEVICE, MAX_WHY, MOST = 15, 200, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """The interface of one node on a link; "" and 0: not known."""

    device: str = ""
    kind: str = ""
    speed_mbps: int = 0
    mtu: int = 0
    duplex: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRun:
    """What a pair measured. `why`: it could not be measured; then the rest says nothing.

    Rates are from `one` to `other` and back; `alone_mbps` is the slower one of a second run without other
    pairs, 0: there was none.
    """

    one: str
    other: str
    at_s: float
    why: str = ""
    busy: str = ""
    rtt_us: float = 0.0
    rtt_p99_us: float = 0.0
    to_mbps: float = 0.0
    from_mbps: float = 0.0
    alone_mbps: float = 0.0
    lost: float = 0.0
    mtu: int = 0
    near: LinkEnd = LinkEnd()
    far: LinkEnd = LinkEnd()

    @property
    def pair(self) -> tuple[str, str]:
        return self.one, self.other

    @property
    def mbps(self) -> float:
        """The rate of the slower direction."""
        return min(self.to_mbps, self.from_mbps)

    def end_of(self, node: str) -> LinkEnd:
        return self.near if node == self.one else self.far


def links_limit_s(count: int) -> float:
    """Return how long a tournament of `count` nodes takes at most."""
    return (count + 1) * PAIR_S + ALONE_S


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return the rounds of a tournament: pairs of which no two have a node in common."""
    places: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def link_run_of(answer: object, one: str, other: str, *, at_s: float, busy: str = "") -> LinkRun:
    """Return the run from a node's answer, which may be anything. Raises ProtocolError."""
    found: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {}
    numbers = {key: _number(found.get(key)) for key in ("rtt_us", "rtt_p99_us", "up_mbps", "down_mbps", "lost", "mtu")}
    if not (numbers["up_mbps"] and numbers["down_mbps"] and numbers["rtt_us"]):
        raise ProtocolError(f"cannot use the link that {one} measured to {other}: it sent no rates")
    return LinkRun(
        one=one,
        other=other,
        at_s=at_s,
        busy=busy,
        rtt_us=numbers["rtt_us"],
        rtt_p99_us=numbers["rtt_p99_us"],
        to_mbps=numbers["up_mbps"],
        from_mbps=numbers["down_mbps"],
        lost=min(1.0, numbers["lost"]),
        mtu=int(numbers["mtu"]),
        near=_end(found.get("near")),
        far=_end(found.get("far")),
    )


def failed_run(one: str, other: str, *, at_s: float, why: str) -> LinkRun:
    """Return the run of a pair that could not be measured."""
    return LinkRun(one=one, other=other, at_s=at_s, why=_text(why, MAX_WHY) or "no answer")


def link_text(run: LinkRun) -> str:
    """Return the run as JSON."""
    return json.dumps(asdict(run))


def link_from(text: str) -> LinkRun:
    """Return the run from its JSON."""
    return link_from_json(json.loads(text))


def link_from_json(values: Mapping[str, Any]) -> LinkRun:
    """Return the run from the object of its JSON."""
    return LinkRun(**{**values, "near": LinkEnd(**values["near"]), "far": LinkEnd(**values["far"])})


def _end(found: object) -> LinkEnd:
    if not isinstance(found, Mapping):
        return LinkEnd()
    kind, duplex = found.get("kind"), found.get("duplex")
    return LinkEnd(
        device=_text(found.get("device"), MAX_DEVICE),
        kind=kind if kind in KINDS else "",
        speed_mbps=int(_number(found.get("speed_mbps"))),
        mtu=int(_number(found.get("mtu"))),
        duplex=duplex if duplex in ("half", "full") else "",
    )


def _number(value: object) -> float:
    """Return a finite number from 0 to 1e9, 0 for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST
    return float(value) if good else 0.0  # type: ignore[arg-type]


def _text(value: object, most: int) -> str:
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text[:most])


# ----- judgement


def last_runs(runs: Iterable[LinkRun]) -> dict[frozenset[str], LinkRun]:
    """Return the last run of each pair."""
    return {frozenset(run.pair): run for run in sorted(runs, key=lambda run: run.at_s)}


def best_rates(runs: Iterable[LinkRun]) -> dict[str, float]:
    """Return the best rate of each node that was measured."""
    best: dict[str, float] = {}
    for run in runs:
        for name in run.pair:
            if not run.why:
                best[name] = max(best.get(name, 0.0), run.mbps)
    return best


def slower_together(runs: Sequence[LinkRun]) -> list[LinkRun]:
    """Return the pairs to be measured again alone, the slowest first."""
    best = best_rates(runs)
    parts = [(run.mbps / min(best[run.one], best[run.other]), run) for run in runs if not run.why]
    return [run for part, run in sorted(parts, key=lambda one: one[0]) if part < SHARED_PART]


def with_alone(run: LinkRun, again: LinkRun) -> LinkRun:
    """Return the run with the rate that it had alone."""
    return replace(run, alone_mbps=again.mbps)


CLASS_STEP = 1.5  # rates of one class differ by less, as `hpcsched.sched.place.node_fit.LINK_STEP`
LATENCY_STEP = 4.0


class NearNodes(NamedTuple):
    """The `near` and `link_bit` of a node, as in `hpcsched.model.node.MeasuredNode`."""

    near: tuple[tuple[int, int], ...]
    link_bit: int


def near_nodes(runs: Iterable[LinkRun]) -> dict[str, NearNodes]:
    """Return by node the nodes that it reaches with at least each class, the best first.

    A class has a rate, then a latency: 938 and 1000 Mbit/s are one class.
    """
    kinds = {run.pair: _link_kind(run) for run in last_runs(runs).values() if not run.why}
    class_of = {kind: at for at, kind in enumerate(sorted(set(kinds.values())))}
    bits = {name: 1 << at for at, name in enumerate(sorted({name for pair in kinds for name in pair}))}
    reached: dict[str, dict[int, int]] = {name: {} for name in bits}
    for (one, other), kind in kinds.items():
        level = class_of[kind]
        reached[one][level] = reached[one].get(level, 0) | bits[other]
        reached[other][level] = reached[other].get(level, 0) | bits[one]
    found = {}
    for node, by_class in reached.items():
        levels = sorted(by_class, reverse=True)
        sums = accumulate((by_class[level] for level in levels), or_)
        found[node] = NearNodes(tuple(zip(levels, sums, strict=True)), bits[node])
    return found


def _link_kind(run: LinkRun) -> tuple[int, int]:
    rate, latency_us = run.alone_mbps or run.mbps, run.rtt_us
    return round(log(max(rate, 1.0), CLASS_STEP)), -round(log(max(latency_us, 1.0), LATENCY_STEP))


def slow_nodes(runs: Sequence[LinkRun]) -> dict[str, float]:
    """Return by slow node which part of the median of all nodes its best rate is."""
    best = best_rates(runs)
    if len(best) < 3:  # which of two is slow is not known
        return {}
    usual = median(best.values())
    return {name: rate / usual for name, rate in best.items() if rate < SLOW_PART * usual}


def ends(runs: Iterable[LinkRun]) -> dict[str, LinkEnd]:
    """Return the interface of each node; of several, one with Wi-Fi first."""
    found: dict[str, LinkEnd] = {}
    for run in runs:
        for name in () if run.why else run.pair:
            end = run.end_of(name)
            if name not in found or (end.kind == WIFI and found[name].kind != WIFI):
                found[name] = end
    return found


def link_findings(runs: Sequence[LinkRun], earlier: Sequence[LinkRun] = ()) -> Iterator[str]:
    """Yield what is wrong with links, a sentence each.

    `earlier`: older runs of the same pairs.
    """
    for name, end in sorted(ends(runs).items()):
        if end.duplex == "half":
            yield f"{name}: {end.device} is half duplex: replace the cable, or set both ends to negotiate"
    for name, part in sorted(slow_nodes(runs).items()):
        yield f"{name}: its best link has {100 * part:.0f} % of the usual rate{_nominal(ends(runs)[name])}"
    yield from _mtus(runs)
    past: dict[frozenset[str], list[float]] = {}
    for run in earlier:
        if not run.why and not run.busy:
            past.setdefault(frozenset(run.pair), []).append(run.mbps)
    for run in runs:
        names = "-".join(run.pair)
        before = past.get(frozenset(run.pair), [])
        if run.why:
            yield f"{names}: not measured: {run.why}"
            continue
        if run.lost > MOST_LOST:
            yield f"{names}: {100 * run.lost:.1f} % of the segments were sent again: a cable, a port, or the radio"
        if run.alone_mbps and run.mbps < SHARED_PART * run.alone_mbps:
            yield (
                f"{names}: {run.mbps:.4g} Mbit/s while others send, {run.alone_mbps:.4g} alone: it shares an uplink or an "
                "access point with them"
            )
        if len(before) >= LEAST_PAST and run.mbps < PAST_PART * median(before) and not run.busy:
            yield f"{names}: {run.mbps:.4g} Mbit/s, {median(before):.4g} was usual"


def _nominal(end: LinkEnd) -> str:
    if end.kind == WIFI:
        return ": it is on Wi-Fi"
    return f": {end.device} negotiated {end.speed_mbps} Mbit/s" if end.speed_mbps else ""


def _mtus(runs: Sequence[LinkRun]) -> Iterator[str]:
    by_mtu: dict[int, list[str]] = {}
    for name, end in sorted(ends(runs).items()):
        if end.mtu and end.device != "lo":
            by_mtu.setdefault(end.mtu, []).append(name)
    if len(by_mtu) > 1:
        usual = max(by_mtu, key=lambda mtu: len(by_mtu[mtu]))
        for mtu, names in sorted(by_mtu.items()):
            if mtu != usual:
                yield f"{', '.join(names)}: MTU {mtu}, others {usual}: set the same on one network"
