"""Decide which jobs of a service to submit and to cancel.

Pure: a service, what is known of its jobs, what the gateway last said of their load, and the time are arguments. `next_step` is
called at each tick; it returns the same service if there is nothing to do.

Rules: a replica that is not wanted any more is drained before its job is cancelled; waiting jobs go first. A replica that ends
before it was ready counts as a failure, and the pause before the next one doubles. The number of replicas rises at once when
requests wait, and falls one by one after a long calm. A rollout takes no replica of the earlier version away before as many
replicas of the new one are ready; it goes back at once when one of these ends by itself, or answers with errors or too slowly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hpcsched.model.service import MAX_OLD_VERSIONS, Rollout, RolloutStage, Service, ServiceReplica

DRAIN_S = 60.0  # a drained replica may finish its requests for so long
UNKNOWN_DRAIN_S = 10.0  # if nothing is known of its requests
STEADY_S = 60.0  # a replica that ran for so long did not fail at its start
FIRST_PAUSE_S, MOST_PAUSE_S = 5.0, 300.0
REFUSED_PAUSE_S = 30.0  # after a refused submission

QUEUE_S = 1.0  # requests that wait longer want another replica
FULL_CACHE = 0.85  # part of the blocks
FREE_CACHE = 0.4
PRESSURE_S = 3.0  # how long it must last
UP_PAUSE_S = 10.0  # between two replicas more
CALM_S = 60.0  # before one replica less
IDLE_S = 300.0  # without requests before there is none

START_S = 3600.0  # for a replica of the new version to be ready; it may wait in the queue
CHECK_S = 600.0  # for the answers to the prompts of a rollout
CANARY_S, CANARY_REQUESTS = 30.0, 20  # the least time and number of requests before the new version is taken
MOST_CANARY_S = 300.0  # then fewer requests are enough
FEW_REQUESTS = 5  # fewer are not judged
MOST_ERRORS = 3  # more are judged, of however few requests
NEVER = -1  # weight of a version that gets requests that name it only
CHECKED = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJob:
    """What matters of a replica's job. `failed`: it ended by itself, `why` says how."""

    running: bool
    ended: bool
    started_at_s: float | None = None
    failed: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """How busy a replica is. Counters are those since the gateway first saw it."""

    ready: bool = False
    active: int = 0  # requests that it has from the gateway
    queue_wait_s: float = 0.0  # of its oldest waiting request
    kv_used: float = 0.0
    requests: int = 0  # answered
    errors: int = 0
    ttft_s: float = 0.0  # of its recent answers, the median
    tokens_per_s: float = 0.0
    error: str = ""  # the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """What the gateway last said of a service. `held`: requests that wait for a ready replica."""

    at_s: float
    replicas: Mapping[int, ReplicaLoad] = field(default_factory=dict)  # by job
    held: int = 0
    checked: Mapping[int, str] = field(default_factory=dict)  # by job: "ok", or what is wrong with its answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleMemory:
    """Since when the load is high, low or absent, and when a replica was last added."""

    pressed_at_s: float | None = None
    calm_at_s: float | None = None
    idle_at_s: float | None = None
    raised_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStep:
    """What to do: the changed service, versions to submit a replica of, and jobs to cancel."""

    service: Service
    submit: tuple[str, ...] = ()
    cancel: tuple[int, ...] = ()


