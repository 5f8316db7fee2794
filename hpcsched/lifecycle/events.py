"""What can happen to a job: events in the past tense, the only things that change one.

`at_s` is the controller's clock (Unix seconds) when it recorded the event. Events are stored as JSON (`to_data`,
`from_data`) in the same commit as the rows that they changed; replaying a job's events gives its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from hpcsched.errors import InvariantError
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ExitStatus, Hold, JobState
from hpcsched.model.node import Share
from hpcsched.model.spec import Dependency, DependencyKind

MAX_NAME, MAX_TEXT = 200, 500  # of an event of the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    job_id: JobId
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(JobEvent):
    """A job was submitted.

    For an array, one event makes all tasks; `job_id` is that of the first and of the array.
    """

    spec_id: int
    uid: int
    user: str
    partition: str
    time_limit_s: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(JobEvent):
    hold: Hold
    by_uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(JobEvent):
    by_uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(JobEvent):
    """Its owner or an admin changed these fields; a field that is None is unchanged."""

    by_uid: int
    time_limit_s: int | None = None
    partition: str | None = None
    nice: int | None = None
    priority_set: int | None = None
    not_before_s: float | None = None
    dependency: tuple[Dependency, ...] | None = None
    dependency_any: bool | None = None
    array_limit: int | None = None
    deadline_at_s: int | None = None  # 0: none
    reservation: str | None = None
    account: str | None = None
    qos: str | None = None
    time_min_s: int | None = None  # 0: none
    site: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Respecified(JobEvent):
    """Its owner or an admin changed its specification: these fields, as JSON values.

    The new specification has a row of its own, number `spec_id`.
    """

    by_uid: int
    spec_id: int
    changes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRenamed(JobEvent):
    """Nodes that refused it, or that it has given back, have other names now.

    `names`: the new name by the former.
    """

    names: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameEligible(JobEvent):
    """From now on it waits only for resources and other jobs: its age counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated(JobEvent):
    """The attempt has its nodes, and the token of its batch step.

    Committed before anything is sent to a node.
    """

    token: str
    epoch: int
    shares: tuple[Share, ...]
    lease_s: float | None = None
    partition: str | None = None  # the one of its partitions in which it starts
    time_limit_s: int | None = None  # its time limit, lowered so that it can start


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(JobEvent):
    """A node that does not run the batch step has claimed its part of the job."""

    node: NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(JobEvent):
    """The batch step's program was started, or an allocation without one is ready.

    `ran_s`: how long ago that was, by the node's clock, because the report may be late.
    """

    ran_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended(JobEvent):
    """It is suspended: by a user (`by_uid`), or so that `for_job` gets its cpus."""

    by_uid: int | None
    for_job: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(JobEvent):
    """It is resumed."""

    by_uid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequested(JobEvent):
    """A user or a limit ends it as `outcome`; with `requeue` it is requeued afterwards.

    `exit`: of the only step of an allocation without a script. `for_job`: it is preempted for that job. `save_s`: the grace
    period after a signal to save its work.
    """

    outcome: JobState
    by_uid: int | None
    why: str
    exit: ExitStatus | None = None
    requeue: bool = False
    not_before_s: float | None = None
    for_job: JobId | None = None
    save_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReserved(JobEvent):
    """This waiting job gets these shares, for which other jobs are preempted.

    No other job gets them meanwhile.
    """

    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesUnreserved(JobEvent):
    """This waiting job has no reserved shares any more."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkAsked(JobEvent):
    """It is elastic, and is asked to keep only these nodes: `for_job` waits for the others."""

    nodes: tuple[NodeName, ...]
    for_job: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReleased(JobEvent):
    """It continues without these nodes, which are being cleared of it."""

    nodes: tuple[NodeName, ...]
    by_uid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAdded(JobEvent):
    """It is elastic, and gets these additional shares once their nodes have claimed them."""

    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(JobEvent):
    """The batch step ended on its node, which has nothing left of the job.

    `clearing`: but its epilog, so the node is held until NodeCleared.

    `requeue`: its exit status asks for a requeue. `ran_s`: how long it ran by the node's clock. `ago_s`: how long ago it
    ended, because the report may be late. None: unknown. `unexecuted`: why the node could not
    execute the script, "" if it ran; with `requeue` it is tried on another node. `saved_step`: a rank was killed, and the next
    attempt resumes from the checkpoint of this step. `output_full`: the file system of its output file was full.
    """

    node: NodeName
    exit: ExitStatus
    ran_s: float | None = None
    ago_s: float | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    requeue: bool = False
    unexecuted: str = ""
    saved_step: int | None = None
    output_full: bool = False
    clearing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRefused(JobEvent):
    """The node could not start it, and will not: `why` is its message.

    With `requeue` it is tried on another node.
    """

    node: NodeName
    why: str
    requeue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCleared(JobEvent):
    """The node reports that it has no part of this attempt, and starts none."""

    node: NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(JobEvent):
    """The attempt provably cannot run on `node` any more; a timeout is not enough.

    The node rebooted, lost its record, or was fenced.
    """

    node: NodeName
    why: str
    requeue: bool
    not_before_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent(JobEvent):
    """A node that the failed attempt still holds does not answer.

    The node's loss, not the script, counts as the cause of the failure.

    That does not prove that the attempt cannot run there: the job holds the node until it is proven.
    """

    node: NodeName
    why: str
    requeue: bool
    not_before_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued(JobEvent):
    """An ended job was put back into the queue on request."""

    by_uid: int
    not_before_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted(JobEvent):
    """A launch from before the restore of the database is this job, and continues.

    `by_uid`: the admin who decided it; None: its token did.
    """

    by_uid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStepped(JobEvent):
    """The head node's clock was set by `by_s` seconds, and the attempt's times moved."""

    by_s: float


class EventSubject(StrEnum):
    """What an event of the cluster is about."""

    JOB = "job"
    NODE = "node"
    RESERVATION = "reservation"
    CONFIGURATION = "configuration"
    ALERT = "alert"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """Something that happened to no job, for those who follow events; it changes nothing.

    `name`: of the node, reservation or rule. `by`: the user who did it. `more`: JSON values.
    """

    about: EventSubject
    kind: str
    name: str
    at_s: float
    text: str = ""
    by: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """Return the fields that have no columns of their own, with bounded texts."""
        return {
            **self.more,
            "about": self.about.value,
            "name": self.name[:MAX_NAME],
            "text": self.text[:MAX_TEXT],
            "by": self.by[:MAX_NAME],
        }


EVENTS: dict[str, type[JobEvent]] = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, JobEvent) and value is not JobEvent
}

# Names and defaults of the fields of each kind of event that have no columns of their own.
_OWN_FIELDS: dict[type[JobEvent], tuple[tuple[str, Any], ...]] = {
    kind: tuple((field.name, field.default) for field in fields(kind) if field.name not in ("job_id", "at_s"))
    for kind in EVENTS.values()
}


def to_data(event: JobEvent) -> dict[str, Any]:
    """Return the event's own fields as JSON values.

    Its kind, job id and time have their own columns.
    """
    data: dict[str, Any] = {}
    for name, default in _OWN_FIELDS[type(event)]:
        value = getattr(event, name)
        if (value is None and default is None) or (value == "" and default == ""):
            continue
        if name == "shares":
            value = [share_to_data(share) for share in value]
        elif isinstance(value, ExitStatus):
            value = [value.code, value.signal]
        elif name == "dependency":
            value = dependency_to_data(value)
        data[name] = value
    return data


def from_data(kind: str, job_id: int, at_s: float, data: dict[str, Any]) -> JobEvent:
    """Return the event that was stored. Raises InvariantError for a kind that does not exist."""
    cls = EVENTS.get(kind)
    if cls is None:
        raise InvariantError(f"cannot read event {kind!r} of job {job_id}: no such kind")
    values = dict(data)
    if "shares" in values:
        values["shares"] = tuple(share_from_data(share) for share in values["shares"])
    if "nodes" in values:
        values["nodes"] = tuple(map(NodeName, values["nodes"]))
    if "exit" in values:
        values["exit"] = ExitStatus(code=values["exit"][0], signal=values["exit"][1])
    if "hold" in values:
        values["hold"] = Hold(values["hold"])
    if values.get("for_job") is not None:
        values["for_job"] = JobId(values["for_job"])
    if "outcome" in values:
        values["outcome"] = JobState(values["outcome"])
    if "dependency" in values:
        values["dependency"] = dependency_from_data(values["dependency"])
    return cls(job_id=JobId(job_id), at_s=at_s, **values)


def share_to_data(share: Share) -> list[Any]:
    """Return the share as a JSON list.

    Node, cpus, mem_mib, gpus, tasks; of a shared GPU also shards, shards_of.

    Then follow the number of its component and its spool, as far as they are not 0 and "".
    """
    data = [share.node, share.cpus, share.mem_mib, list(share.gpus), share.tasks]
    if share.shards or share.component or share.spool:
        data += [share.shards, share.shards_of]
    if share.component or share.spool:
        data.append(share.component)
    if share.spool:
        data.append(share.spool)
    return data


def share_from_data(data: list[Any]) -> Share:
    """Return the share that `share_to_data` wrote."""
    node, cpus, mem_mib, gpus, tasks, *shared = data
    usual: list[Any] = [0, 0, 0, ""]
    shards, shards_of, component, spool = shared + usual[len(shared) :]
    return Share(
        node=NodeName(node),
        cpus=cpus,
        mem_mib=mem_mib,
        gpus=tuple(gpus),
        tasks=tasks,
        shards=shards,
        shards_of=shards_of,
        component=component,
        spool=spool,
    )


def dependency_to_data(terms: tuple[Dependency, ...]) -> list[list[Any]]:
    """Return the terms of a dependency as JSON lists: kind, job ids, delay, task."""
    return [[term.kind.value, list(term.job_ids), term.delay_s, term.task] for term in terms]


def dependency_from_data(data: list[list[Any]]) -> tuple[Dependency, ...]:
    """Return the terms that `dependency_to_data` wrote."""
    return tuple(
        Dependency(kind=DependencyKind(kind), job_ids=tuple(ids), delay_s=delay_s, task=task)
        for kind, ids, delay_s, task in data
    )
