"""How long a job may last: by its time limit, by what that may be lowered to, and until what it runs in is over."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsched.model.reservation import Reservation
from hpcsched.model.units import known_limit_s
from hpcsched.sched.intervals import NEVER_S
from hpcsched.sched.policy import Policy
from hpcsched.sched.reservations import cut_short_s
from hpcsched.sched.snapshot import PendingJob


class Lasting:
    """How long the jobs of one plan may last."""

    def __init__(self, policy: Policy, reservations: Mapping[str, Reservation]) -> None:
        self._policy = policy
        self._reservations = reservations

    def limit_s(self, job: PendingJob) -> int:
        """Return the time limit of `job`, in seconds."""
        return known_limit_s(job.request.time_limit_s) or self._policy.default_time_limit_s

    def least_s(self, job: PendingJob) -> int:
        """Return for how long room is kept for `job`: for its limit, or for what that may be lowered to."""
        limit_s = self.limit_s(job)
        return min(limit_s, job.time_min_s) if job.lowers and job.time_min_s is not None else limit_s

    def cut_s(self, job: PendingJob) -> float:
        """Return when `job` is cut short, whenever it starts; `NEVER_S`: it is not."""
        return NEVER_S if job.free_to_go else cut_short_s(job, self._reservations)

    def end_s(self, job: PendingJob, start_s: float, limit_s: int | None = None) -> float:
        """Return when `job` has ended at the latest if it starts at `start_s`: by its limit, or because it is cut short."""
        end_s = start_s + (self.limit_s(job) if limit_s is None else limit_s)
        cut_s = self.cut_s(job)
        return min(end_s, cut_s) if start_s < cut_s else end_s
