"""What nodes say, each inside a transaction: matched against the ledger by token, turned into events.

A report that bears another token than the job's present one, or comes from another node than it is about, changes
nothing. `Answer` is what goes back to the node after the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcnode import protocol
from hpcsched.controller.measured import used
from hpcsched.controller.messages import claim_token
from hpcsched.controller.requests import end_lost, give_back, lose_node, miss_node, note_condition
from hpcsched.errors import ProtocolError
from hpcsched.lifecycle.effects import is_gathered, unclaimed_nodes
from hpcsched.lifecycle.events import Claimed, Exited, LaunchRefused, NodeCleared, Started
from hpcsched.lifecycle.job import can
from hpcsched.lifecycle.resize import is_moving
from hpcsched.model.ids import BATCH_STEP, JobId, NodeName, Token
from hpcsched.model.job import ExitStatus, Job, JobState
from hpcsched.model.node import Link
from hpcsched.store.rows import StepRow
from hpcsched.store.world import Transaction

# A job submitted with --requeue that exits so is queued again: EX_TEMPFAIL of sysexits.h, "try again later".
REQUEUE_ME = ExitStatus(code=75)
_RESTORED = "the database was restored from a backup"


@dataclass(slots=True)
class Answer:
    """What the node is told after the commit: reports that are kept, and attempts that must not be there."""

    acks: list[int] = field(default_factory=list)
    steps: list[protocol.Report] = field(default_factory=list)  # for the step service
    strays: dict[tuple[str, int], tuple[int, int]] = field(
        default_factory=dict
    )  # (incarnation, job) -> last life to end


def read_token(report: protocol.Report, node: NodeName) -> Token:
    """Return the report's token. Raises ProtocolError if it is none, or is about another node."""
    token = Token.parse(report.token)
    if token.node != node:
        raise ProtocolError(f"cannot take a report of node {token.node} from node {node}")
    return token


def on_batch_report(tx: Transaction, node: NodeName, token: Token, report: protocol.Report, answer: Answer) -> None:
    """Take what `node` says of a batch step."""
    job = tx.world.jobs.get(token.job_id)
    current = job is not None and job.token == report.token
    # What was launched before the database was restored and runs on is ended; how it ended counts.
    former = token.incarnation != tx.world.incarnation and report.status in (protocol.CLAIMED, protocol.STARTED)
    former = former and report.token not in tx.world.adopted
    if former:
        end_stray(token, report, answer)
        if current and job is not None and job.state is not JobState.COMPLETING and node in job.held_nodes:
            end_lost(tx, job, f"{_RESTORED}: what node {node} runs of the job is ended")
        return
    if not current or job is None or node not in job.held_nodes:
        end_stray(token, report, answer)
        return
    match report.status:
        case protocol.CLAIMED:
            return  # nothing to keep: it is repeated as STARTED or not at all
        case protocol.STARTED:
            if job.started_at_s is None and can(job, Started):
                started = tx.record(Started(job_id=job.id, at_s=tx.now_s, ran_s=report.ran_s))
                tx.put_step(_batch_row(started, node, None))
        case protocol.ENDED:
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
                    requeue=job.spec.requeue is True and exit_status(report) == REQUEUE_ME,
                )
            )
            tx.put_step(_batch_row(ended, node, report, outcome=job.outcome))
            for other in ended.held_nodes:
                if tx.world.nodes[other].link is Link.DOWN:
                    miss_node(tx, tx.world.jobs[job.id], other)
        case protocol.REFUSED:
            _on_refusal(tx, job, node, report)
        case protocol.LOST:
            lose_node(tx, job, node, f"node {node} lost the job: {report.why}")
        case protocol.BARRED:
            # Of a job that is being ended JobGone follows, and releases the node. Any other was launched and never ran:
            # the node was rebooted in between, say. Its token never will.
            if job.state is not JobState.COMPLETING:
                lose_node(tx, job, node, f"node {node} did not start the job: {report.why}")
    answer.acks.append(report.seq)


def _on_refusal(tx: Transaction, job: Job, node: NodeName, report: protocol.Report) -> None:
    """Of a refusal the job is the cause, and fails; or the node is: then it gets no more, and the job goes elsewhere."""
    if report.node_fault:
        note_condition(tx, node, report.why)
        give_back(tx, job, node, f"node {node} could not start the job: {report.why}")
    elif job.state in (JobState.CONFIGURING, JobState.COMPLETING):
        tx.record(LaunchRefused(job_id=job.id, at_s=tx.now_s, node=node, why=report.why))


