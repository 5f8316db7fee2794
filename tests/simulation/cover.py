"""Which runs of the stories are made, so that every pair of a crash point and a message fault is tried, and what of it was.

First each fault alone, in every story: that shows which other faults can still come after it. Then the pairs of which both
can: each in the first story in which that is so, or (`everywhere`) in all. The order is such that what is cut short has tried
the most: each named point with each kind of fault, then their repetitions. Work is done in parts; a finished part is a line
of a file, and a run that is started again goes on behind it.

The table at the end is coarser: for each step of a job's way (`STEPS`) how many pairs were tried whose crash lies before the
step is on disk, after it is, and after the others were told of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpcnode
import hpcsched
import simulation
from simulation import stories
from simulation.stage import Stage
from simulation.stories import Crash, Message, Pair, Story
from simulation.wires import FAULTS

PART = 100  # runs
STEPS = ("submit", "allocate", "send", "started", "exited", "cancel", "requeue", "revoke")
WHEN = ("before", "after commit", "after send")

_BEFORE, _COMMITTED, _SENT = WHEN
# On nodes: what a step is there, before and after it is on that node's disk.
_ON_NODES = {
    "agent: claim.before": ("send", _BEFORE),
    "agent: claim.made": ("send", _BEFORE),
    "agent: claim.written": ("send", _COMMITTED),
    "shepherd: started.before": ("started", _BEFORE),
    "shepherd: started.after": ("started", _COMMITTED),
    "shepherd: released": ("started", _SENT),
    "shepherd: tasks.over": ("exited", _BEFORE),
    "shepherd: final.before": ("exited", _BEFORE),
    "shepherd: final.after": ("exited", _COMMITTED),
    "agent: revoke.before": ("revoke", _BEFORE),
    "agent: revoke.made": ("revoke", _BEFORE),
    "agent: fsync done_log": ("revoke", _BEFORE),
    "agent: fsynced done_log": ("revoke", _COMMITTED),
}
# Events, by the step that they are on disk of.
_EVENTS = {
    "Submitted": "submit",
    "Allocated": "allocate",
    "Started": "started",
    "Exited": "exited",
    "LaunchRefused": "exited",
    "NodeCleared": "revoke",
}
_KNOWN = frozenset({*_EVENTS, "EndRequested"})

Run = tuple[int, Pair]  # number of the story
Cell = tuple[str, str]  # step, when


@dataclass(frozen=True, slots=True)
class Part:
    """What came of one part: for each run "1" if all of it happened, "0" if not, "!" if it failed."""

    happened: str
    failures: list[str]
    cpu_s: float
    seen: list[str]  # of runs with one fault: which places of the other kind came, a bit each, in hex


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs that are to be made, in their order, in parts."""

    runs: list[Run]

    @property
    def parts(self) -> int:
        """How many parts they are made in."""
        return -(-len(self.runs) // PART)

    def part(self, number: int) -> list[Run]:
        """Return the runs of a part."""
        return self.runs[number * PART : (number + 1) * PART]


@dataclass(frozen=True, slots=True)
class Faults:
    """What can befall one story, as its run without any shows."""

    crashes: list[Crash]
    messages: list[Message]
    order: dict[Any, int]  # place -> when it is come to first
    cells: dict[str, frozenset[Cell]]  # crash point -> where it is in the table

    @classmethod
    def of(cls, on: Stage, story: Story) -> Faults:
        """Find them."""
        crashes, messages, passed = stories.faults_of(on, story)
        order = {place: at for at, place in enumerate(dict.fromkeys(passed))}
        return cls(crashes, messages, order, dict(_cells_of(story, crashes)))

    def mask(self, passed: Iterable[Any]) -> str:
        """Return which of the places in `order` are among those passed."""
        return f"{sum(1 << self.order[place] for place in set(passed) if place in self.order):x}"


def single_faults(all_faults: list[Faults]) -> Plan:
    """Return the runs of every story without faults, and with each alone."""
    runs: list[Run] = []
    for number, faults in enumerate(all_faults):
        runs.append((number, (None, None)))
        runs += [(number, (crash, None)) for crash in faults.crashes]
        runs += [(number, (None, message)) for message in faults.messages]
    return Plan(runs)


def pairs(all_faults: list[Faults], seen: dict[Run, int], *, everywhere: bool, every: int) -> Plan:
    """Return the runs that try all pairs that can happen, each in the first story in which it can, or everywhere.

    Until the second fault of a pair a run is that of the first alone: so that says whether the second can come at all.
    """
    known: set[tuple[str, str]] = set()
    kinds: set[tuple[str, str]] = set()  # a point and a fault without their counts
    early: list[Run] = []
    late: list[Run] = []
    for number, faults in enumerate(all_faults):
        for crash in faults.crashes:
            crash_at, after_crash = faults.order[crash.place], seen[number, (crash, None)]
            for message in faults.messages:
                message_at = faults.order[message.place]
                if crash_at < message_at:
                    can = after_crash >> message_at & 1
                else:
                    can = seen[number, (None, message)] >> crash_at & 1
                key = str(crash), str(message)
                if not can or (key in known and not everywhere):
                    continue
                known.add(key)
                kind = f"{crash.point} {crash.power}", f"{message.direction} {message.kind} {message.fault}"
                (late if kind in kinds else early).append((number, (crash, message)))
                kinds.add(kind)
    return Plan((early + late)[::every])


def explore(on: Stage, all_faults: list[Faults], runs: list[Run]) -> Part:
    """Make some runs."""
    began_s = time.process_time()
    happened, failures, seen = "", [], []
    for number, pair in runs:
        passed: list[Any] | None = [] if None in pair else None
        result = stories.attempt(on, stories.STORIES[number], pair, passed)
        if isinstance(result, str):
            failures.append(result)
        happened += "!" if isinstance(result, str) else "1" if result else "0"
        if passed is not None:
            seen.append(all_faults[number].mask(passed))
    return Part(happened, failures, round(time.process_time() - began_s, 2), seen)


def digest_of(plan: Plan, *options: object) -> str:
    """Return what tells these runs, of this very code, from others."""
    digest = hashlib.sha256(repr(options).encode())
    for number, pair in plan.runs:
        digest.update(f"{number} {pair[0]} {pair[1]}\n".encode())
    for package in (hpcsched, hpcnode, simulation):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _cells_of(story: Story, crashes: Iterable[Crash]) -> Iterator[tuple[str, frozenset[Cell]]]:
    """Yield where each crash point of a story is in the table; `crashes` in the order in which their points are passed."""
    wish = "requeue" if story.requeues else "cancel"
    steps: frozenset[str] = frozenset()  # that the controller's last commit was of
    for crash in crashes:
        process, _, point = crash.point.partition(": ")
        if process != "head":
            yield str(crash), frozenset({_ON_NODES[crash.point]} if crash.point in _ON_NODES else ())
            continue
        if " commit of " in point:
            kinds = point.partition(" commit of ")[2].split("+")
            steps = frozenset(wish if kind == "EndRequested" else _EVENTS[kind] for kind in kinds if kind in _KNOWN)
            when = _BEFORE if point.startswith("before") else _COMMITTED
        else:
            when = _COMMITTED if point.startswith("before") else _SENT
        found = {(step, when) for step in steps}
        sending = {"Launch": "send", "EndJob": "revoke", "EndStep": "revoke"}.get(point.split(" ")[1])
        if sending is not None:
            found.add((sending, _BEFORE if when == _COMMITTED else _SENT))
        yield str(crash), frozenset(found)


@dataclass(slots=True)
class Result:
    """What came of the runs so far."""

    runs: int = 0
    pairs: set[tuple[str, str]] = field(default_factory=set)  # crash point, message fault: both happened
    points: set[str] = field(default_factory=set)
    table: Counter[tuple[Cell, str]] = field(default_factory=Counter)  # (cell, fault) -> pairs
    failures: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.runs} runs ({self.cpu_s:.0f} s of cpu); {len(self.points)} crash points; {len(self.pairs)} distinct "
            f"(crash point x message fault) pairs; {len(self.failures)} violations"
        )

    def take(self, all_faults: list[Faults], runs: list[Run], part: Part) -> None:
        """Count a part in."""
        self.failures += part.failures
        self.cpu_s += part.cpu_s
        for (number, (crash, message)), happened in zip(runs, part.happened, strict=True):
            self.runs += 1
            if happened != "1" or crash is None:
                continue
            self.points.add(str(crash))
            if message is None or (str(crash), str(message)) in self.pairs:
                continue
            self.pairs.add((str(crash), str(message)))
            for cell in all_faults[number].cells[str(crash)]:
                self.table[cell, message.fault] += 1

    def lines(self) -> Iterator[str]:
        """Yield the table in lines: pairs of which both happened."""
        yield f"{'pairs in which both happened':33}" + "".join(f"{fault:>12}" for fault in FAULTS)
        for step in STEPS:
            for when in WHEN:
                counts = "".join(f"{self.table[(step, when), fault]:12}" for fault in FAULTS)
                yield f"{step:10}{when:23}{counts}"


class Progress:
    """The parts that are done, in memory and, if there is a path, in a file; a file of other runs is written anew."""

    def __init__(self, path: Path | None, digest: str) -> None:
        self.parts = {} if path is None else _read_parts(path, digest)
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if self.parts else "w")
            if not self.parts:
                self._file.write(digest)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, plan: str, number: int, part: Part) -> None:
        """Keep a part of a plan that is done."""
        self.parts[plan, number] = part
        if self._file is not None:
            self._file.write("\n" + json.dumps([plan, number, *dataclasses.astuple(part)]))
            self._file.flush()


def _read_parts(path: Path, digest: str) -> dict[tuple[str, int], Part]:
    """Return the parts that a file has of these very runs; what was cut off does not count."""
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines or lines[0] != digest:
        return {}
    found: dict[tuple[str, int], Part] = {}
    for line in lines[1:]:
        try:
            plan, number, *part = json.loads(line)
        except ValueError:
            continue
        found[plan, number] = Part(*part)
    return found
