"""The samples of each rank, so that unequal ranks finish together, and their efficiency.

A rank's time for b samples is modelled as a + c*b seconds.  Both numbers are learned from the steps; after a sudden
change (another program on the machine, a throttled GPU) the earlier steps are forgotten.
The first shares may follow the speeds that the nodes' assessments have measured (`start_weights`).
Does not measure or exchange: every rank passes the same times of all ranks, and gets the same answer.
Rules: shares are whole samples and add up to the batch.  A rank that would slow the step down gets no samples; it is
tried again with one sample, so seldom that the cost is negligible.  Ranks of about the same speed keep equal shares, so
that their sums keep their order.
Efficiency (`Scaling`) is the fraction of all ranks' time in their own work; 1 is as fast as ranks without communication.  The
rank that waits least at the exchange came last: the others waited for it.  Its own wait is the exchange itself.
Sources: recursive least squares with a forgetting factor (Haykin, "Adaptive Filter Theory", ch. 10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.values import travels

FORGET = 0.9  # weight of a step relative to the next one
CHANGED = 1.25  # ratio of measured and expected time that counts as a change if it happens twice in a row
LEARNING_STEPS = 2
GAIN = 0.05  # shares change only if the step gets shorter by this fraction
# A rank without samples is tried again after so many times the seconds of one sample, at most once a minute.
PATIENCE = 100
LEAST_IDLE_S = 60.0
MOST_UNEQUAL = 100.0  # a larger ratio of two nodes' speeds is an error of the measurement


def start_weights(batch: int, speeds: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of the first shares by the measured speeds of the ranks' nodes.

    Empty, for equal shares, if a speed is not known (0.0) or absurd, if the first step would hardly be shorter, or if a rank
    would get no samples: then its speed could not be learned.
    """
    least, whole = min(speeds, default=0.0), sum(speeds)
    if not all(math.isfinite(speed) for speed in speeds) or least <= 0.0 or max(speeds) > MOST_UNEQUAL * least:
        return ()
    is_longer = len(speeds) * least > (1 - GAIN) * whole
    return () if is_longer or batch * least < whole else tuple(speeds)


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
    last_two: list[tuple[int, float]] = field(default_factory=list)

    def note(self, samples: int, seconds: float) -> None:
        """Learn from a step; if the rank has changed, forget all but the last two steps."""
        expected_s = self.time_of(samples)
        ratio = seconds / expected_s if expected_s else 1.0
        side = (ratio > CHANGED) - (ratio < 1 / CHANGED)
        self.off = self.off + side if side and self.off * side >= 0 else side
        self.last_two = [*self.last_two[-1:], (samples, seconds)]
        if abs(self.off) >= 2:
            self._forget()
            for old in self.last_two:
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


WARM_STEPS = 3  # the first steps fill caches and open connections
LATELY = 0.05  # weight of a step in the recent average
WORTH_NAMING = 0.02  # of a step that the others wait


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds of each rank in one step.

    Its own work, getting data within it, and its wait at the exchange.

    With local steps: means over the steps since the last exchange, and the wait at the exchange before.
    """

    own_s: tuple[float, ...]
    data_s: tuple[float, ...]
    wait_s: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class TimesSinceMeeting:
    """One rank's seconds in the steps since the last exchange.

    One step, or several local ones.
    """

    steps: int = 0
    own_s: float = 0.0
    data_s: float = 0.0
    wait_s: float = 0.0

    def add(self, own_s: float, data_s: float, wait_s: float) -> None:
        """Add one step."""
        self.steps += 1
        self.own_s, self.data_s, self.wait_s = self.own_s + own_s, self.data_s + data_s, self.wait_s + wait_s

    def means(self) -> tuple[float, float, float]:
        """Return own work, data and wait per step; at least one step was added."""
        return self.own_s / self.steps, self.data_s / self.steps, self.wait_s / self.steps


class Scaling:
    """Sums over the steps of a run."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)  # hosts of the ranks
        self._since_exchange_s: list[float] = []  # the steps since the last exchange
        self._seen = 0
        self._step_s = self._own_s = self._data_s = self._exchange_s = self._uneven_s = 0.0
        self._late_s = [0.0] * len(names)  # how long the others waited while this rank was last
        self._lately_s = [0.0] * len(names)
        self._lately_step_s = 0.0

    def note(self, step_s: float, times: RankTimes | None) -> None:
        """Add one step; `times` is None if the ranks did not exchange in it."""
        self._since_exchange_s.append(step_s)
        if times is None:
            return
        step_s = sum(self._since_exchange_s) / len(self._since_exchange_s)
        self._since_exchange_s.clear()
        self._seen += 1
        if self._seen <= WARM_STEPS:
            return
        count = len(times.own_s)
        least_s = min(times.wait_s)
        uneven_s = sum(times.wait_s) / count - least_s
        last = times.wait_s.index(least_s)
        self._step_s += step_s
        self._own_s += sum(times.own_s) / count
        self._data_s += sum(times.data_s) / count
        self._exchange_s += least_s
        self._uneven_s += uneven_s
        others_s = uneven_s * count / max(1, count - 1)  # the mean over the waiting ranks
        self._late_s[last] += others_s
        self._lately_s = [
            old + ((others_s if rank == last else 0.0) - old) * LATELY for rank, old in enumerate(self._lately_s)
        ]
        self._lately_step_s += (step_s - self._lately_step_s) * (LATELY if self._lately_step_s else 1.0)

    def straggler(self) -> str:
        """Return a line about the rank for which the others waited recently.

        Empty if it is negligible.
        """
        worst = max(range(len(self._names)), key=lambda rank: self._lately_s[rank])
        late_s = self._lately_s[worst]
        if len(self._names) < 2 or self._seen <= WARM_STEPS or late_s < WORTH_NAMING * self._lately_step_s:
            return ""
        return f"the others wait for {self._name(worst)}: {1e3 * late_s:.0f} ms of a step's {1e3 * self._lately_step_s:.0f}"

    def summary(self) -> str:
        """Return one line: how well the ranks were used, and what limits them.

        Empty after too few steps.
        """
        if self._step_s <= 0:
            return ""
        efficiency = self._own_s / self._step_s
        worst = max(range(len(self._names)), key=lambda rank: self._late_s[rank])
        parts = {
            "the exchange": self._exchange_s,
            f"waiting for {self._name(worst)}": self._uneven_s,
            "work between steps": max(0.0, self._step_s - self._own_s - self._exchange_s - self._uneven_s),
        }
        if len(self._names) == 1:
            parts = {"work between steps": self._step_s - self._own_s}
        shares = {name: seconds / self._step_s for name, seconds in parts.items()}
        limit = max(shares, key=lambda name: shares[name])
        rest = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if name != limit)
        ranks = f"{len(self._names)} ranks compute" if len(self._names) > 1 else "the rank computes"
        data = f"; of the computing, getting data {100 * self._data_s / max(self._own_s, 1e-9):.1f} %"
        what = f"limited by {limit}, {100 * shares[limit]:.1f} %" + (f" ({rest})" if rest else "")
        return f"scaling: {ranks} {100 * efficiency:.1f} % of the time; {what}{data}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._names[rank]}"
