"""The web pages for those who run the cluster: administration, alerts, the network, plans.

The controller decides who may do what; the pages offer what it says that the session may do. What fits is computed here, from
the memory of the nodes.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hpcsched.errors import RequestError
from hpcsched.gateway.app import ProblemError
from hpcsched.gateway.site import Json, Site, query_of
from hpcsched.listing.overview import worst_first
from hpcsched.metrics.links import MOST_LINKED, LinkRun, ends, last_runs, link_findings, link_from_json
from hpcsched.model.node import PartitionState
from hpcsched.model.units import number, parse_mem_mib, whole_number
from hpcsched.planner import memory
from hpcsched.planner.capacity import DAY_S, DRAWS, HISTORY_DAYS, WARM_DAYS, PlanNodes, replayed
from hpcsched.planner.fits import fit_on, need_of, setting_of, size_text, together, verb_of
from hpcsched.planner.worth import (
    MOST_PRICE,
    UNKNOWN,
    Past,
    Prices,
    added_nodes,
    bands_of,
    cost_lines,
    costs_of,
    days_ahead,
    forecast_lines,
    hours_text,
    instead_of,
    past_of,
    replay_sentences,
)
from hpcsched.sched.snapshot import snapshot_from_json

SILENCES = (("2h", 7200.0), ("1d", DAY_S))
NODE_ROWS = 200  # of the table of nodes, the drained ones first
ACTIONS = ("drain", "update-partition", "reserve")
MAX_CONFIG_CHARS = 20_000
USUAL_DAYS, MAX_DAYS = 28, 92  # to replay
MAX_REPLAYED = 5000  # jobs of a replay
LEAST_DRAWS, MOST_DRAWN = 10, 200_000  # draws of a forecast, and jobs in all of them
SEED = 1  # as of the command
LEVELS = 5  # of a link's rate, each in a colour of its own
# Of the form: name, title, example, and the least and the greatest value of a number.
MODEL_FIELDS = (
    ("params", "Parameters", "7B", 0, 0),
    ("layers", "Layers", "32", 0, memory.MOST),
    ("hidden", "Hidden size", "4096", 0, memory.MOST),
    ("heads", "Heads", "32", 0, memory.MOST),
    ("kv_heads", "Key-value heads", "8", 0, memory.MOST),
    ("vocab", "Vocabulary", "32000", 0, memory.MOST),
    ("ffn", "Feed-forward size", "11008", 0, memory.MOST),
)
USE_FIELDS = (
    ("batch", "Sequences at a time", "1", 1, 10**5),
    ("sequence", "Tokens of a sequence", "1024", 1, 10**6),
    ("streams", "Conversations at a time", "1", 1, 10**5),
    ("context", "Tokens of a conversation", "4096", 1, 10**7),
)
CHOICES = (
    ("use", "To", ("train", "serve")),
    ("dtype", "Weights", ("", *sorted(memory.BYTES))),
    ("optimizer", "Optimizer", ("adamw", *sorted(set(memory.OPTIMIZERS) - {"adamw"}))),
)
PRICES = (
    ("price", "Price of all of them", "2400"),
    ("watts", "Watts under load", "450"),
    ("kwh", "Price of a kWh", "0.30"),
    ("cloud", "Price of an hour elsewhere", "1.10"),
)
FLAGS = (("recompute", "Recompute activations"), ("zero", "Divide the optimizer among the nodes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCell:
    """A pair of nodes in the matrix. `level`: 0 for the slowest rates; -1: not measured."""

    level: int = -1
    text: str = ""
    title: str = ""


class AdminPages:
    """The pages for those who run the cluster."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._replays = ThreadPoolExecutor(1, thread_name_prefix="replay")
        self._replay: Future[Json] | None = None

    def routes(self) -> list[Route]:
        """Return the routes for the ASGI application."""
        return self._site.routes(
            {
                "/admin": self.admin,
                "/alerts": self.alerts,
                "/network": self.network,
                "/plan": self.plan,
                "/plan/worth": self.worth,
            }
        )

    async def admin(self, request: Request) -> Response:
        """Show nodes, partitions and reservations with what the session may do to them."""
        query_of(request, ())
        needed = {"nodes": "/v1/nodes", "partitions": "/v1/partitions", "reservations": "/v1/reservations"}
        found = await self._site.load(request, needed)
        may = {name: name in found["me"]["actions"] for name in ACTIONS}
        rows = sorted(found["nodes"]["nodes"], key=lambda node: not node["drained"])
        values: Json = {"may": may, "states": [one.value for one in PartitionState], "rows": rows[:NODE_ROWS]}
        return self._site.page(request, "admin.html", {**found, **values, "left_out": len(rows) - NODE_ROWS})

    async def alerts(self, request: Request) -> Response:
        """Show what is wrong now, and for those who may silence: silences and receivers."""
        query_of(request, ())
        found = await self._site.load(request, {"answer": "/v1/alerts"})
        answer = found.pop("answer")
        values: Json = {name: answer[name] for name in ("now_s", "left_out", "silences", "receivers")}
        values |= {"rows": alert_rows(answer), "may_silence": "silence" in found["me"]["actions"]}
        return self._site.page(request, "alerts.html", {**found, **values})

    async def network(self, request: Request) -> Response:
        """Show the measured links between nodes as a matrix."""
        query_of(request, ())
        found = await self._site.load(request, {"nodes": "/v1/nodes", "links": "/v1/links"})
        runs = [link_from_json(one) for one in found["links"]["links"]]
        latest = last_runs(runs)
        shown = list(latest.values())
        earlier = [run for run in runs if latest[frozenset(run.pair)] is not run]
        measured = {name for pair in latest for name in pair}
        names = [node["name"] for node in found["nodes"]["nodes"] if node["name"] in measured][:MOST_LINKED]
        values = {
            "names": names,
            "rows": matrix_of(names, latest),
            "kinds": {name: end.kind for name, end in ends(shown).items()},
            "findings": list(link_findings(shown, earlier))[:50],
            "measured_at_s": max((run.at_s for run in shown), default=0.0),
        }
        return self._site.page(request, "network.html", {**found, **values})

    async def plan(self, request: Request) -> Response:
        """Show on which nodes a model fits."""
        given = plan_query(request.query_params)
        found = await self._site.load(request, {"nodes": "/v1/nodes"})
        values: Json = {"given": given, "fields": MODEL_FIELDS, "uses": USE_FIELDS, "choices": CHOICES, "flags": FLAGS}
        values |= {"answer": None, "why": "", "command": ""}
        if any(given[name] for name in ("config", "params", "layers", "hidden")):
            values["command"] = plan_command(given)
            try:
                values["answer"] = fits_of(given, found["nodes"]["nodes"])
            except RequestError as error:
                values["why"] = str(error)
        return self._site.page(request, "plan.html", {**found, **values})

    async def worth(self, request: Request) -> Response:
        """Show what other machines would be worth: the past again, the weeks ahead, and costs."""
        given = query_of(request, ("add", "partition", "days", *(name for name, _, _ in PRICES)))
        found = await self._site.load(request, {})
        days = min(max(_whole(given["days"] or str(USUAL_DAYS), "days"), 1), MAX_DAYS)
        values: Json = {
            "given": given | {"days": str(days)},
            "prices": PRICES,
            "answer": None,
            "why": "",
            "command": "",
        }
        if given["add"]:
            valued = [f"--{name}={given[name]}" for name in ("partition", *(one[0] for one in PRICES)) if given[name]]
            values["command"] = shlex.join(
                ["hpcsched", "plan", "worth", "--add", given["add"], "--days", str(days), *valued]
            )
            try:
                prices = prices_of(given)
                past, is_whole = await self._past(request, found, days)
                new = added_nodes(given["add"].split(","), past, given["partition"] or None)
            except RequestError as error:
                values["why"] = str(error)
            else:
                values["answer"] = await self._replayed(past, new, days, prices) | {"is_whole": is_whole}
        return self._site.page(request, "worth.html", {**found, **values})

    async def _past(self, request: Request, found: Json, days: int) -> tuple[Past, bool]:
        """Return the cluster's past, and whether all jobs are in it. Raises ProblemError."""
        shown = await self._site.load(request, {"snapshot": "/v1/snapshot"}, None, found)
        snapshot = snapshot_from_json(shown["snapshot"]["snapshot"])[0]
        since_s = snapshot.now_s - (max(days, HISTORY_DAYS) + WARM_DAYS) * DAY_S
        views, is_whole = await self._site.history(request, found, {"start_s": since_s}, MAX_REPLAYED)
        return past_of(snapshot, views), is_whole

    async def _replayed(self, past: Past, new: PlanNodes, days: int, prices: Prices) -> Json:
        """Return the replay and the forecast, computed in a thread.

        One at a time. Raises ProblemError.
        """
        if self._replay is not None and not self._replay.done():
            raise ProblemError(
                503, "cannot compute now: another replay is being computed; ask again", {"retry-after": "5"}
            )
        self._replay = self._replays.submit(worth_of, past, new, days, prices)
        return await asyncio.wrap_future(self._replay)


