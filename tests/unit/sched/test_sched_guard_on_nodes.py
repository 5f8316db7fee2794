"""The policy `default` in a plan: who is tried first, who goes ahead, and who is promised a start."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import World, world

from hpcsched.model.reservation import Reservation, reserved_intervals_of
from hpcsched.sched.decisions import Plan
from hpcsched.sched.experience import Experience
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Guard, ShortJobs


def reservation_of_all_nodes(made: World, start_s: float, end_s: float) -> dict[str, object]:
    """Return what changes in a snapshot if all nodes are set aside over this time."""
    names = tuple(node.name for node in made.snapshot().nodes)
    reservations = (Reservation(name="r", start_s=start_s, end_s=end_s, nodes=names, users=("ann",)),)
    return {"reservations": reservations, "reserved_intervals": reserved_intervals_of(reservations, made.now_s)}


# Nobody is quick, and only the old are promised anything.
GUARD = Guard(short=ShortJobs(share=0), first=0, wide=2)

# Four cpus, two of them busy until 1000: job 2 needs all, and for the two that are free others compete.
SKETCH = {"nodes": "1x4", "running": ["1: n1 2c 1000s"]}


def sketch(*waiting: str, guard: Guard = GUARD, **policy: object) -> World:
    return world(**SKETCH, waiting=["2: 4c 600s", *waiting], backfill=Backfill.DEFAULT, guard=guard, **policy)


def planned(made: World, runs_s: dict[int, float] | None = None, easy_wait_s: float = 0.0) -> Plan:
    experience = Experience(longest_runs_s=runs_s or {}, easy_wait_s=easy_wait_s, began_s=-1e9)
    return plan(replace(made.snapshot(), experience=experience), made.policy)


def started(made: World, runs_s: dict[int, float] | None = None, easy_wait_s: float = 0.0) -> list[int]:
    return [start.job_id for start in planned(made, runs_s, easy_wait_s).starts]


def two_users(now_s: float = 100.0, **policy: object) -> World:
    """Job 3 of ann and job 4 of bob, alike and as old: there is room for one."""
    made = sketch("3: 2c 800s", "4: 2c 800s", **policy)
    made.change(2, eligible_at_s=0.0).change(3, uid=1, eligible_at_s=0.0).change(4, uid=2, eligible_at_s=0.0)
    made.now_s = now_s
    return made


def test_whose_jobs_are_short_comes_first() -> None:
    assert started(two_users()) == [3]  # nobody is known: in the order of the line
    assert started(two_users(), {1: 700.0, 2: 60.0}) == [4]
    assert started(two_users(), {1: 60.0, 2: 700.0}) == [3]


def test_of_jobs_that_have_only_just_come_the_shortest_is_first() -> None:
    assert started(two_users(now_s=0.0), {1: 700.0, 2: 60.0}) == [4]


def test_whoever_waits_moves_up() -> None:
    made = two_users(now_s=1000.0).change(1, time_limit_s=6000).change(4, eligible_at_s=990.0)
    assert started(made, {1: 700.0, 2: 300.0}) == [3]  # it has waited longer for what it takes to run


def test_nobody_overtakes_the_old() -> None:
    made = two_users(now_s=5000.0).change(1, time_limit_s=6000).change(4, eligible_at_s=4900.0)
    made.change(2, eligible_at_s=4900.0)
    short = {1: 700.0, 2: 10.0}
    assert started(made, short, easy_wait_s=20_000.0) == [4]  # nobody is old before 10000 s
    assert started(made, short, easy_wait_s=9_000.0) == [3]


def test_old_ones_that_do_not_fit_are_promised_a_start_and_the_young_are_not() -> None:
    made = sketch("3: 3c 100s", estimate_depth=0)
    made.now_s = 900.0
    made.change(1, time_limit_s=1900).change(2, eligible_at_s=0.0).change(3, eligible_at_s=890.0)
    waits = planned(made, easy_wait_s=1_000.0).waits  # an hour at least: half of it makes old
    assert (waits[2].expected_start_s, waits[3].expected_start_s) == (1900.0, None)
    made.change(2, eligible_at_s=-1000.0)
    assert started(made.change(3, cpus_per_task=2, time_limit_s=1200)) == []  # it would be in the way of job 2
    made.change(2, eligible_at_s=800.0)
    assert started(made) == [3]


def test_the_first_in_line_and_the_first_wide_one_are_promised_one_for_later() -> None:
    # Of the hour that nobody has waited for, job 2 is promised a tenth or half: then job 3 must be over.
    made = sketch("3: 2c 1500s").change(2, eligible_at_s=0.0).change(3, eligible_at_s=5.0)
    made.now_s = 10.0
    for guard in (replace(GUARD, first=1, first_part=0.5), replace(GUARD, wide=0.7, wide_part=0.5)):
        made.policy = replace(made.policy, guard=replace(guard, wide_bonus=0.0))
        assert started(made) == [3]
        made.policy = replace(made.policy, guard=replace(guard, wide_bonus=0.0, first_part=0.1, wide_part=0.1))
        assert started(made) == []


def test_who_was_promised_this_moment_starts_in_it() -> None:
    made = world(nodes="1x4", waiting=["2: 4c 600s"], backfill=Backfill.DEFAULT, guard=replace(GUARD, first=1))
    made.now_s = 10_000.0
    made.change(2, eligible_at_s=9_999.0)
    made.policy = replace(made.policy, guard=replace(GUARD, first=1, first_part=0.0))
    assert started(made) == [2]


def quick_world(**changes: object) -> World:
    """Job 2 is old and waits for 1000; job 3, of one of four cpus, would not be over then."""
    short = ShortJobs(limit_s=1200, work_s=300, share=0.25, wait_part=0.9)
    made = sketch("3: 1c 1200s", guard=replace(GUARD, short=replace(short, **changes)))
    made.now_s = 2000.0
    return made.change(1, time_limit_s=3000).change(2, eligible_at_s=0.0).change(3, eligible_at_s=1990.0)


def test_a_quick_job_goes_ahead_of_promises() -> None:
    assert started(quick_world()) == [3]
    for never in ({"limit_s": 1100}, {"work_s": 299}, {"share": 0.24}, {"wait_part": 0.5}):
        assert started(quick_world(**never)) == [], never


def test_who_is_over_a_limit_counts_for_nobody() -> None:
    made = quick_world().change(2, array_job_id=2, array_task_id=2, array_limit_set=1)
    made.change(2, eligible_at_s=-1e9)  # longer than quick jobs let anybody wait
    assert started(made) == []
    made.change(1, array_job_id=2, array_task_id=1)  # a task of the same array
    assert started(made) == [3]
    assert planned(made).waits[2].reason == "JobArrayTaskLimit"


def test_quick_jobs_that_run_leave_the_others_less_of_their_share() -> None:
    made = quick_world().change(1, cpus_per_task=1, time_limit_s=900)
    made.now_s = 800.0
    made.change(1, shares=(replace(made.job(1).shares[0], cpus=1),), started_at_s=0.0)
    made.change(2, eligible_at_s=-2000.0).change(3, eligible_at_s=790.0)
    assert started(made) == []  # job 1 is quick and has all that they may have
    assert started(made.change(1, time_limit_s=3000)) == [3]  # it is not


def test_a_higher_tier_comes_first_however_short_others_are() -> None:
    made = sketch("3: 2c 800s p=low", "4: 2c 800s", partitions={"main": "n1", "low": "n1"})
    made.partitions[0] = replace(made.partitions[0], priority_tier=5)
    made.change(3, uid=1).change(4, uid=2).change(2, partition="main,low")
    assert started(made, {1: 1.0, 2: 800.0}) == [4]


def test_a_job_first_by_more_than_age_has_easys_promise_while_others_are_worth_less() -> None:
    made = two_users()
    assert started(made, {1: 60.0}) == [3]  # 800 s of two cpus: in the way of job 2
    made.change(3, time_limit_s=1200).change(4, time_limit_s=1200)
    assert started(made, {1: 60.0}) == [3]
    made.change(3, nice=5).change(4, nice=5)
    assert started(made, {1: 60.0}) == []  # job 2 is to start at 1000
    assert planned(made).waits[2].expected_start_s == 1000.0
    made.change(2, nice=5)
    assert started(made, {1: 60.0}) == [3]


def test_part_of_the_gpus_counts_as_so_much_of_the_machine() -> None:
    # Job 4 asks for one of two GPUs: half of the machine for 1100 s is too much work.
    made = world(
        nodes="1x4/2xa",
        waiting=["2: 4c 600s", "3: 1c 1000s", "4: 1c 1g 1100s"],
        running=["1: n1 2c 1000s"],
        backfill=Backfill.DEFAULT,
        guard=replace(GUARD, short=ShortJobs(limit_s=1200, work_s=300, share=0.6)),
    )
    made.now_s = 2000.0
    made.change(1, time_limit_s=2500).change(2, eligible_at_s=0.0)
    made.change(3, eligible_at_s=1990.0).change(4, eligible_at_s=1990.0)
    assert started(made) == [3]


def distrusted(made: World, runs_s: dict[int, float], **changes: object) -> Plan:
    """Plan where jobs use a tenth of the time that they ask for, and each user's last runs took so long."""
    guard = replace(made.policy.guard, distrust_part=0.5, distrust_times=3.0)
    experience = Experience(longest_runs_s=runs_s, began_s=-1e9, request_use=0.1)
    snapshot = replace(made.snapshot(), experience=experience, **changes)
    return plan(snapshot, replace(made.policy, guard=guard))


