"""Answer the API's routes: reads from the cluster state, changes through the tick."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import hpcsched
from hpcnode.wire import protocol
from hpcnode.wire.connection_limits import Rates
from hpcsched.api.connection_limits import AnswerPauses
from hpcsched.api.identity import home_of, identity_of, is_account, uid_of
from hpcsched.api.views import (
    failure_view,
    how_it_ended,
    in_a_sentence,
    job_view,
    jobs_text,
    json_text,
    node_views,
    partition_views,
    refused_on,
    reservation_view,
    resumes_words,
    sees_everything,
    training_view,
    visible_nodes,
    why_waiting,
)
from hpcsched.auth.audit import DONE, FAILED, REFUSED, entry_of, record_to_json
from hpcsched.auth.authorize import (
    CONTROLLER,
    HIDEABLE,
    Action,
    Identity,
    Owner,
    Reach,
    RepeatableRequest,
    allows,
    authorize,
    authorize_root,
    reach,
)
from hpcsched.config.load import Config
from hpcsched.controller import credentials, usage_ledger
from hpcsched.controller.credentials import Credentials
from hpcsched.controller.metrics import ControllerMetrics, MetricsView
from hpcsched.controller.nodes import orphans
from hpcsched.controller.nodes.edits import follow_renames, gone_notes
from hpcsched.controller.nodes.link_bench import Tournament
from hpcsched.controller.nodes.links import Fleet
from hpcsched.controller.nodes.loss import remove_node
from hpcsched.controller.nodes.messages import account
from hpcsched.controller.nodes.power import power_down, power_up
from hpcsched.controller.requests import crontabs, services, submission, triggers
from hpcsched.controller.requests import jobs as requests
from hpcsched.controller.requests import reservations as reservation_requests
from hpcsched.controller.requests.job_ids import check_references, find_jobs, listed_of
from hpcsched.controller.requests.jobs import act_on_steps, sort_out
from hpcsched.controller.requests.reaches import KEY_S, Reaches
from hpcsched.controller.requests.reservations import read_options
from hpcsched.controller.requests.update import update
from hpcsched.controller.tick import Controller
from hpcsched.controller.views.alerts import AlertFeed, read_end, read_silence, rule_views
from hpcsched.controller.views.findings import findings_of_job, findings_of_queue
from hpcsched.controller.views.history import history_text, outages_of, story_of, tariff_of
from hpcsched.controller.views.queue import (
    Reading,
    circuit_views,
    first_waiting,
    license_views,
    priority_views,
    share_views,
    visible,
    why_words,
)
from hpcsched.errors import (
    ConflictError,
    HpcschedError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestError,
    UnavailableError,
    UnsignedError,
    error_of,
)
from hpcsched.jobscript.patterns import job_files
from hpcsched.launch.visit import problem_of, question
from hpcsched.lifecycle.events import ClusterEvent, EventSubject
from hpcsched.listing.ecs import node_of_event
from hpcsched.listing.text import split_list
from hpcsched.metrics.bench import run_of
from hpcsched.metrics.links import MOST_LINKED, links_limit_s
from hpcsched.model.codec import value_to_json
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import FINAL, Job, JobState, Reason, TrainingStatus
from hpcsched.model.node import OURSELVES, TESTING, Link
from hpcsched.model.reservation import Reservation, at
from hpcsched.model.spec import JobSpec
from hpcsched.model.tariff import Tariff, as_written
from hpcsched.model.units import format_time_s, nearest, number, parse_signal, whole_number
from hpcsched.recorder import Recorder
from hpcsched.sched.sentences import plural
from hpcsched.sched.snapshot import snapshot_to_json
from hpcsched.state.transaction import Transaction
from hpcsched.store.audit_heads import AuditHeads
from hpcsched.store.backup import back_up
from hpcsched.store.store import NO_JOB, HistoryQuery

Json = dict[str, Any]
T = TypeVar("T")

log = logging.getLogger("hpcsched.backend")

PROBE_TIMEOUT_S = 15.0
MAX_PATH = 1000
READ_TIMEOUT_S = 15.0
MAX_FILES = 500  # of a directory, in one answer
MAX_PART_BYTES = 1 << 20
MAX_AUDIT_RECORDS = 5000  # of one answer
MAX_KEPT_ANSWER = 16 << 10  # characters; a longer answer is not kept for repeated requests
MAX_SERIES_NAMES = 100
MAX_USAGE_DAYS = 3660
MAX_TIME_S = 1e11
MAX_STEP_S = 1e9
TOO_LONG = "too long"  # in place of such an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A piece of a job's output file."""

    data: bytes
    offset: int
    size: int
    path: str
    ended: bool


def _error_of(answer: object) -> str:
    """Return why a node cannot do what it was asked; a node may send anything."""
    return str(getattr(answer, "error", "") or "the node sent another answer than was asked for")


def _roles_of(config: Config) -> dict[str, list[str]]:
    """Return the members of each list of [roles]."""
    return {role: list(getattr(config.access, role)) for role in ("admins", "operators", "viewers", "services")}


def _cost_view(tariff: Tariff) -> Json:
    """Return [cost] as it is written in the configuration."""
    return {
        "currency": tariff.currency,
        "cpu_hour": tariff.cpu_hour,
        "gpu_hour": tariff.gpu_hour,
        "kwh": as_written(tariff.kwh),
        "gco2_per_kwh": as_written(tariff.gco2_per_kwh),
    }


