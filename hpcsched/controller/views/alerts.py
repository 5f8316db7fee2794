"""Tell the child that watches the cluster what is wrong, and which job mail is due.

The child is `hpcsched.alerts`.

Rules:
- The event loop is never held: nodes and jobs are looked at in slices, the child is asked and not
  waited for. What it cannot take now is given again.
- Job mail follows from jobs as they are: after a restart of controller or child all jobs in memory are
  looked at again, and the child knows the keys of what it has. So no mail is lost or doubled.
- Of running jobs a few are judged at each look, by the recorder's samples.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hpcsched import paths
from hpcsched.alerts import rules
from hpcsched.alerts.jobmail import (
    JobMail,
    is_told_as_array,
    key_of,
    mails_of,
    mails_of_array,
    mails_of_limits,
    types_of,
)
from hpcsched.alerts.messages import AlertServiceSettings, letter_of_report
from hpcsched.alerts.rules import WatchedCluster, WatchedJob, WatchedNode
from hpcsched.alerts.state import AlertCondition
from hpcsched.api.connection_limits import AnswerPauses
from hpcsched.api.views import job_view, step_view
from hpcsched.auth.authorize import CONTROLLER
from hpcsched.child import ChildProcess
from hpcsched.config.load import Config
from hpcsched.controller.tick import Controller
from hpcsched.controller.views.findings import bottlenecks_of_job
from hpcsched.errors import NotFoundError, RequestError, UnavailableError, report_fault
from hpcsched.lifecycle.events import ClusterEvent, EventSubject
from hpcsched.lifecycle.job import limit_at_s
from hpcsched.listing.efficiency import efficiency_line
from hpcsched.metrics.bench import slow_tests
from hpcsched.metrics.energy import ESTIMATED
from hpcsched.metrics.findings import Bottleneck
from hpcsched.model.alerting import RULES, RuleSettings, limits_of
from hpcsched.model.codec import value_to_json
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job, JobState, Reason
from hpcsched.model.node import CHECKS, Link, Power
from hpcsched.model.probation import DROPS_S
from hpcsched.recorder import Recorder
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction, WriteBatch

log = logging.getLogger("hpcsched.alerts")

Json = dict[str, Any]

SLICE_S = 0.002  # of the event loop's time, at once
REPORT_S = 600.0  # between looks whether the report of a month is due, and the longest time to make it
MAX_REPORT_BYTES = 2 << 20
REPORTER = (sys.executable, "-P", "-c", "import sys; from hpcsched.cli.hreport import main; sys.exit(main())")
MAIL_PAUSE_S = 1.0  # job mail of the changes of so long is given together
MOST_MAILS = 20_000  # that wait for the child
MAILS_AT_ONCE = 200
JUDGED_AT_ONCE = 5
JUDGED_AFTER_S = 600.0  # a job has run so long when it is judged for the first time
JUDGED_AGAIN_S = 600.0
FRESH_S = 900.0  # a status of a training program counts so long
MOST_UNPLANNED = 1000  # waiting jobs that are looked at for whether a plan has them
UNPLANNED_S = 300.0  # a new job may be without a plan for so long
MAIL_PAST_S = 2 * 86_400.0  # as the child: older mail is not sent


class AlertProcess(ChildProcess):
    """The child that tells alerts. `is_new`: it has not been told of all jobs."""

    def __init__(self, settings: AlertServiceSettings) -> None:
        super().__init__("hpcsched.alerts", "the process of the alerts", "cannot use alerts now")
        self.settings = settings
        self.is_new = True

    def greeting(self) -> tuple[Any, ...]:
        self.is_new = True
        return ("settings", value_to_json(self.settings))

    def configure(self, settings: AlertServiceSettings) -> None:
        """Tell the child new settings."""
        if settings != self.settings:
            self.settings = settings
            self.send(("settings", value_to_json(settings)))


def settings_of(config: Config) -> AlertServiceSettings:
    """Return what the child needs to know."""
    gateway = config.gateway
    return AlertServiceSettings(
        alerts=config.alerts,
        database=str(config.controller.state_dir / paths.ALERTS_FILE),
        cluster=config.name,
        url=gateway.url,
        certificate=gateway.certificate,
        host=socket.gethostname(),
    )


class AlertFeed:
    """Feeds the child, and asks it for users. `configure` applies a changed configuration."""

    def __init__(self, controller: Controller, recorder: Recorder | None, clock: Callable[[], float]) -> None:
        self._controller, self._recorder, self._clock = controller, recorder, clock
        self._process: AlertProcess | None = None
        self._running: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._changed: dict[JobId, Job] = {}  # jobs whose mail may be due
        self._something = asyncio.Event()
        self._mails: dict[str, JobMail] = {}  # not on the child's disk yet
        self._limits: dict[str, None] = {}  # keys of mail that was given and is still due
        self._judged: dict[JobId, tuple[float, list[Bottleneck]]] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._report_at_s = float("-inf")
        self._report_trouble = ""
        self._recorded: dict[str, None] = {}  # news of the child that the next commit has
        self._known_news: dict[str, None] = {}  # that are on disk, which the child is to be told
        self._slow: tuple[object, dict[str, str]] = (None, {})  # of which assessments, and what they say
        controller.on_commit.append(self._committed)

    @property
    def _cluster(self) -> ClusterState:
        return self._controller.cluster

    def configure(self, config: Config) -> None:
        """Begin, end or change the watch."""
        if not config.alerts.on:
            if self._process is not None:
                self._closing = asyncio.get_running_loop().create_task(self.close())
        elif self._process is None:
            self._process = AlertProcess(settings_of(config))
            self._process.start()
            self._running = asyncio.get_running_loop().create_task(self._run(self._process))
        else:
            self._process.configure(settings_of(config))

    async def close(self) -> None:
        """End the watch and the child; letters on their way are waited for a little."""
        process, self._process = self._process, None
        for task in (self._running, self._reporting):
            if task is not None:
                task.cancel()
        if process is not None:
            await process.close()

    def _committed(self, batch: WriteBatch) -> None:
        """Note the jobs that changed and want mail."""
        if self._process is None:
            return
        wanted = {job.id: job for job in batch.jobs.values() if job.spec.mail_type}
        if len(self._changed) >= MOST_MAILS:
            self._process.is_new |= bool(wanted)  # all jobs are looked at again
        elif wanted:
            self._changed |= wanted
            self._something.set()

    # ----- the loop

    async def _run(self, process: AlertProcess) -> None:
        loop = asyncio.get_running_loop()
        next_look_s = loop.time()
        while True:
            interval_s = self._cluster.config.alerts.interval
            try:
                if loop.time() >= next_look_s:
                    next_look_s = loop.time() + interval_s
                    await self._look(process)
                    self._see_to_report(process)
                await self._give_mail(process)
            except UnavailableError as error:
                log.debug("%s", error)  # the child says why in the log, and is asked again
            except Exception as error:
                report_fault(error, "watch the cluster")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._something.wait(), max(0.0, next_look_s - loop.time()))
                self._something.clear()
                await asyncio.sleep(min(MAIL_PAUSE_S, interval_s))

    async def _look(self, process: AlertProcess) -> None:
        """Tell the child what is wrong."""
        if process.pid is None:
            return
        now_s, slices = self._clock(), AnswerPauses(SLICE_S)
        share, limits = self._cluster.config.share, limits_of(self._cluster.config.alerts.rules)
        busy = {name for job in self._cluster.active_jobs() for name in job.held_nodes}
        slow = await self._slow_nodes(slices)
        conditions: list[AlertCondition] = []
        nodes: list[WatchedNode] = []
        for name in list(self._cluster.nodes):
            facts = self._facts_of(name, busy, slow, now_s)
            if facts is not None:
                nodes.append(facts)
                conditions += rules.of_node(facts, share, limits)
            await slices.between()
        conditions += rules.of_cluster(self._cluster_facts(now_s), nodes, share, limits)
        conditions += await self._of_jobs(slices, now_s)
        known_news = list(self._known_news)
        question = {
            "ask": "look",
            "conditions": [value_to_json(made) for made in conditions],
            "quiet_nodes": quiet_nodes(self._cluster, now_s),
            "known_news": known_news,
        }
        answer = json.loads(await process.ask(question))
        for number in known_news:
            self._known_news.pop(number, None)
        self._record_news(answer.get("news", {}))

    def _record_news(self, news: Mapping[str, Json]) -> None:
        """Record which alerts have fired or ended; the child is told when that is on disk.

        A controller that is killed between these two records it again.
        """
        known = self._recorded.keys() | self._known_news.keys()
        new = {number: one for number, one in news.items() if number not in known}
        if not new:
            return
        self._recorded |= dict.fromkeys(new)

        def record(tx: Transaction) -> None:
            for one in new.values():
                tx.note_event(_event_of_alert(one))

        def done(outcome: object) -> None:
            failed = isinstance(outcome, Exception)
            for number in new:
                self._recorded.pop(number, None)
                if not failed:
                    self._known_news[number] = None

        self._controller.ask(record, done)

    # ----- the report of the last month

    def _see_to_report(self, process: AlertProcess) -> None:
        """Begin the report of the last month now and then; the child knows whether it is due."""
        config, now_s = self._cluster.config, asyncio.get_running_loop().time()
        is_free = self._reporting is None or self._reporting.done()
        if config.reports.mail and config.alerts.smtp and is_free and now_s >= self._report_at_s:
            self._report_at_s = now_s + REPORT_S
            self._reporting = asyncio.get_running_loop().create_task(self._report(process, config))

    async def _report(self, process: AlertProcess, config: Config) -> None:
        """Have hreport make the mail, if it is due, and give it to the child.

        A failure is tried again.
        """
        first = datetime.fromtimestamp(self._clock()).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        month = f"{first - timedelta(days=1):%Y-%m}"
        question: Json = {"ask": "report", "key": month, "ended_at_s": first.timestamp()}
        why = ""
        try:
            if json.loads(await process.ask(question))["due"]:
                mail = await _made_report(month, config)
                letter = letter_of_report(mail, f"report.{month}", self._clock(), config.reports.mail)
                await process.ask(question | {"letter": value_to_json(letter)})
                log.info("the report of %s goes to %s", month, ", ".join(config.reports.mail))
        except (UnavailableError, OSError, ValueError) as error:
            why = str(error)
        except Exception as error:
            why = f"{report_fault(error, 'make the report of a month')}"
        if why and why != self._report_trouble:
            log.error("cannot mail the report of %s: %s; trying again", month, why)
        self._report_trouble = why

    # ----- nodes and the cluster

    def _facts_of(self, name: NodeName, busy: set[NodeName], slow: dict[str, str], now_s: float) -> WatchedNode | None:
        if name not in self._cluster.nodes:
            return None
        node = self._cluster.nodes[name]
        is_up = node.link is Link.UP and node.power is Power.ON
        is_down = node.link is Link.DOWN and node.power is Power.ON
        hardware = self._controller.metrics.hardware(name, now_s) if is_up else None
        return WatchedNode(
            name=name,
            down_why=(node.link_why or "it does not answer") if is_down else None,
            drained_by=node.drained_by if node.drained else "",
            drained_why=node.drained_why,
            drops=sum(0 <= now_s - drop_s < DROPS_S for drop_s in node.probation.drops_s),
            silent_s=self._controller.metrics.sample_age_s(name, now_s) if is_up else None,
            has_jobs=name in busy,
            conditions=hardware["conditions"] if hardware is not None else None,
            errors=hardware["errors"] if hardware is not None else None,
            slow=slow.get(name, ""),
            clock_ahead_s=self._controller.metrics.clock_ahead_s(name, now_s) if is_up else None,
        )

    async def _slow_nodes(self, slices: AnswerPauses) -> dict[str, str]:
        """Return what assessments say of slow nodes; it is found out when there is a new one."""
        version = tuple(sorted((name, run.at_s) for name, run in self._cluster.benches.items()))
        if version != self._slow[0]:
            runs, found = self._controller.store.load_benches(), {}
            for name in self._cluster.benches:
                slow = [one for one in slow_tests(name, runs) if one.confirmed]
                if slow:
                    said = (f"{one.test} at {one.part:.0%} of its {one.versus}" for one in slow[:5])
                    found[name] = f"slow in its last assessments: {', '.join(said)}"
                await slices.between()
            self._slow = version, found
        return self._slow[1]

    def _cluster_facts(self, now_s: float) -> WatchedCluster:
        cluster, backup = self._cluster, self._cluster.backup
        first = [job_id for job_id in itertools.islice(cluster.pending, MOST_UNPLANNED) if job_id not in cluster.waits]
        unplanned = sum(now_s - cluster.jobs[job_id].submitted_at_s > UNPLANNED_S for job_id in first)
        made = WatchedCluster(unplanned=unplanned, circuits=self._circuits(now_s))
        if backup is None:
            return made
        age_s = max(0.0, now_s - backup.newest_at_s) if backup.newest_at_s else None
        return replace(made, backup=(age_s, cluster.config.backup.every, backup.why))

    def _circuits(self, now_s: float) -> list[tuple[str, float, float]]:
        """Return each circuit with what the meters of its nodes show, and its budget."""
        if not self._cluster.config.circuits:
            return []
        known = {name: self._controller.energy.watts(name, now_s) for name in self._cluster.nodes}
        metered = {name: one[0] for name, one in known.items() if one is not None and one[1] != ESTIMATED}
        return [
            (
                one.name,
                sum(watts for name, watts in metered.items() if one.feeds(name)),
                one.budget_watts,
            )
            for one in self._cluster.config.circuits
        ]

    # ----- running jobs

    async def _of_jobs(self, slices: AnswerPauses, now_s: float) -> list[AlertCondition]:
        """Return what users should know of their running jobs."""
        running = [job for job in self._cluster.active_jobs() if job.state is JobState.RUNNING]
        await self._judge(running, now_s)
        found: list[AlertCondition] = []
        for job in running:
            if "NONE" not in job.spec.mail_type:
                found += rules.of_job(self._job_facts(job, now_s), now_s)
            await slices.between()
        return found

    async def _judge(self, running: Sequence[Job], now_s: float) -> None:
        """Judge the jobs that were not judged for longest, a few at once."""
        self._judged = {job.id: self._judged[job.id] for job in running if job.id in self._judged}
        if self._recorder is None:
            return
        due = [
            job
            for job in running
            if now_s - (job.started_at_s or now_s) >= JUDGED_AFTER_S
            and not 0.0 <= now_s - self._judged.get(job.id, (0.0, []))[0] < JUDGED_AGAIN_S  # or the clock was set back
        ]
        due.sort(key=lambda job: self._judged.get(job.id, (0.0, []))[0])
        for job in due[:JUDGED_AT_ONCE]:
            known = self._cluster.jobs.get(job.id)
            if known is None or known.state is not JobState.RUNNING:
                continue
            try:
                found, _ = await bottlenecks_of_job(self._recorder.ask, self._cluster, known, now_s)
            except UnavailableError:
                return  # the recorder's log says why
            self._judged[job.id] = now_s, found

    def _job_facts(self, job: Job, now_s: float) -> WatchedJob:
        status = self._cluster.training.get(job.id)
        is_told = status is not None and status.attempt == job.attempt and now_s - status.at_s < FRESH_S
        has_run = now_s - (job.started_at_s or now_s) >= JUDGED_AFTER_S
        return WatchedJob(
            display_id=job.display_id,
            key=key_of(job),
            uid=job.uid,
            user=job.user,
            account=job.account,
            mail_to=job.spec.mail_user,
            limit_at_s=limit_at_s(job),
            ends_at_s=status.ends_at_s if status is not None and is_told and has_run else None,
            bottlenecks=self._judged.get(job.id, (0.0, []))[1],
        )

    # ----- job mail

    async def _give_mail(self, process: AlertProcess) -> None:
        """Find the job mail that is due, and give it to the child."""
        if process.pid is None or not self._cluster.config.alerts.smtp:
            self._changed.clear()
            return
        slices, now_s = AnswerPauses(SLICE_S), self._clock()
        if process.is_new:
            process.is_new = False
            self._limits.clear()
            self._changed |= {job.id: job for job in self._cluster.jobs.values() if job.spec.mail_type}
        try:
            await self._find_mail(process, slices, now_s)
        except UnavailableError:
            process.is_new = True  # what was not found yet is found among all jobs
            raise
        await self._give(process, slices, now_s)

    async def _find_mail(self, process: AlertProcess, slices: AnswerPauses, now_s: float) -> None:
        """Find the job mail that is due; give some of it to the child if there is too much."""
        changed, self._changed = self._changed, {}
        arrays: dict[JobId, None] = {}
        for job in changed.values():
            if is_told_as_array(job) and job.array_job_id is not None:
                arrays[job.array_job_id] = None
            elif types_of(job):
                self._keep(mails_of(job, now_s), now_s)
            await self._pause(process, slices, now_s)
        for array in arrays:
            tasks = self._cluster.numbered(array)
            if tasks:
                self._keep(mails_of_array(tasks, now_s), now_s)
            await self._pause(process, slices, now_s)
        await self._keep_timed(process, slices, now_s)

    async def _pause(self, process: AlertProcess, slices: AnswerPauses, now_s: float) -> None:
        """Let others have their turn, and make room for more mail."""
        if len(self._mails) >= MOST_MAILS:
            await self._give(process, slices, now_s)
        await slices.between()

    async def _keep_timed(self, process: AlertProcess, slices: AnswerPauses, now_s: float) -> None:
        """Find the mail that is due although nothing has changed."""
        limits: dict[str, None] = {}
        for job in self._cluster.active_jobs():
            if job.spec.mail_type and not is_told_as_array(job):
                for mail in mails_of_limits(job, now_s):
                    limits[mail.key] = None
                    if mail.key not in self._limits:
                        self._keep([mail], now_s)
            await self._pause(process, slices, now_s)
        for job_id, wait in list(self._cluster.waits.items()):
            waiting = self._cluster.jobs.get(job_id) if wait.reason is Reason.DEPENDENCY_NEVER else None
            if waiting is not None and waiting.spec.mail_type and not is_told_as_array(waiting):
                for mail in mails_of(waiting, now_s, never_starts=True):
                    limits[mail.key] = None
                    if mail.key not in self._limits:
                        self._keep([mail], now_s)
            await self._pause(process, slices, now_s)
        self._limits = limits

    def _keep(self, mails: Iterable[JobMail], now_s: float) -> None:
        for mail in mails:
            if now_s - mail.at_s < MAIL_PAST_S:
                self._mails[mail.key] = mail

    async def _give(self, process: AlertProcess, slices: AnswerPauses, now_s: float) -> None:
        while self._mails:
            part = list(itertools.islice(self._mails.values(), MAILS_AT_ONCE))
            told = []
            for mail in part:
                told.append(value_to_json(self._with_use(mail, now_s) if mail.is_end else mail))
                await slices.between()
            await process.ask({"ask": "mail", "mails": told})
            for mail in part:
                self._mails.pop(mail.key, None)

    def _with_use(self, mail: JobMail, now_s: float) -> JobMail:
        """Return the mail of an ended job with what the job has used."""
        with suppress(NotFoundError, UnavailableError):
            job_id = JobId(int(mail.key.partition(".")[0]))  # int: of our own key
            found = self._controller.store.jobs([job_id])
            steps = self._controller.store.load_steps([job_id])
            for job in found:
                view = job_view(job, self._cluster, CONTROLLER, now_s) | {"steps": [step_view(step) for step in steps]}
                line = efficiency_line(view)
                return replace(mail, lines=(*mail.lines, *([f"It {line}"] if line else []), f"hacct -j {mail.job}"))
        return mail

    # ----- what users ask

    async def ask(self, question: Json) -> Json:
        """Return the child's answer. Raises HpcschedError."""
        if self._process is None:
            raise UnavailableError("cannot use alerts: they are switched off; see [alerts] on in hpcsched.toml")
        answer: Json = json.loads(await self._process.ask(question))
        return answer


