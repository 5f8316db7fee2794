"""The state of the cluster, as the controller holds it in memory.

`ClusterState` mirrors the rows of the database. It is loaded at the start and changed only inside a `Transaction`
(`hpcsched.state.transaction`). Knows neither the database nor the controller.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hpcsched.config.load import Config
from hpcsched.model.cron import Crontab
from hpcsched.model.ids import BATCH_STEP, JobId, LaunchToken, NodeName
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState
from hpcsched.model.node import OURSELVES, Link, Node, NodeSpec, Partition, PartitionState
from hpcsched.model.reservation import Reservation
from hpcsched.model.training import TrainingStatus
from hpcsched.model.trigger import Trigger
from hpcsched.sched.decisions import Wait
from hpcsched.sched.queue.usage import UsedResources
from hpcsched.state.scripts import ScriptUses

BLOCKED = "runs what was launched before the database was restored: hctl strays"


class UndecidedLaunch(NamedTuple):
    """A launch of a former incarnation that a node runs, and what the node last said of it."""

    token: LaunchToken
    report: Any  # a protocol.Report


class Nodes(dict[NodeName, Node]):
    """The nodes of the configuration. One that left it is still named by jobs: asked for, it is a node that does not answer."""

    def __missing__(self, name: NodeName) -> Node:
        spec = NodeSpec(name=name, host="", host_key="", cpus=0, mem_mib=0)
        return Node(spec=spec, link=Link.DOWN, link_why="it is not in the configuration any more")


@dataclass(slots=True)
class ClusterState:
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
    ask_about_orphans: bool = False  # nothing from before a restore is ended without an admin's word
    undecided_launches: dict[tuple[NodeName, str], UndecidedLaunch] = field(default_factory=dict)  # by node and token
    to_kill: set[tuple[NodeName, str, int]] = field(
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
        taken = {node for (node, _), kept in self.undecided_launches.items() if self.job_of_former(kept.token) is None}
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
        known = {*self.spools, *(name for name, _ in self.undecided_launches)}
        return [
            name for name, node in self.nodes.items() if not node.boot_id or (node.has_orphans and name not in known)
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


def is_attempt_of(job: Job, token: LaunchToken) -> bool:
    """Return whether the launch is a part of the attempt that the job is at."""
    own = LaunchToken.parse(job.token)
    return (own.incarnation, own.attempt) == (token.incarnation, token.attempt)
