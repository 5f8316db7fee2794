"""The snapshot for a plan: small values made of the controller's jobs and nodes.

A `SnapshotCache` keeps the view of a job while the controller holds the same `Job` value. So a snapshot of ten thousand pending
jobs costs little more than one look-up per job. Times are Unix seconds. No clock, no policy.

As JSON, for inspection and for planning it again, a snapshot and its policy are versioned. Jobs have only the fields that the
planner needs: no scripts, environments or paths. Fields of jobs with their default value are left out, because ten thousand
jobs have mostly equal fields. Reservations are stored; the reserved intervals are computed from them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from hpcsched.errors import ProtocolError
from hpcsched.lifecycle.job import cut_at_s, suspended_s
from hpcsched.model.accounting import NO_ACCOUNTING, Accounting, Association
from hpcsched.model.codec import value_from_json, value_to_json
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, Hold, Job, JobState, Refusal
from hpcsched.model.node import Circuit, Gpu, Link, Node, Partition, PartitionState, Power, Share
from hpcsched.model.reservation import Reservation, ReservedInterval, at, reserved_intervals_of
from hpcsched.model.spec import Dependency, DependencyKind, JobSpec
from hpcsched.model.tariff import NO_TARIFF, Tariff
from hpcsched.model.units import known_limit_s
from hpcsched.sched.experience import NO_EXPERIENCE, Experience
from hpcsched.sched.fairshare import UsedResources
from hpcsched.sched.place.features import matches
from hpcsched.sched.place.gpus import GpuSlot, Units, all_units, gpu_slots
from hpcsched.sched.place.request import LicenseCounts, ResourceRequest, Shape, request_of, time_limit_in, without_nodes
from hpcsched.sched.policy import Policy

OFF_WEIGHT = 1 << 32  # a node that must be switched on first is used after all others
UNKNOWN_TMP_MIB = 1 << 53  # a node without tmp_disk satisfies any --tmp
LEAST_LIMIT_S = 1  # minimum of a time limit that is cut for a deadline
_NOT_ENDING = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED})


@dataclass(frozen=True, kw_only=True)  # no __slots__, for the cached properties
class NodeView:
    """The resources of a node, and the reason why no job can start on it now.

    `why_not`: the reason; "": jobs can start.
    """

    name: NodeName
    cpus: int
    mem_mib: int
    gpus: tuple[Gpu, ...] = ()
    features: frozenset[str] = frozenset()
    weight: int = 1
    switch: str = ""
    speed: float = 0.0  # measured, relative to other nodes; 0: not known
    gemm_gflops: float = 0.0  # measured, of its slowest GPU; 0: not known
    link_mbps: int = 0  # of its network link; 0: not known
    near: tuple[tuple[int, int], ...] = ()  # see `hpcsched.model.node.MeasuredNode`
    link_bit: int = 0
    tmp_mib: int = 0
    idle_watts: float = 0.0  # as declared, without GPUs
    peak_watts: float = 0.0
    gpu_watts: float = 0.0  # of each GPU
    why_not: str = ""
    awaited: bool = False  # it has not answered yet since the controller started, and is not down

    @property
    def usable(self) -> bool:
        return not self.why_not

    @cached_property
    def slots(self) -> tuple[GpuSlot, ...]:
        return gpu_slots(self.gpus)

    @cached_property
    def units(self) -> Units:
        """Return the units of its `slots` when it is empty."""
        return all_units(self.gpus, self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSize:
    """The size of a running elastic job.

    `view`: the job as it requested its nodes. `moving`: the job is receiving more nodes. `wanted`: the nodes that it was asked
    at `wanted_at_s` to keep. `leaving`: nodes that it is giving back. `barred`: nodes that it cannot get again.
    """

    view: PendingJob
    nodes_min: int
    nodes_max: int
    wanted: tuple[NodeName, ...] = ()
    wanted_at_s: float | None = None
    leaving: tuple[NodeName, ...] = ()
    barred: tuple[NodeName, ...] = ()
    moving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that holds nodes. `ends_at_s`: the end by its time limit; None: it has none."""

    id: JobId
    display_id: str
    shares: tuple[Share, ...]
    began_at_s: float
    ends_at_s: float | None = None
    array_job_id: JobId | None = None
    uid: int = 0
    name: str = ""
    user: str = ""
    account: str = ""
    qos: str = ""
    partition: str = ""
    licenses: LicenseCounts = ()
    gpu_power: int = 0  # watts to which its GPUs are limited; 0: not limited
    runs: bool = False  # it is not starting, suspended or ending
    ending: bool = False
    may_run_again: bool | None = False  # whether it may be requeued; None: by the rules of the cluster
    saved_at_s: float | None = None  # its last checkpoint that was reported
    elastic: ElasticSize | None = None
    lent_shares: tuple[Share, ...] = ()  # suspended for a preemptor: the shares that it will get again


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJob:
    """A pending job.

    `since_s`: start of its age; None while it waits for something other than resources.
    """

    id: JobId
    display_id: str
    partition: str
    request: ResourceRequest
    submitted_at_s: float
    since_s: float | None = None
    nice: int = 0
    site: int = 0
    priority_set: int | None = None
    hold: Hold = Hold.NONE
    not_before_s: float | None = None
    dependency: tuple[Dependency, ...] = ()
    dependency_any: bool = False
    array_job_id: JobId | None = None
    array_task_id: int | None = None
    array_limit: int = 0
    uid: int = 0
    name: str = ""
    deadline_at_s: float | None = None
    reservation: str = ""
    reserved_shares: tuple[Share, ...] = ()  # jobs are preempted there so that this job can start
    others: tuple[PendingJob, ...] = ()  # its views in the other partitions that it requests
    user: str = ""
    account: str = ""
    qos: str = ""
    licenses: LicenseCounts = ()
    gpu_power: int = 0
    cheap_by_s: float | None = None  # it waits for cheap energy, and ends by then
    switches_wait_s: float | None = None  # time of its wait for few switches; None: the time of the policy
    time_min_s: int | None = None  # its time limit may be lowered to this, so that it starts earlier or at all
    lowers: bool = False  # --time-min was given: the limit that it starts with becomes its time limit
    free_to_go: bool = True  # no hold, begin time, dependency or array limit: these checks are skipped


