"""The decisions of a plan, as values: starts, waits with reasons, preemptions, and changes in the size of elastic jobs.

Knows nothing of how they are made: see `plan`, `preempt.plan` and `preempt.elastic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcsched.model.accounting import PreemptMode
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Reason
from hpcsched.model.resources import Share
from hpcsched.sched.snapshot import Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a job does not start now: Slurm's reason, a sentence for people, and the expected start (None: unknown)."""

    reason: Reason
    detail: str
    expected_start_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A job that starts now with these shares, in the order of nodes."""

    job_id: JobId
    shares: tuple[Share, ...]
    partition: str = ""  # the one of its partitions in which it starts
    time_limit_s: int | None = None  # its time limit, lowered so that it fits; None: as requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A running job that is preempted. `save_s`: the grace period after the signal to save its work; None: none."""

    job_id: JobId
    mode: PreemptMode
    save_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """`victims` are preempted so that `job_id` can start on `shares`, which are reserved for it."""

    job_id: JobId
    shares: tuple[Share, ...]
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """An elastic job is asked to `keep` only these nodes (all: the request is withdrawn), or it also gets `add`."""

    job_id: JobId
    keep: tuple[NodeName, ...] = ()
    add: tuple[Share, ...] = ()
    for_job: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions of one pass: each pending job of the snapshot is in `starts` or in `waits`.

    Jobs that wait for the same reason share one `Wait`. `preempt` decides the rest: preemptions, suspended jobs that
    resume, reserved shares that are given up (`given_up`), and elastic jobs that shrink or grow.
    """

    starts: tuple[Start, ...]
    waits: Mapping[JobId, Wait]
    preemptions: tuple[Preemption, ...] = ()
    resumes: tuple[JobId, ...] = ()
    given_up: tuple[JobId, ...] = ()
    resizes: tuple[Resize, ...] = ()
    priorities: Mapping[JobId, int] = field(default_factory=dict, compare=False)  # of the jobs in the queue
    promises: Mapping[JobId, Promise] = field(default_factory=dict)  # for the next pass
