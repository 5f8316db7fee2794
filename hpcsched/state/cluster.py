"""Hold the state of the cluster in the controller's memory.

`ClusterState` mirrors the rows of the database. It is loaded at the start and changed only inside a
`Transaction` (`hpcsched.state.transaction`). Knows neither the database nor the controller.

The text of a job script is not in memory. It is in the database once, under its SHA-256, which the
specification of a job in the queue has. A script stays until the last job in memory that uses it is
purged (``min_job_age_s`` after its end). Scripts of ended jobs are deleted earlier if all scripts of
their account together exceed its limit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple

from hpcsched.auth.tokens import Credential
from hpcsched.config.load import Config
from hpcsched.metrics.bench import BenchRun, measured_nodes
from hpcsched.metrics.links import LinkRun
from hpcsched.model import frozen
from hpcsched.model.cron import Crontab
from hpcsched.model.ids import BATCH_STEP, JobId, LaunchToken, NodeName
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState, LiveUse, TrainingStatus
from hpcsched.model.node import OURSELVES, UNMEASURED, Link, Node, NodeSpec, Partition, PartitionState
from hpcsched.model.reservation import Reservation
from hpcsched.model.service import Service
from hpcsched.model.spec import JobSpec
from hpcsched.model.trigger import Trigger
from hpcsched.sched.decisions import Wait
from hpcsched.sched.fairshare import UsageKey, UsedResources

BLOCKED = "runs what was launched before the database was restored: hctl strays"


class UndecidedLaunch(NamedTuple):
    """A launch of an earlier incarnation that a node runs, and the node's last report on it."""

    token: LaunchToken
    report: Any  # a protocol.Report


class Nodes(dict[NodeName, Node]):
    """The configured nodes. A lookup of any other node returns a node that does not answer.

    Jobs can still name a node that has left the configuration.
    """

    def __missing__(self, name: NodeName) -> Node:
        spec = NodeSpec(name=name, host="", host_key="", cpus=0, mem_mib=0)
        return Node(spec=spec, link=Link.DOWN, link_why="it is not in the configuration any more")


UNCOUNTED_BYTES = 8 << 10  # of each specification: an ordinary environment


def large_bytes(spec: JobSpec) -> int:
    """Return the bytes of environment, arguments and command line above `UNCOUNTED_BYTES`."""
    size = len(spec.submit_line) + sum(map(len, spec.script_args)) + len(spec.comment)
    size += sum(len(name) + len(value) for name, value in spec.env)
    return max(0, size - UNCOUNTED_BYTES)


class BackupState(NamedTuple):
    """The newest backup that all directories have, 0: none; and why the last one failed."""

    newest_at_s: float
    why: str


