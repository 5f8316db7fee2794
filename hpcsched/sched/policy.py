"""The administrator's choices that a plan follows: weights, backfill, depth. Read from the configuration elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hpcsched.model.accounting import PreemptMode, PreemptType, Qos

# ----- which jobs are so little work that they may go ahead of everybody else, promises or not: for our own policy
# Of the machines whose logs we have half of the jobs run for less than ten minutes. They are one per cent of the work, and make
# nearly all of the mean slowdown. Most of them ask for little time, so no prediction is needed to find them; whoever asks for
# less than he needs is ended at his limit. What goes ahead holds a small share of the machine at most, however many there are.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortJobs:
    """When a job may go ahead of everybody."""

    limit_s: float = 3600.0  # it asks for so little time,
    work_s: float = 60.0  # and for so little of it if all of the machine were to do it;
    share: float = 0.1  # with it such jobs hold no more than this part of the machine,
    part: float = 0.9  # and nobody has waited for more than this part of the measure

    def is_quick(self, limit_s: float, share: float) -> bool:
        """Say whether a job of this time limit, which needs this share of the machine (0..1), is so little work."""
        return limit_s <= self.limit_s and limit_s * share <= self.work_s


class Backfill(StrEnum):
    NONE = "none"  # strict order: nothing starts behind a job that cannot
    EASY = "easy"  # a later job may start now if the first waiting job of each partition starts no later for it
    EASY_SJBF = "easy-sjbf"  # the same, and of the later jobs those with the shortest time limits are tried first
    DEFAULT = (
        "default"  # short jobs first by expected run times, with a guard for those that have waited long; see `guard`
    )
    CONSERVATIVE = "conservative"  # every job that is looked at is promised a start, and none may delay another's
    SLURM_LIKE = "slurm-like"  # the first few that wait are promised a start; later ones start if they touch no promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """How our own policy keeps jobs from being overtaken too long; see `guard`. One set for all machines."""

    part: float = 0.5  # of plain EASY's longest wait: who has waited longer is old, and no longer overtaken
    wide_bonus: float = (
        0.4  # of that: who needs the whole machine counts as having waited so much longer, others by their share
    )
    old_s: float = 3600.0  # that wait counts as this at least
    quick: ShortJobs = ShortJobs()  # who goes ahead of everybody
    promises: int = 2  # so many old ones that do not fit are promised a start at once
    first: int = 2  # so many of the young, the first in line, are promised a start
    first_part: float = 0.9  # when they will have waited for this part
    wide: float = 0.63  # of the machine: who needs as much is hard to find room for
    wide_part: float = 0.06  # the first wide one is promised a start when it will have waited for this part
    size_power: float = -0.3  # how a job's processors weigh against it in the order of the young
    long_s: float = (
        14400.0  # expected run times beyond this count as this, and beyond less when somebody has waited long:
    )
    long_least_s: float = 600.0  # this at least,
    calm_part: float = 0.8  # of plain EASY's longest wait: what the first in line has not yet waited of it,
    long_per_calm: float = 0.05  # so much of it is added
    learning_s: float = 10 * 86400.0  # so long a machine's history says too little
    learning_old_s: float = 329_000.0  # and nobody is old before this
    learning_long_s: float = 14400.0  # in place of all these
    learning_power: float = 0.5  # in place of `size_power`
    distrust: float = (
        0.2  # requests are not trusted if jobs use less than this part of the processor time they ask for:
    )
    distrust_times: float = 3.0  # then a job counts with so many times its expected run time,
    distrust_part: float = 0.6  # in place of `part`,
    distrust_promises: int = 1  # in place of `promises`,
    distrust_wide: float = 2.0  # in place of `wide`; above 1: no wide job is promised an early start

    def distrusts(self, request_use: float) -> bool:
        """Say whether requests are not trusted on a machine whose jobs use this part of them."""
        return request_use < self.distrust

    def where_distrusted(self) -> Guard:
        """Return the guard with the numbers that hold where requests are not trusted."""
        return replace(self, part=self.distrust_part, promises=self.distrust_promises, wide=self.distrust_wide)


DEFAULT_GUARD = Guard()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptRules:
    """Who may preempt whom, and how: the cluster's rules, and the QOS with theirs, by name."""

    type: PreemptType = PreemptType.NONE
    mode: PreemptMode = PreemptMode.REQUEUE
    grace_s: float = 60.0  # what a job of mode "checkpoint" has to save what it has
    exempt_s: float = 0.0  # for so long after its start a job is not preempted
    requeue: bool = True  # whether a job that does not say may run again
    qos: Mapping[str, Qos] = field(default_factory=dict)


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
    weight_fairshare: int = 0
    weight_qos: int = 0
    weight_assoc: int = 0
    weights_tres: tuple[tuple[str, float], ...] = ()
    favor_small: bool = False  # the size factor grows as the job gets smaller
    small_relative_to_time: bool = False  # size is cpus over the time limit in minutes
    accrue_always: bool = False  # age counts from the submission on
    age_max_s: float = 7 * 86400.0  # waiting longer than this adds nothing
    default_time_limit_s: int = 365 * 86400  # what a job without any limit is taken to need
    overdue_s: float = 30.0  # what is past its limit, or is being ended, is taken to end this much later
    max_switch_wait_s: float = 300.0  # of jobs that want few switches and say no time of their own
    backfill_depth: int = 1_000  # so many shapes of jobs are tried in vain behind the first one that waits; 0: all
    promises: int = 100  # so many waiting jobs of each partition are promised a start with "slurm-like"
    conservative_depth: int = 1_000  # and so many with "conservative"; those behind them wait
    preempt: PreemptRules = field(default_factory=PreemptRules)
    estimate_depth: int = 10  # so many waiting jobs of the queue's front get an expected start
    guard: Guard = DEFAULT_GUARD  # of "default"
