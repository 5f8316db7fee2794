"""Messages to nodes for effects and signals, and events from their reports.

Messages are built from the cluster's state alone (`message_for`, `signal_messages`). A report is
matched with its job by its token, inside a transaction. It has no effect if its token is
not the job's present one, or if it comes from another node than the one that the token names.
`Answer` is sent to the node after the commit.

`Trainings` keeps the status reports of training programs while their jobs run; the last one goes to
the history. The newest status is in memory at once. It is written to disk every WRITE_EVERY_S and
when the attempt ends, because a commit for every step would cost too much. A report of another
attempt than the present one, or from a node that the job is not on, has no effect.
"""

from __future__ import annotations

import hmac
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hpcnode.os import rlimits
from hpcnode.wire import protocol
from hpcsched import paths
from hpcsched.controller.nodes.loss import (
    can_start_elsewhere,
    end_lost,
    give_back,
    lose_node,
    miss_node,
    note_condition,
    note_launch,
)
from hpcsched.errors import ProtocolError
from hpcsched.jobscript.patterns import job_file_patterns
from hpcsched.lifecycle.events import Claimed, Exited, LaunchRefused, NodeCleared, Started
from hpcsched.lifecycle.job import Effect, EffectKind, can, cut_at_s, is_gathered, is_moving, unclaimed_nodes
from hpcsched.lifecycle.node import NodeDrained
from hpcsched.listing.text import clean
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, JobId, LaunchToken, NodeName
from hpcsched.model.job import ACTIVE, EX_TEMPFAIL, ExitStatus, Job, JobState, RankFailure, TrainingStatus, signal_of
from hpcsched.model.node import JOB_SCRIPTS, MAX_WHY, OURSELVES, Link, Node, address_of
from hpcsched.model.spec import SIGNED_REQUEST
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import StepRecord, Transaction
from hpcsched.steps.environment import allocation_facts, job_environment, script_environment, with_propagated
from hpcsched.steps.step import used

# A job submitted with --requeue is requeued if it exits so: EX_TEMPFAIL of sysexits.h, "try again
# later".
REQUEUE_ME = ExitStatus(code=EX_TEMPFAIL)
# Signals from outside that end a correct rank: out of memory, a machine fault. MPICH's mpirun exits
# with the signal number itself.
KILLS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS})
MAX_DEATHS = 10  # attempts that may follow killed ranks
ON_NODES = (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)
_RESTORED = "the database was restored from a backup"


WRITE_EVERY_S = 60.0
MAX_FAILURES = 64  # per attempt: reports of further ranks only repeat the first ones
MAX_FAILED_JOBS = 1000  # jobs whose number of failures is known
MAX_NODE_SPEEDS = 512  # nodes of a job whose speeds its programs are told


@dataclass(slots=True)
class Answer:
    """The answer to a node after the commit: kept reports, and attempts that it must end."""

    acks: list[int] = field(default_factory=list)
    steps: list[protocol.Report] = field(default_factory=list)  # for the step service
    # (incarnation, job) -> last attempt and stay to end.
    orphans: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)


def read_token(report: protocol.Report, node: NodeName) -> LaunchToken:
    """Return the report's token.

    Raises: ProtocolError if it is not a token, or is about another node.
    """
    token = LaunchToken.parse(report.token)
    if token.node != node:
        raise ProtocolError(f"cannot take a report of node {token.node} from node {node}")
    return token


def on_batch_report(
    tx: Transaction, node: NodeName, token: LaunchToken, report: protocol.Report, answer: Answer
) -> None:
    """Handle a report of `node` on a batch step."""
    job = tx.cluster.jobs.get(token.job_id)
    current = job is not None and job.token == report.token
    if _is_left_over(tx, token, report):
        end_orphan(token, report, answer)
        if current and job is not None and job.state is not JobState.COMPLETING and node in job.held_nodes:
            end_lost(tx, job, f"{_RESTORED}: what node {node} runs of the job is ended")
        return
    if not current or job is None or node not in job.held_nodes:
        end_orphan(token, report, answer)
        return
    match report.status:
        case protocol.CLAIMED:
            return  # nothing to keep: repeated as STARTED or not at all
        case protocol.STARTED:
            _on_batch_start(tx, job, node, report)
        case protocol.ENDED:
            _on_batch_end(tx, job, node, report)
        case _:
            _on_batch_loss(tx, job, node, report)
    answer.acks.append(report.seq)


