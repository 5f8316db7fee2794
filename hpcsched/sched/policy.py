"""The administrator's settings for a plan: weights, backfill, depth, preemption.

`hpcsched.config` reads them from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hpcsched.model.accounting import PreemptMode, PreemptType, Qos


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortJobs:
    """The limits for short jobs of the policy `default`.

    A short job requests so little work that it starts ahead of all others, even of promises. In logs of real machines, half of
    the jobs run for less than ten minutes. They are one percent of the work and cause nearly all of the mean slowdown. Most of
    them request little time, so no prediction is needed to find them. A job that requests less time than it needs is ended at
    its limit.
    """

    limit_s: float = 3600.0  # longest time limit of a short job
    work_s: float = 60.0  # longest time that it would occupy the whole machine
    share: float = 0.1  # short jobs hold at most this part of the machine
    wait_part: float = 0.9  # they go ahead while no job has waited longer than this part of the bound

    def is_short(self, limit_s: float, share: float) -> bool:
        """Say whether a job with this time limit and part of the machine (0..1) is short."""
        return limit_s <= self.limit_s and limit_s * share <= self.work_s


class Backfill(StrEnum):
    NONE = "none"  # strict order: nothing starts behind a job that does not fit
    EASY = "easy"  # a later job starts if it does not delay the first waiting job of any partition
    EASY_SJBF = "easy-sjbf"  # as easy, and the later jobs are tried shortest time limit first
    DEFAULT = "default"  # short jobs first by predicted run time, with a bound on waits; see `guard`
    CONSERVATIVE = "conservative"  # every job that is considered is promised a start, and no job delays a promise
    SLURM_LIKE = "slurm-like"  # the first few waiting jobs are promised a start; later ones start if they delay none


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The parameters of the guard of the policy `default`; see `guard.decide`.

    One set of numbers applies to all machines.
    """

    overdue_part: float = 0.5  # part of plain EASY's longest wait: a job that has waited longer is overdue
    wide_bonus: float = 0.4  # part of that wait, times the job's part of the machine: added to the wait of the job
    least_easy_wait_s: float = 3600.0  # minimum that is assumed for plain EASY's longest wait
    short: ShortJobs = ShortJobs()
    promises: int = 2  # promises to overdue jobs that do not fit
    first: int = 2  # recent jobs, the first in the queue, that are promised a start
    first_part: float = 0.9  # part of plain EASY's longest wait: when their wait will reach it, the start is promised
    wide: float = 0.63  # part of the machine: a job that needs this much is wide
    wide_part: float = 0.06  # the same as `first_part`, for the first wide job
    size_power: float = -0.3  # exponent of a job's processors in the order of recent jobs
    long_s: float = 14400.0  # predicted run times beyond this count alike; lower if a job has waited long
    long_least_s: float = 600.0  # minimum of that threshold
    calm_part: float = 0.8  # part of plain EASY's longest wait: the rest of it that the first job in the queue has
    long_per_calm: float = 0.05  # not yet waited, times this, is added to `long_least_s`
    learning_s: float = 10 * 86400.0  # until the history of a machine is this long, it is not used
    learning_overdue_s: float = 329_000.0  # until then no job is overdue before this,
    learning_long_s: float = 14400.0  # this replaces `long_s`,
    learning_power: float = 0.5  # and this replaces `size_power`
    distrust: float = 0.2  # requests are not trusted if jobs use less than this part of the requested processor time
    distrust_times: float = 3.0  # then the expected run time of a job is its prediction times this,
    distrust_part: float = 0.6  # this replaces `overdue_part`,
    distrust_promises: int = 1  # this replaces `promises`,
    distrust_wide: float = 2.0  # and this replaces `wide`; above 1: no wide job is promised an early start

    def distrusts(self, request_use: float) -> bool:
        """Say whether requests are not trusted on a machine whose jobs use this part (0..1)."""
        return request_use < self.distrust

    def where_distrusted(self) -> Guard:
        """Return the guard with the parameters for requests that are not trusted."""
        return replace(self, overdue_part=self.distrust_part, promises=self.distrust_promises, wide=self.distrust_wide)


DEFAULT_GUARD = Guard()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptRules:
    """The rules of preemption: those of the cluster, and those of each QOS by name."""

    type: PreemptType = PreemptType.NONE
    mode: PreemptMode = PreemptMode.REQUEUE
    grace_s: float = 60.0  # grace period of a job with mode "checkpoint"
    exempt_s: float = 0.0  # a job is exempt from preemption for this time after its start
    requeue: bool = True  # whether jobs without --requeue or --no-requeue may be requeued
    qos: Mapping[str, Qos] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The order of jobs, and the depth of the planner.

    A priority is `weight_site` plus the weighted factors (each 0..1) minus nice. `weight_site` raises all jobs alike, so
    that a positive nice can be subtracted.
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
    small_relative_to_time: bool = False  # size is cpus divided by the time limit in minutes
    accrue_always: bool = False  # age counts from submission
    age_max_s: float = 7 * 86400.0  # a longer wait does not add to the age factor
    default_time_limit_s: int = 365 * 86400  # expected run time of a job without a time limit
    overdue_s: float = 30.0  # a job past its limit, or being ended, is expected to end in this time
    max_switch_wait_s: float = 300.0  # of jobs with --switches that do not set a time
    backfill_depth: int = 1_000  # failed tries behind a head before the search ends; 0: no limit
    promises: int = 100  # "slurm-like": waiting jobs of each partition with a slot
    conservative_depth: int = 1_000  # "conservative": the same; later jobs wait
    preempt: PreemptRules = field(default_factory=PreemptRules)
    estimate_depth: int = 10  # jobs without a slot that get an expected start
    guard: Guard = DEFAULT_GUARD  # of the policy "default"
