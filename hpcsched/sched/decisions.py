"""What a plan decides, as values: who starts on what, who makes room for whom, who changes in size, and why the others wait.

Knows nothing of how it came to that: see `plan`, `preempt` and `elastic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcsched.model.accounting import PreemptMode
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.resources import Share
from hpcsched.sched.queue.eligible import Wait
from hpcsched.sched.snapshot import Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start this job now with these shares (in the order of nodes)."""

    job_id: JobId
    shares: tuple[Share, ...]
    partition: str = ""  # the one that it got, of those that it asked for
    time_limit_s: int | None = None  # its time limit was lowered to this so that it fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A running job that makes room. `save_s`: it is told by a signal to save what it has, for so long."""

    job_id: JobId
    mode: PreemptMode
    save_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """`victims` make room so that `job_id` can start on `shares`, which are kept for it."""

    job_id: JobId
    shares: tuple[Share, ...]
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """An elastic job is asked to `keep` only these of its nodes (all: no longer), or gets `add` as well."""

    job_id: JobId
    keep: tuple[NodeName, ...] = ()
    add: tuple[Share, ...] = ()
    for_job: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every waiting job of the snapshot is in `starts` or has its `waits` entry. Jobs that wait alike share one `Wait`.

    What is beyond starts and waits is decided in `preempt`: who makes room for whom, which jobs that stand still go on, and
    for which nothing is kept any more; which elastic jobs shrink and grow.
    """

    starts: tuple[Start, ...]
    waits: Mapping[JobId, Wait]
    preemptions: tuple[Preemption, ...] = ()
    resumes: tuple[JobId, ...] = ()
    given_up: tuple[JobId, ...] = ()
    resizes: tuple[Resize, ...] = ()
    priorities: Mapping[JobId, int] = field(default_factory=dict, compare=False)  # of the jobs that stood in line
    promises: Mapping[JobId, Promise] = field(default_factory=dict)  # for the snapshot of the next plan