def _is_left_over(tx: Transaction, token: LaunchToken, report: protocol.Report) -> bool:
    """Return whether the report is of a running launch from before a restore of the database.

    The end of one that has ended counts.
    """
    runs = report.status in (protocol.CLAIMED, protocol.STARTED)
    return runs and token.incarnation != tx.cluster.incarnation and report.token not in tx.cluster.adopted


def _on_batch_start(tx: Transaction, job: Job, node: NodeName, report: protocol.Report) -> None:
    if job.started_at_s is None and can(job, Started):
        started = tx.record(Started(job_id=job.id, at_s=tx.now_s, ran_s=report.ran_s))
        note_launch(tx, started, node, executed=False)
        tx.put_step(_batch_row(started, node, None))


def _on_batch_end(tx: Transaction, job: Job, node: NodeName, report: protocol.Report) -> None:
    if job.started_at_s is None and can(job, Started):  # it was short: its agent reports the end alone
        ran_s = _ran_s(report)
        began_ago_s = None if ran_s is None else ran_s + (report.ago_s or 0.0)
        job = tx.record(Started(job_id=job.id, at_s=tx.now_s, ran_s=began_ago_s))
    elsewhere = report.unexecuted and job.state in ON_NODES and can_start_elsewhere(tx, job, node)
    saved_step = step_to_resume(tx, job, report)
    ended = tx.record(
        Exited(
            job_id=job.id,
            at_s=tx.now_s,
            node=node,
            exit=exit_status(report),
            ran_s=_ran_s(report),
            ago_s=report.ago_s,
            timed_out=report.timed_out,
            out_of_memory=report.out_of_memory,
            requeue=elsewhere or saved_step is not None or asks_again(job, exit_status(report)),
            saved_step=saved_step,
            output_full=report.output_full,
            clearing=report.clearing,
            unexecuted=report.why if report.unexecuted else "",
        )
    )
    tx.put_step(_batch_row(ended, node, report, outcome=job.outcome))
    if not report.unexecuted:
        note_launch(tx, job, node, executed=True)
    for other in ended.held_nodes:
        if tx.cluster.nodes[other].link is Link.DOWN:
            miss_node(tx, tx.cluster.jobs[job.id], other)


def _on_batch_loss(tx: Transaction, job: Job, node: NodeName, report: protocol.Report) -> None:
    match report.status:
        case protocol.REFUSED:
            _on_refusal(tx, job, node, report)
        case protocol.LOST:
            lose_node(tx, job, node, f"node {node} lost the job: {report.why}")
        case protocol.REVOKED:
            # For a job that is being ended, JobGone follows and releases the node. Any other job
            # was launched but never ran, for example because the node rebooted. This token will
            # never run.
            if job.state is not JobState.COMPLETING:
                lose_node(tx, job, node, f"node {node} did not start the job: {report.why}")


def _on_refusal(tx: Transaction, job: Job, node: NodeName, report: protocol.Report) -> None:
    """Start the job on another node, or end it if no other node is left.

    A node that reports that it can start nothing gets no more jobs. For other refusals, the cause
    (job or node) is known when the job starts elsewhere: see `note_launch`.
    """
    if report.node_fault:
        note_condition(tx, node, report.why)
        give_back(tx, job, node, f"node {node} could not start the job: {report.why}")
    elif job.state in (JobState.CONFIGURING, JobState.COMPLETING):
        again = job.state is JobState.CONFIGURING and can_start_elsewhere(tx, job, node)
        tx.record(LaunchRefused(job_id=job.id, at_s=tx.now_s, node=node, why=report.why, requeue=again))


