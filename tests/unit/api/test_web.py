"""The HTTP that we speak, over a socket pair: what is answered to which bytes, however they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import weakref
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import played

from hpcsched.api import web
from hpcsched.api.connection_limits import AnswerPauses, AnswerSlots, SocketLimits, bounds


async def _echo(request: web.Request) -> web.Response:
    told = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "found": request.match_info,
        "body": request.body.decode(),
    }
    return web.Response(json.dumps(told).encode())


async def _fail(request: web.Request) -> web.Response:
    raise ValueError("a fault of ours")


async def _slow(request: web.Request) -> web.Response:
    for _ in range(5):
        await asyncio.sleep(0)
    return web.Response(b'"slow"')


ROUTES = (
    web.get("/echo", _echo),
    web.post("/echo", _echo),
    web.get("/fail", _fail),
    web.get("/slow", _slow),
    web.get("/job/{ref}/why", _echo),
    web.post("/{verb:hold|release}", _echo),
)


def _refusal(status: int, why: str) -> web.Response:
    return web.Response(json.dumps({"error": why}).encode(), status)


async def _answers(pieces: Sequence[bytes]) -> bytes:
    """Return all that a server says to these bytes, sent one piece after the other, until it has nothing more to say."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = web.Server(web.Router(ROUTES), _refusal)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: web.Connection(server), theirs)
        ours.setblocking(False)
        for piece in pieces:
            await loop.sock_sendall(ours, piece)
            for _ in range(4):  # turns of the loop, in which the server reads it
                await asyncio.sleep(0)
        ours.shutdown(socket.SHUT_WR)
        said = b""
        while data := await loop.sock_recv(ours, 1 << 16):
            said += data
        await server.close()
        return said


def _ask(*pieces: bytes) -> list[tuple[int, dict[str, object]]]:
    """Return status and body of each answer."""
    rest, found = asyncio.run(_answers(pieces)), []
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 100:
            continue
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append((status, json.loads(rest[:length])))
        rest = rest[length:]
    return found


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def test_a_request_reaches_its_handler_with_its_query_and_body() -> None:
    [(status, told)] = _ask(_post("/echo?name=a%20b+c&empty=&name2=%25", b"hello"))
    assert status == 200
    assert told["query"] == {"name": "a b c", "empty": "", "name2": "%"}
    assert (told["method"], told["path"], told["body"]) == ("POST", "/echo", "hello")


def test_what_a_route_names_is_found_in_the_path() -> None:
    assert _ask(b"GET /job/10_%5B1-3%5D/why HTTP/1.1\r\n\r\n")[0][1]["found"] == {"ref": "10_[1-3]"}
    assert _ask(_post("/hold", b""))[0][1]["found"] == {"verb": "hold"}


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /nosuch", 404),
        ("GET /hold", 405),
        ("POST /slow", 405),
        ("POST /burn", 404),
        ("GET /job//why", 404),
        ("GET /job/1/2/why", 404),
    ],
)
def test_what_no_route_takes_is_refused_and_the_connection_goes_on(line: str, status: int) -> None:
    first, second = _ask(f"{line} HTTP/1.1\r\n\r\nGET /echo HTTP/1.1\r\n\r\n".encode())
    assert first[0] == status
    assert str(first[1]["error"]).startswith(f"cannot {line}")
    assert second[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /echo HTTP/2\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", 413),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nX: " + b"x" * 70_000, 431),
    ],
)
def test_d2_what_is_no_request_ends_the_connection_with_an_answer(request_bytes: bytes, status: int) -> None:
    [(found, told)] = _ask(request_bytes + b"\r\n\r\nGET /echo HTTP/1.1\r\n\r\n")
    assert found == status
    assert str(told["error"]).startswith("cannot read the request")


def test_a_body_may_come_in_chunks() -> None:
    head = b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    first, second = _ask(head + b"3\r\nhel\r\n", b"2\r\nlo\r\n0\r\n\r\nGET /slow HTTP/1.1\r\n\r\n")
    assert first[1]["body"] == "hello"
    assert second[0] == 200


def test_another_protocol_is_not_taken_up() -> None:
    upgrade = b"GET /echo HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    [(status, _)] = _ask(upgrade + b"GET /echo HTTP/1.1\r\n\r\n")
    assert status == 200


def test_a_fault_of_a_handler_is_answered() -> None:
    [(status, told)] = _ask(b"GET /fail HTTP/1.1\r\n\r\n")
    assert status == 500
    assert "a bug" in str(told["error"])
    assert "fault" in str(told["error"])


def test_a_client_may_have_the_connection_closed() -> None:
    assert len(_ask(b"GET /echo HTTP/1.1\r\nConnection: close\r\n\r\nGET /echo HTTP/1.1\r\n\r\n")) == 1
    assert len(_ask(b"GET /echo HTTP/1.0\r\n\r\nGET /echo HTTP/1.1\r\n\r\n")) == 1


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it() -> None:
    head, body = _post("/echo", b"{}", "Expect: 100-continue").split(b"{}")[0], b"{}"
    said = asyncio.run(_answers([head, body]))
    assert said.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_requests_are_answered_in_order_however_their_bytes_arrive(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.text(alphabet="ab\r\n ", max_size=6), min_size=1, max_size=3))
    sent = b"GET /slow HTTP/1.1\r\n\r\n" + b"".join(_post("/echo", body.encode()) for body in bodies)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=6)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    first, *others = _ask(*pieces)
    assert first == (200, "slow")
    assert [told["body"] for _, told in others] == bodies


