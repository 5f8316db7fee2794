"""Jobs as the controller keeps them.

States and their short codes, and the reasons for waiting, are Slurm's (squeue(1)), because users and their tools know
them. A job changes only in `hpcsched.lifecycle`. At the end: how far a training job is, as its own program reports it, and what
exit codes and signals mean, in words for people (signal(7); 128 + N of bash(1), EXIT STATUS; sysexits.h).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from hpcsched.model.frozen import frozen, replace
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Share, without_cpus
from hpcsched.model.spec import Dependency, JobSpec


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
    """Why a job waits, or why it ended, in Slurm's words."""

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
    RESERVATION_DELETED = "ReservationDeleted"
    DEADLINE = "DeadLine"
    PARTITION_DOWN = "PartitionDown"
    PARTITION_INACTIVE = "PartitionInactive"
    NODES_UNAVAILABLE = "ReqNodeNotAvail"
    LAUNCH_FAILED = "JobLaunchFailure"
    NODE_LOST = "NodeDown"  # waits for a node that does not answer
    TIME_LIMIT = "TimeLimit"
    NONZERO_EXIT = "NonZeroExitCode"
    RAISED_SIGNAL = "RaisedSignal"
    OUT_OF_MEMORY = "OutOfMemory"
    LICENSES = "Licenses"
    POWER_NOT_AVAIL = "PowerNotAvail"
    INVALID_ACCOUNT = "InvalidAccount"
    INVALID_QOS = "InvalidQOS"
    ACCOUNT_NOT_ALLOWED = "AccountNotAllowed"  # in its partition
    QOS_NOT_ALLOWED = "QOSNotAllowed"
    # Over a limit of the association (user, account) or of the QOS or partition; see `hpcsched.sched.limits`.
    ASSOC_GRP_JOBS_LIMIT = "AssocGrpJobsLimit"
    ASSOC_GRP_SUBMIT_JOBS_LIMIT = "AssocGrpSubmitJobsLimit"
    ASSOC_GRP_CPU_LIMIT = "AssocGrpCpuLimit"
    ASSOC_GRP_MEM_LIMIT = "AssocGrpMemLimit"
    ASSOC_GRP_NODE_LIMIT = "AssocGrpNodeLimit"
    ASSOC_GRP_GRES = "AssocGrpGRES"
    ASSOC_GRP_BILLING = "AssocGrpBilling"
    ASSOC_GRP_LICENSE = "AssocGrpLicense"
    ASSOC_GRP_CPU_MINUTES_LIMIT = "AssocGrpCPUMinutesLimit"
    ASSOC_GRP_MEM_MINUTES = "AssocGrpMemMinutes"
    ASSOC_GRP_GRES_MINUTES = "AssocGrpGRESMinutes"
    ASSOC_GRP_BILLING_MINUTES = "AssocGrpBillingMinutes"
    ASSOC_MAX_JOBS_LIMIT = "AssocMaxJobsLimit"
    ASSOC_MAX_SUBMIT_JOB_LIMIT = "AssocMaxSubmitJobLimit"
    ASSOC_MAX_WALL_DURATION_PER_JOB_LIMIT = "AssocMaxWallDurationPerJobLimit"
    ASSOC_MAX_CPU_PER_JOB_LIMIT = "AssocMaxCpuPerJobLimit"
    ASSOC_MAX_MEM_PER_JOB = "AssocMaxMemPerJob"
    ASSOC_MAX_NODE_PER_JOB_LIMIT = "AssocMaxNodePerJobLimit"
    ASSOC_MAX_GRES_PER_JOB = "AssocMaxGRESPerJob"
    ASSOC_MAX_BILLING_PER_JOB = "AssocMaxBillingPerJob"
    ASSOC_MAX_LICENSE_PER_JOB = "AssocMaxLicensePerJob"
    ASSOC_MAX_CPU_MINUTES_PER_JOB_LIMIT = "AssocMaxCpuMinutesPerJobLimit"
    ASSOC_MAX_MEM_MINUTES_PER_JOB = "AssocMaxMemMinutesPerJob"
    ASSOC_MAX_GRES_MINUTES_PER_JOB = "AssocMaxGRESMinutesPerJob"
    ASSOC_MAX_BILLING_MINUTES_PER_JOB = "AssocMaxBillingMinutesPerJob"
    QOS_GRP_JOBS_LIMIT = "QOSGrpJobsLimit"
    QOS_GRP_SUBMIT_JOBS_LIMIT = "QOSGrpSubmitJobsLimit"
    QOS_GRP_CPU_LIMIT = "QOSGrpCpuLimit"
    QOS_GRP_MEM_LIMIT = "QOSGrpMemLimit"
    QOS_GRP_NODE_LIMIT = "QOSGrpNodeLimit"
    QOS_GRP_GRES = "QOSGrpGRES"
    QOS_GRP_BILLING = "QOSGrpBilling"
    QOS_GRP_LICENSE = "QOSGrpLicense"
    QOS_GRP_CPU_MINUTES_LIMIT = "QOSGrpCPUMinutesLimit"
    QOS_GRP_MEM_MINUTES = "QOSGrpMemMinutes"
    QOS_GRP_GRES_MINUTES = "QOSGrpGRESMinutes"
    QOS_GRP_BILLING_MINUTES = "QOSGrpBillingMinutes"
    QOS_MAX_JOBS_PER_USER_LIMIT = "QOSMaxJobsPerUserLimit"
    QOS_MAX_SUBMIT_JOB_PER_USER_LIMIT = "QOSMaxSubmitJobPerUserLimit"
    QOS_MAX_WALL_DURATION_PER_JOB_LIMIT = "QOSMaxWallDurationPerJobLimit"
    QOS_MAX_CPU_PER_JOB_LIMIT = "QOSMaxCpuPerJobLimit"
    QOS_MAX_MEMORY_PER_JOB = "QOSMaxMemoryPerJob"
    QOS_MAX_NODE_PER_JOB_LIMIT = "QOSMaxNodePerJobLimit"
    QOS_MAX_GRES_PER_JOB = "QOSMaxGRESPerJob"
    QOS_MAX_BILLING_PER_JOB = "QOSMaxBillingPerJob"
    QOS_MAX_LICENSE_PER_JOB = "QOSMaxLicensePerJob"
    QOS_MAX_CPU_MINUTES_PER_JOB_LIMIT = "QOSMaxCpuMinutesPerJobLimit"
    QOS_MAX_MEMORY_MINUTES_PER_JOB = "QOSMaxMemoryMinutesPerJob"
    QOS_MAX_GRES_MINUTES_PER_JOB = "QOSMaxGRESMinutesPerJob"
    QOS_MAX_BILLING_MINUTES_PER_JOB = "QOSMaxBillingMinutesPerJob"
    QOS_MAX_CPU_PER_USER_LIMIT = "QOSMaxCpuPerUserLimit"
    QOS_MAX_MEMORY_PER_USER = "QOSMaxMemoryPerUser"
    QOS_MAX_NODE_PER_USER_LIMIT = "QOSMaxNodePerUserLimit"
    QOS_MAX_GRES_PER_USER = "QOSMaxGRESPerUser"
    QOS_MAX_BILLING_PER_USER = "QOSMaxBillingPerUser"
    QOS_MAX_LICENSE_PER_USER = "QOSMaxLicensePerUser"