def on_claim_report(
    tx: Transaction, node: NodeName, token: LaunchToken, report: protocol.Report, answer: Answer
) -> None:
    """Handle a report of `node` on its claim of a job's part."""
    job = tx.cluster.jobs.get(token.job_id)
    current = job is not None and bool(job.token) and claim_token(job, node) == report.token
    if not current or job is None or node not in job.held_nodes:
        end_orphan(token, report, answer)
        return
    answer.acks.append(report.seq)
    if job.state is JobState.COMPLETING:
        return  # JobGone follows
    if is_moving(job, node):
        _on_later_claim(tx, job, node, report)
        return
    match report.status:
        case protocol.CLAIMED:
            if node in unclaimed_nodes(job):
                tx.record(Claimed(job_id=job.id, at_s=tx.now_s, node=node))
        case protocol.REFUSED:
            _on_refusal(tx, job, node, report)
        case _ if not is_gathered(job):
            give_back(tx, job, node, f"node {node} did not keep its part of the job: {report.why}")
        case _:
            lose_node(tx, job, node, f"node {node} did not keep its part of the job: {report.why}")


def _on_later_claim(tx: Transaction, job: Job, node: NodeName, report: protocol.Report) -> None:
    """Handle a claim of a running job: the node takes a part, or loses it.

    If the node loses the part, JobGone follows.
    """
    if not any(share.node == node for share in job.joining):
        return
    if report.status == protocol.CLAIMED:
        tx.record(Claimed(job_id=job.id, at_s=tx.now_s, node=node))
    elif report.status == protocol.REFUSED and not report.node_fault:
        tx.record(LaunchRefused(job_id=job.id, at_s=tx.now_s, node=node, why=report.why))
    else:
        if report.node_fault:
            note_condition(tx, node, report.why)
        give_back(tx, job, node, f"node {node} did not take its part of the job: {report.why}")


def end_orphan(token: LaunchToken, report: protocol.Report, answer: Answer) -> None:
    """Tell the node to end a launch that is not in the cluster state; acknowledge its report.

    This also covers a launch that the job no longer has on this node. The acknowledgement lets the
    node forget the end of the launch.
    """
    if report.status in (protocol.CLAIMED, protocol.READY, protocol.STARTED):
        key = (token.incarnation, int(token.job_id))
        answer.orphans[key] = max(token.life, answer.orphans.get(key, (0, 0)))
    answer.acks.append(report.seq)


def asks_again(job: Job, status: ExitStatus) -> bool:
    """Return whether a job with this exit status asks to be requeued."""
    return job.spec.requeue is True and status == REQUEUE_ME


def step_to_resume(tx: Transaction, job: Job, report: protocol.Report) -> int | None:
    """Return the step from which the next attempt resumes after a rank was killed.

    This is for jobs with --requeue. None if the job ended in another way, has had too many
    attempts, or makes no progress: this attempt left no newer checkpoint than the attempt before.
    """
    told = tx.cluster.training.get(job.id)
    if job.spec.requeue is not True or job.state not in ON_NODES or told is None or told.attempt != job.attempt:
        return None
    if job.deaths >= MAX_DEATHS or told.checkpoint_step <= job.saved_step:
        return None
    if report.timed_out or report.out_of_memory or report.unexecuted:
        return None
    status = exit_status(report)
    killed = signal_of(status.code, status.signal) in KILLS or status.code in KILLS
    lost = status.code != 0 and tx.cluster.lost_ranks.get(job.id) == job.attempt
    return told.checkpoint_step if killed or lost else None


def exit_status(report: protocol.Report) -> ExitStatus:
    """Return how the step ended on this node: the worst exit status of its tasks."""
    signum = max(report.signals, default=0)
    return ExitStatus(code=0 if signum else max(report.codes, default=0), signal=signum)


