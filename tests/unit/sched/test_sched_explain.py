"""Why does my job wait, in words."""

from __future__ import annotations

from unit.sched.world import World, world

from hpcsched.model.ids import JobId
from hpcsched.model.job import Hold
from hpcsched.sched.explain import explain, in_words


def words(sketch: World, job: int) -> str:
    snapshot = sketch.snapshot()
    explanation = explain(snapshot, sketch.policy, sketch.plan(), JobId(job))
    return in_words(explanation, snapshot.now_s) if explanation is not None else ""


QUEUE = world(
    "2x4/1000/2xa100 1x2",
    running=["1: n1 3c 900M 1g 3600s", "2: n2 4c 7200s"],
    waiting=["3: 2 nodes 2c 500M 2g 600s", "4: 4c 600s", "5: 2c 9999s"],
)


def test_the_head() -> None:
    assert words(QUEUE, 3).splitlines() == [
        "Resources: needs 2 nodes with 2 cpus, 500M memory and 2 GPUs each; none is free.",
        "It needs 2 nodes with 2 cpus, 500M memory and 2 GPUs each.",
        "Number 1 in line for its partition, the first.",
        "It starts in 2:00:00 at the latest, if running jobs last to their time limits.",
        "  n1 has 1 of 4 cpus free, has 100M of 1000M memory free, not 500M and has 1 of 2 GPUs free",
        "  n2 has 0 of 4 cpus free",
        "  n3 has no GPU",
    ]


def test_one_behind() -> None:
    assert words(QUEUE, 4).splitlines()[:4] == [
        "Priority: behind job 3 in partition 'main'.",
        "It needs 1 node with 4 cpus.",
        "Number 2 in line for its partition, behind 3.",
        "It starts in 1:00:00 or so, if running jobs last to their time limits.",
    ]


def test_those_that_start_or_are_unknown_have_no_explanation() -> None:
    assert words(QUEUE, 5) == ""
    assert words(QUEUE, 77) == ""


def test_a_held_job_is_not_in_line() -> None:
    held = world("1x4", waiting=["1: 1c 60s"]).change(1, hold=Hold.USER)
    assert words(held, 1).splitlines() == [
        "JobHeldUser: held by its user.",
        "It needs 1 node with 1 cpu.",
        "When it will start is not known.",
        "  n1 could take a share now",
    ]


def test_a_node_that_is_away_says_so() -> None:
    away = world("2x4", waiting=["1: 2 nodes 60s"]).change_node("n2", drained=True, drained_why="disk full")
    assert words(away, 1).splitlines()[-1] == "  n2 is drained (disk full)"
