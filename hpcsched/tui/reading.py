"""What the screen shows of the cluster, as the controller answers it.

`ClusterReader` asks through the controller's socket or the gateway of HPCSCHED_URL, as any command. It is for one thread.
Rule: if the controller does not answer, the last answers stay, and `trouble` says why.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched import client
from hpcsched.errors import HpcschedError, NotFoundError, UnavailableError
from hpcsched.listing.jobs import ACTIVE_STATES
from hpcsched.tui.training import MetricsReader, TrainingRun

TIMEOUT_S = 5.0
LOG_EVERY_S = 1.0
LOG_BYTES = 4000
ENERGY_EVERY_S = 60.0  # the controller writes it once a minute
ENERGY_DAYS, MOST_OF_ENERGY = 7, 1000  # what the screen of use looks back to: days, and their newest jobs
MOST_KNOWN = 100  # answers that change slowly
MOST_RUNNING, MOST_WAITING = 500, 100  # jobs with all of their facts
SEPARATOR = "\ue000"  # never in a value: it is not printable; the gateway refuses control characters
COLUMNS = SEPARATOR.join(("%A", "%i", "%j", "%u", "%T", "%M", "%R", "%r", "%P", "%L"))


class QueuedJob(NamedTuple):
    """A row of the queue: a job, or the tasks of an array that share one.

    `number` addresses the job; `where` is its node list, or why it waits in parentheses.
    """

    number: int
    display_id: str
    name: str
    user: str
    state: str
    time: str
    where: str
    reason: str = "None"
    partition: str = ""
    left: str = ""

    @property
    def is_in_limbo(self) -> bool:
        """Whether a node of this job does not answer, so that nothing is known of it."""
        return self.reason == "NodeDown" and self.state in ACTIVE_STATES


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What to ask for, beside the controller's state and the nodes.

    `parts`: of "queue", "jobs" (those that run or wait, with all facts), "reservations", "slow", "alerts", "shares", "energy".
    `has_ended`: ended jobs, too. `is_folded`: one row for the tasks of an array.
    """

    parts: frozenset[str] = frozenset({"queue"})
    has_ended: bool = True
    is_folded: bool = True


class UserEnergy(NamedTuple):
    """What the jobs of a user caused; price and CO2 are None without a tariff.

    `source`: how it is known, see `hpcsched.metrics.energy`.
    """

    user: str
    joules: float
    source: str
    cost: float | None = None
    co2_g: float | None = None


class UsersEnergy(NamedTuple):
    """The energy of users in the last `ENERGY_DAYS` days, the most first.

    `is_whole`: it is that of all jobs, not of the newest only.
    """

    users: tuple[UserEnergy, ...]
    is_whole: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterScreen:
    """All that is shown. `controller` is its answer to a ping, None if it did not answer."""

    now_s: float = 0.0
    controller: Mapping[str, Any] | None = None
    trouble: str = ""  # why the controller does not answer
    nodes: tuple[Mapping[str, Any], ...] = ()
    queue: tuple[QueuedJob, ...] = ()
    running: tuple[Mapping[str, Any], ...] = ()
    waiting: tuple[Mapping[str, Any], ...] = ()
    reservations: tuple[Mapping[str, Any], ...] = ()
    findings: Mapping[str, Any] = field(default_factory=dict)  # what holds up the queue
    alerts: Mapping[str, Any] = field(default_factory=dict)  # as the API has them; "trouble": why there are none
    shares: tuple[Mapping[str, Any], ...] = ()
    energy: UsersEnergy | None = None
    currency: str = ""
    job_energy: tuple[Mapping[str, Any], ...] = ()  # of the selected job, by attempt and node
    job: Mapping[str, Any] | None = None  # the selected job, as the API shows one job
    run: TrainingRun = field(default_factory=TrainingRun)
    log: tuple[str, ...] = ()

    def node(self, name: str) -> Mapping[str, Any] | None:
        """Return the node of this name, None if there is none."""
        return next((node for node in self.nodes if node["name"] == name), None)