def _ran_s(report: protocol.Report) -> float | None:
    """Return how long the step ran, in seconds.

    After a reboot of the node only wall clock times are left, which are wrong if the clock was set meanwhile.
    """
    if report.ran_s is not None or not report.started_at_s:
        return report.ran_s
    return report.at_s - report.started_at_s


def _batch_row(
    job: Job, node: NodeName, report: protocol.Report | None, *, outcome: JobState | None = None
) -> StepRecord:
    """Return the accounting row of the job's script.

    `outcome` is the state in which the job was to end before the script ended.
    """
    usage: dict[str, Any] = report.usage if report is not None else {}
    again = job.state is JobState.PENDING  # this attempt has ended, and the job waits for the next
    state = "RUNNING" if report is None else (outcome or JobState.FAILED if again else job.outcome or job.state).value
    return StepRecord(
        job_id=job.id,
        attempt=job.attempt - 1 if again else job.attempt,
        step=BATCH_STEP,
        name="batch",
        nodes=(node,),
        ntasks=1,
        state=state,
        started_at_s=job.started_at_s,
        ended_at_s=None if report is None else job.ended_at_s,
        exit_code=None if report is None else exit_status(report).code,
        exit_signal=None if report is None else exit_status(report).signal,
        **used([usage]),
    )


def on_job_gone(tx: Transaction, node: NodeName, gone: protocol.JobGone) -> None:
    """Handle the report of `node` that nothing is left of the job there.

    The report covers all attempts and stays up to the one that it names.
    """
    job = tx.cluster.jobs.get(JobId(gone.job_id))
    if job is None or not job.token.startswith(gone.incarnation + "."):
        return
    if (gone.attempt, gone.stay) < (job.attempt, job.stay_on(node)):
        return
    over = job.state is JobState.COMPLETING or is_moving(job, node)
    if node in job.held_nodes and over and can(job, NodeCleared):
        tx.record(NodeCleared(job_id=job.id, at_s=tx.now_s, node=node))
    elif node in job.held_nodes and tx.cluster.is_former(job):
        lose_node(tx, job, node, f"{_RESTORED}, and what node {node} ran of the job was ended")


def on_script_failure(tx: Transaction, node: NodeName, failed: protocol.ScriptFailed) -> None:
    """Drain a node where the administrator's prolog or epilog has failed; an admin resumes it."""
    known = tx.cluster.nodes[node]
    if not known.drained or known.drained_by == OURSELVES:
        why = f"job {failed.job_id}: {clean(failed.why[:MAX_WHY])}"
        tx.record_node(NodeDrained(node=node, at_s=tx.now_s, why=why, by=JOB_SCRIPTS))


def end_unknown_jobs(tx: Transaction, node: NodeName, found: object, answer: Answer) -> None:
    """Have the node end jobs that wait there for their epilog, but do not hold the node.

    `found` is the node's list of incarnation, job, attempt and stay.
    """
    if any(name == node for name, _ in tx.cluster.undecided_launches):
        return
    for item in found if isinstance(found, list) else ():
        match item:
            case [str(incarnation), int(job_id), int(attempt), int(stay)]:
                job = tx.cluster.jobs.get(JobId(job_id))
                holds = job is not None and node in job.held_nodes and job.token.startswith(incarnation + ".")
                if not holds or job is None or (attempt, stay) < (job.attempt, job.stay_on(node)):
                    key = (incarnation, job_id)
                    answer.orphans[key] = max((attempt, stay), answer.orphans.get(key, (0, 0)))


