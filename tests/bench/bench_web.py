"""The web pages as people see them: in Chromium, in front of a gateway and of a controller over nodes that are only pretended.

Pages of 50 nodes and 200 jobs, and of 1,000 nodes and 10,000 jobs: bytes, requests, first paint, ready. The time from a change
to the page that shows it, and from a line of output to the page. The processor time of gateway and controller for 100 open pages,
each of them a client as the pages' script is one: it reads the events, and asks for its page again after a change.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import random
import select
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from hpcsched import client  # noqa: E402
from tests.bench.figures import Figure, from_samples  # noqa: E402
from tests.chromium import chromium  # noqa: E402
from tests.gateway_server import AS_ROOT, GATEWAY, certificate, free_port, serving  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

PATIENCE_S = 120.0  # whatever is waited for longer has failed
PAGES, USERS = 100, 10
CHANGE_EVERY_S = 10.0
GATHER_S, REFRESH_S = 0.1, 1.0  # of the script
PATHS = ("/", "/jobs", "/nodes", "/queue")
LOADED = """() => {
  const all = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  const paint = performance.getEntriesByType("paint").find((one) => one.name === "first-paint");
  return {
    bytes: all.reduce((sum, one) => sum + one.transferSize, 0), requests: all.length,
    paint: paint ? paint.startTime : NaN, ready: all[0].loadEventEnd, page: all[0].transferSize,
  };
}"""
CHANGED = """async ([job, verb, mostMs]) => {
  const cell = () => document.querySelector(`#job-${job} td:last-child`)?.textContent ?? "";
  const before = cell();
  const seen = new Promise((done, fail) => {
    new MutationObserver(() => cell() !== before && done()).observe(document.body, { subtree: true, childList: true });
    setTimeout(() => fail(new Error(`after ${verb} the page still says of job ${job}: ${before}`)), mostMs);
  });
  const began = performance.now();
  const answer = await fetch(`/api/v1/${verb}`, {
    method: "POST", headers: { "content-type": "application/json", "x-requested-with": "bench" },
    body: JSON.stringify({ jobs: [job] }),
  });
  const { error, errors } = await answer.json();
  if (error || errors?.length) throw new Error(JSON.stringify(error ?? errors));
  await seen;
  return performance.now() - began;
}"""
LINES = """() => {
  window.late = [];
  const log = document.getElementById("log");
  new MutationObserver(() => {
    const now = Date.now();
    for (const [, at] of log.textContent.matchAll(/line at ([0-9]+)/g)) {
      if (!window.late.some((one) => one[0] === at)) window.late.push([at, now - Number(at)]);
    }
  }).observe(log, { subtree: true, childList: true, characterData: true });
}"""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A controller over pretended nodes, and its gateway."""

    base: Path
    port: int
    env: dict[str, str]
    pids: tuple[int, int]  # of the controller and the gateway

    def run(self, *words: str) -> str:
        """Run a command of ours, and return what it prints."""
        return printed_by(*words, env=self.env)

    def processor_s(self) -> float:
        """Return the processor time of controller and gateway so far."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def printed_by(*words: str, env: dict[str, str]) -> str:
    """Run a command, and return what it prints."""
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.stdout.strip()


def next_line(stream: IO[str] | None, what: str) -> str:
    """Return the next line of a process that writes one line for each of ours.

    Raises: TimeoutError if it does not come.
    """
    assert stream is not None
    if not select.select([stream], [], [], PATIENCE_S)[0]:
        raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
    return stream.readline().strip()


@contextmanager
def head_with_gateway(nodes: int, jobs: int) -> Iterator[Head]:
    """Start both; the jobs that start run for hours, so that what changes is what the caller changes."""
    base = Path(tempfile.mkdtemp(prefix="bench-web-"))
    for path in (base, base / "run", base / "etc"):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    certificate(base, "gateway")
    port = free_port()
    gateway: dict[str, Any] = {
        "port": port, "url": f"https://localhost:{port}", "certificate": str(base / "gateway.crt"),
        "key": str(base / "gateway.key"), "rate": 0, "connections_per_address": 1000, **({"user": GATEWAY} if AS_ROOT else {}),
    }  # fmt: skip
    tables = {"gateway": gateway, "controller": {"run_dir": str(base / "run"), "request_rate": 0}}
    lines = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
             for name, table in tables.items()]  # fmt: skip
    (base / "etc" / "hpcsched.toml").write_text("\n".join(lines))
    env = {**os.environ, "HPCSCHED_CONFIG": str(base / "etc"), "HPCSCHED_API": str(base / "run" / "api.sock")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    words = [sys.executable, "-m", "tests.bench.planning_head", env["HPCSCHED_API"], str(nodes), str(jobs), "easy"]
    words += [json.dumps(tables), "36000-72000"]
    log = base / "gateway.log"
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
        try:
            if next_line(controller.stdout, "the controller to start") != "ready":
                raise RuntimeError("the controller did not start")
            with (
                log.open("wb") as stream,
                subprocess.Popen(["hpcsched", "gateway"], env=env, stderr=stream, cwd="/") as served,
            ):
                try:
                    wait_until(lambda: b"ready at" in log.read_bytes() or served.poll() is not None)
                    yield Head(base=base, port=port, env=env, pids=(controller.pid, served.pid))
                finally:
                    served.terminate()
            controller.communicate("stop\n", timeout=PATIENCE_S)
        finally:
            controller.kill()
            shutil.rmtree(base)


# ----- in Chromium


@contextmanager
def browser_of(port: int, env: dict[str, str]) -> Iterator[Any]:
    """Return a function that makes a page of a browser of its own, with one session for all."""
    with chromium() as browser:
        context = browser.new_context(ignore_https_errors=True)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        # An administrator's: the jobs belong to another user.
        page.goto(printed_by("hpcsched", "web", "--scope=read,submit,manage,admin", env=env))
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"https://localhost:{port}/")
        state = context.storage_state()
        context.close()

        def new_page() -> Any:
            made = browser.new_context(ignore_https_errors=True, bypass_csp=True, storage_state=state).new_page()
            made.set_default_timeout(PATIENCE_S * 1000)
            return made

        yield new_page


def loaded(new_page: Any, port: int, path: str, times: int) -> list[dict[str, float]]:
    """Return what a page took, each time with an empty cache."""
    found = []
    for _ in range(times):
        page = new_page()
        page.goto(f"https://localhost:{port}{path}", wait_until="load")
        page.wait_for_function("() => performance.getEntriesByType('paint').length > 0")
        found.append(page.evaluate(LOADED))
        page.context.close()
    return found


def waiting_job(head: Head) -> str:
    """Return the first waiting job, which the overview shows."""
    jobs = client.call(
        "GET", client.query("/v1/jobs", state="PENDING", limit="1"), where=Path(head.env["HPCSCHED_API"])
    )
    return str(jobs["jobs"][0]["id"])


def small_pages(head: Head, new_page: Any, quick: bool) -> list[Figure]:
    """Return what the overview of 50 nodes takes, and how long a change takes to be on it."""
    found = loaded(new_page, head.port, "/", 5 if quick else 15)
    figures = [
        from_samples(f"overview of 50 nodes, 200 jobs: {name}", [one[key] for one in found], unit, bar=bar)
        for name, key, unit, bar in (
            ("bytes", "bytes", "B", "<= 40,000 B"),
            ("requests", "requests", "", "<= 5"),
            ("first paint", "paint", "ms", "<= 300 ms"),
            ("ready", "ready", "ms", "<= 500 ms"),
        )
    ]
    page = new_page()
    page.goto(f"https://localhost:{head.port}/")
    page.locator("#status", has_text="Up to date").wait_for()  # the stream is open
    job, chance, took = waiting_job(head), random.Random(1), []
    for number in range(20 if quick else 60):
        time.sleep(chance.uniform(0.0, 3.0))
        took.append(page.evaluate(CHANGED, [job, "release" if number % 2 else "hold", PATIENCE_S * 1000]))
    page.context.close()
    figures.append(from_samples("a change is on the page after", took, "ms"))
    figures.append(
        Figure(name="the same, 95 of 100", value=sorted(took)[int(len(took) * 0.95)], unit="ms", bar="<= 1,000 ms")
    )
    return figures


def large_pages(quick: bool) -> list[Figure]:
    """Return what the first pages of 1,000 nodes and 10,000 jobs take."""
    figures = []
    with head_with_gateway(1_000, 10_000) as head, browser_of(head.port, head.env) as new_page:
        for path in PATHS:
            found = loaded(new_page, head.port, path, 3 if quick else 7)
            what = f"{path} of 1,000 nodes, 10,000 jobs"
            figures.append(from_samples(f"{what}: bytes", [one["bytes"] for one in found], "B", bar="<= 150,000 B"))
            figures.append(from_samples(f"{what}: ready", [one["ready"] for one in found], "ms", bar="<= 1,000 ms"))
    return figures


def live_log(quick: bool) -> list[Figure]:
    """Return how late a line of output is on the page of a job that runs on a real node."""
    with serving() as served, browser_of(served.port, served.cluster.env) as new_page:
        folder = served.base / "work"
        folder.mkdir(mode=0o777)
        words = ["hsub", "--parsable", "-D", str(folder), "-o", "out.txt", "--wrap", "echo begins; sleep 3600"]
        job = served.cluster.run(*words).stdout.strip()
        wait_until(lambda: (folder / "out.txt").exists())
        page = new_page()
        page.goto(f"https://localhost:{served.port}/job/{job}/log")
        page.locator("#log", has_text="begins").wait_for()
        page.evaluate(LINES)
        chance, count = random.Random(1), 20 if quick else 100
        for _ in range(count):
            time.sleep(chance.uniform(0.0, 0.6))
            with (folder / "out.txt").open("a") as output:
                output.write(f"line at {time.time() * 1000:.0f}\n")
        page.wait_for_function(f"() => window.late.length === {count}")
        late = [one[1] for one in page.evaluate("() => window.late")]
        served.cluster.run("hcancel", job)
    last = sorted(late)[int(len(late) * 0.95)]
    return [
        from_samples("a line of output is on the page after", late, "ms", bar="<= 300 ms"),
        Figure(name="the same, 95 of 100", value=last, unit="ms", bar="<= 300 ms"),
    ]


# ----- open pages


class OpenPage:
    """A page as a browser keeps it open: a stream of events, and its page again after a change."""

    def __init__(self, port: int, token: str, context: ssl.SSLContext) -> None:
        self._port, self._token, self._context = port, token, context
        self._refresh: asyncio.Task[None] | None = None
        self._refreshed_s, self._pace_s = 0.0, REFRESH_S
        self.shown_s: list[float] = []  # when it was up to date again
        self.is_open = asyncio.Event()

    async def keep(self) -> None:
        """Read events until cancelled."""
        await self._connect()
        reader, writer = await asyncio.open_connection("localhost", self._port, ssl=self._context)
        writer.write(self._request("/api/v1/events"))
        await reader.readuntil(b"\r\n\r\n")
        await self._ask()
        self.is_open.set()
        async for line in reader:
            if line.startswith(b"event: job") and (self._refresh is None or self._refresh.done()):
                self._refresh = asyncio.create_task(self._soon())

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("localhost", self._port, ssl=self._context)

    async def _soon(self) -> None:
        await asyncio.sleep(max(GATHER_S, self._refreshed_s + self._pace_s - time.monotonic()))
        self._refreshed_s = time.monotonic()
        await self._ask()
        self.shown_s.append(time.monotonic())

    async def _ask(self) -> None:
        while True:
            try:
                self._writer.write(self._request("/"))
                head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            except (asyncio.IncompleteReadError, ConnectionError):  # closed after it was idle
                await self._connect()
                continue
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            self._pace_s = max(REFRESH_S, int(fields[b"x-hpcsched-refresh-ms"]) / 1000)
            await self._reader.readexactly(int(fields[b"content-length"]))
            if not head.startswith(b"http/1.1 429"):  # too many at once
                break
            await asyncio.sleep(max(self._pace_s, int(fields[b"retry-after"])))
        assert head.startswith(b"http/1.1 200"), head

    def _request(self, path: str) -> bytes:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._token}\r\n"
        return f"{head}Accept-Encoding: gzip\r\n\r\n".encode()


async def keep_open(port: int, ca: str, tokens: list[str]) -> None:
    """Keep a page open for each token; print when they are, and for each line that comes how late each was after it."""
    context = ssl.create_default_context(cafile=ca)
    pages = [OpenPage(port, token, context) for token in tokens]
    tasks = [asyncio.create_task(page.keep()) for page in pages]
    async with asyncio.timeout(PATIENCE_S):
        for page in pages:
            await page.is_open.wait()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        since_s = float(line)
        late = [page.shown_s[-1] - since_s for page in pages if page.shown_s and page.shown_s[-1] > since_s]
        print(json.dumps(late), flush=True)
    for task in tasks:
        task.cancel()


def open_pages(head: Head, quick: bool) -> list[Figure]:
    """Return the processor time of 100 open pages: without changes, and with a change every 10 seconds."""
    users = [one.pw_name for one in pwd.getpwall() if one.pw_name != GATEWAY][:USERS] if AS_ROOT else [""]
    count = PAGES if AS_ROOT else PAGES // 2  # the requests of one user at a time are bounded
    tokens = [
        head.run("hctl", "token", "create", "--scope=read", *([f"--user={user}"] if user else []))
        for user in users
        for _ in range(count // len(users))
    ]
    words = [sys.executable, __file__, str(head.port), str(head.base / "gateway.crt"), *tokens]
    job = waiting_job(head)
    for_s = 30.0 if quick else 120.0
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as opened:
        assert opened.stdin is not None
        assert next_line(opened.stdout, "pages to open") == "ready"
        time.sleep(5.0)
        idle = _load(head, for_s)
        changes, late = [], []
        began_s, used_s = time.monotonic(), head.processor_s()
        while time.monotonic() - began_s < for_s:
            changes.append(time.monotonic())
            head.run("hctl", "release" if len(changes) % 2 == 0 else "hold", job)
            time.sleep(max(0.0, changes[-1] + CHANGE_EVERY_S - time.monotonic()))
            opened.stdin.write(f"{changes[-1]}\n")
            opened.stdin.flush()
            late += json.loads(next_line(opened.stdout, "how late the pages are"))
        busy = (head.processor_s() - used_s) / (time.monotonic() - began_s)
        opened.stdin.close()
    what = f"{len(tokens)} open pages"
    return [
        Figure(name=f"{what}, nothing changes: of a core", value=100 * idle, unit="%", bar="<= 10 %"),
        Figure(
            name=f"{what}, a change each {CHANGE_EVERY_S:g} s: of a core", value=100 * busy, unit="%", bar="<= 10 %"
        ),
        Figure(
            name="pages that showed a change", value=len(late) / max(1, len(changes)), unit="", bar=f"{len(tokens)}"
        ),
        from_samples("one of them shows a change after", [1000 * one for one in late] or [float("nan")], "ms"),
        Figure(
            name="the same, 95 of 100", value=1000 * statistics.quantiles(late, n=20)[-1], unit="ms", bar="<= 1,000 ms"
        ),
    ]


def _load(head: Head, for_s: float) -> float:
    began_s, used_s = time.monotonic(), head.processor_s()
    time.sleep(for_s)
    return (head.processor_s() - used_s) / (time.monotonic() - began_s)


def run(quick: bool) -> list[Figure]:
    """Measure all."""
    with head_with_gateway(50, 200) as head:
        with browser_of(head.port, head.env) as new_page:
            figures = small_pages(head, new_page, quick)
        figures += open_pages(head, quick)
    return [*figures, *large_pages(quick), *live_log(quick)]


if __name__ == "__main__":
    asyncio.run(keep_open(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