# Other jobs of its user, account or QOS run: it waits for its turn, and its age counts.
OVER_LIMIT = frozenset([reason for reason in Reason if reason.startswith(("Assoc", "QOSGrp", "QOSMax"))])


class Hold(StrEnum):
    NONE = "none"
    USER = "user"
    ADMIN = "admin"  # only an admin can release it
    SPECIAL = "special"  # by the user, of a job requeued with State=SpecialExit


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a step ended: `code` 0..255, or `signal` > 0 if a signal killed it.

    `code` is 0 then, as in Slurm's ``code:signal``.
    """

    code: int
    signal: int = 0

    def __str__(self) -> str:
        return f"{self.code}:{self.signal}"


class Refusal(NamedTuple):
    """A node that could not start an attempt of the job, and why."""

    node: NodeName
    attempt: int
    of_exec: bool  # directory and files were there, the program was not
    why: str


@frozen
class Job:
    """A job, or one task of an array, as the controller keeps it. One row of the table `jobs`.

    Times are Unix seconds (float). `shares`: the allocation of the current or last attempt. `held_nodes`: the nodes of it that
    the attempt still holds. `outcome`: the state in which a COMPLETING job ends; a job with `requeue_wanted` returns to PENDING
    instead, as the next attempt.
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
    site: int = 0  # added to its priority by an admin
    time_limit_s: int | None = None
    asked_limit_s: int | None = None  # its time limit in the next attempt, if that differs; None: the same
    partition: str = ""  # of a pending job it may be several: a,b
    partition_asked: str = ""  # of a job with nodes: the partitions that it asked for, if several
    eligible_at_s: float | None = None  # since then it waits only for resources
    aged_s: float = 0.0  # how long it did so before, for example before it was held
    not_before_s: float | None = None  # --begin, or the pause after a requeue
    attempt: int = 0
    token: str = ""  # of the current attempt's batch step, "" while pending
    shares: tuple[Share, ...] = ()
    held_nodes: tuple[NodeName, ...] = ()
    claimed_nodes: tuple[NodeName, ...] = ()  # nodes without the batch step that have claimed their part
    lease_s: float | None = None  # a node without contact for so long has ended the attempt; None: it keeps it
    allocated_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    exit: ExitStatus | None = None
    outcome: JobState | None = None
    requeue_wanted: bool = False
    ended_by_uid: int | None = None  # the user who cancelled it
    restarts: int = 0
    suspended_at_s: float | None = None  # the attempt is suspended since then
    suspended_s: float | None = None  # how long it was suspended before; None: never
    suspended_for: JobId | None = None  # the job that has its cpus; None: a user suspended it
    preempted_by: JobId | None = None  # the preemptor of the present or the last attempt
    save_s: float | None = None  # grace period after the signal to save its work
    leaving: tuple[Share, ...] = ()  # given back by the running job, held until their nodes are clear
    joining: tuple[Share, ...] = ()  # given to the running job, not claimed by their nodes yet
    left_nodes: tuple[NodeName, ...] = ()  # nodes that this attempt has left, once for each time
    barred_nodes: tuple[NodeName, ...] = ()  # nodes that refused their part; they are not asked again
    deaths: int = 0  # attempts that were requeued because a rank was killed
    saved_step: int = 0  # step of the checkpoint that the last of them left
    refusals: tuple[Refusal, ...] = ()  # nodes that could not start it; it is not sent there again
    wanted_nodes: tuple[NodeName, ...] = ()  # it is asked to keep only these nodes,
    wanted_at_s: float | None = None  # last at this time
    generation: int = 0  # how often the allocation of the attempt changed
    reserved_shares: tuple[Share, ...] = ()  # of a pending job: jobs are preempted so that it starts on these
    charged_until_s: float | None = None  # its resources are charged until then; None: not yet
    charged_cpu_s: float = 0.0  # of all attempts: resource-seconds, node by node
    charged_mem_mib_s: float = 0.0
    charged_gpu_s: float = 0.0
    # Changed since submission; None: as in the spec.
    dependency_set: tuple[Dependency, ...] | None = None
    dependency_any_set: bool = False
    array_limit_set: int | None = None
    deadline_set_s: int | None = None  # 0: none any more
    time_min_set_s: int | None = None  # 0: none any more
    reservation_set: str | None = None
    account_set: str | None = None
    qos_set: str | None = None
    expected_start_s: float | None = field(default=None, compare=False)  # the last plan's estimate; not stored
    component: int | None = None  # it is this component of a heterogeneous job: see `component`; never stored

    @property
    def holding(self) -> tuple[Share, ...]:
        """Return the shares that it holds now; without cpus while they are lent to another job."""
        every = (*self.shares, *self.leaving, *self.joining)
        held = tuple(share for share in every if share.node in self.held_nodes)
        return held if self.suspended_for is None else without_cpus(held)

    def stay_on(self, node: NodeName) -> int:
        """Return how often the attempt has lost or given back `node`, for launch tokens."""
        return self.left_nodes.count(node)

    def spool_on(self, node: NodeName) -> str:
        """Return the spool of `node` that the attempt is launched into; "": not known."""
        every = (*self.shares, *self.leaving, *self.joining)
        return next((share.spool for share in every if share.node == node), "")

    @property
    def number(self) -> int:
        """Return its job number; components have consecutive numbers."""
        return self.id + (self.component or 0)

    @property
    def display_id(self) -> str:
        """Return `12`, or `10_3` for an array task, `12+1` for a component of a heterogeneous job."""
        if self.component is not None:
            return f"{self.id}+{self.component}"
        if self.array_job_id is None:
            return str(self.id)
        return f"{self.array_job_id}_{self.array_task_id}"

    @property
    def dependency(self) -> tuple[Dependency, ...]:
        """Return the dependencies that hold now."""
        return self.spec.dependency if self.dependency_set is None else self.dependency_set

    @property
    def dependency_any(self) -> bool:
        """Say whether one of `dependency` is enough."""
        return self.spec.dependency_any if self.dependency_set is None else self.dependency_any_set

    @property
    def array_limit(self) -> int:
        """Return how many tasks of its array may run at once; 0: no limit."""
        if self.array_limit_set is not None:
            return self.array_limit_set
        return self.spec.array.limit if self.spec.array is not None and self.array_job_id is not None else 0

    @property
    def deadline_at_s(self) -> int | None:
        """Return when it must have ended, in Unix seconds; None: no deadline."""
        return self.spec.deadline_at_s if self.deadline_set_s is None else self.deadline_set_s or None

    @property
    def time_min_s(self) -> int | None:
        """Return the least time limit with which it may start earlier; None: its own."""
        return self.spec.time_min_s if self.time_min_set_s is None else self.time_min_set_s or None

    @property
    def accrued_from_s(self) -> float | None:
        """Return since when its age counts, with earlier waits; None: it does not now."""
        return None if self.eligible_at_s is None else self.eligible_at_s - self.aged_s

    @property
    def account(self) -> str:
        """Return the account that it is charged to."""
        return self.spec.account if self.account_set is None else self.account_set

    @property
    def qos(self) -> str:
        """Return its QOS; "": none."""
        return self.spec.qos if self.qos_set is None else self.qos_set

    @property
    def reservation(self) -> str:
        """Return its reservation; "": none."""
        return self.spec.reservation if self.reservation_set is None else self.reservation_set


