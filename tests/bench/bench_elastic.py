"""Ranks of an elastic run are killed and stopped: how soon the others take the next step, and how soon there are as many again.

Three ranks and a spare train a small GPT on this host.  From the kill to the line of the next step in metrics.jsonl (its own
time of day), and to the first one that three ranks took.  Each step has to be there once.  Kills that come so close together
that the last lost one's place is not filled find no spare that is ready: then the others go on, and a new process has to import
torch first.  That is measured too, in lines of its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.figures import Figure, from_samples

RANKS = 3
SMALL = "--layers 2 --width 64 --heads 2 --context 32 --batch 12 --checkpoint-every 200 --eval-every 0 --sample 0"
PATIENCE_S = 90.0


def run(quick: bool = False) -> list[Figure]:
    """Return how long it took after ranks were killed, and after they were stopped."""
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as elastic:
        replaced = [elastic.strike(signal.SIGKILL, spare=True) for _ in range(3 if quick else 10)]
        killed = [elastic.strike(signal.SIGKILL) for _ in range(5 if quick else 100)]
        stopped = [elastic.strike(signal.SIGSTOP) for _ in range(2 if quick else 5)]
        elastic.check_steps()
    next_s, full_s = zip(*killed, strict=True)
    return [
        from_samples(f"kill -9 of one of 3 ranks, {len(killed)} times: next step", next_s, "s", bar="<= 0.5"),
        from_samples("... three ranks again, mostly by a process that has just been started", full_s, "s"),
        from_samples(
            f"kill -9 while a spare is ready, {len(replaced)} times: three ranks again",
            [full for _, full in replaced],
            "s",
            bar="<= 5",
        ),
        from_samples("a rank that is stopped: next step", [one for one, _ in stopped], "s", bar="<= 5"),
    ]


class Elastic:
    """A run, its processes and the lines that it has written."""

    def __init__(self, out: Path, launcher: int) -> None:
        self._metrics, self._log, self._launcher = out / "run" / "metrics.jsonl", out / "log", launcher
        self._choice = random.Random(1)

    def lines(self) -> list[dict]:
        """All steps so far."""
        if not self._metrics.exists():
            return []
        return [json.loads(line) for line in self._metrics.read_text().splitlines() if line.endswith("}")]

    def wait_for_start(self) -> None:
        """Return when steps are being taken."""
        _until(self._world)

    def strike(self, number: signal.Signals, *, spare: bool = False) -> tuple[float, float]:
        """Send a signal to one of the ranks; return the seconds to the next step, and to one that all ranks took.

        `spare`: when there is one that is ready.
        """
        _until(lambda: self._world() == RANKS and (bool(self._ready()) if spare else len(self._processes()) > RANKS))
        at_s, step = self.hit(number)
        # A step that was already under way may end as if nothing had happened: the one after it cannot.
        _until(lambda: self._after(step + 1, at_s, 1))
        next_s = self._after(step + 1, at_s, 1)[0] - at_s
        _until(lambda: self._after(step + 1, at_s, RANKS))
        return next_s, self._after(step + 1, at_s, RANKS)[0] - at_s

    def hit(self, number: signal.Signals) -> tuple[float, int]:
        """Send a signal to one of the ranks; return when, and the last step then."""
        inside = re.findall(r"members, in slots (.*)", self._log.read_text())[-1].split(", ")
        victim = self._processes()[self._choice.choice(inside)]
        at_s = time.time()
        os.kill(victim, number)
        return at_s, self.lines()[-1]["step"]

    def check_steps(self) -> None:
        """Raise if a step is missing, or was taken twice."""
        steps = [line["step"] for line in self.lines()]
        if steps != list(range(1, len(steps) + 1)):
            raise RuntimeError("a step is missing, or was taken twice")

    def _after(self, step: int, at_s: float, world: int) -> list[float]:
        return [x["time"] for x in self.lines() if x["step"] > step and x["time"] > at_s and x["world"] >= world]

    def _world(self) -> int:
        lines = self.lines()
        return lines[-1]["world"] if lines and time.time() - lines[-1]["time"] < 1.0 else 0

    def _ready(self) -> set[str]:
        """The slots of spares that are ready."""
        found: set[str] = set()
        for line in self._log.read_text().splitlines():
            if inside := re.search(r"members, in slots (.*)", line):
                found -= set(inside[1].split(", "))
            elif ready := re.search(r"slot (\d+) is ready as a spare", line):
                found.add(ready[1])
            elif lost := re.search(r"\(slot (\d+)\) is lost", line):
                found.discard(lost[1])
        return found

    def _processes(self) -> dict[str, int]:
        """The process in each slot."""
        found = {}
        for pid in Path(f"/proc/{self._launcher}/task/{self._launcher}/children").read_text().split():
            try:
                slot = re.search(rb"HPCTRAIN_SLOT=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if slot:
                found[slot[1].decode()] = int(pid)
        return found


@contextmanager
def running(out: Path, model: str = SMALL) -> Iterator[Elastic]:
    """A run of the GPT with these options, and a spare."""
    script = [sys.executable, "-m", "hpctrain.examples.chargpt", "--out", str(out / "run"), *model.split()]
    launch = [sys.executable, "-m", "hpctrain.elastic", "--ranks", str(RANKS), "--spares", "1", "--", *script]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with (out / "log").open("w") as log:
        process = subprocess.Popen([*launch, "--steps", "10000000"], env=environ, stdout=log, stderr=log)
        try:
            yield Elastic(out, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def _until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"waited {PATIENCE_S:g} s in vain")
        time.sleep(0.02)
