"""Our own policy, `default`: short jobs first by prediction, and a guard that keeps jobs from waiting much longer than EASY.

Its measure is plain EASY's longest wait so far on the same jobs (see `rehearsal`): certain, and it only grows. Who has waited
for a part of it is *old*. Wide jobs, for which room is hardest to find, count as having waited longer by their share of the
machine: it is they that wait longest under plain EASY. The old come first, in the order of what they count as having waited:
those that fit start, the first few that do not are promised the earliest start that the requests of what runs allow, and the
others start if they touch no promise. The young come by the time they have waited over the time that they are expected to run
(see `predict`), weighed by their size: whoever waits moves up, a short job quickly. They start if they fit and touch no promise.

The work of those who overtake is what keeps the others waiting. So the nearer the one who has waited longest is to the measure,
the shorter a job must be to be preferred: expected times beyond `WaitBound.long_s` count alike,
and such jobs keep their order of arrival.

Jobs that ask for next to nothing (see `quick`) go ahead of all, promises or not, while nobody has waited for nearly as long as
the measure. So a promise can be late, but not for many at once: what goes ahead holds a small share of the machine.

A few of the young are promised a start as well, for what is begun before they are old would still be in their way then: the
first in line, for a late one, and the first of those that need much of the machine, for an early one. Before there is a
measure, in the first days of a machine, nobody is old before a fixed time, and the first in the second order is promised a start.

A prediction only orders jobs, promises count with requests: one that proves short delays no promise. On a machine whose requests
are not trusted (`Guard.distrusts`) promises count with `predict.Needed`, and a job that outlasts its prediction may delay them.

What is proven: with `Guard.part` and `old_s` 0 (everybody is old, and no width counts), one promise and nothing quick the
schedule is plain EASY's, and those that went ahead hold no more than their share of the machine. What is not: that the longest
wait stays below plain EASY's. As soon as one job starts elsewhere than under EASY all later ones do, and the longest of many
thousand waits falls as luck has it: see man/adr/0011-the-guard-of-the-default-policy.md for how often it is above.

Here is what is decided, for whoever knows what is free: `guarded` on a pool of alike processors, `guardplan` on the nodes of a
plan. Where jobs stand in several lines, each with a part of the machine, what is said of the first ones holds for each line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from hpcsched.sched.policy import Guard

SHORTEST_S = 10.0  # as bounded slowdown counts: shorter is not worth preferring

Job = TypeVar("Job")


class Candidate(NamedTuple, Generic[Job]):
    """A waiting job as the guard sees it."""

    number: int  # its place in line, which decides between equals
    since_s: float  # since when it waits
    limit_s: float
    user: int  # negative: nobody
    amount: float  # of processors that it needs, or of their number what it needs more of
    part: float  # of its line's machine, 0..1
    is_quick: bool
    line: Hashable
    job: Job


class Capacity(Protocol[Job]):
    """What is free, and who has it."""

    def most(self) -> float:
        """Return the largest amount that is worth trying."""

    def has_for_quick(self, one: Candidate[Job]) -> bool:
        """Say whether what quick jobs may have has room for one more."""

    def start(self, one: Candidate[Job]) -> bool:
        """Start `one` if it fits now and touches no promise but its own; say whether it runs."""

    def promise(self, one: Candidate[Job], from_s: float) -> None:
        """Keep room for `one`, which does not fit now, from the first time at or after `from_s` at which it fits."""


class WaitBound:
    """The guard's numbers at one moment: who is old, and what counts as long.

    `easy_wait_s`: plain EASY's longest wait so far; `learning`: that says too little yet; `first_waited_s`: for so long the one
    has waited who came first; `longest_s`: of each user's last runs.
    """

    def __init__(
        self,
        guard: Guard,
        now_s: float,
        easy_wait_s: float,
        *,
        learning: bool,
        first_waited_s: float,
        longest_s: Mapping[int, float],
    ) -> None:
        self.guard = guard
        self.now_s = now_s
        self.learning = learning
        self.measure_s = max(guard.old_s, easy_wait_s)
        self.old_after_s = guard.part * self.measure_s
        self.bonus_s = guard.wide_bonus * self.old_after_s
        patience_s = self.measure_s
        if learning:
            self.long_s = guard.learning_long_s
            self.old_after_s, self.bonus_s = max(self.old_after_s, guard.learning_old_s), 0.0
            patience_s = max(patience_s, guard.learning_old_s)
        else:
            calm_s = max(0.0, guard.calm_part * self.measure_s - first_waited_s)
            self.long_s = min(guard.long_s, guard.long_least_s + guard.long_per_calm * calm_s)
        self.quick_go = first_waited_s <= guard.quick.part * patience_s
        self._longest_s = longest_s

    def by_age(self, line: Iterable[Candidate[Job]]) -> tuple[list[Candidate[Job]], list[Candidate[Job]]]:
        """Return the old, who counts as having waited longest first, and the young in the order of `line`."""
        since_s, bonus_s = self.now_s - self.old_after_s, self.bonus_s
        old: list[tuple[float, int, Candidate[Job]]] = []
        young: list[Candidate[Job]] = []
        for one in line:
            counted_s = one[1] - bonus_s * one[5]
            if counted_s <= since_s:
                old.append((counted_s, one[0], one))
            else:
                young.append(one)
        old.sort()
        return [one for _, _, one in old], young

    def ranked(self, jobs: Iterable[Candidate[Job]], power: float) -> list[Candidate[Job]]:
        """Return `jobs` with the one first that has waited most for its size, which weighs by `power`."""
        now_s, long_s, longest_s = self.now_s, self.long_s, self._longest_s
        ranked = []
        for one in jobs:
            number, since_s, limit_s, user, amount = one[:5]
            expected_s = min(limit_s, longest_s.get(user, limit_s))
            expected_s = min(long_s, max(SHORTEST_S, expected_s))
            ranked.append(((since_s - now_s) / (expected_s * amount**power), expected_s, number, one))
        ranked.sort()  # of those that have only just come the shortest is first
        return [one for _, _, _, one in ranked]

    def promised(self, young: Sequence[Candidate[Job]]) -> Iterator[tuple[Candidate[Job], float]]:
        """Yield who of the young is promised a start, and from when on: the first wide one of each line and its first few."""
        guard = self.guard
        wide: dict[Hashable, Candidate[Job]] = {}
        first: dict[Hashable, list[Candidate[Job]]] = {}
        for one in young:
            of_line = first.setdefault(one.line, [])
            if len(of_line) < guard.first:
                of_line.append(one)
            if one.part >= guard.wide and one.line not in wide:
                wide[one.line] = one
        for line, ones in first.items():
            widest = wide.get(line)
            if widest is not None:
                yield widest, self._late_s(widest, guard.wide_part)
            for one in ones:
                if one is not widest:
                    yield one, self._late_s(one, guard.first_part * (1 - guard.wide_bonus * one.part))

    def _late_s(self, one: Candidate[Job], part: float) -> float:
        return max(self.now_s, one.since_s + part * self.measure_s)


def decide(line: Sequence[Candidate[Job]], moment: WaitBound, room: Capacity[Job]) -> Iterator[None]:
    """Start jobs of `line` (as they stand in it) in `room`, and promise others a start; each step is a look at one job."""
    guard = moment.guard
    gone: set[int] = set()
    if moment.quick_go:
        for one in moment.ranked([one for one in line if one.is_quick and one.amount <= room.most()], guard.size_power):
            if room.has_for_quick(one) and room.start(one):
                gone.add(one.number)
            yield
    old, young = moment.by_age([one for one in line if one.number not in gone] if gone else line)
    promises: Counter[Hashable] = Counter()
    for one in old:
        if room.most() <= 0:
            return
        if not room.start(one) and promises[one.line] < guard.promises:
            promises[one.line] += 1
            room.promise(one, moment.now_s)
        yield
    if moment.learning:
        for one in moment.ranked(
            [one for one in young if one.amount <= room.most() or not promises[one.line]], guard.learning_power
        ):
            if room.most() <= 0:
                return
            if not room.start(one) and not promises[one.line]:
                promises[one.line] += 1
                room.promise(one, moment.now_s)
            yield
        return
    if ranked := moment.ranked([one for one in young if one.amount <= room.most()], guard.size_power):
        for one, from_s in moment.promised(young):
            room.promise(one, from_s)
            yield
        for one in ranked:
            if room.most() <= 0:
                return
            room.start(one)
            yield
