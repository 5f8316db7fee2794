"""Change submitted jobs and nodes: check requests, turn them into events, answer.

A function here either records events and returns the answer, or raises and leaves nothing behind:
the tick undoes it. Signals are not events. They are returned in the outcome and sent after the
commit.

Requests may name single steps: `hcancel 12.0`. `12.batch` is the batch script: to end it is to end
the job. Source: scancel(1). New jobs are in `submission`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcsched.auth.authorize import Action, Identity, allows, authorize
from hpcsched.controller.nodes.loss import lose_node, what_became
from hpcsched.controller.requests.job_ids import MAX_TASKS, component_in, find_jobs, matches
from hpcsched.errors import HpcschedError, NotFoundError, RequestError
from hpcsched.lifecycle.events import EndRequested, Held, Released, Requeued, Resumed, Suspended
from hpcsched.lifecycle.job import can
from hpcsched.lifecycle.node import NodeDrained, NodeFenced, NodeFoundIll, NodeFoundWell, NodeResumed
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, FINAL, Hold, Job, JobState
from hpcsched.model.node import Link, Partition, PartitionState
from hpcsched.model.probation import CHECK
from hpcsched.model.units import whole_number
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

_STEP = re.compile(r"(\d+(?:[_+]\d+)?)\.(\d+|batch)\Z")
SIGKILL = 9
JOBS_PER_TICK = 200  # changed by one request in a tick; other requests are answered in between


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalJob:
    """A signal to send to a job's processes after the commit."""

    job: Job
    signum: int
    batch_only: bool
    full: bool  # the batch script and its children as well as the steps


# One job's part of a request; raises RequestError.
Change = Callable[[Transaction, Job, "Outcome"], None]


class Remaining(NamedTuple):
    """A job that a request changes in a later tick; without `reference` if it names several."""

    job_id: JobId
    reference: str
    change: Change


