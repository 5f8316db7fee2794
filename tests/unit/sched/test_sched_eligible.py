"""Dependencies, as sbatch(1) has them."""

from __future__ import annotations

import pytest
from unit.sched.world import World, world

from hpcsched.model.ids import JobId
from hpcsched.model.job import JobState
from hpcsched.model.spec import Dependency, DependencyKind

KIND = DependencyKind
RUNS, DONE, FAILED, WAITS = JobState.RUNNING, JobState.COMPLETED, JobState.FAILED, JobState.PENDING


def dependent(*terms: Dependency, any_of: bool = False, **states: JobState) -> World:
    """Return a world in which job 9 depends on others, whose states are given as j1=..., j2=..."""
    others = [f"{name[1:]}: n1 1c 60s" for name in states]
    sketch = world("1x8", running=others, waiting=["9: 1c 60s"])
    for name, state in states.items():
        holds = {} if state is RUNS else {"held_nodes": (), "shares": ()}
        waits = {"started_at_s": None, "priority_set": 0} if state is WAITS else {}
        sketch.change(int(name[1:]), state=state, **holds, **waits)
    return sketch.change(9, dependency=terms, dependency_any=any_of)


def verdict(sketch: World) -> str:
    return sketch.reasons().get(9, "starts")


@pytest.mark.parametrize(
    ("kind", "waiting", "running", "completed", "failed", "unknown"),
    [
        (KIND.AFTER, "Dependency", "starts", "starts", "starts", "starts"),
        (KIND.AFTER_ANY, "Dependency", "Dependency", "starts", "starts", "starts"),
        (KIND.AFTER_OK, "Dependency", "Dependency", "starts", "DependencyNeverSatisfied", "DependencyNeverSatisfied"),
        (
            KIND.AFTER_NOT_OK,
            "Dependency",
            "Dependency",
            "DependencyNeverSatisfied",
            "starts",
            "DependencyNeverSatisfied",
        ),
    ],
)
def test_each_kind(kind: DependencyKind, waiting: str, running: str, completed: str, failed: str, unknown: str) -> None:
    term = Dependency(kind=kind, job_ids=(1,))
    found = [verdict(dependent(term, j1=state)) for state in (WAITS, RUNS, DONE, FAILED)]
    assert found == [waiting, running, completed, failed]
    assert verdict(dependent(term)) == unknown


def test_a_job_that_is_being_ended_has_not_ended() -> None:
    assert verdict(dependent(Dependency(kind=KIND.AFTER_ANY, job_ids=(1,)), j1=JobState.COMPLETING)) == "Dependency"


def test_the_words_name_job_and_goal() -> None:
    term = Dependency(kind=KIND.AFTER_OK, job_ids=(1, 2))
    assert dependent(term, j1=DONE, j2=RUNS).plan().waits[JobId(9)].detail == "waits until job 2 has completed"
    never = dependent(term, j1=FAILED, j2=RUNS).plan().waits[JobId(9)].detail
    assert never == "waits until job 1 has completed, which cannot happen any more"


def test_after_with_a_delay() -> None:
    sketch = dependent(Dependency(kind=KIND.AFTER, job_ids=(1,), delay_s=300), j1=RUNS)
    sketch.now_s = 299.0
    assert sketch.plan().waits[JobId(9)].detail == "waits until 5 min after job 1 has started"
    sketch.now_s = 300.0
    assert verdict(sketch) == "starts"


def test_a_task_of_an_array_is_waited_for_alone() -> None:
    def tasks(*states: JobState, wanted: int = 1) -> World:
        term = Dependency(kind=KIND.AFTER_OK, job_ids=(1,), task=wanted)
        sketch = dependent(term, j1=states[0], j2=states[1])
        sketch.change(1, array_job_id=JobId(1), array_task_id=0)
        return sketch.change(2, array_job_id=JobId(1), array_task_id=1)

    assert verdict(tasks(RUNS, DONE)) == "starts"
    assert verdict(tasks(DONE, RUNS)) == "Dependency"
    assert verdict(tasks(DONE, FAILED)) == "DependencyNeverSatisfied"
    assert verdict(tasks(RUNS, DONE, wanted=0)) == "Dependency"  # number 1 is the array and its first task alike
    assert tasks(DONE, RUNS).plan().waits[JobId(9)].detail == "waits until job 1_1 has completed"


