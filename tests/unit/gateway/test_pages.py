"""The web pages, made from answers of a real controller without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcsched.auth.authorize import Identity
from hpcsched.errors import HpcschedError, NotFoundError
from hpcsched.gateway.app import COOKIE, GatewayApp
from hpcsched.gateway.charts import Chart, ScheduleBar, rounded_up, schedule, short
from hpcsched.gateway.pages import Pages, actions_for, expected_starts
from hpcsched.gateway.upstream import UpstreamReply
from hpcsched.listing.overview import totals, troubles
from hpcsched.listing.text import output_text
from hpcsched.model.spec import ArraySpec

SESSIONS: Mapping[str, Identity] = {"anns": ANN, "bobs": BOB, "roots": ROOT}
HISTORY = {
    "from_s": 0.0,
    "step_s": 60.0,
    "series": [
        {"name": "node_load1", "labels": {}, "values": [0.5, None, 1.5]},
        {"name": "job_memory_bytes", "labels": {}, "values": [1e9, 2e9, None]},
    ],
}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "\x1b[31mred",
    "a\u202eb",
    "{{ 7 * 7 }}",
]


class Controller:
    """Answers the gateway from a cluster, as the user of the session."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.log = b"one\n\x1b[31mtwo\x1b[0m\n<b>three</b>\n"

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", timeout_s: float = 0
    ) -> UpstreamReply:
        assert method == "GET"
        identity = SESSIONS.get(headers.get("x-hpcsched-session", ""))
        if identity is None:
            return _error(401, "the session has ended", "UnauthenticatedError")
        parts = urlsplit(path)
        query = dict(parse_qsl(parts.query))
        try:
            found = await self._answers(identity, query)[_route(parts.path)](*_names(parts.path))
        except NotFoundError as error:
            return _error(404, str(error), "NotFoundError")
        except HpcschedError as error:
            return _error(400, str(error), type(error).__name__)
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        return UpstreamReply(200, {"x-hpcsched-uid": str(identity.uid), "x-offset": "0", "x-ended": "1"}, data)

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
            "partitions": lambda: now({"partitions": backend.partitions(identity)}),
            "reservations": lambda: now(backend.reservations(identity)),
            "shares": lambda: now(backend.shares(identity)),
            "history": lambda: now(HISTORY),
            "log": lambda: now(self.log),
        }


def _route(path: str) -> str:
    return path.rpartition("/")[2] if path.count("/") != 3 or path.startswith("/v1/metrics") else "job"


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
def browser(cluster: Cluster) -> Iterator[TestClient]:
    app = GatewayApp(Controller(cluster), replace(cluster.state.config.gateway, rate=1e6, burst=1e6))  # type: ignore[arg-type]
    client = TestClient(app.asgi(Pages(app).routes()), base_url="https://head", follow_redirects=False)
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


@pytest.mark.parametrize("path", ["/", "/jobs", "/job/1", "/nodes", "/node/n1", "/queue", "/use", "/job/1/log"])
def test_a_browser_without_a_session_is_told_how_to_log_in(browser: TestClient, path: str) -> None:
    for session in ("", "stolen"):
        browser.cookies.clear()
        if session:
            browser.cookies.set(COOKIE, session)
        assert "Run hpcsched web on the head node" in words(page(browser, path, 401))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_users_are_text_on_every_page(cluster: Cluster, browser: TestClient, name: str) -> None:
    job = cluster.submit(ANN, name="x", hold=True)
    cluster.state.jobs[job] = replace(
        cluster.job(job), spec=replace(cluster.job(job).spec, name=name, comment=name), partition=name
    )
    for path in ("/", "/jobs", f"/job/{job}", "/queue"):
        text = page(browser, path)
        assert name not in text or name == "{{ 7 * 7 }}"
        assert "49" not in words(text)
    page(browser, f"/jobs?name={quote(name)}", 400 if "\x1b" in name else 200)


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
    actions = actions_for({"state": state, "hold": hold}, "7_1")
    assert [one["verb"] for one in actions] == verbs
    assert all(one["command"].endswith(" 7_1") for one in actions)


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
