"""The web pages, made from answers of a real controller without a network."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from jobs import T0, spec
from starlette.routing import Route
from starlette.testclient import TestClient
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcsched.auth.authorize import Identity
from hpcsched.controller.requests import services, submission
from hpcsched.errors import HpcschedError, NotFoundError, UnavailableError
from hpcsched.gateway.admin import draws_of
from hpcsched.gateway.app import COOKIE, GatewayApp
from hpcsched.gateway.charts import Chart, ScheduleBar, rounded_up, schedule, short
from hpcsched.gateway.pages import Pages, actions_for, expected_starts, month_of
from hpcsched.gateway.site import Site
from hpcsched.gateway.upstream import UpstreamReply
from hpcsched.listing.overview import totals, troubles
from hpcsched.listing.text import output_text
from hpcsched.metrics.links import LinkEnd, LinkRun, failed_run
from hpcsched.model.accounting import ServiceUse
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.ids import NodeName
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import ArraySpec
from hpcsched.sched.replicas import ReplicaLoad, ServiceLoad

SESSIONS: Mapping[str, Identity] = {"anns": ANN, "bobs": BOB, "roots": ROOT}
HISTORY = {
    "from_s": 0.0,
    "step_s": 60.0,
    "series": [
        {"name": "node_load1", "labels": {}, "values": [0.5, None, 1.5]},
        {"name": "job_memory_bytes", "labels": {}, "values": [1e9, 2e9, None]},
    ],
}
COST = {"currency": "EUR", "cpu_hour": 0.0, "gpu_hour": 0.0, "kwh": 0.3, "gco2_per_kwh": 0.0}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "\x1b[31mred",
    "a\u202eb",
    "{{ 7 * 7 }}",
]


def alert(rule: str, severity: str, phase: str = "firing", **labels: str) -> dict[str, Any]:
    texts = {"text": f"{rule} of {labels}", "remedy": "hpcsched doctor n1", "quiet": ""}
    times = {"since_s": T0 - 60, "ended_at_s": T0 - 5 if phase == "resolved" else None}
    return {"rule": rule, "severity": severity, "phase": phase, "labels": labels, **texts, **times}


class Controller:
    """Answers the gateway from a cluster, as the user of the session."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hostile = ""  # what each text of each answer ends with
        self.files: dict[str, str] = {}
        self.file = b"text\n"
        self.sent: list[dict[str, Any]] = []
        self.links: list[LinkRun] = []
        self.alerts: list[dict[str, Any]] | None = [alert("NodeDown", "critical", node="n1")]
        self.history: list[dict[str, Any]] = []
        self.snapshot_at_s: float | None = None  # None: now
        self.log = b"one\n\x1b[31mtwo\x1b[0m\n<b>three</b>\n"
        self.asked: Counter[str] = Counter()  # by path

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", timeout_s: float = 0
    ) -> UpstreamReply:
        identity = SESSIONS.get(headers.get("x-hpcsched-session", ""))
        if identity is None:
            return _error(401, "the session has ended", "UnauthenticatedError")
        parts = urlsplit(path)
        query = dict(parse_qsl(parts.query))
        self.asked[parts.path] += 1
        try:
            answers = self._answers(identity, query) if method == "GET" else self._changes(identity, json.loads(body))
            found = await answers[_route(parts.path)](*_names(parts.path))
        except NotFoundError as error:
            return _error(404, str(error), "NotFoundError")
        except UnavailableError as error:
            return _error(503, str(error), "UnavailableError")
        except HpcschedError as error:
            return _error(400, str(error), type(error).__name__)
        if self.hostile and _route(parts.path) != "snapshot" and not isinstance(found, bytes):
            found = _with_everywhere(json.loads(json.dumps(found)), self.hostile)
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        headers = {
            "x-hpcsched-uid": str(identity.uid),
            "x-offset": query.get("offset", "0").lstrip("-"),
            "x-ended": "1",
        }
        return UpstreamReply(200, headers | {"x-size": str(len(self.file))}, data)

    def _changes(self, identity: Identity, body: dict[str, Any]) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        backend = self.cluster.backend()
        self.sent.append(body)

        async def submitted() -> Any:
            specs = [spec_from_json(one) for one in body["jobs"]]
            return {"jobs": self.cluster.ask(
                lambda tx: submission.submit(tx, identity, body["request_id"], specs, self.cluster.store.request_jobs)
            )}  # fmt: skip

        return {"test": lambda: backend.test(identity, spec_from_json(body["job"])), "submit": submitted}

    async def _snapshot(self, identity: Identity) -> Any:
        answer = await self.cluster.backend().snapshot(identity)
        inner = answer["snapshot"]["snapshot"]
        inner["now_s"] = inner["now_s"] if self.snapshot_at_s is None else self.snapshot_at_s
        return answer

    async def _alerts(self) -> Any:
        if self.alerts is None:
            raise UnavailableError("cannot use alerts: this controller has none")
        silence = {"id": 3, "matchers": [["node", ["n2"]]], "until_s": T0 + 60, "by": "root", "why": "new fan"}
        receiver = {"name": "chat", "kind": "slack", "waiting": 2, "why": "it answers 500", "failing_since_s": T0}
        return {"now_s": T0, "left_out": 0, "alerts": self.alerts, "silences": [silence], "receivers": [receiver]}

    def _listed(self, query: dict[str, str]) -> Any:
        names = sorted(name for name in self.files if name > query.get("after", ""))
        files = [{"name": name, "kind": self.files[name], "size": 5, "at_s": 1e9} for name in names]
        more = {"next": names[2]} if len(names) > 3 else {}
        return {
            "directory": "/home/ann",
            "node": "n1",
            "path": query.get("path", ""),
            "files": files[:3] if more else files,
        } | more

    def _answers(self, identity: Identity, query: dict[str, str]) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        backend = self.cluster.backend()

        async def now(value: Any) -> Any:
            return value

        return {
            "ping": lambda: now(backend.ping(identity)),
            "me": lambda: now(backend.me(identity)),
            "jobs": lambda: backend.jobs(identity, query),
            "job": lambda name: now(backend.job(identity, name)),
            "why": lambda name: backend.why(identity, name),
            "slow": lambda *names: now({"findings": [], "text": "nothing holds it up"}),
            "story": lambda name: now(backend.story(identity, name)),
            "nodes": lambda: backend.nodes(identity, query),
            "partitions": lambda: now(backend.partitions(identity)),
            "reservations": lambda: now(backend.reservations(identity)),
            "alerts": self._alerts,
            "links": lambda: now({"now_s": T0, "links": [asdict(run) for run in self.links]}),
            "services": lambda: now(backend.services(identity)),
            "usage": lambda: now(backend.service_usage(identity, query["days"])),
            "shares": lambda: now(backend.shares(identity)),
            "config": lambda: now(backend.config(identity) | {"cost": COST}),
            "tariff": lambda: now(COST | {"kwh": [[0.0, 0.3]], "gco2_per_kwh": []}),
            "history": lambda: now(HISTORY if "series" in query else {"jobs": self.history}),
            "snapshot": lambda: self._snapshot(identity),
            "log": lambda: now(self.log),
            "files": lambda: now(self._listed(query)),
            "file": lambda: now(
                self.file[int(query["offset"]) :][: int(query["limit"])]
                if "-" not in query["offset"]
                else self.file[int(query["offset"]) :]
            ),
        }