def on_inventory(
    tx: Transaction, node: NodeName, spool: str, rebooted: bool, tokens: set[str], orphans: set[tuple[str, int]]
) -> None:
    """Compare the cluster state with the inventory of a node that has just connected.

    The reports of the inventory were handled before. `spool`: the spool of this inventory. For a
    job that was launched into another spool, the inventory counts only after a reboot (see
    `hpcsched.controller.nodes.edits`). `rebooted`: the boot id has changed, so no earlier process
    can be left. `orphans`: (incarnation, job) of launches that the node was told to end.
    """
    for job in tx.cluster.jobs_on(node):
        batch_here = job.spec.has_script and job.shares[0].node == node
        claimed_here = node in job.claimed_nodes and job.state is not JobState.COMPLETING
        if job.spool_on(node) != spool:
            lose_node(tx, job, node, f"node {node} was rebooted, and has another spool")
        elif tx.cluster.is_former(job):
            ending = (LaunchToken.parse(job.token).incarnation, int(job.id)) in orphans
            if batch_here and not ending and job.token not in tokens and job.state is not JobState.COMPLETING:
                lose_node(tx, job, node, f"{_RESTORED}, and node {node} has nothing of the job")
        elif batch_here and job.state in (JobState.RUNNING, JobState.SUSPENDED) and job.token not in tokens:
            lose_node(tx, job, node, f"node {node} has no record of the job any more")
        elif not batch_here and rebooted and job.state is not JobState.CONFIGURING:
            lose_node(tx, job, node, f"node {node} was rebooted")
        elif claimed_here and claim_token(job, node) not in tokens:
            again = lose_node if is_gathered(job) else give_back
            again(tx, job, node, f"node {node} has no record of the job any more")


class Trainings:
    """The last status of all training jobs.

    `keep` runs a transaction, and retries it until it succeeds.
    """

    def __init__(self, cluster: ClusterState, keep: Callable[[Callable[[Transaction], Any]], None]) -> None:
        self._cluster = cluster
        self._keep = keep
        # Number of reported failures, by job and attempt.
        self._failures: dict[tuple[JobId, int], int] = {}
        self._written_s: dict[JobId, float] = {job_id: one.at_s for job_id, one in cluster.training.items()}

    def told(self, node: NodeName, said: protocol.FromStream, now_s: float) -> None:
        """Handle a report of a program on `node`.

        Raises: ProtocolError, WireError.
        """
        word = protocol.from_json(said.message)
        job = self._cluster.jobs.get(JobId(said.job_id))
        on = {share.node for share in job.shares} | set(job.held_nodes) if job is not None else set()
        if job is None or said.attempt != job.attempt or node not in on:
            raise ProtocolError(f"attempt {said.attempt} of job {said.job_id} is not on node {node}")
        if isinstance(word, protocol.Failure):
            self._failed(job, node, word, now_s)
            return
        if not isinstance(word, protocol.Progress):
            raise ProtocolError(f"cannot take {type(word).__name__} from a program")
        training = training_of(job, word, now_s)
        if job.state not in ACTIVE:  # its last report, received after its end
            self._write(training)
            return
        self._cluster.training[job.id] = training
        if not 0.0 <= now_s - self._written_s.get(job.id, float("-inf")) < WRITE_EVERY_S:  # or the clock was set back
            self._write(training)

    def _failed(self, job: Job, node: NodeName, word: protocol.Failure, now_s: float) -> None:
        key = job.id, job.attempt
        if word.echo and key not in self._failures:
            self._cluster.lost_ranks[job.id] = job.attempt
        elif not word.echo:
            self._cluster.lost_ranks.pop(job.id, None)
        count = self._failures.pop(key, 0) + 1
        self._failures[key] = count  # newest last
        if count > MAX_FAILURES:
            return
        if len(self._failures) > MAX_FAILED_JOBS:
            del self._failures[next(iter(self._failures))]
        failure = RankFailure(
            job_id=job.id,
            attempt=job.attempt,
            rank=word.rank,
            ranks=word.ranks,
            node=node,
            at_s=now_s - max(0.0, word.age_s),
            echo=word.echo,
            text=word.text,
        )
        self._keep(lambda tx: tx.put_failure(failure))

    def changed(self, job: Job) -> None:
        """Move the last status of an ended job to the history."""
        if job.state in ACTIVE:
            return
        self._cluster.lost_ranks.pop(job.id, None)
        self._written_s.pop(job.id, None)
        last = self._cluster.training.pop(job.id, None)
        if last is not None:
            self._write(last)

    def _write(self, training: TrainingStatus) -> None:
        if training.job_id in self._cluster.training:
            self._written_s[training.job_id] = training.at_s
        self._keep(lambda tx: tx.put_training(training))


