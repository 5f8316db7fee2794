"""Track what nodes still run from before the database was restored.

After `hpcsched restore` nothing of an earlier incarnation is ended automatically, except with `--strays=end`, which ends all of
it. A job is adopted as a whole if the token of its batch step is the same as in the database, and its node reports it as
started. Then this is that job, its allocation is known, and it continues unchanged. Adoption is automatic; with `--strays=ask`
it needs an admin's word.

A launch that is not in the database, or has another token there, has no owner, script or allocation here. It is listed (`hctl
strays`) until it ends by itself or an admin ends it. A node that runs such a launch gets no new jobs meanwhile. The list is
kept in memory only, because nodes report these launches on every connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Action, Identity, authorize
from hpcsched.controller.nodes.loss import end_lost
from hpcsched.controller.nodes.messages import Answer, claim_token, end_orphan
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.lifecycle.events import Adopted, Claimed, Started
from hpcsched.lifecycle.job import can
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, JobId, LaunchToken, NodeName
from hpcsched.model.job import Job, JobState, Reason
from hpcsched.sched.decisions import Wait
from hpcsched.state.cluster import ClusterState, UndecidedLaunch, is_attempt_of
from hpcsched.state.transaction import Transaction

LIVING = (protocol.CLAIMED, protocol.READY, protocol.STARTED)


def keep(cluster: ClusterState, node: NodeName, token: LaunchToken, report: protocol.Report, answer: Answer) -> None:
    """Record a launch of an earlier incarnation on `node` until it is decided or has ended."""
    cluster.undecided_launches[node, report.token] = UndecidedLaunch(token=token, report=report)
    answer.acks.append(report.seq)


def take(tx: Transaction, node: NodeName, token: LaunchToken, report: protocol.Report, answer: Answer) -> bool:
    """Handle a report of an earlier incarnation: adopt its job, or keep it for an admin.

    Return False if the report is to be handled like any other report.
    """
    cluster = tx.cluster
    if is_adopted(cluster, token):
        if token.step in (BATCH_STEP, ALLOC_STEP):
            return False
        # The job's steps are supervised on their nodes, and end with the job.
        answer.acks.append(report.seq)
        return True
    if report.status not in LIVING:
        forget(cluster, node, token=report.token)
        return False
    job = cluster.job_of_former(token)
    if (
        not cluster.ask_about_orphans
        or (job is not None and job.state is JobState.COMPLETING)
        or (node, token.incarnation, int(token.job_id)) in cluster.to_kill
    ):
        return False
    keep(cluster, node, token, report, answer)
    if cluster.adopts_known and job is not None and str(token) == job.token and report.status == protocol.STARTED:
        _adopt(tx, job, None)
    return True


def forget(cluster: ClusterState, node: NodeName, *, ended: protocol.JobGone | None = None, token: str = "") -> bool:
    """Forget the node's launches of a token, an ended job, or all.

    Return whether any was known.
    """
    drop = [
        key
        for key, launch in cluster.undecided_launches.items()
        if key[0] == node
        and (not token or key[1] == token)
        and (ended is None or (launch.token.incarnation, int(launch.token.job_id)) == (ended.incarnation, ended.job_id))
    ]
    for key in drop:
        del cluster.undecided_launches[key]
    if ended is not None:
        cluster.to_kill.discard((node, ended.incarnation, ended.job_id))
    return bool(drop)


def held_back(cluster: ClusterState, ending: Iterable[tuple[NodeName, str, int]]) -> dict[JobId, Wait]:
    """Return the waiting jobs that may still run from before a restore, and their waits.

    `ending`: node, incarnation and job of launches that were told to end.
    """
    if unseen := cluster.unseen_nodes():
        text = (
            f"the database was restored from a backup, and node {unseen[0]}, which has not answered since, may still "
            f"run the job from before; it waits for the node, or for an admin's word: hctl fence {unseen[0]}"
        )
        restored = [job_id for job_id in cluster.pending if job_id <= cluster.restored_last_id]
        return dict.fromkeys(restored, Wait(reason=Reason.NODE_LOST, detail=text))
    asked = {
        launch.token.job_id: f"node {node} runs it from before the database was restored; an admin decides: hctl strays"
        for (node, _), launch in cluster.undecided_launches.items()
    }
    asked |= {
        JobId(job_id): f"node {node} is ending what it ran of the job before"
        for node, incarnation, job_id in ending
        if incarnation != cluster.incarnation
    }
    return {
        job_id: Wait(reason=Reason.NODE_LOST, detail=text)
        for job_id, text in asked.items()
        if job_id in cluster.pending
    }


def views(cluster: ClusterState) -> list[dict[str, Any]]:
    """Return the launches that wait for an admin's decision, as `hctl strays` shows them."""
    return [
        {
            "token": text,
            "node": node,
            "incarnation": launch.token.incarnation,
            "job_id": int(launch.token.job_id),
            "attempt": launch.token.attempt,
            "step": launch.token.step,
            "status": launch.report.status,
            "since_s": launch.report.started_at_s or launch.report.at_s,
            "adoptable": job is not None,
            "name": job.spec.name if job is not None else None,
            "user": job.user if job is not None else None,
        }
        for (node, text), launch in cluster.undecided_launches.items()
        for job in [cluster.job_of_former(launch.token)]
    ]


