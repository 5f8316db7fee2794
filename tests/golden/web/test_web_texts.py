"""What the web pages say and offer, as texts, for a cluster and a clock that never change.

A page is kept as the lines of its main part: texts, and the elements that link, act or ask, with their attributes. So a value, a
condition or an action that a page loses is a difference. The pictures beside these texts show how it looks. To record anew, after
looking at the difference: ``HPCSCHED_UPDATE_GOLDEN=1 pytest tests/golden/web``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("fontTools")
pytest.importorskip("PIL")

from jobs import T0
from page_drawer import lab
from starlette.testclient import TestClient
from test_pages import Controller, alert, step_of, used
from unit.controller.cluster import ANN
from zones import time_zone

from hpcsched.auth.authorize import Identity
from hpcsched.gateway.app import COOKIE, GatewayApp
from hpcsched.gateway.jobproxy import JobProxy
from hpcsched.gateway.pages import Pages
from hpcsched.gateway.site import Site
from hpcsched.gateway.terminal import Terminals
from hpcsched.metrics.links import LinkEnd, LinkRun, failed_run

TEXTS = Path(__file__).parent / "texts"
# Of each page: its address, and the user whose session asks for it.
PAGES = {
    "admin": ("/admin", "roots"),
    "admin-of-a-user": ("/admin", "anns"),
    "alerts": ("/alerts", "roots"),
    "alerts-of-a-user": ("/alerts", "anns"),
    "array": ("/job/4", "bobs"),
    "checkpoints": ("/job/1/checkpoints?path=run", "anns"),
    "file": ("/job/1/file?path=run%2Fa.txt", "anns"),
    "files": ("/job/1/files?path=run", "anns"),
    "job": ("/job/1", "anns"),
    "job-of-another": ("/job/1", "bobs"),
    "jobs": ("/jobs?user=bob", "anns"),
    "log": ("/job/1/log?stream=err", "anns"),
    "login": ("/login?code=abc", ""),
    "network": ("/network", "roots"),
    "node": ("/node/n1", "roots"),
    "node-drained": ("/node/n4", "roots"),
    "nodes": ("/nodes?state=trouble&name=n", "roots"),
    "open": ("/job/1/open", "anns"),
    "open-waiting": ("/job/3/open", "anns"),
    "overview": ("/", "roots"),
    "plan": ("/plan?params=7B&use=serve&context=100&recompute=1", "anns"),
    "queue": ("/queue", "anns"),
    "report": ("/use/report?by=node", "anns"),
    "submit": ("/submit?from=1", "anns"),
    "submit-template": ("/submit?template=jupyter", "anns"),
    "terminal": ("/job/1/terminal", "anns"),
    "use": ("/use", "roots"),
    "without-a-session": ("/jobs", ""),
    "worth": ("/plan/worth?add=1x2:4G&kwh=0.3", "anns"),
}
ATTRIBUTES = (
    "id", "class", "href", "action", "name", "value", "placeholder", "list", "label", "type", "min", "max", "hidden", "required",
    "checked", "selected", "open", "role", "title", "aria-label", "aria-current", "data-live", "data-verb", "data-body",
    "data-command", "data-word", "data-job", "data-runs", "data-stream", "data-offset", "data-opens",
)  # fmt: skip
TELLING = frozenset(ATTRIBUTES) - {"class", "role", "type", "data-live"}  # others alone make no line


class Lines(HTMLParser):
    """Reads the main part of a page as lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._is_in_main = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_in_main = self._is_in_main or tag == "main"
        given = dict(attrs)
        if self._is_in_main and (TELLING.intersection(given) or tag in ("h1", "h2", "tr")):
            shown = [name if given[name] is None else f"{name}={given[name]}" for name in ATTRIBUTES if name in given]
            self.lines.append(" ".join([f"<{tag}", *shown]) + ">")

    def handle_endtag(self, tag: str) -> None:
        self._is_in_main = self._is_in_main and tag != "main"

    def handle_data(self, data: str) -> None:
        if self._is_in_main and data.strip():
            self.lines.append(" ".join(data.split()))


