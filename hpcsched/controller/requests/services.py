"""Start, change and stop services, and keep their replicas up.

A replica is an ordinary job of the service's owner: limits, fair share, preemption and reservations apply to it. At each tick
`keep_up` submits and cancels the jobs that `hpcsched.sched.replicas` asks for. The gateway says every second how busy replicas
are; this is kept in memory only.

Whose program a replica runs: a version's job comes from the owner alone, because it runs as the owner. Others may scale and stop.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hpcsched.api.identity import identity_of, uid_of
from hpcsched.api.views import how_it_ended
from hpcsched.auth.authorize import Action, Identity, Owner, allows, authorize
from hpcsched.controller import usage_ledger
from hpcsched.controller.requests import jobs, submission
from hpcsched.errors import ConflictError, NotFoundError, RequestError
from hpcsched.model import frozen
from hpcsched.model.accounting import ServiceUse, resolve
from hpcsched.model.codec import spec_from_json, spec_to_short_json, value_from_json
from hpcsched.model.ids import JobId
from hpcsched.model.job import FINAL, Job, JobState
from hpcsched.model.service import (
    MAX_CHECKS,
    MAX_CHECKS_BYTES,
    MAX_MODEL_CHARS,
    MAX_REPLICAS,
    MAX_SERVICES,
    MAX_SERVICES_PER_USER,
    MAX_SPEC_BYTES,
    MAX_USED_ROWS,
    Audience,
    Rollout,
    RolloutStage,
    Service,
    ServiceReplica,
    ServiceVersion,
    check_service_name,
)
from hpcsched.sched.fairshare import ServiceCredit, UsageKey, accrued, billing_per_s, token_price, weights_of
from hpcsched.sched.replicas import (
    REFUSED_PAUSE_S,
    ReplicaJob,
    ReplicaLoad,
    ReplicaStep,
    ScaleMemory,
    ServiceLoad,
    next_step,
    next_time_s,
    rescaled,
    reverted,
    version_weights,
    without_old_versions,
)
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

Json = dict[str, Any]

DAY_S = 86_400
NO_UID = -2  # of an account that is gone
MAX_USED_CHARS = 256  # of a name
MAX_USED = 1 << 50  # of one kind in one report
USED_KINDS = ("requests", "prompt_tokens", "completion_tokens")
LOAD_S = 10.0  # a load is known for so long


@dataclass(slots=True)
class ServiceLoads:
    """What the gateway said of each service, what scaling remembers, and unpaid costs."""

    loads: dict[str, ServiceLoad] = field(default_factory=dict)
    memories: dict[str, ScaleMemory] = field(default_factory=dict)
    credits: dict[str, ServiceCredit] = field(default_factory=dict)

    def of(self, name: str, now_s: float) -> ServiceLoad | None:
        """Return the load of a service, None if it is not known now."""
        load = self.loads.get(name)
        return load if load is not None and abs(now_s - load.at_s) <= LOAD_S else None

    def keep(self, names: Iterable[str]) -> None:
        """Forget services that are gone."""
        known = set(names)
        self.loads = {name: load for name, load in self.loads.items() if name in known}
        self.memories = {name: one for name, one in self.memories.items() if name in known}
        self.credits = {name: one for name, one in self.credits.items() if name in known}


# ----- requests of users


def create(tx: Transaction, identity: Identity, body: Json) -> Service:
    """Start a service. `body`: name, model, job, least, most, audience.

    Raises: RequestError, ConflictError, PermissionDeniedError.
    """
    cluster = tx.cluster
    authorize(identity, Action.SUBMIT, what="start a service")
    authorize(identity, Action.MANAGE_SERVICE, Owner(uid=identity.uid, user=identity.user), "start a service")
    name = check_service_name(body.get("name"))
    if name in cluster.services:
        raise ConflictError(
            f"cannot start service {name!r}: there is one of this name; choose another --name, or replace its model: "
            f"hserve roll {name} --to MODEL"
        )
    if cluster.config.controller.sign_jobs:
        raise RequestError(
            "cannot start a service: users of this cluster sign each job (sign_jobs in hpcsched.toml), and replicas are "
            "submitted without their user"
        )
    mine = sum(one.uid == identity.uid for one in cluster.services.values())
    if len(cluster.services) >= MAX_SERVICES or mine >= MAX_SERVICES_PER_USER:
        raise RequestError(
            f"cannot start a service: you have {mine} of at most {MAX_SERVICES_PER_USER}, all users together "
            f"{len(cluster.services)} of at most {MAX_SERVICES}; stop some with hserve stop"
        )
    least, most = read_counts(body)
    version = read_version(tx, identity, body, "v1", name)
    account, _ = resolve(cluster.config.accounting, identity.user, spec_from_json(json.loads(version.spec)).account, "")
    made = Service(
        name=name,
        uid=identity.uid,
        user=identity.user,
        account=account,
        audience=read_audience(body.get("audience", Audience.OWNER)),
        least=least,
        most=most,
        wanted=least,
        versions=(version,),
        made_at_s=tx.now_s,
    )
    tx.set_service(name, made)
    return made


def read_counts(body: Json) -> tuple[int, int]:
    """Return the least and most replicas of a request. Raises RequestError."""
    least, most = body.get("least", 1), body.get("most", 1)
    if type(least) is not int or type(most) is not int or not 0 <= least <= most <= MAX_REPLICAS or not most:
        raise RequestError(f"cannot use these numbers of replicas: most is 1 to {MAX_REPLICAS}, least is 0 to most")
    return least, most


def read_audience(value: object) -> Audience:
    """Return who may ask the model. Raises RequestError."""
    try:
        return Audience(str(value))
    except ValueError:
        raise RequestError(f"cannot open a service to {str(value)[:40]!r}: there are {', '.join(Audience)}") from None


def read_version(tx: Transaction, identity: Identity, body: Json, label: str, name: str) -> ServiceVersion:
    """Return the version of a request: its job is checked as if it were submitted now.

    Raises: RequestError.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model or len(model) > MAX_MODEL_CHARS or not model.isprintable():
        raise RequestError(f"cannot serve this model: name it with 1 to {MAX_MODEL_CHARS} printable characters")
    spec = spec_from_json(body.get("job"))
    if spec.array is not None or spec.components or spec.dependency or not spec.has_script:
        raise RequestError(
            "cannot start a service of this job: it needs a script, and can have no array, components, dependency"
        )
    spec = frozen.replace(spec, comment=f"service {name}@{label}", name=name if spec.name == "" else spec.name)
    text = json.dumps(spec_to_short_json(spec), separators=(",", ":"))
    if len(text) > MAX_SPEC_BYTES:
        raise RequestError(
            f"cannot start a service of this job: its script and environment have {len(text) >> 10} KiB, "
            f"{MAX_SPEC_BYTES >> 10} are allowed; export fewer variables"
        )
    submission.place_of(tx.cluster, identity, submission.settle(tx.cluster, identity.user, spec), tx.now_s)
    return ServiceVersion(label=label, model=model, spec=text)


