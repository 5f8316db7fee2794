"""What jobs serve, in the browser of their user alone: tickets, cookies, hosts, origins, floods, the end of sessions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jwt")
pytest.importorskip("uvicorn")

from gateway_server import AS_ROOT, Served, serving
from served_job import Browser, frame, half_read, headers_of, submit, text_of
from waiting import wait_until


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(connections_per_address=500) as found:
        yield found


@pytest.fixture(scope="module")
def browser(served: Served) -> Browser:
    return Browser.of_root(served)


@pytest.fixture(scope="module")
def job(served: Served) -> str:
    return submit(served)


@pytest.fixture(scope="module")
def cookie(browser: Browser, job: str) -> str:
    return browser.cookie(job)


# ----- what passes


def test_a_request_reaches_the_job_without_the_gateways_secrets(browser: Browser, job: str, cookie: str) -> None:
    sent = {"Authorization": "Bearer x", "X-Forwarded-For": "192.0.2.1", "X-Hpcsched-Session": "x", "TE": "trailers"}
    sent |= {"X_Hop": "1", "Connection": "keep-alive, X-Hop", "Accept": "text/plain"}
    answer = browser.ask(job, "/a%2Fb/..?q=%20&q=2", f"a=1; {browser.session}; {cookie}; b=2", **sent)
    assert answer[0] == 200
    seen = headers_of(answer[1])
    assert (answer[1]["job"], answer[1]["path"]) == (job, "/a%2Fb/..?q=%20&q=2")
    assert seen["cookie"] == "a=1; b=2"
    assert seen["host"] == browser.host(job)
    assert (seen["accept"], seen["x-forwarded-proto"]) == ("text/plain", "https")
    assert not {"authorization", "x-forwarded-for", "x-hpcsched-session", "te", "x-hop"} & seen.keys()
    assert not [value for value in seen.values() if "hpcsched" in value and "localhost" not in value]


def test_a_job_sets_cookies_for_its_own_origin_only(browser: Browser, job: str, cookie: str) -> None:
    connection = browser.served.connect()
    connection.request("GET", "/cookies", headers={"Host": browser.host(job), "Cookie": cookie})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    cookies = [value for name, value in answer.getheaders() if name.lower() == "set-cookie"]
    assert cookies == ["mine=1; Path=/"]
    assert answer.getheader("x-secret") is None


def test_bodies_and_websockets_pass_in_both_directions(browser: Browser, job: str, cookie: str) -> None:
    connection = browser.served.connect()
    body = os.urandom(20 << 20)  # more than the API takes
    connection.request("PUT", "/upload", body, {"Host": browser.host(job), "Cookie": cookie})
    answer = connection.getresponse().read()
    assert f'"body": {len(body)}'.encode() in answer
    connection.close()
    status, sock = browser.websocket(job, cookie)
    assert status == 101
    for text in (b"first", b"second"):
        sock.sendall(frame(text))
        assert sock.recv(100) == bytes([0x81, len(text)]) + text
    sock.close()


# ----- who may


def test_nobody_else_opens_a_job_not_even_an_admin(served: Served, browser: Browser, job: str) -> None:
    status, answer, _ = served.ask("POST", f"/job/{job}/open", {}, Host=f"localhost:{served.port}")
    if AS_ROOT:  # the token is of another user, and the session of root
        assert (status, "it belongs to root" in answer["error"]) == (403, True)
        theirs = served.ask(
            "POST",
            "/api/v1/submit",
            {"jobs": [{"name": "theirs", "script": "#!/bin/sh\nsleep 600\n", "work_dir": "/tmp"}]},
        )[1]["jobs"][0]["job_id"]
        status, answer = Browser.of_root(served, "read,submit,manage,admin").ask_to_open(str(theirs))
        assert (status, "it belongs to" in text_of(answer)) == (403, True)
        served.cluster.run("hcancel", str(theirs), check=False)
    assert served.ask("POST", f"/job/{job}/open", {}, token="", Host=f"localhost:{served.port}")[0] == 401


def test_a_session_without_the_scope_submit_opens_no_job(served: Served, job: str) -> None:
    status, answer = Browser.of_root(served, "read").ask_to_open(job)
    assert (status, "it needs the scope submit" in answer["error"]) == (403, True)


def test_a_ticket_works_once_and_at_its_job_only(served: Served, browser: Browser, job: str) -> None:
    other = submit(served)
    first, second = browser.ticket(job), browser.ticket(other)
    assert browser.enter(job, first)[0] == 200
    for ticket, where in ((first, job), (second, job), (second, other), ("", job), ("x" * 5000, job)):
        status, answer, headers = browser.enter(where, ticket)
        assert (status, "set-cookie" in headers) == (401, False), answer
    served.cluster.run("hcancel", other)


def test_the_cookie_of_one_job_is_refused_at_another(served: Served, browser: Browser, job: str, cookie: str) -> None:
    other = submit(served)
    browser.cookie(other)
    for wrong in (cookie, browser.session, "", "__Host-hpcsched-job=x"):
        status, answer, _ = browser.ask(other, "/", wrong)
        assert (status, "open it from its page" in text_of(answer)) == (401, True)
        assert browser.websocket(other, wrong)[0] == 401
    served.cluster.run("hcancel", other)


def test_other_hosts_show_no_job(browser: Browser, job: str, cookie: str) -> None:
    hosts = [f"job-{job}.evil.example", f"job-{job}.localhost.evil.example", f"xjob-{job}.localhost", f"job-{job}"]
    hosts += [f"job-0{job}.localhost", "job-99999999999999999999.localhost", "localhost", f"job-{job}.localhost@evil"]
    for host in hosts:
        status, answer, _ = browser.ask(job, "/headers", cookie, Host=host)
        assert status in (401, 404), (host, status)
        assert "headers" not in answer, host


def test_the_cookie_of_a_job_opens_nothing_at_the_gateway(served: Served, browser: Browser, cookie: str) -> None:
    stolen = cookie.replace("-job=", "=")
    for sent in (cookie, stolen):
        assert served.ask("GET", "/api/v1/me", token="", Cookie=sent)[0] == 401


# ----- pages of other origins


def test_pages_of_other_origins_reach_no_job(browser: Browser, job: str, cookie: str) -> None:
    for origin in ("https://evil.example", f"https://localhost:{browser.served.port}", browser.origin("99"), "null"):
        assert browser.ask(job, "/", cookie, Origin=origin)[0] == 403
        assert browser.ask(job, "/", cookie, "POST", Origin=origin)[0] == 403
        assert browser.websocket(job, cookie, Origin=origin)[0] == 403
        assert browser.enter(job, "x", Origin=origin)[0] == 403
    for site, dest, status in (
        ("same-site", "image", 403),
        ("same-site", "iframe", 403),
        ("cross-site", "document", 200),
    ):
        sent = {"Sec_Fetch_Site": site, "Sec_Fetch_Dest": dest}
        assert browser.ask(job, "/", cookie, **sent)[0] == status
    connection = browser.raw()
    connection.sendall(
        f"GET /socket HTTP/1.1\r\nHost: {browser.host(job)}\r\nCookie: {cookie}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\n\r\n".encode()
    )
    assert b" 403 " in connection.recv(20)  # without an Origin


def test_a_page_of_a_job_uses_no_session_of_the_gateway(served: Served, browser: Browser, job: str) -> None:
    here = f"localhost:{served.port}"
    for path in ("/api/v1/me", "/", f"/job/{job}"):
        sent = {"Cookie": browser.session, "Host": here}
        assert served.ask("GET", path, token="", **sent)[0] == 200
        assert served.ask("GET", path, token="", Origin=browser.origin(job), **sent)[0] == 403
    assert browser.ask_to_open(job, Origin=browser.origin(job))[0] == 403
    assert browser.ask_to_open(job, Origin=f"https://{here}")[0] == 200


# ----- hostile servers, slow readers, ends


def test_answers_that_are_no_http_or_too_long_are_refused(browser: Browser, job: str, cookie: str) -> None:
    for path, why in (("/long-head", "HTTP/1.1"), ("/no-http", "HTTP/1.1")):
        status, answer, _ = browser.ask(job, path, cookie)
        assert (status, why in answer["error"]) == (502, True), answer
    status = browser.ask(job, "/", f"{cookie}; long={'a' * (40 << 10)}")[0]
    assert status in (400, 431)
    assert browser.ask(job, "/", cookie)[0] == 200


def memory_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) >> 10


def test_a_reader_that_stops_takes_no_memory(served: Served, browser: Browser, job: str, cookie: str) -> None:
    before = memory_mib(served.pid)
    open_now = [half_read(browser, job, cookie, "/endless") for _ in range(20)]
    for _ in range(50):  # others are served meanwhile
        assert browser.ask(job, "/", cookie)[0] == 200
    assert memory_mib(served.pid) - before < 64
    for sock in open_now:
        sock.close()


def test_connections_to_a_job_are_bounded(served: Served, browser: Browser, job: str, cookie: str) -> None:
    sockets = [browser.websocket(job, cookie) for _ in range(70)]
    statuses = [status for status, _ in sockets]
    assert statuses.count(101) <= 64
    assert statuses[-1] == 502
    for _, sock in sockets:
        sock.close()
    wait_until(lambda: browser.ask(job, "/", cookie)[0] == 200, what="room for connections")


def test_a_job_that_ends_says_so_and_its_websockets_end(served: Served, browser: Browser) -> None:
    job = submit(served)
    cookie = browser.cookie(job)
    _, sock = browser.websocket(job, cookie)
    served.cluster.run("hcancel", job)
    assert sock.recv(100) == b""
    sent = {"Accept": "text/html", "Sec_Fetch_Dest": "document"}
    wait_until(lambda: b"it is CANCELLED" in browser.ask(job, "/", cookie, **sent)[1], what="the end of the job")
    status, answer, _ = browser.ask(job, "/", cookie, **sent)
    assert (status, b"The page of the job" in answer) == (502, True)


def test_a_revoked_session_loses_its_open_streams(served: Served, job: str) -> None:
    browser = Browser.of_root(served)
    cookie = browser.cookie(job)
    _, sock = browser.websocket(job, cookie)
    sock.settimeout(60)
    session = browser.session.partition("=")[2].partition(".")[0]
    served.cluster.run("hctl", "token", "revoke", session)
    assert sock.recv(100) == b""  # within a minute
    wait_until(lambda: browser.ask(job, "/", cookie)[0] == 401, what="the end of the cookie")


def test_what_was_opened_is_in_the_audit_log(served: Served, browser: Browser, job: str, cookie: str) -> None:
    records = served.cluster.api("GET", "/v1/audit?limit=5000")["records"]
    opened = [one for one in records if one["action"] == "reach-job"]
    assert opened
    assert f'"job":"{job}"' in opened[0]["after"]
    assert opened[0]["source"] == "127.0.0.1"


# ----- terminals


def shown(sock: object, text: str) -> str:
    """Return what a terminal sends until it has this text."""
    found = ""
    while text not in found:
        data = sock.recv(1 << 16)  # type: ignore[attr-defined]
        assert data, found
        found += data.decode("utf-8", "replace")
    return found


def test_a_terminal_is_a_shell_in_the_job(browser: Browser, job: str) -> None:
    status, sock = browser.terminal(job)
    assert status == 101
    sock.sendall(frame(b'{"size": [30, 90]}') + frame(b'{"keys": "stty size; echo job=$SLURM_JOB_ID.\\r"}'))
    assert "30 90" in shown(sock, f"job={job}.")
    sock.sendall(frame(b'{"keys": "exit\\r"}'))
    shown(sock, "The terminal has ended")
    sock.close()


def test_terminals_are_for_the_own_pages_of_the_gateway_and_the_own_job(
    served: Served, browser: Browser, job: str
) -> None:
    for origin in ("https://evil.example", browser.origin(job), "", "null"):
        assert browser.terminal(job, Origin=origin)[0] == 403
    assert browser.terminal(job, Cookie="")[0] == 401
    assert browser.terminal("99999")[0] == 404
    assert Browser.of_root(served, "read").terminal(job)[0] == 403
    status, _ = browser.terminal(job, Cookie="", Authorization=f"Bearer {served.token}")
    assert status == (403 if AS_ROOT else 101)
    assert served.ask("GET", f"/job/{job}/terminal/socket", token="", Cookie=browser.session)[0] == 404


@pytest.mark.parametrize(
    "said",
    [
        b"\x81\x05hello",
        frame(b"no json"),
        frame(b'{"size": [9999, 80]}'),
        b"\xff" * 20,
        b"\x82\x80aaaa",
        frame(b"[" * 120),
    ],
    ids=["unmasked", "no JSON", "too large", "no frame", "no text", "deep JSON"],
)
def test_a_browser_that_says_something_else_loses_its_terminal(browser: Browser, job: str, said: bytes) -> None:
    status, sock = browser.terminal(job)
    assert status == 101
    sock.sendall(said)
    while sock.recv(1 << 16):
        pass
    sock.close()


def test_a_flood_in_a_terminal_holds_nobody_up(served: Served, browser: Browser, job: str, cookie: str) -> None:
    before = memory_mib(served.pid)
    _, unread = browser.terminal(job)
    _, read = browser.terminal(job)
    for sock in (unread, read):
        sock.sendall(frame(b'{"keys": "yes \\u001b[31m$RANDOM\\r"}'))
    for _ in range(50):
        assert browser.ask(job, "/", cookie)[0] == 200
    read.sendall(frame(b'{"keys": "\\u0003"}') + frame(b'{"keys": "echo $((40+2))answer\\r"}'))
    shown(read, "42answer")
    assert memory_mib(served.pid) - before < 64
    for sock in (unread, read):
        sock.close()
