"""Plans in slices: they come to the same, give nothing away twice, and let others in between."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from jobs import T0
from unit.controller.cluster import ROOT, Cluster
from unit.sched.world import World, world

from hpcsched.controller import planning
from hpcsched.controller.planning import Planning, Slice
from hpcsched.model.accounting import PreemptType, Qos
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Hold, Job, JobState
from hpcsched.sched.decisions import Plan, Start
from hpcsched.sched.policy import Backfill, Policy, PreemptRules


class Clock:
    """A clock that goes on by `step_s` each time that it is looked at."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._count = itertools.count()

    def __call__(self) -> float:
        return next(self._count) * self.step_s


class Sliced:
    """A sketched world that is planned for in slices of a few steps."""

    def __init__(self, sketch: World, step_s: float = 0.006, quick_depth: int = 4) -> None:
        self.sketch = sketch
        self.planning = Planning(Clock(step_s), quick_depth)
        self.starts: list[Start] = []

    def jobs(self) -> dict[JobId, Job]:
        return {job.id: job for job in self.sketch.jobs}

    def begin(self) -> None:
        nodes = {node.spec.name: node for node in self.sketch.nodes}
        self.planning.begin(self.sketch.snapshot(), self.sketch.policy, self.jobs(), nodes)

    def go_on(self) -> Slice:
        done = self.planning.go_on(self.jobs(), {node.spec.name: node for node in self.sketch.nodes})
        for start in done.starts:
            self.sketch.change(
                start.job_id,
                state=JobState.RUNNING,
                shares=start.shares,
                held_nodes=tuple(share.node for share in start.shares),
                started_at_s=self.sketch.now_s,
            )
        self.starts += done.starts
        return done

    def finish(self) -> tuple[Plan, int]:
        """Go on until the whole plan is finished; return it, and how many slices that took."""
        for count in itertools.count(1):
            done = self.go_on()
            if done.plan is not None:
                return done.plan, count
        raise AssertionError


def queue(*, backfill: Backfill = Backfill.EASY, small: int = 20) -> World:
    """Return two nodes, one half busy until 100; a job that needs both, and many small ones behind it."""
    waiting = ["10: 2 nodes 4c 50s", *(f"{20 + at}: 1c {60 + 2 * at}s" for at in range(small))]
    return world("2x4", running=["1: n1 2c 100s"], waiting=waiting, backfill=backfill)


def test_slices_come_to_the_plan_that_is_made_in_one_go() -> None:
    for backfill in Backfill:
        sketch = queue(backfill=backfill)
        expected = sketch.plan()
        sliced = Sliced(sketch)
        sliced.begin()
        made, slices = sliced.finish()
        assert made == expected
        assert tuple(sliced.starts) == expected.starts
        assert slices > 5


def test_a_short_queue_takes_one_slice() -> None:
    sliced = Sliced(queue(), step_s=0.0)
    sliced.begin()
    assert sliced.finish()[1] == 1


def test_starts_come_before_the_plan_is_finished() -> None:
    sliced = Sliced(queue())
    sliced.begin()
    while not sliced.starts:
        assert sliced.go_on().plan is None


def changed_midway(quick_depth: int = 4) -> Sliced:
    """Return a whole plan that is past its front when job 1 ends and a job of higher priority comes, and a quick one begins."""
    sketch = queue(small=40)
    sketch.change(10, hold=Hold.USER)
    sliced = Sliced(sketch, quick_depth=quick_depth)
    sliced.begin()
    while len(sliced.starts) < 4:
        sliced.go_on()
    urgent = replace(sketch.job(59), id=JobId(5), spec_id=5, nice=-1000)
    sketch.jobs = [job for job in sketch.jobs if job.id != 1] + [urgent]
    assert sliced.planning.may_begin
    sliced.begin()
    assert not sliced.planning.may_begin
    return sliced


def held(sketch: World) -> dict[str, int]:
    cpus: dict[str, int] = {}
    for job in sketch.jobs:
        for share in job.shares if job.state is JobState.RUNNING else ():
            cpus[share.node] = cpus.get(share.node, 0) + share.cpus
    return cpus


def test_a_quick_plan_comes_first_and_what_it_starts_is_not_given_again() -> None:
    sliced = changed_midway()
    before = len(sliced.starts)
    sliced.go_on()
    while len(sliced.starts) == before:
        sliced.go_on()
    assert sliced.starts[before].job_id == 5
    made, _ = sliced.finish()
    assert len({start.job_id for start in sliced.starts}) == len(sliced.starts)
    assert held(sliced.sketch) == {"n1": 4, "n2": 4}
    assert JobId(5) not in made.waits  # it came after the whole plan had begun


def test_the_whole_plan_goes_on_where_it_stopped_and_another_follows() -> None:
    sliced = changed_midway()
    done = sliced.go_on()
    while done.plan is None:
        done = sliced.go_on()
    assert done.stale
    assert len(done.plan.waits) > 30
    assert not sliced.planning.under_way


def test_the_whole_plan_gets_its_turn_before_the_next_quick_one() -> None:
    sliced = changed_midway()
    turns = []
    for _ in range(200):
        if not sliced.planning.under_way:
            break
        turns.append(sliced.planning.may_begin)
        if turns[-1]:
            sliced.begin()
        sliced.go_on()
    assert not sliced.planning.under_way
    assert any(turns)