@played
async def test_what_a_client_does_not_read_is_unsent_until_it_does() -> None:
    size = 1 << 22  # more than a socket takes by itself

    async def large(request: web.Request) -> web.Response:
        return web.Response(b"x" * size)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = web.Server(web.Router([web.get("/large", large)]), _refusal)
        assert server.unread_bytes == 0
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: web.Connection(server), theirs)
        ours.setblocking(False)
        await loop.sock_sendall(ours, b"GET /large HTTP/1.1\r\n\r\n")
        while not server.unread_bytes:
            await asyncio.sleep(0)
        received = 0
        while received < size:
            received += len(await loop.sock_recv(ours, 1 << 20))
        while server.unread_bytes:
            await asyncio.sleep(0)
        await server.close()


async def _connected(server: web.Server) -> socket.socket:
    """Return our end of a connection to the server."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: web.Connection(server), theirs.dup())
    return ours


async def _status(ours: socket.socket, path: str) -> bytes:
    """Ask; return the first line of the answer, b"" if the connection was ended."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(ours, f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return (await loop.sock_recv(ours, 1 << 16)).partition(b"\r\n")[0]
    except ConnectionError:
        return b""


@played
async def test_one_connection_too_many_ends_the_account_s_that_was_silent_longest() -> None:
    server = web.Server(web.Router(ROUTES), _refusal, SocketLimits(bounds()._replace(connections=3)))
    first, second, third = [await _connected(server) for _ in range(3)]
    assert await _status(first, "/echo") == b"HTTP/1.1 200 OK"
    fourth = await _connected(server)
    assert await _status(second, "/echo") == b""
    for ours in (first, third, fourth):
        assert await _status(ours, "/echo") == b"HTTP/1.1 200 OK"
    await server.close()
    for ours in (first, second, third, fourth):
        ours.close()


@played
async def test_who_does_not_read_is_answered_no_more_until_he_does() -> None:
    size, asked = 1 << 22, 0

    async def large(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(b"x" * size)

    server = web.Server(web.Router([web.get("/large", large)]), _refusal)
    with await _connected(server) as ours:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, b"GET /large HTTP/1.1\r\n\r\n" * 3)
        ours.shutdown(socket.SHUT_WR)
        for _ in range(20):
            await asyncio.sleep(0)
        assert asked == 1
        received = 0
        while data := await loop.sock_recv(ours, 1 << 20):
            received += len(data)
        assert asked == 3
        assert received > 3 * size
    await server.close()


@played
async def test_an_account_that_reads_no_answers_loses_the_connection_of_one_too_many() -> None:
    async def large(request: web.Request) -> web.Response:
        return web.Response(b"x" * (1 << 22))

    server = web.Server(
        web.Router([web.get("/large", large)]), _refusal, SocketLimits(bounds()._replace(unread_bytes=6 << 20))
    )
    first, second = await _connected(server), await _connected(server)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(first, b"GET /large HTTP/1.1\r\n\r\n")
    while not server.unread_bytes:
        await asyncio.sleep(0)
    assert await _status(second, "/large") == b""
    assert await _status(first, "/large") == b"HTTP/1.1 200 OK"
    await server.close()
    first.close()
    second.close()


@played
async def test_an_account_that_asks_too_often_is_told_when_to_come_back() -> None:
    socket_limits = SocketLimits(bounds(), exempt=frozenset(), clock=lambda: 0.0)
    socket_limits.set_rate(1, 2)
    server = web.Server(web.Router(ROUTES), _refusal, socket_limits)
    for expected in (b"200 OK", b"200 OK", b"429 Too Many Requests"):
        with await _connected(server) as ours:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(ours, b"GET /echo HTTP/1.1\r\n\r\n")
            said = await loop.sock_recv(ours, 1 << 16)
            assert said.startswith(b"HTTP/1.1 " + expected)
    assert b"\r\nRetry-After: 1\r\n" in said
    assert b"asks more than 1 times per second" in said
    await server.close()


@played
async def test_a_request_that_comes_by_single_bytes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "IDLE_S", 1.0)
    server = web.Server(web.Router(ROUTES), _refusal)
    loop = asyncio.get_running_loop()
    for request in (
        b"GET /echo HTTP/1.1\r\nX-A: " + b"a" * 10_000,
        b"POST /echo HTTP/1.1\r\nContent-Length: 9999\r\n\r\n",
    ):
        with await _connected(server) as ours:
            await loop.sock_sendall(ours, request[:60])
            said = loop.create_task(loop.sock_recv(ours, 1 << 16))
            sent = 0
            with contextlib.suppress(ConnectionError):  # a byte that comes after the end resets the connection
                while not said.done():
                    await loop.sock_sendall(ours, b"a")
                    sent += 1
                    await asyncio.sleep(0.05)
            assert sent > 5
            assert (await said).startswith(b"HTTP/1.1 408 Request Timeout")
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(ours, 1 << 16) == b""
    await server.close()


