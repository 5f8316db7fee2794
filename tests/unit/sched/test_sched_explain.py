"""Why does my job wait, in words."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.test_sched_reservations import inside, reserved
from unit.sched.world import World, world

from hpcsched.model.ids import JobId
from hpcsched.model.job import Hold
from hpcsched.sched.experience import Experience
from hpcsched.sched.explain import explain, in_words
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill


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
        "It needs 2 nodes with 2 cpus, 500M memory and 2 GPUs each for 10:00.",
        "Number 1 in line for its partition, the first.",
        "It starts in 2:00:00 at the latest, on n1 and n2, when jobs 2 and 1 have ended by their time limits, the last in "
        "2:00:00.",
        "Nothing that is smaller in one thing alone would start now.",
        "  n1 has 1 of 4 cpus free, has 100M of 1000M memory free, not 500M and has 1 of 2 GPUs free",
        "  n2 has 0 of 4 cpus free",
        "  n3 has no GPU",
    ]


def test_with_the_policy_default_a_head_may_start_later_than_expected() -> None:
    queue = world("1x4", running=["1: n1 4c 3600s"], waiting=["2: 4c 600s"], backfill=Backfill.DEFAULT)
    assert (
        words(queue, 2).splitlines()[3] == "It starts in 1:00:00 or so, on n1, when job 1 has ended by its time limit."
    )


def test_one_behind() -> None:
    assert words(QUEUE, 4).splitlines()[:5] == [
        "Priority: behind job 3 in partition 'main'.",
        "It needs 1 node with 4 cpus for 10:00.",
        "Number 2 in line for its partition, behind 3.",
        "It starts in 1:00:00 or so, on n1, when job 1 has ended by its time limit.",
        "It would start now with --cpus-per-task=2.",
    ]


def test_those_that_start_or_are_unknown_have_no_explanation() -> None:
    assert words(QUEUE, 5) == ""
    assert words(QUEUE, 77) == ""


def test_a_held_job_is_not_in_line() -> None:
    held = world("1x4", waiting=["1: 1c 60s"]).change(1, hold=Hold.USER)
    assert words(held, 1).splitlines() == [
        "JobHeldUser: held by its user.",
        "It needs 1 node with 1 cpu for 1:00.",
        "When it will start is not known.",
        "  n1 has room now",
    ]


def test_a_node_that_is_away_says_so() -> None:
    away = world("2x4", waiting=["1: 2 nodes 60s"]).change_node("n2", drained=True, drained_why="disk full")
    assert words(away, 1).splitlines()[-1] == "  n2 is drained (disk full)"


def test_a_job_that_names_all_its_nodes_is_told_of_no_others() -> None:
    named = world("3x4", ["1: n1 4c 600s"], ["2: 1c n1 600s"])
    assert words(named, 2).splitlines()[-1] == "  n1 has 0 of 4 cpus free"
    among = world("3x4", ["1: n1 4c 600s"], ["2: 2 nodes 1c n1 600s"])
    assert words(among, 2).splitlines()[-2:] == ["  n2 has room now", "  n3 has room now"]


def smaller(sketch: World, job: int) -> tuple[str, ...] | None:
    snapshot = sketch.snapshot()
    explanation = explain(snapshot, sketch.policy, sketch.plan(), JobId(job))
    assert explanation is not None
    return explanation.smaller


def test_what_is_smaller_and_would_start_now() -> None:
    half = ["1: n1 2c 600s", "7: n2 4c 300s"]
    assert smaller(world("2x4", half, ["2: 2 nodes 2c 600s"]), 2) == ("--nodes=1",)
    assert smaller(world("2x4", half, ["2: 4 tasks 600s"]), 2) == ("--ntasks=2",)
    assert smaller(world("2x4", half, ["2: 3c 600s"]), 2) == ("--cpus-per-task=2",)
    assert smaller(world("2x4", half, ["2: 1c exclusive 600s"]), 2) == ("without --exclusive",)
    assert smaller(world("2x4", half, ["2: 1c n2 600s"]), 2) == ("without --nodelist",)
    features = world("1x4+a 1x4", ["1: n1 4c 600s"], ["2: 1c +a 600s"])
    assert smaller(features, 2) == ("without --constraint",)
    gpus = world("1x8/1000/4xa100", ["1: n1 1c 3g 600s"], ["2: 1c 10M 2g:a100 600s"])
    assert smaller(gpus, 2) == ("--gpus-per-node=a100:1",)
    memory = world("1x4/8192", ["1: n1 1c 4096M 600s"], ["2: 1c 6000M 600s"])
    assert smaller(memory, 2) == ("--mem=4G",)


def test_default_names_no_smaller_request_that_a_promise_to_a_later_job_blocks() -> None:
    # Job 3 needs all, and is promised 1000: job 2 with two cpus would still run then.
    sketch = world("1x4", ["1: n1 2c 1000s"], ["2: 3c 7200s", "3: 4c 600s"], backfill=Backfill.DEFAULT)
    known = Experience(began_s=-1e9)
    snapshot = replace(sketch.snapshot(), experience=known)
    explanation = explain(snapshot, sketch.policy, plan(snapshot, sketch.policy), JobId(2))
    assert explanation is not None
    assert explanation.smaller == ()
    less = replace(sketch.change(2, cpus_per_task=2).snapshot(), experience=known)
    assert plan(less, sketch.policy).starts == ()


def test_with_default_a_request_so_small_that_it_would_go_ahead_of_all_is_told() -> None:
    sketch = world("1x4", ["1: n1 1c 1000s"], ["2: 3c 1200s", "3: 1c 3600s"], backfill=Backfill.DEFAULT)
    snapshot = replace(sketch.snapshot(), experience=Experience(began_s=-1e9))
    explanation = explain(snapshot, sketch.policy, plan(snapshot, sketch.policy), JobId(3))
    assert explanation is not None
    assert explanation.smaller == ("--time=3:00",)
    short = replace(sketch.change(3, time_limit_s=180).snapshot(), experience=Experience(began_s=-1e9))
    assert [start.job_id for start in plan(short, sketch.policy).starts] == [3]


def test_a_shorter_time_is_told_where_it_fits_before_somebody_s_turn() -> None:
    sketch = world("2x4", ["1: n1 4c 600s"], ["2: 2 nodes 4c 600s", "3: 4c 3600s"])
    assert smaller(sketch, 3) == ("--time=10:00",)
    assert sketch.change(3, time_limit_s=600).starts() == {3: "n2:4"}
    assert sketch.change(3, time_limit_s=601).starts() == {}


def test_where_it_is_expected_and_whose_ends_it_waits_for() -> None:
    sketch = world("3x4", ["1: n1 4c 600s", "7: n2 4c 300s", "8: n3 4c 900s"], ["2: 2 nodes 4c 600s"])
    found = explain(sketch.snapshot(), sketch.policy, sketch.plan(), JobId(2))
    assert found is not None
    assert found.place is not None
    assert (found.place.start_s, found.place.nodes, found.place.cpus) == (600.0, ("n1", "n2"), 8)
    assert found.place.until_ended == (("1", 600.0), ("7", 300.0))
    assert found.expected_start_s == 600.0


def test_reserved_nodes_say_until_when() -> None:
    sketch = reserved(world("2x4", ["1: n2 4c 900s"], ["2: 4c 3600s"]), "n1", 600, 1200)
    lines = words(sketch, 2).splitlines()
    assert lines[2:] == [
        "Number 1 in line for its partition, the first.",
        "It starts in 15:00 or so, on n2, when job 1 has ended by its time limit.",
        "It would start now with --time=10:00.",
        "  n1 is reserved (r) in 10:00, before the job would have ended",
        "  n2 has 0 of 4 cpus free",
    ]
    assert smaller(reserved(world("1x4", (), ["2: 4c 3600s"]), "n1", 600, 1200), 2) == ("--time=10:00",)


def test_of_many_nodes_those_that_lack_least_are_the_nearest() -> None:
    running = ["1: n1 4c 1000M 600s", "2: n2 2c 900s", "3: n3 4c 600s", "4: n4 1c 500s"]
    sketch = world("4x4", running, ["5: 4c 100M exclusive 60s"])
    found = explain(sketch.snapshot(), sketch.policy, sketch.plan(), JobId(5))
    assert found is not None
    assert found.nearest == ("n2", "n3", "n4")


def test_before_its_reservation_a_job_may_not_start_whatever_is_free() -> None:
    sketch = inside(reserved(world("2x4", waiting=["1: 1c 60s"]), "n1", 600, 1200), 1)
    assert words(sketch, 1).splitlines() == [
        "Reservation: its reservation 'r' begins in 10:00.",
        "It needs 1 node with 1 cpu for 1:00.",
        "It may start in 10:00.",
        "  n1 is not reserved for it yet: in 10:00",
        "  n2 is not in reservation r",
    ]