class ClusterReader:
    """Asks the controller for what a screen shows.

    `metrics` is the training's file, if the caller knows it.
    """

    def __init__(self, metrics: Path | None = None) -> None:
        self._metrics = metrics
        self._runs: dict[int, MetricsReader] = {}
        self._last = ClusterScreen()
        self._log_of: tuple[int, float] = (0, 0.0)
        self._known: dict[str, tuple[float, Any]] = {}  # answers that change slowly, and until when they are used

    def look(self, chosen: str | int | None = None, asked: Asked | None = None) -> ClusterScreen:
        """Return the cluster as it is now, with the job `chosen`, if there is one."""
        try:
            self._last = self._asked(chosen, asked or Asked())
        except UnavailableError as error:
            self._last = dataclasses.replace(self._last, controller=None, trouble=str(error), now_s=time.time())
            if self._last.job is not None:  # its file may still grow
                self._last = dataclasses.replace(self._last, run=self._runs[self._last.job["id"]].read())
        return self._last

    def _asked(self, chosen: str | int | None, asked: Asked) -> ClusterScreen:
        found: dict[str, Any] = {"controller": _get("/v1/ping"), "nodes": tuple(_get("/v1/nodes")["nodes"])}
        found["now_s"] = found["controller"]["now_s"]
        if "queue" in asked.parts:
            found["queue"] = self._queue(asked)
        if "jobs" in asked.parts:
            states = ",".join(sorted(ACTIVE_STATES))
            query = client.query("/v1/jobs", state=states, limit=str(MOST_RUNNING), fold="0")
            found["running"] = tuple(_get(query)["jobs"])
            query = client.query("/v1/jobs", state="PENDING", limit=str(MOST_WAITING), fold="1")
            found["waiting"] = tuple(_get(query)["jobs"])
        if "reservations" in asked.parts:
            found["reservations"] = tuple(_get("/v1/reservations")["reservations"])
        if "slow" in asked.parts:
            found["findings"] = _get("/v1/slow")
        if "alerts" in asked.parts:
            found["alerts"] = _alerts()
        if "shares" in asked.parts:
            found["shares"] = tuple(_get("/v1/shares")["shares"])
        if "energy" in asked.parts:
            found["energy"] = self._slowly("energy", partial(users_energy, found["now_s"]), None)
            found["currency"] = self._slowly("currency", _currency, "")
        job = self._job(chosen)
        if job is not None:
            found |= {"run": self._run(job).read(), "log": self._log(job["id"])}
            found["job_energy"] = self._slowly(f"energy {job['id']}", partial(_energy_of, job["id"]), ())
            found["currency"] = self._slowly("currency", _currency, "")
        return dataclasses.replace(self._last, **found, trouble="", job=job)

    def _slowly(self, name: str, read: Callable[[], Any], unknown: Any) -> Any:
        """Return what `read` returned within the last minute.

        If it is refused, what it returned last, else `unknown`: the history may be hidden from this user.
        """
        until_s, value = self._known.get(name, (0.0, unknown))
        if time.monotonic() >= until_s:
            with suppress(HpcschedError):
                value = read()
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[name] = time.monotonic() + ENERGY_EVERY_S, value
        return value

    def _queue(self, asked: Asked) -> tuple[QueuedJob, ...]:
        fold = {"fold": "1"} if asked.is_folded else {"array": "1"}
        state = "ALL" if asked.has_ended else ""
        query = client.query("/v1/queue", format=COLUMNS, state=state, order="phase", noheader="1", **fold)
        return queue_of(client.fetch_text(query, timeout_s=TIMEOUT_S))

    def _job(self, chosen: str | int | None) -> dict[str, Any] | None:
        if chosen is None:
            return None
        try:
            answer = _get(client.job_path(str(chosen)))
        except NotFoundError:
            return None
        job: dict[str, Any] = answer["jobs"][0]
        return job

    def _run(self, job: dict[str, Any]) -> MetricsReader:
        """Return the reader of the job's metrics file, or of its reports if that is not readable."""
        report = job.get("training") or {}
        path = self._metrics
        if path is None and report.get("directory"):
            path = Path(report["directory"]).parent / "metrics.jsonl"
        known = self._runs.get(job["id"])
        if known is None or known.path != path:
            known = self._runs[job["id"]] = MetricsReader(path)
        if report and (path is None or not os.access(path, os.R_OK)):
            known.add_report(report)
        return known

    def _log(self, number: int) -> tuple[str, ...]:
        """Return the last lines of the job's output.

        Those seen last if it cannot be read at the moment.
        """
        known_of, at_s = self._log_of
        known = self._last.log if known_of == number else ()
        if known_of == number and time.monotonic() < at_s + LOG_EVERY_S:
            return known
        self._log_of = number, time.monotonic()
        try:
            part = client.fetch_log(str(number), offset=-LOG_BYTES, timeout_s=TIMEOUT_S)
        except UnavailableError:
            return known
        except HpcschedError as error:
            return (str(error),)
        lines = part.data.decode("utf-8", "replace").splitlines()
        return tuple(lines[1:] if part.offset else lines)


