"""Which runs of the stories are made, so that every pair of a crash point and a message fault is tried, and what of it was.

A pair occurs in many stories. By default it is tried in the first of them alone; `everywhere` tries it in all. The order is
such that what is cut short has tried the most: first each named point with each kind of fault, then their repetitions.
Work is done in parts; a finished part is a line of a file, and a run that is started again goes on behind it.

The table at the end is coarser: for each step of a job's way (`STEPS`) how many pairs were tried whose crash lies before the
step is on disk, after it is, and after the others were told of it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from simulation import stories
from simulation.stories import Pair
from simulation.wires import FAULTS
from simulation.world import Stage

PART = 100  # runs
STEPS = ("submit", "allocate", "send", "started", "exited", "cancel", "requeue", "bar")
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
    "agent: bar.before": ("bar", _BEFORE),
    "agent: bar.made": ("bar", _BEFORE),
    "agent: fsync done": ("bar", _BEFORE),
    "agent: fsynced done": ("bar", _COMMITTED),
}
# Events, by the step that they are on disk of.
_EVENTS = {
    "Submitted": "submit",
    "Allocated": "allocate",
    "Started": "started",
    "Exited": "exited",
    "LaunchRefused": "exited",
    "NodeCleared": "bar",
}
_KNOWN = frozenset({*_EVENTS, "EndRequested"})

Run = tuple[int, Pair]  # number of the story
Cell = tuple[str, str]  # step, when


@dataclass(frozen=True, slots=True)
class Cover:
    """All runs that are to be made, in their order."""

    runs: list[Run]
    cells: dict[tuple[int, str], frozenset[Cell]]  # (story, crash point) -> where it is in the table
    digest: str

    @property
    def parts(self) -> int:
        """How many parts they are made in."""
        return -(-len(self.runs) // PART)

    def part(self, number: int) -> list[Run]:
        """Return the runs of a part."""
        return self.runs[number * PART : (number + 1) * PART]


def cover_of(on: Stage, *, everywhere: bool = False, every: int = 1) -> Cover:
    """Return the runs that try every pair, or every so many of them."""
    seen: set[tuple[str, str]] = set()
    first: dict[tuple[str, str], bool] = {}  # a point and a fault without their counts
    early: list[Run] = []
    late: list[Run] = []
    cells: dict[tuple[int, str], frozenset[Cell]] = {}
    for number, story in enumerate(stories.STORIES):
        pairs = stories.pairs_of(on, story)
        cells |= {(number, name): where for name, where in _cells_of(story, pairs)}
        for pair in pairs:
            key = str(pair[0]), str(pair[1])
            if key in seen and not everywhere:
                continue
            seen.add(key)
            kind = _without_count(pair)
            (late if kind in first else early).append((number, pair))
            first[kind] = True
    runs = (early + late)[::every]
    digest = hashlib.sha256("\n".join(f"{number} {pair[0]} {pair[1]}" for number, pair in runs).encode())
    return Cover(runs, cells, digest.hexdigest())


def _without_count(pair: Pair) -> tuple[str, str]:
    crash, message = pair
    point = "" if crash is None else f"{crash.point} {crash.power}"
    return point, "" if message is None else f"{message.direction} {message.kind} {message.fault}"


def _cells_of(story: stories.Story, pairs: Iterable[Pair]) -> Iterator[tuple[str, frozenset[Cell]]]:
    """Yield where each crash point of a story is in the table; `pairs` in the order in which their points are passed."""
    wish = "requeue" if story.requeues else "cancel"
    steps: frozenset[str] = frozenset()  # that the controller's last commit was of
    for crash in dict.fromkeys(crash for crash, _ in pairs if crash is not None):
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
        sending = {"Launch": "send", "EndJob": "bar", "EndStep": "bar"}.get(point.split(" ")[1])
        if sending is not None:
            found.add((sending, _BEFORE if when == _COMMITTED else _SENT))
        yield str(crash), frozenset(found)


@dataclass(slots=True)
class Result:
    """What came of the runs so far."""

    runs: int = 0
    tried: set[tuple[str, str]] = field(default_factory=set)  # crash point, message fault: neither is None
    pairs: set[tuple[str, str]] = field(default_factory=set)  # those of which both happened
    points: set[str] = field(default_factory=set)
    table: Counter[tuple[Cell, str]] = field(default_factory=Counter)  # (cell, fault) -> pairs
    failures: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.runs} runs ({self.cpu_s:.0f} s of cpu); {len(self.points)} crash points; {len(self.tried)} distinct "
            f"(crash point x message fault) pairs tried, in {len(self.pairs)} of them both happened; "
            f"{len(self.failures)} violations"
        )

    def take(self, cover: Cover, number: int, line: Part) -> None:
        """Count a part in."""
        self.failures += line.failures
        self.cpu_s += line.cpu_s
        for (story, (crash, message)), happened in zip(cover.part(number), line.happened, strict=True):
            self.runs += 1
            if crash is not None and happened == "1":
                self.points.add(str(crash))
            if crash is None or message is None:
                continue
            pair = str(crash), str(message)
            self.tried.add(pair)
            if happened == "1" and pair not in self.pairs:
                self.pairs.add(pair)
                for cell in cover.cells.get((story, pair[0]), ()):
                    self.table[cell, message.fault] += 1

    def lines(self) -> Iterator[str]:
        """Yield the table in lines: pairs of which both happened."""
        yield f"{'pairs in which both happened':33}" + "".join(f"{fault:>12}" for fault in FAULTS)
        for step in STEPS:
            for when in WHEN:
                counts = "".join(f"{self.table[(step, when), fault]:12}" for fault in FAULTS)
                yield f"{step:10}{when:23}{counts}"


@dataclass(frozen=True, slots=True)
class Part:
    """What came of one part: for each run "1" if both happened, "0" if not, "!" if it failed."""

    happened: str
    failures: list[str]
    cpu_s: float


def explore(on: Stage, cover: Cover, number: int) -> Part:
    """Make the runs of a part."""
    began_s = time.process_time()
    happened, failures = "", []
    for story, pair in cover.part(number):
        result = stories.attempt(on, stories.STORIES[story], pair)
        if isinstance(result, str):
            failures.append(result)
        happened += "!" if isinstance(result, str) else "1" if result else "0"
    return Part(happened, failures, round(time.process_time() - began_s, 2))


class Progress:
    """The parts that are done, in memory and, if there is a path, in a file; a file of another cover is written anew."""

    def __init__(self, path: Path | None, cover: Cover) -> None:
        self.parts = {} if path is None else _read_parts(path, cover)
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if self.parts else "w")
            if not self.parts:
                self._file.write(cover.digest + "\n")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, number: int, part: Part) -> None:
        """Keep a part that is done."""
        self.parts[number] = part
        if self._file is not None:
            self._file.write(f"\n{json.dumps([number, part.happened, part.failures, part.cpu_s])}")
            self._file.flush()


def _read_parts(path: Path, cover: Cover) -> dict[int, Part]:
    """Return the parts that a file has of this very cover; what was cut off does not count."""
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines or lines[0] != cover.digest:
        return {}
    found: dict[int, Part] = {}
    for line in lines[1:]:
        try:
            number, happened, failures, cpu_s = json.loads(line)
        except ValueError:
            continue
        found[number] = Part(happened, failures, cpu_s)
    return found
