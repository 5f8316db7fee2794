"""A server in a job, and a browser without a screen: sessions at a gateway, tickets, requests at the origin of a job."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from gateway_server import Served
from waiting import PATIENCE_S, wait_until

# It serves HTTP and echoes WebSockets, at the socket that the web pages open. Any Python runs it.
SERVER = r"""
import base64, hashlib, http.server, json, os, socketserver, subprocess, sys

path = subprocess.run(["htun", "socket"], check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()
if os.path.exists(path):
    os.unlink(path)

# As code-server has them: absolute paths, a service worker of a wider scope than its folder, a WebSocket of a subprotocol.
EDITOR = {
    "/editor": ("text/html", b"<!doctype html><title>editor</title><script type=module src=/static/editor.js></script>"),
    "/static/editor.js": ("text/javascript", b'''
        const taken = new Promise((done) => { navigator.serviceWorker.oncontrollerchange = done; });
        await navigator.serviceWorker.register("/static/worker.js", { scope: "/" });
        if (!navigator.serviceWorker.controller) await taken;
        const made = await (await fetch("/of-the-worker")).text();
        const socket = new WebSocket("wss://" + location.host + "/socket", ["first", "editor.v1"]);
        await new Promise((opened) => { socket.onopen = opened; });
        const echo = new Promise((done) => { socket.onmessage = (event) => done(event.data); });
        socket.send("echo");
        document.title = [made, socket.protocol, await echo].join(", ");
    '''),
    "/static/worker.js": ("text/javascript", b'''
        self.addEventListener("activate", (event) => event.waitUntil(clients.claim()));
        self.addEventListener("fetch", (event) => {
          if (event.request.url.endsWith("/of-the-worker")) event.respondWith(new Response("made by the worker"));
        });
    '''),
}


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answer(self, body, kind="application/json", **more):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in more.items():
            for one in value if isinstance(value, list) else [value]:
                self.send_header(name.replace("_", "-"), one)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        if self.path in EDITOR:
            kind, body = EDITOR[self.path]
            return self.answer(body, kind, Service_Worker_Allowed="/")
        if self.path == "/socket" and self.headers.get("Upgrade"):
            return self.echo()
        if self.path == "/cookies":
            cookies = ["mine=1; Path=/", "wide=1; Domain=localhost", "__Host-hpcsched=stolen; Secure; Path=/",
                       "__Host-hpcsched-job=stolen; Secure; Path=/"]
            return self.answer(b"{}", Set_Cookie=cookies, Connection="X-Secret", X_Secret="1")
        if self.path == "/long-head":
            return self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * (10 << 20) + b"\r\n\r\n")
        if self.path == "/no-http":
            return self.wfile.write(b"\x00\x01 SSH-2.0\r\n\r\n")
        if self.path == "/endless":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n\r\n")
            while True:
                self.wfile.write(b"b" * 65536)
        if self.path == "/page":
            body = b"<!doctype html><title>page of the job</title><h1>page of the job</h1>"
            return self.answer(body, "text/html")
        seen = {"job": os.environ["SLURM_JOB_ID"], "path": self.path, "method": self.command}
        size = int(self.headers.get("Content-Length") or 0)
        seen["body"] = len(self.rfile.read(size))
        seen["headers"] = [[name.lower(), value] for name, value in self.headers.items()]
        self.answer(json.dumps(seen).encode())

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def echo(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        protocols = self.headers.get("Sec-WebSocket-Protocol")
        if protocols:
            self.send_header("Sec-WebSocket-Protocol", protocols.split(",")[-1].strip())
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8:
                return
            size = head[1] & 127
            if size == 126:
                size = int.from_bytes(self.rfile.read(2), "big")
            mask, data = self.rfile.read(4), self.rfile.read(size)
            text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
            length = bytes([size]) if size < 126 else bytes([126]) + size.to_bytes(2, "big")
            self.wfile.write(head[:1] + length + text)
            self.wfile.flush()


Server(path, Handler).serve_forever()
"""


@dataclass
class Browser:
    """A session at the gateway, and the cookies of jobs' origins."""

    served: Served
    session: str  # the cookie of the gateway, as a header has it

    @classmethod
    def of_root(cls, served: Served, scope: str = "read,submit,manage") -> Browser:
        """Return a browser with a session of whoever runs the tests."""
        link = served.cluster.run("hpcsched", "web", f"--scope={scope}").stdout.strip()
        code = link.partition("code=")[2]
        status, answer, headers = served.ask("POST", "/api/v1/session", {"code": code}, token="")
        assert status == 200, answer
        return cls(served, headers["set-cookie"].partition(";")[0])

    def host(self, job: str) -> str:
        return f"job-{job}.localhost:{self.served.port}"

    def origin(self, job: str) -> str:
        return f"https://{self.host(job)}"

    def ask_to_open(self, job: str, **headers: str) -> tuple[int, Any]:
        """Ask the gateway for the way to a job."""
        sent = {"Cookie": self.session, "X_Requested_With": "test", "Host": f"localhost:{self.served.port}", **headers}
        return self.served.ask("POST", f"/job/{job}/open", {}, token="", **sent)[:2]

    def ticket(self, job: str) -> str:
        """Return a ticket for a job, when its server answers."""

        def asked() -> Any:
            status, answer = self.ask_to_open(job)
            assert status == 200, answer
            return answer if answer["ready"] else None

        answer = wait_until(asked, what="the server in the job")
        assert answer["address"] == f"{self.origin(job)}/.hpcsched/enter"
        return str(answer["ticket"])

    def enter(self, job: str, ticket: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Exchange a ticket at the origin of a job."""
        sent = {"Host": self.host(job), "Origin": self.origin(job), **headers}
        return self.served.ask("POST", "/.hpcsched/enter", {"ticket": ticket}, token="", **sent)

    def cookie(self, job: str) -> str:
        """Return a cookie for the origin of a job, as a header has it."""
        status, answer, headers = self.enter(job, self.ticket(job))
        assert status == 200, answer
        cookie = headers["set-cookie"]
        assert all(word in cookie for word in ("HttpOnly", "Secure", "SameSite=strict", "Path=/")), cookie
        return cookie.partition(";")[0]

    def ask(self, job: str, path: str, cookie: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
        """Ask the server in a job."""
        sent = {"Host": self.host(job), "Cookie": cookie, **headers}
        return self.served.ask(method, path, None, token="", **sent)

    def raw(self) -> ssl.SSLSocket:
        """Return a connection to the gateway."""
        sock = socket.create_connection(("127.0.0.1", self.served.port), timeout=PATIENCE_S)
        return self.served.context().wrap_socket(sock, server_hostname="localhost")

    def websocket(self, job: str, cookie: str, **headers: str) -> tuple[int, ssl.SSLSocket]:
        """Return the status of a handshake, and its connection."""
        sent = {"Host": self.host(job), "Origin": self.origin(job), "Cookie": cookie, **headers}
        return self._websocket("/socket", sent)

    def terminal(self, job: str, **headers: str) -> tuple[int, ssl.SSLSocket]:
        """Return the status of the handshake of a terminal in a job, and its connection."""
        here = f"localhost:{self.served.port}"
        sent = {"Host": here, "Origin": f"https://{here}", "Cookie": self.session, **headers}
        return self._websocket(f"/job/{job}/terminal/socket", sent)

    def _websocket(self, path: str, sent: dict[str, str]) -> tuple[int, ssl.SSLSocket]:
        sock = self.raw()
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value)]
        lines += ["Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
        lines += [f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}"]
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        head = b""
        while b"\r\n\r\n" not in head and (part := sock.recv(1)):
            head += part
        return int(head.split()[1]), sock


def submit(served: Served, server: str = SERVER, name: str = "served") -> str:
    """Submit a job with a server; return its number."""
    script = served.base / f"{name}.py"
    script.write_text(server)
    script.chmod(0o755)
    words = [
        "--parsable",
        "-D",
        "/",
        "-o",
        f"/tmp/{served.base.name}-%j.out",
        "--wrap",
        f"exec /usr/bin/python3 {script}",
    ]
    return served.cluster.run("hsub", *words).stdout.strip()


def frame(text: bytes) -> bytes:
    """Return a masked WebSocket frame of a text shorter than 126 bytes."""
    mask = os.urandom(4)
    return bytes([0x81, 0x80 | len(text)]) + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(text))


def headers_of(answer: dict[str, Any]) -> dict[str, str]:
    """Return the headers that the job has seen."""
    return dict(answer["headers"])


def half_read(browser: Browser, job: str, cookie: str, path: str) -> ssl.SSLSocket:
    """Return a connection whose answer is not read."""
    sock = browser.raw()
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {browser.host(job)}\r\nCookie: {cookie}\r\n\r\n".encode())
    assert sock.recv(20).startswith(b"HTTP/1.1 200")
    return sock


def text_of(data: object) -> str:
    """Return an answer as text."""
    return data.decode() if isinstance(data, bytes) else json.dumps(data)
