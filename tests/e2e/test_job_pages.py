"""What jobs serve, and terminals in them, in a real Chromium: a small server, a real Jupyter, a shell."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("uvicorn")
pytest.importorskip("jupyter_server")

from chromium import NEEDS_CHROMIUM, chromium
from gateway_server import Served, serving
from playwright.sync_api import Page, expect
from served_job import Browser, submit
from waiting import PATIENCE_S

SCRIPTS = Path(__file__).parents[2] / "etc/templates"

pytestmark = NEEDS_CHROMIUM
expect.set_options(timeout=PATIENCE_S * 1000)

RUN_CELL = """async () => {
  document.cookie = "_xsrf=deadbeef; path=/";
  const headers = { "X-XSRFToken": "deadbeef", "content-type": "application/json" };
  const made = await fetch("/api/kernels", { method: "POST", headers, body: "{}" });
  const kernel = await made.json();
  const socket = new WebSocket(`wss://${location.host}/api/kernels/${kernel.id}/channels?session_id=s`);
  await new Promise((opened, failed) => { socket.onopen = opened; socket.onerror = failed; });
  const header = { msg_id: crypto.randomUUID(), username: "", session: "s", msg_type: "execute_request", version: "5.3",
    date: new Date().toISOString() };
  const said = new Promise((done) => {
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (message.msg_type === "stream" && message.parent_header.msg_id === header.msg_id) done(message.content.text);
    };
  });
  const code = "import os; print(6 * 7, os.environ['SLURM_JOB_ID'])";
  const content = { code, silent: false, store_history: true, user_expressions: {}, allow_stdin: false, stop_on_error: true };
  socket.send(JSON.stringify({ header, parent_header: {}, metadata: {}, content, channel: "shell", buffers: [] }));
  return await said;
}"""
# What a page of a job tries to do with the session of the gateway: each is refused by the browser or the gateway.
ATTACKS = """async (gateway) => {
  const tries = {
    read: () => fetch(`${gateway}/api/v1/me`, { credentials: "include" }).then((answer) => answer.text()),
    page: () => fetch(`${gateway}/`, { credentials: "include" }).then((answer) => answer.text()),
    change: () => fetch(`${gateway}/api/v1/cancel`, { method: "POST", credentials: "include",
      headers: { "content-type": "application/json", "x-requested-with": "x" }, body: "{}" }).then((answer) => answer.text()),
    socket: () => new Promise((opened, failed) => {
      const socket = new WebSocket(gateway.replace("https", "wss") + "/job/1/terminal/socket");
      socket.onopen = () => opened("open");
      socket.onerror = failed;
    }),
  };
  const found = {};
  for (const [name, attempt] of Object.entries(tries)) {
    found[name] = await attempt().then((text) => `read ${text.slice(0, 50)}`, () => "refused");
  }
  return { ...found, cookie: document.cookie };
}"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(connections_per_address=200) as found:
        yield found


@pytest.fixture(scope="module")
def page(served: Served) -> Iterator[Page]:
    with chromium("--ignore-certificate-errors") as browser:  # service workers need more than a page that ignores them
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(served.cluster.run("hpcsched", "web").stdout.strip())
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        yield page


def at(served: Served, path: str) -> str:
    return f"https://localhost:{served.port}{path}"


def test_a_job_is_opened_from_its_page_and_cannot_use_the_session(served: Served, page: Page) -> None:
    job = submit(served)
    page.goto(at(served, f"/job/{job}"))
    page.get_by_role("link", name="Open what it serves").click()
    page.get_by_role("button", name="Open", exact=True).click()
    page.wait_for_url(f"https://job-{job}.localhost:{served.port}/")
    expect(page.locator("body")).to_contain_text(f'"job": "{job}"')
    found = page.evaluate(ATTACKS, f"https://localhost:{served.port}")
    assert found == {"read": "refused", "page": "refused", "change": "refused", "socket": "refused", "cookie": ""}
    page.goto(f"https://job-{job}.localhost:{served.port}/page")  # the cookie stays
    expect(page.get_by_role("heading", level=1)).to_have_text("page of the job")
    served.cluster.run("hcancel", job)
    page.goto(f"https://job-{job}.localhost:{served.port}/page")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Not available")
    page.get_by_role("link", name="The page of the job").click()
    page.wait_for_url(at(served, f"/job/{job}"))


def test_an_editor_has_its_service_worker_and_the_subprotocol_of_its_socket(served: Served, page: Page) -> None:
    job = submit(served)
    page.goto(at(served, f"/job/{job}/open"))
    page.get_by_role("button", name="Open", exact=True).click()
    page.wait_for_url(f"https://job-{job}.localhost:{served.port}/")
    page.goto(f"https://job-{job}.localhost:{served.port}/editor")
    expect(page).to_have_title("made by the worker, editor.v1, echo")
    served.cluster.run("hcancel", job)


