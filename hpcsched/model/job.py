"""Jobs as the controller keeps them.

States and their short codes, and the reasons for waiting, are Slurm's (squeue(1)), because users and their tools know
them. A job changes only in `hpcsched.lifecycle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from hpcsched.model.frozen import frozen, replace
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.resources import Share, without_cpus
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
    RESERVATION_DELETED = "ReservationDeleted"
    DEADLINE = "DeadLine"
    PARTITION_DOWN = "PartitionDown"
    PARTITION_INACTIVE = "PartitionInactive"
    NODES_UNAVAILABLE = "ReqNodeNotAvail"
    LAUNCH_FAILED = "JobLaunchFailure"
    NODE_LOST = "NodeDown"  # waits for word from a node that does not answer
    TIME_LIMIT = "TimeLimit"
    NONZERO_EXIT = "NonZeroExitCode"
    RAISED_SIGNAL = "RaisedSignal"
    OUT_OF_MEMORY = "OutOfMemory"
    LICENSES = "Licenses"
    INVALID_ACCOUNT = "InvalidAccount"
    INVALID_QOS = "InvalidQOS"
    ACCOUNT_NOT_ALLOWED = "AccountNotAllowed"  # in its partition
    QOS_NOT_ALLOWED = "QOSNotAllowed"
    # Over a limit of the association (user, account) or of the QOS or partition; see `hpcsched.sched.limits.rules`.
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


# Others of its user, account or QOS run: it waits for its turn like everybody, and its age counts.
OVER_LIMIT = frozenset([reason for reason in Reason if reason.startswith(("Assoc", "QOSGrp", "QOSMax"))])


class Hold(StrEnum):
    NONE = "none"
    USER = "user"
    ADMIN = "admin"  # only an admin can release it
    SPECIAL = "special"  # the user's, of a job that was requeued with State=SpecialExit


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a step ended: `code` 0..255, or `signal` > 0 if one killed it (then `code` is 0), as in Slurm's ``code:signal``."""

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
    site: int = 0  # what an admin adds to its priority
    time_limit_s: int | None = None
    asked_limit_s: int | None = (
        None  # of a job that holds nodes whose limit was lowered or changed: the one of its next life; None: the same
    )
    partition: str = ""  # while it waits it may be several: a,b
    partition_asked: str = (
        ""  # of a job that holds nodes: the several that it was given this one of; "": this one alone
    )
    eligible_at_s: float | None = None  # since when nothing but resources keeps it waiting
    aged_s: float = 0.0  # for how long nothing else did before that: what it waited before it was held, say
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
    suspended_at_s: float | None = None  # since when the attempt stands still
    suspended_s: float | None = None  # for how long it did before that; None: it never has
    suspended_for: JobId | None = None  # the job that has its cpus meanwhile; None: a person suspended it
    preempted_by: JobId | None = None  # for which job the present attempt is being ended, or the last one was
    save_s: float | None = None  # it is being ended by the signal that lets it save what it has: so long it may take
    leaving: tuple[Share, ...] = ()  # given back by the running job; it holds them until their nodes are clear
    joining: tuple[Share, ...] = ()  # given to the running job; their nodes have not claimed them yet
    left_nodes: tuple[NodeName, ...] = ()  # that this attempt had or was given, once for each time
    barred_nodes: tuple[NodeName, ...] = ()  # of these: that refused to take their part, and are not asked again
    deaths: int = 0  # attempts that ended because a rank was killed, and were followed by another
    saved_step: int = 0  # the checkpoint that the last of those left
    refusals: tuple[Refusal, ...] = ()  # nodes that could not start it; it is not sent there again
    wanted_nodes: tuple[NodeName, ...] = ()  # it has been asked to keep these alone,
    wanted_at_s: float | None = None  # last of all then
    generation: int = 0  # how often the attempt has heard of another allocation
    reserved_shares: tuple[Share, ...] = ()  # of a waiting job: others are being ended so that it starts on these
    charged_until_s: float | None = None  # what it holds has been charged up to then; None: nothing yet
    charged_cpu_s: float = 0.0  # of all attempts: resources times the time that they were held, node by node
    charged_mem_mib_s: float = 0.0
    charged_gpu_s: float = 0.0
    # What was changed since submission; None: as the spec has it.
    dependency_set: tuple[Dependency, ...] | None = None
    dependency_any_set: bool = False
    array_limit_set: int | None = None
    deadline_set_s: int | None = None  # 0: none any more
    time_min_set_s: int | None = None  # 0: none any more
    reservation_set: str | None = None
    account_set: str | None = None
    qos_set: str | None = None
    expected_start_s: float | None = field(default=None, compare=False)  # the last plan's estimate; not stored
    component: int | None = None  # it is not a job but that component of one: see `components`; never stored

    @property
    def holding(self) -> tuple[Share, ...]:
        """What it holds now, of the nodes that it has not given back: without the cpus while another job has them."""
        every = (*self.shares, *self.leaving, *self.joining)
        held = tuple(share for share in every if share.node in self.held_nodes)
        return held if self.suspended_for is None else without_cpus(held)

    def stay_on(self, node: NodeName) -> int:
        """Return how often the attempt has lost or given back `node` before: what is launched there bears it."""
        return self.left_nodes.count(node)

    def spool_on(self, node: NodeName) -> str:
        """Return the spool of `node` that the attempt is launched into; "": not known."""
        every = (*self.shares, *self.leaving, *self.joining)
        return next((share.spool for share in every if share.node == node), "")

    @property
    def number(self) -> int:
        """Its own number: of a component one behind the job's."""
        return self.id + (self.component or 0)

    @property
    def display_id(self) -> str:
        """`12`, or `10_3` for a task of an array, `12+1` for a component of a heterogeneous job."""
        if self.component is not None:
            return f"{self.id}+{self.component}"
        if self.array_job_id is None:
            return str(self.id)
        return f"{self.array_job_id}_{self.array_task_id}"

    @property
    def dependency(self) -> tuple[Dependency, ...]:
        """What it waits for."""
        return self.spec.dependency if self.dependency_set is None else self.dependency_set

    @property
    def dependency_any(self) -> bool:
        """Whether one of `dependency` is enough."""
        return self.spec.dependency_any if self.dependency_set is None else self.dependency_any_set

    @property
    def array_limit(self) -> int:
        """How many tasks of its array may run at once, 0: as many as can."""
        if self.array_limit_set is not None:
            return self.array_limit_set
        return self.spec.array.limit if self.spec.array is not None and self.array_job_id is not None else 0

    @property
    def deadline_at_s(self) -> int | None:
        """When it must have ended."""
        return self.spec.deadline_at_s if self.deadline_set_s is None else self.deadline_set_s or None

    @property
    def time_min_s(self) -> int | None:
        """To what its time limit may be lowered so that it starts earlier; None: it may not."""
        return self.spec.time_min_s if self.time_min_set_s is None else self.time_min_set_s or None

    @property
    def accrued_from_s(self) -> float | None:
        """Since when its age counts, what it waited before it was held added; None: it does not count now."""
        return None if self.eligible_at_s is None else self.eligible_at_s - self.aged_s

    @property
    def account(self) -> str:
        """The account that it is charged to."""
        return self.spec.account if self.account_set is None else self.account_set

    @property
    def qos(self) -> str:
        """Its quality of service, "" for none."""
        return self.spec.qos if self.qos_set is None else self.qos_set

    @property
    def reservation(self) -> str:
        """The reservation that it runs in, "" for none."""
        return self.spec.reservation if self.reservation_set is None else self.reservation_set


# ----- the components of a heterogeneous job, each as if it were a job: what lists and environments show of it
# A heterogeneous job is one job, with one state and one batch script; its components differ in name and in what they have of
# which nodes. The first one has the job's own number, the others those behind it, which no other job gets.
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
    """Return the components of `job`; of one that has none, or is one, itself."""
    if not job.spec.components or job.component is not None:
        return [job]
    return [component(job, number) for number in range(1 + len(job.spec.components))]


def component(job: Job, number: int) -> Job:
    """Return component `number` of the heterogeneous `job`."""
    spec = job.spec
    if number:
        its = spec.components[number - 1]
        spec = replace(spec, **{name: getattr(its, name) for name in _OWN})
    shares = tuple([share for share in job.shares if share.component == number])
    names = {share.node for share in shares}
    return replace(
        job,
        component=number,
        spec=spec,
        shares=shares,
        held_nodes=tuple([node for node in job.held_nodes if node in names]),
    )
