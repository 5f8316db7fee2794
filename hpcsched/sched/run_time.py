"""Expected run times: until the time limit, a lowered limit, or an earlier end.

If requests are not trusted (see `guard.predict.Needed`), a plan uses the predicted run times of
jobs. Reserved intervals stay closed to every job with a limit that reaches into them: such a job
counts with its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TypeVar

from hpcsched.model.reservation import Reservation
from hpcsched.model.units import MINUTE_S, known_limit_s
from hpcsched.sched.guard.predict import Needed
from hpcsched.sched.place.reserved_intervals import NEVER_S, ReservedInterval
from hpcsched.sched.policy import Policy
from hpcsched.sched.queue.reservations import cut_short_s
from hpcsched.sched.snapshot import PendingJob


class RunTimes:
    """The expected run times of the jobs of one pass."""

    def __init__(
        self,
        policy: Policy,
        reservations: Mapping[str, Reservation],
        blocks: Sequence[ReservedInterval] = (),
        needed: Needed | None = None,
    ) -> None:
        self._policy = policy
        self._reservations = reservations
        self._blocks = blocks
        self._needed = needed

    def limit_s(self, job: PendingJob) -> int:
        """Return the time limit of `job`, in seconds."""
        return known_limit_s(job.request.time_limit_s) or self._policy.default_time_limit_s

    def needed_s(self, job: PendingJob, start_s: float) -> float:
        """Return how long `job` needs if it starts at `start_s`, in seconds.

        That is its time limit, or less if requests are not trusted.
        """
        limit_s = self.limit_s(job)
        if self._needed is None or job.lowers or job.reservation:
            return limit_s
        end_s = start_s + limit_s
        if self._blocks and any(block.start_s < end_s and block.end_s > start_s for block in self._blocks):
            return limit_s
        return self._needed.length_s(job.uid, limit_s)

    def least_s(self, job: PendingJob, start_s: float) -> float:
        """Return the least length of a slot of `job`, in seconds.

        That is the time that the job needs, or ``--time-min`` if its time limit may be lowered.
        """
        if job.lowers and job.time_min_s is not None:
            return min(self.limit_s(job), job.time_min_s)
        return self.needed_s(job, start_s)

    def cut_s(self, job: PendingJob) -> float:
        """Return when `job` is cut short, regardless of its start; `NEVER_S`: never."""
        return NEVER_S if job.free_to_go else cut_short_s(job, self._reservations)

    def end_s(self, job: PendingJob, start_s: float, limit_s: float | None = None) -> float:
        """Return the expected end of `job` if it starts at `start_s`.

        The job ends after the time that it needs, or when it is cut short.
        """
        end_s = start_s + (self.needed_s(job, start_s) if limit_s is None else limit_s)
        cut_s = self.cut_s(job)
        return min(end_s, cut_s) if start_s < cut_s else end_s


# ----- jobs with a time limit that may be lowered (``--time-min``): the longest time that fits now
# As in Slurm: a slot is as long as the least time, and a job that starts gets as much more, in whole minutes, as leaves the
# slots of others untouched. Source: sbatch(1), --time-min.


Found = TypeVar("Found")


def longest(fits: Callable[[float], Found | None], least_s: float, most_s: float) -> tuple[Found, float] | None:
    """Return the result of `fits` for the latest end that fits, and that end.

    None: `fits` returns None even for `least_s`. Ends are `most_s`, or `least_s` plus whole
    minutes. A job that fits also fits for less time, so the end is found by bisection.
    """
    found = fits(most_s)
    if found is not None or most_s <= least_s:
        return None if found is None else (found, most_s)
    found = fits(least_s)
    if found is None:
        return None
    low, high = 0, ceil((most_s - least_s) / MINUTE_S)
    while high - low > 1:
        middle = (low + high) // 2
        more = fits(least_s + middle * MINUTE_S)
        if more is None:
            high = middle
        else:
            low, found = middle, more
    return found, least_s + low * MINUTE_S