def on_claim_report(tx: Transaction, node: NodeName, token: Token, report: protocol.Report, answer: Answer) -> None:
    """Take what `node` says of its claim of a job's part."""
    job = tx.world.jobs.get(token.job_id)
    current = job is not None and bool(job.token) and claim_token(job, node) == report.token
    if not current or job is None or node not in job.held_nodes:
        end_stray(token, report, answer)
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
    """Take what a node says that a running job gets, or loses (then JobGone follows)."""
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


def end_stray(token: Token, report: protocol.Report, answer: Answer) -> None:
    """Have what is not in the ledger (any more, on this node) ended, and let its end be forgotten."""
    if report.status in (protocol.CLAIMED, protocol.READY, protocol.STARTED):
        key = (token.incarnation, int(token.job_id))
        answer.strays[key] = max(token.life, answer.strays.get(key, (0, 0)))
    answer.acks.append(report.seq)


def exit_status(report: protocol.Report) -> ExitStatus:
    """Return how the step ended on this node: the worst of its tasks."""
    signum = max(report.signals, default=0)
    return ExitStatus(code=0 if signum else max(report.codes, default=0), signal=signum)


def _ran_s(report: protocol.Report) -> float | None:
    """Return how long the step ran. An agent of before says only what its clock showed, which may have been set since."""
    if report.ran_s is not None or not report.started_at_s:
        return report.ran_s
    return report.at_s - report.started_at_s


def _batch_row(job: Job, node: NodeName, report: protocol.Report | None, *, outcome: JobState | None = None) -> StepRow:
    """Return the row of the job's script; `outcome`: what the job was to end as before it did."""
    usage: dict[str, Any] = report.usage if report is not None else {}
    again = job.state is JobState.PENDING  # this attempt is over, and the job waits for its next
    state = "RUNNING" if report is None else (outcome or JobState.FAILED if again else job.outcome or job.state).value
    return StepRow(
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
    """Take the word of `node` that nothing is left there of the job up to that stay in that attempt."""
    job = tx.world.jobs.get(JobId(gone.job_id))
    if job is None or not job.token.startswith(gone.incarnation + "."):
        return
    if (gone.attempt, gone.stay) < (job.attempt, job.stay_on(node)):
        return
    over = job.state is JobState.COMPLETING or is_moving(job, node)
    if node in job.held_nodes and over and can(job, NodeCleared):
        tx.record(NodeCleared(job_id=job.id, at_s=tx.now_s, node=node))
    elif node in job.held_nodes and tx.world.is_former(job):
        lose_node(tx, job, node, f"{_RESTORED}, and what node {node} ran of the job was ended")


def on_inventory(
    tx: Transaction, node: NodeName, rebooted: bool, tokens: set[str], strays: set[tuple[str, int]]
) -> None:
    """Compare the ledger with what the node has after it (re)connected; its reports have been taken already.

    `rebooted`: it has another boot id than when we last heard of it, so no process of before can be left there.
    `strays`: (incarnation, job) of what it has been told to end.
    """
    for job in tx.world.jobs_on(node):
        batch_here = bool(job.spec.script) and job.shares[0].node == node
        claimed_here = node in job.claimed_nodes and job.state is not JobState.COMPLETING
        if tx.world.is_former(job):
            ending = (Token.parse(job.token).incarnation, int(job.id)) in strays
            if batch_here and not ending and job.token not in tokens and job.state is not JobState.COMPLETING:
                lose_node(tx, job, node, f"{_RESTORED}, and node {node} has nothing of the job")
        elif batch_here and job.state in (JobState.RUNNING, JobState.SUSPENDED) and job.token not in tokens:
            lose_node(tx, job, node, f"node {node} has no record of the job any more")
        elif not batch_here and rebooted and job.state is not JobState.CONFIGURING:
            lose_node(tx, job, node, f"node {node} was rebooted")
        elif claimed_here and claim_token(job, node) not in tokens:
            again = lose_node if is_gathered(job) else give_back
            again(tx, job, node, f"node {node} has no record of the job any more")