def find_service(cluster: ClusterState, identity: Identity, name: object) -> Service:
    """Return the service of this name. Raises NotFoundError, if the user may not see it, too."""
    found = cluster.services.get(name) if isinstance(name, str) else None
    if found is None or not may_see(cluster, identity, found):
        raise NotFoundError(f"cannot find service {str(name)[:80]!r}: there is none of this name; see hserve ls")
    return found


def owner_of(service: Service) -> Owner:
    """Return whom `authorize` asks about."""
    return Owner(uid=service.uid, user=service.user, account=service.account)


def scale(tx: Transaction, identity: Identity, body: Json) -> Service:
    """Change how many replicas a service has."""
    service = _managed(tx, identity, body, "scale")
    least, most = read_counts(body)
    changed = replace(service, least=least, most=most, wanted=min(max(service.wanted, least), most))
    tx.set_service(service.name, changed)
    return changed


def stop(tx: Transaction, identity: Identity, body: Json) -> Service:
    """Cancel the jobs of a service, and delete it."""
    service = _managed(tx, identity, body, "stop")
    tx.set_service(service.name, None)
    for one in service.replicas:
        _cancel(tx, one.job_id, identity)
    return service


def roll(tx: Transaction, identity: Identity, body: Json) -> Service:
    """Bring in a new version beside the present one, or take it back.

    `body`: name; model, job, canary, max_errors, max_ttft, checks; or back. Without a job it is that of the present version, with
    the new model in its script.

    Raises: ConflictError: there is a rollout already. PermissionDeniedError: the new job would run as another user.
    """
    service = _managed(tx, identity, body, "change the model of")
    if body.get("back") is True:
        changed = reverted(service, f"{identity.user} wanted it")
        if changed is service:
            raise RequestError(f"cannot take anything back: service {service.name} has no rollout now")
        tx.set_service(service.name, changed)
        return changed
    authorize(identity, Action.SUBMIT, owner_of(service), f"give service {service.name} a new job")
    if service.rollout is not None:
        raise ConflictError(
            f"cannot begin a rollout of service {service.name}: that of version {service.rollout.label} is under way; wait, or "
            f"end it: hserve roll {service.name} --back"
        )
    label = f"v{service.made + 1}"
    if "job" not in body:
        body = body | {"job": _job_with_model(service, body.get("model"))}
    rollout = read_rollout(body, label, service.current, tx.now_s)
    versions = (*service.versions, read_version(tx, identity, body, label, service.name))
    changed = without_old_versions(
        replace(service, versions=versions, made=service.made + 1, rollout=rollout, last_rollout="")
    )
    tx.set_service(service.name, changed)
    return changed


