"""Accept connections: TLS 1.3, limits for each address, and deadlines.

Deadlines are for handshakes, heads, bodies and slow readers. What slow readers have not read is bounded for each user.

uvicorn's protocol parses the requests. Connections are accepted here, because a limit must count those whose handshake is not
complete. One task checks all deadlines once per second.

Sources: RFC 8446 (TLS 1.3), uvicorn's documentation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import socket
import ssl
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import anyio
import httptools
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from hpcnode.wire.connection_limits import Bounds, ConnectionLimits
from hpcsched.config.load import GatewaySettings
from hpcsched.errors import ConfigError, report_fault
from hpcsched.gateway.app import GatewayApp, OidcLogin, ProblemError, network_of, problem
from hpcsched.gateway.jobproxy import JobProxy, Origins
from hpcsched.gateway.pages import Pages
from hpcsched.gateway.routes import MAX_BODY_BYTES
from hpcsched.gateway.serving import ModelGateway
from hpcsched.gateway.site import Site
from hpcsched.gateway.slurmrestd import SlurmPaths
from hpcsched.gateway.streams import WRITE_S, StreamError
from hpcsched.gateway.terminal import Terminals
from hpcsched.gateway.upstream import Upstream, UpstreamError

log = logging.getLogger("hpcsched.gateway")

HANDSHAKE_S = 5.0
HEAD_S = 10.0
BODY_S = 60.0
KEEP_ALIVE_S = 30
CHECK_S = 1.0
MAX_HEAD_BYTES = 32 << 10
BACKLOG = 2048
AT_ONCE = 64  # connections that are accepted in one turn of the event loop
PAUSE_S = 0.2  # when no file is left
CLOSED_S = 2.0
PIECE_BYTES = 64 << 10  # of an answer that a client has to read before it gets more
UNREAD_BYTES = 64 << 20  # of one user's answers; a single answer may be larger
ALL_UNREAD_BYTES = 192 << 20
MAX_JOB_BODY_BYTES = 1 << 30  # of a request to a job
# Headers of which two would be two opinions.
SINGLE_HEADERS = (b"host", b"content-type", b"x-slurm-user-name", b"last-event-id", b"x-requested-with")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def tls_context(settings: GatewaySettings) -> ssl.SSLContext:
    """Return the TLS settings: version 1.3 only. Raises ConfigError."""
    for name, path in (("certificate", settings.certificate), ("key", settings.key)):
        if not path:
            raise ConfigError(
                f"cannot start the gateway: [gateway] {name} is not set in hpcsched.toml. A certificate for a trial: "
                "openssl req -x509 -newkey ed25519 -nodes -days 365 -subj /CN=$(hostname) -addext "
                "subjectAltName=DNS:$(hostname) -keyout gateway.key -out gateway.crt"
            )
    _check_key(Path(settings.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.certificate, settings.key)
        if settings.client_ca:
            context.load_verify_locations(settings.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
            context.verify_flags |= ssl.VERIFY_X509_STRICT
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"cannot start the gateway: its certificate, key or client_ca cannot be read: {why}"
        ) from None
    return context


def _check_key(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot start the gateway: cannot read the key {path}: {error.strerror}") from None
    if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"cannot start the gateway: others can read or write the key {path}; run: chmod 640 {path}")


def listening_socket(address: str, port: int) -> socket.socket:
    """Return the listening socket. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sock = socket.socket(found[0][0], socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found[0][4])
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {address} port {port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


def become(user: str | None) -> None:
    """Leave root for the gateway's account. Raises ConfigError."""
    if os.getuid() != 0:
        return
    if not user:
        raise ConfigError(
            "cannot run the gateway as root: set user in [gateway] of hpcsched.toml to an account of its own"
        )
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"cannot run the gateway: this machine has no account {user!r} ([gateway] user)") from None
    if account.pw_uid == 0:
        raise ConfigError("cannot run the gateway: [gateway] user is root; use an account of its own")
    os.setgroups([])
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)


async def check_controller(upstream: Upstream) -> None:
    """Check that the controller accepts us as its gateway, and asks for credentials.

    Raises ConfigError. It is not an error if the controller does not run: it may start later.
    """
    try:
        reply = await upstream.ask("GET", "/v1/ping", {"x-hpcsched-gateway": "start"}, timeout_s=20.0)
    except UpstreamError as error:
        log.warning("%s; requests are answered when it runs", error)
        return
    if reply.status != 401:
        raise ConfigError(
            "cannot start the gateway: the controller does not accept this account as its gateway: set user in [gateway] of "
            f"hpcsched.toml to {pwd.getpwuid(os.getuid()).pw_name!r}, and run hctl reconfigure"
        )


