"""The web pages that show the cluster: jobs, output, nodes, the queue, use.

Without scripts the pages are whole, and read only; the script keeps them up to date, and sends actions to the REST API.
`hpcsched.gateway.site` has what all pages have.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hpcsched.gateway.admin import AdminPages
from hpcsched.gateway.app import ProblemError, packed
from hpcsched.gateway.charts import Chart, ScheduleBar, schedule
from hpcsched.gateway.site import PAGE_HEADERS, Json, Page, Site, query_of
from hpcsched.gateway.work import WorkPages
from hpcsched.listing.efficiency import efficiency_line
from hpcsched.listing.jobs import energy_text
from hpcsched.listing.overview import takes_jobs, totals, troubles
from hpcsched.listing.text import clean, date_text, output_text
from hpcsched.metrics.usage_report import HOUR_S, Period, UsageRow, total_of, usage_rows
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.tariff import PeriodPrices
from hpcsched.model.units import format_mem, format_time_s

ACTIVE = "PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING"
ON_NODES = "CONFIGURING,RUNNING,SUSPENDED,COMPLETING"
ROWS = 100  # jobs on a page of the list
FIRST_ROWS = 20  # ... on the overview
NODE_ROWS = 200  # nodes on a page of the list
SCHEDULE_ROWS = 60  # of the schedule: more nodes than this are shown only if they have bars
STEP_ROWS = 50  # on the page of a job
MAX_BARS = 500
MAX_LOG_BYTES = 64 << 10
REPLICA_ROWS = 500
USED_ROWS, USED_DAYS = 200, 30
RANGES = {"1h": 3600.0, "1d": 86_400.0, "30d": 2_592_000.0}
SCHEDULE_S = 86_400.0
FILTERS = ("user", "name", "partition", "account", "state")
# Of a job: title, unit, series. Bytes are counted each second.
JOB_CHARTS = (
    ("CPUs in use", "", "job_cpu_seconds_total"),
    ("Memory", "bytes", "job_memory_bytes"),
    ("GPU utilization", "of 1", "job_gpu_utilization_ratio"),
    ("Read from disks", "bytes/s", "job_read_bytes_total"),
    ("Written to disks", "bytes/s", "job_written_bytes_total"),
    ("Training loss", "", "job_training_loss"),
)
NODE_CHARTS = (
    ("Time of the CPUs by mode", "CPUs", "node_cpu_seconds_total"),
    ("Load", "", "node_load1"),
    ("Memory available", "bytes", "node_memory_available_bytes"),
    ("GPU utilization", "of 1", "gpu_utilization_ratio"),
    ("GPU temperature", "°C", "gpu_temperature_celsius"),
    ("Network, received", "bytes/s", "node_network_receive_bytes_total"),
)


class Pages:
    """The pages that show the cluster, and with them the routes of all pages."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[Route]:
        """Return the routes of all pages for the ASGI application."""
        shared: dict[str, Page] = {
            "/": self.overview,
            "/jobs": self.jobs,
            "/job/{job}": self.job,
            "/nodes": self.nodes,
            "/node/{node}": self.node,
            "/queue": self.queue,
            "/services": self.services,
            "/use": self.use,
        }
        pages: dict[str, Page] = {"/job/{job}/log": self.log, "/use/report": self.report}
        others = (WorkPages(self._site), AdminPages(self._site))
        routes = [route for one in others for route in one.routes()]
        own = self._site.own_routes()
        return [*self._site.shared_routes(shared), *self._site.routes(pages), *routes, *own]

    # ----- pages

    async def overview(self, request: Request) -> Response:
        """Show whether the cluster is healthy, what runs, what waits, and what is wrong."""
        found = await self._site.load(
            request,
            {
                "nodes": "/v1/nodes",
                "running": _jobs_path(state=ON_NODES, limit=FIRST_ROWS),
                "waiting": _jobs_path(state="PENDING", limit=FIRST_ROWS),
            },
            {"slow": "/v1/slow"},
        )
        nodes = found["nodes"]["nodes"]
        found["totals"] = totals(nodes)
        found["troubles"] = troubles(found["ping"], nodes)
        return self._site.page(request, "overview.html", found)

    async def jobs(self, request: Request) -> Response:
        """List jobs, arrays folded, with filters."""
        given = query_of(request, (*FILTERS, "cursor"))
        filters = {name: given[name] for name in FILTERS if given[name]}
        query = {"state": ACTIVE, **filters, "limit": ROWS}
        if given["cursor"]:
            query["after"] = given["cursor"]
        found = await self._site.load(request, {"jobs": _jobs_path(**query)})
        after = found["jobs"].get("next_cursor")
        found["next"] = f"/jobs?{urlencode({**filters, 'cursor': after})}" if after else ""
        return self._site.page(request, "jobs.html", {**found, "filters": {name: given[name] for name in FILTERS}})

    async def job(self, request: Request) -> Response:
        """Show a job: why it waits, what it uses, its history, output and script."""
        name = quote(request.path_params["job"], safe="")
        range_s = _range(request)
        listed = await self._site.load(
            request,
            {
                "tasks": _jobs_path(id=request.path_params["job"], limit=ROWS, fold=0),
                "groups": _jobs_path(id=request.path_params["job"], limit=ROWS),
            },
        )
        count = sum(group["folded"]["count"] for group in listed["groups"]["jobs"])
        first = listed["tasks"]["jobs"][0]["display_id"]
        shown = await self._site.load(request, {"answer": f"/v1/job/{quote(first, safe='')}"}, None, listed)
        job = shown["answer"]["jobs"][0]
        target = quote(str(job["id"]), safe="")
        from_s = max(job["started_at_s"] or 0.0, shown["now_s"] - range_s) if job["started_at_s"] else 0.0
        more: dict[str, str] = {}
        if count == 1:
            more["story"] = f"/v1/job/{name}/story"
        if job["state"] == "PENDING":
            more["why"] = f"/v1/job/{name}/why"
        if job["state"] == "RUNNING" and count == 1:
            more["slow"] = f"/v1/job/{name}/slow"
        if job["started_at_s"]:
            more["past"] = f"/v1/history?{urlencode({'id': target, 'energy': 1, 'limit': ROWS})}"
            more["config"] = "/v1/config"
            to_s = job["ended_at_s"] or shown["now_s"]
            more["history"] = _history_path(target, [one[2] for one in JOB_CHARTS], from_s, max(to_s, from_s + 60))
        found = await self._site.load(request, {}, more, shown)
        found = {**dict.fromkeys(("why", "slow", "story", "history", "past", "config")), **found}
        return self._site.page(
            request,
            "job.html",
            {
                **found,
                "job": job,
                "count": count,
                "charts": charts_of(found["history"], JOB_CHARTS),
                "range": request.query_params.get("range", "1h"),
                "ranges": list(RANGES),
                "actions": actions_for(
                    job, str(job["array_job_id"]) if count > 1 else job["display_id"], found["me"]["actions"]
                ),
                "facts": [*facts_of(job), *use_facts_of(job, _past_of(job, found["past"]), found["config"])],
                "steps": steps_of(_past_of(job, found["past"])) if count == 1 else [],
            },
        )

    async def log(self, request: Request) -> Response:
        """Show the end of a job's output."""
        name = request.path_params["job"]
        stream = request.query_params.get("stream", "out")
        if stream not in ("out", "err"):
            raise ProblemError(400, "cannot show output: stream is out or err")
        query = urlencode({"job": name, "stream": stream, "offset": -MAX_LOG_BYTES, "limit": MAX_LOG_BYTES})
        found = await self._site.load(request, {"answer": _jobs_path(id=name, limit=1)})
        reply = await self._site.app.forward(request, "GET", f"/v1/log?{query}")
        if reply.status != 200:
            raise ProblemError(reply.status, str(json.loads(reply.body)["error"]))
        text = output_text(reply.body.decode("utf-8", "replace"))
        end = reply.headers.get("x-offset", "0")
        offset = int(end) + len(reply.body)  # int: of our own controller
        values = {**found, "job": found["answer"]["jobs"][0], "text": text, "stream": stream, "offset": offset}
        return self._site.page(request, "log.html", values)

    async def nodes(self, request: Request) -> Response:
        """List the nodes, with filters."""
        given = query_of(request, ("name", "state", "after"))
        found = await self._site.load(request, {"nodes": "/v1/nodes"})
        everything = found["nodes"]["nodes"]
        wanted = {"": (True, False), "up": (True,), "trouble": (False,)}.get(given["state"])
        if wanted is None:
            raise ProblemError(400, "cannot show those nodes: state is up or trouble")
        matching = [node for node in everything if given["name"] in node["name"] and takes_jobs(node) in wanted]
        first = next((at for at, node in enumerate(matching, 1) if node["name"] == given["after"]), 0)
        rows = matching[first : first + NODE_ROWS]
        more = {"name": given["name"], "state": given["state"], "after": rows[-1]["name"]} if rows else {}
        is_last = first + NODE_ROWS >= len(matching)
        values = {"rows": rows, "given": given, "next": "" if is_last else f"/nodes?{urlencode(more)}"}
        return self._site.page(request, "nodes.html", {**found, **values, "totals": totals(everything)})

    async def node(self, request: Request) -> Response:
        """Show a node: its state, jobs, resources and use."""
        name = request.path_params["node"]
        range_s = _range(request)
        found = await self._site.load(request, {"nodes": "/v1/nodes"})
        node = next((one for one in found["nodes"]["nodes"] if one["name"] == name), None)
        if node is None:
            raise ProblemError(404, f"cannot find node {name[:100]!r}")
        path = _history_path(
            quote(name, safe=""), [one[2] for one in NODE_CHARTS], found["now_s"] - range_s, found["now_s"]
        )
        wanted = {"history": path, "jobs": _jobs_path(state=ON_NODES, nodes=name)}
        more = await self._site.load(request, {}, wanted, found)
        return self._site.page(
            request,
            "node.html",
            {
                **more,
                "node": node,
                "charts": charts_of(more["history"], NODE_CHARTS),
                "range": request.query_params.get("range", "1h"),
                "ranges": list(RANGES),
            },
        )

    async def queue(self, request: Request) -> Response:
        """Show what runs and what is expected to start in the next day, on each node."""
        found = await self._site.load(
            request,
            {
                "nodes": "/v1/nodes",
                "running": _jobs_path(state=ON_NODES, limit=MAX_BARS, fold=0),
                "waiting": _jobs_path(state="PENDING", limit=ROWS),
                "reservations": "/v1/reservations",
            },
        )
        from_s, to_s = found["now_s"] - SCHEDULE_S / 24, found["now_s"] + SCHEDULE_S
        names = [node["name"] for node in found["nodes"]["nodes"]]
        bars = bars_of(found["running"]["jobs"], found["reservations"]["reservations"], to_s)
        rows = rows_of_schedule(names, bars)
        expected, later = expected_starts(found["waiting"]["jobs"], to_s)
        drawing = schedule([*rows, *(bar.row for bar in expected)], [*bars, *expected], from_s, to_s)
        values = {"drawing": drawing, "later": later, "left_out": len(names) - len(rows)}
        return self._site.page(request, "queue.html", {**found, **values})

    async def services(self, request: Request) -> Response:
        """Show served models, their replicas and what users asked, with what the session may do."""
        query_of(request, ())
        wanted = {"usage": f"/v1/services/usage?days={USED_DAYS}"}
        found = await self._site.load(request, {"answer": "/v1/services"}, wanted)
        rows = found.pop("answer")["services"]
        replicas = [(service["name"], one) for service in rows for one in service["replicas"]]
        values = {"rows": rows, "replicas": replicas[:REPLICA_ROWS], "left_out": len(replicas) - REPLICA_ROWS}
        values |= {"used": used_rows((found["usage"] or {}).get("usage", ())), "days": USED_DAYS}
        values |= {verb: [one["name"] for one in rows if verb in one["may"]] for verb in ("scale", "roll")}
        return self._site.page(request, "services.html", {**found, **values})

    async def use(self, request: Request) -> Response:
        """Show shares and usage of accounts and users."""
        return self._site.page(request, "use.html", await self._site.load(request, {"shares": "/v1/shares"}))

    async def report(self, request: Request) -> Response:
        """Show what users, accounts, partitions or nodes used and wasted in a month; also as CSV."""
        given = query_of(request, ("by", "month", "format"))
        by, month = given["by"] or REPORTED[0], given["month"] or MONTHS[0]
        if by not in REPORTED or month not in MONTHS or given["format"] not in ("", "csv"):
            raise ProblemError(
                400, f"cannot report that: by {', '.join(REPORTED)}; month {', '.join(MONTHS)}; format csv"
            )
        found = await self._site.load(request, {})
        period = month_of(found["now_s"], month)
        times = {"start_s": max(0.0, period.start_s), "end_s": max(0.0, period.until_s)}
        found = await self._site.load(request, {"tariff": f"/v1/tariff?{urlencode(times)}"}, None, found)
        query = {"attempts": 1, "energy": 1, "start_s": period.start_s, "end_s": period.end_s}
        jobs, is_whole = await self._site.history(request, found, query, MAX_REPORTED)
        prices = PeriodPrices.read(found["tariff"])
        rows = usage_rows(jobs, [period], (by,), None, prices.energy)
        if given["format"]:
            return csv_answer(request, by, rows, prices, f"use-{period.name}-{by}.csv")
        columns = [one for one in USE_COLUMNS if any(one.value(row, prices) is not None for row in rows)]
        values = {"by": by, "month": month, "bys": REPORTED, "months": MONTHS, "is_whole": is_whole, "period": period}
        values |= {"titles": [one.title.format(currency=prices.currency) for one in columns]}
        values |= {"rows": [(row.key[0], [one.shown(row, prices) for one in columns]) for row in rows]}
        values |= {"total": [one.shown(total_of(rows), prices) for one in columns] if rows else []}
        return self._site.page(request, "report.html", {**found, **values})


