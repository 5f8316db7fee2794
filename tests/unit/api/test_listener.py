"""How connections are taken: a few at a time, without files, and of accounts that connect too often."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from pathlib import Path

import pytest
from waiting import PATIENCE_S, played

from hpcsched.api import connection_limits as listening
from hpcsched.api.connection_limits import Listener, SocketLimits, bounds


class Greeter(asyncio.Protocol):
    """Says one word, and goes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"welcome")
        transport.close()


def _socket(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(64)
    return sock


async def _heard(path: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    said = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return said


@played
async def test_an_account_that_connects_too_often_is_told_so(tmp_path: Path) -> None:
    socket_limits = SocketLimits(bounds(), exempt=frozenset(), clock=lambda: 0.0)
    socket_limits.set_rate(1, 1)
    with _socket(tmp_path / "s") as sock:
        ours = Listener(sock, Greeter, socket_limits, lambda uid: b"uid %d waits" % uid)
        said = [await _heard(tmp_path / "s") for _ in range(6)]
        ours.close()
    assert said == [b"welcome"] + [b"uid %d waits" % os.getuid()] * 5


@played
async def test_without_files_it_pauses_and_then_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "PAUSE_S", 0.02)
    left = [3]

    class Full(socket.socket):
        def _accept(self) -> tuple[int, object]:
            if left[0]:
                left[0] -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super()._accept()  # type: ignore[misc]

    with _socket(tmp_path / "s") as sock, Full(fileno=os.dup(sock.fileno())) as full, caplog.at_level(logging.ERROR):
        ours = Listener(full, Greeter, SocketLimits(bounds()), lambda _uid: b"")
        assert await _heard(tmp_path / "s") == b"welcome"
        ours.close()
    assert [record.getMessage() for record in caplog.records] == [
        "cannot take a connection: Too many open files; trying again"
    ] * 3