def held_up() -> World:
    """Job 2 is old, needs all, and is promised 1000; job 3 of user 7 asks for 5000 s."""
    made = sketch("3: 2c 5000s", estimate_depth=0).change(2, eligible_at_s=-9000.0).change(3, uid=7)
    return made.change(1, uid=5)


def test_without_trust_in_requests_a_job_counts_three_times_its_users_longest_run() -> None:
    assert started(held_up(), {7: 300.0}) == []
    assert [start.job_id for start in distrusted(held_up(), {7: 300.0}).starts] == [3]
    assert [start.job_id for start in distrusted(held_up(), {7: 340.0}).starts] == []
    assert [start.job_id for start in distrusted(held_up(), {}).starts] == []


def test_a_start_by_prediction_keeps_the_time_limit_that_was_asked_for() -> None:
    (start,) = distrusted(held_up(), {7: 300.0}).starts
    assert start.time_limit_s is None  # as the job has it


def test_running_jobs_are_expected_to_end_by_prediction_too() -> None:
    # Job 1 may run until 1000 and is expected to end at 600: job 2 is promised that.
    waits = distrusted(held_up(), {5: 200.0, 7: 300.0}).waits
    assert waits[2].expected_start_s == 600.0
    assert 3 in waits


def test_a_prediction_opens_no_way_into_a_reservation() -> None:
    made = held_up()
    reserved = reservation_of_all_nodes(made, 4000, 5000)
    assert distrusted(made, {7: 300.0}).starts
    assert not distrusted(made, {7: 300.0}, **reserved).starts


def test_other_policies_trust_requests_always() -> None:
    made = held_up()
    for backfill in (Backfill.EASY, Backfill.EASY_SJBF, Backfill.CONSERVATIVE, Backfill.SLURM_LIKE):
        made.policy = replace(made.policy, backfill=backfill)
        trusting = plan(made.snapshot(), made.policy)
        assert distrusted(made, {5: 10.0, 7: 10.0}) == trusting, backfill
