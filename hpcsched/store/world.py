"""The controller's state in memory, and the transaction that changes it.

`World` mirrors the rows: it is loaded from the store and changed only inside a `Transaction`, which remembers what was
before, so that a commit that fails leaves nothing behind. The tick is synchronous: nobody sees a world between the
change and its commit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from hpcnode.wire.message import WireError
from hpcsched import mishap
from hpcsched.config.load import Config
from hpcsched.errors import HpcschedError, InvariantError
from hpcsched.lifecycle.events import Allocated, Event, NodesAdded, Respecified, Submitted
from hpcsched.lifecycle.job import apply, submitted_jobs
from hpcsched.model.cron import Crontab
from hpcsched.model.ids import BATCH_STEP, JobId, LaunchToken, NodeName
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState
from hpcsched.model.node import OURSELVES, Link, Node, NodeSpec, Partition, PartitionState
from hpcsched.model.reservation import Reservation
from hpcsched.model.resources import Share
from hpcsched.model.spec import JobSpec
from hpcsched.model.training import RankFailure, TrainingStatus
from hpcsched.model.trigger import Trigger
from hpcsched.sched.decisions import Wait
from hpcsched.sched.queue.usage import UsedResources, at, charge_of, plus, weights_of
from hpcsched.store.rows import StepRow
from hpcsched.store.scripts import ScriptUses, set_apart
from hpcsched.store.store import Batch

BLOCKED = "runs what was launched before the database was restored: hctl strays"

K = TypeVar("K")
V = TypeVar("V")


class Kept(NamedTuple):
    """A launch of a former incarnation that a node runs, and what the node last said of it."""

    token: LaunchToken
    report: Any  # a protocol.Report


class Nodes(dict[NodeName, Node]):
    """The nodes of the configuration. One that left it is still named by jobs: asked for, it is a node that does not answer."""

    def __missing__(self, name: NodeName) -> Node:
        spec = NodeSpec(name=name, host="", host_key="", cpus=0, mem_mib=0)
        return Node(spec=spec, link=Link.DOWN, link_why="it is not in the configuration any more")


@dataclass(slots=True)
class World:
    """Everything the controller knows. `waits` is the last plan's word on each pending job; it is not stored."""

    config: Config
    incarnation: str
    epoch: int
    jobs: dict[JobId, Job] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=Nodes)
    partitions: dict[str, Partition] = field(default_factory=dict)
    partition_states: dict[str, PartitionState] = field(default_factory=dict)  # that admins gave them
    pending: dict[JobId, None] = field(default_factory=dict)  # ids in order of their becoming pending
    active: dict[JobId, None] = field(default_factory=dict)
    ended: dict[JobId, None] = field(default_factory=dict)  # ids of ended jobs in memory, in order of their ends
    queued: Counter[str] = field(default_factory=Counter)  # jobs that wait or hold nodes, by user
    states: Counter[JobState] = field(
        default_factory=Counter
    )  # jobs in memory: of tens of thousands nobody counts them anew
    arrays: dict[JobId, dict[JobId, None]] = field(default_factory=dict)  # array id -> ids of its tasks
    reservations: dict[str, Reservation] = field(default_factory=dict)
    crontabs: dict[int, Crontab] = field(default_factory=dict)  # by uid
    triggers: dict[int, Trigger] = field(default_factory=dict)
    waits: dict[JobId, Wait] = field(default_factory=dict)
    priorities: Mapping[JobId, int] = field(
        default_factory=dict
    )  # of waiting jobs, as the last plan had them; not stored
    scripts: ScriptUses = field(default_factory=ScriptUses)
    last_job_id: int = 0
    last_spec_id: int = 0
    usage: dict[tuple[str, str, str], UsedResources] = field(default_factory=dict)  # what was given back, charged
    training: dict[JobId, TrainingStatus] = field(default_factory=dict)  # of active jobs: their programs' last word
    spools: dict[NodeName, str] = field(
        default_factory=dict
    )  # of connected nodes, "": its agent does not say; not stored
    lost_ranks: dict[JobId, int] = field(default_factory=dict)  # attempts whose ranks tell of nothing but a lost rank
    silent_since_s: dict[NodeName, float] = field(default_factory=dict)  # of nodes that are not connected: an estimate
    restored_last_id: int = 0  # of a database restored from a backup: the highest id in it
    not_taken: tuple[str, ...] = ()  # what the files say and this controller does not do, because jobs are held
    adopts_known: bool = False  # jobs from before a restore whose launch the database knows continue unasked
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

    def job_of_former(self, token: LaunchToken) -> Job | None:
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
        blocked: dict[str, Any] = {"drained": True, "drained_why": BLOCKED, "drained_by": OURSELVES}
        return [
            replace(node, **blocked) if node.name in taken and not node.drained else node
            for node in self.nodes.values()
        ]

    def requeues(self, job: Job) -> bool:
        """Return whether the job goes back to the queue when its node is lost."""
        wanted = job.spec.requeue if job.spec.requeue is not None else self.config.controller.requeue
        return wanted and job.spec.has_script

    def unseen_nodes(self) -> list[NodeName]:
        """Return the nodes that may still run what was launched before the database was restored, and have not said what."""
        if not self.restored_last_id:
            return []
        known = {*self.spools, *(name for name, _ in self.kept)}
        return [
            name for name, node in self.nodes.items() if not node.boot_id or (node.has_strays and name not in known)
        ]

    def gone_nodes(self) -> list[NodeName]:
        """Return the nodes that are not in the configuration any more, and that jobs hold."""
        held = {node: None for job in self.active_jobs() for node in job.held_nodes}
        return [node for node in held if node not in self.nodes]

    def put(self, job: Job) -> None:
        """Keep `job` in place of what was known under its id."""
        before = self.jobs.get(job.id)
        if before is None or (before.state in FINAL) != (job.state in FINAL):
            if before is not None:
                self.scripts.remove(before)
            self.scripts.add(job)
        if before is not None:
            self.states[before.state] -= 1
        self.states[job.state] += 1
        was_queued = job.id in self.pending or job.id in self.active
        self.queued[job.user] += (job.state is JobState.PENDING or job.state in ACTIVE) - was_queued
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
        if job.state in FINAL:
            self.ended.setdefault(job.id)
        else:
            self.ended.pop(job.id, None)

    def add(self, jobs: Sequence[Job]) -> dict[JobId, Job]:
        """Keep a job that was submitted now, or all tasks of an array; return them by id."""
        made = {job.id: job for job in jobs}
        self.scripts.add(jobs[0], len(jobs))
        self.jobs |= made
        self.pending |= dict.fromkeys(made)
        self.queued[jobs[0].user] += len(made)
        self.states[jobs[0].state] += len(made)
        if jobs[0].array_job_id is not None:
            self.arrays[jobs[0].array_job_id] = dict.fromkeys(made)
        return made

    def drop(self, job_id: JobId) -> None:
        """Forget the job here (its row stays in the store)."""
        job = self.jobs.pop(job_id, None)
        if job is not None:
            self.scripts.remove(job)
            self.states[job.state] -= 1
        if job is not None and (job_id in self.pending or job_id in self.active):
            self.queued[job.user] -= 1
        if job is not None and job.array_job_id is not None:
            tasks = self.arrays[job.array_job_id]
            del tasks[job_id]
            if not tasks:
                del self.arrays[job.array_job_id]
        self.pending.pop(job_id, None)
        self.active.pop(job_id, None)
        self.ended.pop(job_id, None)
        self.waits.pop(job_id, None)

    def count_states(self) -> Counter[JobState]:
        """Return how many jobs are in each state that any is in."""
        return +self.states

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
        jobs = self.jobs
        numbers = {
            number
            for job_id in self.pending
            if (terms := jobs[job_id].dependency)
            for dependency in terms
            for number in dependency.job_ids
        }
        return {job.id: job for number in numbers for job in self.numbered(number)}

    def jobs_to_plan(self) -> list[Job]:
        """Return what a plan must look at: jobs that wait, that hold nodes, and those that others depend on."""
        wanted = [self.jobs[job_id] for job_id in (*self.active, *self.pending)]
        others = [job for job in self.depended_on().values() if job.state in FINAL]
        return wanted + others

    def set_partitions(self, configured: Iterable[Partition]) -> None:
        """Take the partitions of the configuration, each in the state that an admin gave it."""
        states = self.partition_states
        self.partitions = {
            one.name: one if one.name not in states else replace(one, state=states[one.name]) for one in configured
        }

    def default_partition(self) -> Partition:
        """Return the partition for jobs that name none."""
        for partition in self.partitions.values():
            if partition.default:
                return partition
        return next(iter(self.partitions.values()))

    def forget_ended(self, before_s: float) -> None:
        """Drop from memory the jobs that ended before `before_s`, unless waiting jobs depend on them."""
        self._forget(job_id for job_id in self.ended if (self.jobs[job_id].ended_at_s or 0.0) < before_s)

    def forget_oldest(self, keep: int) -> None:
        """Drop from memory all but the last `keep` jobs to end, and those that waiting jobs depend on."""
        self._forget(itertools.islice(self.ended, max(0, len(self.ended) - keep)))

    def _forget(self, job_ids: Iterable[JobId]) -> None:
        found = list(job_ids)
        needed = self.depended_on() if found else {}
        for job_id in found:
            if job_id not in needed:
                self.drop(job_id)