def training_of(job: Job, progress: protocol.Progress, now_s: float) -> TrainingStatus:
    """Return the status of the job from `progress`, with times of the controller's clock."""
    at_s = now_s - max(0.0, progress.age_s)
    age_s = progress.checkpoint_age_s
    return TrainingStatus(
        job_id=job.id,
        attempt=job.attempt,
        at_s=at_s,
        step=progress.step,
        total_steps=progress.total_steps,
        loss=progress.loss,
        samples_per_s=progress.samples_per_s,
        steps_per_s=progress.steps_per_s,
        checkpoint_step=progress.checkpoint_step,
        checkpoint_at_s=None if age_s is None else at_s - max(0.0, age_s),
        goodput=progress.goodput,
        note=progress.note,
        directory=progress.directory,
    )


def message_for(
    effect: Effect, cluster: ClusterState, script_of: Callable[[Job], bytes]
) -> tuple[protocol.Message, bytes]:
    """Return the message (and its blob) for `effect`.

    `script_of` returns the text of a job's script.
    """
    node, job = effect.node, effect.job
    match effect.kind:
        case EffectKind.BATCH_STEP:
            return launch_batch(job, cluster, node), script_of(job)
        case EffectKind.CLAIM:
            return claim_part(job, cluster, node), b""
        case EffectKind.CLEAR:
            return end_job(job, cluster, node), b""
        case EffectKind.ALLOCATION:
            message = protocol.Allocation(
                incarnation=_incarnation(job, cluster),
                job_id=job.id,
                attempt=job.attempt,
                generation=job.generation,
                nodes=[share.node for share in job.shares],
                wanted=list(job.wanted_nodes),
            )
            return message, b""
        case EffectKind.LIMIT:
            return protocol.TimeLimit(token=job.token, limit_s=_limit_s(job)), b""
        case EffectKind.HALT | EffectKind.CONTINUE:
            halt = effect.kind is EffectKind.HALT
            return protocol.SuspendJob(_incarnation(job, cluster), job.id, job.attempt, halt), b""


def end_job(job: Job, cluster: ClusterState, node: NodeName) -> protocol.EndJob:
    """Return the order to end the job's attempt on `node`.

    A job that may still save its state gets its own signal (``--signal``).
    """
    order = protocol.EndJob(
        incarnation=_incarnation(job, cluster),
        job_id=job.id,
        attempt=job.attempt,
        grace_s=float(cluster.config.controller.kill_wait_s),
        stay=job.stay_on(node),
    )
    if job.save_s is None:
        return order
    wanted = job.spec.signal
    if wanted is None:
        return protocol.changed(order, grace_s=job.save_s)
    return protocol.changed(order, grace_s=job.save_s, signum=wanted.signum, batch_only=wanted.batch_only)


def _incarnation(job: Job, cluster: ClusterState) -> str:
    return LaunchToken.parse(job.token).incarnation if job.token else cluster.incarnation


def allocation_environment(job: Job, cluster: ClusterState) -> dict[str, str]:
    """Return the environment for a command on the head that holds the job."""
    return allocation_facts(_environment(job, cluster))


def _environment(job: Job, cluster: ClusterState) -> dict[str, str]:
    first = cluster.nodes[job.shares[0].node]
    of_attempt = job_key(job, cluster) | node_speeds(job, cluster)
    return of_attempt | job_environment(
        job,
        cluster=cluster.config.name,
        conf=str(cluster.config.config_dir / paths.CONFIG_FILE),
        master_addr=address(first),
        share_dir=cluster.config.share,
        devices=devices_of(first),
        cut_at_s=cut_at_s(job, cluster.reservations.get(job.reservation)),
    )