@played
async def test_bodies_that_are_not_complete_are_bounded_in_sum() -> None:
    server = web.Server(web.Router(ROUTES), _refusal, SocketLimits(bounds()._replace(unparsed_bytes=3 << 20)))
    loop = asyncio.get_running_loop()
    head = b"POST /echo HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n"
    clients = [await _connected(server) for _ in range(2)]
    await loop.sock_sendall(clients[0], head + b"x" * 1_900_000)
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(clients[1], head + b"x" * 1_900_000)
    assert (await loop.sock_recv(clients[1], 1 << 16)).startswith(b"HTTP/1.1 429 ")
    await loop.sock_sendall(clients[0], b"x" * 100_000)
    assert (await loop.sock_recv(clients[0], 1 << 16)).startswith(b"HTTP/1.1 200 OK")
    await server.close()
    for one in clients:
        one.close()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _only_connection(server: web.Server) -> weakref.ref[web.Connection]:
    (connection,) = server.connections
    return weakref.ref(connection)


async def _turns_of_the_loop() -> None:
    for _ in range(20):  # in which the server notices what its client did
        await asyncio.sleep(0)


@played
async def test_the_body_of_a_lost_connection_is_freed_without_garbage_collection() -> None:
    server = web.Server(web.Router(ROUTES), _refusal)
    with _no_garbage_collection():
        with await _connected(server) as ours:
            head = b"POST /echo HTTP/1.1\r\nContent-Length: 100000\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(ours, head + 1000 * b"x")
            lost = _only_connection(server)
            while lost()._coming is None:
                await asyncio.sleep(0)
        await _turns_of_the_loop()
        assert lost() is None


class _Held:
    """What a handler has in memory while it works."""


@played
@pytest.mark.parametrize("waits_for", ["turn", "pause"])
async def test_e1_a_cancelled_answer_is_freed_without_garbage_collection(waits_for: str) -> None:
    slots, begun, held = AnswerSlots(1, 1), asyncio.Event(), []

    async def list_jobs(request: web.Request) -> web.Response:
        jobs = _Held()
        held.append(weakref.ref(jobs))
        if waits_for == "turn":
            begun.set()
        async with slots.turn(1):
            begun.set()
            pauses = AnswerPauses(0.0)
            while True:
                await pauses.take()

    server = web.Server(web.Router([web.get("/jobs", list_jobs)]), _refusal)
    with _no_garbage_collection():
        async with slots.turn(1) if waits_for == "turn" else contextlib.AsyncExitStack():
            with await _connected(server) as ours:
                await asyncio.get_running_loop().sock_sendall(ours, b"GET /jobs HTTP/1.1\r\n\r\n")
                await begun.wait()
                lost = _only_connection(server)
            await _turns_of_the_loop()
            assert not server.connections
            assert (held[0](), lost()) == (None, None)


@played
async def test_e1_a_large_body_whose_client_has_left_is_not_read_and_freed() -> None:
    bodies, begun, told = web.Bodies(json.loads, 10), asyncio.Event(), []

    async def submit(request: web.Request) -> web.Response:
        begun.set()
        told.append(await bodies.read(1, request))
        return web.Response(b"{}")

    server = web.Server(web.Router([web.post("/submit", submit)]), _refusal)
    body = json.dumps(["x" * web.SMALL_BYTES]).encode()
    head = b"POST /submit HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    with _no_garbage_collection():
        async with bodies._turns.turn(1):
            with await _connected(server) as ours:
                await asyncio.get_running_loop().sock_sendall(ours, head + body)
                await begun.wait()
                lost = _only_connection(server)
            await _turns_of_the_loop()
            assert lost() is None
        await _turns_of_the_loop()
    assert told == []


@played
@pytest.mark.parametrize(
    "request_bytes",
    [b"POST /echo HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n", b"GET /" + 70_000 * b"x", b"nonsense\r\n\r\n"],
    ids=["large", "long", "nonsense"],
)
async def test_e1_a_refused_connection_is_freed_without_garbage_collection(request_bytes: bytes) -> None:
    server = web.Server(web.Router(ROUTES), _refusal)
    loop = asyncio.get_running_loop()
    with _no_garbage_collection():
        with await _connected(server) as ours:
            lost = _only_connection(server)
            await loop.sock_sendall(ours, request_bytes)
            while await loop.sock_recv(ours, 1 << 16):
                pass
        await _turns_of_the_loop()
        assert lost() is None


@pytest.mark.parametrize(
    "request_bytes", [b"POST /echo HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n", b"GET /" + 70_000 * b"x"]
)
def test_e1_refused_requests_leave_no_connections_in_memory(request_bytes: bytes) -> None:
    for _ in range(3):
        assert b" 4" in asyncio.run(_answers([request_bytes]))[:12]
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, web.Connection)] == []
