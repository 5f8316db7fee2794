"""The web pages in a real Chromium: a cluster with a node behind sshd, and its gateway over TLS."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright")
pytest.importorskip("uvicorn")

from gateway_server import Served, serving
from playwright.sync_api import Page, expect, sync_playwright
from waiting import PATIENCE_S, wait_until

CHROMIUM = shutil.which("chromium")
CI = os.environ.get("CI") == "true"
pytestmark = pytest.mark.skipif(CHROMIUM is None and not CI, reason="NOT TESTED: needs Debian's chromium")
expect.set_options(timeout=PATIENCE_S * 1000)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def page(served: Served) -> Iterator[Page]:
    """A page of a browser with a session; nothing is written to the console, and no policy is violated."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(served.cluster.run("hpcsched", "web").stdout.strip())
        page.get_by_role("button", name="Log in").click()
        yield page
        assert wrong == []
        browser.close()


def at(served: Served, path: str) -> str:
    return f"https://localhost:{served.port}{path}"


def test_a_link_of_hpcsched_web_opens_the_overview(page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    expect(page.get_by_text("Healthy: the node takes jobs")).to_be_visible()


def test_a_job_appears_by_itself_and_is_cancelled_from_its_page(served: Served, page: Page) -> None:
    page.goto(at(served, "/"))
    job = served.cluster.run("hsub", "--parsable", "--job-name=appears", "--wrap", "sleep 600").stdout.strip()
    page.get_by_role("link", name=job, exact=True).click()
    expect(page.locator("#state")).to_have_text("RUNNING")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#ask-command")).to_have_text(f"hcancel {job}")
    page.get_by_role("button", name="Keep as it is").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#state")).to_have_text("CANCELLED")
    expect(page.locator("#story")).to_contain_text("submitted by")


def test_output_is_followed_filtered_and_never_markup(served: Served, page: Page) -> None:
    folder = served.base / "work"
    folder.mkdir(mode=0o777)
    script = "echo '<b>first</b>'; until [ -e go ]; do sleep 0.1; done; printf 'a\\033[31mred\\033[0m\\nlast\\n'"
    job = served.cluster.run("hsub", "--parsable", "-D", str(folder), "--wrap", script).stdout.strip()
    page.goto(at(served, f"/job/{job}/log"))
    expect(page.locator("#log")).to_contain_text("<b>first</b>")
    (folder / "go").touch()
    expect(page.locator("#log")).to_contain_text("ared\nlast")
    page.keyboard.press("/")
    page.keyboard.type("LAST")
    expect(page.locator("#log")).to_have_text("last")
    wait_until(lambda: "complete" in page.locator("#status").inner_text(), what="the end of the output")


def test_every_page_works_with_the_keyboard_and_on_a_phone(served: Served, page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(at(served, "/"))
    for key, heading in (("j", "Jobs"), ("n", "Nodes"), ("q", "Queue"), ("u", "Shares and use"), ("o", "Overview")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page.get_by_role("heading", level=1)).to_have_text(heading)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), heading
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(at(served, "/node/n1"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("Node n1")


def test_without_scripts_a_page_is_whole_and_offers_no_action(served: Served, page: Page) -> None:
    job = served.cluster.run("hsub", "--parsable", "--hold", "--wrap", "true").stdout.strip()
    context = page.context.browser.new_context(  # type: ignore[union-attr]
        ignore_https_errors=True, java_script_enabled=False, storage_state=page.context.storage_state()
    )
    plain = context.new_page()
    plain.goto(at(served, f"/job/{job}"))
    expect(plain.locator("#why")).to_contain_text("held")
    expect(plain.get_by_role("button", name="Release")).to_be_hidden()
    context.close()
    page.goto(at(served, f"/job/{job}"))
    page.get_by_role("button", name="Release").click()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#state")).to_have_text("COMPLETED")