# ----- the components of a heterogeneous job, each as if it were a job, for lists and environments
# A heterogeneous job is one job, with one state and one batch script; its components differ in name and resources. The first
# has the job's number, the others the following numbers, which no other job gets.
#
# Source: "Heterogeneous Job Support" of Slurm's documentation.


MAX_COMPONENTS = 128  # as in Slurm

_OWN = (
    "name", "nodes_min", "nodes_max", "nodes_given", "ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_task_given",
    "mem_per_node_mib", "mem_per_cpu_mib", "gpus_per_node", "gpus_total", "gpus_per_task", "shards_per_node", "exclusive",
    "overcommit", "nodelist", "exclude", "constraint", "prefer", "mincpus", "tmp_mib", "contiguous", "spread", "distribution",
    "hints",
)  # fmt: skip


def components_of(job: Job) -> list[Job]:
    """Return the components of `job`; the job itself if it has none or is one."""
    if not job.spec.components or job.component is not None:
        return [job]
    return [component(job, number) for number in range(1 + len(job.spec.components))]


def component(job: Job, number: int) -> Job:
    """Return component `number` of the heterogeneous `job`."""
    spec = job.spec
    if number:
        own = spec.components[number - 1]
        spec = replace(spec, **{name: getattr(own, name) for name in _OWN})
    shares = tuple([share for share in job.shares if share.component == number])
    names = {share.node for share in shares}
    return replace(
        job,
        component=number,
        spec=spec,
        shares=shares,
        held_nodes=tuple([node for node in job.held_nodes if node in names]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why a rank of a training job failed. `echo`: it only noticed that another one was gone."""

    job_id: JobId
    attempt: int
    rank: int
    ranks: int
    node: NodeName
    at_s: float
    echo: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUse:
    """What a running attempt of a job uses on all its nodes, from their last samples."""

    at_s: float
    cpu_s: float  # since the attempt began
    busy_cpus: float | None  # between the last two samples
    memory_bytes: float
    processes: float
    gpu_ratio: float | None  # mean utilization of its GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """The state of one attempt of a job as of `at_s`. 0 of steps and rates: not known."""

    job_id: JobId
    attempt: int
    at_s: float
    step: int
    total_steps: int
    loss: float | None
    samples_per_s: float
    steps_per_s: float
    checkpoint_step: int
    checkpoint_at_s: float | None
    goodput: float | None  # steps that count: their part of the time since the run first began
    note: str  # what a person should know: which rank the others wait for, say
    directory: str = ""  # of its checkpoints; "": not known

    @property
    def ends_at_s(self) -> float | None:
        """Return when the last step ends at the present rate; None: unknown."""
        if self.total_steps <= 0 or self.steps_per_s <= 0:
            return None
        return self.at_s + max(0, self.total_steps - self.step) / self.steps_per_s


FROM_SIGNAL = 128  # a shell, srun and Open MPI's mpirun add this to the signal that ended a program
EX_TEMPFAIL = 75

_HINTS = {
    signal.SIGKILL: "perhaps memory ran out: see MaxRSS in hacct and --mem",
    signal.SIGSEGV: "it used memory that is not its own",
    signal.SIGBUS: "it used memory that is not there; perhaps a file system is full",
    signal.SIGABRT: "the program or a library gave up",
    signal.SIGILL: "the program was built for another processor",
}
_CODES = {
    EX_TEMPFAIL: "it asks to be queued again; that needs --requeue",
    126: "a command in it could not be executed",
    127: "a command in it was not found",
}


def signal_of(code: int, signum: int) -> int:
    """Return the signal that ended a program which left this exit status; 0: none did."""
    if signum:
        return signum
    return code - FROM_SIGNAL if FROM_SIGNAL < code < FROM_SIGNAL + signal.NSIG else 0


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def exit_words(code: int, signum: int) -> str:
    """Return the meaning of an exit status: ``killed by SIGKILL; ...``; "" if it has none."""
    if not (ended_by := signal_of(code, signum)):
        return _CODES.get(code, "")
    hint = next((text for number, text in _HINTS.items() if number == ended_by), "")
    return f"killed by {signal_name(ended_by)}" + (f"; {hint}" if hint else "")
