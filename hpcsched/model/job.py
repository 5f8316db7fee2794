"""Jobs as the controller keeps them.

States and their short codes, and the reasons for waiting, are Slurm's (squeue(1)), because users and their tools know
them. A job changes only in `hpcsched.lifecycle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.resources import Share
from hpcsched.model.spec import JobSpec


class JobState(StrEnum):
    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"  # has its nodes; its batch step is being started
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"  # has ended or is being ended; some node still has processes of it
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    DEADLINE = "DEADLINE"
    BOOT_FAIL = "BOOT_FAIL"  # could not be launched


SHORT_CODES = {
    JobState.PENDING: "PD",
    JobState.CONFIGURING: "CF",
    JobState.RUNNING: "R",
    JobState.SUSPENDED: "S",
    JobState.COMPLETING: "CG",
    JobState.COMPLETED: "CD",
    JobState.FAILED: "F",
    JobState.CANCELLED: "CA",
    JobState.TIMEOUT: "TO",
    JobState.NODE_FAIL: "NF",
    JobState.OUT_OF_MEMORY: "OOM",
    JobState.PREEMPTED: "PR",
    JobState.DEADLINE: "DL",
    JobState.BOOT_FAIL: "BF",
}

ACTIVE = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING})
FINAL = frozenset(JobState) - ACTIVE - {JobState.PENDING}


class Reason(StrEnum):
    """Why a job waits (or how it came to its end), in Slurm's words."""

    NONE = "None"
    PRIORITY = "Priority"
    RESOURCES = "Resources"
    DEPENDENCY = "Dependency"
    DEPENDENCY_NEVER = "DependencyNeverSatisfied"
    BEGIN_TIME = "BeginTime"
    HELD_USER = "JobHeldUser"
    HELD_ADMIN = "JobHeldAdmin"
    ARRAY_LIMIT = "JobArrayTaskLimit"
    RESERVATION = "Reservation"
    PARTITION_DOWN = "PartitionDown"
    NODES_UNAVAILABLE = "ReqNodeNotAvail"
    LAUNCH_FAILED = "JobLaunchFailure"
    NODE_LOST = "NodeDown"  # waits for word from a node that does not answer
    TIME_LIMIT = "TimeLimit"
    NONZERO_EXIT = "NonZeroExitCode"
    RAISED_SIGNAL = "RaisedSignal"
    OUT_OF_MEMORY = "OutOfMemory"


class Hold(StrEnum):
    NONE = "none"
    USER = "user"
    ADMIN = "admin"  # only an admin can release it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a step ended: `code` 0..255, or `signal` > 0 if one killed it (then `code` is 0), as in Slurm's ``code:signal``."""

    code: int
    signal: int = 0

    def __str__(self) -> str:
        return f"{self.code}:{self.signal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, or one task of an array, as the controller keeps it. One row of the table `jobs`.

    Times are Unix seconds (float). `shares` are what the current or last attempt holds or held; `held_nodes` says
    which of
    them it still holds. `outcome` is the state that a COMPLETING job will end in; a job with `requeue_wanted` goes back
    to PENDING instead, as the next attempt.
    """

    id: JobId
    spec_id: int  # the row of the table `specs`: array tasks and same scripts share one
    spec: JobSpec
    uid: int
    user: str
    submitted_at_s: float
    array_job_id: JobId | None = None
    array_task_id: int | None = None
    state: JobState = JobState.PENDING
    reason: Reason = Reason.NONE
    reason_detail: str = ""  # in words, for people
    hold: Hold = Hold.NONE
    priority_set: int | None = None  # an admin's or user's fixed priority
    nice: int = 0
    time_limit_s: int | None = None
    partition: str = ""
    eligible_at_s: float | None = None  # since when nothing but resources keeps it waiting
    not_before_s: float | None = None  # --begin, or the pause after a requeue
    attempt: int = 0
    token: str = ""  # of the current attempt's batch step, "" while pending
    shares: tuple[Share, ...] = ()
    held_nodes: tuple[NodeName, ...] = ()
    claimed_nodes: tuple[NodeName, ...] = ()  # of those without the batch step: which have taken their part
    lease_s: float | None = (
        None  # a node that has heard nothing for so long has nothing left of the attempt; None: keep
    )
    allocated_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    exit: ExitStatus | None = None
    outcome: JobState | None = None
    requeue_wanted: bool = False
    ended_by_uid: int | None = None  # who cancelled it
    restarts: int = 0
    charged_cpu_s: float = 0.0  # of all attempts: resources times the time that they were held, node by node
    charged_mem_mib_s: float = 0.0
    charged_gpu_s: float = 0.0
    expected_start_s: float | None = field(default=None, compare=False)  # the last plan's estimate; not stored

    @property
    def display_id(self) -> str:
        """`12`, or `10_3` for a task of an array."""
        if self.array_job_id is None:
            return str(self.id)
        return f"{self.array_job_id}_{self.array_task_id}"