class PromisedPart(NamedTuple):
    """The part of a promise on one node.

    It has tasks, and `use`: cpus, memory in MiB and units of the GPU `slots`.
    """

    node: NodeName
    tasks: int
    use: tuple[int, int, Units]
    slots: tuple[GpuSlot, ...]
    component: int = 0  # of a heterogeneous job


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The start that an earlier pass promised to a pending job.

    The job starts at `start_s` at the latest, on these `parts` of nodes.
    """

    job_id: JobId
    partition: str
    request: ResourceRequest
    start_s: float
    parts: tuple[PromisedPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFact:
    """The facts of a job that dependencies refer to."""

    id: JobId
    state: JobState
    array_task_id: int | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLedger:
    """Accounts, limits, licences and past usage.

    `fairshare`: the factor (0..1) of each association, best first. `used`: decayed usage of
    resources that were given back; running jobs are not included.
    """

    accounting: Accounting = NO_ACCOUNTING
    fairshare: tuple[tuple[Association, float], ...] = ()
    used: tuple[UsedResources, ...] = ()


NO_USAGE = UsageLedger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The complete input of a plan, except the policy.

    `facts`: jobs that pending jobs depend on, by job id or array id.
    """

    now_s: float
    nodes: tuple[NodeView, ...]
    partitions: Mapping[str, Partition]
    running: tuple[RunningJob, ...] = ()
    pending: tuple[PendingJob, ...] = ()
    facts: Mapping[int, tuple[JobFact, ...]] = field(default_factory=lambda: MappingProxyType({}))
    ledger: UsageLedger = NO_USAGE
    reservations: tuple[Reservation, ...] = ()
    reserved_intervals: tuple[ReservedInterval, ...] = ()  # from these reservations
    promises: Mapping[JobId, Promise] = field(default_factory=lambda: MappingProxyType({}))  # of the previous pass
    experience: Experience = NO_EXPERIENCE
    tariff: Tariff = NO_TARIFF
    circuits: tuple[Circuit, ...] = ()


