"""The web pages in a real Chromium: a cluster with a node behind sshd, and its gateway over TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("uvicorn")

from chromium import NEEDS_CHROMIUM, chromium
from gateway_server import Served, serving
from playwright.sync_api import Page, Route, expect
from waiting import PATIENCE_S, wait_until

pytestmark = NEEDS_CHROMIUM
expect.set_options(timeout=PATIENCE_S * 1000)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(alerts={"on": True}) as found:
        yield found


@pytest.fixture(scope="module")
def page(served: Served) -> Iterator[Page]:
    """A page of a browser with a session; nothing is written to the console, and no policy is violated."""
    with chromium() as browser:
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(served.cluster.run("hpcsched", "web", "--scope=read,submit,manage,admin").stdout.strip())
        page.get_by_role("button", name="Log in").click()
        yield page
        assert wrong == []


KEYS = (
    ("j", "Jobs"),
    ("n", "Nodes"),
    ("q", "Queue"),
    ("v", "Services"),
    ("u", "Shares and use"),
    ("s", "Submit a job"),
    ("p", "Does a model fit?"),
    ("m", "Network between nodes"),
    ("l", "Alerts"),
    ("a", "Administration"),
    ("o", "Overview"),
)


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


def test_a_page_that_is_refused_for_now_is_asked_for_again(served: Served, page: Page) -> None:
    statuses: list[int] = []

    def refuse_once(route: Route) -> None:
        statuses.append(200 if statuses.count(429) or not statuses else 429)
        if statuses[-1] == 200:
            route.continue_()
        else:
            route.fulfill(status=429, headers={"retry-after": "1"}, body="too many")

    other = page.context.new_page()
    other.add_init_script("window.setInterval = () => 0")  # it would look again after a while in any case
    other.route("**/jobs", refuse_once)
    other.route(  # no event comes later
        "**/api/v1/events*",
        lambda route: route.fulfill(content_type="text/event-stream", body="retry: 3600000\n\n"),
    )
    other.goto(at(served, "/jobs"))
    expect(other.locator("#status")).to_contain_text("Up to date")
    assert statuses == [200, 429, 200]
    other.close()


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
    for key, heading in KEYS:
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


def test_a_job_is_submitted_from_the_page_and_its_files_are_read(served: Served, page: Page) -> None:
    folder = served.base / "files"
    folder.mkdir(mode=0o777)
    page.goto(at(served, "/submit"))
    page.get_by_label("Name").fill("from the page")
    page.get_by_label("Directory").fill(str(folder))
    script = page.locator("#script")
    script.fill("#!/bin/bash\n")
    script.press("Control+End")
    script.press_sequentially("#HSUB --tim")
    expect(page.get_by_role("option", name="--time=")).to_be_visible()
    script.press("Enter")
    script.press_sequentially("soon\n")
    expect(page.locator("#check")).to_contain_text("soon")
    script.fill("#!/bin/bash\n#HSUB --time=5\nmkdir out; echo '<i>written</i>' > out/a.txt; ln -s /etc/passwd key\n")
    expect(page.locator("#check")).to_contain_text("to start at")
    expect(page.locator("#command")).to_contain_text("'--job-name=from the page' job.sh")
    page.get_by_role("button", name="Submit").click()
    expect(page.locator("#state")).to_have_text("COMPLETED")
    page.get_by_role("link", name="Files", exact=True).click()
    expect(page.locator("#files")).to_contain_text("key")
    expect(page.get_by_role("link", name="key")).to_have_count(0)
    page.get_by_role("link", name="out/").click()
    page.get_by_role("link", name="a.txt", exact=True).click()
    expect(page.locator("pre")).to_have_text("<i>written</i>\n")
    with page.expect_download() as found:
        page.get_by_role("link", name="Download").click()
    assert found.value.suggested_filename == "a.txt"
    assert found.value.path().read_text() == "<i>written</i>\n"
    answer = page.request.get(page.url.replace("out%2Fa.txt", "key"))
    assert (answer.status, "symbolic link" in answer.text()) == (404, True)


def test_a_node_is_drained_and_resumed_and_reserved_from_the_page(served: Served, page: Page) -> None:
    page.goto(at(served, "/admin"))
    drain = page.locator("form[data-verb='nodes/drain']")
    drain.get_by_label("Nodes").fill("n1")
    drain.get_by_label("Reason").fill("the fan's loud")
    drain.get_by_role("button").click()
    expect(page.locator("#ask-command")).to_have_text("hctl drain n1 'the fan'\\''s loud'")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#ask-command")).to_have_text("hctl resume n1")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#nodes")).not_to_contain_text("loud")
    for name, value in (
        ("Name", "weekend"),
        ("Start", "now+1hour"),
        ("Duration", "60"),
        ("Users", "root"),
        ("Flags", "MAINT"),
    ):
        page.locator("form[data-verb='reservations/create']").get_by_label(name, exact=True).fill(value)
    page.locator("form[data-verb='reservations/create']").get_by_label("Nodes", exact=True).fill("n1")
    page.get_by_role("button", name="Reserve").click()
    expect(page.locator("#ask-command")).to_have_text(
        "hctl create reservation weekend StartTime=now+1hour Duration=60 Nodes=n1 Users=root Flags=MAINT"
    )
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#reservations")).to_contain_text("None.")


def test_a_service_is_scaled_and_stopped_from_its_page(served: Served, page: Page) -> None:
    script = served.base / "serve.sh"
    script.write_text("#!/bin/sh\n#HSUB --serve=web\nsleep 600\n")
    served.cluster.run("hsub", str(script))
    page.goto(at(served, "/services"))
    line = page.get_by_role("row", name="web", exact=False).first
    expect(line).to_contain_text("0/1")
    page.get_by_label("Least replicas").fill("0")
    page.get_by_label("Most replicas").fill("2")
    page.get_by_role("button", name="Scale").click()
    expect(page.locator("#ask-command")).to_have_text("hserve scale web 0-2")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(line).to_contain_text("0–2")
    page.get_by_role("button", name="Stop web").click()
    expect(page.locator("#ask-command")).to_have_text("hserve stop web")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_text("None: hserve start")).to_be_visible()
    assert "web" not in served.cluster.run("hserve", "ls").stdout


def test_an_administrator_silences_an_alert_and_ends_the_silence(served: Served, page: Page) -> None:
    """The gateway's certificate ends in three days, which is an alert."""
    wait_until(lambda: "CertificateExpires" in served.cluster.run("hctl", "alerts").stdout, what="the alert")
    page.goto(at(served, "/alerts"))
    page.get_by_role("button", name="Silence CertificateExpires for 2h").click()
    expect(page.locator("#ask-command")).to_have_text("hctl silence rule=CertificateExpires 2h")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#silences")).to_contain_text("rule=CertificateExpires")
    assert "from the web page" in served.cluster.run("hctl", "silence").stdout
    page.get_by_role("button", name="End", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#silences")).to_contain_text("None.")
    assert "no silences" in served.cluster.run("hctl", "silence").stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_barrier_for_people_with_disabilities(served: Served, page: Page, scheme: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python")
    script = Path(axe.__file__).with_name("axe.min.js").read_text()
    context = page.context.browser.new_context(  # type: ignore[union-attr]
        ignore_https_errors=True, bypass_csp=True, color_scheme=scheme, storage_state=page.context.storage_state()
    )
    plain = context.new_page()
    job = served.cluster.run("hsub", "--parsable", "-D", "/tmp", "--wrap", "echo out").stdout.strip()
    paths = [
        "/",
        "/jobs",
        "/nodes",
        "/node/n1",
        "/queue",
        "/use",
        "/use/report",
        "/submit",
        "/alerts",
        "/network",
        "/admin",
        "/login",
        "/job/none",
    ]
    paths += ["/plan?params=7B", "/plan/worth?add=1x4:8G"]
    paths += [f"/job/{job}{page}" for page in ("", "/log", "/files", "/checkpoints", "/open", "/terminal")]
    paths += ["/submit?template=jupyter"]
    wrong = []
    for path in paths:
        plain.goto(at(served, path))
        plain.evaluate(script)
        found = plain.evaluate("() => axe.run()")
        assert len(found["passes"]) > 10
        wrong += [(path, one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]]
    context.close()
    assert wrong == []