def next_step(service: Service, jobs: Mapping[int, ReplicaJob], load: ServiceLoad | None, now_s: float) -> ReplicaStep:
    """Return what a service needs now. A job that is not in `jobs` has ended long ago."""
    service = advanced(without_ended(service, jobs, load, now_s), load, now_s)
    submit: list[str] = []
    cancel: list[int] = []
    drained: dict[int, ServiceReplica] = {}
    for label, wanted in wanted_of(service).items():
        mine = [one for one in service.replicas if one.version == label and not one.drained_at_s]
        if len(mine) < wanted and now_s >= service.retry_at_s:
            submit += [label] * (wanted - len(mine))
        for one in _least_useful(mine, jobs, load)[: max(0, len(mine) - wanted)]:
            if _is_running(one, jobs):
                drained[one.job_id] = replace(one, drained_at_s=now_s)
            else:
                cancel.append(one.job_id)
    for one in service.replicas:
        if one.drained_at_s and _is_drained(one, load, now_s):
            cancel.append(one.job_id)
    replicas = tuple(drained.get(one.job_id, one) for one in service.replicas if one.job_id not in cancel)
    if replicas != service.replicas:
        service = replace(service, replicas=replicas)
    return ReplicaStep(service=service, submit=tuple(submit), cancel=tuple(cancel))


def wanted_of(service: Service) -> dict[str, int]:
    """Return how many replicas of each version are wanted; 0 for those that are to go."""
    wanted = dict.fromkeys((one.version for one in service.replicas), 0)
    wanted |= {service.current: service.wanted}
    if (rollout := service.rollout) is not None:
        is_widening = rollout.stage is RolloutStage.WIDENING
        wanted[rollout.label] = service.wanted if is_widening else share_of(service.wanted, rollout.canary)
    return wanted


def version_weights(service: Service) -> dict[str, int]:
    """Return percent of new conversations by version; `NEVER`: only by its name."""
    rollout = service.rollout
    if rollout is None:
        return {service.current: 100}
    match rollout.stage:
        case RolloutStage.CANARY:
            return {service.current: 100 - rollout.canary, rollout.label: rollout.canary}
        case RolloutStage.WIDENING:
            return {service.current: 0, rollout.label: 100}
        case _:
            return {service.current: 100, rollout.label: NEVER}


def without_ended(service: Service, jobs: Mapping[int, ReplicaJob], load: ServiceLoad | None, now_s: float) -> Service:
    """Return the service without replicas whose jobs have ended; failures delay the next ones."""
    ended = [one for one in service.replicas if one.job_id not in jobs or jobs[one.job_id].ended]
    if not ended:
        return _recovered(service, load)
    left = tuple(one for one in service.replicas if one not in ended)
    failed = [one for one in ended if one.job_id in jobs and _has_failed(one, jobs[one.job_id], load, now_s)]
    if not failed:
        return replace(service, replicas=left)
    broken = [one for one in failed if service.rollout is not None and one.version == service.rollout.label]
    if broken:
        detail = jobs[broken[0].job_id].why
        return reverted(replace(service, replicas=left), f"job {broken[0].job_id} ended before it was ready: {detail}")
    failures = service.failures + len(failed)
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), MOST_PAUSE_S)
    why = f"job {failed[-1].job_id} of version {failed[-1].version} ended before it was ready"
    detail = jobs[failed[-1].job_id].why
    return replace(
        service,
        replicas=left,
        failures=failures,
        retry_at_s=now_s + pause_s,
        problem=f"{why}: {detail}" if detail else why,
    )


def _recovered(service: Service, load: ServiceLoad | None) -> Service:
    """Return the service without its problem, once a replica is ready."""
    if not service.failures or load is None or not any(one.ready for one in load.replicas.values()):
        return service
    return replace(service, failures=0, retry_at_s=0.0, problem="")


def _has_failed(one: ServiceReplica, job: ReplicaJob, load: ServiceLoad | None, now_s: float) -> bool:
    if one.drained_at_s or not job.failed:
        return False
    if load is not None and (known := load.replicas.get(one.job_id)) is not None and known.requests > known.errors:
        return False
    return job.started_at_s is None or now_s - job.started_at_s < STEADY_S


def _is_running(one: ServiceReplica, jobs: Mapping[int, ReplicaJob]) -> bool:
    return one.job_id in jobs and jobs[one.job_id].running