class SnapshotCache:
    """The views of pending jobs, which are kept between snapshots.

    Equal requests and shapes become one object.
    """

    def __init__(self) -> None:
        self.pending: dict[JobId, tuple[Job, PendingJob]] = {}
        self._partitions: dict[str, Partition] = {}
        self._requests: dict[tuple[int, str, int | None, tuple[Refusal, ...]], ResourceRequest] = {}
        self._shapes: dict[Shape, Shape] = {}
        self._specs: dict[int, JobSpec] = {}  # keeps them alive, because their id() is the key above

    def follow(self, partitions: Mapping[str, Partition]) -> None:
        """Drop all views if the partitions have changed."""
        if partitions != self._partitions:
            self._partitions = dict(partitions)
            self.pending = {}
            self._forget_requests()

    def request(self, job: Job, partition: Partition) -> ResourceRequest:
        """Return the request of `job`; jobs with the same specification share the object."""
        key = (id(job.spec), partition.name, job.time_limit_s, job.refusals)
        request = self._requests.get(key)
        if request is None:
            made = request_of(job.spec, partition, time_limit_s=job.time_limit_s)
            shape = without_nodes(made.shape, [refusal.node for refusal in job.refusals])
            shape = self._shapes.setdefault(shape, shape)
            request = self._requests[key] = ResourceRequest(shape=shape, time_limit_s=made.time_limit_s)
            self._specs[id(job.spec)] = job.spec
        return request

    def prepare(self, job: Job, partitions: Mapping[str, Partition]) -> None:
        """Make the view of a waiting job before the next snapshot needs it."""
        self.follow(partitions)
        if job.state is JobState.PENDING and not job.held_nodes:
            self.pending[job.id] = job, pending_job(job, partitions, default_of(partitions), self)

    def keep_only(self, waiting: Mapping[JobId, tuple[Job, PendingJob]]) -> None:
        """Keep only `waiting`; drop the requests if they are many more than the jobs."""
        self.pending = dict(waiting)
        if len(self._requests) > 1000 + 2 * len(self.pending):
            self._forget_requests()

    def _forget_requests(self) -> None:
        self._requests.clear()
        self._shapes.clear()
        self._specs.clear()


def default_of(partitions: Mapping[str, Partition]) -> str:
    """Return the name of the default partition; empty if there is none."""
    return next((part.name for part in partitions.values() if part.default), "")


def snapshot_of(
    jobs: Iterable[Job],
    nodes: Iterable[Node],
    partitions: Iterable[Partition],
    now_s: float,
    cache: SnapshotCache | None = None,
    ledger: UsageLedger = NO_USAGE,
    reservations: Iterable[Reservation] = (),
    promises: Mapping[JobId, Promise] = MappingProxyType({}),
    experience: Experience = NO_EXPERIENCE,
    held_back: Container[JobId] = frozenset(),
    tariff: Tariff = NO_TARIFF,
    circuits: tuple[Circuit, ...] = (),
) -> Snapshot:
    """Return the snapshot of the cluster at `now_s`.

    `jobs`: all pending and active jobs, and at least the ended jobs that a pending job depends on. Any other job in a dependency
    counts as ended long ago. `held_back`: those that cannot start now, so that they are not planned.
    """
    cache = cache if cache is not None else SnapshotCache()
    jobs = tuple(jobs)
    parts = {partition.name: partition for partition in partitions}
    default = default_of(parts)
    cache.follow(parts)
    current = tuple(at(reservation, now_s) for reservation in reservations)
    pending = _pending_jobs([job for job in jobs if job.id not in held_back], parts, default, cache)
    return Snapshot(
        now_s=now_s,
        nodes=tuple(node_view(node) for node in nodes),
        partitions=parts,
        running=_running_jobs(jobs, parts, default, now_s, current, cache),
        pending=pending,
        facts=_facts(jobs, pending),
        ledger=ledger,
        reservations=current,
        reserved_intervals=reserved_intervals_of(current, now_s),
        promises=promises,
        experience=experience,
        tariff=tariff,
        circuits=circuits,
    )


