"""How many samples of the global batch each rank takes, so that unequal ranks finish together.

A rank's time for b samples is taken to be a + c*b seconds: a fixed part, and one per sample.  Both are learned from the
steps as they go; a sudden change (another program on the machine, a throttled GPU) forgets what was learned before it.
Does not measure, and does not exchange: it is fed with every rank's times, the same on all, and so answers all alike.
Rules: shares are whole samples and add up to the batch; a rank that would make the whole slower gets none, and is named; it
is tried again with one sample, so seldom that this costs next to nothing.
Ranks that are as good as equal keep equal shares, so that their sums keep their order.
Sources: recursive least squares with a forgetting factor (Haykin, "Adaptive Filter Theory", ch. 10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.9  # what a step weighs of the one after it
CHANGED = 1.25  # a time so many times off what was expected, twice in a row, is a change
LEARNING_STEPS = 2
GAIN = 0.05  # shares move only for so much less time per step
# Who is left out is tried again after so many times the seconds that one sample took there, but each minute at the most.
PATIENCE = 100
LEAST_IDLE_S = 60.0


@dataclass(slots=True)
class Speed:
    """What is known of one rank: weighted sums over its steps."""

    weight: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    steps: int = 0
    off: int = 0  # so many of the last steps were not as expected, all slower or all quicker
    kept: list[tuple[int, float]] = field(default_factory=list)

    def note(self, samples: int, seconds: float) -> None:
        """Learn from a step, and forget those before the last two if the rank has changed."""
        expected_s = self.time_of(samples)
        ratio = seconds / expected_s if expected_s else 1.0
        side = (ratio > CHANGED) - (ratio < 1 / CHANGED)
        self.off = self.off + side if side and self.off * side >= 0 else side
        self.kept = [*self.kept[-1:], (samples, seconds)]
        if abs(self.off) >= 2:
            self._forget()
            for old in self.kept:
                self._add(*old)
        elif self.steps < LEARNING_STEPS or not side:  # one odd step says nothing
            self._add(samples, seconds)

    def parts(self) -> tuple[float, float]:
        """Return (a, c): seconds per step and per sample; a is 0 while all steps were of one size."""
        spread = self.weight * self.squares - self.samples**2
        if self.samples <= 0:
            return 0.0, 0.0
        if spread <= 1e-6 * self.weight * self.squares:
            return 0.0, self.seconds / self.samples
        per_sample_s = (self.weight * self.products - self.samples * self.seconds) / spread
        fixed_s = (self.seconds - per_sample_s * self.samples) / self.weight
        if per_sample_s <= 0 or fixed_s < 0:  # noise: a line through the origin is the safer guess
            return 0.0, self.seconds / self.samples
        return fixed_s, per_sample_s

    def time_of(self, samples: int) -> float:
        """Return the expected seconds for so many samples; 0.0 while nothing is known."""
        fixed_s, per_sample_s = self.parts()
        return fixed_s + per_sample_s * samples

    def _add(self, samples: int, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("samples", samples),
            ("seconds", seconds),
            ("squares", samples * samples),
            ("products", samples * seconds),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)
        self.steps += 1

    def _forget(self) -> None:
        self.weight = self.samples = self.seconds = self.squares = self.products = 0.0
        self.steps = self.off = 0


class Balance:
    """The ranks' shares of a batch, following their measured speeds."""

    def __init__(self, batch: int, counts: Sequence[int]) -> None:
        self._batch = batch
        self.counts = list(counts)
        self._speeds = [Speed() for _ in counts]
        self.left_out: list[int] = [rank for rank, count in enumerate(counts) if count == 0]
        self._idle_s = [0.0 for _ in counts]  # since this rank was left out

    def note(self, seconds: Sequence[float]) -> str:
        """Learn each rank's time for its share, and may change `counts`. Returns what changed, in words."""
        for speed, count, spent_s in zip(self._speeds, self.counts, seconds, strict=True):
            if count:
                speed.note(count, spent_s)
        step_s = max(spent_s for count, spent_s in zip(self.counts, seconds, strict=True) if count)
        self._idle_s = [0.0 if n else idle_s + step_s for n, idle_s in zip(self.counts, self._idle_s, strict=True)]
        if said := self._try_again():
            return said
        if any(speed.steps < LEARNING_STEPS for speed, n in zip(self._speeds, self.counts, strict=True) if n):
            return ""
        lines = [speed.parts() for speed in self._speeds]
        counts = best_shares(self._batch, lines)
        now_s, then_s = self._longest(self.counts), self._longest(counts)
        if counts == self.counts or then_s > (1 - GAIN) * now_s:
            return ""
        self.counts = counts
        out = [rank for rank, count in enumerate(counts) if count == 0]
        gone = sorted(set(out) - set(self.left_out))
        self.left_out = out
        why = f"shares {' '.join(map(str, counts))}: a step takes {1e3 * then_s:.0f} ms instead of {1e3 * now_s:.0f}"
        return why + "".join(f"; rank {rank} is left out, it would make the others wait" for rank in gone)

    def _try_again(self) -> str:
        """Give one sample to a rank that was left out for long; it may have been slow for a while only."""
        most = max(range(len(self.counts)), key=lambda rank: self.counts[rank])
        for rank in self.left_out:
            sample_s = self._speeds[rank].time_of(1)
            if sample_s and self._idle_s[rank] > max(PATIENCE * sample_s, LEAST_IDLE_S) and self.counts[most] > 1:
                self._speeds[rank] = Speed()
                self.counts[most], self.counts[rank] = self.counts[most] - 1, 1
                self.left_out.remove(rank)
                return f"shares {' '.join(map(str, self.counts))}: rank {rank}, which was left out, is tried again"
        return ""

    def _longest(self, counts: Sequence[int]) -> float:
        return max(speed.time_of(n) for speed, n in zip(self._speeds, counts, strict=True) if n)


def best_shares(batch: int, lines: Sequence[tuple[float, float]]) -> list[int]:
    """Divide `batch` samples so that the last rank to finish finishes first; (a, c) of each rank in `lines`.

    Ranks of which nothing is known (c = 0) get nothing.
    """

    def fits(limit_s: float) -> list[int]:
        return [max(0, int((limit_s - a) / c + 1e-9)) if c > 0 else 0 for a, c in lines]

    low_s, high_s = 0.0, min(a + c * batch for a, c in lines if c > 0)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        if sum(fits(middle_s)) >= batch:
            high_s = middle_s
        else:
            low_s = middle_s
    counts = fits(high_s)
    while sum(counts) > batch:  # take back where that helps most
        last = max((rank for rank, n in enumerate(counts) if n), key=lambda rank: _time(lines[rank], counts[rank]))
        counts[last] -= 1
    return counts


def _time(line: tuple[float, float], samples: int) -> float:
    return line[0] + line[1] * samples if samples else -math.inf
