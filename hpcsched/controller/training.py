"""Keep the status reports of training programs.

They are kept while the job runs. The last one goes to the history.

Rules: the newest status is in memory at once. It is written to disk every WRITE_EVERY_S and when
the attempt ends, because a commit for every step would cost too much. A report of another attempt
than the present one, or from a node that the job is not on, has no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hpcnode.wire import protocol
from hpcsched.errors import ProtocolError
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, Job, RankFailure, TrainingStatus
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

log = logging.getLogger("hpcsched.training")

WRITE_EVERY_S = 60.0
MAX_FAILURES = 64  # per attempt: reports of further ranks only repeat the first ones
MAX_FAILED_JOBS = 1000  # jobs whose number of failures is known


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
        if now_s - self._written_s.get(job.id, float("-inf")) >= WRITE_EVERY_S:
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
