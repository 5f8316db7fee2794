"""The API of a real gateway: repeated requests, pages, unchanged answers, streams, bounds."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

pytest.importorskip("jwt")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from gateway_server import AS_ROOT, USER, Served, serving
from prometheus_client.parser import text_string_to_metric_families as parse_text

HELD = {"name": "x", "script": "#!/bin/sh\n", "work_dir": "/tmp", "hold": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def admin(served: Served) -> str:
    return served.cluster.run("hctl", "token", "create", "--scope=read,submit,manage,admin").stdout.strip()


def submit(served: Served, count: int = 1, **fields: object) -> list[int]:
    status, made, _ = served.ask("POST", "/api/v1/submit", {"jobs": [HELD | fields] * count})
    assert status == 200, made
    return [job["job_id"] for job in made["jobs"]]


def lines_of(served: Served, path: str, count: int, **headers: str) -> list[str]:
    """Return the first lines of a stream."""
    connection = served.connect()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers={"Authorization": f"Bearer {served.token}"} | names)
    answer = connection.getresponse()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    lines = [answer.readline().decode().rstrip("\n") for _ in range(count)]
    connection.close()
    return lines


# ----- repeated requests


def test_a_repeated_change_is_done_once_and_another_one_of_its_key_is_refused(served: Served) -> None:
    job, other = submit(served, 2)
    body = {"jobs": [str(job)], "changes": {"comment": "first"}}
    first = served.ask("POST", "/api/v1/update", body, Idempotency_Key="change")
    assert first[0] == 200
    served.ask("POST", "/api/v1/update", body | {"changes": {"comment": "second"}})
    assert served.ask("POST", "/api/v1/update", body, Idempotency_Key="change")[:2] == first[:2]
    assert served.ask("GET", f"/api/v1/job/{job}")[1]["jobs"][0]["comment"] == "second"
    for path, sent in (("update", body | {"jobs": [str(other)]}), ("hold", {"jobs": [str(job)]})):
        status, answer, headers = served.ask("POST", f"/api/v1/{path}", sent, Idempotency_Key="change")
        assert (status, answer["kind"]) == (409, "ConflictError"), path
        assert headers["content-type"] == "application/problem+json"
    assert served.ask("POST", "/api/v1/submit", {"jobs": [HELD]}, Idempotency_Key="change")[0] == 409


def test_the_key_of_a_submission_is_its_request_id(served: Served) -> None:
    first = served.ask("POST", "/api/v1/submit", {"jobs": [HELD]}, Idempotency_Key="night")
    again = served.ask("POST", "/api/v1/submit", {"jobs": [HELD], "request_id": "night"})
    assert (first[0], first[:2]) == (200, again[:2])
    assert served.ask("POST", "/api/v1/submit", {"jobs": [HELD | {"name": "y"}]}, Idempotency_Key="night")[0] == 409
    assert served.ask("POST", "/api/v1/submit", {"jobs": [HELD], "request_id": "z"}, Idempotency_Key="n")[0] == 400


@pytest.mark.parametrize("key", ["", "k" * 201, "a\tb"])
def test_a_key_is_short_and_printable(served: Served, key: str) -> None:
    assert served.ask("POST", "/api/v1/hold", {"jobs": ["1"]}, Idempotency_Key=key)[0] == 400


def test_an_answer_with_a_secret_is_not_kept(served: Served) -> None:
    head = "POST /v1/tokens/create HTTP/1.1\nHost: x\nIdempotency-Key: k\nConnection: close\nContent-Length: 2\n\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(served.cluster.api_socket))
        sock.sendall(head.replace("\n", "\r\n").encode() + b"{}")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert b" 400 " in answer
    assert b"has a secret" in answer


def test_every_change_takes_a_key_as_its_description_says(served: Served) -> None:
    described = served.ask("GET", "/api/v1/openapi.json")[1]["paths"]
    for path, methods in described.items():
        if "post" in methods:
            named = [one["name"] for one in methods["post"]["parameters"]]
            assert ("Idempotency-Key" in named) is (path not in ("/api/v1/test", "/api/v1/command")), path
            if "Idempotency-Key" in named:
                status, answer, _ = served.ask("POST", path, {}, Idempotency_Key="k" * 201)
                assert (status, "idempotency key" in answer["detail"]) == (400, True), path


# ----- pages


def test_every_list_comes_in_pages(served: Served, admin: str) -> None:
    for number in range(3):
        served.cluster.run("hctl", "token", "create", f"--name=t{number}", *([f"--user={USER}"] if AS_ROOT else []))
        made = {
            "name": f"r{number}",
            "changes": {"starttime": f"now+{1 + number}days", "duration": "60", "users": USER, "nodecnt": "1"},
        }
        assert served.ask("POST", "/api/v1/reservations/create", made, token=admin)[0] == 200, made
    submit(served, 5, hold=False, begin_at_s=4_000_000_000)
    lists = {
        "tokens": "tokens",
        "reservations": "reservations",
        "shares": "shares",
        "priorities": "jobs",
        "nodes": "nodes",
    }
    for path, name in lists.items():
        whole = served.ask("GET", f"/api/v1/{path}")[1]
        assert len(whole[name]) >= (1 if path == "nodes" else 2), path
        pages, cursor = [], ""
        while True:
            status, page, _ = served.ask("GET", f"/api/v1/{path}?limit=1&cursor={cursor}")
            assert status == 200, page
            pages += page[name]
            cursor = page.get("next_cursor", "")
            if not cursor:
                break
        assert _without_times(pages) == _without_times(whole[name]), path
    for cursor in ("x", "-1.a", "9" * 30 + ".a"):
        assert served.ask("GET", f"/api/v1/tokens?cursor={cursor}")[0] in (200, 400), cursor


def _without_times(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in item.items() if type(value) is not float and name != "factors"}
        for item in items
    ]


def test_the_history_comes_in_pages_from_the_newest_to_the_oldest(served: Served) -> None:
    made = submit(served, 7, name="of-the-history")
    pages, cursor = [], ""
    while True:
        page = served.ask("GET", f"/api/v1/history?name=of-the-history&limit=3&cursor={cursor}")[1]
        pages.append([job["id"] for job in page["jobs"]])
        cursor = page.get("next_cursor", "")
        if not cursor:
            break
    assert pages == [made[4:], made[1:4], made[:1]]


# ----- unchanged answers


@pytest.mark.parametrize("path", ["nodes", "partitions", "shares", "config", "history", "me", "queue", "tokens"])
def test_an_unchanged_answer_has_no_body(served: Served, path: str) -> None:
    def unchanged() -> bool:  # a node or a job may change in between
        tag = served.ask("GET", f"/api/v1/{path}")[2]["etag"]
        status, body, headers = served.ask("GET", f"/api/v1/{path}", If_None_Match=f'"other", {tag}')
        return (status, body, headers["etag"]) == (304, b"", tag)

    wait_until(unchanged)


# ----- streams


def test_a_stream_of_events_continues_after_the_last_id(served: Served) -> None:
    job = submit(served, 2)[0]  # two events at least, whatever the nodes do
    lines = lines_of(served, "/api/v1/events?after=0", 8)  # perhaps of nodes: all events have one order
    assert [lines[0], lines[4]] == ["id: 1", "id: 2"]
    assert lines_of(served, "/api/v1/events", 4, Last_Event_ID="1") == lines[4:]
    # A stream that begins now has an id before its first event, so that a client misses none.
    begun = lines_of(served, "/api/v1/events", 1)[0]
    assert begun.startswith("id: ")
    served.ask("POST", "/api/v1/cancel", {"jobs": [str(job)]})
    after = lines_of(served, "/api/v1/events", 4, Last_Event_ID=begun[4:])
    assert json.loads(after[2].removeprefix("data: "))["job_id"] == job


def test_output_that_is_continued_has_whole_characters(served: Served) -> None:
    folder = Path(tempfile.mkdtemp(dir=served.cluster.share))
    folder.chmod(0o777)
    half, rest = "h\u00e9".encode()[:2], "h\u00e9llo\n".encode()[2:]
    (folder / "half").write_bytes(half)
    (folder / "rest").write_bytes(rest)
    os.mkfifo(folder / "fifo")
    (folder / "fifo").chmod(0o666)
    script = f"#!/bin/sh\ncat {folder}/half\nread x < {folder}/fifo\ncat {folder}/rest\n"
    job = submit(served, script=script, hold=False, work_dir=str(folder), time_limit_s=600)[0]
    out = folder / f"slurm-{job}.out"
    wait_until(lambda: out.exists() and out.read_bytes() == half)
    path = f"/api/v1/log/stream?job={job}"
    lines = lines_of(served, path, 3)
    assert lines == ["id: 1", "event: output", 'data: {"offset": 0, "data": "h"}']
    (folder / "fifo").write_text("x\n")
    found = b""
    connection = served.connect()
    connection.request("GET", path, headers={"Authorization": f"Bearer {served.token}", "Last-Event-ID": "1"})
    stream: http.client.HTTPResponse = connection.getresponse()
    while b"event: end" not in found:
        found += stream.readline()
    connection.close()
    texts = [json.loads(line[6:]).get("data", "") for line in found.split(b"\n") if line.startswith(b"data: ")]
    assert "".join(texts) == "\u00e9llo\n"


# ----- bounds


@pytest.mark.parametrize(
    "query",
    [
        "jobs?limit=0", "jobs?limit=10001", "jobs?limit=99999999999999999999", "jobs?limit=1e3", "history?start_s=nan",
        "history?end_s=-1", "log?job=1&wait_s=21", "log?job=1&limit=1048577", "log?job=1&offset=-1", "queue?width=1001",
        "events?after=-1", "jobs?limit=\u0661", "jobs?name=%00", "jobs?limit=1&limit=2", "jobs?colour=2",
    ],
)  # fmt: skip
def test_a_number_outside_of_its_bounds_is_refused(served: Served, query: str) -> None:
    from urllib.parse import quote

    status, answer, _ = served.ask("GET", "/api/v1/" + quote(query, safe="/?=&%"))
    assert (status, answer["kind"]) == (400, "RequestError")


# ----- metrics


def test_metrics_are_for_tokens_with_their_scope_and_come_compressed(served: Served) -> None:
    token = served.cluster.run("hctl", "token", "create", "--scope=metrics").stdout.strip()

    def got(path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = served.connect()
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = answer.status, dict(answer.headers.items()), answer.read()
        connection.close()
        return found

    mine = {"Authorization": f"Bearer {token}"}
    status, headers, body = got("/metrics", **mine)
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b"hpcsched_build_info{" in body
    whole = wait_until(lambda: b"hpcsched_node_load1{" in (page := got("/metrics", **mine)[2]) and page.decode())
    samples = [(one.name, *sorted(one.labels.items())) for family in parse_text(whole) for one in family.samples]
    assert len(samples) == len(set(samples)) > 100
    assert 'hpcsched_http_request_seconds_count{route="/metrics",code="200"}' in whole
    status, headers, packed = got("/metrics", Accept_Encoding="gzip", Accept="application/openmetrics-text", **mine)
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert gzip.decompress(packed).endswith(b"# EOF\n")
    assert b"slurm_jobs_running" in got("/metrics/jobs", **mine)[2]
    assert got("/metrics/..%2Fv1%2Fjobs", **mine)[0] == 404
    assert got("/metrics?x=1", **mine)[0] == 400
    assert got("/metrics")[0] == 401
    assert got("/metrics", Authorization=f"Bearer {served.token}")[0] == 403


# ----- hmon from a laptop


def test_hmon_shows_each_screen_through_the_gateway(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textual")
    from hpcsched.tui.app import MonitorApp

    (held,) = submit(served, name="fromlaptop")
    monkeypatch.setenv("HPCSCHED_URL", f"https://localhost:{served.port}")
    monkeypatch.setenv("HPCSCHED_TOKEN", served.token)
    monkeypatch.setenv("HPCSCHED_CA_FILE", str(served.base / "gateway.crt"))
    app = MonitorApp(0.2)

    async def shown(part: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            text = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
            if part in text and "does not answer" not in text:
                return
            assert time.monotonic() < deadline_s, f"no {part!r} in\n{text}"
            await asyncio.sleep(0.05)

    async def look() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            for key, part in zip("123456", ("fromlaptop", "JobHeldUser", "n1", "NODES", "WRONG", "DUE"), strict=True):
                await pilot.press(key)
                await shown(part)
            await pilot.press("2")
            await shown("fromlaptop")
            await pilot.press("slash", *str(held), "enter", "enter")
            await shown(f"job {held}  fromlaptop")
            await pilot.press("l")
            await shown(f"output of job {held}")

    asyncio.run(look())