def test_a_start_is_dropped_if_its_job_changed_meanwhile() -> None:
    sliced = Sliced(world("1x4", waiting=["2: 1c 60s", "3: 1c 60s"]), step_s=0.0)
    sliced.begin()
    sliced.sketch.change(2, hold=Hold.USER)
    done = sliced.go_on()
    assert [start.job_id for start in done.starts] == [3]
    assert done.dropped == 1


def test_a_start_is_dropped_if_one_of_its_nodes_changed_meanwhile() -> None:
    sliced = Sliced(world("2x4", waiting=["2: 4c 60s", "3: 4c 60s"]), step_s=0.0)
    sliced.begin()
    sliced.sketch.change_node("n1", drained=True)
    done = sliced.go_on()
    assert [start.shares[0].node for start in done.starts] == [NodeName("n2")]
    assert done.dropped == 1


class SlowCluster(Cluster):
    """A cluster whose controller has time for a few steps of a plan in each tick."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.controller._planning = Planning(Clock(0.006), 4)
        self.ports.monotonic_s = Clock(0.5)  # type: ignore[method-assign]  # there has been time enough since the last slice


def test_a_request_is_answered_while_a_long_queue_is_planned_for() -> None:
    cluster = SlowCluster("n1")
    jobs = [cluster.submit(time_limit_s=600) for _ in range(12)]
    assert cluster.controller._planning.under_way
    late = cluster.submit(nice=10_000, time_limit_s=600)
    assert cluster.controller._planning.under_way
    for _ in range(60):
        cluster.tick()
    assert not cluster.controller._planning.under_way
    assert [cluster.job(job).state for job in jobs[:2]] == [JobState.CONFIGURING] * 2
    assert set(cluster.state.waits) == {*jobs[2:], late}
    assert cluster.now_s == T0


def test_nothing_is_left_of_a_plan_when_the_configuration_changes() -> None:
    cluster = SlowCluster("n1")
    for _ in range(12):
        cluster.submit(time_limit_s=600)
    planning = cluster.controller._planning
    assert planning.under_way
    cluster.controller.reconfigured()
    assert not planning.under_way
    for _ in range(60):
        cluster.tick()
    assert len(cluster.state.waits) == 10


def test_the_conservative_policy_keeps_what_an_earlier_plan_promised() -> None:
    cluster = Cluster("n1")
    cluster.controller.policy = replace(cluster.controller.policy, backfill=Backfill.CONSERVATIVE)
    cluster.submit(cpus_per_task=2, time_limit_s=100)
    first = cluster.submit(cpus_per_task=2, time_limit_s=100)
    promised_s = cluster.state.waits[first].expected_start_s
    urgent = cluster.submit(identity=ROOT, cpus_per_task=2, time_limit_s=100, nice=-1000)
    assert cluster.state.waits[first].expected_start_s == promised_s
    assert cluster.state.waits[urgent].expected_start_s == promised_s + 100


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the smallest world count as large."""
    monkeypatch.setattr(planning, "LARGE", 0)


def victims() -> World:
    """Return two nodes of running jobs, two jobs waiting that may take their places, and many that may not."""
    qos = {"low": Qos(name="low"), "high": Qos(name="high", preempt=("low",))}
    running = [f"{at}: n{at} 4c 1000s q=low" for at in (1, 2)]
    waiting = ["10: n1 4c 50s q=high", "11: n2 4c 50s q=high", *(f"{20 + at}: 1c {60 + at}s" for at in range(20))]
    sketch = world("2x4", running=running, waiting=waiting)
    sketch.policy = Policy(weight_age=0, preempt=PreemptRules(type=PreemptType.QOS, qos=qos))
    return sketch


@pytest.mark.usefixtures("large")
def test_a_plan_of_many_plans_is_made_in_slices_and_comes_to_the_same() -> None:
    sketch = victims()
    expected = sketch.full_plan()
    assert [one.job_id for one in expected.preemptions] == [10, 11]
    sliced = Sliced(sketch)
    sliced.begin()
    made, slices = sliced.finish()
    assert made == expected
    assert slices > 5


@pytest.mark.usefixtures("large")
def test_nothing_comes_in_between_a_plan_of_many_plans() -> None:
    sliced = Sliced(victims())
    sliced.begin()
    sliced.go_on()
    assert not sliced.planning.may_begin
    sliced.finish()
    assert sliced.planning.may_begin


@pytest.mark.usefixtures("large")
def test_nobody_makes_room_who_has_changed_since_the_plan_began() -> None:
    sliced = Sliced(victims())
    sliced.begin()
    sliced.go_on()
    sliced.sketch.change(1, nice=1)
    while (done := sliced.go_on()).plan is None:
        pass
    assert [one.job_id for one in done.plan.preemptions] == [11]
    assert done.stale
    sliced.begin()
    sliced.sketch.change_node("n2", drained=True)
    while (done := sliced.go_on()).plan is None:
        pass
    assert [one.job_id for one in done.plan.preemptions] == [10]


@pytest.mark.usefixtures("large")
def test_a_plan_of_many_plans_that_is_forgotten_leaves_nothing_behind() -> None:
    sliced = Sliced(victims())
    sliced.begin()
    sliced.go_on()
    sliced.planning.forget()
    assert not sliced.planning.under_way
    sliced.begin()
    assert [one.job_id for one in sliced.finish()[0].preemptions] == [10, 11]