def _pending_jobs(
    jobs: Sequence[Job], partitions: Mapping[str, Partition], default: str, cache: SnapshotCache
) -> tuple[PendingJob, ...]:
    waiting: dict[JobId, tuple[Job, PendingJob]] = {}
    for job in jobs:
        if job.state is JobState.PENDING and not job.held_nodes:
            known = cache.pending.get(job.id)
            if known is None or known[0] is not job:
                known = (job, pending_job(job, partitions, default, cache))
            waiting[job.id] = known
    cache.keep_only(waiting)
    return tuple([view for _, view in waiting.values()])


def _running_jobs(
    jobs: Sequence[Job],
    partitions: Mapping[str, Partition],
    default: str,
    now_s: float,
    reservations: Iterable[Reservation],
    cache: SnapshotCache,
) -> tuple[RunningJob, ...]:
    by_name = {reservation.name: reservation for reservation in reservations}
    running = []
    for job in jobs:
        if job.state in ACTIVE or job.held_nodes:
            view = running_job(job, partitions, default, now_s, by_name.get(job.reservation))
            running.append(replace(view, elastic=_elastic(job, view, partitions, cache)) if job.spec.elastic else view)
    return tuple(running)


def relaxed(job: PendingJob, now_s: float, max_switch_wait_s: float) -> PendingJob:
    """Return `job` with its request at `now_s`.

    After its wait for few switches it accepts more.
    """
    until_s = switches_matter_until_s(job.since_s, job.switches_wait_s, max_switch_wait_s)
    if not job.request.shape.switches or until_s is None or now_s < until_s:
        return job
    return replace(job, request=replace(job.request, shape=replace(job.request.shape, switches=0)))


def switches_matter_until_s(since_s: float | None, own_s: float | None, max_switch_wait_s: float) -> float | None:
    """Return the time until which a job waits for few switches.

    That is `own_s` after `since_s`, or `max_switch_wait_s` after it if `own_s` is None.
    """
    return since_s + (own_s if own_s is not None else max_switch_wait_s) if since_s is not None else None


def allows(shape: Shape, node: NodeView) -> bool:
    """Say whether `shape` may use `node` at all.

    It may if the node is not excluded, is large enough, and has the features.
    """
    if shape.components:
        return any(allows(component, node) for component in shape.components)
    if shape.exclude and node.name in shape.exclude:
        return False
    if shape.mincpus > node.cpus or shape.tmp_mib > node.tmp_mib:
        return False
    return not shape.features or matches(shape.features, node.features)


def node_view(node: Node) -> NodeView:
    """Return the planner's view of `node`."""
    spec = node.spec
    return NodeView(
        name=spec.name,
        cpus=spec.cpus,
        mem_mib=spec.mem_mib,
        gpus=spec.gpus,
        features=frozenset(node.features),
        weight=spec.weight + (OFF_WEIGHT if node.power.is_off else 0),
        switch=spec.switch,
        speed=node.speed,
        gemm_gflops=node.measured.gemm_gflops,
        link_mbps=spec.link_mbps,
        near=node.measured.near,
        link_bit=node.measured.link_bit,
        tmp_mib=spec.tmp_mib or UNKNOWN_TMP_MIB,
        idle_watts=spec.idle_watts,
        peak_watts=spec.peak_watts,
        gpu_watts=spec.gpu_watts,
        why_not=_why_not(node),
        awaited=node.link is Link.UNKNOWN and not node.drained and not node.power.is_off,
    )


def pending_job(job: Job, partitions: Mapping[str, Partition], default: str, cache: SnapshotCache) -> PendingJob:
    """Return the planner's view of a pending job, with views in its other partitions."""
    names = (job.partition or job.spec.partition or default).split(",")
    views = [_pending_in(job, partitions, name, cache) for name in names]
    return views[0] if len(views) == 1 else replace(views[0], others=tuple(views[1:]))


