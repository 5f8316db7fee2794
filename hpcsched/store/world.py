"""The controller's state in memory, and the transaction that changes it.

`World` mirrors the rows: it is loaded from the store and changed only inside a `Transaction`, which remembers what was
before, so that a commit that fails leaves nothing behind. The tick is synchronous: nobody sees a world between the
change and its commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from hpcsched.config import Config
from hpcsched.errors import InvariantError
from hpcsched.lifecycle.events import Event, Respecified, Submitted
from hpcsched.lifecycle.job import apply, submitted_jobs
from hpcsched.model.ids import BATCH_STEP, JobId, NodeName, Token
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState
from hpcsched.model.node import OURSELVES, Node, Partition
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import JobSpec
from hpcsched.model.training import Failure, Training
from hpcsched.sched.eligible import Wait
from hpcsched.sched.usage import Used, at, charge_of, plus, weights_of
from hpcsched.store.rows import StepRow
from hpcsched.store.store import Batch

BLOCKED = "runs what was launched before the database was restored: hctl strays"
_STATE = attrgetter("state")


class Kept(NamedTuple):
    """A launch of a former incarnation that a node runs, and what the node last said of it."""

    token: Token
    report: Any  # a protocol.Report


@dataclass(slots=True)
class World:
    """Everything the controller knows. `waits` is the last plan's word on each pending job; it is not stored."""

    config: Config
    incarnation: str
    epoch: int
    jobs: dict[JobId, Job] = field(default_factory=dict)
    nodes: dict[NodeName, Node] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    pending: dict[JobId, None] = field(default_factory=dict)  # ids in order of their becoming pending
    active: dict[JobId, None] = field(default_factory=dict)
    arrays: dict[JobId, dict[JobId, None]] = field(default_factory=dict)  # array id -> ids of its tasks
    reservations: dict[str, Reservation] = field(default_factory=dict)
    waits: dict[JobId, Wait] = field(default_factory=dict)
    priorities: Mapping[JobId, int] = field(
        default_factory=dict
    )  # of waiting jobs, as the last plan had them; not stored
    last_job_id: int = 0
    last_spec_id: int = 0
    usage: dict[tuple[str, str, str], Used] = field(default_factory=dict)  # what was given back, charged
    training: dict[JobId, Training] = field(default_factory=dict)  # of active jobs: their programs' last word
    silent_since_s: dict[NodeName, float] = field(default_factory=dict)  # of nodes that are not connected: an estimate
    restored_last_id: int = 0  # of a database restored from a backup: the highest id in it
    ask_strays: bool = False  # nothing from before a restore is ended without an admin's word
    kept: dict[tuple[NodeName, str], Kept] = field(default_factory=dict)  # by node and token: waits for that word
    doomed: set[tuple[NodeName, str, int]] = field(
        default_factory=set
    )  # (node, incarnation, job) that an admin wants ended
    adopted: set[str] = field(default_factory=set)  # tokens of former incarnations whose jobs go on

    def gpu_types(self, job: Job) -> dict[NodeName, dict[int, str]]:
        """Return the types of the GPUs of the nodes where `job` has some, by index."""
        nodes = [self.nodes[share.node] for share in job.shares if share.gpus and share.node in self.nodes]
        return {node.name: {gpu.index: gpu.type for gpu in node.spec.gpus} for node in nodes}

    def is_former(self, job: Job) -> bool:
        """Return whether the job was launched before the database was restored, and not since."""
        return bool(job.token) and not job.token.startswith(self.incarnation + ".") and job.token not in self.adopted

    def job_of_former(self, token: Token) -> Job | None:
        """Return the job, holding nodes, that this launch of before a restore belongs to by its whole token."""
        job = self.jobs.get(token.job_id)
        if job is None or not job.token or not job.held_nodes or not is_attempt_of(job, token):
            return None
        if token.step == BATCH_STEP and str(token) != job.token:
            return None
        return job if token.node in job.held_nodes else None

    def open_nodes(self) -> list[Node]:
        """Return the nodes as a plan may use them: one that runs what no job here holds has no room that is known."""
        taken = {node for (node, _), kept in self.kept.items() if self.job_of_former(kept.token) is None}
        blocked = {"drained": True, "drained_why": BLOCKED, "drained_by": OURSELVES}
        return [
            replace(node, **blocked) if node.name in taken and not node.drained else node  # type: ignore[arg-type]
            for node in self.nodes.values()
        ]

    def requeues(self, job: Job) -> bool:
        """Return whether the job goes back to the queue when its node is lost."""
        wanted = job.spec.requeue if job.spec.requeue is not None else self.config.controller.requeue
        return wanted and bool(job.spec.script)

    def unseen_nodes(self) -> list[NodeName]:
        """Return the nodes that may still run what was launched before the database was restored."""
        return [name for name, node in self.nodes.items() if not node.boot_id] if self.restored_last_id else []

    def put(self, job: Job) -> None:
        """Keep `job` in place of what was known under its id."""
        self.jobs[job.id] = job
        if job.array_job_id is not None:
            self.arrays.setdefault(job.array_job_id, {})[job.id] = None
        if job.state is JobState.PENDING:
            self.pending[job.id] = None
        else:
            self.pending.pop(job.id, None)
            self.waits.pop(job.id, None)
        if job.state in ACTIVE:
            self.active[job.id] = None
        else:
            self.active.pop(job.id, None)

    def add(self, jobs: Sequence[Job]) -> dict[JobId, Job]:
        """Keep a job that was submitted now, or all tasks of an array; return them by id."""
        made = {job.id: job for job in jobs}
        self.jobs |= made
        self.pending |= dict.fromkeys(made)
        if jobs[0].array_job_id is not None:
            self.arrays[jobs[0].array_job_id] = dict.fromkeys(made)
        return made

    def drop(self, job_id: JobId) -> None:
        """Forget the job here (its row stays in the store)."""
        job = self.jobs.pop(job_id, None)
        if job is not None and job.array_job_id is not None:
            tasks = self.arrays[job.array_job_id]
            del tasks[job_id]
            if not tasks:
                del self.arrays[job.array_job_id]
        self.pending.pop(job_id, None)
        self.active.pop(job_id, None)
        self.waits.pop(job_id, None)

    def count_states(self) -> Counter[JobState]:
        """Return how many jobs are in each state."""
        return Counter(map(_STATE, self.jobs.values()))

    def active_jobs(self) -> list[Job]:
        """Return the jobs that hold nodes."""
        return [self.jobs[job_id] for job_id in self.active]

    def jobs_on(self, node: NodeName) -> list[Job]:
        """Return the jobs that hold a part of `node`."""
        return [job for job in self.active_jobs() if node in job.held_nodes]

    def numbered(self, job_id: int) -> list[Job]:
        """Return the job of that number, or all tasks of the array of that number; empty if there is neither."""
        tasks = self.arrays.get(JobId(job_id))
        if tasks is not None:
            return [self.jobs[task] for task in tasks]
        job = self.jobs.get(JobId(job_id))
        return [] if job is None else [job]

    def using(self, reservation: str) -> list[Job]:
        """Return the jobs that run in this reservation or wait for it."""
        found = (self.jobs[job_id] for job_id in (*self.active, *self.pending))
        return [job for job in found if job.reservation == reservation]

    def depended_on(self) -> dict[JobId, Job]:
        """Return the jobs that a waiting job depends on."""
        numbers = {
            number
            for job_id in self.pending
            for dependency in self.jobs[job_id].dependency
            for number in dependency.job_ids
        }
        return {job.id: job for number in numbers for job in self.numbered(number)}

    def jobs_to_plan(self) -> list[Job]:
        """Return what a plan must look at: jobs that wait, that hold nodes, and those that others depend on."""
        wanted = [self.jobs[job_id] for job_id in (*self.active, *self.pending)]
        others = [job for job in self.depended_on().values() if job.state in FINAL]
        return wanted + others

    def default_partition(self) -> Partition:
        """Return the partition for jobs that name none."""
        for partition in self.partitions.values():
            if partition.default:
                return partition
        return next(iter(self.partitions.values()))

    def forget_ended(self, before_s: float, keep: int = 10_000) -> None:
        """Drop from memory the jobs that ended before `before_s` (all but the last `keep`), unless others depend on them."""
        ended = sorted((job for job in self.jobs.values() if job.state in FINAL), key=lambda job: job.ended_at_s or 0.0)
        needed = self.depended_on()
        old = len(ended) - keep
        for i, job in enumerate(ended):
            if (i < old or (job.ended_at_s or 0.0) < before_s) and job.id not in needed:
                self.drop(job.id)