class LargeTexts:
    """Counts the bytes of large specifications of each account in memory, also of ended jobs.

    The tasks of an array share a specification, which counts once.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, int] = {}  # by specification
        self._bytes: dict[int, int] = {}  # by account

    def add(self, job: Job, count: int = 1) -> None:
        """Add `count` jobs like `job` to the counts."""
        if job.spec_id not in self._jobs and (size := large_bytes(job.spec)):
            self._bytes[job.uid] = self._bytes.get(job.uid, 0) + size
        self._jobs[job.spec_id] = self._jobs.get(job.spec_id, 0) + count

    def remove(self, job: Job) -> None:
        """Remove `job` from the counts."""
        self._jobs[job.spec_id] -= 1
        if self._jobs[job.spec_id]:
            return
        del self._jobs[job.spec_id]
        if size := large_bytes(job.spec):
            self._bytes[job.uid] -= size
            if not self._bytes[job.uid]:
                del self._bytes[job.uid]

    def bytes_of(self, uid: int) -> int:
        """Return the bytes that are counted for the account."""
        return self._bytes.get(uid, 0)


class ScriptUses:
    """Counts the jobs in memory that use each script, by account and hash.

    Jobs that have not ended are counted separately.
    """

    def __init__(self) -> None:
        self._unended: dict[tuple[int, str], int] = {}
        self._ended: dict[tuple[int, str], int] = {}  # oldest script first
        self._users: dict[str, int] = {}  # by hash: entries in both
        self._sizes: dict[str, int] = {}
        self._unended_bytes: dict[int, int] = {}  # by account; each script counts once
        self._ended_bytes: dict[int, int] = {}
        self._unused: dict[str, None] = {}

    def add(self, job: Job, count: int = 1) -> None:
        """Add `count` jobs like `job` to the counts."""
        sha256 = job.spec.script_sha256
        if not sha256:
            return
        key = (job.uid, sha256)
        ended = job.state in FINAL
        table, in_bytes = (self._ended, self._ended_bytes) if ended else (self._unended, self._unended_bytes)
        if key in table:
            table[key] += count
            return
        table[key] = count
        in_bytes[job.uid] = in_bytes.get(job.uid, 0) + job.spec.script_bytes
        self._users[sha256] = self._users.get(sha256, 0) + 1
        self._sizes[sha256] = job.spec.script_bytes
        self._unused.pop(sha256, None)

    def remove(self, job: Job) -> None:
        """Remove `job` from the counts."""
        key = (job.uid, job.spec.script_sha256)
        table = self._ended if job.state in FINAL else self._unended
        if key not in table:
            return  # it has no script, or the script was deleted early
        table[key] -= 1
        if not table[key]:
            self._drop(table, key)

    def _drop(self, table: dict[tuple[int, str], int], key: tuple[int, str]) -> None:
        uid, sha256 = key
        in_bytes = self._ended_bytes if table is self._ended else self._unended_bytes
        del table[key]
        in_bytes[uid] -= self._sizes[sha256]
        if not in_bytes[uid]:
            del in_bytes[uid]
        self._users[sha256] -= 1
        if not self._users[sha256]:
            del self._users[sha256], self._sizes[sha256]
            self._unused[sha256] = None

    def has(self, job: Job) -> bool:
        """Return whether the script of `job` is still stored."""
        return not job.spec.script_sha256 or job.spec.script_sha256 in self._users

    def unended_bytes(self, uid: int) -> int:
        """Return the bytes of the different scripts of the account's waiting and running jobs."""
        return self._unended_bytes.get(uid, 0)

    def let_go(self, most_bytes: int) -> bool:
        """Drop the oldest scripts of ended jobs for accounts that use more than `most_bytes`.

        Return whether any was dropped.
        """
        over = [uid for uid, ended in self._ended_bytes.items() if ended + self._unended_bytes.get(uid, 0) > most_bytes]
        for uid in over:
            # Drop a quarter more than needed, so that the next ended job does not scan all scripts
            # again.
            least = min(most_bytes - self._unended_bytes.get(uid, 0), most_bytes * 3 // 4)
            for key in [key for key in self._ended if key[0] == uid]:
                if self._ended_bytes.get(uid, 0) <= least:
                    break
                self._drop(self._ended, key)
        return bool(over)

    def keep_only(self, stored: Collection[str]) -> None:
        """Drop scripts of ended jobs that are not among the `stored` hashes.

        These were deleted before the last restart.
        """
        for key in [key for key in self._ended if key[1] not in stored]:
            self._drop(self._ended, key)

    def take_unused(self) -> list[str]:
        """Return the hashes of scripts that no job uses any more, each once."""
        unused = list(self._unused)
        self._unused.clear()
        return unused

    def put_back(self, unused: list[str]) -> None:
        """Queue hashes for `take_unused` again, because they could not be deleted."""
        self._unused |= dict.fromkeys(sha256 for sha256 in unused if sha256 not in self._users)

    def unknown(self, stored: list[str]) -> list[str]:
        """Return those of the `stored` hashes that no job uses."""
        return [sha256 for sha256 in stored if sha256 not in self._users]


@dataclass(slots=True)
class ClusterState:
    """The state of the cluster. `waits` has the last plan's wait of each pending job.

    `waits` is not stored.
    """

    config: Config
    incarnation: str
    epoch: int
    start: str = ""  # random, of this start of the controller
    jobs: dict[JobId, Job] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=Nodes)
    partitions: dict[str, Partition] = field(default_factory=dict)
    partition_states: dict[str, PartitionState] = field(default_factory=dict)  # set by admins
    # Ids in the order in which they became pending.
    pending: dict[JobId, None] = field(default_factory=dict)
    active: dict[JobId, None] = field(default_factory=dict)
    # Ids of ended jobs in memory, in the order of their ends.
    ended: dict[JobId, None] = field(default_factory=dict)
    queued: Counter[str] = field(default_factory=Counter)  # jobs that wait or hold nodes, by user
    # Jobs in memory by state, kept up to date because counting them is slow.
    states: Counter[JobState] = field(default_factory=Counter)
    # Array id -> ids of its tasks.
    arrays: dict[JobId, dict[JobId, None]] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    crontabs: dict[int, Crontab] = field(default_factory=dict)  # by uid
    triggers: dict[int, Trigger] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)
    # The last assessment of each node that was not busy, and of each link.
    benches: dict[str, BenchRun] = field(default_factory=dict)
    links: dict[frozenset[str], LinkRun] = field(default_factory=dict)
    credentials: dict[str, Credential] = field(default_factory=dict)  # of the API over the network
    waits: dict[JobId, Wait] = field(default_factory=dict)
    # Of waiting jobs, from the last plan; not stored.
    priorities: Mapping[JobId, int] = field(default_factory=dict)
    scripts: ScriptUses = field(default_factory=ScriptUses)
    large_texts: LargeTexts = field(default_factory=LargeTexts)
    last_job_id: int = 0
    last_spec_id: int = 0
    # Specifications whose environment no key opens: their waiting jobs are held.
    unopened_specs: frozenset[int] = frozenset()
    # The keys of jobs are derived from it; empty: jobs get none.
    jobs_secret: bytes = field(default=b"", repr=False)
    # Usage of released resources, charged.
    usage: dict[UsageKey, UsedResources] = field(default_factory=dict)
    # Last status from the programs of active jobs.
    training: dict[JobId, TrainingStatus] = field(default_factory=dict)
    # What a running job uses, by the last samples of its nodes; None: not known.
    live_use: Callable[[Job], LiveUse | None] = lambda _job: None
    # Of connected nodes; "": the agent does not send it; not stored.
    spools: dict[NodeName, str] = field(default_factory=dict)
    # Attempts whose ranks report only a lost rank.
    lost_ranks: dict[JobId, int] = field(default_factory=dict)
    # For nodes that are not connected: an estimate.
    silent_since_s: dict[NodeName, float] = field(default_factory=dict)
    # Of scheduled backups; None: there are none, or it is not known yet.
    backup: BackupState | None = None
    restored_last_id: int = 0  # of a database restored from a backup: the highest id in it
    not_taken: tuple[str, ...] = ()  # file settings not applied because jobs are held
    # Jobs from before a restore whose launch is in the database are adopted automatically.
    adopts_known: bool = False
    # Launches from before a restore end only by an admin's decision.
    ask_about_orphans: bool = False
    # By node and token.
    undecided_launches: dict[tuple[NodeName, str], UndecidedLaunch] = field(default_factory=dict)
    # (node, incarnation, job) that an admin wants ended.
    to_kill: set[tuple[NodeName, str, int]] = field(default_factory=set)
    # Tokens of earlier incarnations whose jobs continue.
    adopted: set[str] = field(default_factory=set)

    def gpu_types(self, job: Job) -> dict[NodeName, dict[int, str]]:
        """Return by node the types of the job's GPUs, by index."""
        nodes = [self.nodes[share.node] for share in job.shares if share.gpus and share.node in self.nodes]
        return {node.name: {gpu.index: gpu.type for gpu in node.spec.gpus} for node in nodes}

    def is_former(self, job: Job) -> bool:
        """Return whether the job's last launch was before the database was restored."""
        return bool(job.token) and not job.token.startswith(self.incarnation + ".") and job.token not in self.adopted

    def job_of_former(self, token: LaunchToken) -> Job | None:
        """Return the job with nodes to which this launch belongs by its whole token.

        The launch is from before the database was restored.
        """
        job = self.jobs.get(token.job_id)
        if job is None or not job.token or not job.held_nodes or not is_attempt_of(job, token):
            return None
        if token.step == BATCH_STEP and str(token) != job.token:
            return None
        return job if token.node in job.held_nodes else None

    def measured_again(self) -> dict[NodeName, Node]:
        """Return the nodes of which the assessments say something else than before."""
        found = measured_nodes([node.spec for node in self.nodes.values()], self.benches, self.links.values())
        nodes = {name: replace(node, measured=found.get(name, UNMEASURED)) for name, node in self.nodes.items()}
        return {name: node for name, node in nodes.items() if node != self.nodes[name]}

    def open_nodes(self) -> list[Node]:
        """Return the nodes that a plan may use.

        A node that runs something that no job here holds is left out, because its free resources
        are unknown.
        """
        taken = {node for (node, _), kept in self.undecided_launches.items() if self.job_of_former(kept.token) is None}
        blocked: dict[str, Any] = {"drained": True, "drained_why": BLOCKED, "drained_by": OURSELVES}
        return [
            replace(node, **blocked) if node.name in taken and not node.drained else node
            for node in self.nodes.values()
        ]

    def requeues(self, job: Job) -> bool:
        """Return whether the job is requeued when its node is lost."""
        wanted = job.spec.requeue if job.spec.requeue is not None else self.config.controller.requeue
        return wanted and job.spec.has_script

    def unseen_nodes(self) -> list[NodeName]:
        """Return the nodes that have not reported their launches since a restore.

        They may still run launches from before the restore.
        """
        if not self.restored_last_id:
            return []
        known = {*self.spools, *(name for name, _ in self.undecided_launches)}
        return [
            name for name, node in self.nodes.items() if not node.boot_id or (node.has_orphans and name not in known)
        ]

    def sealed_jobs(self) -> list[JobId]:
        """Return the waiting jobs whose environment no key opens: they must not start."""
        if not self.unopened_specs:
            return []
        return [job_id for job_id in self.pending if self.jobs[job_id].spec_id in self.unopened_specs]

    def gone_nodes(self) -> list[NodeName]:
        """Return the nodes that jobs hold but that have left the configuration."""
        held = {node: None for job in self.active_jobs() for node in job.held_nodes}
        return [node for node in held if node not in self.nodes]

    def put(self, job: Job) -> None:
        """Replace the job of this id by `job`."""
        before = self.jobs.get(job.id)
        if before is None or (before.state in FINAL) != (job.state in FINAL):
            if before is not None:
                self.scripts.remove(before)
            self.scripts.add(job)
        if before is None or before.spec_id != job.spec_id:
            self.large_texts.add(job)
            if before is not None:
                self.large_texts.remove(before)
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
        """Add a newly submitted job, or all tasks of an array; return them by id."""
        made = {job.id: job for job in jobs}
        self.scripts.add(jobs[0], len(jobs))
        self.large_texts.add(jobs[0], len(jobs))
        self.jobs |= made
        self.pending |= dict.fromkeys(made)
        self.queued[jobs[0].user] += len(made)
        self.states[jobs[0].state] += len(made)
        if jobs[0].array_job_id is not None:
            self.arrays[jobs[0].array_job_id] = dict.fromkeys(made)
        return made

    def drop(self, job_id: JobId) -> None:
        """Remove the job from memory. Its row stays in the store."""
        job = self.jobs.pop(job_id, None)
        if job is not None:
            self.scripts.remove(job)
            self.large_texts.remove(job)
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
        """Return the number of jobs in each state that occurs."""
        return +self.states

    def active_jobs(self) -> list[Job]:
        """Return the jobs that hold nodes."""
        return [self.jobs[job_id] for job_id in self.active]

    def jobs_on(self, node: NodeName) -> list[Job]:
        """Return the jobs that hold a part of `node`."""
        return [job for job in self.active_jobs() if node in job.held_nodes]

    def numbered(self, job_id: int) -> list[Job]:
        """Return the job of this id, or all tasks of the array of this id; empty if unknown."""
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
        """Return the jobs that a plan needs: waiting jobs, jobs with nodes, and dependencies."""
        wanted = [self.jobs[job_id] for job_id in (*self.active, *self.pending)]
        others = [job for job in self.depended_on().values() if job.state in FINAL]
        return wanted + others

    def set_partitions(self, configured: Iterable[Partition]) -> None:
        """Set the configured partitions, each in the state that an admin set."""
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
        """Purge from memory jobs that ended before `before_s`.

        Jobs that waiting jobs depend on stay.
        """
        self._forget(job_id for job_id in self.ended if (self.jobs[job_id].ended_at_s or 0.0) < before_s)

    def forget_oldest(self, keep: int) -> None:
        """Purge from memory all but the last `keep` ended jobs.

        Jobs that waiting jobs depend on stay.
        """
        self._forget(itertools.islice(self.ended, max(0, len(self.ended) - keep)))

    def _forget(self, job_ids: Iterable[JobId]) -> None:
        found = list(job_ids)
        needed = self.depended_on() if found else {}
        for job_id in found:
            if job_id not in needed:
                self.drop(job_id)


def is_attempt_of(job: Job, token: LaunchToken) -> bool:
    """Return whether the launch belongs to the job's present attempt."""
    own = LaunchToken.parse(job.token)
    return (own.incarnation, own.attempt) == (token.incarnation, token.attempt)


def set_apart(spec: JobSpec) -> tuple[JobSpec, bytes]:
    """Return the specification as queued, and the text of its script (empty if it has none)."""
    if any(one.has_script for one in spec.components):  # components run the script of their job
        bare = tuple(frozen.replace(one, script="", script_sha256="", script_bytes=0) for one in spec.components)
        spec = frozen.replace(spec, components=bare)
    if not spec.script:
        return spec, b""
    text = spec.script.encode("utf-8", "surrogateescape")
    return frozen.replace(spec, script="", script_sha256=sha256(text).hexdigest(), script_bytes=len(text)), text