def _pending_in(job: Job, partitions: Mapping[str, Partition], name: str, cache: SnapshotCache) -> PendingJob:
    """Return the view of a pending job in partition `name`."""
    partition = partitions.get(name) or Partition(name=name, nodes=(), state=PartitionState.DOWN)
    return PendingJob(
        id=job.id,
        display_id=job.display_id,
        partition=name,
        request=cache.request(job, partition),
        submitted_at_s=job.submitted_at_s,
        since_s=job.accrued_from_s,
        site=job.site,
        nice=job.nice,
        priority_set=job.priority_set,
        hold=job.hold,
        not_before_s=job.not_before_s,
        dependency=job.dependency,
        dependency_any=job.dependency_any,
        array_job_id=job.array_job_id,
        array_task_id=job.array_task_id,
        array_limit=job.array_limit,
        uid=job.uid,
        name=job.spec.name,
        deadline_at_s=job.deadline_at_s,
        reservation=job.reservation,
        user=job.user,
        account=job.account,
        qos=job.qos,
        licenses=job.spec.licenses,
        gpu_power=job.spec.gpu_power,
        cheap_by_s=job.spec.cheap_by_s,
        reserved_shares=job.reserved_shares,
        switches_wait_s=job.spec.switches_wait_s,
        time_min_s=time_min_s(job),
        lowers=job.time_min_s is not None,
        free_to_go=not (
            job.hold is not Hold.NONE
            or job.priority_set == 0
            or job.not_before_s is not None
            or job.spec.begin_at_s is not None
            or job.dependency
            or job.array_limit
            or job.deadline_at_s is not None
            or job.reservation
        ),
    )


def time_min_s(job: Job) -> int | None:
    """Return the lower limit of the time limit of `job`; None if the limit is fixed.

    A default limit may be lowered for a deadline.
    """
    if job.time_min_s is not None:
        return job.time_min_s if job.time_limit_s is None else min(job.time_min_s, job.time_limit_s)
    return LEAST_LIMIT_S if job.spec.time_limit_s is None and job.deadline_at_s is not None else None


def running_job(
    job: Job, partitions: Mapping[str, Partition], default: str, now_s: float, reservation: Reservation | None = None
) -> RunningJob:
    """Return the view of a job that holds nodes, in `reservation`."""
    held = set(job.held_nodes)
    began_at_s = next((at_s for at_s in (job.started_at_s, job.allocated_at_s) if at_s is not None), now_s)
    partition = partitions.get(job.partition or job.spec.partition or default)
    return RunningJob(
        id=job.id,
        display_id=job.display_id,
        shares=job.holding,
        lent_shares=tuple(share for share in job.shares if share.node in held) if job.suspended_for is not None else (),
        runs=job.state is JobState.RUNNING,
        ending=job.state is JobState.COMPLETING,
        may_run_again=job.spec.requeue if job.spec.has_script else False,
        began_at_s=began_at_s,
        ends_at_s=_ends_at_s(job, partition, began_at_s, now_s, reservation),
        array_job_id=job.array_job_id,
        uid=job.uid,
        name=job.spec.name,
        user=job.user,
        account=job.account,
        qos=job.qos,
        partition=job.partition or job.spec.partition or default,
        licenses=job.spec.licenses,
        gpu_power=job.spec.gpu_power,
    )


def _ends_at_s(
    job: Job, partition: Partition | None, began_at_s: float, now_s: float, reservation: Reservation | None
) -> float | None:
    """Return when the job reaches its limit or is cut short; None: never.

    A job that is being ended ends now.
    """
    if job.state not in _NOT_ENDING:
        return now_s
    limit_s = job.time_limit_s if job.time_limit_s is not None else job.spec.time_limit_s
    if partition is not None:
        limit_s = time_limit_in(partition, limit_s)
    limit_s = known_limit_s(limit_s)
    limit_ends_s = began_at_s + suspended_s(job, now_s) + limit_s if limit_s is not None else None
    cut_s = cut_at_s(job, reservation)
    return min((end_s for end_s in (limit_ends_s, cut_s) if end_s is not None), default=None)