def _least_useful(
    replicas: Iterable[ServiceReplica], jobs: Mapping[int, ReplicaJob], load: ServiceLoad | None
) -> list[ServiceReplica]:
    """Return replicas, those first that are missed least: not running, not ready, young."""
    known = load.replicas if load is not None else {}

    def use(one: ServiceReplica) -> tuple[bool, bool, int, float]:
        of_load = known.get(one.job_id, ReplicaLoad())
        return _is_running(one, jobs), of_load.ready, of_load.active, -one.job_id

    return sorted(replicas, key=use)


def _is_drained(one: ServiceReplica, load: ServiceLoad | None, now_s: float) -> bool:
    since_s = now_s - one.drained_at_s
    known = load.replicas.get(one.job_id) if load is not None and load.at_s > one.drained_at_s else None
    if known is None:
        return since_s >= UNKNOWN_DRAIN_S
    return known.active == 0 or since_s >= DRAIN_S


def next_time_s(service: Service, now_s: float) -> float | None:
    """Return when a step is due by time alone, or None."""
    times_s = [
        service.retry_at_s,
        *(one.drained_at_s + UNKNOWN_DRAIN_S for one in service.replicas if one.drained_at_s),
    ]
    times_s += [one.drained_at_s + DRAIN_S for one in service.replicas if one.drained_at_s]
    return min((at_s for at_s in times_s if at_s > now_s), default=None)


# ----- a new version beside the present one


def advanced(service: Service, load: ServiceLoad | None, now_s: float) -> Service:
    """Return the service with its rollout in its next stage, at its end, or taken back."""
    rollout = service.rollout
    if rollout is None:
        return service
    known = load.replicas if load is not None else {}
    mine = {one.job_id: known[one.job_id] for one in _of(service, rollout.label) if one.job_id in known}
    others = [known[one.job_id] for one in _of(service, rollout.before) if one.job_id in known]
    ready = sum(one.ready for one in mine.values())
    if why := _why_broken(rollout, list(mine.values()), others):
        return reverted(service, why)
    in_stage_s = now_s - rollout.stage_at_s
    match rollout.stage:
        case RolloutStage.STARTING if ready:
            stage = RolloutStage.CHECKING if rollout.checks else RolloutStage.CANARY
            return _in_stage(service, rollout, stage, now_s)
        case RolloutStage.STARTING if in_stage_s > START_S:
            return reverted(service, f"no replica was ready within {START_S:g} s")
        case RolloutStage.CHECKING:
            found = [load.checked[job_id] for job_id in mine if load is not None and job_id in load.checked]
            if wrong := [text for text in found if text != CHECKED]:
                return reverted(service, f"a check failed: {wrong[0]}")
            if found:
                return _in_stage(service, rollout, RolloutStage.CANARY, now_s)
            if in_stage_s > CHECK_S:
                return reverted(service, f"the checks were not answered within {CHECK_S:g} s")
        case RolloutStage.CANARY:
            enough = sum(one.requests for one in mine.values()) >= CANARY_REQUESTS and in_stage_s >= CANARY_S
            if ready and (enough or in_stage_s >= MOST_CANARY_S):
                return _in_stage(service, rollout, RolloutStage.WIDENING, now_s)
        case RolloutStage.WIDENING if ready >= service.wanted:
            done = replace(
                service, current=rollout.label, rollout=None, last_rollout=f"version {rollout.label} was taken"
            )
            return without_old_versions(done)
        case _:
            pass
    return service


def _of(service: Service, label: str) -> list[ServiceReplica]:
    return [one for one in service.replicas if one.version == label and not one.drained_at_s]


def _in_stage(service: Service, rollout: Rollout, stage: RolloutStage, now_s: float) -> Service:
    return replace(service, rollout=replace(rollout, stage=stage, stage_at_s=now_s))


