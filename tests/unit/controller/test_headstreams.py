"""The steps socket on the head."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from waiting import PATIENCE_S, played

from hpcnode.wire import protocol
from hpcnode.wire.connection_limits import Bounds
from hpcsched.api.connection_limits import SocketLimits, bounds
from hpcsched.controller import head_socket as heads_module
from hpcsched.controller.head_socket import HeadStreams


def test_a_step_command_hears_that_the_controller_is_there(tmp_path: Path) -> None:
    async def ask() -> list[tuple[protocol.Message, bytes]]:
        heads = HeadStreams()
        await heads.serve(tmp_path / "steps.sock", 0o600)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "steps.sock")
        writer.write(protocol.encode(protocol.Ping(7)))
        answer = await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
        writer.close()
        await heads.close()
        return list(protocol.Framer().feed(answer))

    assert asyncio.run(ask()) == [(protocol.Pong(7), b"")]


REQUEST = protocol.StepRequest(protocol.VERSION, 0, {"ntasks": "1"}, ["true"], "/", {})


class Asked:
    """Takes the place of the step service: keeps what was said, and answers nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.closed = 0

    def on_from_stream(self, node: str, said: protocol.FromStream, blob: bytes) -> None:
        self.said.append(said.message["type"])

    def on_stream_closed(self, origin: object) -> None:
        self.closed += 1


@asynccontextmanager
async def _heads(
    path: Path, limits: Bounds | None = None, rate: tuple[float, int] = (0, 1)
) -> AsyncIterator[HeadStreams]:
    socket_limits = SocketLimits(limits, exempt=frozenset())
    socket_limits.set_rate(*rate)
    heads = HeadStreams(socket_limits)
    heads.stepping = Asked()  # type: ignore[assignment]
    await heads.serve(path, 0o600)
    yield heads
    await heads.close()


async def _until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            await asyncio.sleep(0.01)


async def _send(path: Path, data: bytes = b"") -> socket.socket:
    """Return a connection on which this was sent, or as much as was taken."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, str(path))
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(loop.sock_sendall(sock, data), PATIENCE_S)
    return sock


async def _rest(sock: socket.socket) -> list[protocol.Message]:
    """Return what is said until the connection ends."""
    loop, said = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.wait_for(loop.sock_recv(sock, 1 << 16), PATIENCE_S):
            said += data
    sock.close()
    return [message for message, _ in protocol.Framer().feed(said)]


@played
async def test_a_connection_that_asks_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_module, "FRAME_S", 0.2)
    async with _heads(tmp_path / "s") as heads:
        [said] = await _rest(await _send(tmp_path / "s", protocol.encode(REQUEST)[:20]))
        assert isinstance(said, protocol.Goodbye)
        assert "did not come whole within 0.2 s" in said.why
        await _until(lambda: not heads.streams)


@played
async def test_frames_that_are_not_complete_are_bounded_in_sum(tmp_path: Path) -> None:
    limits = bounds()._replace(unparsed_bytes=3 << 20)
    frame = protocol.encode(protocol.Input("t", 0, 0, False), b"x" * (2 << 20))
    async with _heads(tmp_path / "s", limits) as heads:
        first = await _send(tmp_path / "s", frame[:-1])
        await _until(lambda: any(one._framer.pending_bytes > 2 << 20 for one in heads.streams.values()))
        [said] = await _rest(await _send(tmp_path / "s", frame[:-1]))
        assert isinstance(said, protocol.Goodbye)
        assert "sends too much at once" in said.why
        first.send(frame[-1:])
        await _until(lambda: heads.stepping.said == ["Input"])  # type: ignore[union-attr]
        first.close()


@pytest.mark.parametrize("text", [b"[" + b"[]," * 100_000 + b"[]]", b"x" * (5 << 20)], ids=["values", "bytes"])
@played
async def test_a_frame_that_takes_long_to_read_is_refused(tmp_path: Path, text: bytes) -> None:
    async with _heads(tmp_path / "s"):
        [said] = await _rest(await _send(tmp_path / "s", struct.pack("!II", len(text), 0) + text))
        assert isinstance(said, protocol.Goodbye)


@played
async def test_what_is_asked_too_fast_waits_and_is_not_lost(tmp_path: Path) -> None:
    async with _heads(tmp_path / "s", rate=(20, 6)) as heads:
        began_s = asyncio.get_running_loop().time()
        clients = [await _send(tmp_path / "s", 2 * protocol.encode(REQUEST)) for _ in range(5)]
        await _until(lambda: len(heads.stepping.said) == 10)  # type: ignore[union-attr]
        assert asyncio.get_running_loop().time() - began_s > 0.15
        for sock in clients:
            sock.close()


@played
async def test_a_command_that_is_refused_is_not_kept(tmp_path: Path) -> None:
    async with _heads(tmp_path / "s") as heads:
        sock = await _send(tmp_path / "s", protocol.encode(REQUEST))
        await _until(lambda: heads.stepping.said)  # type: ignore[union-attr]
        heads.reply(1, protocol.StepEnded([], [], "cannot start a step: no"), b"")
        assert await _rest(sock) == [protocol.StepEnded([], [], "cannot start a step: no")]
        await _until(lambda: not heads.streams)
        assert heads.stepping.closed == 1  # type: ignore[union-attr]


@played
async def test_connections_of_an_account_are_bounded_and_running_steps_kept(tmp_path: Path) -> None:
    limits = bounds()._replace(connections=2)
    async with _heads(tmp_path / "s", limits) as heads:
        step = await _send(tmp_path / "s", protocol.encode(REQUEST))
        await _until(lambda: heads.stepping.said)  # type: ignore[union-attr]
        idle = await _send(tmp_path / "s")
        await _until(lambda: len(heads.streams) == 2)
        again = await _send(tmp_path / "s", protocol.encode(protocol.Ping(1)))
        assert await _rest(idle) == []
        await _until(lambda: set(heads.streams) == {1, 3})
        for sock in (step, again):
            sock.close()