# ----- alerts


def alert_rows(answer: Json) -> list[Json]:
    """Return the alerts as the page shows them, the worst first, with silences to offer."""
    rows = []
    for alert in worst_first(answer["alerts"]):
        labels = {"rule": alert["rule"], **alert["labels"]}
        over = alert["phase"] == "resolved"
        rows.append(
            {name: alert[name] for name in ("rule", "severity", "phase", "quiet", "text", "remedy")}
            | {
                "where": ", ".join(alert["labels"].values()),
                "at_s": alert["ended_at_s"] if over else alert["since_s"],
                "buttons": [] if over else list(_silences_of(labels, answer["now_s"])),
            }
        )
    return rows


def _silences_of(labels: Mapping[str, str], now_s: float) -> Iterator[Json]:
    """Yield what silences this alert alone; nothing if a label reads as a pattern or list."""
    if any(set(value) & set("*?[],") for value in labels.values()):
        return
    for text, seconds in SILENCES:
        words = [f"{name}={value}" for name, value in labels.items()]
        yield {
            "text": text,
            "body": {"matchers": dict(labels), "until_s": now_s + seconds, "why": "from the web page"},
            "command": shlex.join(["hctl", "silence", *words, text]),
        }


# ----- the network


def matrix_of(names: Sequence[str], latest: Mapping[frozenset[str], LinkRun]) -> list[tuple[str, list[LinkCell]]]:
    """Return for each node its links to all nodes; the rate is from the node of the line."""
    rates = sorted({round(run.mbps) for run in latest.values() if not run.why})
    best = rates[-1] if rates else 1
    return [
        (name, [_cell(name, other, latest.get(frozenset((name, other))), best) for other in names]) for name in names
    ]