@dataclass(slots=True)
class Outcome:
    """The outcome of a request for several jobs: the changed ids, and what was refused."""

    jobs: list[int] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    signals: list[SignalJob] = field(default_factory=list)
    # What becomes of jobs that lost a node, in words.
    became: dict[int, str] = field(default_factory=dict)
    # The new specification of each changed job.
    spec_ids: dict[int, int] = field(default_factory=dict)
    remaining: list[Remaining] = field(default_factory=list)  # left for later ticks

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was or will be done."""
        return not (self.jobs or self.signals or self.became or self.spec_ids or self.remaining)

    def refuse(self, reference: str, error: HpcschedError) -> None:
        """Record that a reference was refused."""
        self.errors.append({"job": reference, "error": str(error), "kind": type(error).__name__})

    def add(self, other: Outcome) -> None:
        """Add the outcome of another part of the request."""
        self.jobs += other.jobs
        self.errors += other.errors
        self.signals += other.signals
        self.remaining += other.remaining

    def as_json(self) -> dict[str, Any]:
        """Return the part that the client sees."""
        answer: dict[str, Any] = {"jobs": self.jobs, "errors": self.errors}
        return answer | ({"became": list(self.became.values())} if self.became else {})


def cancel(tx: Transaction, identity: Identity, references: Iterable[str], filters: dict[str, str]) -> Outcome:
    """Cancel the named jobs, or all that match the filters.

    Waiting jobs end at once, running jobs after their grace period.
    """

    def one(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if job.state in FINAL:
            raise RequestError(f"cannot cancel job {job.display_id}: it has already ended ({job.state})")
        tx.record(
            EndRequested(
                job_id=job.id,
                at_s=tx.now_s,
                outcome=JobState.CANCELLED,
                by_uid=identity.uid,
                why=f"cancelled by {identity.user}",
            )
        )

    return each_job(tx, identity, references, filters, Action.CANCEL, one)


def signal(
    tx: Transaction,
    identity: Identity,
    references: Iterable[str],
    filters: dict[str, str],
    signum: int,
    batch: bool,
    full: bool,
) -> Outcome:
    """Send a signal to the steps of the named jobs, or to the batch script (`batch`).

    With `full`, the script, its children and the steps get it. As in Slurm, KILL for a whole job
    cancels the job.
    """
    if signum == SIGKILL and (full or not batch):
        return cancel(tx, identity, references, filters)

    def one(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if batch and not full and not job.spec.has_script:
            raise RequestError(f"cannot signal the batch script of job {job.display_id}: it has none")
        if job.state not in (JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING):
            raise RequestError(f"cannot signal job {job.display_id}: it is {job.state}")
        outcome.signals.append(SignalJob(job=job, signum=signum, batch_only=batch and not full, full=full))

    return each_job(tx, identity, references, filters, Action.CANCEL, one, "signal")


def hold(tx: Transaction, identity: Identity, references: Iterable[str]) -> Outcome:
    """Hold the named waiting jobs."""

    def one(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if not _can_be_held(job):
            raise RequestError(f"cannot hold job {job.display_id}: it is {job.state}")
        tx.record(Held(job_id=job.id, at_s=tx.now_s, hold=_hold_of(job, identity), by_uid=identity.uid))

    return each_job(tx, identity, references, {}, Action.HOLD, one)


def _can_be_held(job: Job) -> bool:
    """Return whether the job waits, or is being requeued."""
    return can(job, Held) and (job.state is JobState.PENDING or job.requeue_wanted)


def _hold_of(job: Job, identity: Identity) -> Hold:
    return Hold.ADMIN if job.uid != identity.uid and allows(identity, Action.OVERRULE_HOLD, job) else Hold.USER


def release(tx: Transaction, identity: Identity, references: Iterable[str]) -> Outcome:
    """Release the named held jobs."""

    def one(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if not can(job, Released):
            raise RequestError(f"cannot release job {job.display_id}: it is {job.state}")
        if job.hold is Hold.ADMIN:
            authorize(identity, Action.OVERRULE_HOLD, job, f"release job {job.display_id}: an admin holds it")
        tx.record(Released(job_id=job.id, at_s=tx.now_s, by_uid=identity.uid))

    return each_job(tx, identity, references, {}, Action.RELEASE, one)


def requeue(
    tx: Transaction,
    identity: Identity,
    references: Iterable[str],
    *,
    incomplete: bool = False,
    held: bool = False,
    special: bool = False,
) -> Outcome:
    """Requeue the named jobs: ended ones at once, running ones after they were ended.

    With `incomplete`, completed jobs stay as they are. With `held`, the requeued jobs are held.
    With `special`, they also show the state SPECIAL_EXIT.
    """

    def one(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if incomplete and job.state is JobState.COMPLETED:
            return
        not_before_s = tx.now_s + tx.cluster.config.controller.requeue_delay_s
        if job.state is JobState.PENDING:
            raise RequestError(f"cannot requeue job {job.display_id}: it is already waiting")
        if not job.spec.has_script:
            raise RequestError(f"cannot requeue job {job.display_id}: it has no script to run again")
        if not tx.cluster.scripts.has(job):
            raise RequestError(f"cannot requeue job {job.display_id}: its script is not kept any more; submit it again")
        if job.state in ACTIVE:
            again = tx.record(
                EndRequested(
                    job_id=job.id,
                    at_s=tx.now_s,
                    outcome=JobState.CANCELLED,
                    by_uid=identity.uid,
                    why=f"requeued by {identity.user}",
                    requeue=True,
                    not_before_s=not_before_s,
                )
            )
        else:
            again = tx.record(Requeued(job_id=job.id, at_s=tx.now_s, by_uid=identity.uid, not_before_s=not_before_s))
        if (held or special) and _can_be_held(again):
            how = Hold.SPECIAL if special else _hold_of(job, identity)
            tx.record(Held(job_id=job.id, at_s=tx.now_s, hold=how, by_uid=identity.uid))

    return each_job(tx, identity, references, {}, Action.REQUEUE, one)


def each_job(
    tx: Transaction,
    identity: Identity,
    references: Iterable[str],
    filters: dict[str, str],
    action: Action,
    one: Change,
    what: str = "",
) -> Outcome:
    """Call `one` for each referenced job. A refused job does not affect the others.

    If there are more than `JOBS_PER_TICK` jobs, the rest is left in the outcome for `continued`.
    """
    outcome, what, named = Outcome(), what or action.value, 0
    for reference in references:
        try:
            if named > MAX_TASKS:
                raise RequestError(f"cannot {what} {reference}: the request names more than {MAX_TASKS} jobs")
            found = find_jobs(tx.cluster, reference, identity.uid)
            named += len(found)
            jobs = [job for job in found if matches(job, filters)]
            for job in jobs:
                authorize(identity, action, job, f"{what} job {job.display_id}")
                if component_in(job, reference):
                    raise RequestError(
                        f"cannot {what} {reference}: Operation not permitted on individual component of heterogeneous job; "
                        f"{job.id} is the whole job"
                    )
        except HpcschedError as error:
            outcome.refuse(reference, error)
            continue
        refused = _change_each(tx, jobs, one, outcome, reference if len(jobs) == 1 else "")
        # For a partly ended array, the remaining tasks are meant.
        if refused and len(refused) == len(jobs):
            outcome.refuse(reference, refused[0])
    if filters and not list(references):
        # A bulk request skips other users' jobs and jobs that it cannot apply to.
        mine = [job for job in tx.cluster.jobs.values() if job.state not in FINAL and allows(identity, action, job)]
        _change_each(tx, [job for job in mine if matches(job, filters)], one, outcome)
    return outcome


def continued(tx: Transaction, done: Outcome) -> Outcome:
    """Return the outcome of the next part of a request that takes several ticks."""
    outcome = Outcome()
    for i, (job_id, reference, change) in enumerate(done.remaining):
        if len(outcome.jobs) >= JOBS_PER_TICK:
            outcome.remaining += done.remaining[i:]
            break
        job = tx.cluster.jobs.get(job_id)
        if job is None:  # it ended and was purged from memory
            continue
        refused = _change_each(tx, [job], change, outcome, reference)
        if refused and reference:
            outcome.refuse(reference, refused[0])
    return outcome


def _change_each(
    tx: Transaction, jobs: Sequence[Job], one: Change, outcome: Outcome, reference: str = ""
) -> list[RequestError]:
    """Call `one` for each job, up to the limit of a tick, and note the changed jobs.

    Return the refusals of the others.
    """
    refused: list[RequestError] = []
    for i, job in enumerate(jobs):
        if len(outcome.jobs) >= JOBS_PER_TICK:
            outcome.remaining += [Remaining(later.id, reference, one) for later in jobs[i:]]
            break
        try:
            one(tx, job, outcome)
        except RequestError as error:
            refused.append(error)
        else:
            outcome.jobs.append(job.id)
    return refused


# ----- nodes


def find_nodes(cluster: ClusterState, text: str, others: Collection[NodeName] = ()) -> list[NodeName]:
    """Return the nodes that the host list names ("all" is every configured node).

    Nodes of `others` are also accepted if the list names them.

    Raises: NotFoundError for unknown nodes.
    """
    if text in ("all", "ALL"):
        return list(cluster.nodes)
    names = [NodeName(name) for name in expand_hostlist(text)]
    for name in names:
        if name not in cluster.nodes and name not in others:
            raise NotFoundError(f"Invalid node name specified: {name}; there are: {', '.join(cluster.nodes) or 'none'}")
    return names


def drain(tx: Transaction, identity: Identity, nodes: str, why: str, by: str) -> list[str]:
    """Drain these nodes: no new job starts there, and running jobs continue."""
    authorize(identity, Action.DRAIN, what="drain a node")
    if not why:
        raise RequestError("cannot drain a node: give the reason, it is what others will see")
    names = find_nodes(tx.cluster, nodes)
    for name in names:
        known = tx.cluster.nodes[name]
        if by and known.drained:  # a health check does not replace an admin's drain
            if by == known.drained_by == CHECK and known.probation.well_since_s is not None:
                tx.record_node(NodeFoundIll(node=name, at_s=tx.now_s))
            continue
        tx.record_node(NodeDrained(node=name, at_s=tx.now_s, why=why, by=by or identity.user))
    return list(names)


def resume_nodes(tx: Transaction, identity: Identity, nodes: str, only_by: str) -> list[str]:
    """Resume these nodes; with `only_by`, only the nodes that it drained.

    A node that a health check has drained stays away until it was well for a while. Return the nodes that were resumed.
    """
    authorize(identity, Action.DRAIN, what="resume a node")
    names = [
        name for name in find_nodes(tx.cluster, nodes) if not only_by or tx.cluster.nodes[name].drained_by == only_by
    ]
    resumed: list[str] = []
    for name in names:
        if only_by == CHECK:
            if tx.cluster.nodes[name].probation.well_since_s is None:
                tx.record_node(NodeFoundWell(node=name, at_s=tx.now_s))
            returns_at_s = tx.cluster.nodes[name].probation.returns_at_s(tx.cluster.config.controller.health_hold)
            if returns_at_s is not None and tx.now_s < returns_at_s:
                continue
        tx.record_node(NodeResumed(node=name, at_s=tx.now_s, by=only_by if only_by == CHECK else identity.user))
        resumed.append(name)
    return resumed


def set_partition_state(tx: Transaction, identity: Identity, name: str, state: str) -> Partition:
    """Set whether a partition accepts and starts jobs.

    The setting is kept until it is changed again, also over restarts.
    """
    authorize(identity, Action.UPDATE_PARTITION, what="change a partition")
    if name not in tx.cluster.partitions:
        known = ", ".join(tx.cluster.partitions)
        raise NotFoundError(f"Invalid partition name specified: {name[:60]!r}; there are: {known}")
    if state.upper() not in PartitionState.__members__:
        raise RequestError(f"cannot read State={state[:60]!r}: the states are {', '.join(PartitionState)}")
    return tx.set_partition_state(name, PartitionState(state.upper()))


def fence(tx: Transaction, identity: Identity, nodes: str, why: str) -> Outcome:
    """Record that, by the word of an admin, these nodes run none of our processes.

    Jobs that wait for these nodes continue. A node that has left the configuration can be named
    while jobs are held there.
    """
    authorize(identity, Action.FENCE, what="fence a node")
    outcome = Outcome()
    names = find_nodes(tx.cluster, nodes, tx.cluster.gone_nodes())
    for name in names:
        if tx.cluster.nodes[name].link is Link.UP:
            raise RequestError(
                f"cannot fence node {name}: it answers, so what it runs is known and can be ended: hcancel, hctl requeue; "
                f"hctl drain {name} keeps new jobs away. One that has just been switched off is DOWN in a moment"
            )
    for name in names:
        for job in tx.cluster.jobs_on(name):
            lost = lose_node(tx, job, name, f"node {name} was fenced by {identity.user}{': ' + why if why else ''}")
            outcome.became[lost.id] = what_became(lost)
        tx.decided(key for key in tx.cluster.undecided_launches if key[0] == name)
        if name in tx.cluster.unseen_nodes() or tx.cluster.nodes[name].has_orphans:
            # Jobs of a restored database no longer wait for this node.
            tx.record_node(NodeFenced(node=name, at_s=tx.now_s, by=identity.user, why=why))
    outcome.jobs = list(outcome.became)
    return outcome


class Meant(NamedTuple):
    """The parsed references of a request."""

    jobs: list[str]
    batch: list[str]  # jobs of which only the batch script is referenced
    steps: list[tuple[str, int]]  # job, number


def sort_out(references: Iterable[str]) -> Meant:
    """Return which of the references are jobs, which batch scripts and which steps."""
    meant = Meant([], [], [])
    for reference in references:
        match = _STEP.match(reference)
        if match is None:
            meant.jobs.append(reference)
        elif match[2] == "batch":
            meant.batch.append(match[1])
        else:
            meant.steps.append((match[1], whole_number(match[2], "a step")))
    return meant


def act_on_steps(
    cluster: ClusterState,
    act_on_step: Callable[[Job, int, int | None, str], bool],
    identity: Identity,
    steps: Iterable[tuple[str, int]],
    filters: dict[str, str],
    signum: int | None,
    outcome: Outcome,
) -> None:
    """Send `signum` to these steps of matching jobs, or end them if it is None.

    Refusals are added to `outcome`.
    """
    for reference, number in steps:
        try:
            jobs = find_jobs(cluster, reference, identity.uid)
            if not all(matches(job, filters) for job in jobs):
                continue
            if len(jobs) > 1:
                raise RequestError(
                    f"cannot tell which step {number} of job {reference} is meant: say {jobs[0].display_id}"
                )
            authorize(identity, Action.CANCEL, jobs[0], f"cancel a step of job {jobs[0].display_id}")
            if not act_on_step(jobs[0], number, signum, identity.user):
                raise NotFoundError(f"Invalid job id specified: no step {reference}.{number} is running")
        except HpcschedError as error:
            outcome.refuse(f"{reference}.{number}", error)
        else:
            outcome.jobs.append(jobs[0].id)


def suspend(tx: Transaction, identity: Identity, references: Iterable[str]) -> Outcome:
    """Suspend the named running jobs. They keep their resources."""

    def suspend_job(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if not can(job, Suspended):
            raise RequestError(f"cannot suspend job {job.display_id}: it is {job.state}")
        tx.record(Suspended(job_id=job.id, at_s=tx.now_s, by_uid=identity.uid))

    return each_job(tx, identity, references, {}, Action.SUSPEND, suspend_job)


def resume(tx: Transaction, identity: Identity, references: Iterable[str]) -> Outcome:
    """Resume the named suspended jobs."""

    def resume_job(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if not can(job, Resumed):
            raise RequestError(f"cannot resume job {job.display_id}: it is {job.state}, not SUSPENDED")
        if job.suspended_for is not None:
            raise RequestError(
                f"cannot resume job {job.display_id}: job {job.suspended_for} has its CPUs; it continues when they are free"
            )
        tx.record(Resumed(job_id=job.id, at_s=tx.now_s, by_uid=identity.uid))

    return each_job(tx, identity, references, {}, Action.SUSPEND, resume_job, "resume")
