"""A real log shipper reads what we write with the example of its configuration: each line arrives, whole, once."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpcnode.agent.command import EcsLines
from hpcsched.controller.logfile import EcsFormatter, LogFile
from hpcsched.listing.ecs import ecs_line, event_document

SHIPPERS = Path(__file__).parents[2] / "etc" / "log-shippers"
RSYSLOG = shutil.which("rsyslogd") or shutil.which("/usr/sbin/rsyslogd")
NASTY = ["plain", "two\nlines", "\u2028 \x1b[2J \udcff", '"}', "%s %msg% $!x", "x" * 32_000, "tail   "]


class Receiver:
    """A TCP server that keeps the lines that it gets."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.received = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(1 << 16):
                    self.received += data

    def lines(self) -> list[str]:
        return self.received.decode("ascii").splitlines()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def rsyslog(tmp_path: Path, receiver: Receiver) -> Iterator[Path]:
    """Run rsyslog with our example on a directory of this test, and return that."""
    if RSYSLOG is None:
        assert os.environ.get("CI") != "true", "rsyslogd is missing: apt-get install rsyslog"
        pytest.skip("rsyslogd is missing: apt-get install rsyslog")
    text = (SHIPPERS / "rsyslog.conf").read_text()
    for name in ("/var/lib/hpcsched", "/var/log/hpcsched"):
        assert name in text
        text = text.replace(name, str(tmp_path / "logs"))
    text = text.replace('"5170"', f'"{receiver.port}"').replace("global(", f'global(workDirectory="{tmp_path}" ')
    (tmp_path / "logs").mkdir()
    config = tmp_path / "rsyslog.conf"
    config.write_text(text)
    words = [RSYSLOG, "-n", "-f", str(config), "-i", str(tmp_path / "pid")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        yield tmp_path / "logs"
        running.terminate()


def test_rsyslog_sends_each_line_of_controller_node_and_events_whole(rsyslog: Path, receiver: Receiver) -> None:
    written: list[str] = []
    log = LogFile(rsyslog / "hpcschedd.log", maxBytes=200_000, backupCount=2, encoding="utf-8")
    log.setFormatter(EcsFormatter("hpcschedd"))

    def write(text: str) -> None:
        record = logging.LogRecord("hpcsched", logging.WARNING, __file__, 1, "%s", (text,), None)
        written.append(log.format(record))
        log.emit(record)

    for text in NASTY:
        write(text)
    lines = EcsLines("lab", "n1")
    events = [
        ecs_line(event_document({"seq": 1, "at_s": 1.0, "job_id": 7, "kind": "Exited", "state": "FAILED"}, "lab")),
        lines.line("cannot record the end of it: disk full"),
    ]
    written += events
    (rsyslog / "events.json").write_text("".join(f"{line}\n" for line in events))
    wait_until(lambda: len(receiver.lines()) >= len(written), what="all lines", timeout_s=30)
    assert sorted(receiver.lines()) == sorted(written)
    messages = {json.loads(line)["message"] for line in receiver.lines()}
    assert {*NASTY} <= messages
    for number in range(12):  # the log moves to another file in between
        write(f"{number} " + "y" * 30_000)
        wait_until(lambda: len(receiver.lines()) >= len(written), what=f"line {number}", timeout_s=30)
    assert (rsyslog / "hpcschedd.log.1").exists()
    assert sorted(receiver.lines()) == sorted(written)
    log.close()
