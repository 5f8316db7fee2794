"""What the script of the web pages does when all is not well: a lost session, a lost answer, a refused action, odd keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("fontTools")
pytest.importorskip("PIL")

from chromium import NEEDS_CHROMIUM
from page_drawer import Drawer, drawing, lab
from playwright.sync_api import Page, Route, expect
from test_pages import HISTORY
from waiting import PATIENCE_S

from hpcsched.gateway.app import COOKIE

pytestmark = NEEDS_CHROMIUM
expect.set_options(timeout=PATIENCE_S * 1000)
LATER_MS = 61_000  # then a page asks for itself


@pytest.fixture(scope="module")
def drawer() -> Iterator[Drawer]:
    with drawing(lab(), boxes=False) as made:
        yield made


@pytest.fixture
def page(drawer: Drawer) -> Iterator[Page]:
    page = drawer.page("light")
    yield page
    page.context.close()


def sent(route: Route, kept: list[Any]) -> dict[str, Any]:
    """Return the body of a request, and keep it."""
    body: dict[str, Any] = json.loads(route.request.post_data or "")
    kept.append(body)
    return body


def test_a_page_says_when_its_session_or_the_cluster_is_gone(drawer: Drawer, page: Page) -> None:
    page.clock.install()
    page.goto("https://head/")
    status = page.locator("#status")
    drawer.client.cookies.clear()
    page.clock.run_for(LATER_MS)
    expect(status).to_have_text("The session has ended: run hpcsched web for a new link.")
    expect(status).to_have_class("bad")
    drawer.client.cookies.set(COOKIE, "roots")
    page.clock.run_for(LATER_MS)
    expect(status).to_contain_text("Up to date at")
    expect(status).not_to_have_class("bad")
    page.route("https://head/", lambda route: route.fulfill(status=503, body=""))
    page.clock.run_for(LATER_MS)
    expect(status).to_have_text("The page cannot be read (503); it shows its last state.")
    page.route("https://head/", lambda route: route.abort())
    page.clock.run_for(LATER_MS)
    expect(status).to_have_text("The cluster does not answer; the page shows its last state.")
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


def test_a_change_leaves_open_tables_open_and_the_focus_where_it_is(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.clock.install()
    page.goto("https://head/job/1")
    summary = page.locator("#charts summary").first
    summary.focus()
    summary.press("Enter")
    series: Any = HISTORY["series"]
    (memory,) = [one for one in series if one["name"] == "job_memory_bytes"]
    monkeypatch.setitem(memory, "values", [1e9, 7e9, None])
    page.clock.run_for(LATER_MS)
    expect(page.locator("#charts td", has_text="7G")).to_be_visible()
    expect(summary).to_be_focused()


def test_an_action_that_is_refused_says_why_and_asks_once(page: Page) -> None:
    bodies: list[Any] = []
    keys: list[str] = []

    def refuse(route: Route) -> None:
        sent(route, bodies)
        keys.append(route.request.headers["idempotency-key"])
        assert route.request.headers["x-requested-with"] == "hpcsched"
        route.fulfill(status=409, json={"error": "it has <b>ended</b>"})

    page.route("**/api/v1/cancel", refuse)
    page.goto("https://head/job/1")
    for answer in ("Keep as it is", "Run", "Run"):
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name=answer, exact=True).click()
        expect(page.locator("#ask")).to_be_hidden()
    status = page.locator("#status")
    expect(status).to_have_text("hcancel 1: it has <b>ended</b>")
    expect(status).to_have_class("bad")
    assert bodies == [{"jobs": ["1"]}] * 2
    assert len(set(keys)) == 2
    page.route("**/api/v1/cancel", lambda route: route.abort())
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(status).to_have_text("The cluster does not answer; nothing is known to have changed.")


def test_options_are_completed_by_arrows_and_pointer_and_escape_closes_them(page: Page) -> None:
    page.goto("https://head/submit")
    script, options = page.locator("#script"), page.get_by_role("option")
    script.fill("#!/bin/bash\n")
    script.press("Control+End")
    script.press_sequentially("#HSUB --no")
    names = [text.split()[0] for text in options.all_inner_texts()]
    assert len(names) > 2
    script.press("ArrowDown")
    script.press("ArrowDown")
    script.press("ArrowUp")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    expect(options.nth(0)).to_have_attribute("aria-selected", "false")
    expect(script).to_have_attribute("aria-activedescendant", "completion-1")
    script.press("Enter")
    expect(script).to_have_value(f"#!/bin/bash\n#HSUB {names[1]}")
    expect(page.locator("#completions")).to_be_hidden()
    script.press("Control+End")
    script.press_sequentially("\n#HSUB --no")
    script.press("Escape")
    expect(page.locator("#completions")).to_be_hidden()
    script.press_sequentially("d")
    options.first.click()
    assert script.input_value().splitlines()[-1].startswith("#HSUB --nod")
    script.press_sequentially("\necho --no")
    expect(page.locator("#completions")).to_be_hidden()


def test_a_form_whose_answer_is_lost_is_sent_again_as_the_same_request(page: Page) -> None:
    bodies: list[Any] = []

    def lose_then_refuse(route: Route) -> None:
        if route.request.method != "POST" or json.loads(route.request.post_data or "")["test"]:
            route.fallback()
        elif sent(route, bodies) and len(bodies) == 1:
            route.abort()
        else:
            route.fulfill(status=400, json={"error": "no such account", "command": "hsub job.sh"})

    page.route("**/submit", lose_then_refuse)
    page.goto("https://head/submit")
    send, check = page.get_by_role("button", name="Submit"), page.locator("#check")
    send.click()
    expect(page.locator("#status")).to_contain_text("The cluster does not answer")
    for _ in range(2):
        expect(send).to_be_enabled()
        send.click()
        expect(check).to_have_text("no such account")
        expect(check).to_have_class("bad")
        expect(send).to_be_enabled()
    lost, again, another = [body["request_id"] for body in bodies]
    assert lost == again != another