def _event_of_alert(news: Json) -> ClusterEvent:
    more = {name: news[name] for name in ("labels", "severity", "uid", "user", "account")}
    return ClusterEvent(
        about=EventSubject.ALERT,
        kind=news["kind"],
        name=news["name"],
        at_s=news["at_s"],
        text=news["text"],
        more=more,
    )


def rule_views(settings: Sequence[RuleSettings]) -> list[Json]:
    """Return all rules as they apply, and which keys of hpcsched.toml have changed them."""
    changes, limits = {one.name: one for one in settings}, limits_of(settings)
    return [
        {
            "rule": name,
            "enabled": change.enabled,
            "severity": change.severity or rule.severity.value,
            "for_s": rule.for_s if change.for_s is None else change.for_s,
            "limit": limits.get(name),
            "unit": "" if rule.limit is None else rule.limit.unit,
            "meaning": rule.meaning,
            "changed": change.changed,
        }
        for name, rule in RULES.items()
        for change in [changes.get(name, RuleSettings(name=name))]
    ]


async def _made_report(month: str, config: Config) -> str:
    """Return what hreport writes as a mail, in a process of its own.

    Raises OSError, ValueError.
    """
    words = (f"--month={month}", f"--by={','.join(config.reports.by)}", f"--mail={','.join(config.reports.mail)}")
    environment = {name: value for name, value in os.environ.items() if name not in ("HPCSCHED_URL", "HPCSCHED_API")}
    child = await asyncio.create_subprocess_exec(
        *REPORTER,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | {"HPCSCHED_CONFIG": str(config.config_dir), "HPCSCHED_API": str(config.api_socket)},
    )
    try:
        async with asyncio.timeout(REPORT_S):
            out, err = await child.communicate()
    except TimeoutError:
        raise ValueError(f"hreport took more than {REPORT_S:g} s") from None
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
    if child.returncode or len(out) > MAX_REPORT_BYTES:
        why = err.decode(errors="replace").strip().splitlines()[-1:] or [f"it has {len(out)} bytes"]
        raise ValueError(why[0][:300])
    return out.decode("ascii")


