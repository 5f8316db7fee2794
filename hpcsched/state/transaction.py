"""Change the cluster state in transactions, which are committed together or undone.

A `Transaction` keeps the previous values, so that a failed commit leaves nothing behind.
`WriteBatch` is what the store writes. The tick is synchronous: nothing reads the state between a
change and its commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from hpcnode.wire.message import WireError
from hpcsched.auth.audit import AuditEntry, entry_of
from hpcsched.auth.authorize import CONTROLLER, Identity, user_behind
from hpcsched.auth.tokens import Credential
from hpcsched.errors import HpcschedError, InvariantError, RequestError, report_fault
from hpcsched.lifecycle.events import (
    Allocated,
    BecameEligible,
    Claimed,
    ClusterEvent,
    EventSubject,
    Exited,
    JobEvent,
    NodeCleared,
    NodesAdded,
    NodesReserved,
    NodesUnreserved,
    Respecified,
    Started,
    Submitted,
)
from hpcsched.lifecycle.job import apply, submitted_jobs
from hpcsched.lifecycle.node import (
    NodeDrained,
    NodeEvent,
    NodeFaultCleared,
    NodeFenced,
    NodeResumed,
    PowerDownFailed,
    PowerDownOrdered,
    PowerUpFailed,
    PowerUpOrdered,
    apply_to_node,
    cluster_event_of,
)
from hpcsched.metrics.bench import BenchRun
from hpcsched.metrics.links import LinkRun
from hpcsched.model.accounting import EnergyUse, GpuUse, ServiceUse
from hpcsched.model.cron import Crontab
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job, RankFailure, TrainingStatus
from hpcsched.model.node import Node, Partition, PartitionState, Share
from hpcsched.model.reservation import Reservation
from hpcsched.model.service import Service
from hpcsched.model.spec import JobSpec
from hpcsched.model.trigger import Trigger
from hpcsched.sched.fairshare import Amounts, UsageKey, UsedResources, at, charge_of, plus, weights_of
from hpcsched.state.cluster import ClusterState, set_apart

SHOWN_DIFFERENCES = 20  # objects of one request in the audit log
_NOT_LOGGED = frozenset(
    ("spec", "versions", "refusals", "secret_sha256")
)  # a specification has the environment, which may have secrets

# A job's ordinary way from its submission to its end is in its history, not in the audit log.
_ORDINARY = (BecameEligible, NodesReserved, NodesUnreserved, Allocated, Claimed, Started, Exited, NodeCleared)
_NODE_DECISIONS = (
    NodeDrained,
    NodeResumed,
    NodeFaultCleared,
    NodeFenced,
    PowerDownOrdered,
    PowerDownFailed,
    PowerUpOrdered,
    PowerUpFailed,
)
_DECIDED_TABLES = {
    "reservations": "reservation",
    "crontabs": "crontab",
    "triggers": "trigger",
    "services": "service",
    "credentials": "token",
}

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one attempt, for accounting."""

    job_id: int
    attempt: int
    step: str
    name: str
    nodes: tuple[str, ...]
    ntasks: int
    state: str
    started_at_s: float | None = None
    ended_at_s: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    max_rss_kib: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    kept: str | None = None  # state that the next controller needs: hpcsched.steps.service


class NotedRequest(NamedTuple):
    """A request that its client may repeat: a submission, or another change.

    `content`: the hash of another change, "" of a submission.
    """

    uid: int
    request_id: str
    job_ids: list[int]
    at_s: float
    content: str = ""