def _job_with_model(service: Service, model: object) -> Json:
    """Return the present version's job with another model. Raises RequestError."""
    version = service.version(service.current)
    job: Json = json.loads(version.spec)
    runs = f" hpcserve run {shlex.quote(version.model)} "
    if not isinstance(model, str) or str(job.get("script")).count(runs) != 1:
        raise RequestError(
            f"cannot put another model into the script of version {version.label}: it does not run hpcserve with its model once; "
            f"name the new job: hserve roll {service.name} --to=MODEL --script=FILE"
        )
    return job | {"script": job["script"].replace(runs, f" hpcserve run {shlex.quote(model)} ")}


def read_rollout(body: Json, label: str, before: str, now_s: float) -> Rollout:
    """Return the rollout of a request. Raises RequestError."""
    canary, errors, ttft = body.get("canary", 10), body.get("max_errors", 0.01), body.get("max_ttft", 1.3)
    whole = type(canary) is int and 1 <= canary <= 100
    if not whole or not _is_number(errors, 0.0, 1.0) or not _is_number(ttft, 1.0, 100.0):
        raise RequestError(
            "cannot begin the rollout: canary is 1 to 100 percent, max_errors 0 to 1, max_ttft 1 to 100 times the time before"
        )
    checks = body.get("checks", [])
    if not isinstance(checks, list) or len(checks) > MAX_CHECKS or not all(isinstance(one, dict) for one in checks):
        raise RequestError(f"cannot begin the rollout: checks are at most {MAX_CHECKS} objects")
    texts = tuple(json.dumps(one, separators=(",", ":")) for one in checks)
    if sum(map(len, texts)) > MAX_CHECKS_BYTES:
        raise RequestError(f"cannot begin the rollout: its checks have more than {MAX_CHECKS_BYTES >> 10} KiB")
    return Rollout(
        label=label,
        before=before,
        stage=RolloutStage.STARTING,
        stage_at_s=now_s,
        began_at_s=now_s,
        canary=canary,
        max_errors=float(errors),
        max_ttft=float(ttft),
        checks=texts,
    )


