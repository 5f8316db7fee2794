"""How many replicas a service wants, and which jobs come and go, as a pure function."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.model.service import Rollout, RolloutStage, Service, ServiceReplica, ServiceVersion, read_replicas
from hpcsched.sched.replicas import (
    CALM_S,
    IDLE_S,
    NEVER,
    PRESSURE_S,
    UP_PAUSE_S,
    ReplicaJob,
    ReplicaLoad,
    ReplicaStep,
    ScaleMemory,
    ServiceLoad,
    next_step,
    rescaled,
    version_weights,
)

T0 = 1_000_000.0


def a_service(replicas: int = 1, **fields: object) -> Service:
    made = Service(
        name="chat",
        uid=1000,
        user="ann",
        versions=(ServiceVersion(label="v1", model="/m", spec="{}"),),
        replicas=tuple(ServiceReplica(job_id=number, version="v1", made_at_s=T0) for number in range(1, replicas + 1)),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


class Scaling:
    """A service whose load is told every second."""

    def __init__(self, service: Service) -> None:
        self.service, self.memory, self.now_s = service, ScaleMemory(), T0

    def told(self, seconds: float, held: int = 0, **load: float) -> int:
        """Tell the same load of each replica for some seconds; return how many are wanted."""
        for _ in range(int(seconds)):
            self.now_s += 1
            known = {one.job_id: ReplicaLoad(ready=True, **load) for one in self.service.replicas}  # type: ignore[arg-type]
            made = ServiceLoad(at_s=self.now_s, replicas=known, held=held)
            self.service, self.memory = rescaled(self.service, made, self.memory, self.now_s)
        return self.service.wanted

    def started(self) -> None:
        """Give the service the replicas that it wants."""
        self.service = replace(self.service, replicas=a_service(self.service.wanted).replicas)


def test_replicas_rise_when_requests_wait_and_only_after_the_last_one_is_ready() -> None:
    scaling = Scaling(a_service(most=3))
    assert scaling.told(PRESSURE_S, queue_wait_s=2.0, active=9) == 1
    assert scaling.told(1, queue_wait_s=2.0, active=9) == 2
    assert scaling.told(60, queue_wait_s=2.0, active=9) == 2
    scaling.started()
    assert scaling.told(PRESSURE_S + 1, queue_wait_s=2.0, active=9) == 3
    scaling.started()
    assert scaling.told(60, queue_wait_s=2.0, active=9) == 3


def test_a_full_cache_wants_a_replica_more_and_a_short_peak_does_not() -> None:
    scaling = Scaling(a_service(most=2))
    assert scaling.told(2, kv_used=0.9, active=1) == 1
    assert scaling.told(1, kv_used=0.5, active=1) == 1
    assert scaling.told(2, kv_used=0.9, active=1) == 1
    assert scaling.told(2, kv_used=0.9, active=1) == 2


def test_replicas_fall_one_by_one_after_a_long_calm_and_not_below_the_least() -> None:
    scaling = Scaling(a_service(3, least=1, most=3, wanted=3))
    assert scaling.told(CALM_S, active=1) == 3
    assert scaling.told(1, active=1) == 2
    scaling.started()
    assert scaling.told(CALM_S - 1, active=1) == 2
    assert scaling.told(1, active=1) == 1
    scaling.started()
    assert scaling.told(2 * IDLE_S) == 1


def test_a_load_that_changes_around_the_limits_does_not_change_the_replicas() -> None:
    scaling = Scaling(a_service(2, least=1, most=3, wanted=2))
    for _ in range(60):
        assert scaling.told(2, kv_used=0.9, active=1) == 2
        assert scaling.told(2, kv_used=0.1, active=1) == 2


def test_an_idle_service_that_may_have_none_has_none_until_a_request_waits() -> None:
    scaling = Scaling(a_service(1, least=0, most=1))
    assert scaling.told(IDLE_S - 1, active=1) == 1
    assert scaling.told(IDLE_S + 1) == 0
    scaling.started()
    assert scaling.told(100) == 0
    assert scaling.told(1, held=1) == 1


def test_too_fast_raises_are_put_off() -> None:
    scaling = Scaling(a_service(most=9))
    scaling.told(PRESSURE_S + 1, queue_wait_s=2.0)
    scaling.started()
    raised_s = scaling.now_s
    while scaling.told(1, queue_wait_s=2.0) == 2:
        pass
    assert scaling.now_s - raised_s >= UP_PAUSE_S


STATES = st.sampled_from(["waiting", "running", "ended", "failed", "gone"])


@settings(max_examples=200, deadline=None)
@given(
    states=st.lists(STATES, max_size=8),
    wanted=st.integers(0, 8),
    failures=st.integers(0, 3),
    ready=st.sets(st.integers(1, 8)),
)
def test_after_enough_steps_exactly_the_wanted_replicas_are_left(
    states: list[str], wanted: int, failures: int, ready: set[int]
) -> None:
    service = a_service(len(states), least=0, most=8, wanted=wanted, failures=failures)
    jobs = {
        number: ReplicaJob(
            running=state == "running", ended=state in ("ended", "failed"), failed=state == "failed", started_at_s=T0
        )
        for number, state in enumerate(states, 1)
        if state != "gone"
    }
    now_s = T0
    for _ in range(20):
        now_s += 100
        load = ServiceLoad(at_s=now_s, replicas={number: ReplicaLoad(ready=True) for number in ready})
        step = next_step(service, jobs, load, now_s)
        service = step.service
        for job_id in step.cancel:
            assert job_id not in {one.job_id for one in service.replicas}
            jobs.pop(job_id, None)
        for label in step.submit:
            job_id = max([*jobs, 100]) + 1
            jobs[job_id] = ReplicaJob(running=True, ended=False, started_at_s=now_s)
            made = ServiceReplica(job_id=job_id, version=label, made_at_s=now_s)
            service = replace(service, replicas=(*service.replicas, made))
    alive = [number for number, job in jobs.items() if not job.ended]
    assert len(service.replicas) == wanted
    assert sorted(one.job_id for one in service.replicas) == sorted(alive)
    step = next_step(service, jobs, None, now_s)
    assert (step.service, step.submit, step.cancel) == (service, (), ())


@pytest.mark.parametrize(("text", "found"), [("2", (2, 2)), ("1-3", (1, 3)), ("0-1", (0, 1))])
def test_a_number_of_replicas_is_read(text: str, found: tuple[int, int]) -> None:
    assert read_replicas(text) == found


# ----- rollouts


class Rolling:
    """A service with two replicas of v1 that are ready, and a rollout of v2."""

    def __init__(self, checks: tuple[str, ...] = (), **fields: object) -> None:
        self.now_s = T0
        versions = tuple(ServiceVersion(label=label, model="/m", spec="{}") for label in ("v1", "v2"))
        made = Rollout(
            label="v2", before="v1", stage=RolloutStage.STARTING, stage_at_s=T0, began_at_s=T0, checks=checks, canary=50
        )
        self.service = a_service(2, most=2, wanted=2, versions=versions, made=2, rollout=replace(made, **fields))  # type: ignore[arg-type]
        self.jobs = {number: ReplicaJob(running=True, ended=False, started_at_s=T0) for number in (1, 2)}
        self.loads = {1: ReplicaLoad(ready=True), 2: ReplicaLoad(ready=True)}
        self.checked: dict[int, str] = {}

    def step(self, after_s: float = 1.0) -> ReplicaStep:
        self.now_s += after_s
        load = ServiceLoad(at_s=self.now_s, replicas=self.loads, checked=self.checked)
        step = next_step(self.service, self.jobs, load, self.now_s)
        self.service = step.service
        for job_id in step.cancel:
            self.jobs.pop(job_id)
        for label in step.submit:
            job_id = max(self.jobs) + 1
            self.jobs[job_id] = ReplicaJob(running=True, ended=False, started_at_s=self.now_s)
            made = ServiceReplica(job_id=job_id, version=label, made_at_s=self.now_s)
            self.service = replace(self.service, replicas=(*self.service.replicas, made))
        return step

    def stage(self) -> RolloutStage | None:
        return self.service.rollout.stage if self.service.rollout is not None else None

    def canary(self, **load: object) -> None:
        """Step until the new version has its part, with this load."""
        self.step()
        self.loads[3] = ReplicaLoad(ready=True, **load)  # type: ignore[arg-type]
        self.step()

    def labels(self) -> list[str]:
        return [one.version for one in self.service.replicas if not one.drained_at_s]


def test_a_good_version_is_taken_and_the_earlier_one_goes_when_that_is_ready() -> None:
    rolling = Rolling(checks=("{}",))
    assert rolling.step().submit == ("v2",)
    assert version_weights(rolling.service) == {"v1": 100, "v2": NEVER}
    rolling.loads[3] = ReplicaLoad(ready=True)
    rolling.step()
    assert rolling.stage() is RolloutStage.CHECKING
    rolling.checked[3] = "ok"
    rolling.step()
    assert (rolling.stage(), version_weights(rolling.service)) == (RolloutStage.CANARY, {"v1": 50, "v2": 50})
    rolling.loads[3] = ReplicaLoad(ready=True, requests=30, ttft_s=0.1)
    rolling.step(10)
    assert rolling.stage() is RolloutStage.CANARY
    rolling.step(30)
    assert (rolling.stage(), version_weights(rolling.service)) == (RolloutStage.WIDENING, {"v1": 0, "v2": 100})
    rolling.step()
    assert rolling.labels() == ["v1", "v1", "v2", "v2"]
    rolling.loads[4] = ReplicaLoad(ready=True)
    rolling.step()
    assert (rolling.stage(), rolling.service.current, rolling.labels()) == (None, "v2", ["v2", "v2"])
    assert rolling.service.last_rollout == "version v2 was taken"
    rolling.step()
    assert [one.version for one in rolling.service.replicas] == ["v2", "v2"]


def test_a_version_that_ends_at_its_start_is_taken_back_at_once() -> None:
    rolling = Rolling()
    rolling.step()
    rolling.jobs[3] = ReplicaJob(running=False, ended=True, failed=True, started_at_s=T0, why="exit code 1")
    rolling.step()
    assert rolling.service.rollout is None
    assert rolling.service.last_rollout == "version v2 was taken back: job 3 ended before it was ready: exit code 1"
    assert (rolling.labels(), rolling.service.failures) == (["v1", "v1"], 0)


@pytest.mark.parametrize(
    ("load", "why"),
    [
        ({"requests": 3, "errors": 3, "error": "status 500"}, "3 of 3 answers were errors: status 500"),
        ({"requests": 50, "errors": 2}, "2 of 50 answers were errors"),
        ({"requests": 9, "ttft_s": 0.21}, "its first token takes 0.21 s, that of v1 0.1 s"),
    ],
    ids=["broken", "errors", "slow"],
)
def test_a_version_with_errors_or_late_first_tokens_is_taken_back(load: dict[str, object], why: str) -> None:
    rolling = Rolling()
    rolling.loads[1] = ReplicaLoad(ready=True, requests=9, ttft_s=0.1)
    rolling.canary(**load)
    rolling.step()
    assert rolling.service.last_rollout == f"version v2 was taken back: {why}"
    rolling.step(20)
    assert (rolling.service.current, rolling.labels()) == ("v1", ["v1", "v1"])


def test_a_failed_check_takes_the_version_back_before_a_user_sees_it() -> None:
    rolling = Rolling(checks=("{}",))
    rolling.canary()
    rolling.checked[3] = "prompt 1: the answer is empty"
    assert version_weights(rolling.service)["v2"] == NEVER
    rolling.step()
    assert rolling.service.last_rollout == "version v2 was taken back: a check failed: prompt 1: the answer is empty"


def test_few_errors_and_few_answers_are_not_judged() -> None:
    rolling = Rolling()
    rolling.canary(requests=4, errors=1)
    rolling.step(200)
    assert rolling.stage() is RolloutStage.CANARY