def _elastic(job: Job, view: RunningJob, partitions: Mapping[str, Partition], cache: SnapshotCache) -> ElasticSize:
    return ElasticSize(
        view=_pending_in(job, partitions, view.partition.split(",")[0], cache),
        nodes_min=job.spec.nodes_min,
        nodes_max=job.spec.nodes_max,
        wanted=job.wanted_nodes,
        wanted_at_s=job.wanted_at_s,
        leaving=tuple(share.node for share in job.leaving),
        barred=job.barred_nodes,
        moving=bool(job.joining),
    )


def _why_not(node: Node) -> str:
    if node.power is Power.POWERING_DOWN and not node.drained:
        return "is being switched off to save power"
    if node.power.is_off and not node.drained:
        return ""  # it is switched on for the job
    if node.link is Link.DOWN:
        return f"is down ({node.link_why})" if node.link_why else "is down"
    if node.link is Link.UNKNOWN:
        return "has not been heard of yet"
    if node.drained:
        return f"is drained ({node.drained_why})" if node.drained_why else "is drained"
    return ""


def _facts(jobs: tuple[Job, ...], pending: tuple[PendingJob, ...]) -> dict[int, tuple[JobFact, ...]]:
    """Return the facts of the jobs that other jobs depend on, by job id.

    Array tasks are also included by the id of the array.
    """
    wanted = {
        job_id
        for view in pending
        if view.dependency
        for term in view.dependency
        if term.kind is not DependencyKind.SINGLETON
        for job_id in term.job_ids
    }
    found: dict[int, list[JobFact]] = {}
    if not wanted:
        return {}
    for job in jobs:
        for key in {int(job.id), int(job.array_job_id if job.array_job_id is not None else job.id)} & wanted:
            found.setdefault(key, []).append(_fact(job))
    return {key: tuple(facts) for key, facts in found.items()}


def _fact(job: Job) -> JobFact:
    return JobFact(
        id=job.id,
        state=job.state,
        array_task_id=job.array_task_id,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
    )


VERSION = 1
KIND = "hpcsched snapshot"

Json = dict[str, Any]


def snapshot_to_json(snapshot: Snapshot, policy: Policy) -> Json:
    """Return the snapshot and the policy as an object that ``json.dumps`` accepts."""
    data = value_to_json(replace(snapshot, reserved_intervals=()))
    del data["reserved_intervals"]
    usual = _usual()
    for job in data["pending"]:
        _drop_usual(job, usual)
    return {"kind": KIND, "version": VERSION, "snapshot": data, "policy": value_to_json(policy)}


def snapshot_from_json(obj: object) -> tuple[Snapshot, Policy]:
    """Return the snapshot and the policy in `obj`, which is parsed JSON.

    Raises: ProtocolError if it has none.
    """
    if not isinstance(obj, dict) or obj.get("kind") != KIND:
        raise ProtocolError("cannot read the snapshot: hctl snapshot has not written this file")
    if obj.get("version") != VERSION:
        raise ProtocolError(
            f"cannot read the snapshot: it has version {str(obj.get('version'))[:20]!r}, this hpcsched reads {VERSION}"
        )
    snapshot = value_from_json(Snapshot, obj.get("snapshot"))
    policy = value_from_json(Policy, obj.get("policy"))
    return replace(snapshot, reserved_intervals=reserved_intervals_of(snapshot.reservations, snapshot.now_s)), policy


def _usual() -> Json:
    """Return a pending job whose fields have their defaults."""
    some = ResourceRequest(shape=Shape())
    return value_to_json(PendingJob(id=JobId(0), display_id="", partition="", request=some, submitted_at_s=0.0))


def _drop_usual(job: Json, usual: Mapping[str, Any]) -> None:
    """Remove the fields of `job` with the same values as in `usual`.

    Fields of its shape, and of its views in other partitions, are removed too.
    """
    for name in _DEFAULTED:
        if job[name] == usual[name]:
            del job[name]
    shape, plain = job["request"]["shape"], usual["request"]["shape"]
    job["request"]["shape"] = {name: value for name, value in shape.items() if value != plain[name]}
    for other in job.get("others", ()):
        _drop_usual(other, usual)


_DEFAULTED = tuple([field.name for field in fields(PendingJob) if field.default is not MISSING])