def test_each_job_of_a_term_counts_by_itself_where_one_is_enough() -> None:
    term = Dependency(kind=KIND.AFTER_OK, job_ids=(1, 2))
    assert verdict(dependent(term, any_of=True, j1=FAILED, j2=DONE)) == "starts"
    assert verdict(dependent(term, any_of=True, j1=FAILED, j2=RUNS)) == "Dependency"


def test_a_delay_says_when_to_look_again() -> None:
    sketch = dependent(Dependency(kind=KIND.AFTER, job_ids=(1,), delay_s=300), j1=RUNS)
    assert sketch.plan().waits[JobId(9)].expected_start_s == 300.0


def test_what_depends_on_can_be_changed() -> None:
    sketch = dependent(Dependency(kind=KIND.AFTER_OK, job_ids=(1,)), j1=RUNS)
    assert verdict(sketch.change(9, dependency_set=())) == "starts"
    term = Dependency(kind=KIND.AFTER, job_ids=(1,))
    assert verdict(sketch.change(9, dependency_set=(term,))) == "starts"


def test_a_job_is_too_late_for_its_deadline_when_its_limit_reaches_beyond() -> None:
    sketch = world("1x4", waiting=["1: 1c 60s"]).change(1, deadline_at_s=100)
    sketch.now_s = 40.0
    assert sketch.starts() == {1: "n1:1"}
    sketch.now_s = 41.0
    wait = sketch.plan().waits[JobId(1)]
    assert str(wait.reason) == "DeadLine"
    assert wait.detail == "it cannot end by its deadline any more: its time limit is 1:00, and 0:59 is left"
    held = sketch.change(1, priority_set=0)
    assert held.reasons() == {1: "DeadLine"}


def test_all_terms_or_one_of_them() -> None:
    ok, after = Dependency(kind=KIND.AFTER_OK, job_ids=(1,)), Dependency(kind=KIND.AFTER_ANY, job_ids=(2,))
    assert verdict(dependent(ok, after, j1=DONE, j2=RUNS)) == "Dependency"
    assert verdict(dependent(ok, after, j1=FAILED, j2=RUNS)) == "DependencyNeverSatisfied"
    assert verdict(dependent(ok, after, j1=DONE, j2=DONE)) == "starts"
    assert verdict(dependent(ok, after, any_of=True, j1=DONE, j2=RUNS)) == "starts"
    assert verdict(dependent(ok, after, any_of=True, j1=FAILED, j2=RUNS)) == "Dependency"
    assert verdict(dependent(ok, ok, any_of=True, j1=FAILED)) == "DependencyNeverSatisfied"


@pytest.mark.parametrize(
    ("kind", "states", "expected"),
    [
        (KIND.AFTER_OK, (DONE, DONE), "starts"),
        (KIND.AFTER_OK, (DONE, RUNS), "Dependency"),
        (KIND.AFTER_OK, (FAILED, RUNS), "DependencyNeverSatisfied"),
        (KIND.AFTER_ANY, (FAILED, DONE), "starts"),
        (KIND.AFTER_NOT_OK, (FAILED, RUNS), "Dependency"),
        (KIND.AFTER_NOT_OK, (FAILED, DONE), "starts"),
        (KIND.AFTER_NOT_OK, (DONE, DONE), "DependencyNeverSatisfied"),
        (KIND.AFTER_CORR, (FAILED, DONE), "starts"),
        (KIND.AFTER_CORR, (DONE, RUNS), "Dependency"),
        (KIND.AFTER_CORR, (DONE, FAILED), "DependencyNeverSatisfied"),
    ],
)
def test_on_an_array(kind: DependencyKind, states: tuple[JobState, JobState], expected: str) -> None:
    sketch = dependent(Dependency(kind=kind, job_ids=(1,)), j1=states[0], j2=states[1])
    sketch.change(1, array_job_id=JobId(1), array_task_id=0).change(2, array_job_id=JobId(1), array_task_id=1)
    sketch.change(9, array_job_id=JobId(8), array_task_id=1)
    assert verdict(sketch) == expected


def test_a_singleton_waits_for_the_earlier_ones_of_its_name_and_user() -> None:
    def line() -> World:
        sketch = world("1x8", running=["1: n1 1c 60s"], waiting=["2: 1c 60s", "3: 1c 60s"])
        for job in (2, 3):
            sketch.change(job, dependency=(Dependency(kind=KIND.SINGLETON),))
        return sketch

    assert line().reasons() == {2: "Dependency", 3: "Dependency"}
    assert line().change(1, uid=7).starts() == {2: "n1:1"}
    assert line().change(1, name="other").starts() == {2: "n1:1"}
    assert line().change(3, name="other").starts() == {3: "n1:1"}