def adopt(tx: Transaction, identity: Identity, references: Iterable[str]) -> list[int]:
    """Adopt these running jobs; return their ids.

    A launch with another token than the database has is refused. "all" means all that can be adopted, if any can.
    """
    authorize(identity, Action.SETTLE_ORPHANS)
    references = list(references)
    named = _named(tx.cluster, references)
    if references == ["all"]:
        named = [token for token in named if tx.cluster.job_of_former(token) is not None] or named
    adopted: dict[int, None] = {}
    for token in named:
        job = tx.cluster.job_of_former(token)
        if job is None:
            raise RequestError(
                f"cannot adopt {token}: the restored database does not know this launch, so that its owner and what it "
                "holds are not known either; leave it to end, or end it with: hctl strays end"
            )
        if int(job.id) not in adopted:
            _adopt(tx, job, identity.uid)
            adopted[int(job.id)] = None
    return list(adopted)


def _adopt(tx: Transaction, job: Job, by_uid: int | None) -> None:
    first = job.shares[0].node
    batch = tx.cluster.undecided_launches.get((first, job.token))
    if batch is None or batch.report.status != protocol.STARTED:
        raise RequestError(f"cannot adopt job {job.display_id}: node {first} does not say that its script runs")
    tx.record(Adopted(job_id=job.id, at_s=tx.now_s, by_uid=by_uid))
    tx.adopt(job.token)
    for share in job.shares[1:]:
        if (
            can(tx.cluster.jobs[job.id], Claimed)
            and (share.node, claim_token(job, share.node)) in tx.cluster.undecided_launches
        ):
            tx.record(Claimed(job_id=job.id, at_s=tx.now_s, node=share.node))
    if tx.cluster.jobs[job.id].state is JobState.CONFIGURING:
        tx.record(Started(job_id=job.id, at_s=tx.now_s))
    tx.decided(
        key
        for key, launch in tx.cluster.undecided_launches.items()
        if launch.token.job_id == job.id and tx.cluster.job_of_former(launch.token) is not None
    )


def end(tx: Transaction, identity: Identity, references: Iterable[str]) -> dict[NodeName, Answer]:
    """End these launches, each with its whole job on its node; return the orders by node."""
    authorize(identity, Action.SETTLE_ORPHANS)
    answers: dict[NodeName, Answer] = {}
    for token in _named(tx.cluster, references):
        answer = answers.setdefault(token.node, Answer())
        end_orphan(token, tx.cluster.undecided_launches[token.node, str(token)].report, answer)
        job = tx.cluster.job_of_former(token)
        if job is not None and job.state is not JobState.COMPLETING:
            end_lost(tx, job, f"ended by {identity.user}: the database was restored from a backup")
    return answers


def is_adopted(cluster: ClusterState, token: LaunchToken) -> bool:
    """Return whether the launch belongs to an adopted job."""
    job = cluster.jobs.get(token.job_id)
    return job is not None and job.token in cluster.adopted and is_attempt_of(job, token)


def _named(cluster: ClusterState, references: Iterable[str]) -> list[LaunchToken]:
    """Return the referenced launches: whole tokens, token prefixes up to a dot, or "all"."""
    found: dict[str, LaunchToken] = {}
    for reference in references:
        meant = [
            launch.token
            for (_, text), launch in cluster.undecided_launches.items()
            if reference == "all" or text == reference or text.startswith(reference.rstrip(".") + ".")
        ]
        if not meant:
            raise NotFoundError(
                f"cannot find {reference[:120]!r} among what runs from before the restore: see hctl strays"
            )
        found |= {str(token): token for token in meant}
    return list(found.values())