def _is_number(value: object, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most  # type: ignore[operator]


def _managed(tx: Transaction, identity: Identity, body: Json, verb: str) -> Service:
    service = find_service(tx.cluster, identity, body.get("name"))
    authorize(identity, Action.MANAGE_SERVICE, owner_of(service), f"{verb} service {service.name}")
    return service


def may_use(cluster: ClusterState, identity: Identity, service: Service) -> bool:
    """Return whether the user may ask the model: by role, or because it is open to the user."""
    if allows(identity, Action.USE_SERVICE, owner_of(service)):
        return True
    if service.audience is Audience.OWNER:
        return False
    is_account = service.audience is Audience.ACCOUNT
    if is_account and service.account not in cluster.config.accounting.accounts_of(identity.user):
        return False  # also on a cluster without accounts
    return allows(identity, Action.USE_SERVICE, Owner(uid=identity.uid, user=identity.user))


def may_see(cluster: ClusterState, identity: Identity, service: Service) -> bool:
    """Return whether the user may know that there is this service."""
    return allows(identity, Action.VIEW_JOBS, owner_of(service)) or may_use(cluster, identity, service)


# ----- the replicas, at each tick


def keep_up(tx: Transaction, loads: ServiceLoads) -> None:
    """Submit and cancel the jobs that services need."""
    for service in list(tx.cluster.services.values()):
        step = _step_of(tx.cluster, service, loads.of(service.name, tx.now_s), tx.now_s)
        if step.service is not service or step.submit or step.cancel:
            tx.attempt(f"keep service {service.name} up", partial(_carry_out, step=step))


def _step_of(cluster: ClusterState, service: Service, load: ServiceLoad | None, now_s: float) -> ReplicaStep:
    known = {one.job_id: job for one in service.replicas if (job := cluster.jobs.get(JobId(one.job_id))) is not None}
    return next_step(service, {job_id: _facts_of(job) for job_id, job in known.items()}, load, now_s)


def _facts_of(job: Job) -> ReplicaJob:
    ended = job.state in FINAL
    return ReplicaJob(
        running=job.state in (JobState.RUNNING, JobState.SUSPENDED),
        ended=ended,
        started_at_s=job.started_at_s,
        failed=ended and job.ended_by_uid is None,
        why=(how_it_ended(job).removeprefix(": ") or job.reason_detail) if ended else "",
    )


def _carry_out(tx: Transaction, step: ReplicaStep) -> None:
    service = step.service
    owner = identity_of(service.uid, tx.cluster.config.access).as_user()
    for job_id in step.cancel:
        _cancel(tx, job_id, owner)
    for label in step.submit:
        service = _with_replica(tx, owner, service, label)
        if service.retry_at_s > tx.now_s:
            break  # refused: the next one would be, too
    tx.set_service(service.name, service)


def _with_replica(tx: Transaction, owner: Identity, service: Service, label: str) -> Service:
    """Return the service with one more replica, or with the reason of the refusal."""
    spec = spec_from_json(json.loads(service.version(label).spec))
    made = tx.attempt("submit a replica", lambda inner: submission.submit(inner, owner, "", [spec], lambda *_: None))
    if isinstance(made, Exception):
        return replace(service, problem=f"a replica is refused: {made}", retry_at_s=tx.now_s + REFUSED_PAUSE_S)
    replica = ServiceReplica(job_id=made[0]["job_id"], version=label, made_at_s=tx.now_s)
    problem = service.problem if service.failures else ""
    return replace(service, replicas=(*service.replicas, replica), problem=problem)


def _cancel(tx: Transaction, job_id: int, identity: Identity) -> None:
    job = tx.cluster.jobs.get(JobId(job_id))
    if job is not None and job.state not in FINAL:
        jobs.cancel(tx, identity, [str(job_id)], {})


def next_service_s(cluster: ClusterState, now_s: float) -> float | None:
    """Return when a service needs a step by time alone, or None."""
    times_s = (next_time_s(service, now_s) for service in cluster.services.values())
    return min((at_s for at_s in times_s if at_s is not None), default=None)


# ----- what the gateway says and asks


def use(cluster: ClusterState, identity: Identity, body: Json, now_s: float) -> Json:
    """Return who pays for asking the model of a service; without a name, the usable services.

    Raises: NotFoundError, if the user may not ask it, too. RateLimitError: its usage has reached a limit.
    """
    payer, _ = resolve(cluster.config.accounting, identity.user, "", "")
    answer: Json = {"user": identity.user, "account": payer}
    name = body.get("name") or ""
    if not name:
        usable = [one for one in cluster.services.values() if may_use(cluster, identity, one)]
        return answer | {
            "services": [{"name": one.name, "user": one.user, "made_at_s": one.made_at_s} for one in usable]
        }
    service = cluster.services.get(name) if isinstance(name, str) else None
    if service is None or not may_use(cluster, identity, service):
        raise NotFoundError(f"cannot ask model {str(name)[:80]!r}: there is no service of this name that you may use")
    if cluster.config.accounting.token_billing and identity.user != service.user:
        usage_ledger.check_unspent(cluster, payer, identity.user, now_s)
    return answer | {"service": name}


def read_loads(body: Json, now_s: float) -> dict[str, ServiceLoad]:
    """Return the loads in what the gateway says. Raises ProtocolError."""
    found = body.get("services", {})
    if not isinstance(found, dict) or len(found) > MAX_SERVICES:
        raise RequestError("cannot read the loads of services: they are not an object, or too many")
    return {str(name): value_from_json(ServiceLoad, _loads_of(load) | {"at_s": now_s}) for name, load in found.items()}


def _loads_of(load: Any) -> Json:
    if not isinstance(load, dict):
        raise RequestError("cannot read the load of a service: it is not an object")
    for name in ("replicas", "checked"):
        by_job = load.get(name, {})
        if not isinstance(by_job, dict) or len(by_job) > 4 * MAX_REPLICAS:
            raise RequestError(f"cannot read the load of a service: {name} is not an object, or has too many replicas")
    return load


def sees_use(cluster: ClusterState, identity: Identity, use_of: ServiceUse) -> bool:
    """Return whether the user may see this usage: its own, or that of its services."""
    service, uid = cluster.services.get(use_of.service), uid_of(use_of.user)
    asker = Owner(uid=NO_UID if uid is None else uid, user=use_of.user, account=use_of.account)
    return allows(identity, Action.MANAGE_SERVICE, asker) or (
        service is not None and allows(identity, Action.MANAGE_SERVICE, owner_of(service))
    )


def find_replica(cluster: ClusterState, body: Json) -> tuple[Service, Job]:
    """Return the service and the running job that the gateway means. Raises NotFoundError."""
    service = cluster.services.get(str(body.get("name")))
    job_id = body.get("job")
    if service is None or type(job_id) is not int or job_id not in {one.job_id for one in service.replicas}:
        raise NotFoundError("cannot reach the replica: the service has no such one")
    job = cluster.jobs.get(JobId(job_id))
    if job is None or job.state is not JobState.RUNNING:
        raise NotFoundError(f"cannot reach the replica: job {job_id} does not run")
    return service, job


def read_used(body: Json, now_s: float) -> list[ServiceUse]:
    """Return what users have asked of models, in what the gateway says. Raises RequestError."""
    rows = body.get("used", [])
    found: dict[tuple[str, str, str], dict[str, int]] = {}
    if not isinstance(rows, list) or len(rows) > MAX_USED_ROWS:
        raise RequestError("cannot read the usage of services: it is not a list, or too long")
    for row in rows:
        if not isinstance(row, list) or len(row) != 5 or row[3] not in USED_KINDS:
            raise RequestError("cannot read the usage of services: a row is service, user, account, kind and count")
        service, user, account, kind, count = row
        if not all(map(_is_used_name, (service, user, account))) or type(count) is not int or count < 0:
            raise RequestError("cannot read the usage of services: a name is not a text, or a count not a number")
        counts = found.setdefault((service, user, account), dict.fromkeys(USED_KINDS, 0))
        counts[kind] += count
        if counts[kind] >= MAX_USED:
            raise RequestError("cannot read the usage of services: a count is too large")
    day = int(now_s // DAY_S)
    return [ServiceUse(*whose, day, *(counts[kind] for kind in USED_KINDS)) for whose, counts in found.items()]


def _is_used_name(text: object) -> bool:
    return isinstance(text, str) and len(text) <= MAX_USED_CHARS and text.isprintable()


def note_loads(
    tx: Transaction, loads: ServiceLoads, body: Mapping[str, ServiceLoad], used: Sequence[ServiceUse] = ()
) -> None:
    """Take the loads of services from the gateway, and change the numbers of wanted replicas.

    `used`: what users have asked meanwhile, which is added to what is stored.
    """
    loads.keep(tx.cluster.services)
    tx.put_service_use(_charged(tx, loads, used) if tx.cluster.config.accounting.token_billing else used)
    for name, service in list(tx.cluster.services.items()):
        load = body.get(name, ServiceLoad(at_s=tx.now_s))
        loads.loads[name] = load
        changed, loads.memories[name] = rescaled(service, load, loads.memories.get(name, ScaleMemory()), tx.now_s)
        if changed is not service:
            tx.set_service(name, changed)


def _charged(tx: Transaction, loads: ServiceLoads, used: Sequence[ServiceUse]) -> list[ServiceUse]:
    """Charge users instead of owners for tokens; return the usage with what was charged."""
    cluster, accounting = tx.cluster, tx.cluster.config.accounting
    for service in cluster.services.values():
        known, cost = loads.credits.get(service.name), _cost_of(cluster, service)
        if cost is not None:
            loads.credits[service.name] = accrued(known, *cost, tx.now_s)
        elif known is not None:
            loads.credits[service.name] = replace(known, at_s=tx.now_s)  # no replica runs, so this time costs nothing
    prices = dict(accounting.token_billing)
    found = []
    for one in used:
        asked, credit = cluster.services.get(one.service), loads.credits.get(one.service)
        charged_s = 0.0
        if asked is not None and credit is not None and one.user != asked.user:
            charged_s = min(token_price(one, prices), credit.billing_s)
        if credit is not None and charged_s:
            loads.credits[one.service] = replace(credit, billing_s=credit.billing_s - charged_s)
            usage_ledger.move_charge(tx, credit.payer, accounting.association_of(one.user, one.account), charged_s)
        found.append(one._replace(charged_s=charged_s))
    return found


def _cost_of(cluster: ClusterState, service: Service) -> tuple[UsageKey, float] | None:
    """Return who pays for the running replicas, and their billing per second; None: none runs."""
    accounting = cluster.config.accounting
    payer: UsageKey | None = None
    per_s = 0.0
    for one in service.replicas:
        if (job := cluster.jobs.get(JobId(one.job_id))) is not None and job.held_nodes:
            weights = weights_of(accounting, cluster.partitions.get(job.partition))
            payer = payer or (*accounting.association_of(job.user, job.account), job.qos)
            per_s += billing_per_s(job, accounting, weights, cluster.gpu_types(job))
    return (payer, per_s) if payer is not None else None


def serving_view(cluster: ClusterState) -> list[Json]:
    """Return what the gateway needs to pass requests on: no scripts, no paths."""
    return [
        {
            "name": service.name,
            "weights": version_weights(service),
            "checks": _checks_of(service),
            "replicas": [
                {"job": one.job_id, "version": one.version, "drained": bool(one.drained_at_s)}
                for one in service.replicas
                if _runs(cluster, one.job_id)
            ],
        }
        for service in cluster.services.values()
    ]


def _checks_of(service: Service) -> Json | None:
    """Return what the gateway is to ask a new version, and which."""
    rollout = service.rollout
    if rollout is None or rollout.stage is not RolloutStage.CHECKING:
        return None
    return {"version": rollout.label, "requests": [json.loads(text) for text in rollout.checks]}


def _runs(cluster: ClusterState, job_id: int) -> bool:
    job = cluster.jobs.get(JobId(job_id))
    return job is not None and job.state is JobState.RUNNING


def views(cluster: ClusterState, identity: Identity, loads: ServiceLoads, now_s: float) -> list[Json]:
    """Return the services that the user may see or use, as JSON."""
    seen = [service for service in cluster.services.values() if may_see(cluster, identity, service)]
    return [service_view(cluster, identity, service, loads.of(service.name, now_s)) for service in seen]


def service_view(cluster: ClusterState, identity: Identity, service: Service, load: ServiceLoad | None) -> Json:
    """Return a service as JSON; paths and errors are for those who see a job's details."""
    details = allows(identity, Action.VIEW_DETAILS, owner_of(service))
    return {
        "name": service.name,
        "user": service.user,
        "account": service.account,
        "audience": service.audience.value,
        "least": service.least,
        "most": service.most,
        "wanted": service.wanted,
        "ready": sum(one.ready for one in load.replicas.values()) if load is not None else 0,
        "current": service.current,
        "versions": [
            {"label": version.label, "model": version.model if details else None} for version in service.versions
        ],
        "replicas": [_replica_view(cluster, one, load, details=details) for one in service.replicas],
        "held": load.held if load is not None else 0,
        "problem": service.problem if details else "",
        "rollout": _rollout_view(service.rollout),
        "last_rollout": service.last_rollout if details else "",
        "made_at_s": service.made_at_s,
        "may": _verbs_of(identity, service),
    }


def _verbs_of(identity: Identity, service: Service) -> list[str]:
    """Return what the user may do with the service, in the words of hserve."""
    if not allows(identity, Action.MANAGE_SERVICE, owner_of(service)):
        return []
    return ["scale", "stop", *(["roll"] if allows(identity, Action.SUBMIT, owner_of(service)) else [])]


def _rollout_view(rollout: Rollout | None) -> Json | None:
    if rollout is None:
        return None
    names = ("label", "before", "canary", "max_errors", "max_ttft", "began_at_s", "stage_at_s")
    return {name: getattr(rollout, name) for name in names} | {"stage": rollout.stage.value}


def _replica_view(cluster: ClusterState, one: ServiceReplica, load: ServiceLoad | None, *, details: bool) -> Json:
    job = cluster.jobs.get(JobId(one.job_id))
    known = load.replicas.get(one.job_id, ReplicaLoad()) if load is not None else ReplicaLoad()
    return {
        "job": one.job_id,
        "version": one.version,
        "state": job.state.value if job is not None else "UNKNOWN",
        "nodes": [share.node for share in job.shares] if job is not None and details else [],
        "drained": bool(one.drained_at_s),
        "ready": known.ready,
        "active": known.active,
        "queue_wait_s": known.queue_wait_s,
        "kv_used": known.kv_used,
        "requests": known.requests,
        "errors": known.errors,
        "tokens_per_s": known.tokens_per_s,
        "error": known.error if details else "",
    }
