"""The number of samples per rank, so that unequal ranks finish together.

A rank's time for b samples is modelled as a + c*b seconds.  Both numbers are learned from the steps; after a sudden
change (another program on the machine, a throttled GPU) the earlier steps are forgotten.
Does not measure or exchange: every rank passes the same times of all ranks, and gets the same answer.
Rules: shares are whole samples and add up to the batch.  A rank that would slow the step down gets no samples; it is
tried again with one sample, so seldom that the cost is negligible.  Ranks of about the same speed keep equal shares, so
that their sums keep their order.
Sources: recursive least squares with a forgetting factor (Haykin, "Adaptive Filter Theory", ch. 10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.9  # weight of a step relative to the next one
CHANGED = 1.25  # ratio of measured and expected time that counts as a change if it happens twice in a row
LEARNING_STEPS = 2
GAIN = 0.05  # shares change only if the step gets shorter by this fraction
# A rank without samples is tried again after so many times the seconds of one sample, at most once a minute.
PATIENCE = 100
LEAST_IDLE_S = 60.0


@dataclass(slots=True)
class Speed:
    """The measured speed of one rank: weighted sums over its steps."""

    weight: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    steps: int = 0
    off: int = 0  # consecutive last steps that were unexpectedly slow (above 0) or fast (below 0)
    kept: list[tuple[int, float]] = field(default_factory=list)

    def note(self, samples: int, seconds: float) -> None:
        """Learn from a step; if the rank has changed, forget all but the last two steps."""
        expected_s = self.time_of(samples)
        ratio = seconds / expected_s if expected_s else 1.0
        side = (ratio > CHANGED) - (ratio < 1 / CHANGED)
        self.off = self.off + side if side and self.off * side >= 0 else side
        self.kept = [*self.kept[-1:], (samples, seconds)]
        if abs(self.off) >= 2:
            self._forget()
            for old in self.kept:
                self._add(*old)
        elif self.steps < LEARNING_STEPS or not side:  # ignore a single outlier
            self._add(samples, seconds)

    def parts(self) -> tuple[float, float]:
        """Return (a, c): seconds per step and per sample; a is 0 while all steps had one size."""
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
        """Return the expected seconds for so many samples; 0.0 while unknown."""
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
    """The ranks' shares of a batch, adapted to their measured speeds."""

    def __init__(self, batch: int, counts: Sequence[int]) -> None:
        self._batch = batch
        self.counts = list(counts)
        self._speeds = [Speed() for _ in counts]
        self.left_out: list[int] = [rank for rank, count in enumerate(counts) if count == 0]
        self._idle_s = [0.0 for _ in counts]  # since the rank got no samples

    def note(self, seconds: Sequence[float]) -> str:
        """Learn each rank's seconds, adapt `counts`, and return the change as text or ""."""
        self._learn(seconds)
        if retry := self._try_again():
            return retry
        if any(speed.steps < LEARNING_STEPS for speed, n in zip(self._speeds, self.counts, strict=True) if n):
            return ""
        counts = best_shares(self._batch, [speed.parts() for speed in self._speeds])
        now_s, then_s = self._longest(self.counts), self._longest(counts)
        if counts == self.counts or then_s > (1 - GAIN) * now_s:
            return ""
        self.counts = counts
        out = [rank for rank, count in enumerate(counts) if count == 0]
        newly_out = sorted(set(out) - set(self.left_out))
        self.left_out = out
        why = f"shares {' '.join(map(str, counts))}: a step takes {1e3 * then_s:.0f} ms instead of {1e3 * now_s:.0f}"
        return why + "".join(f"; rank {rank} is left out, it would make the others wait" for rank in newly_out)

    def _learn(self, seconds: Sequence[float]) -> None:
        for speed, count, spent_s in zip(self._speeds, self.counts, seconds, strict=True):
            if count:
                speed.note(count, spent_s)
        step_s = max(spent_s for count, spent_s in zip(self.counts, seconds, strict=True) if count)
        self._idle_s = [0.0 if n else idle_s + step_s for n, idle_s in zip(self.counts, self._idle_s, strict=True)]

    def _try_again(self) -> str:
        """Give one sample to a rank that was left out for long, because it may be faster now."""
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
    """Divide `batch` samples so that the slowest rank finishes as early as possible.

    `lines`: (a, c) of each rank, in seconds and seconds per sample.  Ranks of unknown speed (c = 0) get no samples.
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
    while sum(counts) > batch:  # take samples back from the slowest rank
        last = max((rank for rank, n in enumerate(counts) if n), key=lambda rank: _time(lines[rank], counts[rank]))
        counts[last] -= 1
    return counts


def _time(line: tuple[float, float], samples: int) -> float:
    return line[0] + line[1] * samples if samples else -math.inf