def _cell(name: str, other: str, run: LinkRun | None, best: float) -> LinkCell:
    if run is None or name == other:
        return LinkCell()
    if run.why:
        return LinkCell(text="?", title=f"{name} to {other}: not measured: {run.why}")
    rate = run.to_mbps if name == run.one else run.from_mbps
    title = (
        f"{name} to {other}: {rate:.4g} Mbit/s, round trip {run.rtt_us / 1000:.3g} ms, p99 {run.rtt_p99_us / 1000:.3g}"
    )
    if run.alone_mbps:
        title += f"; {run.alone_mbps:.4g} Mbit/s without others"
    level = min(LEVELS - 1, int(LEVELS * rate / max(best, 1.0)))  # int: a number
    return LinkCell(level=level, text=f"{rate:.4g} / {run.rtt_us / 1000:.2g}", title=title)


# ----- what fits


def plan_query(given: Mapping[str, str]) -> dict[str, str]:
    """Return the form's values, "" for those that are absent. Raises ProblemError."""
    names = [*(one[0] for one in (*MODEL_FIELDS, *USE_FIELDS, *CHOICES, *FLAGS)), "gpu_memory", "config"]
    if unknown := set(given) - set(names):
        raise ProblemError(400, f"cannot plan with {min(unknown)[:40]!r}: the page takes {', '.join(names)}")
    found = {name: given.get(name, "").strip() for name in names}
    if any(len(value) > (MAX_CONFIG_CHARS if name == "config" else 200) for name, value in found.items()):
        raise ProblemError(400, "cannot plan: a value is too long")
    for name, _, known in CHOICES:
        if found[name] and found[name] not in known:
            raise ProblemError(
                400, f"cannot plan with {name}={found[name][:40]}: there are {', '.join(filter(None, known))}"
            )
    return found


