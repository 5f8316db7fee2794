"""The administrator's choices that a plan follows: weights, backfill, depth. Read from the configuration elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Backfill(StrEnum):
    NONE = "none"  # strict order: nothing starts behind a job that cannot
    EASY = "easy"  # a later job may start now if the first waiting job of each partition starts no later for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How jobs are ordered and how far the planner looks.

    A priority is `weight_site` plus the weighted factors (each 0..1) minus nice. The site's part only lifts all jobs, so
    that a positive nice has something to be taken from.
    """

    backfill: Backfill = Backfill.EASY
    weight_site: int = 100_000
    weight_age: int = 1_000
    weight_partition: int = 1_000
    weight_size: int = 0
    favor_small: bool = False  # the size factor grows as the job gets smaller
    age_max_s: float = 7 * 86400.0  # waiting longer than this adds nothing
    default_time_limit_s: int = 365 * 86400  # what a job without any limit is taken to need
    overdue_s: float = 30.0  # what is past its limit, or is being ended, is taken to end this much later
    backfill_depth: int = 1_000  # so many shapes of jobs are tried in vain behind the first one that waits; 0: all
    estimate_depth: int = 10  # so many waiting jobs of the queue's front get an expected start
