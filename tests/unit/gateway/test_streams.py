"""Connections of the gateway through one step of a job: order, windows, ends, and nodes that send anything."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("httptools")

from waiting import played

from hpcnode.commands.tunnel import CLOSE, COUNT, DATA, HEADER, OPEN, READY, TAKEN, WINDOW
from hpcnode.wire import protocol
from hpcsched.gateway.streams import MOST_CONNECTIONS, JobTunnel, StreamError, TunnelConnection

TOKEN = f"{'a' * 8}.12.0.3.n1.{'b' * 32}"
TO = protocol.Address(node="", stream=1)


class FakeSteps:
    """The controller's steps socket with one step, whose task is the node's end of a tunnel."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "steps.sock")
        self.frames: list[tuple[int, bytes, bytes]] = []
        self.acknowledged = 0
        self._input = b""
        self._sent = 0
        self._changed = asyncio.Event()

    async def serve(self) -> None:
        self.server = await asyncio.start_unix_server(self._client, self.path)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer, framer = writer, protocol.Framer()
        while data := await reader.read(1 << 16):
            for message, blob in framer.feed(data):
                match message:
                    case protocol.PreparedStep():
                        self.say(protocol.StepStarted(job_id=12, step=3, tasks=[("n1", 0, 1, TOKEN)]))
                        self.frame(0, READY)
                    case protocol.Input():
                        self._input += blob
                        self.say(protocol.InputAck(to=TO, token=TOKEN, task=0, offset=message.offset + len(blob)))
                    case protocol.OutputAck():
                        self.acknowledged = message.offset
            self._read_frames()
            self._changed.set()

    def _read_frames(self) -> None:
        while len(self._input) >= HEADER.size:
            number, kind, length = HEADER.unpack_from(self._input)
            if len(self._input) < HEADER.size + length:
                return
            self.frames.append((number, kind, self._input[HEADER.size : HEADER.size + length]))
            self._input = self._input[HEADER.size + length :]

    def say(self, message: protocol.Message, blob: bytes = b"") -> None:
        self.writer.write(protocol.encode(message, blob))

    def frame(self, number: int, kind: bytes, body: bytes = b"") -> None:
        self.output(HEADER.pack(number, kind, len(body)) + body)

    def output(self, data: bytes) -> None:
        self.say(protocol.Output(to=TO, token=TOKEN, task=0, fd=1, offset=self._sent, eof=False), data)
        self._sent += len(data)

    async def until(self, done: Callable[[], object]) -> None:
        while not done():
            self._changed.clear()
            await self._changed.wait()

    def sizes(self, number: int) -> int:
        return sum(len(body) for one, kind, body in self.frames if (one, kind) == (number, DATA))


async def opened(path: Path) -> tuple[FakeSteps, JobTunnel]:
    steps = FakeSteps(path)
    await steps.serve()
    tunnel = JobTunnel(lambda: None, lambda: None)
    await tunnel.open(steps.path, "key")
    await tunnel.opened()
    return steps, tunnel


@played
async def test_bytes_pass_in_order_and_each_connection_has_a_window(tmp_path: Path) -> None:
    steps, tunnel = await opened(tmp_path)
    slow, quick = tunnel.connect(), tunnel.connect()
    data = os.urandom(3 * WINDOW)
    writing = asyncio.create_task(slow.write(data))
    await steps.until(lambda: steps.sizes(1) >= WINDOW)
    await quick.write(b"not behind it")
    await steps.until(lambda: steps.sizes(2))
    assert not writing.done()
    assert steps.sizes(1) <= WINDOW + (64 << 10)
    told = 0
    while not writing.done() or steps.sizes(1) < len(data):
        await steps.until(lambda before=told: steps.sizes(1) > before or writing.done())  # type: ignore[misc]
        steps.frame(1, TAKEN, COUNT.pack(steps.sizes(1) - told))
        told = steps.sizes(1)
        await asyncio.sleep(0)
    assert b"".join(body for number, kind, body in steps.frames if (number, kind) == (1, DATA)) == data
    steps.frame(2, DATA, b"answer")
    assert await quick.read() == b"answer"
    await steps.until(lambda: (2, TAKEN, COUNT.pack(6)) in steps.frames)
    steps.frame(2, CLOSE)
    assert await quick.read() == b""
    slow.close()
    await steps.until(lambda: (1, CLOSE, b"") in steps.frames)
    assert tunnel.is_idle
    tunnel.end("")


@played
async def test_a_refused_connection_has_the_nodes_reason(tmp_path: Path) -> None:
    steps, tunnel = await opened(tmp_path)
    connection = tunnel.connect()
    await steps.until(lambda: (1, OPEN, b"") in steps.frames)
    steps.frame(1, CLOSE, b"No such file or directory")
    assert await connection.read() == b""
    assert connection.why_ended == "No such file or directory"
    with pytest.raises(StreamError, match="No such file"):
        await connection.write(b"x")
    tunnel.end("")


async def _broken_by(path: Path, send: Callable[[FakeSteps], None]) -> tuple[JobTunnel, TunnelConnection]:
    steps, tunnel = await opened(path)
    connection = tunnel.connect()
    await steps.until(lambda: steps.frames)
    send(steps)
    while tunnel.why_over is None:
        await asyncio.sleep(0.001)
    while await connection.read():
        pass
    return tunnel, connection


HOSTILE: dict[str, Callable[[FakeSteps], None]] = {
    "a frame that is too long": lambda steps: steps.output(HEADER.pack(1, DATA, WINDOW + 1)),
    "more than the window": lambda steps: [steps.frame(1, DATA, b"x" * WINDOW) for _ in range(4)] and None,
    "no message of the protocol": lambda steps: steps.writer.write(b"\xff" * 8),
    "the end of the step": lambda steps: steps.say(protocol.StepEnded(codes=[0], signals=[0])),
    "the end of the session": lambda steps: steps.say(protocol.Goodbye("the step is ended: its session is revoked")),
    "the end of the connection": lambda steps: steps.writer.close(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_or_ended_step_ends_all_its_connections(tmp_path: Path, name: str) -> None:
    @played
    async def scene() -> None:
        tunnel, connection = await _broken_by(tmp_path, HOSTILE[name])
        assert tunnel.why_over
        assert connection.why_ended is not None
        with pytest.raises(StreamError):
            tunnel.connect()

    scene()


@played
async def test_output_that_was_lost_is_asked_for_again_and_repeats_are_dropped(tmp_path: Path) -> None:
    steps, tunnel = await opened(tmp_path)
    connection = tunnel.connect()
    whole = HEADER.pack(1, DATA, 6) + b"answer"
    begin = steps._sent

    def part(offset: int, data: bytes) -> None:
        steps.say(protocol.Output(to=TO, token=TOKEN, task=0, fd=1, offset=begin + offset, eof=False), data)

    part(0, whole[:4])
    part(8, whole[8:])  # what is between was lost
    part(0, whole[:10])
    part(4, whole[4:])
    assert await connection.read() == b"answer"
    tunnel.end("")


@played
async def test_connections_through_a_step_are_bounded(tmp_path: Path) -> None:
    _, tunnel = await opened(tmp_path)
    for _ in range(MOST_CONNECTIONS):
        tunnel.connect()
    with pytest.raises(StreamError, match="are open"):
        tunnel.connect()
    tunnel.end("")
