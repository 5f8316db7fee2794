"""The job's transition table: (state, event) -> job. A pair without a row raises.

    PENDING -Allocated-> CONFIGURING -Claimed*, Started-> RUNNING -Exited-> COMPLETING -NodeCleared*-> its outcome
       ^                                Suspended | ^ Resumed         |
       |                                          SUSPENDED           |
       +------------------ the next attempt, if it is to be requeued -+

A job gives its nodes back one by one; it ends when it holds none. A job that is to be requeued then returns to PENDING with
the next attempt number, but only after every node has reported, or it is proven, that no part of the old attempt can run.

The allocation of a running job changes when it gives nodes back, gets more, or is asked to give some back:

    shares   its allocation                   leaving   given back, until the node reports that it is clear
    joining  given, until the node has claimed its part (then it is one of `shares`)

    left     once for each time that a node was given back or lost: its next allocation there is another stay (see `model.ids`)

A node may be given to the same attempt again, unless it has refused its part. Each change that the job must know of raises
`generation`; what its nodes are sent carries it, so that repeating it has no effect. The first node, where the batch step runs,
stays.

`effects_of` derives from a job's state alone what must be true on its nodes. The controller performs the effects after the
commit, and again whenever a node reconnects, so recovery needs no code of its own.

Clocks: suspended time counts against no limit and is not charged, as in Slurm (scontrol(1): "The time a job is suspended will
not count against a job's time limit"). The resources of a job are charged node by node, from `Job.charged_until_s` (the
allocation, if that is None) until the node is given back. So code that changes the resources of a job, or suspends it, settles
first. A fault changes when a node is given back, but every second until then is charged, with one exception: the time
between the end of a job's script, as its node recorded it, and the report of it is not charged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from hpcsched.errors import InvariantError
from hpcsched.lifecycle.events import (
    Adopted,
    Allocated,
    BecameEligible,
    Changed,
    Claimed,
    ClockStepped,
    EndRequested,
    Exited,
    Held,
    JobEvent,
    LaunchRefused,
    NodeCleared,
    NodeLost,
    NodesAdded,
    NodeSilent,
    NodesReleased,
    NodesRenamed,
    NodesReserved,
    NodesUnreserved,
    Released,
    Requeued,
    Respecified,
    Resumed,
    ShrinkAsked,
    Started,
    Submitted,
    Suspended,
)
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.frozen import copies, replace
from hpcsched.model.ids import NodeName
from hpcsched.model.job import FINAL, ExitStatus, Hold, Job, JobState, Reason, Refusal
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import JobSpec

CHANGEABLE = {  # field of `Changed`: field of `Job`
    "time_limit_s": "time_limit_s",
    "partition": "partition",
    "nice": "nice",
    "priority_set": "priority_set",
    "not_before_s": "not_before_s",
    "dependency": "dependency_set",
    "dependency_any": "dependency_any_set",
    "array_limit": "array_limit_set",
    "deadline_at_s": "deadline_set_s",
    "reservation": "reservation_set",
    "account": "account_set",
    "qos": "qos_set",
    "time_min_s": "time_min_set_s",
    "site": "site",
}

CLOCK_DRIFT = 1.01
LEASE_MARGIN_S = 5.0
DONE = ExitStatus(code=0)
OUTPUT_FULL = "the file system of its output file was full when it ended"
WHY_CHARS = 400  # of what a node says of a launch

PENDING = JobState.PENDING
CONFIGURING = JobState.CONFIGURING
RUNNING = JobState.RUNNING
SUSPENDED = JobState.SUSPENDED
COMPLETING = JobState.COMPLETING


def submitted_jobs(event: Submitted, spec: JobSpec, ids: Iterable[int] | None = None) -> Sequence[Job]:
    """Return the job that `event` makes, or all tasks of its array, with consecutive ids.

    With `ids`: only the tasks of these ids.
    """
    first = Job(
        id=event.job_id,
        spec_id=event.spec_id,
        spec=spec,
        uid=event.uid,
        user=event.user,
        submitted_at_s=event.at_s,
        array_job_id=event.job_id if spec.array is not None else None,
        hold=Hold.USER if spec.hold or spec.priority == 0 else Hold.NONE,
        priority_set=spec.priority or None,
        nice=spec.nice,
        partition=event.partition,
        time_limit_s=event.time_limit_s,
        not_before_s=spec.begin_at_s,
        eligible_at_s=event.at_s if not (spec.hold or spec.dependency or spec.begin_at_s or spec.cheap_by_s) else None,
    )
    if spec.array is None:
        return (first,)
    indices = spec.array.indices
    ids = range(event.job_id, event.job_id + len(indices)) if ids is None else ids
    return copies(first, ("id", "array_task_id"), [(job_id, indices[job_id - event.job_id]) for job_id in ids])


def apply(job: Job, event: JobEvent) -> Job:
    """Return the job as it is after `event`.

    Raises InvariantError if the event cannot happen in its state.
    """
    transition = TABLE.get((job.state, type(event)))
    if transition is None:
        raise InvariantError(f"cannot apply {type(event).__name__} to job {job.id}: it is {job.state}")
    return transition(job, event)


def can(job: Job, event_type: type[JobEvent]) -> bool:
    """Return whether an event of this type can happen to the job in its present state."""
    return (job.state, event_type) in TABLE


def lease_end_s(job: Job) -> float | None:
    """Return how long a node must be silent before no part of the attempt is left there.

    None: the attempt has no lease.

    The margin covers clock drift, and the time that a killed process tree takes to end.
    """
    return None if job.lease_s is None else job.lease_s * CLOCK_DRIFT + LEASE_MARGIN_S


def _held(job: Job, event: Held) -> Job:
    return replace(not_aging(job, event.at_s), hold=event.hold)


def _adopted(job: Job, event: Adopted) -> Job:
    return replace(job, reason=Reason.NONE, reason_detail="")


def _released(job: Job, event: Released) -> Job:
    return replace(job, hold=Hold.NONE)


def _changed(job: Job, event: Changed) -> Job:
    changes = {field: value for name, field in CHANGEABLE.items() if (value := getattr(event, name)) is not None}
    later = event.not_before_s is not None and event.not_before_s > event.at_s
    if event.dependency is not None or later or event.priority_set == 0:  # its age stops until these are met
        job = not_aging(job, event.at_s)
    if event.time_limit_s is not None and job.state is not PENDING:
        changes["asked_limit_s"] = changes["time_limit_s"]  # in its next attempt too
    return replace(job, **changes)


def _respecified(job: Job, event: Respecified) -> Job:
    if "cheap_by_s" in event.changes:  # it may wait for its price again, or no longer
        job = not_aging(job, event.at_s)
    return replace(job, spec=spec_from_json(spec_to_json(job.spec) | event.changes), spec_id=event.spec_id)


def names_nodes(job: Job, names: Collection[str]) -> bool:
    """Return whether one of these nodes refused the job, or was given back by it."""
    return not set(names).isdisjoint((*job.left_nodes, *job.barred_nodes, *(node for node, *_ in job.refusals)))


def _nodes_renamed(job: Job, event: NodesRenamed) -> Job:
    def name_of(node: NodeName) -> NodeName:
        return NodeName(event.names.get(node, node))

    return replace(
        job,
        left_nodes=tuple(map(name_of, job.left_nodes)),
        barred_nodes=tuple(map(name_of, job.barred_nodes)),
        refusals=tuple(refusal._replace(node=name_of(refusal.node)) for refusal in job.refusals),
    )


def _became_eligible(job: Job, event: BecameEligible) -> Job:
    return replace(job, eligible_at_s=event.at_s)


def _allocated(job: Job, event: Allocated) -> Job:
    return replace(
        job,
        state=CONFIGURING,
        reason=Reason.NONE,
        reason_detail="",
        token=event.token,
        shares=event.shares,
        held_nodes=tuple(share.node for share in event.shares),
        claimed_nodes=(),
        lease_s=event.lease_s,
        allocated_at_s=event.at_s,
        charged_until_s=None,
        suspended_s=None,
        preempted_by=None,
        save_s=None,
        reserved_shares=(),
        leaving=(),
        joining=(),
        left_nodes=(),
        barred_nodes=(),
        wanted_nodes=(),
        wanted_at_s=None,
        generation=0,
        started_at_s=None,
        ended_at_s=None,
        exit=None,
        outcome=None,
        requeue_wanted=False,
        ended_by_uid=None,
        partition=event.partition or job.partition,
        partition_asked=job.partition if event.partition and event.partition != job.partition else "",
        time_limit_s=event.time_limit_s if event.time_limit_s is not None else job.time_limit_s,
        asked_limit_s=job.time_limit_s if event.time_limit_s is not None else None,
    )


def _claimed(job: Job, event: Claimed) -> Job:
    return replace(job, claimed_nodes=(*(name for name in job.claimed_nodes if name != event.node), event.node))


def _started(job: Job, event: Started) -> Job:
    return replace(job, state=RUNNING, started_at_s=_began_s(job, event.at_s, event.ran_s))


def _started_while_ending(job: Job, event: Started) -> Job:
    return replace(job, started_at_s=_began_s(job, event.at_s, event.ran_s))


def _began_s(job: Job, at_s: float, ran_s: float | None) -> float:
    """Return when a step began, on our clock, which had run for `ran_s` at `at_s`.

    It is not before the allocation.
    """
    return max(at_s - max(0.0, ran_s or 0.0), at_s if job.allocated_at_s is None else job.allocated_at_s)


def _suspended(job: Job, event: Suspended) -> Job:
    return replace(clocks_stopped(job, event.at_s), state=SUSPENDED, suspended_for=event.for_job)


def _resumed(job: Job, event: Resumed) -> Job:
    return replace(clocks_resumed(job, event.at_s), state=RUNNING)


def _nodes_reserved(job: Job, event: NodesReserved) -> Job:
    return replace(job, reserved_shares=event.shares)


def _nodes_unreserved(job: Job, event: NodesUnreserved) -> Job:
    return replace(job, reserved_shares=())


def _cancelled_in_queue(job: Job, event: EndRequested) -> Job:
    return replace(
        job,
        state=event.outcome,
        reason_detail=event.why,
        reason=Reason.NONE,
        ended_at_s=event.at_s,
        ended_by_uid=event.by_uid,
        reserved_shares=(),
    )


def _end_requested(job: Job, event: EndRequested) -> Job:
    return replace(
        clocks_resumed(job, event.at_s),
        state=COMPLETING,
        outcome=event.outcome,
        exit=event.exit,
        reason=Reason.TIME_LIMIT if event.outcome is JobState.TIMEOUT else Reason.NONE,
        reason_detail=event.why,
        ended_by_uid=event.by_uid,
        requeue_wanted=event.requeue,
        not_before_s=event.not_before_s if event.requeue else job.not_before_s,
        preempted_by=event.for_job,
        save_s=event.save_s,
    )


def _end_requested_again(job: Job, event: EndRequested) -> Job:
    """Return the job that ends instead of being requeued, if the request says so."""
    if event.requeue:
        return job
    return replace(
        job,
        requeue_wanted=False,
        outcome=event.outcome,
        ended_by_uid=event.by_uid,
        reason_detail=event.why,
        preempted_by=None,
        save_s=None,
    )


def _outcome_of(event: Exited) -> tuple[JobState, Reason]:
    if event.out_of_memory:
        return JobState.OUT_OF_MEMORY, Reason.OUT_OF_MEMORY
    if event.timed_out:
        return JobState.TIMEOUT, Reason.TIME_LIMIT
    if event.exit.signal:
        return JobState.FAILED, Reason.RAISED_SIGNAL
    if event.exit.code:
        return JobState.FAILED, Reason.NONZERO_EXIT
    return JobState.COMPLETED, Reason.NONE


def _exited(job: Job, event: Exited) -> Job:
    outcome, reason = _outcome_of(event)
    ended = replace(
        clocks_resumed(job, event.at_s),
        state=COMPLETING,
        outcome=outcome,
        reason=reason,
        exit=event.exit,
        requeue_wanted=event.requeue,
    )
    if event.output_full:
        ended = replace(ended, reason_detail=OUTPUT_FULL)
    if event.saved_step is not None:
        ended = replace(ended, deaths=job.deaths + 1, saved_step=event.saved_step, reason_detail=_killed(event))
    if event.unexecuted:
        ended = _refused_by(ended, event.node, event.unexecuted, of_exec=True)
    return _left(_ran(ended, event), event)


def _left(job: Job, event: Exited) -> Job:
    """Return the job without the node of its batch step, unless its epilog still runs there."""
    return job if event.clearing else _without_node(job, event.node, event.at_s)


def _killed(event: Exited) -> str:
    return f"a rank was killed; the next attempt resumes from the checkpoint of step {event.saved_step}"


def _exited_while_ending(job: Job, event: Exited) -> Job:
    if job.save_s is not None and event.exit == DONE:  # it saved its work and completed in time
        job = replace(job, outcome=JobState.COMPLETED, requeue_wanted=False, reason_detail="", preempted_by=None)
    elif _had_ended_in_time(job, event):
        outcome, reason = _outcome_of(event)
        job = replace(job, outcome=outcome, reason=reason, reason_detail="", requeue_wanted=event.requeue)
    return _left(_ran(replace(job, exit=event.exit, save_s=None), event), event)


def _had_ended_in_time(job: Job, event: Exited) -> bool:
    """Return whether a job that we ended at its time limit had ended before.

    We ended it because its node did not answer.
    """
    by_limit_alone = job.outcome is JobState.TIMEOUT and job.ended_by_uid is None and not job.reservation
    if not by_limit_alone or event.ran_s is None or job.time_limit_s is None:
        return False
    return event.ran_s < job.time_limit_s + (job.suspended_s or 0.0)


def _ran(job: Job, event: Exited) -> Job:
    """Return the job with start and end on our clock, charged for what it held until then.

    Only durations are taken from the node's clock. Its end may be known much later, by a controller that was down, say:
    the time between is not charged.
    """
    ran_s = max(0.0, event.ran_s or 0.0)
    started_at_s = job.started_at_s
    if event.ago_s is not None:
        ended_at_s = event.at_s - max(0.0, event.ago_s)
    elif event.ran_s is not None and started_at_s is not None:
        ended_at_s = started_at_s + ran_s
    else:
        ended_at_s = event.at_s
    ended_at_s = max(ended_at_s, job.allocated_at_s or ended_at_s)
    began_s = _began_s(job, ended_at_s, event.ran_s)
    if started_at_s is None or began_s < started_at_s:  # we heard late of its start, or never
        started_at_s = began_s
    ended_at_s = min(max(started_at_s, ended_at_s), event.at_s)
    job = replace(settled(job, ended_at_s), charged_until_s=event.at_s)
    return replace(job, started_at_s=started_at_s, ended_at_s=ended_at_s)


def _launch_refused(job: Job, event: LaunchRefused) -> Job:
    ended = replace(
        job, state=COMPLETING, outcome=JobState.FAILED, exit=ExitStatus(code=1), requeue_wanted=event.requeue
    )
    return _without_node(_refused_by(ended, event.node, event.why, of_exec=False), event.node, event.at_s)


def _refused_by(job: Job, node: NodeName, why: str, *, of_exec: bool) -> Job:
    """Return the job that `node` could not start.

    It is not sent there again, and has the reason.
    """
    refusals = (*job.refusals, Refusal(node, job.attempt, of_exec, why[:WHY_CHARS]))
    return replace(job, refusals=refusals, reason=Reason.LAUNCH_FAILED, reason_detail=refusal_words(refusals))


def refusal_words(refusals: Sequence[Refusal]) -> str:
    """Return why nodes could not start a job: each reason with the nodes that gave it."""
    if len(refusals) == 1:
        return refusals[0].why
    nodes: dict[str, list[NodeName]] = {}
    for refusal in refusals:
        nodes.setdefault(refusal.why, []).append(refusal.node)
    return "; ".join(f"on {', '.join(dict.fromkeys(names))}: {why}" for why, names in nodes.items())


def _node_lost(job: Job, event: NodeLost) -> Job:
    if is_moving(job, event.node):
        return _given_back(job, event)
    if can_do_without(job, event.node):
        return _lost_one(job, event)
    ended = replace(
        clocks_resumed(job, event.at_s),
        state=COMPLETING,
        outcome=JobState.NODE_FAIL,
        reason=Reason.NONE,
        reason_detail=event.why,
        requeue_wanted=event.requeue,
        not_before_s=event.not_before_s if event.requeue else job.not_before_s,
    )
    return _without_node(ended, event.node, event.at_s)


def _blamed_on_node(job: Job, event: NodeLost | NodeSilent) -> Job:
    """Return the job with its failed script blamed on the lost node.

    For example, its mpirun missed ranks.
    """
    if job.outcome is not JobState.FAILED or job.reason not in (Reason.NONZERO_EXIT, Reason.RAISED_SIGNAL):
        return job
    return replace(
        job,
        outcome=JobState.NODE_FAIL,
        reason=Reason.NONE,
        reason_detail=event.why,
        requeue_wanted=event.requeue,
        not_before_s=event.not_before_s if event.requeue else job.not_before_s,
    )


def _lost_while_ending(job: Job, event: NodeLost) -> Job:
    return _without_node(_blamed_on_node(job, event), event.node, event.at_s)


def _node_cleared(job: Job, event: NodeCleared | LaunchRefused) -> Job:
    return _without_node(job, event.node, event.at_s)


def _without_node(job: Job, node: NodeName, at_s: float) -> Job:
    """Return the COMPLETING job without `node`.

    If that was its last node, the job has ended, or waits for its next attempt.
    """
    job = charged(job, node, at_s)
    held = tuple(name for name in job.held_nodes if name != node)
    if held:
        return replace(job, held_nodes=held)
    if job.requeue_wanted:
        return _back_in_queue(job, at_s if job.ended_at_s is None else job.ended_at_s)
    if job.outcome is None:
        raise InvariantError(f"cannot end job {job.id}: it is completing without an outcome")
    job = replace(job, leaving=(), joining=(), wanted_nodes=(), wanted_at_s=None)
    return replace(job, held_nodes=(), state=job.outcome, ended_at_s=at_s if job.ended_at_s is None else job.ended_at_s)


def _back_in_queue(job: Job, ended_at_s: float) -> Job:
    return replace(
        job,
        state=PENDING,
        attempt=job.attempt + 1,
        restarts=job.restarts + 1,
        token="",
        held_nodes=(),
        ended_at_s=ended_at_s,
        outcome=None,
        requeue_wanted=False,
        eligible_at_s=None,
        aged_s=0.0,
        exit=None,
        reason=Reason.NONE,
        partition=job.partition_asked or job.partition,
        partition_asked="",
        time_limit_s=job.asked_limit_s if job.asked_limit_s is not None else job.time_limit_s,
        asked_limit_s=None,
    )


def _clock_stepped(job: Job, event: ClockStepped) -> Job:
    return moved(job, event.by_s)


def _pause_moved(job: Job, event: ClockStepped) -> Job:
    return replace(job, not_before_s=None if job.not_before_s is None else job.not_before_s + event.by_s)


def _requeued(job: Job, event: Requeued) -> Job:
    return replace(
        _back_in_queue(job, event.at_s), not_before_s=event.not_before_s, ended_by_uid=None, refusals=(), deaths=0
    )


# ----- the allocation of a running job changes (see above)


def _shrink_asked(job: Job, event: ShrinkAsked) -> Job:
    """Return the job that is asked to keep only these nodes.

    With all of its nodes, the request is withdrawn.
    """
    wanted = () if len(event.nodes) == len(job.shares) else event.nodes
    wanted_at_s = event.at_s if wanted else None
    return replace(job, wanted_nodes=wanted, wanted_at_s=wanted_at_s, generation=job.generation + 1)


def _nodes_released(job: Job, event: NodesReleased) -> Job:
    """Return the job without these nodes; it holds them until they are clear."""
    return _without(job, event.nodes)


def _without(job: Job, nodes: tuple[NodeName, ...]) -> Job:
    lost = set(nodes)
    first, *others = job.shares
    if first.node in lost or not lost <= {share.node for share in others}:
        raise InvariantError(f"cannot take {', '.join(nodes)} from job {job.id}: these are not among its other nodes")
    left = tuple(share for share in others if share.node in lost)
    return replace(
        job,
        shares=(first, *(share for share in others if share.node not in lost)),
        leaving=job.leaving + left,
        claimed_nodes=tuple(name for name in job.claimed_nodes if name not in lost),
        wanted_nodes=(),
        wanted_at_s=None,
        generation=job.generation + 1,
    )


def _nodes_added(job: Job, event: NodesAdded) -> Job:
    """Return the job with these joining shares.

    They are charged from now on, and usable when their nodes have claimed them.
    """
    job = settled(job, event.at_s)
    names = tuple(share.node for share in event.shares)
    if set(names) & {*job.held_nodes, *job.barred_nodes}:
        raise InvariantError(f"cannot give job {job.id} {', '.join(names)}: it has them, or they have refused")
    return replace(job, joining=job.joining + event.shares, held_nodes=job.held_nodes + names)


def _claimed_later(job: Job, event: Claimed) -> Job:
    """Return the running job with a share that its node has claimed."""
    joined = tuple(share for share in job.joining if share.node == event.node)
    return replace(
        job,
        joining=tuple(share for share in job.joining if share.node != event.node),
        shares=job.shares + joined,
        claimed_nodes=(*job.claimed_nodes, event.node),
        generation=job.generation + 1,
    )


def is_moving(job: Job, node: NodeName) -> bool:
    """Return whether the job is about to get or lose `node` while it continues."""
    return any(share.node == node for share in (*job.leaving, *job.joining))


def can_do_without(job: Job, node: NodeName) -> bool:
    """Return whether an elastic job continues when it loses `node`.

    The node is not its first, and enough nodes are left.
    """
    others = {share.node for share in job.shares[1:]}
    return job.spec.elastic and job.state is JobState.RUNNING and node in others and len(others) >= job.spec.nodes_min


def _lost_one(job: Job, event: NodeLost) -> Job:
    """Return the elastic job without a node that is lost, as if it had given it back."""
    return _given_back(_without(job, (event.node,)), event)


def _refused_later(job: Job, event: LaunchRefused) -> Job:
    """Return the running job without a node that refused its part; it is not given back."""
    return replace(_given_back(job, event), barred_nodes=(*job.barred_nodes, event.node))


def _given_back(job: Job, event: NodeCleared | NodeLost | LaunchRefused) -> Job:
    """Return the running job without a node that it was about to get or to lose."""
    if not is_moving(job, event.node):
        raise InvariantError(f"cannot take {event.node} from job {job.id}: it has not given it back")
    job = charged(job, event.node, event.at_s)
    return replace(
        job,
        held_nodes=tuple(name for name in job.held_nodes if name != event.node),
        leaving=tuple(share for share in job.leaving if share.node != event.node),
        joining=tuple(share for share in job.joining if share.node != event.node),
        left_nodes=(*job.left_nodes, event.node),
    )


Transition = Callable[[Job, JobEvent], Job]


def _table() -> dict[tuple[JobState, type[JobEvent]], Transition]:
    on_nodes = (CONFIGURING, RUNNING, SUSPENDED)
    rows: list[tuple[tuple[JobState, ...], type[JobEvent], Callable[..., Job]]] = [
        ((PENDING, COMPLETING), Held, _held),  # of a job that is requeued it takes effect in the queue
        ((PENDING,), Released, _released),
        ((PENDING, *on_nodes), Changed, _changed),
        ((PENDING, *on_nodes), Respecified, _respecified),
        ((PENDING, *on_nodes, COMPLETING), NodesRenamed, _nodes_renamed),
        ((PENDING,), BecameEligible, _became_eligible),
        ((PENDING,), Allocated, _allocated),
        ((CONFIGURING,), Claimed, _claimed),
        ((CONFIGURING,), Started, _started),
        ((COMPLETING,), Started, _started_while_ending),
        ((PENDING,), EndRequested, _cancelled_in_queue),
        ((RUNNING,), ShrinkAsked, _shrink_asked),
        ((RUNNING,), NodesReleased, _nodes_released),
        ((RUNNING,), NodesAdded, _nodes_added),
        ((RUNNING, SUSPENDED), Claimed, _claimed_later),
        ((RUNNING, SUSPENDED), NodeCleared, _given_back),
        ((RUNNING, SUSPENDED), LaunchRefused, _refused_later),
        ((RUNNING,), Suspended, _suspended),
        ((SUSPENDED,), Resumed, _resumed),
        ((PENDING,), NodesReserved, _nodes_reserved),
        ((PENDING,), NodesUnreserved, _nodes_unreserved),
        (on_nodes, EndRequested, _end_requested),
        ((COMPLETING,), EndRequested, _end_requested_again),
        (on_nodes, Exited, _exited),
        ((COMPLETING,), Exited, _exited_while_ending),
        ((CONFIGURING,), LaunchRefused, _launch_refused),
        ((COMPLETING,), LaunchRefused, _node_cleared),
        ((COMPLETING,), NodeCleared, _node_cleared),
        (on_nodes, NodeLost, _node_lost),
        ((COMPLETING,), NodeLost, _lost_while_ending),
        ((COMPLETING,), NodeSilent, _blamed_on_node),
        (tuple(FINAL), Requeued, _requeued),
        (on_nodes, Adopted, _adopted),
        ((*on_nodes, COMPLETING), ClockStepped, _clock_stepped),
        ((PENDING,), ClockStepped, _pause_moved),
    ]
    return {(state, event): transition for states, event, transition in rows for state in states}


TABLE = _table()


# ----- what must be true on nodes for a job in its present state: safe to repeat


class EffectKind(Enum):
    """What an effect requires of its node."""

    BATCH_STEP = auto()  # the attempt's batch step runs there
    CLAIM = auto()  # it has claimed its part of the job; the batch step, on another node, starts only after that
    CLEAR = auto()  # it has no processes of the job's attempts up to this one, and starts none of them
    HALT = auto()  # the processes of the job there are stopped
    CONTINUE = auto()  # the processes of the job there, which has been suspended before, run
    ALLOCATION = auto()  # the job's processes there know its present nodes, and those that it is asked to keep
    LIMIT = auto()  # the attempt's batch step there is ended at the job's time limit, which changed after the launch


LAUNCHES = frozenset({EffectKind.BATCH_STEP, EffectKind.CLAIM})


class Effect(NamedTuple):
    kind: EffectKind
    node: NodeName
    job: Job


def effects_of(job: Job) -> tuple[Effect, ...]:
    """Return the effects that the state of `job` requires."""
    match job.state:
        case JobState.CONFIGURING if unclaimed := unclaimed_nodes(job):
            return tuple(Effect(EffectKind.CLAIM, node, job) for node in unclaimed)
        case JobState.CONFIGURING if job.spec.has_script:
            return (Effect(EffectKind.BATCH_STEP, job.shares[0].node, job),)
        case JobState.SUSPENDED:
            return (*_moves(job), *_limit(job), *(Effect(EffectKind.HALT, node, job) for node in job.held_nodes))
        case JobState.RUNNING:
            resumed: tuple[Effect, ...] = ()
            if job.suspended_s is not None:
                resumed = tuple(Effect(EffectKind.CONTINUE, node, job) for node in job.held_nodes)
            informed = job.shares if job.generation else ()
            return (
                *_moves(job),
                *_limit(job),
                *resumed,
                *(Effect(EffectKind.ALLOCATION, share.node, job) for share in informed),
            )
        case JobState.COMPLETING:
            return tuple(Effect(EffectKind.CLEAR, node, job) for node in job.held_nodes)
        case _:
            return ()


def _limit(job: Job) -> tuple[Effect, ...]:
    """Return the effect that gives the node of the batch step a time limit that was changed.

    A limit that was lowered for the start was set at the launch; to set it again does no harm.
    """
    if job.asked_limit_s is None or not job.spec.has_script:
        return ()
    return (Effect(EffectKind.LIMIT, job.shares[0].node, job),)


def _moves(job: Job) -> tuple[Effect, ...]:
    """Return the effects on nodes that a running job gets or loses."""
    claims = (Effect(EffectKind.CLAIM, share.node, job) for share in job.joining)
    return (*claims, *(Effect(EffectKind.CLEAR, share.node, job) for share in job.leaving))


def unclaimed_nodes(job: Job) -> tuple[NodeName, ...]:
    """Return the nodes that must claim their part before the batch step is launched."""
    if job.state is not JobState.CONFIGURING or not job.spec.has_script:
        return ()
    return tuple(share.node for share in job.shares[1:] if share.node not in job.claimed_nodes)


def is_gathered(job: Job) -> bool:
    """Return whether all nodes have claimed their parts, so that one may be launched."""
    if not job.spec.has_script or job.started_at_s is not None:
        return True
    return all(share.node in job.claimed_nodes for share in job.shares[1:])


def suspended_s(job: Job, now_s: float) -> float:
    """Return how long the attempt has been suspended in all."""
    before_s = job.suspended_s or 0.0
    return before_s if job.suspended_at_s is None else before_s + max(0.0, now_s - job.suspended_at_s)


def ran_s(job: Job, now_s: float) -> float:
    """Return how long the attempt has run, without suspended time.

    Until `now_s`, or until it ended.
    """
    if job.started_at_s is None:
        return 0.0
    return max(0.0, now_s - job.started_at_s - suspended_s(job, now_s))


def limit_at_s(job: Job) -> float | None:
    """Return when the attempt reaches its time limit; None: it has none, or does not run now."""
    if job.started_at_s is None or job.time_limit_s is None or job.suspended_at_s is not None:
        return None
    return job.started_at_s + (job.suspended_s or 0.0) + job.time_limit_s


def cut_at_s(job: Job, reservation: Reservation | None) -> float | None:
    """Return when the attempt is ended before its time limit; None: only its limit ends it.

    That is the end of its reservation, and its deadline if it asked for no time limit. Suspension delays neither.
    """
    ends_s: list[float] = [reservation.end_s] if reservation is not None else []
    if job.deadline_at_s is not None and job.spec.time_limit_s is None and job.time_min_s is None:
        ends_s.append(job.deadline_at_s)
    return min(ends_s, default=None)


def not_aging(job: Job, at_s: float) -> Job:
    """Return the job with its age stopped until it `BecameEligible` again."""
    if job.eligible_at_s is None:
        return job
    return replace(job, eligible_at_s=None, aged_s=job.aged_s + max(0.0, at_s - job.eligible_at_s))


def clocks_stopped(job: Job, at_s: float) -> Job:
    """Return the job with its run time charged, and its clocks stopped."""
    return replace(settled(job, at_s), suspended_at_s=at_s)


def clocks_resumed(job: Job, at_s: float) -> Job:
    """Return the job with its clocks running again; unchanged if it was not suspended."""
    if job.suspended_at_s is None:
        return job
    return replace(
        job, suspended_s=suspended_s(job, at_s), suspended_at_s=None, suspended_for=None, charged_until_s=at_s
    )


def moved(job: Job, by_s: float) -> Job:
    """Return the job with the times of its attempt moved by `by_s`.

    The time since each remains the same.
    """

    def at(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + by_s

    return replace(
        job,
        allocated_at_s=at(job.allocated_at_s),
        started_at_s=at(job.started_at_s),
        suspended_at_s=at(job.suspended_at_s),
        charged_until_s=at(job.charged_until_s),
        ended_at_s=at(job.ended_at_s),
        wanted_at_s=at(job.wanted_at_s),
    )


def settled(job: Job, at_s: float) -> Job:
    """Return the job with all its resources charged until `at_s`."""
    for node in job.held_nodes:
        job = charged(job, node, at_s)
    return replace(job, charged_until_s=at_s)


def charged(job: Job, node: NodeName, at_s: float) -> Job:
    """Return the job with its resources on `node` charged until `at_s`."""
    since_s = job.charged_until_s if job.charged_until_s is not None else job.allocated_at_s
    if node not in job.held_nodes or since_s is None or job.suspended_at_s is not None:
        return job
    share = next(share for share in (*job.shares, *job.leaving, *job.joining) if share.node == node)
    held_s = max(0.0, at_s - since_s)
    return replace(
        job,
        charged_cpu_s=job.charged_cpu_s + share.cpus * held_s,
        charged_mem_mib_s=job.charged_mem_mib_s + share.mem_mib * held_s,
        charged_gpu_s=job.charged_gpu_s + share.gpu_amount * held_s,
    )
