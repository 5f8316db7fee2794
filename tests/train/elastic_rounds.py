"""In each round of an elastic run a rank is killed as it begins its N-th sum, for every N of the run: `make elastic-rounds`.

The run is small (`forked_elastic`), begins afresh or goes on from a checkpoint, has steps, checkpoints, validations and an end.
Whoever is killed wherever: every step is told once, in order, with the loss that it has when nobody is lost; no rank's weights or
buffers have seen a step twice; the run ends well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forked_elastic import Outcome, run

from hpctrain.errors import EXIT_REQUEUE

STEPS, BEFORE = 8, 4
CLOSE = 1e-4  # sums of other ranks have other orders
# Who is killed: the one that writes, another one, two at once.
VICTIMS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where runs are made, and what they are like when nobody is lost."""

    top: Path
    words: tuple[str, ...]
    resumed: bool
    losses: list[float]

    def round(self, victims: tuple[int, ...], number: int) -> tuple[bool, list[str]]:
        """Kill the first processes of these slots in that sum; return whether it came to that, and what is wrong then."""
        out = self.top / f"{'-'.join(map(str, victims))}.{number}"
        if self.resumed:
            shutil.copytree(self.top / "before", out)
        outcome = run(out, out.with_suffix(".log"), *self.words, faults=dict.fromkeys(victims, number))
        wrong = list(self._wrong(out, outcome))
        if wrong:
            wrong.append(outcome.output)
        shutil.rmtree(out, ignore_errors=True)
        return "is lost: " in outcome.output, wrong

    def _wrong(self, out: Path, outcome: Outcome) -> Iterator[str]:
        lost_at_end = outcome.status == EXIT_REQUEUE and "lost after the last step" in outcome.output
        if outcome.status and not lost_at_end:
            yield f"it ended with status {outcome.status}"
        lines = [line for line in lines_of(out) if "loss" in line]
        if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
            yield f"these steps were told: {[line['step'] for line in lines]}"
        else:
            for line, loss in zip(lines, self.losses, strict=True):
                if abs(line["loss"] - loss) > CLOSE * abs(loss):
                    yield f"step {line['step']} had a loss of {line['loss']}, not {loss}"
        forwards = [line for line in outcome.output.splitlines() if line.startswith("forwards")]
        if forwards[-1:] != [f"forwards {STEPS}"] and not lost_at_end:
            yield f"the model counted {forwards}, and not its {STEPS} steps"


def lines_of(out: Path) -> list[dict]:
    """All lines of a run's metrics."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def world(top: Path, *words: str, resumed: bool) -> World:
    """Make what is there before, and the run in which nobody is lost."""
    if resumed:
        before = run(top / "before", top / "before.log", *words, "--steps", str(BEFORE))
        if before.status:
            raise RuntimeError(before.output)
        shutil.copytree(top / "before", top / "none")
    whole = run(top / "none", top / "none.log", *words)
    losses = [line["loss"] for line in lines_of(top / "none") if "loss" in line]
    if whole.status or len(losses) != STEPS or "is lost" in whole.output:
        raise RuntimeError(f"the run in which nobody is lost:\n{whole.output}")
    return World(top=top, words=words, resumed=resumed, losses=losses)


def rounds(top: Path, first: int, every: int, *words: str, resumed: bool) -> tuple[int, list[str]]:
    """Kill in each `every`-th sum, until the run has no more; return how many rounds there were, and what is wrong."""
    top.mkdir()
    here = world(top, *words, resumed=resumed)
    count, wrong = 0, []
    for victims in VICTIMS:
        number = first
        while True:
            was_lost, found = here.round(victims, number)
            if found:
                wrong.append(f"slots {victims} killed in sum {number}: " + "\n".join(found))
            if not was_lost:
                break
            count, number = count + 1, number + every
    return count, wrong


def main() -> int:
    """Make the rounds that the command line asks for; other words are options of the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    options, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as top:
        for name, resumed in (("from the beginning", False), ("from a checkpoint", True)):
            count, wrong = rounds(Path(top, name), options.first, options.every, *words, resumed=resumed)
            print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
            print(f"{name}: {count} rounds, {len(wrong)} of them wrong", flush=True)
            if wrong:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