def lines_of(html: str) -> str:
    """Return the main part of a page as text."""
    reader = Lines()
    reader.feed(html)
    return "\n".join(reader.lines) + "\n"


class WholeLab(Controller):
    """The lab of the pictures, with answers that need real nodes and a recorder."""

    def _answers(self, identity: Identity, query: dict[str, str]) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        known = super()._answers(identity, query)

        async def job(name: str) -> Any:
            answer = await known["job"](name)
            answer["jobs"][0]["training"] = {"step": 120, "total_steps": 1000, "loss": 2.3456, "checkpoint_step": 100}
            return answer

        async def slow(*_: str) -> Any:
            finding = {"text": "n2 reads slowly", "remedy": "hpcsched doctor n2"}
            return {"findings": [finding], "text": "It waits for data."}

        async def alerts() -> Any:
            answer = await known["alerts"]()
            mail = {"name": "mail", "kind": "mail", "waiting": 0, "why": "", "failing_since_s": None}
            return answer | {"left_out": 7, "receivers": [*answer["receivers"], mail]}

        async def nodes() -> Any:
            answer = await known["nodes"]()
            answer["nodes"][0] |= {"not_enforced": ["memory"], "agent_version": "1.0.0"}
            return answer

        return {**known, "job": job, "slow": slow, "alerts": alerts, "nodes": nodes}


def whole_lab() -> WholeLab:
    """Return a controller with one of each thing that a page may show."""
    found = WholeLab(lab().cluster)
    found.alerts = [
        alert("NodeDown", "critical", node="n3"),
        alert("DiskFull", "warning", "pending", node="n2", mount="/") | {"quiet": "silenced by 3"},
        alert("JobWaste", "info", "resolved", job="1"),
    ]
    wifi = LinkEnd(device="wlan0", kind="wifi", mtu=1500)
    found.links = [
        LinkRun(one="n1", other="n2", at_s=T0 - 60, rtt_us=210, to_mbps=940, from_mbps=120, near=wifi, alone_mbps=500),
        failed_run("n1", "n3", at_s=T0 - 60, why="no route"),
    ]
    found.files = {"a.txt": "file", "b": "directory", "key": "link", "step-0000000100.a0000.json": "file"}
    found.file = b"<b>text</b>\n" * 30_000
    steps = [step_of("batch", cpu_user_s=900.0, max_rss_kib=2 << 20), step_of("0", state="RUNNING", exit_code=None)]
    held = used("ann", 1, energy=7.2e6)
    held["energy"][0]["cost"] = 0.6
    share = {"node": "n1", "cpus": 2, "mem_mib": 100, "gpus": [], "tasks": 1, "shards": 0}
    known = found.cluster.backend().job(ANN, "1")["jobs"][0]
    found.history = [known | held | {"steps": steps, "shares": [share], "suspended_s": 0.0}]
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[TestClient]:
    with time_zone("UTC"):
        controller = whole_lab()
        settings = replace(controller.cluster.state.config.gateway, rate=1e6, burst=1e6)
        app = GatewayApp(controller, settings)  # type: ignore[arg-type]
        site = Site(app, has_oidc=True)
        of_jobs = [*JobProxy(app, site, "", "", 1.0).routes(), *Terminals(app, site, "").routes()]
        with TestClient(app.asgi([*of_jobs, *Pages(site).routes()]), base_url="https://head") as client:
            yield client


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_and_offers_what_its_text_has(browser: TestClient, name: str) -> None:
    path, session = PAGES[name]
    browser.cookies.clear()
    if session:
        browser.cookies.set(COOKIE, session)
    answer, recorded = browser.get(path), TEXTS / f"{name}.txt"
    assert answer.status_code == (401 if name == "without-a-session" else 200), answer.text
    shown = lines_of(answer.text)
    if os.environ.get("HPCSCHED_UPDATE_GOLDEN") == "1":
        recorded.parent.mkdir(exist_ok=True)
        recorded.write_text(shown)
    assert shown.splitlines() == recorded.read_text().splitlines()


def test_the_texts_are_those_of_pages_that_there_are() -> None:
    assert {path.stem for path in TEXTS.iterdir()} == set(PAGES)