def job_key(job: Job, cluster: ClusterState) -> dict[str, str]:
    """Return the variable with the key of the job's attempt.

    Its ranks know each other by it. It is the same for all steps of the attempt, and is not stored.
    """
    if not cluster.jobs_secret:
        return {}
    return {"HPCSCHED_JOB_KEY": hmac.digest(cluster.jobs_secret, job.token.encode(), "sha256").hex()}


def node_speeds(job: Job, cluster: ClusterState) -> dict[str, str]:
    """Return the variable with the measured speeds of the job's nodes; {} if one is not known.

    With GPUs it is that of the slowest GPU of the node. `hpctrain --shares auto` starts with them.
    """
    nodes = [cluster.nodes[name] for name in dict.fromkeys(share.node for share in job.shares)]
    has_gpus = any(share.gpus for share in job.shares)
    speeds = [node.measured.gemm_gflops if has_gpus else node.speed for node in nodes]
    if not 1 < len(nodes) <= MAX_NODE_SPEEDS or not all(speeds):
        return {}
    parts = (f"{node.name}={speed:g}" for node, speed in zip(nodes, speeds, strict=True))
    return {"HPCSCHED_NODE_SPEEDS": ",".join(parts)}


def launch_batch(job: Job, cluster: ClusterState, node: NodeName) -> protocol.Launch:
    """Return the launch of the job's batch step on its first node."""
    spec, share, files = job.spec, job.shares[0], job_file_patterns(job)
    env = with_propagated(_environment(job, cluster), rlimits.names(cluster.config.controller.propagate))
    if spec.signed:
        env[SIGNED_REQUEST] = spec.signed
    return protocol.Launch(
        token=job.token,
        job_id=job.id,
        attempt=job.attempt,
        step=BATCH_STEP,
        epoch=cluster.epoch,
        user=account(job, cluster, node),
        allow_uid_below=cluster.config.controller.allow_uid_below,
        work_dir=spec.work_dir,
        argv=list(spec.script_args),
        env=env,
        tasks=protocol.TaskSet(first_rank=0, count=1, total=1, node_rank=0, nnodes=1),
        cpus=share.cpus,
        mem_mib=share.mem_mib,
        gpus=list(share.gpus),
        stdout=files.stdout,
        stderr=files.stderr,
        stdin=files.stdin,
        append=spec.open_mode == "append" or (spec.open_mode != "truncate" and job.restarts > 0),
        limit_s=_limit_s(job),
        grace_s=float(cluster.config.controller.kill_wait_s),
        signum=spec.signal.signum if spec.signal else 0,
        signal_before_s=float(spec.signal.before_s) if spec.signal else 0.0,
        signal_batch_only=spec.signal.batch_only if spec.signal else False,
        lease=spec.lease,
        lease_s=job.lease_s or 0.0,
        confine=confinement(job, cluster, node),
        hosts=hosts(job),
        same_machine=same_machine(job, cluster),
        scripts=job_scripts(job, cluster, node),
    )


def _limit_s(job: Job) -> float | None:
    return None if job.time_limit_s is None else float(job.time_limit_s)


def claim_part(job: Job, cluster: ClusterState, node: NodeName) -> protocol.Launch:
    """Return the claim of the job's part on another of its nodes.

    A claim holds the resources and runs nothing.
    """
    every = (*job.shares, *job.joining)
    rank = next(i for i, share in enumerate(every) if share.node == node)
    share = every[rank]
    return protocol.Launch(
        token=claim_token(job, node),
        job_id=job.id,
        attempt=job.attempt,
        step=ALLOC_STEP,
        epoch=cluster.epoch,
        user=account(job, cluster, node),
        allow_uid_below=cluster.config.controller.allow_uid_below,
        work_dir="/",
        argv=[],
        env={},
        tasks=protocol.TaskSet(first_rank=0, count=1, total=1, node_rank=rank, nnodes=len(every)),
        cpus=share.cpus,
        mem_mib=share.mem_mib,
        gpus=list(share.gpus),
        confine=confinement(job, cluster, node),
        scripts=job_scripts(job, cluster, node),
    )


