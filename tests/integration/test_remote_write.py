"""Remote write: a real Prometheus takes the samples; one that is down, slow or refuses costs the recorder nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

from hpcsched.recorder import remote_write
from hpcsched.recorder.remote_write import QueuedRow, RemoteWriter, Target, snappy, varint

PROMETHEUS = shutil.which("prometheus")
NAMES = ("node_load1", "node_network_receive_bytes_total:eth0", "node_cpu_seconds_total:user")


def row(at_s: float, *values: float | None, job: str = "", names: tuple[str, ...] = NAMES) -> QueuedRow:
    return QueuedRow("n1", job, round(at_s * 1000), names, json.dumps(values))


@given(st.binary(max_size=200_000))
def test_the_body_is_a_snappy_block(body: bytes) -> None:
    """The reader follows the description of the format; Prometheus' own reader is asked below."""
    data = snappy(body)
    size, at, shift = 0, 0, 0
    while True:
        size |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not data[at - 1] & 0x80:
            break
    found = b""
    while at < len(data):
        assert data[at] == 61 << 2
        length = int.from_bytes(data[at + 1 : at + 3], "little") + 1
        found += data[at + 3 : at + 3 + length]
        at += 3 + length
    assert (size, found) == (len(body), body)


@given(st.integers(0, (1 << 64) - 1))
def test_a_varint_is_read_back(number: int) -> None:
    data = varint(number)
    assert sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(data)) == number
    assert all(byte & 0x80 for byte in data[:-1])


class Server(HTTPServer):
    """A server that answers with `status`, and keeps what came."""

    status = 204
    delay = threading.Event()

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.delay.wait(30)
                server.headers.append(dict(self.headers))
                server.bodies.append(body)
                self.send_response(server.status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.delay = threading.Event()
        self.delay.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/api/v1/write"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.delay.set()
    made.shutdown()
    made.server_close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_write, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(remote_write, "LONGEST_PAUSE_S", 0.1)


def writer_to(url: str, said: list[str], **more: str) -> RemoteWriter:
    return RemoteWriter(Target(url, **more), lambda level, text: said.append(text))


def test_a_server_that_fails_gets_the_same_samples_again(server: Server, said: list[str]) -> None:
    server.status = 503
    writer = writer_to(server.url, said)
    writer.add(row(1e9, 1.0, 2, 3.0))
    wait_until(lambda: len(server.bodies) >= 3)
    server.status = 204
    wait_until(lambda: writer.sent == 1)
    assert len(set(server.bodies)) == 1
    assert sum("does not take samples" in text for text in said) == 1
    writer.close()


def test_samples_that_a_server_refuses_are_dropped_and_counted(server: Server, said: list[str]) -> None:
    server.status = 400
    writer = writer_to(server.url, said)
    writer.add(row(1e9, 1.0, 2, 3.0))
    wait_until(lambda: writer.dropped == 1)
    server.status = 204
    writer.add(row(1e9, 1.0, 2, 3.0))
    wait_until(lambda: writer.sent == 1)
    assert "status 400" in said[0]
    writer.close()


def test_a_server_that_never_answers_costs_old_samples_and_no_time(
    server: Server, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_write, "MAX_QUEUED_BYTES", 10_000)
    server.delay.clear()
    writer = writer_to(server.url, said)
    began_s = time.monotonic()
    for step in range(5000):
        writer.add(row(1e9 + step, 1.0, 2, 3.0))
    assert time.monotonic() - began_s < 5.0
    assert writer._bytes <= 10_000
    assert writer.dropped > 4000
    writer.close()


def test_the_token_is_read_from_its_file_for_each_request(server: Server, said: list[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret1\n")
    writer = writer_to(server.url, said, token_file=str(token))
    writer.add(row(1e9, 1.0, 2, 3.0))
    wait_until(lambda: writer.sent == 1)
    token.write_text("secret2\n")
    writer.add(row(1e9, 1.0, 2, 3.0))
    wait_until(lambda: writer.sent == 2)
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret1", "Bearer secret2"]
    token.unlink()
    writer.add(row(1e9, 1.0, 2, 3.0))
    wait_until(lambda: any("No such file" in text for text in said))
    writer.close()


# ----- a real Prometheus


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if PROMETHEUS is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus is not installed")
        pytest.skip("needs Debian's prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    (directory / "prometheus.yml").write_text("global: {scrape_interval: 1h}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            PROMETHEUS, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(directory / "log").open("w"),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return bool(urllib.request.urlopen(f"{url}/-/ready", timeout=5).status == 200)
        except OSError:
            return False

    wait_until(is_ready)
    yield url
    process.terminate()
    process.wait(30)


def asked(url: str, query: str, at_s: float) -> list[dict[str, Any]]:
    answer = json.load(urllib.request.urlopen(f"{url}/api/v1/query?query={quote(query)}&time={at_s}", timeout=10))
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def test_prometheus_takes_samples_of_nodes_and_jobs(prometheus: str, said: list[str]) -> None:
    writer = writer_to(f"{prometheus}/api/v1/write", said, cluster="lab")
    now_s = time.time() - 300
    for step in range(31):
        writer.add(row(now_s + step * 10, 0.25, 1000 * step, None))
        job_names = ("job_memory_bytes", "job_cpu_seconds_total")
        writer.add(row(now_s + step * 10, 4096, step * 5.0, job="12", names=job_names))
    wait_until(lambda: writer.sent == 62 or writer.dropped)
    assert (writer.dropped, said) == (0, [])
    at_s = now_s + 300
    (load,) = asked(prometheus, "hpcsched_node_load1", at_s)
    assert load["metric"] == {"__name__": "hpcsched_node_load1", "cluster": "lab", "node": "n1"}
    assert load["value"][1] == "0.25"
    (rate,) = asked(prometheus, 'rate(hpcsched_node_network_receive_bytes_total{device="eth0"}[200s])', at_s)
    assert float(rate["value"][1]) == pytest.approx(100, rel=0.01)
    (job,) = asked(prometheus, "rate(hpcsched_job_cpu_seconds_total[200s])", at_s)
    assert (job["metric"]["job"], float(job["value"][1])) == ("12", pytest.approx(0.5, rel=0.01))
    assert asked(prometheus, "hpcsched_node_cpu_seconds_total", at_s) == []
    writer.close()
