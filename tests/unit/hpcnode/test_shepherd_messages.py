"""The messages between agent and shepherd: good, hostile and unknown ones."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcnode.os.loop import Loop
from hpcnode.shepherd.relay import Relay, connect_in
from hpcnode.wire import message as wire
from hpcnode.wire import shepherd_messages
from hpcnode.wire.message import Message, WireError
from hpcnode.wire.protocol import Address
from hpcnode.wire.shepherd_messages import (
    ChangeTimeLimit,
    EndTasks,
    ReleaseTasks,
    SignalTasks,
    TaskInput,
    TaskOutput,
    TasksEnded,
    TasksStarted,
    check_final,
    encode,
    record_of,
)

STARTED = TasksStarted(7, 1.0, 1.0, [(7, 1, "b")], (6, 1, "b"), "b", 2.0, 1001, stream_to=Address("n1", 3))
ENDED = TasksEnded("ended", 3.0, "", codes=[0, 1], signals=[0, 0], usage={"cpu_user_s": 0.5})
SAMPLES = (
    EndTasks(2.0, "cancelled", 10, True),
    SignalTasks(9),
    ChangeTimeLimit(),
    ChangeTimeLimit(3.5),
    STARTED,
    ENDED,
)


def frame(text: bytes, blob: bytes = b"") -> bytes:
    return struct.pack("!II", len(text), len(blob)) + text + blob


def frame_of(**fields: object) -> bytes:
    return frame(json.dumps(fields).encode())


def read(data: bytes) -> list[tuple[Message, bytes]]:
    return list(shepherd_messages.reader().feed(data))


@given(st.lists(st.tuples(st.sampled_from(SAMPLES), st.binary(max_size=50)), max_size=8), st.integers(1, 17))
def test_messages_survive_any_cutting_of_their_bytes(sent: list[tuple[Message, bytes]], size: int) -> None:
    data = b"".join(encode(message, blob) for message, blob in sent)
    frames = shepherd_messages.reader()
    assert [found for at in range(0, len(data), size) for found in frames.feed(data[at : at + size])] == sent


def test_a_record_of_the_spool_has_the_fields_of_its_message() -> None:
    assert record_of(ENDED)["codes"] == [0, 1]
    assert record_of(STARTED)["stream_to"] == {"node": "n1", "stream": 3}
    assert "type" not in record_of(ENDED)


def test_a_message_of_a_newer_version_is_skipped() -> None:
    assert read(frame_of(type="Newer", field=1) + encode(ReleaseTasks())) == [(ReleaseTasks(), b"")]


def test_what_is_not_utf_8_in_a_reason_is_replaced() -> None:
    ((ended, _),) = read(encode(TasksEnded("refused", 1.0, "cannot open caf\udce9")))
    assert ended == TasksEnded("refused", 1.0, "cannot open caf\ufffd")


HOSTILE = {
    "not JSON": frame(b"{"),
    "a list": frame(b'["end",1,""]'),
    "no type": frame_of(grace_s=1.0, why=""),
    "a type that is a number": frame_of(type=7),
    "a missing field": frame_of(type="EndTasks", grace_s=1.0),
    "an unknown field": frame_of(type="ReleaseTasks", now=True),
    "a text for a number": frame_of(type="EndTasks", grace_s="1", why=""),
    "NaN": frame(b'{"type":"EndTasks","grace_s":NaN,"why":""}'),
    "an infinite number": frame(b'{"type":"EndTasks","grace_s":1e999,"why":""}'),
    "a negative grace period": frame_of(type="EndTasks", grace_s=-1.0, why=""),
    "a signal that does not exist": frame_of(type="SignalTasks", signum=65),
    "a boolean for a number": frame_of(type="SignalTasks", signum=True),
    "a number of 65 bits": frame(b'{"type":"SignalTasks","signum":18446744073709551616}'),
    "a negative offset": frame_of(type="TaskInput", task=0, offset=-1, eof=False),
    "a task that cannot be": frame_of(type="TaskInput", task=-2, offset=0, eof=False),
    "a descriptor of the shepherd": frame_of(type="OutputTaken", task=0, fd=3, offset=0),
    "a time limit below zero": frame_of(type="ChangeTimeLimit", limit_s=-0.5),
    "a field twice": frame(b'{"type":"SignalTasks","signum":1,"signum":2}'),
    "a process of two parts": frame_of(type="TasksStarted", **{**record_of(STARTED), "tasks": [[7, 1]]}),
    "codes that are texts": frame_of(type="TasksEnded", status="ended", at_s=1.0, why="", codes=["0"]),
    "deep nesting": frame(b'{"type":' + b"[" * 40 + b"]" * 40 + b"}"),
    "long JSON": struct.pack("!II", wire.MAX_JSON_BYTES + 1, 0),
    "a long blob": struct.pack("!II", 2, wire.MAX_BLOB_BYTES + 1),
    "a NUL": frame_of(type="EndTasks", grace_s=1.0, why="\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_is_rejected(name: str) -> None:
    with pytest.raises(WireError):
        read(HOSTILE[name])


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_rejected(data: bytes) -> None:
    try:
        read(frame(data))
    except WireError:
        pass


def test_an_end_needs_a_final_status() -> None:
    check_final(ENDED)
    with pytest.raises(WireError, match="'claimed' is not a final status"):
        check_final(TasksEnded("claimed", 1.0, ""))


def test_a_message_that_the_other_end_would_reject_is_not_sent() -> None:
    with pytest.raises(WireError, match="its task is not between"):
        encode(TaskInput(-5, 0, False))


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[tuple[Loop, Relay, socket.socket, list[Message]]]:
    """A loop, a shepherd's connection, the agent's end of it, and the handled messages."""
    loop, (ours, theirs), handled = Loop(), socket.socketpair(), []
    made = Relay(loop, str(tmp_path), 0, ours)
    made.handle = handled.append
    yield loop, made, theirs, handled
    made.close()
    theirs.close()


@pytest.mark.parametrize("name", ["not JSON", "a signal that does not exist", "long JSON"])
def test_a_bad_frame_ends_its_connection_only(
    relay: tuple[Loop, Relay, socket.socket, list[Message]],
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop, shepherd, agent, handled = relay
    agent.sendall(encode(ReleaseTasks()) + HOSTILE[name] + encode(SignalTasks(9)))
    loop.turn()
    assert handled == [ReleaseTasks()]
    assert not shepherd.is_connected
    assert agent.recv(1) == b""
    assert "the agent's connection is closed: cannot" in capsys.readouterr().err
    with connect_in(str(tmp_path)) as second:
        loop.turn()
        second.sendall(encode(SignalTasks(10)))
        loop.turn()
    assert handled == [ReleaseTasks(), SignalTasks(10)]


def test_output_has_the_round_of_its_reader(relay: tuple[Loop, Relay, socket.socket, list[Message]]) -> None:
    _loop, shepherd, agent, _ = relay
    shepherd.send(TaskOutput(0, 1, 0, False, 4), b"hello")
    shepherd.finish()
    assert read(agent.recv(1 << 16)) == [(TaskOutput(0, 1, 0, False, 4), b"hello")]