def job_scripts(job: Job, cluster: ClusterState, node: NodeName) -> protocol.JobScripts:
    """Return the prolog and epilog of the job on `node`, with their environment."""
    settings, watts = cluster.config.controller, job.spec.gpu_power
    if not settings.prolog and not settings.epilog and not watts:
        return protocol.JobScripts()
    share = next((share for share in (*job.shares, *job.joining) if share.node == node), None)
    names = devices_of(cluster.nodes[node]) if node in cluster.nodes else {}
    gpus = [names.get(index, str(index)) for index in share.gpus] if share is not None and watts else []
    env = script_environment(job, cluster=cluster.config.name, share_dir=cluster.config.share, share=share)
    return protocol.JobScripts(
        prolog=settings.prolog,
        epilog=settings.epilog,
        limit_s=settings.prolog_epilog_timeout,
        env=env,
        gpu_power=watts if gpus else 0,
        gpus=gpus,
    )


def confinement(job: Job, cluster: ClusterState, node: NodeName) -> protocol.Confinement:
    """Return the job's share of `node`, and which parts of it the node enforces."""
    spec, settings = cluster.nodes[node].spec, cluster.config.controller
    share = next((share for share in (*job.shares, *job.joining) if share.node == node), None)
    if share is None:
        return protocol.Confinement()
    words = settings.confine if spec.confine is None else spec.confine
    has_parts = any(gpu.device.startswith("MIG-") for gpu in spec.gpus)  # several of them are one device file
    return protocol.Confinement(
        words=[word for word in words if not (word == "gpus" and (has_parts or not spec.gpus))],
        cpus=share.cpus,
        mem_mib=share.mem_mib,
        gpus=list(share.gpus),
        gpu_files=list(spec.gpu_files),
        max_processes=settings.max_processes,
    )


def claim_token(job: Job, node: NodeName) -> str:
    """Return the token of the claim on `node`, derived from the attempt's batch step token."""
    return str(replace(LaunchToken.parse(job.token), step=ALLOC_STEP, node=node, stay=job.stay_on(node)))


def signal_messages(
    job: Job, signum: int, *, batch_only: bool, full: bool
) -> list[tuple[protocol.SignalStep, NodeName]]:
    """Return the messages, with their nodes, that signal the processes of a job with a script.

    Without `batch_only` and `full`, only the job's steps get the signal. Steps on other nodes are
    found by the claims there.
    """
    node = job.shares[0].node
    batch = protocol.SignalStep(
        token=job.token, signum=signum, batch_only=batch_only, steps=not (batch_only or full), full=full
    )
    if batch_only:
        return [(batch, node)]
    there = protocol.SignalStep(token="", signum=signum, steps=True)
    others = [share.node for share in job.shares[1:]]
    return [(batch, node), *((protocol.changed(there, token=claim_token(job, other)), other) for other in others)]


def account(job: Job, cluster: ClusterState, node: NodeName) -> str:
    """Return the account that the job's processes run as on `node`.

    This is the submitter's account if the agent can switch to it.
    """
    return job.user if cluster.nodes[node].root_agent else ""


def devices_of(node: Node) -> dict[int, str]:
    """Return the CUDA names of the node's GPUs that CUDA does not know by index."""
    return {gpu.index: gpu.device for gpu in node.spec.gpus if gpu.device}


def hosts(job: Job) -> list[tuple[str, int]]:
    """Return the nodes of the allocation with their MPI slots: the number of tasks there."""
    return [(share.node, share.tasks) for share in job.shares]


def same_machine(job: Job, cluster: ClusterState) -> bool:
    """Return whether several of the job's nodes are the same machine.

    MPI has to be told in that case.
    """
    machines = [cluster.nodes[share.node].machine_id for share in job.shares]
    return len(machines) > len(set(machines)) and "" not in machines


def address(node: Node) -> str:
    """Return the address at which other nodes reach this node."""
    return address_of(node.spec)