class ControllerBackend(Reading):
    """The controller's answers to API requests. Changes are on disk when a method returns."""

    def __init__(
        self,
        controller: Controller,
        fleet: Fleet,
        *,
        clock: Callable[[], float],
        started_at_s: float,
        apply_config: Callable[[list[str]], list[str]],
        database: Path,
        credentials: Credentials | None = None,
        audit_heads: AuditHeads | None = None,
        recorder: Recorder | None = None,
        alerts: AlertFeed | None = None,
        reaches: Reaches | None = None,
    ) -> None:
        super().__init__(controller.cluster, clock)
        self._reaches = reaches or Reaches(controller.cluster, clock)
        self._recorder = recorder
        self._alerts = alerts
        self._controller = controller
        self._fleet = fleet
        self._started_at_s = started_at_s
        self._apply_config = apply_config
        self._database = database
        self._credentials = credentials or Credentials(controller.cluster, database.parent, "", clock)
        self._audit_heads = audit_heads
        self._changing: set[asyncio.Task[Any]] = set()  # requests that take several ticks
        # Requests with an idempotency key that are being answered, by uid and key.
        self._repeatable: dict[tuple[int, str], tuple[str, asyncio.Task[Json]]] = {}
        self._submitted = Rates(0, 1, time.monotonic)  # jobs of each user; the configuration has its limits
        # If False, all jobs run as the accounts that the nodes were added with.
        self._serves_all = os.getuid() == 0 or controller.cluster.config.controller.user is not None

    def ping(self, identity: Identity) -> Json:
        """Return the controller's state; of what [privacy] hides, the identity's own part."""
        cluster = self._cluster
        counts = cluster.count_states()
        if reach(identity, Action.VIEW_JOBS) is not Reach.ALL:
            counts = Counter(job.state for job in cluster.jobs.values() if allows(identity, Action.VIEW_JOBS, job))
        nodes = self._visible_nodes(identity, node_views(cluster, self._clock()))
        sees_all = all(reach(identity, action) is Reach.ALL for action in (Action.VIEW_JOBS, Action.VIEW_NODES))
        return {
            "hpcsched": hpcsched.__version__,
            "cluster": self._cluster.config.name,
            "pid": os.getpid(),
            "started_at_s": self._started_at_s,
            "now_s": self._clock(),
            "incarnation": self._cluster.incarnation,
            "epoch": self._cluster.epoch,
            "start": self._cluster.start,
            "counts": {state.value: count for state, count in counts.items()},
            "nodes": dict(Counter(view["state"] for view in nodes)),
            "unseen_nodes": list(cluster.unseen_nodes()) if sees_all else [],
            "orphans": [
                {"node": node, "incarnation": incarnation, "job_id": job_id}
                for node, incarnation, job_id in self._controller.orphans
                if sees_all
            ],
            "backup": self._backup_view() if sees_all else None,
            "undecided": len(cluster.undecided_launches) if sees_all else 0,
            "not_taken": [*cluster.not_taken, *gone_notes(cluster)] if sees_all else [],
            "scripts": gate.waits if sees_all and (gate := self._controller.gate) is not None else [],
        }

    def me(self, identity: Identity) -> Json:
        """Return who asks: clients on other machines have neither the account nor its home.

        `last_event` tells whether anything has changed since another answer.
        """
        actions = [action.value for action in Action if reach(identity, action) is not Reach.NONE]
        answer: Json = {"user": identity.user, "uid": identity.uid, "home": home_of(identity.uid)}
        last_event = self._controller.store.last_event()
        return answer | {"role": identity.role.value, "actions": actions, "last_event": last_event}

    @property
    def metrics(self) -> ControllerMetrics:
        return self._controller.metrics

    async def metrics_page(self, identity: Identity, which: str, *, open_metrics: bool) -> bytes:
        """Return the page of metrics, or Slurm's page of this name."""
        if which:
            return await self.metrics.slurm_page(identity, which, self._clock(), open_metrics=open_metrics)
        return await self.metrics.page(identity, self._clock(), open_metrics=open_metrics)

    # ----- jobs

    async def submit(self, identity: Identity, request_id: str, specs: list[JobSpec]) -> Json:
        if self._serves_all and not is_account(identity.user):
            raise PermissionDeniedError(
                f"cannot submit: uid {identity.uid} has no account on this machine to run the job as"
            )
        if self._cluster.config.controller.sign_jobs:
            for spec in specs:
                if not spec.signed:
                    raise UnsignedError(
                        "cannot submit: jobs of this cluster are signed by their users (sign_jobs in hpcsched.toml), which REST "
                        "and the Python client do not do; use hsub or sbatch on the head"
                    )
        seen = self._controller.store.request_jobs
        self._count_submitted(identity.uid, 0)
        looks = None  # a single job is tried in the tick alone
        if len(specs) > 1:
            looks = await submission.looked_at(self._cluster, identity, specs, self._clock())
        jobs = await self._change(
            identity, Action.SUBMIT, lambda tx: submission.submit(tx, identity, request_id, specs, seen, looks)
        )
        self._count_submitted(
            identity.uid, sum(len(spec.array.indices) if spec.array is not None else 1 for spec in specs)
        )
        return {"jobs": jobs, "notes": []}

    def _count_submitted(self, uid: int, jobs: int) -> None:
        """Count jobs of the user, whose number in the database is bounded by that.

        Raises: RateLimitError if `jobs` is 0 and there were too many.
        """
        settings, rates = self._cluster.config.controller, self._submitted
        rates.per_s, rates.burst = settings.submit_rate, settings.submit_burst
        if uid in (0, os.getuid()):
            return
        wait_s = rates.wait_s(uid, jobs)
        if wait_s is not None and not jobs:
            raise RateLimitError(
                f"cannot submit now: uid {uid} has submitted {rates.burst} jobs, and more than {rates.per_s:g} per second since; "
                f"each task of an array counts. Try again in {format_time_s(wait_s)} (submit_rate in hpcsched.toml)",
                wait_s,
            )

    async def test(self, identity: Identity, spec: JobSpec) -> Json:
        """Return when the job would start if it were submitted now, from a fresh plan."""
        return await asyncio.to_thread(self._controller.rehearsal(identity, spec, self._clock()))

    def job(self, identity: Identity, reference: str) -> Json:
        now_s = self._clock()
        return {
            "now_s": now_s,
            "jobs": list(self._job_views(identity, self._find(identity, reference), reference, now_s)),
        }

    def count_jobs(self, identity: Identity, reference: str) -> int:
        """Return how many jobs are referenced: the tasks of an array may be many."""
        return len(self._find(identity, reference))

    async def job_text(self, identity: Identity, reference: str) -> bytes:
        """Return the same as `job`, as JSON that is made in parts: others are answered meanwhile."""
        now_s, breaks, texts = self._clock(), AnswerPauses(), []
        for view in self._job_views(identity, self._find(identity, reference), reference, now_s):
            texts.append(json_text(view))
            if breaks.due():
                await breaks.take()
        return jobs_text(now_s, texts)

    def _job_views(self, identity: Identity, jobs: list[Job], reference: str, now_s: float) -> Iterator[Json]:
        """Yield the views; script and environment are in that of the first task alone.

        Otherwise an answer would have some MiB for each task of an array.
        """
        script, is_one = self._script_of(identity, jobs), len(jobs) == 1
        for job in jobs:
            shows = allows(identity, Action.VIEW_DETAILS, job)
            for component_number, component in enumerate(listed_of(job, reference)):
                whole = job is jobs[0]
                view = job_view(
                    component, self._cluster, identity, now_s, whole=whole, script=script if whole else None
                )
                if shows and job.spec.signed:
                    view["signed"] = job.spec.signed
                if shows and is_one and component_number == 0:
                    failures = self._controller.store.load_failures(job.id, job.attempt)
                    view["failures"] = [failure_view(failure) for failure in failures]
                    view["training"] = training_view(self._training(job))
                yield view

    def array_of(self, identity: Identity, reference: str) -> int:
        """Return the id of a job, or of its array."""
        job = self._find(identity, reference)[0]
        return job.array_job_id or job.id

    def _training(self, job: Job) -> TrainingStatus | None:
        """Return the job's training progress, from the store if the job has ended."""
        if job.state in FINAL:
            return self._controller.store.load_training([job.id]).get(job.id)
        return self._cluster.training.get(job.id)

    def _script_of(self, identity: Identity, jobs: list[Job]) -> str | None:
        """Return the script of `jobs`, which are tasks of one array if there are several.

        None if the script is no longer kept.
        """
        if not allows(identity, Action.VIEW_DETAILS, jobs[0]):
            return None
        text = self._controller.store.script(jobs[0].spec)
        return None if text is None else text.decode("utf-8", "surrogateescape")

    def _find(self, identity: Identity, reference: str) -> list[Job]:
        """Return the referenced jobs, from memory, or from the store if they ended long ago."""
        try:
            return visible(identity, find_jobs(self._cluster, reference, identity.uid), reference)
        except NotFoundError:
            if reference.isascii() and reference.isdigit():
                old = self._controller.store.history(HistoryQuery(job_ids=(whole_number(reference, "a job id"),)))
                if old:
                    return visible(identity, old, reference)
            raise

    def _single_job(self, identity: Identity, reference: str) -> Job:
        jobs = self._find(identity, reference)
        if len(jobs) > 1:
            raise RequestError(
                f"cannot tell which job {reference} means: it is an array of {len(jobs)} tasks; say {jobs[0].display_id}"
            )
        return jobs[0]

    def story(self, identity: Identity, reference: str) -> Json:
        job = self._single_job(identity, reference)
        authorize(identity, Action.VIEW_DETAILS, job, f"tell the story of job {job.display_id}")
        events = self._controller.store.load_events(job.id)
        now_s = self._clock()
        reason, detail, _ = why_waiting(job, self._cluster, identity, now_s)
        over = f"job {job.display_id} is {job.state}{how_it_ended(job)}"
        now = over if job.state in FINAL else in_a_sentence(job, self._cluster, identity, reason, detail, now_s)
        return {"job_id": job.id, "events": story_of(job, events), "now_s": now_s, "now": now}

    async def why(self, identity: Identity, reference: str) -> Json:
        """Explain why a job waits, from a fresh plan over the current cluster."""
        jobs = self._find(identity, reference)
        job = first_waiting(jobs)
        reason, detail, expected_s = why_waiting(job, self._cluster, identity, self._clock())
        answer: Json = {
            "text": in_a_sentence(job, self._cluster, identity, reason, detail, self._clock()),
            "reason": reason.value,
            "expected_start_s": expected_s,
            "job": job.display_id,
            "waiting": sum(task.state is JobState.PENDING for task in jobs),
            "of": len(jobs),
        }
        if (
            job.state in FINAL
            and allows(identity, Action.VIEW_DETAILS, job)
            and (resumes := resumes_words(job, self._training(job)))
        ):
            answer["text"] += f". {resumes}"
        if job.state is JobState.PENDING and sees_everything(identity):
            snapshot = self._controller.snapshot(self._cluster.jobs_to_plan(), self._clock())
            answer |= await asyncio.to_thread(why_words, snapshot, self._controller.policy, job.id)
            if reason in (Reason.BEGIN_TIME, Reason.HELD_ADMIN) and job.restarts and "lines" in answer:
                # The plan does not know what became of the attempt before.
                answer["lines"][0] = f"{reason.value}: {answer['text']}."
            if job.refusals and allows(identity, Action.VIEW_DETAILS, job) and "lines" in answer:
                answer["lines"].insert(1, f"It could not be started {refused_on(job)}.")
        return answer

    async def slow(self, identity: Identity, reference: str) -> Json:
        """Tell what slows a running job down. Raises RequestError if it does not run."""
        job = self._single_job(identity, reference)
        authorize(identity, Action.VIEW_DETAILS, job, f"judge job {job.display_id}")
        if job.state is not JobState.RUNNING:
            hint = "hwhy says why it waits" if job.state is JobState.PENDING else "hacct --eff says what it used"
            raise RequestError(
                f"cannot tell what slows job {job.display_id} down: it is {job.state}; {hint}: "
                f"{'hwhy' if job.state is JobState.PENDING else 'hacct --eff -j'} {job.display_id}"
            )
        return await findings_of_job(self._asked, self._cluster, job, self._clock())

    async def slow_queue(self, identity: Identity) -> Json:
        """Tell what holds up the queue, if [privacy] hides nothing from the user."""
        if not sees_everything(identity):
            return {"version": 1, "findings": [], "text": "not known: [privacy] hides jobs or nodes of others from you"}
        view = await MetricsView.of(self._cluster, identity)
        return findings_of_queue(self._cluster, view, self._clock())

    async def act(self, identity: Identity, verb: str, body: Json) -> Json:
        references, filters = body.get("jobs"), body.get("filters") or {}
        if not _is_texts(references) or not isinstance(filters, dict) or not _is_texts(list(filters.values())):
            raise RequestError('cannot do that: the body must be {"jobs": [references], "filters": {name: text}}')
        if not references and not filters:
            raise RequestError(f"cannot {verb}: no job was named")
        if filters and verb != "cancel":
            raise RequestError(f"cannot {verb} jobs by filters: name the jobs")
        if not isinstance(body.get("signal") or "", str):
            raise RequestError("cannot signal jobs: the signal must be a text, such as USR1 or 10")
        references = list(dict.fromkeys(references))
        check_references(references, filters)
        if verb == "cancel":
            return await self._cancel(identity, references, filters, body)
        if verb == "update":
            changes = body.get("changes")
            if not isinstance(changes, dict):
                raise RequestError('cannot change the job: the body must have {"changes": {name: text}}')
            texts = {str(name): str(value) for name, value in changes.items()}
            outcome = await self._change_jobs(identity, verb, lambda tx: update(tx, identity, references, texts))
        elif verb == "requeue":
            how = {name: body.get(name) is True for name in ("incomplete", "held", "special")}
            outcome = await self._change_jobs(
                identity, verb, lambda tx: requests.requeue(tx, identity, references, **how)
            )
        else:
            work = _WORK[verb]
            outcome = await self._change_jobs(identity, verb, lambda tx: work(tx, identity, references))
        return outcome.as_json()

    async def _cancel(self, identity: Identity, references: list[str], filters: dict[str, str], body: Json) -> Json:
        """Cancel the referenced jobs or steps, or send them a signal."""
        meant = sort_out(references)
        signum = parse_signal(body["signal"]) if body.get("signal") else None
        batch, full = bool(body.get("batch")), bool(body.get("full"))

        def work(tx: Transaction) -> requests.Outcome:
            outcome = requests.Outcome()
            if signum is None and (meant.jobs or meant.batch or not references):
                outcome.add(requests.cancel(tx, identity, [*meant.jobs, *meant.batch], filters))
            if signum is not None and (meant.jobs or not references):
                outcome.add(requests.signal(tx, identity, meant.jobs, filters, signum, batch, full))
            if signum is not None and meant.batch:
                outcome.add(requests.signal(tx, identity, meant.batch, filters, signum, True, False))
            return outcome

        asked = {"references": references, "filters": filters, "signal": body.get("signal")}
        outcome = await self._change_jobs(identity, "cancel" if signum is None else "signal", work, asked)
        self._controller.send_signals(outcome.signals)
        listener = self._controller.listener
        if meant.steps and listener is not None:
            act_on_steps(self._cluster, listener.act_on_step, identity, meant.steps, filters, signum, outcome)
        answer = outcome.as_json()
        for_steps = [sent.job for sent in outcome.signals if not sent.batch_only and not sent.full]
        without = [job.display_id for job in for_steps if listener is None or not listener.has_steps(job)]
        return answer | ({"without_steps": without} if without else {})

    async def history(self, identity: Identity, query: Json) -> bytes:
        return await history_text(self._database, self._cluster, identity, query, self._clock())

    async def tariff(self, query: Json) -> Json:
        """Return the prices of the period of the query. Raises RequestError."""
        return await asyncio.to_thread(tariff_of, self._cluster.config.cost, query)

    async def outages(self, identity: Identity, query: Json) -> Json:
        """Return when nodes did not answer in the period of the query.

        Raises RequestError, UnavailableError.
        """
        found = await asyncio.to_thread(outages_of, self._database, query)
        if reach(identity, Action.VIEW_NODES) is not Reach.ALL:
            return {"outages": [], "first_seen_s": {}}
        return found

    # ----- the history of metrics, which the recorder has

    async def metrics_series(self, identity: Identity, query: Mapping[str, str]) -> bytes:
        """Return the nodes with metrics, or the series of a node or job. Raises HpcschedError."""
        target = query.get("target", "")
        if target:
            return await self._asked({"ask": "list", **self._metrics_source(identity, target)})
        names = json.loads(await self._asked({"ask": "list", "kind": "node", "name": "", "target": ""}))["names"]
        seen = visible_nodes(self._cluster, identity)
        sees_gone = reach(identity, Action.VIEW_NODES) is Reach.ALL
        shown = [name for name in names if name in seen or (sees_gone and name not in self._cluster.nodes)]
        return json_text({"version": 1, "names": shown}).encode()

    async def metrics_history(self, identity: Identity, query: Mapping[str, str]) -> bytes:
        """Return values of series of a node or job in a period. Raises HpcschedError."""
        source = self._metrics_source(identity, query.get("target", ""))
        series = [name for name in split_list(query.get("series", "")) if name]
        if not series or len(series) > MAX_SERIES_NAMES:
            raise RequestError(f"cannot show metrics: name 1 to {MAX_SERIES_NAMES} series")
        now_s = self._clock()
        from_s, to_s = (
            min(max(number(query.get(name, str(usual)), name), 0.0), MAX_TIME_S)
            for name, usual in (("from_s", now_s - 3600), ("to_s", now_s))
        )
        step_s = number(query["step_s"], "step_s") if query.get("step_s") else None
        if from_s >= to_s or (step_s is not None and not 1 <= step_s <= MAX_STEP_S):
            raise RequestError("cannot show metrics: from_s must be before to_s, and step_s at least 1")
        of = query.get("of", "mean")
        if of not in ("mean", "max", "min"):
            raise RequestError(f"cannot show the {of[:20]!r} of a series: there are mean, max and min")
        period = {"from_s": from_s, "to_s": to_s, "step_s": step_s, "of": of}
        known_only = (
            query.get("known_only") == "1"
        )  # of the series that the target has, without an error for the others
        return await self._asked({"ask": "series", "series": series, "known_only": known_only, **source, **period})

    async def _asked(self, question: Json) -> bytes:
        if self._recorder is None:
            raise UnavailableError("cannot read metrics: no history is kept; see [metrics] history in hpcsched.toml")
        return await self._recorder.ask(question)

    def _metrics_source(self, identity: Identity, target: str) -> Json:
        """Return whose history a user asks for: of a node or job that the user may see.

        Raises NotFoundError, PermissionDeniedError, RequestError.
        """
        names = visible_nodes(self._cluster, identity)
        if target in names:
            return {"kind": "node", "name": target, "target": target}
        try:
            job = self._single_job(identity, target)
        except NotFoundError:
            if reach(identity, Action.VIEW_NODES) is Reach.ALL and not target[:1].isdigit():
                # A node that was removed may have a history.
                return {"kind": "node", "name": target, "target": target, "near": nearest(target, names)}
            raise NotFoundError(
                f"cannot show metrics of {target[:80]!r}: no such node or job{nearest(target, names)}"
            ) from None
        return {"kind": "job", "name": str(job.id), "target": f"job {job.display_id}"}

    async def log(self, identity: Identity, reference: str, stream: str, offset: int, limit: int) -> LogPart:
        job = self._single_job(identity, reference)
        authorize(identity, Action.VIEW_DETAILS, job, f"read the output of job {job.display_id}")
        if stream not in ("out", "err"):
            raise RequestError(f"cannot read stream {stream!r}: there are out and err")
        files = job_files(job)
        path = files.stdout if stream == "out" else files.stderr
        if not job.shares or not job.spec.has_script:
            return LogPart(data=b"", offset=0, size=0, path=path, ended=job.state in FINAL)
        over = job.state in FINAL  # checked before the read, so that later output is not missed
        answer, blob = await self._read_file(job, path, offset, limit)
        if answer.error:
            if job.state in FINAL:
                why = job.reason_detail if job.reason is Reason.LAUNCH_FAILED else answer.error
                raise NotFoundError(f"cannot show the output of job {job.display_id} on {job.shares[0].node}: {why}")
            return LogPart(data=b"", offset=0, size=0, path=path, ended=False)
        ended = over and answer.offset + len(blob) >= answer.size
        return LogPart(data=blob, offset=answer.offset, size=answer.size, path=path, ended=ended)

    async def _read_file(self, job: Job, path: str, offset: int, limit: int, *, beneath: str = "") -> tuple[Any, bytes]:
        """Return the answer of the job's first node, and a part of a file there."""
        node = job.shares[0].node
        return await self._fleet.call(
            node,
            lambda request: protocol.ReadFile(
                request=request,
                user=account(job, self._cluster, node),
                path=path,
                offset=offset,
                limit=limit,
                beneath=beneath,
            ),
            READ_TIMEOUT_S,
        )

    async def files(self, identity: Identity, query: Mapping[str, str]) -> Json:
        """List files below the directory of one's own job, on its first node.

        Raises HpcschedError.
        """
        job, node, path = self._directory_of(identity, query)
        limit = max(1, min(whole_number(query.get("limit", str(MAX_FILES)), "limit"), MAX_FILES))
        answer, _ = await self._fleet.call(
            node,
            lambda request: protocol.ListFiles(
                request=request,
                user=account(job, self._cluster, node),
                beneath=job.spec.work_dir,
                path=path,
                after=query.get("after", ""),
                limit=limit,
            ),
            READ_TIMEOUT_S,
        )
        if not isinstance(answer, protocol.FileList) or answer.error:
            raise NotFoundError(f"{_error_of(answer)} on {node}")
        shown = answer.files[:limit]
        files = [{"name": name, "kind": kind, "size": size, "at_s": at_s} for name, kind, size, at_s in shown]
        found: Json = {"directory": job.spec.work_dir, "node": node, "path": path, "files": files}
        return found | ({"next": files[-1]["name"]} if answer.more and files else {})

    async def file(self, identity: Identity, query: Mapping[str, str]) -> LogPart:
        """Return a part of a file below the directory of one's own job, on its first node.

        Raises HpcschedError.
        """
        job, node, path = self._directory_of(identity, query)
        if not path:
            raise RequestError("cannot read a file: name it, as path=results/loss.csv")
        offset = max(0, whole_number(query.get("offset", "0"), "offset"))
        limit = max(0, min(whole_number(query.get("limit", str(MAX_PART_BYTES)), "limit"), MAX_PART_BYTES))
        answer, blob = await self._read_file(job, path, offset, limit, beneath=job.spec.work_dir)
        if not isinstance(answer, protocol.FileData) or answer.error:
            raise NotFoundError(f"{_error_of(answer)} on {node}")
        ended = answer.offset + len(blob) >= answer.size
        return LogPart(data=blob, offset=answer.offset, size=answer.size, path=path, ended=ended)

    def _directory_of(self, identity: Identity, query: Mapping[str, str]) -> tuple[Job, NodeName, str]:
        """Return the user's job, the node with its directory, and the path below that.

        Raises HpcschedError.
        """
        job = self._single_job(identity, query.get("job", ""))
        authorize(identity, Action.VIEW_FILES, job, f"see the files of job {job.display_id}")
        path = query.get("path", "")
        if len(path) > MAX_PATH or any(part in ("", ".", "..") for part in path.split("/") if path):
            raise RequestError(f"cannot use the path {path[:80]!r}: it is below the job's directory, without . and ..")
        if not job.shares:
            raise RequestError(f"cannot see the files of job {job.display_id}: it has not started, so no node has them")
        if not job.spec.work_dir.startswith("/"):
            raise RequestError(f"cannot see the files of job {job.display_id}: it has no directory")
        return job, job.shares[0].node, path

    async def reach(self, identity: Identity, body: Json, credential_id: str) -> Json:
        """Prepare a terminal in one's own job, or connections to what it serves; return the key.

        Raises HpcschedError.
        """
        job = self._single_job(identity, str(body.get("job") or ""))
        key = self._reaches.prepare(identity, job, body, credential_id)
        asked = {"job": job.display_id, "terminal": bool(body.get("terminal"))}
        await self._change(identity, Action.REACH_JOB, lambda tx: None, asked)
        return {"key": key, "job": job.id, "display_id": job.display_id, "valid_s": KEY_S}

    def events(
        self, identity: Identity, after: int | None, about: Collection[str] = (), nodes: Collection[str] = ()
    ) -> Json:
        """Return the visible events after number `after`; None: none, from now on.

        `about`: only those about these subjects; `nodes`: only those of these nodes. `state` is the job's present state;
        it and the user of a job that is not remembered any more are None.
        """
        store = self._controller.store
        found: list[Json] = []
        if after is None:
            return {"events": found, "next": store.last_event()}
        sees_all = reach(identity, Action.VIEW_JOBS) is Reach.ALL
        sees: Callable[[Json], bool] | None = None  # made for the first event that needs it
        for row in store.events_after(after):
            after = row.seq
            if row.job_id == NO_JOB:
                event = {"seq": row.seq, "at_s": row.at_s, "kind": row.kind, **json.loads(row.data)}
                sees = sees or self._event_filter(identity, about, nodes)
                if sees(event):
                    found.append({name: value for name, value in event.items() if name not in ("uid", "account")})
                continue
            if nodes or (about and EventSubject.JOB not in about):
                continue
            job = self._cluster.jobs.get(JobId(row.job_id))
            if sees_all or (job is not None and allows(identity, Action.VIEW_JOBS, job)):
                state = None if job is None else job.state.value
                event = {"seq": row.seq, "at_s": row.at_s, "about": EventSubject.JOB.value, "job_id": row.job_id}
                event |= {"kind": row.kind, "state": state, "user": None if job is None else job.user}
                found.append(event)
        return {"events": found, "next": after}

    def _event_filter(
        self, identity: Identity, about: Collection[str], nodes: Collection[str]
    ) -> Callable[[Json], bool]:
        """Return what says whether an event of no job is wanted, and visible to the user."""
        seen = visible_nodes(self._cluster, identity)
        sees_nodes = reach(identity, Action.VIEW_NODES) is Reach.ALL
        reserved = {one.name for one in self._visible_reservations(identity)}
        sees_reservations = reach(identity, Action.VIEW_RESERVATIONS) is Reach.ALL

        def is_seen(event: Json) -> bool:
            if about and event["about"] not in about:
                return False
            if nodes and node_of_event(event) not in nodes:
                return False
            match event["about"]:
                case EventSubject.NODE:
                    return sees_nodes or event["name"] in seen
                case EventSubject.RESERVATION:
                    return sees_reservations or event["name"] in reserved
                case EventSubject.ALERT:
                    return self._is_visible_alert(identity, event, seen)
                case _:
                    return sees_nodes

        return is_seen

    # ----- nodes and the rest

    async def nodes(self, identity: Identity, query: Mapping[str, str]) -> Json:
        """Return the nodes.

        Query: ``probe=1`` checks each node first; each compares the share probe of ``share_``.
        """
        share = {name[6:]: query[name] for name in ("share_file", "share_sha256", "share_uid") if name in query}
        if share:
            authorize(identity, Action.PROBE_SHARE)
        views = self._visible_nodes(identity, node_views(self._cluster, self._clock()))
        up = [view for view in views if view["link"] == Link.UP]
        if query.get("probe") == "1":
            await asyncio.gather(*(self._probe(view) for view in up))
            for view in up:
                view["hardware"] = self.metrics.hardware(view["name"], self._clock())
        if share and self._cluster.config.share:
            asked = _probe_question(self._cluster.config.share, share)
            await asyncio.gather(*(self._compare_share(view, asked) for view in up))
        return {"now_s": self._clock(), "nodes": views}

    def _visible_nodes(self, identity: Identity, views: list[Json]) -> list[Json]:
        """Return the nodes that the user may see: if nodes are private, those of its jobs.

        Jobs and reservations that the user may not see are not in them.
        """
        if reach(identity, Action.VIEW_JOBS) is not Reach.ALL:
            views = [view | {"jobs": self._visible_ids(identity, view["jobs"])} for view in views]
        if reach(identity, Action.VIEW_RESERVATIONS) is not Reach.ALL:
            mine = {one.name for one in self._visible_reservations(identity)}
            views = [
                view | {"reservation": view["reservation"] if view["reservation"] in mine else ""} for view in views
            ]
        names = visible_nodes(self._cluster, identity)
        return [view for view in views if view["name"] in names]

    def _visible_ids(self, identity: Identity, ids: Iterable[JobId]) -> list[JobId]:
        jobs = self._cluster.jobs
        return [job_id for job_id in ids if job_id in jobs and allows(identity, Action.VIEW_JOBS, jobs[job_id])]

    async def _compare_share(self, view: Json, asked: protocol.CompareProbe) -> None:
        try:
            answer, _ = await self._fleet.call(
                view["name"], lambda request: protocol.changed(asked, request=request), PROBE_TIMEOUT_S
            )
        except UnavailableError as error:
            view["share_error"] = str(error)
            return
        view["share_error"] = problem_of(asked.directory, same=answer.same, error=answer.error)

    async def _probe(self, view: Json) -> None:
        try:
            view["facts"] = await self._fleet.facts(view["name"], PROBE_TIMEOUT_S)
        except UnavailableError as error:
            view["facts_error"] = str(error)

    def benches(self, identity: Identity) -> Json:
        """Return the last assessments of the nodes that the user may see."""
        authorize(identity, Action.VIEW_NODES)
        names = visible_nodes(self._cluster, identity)
        runs = [run for run in self._controller.store.load_benches() if run.node in names]
        return {"now_s": self._clock(), "benches": [asdict(run) for run in runs]}

    async def bench(self, identity: Identity, body: Json) -> Json:
        """Measure a node in a reservation of its own, and record the result.

        Raises HpcschedError. If the client disconnects, the measurement is finished and recorded.
        """
        if body.get("how") == "links":
            return await asyncio.shield(self._kept(self._bench_links(identity, body)))
        asked = [body.get("node"), body.get("how", "quick"), body.get("python", "")]
        if not _is_texts(asked) or asked[1] not in protocol.BENCH_DEADLINES_S:
            raise RequestError(
                'cannot measure: the body must be {"node": name, "how": "quick" or "full", "python": path}'
            )
        name, how, python = asked
        if python and not (python.startswith("/") and python.isprintable() and len(python) < MAX_PATH):
            raise RequestError(f"cannot measure with Python {python[:60]!r}: give its absolute path on the nodes")
        question = protocol.Probe(request=0, bench=how, bench_python=python)
        return await asyncio.shield(
            self._kept(self._bench(identity, NodeName(name), question, now=body.get("now") is True))
        )

    async def _bench(self, identity: Identity, name: NodeName, question: protocol.Probe, *, now: bool) -> Json:
        timeout_s = protocol.BENCH_DEADLINES_S[question.bench] + PROBE_TIMEOUT_S
        made = await self._change(
            identity,
            Action.BENCH_NODES,
            lambda tx: reservation_requests.reserve_for_bench(
                tx, identity, f"bench-{name}", [name], timeout_s, now=now
            ),
            {"node": name, "how": question.bench, "python": question.bench_python, "now": now},
        )
        try:
            beside = [job.display_id for job in self._cluster.jobs_on(name)]
            answer, _ = await self._fleet.call(
                name, lambda request: protocol.changed(question, request=request), timeout_s
            )
        finally:
            await self._change(CONTROLLER, "end-bench", lambda tx: reservation_requests.end_bench(tx, made.name))
        if "bench" not in answer.facts:
            why = str(answer.facts.get("error") or "its agent is of another version, and has work")[:MAX_PATH]
            raise UnavailableError(f"cannot measure node {name}: {why}")
        if name not in self._cluster.nodes:
            raise NotFoundError(f"cannot record the assessment of node {name}: it was removed meanwhile")
        spec = self._cluster.nodes[name].spec
        run = run_of(
            answer.facts["bench"],
            spec,
            at_s=self._clock(),
            busy=f"jobs were running: {', '.join(beside[:3])}" if beside else "",
        )
        await self._in_tick(lambda tx: tx.note_bench(run))
        return asdict(run)

    def links(self, identity: Identity) -> Json:
        """Return the last runs of links between nodes that the user may see."""
        authorize(identity, Action.VIEW_NODES)
        names = visible_nodes(self._cluster, identity)
        runs = [run for run in self._controller.store.load_links() if names.issuperset(run.pair)]
        return {"now_s": self._clock(), "links": [asdict(run) for run in runs]}

    async def _bench_links(self, identity: Identity, body: Json) -> Json:
        """Measure the links between nodes in one reservation, and record the results.

        Raises HpcschedError.
        """
        if not isinstance(body.get("nodes"), str):
            raise RequestError('cannot measure links: the body must be {"how": "links", "nodes": "n[1-4]"}')
        names = list(dict.fromkeys(expand_hostlist(body["nodes"])))
        if not 2 <= len(names) <= MOST_LINKED:
            raise RequestError(f"cannot measure the links of {plural(len(names), 'node')}: name 2 to {MOST_LINKED}")
        now, limit_s = body.get("now") is True, links_limit_s(len(names))
        made = await self._change(
            identity,
            Action.BENCH_NODES,
            lambda tx: reservation_requests.reserve_for_bench(tx, identity, "node-links", names, limit_s, now=now),
            {"nodes": body["nodes"], "how": "links", "now": now},
        )
        try:
            beside = [job.display_id for name in names for job in self._cluster.jobs_on(NodeName(name))]
            tournament = Tournament(
                self._fleet, self._cluster, busy=", ".join(dict.fromkeys(beside)), clock=self._clock
            )
            runs = await tournament.run(names)
        finally:
            await self._change(CONTROLLER, "end-bench", lambda tx: reservation_requests.end_bench(tx, made.name))
        await self._in_tick(lambda tx: tx.note_links(runs))
        return {"links": [asdict(run) for run in runs]}

    async def act_on_nodes(self, identity: Identity, verb: str, body: Json) -> Json:
        nodes, why, by = body.get("nodes"), str(body.get("why") or ""), str(body.get("by") or "")
        if not isinstance(nodes, str) or not nodes:
            raise RequestError('cannot do that: the body must have {"nodes": "n[1-2]"}')
        if verb == "fence":
            removed = self._cluster.gone_nodes()
            fenced = await self._change(identity, Action.FENCE, lambda tx: requests.fence(tx, identity, nodes, why))
            self._fleet.retry(requests.find_nodes(self._cluster, nodes, removed))
            return fenced.as_json()
        if verb == "remove":
            force = body.get("force") is True
            return await self._change(
                identity, Action.REMOVE_NODE, lambda tx: remove_node(tx, identity, NodeName(nodes), force=force)
            )
        if verb == "drain":
            return {
                "nodes": await self._change(identity, "drain", lambda tx: requests.drain(tx, identity, nodes, why, by))
            }
        if verb in ("power-down", "power-up"):
            switch = power_down if verb == "power-down" else power_up
            return {"nodes": await self._change(identity, Action.POWER, lambda tx: switch(tx, identity, nodes), body)}
        only_by = str(body.get("only_by") or "")
        return {
            "nodes": await self._change(
                identity, "resume", lambda tx: requests.resume_nodes(tx, identity, nodes, only_by)
            )
        }

    async def note_sync(self, identity: Identity, body: Json) -> Json:
        """Record that a user is about to change nodes by `hpcsched node sync`, if the user may."""
        nodes, files, command = body.get("nodes"), body.get("files"), body.get("command")
        if not _is_texts(nodes) or not isinstance(files, dict) or not isinstance(command, str):
            raise RequestError(
                'cannot record it: the body must be {"nodes": [names], "files": {path: sha256}, "command": text}'
            )

        def check(tx: Transaction) -> None:
            authorize(identity, Action.SYNC_NODES)
            for name in nodes:
                if name not in tx.cluster.nodes:
                    raise NotFoundError(f"Invalid node name specified: {name[:60]!r}")

        await self._change(identity, Action.SYNC_NODES, check, {"nodes": nodes, "files": files, "command": command})
        return {}

    def reservations(self, identity: Identity) -> Json:
        now_s = self._clock()
        views = [reservation_view(one, self._cluster, now_s) for one in self._visible_reservations(identity)]
        return {
            "now_s": now_s,
            "reservations": [view | {"jobs": self._visible_ids(identity, view["jobs"])} for view in views],
        }

    def _visible_reservations(self, identity: Identity) -> list[Reservation]:
        now_s = self._clock()
        found = [at(reservation, now_s) for reservation in self._cluster.reservations.values()]
        if reach(identity, Action.VIEW_RESERVATIONS) is Reach.ALL:
            return found
        mine = {*self._cluster.config.accounting.accounts_of(identity.user), *identity.accounts}
        return [one for one in found if identity.user in one.users or mine.intersection(one.accounts)]

    async def update_partition(self, identity: Identity, body: Json) -> Json:
        name, state = body.get("name"), body.get("state")
        if not isinstance(name, str) or not isinstance(state, str):
            raise RequestError('cannot change a partition: the body must be {"name": text, "state": text}')
        made = await self._change(
            identity, Action.UPDATE_PARTITION, lambda tx: requests.set_partition_state(tx, identity, name, state)
        )
        return {"name": made.name, "state": made.state.value}

    async def act_on_reservation(self, identity: Identity, verb: str, body: Json) -> Json:
        name, changes = str(body.get("name") or ""), body.get("changes") or {}
        if not isinstance(changes, dict):
            raise RequestError('cannot do that: the body must be {"name": text, "changes": {name: text}}')
        texts = {str(key): str(value) for key, value in changes.items()}
        if verb == "delete":
            await self._change(
                identity, "delete-reservation", lambda tx: reservation_requests.delete(tx, identity, name)
            )
            return {"name": name}
        self._check_people(texts)
        work = reservation_requests.create if verb == "create" else reservation_requests.update
        made = await self._change(identity, f"{verb}-reservation", lambda tx: work(tx, identity, name, texts))
        return {"name": made.name, "reservation": reservation_view(made, self._cluster, self._clock())}

    def _check_people(self, changes: Mapping[str, str]) -> None:
        """Reject a reservation for unknown users, because no user could use it."""
        known = {
            *(job.user for job in self._cluster.jobs.values()),
            *(user.name for user in self._cluster.config.accounting.users),
        }
        for name in read_options(changes, self._clock()).users or ():
            if name not in known and not is_account(name):
                raise RequestError(
                    f"cannot reserve for user {name[:60]!r}: Invalid user specified: there is no such account"
                )

    def crontab(self, identity: Identity, user: str) -> Json:
        owner = self._owner(identity, user)
        return crontabs.view(self._cluster.crontabs.get(owner.uid))

    async def install_crontab(self, identity: Identity, body: Json) -> Json:
        """Replace the crontab of the identity, or of the user that an admin names.

        A text without entries deletes the crontab.
        """
        user = str(body.get("user") or "")
        text, jobs = body.get("text"), body.get("jobs")
        if not isinstance(text, str) or not isinstance(jobs, list):
            raise RequestError('cannot take the crontab: the body must be {"text": text, "jobs": [...]}')
        if not text.strip():
            await self._change(
                identity, "remove-crontab", lambda tx: crontabs.remove(tx, self._owner(identity, user, changes=True))
            )
            return crontabs.view(None)
        made = await self._change(
            identity,
            "install-crontab",
            lambda tx: crontabs.install(tx, self._owner(identity, user, changes=True), text, jobs),
        )
        return crontabs.view(made)

    def _owner(self, identity: Identity, user: str, *, changes: bool = False) -> Identity:
        """Return the identity, or the user that an admin acts for."""
        if user in ("", identity.user):
            if changes:
                authorize(identity, Action.SUBMIT, what="change a crontab")
            return identity.as_user()
        authorize(identity, Action.ACT_FOR_USER, what=f"look at or change the crontab of {user[:60]}")
        uid = uid_of(user)
        if uid is None:
            raise NotFoundError(f"cannot find user {user[:60]!r}: this machine has no such account")
        if changes and uid in (0, os.getuid()):
            authorize_root(identity, os.getuid(), f"have jobs run again and again as {user[:60]}")
        return identity_of(uid, self.access()).as_user()

    def triggers(self, identity: Identity) -> Json:
        return {"triggers": triggers.views(self._cluster, identity)}

    async def act_on_triggers(self, identity: Identity, verb: str, body: Json) -> Json:
        if verb == "set":
            made = await self._change(identity, "set-trigger", lambda tx: triggers.create(tx, identity, body))
            return {"id": made.id}
        number = body.get("id")
        if number is not None and type(number) is not int:
            raise RequestError("cannot clear a trigger: its id must be a number")
        target, user = str(body.get("target") or ""), str(body.get("user") or "")
        return {
            "cleared": await self._change(
                identity, "clear-trigger", lambda tx: triggers.clear(tx, identity, number, target, user)
            )
        }

    # ----- services: models that jobs serve

    def services(self, identity: Identity) -> Json:
        now_s = self._clock()
        return {
            "services": services.views(self._cluster, identity, self._controller.service_loads, now_s),
            "now_s": now_s,
        }

    async def act_on_services(self, identity: Identity, verb: str, body: Json) -> Json:
        """Start, scale, roll or stop a service."""
        work = {"start": services.create, "scale": services.scale, "stop": services.stop, "roll": services.roll}[verb]
        if verb in ("start", "roll") and self._serves_all and not is_account(identity.user):
            raise RequestError(f"cannot {verb} a service: uid {identity.uid} has no account on this machine")
        made = await self._change(identity, f"{verb}-service", lambda tx: work(tx, identity, body))
        return {"service": services.service_view(self._cluster, identity, made, None)}

    def service_usage(self, identity: Identity, days: str) -> Json:
        """Return what users have asked of served models in the last `days`: one's own, or all."""
        count = min(max(whole_number(days or "30", "days"), 1), MAX_USAGE_DAYS)
        found = self._controller.store.load_service_uses(int(self._clock() // services.DAY_S) - count + 1)
        shown = [one._asdict() for one in found if services.sees_use(self._cluster, identity, one)]
        return {"usage": shown, "days": count}

    def use_service(self, identity: Identity, body: Json) -> Json:
        """Return that the user may ask the model of a service; without a name, which ones."""
        return services.use(self._cluster, identity, body, self._clock())

    async def sync_services(self, body: Json) -> Json:
        """Take from the gateway how busy replicas are; return where requests may go."""
        now_s = self._clock()
        loads, used = services.read_loads(body, now_s), services.read_used(body, now_s)
        if self._cluster.services or used:
            await self._in_tick(lambda tx: services.note_loads(tx, self._controller.service_loads, loads, used))
        return {"services": services.serving_view(self._cluster)}

    def reach_service(self, body: Json) -> Json:
        """Return the key of connections to a replica, for the gateway."""
        service, job = services.find_replica(self._cluster, body)
        return {"key": self._reaches.prepare_replica(service, job), "valid_s": KEY_S}

    # ----- alerts, which a child of the controller has

    async def alerts(self, identity: Identity) -> Json:
        """Return the alerts that the user may see, the silences, and the rules as they apply.

        Receivers, and how sending to them goes, are for those who may silence.
        """
        found = await self._asked_alerts({"ask": "view"})
        seen = visible_nodes(self._cluster, identity)
        found["alerts"] = [alert for alert in found["alerts"] if self._is_visible_alert(identity, alert, seen)]
        if not allows(identity, Action.SILENCE):
            found["silences"], found["receivers"] = [], []
        return found | {"rules": rule_views(self._cluster.config.alerts.rules), "now_s": self._clock()}

    def _is_visible_alert(self, identity: Identity, alert: Json, seen: Collection[str]) -> bool:
        if alert["uid"] is not None:
            owner = Owner(uid=alert["uid"], user=alert["user"], account=alert["account"])
            return allows(identity, Action.VIEW_DETAILS, owner)
        node = alert["labels"].get("node")
        return node in seen if node is not None else reach(identity, Action.VIEW_NODES) is Reach.ALL

    async def act_on_silences(self, identity: Identity, verb: str, body: Json) -> Json:
        """Make or end a silence."""
        asked = read_silence(body, identity.user, self._clock()) if verb == "create" else read_end(body)
        await self._change(identity, Action.SILENCE, lambda tx: authorize(identity, Action.SILENCE), asked)
        return await self._asked_alerts(asked)

    async def test_receiver(self, identity: Identity, body: Json) -> Json:
        """Send a message to a receiver at once; an error says why it does not get it."""
        asked = {"ask": "test", "receiver": str(body.get("receiver") or "")}
        await self._change(identity, Action.SILENCE, lambda tx: authorize(identity, Action.SILENCE), asked)
        return await self._asked_alerts(asked)

    async def _asked_alerts(self, question: Json) -> Json:
        if self._alerts is None:
            raise UnavailableError("cannot use alerts: this controller has none")
        return await self._alerts.ask(question)

    # ----- credentials of the API over the network

    def tokens(self, identity: Identity, user: str) -> Json:
        return {"now_s": self._clock(), "tokens": credentials.views(self._cluster, identity, user)}

    async def act_on_tokens(self, identity: Identity, verb: str, body: Json) -> Json:
        if verb == "rotate-key":
            await self._change(identity, "rotate-token-key", lambda tx: credentials.authorize_rotation(identity))
            return {"key": self._credentials.rotate_key()}
        if verb == "revoke":
            ids, user = body.get("ids") or [], str(body.get("user") or "")
            if not _is_texts(ids) or not (ids or user):
                raise RequestError('cannot revoke a token: the body must be {"ids": [ids]} or {"user": name}')
            return {
                "revoked": await self._change(
                    identity, "revoke-token", lambda tx: credentials.revoke(tx, identity, ids, user)
                )
            }
        made, secret = self._credentials.prepare(identity, body)
        await self._change(identity, "create-token", lambda tx: credentials.create(tx, identity, made))
        log.info("%s made the %s %s of %s", identity.user, made.kind, made.id, made.user)
        return {"id": made.id, "user": made.user, "expires_at_s": made.expires_at_s, "token": secret}

    def session_link(self, identity: Identity, body: Json) -> Json:
        return self._credentials.make_code(identity, self._credentials.scopes_of_code(body))

    async def open_session(self, body: Json, source: str) -> Json:
        """Open a session with a one-time code."""
        code = self._credentials.use_code(body)
        made, secret = self._credentials.new_session(code.uid, code.user, code.scopes, source)
        identity = replace(identity_of(code.uid, self.access()), source="session")
        await self._change(identity, "open-session", lambda tx: credentials.put(tx, made))
        return {"session": secret, "user": made.user, "expires_at_s": made.expires_at_s}

    def begin_login(self) -> Json:
        return self._credentials.begin_login()

    async def finish_login(self, body: Json) -> Json:
        """Open a session for the user that an id token names."""
        whose, name = await self._credentials.finish_login(body)
        made, secret = self._credentials.new_session(whose.uid, whose.user, whose.scopes, name)
        identity = replace(identity_of(whose.uid, self.access()), source="login")
        await self._change(identity, "open-session", lambda tx: credentials.put(tx, made))
        return {"session": secret, "user": made.user, "expires_at_s": made.expires_at_s}

    async def close_session(self, identity: Identity, credential_id: str) -> Json:
        if not credential_id:
            raise RequestError("cannot close the session: the request has none")
        revoked = await self._change(
            identity, "close-session", lambda tx: credentials.revoke(tx, identity, [credential_id])
        )
        return {"revoked": revoked}

    def priorities(self, identity: Identity, query: Json) -> Json:
        """Return the priorities of the waiting jobs that match `query`, as in `jobs`."""
        now_s = self._clock()
        snapshot = self._controller.snapshot(self._cluster.jobs_to_plan(), now_s)
        wanted = [job.id for job in self.selected(identity, query)]
        return {"now_s": now_s, **priority_views(snapshot, self._controller.policy, wanted)}

    async def snapshot(self, identity: Identity) -> Json:
        """Return the cluster as a plan sees it: what hqueue, hinfo and hshare show to every user.

        Raises: PermissionDeniedError if some of this is private.
        """
        for action in HIDEABLE.values():
            if reach(identity, action) is not Reach.ALL:
                raise PermissionDeniedError(f"cannot show the snapshot: [privacy] hides it from users ({action.value})")
        snapshot = self._controller.snapshot(self._cluster.jobs_to_plan(), self._clock())
        return {"snapshot": await asyncio.to_thread(snapshot_to_json, snapshot, self._controller.policy)}

    def shares(self, identity: Identity) -> Json:
        now_s = self._clock()
        return {"now_s": now_s, **share_views(self._cluster, identity, now_s)}

    async def reset_usage(self, identity: Identity, body: Json) -> Json:
        accounts, users = body.get("accounts") or [], body.get("users") or []
        if not _is_texts(accounts) or not _is_texts(users):
            raise RequestError(
                'cannot reset usage: the body must be {"accounts": [names], "users": [names]}, empty for all'
            )
        found = await self._change(
            identity, Action.RESET_USAGE, lambda tx: usage_ledger.reset(tx, identity, accounts, users)
        )
        self._controller.reconfigured()
        log.info("%s reset the usage of %s", identity.user, ", ".join(map("/".join, found)) or "no account")
        return {"reset": [{"account": account, "user": user} for account, user in found]}

    def licenses(self) -> Json:
        return {"licenses": license_views(self._cluster)}

    def strays(self, identity: Identity) -> Json:
        authorize(identity, Action.SETTLE_ORPHANS)
        return {"now_s": self._clock(), "strays": orphans.views(self._cluster)}

    async def act_on_strays(self, identity: Identity, verb: str, body: Json) -> Json:
        tokens = body.get("tokens")
        if not _is_texts(tokens) or not tokens:
            raise RequestError('cannot do that: the body must be {"tokens": [tokens or their beginnings, or "all"]}')
        if verb == "adopt":
            adopted = await self._change(identity, "adopt", lambda tx: orphans.adopt(tx, identity, tokens))
            return {"jobs": adopted, "left": len(self._cluster.undecided_launches)}
        ended = await self._change(identity, "end", lambda tx: orphans.end(tx, identity, tokens))
        self._controller.end_orphans(ended)
        return {"nodes": list(ended)}

    def partitions(self, identity: Identity) -> Json:
        nodes = self._visible_nodes(identity, node_views(self._cluster, self._clock()))
        circuits = circuit_views(self._cluster, self._controller.energy, self._clock())
        return {"partitions": partition_views(self._cluster, nodes), "circuits": circuits}

    def config(self, identity: Identity) -> Json:
        config = self._cluster.config
        shown: Json = {"cluster": config.name, "share": config.share, "config_dir": str(config.config_dir)}
        for name, value in (asdict(config.controller) | {"scheduler": asdict(config.scheduler)}).items():
            shown[name] = str(value) if isinstance(value, Path) else value
        shown |= _roles_of(config)
        shown["hidden"] = sorted(kind for kind, action in HIDEABLE.items() if action in config.access.hidden)
        accounting = value_to_json(config.accounting)
        return {
            "config": shown,
            "cost": _cost_view(config.cost),
            "gateway": {"url": config.gateway.url},
            "accounting": {name: accounting[name] for name in ("accounts", "users", "qos", "licenses")},
        }

    def note_start(self) -> None:
        """Record the start of this controller and its roles in the audit log."""
        facts = {
            "epoch": self._cluster.epoch,
            "version": hpcsched.__version__,
            "roles": _roles_of(self._cluster.config),
        }
        entry = entry_of(CONTROLLER, "start", self._clock(), after=facts)
        self._controller.ask(lambda tx: tx.audit(entry), lambda _: None, keep=True)

    async def reconfigure(self, identity: Identity, same_machine: object, testing: object) -> Json:
        """Reread the configuration; `same_machine` names nodes of which only the address changed.

        `testing`: new nodes that get no jobs until somebody resumes them.
        """
        if not _is_texts(same_machine) or not _is_texts(testing):
            raise RequestError(
                'cannot reload the configuration: the body must be {"same_machine": [names of nodes], "testing": [names]}'
            )

        def check(tx: Transaction) -> None:
            authorize(identity, Action.RECONFIGURE)
            for name in same_machine:
                if name not in tx.cluster.nodes:
                    there = ", ".join(tx.cluster.nodes) or "none"
                    raise NotFoundError(f"Invalid node name specified: {name[:60]!r}; there are: {there}")

        await self._change(identity, Action.RECONFIGURE, check, {"same_machine": same_machine})
        before = _roles_of(self._cluster.config)
        try:
            changed = self._apply_config(same_machine)
        except HpcschedError as error:
            await self._change(identity, Action.RECONFIGURE, lambda tx: None, outcome=f"{FAILED}: {error}")
            raise
        roles = _roles_of(self._cluster.config)
        told: Json = {"changed": changed} | ({"roles": roles, "roles_before": before} if roles != before else {})

        def drained(tx: Transaction) -> None:
            changed.extend(follow_renames(tx, identity.uid))
            tx.note_event(
                ClusterEvent(
                    about=EventSubject.CONFIGURATION,
                    kind="ConfigurationRead",
                    name="",
                    at_s=tx.now_s,
                    by=identity.user,
                    text="; ".join(changed),
                )
            )
            # Before the nodes are connected, so before a job can start there.
            for name in testing:
                state = tx.cluster.nodes.get(NodeName(name))
                is_of_others = state is not None and state.drained and state.drained_by != OURSELVES
                if state is None or not is_of_others or state.drained_why.startswith(TESTING):
                    requests.drain(tx, identity, name, TESTING, "")

        await self._change(identity, Action.RECONFIGURE, drained, told)
        return {"changed": changed}

    def _backup_view(self) -> Json | None:
        state, settings = self._cluster.backup, self._cluster.config.backup
        return None if state is None else {**state._asdict(), "every_s": settings.every, "to": list(settings.to)}

    async def backup(self, identity: Identity, path: object) -> Json:
        """Write a copy of the database to the new file `path`, in a thread.

        Other requests do not wait for it.
        """
        if not isinstance(path, str):
            raise RequestError('cannot back up: the body must be {"path": absolute path}')

        def check(_tx: Transaction) -> None:
            authorize(identity, Action.BACK_UP)
            # The controller writes with its own rights, so the user who names the file must have them.
            authorize_root(identity, os.getuid(), "back up the database into a file of the controller")
            if not path.startswith("/"):
                raise RequestError(f"cannot write a backup to {path[:200]!r}: the path must be absolute")

        await self._change(identity, Action.BACK_UP, check, {"path": path})
        size = await asyncio.to_thread(back_up, self._database, Path(path))
        return {"path": path, "size": size}

    async def _change_jobs(
        self, identity: Identity, verb: str, work: Callable[[Transaction], requests.Outcome], asked: Json | None = None
    ) -> requests.Outcome:
        """Do `work` in the next tick, and its remaining jobs in later ticks.

        This continues even if the client disconnects.
        """

        async def all_parts() -> requests.Outcome:
            outcome = await self._change(identity, verb, work, asked)
            while outcome.remaining:
                part = await self._change(identity, verb, partial(requests.continued, done=outcome))
                outcome.remaining = []
                outcome.add(part)
            return outcome

        outcome = await asyncio.shield(self._kept(all_parts()))
        for error in outcome.errors:
            if error["kind"] == PermissionDeniedError.__name__:
                self.note_refusal(identity, verb, error["error"])
        return outcome

    def note_refusal(self, identity: Identity, asked: str, why: str) -> None:
        """Record in the audit log that a request was refused."""
        self._controller.note_refusal(entry_of(identity, asked, self._clock(), outcome=f"{REFUSED}: {why}"))

    def audit(self, identity: Identity, query: Mapping[str, str]) -> Json:
        """Return audit records with numbers above `after`, and how many there are."""
        authorize(identity, Action.READ_AUDIT)
        after = whole_number(query.get("after", "0"), "after")
        limit = max(1, min(whole_number(query.get("limit", "1000"), "limit"), MAX_AUDIT_RECORDS))
        records = self._controller.store.audit_records(after, limit)
        last, _ = self._controller.store.audit_end()
        return {"records": [record_to_json(record) for record in records], "last": last}

    def audit_heads(self, identity: Identity) -> Json:
        """Return the signed ends of the audit log, signed anew, and the public key."""
        authorize(identity, Action.READ_AUDIT)
        if self._audit_heads is None:
            raise UnavailableError("cannot show the signed heads: this controller signs none")
        self._audit_heads.sign(self._clock())
        return {"heads": self._audit_heads.heads(), "public_key": self._audit_heads.public_key()}

    async def once(self, identity: Identity, work: Callable[[Identity], Awaitable[Json]]) -> Json:
        """Do `work` for a request with an idempotency key, or return its answer if it is done.

        It is done even if the client disconnects, so that the repeated request finds the answer.
        Raises ConflictError if the key belongs to another request, or if the answer is lost.
        """
        asked = identity.request
        assert asked is not None
        place = (identity.uid, asked.key)
        if place in self._repeatable:
            content, task = self._repeatable[place]
            if content != asked.content:
                raise ConflictError(_other_content(asked.key))
            return await asyncio.shield(task)
        known = self._controller.store.request(*place)
        if known is not None:
            return _answered_before(asked, *known)
        task = self._kept(self._answer_once(identity, asked, work))
        self._repeatable[place] = (asked.content, task)
        task.add_done_callback(lambda _: self._repeatable.pop(place, None))
        return await asyncio.shield(task)

    async def _answer_once(
        self, identity: Identity, asked: RepeatableRequest, work: Callable[[Identity], Awaitable[Json]]
    ) -> Json:
        """Do `work`, and keep its answer if it has changed anything."""
        try:
            answer = await work(identity)
        except HpcschedError as error:
            await self._keep_answer(identity.uid, asked, {"error": str(error), "kind": type(error).__name__})
            raise
        await self._keep_answer(identity.uid, asked, answer)
        return answer

    async def _keep_answer(self, uid: int, asked: RepeatableRequest, answer: Json) -> None:
        if self._controller.store.request(uid, asked.key) is None:  # nothing was changed: it may be done again
            return
        text = json_text(answer)
        kept = text if len(text) <= MAX_KEPT_ANSWER else TOO_LONG
        await self._in_tick(lambda tx: tx.note_answer(uid, asked.key, kept))

    def _kept(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Return the task that does `work` even if the client disconnects."""
        task = asyncio.create_task(work)
        self._changing.add(task)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changing.discard(task)
        if not task.cancelled():
            task.exception()  # the client is told, or has left

    async def _change(
        self,
        identity: Identity,
        action: Action | str,
        work: Callable[[Transaction], T],
        asked: Json | None = None,
        *,
        outcome: str = DONE,
    ) -> T:
        """Do `work` in the next tick; return its result when it is on disk with its record.

        `asked`: the request, if its effect alone does not show it.
        """
        name = action if isinstance(action, str) else action.value

        def recorded(tx: Transaction) -> T:
            result = work(tx)
            objects, before, after = tx.differences()
            if asked:
                after |= {"asked": asked}
            is_nothing = isinstance(result, requests.Outcome) and result.is_empty and not objects
            if not is_nothing:  # refusals are recorded and counted by `note_refusal`
                tx.audit(
                    entry_of(identity, name, tx.now_s, object=objects, before=before, after=after, outcome=outcome)
                )
            if identity.request is not None:
                self._note_request(tx, identity.uid, identity.request)
            return result

        return await self._in_tick(recorded)

    def _note_request(self, tx: Transaction, uid: int, asked: RepeatableRequest) -> None:
        """Record the request with its first change."""
        known = self._controller.store.request(uid, asked.key)
        if tx.requested(uid, asked.key) is not None or (known is not None and known[0] != asked.content):
            raise ConflictError(_other_content(asked.key))
        if known is None:
            tx.note_request(uid, asked.key, [], asked.content)

    async def _in_tick(self, work: Callable[[Transaction], T]) -> T:
        """Do `work` in the next tick; return its result when it is on disk."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: Any) -> None:
            if future.done():
                return  # the client left; its request is still done
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        self._controller.ask(work, done)
        return await future


_WORK = {
    "hold": requests.hold,
    "release": requests.release,
    "suspend": requests.suspend,
    "resume": requests.resume,
}


def _probe_question(share: str, asked: Mapping[str, str]) -> protocol.CompareProbe:
    """Return the question that nodes are asked about the requested share probe."""
    try:
        return question(
            0, share, asked.get("file", ""), asked.get("sha256", ""), whole_number(asked.get("uid", ""), "uid")
        )
    except ValueError:
        raise RequestError("cannot have nodes compare the share: the request does not name a share probe") from None


def _other_content(key: str) -> str:
    return f"cannot use idempotency key {key!r}: another request had it; give each request a key of its own"


def _answered_before(asked: RepeatableRequest, content: str, answer: str) -> Json:
    """Return the kept answer of the request that `asked` repeats.

    Raises its error, ConflictError.
    """
    if content != asked.content:
        raise ConflictError(_other_content(asked.key))
    if answer in ("", TOO_LONG):
        why = "is too long to be kept" if answer else "was lost when the controller stopped; it may be done in part"
        raise ConflictError(
            f"cannot answer again: the request of idempotency key {asked.key!r} is done, and its answer {why}"
        )
    values: Json = json.loads(answer)
    if "error" in values and "kind" in values:
        raise error_of(values)
    return values


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