# ----- the report


REPORTED = ("user", "account", "partition", "node")
MONTHS = ("this", "last")
MAX_REPORTED = 5000  # jobs


class UseColumn(NamedTuple):
    """A column of the report, of a row and the prices of the period.

    `value`: None if it is not known; `shape`: how it is written.
    """

    title: str
    name: str
    value: Callable[[UsageRow, PeriodPrices], float | None]
    shape: str = "{:,.1f}"

    def shown(self, row: UsageRow, prices: PeriodPrices) -> str:
        """Return the value as the page has it."""
        value = self.value(row, prices)
        return "" if value is None else format_time_s(value) if self.shape == "time" else self.shape.format(value)


def _priced(row: UsageRow, prices: PeriodPrices) -> float | None:
    return row.cost(prices.cpu_hour, prices.gpu_hour) if prices else None


USE_COLUMNS = (
    UseColumn("Jobs", "jobs", lambda row, _: len(row.jobs), "{:,}"),
    UseColumn("CPU hours", "cpu_hours", lambda row, _: row.cpu_s / HOUR_S),
    UseColumn("GPU hours", "gpu_hours", lambda row, _: row.gpu_s / HOUR_S),
    UseColumn("Mean wait", "mean_wait_s", lambda row, _: row.mean_wait_s, "time"),
    UseColumn("Unused CPU hours", "unused_cpu_hours",
              lambda row, _: None if row.unused_cpu_s is None else row.unused_cpu_s / HOUR_S),
    UseColumn("Failed and requeued", "lost_cpu_hours", lambda row, _: (row.failed_cpu_s + row.requeued_cpu_s) / HOUR_S),
    UseColumn("kWh", "kwh", lambda row, _: None if row.joules is None else row.joules / 3.6e6),
    UseColumn("{currency}", "cost", _priced, "{:,.2f}"),
)  # fmt: skip


