"""The controller's log under floods: bounded in lines, repetition and size, and nothing of it lost silently."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsched.controller import logfile
from hpcsched.controller.logfile import Bounded


class Kept(logging.Handler):
    """Keeps what is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Log:
    """A log of its own, whose clock is `now`."""

    def __init__(self) -> None:
        self.kept, self.now = Kept(), [0.0]
        self.handler = Bounded(self.kept, lambda: self.now[0])
        self.logger = logging.Logger("test")
        self.logger.addHandler(self.handler)


def test_repeated_messages_are_counted() -> None:
    log = Log()
    for _ in range(1235):
        log.logger.error("no file is left")
        log.logger.error("a node is down")
    assert log.kept.texts == ["no file is left", "a node is down"]
    log.now[0] = logfile.REMEMBERED_S
    log.logger.error("a node is up")
    assert log.kept.texts[2:] == [
        "message repeated 1,234 times: no file is left",
        "message repeated 1,234 times: a node is down",
        "a node is up",
    ]
    log.logger.error("no file is left")
    assert log.kept.texts[-1] == "no file is left"


def test_a_place_that_logs_too_fast_holds_back_itself_alone() -> None:
    log = Log()
    for i in range(10_000):
        log.logger.error("connection %d", i)
    log.logger.error("an admin drains n1")
    assert len(log.kept.texts) == logfile.BURST + 1
    assert log.kept.texts[-1] == "an admin drains n1"
    log.now[0] = 1.0
    for i in range(2):
        log.logger.error("connection %d", i + 10_000)
    log.handler.close()
    held_back = [text for text in log.kept.texts if "not written" in text]
    assert len(held_back) == 1
    assert held_back[0].startswith("9,900 messages of test_logfile.py:")


def test_counts_are_written_when_the_log_is_closed() -> None:
    log = Log()
    log.logger.error("one")
    log.logger.error("one")
    log.handler.close()
    assert log.kept.texts == ["one", "message repeated 1 times: one"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "BURST", 10_000.0)
    log = Log()
    for i in range(2000):
        log.logger.error("text %d", i)
    assert len(log.handler._said) == logfile.MAX_REMEMBERED


PROGRAM = """
import asyncio, logging, os, sys
from pathlib import Path
from hpcsched.controller.logfile import start_log
start_log("info", Path(sys.argv[1]), 20_000, 3)
for i in range(3000):
    logging.getLogger(str(i)).handle(logging.LogRecord("a", 20, "place%d" % (i % 100), 1, "line %d", (i,), None))
async def fail():
    for _ in range(500):
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.05)
asyncio.run(fail())
print("to stdout", flush=True)
os.write(2, b"to stderr")
"""


def test_a_log_file_rotates_and_takes_standard_error_along(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab") as stream:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(path)], stdout=stream, stderr=stream, check=True, cwd=tmp_path
        )
    kept = sorted(tmp_path.iterdir())
    assert [one.name for one in kept] == ["log", "log.1", "log.2", "log.3"]
    assert all(one.stat().st_size < 25_000 for one in kept)
    said = path.read_text()
    assert "to stdout" in said
    assert "to stderr" in said
    assert said.count("ZeroDivisionError") + (tmp_path / "log.1").read_text().count("ZeroDivisionError") < 10
    assert "message repeated" in said
    assert os.fspath(path) not in said


def test_a_log_in_ecs_has_one_json_object_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (
        "import logging; from pathlib import Path; from hpcsched.controller.logfile import start_log\n"
        f"start_log('info', Path({str(path)!r}), 1 << 20, 1, is_ecs=True, service='hpcsched-gateway')\n"
        "for _ in range(3): logging.getLogger('hpcsched').warning('a job is called %s', 'a\\nb')\n"
        "logging.shutdown()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["message"] for line in lines] == [
        "a job is called a\nb",
        "message repeated 2 times: a job is called a\nb",
    ]
    assert {line["service"]["name"] for line in lines} == {"hpcsched-gateway"}