def _why_broken(rollout: Rollout, mine: list[ReplicaLoad], others: list[ReplicaLoad]) -> str:
    """Return why the new version is not good enough, "" if nothing is known against it."""
    requests, errors = sum(one.requests for one in mine), sum(one.errors for one in mine)
    if (requests >= FEW_REQUESTS or errors >= MOST_ERRORS) and errors > rollout.max_errors * max(requests, 1):
        last = next((f": {one.error}" for one in mine if one.error), "")
        return f"{errors} of {requests} answers were errors{last}"
    slow_s, usual_s = _ttft_s(mine), _ttft_s(others)
    if slow_s and usual_s and slow_s > rollout.max_ttft * usual_s:
        return f"its first token takes {slow_s:.3g} s, that of {rollout.before} {usual_s:.3g} s"
    return ""


def _ttft_s(replicas: list[ReplicaLoad]) -> float:
    """Return the time to the first token of the fastest replica; 0: not known."""
    return min((one.ttft_s for one in replicas if one.requests >= FEW_REQUESTS and one.ttft_s), default=0.0)


def reverted(service: Service, why: str) -> Service:
    """Return the service without its rollout: the earlier version has all requests again."""
    if service.rollout is None:
        return service
    text = f"version {service.rollout.label} was taken back: {why}"
    return without_old_versions(replace(service, rollout=None, last_rollout=text[:1000]))


def without_old_versions(service: Service) -> Service:
    """Return the service without versions that have no replicas, but for the last few."""
    used = {service.current, *(one.version for one in service.replicas)}
    used |= {service.rollout.label} if service.rollout is not None else set()
    last = {version.label for version in service.versions[-MAX_OLD_VERSIONS:]}
    return replace(service, versions=tuple(one for one in service.versions if one.label in used | last))


# ----- how many replicas


def rescaled(service: Service, load: ServiceLoad, memory: ScaleMemory, now_s: float) -> tuple[Service, ScaleMemory]:
    """Return the service with as many wanted replicas as its load needs, and what to remember."""
    mine = [one for one in service.replicas if not one.drained_at_s]
    known = [load.replicas.get(one.job_id, ReplicaLoad()) for one in mine]
    ready = [one for one in known if one.ready]
    active = sum(one.active for one in known)
    is_idle = not active and not load.held
    is_pressed = load.held > 0 or any(one.queue_wait_s > QUEUE_S or one.kv_used > FULL_CACHE for one in ready)
    is_calm = not is_pressed and all(not one.queue_wait_s and one.kv_used < FREE_CACHE for one in ready)
    memory = replace(
        memory,
        pressed_at_s=_since(memory.pressed_at_s, is_pressed, now_s),
        calm_at_s=_since(memory.calm_at_s, is_calm, now_s),
        idle_at_s=_since(memory.idle_at_s, is_idle, now_s),
    )
    wanted = _wanted(service, memory, now_s, is_starting=len(ready) < service.wanted, is_asked=bool(load.held))
    if wanted > service.wanted:
        memory = replace(memory, raised_at_s=now_s)
    if wanted < service.wanted:
        memory = replace(memory, calm_at_s=now_s)
    return (service if wanted == service.wanted else replace(service, wanted=wanted)), memory


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _lasts(since_s: float | None, least_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= least_s


def _wanted(service: Service, memory: ScaleMemory, now_s: float, *, is_starting: bool, is_asked: bool) -> int:
    wanted = service.wanted
    if not wanted and is_asked:
        wanted = 1
    elif not is_starting and _lasts(memory.pressed_at_s, PRESSURE_S, now_s):
        wanted += now_s - memory.raised_at_s >= UP_PAUSE_S
    elif wanted == 1 and service.least == 0:
        wanted -= _lasts(memory.idle_at_s, IDLE_S, now_s)
    elif wanted > 1:
        wanted -= _lasts(memory.calm_at_s, CALM_S, now_s)
    return min(max(wanted, service.least), service.most)


def share_of(count: int, percent: int) -> int:
    """Return `percent` of `count` replicas, at least one."""
    return max(1, math.ceil(count * percent / 100))