@dataclass(slots=True)
class WriteBatch:
    """The changes of one tick, committed together."""

    specs: dict[int, JobSpec] = field(default_factory=dict)
    scripts: dict[str, bytes] = field(default_factory=dict)  # by hash
    jobs: dict[JobId, Job] = field(default_factory=dict)
    # New jobs as submitted; of an array all tasks.
    submitted: list[Sequence[Job]] = field(default_factory=list)
    events: list[JobEvent] = field(default_factory=list)
    node_events: list[NodeEvent] = field(default_factory=list)
    cluster_events: list[ClusterEvent] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    steps: dict[tuple[int, int, str], StepRecord] = field(default_factory=dict)
    usage: dict[UsageKey, UsedResources] = field(default_factory=dict)
    requests: list[NotedRequest] = field(default_factory=list)
    answers: dict[tuple[int, str], str] = field(default_factory=dict)  # of noted requests, by uid and request id
    partitions: dict[str, PartitionState] = field(default_factory=dict)  # states set by admins
    reservations: dict[str, Reservation | None] = field(default_factory=dict)  # None: deleted
    crontabs: dict[int, Crontab | None] = field(default_factory=dict)  # by uid; None: deleted
    triggers: dict[int, Trigger | None] = field(default_factory=dict)  # None: deleted
    services: dict[str, Service | None] = field(default_factory=dict)  # None: deleted
    credentials: dict[str, Credential | None] = field(default_factory=dict)  # None: deleted
    training: dict[int, TrainingStatus] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    energies: list[EnergyUse] = field(default_factory=list)  # added to what is stored
    gpu_uses: list[GpuUse] = field(default_factory=list)  # added to what is stored
    service_uses: list[ServiceUse] = field(default_factory=list)  # added to what is stored
    energy_marks: dict[str, str] = field(default_factory=dict)  # by node
    benches: list[BenchRun] = field(default_factory=list)
    links: list[LinkRun] = field(default_factory=list)
    # Tokens from before a restore whose jobs continue.
    adopted: list[str] = field(default_factory=list)
    audit: list[AuditEntry] = field(default_factory=list)
    clock: str = ""  # the clock mark of the head node, if it changed

    def __bool__(self) -> bool:
        return bool(self.events) or any(getattr(self, name) for name in self.__slots__)

    def add(self, later: WriteBatch) -> None:
        """Add the changes of a later batch, which count."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(later, name)
            if isinstance(mine, dict):
                mine.update(theirs)
            elif isinstance(mine, list):
                mine.extend(theirs)
            elif theirs:
                setattr(self, name, theirs)


class Transaction:
    """One tick's changes to the cluster, to be committed as one `WriteBatch`, or undone.

    With `commit`, each `attempt` is committed by itself, and the transaction as a whole is not.
    This finds the part that cannot be written.
    """

    def __init__(
        self,
        cluster: ClusterState,
        now_s: float,
        within: Transaction | None = None,
        *,
        commit: Callable[[WriteBatch], None] | None = None,
    ) -> None:
        self.cluster = cluster
        self.now_s = now_s
        self._within = within
        self._commit = commit
        self.batch = WriteBatch()
        self._jobs_before: dict[JobId, Job | None] = {}
        # By table of the cluster and key: the first value of what was changed; None: it was not there.
        self._before: dict[tuple[str, Any], Any] = {}
        self._partitions_before: tuple[dict[str, Partition], dict[str, PartitionState]] | None = None
        self._ids_before = (cluster.last_job_id, cluster.last_spec_id)

    def record(self, event: JobEvent) -> Job:
        """Apply `event` to its job and add both to the commit. Return the changed job."""
        if isinstance(event, Allocated | NodesAdded):
            event = replace(event, shares=self._with_spools(event.shares))
        job = self.cluster.jobs.get(event.job_id)
        if job is None:
            raise InvariantError(f"cannot record {type(event).__name__}: there is no job {event.job_id}")
        changed = apply(job, event)
        self._charge(job, changed, event.at_s)
        self._put(changed)
        self.batch.events.append(event)
        return changed

    def _with_spools(self, shares: tuple[Share, ...]) -> tuple[Share, ...]:
        """Return the shares with the spools that the nodes' names refer to now.

        A node that is off comes back with its last one.
        """
        cluster = self.cluster
        off = {share.node: node.spool for share in shares if (node := cluster.nodes[share.node]).power.is_off}
        spools = cluster.spools | off
        return tuple(replace(share, spool=spools.get(share.node, "")) for share in shares)

    def submit(self, spec: JobSpec, *, uid: int, user: str, partition: str, time_limit_s: int | None) -> list[Job]:
        """Create the job of `spec`, or all tasks of its array."""
        cluster = self.cluster
        cluster.last_spec_id += 1
        spec, script = set_apart(spec)
        event = Submitted(
            job_id=JobId(cluster.last_job_id + 1),
            at_s=self.now_s,
            spec_id=cluster.last_spec_id,
            uid=uid,
            user=user,
            partition=partition,
            time_limit_s=time_limit_s,
        )
        jobs = submitted_jobs(event, spec)
        cluster.last_job_id += len(jobs) + len(spec.components)  # components have ids too
        self.batch.specs[event.spec_id] = spec
        if script:
            self.batch.scripts[spec.script_sha256] = script
        self.batch.events.append(event)
        self.batch.submitted.append(jobs)
        self._jobs_before |= dict.fromkeys(job.id for job in jobs)
        self.batch.jobs |= cluster.add(jobs)
        return list(jobs)

    def respecify(self, job: Job, changes: dict[str, Any], *, by_uid: int, spec_id: int | None = None) -> Job:
        """Change the job's specification; `changes` are its fields as JSON values.

        `spec_id` is the id of an equal specification that this transaction has already made, if
        any.

        Raises: RequestError: no key opens its environment, which the new specification would lose.
        """
        if job.spec_id in self.cluster.unopened_specs:
            raise RequestError(f"cannot change job {job.display_id}: no key opens its environment; see hpcsched seal")
        made = spec_id is None
        if spec_id is None:
            self.cluster.last_spec_id += 1
            spec_id = self.cluster.last_spec_id
        event = Respecified(job_id=job.id, at_s=self.now_s, by_uid=by_uid, spec_id=spec_id, changes=changes)
        changed = self.record(event)
        if made:
            self.batch.specs[spec_id] = changed.spec
        return changed

    def record_node(self, event: NodeEvent) -> Node:
        """Apply `event` to its node and add both to the commit. Return the changed node.

        Events of a node that left the configuration are dropped, because it has no row.
        """
        name = event.node
        before = self.cluster.nodes[name]
        if name not in self.cluster.nodes:
            return before
        node = apply_to_node(before, event)
        self._set("nodes", name, node)
        self.batch.nodes[name] = node
        self.batch.node_events.append(event)
        if (told := cluster_event_of(event)) is not None:
            self.batch.cluster_events.append(told)
        return node

    def note_event(self, event: ClusterEvent) -> None:
        """Add an event for those who follow events to the commit."""
        self.batch.cluster_events.append(event)

    def set_reservation(self, name: str, reservation: Reservation | None) -> None:
        """Set the reservation of this name; None deletes it."""
        known = self.cluster.reservations.get(name)
        if known != reservation:
            kind = "Deleted" if reservation is None else "Created" if known is None else "Changed"
            self.note_event(
                ClusterEvent(about=EventSubject.RESERVATION, kind=f"Reservation{kind}", name=name, at_s=self.now_s)
            )
        self._set("reservations", name, reservation)
        self.batch.reservations[name] = reservation

    def set_partition_state(self, name: str, state: PartitionState) -> Partition:
        """Set a partition's state, which overrides the configuration."""
        cluster = self.cluster
        self._partitions_before = self._partitions_before or (cluster.partitions, cluster.partition_states)
        cluster.partition_states = cluster.partition_states | {name: state}
        cluster.partitions = cluster.partitions | {name: replace(cluster.partitions[name], state=state)}
        self.batch.partitions[name] = state
        self.note_event(
            ClusterEvent(
                about=EventSubject.CONFIGURATION,
                kind="PartitionChanged",
                name=name,
                at_s=self.now_s,
                text=f"its state is {state.value}",
            )
        )
        return cluster.partitions[name]

    def set_crontab(self, uid: int, crontab: Crontab | None) -> None:
        """Set the crontab of a user; None deletes it."""
        self._set("crontabs", uid, crontab)
        self.batch.crontabs[uid] = crontab

    def set_trigger(self, number: int, trigger: Trigger | None) -> None:
        """Set the trigger of this number; None deletes it."""
        self._set("triggers", number, trigger)
        self.batch.triggers[number] = trigger

    def set_service(self, name: str, service: Service | None) -> None:
        """Set the service of this name; None deletes it."""
        self._set("services", name, service)
        self.batch.services[name] = service

    def set_credential(self, credential_id: str, credential: Credential | None) -> None:
        """Set the credential of this id; None deletes it."""
        self._set("credentials", credential_id, credential)
        self.batch.credentials[credential_id] = credential

    def nodes_before(self) -> dict[NodeName, Node]:
        """Return the nodes that this transaction changed, in their earlier state."""
        return {key: before for (table, key), before in self._before.items() if table == "nodes"}

    def adopt(self, token: str) -> None:
        """Adopt a launch of an earlier incarnation: from now on it belongs to its job."""
        self.cluster.adopted.add(token)
        self.batch.adopted.append(token)

    def decided(self, keys: Iterable[tuple[NodeName, str]]) -> None:
        """Mark these launches of an earlier incarnation as decided: no admin is asked about them."""
        for key in list(keys):
            self._set("undecided_launches", key, None)

    def put_usage(self, used: UsedResources) -> None:
        """Add resource usage to the commit."""
        self._set("usage", used.key, used)
        self.batch.usage[used.key] = used

    def add_usage(self, key: UsageKey, amounts: Amounts, at_s: float) -> None:
        """Add the usage `amounts` of the time `at_s` to that of an account, user and QOS."""
        account, user, qos = key
        known = self.cluster.usage.get(key) or UsedResources(account=account, user=user, qos=qos, at_s=at_s)
        self.put_usage(plus(at(known, at_s, self.cluster.config.accounting.half_life_s), amounts))

    def put_step(self, step: StepRecord) -> None:
        """Add a step's row to the commit."""
        self.batch.steps[(step.job_id, step.attempt, step.step)] = step

    def put_training(self, training: TrainingStatus) -> None:
        """Add a training program's status to the commit."""
        self.batch.training[training.job_id] = training

    def put_energy(self, uses: Sequence[EnergyUse], marks: Mapping[str, str]) -> None:
        """Add energy of jobs to the commit, which is added to what they used before.

        `marks`: what the meters of nodes showed when that was known.
        """
        self.batch.energies += uses
        self.batch.energy_marks.update(marks)

    def put_gpu_use(self, uses: Sequence[GpuUse]) -> None:
        """Add GPU time of jobs to the commit."""
        self.batch.gpu_uses += uses

    def put_service_use(self, uses: Sequence[ServiceUse]) -> None:
        """Add what users have asked of served models to the commit."""
        self.batch.service_uses += uses

    def put_failure(self, failure: RankFailure) -> None:
        """Add a rank's failure to the commit; the first report of a rank counts."""
        self.batch.failures.append(failure)

    def note_request(self, uid: int, request_id: str, job_ids: list[int], content: str = "") -> None:
        """Record a request id with its jobs or its content.

        A repeated request gets the same answer.
        """
        self.batch.requests.append(NotedRequest(uid, request_id, job_ids, self.now_s, content))

    def note_answer(self, uid: int, request_id: str, answer: str) -> None:
        """Record the answer of a noted request."""
        self.batch.answers[(uid, request_id)] = answer

    def note_bench(self, run: BenchRun) -> None:
        """Record what a node measured, and use it."""
        self.batch.benches.append(run)
        if not run.busy:
            self._set("benches", run.node, run)
            self._measure()

    def note_links(self, runs: Iterable[LinkRun]) -> None:
        """Record what pairs of nodes measured, and use it."""
        runs = list(runs)
        self.batch.links.extend(runs)
        for run in runs:
            if not run.busy and not run.why:
                self._set("links", frozenset(run.pair), run)
        self._measure()

    def _measure(self) -> None:
        for name, node in self.cluster.measured_again().items():
            self._set("nodes", name, node)

    def requested(self, uid: int, request_id: str) -> dict[int, JobSpec] | None:
        """Return the jobs that this transaction created for a request id, or None.

        The store does not know them yet.
        """
        for noted in self.batch.requests:
            if noted[:2] == (uid, request_id):
                return {job_id: self.cluster.jobs[JobId(job_id)].spec for job_id in noted.job_ids}
        return None if self._within is None else self._within.requested(uid, request_id)

    def audit(self, entry: AuditEntry) -> None:
        """Add a record to the audit log: in the same commit as the changes, or not at all."""
        self.batch.audit.append(entry)

    def differences(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Return what this transaction changed: its objects in words, earlier and new values.

        Only values that differ, of at most `SHOWN_DIFFERENCES` objects.
        """
        changed: list[tuple[str, Any, Any]] = []
        for jobs in self.batch.submitted:
            spec = jobs[0].spec
            after = {
                "name": spec.name,
                "partition": jobs[0].partition,
                "tasks": len(jobs),
                "script": spec.script_sha256,
            }
            changed.append((f"job {jobs[0].number}", {}, after))
        for job_id, before in self._jobs_before.items():
            if before is not None:
                changed.append((f"job {before.display_id}", before, self.cluster.jobs.get(job_id)))
        for (table, key), before in self._before.items():
            if table not in ("usage", "benches", "links"):
                changed.append((f"{table.removesuffix('s')} {key}", before, getattr(self.cluster, table).get(key)))
        for name, state in self.batch.partitions.items():
            earlier = self._partitions_before[0].get(name) if self._partitions_before else None
            changed.append((f"partition {name}", {"state": earlier and earlier.state.value}, {"state": state.value}))
        shown = [(name, *_differing(before, after)) for name, before, after in changed[:SHOWN_DIFFERENCES]]
        more = [f"and {len(changed) - len(shown)} more"] if len(changed) > len(shown) else []
        return (
            ", ".join([name for name, _, _ in shown] + more),
            {name: before for name, before, _ in shown if before},
            {name: after for name, _, after in shown if after},
        )

    def record_decision(self, source: str) -> None:
        """Add what was changed without a request to the audit log, if that was a decision."""
        batch = self.batch
        kinds = {type(event).__name__ for event in batch.events if not isinstance(event, _ORDINARY)}
        kinds |= {type(event).__name__ for event in batch.node_events if isinstance(event, _NODE_DECISIONS)}
        kinds |= {name for table, name in _DECIDED_TABLES.items() if getattr(batch, table)}
        if kinds:
            objects, before, after = self.differences()
            who = self._asker(source)
            self.audit(entry_of(who, " ".join(sorted(kinds)), self.now_s, object=objects, before=before, after=after))

    def _asker(self, source: str) -> Identity:
        """Return the user whom the events name, for example that of `hrun`, or the controller."""
        for event in self.batch.events:
            job = self.cluster.jobs.get(event.job_id)
            uid = event.uid if isinstance(event, Submitted) else getattr(event, "by_uid", None)
            if uid is not None:
                user = job.user if job is not None and job.uid == uid else str(uid)
                return user_behind(uid, user, source)
        return replace(CONTROLLER, source=source)

    def undo(self) -> None:
        """Restore the cluster to its state before this transaction."""
        for job_id, job in self._jobs_before.items():
            if job is None:
                self.cluster.drop(job_id)
            else:
                self.cluster.put(job)
        for (table, key), before in self._before.items():
            _keep(getattr(self.cluster, table), key, before)
        self.cluster.adopted.difference_update(self.batch.adopted)
        if self._partitions_before is not None:
            self.cluster.partitions, self.cluster.partition_states = self._partitions_before
        self.cluster.last_job_id, self.cluster.last_spec_id = self._ids_before

    def attempt(self, what: str, work: Callable[[Transaction], Any], source: str = CONTROLLER.source) -> Any:
        """Do `work` in a savepoint and return its result; on failure undo it, return the error.

        An unexpected exception is logged as a failure to do `what`, and returned as InternalError.
        If no request has left a record, that of a decision names `source`.

        Raises: InvariantError only, because memory and disk may then differ.
        """
        inner = self.savepoint()
        try:
            result = work(inner)
            if self._within is None and not inner.batch.audit:
                inner.record_decision(source)
            if self._commit is not None and inner.batch:
                self._commit(inner.batch)
        except InvariantError:
            raise
        except Exception as error:  # the barrier: only this piece has failed
            try:
                inner.undo()
            except Exception as wrong:
                raise InvariantError(f"cannot undo what has failed: {error!r}") from wrong
            return error if isinstance(error, HpcschedError | WireError) else report_fault(error, what)
        self.merge(inner)
        return result

    def savepoint(self) -> Transaction:
        """Return a transaction for one request: `merge` it on success, `undo` it on failure."""
        return Transaction(self.cluster, self.now_s, self)

    def merge(self, inner: Transaction) -> None:
        """Add the changes of a `savepoint` to this transaction."""
        _add_missing(self._jobs_before, inner._jobs_before)
        _add_missing(self._before, inner._before)
        self._partitions_before = self._partitions_before or inner._partitions_before
        self.batch.add(inner.batch)

    def _charge(self, before: Job, after: Job, at_s: float) -> None:
        """Charge the resources that the job released to its user, account and QOS.

        This is part of the same commit, so it is charged once.
        """
        if after.charged_cpu_s == before.charged_cpu_s and after.charged_mem_mib_s == before.charged_mem_mib_s:
            return
        cluster, accounting = self.cluster, self.cluster.config.accounting
        weights = weights_of(accounting, cluster.partitions.get(before.partition))
        amounts = charge_of(before, after, at_s, accounting, weights, cluster.gpu_types(before))
        account, user = accounting.association_of(before.user, before.account)
        self.add_usage((account, user, before.qos), amounts, at_s)

    def _set(self, table: str, key: Any, value: Any) -> None:
        """Set a value in a table of the cluster; None deletes it."""
        values = getattr(self.cluster, table)
        self._before.setdefault((table, key), values.get(key))
        _keep(values, key, value)

    def _put(self, job: Job) -> None:
        self._jobs_before.setdefault(job.id, self.cluster.jobs.get(job.id))
        self.cluster.put(job)
        self.batch.jobs[job.id] = job


def _differing(before: Any, after: Any) -> tuple[Any, Any]:
    """Return the parts of two values that differ, as values for JSON."""
    kind = before if before is not None else after
    if isinstance(kind, dict):
        return before, after
    if not is_dataclass(kind):
        return _plain(before), _plain(after)
    names = [field.name for field in fields(kind) if field.name not in _NOT_LOGGED]
    if before is not None and after is not None:
        names = [name for name in names if getattr(before, name) != getattr(after, name)]
    earlier, later = (
        {name: _plain(getattr(value, name)) for name in names} if value else {} for value in (before, after)
    )
    return earlier, later


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and all(isinstance(item, str | Enum) for item in value):
        return [_plain(item) for item in value[:SHOWN_DIFFERENCES]]
    return value if isinstance(value, int | float | str | bool | None) else str(getattr(value, "value", value))[:200]


def _add_missing(known: dict[K, V], more: Mapping[K, V]) -> None:
    if known:
        more = {key: value for key, value in more.items() if key not in known}
    known.update(more)


def _keep(kept: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        kept.pop(key, None)
    else:
        kept[key] = value