class Transaction:
    """One tick's changes to the world, to be committed as one `Batch`, or undone.

    With `commit` each `attempt` is committed by itself, and the transaction as a whole is not: a way to tell what of it
    cannot be written.
    """

    def __init__(
        self,
        world: World,
        now_s: float,
        within: Transaction | None = None,
        *,
        commit: Callable[[Batch], None] | None = None,
    ) -> None:
        self.world = world
        self.now_s = now_s
        self._within = within
        self._commit = commit
        self.batch = Batch()
        self._jobs_before: dict[JobId, Job | None] = {}
        self._nodes_before: dict[NodeName, Node] = {}
        self._usage_before: dict[tuple[str, str, str], UsedResources | None] = {}
        self._reservations_before: dict[str, Reservation | None] = {}
        self._partitions_before: tuple[dict[str, Partition], dict[str, PartitionState]] | None = None
        self._crontabs_before: dict[int, Crontab | None] = {}
        self._triggers_before: dict[int, Trigger | None] = {}
        self._kept_before: dict[tuple[NodeName, str], Kept] = {}
        self._ids_before = (world.last_job_id, world.last_spec_id)

    def record(self, event: Event) -> Job:
        """Apply `event` to its job and note both for the commit. Returns the job as it is now."""
        if isinstance(event, Allocated | NodesAdded):
            event = replace(event, shares=self._with_spools(event.shares))
        job = self.world.jobs.get(event.job_id)
        if job is None:
            raise InvariantError(f"cannot record {type(event).__name__}: there is no job {event.job_id}")
        changed = apply(job, event)
        self._charge(job, changed, event.at_s)
        self._put(changed)
        self.batch.events.append(event)
        return changed

    def _with_spools(self, shares: tuple[Share, ...]) -> tuple[Share, ...]:
        """Return the shares with the spools that the nodes' names lead to now."""
        spools = self.world.spools
        return tuple(replace(share, spool=spools.get(share.node, "")) for share in shares)

    def submit(self, spec: JobSpec, *, uid: int, user: str, partition: str, time_limit_s: int | None) -> list[Job]:
        """Make the job (or all tasks of the array) that `spec` asks for."""
        world = self.world
        world.last_spec_id += 1
        spec, script = set_apart(spec)
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
        if script:
            self.batch.scripts[spec.script_sha256] = script
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

    def set_node(self, name: NodeName, **changes: Any) -> Node:
        """Change what is kept of a node; of one that left the configuration nothing is."""
        before = self.world.nodes[name]
        if name not in self.world.nodes:
            return before
        self._nodes_before.setdefault(name, before)
        node = replace(before, **changes)
        self.world.nodes[name] = node
        self.batch.nodes[name] = node
        return node

    def set_reservation(self, name: str, reservation: Reservation | None) -> None:
        """Keep `reservation` under `name`; None: there is none of that name any more."""
        self._reservations_before.setdefault(name, self.world.reservations.get(name))
        _keep(self.world.reservations, name, reservation)
        self.batch.reservations[name] = reservation

    def set_partition_state(self, name: str, state: PartitionState) -> Partition:
        """Give a partition a state, whatever the configuration says."""
        world = self.world
        self._partitions_before = self._partitions_before or (world.partitions, world.partition_states)
        world.partition_states = world.partition_states | {name: state}
        world.partitions = world.partitions | {name: replace(world.partitions[name], state=state)}
        self.batch.partitions[name] = state
        return world.partitions[name]

    def set_crontab(self, uid: int, crontab: Crontab | None) -> None:
        """Keep the crontab of a user; None: there is none any more."""
        self._crontabs_before.setdefault(uid, self.world.crontabs.get(uid))
        _keep(self.world.crontabs, uid, crontab)
        self.batch.crontabs[uid] = crontab

    def set_trigger(self, number: int, trigger: Trigger | None) -> None:
        """Keep a trigger under its number; None: there is none any more."""
        self._triggers_before.setdefault(number, self.world.triggers.get(number))
        _keep(self.world.triggers, number, trigger)
        self.batch.triggers[number] = trigger

    def nodes_before(self) -> dict[NodeName, Node]:
        """Return the nodes that this transaction has changed, as they were before it."""
        return dict(self._nodes_before)

    def adopt(self, token: str) -> None:
        """Take the launch of a former incarnation for its job's own from now on."""
        self.world.adopted.add(token)
        self.batch.adopted.append(token)

    def decided(self, keys: Iterable[tuple[NodeName, str]]) -> None:
        """Ask no admin any more about these launches of a former incarnation."""
        for key in list(keys):
            self._kept_before[key] = self.world.kept.pop(key)

    def put_usage(self, used: UsedResources) -> None:
        """Note what has been used for the commit."""
        self._usage_before.setdefault(used.key, self.world.usage.get(used.key))
        self.world.usage[used.key] = self.batch.usage[used.key] = used

    def put_step(self, step: StepRow) -> None:
        """Note a step's row for the commit."""
        self.batch.steps[(step.job_id, step.attempt, step.step)] = step

    def put_training(self, training: TrainingStatus) -> None:
        """Note a training program's word for the commit."""
        self.batch.training[training.job_id] = training

    def put_failure(self, failure: RankFailure) -> None:
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
        if self._partitions_before is not None:
            self.world.partitions, self.world.partition_states = self._partitions_before
        for uid, crontab in self._crontabs_before.items():
            _keep(self.world.crontabs, uid, crontab)
        for number, trigger in self._triggers_before.items():
            _keep(self.world.triggers, number, trigger)
        self.world.last_job_id, self.world.last_spec_id = self._ids_before

    def attempt(self, what: str, work: Callable[[Transaction], Any]) -> Any:
        """Do `work` in a savepoint and return its result. If it fails, undo it alone and return the error.

        An unexpected exception is logged as a failure to do `what`, and returned as InternalError. Only InvariantError is
        raised: what is in memory may not be what is on disk any more.
        """
        inner = self.savepoint()
        try:
            result = work(inner)
            if self._commit is not None and inner.batch:
                self._commit(inner.batch)
        except InvariantError:
            raise
        except Exception as error:  # the barrier: it is the failure of this piece alone
            try:
                inner.undo()
            except Exception as wrong:
                raise InvariantError(f"cannot undo what has failed: {error!r}") from wrong
            return error if isinstance(error, HpcschedError | WireError) else mishap.report(error, what)
        self.merge(inner)
        return result

    def savepoint(self) -> Transaction:
        """Return a transaction for one request: `merge` it when the request succeeded, `undo` it when it did not."""
        return Transaction(self.world, self.now_s, self)

    def merge(self, inner: Transaction) -> None:
        """Take over the changes of a `savepoint`."""
        _add_missing(self._jobs_before, inner._jobs_before)
        _add_missing(self._nodes_before, inner._nodes_before)
        _add_missing(self._usage_before, inner._usage_before)
        _add_missing(self._reservations_before, inner._reservations_before)
        _add_missing(self._crontabs_before, inner._crontabs_before)
        _add_missing(self._triggers_before, inner._triggers_before)
        self._partitions_before = self._partitions_before or inner._partitions_before
        self.batch.partitions |= inner.batch.partitions
        self.batch.usage |= inner.batch.usage
        self.batch.crontabs |= inner.batch.crontabs
        self.batch.triggers |= inner.batch.triggers
        self._kept_before |= inner._kept_before
        self.batch.specs |= inner.batch.specs
        self.batch.scripts |= inner.batch.scripts
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
        self.batch.clock = inner.batch.clock or self.batch.clock

    def _charge(self, before: Job, after: Job, at_s: float) -> None:
        """Charge what the job gave back, if it did, to its user, account and QOS: in this very commit, so once."""
        if after.charged_cpu_s == before.charged_cpu_s and after.charged_mem_mib_s == before.charged_mem_mib_s:
            return
        world, accounting = self.world, self.world.config.accounting
        weights = weights_of(accounting, world.partitions.get(before.partition))
        amounts = charge_of(before, after, at_s, accounting, weights, world.gpu_types(before))
        account, user = accounting.association_of(before.user, before.account)
        known = world.usage.get((account, user, before.qos))
        used = known or UsedResources(account=account, user=user, qos=before.qos, at_s=at_s)
        self.put_usage(plus(at(used, at_s, accounting.half_life_s), amounts))

    def _put(self, job: Job) -> None:
        self._jobs_before.setdefault(job.id, self.world.jobs.get(job.id))
        self.world.put(job)
        self.batch.jobs[job.id] = job


def is_attempt_of(job: Job, token: LaunchToken) -> bool:
    """Return whether the launch is a part of the attempt that the job is at."""
    own = LaunchToken.parse(job.token)
    return (own.incarnation, own.attempt) == (token.incarnation, token.attempt)


def _add_missing(known: dict[K, V], more: Mapping[K, V]) -> None:
    for key, value in more.items():
        known.setdefault(key, value)


def _keep(kept: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        kept.pop(key, None)
    else:
        kept[key] = value