class GatewayPlaces(NamedTuple):
    """The controller's sockets, and the directory of the site's own job scripts."""

    api_socket: str
    steps_socket: str
    templates: Path


class GatewayServer:
    """Serves an application on one listening socket."""

    def __init__(
        self, app: GatewayApp, settings: GatewaySettings, tls: ssl.SSLContext | None, places: GatewayPlaces
    ) -> None:
        self._settings = settings
        self._tls = tls
        site = Site(app, has_oidc=bool(settings.oidc.issuer), own_templates=places.templates)
        jobs = JobProxy(app, site, places.steps_socket, settings.job_hosts, settings.session_s)
        terminals = Terminals(app, site, places.steps_socket)
        self._models = ModelGateway(app, places.steps_socket)
        routes = [
            *SlurmPaths(app).routes(),
            *_login_routes(app, settings, site.logged_in),
            *jobs.routes(),
            *terminals.routes(),
            *self._models.routes(),
            *Pages(site).routes(),
        ]
        self._upgrades = Upgrades(jobs, terminals)
        self._config = uvicorn.Config(
            AnswerPacer(Origins(app.asgi(routes), jobs), settings.max_connections),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._of: Counter[str] = Counter()  # connections by address
        self._count = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refused = 0

    async def serve(self, sock: socket.socket, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._loop.add_reader(sock.fileno(), self._accept)
        watches = [self._loop.create_task(self._check()), self._loop.create_task(self._models.watch())]
        await stop.wait()
        for watch in watches:
            watch.cancel()
        self._loop.remove_reader(sock.fileno())
        for connection in list(self._state.connections):
            connection.shutdown()
        for task in (*self._tasks, *self._upgrades.tasks):
            task.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept a connection: %s; trying again", error.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(PAUSE_S, self._loop.add_reader, self._sock.fileno(), self._accept)
                return
            host = network_of(address[0])
            settings = self._settings
            if self._count >= settings.max_connections or self._of[host] >= settings.connections_per_address:
                self._refused += 1
                if str(self._refused).strip("0") == "1":  # 1, 10, 100 ...
                    log.warning("refused %d connections so far: too many, lately from %s", self._refused, host)
                sock.close()
                continue
            self._count += 1
            self._of[host] += 1
            task = self._loop.create_task(self._serve_one(sock, host))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve_one(self, sock: socket.socket, host: str) -> None:
        """Do the handshake, and wait for the connection's end."""
        ended = asyncio.Event()
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": CLOSED_S} if self._tls else {}
            await self._loop.connect_accepted_socket(
                lambda: GatewayConnection(self._config, self._state, ended, self._upgrades),
                sock,
                ssl=self._tls,
                **times,
            )
            await ended.wait()
        except (OSError, ssl.SSLError):  # no handshake, or too late: nothing to answer
            sock.close()
        finally:
            self._count -= 1
            self._of[host] -= 1
            if not self._of[host]:
                del self._of[host]

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            for connection in list(self._state.connections):
                if isinstance(connection, GatewayConnection):
                    connection.check(now_s)


class AnswerPacer:
    """Sends large answers as clients read them, and bounds what waits in memory.

    A transport would take an answer at once, with copies of it for TLS.
    """

    def __init__(self, app: Any, connections: int) -> None:
        self._app = app
        self._limits = ConnectionLimits(Bounds(connections, connections, UNREAD_BYTES, ALL_UNREAD_BYTES, 0, 0))

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        await self._app(scope, receive, _PacedAnswer(self._limits, scope, send).send)


class _PacedAnswer:
    """One answer, as a guest of `ConnectionLimits` while it is sent."""

    is_busy = is_lasting = True

    def __init__(self, limits: ConnectionLimits, scope: Any, send: Send) -> None:
        self._limits, self._scope, self._send = limits, scope, send
        self._head: Message | None = None  # sent when it is known whether the body may follow
        self._is_refused = False
        self.unread_bytes = 0

    def drop(self) -> None:
        """End the connection now."""
        self._is_refused = True
        self._scope["state"]["connection"].drop()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._is_refused:
            return
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await self._pass_on(message)
            return
        user = hash(self._scope["state"].get("asker"))
        try:
            if self._limits.comes(user, self) and self._limits.may_send(user, self, len(body)):
                await self._send_pieces(memoryview(body), message.get("more_body", False))
            else:
                await self._refuse()
        finally:
            self.unread_bytes = 0
            self._limits.goes(user, self)

    async def _send_pieces(self, body: memoryview, more: bool) -> None:
        for begin in range(0, len(body), PIECE_BYTES):
            if self._is_refused:
                return
            self.unread_bytes = len(body) - begin
            piece = bytes(body[begin : begin + PIECE_BYTES])
            is_last = begin + PIECE_BYTES >= len(body)
            await self._pass_on({"type": "http.response.body", "body": piece, "more_body": more or not is_last})

    async def _pass_on(self, message: Message) -> None:
        """Send it, when the client has read most of what came before, within `WRITE_S`."""
        try:
            async with asyncio.timeout(WRITE_S):
                if self._head is not None:
                    head, self._head = self._head, None
                    await self._send(head)
                await self._send(message)
        except TimeoutError:
            self.drop()

    async def _refuse(self) -> None:
        if self._head is None:
            self.drop()
            return
        why = "cannot answer now: your other answers have not been read; read them, or ask for fewer at once"
        self._is_refused = True
        await problem(429, why, "UnavailableError", headers={"retry-after": "1"})(self._scope, _no_more, self._send)


async def _no_more() -> Message:
    return {"type": "http.disconnect"}


class Upgrades:
    """Connections that have become WebSockets. They have deadlines of their own."""

    def __init__(self, jobs: JobProxy, terminals: Terminals) -> None:
        self._jobs, self._terminals = jobs, terminals
        self.tasks: set[asyncio.Task[None]] = set()

    def is_jobs(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Return whether a request is for the origin of a job."""
        host = next((value for name, value in headers if name == b"host"), b"")
        return self._jobs.job_of(host.decode("latin-1")) is not None

    def begin(self, request: Request, transport: asyncio.Transport, ended: asyncio.Event) -> None:
        """Take over a connection."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE_BYTES, loop=loop)
        stream = _UpgradedConnection(reader, ended)
        stream.connection_made(transport)
        transport.set_protocol(stream)
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        writer = asyncio.StreamWriter(transport, stream, reader, loop)
        task = loop.create_task(self._serve(request, reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refusal: bytes = b""
        try:
            job_id = self._jobs.job_of(request.headers.get("host", ""))
            if job_id is not None:
                await self._jobs.upgrade(request, job_id, reader, writer)
            elif job := self._terminals.job_of(request):
                await self._terminals.serve(request, job, reader, writer)
            else:
                raise ProblemError(404, f"cannot find the WebSocket {request.scope['path'][:200]!r}")
        except (ProblemError, UpstreamError) as error:
            refusal = plain_answer(error.status, str(error))
        except StreamError as error:
            refusal = plain_answer(502, str(error))
        except Exception as error:
            wrong = report_fault(error, f"serve a WebSocket at {request.scope['path'][:200]!r}", "the gateway's log")
            refusal = plain_answer(500, str(wrong))
        finally:
            if not writer.transport.is_closing():
                writer.write(refusal)
                writer.close()


class _UpgradedConnection(asyncio.StreamReaderProtocol):
    """The connection of a WebSocket."""

    def __init__(self, reader: asyncio.StreamReader, ended: asyncio.Event) -> None:
        super().__init__(reader)
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._ended.set()


def plain_answer(status: int, why: str) -> bytes:
    """Return an error as an answer that ends its connection."""
    answer = problem(status, why, "RequestError")
    head = [f"HTTP/1.1 {status} -", "connection: close"]
    head += [f"{name.decode()}: {value.decode()}" for name, value in answer.raw_headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + bytes(answer.body)


class GatewayConnection(HttpToolsProtocol):
    """One connection, with bounds on the head, the body and the time."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, ended: asyncio.Event, upgrades: Upgrades | None = None
    ) -> None:
        super().__init__(config, state, {})
        self._ended = ended
        self._upgrades = upgrades
        self._certificate = ""
        self._head_bytes = 0
        self._in_head = True
        self._in_body = False
        self._began_s = time.monotonic()
        self._unread_bytes = 0
        self._read_s = self._began_s
        self._is_jobs = False  # the present request is for the origin of a job: its body is passed on as it comes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        tls = transport.get_extra_info("ssl_object")
        certificate = tls.getpeercert(binary_form=True) if tls is not None else None
        if certificate:
            self._certificate = sha256(certificate).hexdigest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._ended.set()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if not self._head_bytes:
                self._began_s = time.monotonic()
            self._head_bytes += len(data)
        elif self._is_jobs:
            self._began_s = time.monotonic()
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "cannot read the request: its head is too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        if self._certificate:
            self.scope["state"]["certificate"] = self._certificate

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # after the body: it would count as a header of a request that is being answered
            raise httptools.HttpParserError("trailers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_body = True
        self._is_jobs = False
        self._began_s = time.monotonic()
        size = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if not self.url.isascii() or sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse(400, "cannot read the request: its address is not ASCII, or its head is too long")
            return
        if why := self._why_ambiguous():
            self._refuse(400, f"cannot read the request: {why}")
            return
        most = MAX_BODY_BYTES
        if self._upgrades is not None and self._upgrades.is_jobs(self.headers):
            most, self._is_jobs = MAX_JOB_BODY_BYTES, True
        if len(size) > 12 or int(size) > most:  # int: the parser has read it
            self._refuse(413, f"cannot read the request: its body has more than {most} bytes")
            return
        try:
            super().on_headers_complete()
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            self._refuse(400, "cannot read the request: its address is not valid")

    def _why_ambiguous(self) -> str:
        """Return why two readers could understand the head differently, "" if it is clear."""
        count = Counter(name for name, _ in self.headers)
        if not count[b"host"] and self.parser.get_http_version() == "1.1":
            return "it has no Host"
        twice = [name.decode() for name in SINGLE_HEADERS if count[name] > 1]
        return f"it has the header {twice[0]} twice" if twice else ""

    def drop(self) -> None:
        """End the connection now."""
        self.transport.abort()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        if self.cycle is not None:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, "cannot read the request: it is not HTTP/1.1")

    def _refuse(self, status: int, why: str) -> None:
        self.transport.write(plain_answer(status, why))
        self.transport.close()

    def _should_upgrade_to_ws(self) -> bool:
        return self._upgrades is not None

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over. The head is checked as that of every request."""
        if self._upgrades is None or self.transport.is_closing():
            return
        if self.scope["method"] != "GET" or (self.cycle is not None and not self.cycle.response_complete):
            self._refuse(400, "cannot open a WebSocket: its request must be a GET, and the only one that waits")
            return
        try:
            parsed = httptools.parse_url(self.url)
            path = parsed.path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            self._refuse(400, "cannot read the request: its address is not valid")
            return
        scope = dict(self.scope) | {
            "path": unquote(path),
            "raw_path": parsed.path,
            "query_string": parsed.query or b"",
        }
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        self._upgrades.begin(Request(scope), self.transport, self._ended)

    def check(self, now_s: float) -> None:
        """Close the connection if its head, its body or its reader is too slow."""
        if self.transport.is_closing():
            return
        unread_bytes = self.transport.get_write_buffer_size()
        if not unread_bytes or unread_bytes < self._unread_bytes:
            self._read_s = now_s
        self._unread_bytes = unread_bytes
        waits = self._in_head and (self._head_bytes or self.cycle is None) and now_s - self._began_s > HEAD_S
        sends = self._in_body and now_s - self._began_s > BODY_S
        if waits or sends:
            self._refuse(408, "cannot read the request: it came too slowly")
        if now_s - self._read_s > WRITE_S:
            self.transport.abort()


def _login_routes(
    app: GatewayApp, settings: GatewaySettings, logged_in: Callable[[Request, str], Response]
) -> list[Route]:
    """Return the routes of a login at a provider, if one is configured. Raises ConfigError."""
    if not settings.oidc.issuer:
        return []
    try:
        return OidcLogin(app, settings, logged_in).routes()
    except ImportError as error:
        raise ConfigError(
            f"cannot start the gateway: [gateway.oidc] needs {error.name}: pip install 'hpcsched[oidc]'"
        ) from None


def run(settings: GatewaySettings, places: GatewayPlaces, *, insecure: bool = False) -> None:
    """Serve until a signal.

    `insecure`: without TLS, on the loopback address only; credentials are still needed.
    """
    import signal

    tls = None if insecure else tls_context(settings)
    address = "127.0.0.1" if insecure else settings.address
    sock = listening_socket(address, settings.port)
    run_loop = _loop_runner()
    run_loop(_use_task_group())
    upstream = Upstream(places.api_socket)
    server = GatewayServer(GatewayApp(upstream, settings), settings, tls, places)  # reads its secrets
    become(settings.user)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each malformed request

    async def serve() -> None:
        await check_controller(upstream)
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        log.info("ready at %s://%s:%d", "http" if insecure else "https", address, sock.getsockname()[1])
        await server.serve(sock, stop)
        upstream.close()

    run_loop(serve())


async def _use_task_group() -> None:
    """Have anyio import what it imports at the first use: afterwards it may be unreadable."""
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, 0)


def _loop_runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return what runs the event loop: uvloop, which needs a tenth of the memory, or asyncio.

    It is imported while the gateway may still be root: its own account may not be able to read it.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
