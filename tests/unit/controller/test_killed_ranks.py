"""A training job with --requeue of which a rank was killed is tried again, as long as its checkpoints get on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster import ANN, BOB, Cluster

from hpcnode.wire import protocol
from hpcsched.controller.nodes.messages import MAX_DEATHS
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState


def tell(cluster: Cluster, job_id: int, message: Any) -> None:
    inner = protocol.to_json(message)
    attempt = cluster.job(job_id).attempt
    said = protocol.FromStream(stream=0, uid=1000, job_id=job_id, attempt=attempt, message=inner)
    cluster.controller.training.told(NodeName("n1"), said, cluster.now_s)
    cluster.tick()


def attempt(cluster: Cluster, job_id: int, checkpoint: int, **end: Any) -> None:
    """Run an attempt of the job that has made a checkpoint of that step, and ends so."""
    cluster.tick(after_s=60)  # requeue_delay_s
    cluster.run(job_id)
    if checkpoint:
        tell(cluster, job_id, protocol.Progress(job_id=job_id, step=checkpoint + 5, checkpoint_step=checkpoint))
    end = {"codes": [137], "signals": [0]} | end
    cluster.says("n1", cluster.report(job_id, protocol.ENDED, **end))


@pytest.mark.parametrize(
    "end",
    [
        {"codes": [137]},  # Open MPI's mpirun, srun, a shell
        {"codes": [9]},  # MPICH's mpirun
        {"codes": [139]},
        {"codes": [0], "signals": [9]},
    ],
)
def test_a_killed_rank_is_tried_again(end: dict[str, Any]) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    attempt(cluster, job_id, 600, **end)
    job = cluster.job(job_id)
    assert (job.state, job.attempt) in ((JobState.PENDING, 1), (JobState.CONFIGURING, 1))
    assert job.saved_step == 600
    assert cluster.replayed(job_id) == job


@pytest.mark.parametrize(
    ("fields", "checkpoint", "end"),
    [
        ({}, 600, {}),  # it was not asked for
        ({"requeue": False}, 600, {}),
        ({"requeue": True}, 0, {}),  # it would begin at the beginning
        ({"requeue": True}, 600, {"codes": [1]}),
        ({"requeue": True}, 600, {"codes": [137], "out_of_memory": True}),
        ({"requeue": True}, 600, {"codes": [137], "timed_out": True}),
    ],
)
def test_others_are_not(fields: dict[str, Any], checkpoint: int, end: dict[str, Any]) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(time_limit_s=3600, **fields)
    attempt(cluster, job_id, checkpoint, **end)
    assert cluster.job(job_id).state in (JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.TIMEOUT)
    assert cluster.job(job_id).deaths == 0


def test_ranks_that_only_noticed_a_lost_one_count_as_killed() -> None:
    cluster = Cluster("n1")
    for echo, state in ((True, JobState.CONFIGURING), (False, JobState.FAILED)):
        job_id = cluster.submit(requeue=True)
        cluster.run(job_id)
        tell(cluster, job_id, protocol.Progress(job_id=job_id, step=5, checkpoint_step=5))
        tell(cluster, job_id, protocol.Failure(job_id=job_id, rank=0, ranks=2, text="rank 1 is gone", echo=True))
        if not echo:
            tell(cluster, job_id, protocol.Failure(job_id=job_id, rank=1, ranks=2, text="KeyError", echo=False))
        cluster.says("n1", cluster.report(job_id, protocol.ENDED, codes=[1], signals=[0]))
        cluster.tick()
        assert cluster.job(job_id).state is state
        if state is not JobState.FAILED:
            cluster.run(job_id)
            cluster.end(job_id)


def test_an_attempt_that_made_no_checkpoint_of_its_own_is_the_last() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    attempt(cluster, job_id, 600)
    attempt(cluster, job_id, 600)
    assert cluster.job(job_id).state is JobState.FAILED


def test_the_attempts_are_bounded() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    for number in range(MAX_DEATHS + 1):
        attempt(cluster, job_id, 100 + number)
    assert (cluster.job(job_id).state, cluster.job(job_id).deaths) == (JobState.FAILED, MAX_DEATHS)


def test_hwhy_says_what_the_exit_code_means_and_where_another_attempt_resumes() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    attempt(cluster, job_id, 600)
    text = asyncio.run(cluster.backend().why(ANN, str(job_id)))["text"]
    assert "its script ended with exit code 137 (killed by SIGKILL; perhaps memory ran out" in text
    assert f"Queued again it resumes from step 600: hctl requeue {job_id}" in text
    assert "600" not in asyncio.run(cluster.backend().why(BOB, str(job_id)))["text"]


def test_a_full_file_system_is_part_of_how_a_job_ended() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.says("n1", cluster.report(job_id, protocol.ENDED, codes=[1], signals=[0], output_full=True))
    text = asyncio.run(cluster.backend().why(ANN, str(job_id)))["text"]
    assert text.endswith("exit code 1; the file system of its output file was full when it ended")
    assert cluster.replayed(job_id) == cluster.job(job_id)


def test_the_story_says_why_a_job_was_tried_again() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    attempt(cluster, job_id, 600)
    told = [event["text"] for event in cluster.backend().story(ANN, str(job_id))["events"]]
    assert any("a rank was killed, and it is requeued to resume from step 600" in text for text in told)
