"""The decisions of a plan: starts, waits with reasons, preemptions and resizes.

Knows nothing of the algorithms: see `plan` and `preempt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcsched.model.accounting import PreemptMode
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Reason
from hpcsched.model.node import Share
from hpcsched.sched.snapshot import Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a job does not start now.

    Slurm's reason, a sentence for users, and the expected start (None: unknown).
    """

    reason: Reason
    detail: str
    expected_start_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a job now, with its shares in the order of nodes."""

    job_id: JobId
    shares: tuple[Share, ...]
    partition: str = ""  # the partition in which the job starts
    time_limit_s: int | None = None  # the time limit, lowered so that the job fits; None: as requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A running job that is preempted.

    `save_s`: the grace period after the signal, in which the job can save its work; None: no grace period.
    """

    job_id: JobId
    mode: PreemptMode
    save_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A preemption of `victims` so that `job_id` can start.

    The job starts on `shares`, which are reserved for it.
    """

    job_id: JobId
    shares: tuple[Share, ...]
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A resize of an elastic job.

    The job is asked to `keep` only these nodes (all nodes: the request is withdrawn), or it gets the nodes `add` in addition.
    """

    job_id: JobId
    keep: tuple[NodeName, ...] = ()
    add: tuple[Share, ...] = ()
    for_job: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions of one pass. Each pending job is in `starts` or in `waits`.

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