def open_jupyter(served: Served, page: Page, folder: Path) -> str:
    """Submit the form's job script, with its files in `folder`; open what it serves; return the job."""
    folder.mkdir(mode=0o777)
    page.goto(at(served, "/submit"))
    page.get_by_role("link", name="Jupyter here").click()
    script = page.locator("#script")
    text = script.input_value()
    assert "htun socket" in text
    assert "# title" not in text
    places = f"JUPYTER_RUNTIME_DIR={folder}/runtime JUPYTER_CONFIG_DIR={folder}/config IPYTHONDIR={folder}/ipython"
    script.fill(text.replace("\nsocket=", f"\nexport PATH={Path(sys.executable).parent}:$PATH {places}\nsocket=", 1))
    page.get_by_label("CPUs per task").fill("1")
    page.get_by_label("Directory").fill(str(folder))
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/job/*/open")
    job = page.url.split("/")[-2]
    page.get_by_role("button", name="Open", exact=True).click()
    page.wait_for_url(f"https://job-{job}.localhost:{served.port}/**")
    return job


def test_jupyter_from_its_job_script_runs_a_cell(served: Served, page: Page) -> None:
    job = open_jupyter(served, page, served.base / "notebooks")
    expect(page).to_have_title(re.compile("Jupyter"))
    assert page.evaluate(RUN_CELL) == f"42 {job}\n"
    served.cluster.run("hcancel", job)


@pytest.mark.skipif("HPCSCHED_COMPAT" not in os.environ, reason="NOT TESTED: takes minutes: make compat")
def test_the_page_of_jupyterlab_opens_a_notebook_and_runs_a_cell(served: Served, page: Page) -> None:
    pytest.importorskip("jupyterlab")
    statuses: list[int] = []
    page.on("response", lambda answer: statuses.append(answer.status))
    job = open_jupyter(served, page, served.base / "lab")
    page.locator(".jp-LauncherCard[data-category='Notebook']").first.click()
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.insert_text("import os; print(6 * 7, os.environ['SLURM_JOB_ID'])")
    page.keyboard.press("Shift+Enter")
    expect(page.locator(".jp-OutputArea-output").first).to_have_text(f"42 {job}")
    assert {403, 429, 502}.isdisjoint(statuses)
    served.cluster.run("hcancel", job)


def test_a_terminal_shows_a_shell_and_never_markup(served: Served, page: Page) -> None:
    job = submit(served)
    page.goto(at(served, f"/job/{job}"))
    page.get_by_role("link", name="Terminal").click()
    expect(page.locator("#status")).to_have_text("The terminal is open.")
    keys = page.get_by_label("Keyboard")
    keys.press_sequentially(
        "echo job=$SLURM_JOB_ID=$((6*7)) '<b>bold</b>'; printf '\\033]0;t\\007\\033[31mred\\033[0m\\n'"
    )
    keys.press("Enter")
    screen = page.locator("#screen")
    expect(screen).to_contain_text(f"job={job}=42 <b>bold</b>")
    expect(screen.locator("b")).to_have_count(0)
    expect(screen.locator(".fg-red")).to_have_text("red")
    keys.press_sequentially("cat > /dev/null")
    keys.press("Enter")
    keys.press("Control+c")
    keys.press_sequentially("exit")
    keys.press("Enter")
    expect(page.locator("#status")).to_contain_text("The terminal has ended")
    page.get_by_role("button", name="Open again").click()
    expect(page.locator("#status")).to_have_text("The terminal is open.")
    served.cluster.run("hcancel", job)
    expect(page.locator("#status")).to_contain_text("The terminal has ended")


def test_tensorboard_from_its_job_script_is_reached_without_a_port(served: Served) -> None:
    pytest.importorskip("tensorboard")
    script = (SCRIPTS / "tensorboard.sh").read_text()
    first, rest = script.split("\nsocket=", 1)
    name = served.base / "tensorboard.sh"
    name.write_text(f"{first}\nexport PATH={Path(sys.executable).parent}:$PATH\nsocket={rest}")
    words = ["--parsable", "--mem=0", "-D", str(served.base), "-o", str(served.base / "tensorboard.out"), str(name)]
    job = served.cluster.run("hsub", *words).stdout.strip()
    browser = Browser.of_root(served)
    status, answer, _ = browser.ask(job, "/data/environment", browser.cookie(job))
    assert (status, "data_location" in answer) == (200, True)
    served.cluster.run("hcancel", job)