LABELS = ("rule", "node", "mount", "part", "job", "user")
MAX_MATCHERS, MAX_PATTERNS, MAX_PATTERN = 8, 1000, 100
LONGEST_SILENCE_S = 366 * 86_400.0
MAX_WHY = 300


def read_silence(body: Json, by: str, now_s: float) -> Json:
    """Return the question to the child for a silence. Raises RequestError.

    `body`: matchers (label: text of patterns between commas; of nodes a host list), until_s, why.
    """
    matchers, until_s, why = body.get("matchers"), body.get("until_s"), body.get("why")
    if not isinstance(matchers, dict) or not isinstance(why, str) or not isinstance(until_s, int | float):
        raise RequestError(
            'cannot silence: the body must be {"matchers": {label: patterns}, "until_s": time, "why": text}'
        )
    if not matchers or len(matchers) > MAX_MATCHERS:
        raise RequestError(f"cannot silence: say which alerts, by some of {', '.join(LABELS)}")
    if not now_s < until_s <= now_s + LONGEST_SILENCE_S:
        raise RequestError("cannot silence: its end must be after now, and within a year")
    read = []
    for label, text in matchers.items():
        if label not in LABELS or not isinstance(text, str) or not text:
            raise RequestError(f"cannot silence by {str(label)[:40]!r}: there are {', '.join(LABELS)}")
        is_list = label == "node" and "[" in text
        patterns = expand_hostlist(text) if is_list else [part.strip() for part in text.split(",") if part.strip()]
        if not 0 < len(patterns) <= MAX_PATTERNS or any(len(part) > MAX_PATTERN for part in patterns):
            raise RequestError(f"cannot silence by {label}: at most {MAX_PATTERNS} names of {MAX_PATTERN} characters")
        read.append([label, patterns])
    return {"ask": "silence", "matchers": read, "until_s": until_s, "by": by, "why": rules.one_line(why, MAX_WHY)}


def read_end(body: Json) -> Json:
    """Return the question to the child for the end of a silence. Raises RequestError."""
    number = body.get("id")
    if type(number) is not int:
        raise RequestError('cannot end a silence: the body must be {"id": number}')
    return {"ask": "end-silence", "id": number}


def quiet_nodes(cluster: ClusterState, now_s: float) -> dict[str, str]:
    """Return the nodes of whose alerts nobody is told, and why: somebody works on them."""
    found = {
        node.name: f"drained by {node.drained_by}"
        for node in cluster.nodes.values()
        if node.drained and node.drained_by not in CHECKS
    }
    for one in cluster.reservations.values():
        if one.is_maintenance and one.is_active(now_s):
            found |= dict.fromkeys(one.nodes, f"reservation {one.name}")
    return {str(name): why for name, why in found.items()}