def month_of(now_s: float, which: str) -> Period:
    """Return this month so far, or the last one, in local time."""
    now = datetime.fromtimestamp(now_s)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    if which == "this":
        return Period(first.timestamp(), now_s, now_s, first.strftime("%Y-%m"))
    before = (first - timedelta(days=1)).replace(day=1)
    return Period(before.timestamp(), first.timestamp(), now_s, before.strftime("%Y-%m"))


def csv_answer(request: Request, by: str, rows: Sequence[UsageRow], prices: PeriodPrices, name: str) -> Response:
    """Return the report as a file; no text in it is a formula for spreadsheets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([by, *(one.name for one in USE_COLUMNS)])
    for row in rows:
        key, values = clean(row.key[0]), [one.value(row, prices) for one in USE_COLUMNS]
        key = f"'{key}" if key.startswith(("=", "+", "-", "@")) else key
        writer.writerow([key, *("" if value is None else f"{value:.10g}" for value in values)])
    headers = {**PAGE_HEADERS, "content-disposition": f'attachment; filename="{name}"'}
    return packed(request, text.getvalue().encode("utf-8", "replace"), "text/csv; charset=utf-8", headers)


# ----- what the pages show


def charts_of(history: Json | None, wanted: Sequence[tuple[str, str, str]]) -> list[Chart]:
    """Return the charts of the series that have values."""
    found = []
    for title, unit, name in wanted:
        lines = [
            (_label(series), series["values"])
            for series in (history or {}).get("series", ())
            if series["name"] == name and any(value is not None for value in series["values"])
        ]
        if history is not None and lines:
            found.append(
                Chart(title=title, unit=unit, from_s=history["from_s"], step_s=history["step_s"], lines=lines[:12])
            )
    return found


def used_rows(usage: Sequence[Json]) -> list[tuple[str, str, str, Json]]:
    """Return service, user, account and sums of what the user asked of the service."""
    kinds = ("requests", "prompt_tokens", "completion_tokens", "charged_s")
    sums: dict[tuple[str, str, str], Json] = {}
    for row in usage:
        total = sums.setdefault((row["service"], row["user"], row["account"]), dict.fromkeys(kinds, 0))
        for kind in kinds:
            total[kind] += row[kind]
    return [(*whose, total) for whose, total in sorted(sums.items())][:USED_ROWS]


def _label(series: Json) -> str:
    return " ".join([series.get("node", ""), *map(str, series["labels"].values())]).strip()


def bars_of(jobs: Sequence[Json], reservations: Sequence[Json], to_s: float) -> list[ScheduleBar]:
    """Return the bars of running jobs and of reservations.

    A job without a time limit has no end.
    """
    found = []
    for reservation in reservations:
        label = f"reservation {reservation['name']}"
        for node in reservation["nodes"]:
            found.append(
                ScheduleBar(
                    row=node, begin_s=reservation["start_s"], end_s=reservation["end_s"], kind="reserved", label=label
                )
            )
    for job in jobs:
        begin_s = job["started_at_s"] or job["allocated_at_s"] or 0.0
        end_s = begin_s + job["time_limit_s"] if job["time_limit_s"] is not None else to_s
        label, link = f"job {job['display_id']} {clean(job['name'])}", f"/job/{quote(job['display_id'], safe='')}"
        for node in job["nodes"]:
            found.append(ScheduleBar(row=node, begin_s=begin_s, end_s=end_s, kind="running", label=label, link=link))
    return found


def expected_starts(jobs: Sequence[Json], to_s: float) -> tuple[list[ScheduleBar], list[Json]]:
    """Return bars of waiting jobs that are expected to start before `to_s`, and the others.

    Each has a line of its own.
    """
    bars, later = [], []
    for job in jobs:
        begin_s = job["expected_start_s"]
        if begin_s is None or begin_s >= to_s:
            later.append(job)
            continue
        name = job["display_id"]
        end_s = begin_s + job["time_limit_s"] if job["time_limit_s"] is not None else to_s
        label, link = f"job {name} is expected to start", f"/job/{quote(name, safe='')}"
        bars.append(
            ScheduleBar(row=f"job {name}", begin_s=begin_s, end_s=end_s, kind="expected", label=label, link=link)
        )
    return bars, later


def rows_of_schedule(names: Sequence[str], bars: Sequence[ScheduleBar]) -> list[str]:
    """Return the nodes to draw: all of a few, else those with bars."""
    busy = {bar.row for bar in bars}
    return list(names if len(names) <= SCHEDULE_ROWS else [name for name in names if name in busy][:NODE_ROWS])


def actions_for(job: Json, name: str, may: Sequence[str]) -> list[Json]:
    """Return the actions of a job that the session may do.

    Each is the API's verb, and the command that it stands for.
    """
    verbs = {
        "PENDING": ("release" if job["hold"] != "none" else "hold", "cancel"),
        "RUNNING": ("suspend", "requeue", "cancel"),
        "SUSPENDED": ("resume", "cancel"),
        "CONFIGURING": ("cancel",),
    }.get(job["state"], ("requeue",) if job["state"] != "COMPLETING" else ())
    verbs = tuple(verb for verb in verbs if {"resume": "suspend"}.get(verb, verb) in may)
    commands = {"cancel": "hcancel"}
    return [{"verb": verb, "command": f"{commands.get(verb, 'hctl ' + verb)} {name}", "job": name} for verb in verbs]


def facts_of(job: Json) -> list[tuple[str, str]]:
    """Return the facts of a job with their names; those that are not known are left out."""
    facts = [
        ("User", f"{job['user']} ({job['account']})" if job["account"] else job["user"]),
        ("Partition", job["partition"]),
        ("QOS", job["qos"]),
        ("Nodes", f"{job['num_nodes']}: {job['node_list']}" if job["node_list"] else str(job["num_nodes"])),
        ("CPUs", str(job["num_cpus"])),
        ("Memory", format_mem(job["mem_mib"]) if job["mem_mib"] else ""),
        ("GPUs", str(job["gpus"]) if job["gpus"] else ""),
        ("Submitted", date_text(job["submitted_at_s"])),
        ("Started", date_text(job["started_at_s"]) if job["started_at_s"] else ""),
        ("Ended", date_text(job["ended_at_s"]) if job["ended_at_s"] else ""),
        ("Run time", format_time_s(job["elapsed_s"])),
        ("Time limit", format_time_s(job["time_limit_s"])),
        ("Exit code", "" if job["exit_code"] is None else f"{job['exit_code']}:{job['exit_signal'] or 0}"),
        ("Attempt", str(job["attempt"]) if job["attempt"] else ""),
        ("Dependency", job["dependency"] or ""),
        ("Reservation", job["reservation"] or ""),
        ("Directory", job["work_dir"] or ""),
        ("Output", job["stdout"] or ""),
        ("Errors", job["stderr"] if job["stderr"] != job["stdout"] else ""),
        ("Command", job["submit_line"] or ""),
        ("Comment", job["comment"] or ""),
    ]
    return [(name, value) for name, value in facts if value]


def _past_of(job: Json, past: Json | None) -> Json | None:
    """Return the job as the history has it; None: it is not there."""
    return next((one for one in (past or {}).get("jobs", ()) if one["id"] == job["id"]), None)


def steps_of(view: Json | None) -> list[Json]:
    """Return the steps of a job of the history, the last ones last."""
    steps = (view or {}).get("steps") or []
    return [step | {"node_list": compress_hostlist(step["nodes"]), **_used_by(step)} for step in steps[-STEP_ROWS:]]


def _used_by(step: Json) -> dict[str, str]:
    """Return the times, memory and exit of a step as texts; "": not known yet."""
    is_measured, kib, code = step["cpu_user_s"] is not None, step["max_rss_kib"], step["exit_code"]
    return {
        "cpu_time": format_time_s(step["cpu_user_s"] + (step["cpu_system_s"] or 0.0)) if is_measured else "",
        "memory": format_mem(round(kib / 1024)) if kib else "",
        "exit": "" if code is None else f"{code}:{step['exit_signal'] or 0}",
    }


def use_facts_of(job: Json, view: Json | None, config: Json | None) -> list[tuple[str, str]]:
    """Return the efficiency, the energy and, if there are prices, the price of a job."""
    if view is None:
        return []
    uses, cost = view.get("energy") or [], (config or {}).get("cost", {})
    hours = job["elapsed_s"] / HOUR_S
    price = hours * (job["num_cpus"] * cost.get("cpu_hour", 0) + job["gpus"] * cost.get("gpu_hour", 0))
    facts = [("Efficiency", efficiency_line(view))]
    facts += [("Energy", energy_text(uses, cost.get("currency", ""), job))] if uses else []
    facts += [(f"Price of attempt {job['attempt']}", f"{price:.2f} {cost.get('currency', '')}")] if price else []
    return [(name, value) for name, value in facts if value]


# ----- requests


def _range(request: Request) -> float:
    name = request.query_params.get("range", "1h")
    if name not in RANGES:
        raise ProblemError(400, f"cannot show that range: there are {', '.join(RANGES)}")
    return RANGES[name]


def _jobs_path(**query: object) -> str:
    return "/v1/jobs?" + urlencode({"fold": 1, **query})


def _history_path(target: str, series: Sequence[str], from_s: float, to_s: float) -> str:
    """Return the path of the values of those series that the target has."""
    return f"/v1/metrics/history?target={target}&" + urlencode(
        {"series": ",".join(series), "from_s": f"{from_s:.3f}", "to_s": f"{to_s:.3f}", "known_only": 1}
    )