class Transaction:
    """One tick's changes to the world, to be committed as one `Batch`, or undone."""

    def __init__(self, world: World, now_s: float, within: Transaction | None = None) -> None:
        self.world = world
        self.now_s = now_s
        self._within = within
        self.batch = Batch()
        self._jobs_before: dict[JobId, Job | None] = {}
        self._nodes_before: dict[NodeName, Node] = {}
        self._usage_before: dict[tuple[str, str, str], Used | None] = {}
        self._reservations_before: dict[str, Reservation | None] = {}
        self._kept_before: dict[tuple[NodeName, str], Kept] = {}
        self._ids_before = (world.last_job_id, world.last_spec_id)

    def record(self, event: Event) -> Job:
        """Apply `event` to its job and note both for the commit. Returns the job as it is now."""
        job = self.world.jobs.get(event.job_id)
        if job is None:
            raise InvariantError(f"cannot record {type(event).__name__}: there is no job {event.job_id}")
        changed = apply(job, event)
        self._charge(job, changed, event.at_s)
        self._put(changed)
        self.batch.events.append(event)
        return changed

    def submit(self, spec: JobSpec, *, uid: int, user: str, partition: str, time_limit_s: int | None) -> list[Job]:
        """Make the job (or all tasks of the array) that `spec` asks for."""
        world = self.world
        world.last_spec_id += 1
        event = Submitted(
            job_id=JobId(world.last_job_id + 1),
            at_s=self.now_s,
            spec_id=world.last_spec_id,
            uid=uid,
            user=user,
            partition=partition,
            time_limit_s=time_limit_s,
        )
        jobs = submitted_jobs(event, spec)
        world.last_job_id += len(jobs) + len(spec.components)  # the components have numbers too
        self.batch.specs[event.spec_id] = spec
        self.batch.events.append(event)
        if spec.array is not None:
            self.batch.arrays.append(jobs)
        self._jobs_before |= dict.fromkeys(job.id for job in jobs)
        self.batch.jobs |= world.add(jobs)
        return list(jobs)

    def respecify(self, job: Job, changes: dict[str, Any], *, by_uid: int, spec_id: int | None = None) -> Job:
        """Have the job ask for something else: `changes` are fields of its specification, as JSON values.

        `spec_id` is that of a specification which this transaction has made of the same one in the same way, if it has.
        """
        made = spec_id is None
        if spec_id is None:
            self.world.last_spec_id += 1
            spec_id = self.world.last_spec_id
        event = Respecified(job_id=job.id, at_s=self.now_s, by_uid=by_uid, spec_id=spec_id, changes=changes)
        changed = self.record(event)
        if made:
            self.batch.specs[spec_id] = changed.spec
        return changed

    def set_node(self, name: NodeName, **changes: object) -> Node:
        """Change what is kept of a node."""
        before = self.world.nodes[name]
        self._nodes_before.setdefault(name, before)
        node = replace(before, **changes)  # type: ignore[arg-type]
        self.world.nodes[name] = node
        self.batch.nodes[name] = node
        return node

    def set_reservation(self, name: str, reservation: Reservation | None) -> None:
        """Keep `reservation` under `name`; None: there is none of that name any more."""
        self._reservations_before.setdefault(name, self.world.reservations.get(name))
        _keep(self.world.reservations, name, reservation)
        self.batch.reservations[name] = reservation

    def adopt(self, token: str) -> None:
        """Take the launch of a former incarnation for its job's own from now on."""
        self.world.adopted.add(token)
        self.batch.adopted.append(token)

    def decided(self, keys: Iterable[tuple[NodeName, str]]) -> None:
        """Ask no admin any more about these launches of a former incarnation."""
        for key in list(keys):
            self._kept_before[key] = self.world.kept.pop(key)

    def put_usage(self, used: Used) -> None:
        """Note what has been used for the commit."""
        self._usage_before.setdefault(used.key, self.world.usage.get(used.key))
        self.world.usage[used.key] = self.batch.usage[used.key] = used

    def put_step(self, step: StepRow) -> None:
        """Note a step's row for the commit."""
        self.batch.steps[(step.job_id, step.attempt, step.step)] = step

    def put_training(self, training: Training) -> None:
        """Note a training program's word for the commit."""
        self.batch.training[training.job_id] = training

    def put_failure(self, failure: Failure) -> None:
        """Note for the commit why a rank failed; the first word of a rank counts."""
        self.batch.failures.append(failure)

    def note_request(self, uid: int, request_id: str, job_ids: list[int]) -> None:
        """Remember what a request id made, so that a repeated request gets the same jobs."""
        self.batch.requests.append((uid, request_id, job_ids, self.now_s))

    def requested(self, uid: int, request_id: str) -> dict[int, JobSpec] | None:
        """Return the jobs that a request id has made in this very transaction, which no store knows yet; None: none."""
        for noted_uid, noted_id, job_ids, _ in self.batch.requests:
            if (noted_uid, noted_id) == (uid, request_id):
                return {job_id: self.world.jobs[JobId(job_id)].spec for job_id in job_ids}
        return None if self._within is None else self._within.requested(uid, request_id)

    def undo(self) -> None:
        """Put the world back as it was before this transaction."""
        for job_id, job in self._jobs_before.items():
            if job is None:
                self.world.drop(job_id)
            else:
                self.world.put(job)
        self.world.nodes.update(self._nodes_before)
        self.world.adopted.difference_update(self.batch.adopted)
        self.world.kept |= self._kept_before
        for key, used in self._usage_before.items():
            if used is None:
                del self.world.usage[key]
            else:
                self.world.usage[key] = used
        for name, reservation in self._reservations_before.items():
            _keep(self.world.reservations, name, reservation)
        self.world.last_job_id, self.world.last_spec_id = self._ids_before

    def savepoint(self) -> Transaction:
        """Return a transaction for one request: `merge` it when the request succeeded, `undo` it when it did not."""
        return Transaction(self.world, self.now_s, self)

    def merge(self, inner: Transaction) -> None:
        """Take over the changes of a `savepoint`."""
        for job_id, job in inner._jobs_before.items():
            self._jobs_before.setdefault(job_id, job)
        for name, node in inner._nodes_before.items():
            self._nodes_before.setdefault(name, node)
        for key, used in inner._usage_before.items():
            self._usage_before.setdefault(key, used)
        self.batch.usage |= inner.batch.usage
        for name, reservation in inner._reservations_before.items():
            self._reservations_before.setdefault(name, reservation)
        self._kept_before |= inner._kept_before
        self.batch.specs |= inner.batch.specs
        self.batch.jobs |= inner.batch.jobs
        self.batch.arrays += inner.batch.arrays
        self.batch.events += inner.batch.events
        self.batch.nodes |= inner.batch.nodes
        self.batch.steps |= inner.batch.steps
        self.batch.requests += inner.batch.requests
        self.batch.adopted += inner.batch.adopted
        self.batch.reservations |= inner.batch.reservations
        self.batch.training |= inner.batch.training
        self.batch.failures += inner.batch.failures

    def _charge(self, before: Job, after: Job, at_s: float) -> None:
        """Charge what the job gave back, if it did, to its user, account and QOS: in this very commit, so once."""
        if after.charged_cpu_s == before.charged_cpu_s and after.charged_mem_mib_s == before.charged_mem_mib_s:
            return
        world, accounting = self.world, self.world.config.accounting
        weights = weights_of(accounting, world.partitions.get(before.partition))
        amounts = charge_of(before, after, at_s, accounting, weights, world.gpu_types(before))
        account, user = accounting.association_of(before.user, before.account)
        known = world.usage.get((account, user, before.qos))
        used = known or Used(account=account, user=user, qos=before.qos, at_s=at_s)
        self.put_usage(plus(at(used, at_s, accounting.half_life_s), amounts))

    def _put(self, job: Job) -> None:
        self._jobs_before.setdefault(job.id, self.world.jobs.get(job.id))
        self.world.put(job)
        self.batch.jobs[job.id] = job


def is_attempt_of(job: Job, token: Token) -> bool:
    """Return whether the launch is a part of the attempt that the job is at."""
    own = Token.parse(job.token)
    return (own.incarnation, own.attempt) == (token.incarnation, token.attempt)


def _keep(reservations: dict[str, Reservation], name: str, reservation: Reservation | None) -> None:
    if reservation is None:
        reservations.pop(name, None)
    else:
        reservations[name] = reservation
