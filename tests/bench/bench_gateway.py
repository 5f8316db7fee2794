"""The gateway's speed: GETs on kept connections, alone and beside 500 half-open handshakes and slow readers.

The client is a process of its own, on the same processors.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from tests.bench.figures import Figure  # noqa: E402
from tests.gateway_server import serving  # noqa: E402

CONNECTIONS = 8


async def one(port: int, request: bytes, context: ssl.SSLContext, until_s: float, pause_s: float) -> list[float]:
    """Ask again and again on one connection; return the times."""
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
    took = []
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        took.append(time.monotonic() - began_s)
        if pause_s:
            await asyncio.sleep(pause_s)
    writer.close()
    return took


async def many(
    port: int, request: bytes, context: ssl.SSLContext, for_s: float, count: int, pause_s: float
) -> list[float]:
    until_s = time.monotonic() + for_s
    parts = await asyncio.gather(*(one(port, request, context, until_s, pause_s) for _ in range(count)))
    return sorted(took for part in parts for took in part)


def client(port: str, path: str, token: str, ca: str, for_s: str, count: str, pause_s: str) -> None:
    """Run as a process of its own: measure and print."""
    context = ssl.create_default_context(cafile=ca)
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    took = asyncio.run(many(int(port), request, context, float(for_s), int(count), float(pause_s)))
    p50, p99 = (1000 * took[int(part * len(took))] for part in (0.5, 0.99))
    print(len(took) / float(for_s), p50, p99)


def run(quick: bool) -> list[Figure]:
    """Return requests per second, p50 and p99 of each load."""
    for_s, figures = 3.0 if quick else 10.0, []
    with serving(connections_per_address=1000) as served:
        spec = {"name": "x", "script": "#!/bin/sh\n", "work_dir": "/tmp", "hold": True}
        assert served.ask("POST", "/api/v1/submit", {"jobs": [spec] * 10})[0] == 200

        def ask(label: str, path: str, count: int, pause_s: float = 0.0) -> None:
            words = [served.port, path, served.token, served.base / "gateway.crt", for_s, count, pause_s]
            done = subprocess.run(
                [sys.executable, __file__, *map(str, words)], capture_output=True, text=True, check=True
            )
            per_s, p50, p99 = map(float, done.stdout.split())
            figures.append(
                Figure(name=f"{label}: requests", value=per_s, unit="/s", bar=">= 1,000 /s" if count > 1 else "")
            )
            figures.append(Figure(name=f"{label}: p50", value=p50, unit="ms", bar="<= 5 ms"))
            figures.append(Figure(name=f"{label}: p99", value=p99, unit="ms"))

        ask("GET /ping, 1 connection, 100/s", "/api/v1/ping", 1, 0.01)
        ask("GET /job/1, 1 connection, 100/s", "/api/v1/job/1", 1, 0.01)
        ask(f"GET /ping, {CONNECTIONS} connections", "/api/v1/ping", CONNECTIONS)
        ask(f"GET /job/1, {CONNECTIONS} connections", "/api/v1/job/1", CONNECTIONS)
        with ExitStack() as stack:
            for _ in range(500):
                sock = stack.enter_context(socket.socket())
                sock.connect(("127.0.0.1", served.port))
                sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            slow = served.context()
            for _ in range(50):
                raw = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader = stack.enter_context(slow.wrap_socket(raw, server_hostname="localhost"))
                asked = f"GET /api/v1/openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.token}\r\n\r\n"
                reader.sendall(asked.encode() * 5)
            ask("the same at 100/s, 500 half-open, 50 slow", "/api/v1/ping", 1, 0.01)
    return figures


if __name__ == "__main__":
    client(*sys.argv[1:])