def _get(path: str) -> dict[str, Any]:
    return client.call("GET", path, timeout_s=TIMEOUT_S)


def _alerts() -> Mapping[str, Any]:
    """Return the alerts; they may be switched off, or their child may not run."""
    try:
        return _get("/v1/alerts")
    except HpcschedError as error:
        return {"alerts": [], "left_out": 0, "trouble": str(error)}


def _currency() -> str:
    return str(_get("/v1/config").get("cost", {}).get("currency", ""))


def _energy_of(job: int) -> tuple[Mapping[str, Any], ...]:
    """Return the energy that a job caused, by attempt and node."""
    jobs = _get(client.query("/v1/history", id=str(job), energy="1", limit="10"))["jobs"]
    return tuple(use for one in jobs if one["id"] == job for use in one.get("energy") or ())


def users_energy(now_s: float) -> UsersEnergy:
    """Return the energy of each user's jobs in the last days. Raises HpcschedError."""
    from hpcsched.metrics.usage_report import Period, usage_rows  # the first screen does not need it
    from hpcsched.model.tariff import PeriodPrices

    since_s = max(0.0, now_s - ENERGY_DAYS * 86_400.0)
    wanted = {"attempts": "1", "energy": "1", "limit": str(MOST_OF_ENERGY)}
    answer = _get(client.query("/v1/history", start_s=since_s, end_s=now_s, **wanted))
    prices = PeriodPrices.read(_get(client.query("/v1/tariff", start_s=since_s, end_s=now_s))).energy
    sources: dict[str, set[str]] = {}
    for job in answer["jobs"]:
        sources.setdefault(job["user"], set()).update(use["source"] for use in job.get("energy") or ())
    found = [
        UserEnergy(
            row.key[0],
            row.joules,
            "+".join(sorted(sources[row.key[0]])),
            row.energy_cost if prices.kwh else None,
            row.co2_g if prices.gco2_per_kwh else None,
        )
        for row in usage_rows(answer["jobs"], [Period(since_s, now_s, now_s)], ("user",), None, prices)
        if row.joules is not None
    ]
    return UsersEnergy(tuple(sorted(found, key=lambda one: -one.joules)), not answer.get("next_cursor"))


def queue_of(text: str) -> tuple[QueuedJob, ...]:
    """Return the jobs of the controller's lines."""
    lines = [line.split(SEPARATOR) for line in text.splitlines()]
    return tuple([QueuedJob(int(line[0]), *line[1:]) for line in lines])


def first_of_mine(queue: tuple[QueuedJob, ...]) -> int | None:
    """Return the job to select first: a running one of ours, else the first in the queue.

    None if there is none.
    """
    me = client.my_name()
    mine = [job for job in queue if job.user == me and job.state in ACTIVE_STATES]
    return next((job.number for job in (*mine, *queue)), None)
