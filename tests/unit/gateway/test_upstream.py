"""Requests of the gateway to the controller's socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from hpcsched.gateway import upstream
from hpcsched.gateway.upstream import Upstream

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the first request of a connection, if there is one."""
    if await reader.read(1 << 16):
        writer.write(ANSWER)
        await writer.drain()


def test_a_request_waits_while_the_controller_accepts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "s")
    tries: list[float] = []
    sleep = asyncio.sleep

    async def slept(time_s: float) -> None:
        tries.append(time_s)
        await sleep(time_s)

    async def asked() -> bytes:
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
            listener.bind(path)
            listener.listen(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    one = waiting.enter_context(socket.socket(socket.AF_UNIX))
                    one.setblocking(False)
                    one.connect(path)
            asking = asyncio.create_task(Upstream(path).ask("GET", "/v1/ping", {}))
            while not tries and not asking.done():
                await sleep(0)
            async with await asyncio.start_unix_server(answer, sock=listener):
                return (await asking).body

    monkeypatch.setattr(upstream.asyncio, "sleep", slept)
    assert asyncio.run(asyncio.wait_for(asked(), 30)) == b"ok"
    assert tries