def options_of(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `hpcsched plan fits` that the form means. Raises RequestError."""
    options: dict[str, Any] = {"params": given["params"], "serve": given["use"] == "serve"}
    options |= {"dtype": given["dtype"] or None, "optimizer": given["optimizer"] or "adamw"}
    options |= {name: bool(given[name]) for name, _ in FLAGS}
    for name, title, usual, least, most in (*MODEL_FIELDS[1:], *USE_FIELDS):
        value = whole_number(given[name], title) if given[name] else 0 if least == 0 else whole_number(usual, title)
        if not least <= value <= most:
            raise RequestError(f"cannot plan with {title} {value}: it is {least} to {most}")
        options[name] = value
    return options


def fits_of(given: Mapping[str, str], nodes: Sequence[Json]) -> Json:
    """Return on which nodes the model fits. Raises RequestError."""
    options = options_of(given)
    if given["config"]:
        if any(given[name] for name, *_ in MODEL_FIELDS):
            raise RequestError("cannot tell which model: give its configuration, or its numbers, not both")
        model = memory.read_config(given["config"], "the model")
    else:
        model = memory.model_from_numbers(**{name: options[name] for name, *_ in MODEL_FIELDS})
    rooms = rooms_of(nodes, given["gpu_memory"])
    asked = setting_of(options, len(rooms))
    need = need_of(model, asked)
    return {
        "params": model.params,
        "verb": verb_of(asked),
        "need": size_text(need.total),
        "parts": [(name, size_text(size)) for name, size in need.parts.items() if size >= memory.MIB],
        "nodes": [fit_on(model, asked, name, room, len(rooms)) for name, room in rooms],
        "together": together(need, asked, rooms)["words"],
    }


def rooms_of(nodes: Sequence[Json], gpu_memory: str) -> list[tuple[str, int]]:
    """Return the memory of each node in MiB: of its GPUs if sizes of their types are given.

    Raises RequestError.
    """
    if not gpu_memory:
        return [(node["name"], node["mem_mib"]) for node in nodes]
    sizes = {}
    for word in filter(None, gpu_memory.split(",")):
        kind, _, size = word.partition("=")
        sizes[kind.strip().lower()] = parse_mem_mib(size)
    found = []
    for node in nodes:
        kinds = [str(gpu["type"]).lower() for gpu in node["gpus"]]
        if kinds and kinds[0] in sizes:
            found.append((node["name"], sizes[kinds[0]] * len(kinds)))
    if not found:
        raise RequestError(f"cannot find a GPU of type {', '.join(sizes)[:60]}: the nodes' pages show their GPUs")
    return found


def prices_of(given: Mapping[str, str]) -> Prices:
    """Return the prices of the form. Raises RequestError."""
    found = {name: number(given[name], title.lower()) for name, title, _ in PRICES if given[name]}
    for name, title, _ in PRICES:
        if not 0 <= found.get(name, 0) <= MOST_PRICE:
            raise RequestError(f"cannot compute with {title.lower()} {found[name]:g}: it is 0 to {MOST_PRICE:.0f}")
    return Prices(**found)


def worth_of(past: Past, new: PlanNodes, days: int, prices: Prices) -> Json:
    """Return the last days and the days ahead with more machines, costs, and waits of users."""
    span, more = (past.now_s - days * DAY_S, past.now_s), (*past.machines, *new)
    now, then = (replayed(machines, past.jobs, *span) for machines in (past.machines, more))
    if not now.waits.jobs:
        nothing = f"No job was submitted in the last {days} days: nothing to replay."
        return {"sentences": [nothing], "forecast": [], "costs": [], "bands": [], "rows": [], "instead": []}
    draws = draws_of(len(past.jobs), past.whole_days, days)
    drawn = days_ahead((past.machines, more), past, days, draws, SEED)
    answer: Json = {"days": days}
    if drawn is not None:
        answer["ahead"] = {"draws": draws, "now": bands_of(drawn, 0), "with": bands_of(drawn, 1)}
    worst = sorted(now.by_user.items(), key=lambda item: -item[1].total_s)[:10]
    rows = [(user, waits.jobs, hours_text(waits.mean_s), hours_text(then.by_user[user].mean_s)) for user, waits in worst
            if user in then.by_user]  # fmt: skip
    return {
        "sentences": [*replay_sentences(days, now, then), UNKNOWN],
        "forecast": forecast_lines(answer, past),
        "bands": band_rows(answer["ahead"]) if "ahead" in answer else [],
        "costs": cost_lines(costs_of(now, then, new, days, prices)),
        "rows": rows,
        "instead": [each["text"] for each in instead_of(past, span, now)],
    }


def draws_of(jobs: int, whole_days: int, days: int) -> int:
    """Return the number of draws of a forecast: fewer than the command's for many jobs."""
    jobs_of_a_draw = jobs / max(1, whole_days) * (days + WARM_DAYS)
    return int(max(LEAST_DRAWS, min(DRAWS, MOST_DRAWN / max(1.0, 2 * jobs_of_a_draw))))


def band_rows(ahead: Json) -> list[list[str]]:
    """Return the forecast as rows: a name, then median, low and high without and with more."""

    def row(title: str, name: str, text: Callable[[float], str]) -> list[str]:
        bands = [ahead[which][name] for which in ("now", "with")]
        return [title, *(text(band[part]) for band in bands for part in ("median", "low", "high"))]

    rows = [row("Mean wait", "wait_mean_s", hours_text), row("Use of CPUs", "utilization", "{:.0%}".format)]
    if ahead["with"]["gpu_utilization"]["high"]:
        rows += [row("Mean wait of GPU jobs", "gpu_wait_mean_s", hours_text)]
        rows += [row("Use of GPUs", "gpu_utilization", "{:.0%}".format)]
    return rows


def _whole(text: str, what: str) -> int:
    """Return a whole number. Raises ProblemError."""
    try:
        return whole_number(text, what)
    except RequestError as error:
        raise ProblemError(400, str(error)) from None


def plan_command(given: Mapping[str, str]) -> str:
    """Return the command that the form stands for."""
    words = ["hpcsched", "plan", "fits"]
    words += ["--serve"] if given["use"] == "serve" else []
    words += [f"--{name}" for name, _ in FLAGS if given[name]]
    valued = [one[0] for one in (*MODEL_FIELDS, *USE_FIELDS)] + ["dtype", "optimizer", "gpu_memory"]
    words += [f"--{name.replace('_', '-')}={given[name]}" for name in valued if given[name]]
    return shlex.join([*words, *(["config.json"] if given["config"] else [])])