KEPT = frozenset(
    {"state", "link", "power", "kind", "hold", "actions", "may", "next_cursor", "next"}
)  # never a user's text


def _with_everywhere(value: Any, text: str) -> Any:
    """Return the answer with `text` at the end of each text in it, but for words of our own."""
    if isinstance(value, str):
        return value + text
    if isinstance(value, list):
        return [_with_everywhere(one, text) for one in value]
    if isinstance(value, dict):
        return {key: one if key in KEPT else _with_everywhere(one, text) for key, one in value.items()}
    return value


def _route(path: str) -> str:
    return "job" if path.startswith("/v1/job/") and path.count("/") == 3 else path.rpartition("/")[2]


def _names(path: str) -> list[str]:
    return [unquote(path.split("/")[3])] if path.startswith("/v1/job/") else []


def _error(status: int, why: str, kind: str) -> UpstreamReply:
    return UpstreamReply(status, {}, json.dumps({"error": why, "kind": kind}).encode())


class Checker(HTMLParser):
    """Finds elements that are not closed, handlers and styles in attributes, and links to elsewhere."""

    VOID = frozenset({"meta", "link", "input", "br", "line", "polyline", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if (
                name.startswith("on")
                or name == "style"
                or (name in ("href", "src") and (value or "")[:2] in ("//", "ht", "ja"))
            ):
                self.wrong.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("n1", "n2")


@pytest.fixture
def controller(cluster: Cluster) -> Controller:
    return Controller(cluster)


@pytest.fixture
def browser(cluster: Cluster, controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr("hpcsched.gateway.site.SHARED_S", 0.0)  # many tests change what no event tells
    app = GatewayApp(controller, replace(cluster.state.config.gateway, rate=1e6, burst=1e6))  # type: ignore[arg-type]
    client = TestClient(app.asgi(Pages(Site(app)).routes()), base_url="https://head", follow_redirects=False)
    client.cookies.set(COOKIE, "anns")
    with client:
        yield client


def page(browser: TestClient, path: str, status: int = 200) -> str:
    """Return the page, which is well formed and has nothing that its security policy would refuse."""
    answer = browser.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    checker = Checker()
    checker.feed(answer.text)
    assert (checker.wrong, checker.open) == ([], [])
    assert len(set(checker.ids)) == len(checker.ids)
    return answer.text


def words(text: str) -> str:
    """Return the text of a page without its elements, in one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_the_overview_shows_health_resources_and_jobs(cluster: Cluster, browser: TestClient) -> None:
    job = cluster.submit(ANN, name="train")
    cluster.run(job)
    cluster.submit(BOB, name="waits", nodes_min=2, exclusive=True)
    cluster.tick()
    shown = words(page(browser, "/"))
    assert "Healthy: all 2 nodes take jobs" in shown
    assert "1 running, 1 waiting" in shown
    assert f"{job} train ann" in shown
    assert "waits bob" in shown


def test_the_overview_names_what_is_wrong_with_the_command_that_helps(cluster: Cluster, browser: TestClient) -> None:
    cluster.backend()
    cluster.ask(lambda tx: _drain(tx, "n2"))
    shown = words(page(browser, "/"))
    assert "1 problem" in shown
    assert "node n2 is drained: fan is loud hctl resume n2" in shown


def _drain(tx: Any, name: str) -> None:
    from hpcsched.lifecycle.node import NodeDrained

    tx.record_node(NodeDrained(node=name, at_s=tx.now_s, why="fan is loud", by="root"))


def test_a_list_of_jobs_folds_arrays_and_has_pages(cluster: Cluster, browser: TestClient) -> None:
    array = cluster.submit(ANN, array=ArraySpec(indices=tuple(range(500))), hold=True)
    last = [cluster.submit(ANN, name=f"j{number}", hold=True) for number in range(120)][-1]
    first = page(browser, "/jobs")
    assert f"{array}_[0-499]" in words(first)
    assert "×500" in words(first)
    assert first.count("<tr id=") == 100
    assert f'/job/{last}"' not in first
    more = re.search(r'<a href="(/jobs\?[^"]*cursor=[^"]*)" rel="next"', first)
    assert more is not None
    second = page(browser, unescape(more[1]))
    assert f'/job/{last}"' in second
    assert second.count("<tr id=") == 21


def test_a_list_of_jobs_has_filters_and_refuses_others(cluster: Cluster, browser: TestClient) -> None:
    cluster.submit(ANN, name="mine", hold=True)
    cluster.submit(BOB, name="his", hold=True)
    shown = words(page(browser, "/jobs?user=bob"))
    assert "his" in shown
    assert "mine ann" not in shown
    assert "No job matches" in words(page(browser, "/jobs?name=none"))
    assert "cannot show that" in words(page(browser, "/jobs?order=x", 400))
    assert "Invalid job state" in words(page(browser, "/jobs?state=SLEEPING", 400))


def test_a_waiting_job_says_why_and_has_the_actions_of_its_state(cluster: Cluster, browser: TestClient) -> None:
    cluster.run(cluster.submit(ANN, name="blocker"))
    job = cluster.submit(ANN, name="big", nodes_min=2, exclusive=True, comment="for the paper")
    cluster.tick()
    text = page(browser, f"/job/{job}")
    assert "for the paper" in words(text)
    assert f"hcancel {job}" in words(text)
    assert 'data-verb="hold"' in text
    assert 'hidden data-verb="cancel"' in text  # without scripts nothing can be pressed
    assert "submitted by ann" in words(text)


def test_a_large_array_shows_counts_the_first_tasks_and_acts_on_all(cluster: Cluster, browser: TestClient) -> None:
    array = cluster.submit(ANN, array=ArraySpec(indices=tuple(range(500))), hold=True, comment="all of them")
    cluster.submit(ANN, hold=True)
    text = page(browser, f"/job/{array}")
    assert f"Job {array}" in words(text)
    assert "500 tasks" in words(text)
    assert "500 PENDING" in words(text)
    assert "The first 100 are shown" in words(text)
    assert f'data-command="hcancel {array}"' in text
    assert "all of them" in words(text)
    assert "1 tasks" not in words(page(browser, f"/job/{array}_7"))
    assert "Invalid job id" in words(page(browser, "/job/99999", 404))


def test_a_running_job_has_charts_with_a_table_of_the_values(cluster: Cluster, browser: TestClient) -> None:
    job = cluster.submit(ANN, name="train")
    cluster.run(job)
    text = page(browser, f"/job/{job}?range=1d")
    assert "<polyline" in text
    assert "1G" in words(text)
    assert "2G" in words(text)
    assert 'data-verb="requeue"' in text
    assert "cannot show that range" in words(page(browser, f"/job/{job}?range=9y", 400))


def test_a_job_of_another_user_shows_no_private_values(cluster: Cluster, browser: TestClient) -> None:
    job = cluster.submit(BOB, name="his", comment="secret words", work_dir="/home/bob/secret")
    text = page(browser, f"/job/{job}")
    assert "secret" not in text


def test_output_is_shown_without_escape_sequences_and_as_text(cluster: Cluster, browser: TestClient) -> None:
    job = cluster.submit(ANN, name="train")
    cluster.run(job)
    text = page(browser, f"/job/{job}/log?stream=out")
    assert "one\ntwo\n&lt;b&gt;three&lt;/b&gt;" in text
    assert "stream is out or err" in words(page(browser, f"/job/{job}/log?stream=both", 400))


def test_nodes_a_node_the_queue_and_use_are_shown(cluster: Cluster, browser: TestClient) -> None:
    job = cluster.submit(ANN, name="train", time_limit_s=3600)
    cluster.run(job)
    assert "n1" in words(page(browser, "/nodes"))
    node = page(browser, f"/node/{cluster.job(job).shares[0].node}")
    assert f'/job/{job}"' in node
    assert "<polyline" in node
    queue = page(browser, "/queue")
    assert f"<title>job {job} train</title>" in queue
    assert "Accounts and users" in words(page(browser, "/use"))
    assert "cannot find node" in words(page(browser, "/node/n99", 404))


def test_a_job_page_has_efficiency_energy_and_price(
    cluster: Cluster, browser: TestClient, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cluster.submit(ANN, name="train", time_limit_s=7200)
    cluster.run(job)
    cluster.tick(3600.0)
    cluster.end(job)
    step = step_of("batch", cpu_user_s=900.0, max_rss_kib=50 << 10)
    energy = [{"job_id": job, "attempt": 0, "node": "n1", "source": "estimated", "joules": 7.2e6, "cost": 0.6}]
    shown = cluster.backend().job(ANN, str(job))["jobs"][0]
    controller.history = [shown | {"steps": [step], "energy": energy}]
    text = words(page(browser, f"/job/{job}"))
    assert "Efficiency used 50% of its time limit, 25% of its CPUs" in text
    assert "Energy 2 kWh (estimated), 0.60 EUR" in text
    assert "Price" not in text
    monkeypatch.setitem(COST, "cpu_hour", 0.5)
    assert "Price of attempt 0 0.50 EUR" in words(page(browser, f"/job/{job}"))
    controller.history = []
    assert "Efficiency" not in words(page(browser, f"/job/{job}"))


def step_of(step: str, **values: Any) -> dict[str, Any]:
    """Return a step of a job of the history."""
    usual = {"attempt": 0, "name": "train.py", "nodes": ["n1", "n2"], "ntasks": 1, "state": "COMPLETED", "exit_code": 0}
    unknown = dict.fromkeys(("exit_signal", "cpu_user_s", "cpu_system_s", "max_rss_kib"))
    return {"step": step, **usual, **unknown, **values}


def test_a_job_page_lists_the_last_steps_with_their_use_and_exit(
    cluster: Cluster, browser: TestClient, controller: Controller
) -> None:
    job = cluster.submit(ANN, name="train")
    cluster.run(job)
    shown = cluster.backend().job(ANN, str(job))["jobs"][0]
    steps = [step_of(str(number)) for number in range(60)]
    steps += [
        step_of("60", attempt=1, ntasks=4, state="FAILED", exit_code=1, exit_signal=9, cpu_user_s=50.0, cpu_system_s=20.5,
                max_rss_kib=3 << 20),
        step_of("61", name="<b>now", state="RUNNING", exit_code=None),
    ]  # fmt: skip
    controller.history = [shown | {"steps": steps}]
    text = words(page(browser, f"/job/{job}"))
    assert "Step Name State Attempt Tasks CPU time Memory Exit code Nodes" in text
    assert "60 train.py FAILED 1 4 1:10 3G 1:9 n[1-2]" in text
    assert "61 <b>now RUNNING 0 1 n[1-2]" in text
    assert f"The last 50 steps; hacct -j {job} shows all" in text
    assert "12 train.py" in text
    assert "11 train.py" not in text
    controller.history = [shown | {"steps": []}]
    assert "Exit code Nodes" not in words(page(browser, f"/job/{job}"))


def test_nodes_are_filtered_and_have_pages(browser: TestClient, cluster: Cluster) -> None:
    for number in range(500):
        name = NodeName(f"m{number:03}")
        cluster.state.nodes[name] = replace(
            cluster.state.nodes[NodeName("n1")], spec=replace(cluster.state.nodes[NodeName("n1")].spec, name=name)
        )
    cluster.ask(lambda tx: _drain(tx, "m007"))
    first = page(browser, "/nodes")
    assert first.count("<tr id=") == 200
    more = re.search(r'<a href="(/nodes\?[^"]*)" rel="next"', first)
    assert more is not None
    second = page(browser, unescape(more[1]))
    assert first.rpartition('id="node-')[2][:4] < second.partition('id="node-')[2][:4]
    assert page(browser, "/nodes?name=m00").count("<tr id=") == 10
    assert "fan is loud" in words(page(browser, "/nodes?state=trouble"))
    assert page(browser, "/nodes?state=trouble").count("<tr id=") == 1
    assert "state is up or trouble" in words(page(browser, "/nodes?state=x", 400))
    queue = page(browser, "/queue")
    assert "502 nodes without jobs and reservations are not shown" in words(queue)
    browser.cookies.set(COOKIE, "roots")
    admin = page(browser, "/admin")
    assert words(admin).index("m007") < words(admin).index("m000")
    assert "302 nodes that are not drained are not shown" in words(admin)


def used(user: str, job_id: int, *, energy: float | None = None, since_s: float = T0 - 7200) -> dict[str, Any]:
    """Return a job as reports count it: an hour on two cpus of n1, of which one was busy."""
    held = {"node": "n1", "since_s": since_s, "until_s": since_s + 3600, "cpus": 2, "gpus": 0, "mem_mib": 100}
    times = {"allocated_at_s": since_s, "ended_at_s": since_s + 3600, "waited_s": 600.0}
    use = {"job_id": job_id, "attempt": 0, "node": "n1", "source": "estimated", "joules": energy}
    return {
        "id": job_id, "user": user, "account": "", "partition": "main", "state": "FAILED", "use": None,
        "steps": [{"attempt": 0, "cpu_user_s": 3600.0, "cpu_system_s": None}], "energy": [use] if energy else [],
        "attempts": [{"attempt": 0, "requeued": False, "holdings": [held], **times}],
    }  # fmt: skip


def test_use_waste_and_cost_of_a_month_are_shown_and_sent_as_csv(browser: TestClient, controller: Controller) -> None:
    controller.history = [used("ann", 1, energy=3.6e6), used("ann", 2), used("=bob()", 3)]
    shown = words(page(browser, "/use/report"))
    assert "User Jobs CPU hours GPU hours Mean wait Unused CPU hours Failed and requeued kWh EUR" in shown
    assert "ann 2 4.0 0.0 10:00 2.0 4.0 1.0 0.30" in shown
    assert "All 3 6.0 0.0 10:00 3.0 6.0 1.0 0.30" in shown
    assert "hreport --by=user --month=this" in shown
    assert "root 3" in words(page(browser, "/use/report?by=account"))
    answer = browser.get("/use/report?format=csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert 'filename="use-1970-01-user.csv"' in answer.headers["content-disposition"]
    head, first, last = answer.text.splitlines()
    assert head == "user,jobs,cpu_hours,gpu_hours,mean_wait_s,unused_cpu_hours,lost_cpu_hours,kwh,cost"
    assert [first, last] == ["'=bob(),1,2,0,600,1,2,,0", "ann,2,4,0,600,2,4,1,0.3"]
    assert "No job ran" in words(page(browser, "/use/report?month=last"))
    for query in ("by=x", "month=9", "format=xls"):
        assert "cannot report that" in words(page(browser, f"/use/report?{query}", 400))


@pytest.mark.parametrize(
    ("now", "which", "start", "end"),
    [
        ((2027, 1, 15), "this", (2027, 1, 1), (2027, 1, 15)),
        ((2027, 1, 15), "last", (2026, 12, 1), (2027, 1, 1)),
        ((2027, 3, 31), "last", (2027, 2, 1), (2027, 3, 1)),
    ],
)
def test_a_month_begins_at_midnight_of_its_first_day(
    now: tuple[int, int, int], which: str, start: tuple[int, int, int], end: tuple[int, int, int]
) -> None:
    found = month_of(datetime(*now).timestamp(), which)
    assert [datetime.fromtimestamp(at_s) for at_s in found[:2]] == [datetime(*start), datetime(*end)]


def test_pages_of_a_cluster_without_nodes_say_how_to_add_one() -> None:
    empty = Cluster()
    app = GatewayApp(Controller(empty), replace(empty.state.config.gateway, rate=1e6, burst=1e6))  # type: ignore[arg-type]
    browser = TestClient(app.asgi(Pages(Site(app)).routes()), base_url="https://head", cookies={COOKIE: "roots"})
    for path in ("/", "/nodes", "/queue"):
        assert "hpcsched node add USER@HOST adds one" in words(page(browser, path))
    for path in (
        "/jobs",
        "/services",
        "/use",
        "/submit",
        "/plan?params=7B",
        "/network",
        "/admin",
        "/alerts",
        "/plan/worth?add=1x2:4G",
    ):
        page(browser, path)


# ----- submit, files, checkpoints

SENT = {"x-requested-with": "hpcsched"}
FORM: dict[str, Any] = {
    "script": "#!/bin/sh\n#HSUB --time=60\ntrue\n",
    "options": {"job-name": "from the web", "cpus-per-task": "2"},
    "more": "--comment='two words'",
    "work_dir": "",
    "test": True,
    "request_id": "r1",
}


def sent(browser: TestClient, form: object, status: int = 200, headers: Mapping[str, str] = SENT) -> Any:
    answer = browser.post("/submit", json=form, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_the_form_says_when_the_job_would_start_and_its_command(browser: TestClient, controller: Controller) -> None:
    assert "#!/bin/bash" in page(browser, "/submit")
    found = sent(browser, FORM)
    assert "to start at" in found["text"]
    assert found["command"] == "hsub '--job-name=from the web' --cpus-per-task=2 '--comment=two words' job.sh"
    assert controller.sent[0]["job"]["time_limit_s"] == 3600


def test_the_form_submits_a_job_once_with_nothing_of_the_gateway(browser: TestClient, controller: Controller) -> None:
    first = sent(browser, FORM | {"test": False, "work_dir": "/srv/work"})
    assert first == sent(browser, FORM | {"test": False, "work_dir": "/srv/work"})
    spec = controller.cluster.job(first["job"]).spec
    assert (spec.name, spec.comment, spec.cpus_per_task, spec.work_dir) == ("from the web", "two words", 2, "/srv/work")
    assert spec.env == ()
    assert "from the web" in words(page(browser, f"/submit?from={first['job']}"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"script": "echo"}, "#!"),
        ({"script": ""}, "empty"),
        ({"script": "#!/bin/sh\n#HSUB --tiem=3\n"}, "tiem"),
        ({"options": {"time": "soon"}}, "soon"),
        ({"options": {"wrap": "true"}}, "no field"),
        ({"more": "--wrap=true"}, "--wrap"),
        ({"more": "--dry-run"}, "--dry-run"),
        ({"more": "--serve=chat"}, "--serve"),
        ({"script": "#!/bin/sh\n#HSUB --serve=chat\n"}, "cannot start a service here"),
        ({"more": "'"}, "further options"),
        ({"more": "/etc/shadow"}, "--name=value"),
        ({"more": "- /etc/shadow"}, "--name=value"),
        ({"more": ": --nodes=2 x.sh"}, ""),
        ({"script": "#!/bin/sh\n" + "#\n" * 600}, "hsub"),
        ({"script": "#!/bin/sh\n" + "x" * 300_000}, "hsub"),
        ({"more": "--dependency=afterok:train"}, "train"),
        ({"work_dir": "relative"}, ""),
        ({"options": {"job-name": "a\0b"}}, ""),
    ],
)
def test_a_form_that_is_no_job_says_why(browser: TestClient, change: dict[str, Any], why: str) -> None:
    assert why in sent(browser, FORM | {"test": False} | change, 400)["error"]
    assert why in sent(browser, FORM | change)["error"]


@pytest.mark.parametrize(
    "form", [[], "x", {"script": 1}, {"unknown": ""}, {"options": {"time": 1}}, FORM | {"test": 1}]
)
def test_a_form_of_another_shape_is_refused(browser: TestClient, form: object) -> None:
    assert "the body must be" in sent(browser, form, 400)["error"]


def test_a_form_of_another_site_or_without_a_session_is_refused(browser: TestClient, controller: Controller) -> None:
    assert "x-requested-with" in sent(browser, FORM, 403, {})["error"]
    assert (
        browser.post("/submit", content=json.dumps(FORM), headers=SENT | {"content-type": "text/plain"}).status_code
        == 415
    )
    browser.cookies.clear()
    sent(browser, FORM, 401)
    assert controller.sent == []


def test_files_are_listed_shown_and_downloaded(cluster: Cluster, browser: TestClient, controller: Controller) -> None:
    job = cluster.submit(ANN, name="train")
    cluster.run(job)
    assert f'/job/{job}/files"' in page(browser, f"/job/{job}")
    assert "No files" in words(page(browser, f"/job/{job}/files"))
    controller.files = {"a&b.txt": "file", "dir": "directory", "key": "link", "z": "other"}
    text = page(browser, f"/job/{job}/files?path=out")
    assert "path=out%2Fa%26b.txt" in text
    assert "path=out%2Fdir" in text
    assert "path=out%2Fkey" not in text
    assert "after=key" in text
    controller.file = b"<b>x</b>\n" * 100_000
    shown = page(browser, f"/job/{job}/file?path=out%2Fa%26b.txt")
    assert "&lt;b&gt;x" in shown
    assert "900000 bytes; shown are 0 to" in words(shown)
    page(browser, f"/job/{job}/file?path=out%2Fa%26b.txt&part=end")
    answer = browser.get(f"/job/{job}/download?path=out%2Fa%26b%22%0d.txt")
    assert answer.status_code == 400
    controller.file = bytes(range(256)) * 10_000
    answer = browser.get(f"/job/{job}/download?path=out%2Fa%26b%22.txt")
    assert answer.content == controller.file
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''a%26b%22.txt"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "This is not a text" in words(page(browser, f"/job/{job}/file?path=x"))
    controller.file = b""
    assert browser.get(f"/job/{job}/download?path=x").content == b""


def test_a_download_that_fails_in_the_middle_ends_the_connection(
    cluster: Cluster, controller: Controller, browser: TestClient
) -> None:
    job = cluster.submit(ANN, name="train")
    cluster.run(job)
    controller.file = bytes(3 << 20)
    ask, dropped = controller.ask, []

    async def fails(method: str, path: str, *more: Any, **named: Any) -> UpstreamReply:
        return (
            _error(404, "it is gone", "NotFoundError")
            if "offset=2097152" in path
            else await ask(method, path, *more, **named)
        )

    controller.ask = fails  # type: ignore[method-assign]
    connection = SimpleNamespace(drop=lambda: dropped.append(True))
    inner = browser.app

    async def with_connection(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope | {"state": {**scope.get("state", {}), "connection": connection}}, receive, send)

    client = TestClient(with_connection, base_url="https://head", cookies={COOKIE: "anns"})
    assert len(client.get(f"/job/{job}/download?path=x").content) == 2 << 20
    assert dropped == [True]


def test_checkpoints_are_listed_by_their_manifests(
    cluster: Cluster, browser: TestClient, controller: Controller
) -> None:
    job = cluster.submit(ANN, name="train")
    cluster.run(job)
    steps = ("0000000100.a0000", "0000000200.a0001")
    controller.files = {f"step-{step}.json": "file" for step in steps}
    controller.files |= {
        f"data-step-{steps[1]}-ab12.bin": "file",
        "step-0000000300.a0001.json": "link",
        "LATEST": "file",
    }
    shown = words(page(browser, f"/job/{job}/checkpoints?path=checkpoints"))
    assert "2 checkpoints" in shown
    assert "200 1 2001-09-09" in shown.replace("T", " ")
    assert "10 step-0000000200.a0001" in shown  # the manifest and its data
    controller.files = {"checkpoints": "directory", "run1": "directory"}
    found = re.findall(r'href="[?](path=[^"]*)"', page(browser, f"/job/{job}/checkpoints"))
    assert found == ["path=checkpoints", "path=checkpoints%2Fcheckpoints", "path=run1%2Fcheckpoints"]
    controller.files = {}
    assert "No checkpoints" in words(page(browser, f"/job/{job}/checkpoints"))


# ----- services


def _serve(cluster: Cluster, audience: str = "all") -> None:
    """Start a service of ann's with a busy replica, which bob has asked."""
    script = "#!/bin/sh\nexec python3 -m hpcserve run /models/tiny --name chat\n"
    body = {"name": "chat", "model": "/models/tiny", "job": spec_to_json(spec(script=script)), "least": 1, "most": 3}
    cluster.ask(lambda tx: services.create(tx, ANN, body | {"audience": audience}))
    cluster.tick()
    job_id = cluster.state.services["chat"].replicas[0].job_id
    cluster.run(job_id)
    busy = ReplicaLoad(ready=True, active=3, kv_used=0.25, requests=7, errors=1, tokens_per_s=41.5, error="it was full")
    load = ServiceLoad(at_s=T0, replicas={job_id: busy}, held=2)
    used = [ServiceUse("chat", "bob", "lab", int(T0 // 86_400), 7, 70, 700, 12.0)]
    cluster.ask(lambda tx: services.note_loads(tx, cluster.controller.service_loads, {"chat": load}, used))


def test_services_are_shown_with_replicas_load_use_and_what_the_user_may_do(
    cluster: Cluster, browser: TestClient
) -> None:
    assert "None: hserve start MODEL --name=NAME starts one." in words(page(browser, "/services"))
    _serve(cluster)
    text = page(browser, "/services")
    assert "chat ann all v1 1 of 1 1/1 1–3 2 41.5 Stop /models/tiny" in words(text)
    assert f'href="/job/{cluster.state.services["chat"].replicas[0].job_id}"' in text
    assert "chat v1 RUNNING ready 3 25.0 of 100 41.5 7 1 n1 it was full" in words(text)
    assert "chat bob lab 7 70 700 12" in words(text)
    assert 'href="/services" aria-current="page"' in text
    for command in ("scale {name} {least}-{most}", "roll {name} --to={model} --canary={canary}%", "stop chat"):
        assert f'data-command="hserve {command}"' in text
    assert text.count("hidden data-verb=") == text.count("data-verb=") == 3  # without scripts nothing can be pressed
    assert "Take back" not in text
    cluster.ask(lambda tx: services.roll(tx, ANN, {"name": "chat", "model": "/models/new"}))
    text = page(browser, "/services")
    assert "Version v2 comes in beside v1: it is starting." in words(text)
    assert 'data-command="hserve roll chat --back"' in text


def test_others_see_a_service_that_is_open_to_them_without_its_model_or_actions(
    cluster: Cluster, browser: TestClient
) -> None:
    _serve(cluster)
    browser.cookies.set(COOKIE, "bobs")
    text = page(browser, "/services")
    assert "chat ann all" in words(text)
    assert "/models/tiny" not in text
    assert "it was full" not in text
    assert "data-verb" not in text
    browser.cookies.set(COOKIE, "roots")
    text = page(browser, "/services")
    assert 'data-command="hserve stop chat"' in text
    assert "hserve roll" not in text  # a new job would run as ann


# ----- administration, the network, what fits


def test_administration_offers_what_the_session_may_do(cluster: Cluster, browser: TestClient) -> None:
    cluster.ask(lambda tx: _drain(tx, "n2"))
    text = page(browser, "/admin")
    assert "with the role user" in words(text)
    assert "data-verb=" not in text
    assert "hctl resume n2" in words(text)
    assert 'href="/admin"' not in page(browser, "/")
    browser.cookies.set(COOKIE, "roots")
    text = page(browser, "/admin")
    for verb in ("nodes/drain", "nodes/resume", "partitions/update", "reservations/create"):
        assert f'hidden data-verb="{verb}"' in text  # without scripts nothing can be pressed
    assert 'data-command="hctl update PartitionName=main State=DRAIN"' in text
    assert 'href="/admin"' in page(browser, "/")


def test_alerts_are_listed_the_worst_first_and_silenced_by_those_who_may(
    browser: TestClient, controller: Controller
) -> None:
    controller.alerts = [
        alert("DiskFull", "warning", "resolved", node="n2"),
        alert("JobWaste", "info", job="7"),
        alert("Odd", "info", mount="/a*b"),
        alert("NodeDown", "critical", node="n1"),
    ]
    text = page(browser, "/alerts")
    found = [words(text).index(name) for name in ("NodeDown", "JobWaste", "DiskFull")]
    assert found == sorted(found)
    assert "data-verb" not in text
    assert "new fan" not in text
    browser.cookies.set(COOKIE, "roots")
    text = page(browser, "/alerts")
    assert 'data-command="hctl silence rule=NodeDown node=n1 2h"' in text
    (body,) = re.findall(r"data-body='([^']*)' data-command=\"hctl silence rule=NodeDown node=n1 2h", text)
    assert json.loads(unescape(body)) == {
        "matchers": {"rule": "NodeDown", "node": "n1"}, "until_s": T0 + 7200, "why": "from the web page",
    }  # fmt: skip
    assert "rule=DiskFull" not in text  # it is over
    assert "rule=Odd" not in text  # its mount would be a pattern
    assert 'data-command="hctl silence end 3"' in text
    assert "it answers 500" in words(text)
    controller.alerts = None
    assert "this controller has none" in words(page(browser, "/alerts", 503))


def test_links_between_nodes_are_a_matrix_with_what_is_wrong(browser: TestClient, controller: Controller) -> None:
    assert "No links are measured" in words(page(browser, "/network"))
    wifi = LinkEnd(device="wlan0", kind="wifi", mtu=1500)
    controller.links = [
        LinkRun(one="n1", other="n2", at_s=T0 - 9, rtt_us=9000, to_mbps=9, from_mbps=9),
        LinkRun(one="n1", other="n2", at_s=T0, rtt_us=210, to_mbps=940, from_mbps=120, near=wifi, alone_mbps=500),
    ]
    text = page(browser, "/network")
    assert "940 / 0.21" in words(text)
    assert "120 / 0.21" in words(text)
    assert "9 / 9" not in words(text)
    assert "Wi-Fi" in words(text)
    assert "shares an uplink" in words(text)
    controller.links = [failed_run("n1", "n2", at_s=T0, why="<b>no route</b>")]
    assert "&lt;b&gt;no route" in page(browser, "/network")


def test_the_plan_says_on_which_nodes_a_model_fits_and_the_command(browser: TestClient) -> None:
    assert "billion" not in words(page(browser, "/plan"))
    text = words(page(browser, "/plan?params=7B&use=serve&dtype=int4&context=100"))
    assert "hpcsched plan fits --serve --params=7B --context=100 --dtype=int4" in text
    assert "7 billion parameters: to serve it takes" in text
    assert "hpcsched plan fits '--params=7B; id'" in words(page(browser, "/plan?params=7B%3B%20id"))
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    config |= {"intermediate_size": 128}
    shown = page(browser, f"/plan?recompute=1&config={quote(json.dumps(config, indent=1))}")
    assert "to train it takes" in words(shown)
    assert "n1" in words(shown)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("params=lots", 200), ("layers=1&hidden=x", 200), ("params=7B&batch=0", 200), ("params=7B&gpu_memory=a100=80G", 200),
        ("config=%7B", 200), ("config=%5B" + "%5B" * 2000, 200), ("params=7B&config=%7B%7D", 200), ("params=7B&dtype=int8", 200),
        ("params=7B&gpu_memory==", 200), ("use=fly", 400), ("order=x", 400), ("params=" + "9" * 300, 400),
    ],
)  # fmt: skip
def test_a_plan_of_no_model_says_why(browser: TestClient, query: str, status: int) -> None:
    assert "cannot" in words(page(browser, f"/plan?{query}", status))


def test_the_past_is_replayed_with_other_machines(browser: TestClient, controller: Controller) -> None:
    share = {"node": "n1", "cpus": 2, "mem_mib": 100, "gpus": [], "tasks": 1, "shards": 0}
    job = {
        "user": "<b>ann",
        "partition": "main",
        "eligible_at_s": 0,
        "suspended_s": 0.0,
        "shares": [share],
        "attempt": 1,
    }
    times = [T0 - 9000 + at for at in range(6)]
    controller.history = [
        job
        | {
            "id": at,
            "submitted_at_s": at_s,
            "started_at_s": at_s,
            "ended_at_s": at_s + 900,
            "time_limit_s": 900,
            "steps": [],
        }
        for at, at_s in enumerate(times)
    ]
    text = page(browser, "/plan/worth?add=4x2:4G&days=28")
    assert "4 of 6 jobs would have started at once" not in words(text)
    assert "6 of 6 jobs would have started at once, 2 without it" in words(text)
    assert "&lt;b&gt;ann" in text
    assert "hpcsched plan worth --add 4x2:4G --days 28" in words(text)
    for query, status in (("add=x", 200), ("add=1x2:4G&partition=none", 200), ("add=9999x2:4G", 200), ("days=x", 400)):
        assert "cannot" in words(page(browser, f"/plan/worth?{query}", status))
    controller.history = []
    assert "nothing to replay" in words(page(browser, "/plan/worth?add=1x2:4G"))


LATER_S = 1_800_000_000.0  # long after T0: forecasts need weeks of history


def history_of(days: int, *, gpus: int = 0) -> list[dict[str, Any]]:
    """Return six jobs of an hour each day, submitted at once: two nodes are too few for them."""
    share = {"node": "n1", "cpus": 2, "mem_mib": 100, "gpus": list(range(gpus)), "tasks": 1, "shards": 0}
    known = {
        "user": "ann",
        "partition": "main",
        "eligible_at_s": 0,
        "suspended_s": 0.0,
        "shares": [share],
        "attempt": 1,
    }
    times = [LATER_S - day * 86_400 + number for day in range(1, days + 1) for number in range(6)]
    return [
        known | {"id": at, "submitted_at_s": at_s, "started_at_s": at_s, "ended_at_s": at_s + 3600, "time_limit_s": 3600,
                 "steps": []}
        for at, at_s in enumerate(times, 1)
    ]  # fmt: skip


def test_worth_forecasts_the_weeks_ahead_and_computes_costs_as_the_command(
    browser: TestClient, controller: Controller
) -> None:
    controller.snapshot_at_s, controller.history = LATER_S, history_of(40)
    prices = "price=2400&watts=450&kwh=0.30&cloud=1.5"
    shown = words(page(browser, f"/plan/worth?add=4x2:4G&days=14&{prices}"))
    assert "--price=2400 --watts=450 --kwh=0.30 --cloud=1.5" in shown
    assert "The next 14 days (40 draws): 59:58 (59:58 to 59:58) -> 0:00 (0:00 to 0:00) 80 % of the draws" in shown
    assert "Mean wait 59:58 59:58 59:58 0:00 0:00 0:00" in shown
    assert "Use of CPUs 12% 12% 12% 4% 4% 4%" in shown
    assert "GPU" not in shown
    assert re.search(r"Costs 2400 and \d+ a year for electricity at 4% use: \d+\.\d\d for each hour", shown)
    assert "The same hours elsewhere:" in shown
    controller.history = history_of(20)
    shown = words(page(browser, "/plan/worth?add=4x2:4G"))
    assert "No forecast: there are 20 days of history; it needs 28." in shown
    assert "Costs" not in shown


@pytest.mark.parametrize("query", ["price=x", "watts=-1", "kwh=nan", "cloud=inf", "price=1e300", "kwh=" + "9" * 200])
def test_costs_of_no_price_say_why(browser: TestClient, controller: Controller, query: str) -> None:
    controller.history = history_of(2)
    assert "cannot" in words(page(browser, f"/plan/worth?add=1x2:4G&{query}"))


@pytest.mark.parametrize(("jobs", "days", "draws"), [(0, 0, 40), (1000, 80, 40), (5000, 7, 10), (5000, 60, 34)])
def test_a_forecast_of_many_jobs_has_fewer_draws(jobs: int, days: int, draws: int) -> None:
    assert draws_of(jobs, days, 28) == draws


def test_an_address_that_there_is_not_is_a_page_for_browsers_alone(browser: TestClient) -> None:
    answer = browser.get("/<b>none", headers={"accept": "text/html,*/*"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "<h1>404</h1>" in answer.text
    assert "<b>none" not in answer.text
    assert browser.get("/none").json()["kind"] == "NotFoundError"
    assert browser.post("/none", headers={"accept": "text/html"}).status_code in (404, 405)


def test_pages_ask_for_themselves_less_often_the_more_are_open(
    cluster: Cluster, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = GatewayApp(controller, cluster.state.config.gateway)  # type: ignore[arg-type]
    browser = TestClient(app.asgi(Pages(Site(app)).routes()), base_url="https://head", cookies={COOKIE: "anns"})
    known, seen = controller.ask, []

    async def ask(method: str, path: str, *rest: Any, **more: Any) -> UpstreamReply:
        if not path.startswith("/v1/events"):
            return await known(method, path, *rest, **more)
        seen.append(app.open_streams)
        answer = {"events": [], "next": 1} if len(seen) == 1 else {"error": "gone", "kind": "UnavailableError"}
        return UpstreamReply(200 if len(seen) == 1 else 503, {}, json.dumps(answer).encode())

    monkeypatch.setattr(controller, "ask", ask)
    assert "gone" in browser.get("/api/v1/events").text
    assert (seen, app.open_streams) == ([0, 1], 0)
    assert browser.get("/").headers["x-hpcsched-refresh-ms"] == "0"
    app.open_streams = 100
    assert int(browser.get("/").headers["x-hpcsched-refresh-ms"]) >= 5000


def test_a_login_at_a_provider_leads_to_the_overview(cluster: Cluster, controller: Controller) -> None:
    app = GatewayApp(controller, cluster.state.config.gateway)  # type: ignore[arg-type]
    site = Site(app)
    route = Route("/back", lambda request: site.logged_in(request, "<b>ann"))
    text = page(TestClient(app.asgi([route]), base_url="https://head"), "/back")
    assert "You are logged in as &lt;b&gt;ann." in text
    assert 'http-equiv="refresh" content="0; url=/"' in text


PAGES = [
    "/",
    "/jobs",
    "/job/1",
    "/nodes",
    "/node/n1",
    "/queue",
    "/use",
    "/use/report",
    "/job/1/log",
    "/submit",
    "/job/1/files",
]
PAGES += [
    "/services",
    "/admin",
    "/alerts",
    "/network",
    "/plan",
    "/plan/worth?add=1x2:4G",
    "/job/1/file?path=a",
    "/job/1/download?path=a",
    "/job/1/checkpoints",
]


@pytest.mark.parametrize("path", PAGES)
def test_a_browser_without_a_session_is_told_how_to_log_in(browser: TestClient, path: str) -> None:
    for session in ("", "stolen"):
        browser.cookies.clear()
        if session:
            browser.cookies.set(COOKIE, session)
        assert "Run hpcsched web on the head node" in words(page(browser, path, 401))


@pytest.mark.parametrize("name", HOSTILE)
def test_texts_of_users_are_text_on_every_page(
    cluster: Cluster, browser: TestClient, controller: Controller, name: str
) -> None:
    job = cluster.submit(ANN, name="x", hold=True)
    cluster.state.jobs[job] = replace(
        cluster.job(job),
        spec=replace(cluster.job(job).spec, name=name, comment=name, submit_line=name, work_dir=name, script=name),
        partition=name,
    )
    controller.files = {
        name: "link",
        f"a{name}": "file",
        f"b{name}": "directory",
    }
    controller.file = name.encode("utf-8", "replace")
    shown = ("", "/files", "/files?path=x", "/file?path=x", "/checkpoints", "/log")
    for path in ("/", "/jobs", "/queue", f"/submit?from={job}", *(f"/job/{job}{page}" for page in shown)):
        text = page(browser, path)
        assert name not in text or name == "{{ 7 * 7 }}"
        assert "49" not in words(text)
    page(browser, f"/jobs?name={quote(name)}", 400 if "\x1b" in name else 200)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_any_answer_is_markup_on_any_page(
    cluster: Cluster, browser: TestClient, controller: Controller, hostile: str
) -> None:
    browser.cookies.set(COOKIE, "roots")
    running, waiting = cluster.submit(ANN, name="x", comment="y"), cluster.submit(ANN, name="z", hold=True, comment="y")
    cluster.run(running)
    _serve(cluster)
    cluster.ask(lambda tx: _drain(tx, "n2"))
    _reserve(cluster)
    controller.links = [LinkRun(one="n1", other="n2", at_s=T0, rtt_us=9, to_mbps=9, from_mbps=9, lost=0.5)]
    controller.files = {"a": "file", "b": "directory", "c": "link", "step-0000000001.a0001.json": "file"}
    controller.hostile = hostile
    jobs = [
        f"/job/{job}{page}"
        for job in (running, waiting)
        for page in ("", "/files", "/file?path=x", "/checkpoints", "/log")
    ]
    others = [
        "/",
        "/jobs",
        "/nodes",
        "/queue",
        "/services",
        "/use",
        "/network",
        "/admin",
        "/alerts",
    ]
    others += [] if "/" in hostile else [f"/node/{quote('n1' + hostile, safe='')}"]
    for path in [*jobs, *others, f"/submit?from={running}", "/plan?params=7B", "/plan/worth?add=1x2:4G"]:
        text = page(browser, path)
        assert hostile not in text or hostile == "{{ 7 * 7 }}", path
        assert "49" not in words(text), path
    controller.history = [used("ann", running, energy=1.0)]
    assert hostile not in page(browser, "/use/report") or hostile == "{{ 7 * 7 }}"


def _reserve(cluster: Cluster) -> None:
    made = Reservation(name="r1", start_s=int(T0), end_s=int(T0) + 60, nodes=(NodeName("n1"),), users=("ann",))
    cluster.state.reservations["r1"] = made


def test_static_files_may_be_kept_for_their_address_changes(browser: TestClient) -> None:
    browser.cookies.clear()
    for address in re.findall(r'(?:href|src)="(/static/[^"]+)"', page(browser, "/", 401)):
        answer = browser.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert browser.get("/static/../pages.py").status_code == 404
    assert (
        browser.get("/static/style.css", headers={"accept-encoding": "identity"}).headers.get("content-encoding")
        is None
    )


def test_pages_of_many_nodes_and_jobs_are_small(browser: TestClient, cluster: Cluster) -> None:
    for number in range(300):
        cluster.submit(ANN, name=f"j{number}", hold=True)
    for path, most in (("/", 40_000), ("/jobs", 40_000)):
        answer = browser.get(path, headers={"accept-encoding": "gzip"})
        assert answer.headers["content-encoding"] == "gzip"
        assert int(answer.headers["content-length"]) < most


# ----- pure parts


def test_a_chart_has_gaps_and_a_point_alone_is_drawn() -> None:
    chart = Chart(title="Load <1>", unit="", from_s=0.0, step_s=60.0, lines=[("", [1.0, 2.0, None, 4.0])])
    text = chart.svg()
    assert text.count("<polyline") == 2
    assert "Load &lt;1&gt;: 1 to 4" in text
    assert [row[1] for row in chart.rows()] == ["1", "2", "", "4"]
    assert "no values" in replace(chart, lines=[("", [None])]).svg()


def test_the_table_of_a_long_chart_is_short() -> None:
    chart = Chart(title="", unit="", from_s=0.0, step_s=1.0, lines=[("a", [1.0] * 1000), ("b", [2.0] * 10)])
    assert len(chart.rows()) <= 30
    assert chart.rows()[-1][2] == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (0.1234, "0.123"),
        (999.4, "999"),
        (12_345.0, "12.3k"),
        (2.5e9, "2.5G"),
        (float("nan"), ""),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(("value", "top"), [(0.0, 1.0), (0.3, 0.5), (1.0, 1.0), (21.0, 50.0), (float("inf"), 1.0)])
def test_the_axis_ends_at_a_round_number(value: float, top: float) -> None:
    assert rounded_up(value) == pytest.approx(top)


def test_a_schedule_cuts_bars_at_its_ends_and_leaves_out_others() -> None:
    bars = [
        ScheduleBar(row="n1", begin_s=-100.0, end_s=1e9, kind="running", label="job 1", link="/job/1"),
        ScheduleBar(row="n1", begin_s=-100.0, end_s=-1.0, kind="running", label="job 2"),
        ScheduleBar(row="n9", begin_s=0.0, end_s=10.0, kind="running", label="job 3"),
    ]
    text = schedule(["n1"], bars, 0.0, 100.0)
    assert text.count("<rect") == 1
    width = float(re.search(r'width="([\d.]+)"', text)[1])  # type: ignore[index]
    assert width < 1150


def test_jobs_without_an_expected_start_are_listed_apart() -> None:
    job = {"display_id": "1", "expected_start_s": 50.0, "time_limit_s": 10}
    bars, later = expected_starts([job, {**job, "expected_start_s": None}, {**job, "expected_start_s": 999.0}], 100.0)
    assert [(bar.begin_s, bar.end_s) for bar in bars] == [(50.0, 60.0)]
    assert len(later) == 2


def test_output_loses_colours_and_control_characters_but_no_text() -> None:
    assert output_text("a\x1b[1;31mb\x1b[0mc\td\r\ne\x07\u202ef\x1b[") == "abc\td\nef"


@pytest.mark.parametrize(
    ("state", "hold", "verbs"),
    [
        ("PENDING", "none", ["hold", "cancel"]),
        ("PENDING", "user", ["release", "cancel"]),
        ("RUNNING", "none", ["suspend", "requeue", "cancel"]),
        ("COMPLETING", "none", []),
        ("COMPLETED", "none", ["requeue"]),
    ],
)
def test_a_job_has_the_actions_of_its_state(state: str, hold: str, verbs: list[str]) -> None:
    actions = actions_for({"state": state, "hold": hold}, "7_1", [*verbs, "drain"])
    assert [one["verb"] for one in actions] == verbs
    assert all(one["command"].endswith(" 7_1") for one in actions)
    assert actions_for({"state": state, "hold": hold}, "7_1", ["drain"]) == []


def test_a_node_that_is_off_to_save_power_takes_jobs_and_is_no_problem() -> None:
    node = {"name": "n1", "link": "down", "link_why": "off", "drained": False, "power": "powered_down"}
    amounts = {"cpus": 1, "cpus_alloc": 0, "mem_mib": 1, "mem_alloc_mib": 0, "gpus": [], "gpus_alloc": 0}
    assert totals([node | amounts])["up"] == 1
    ping = {"not_taken": [], "undecided": 0}
    assert troubles(ping, [node]) == []
    assert len(troubles(ping, [node | {"power": "on"}])) == 1


def test_totals_and_troubles_of_no_nodes() -> None:
    assert totals([])["cpus"] == 0
    assert troubles({"not_taken": ["port changed"], "undecided": 2}, [])[0]["text"] == "port changed"


# ----- a page that many browsers keep open


@pytest.fixture
def long_shared(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr("hpcsched.gateway.site.SHARED_S", 1e9)
    return browser


def test_a_page_is_made_once_for_all_browsers_of_a_user_until_an_event(
    cluster: Cluster, long_shared: TestClient, controller: Controller
) -> None:
    cluster.submit(ANN, name="first", hold=True)
    shown = {page(long_shared, "/") for _ in range(5)}
    assert len(shown) == 1
    assert (controller.asked["/v1/nodes"], controller.asked["/v1/me"]) == (1, 5)
    cluster.submit(ANN, name="second", hold=True)
    assert "second" in page(long_shared, "/")
    assert controller.asked["/v1/nodes"] == 2


def test_a_shared_page_is_that_of_one_user_address_and_encoding(
    cluster: Cluster, long_shared: TestClient, controller: Controller
) -> None:
    cluster.submit(BOB, name="bobs-job", hold=True)
    assert "bobs-job" not in words(page(long_shared, "/jobs?name=mine"))
    assert "bobs-job" in words(page(long_shared, "/jobs"))
    plain = long_shared.get("/jobs", headers={"accept-encoding": "identity"})
    packed = long_shared.get("/jobs")
    assert (plain.headers.get("content-encoding"), packed.headers["content-encoding"]) == (None, "gzip")
    assert plain.text == packed.text
    long_shared.cookies.set(COOKIE, "bobs")
    assert re.search(r'class="who"><a href="/jobs\?user=bob"', page(long_shared, "/jobs"))


def test_a_shared_page_is_refused_to_a_session_that_has_ended(cluster: Cluster, long_shared: TestClient) -> None:
    page(long_shared, "/")
    long_shared.cookies.set(COOKIE, "ended")
    assert "Log in" in words(page(long_shared, "/", 401))


def test_a_page_that_failed_is_made_again(
    long_shared: TestClient, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(self: object, *args: object) -> None:
        raise UnavailableError("cannot list nodes: it starts")

    with monkeypatch.context() as patched:
        patched.setattr("hpcsched.controller.views.backend.ControllerBackend.nodes", unavailable)
        assert "it starts" in words(page(long_shared, "/nodes", 503))
    assert "n1" in words(page(long_shared, "/nodes"))
