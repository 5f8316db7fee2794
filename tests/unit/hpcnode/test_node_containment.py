"""A connection of an agent cannot harm the others; its log cannot fill the disk."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nodeworld import launch, token

from hpcnode.agent import command, shepherds
from hpcnode.agent.command import EcsLines, RateLimitedLog
from hpcnode.os import process
from hpcnode.os.faults import CrashPoints
from hpcnode.os.loop import Loop, Stream
from hpcnode.shepherd.assignment import Setting
from hpcnode.shepherd.confinement import Ground, Sandboxes
from hpcnode.shepherd.mpi import MpiVariables
from hpcnode.shepherd.relay import listen_in
from hpcnode.spool import Spool
from hpcnode.wire import shepherd_messages
from hpcnode.wire.message import Message
from hpcnode.wire.shepherd_messages import InputTaken, ReleaseTasks, SignalOtherSteps


def _turn_until(loop: Loop, done: Callable[[], Any]) -> None:
    loop.later(60.0, lambda: pytest.fail("it did not come"))
    while not done():
        loop.turn()


def test_a_handler_that_fails_ends_its_connection_alone(capsys: pytest.CaptureFixture[str]) -> None:
    loop, heard = Loop(contains_faults=True), []
    pairs = [socket.socketpair() for _ in range(2)]

    def fail(data: bytes) -> None:
        heard.append(data)
        if data:
            raise KeyError("a fault of ours")

    bad = Stream(loop, pairs[0][0], fail)
    bad.what = "a connection of uid 7"
    good = Stream(loop, pairs[1][0], heard.append)
    pairs[0][1].send(b"bad")
    pairs[1][1].send(b"good")
    _turn_until(loop, lambda: len(heard) == 3)
    assert sorted(heard) == [b"", b"bad", b"good"]
    assert bad.closed
    assert bad.failed
    assert not good.closed
    assert pairs[0][1].recv(1) == b""
    said = capsys.readouterr().err
    assert said.count("a connection of uid 7 is closed") == said.count("KeyError: ") == 1
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_loop_that_contains_no_faults_raises_them() -> None:
    loop, (ours, theirs) = Loop(), socket.socketpair()
    with ours, theirs:

        def fail(data: bytes) -> None:
            raise KeyError

        Stream(loop, ours, fail)
        theirs.send(b"bad")
        with pytest.raises(KeyError):
            loop.turn()


def test_a_shepherd_whose_message_fails_is_connected_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shepherds, "MAX_RETRY_S", 0.01)
    loop, spool, heard = Loop(contains_faults=True), Spool(str(tmp_path), CrashPoints()), []
    setting = Setting(spool, CrashPoints(), process.boot_id({}), "n1", str(tmp_path / "sock"), False)
    ours = shepherds.ShepherdPool(loop, setting, MpiVariables(str(tmp_path), print), Sandboxes(loop, Ground()))
    one, bad, good = token(1), InputTaken(0, 0), SignalOtherSteps(10)
    spool.claim(launch(one), b"#!/bin/sh\n", "boot", (os.geteuid(), os.getegid()))
    lock_fd = spool.open_lock(one)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)

    def take(_token: str, message: Message, _blob: bytes) -> None:
        if message == bad:
            raise KeyError("a fault of ours")
        heard.append(message)

    ours.on_message = take
    ours.on_gone = lambda gone: heard.append([gone])
    listener = listen_in(spool.entry(one))
    ours.adopt(one)
    first, _ = listener.accept()
    first.send(shepherd_messages.encode(bad))
    _turn_until(loop, lambda: one not in ours._streams)
    ours.send(one, ReleaseTasks())
    _turn_until(loop, lambda: one in ours._streams)
    second, _ = listener.accept()
    second.send(shepherd_messages.encode(good))
    _turn_until(loop, lambda: good in heard)
    loop.flush()
    assert shepherd_messages.encode(ReleaseTasks()) in second.recv(1 << 16)
    os.close(lock_fd)
    for sock in (first, second, listener):
        sock.close()
    _turn_until(loop, lambda: [one] in heard)


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, int]:
    path = tmp_path / "log"
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def test_repeated_lines_are_counted(log: tuple[Path, int]) -> None:
    path, fd = log
    ours = RateLimitedLog(fd, str(path))
    for second in range(30):
        print(f"2026-01-01T00:00:{second:02}", "connection refused", file=ours)
    print("2026-01-01T00:01:00", "something else", file=ours)
    assert path.read_text().splitlines() == [
        "2026-01-01T00:00:00 connection refused",
        "last line repeated 29 times",
        "2026-01-01T00:01:00 something else",
    ]


def test_lines_beyond_the_rate_are_counted(log: tuple[Path, int]) -> None:
    path, fd = log
    now = [0.0]
    ours = RateLimitedLog(fd, str(path), lambda: now[0])
    for i in range(10_000):
        print(f"line {i}", file=ours)
    assert len(path.read_text().splitlines()) == command.BURST_LINES
    now[0] = 1.0
    print("later", file=ours)
    assert path.read_text().splitlines()[command.BURST_LINES :] == [
        f"{10_000 - command.BURST_LINES} lines dropped: more than 20 per second",
        "later",
    ]


TOKEN = f"{'a' * 8}.12.3.0.n1.{'b' * 32}"


@pytest.mark.parametrize("text", ["a\u2028b", "\x1b[2J", '"}', "\udcff", "%s", "x" * 7000])
def test_each_line_of_a_log_of_json_is_one_object(log: tuple[Path, int], text: str) -> None:
    path, fd = log
    ours = RateLimitedLog(fd, str(path))
    ours.as_line = EcsLines("lab", "n1", lambda: 1_800_000_000.25).line
    for second in range(3):
        print(f"2026-01-01T00:00:{second:02}", text, file=ours)
    print("cannot record the end of", TOKEN + ":", "disk full", file=ours, flush=True)
    first, repeated, last = map(json.loads, path.read_text().splitlines())
    assert (first["message"], first["@timestamp"], first["log.level"]) == (text, "2027-01-15T08:00:00.250Z", "info")
    assert repeated["message"] == "last line repeated 2 times"
    assert last["labels"] == {"node": "n1", "job_id": "12", "attempt": "3", "step": "0"}
    assert (last["trace"], last["log.level"]) == ({"id": "aaaaaaaa.12.3"}, "error")


def test_a_line_of_a_node_has_the_fields_of_ecs_logging(log: tuple[Path, int]) -> None:
    ecs_logging = pytest.importorskip("ecs_logging")
    record = logging.LogRecord("hpcnode", logging.INFO, __file__, 1, "hello", None, None)
    theirs = json.loads(ecs_logging.StdlibFormatter(exclude_fields=["log.original", "process.thread"]).format(record))
    ours = json.loads(EcsLines("lab", "n1").line("hello"))
    assert list(ours)[:4] == list(theirs)[:4]
    assert ours["ecs.version"] == theirs["ecs.version"]
    assert ours["process"]["pid"] == theirs["process"]["pid"]


def test_a_long_log_is_put_aside_for_all_who_write_to_it(
    log: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fd = log
    monkeypatch.setattr(command, "LOG_BYTES", 1000)
    monkeypatch.setattr(command, "LOOK_BYTES", 100)
    of_shepherd = os.dup(fd)
    ours = RateLimitedLog(fd, str(path), iter(range(100_000)).__next__)
    for i in range(300):
        print(f"line {i}", file=ours)
    os.write(of_shepherd, b"of a shepherd\n")
    assert path.stat().st_size < 1200
    assert (path.parent / "log.1").stat().st_size == 1000
    assert path.read_text().endswith("line 299\nof a shepherd\n")
    os.close(of_shepherd)
