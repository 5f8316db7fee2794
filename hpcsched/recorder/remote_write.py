"""Send samples to Prometheus, VictoriaMetrics or another server that takes remote write.

A thread of the recorder sends what is queued. The queue is bounded: a server that is slow or down
for long costs the oldest samples, which are counted, and never delays the recorder.

The body is written here, without libraries for protobuf and Snappy: the message has five fields, and
Snappy's format allows a body that is not compressed.

Sources: https://prometheus.io/docs/specs/prw/remote_write_spec/ (1.0); prompb/remote.proto;
https://github.com/google/snappy/blob/main/format_description.txt.
"""

from __future__ import annotations

import http.client
import json
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hpcsched.metrics.series import TABLE

MAX_QUEUED_BYTES = 32 << 20
MAX_ROWS = 200  # samples of nodes in one request
TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
COMPLAIN_S = 3600.0
MAX_LITERAL = 1 << 16
MAX_LABEL_LISTS = 10_000
MAX_TOKEN_BYTES = 16_384
HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": "hpcsched",
}


class Target(NamedTuple):
    """Where to send, and as whom. `cluster` is a label of all series."""

    url: str
    token_file: str = ""
    cluster: str = ""


class QueuedRow(NamedTuple):
    """A sample of a node, or of a job on it: `values` as a JSON list."""

    node: str
    job: str  # "": the node itself
    at_ms: int
    names: tuple[str, ...]
    values: str


# ----- the body


def varint(number: int) -> bytes:
    """Return a number from 0 to 2**64 - 1 as protobuf and Snappy write it."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def labels_of(row: QueuedRow, name: str, cluster: str) -> bytes:
    """Return the labels of a series, sorted by name, as fields of a TimeSeries."""
    series = TABLE[name.partition(":")[0]]
    names = series.column_labels
    values = name.partition(":")[2].split(":", len(names) - 1) if names else []
    labels = dict(zip(names, values, strict=False)) | {"__name__": series.full_name, "node": row.node}
    if row.job:
        labels["job"] = row.job
    if cluster:
        labels["cluster"] = cluster
    pairs = sorted((key, value) for key, value in labels.items() if value)
    return b"".join(
        _field(1, _field(1, key.encode()) + _field(2, value.encode("utf-8", "replace"))) for key, value in pairs
    )


def sample_of(value: float, at_ms: int) -> bytes:
    """Return a Sample as a field of a TimeSeries."""
    return _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + varint(at_ms))


def snappy(body: bytes) -> bytes:
    """Return the body in Snappy's format, as literals."""
    parts = [varint(len(body))]
    for begin in range(0, len(body), MAX_LITERAL):
        literal = body[begin : begin + MAX_LITERAL]
        parts += [b"\xf4" + struct.pack("<H", len(literal) - 1), literal]  # 61 << 2: a length of two bytes follows
    return b"".join(parts)


# ----- the sender


class RemoteWriter:
    """A queue, and the thread that sends it."""

    def __init__(self, target: Target, say: Callable[[str, str], None]) -> None:
        self._target = target
        self._say = say
        self._rows: deque[QueuedRow] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._labels: dict[tuple[str, str, tuple[str, ...]], list[bytes]] = {}
        self._complained_s = float("-inf")
        self._ended = False
        self.sent = self.dropped = 0  # rows
        self._thread = threading.Thread(target=self._run, name="remote-write", daemon=True)
        self._thread.start()

    def add(self, row: QueuedRow) -> None:
        """Queue a row; if there is no room, drop the oldest ones."""
        with self._changed:
            self._rows.append(row)
            self._bytes += len(row.values)
            while self._bytes > MAX_QUEUED_BYTES:
                self._bytes -= len(self._rows.popleft().values)
                self.dropped += 1
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its present request; do not wait for it."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        while not self._ended:
            with self._changed:
                while not self._rows and not self._ended:
                    self._changed.wait()
                rows = [self._rows.popleft() for _ in range(min(MAX_ROWS, len(self._rows)))]
                self._bytes -= sum(len(row.values) for row in rows)
            if rows:
                self._send_until_taken(rows)

    def _send_until_taken(self, rows: Sequence[QueuedRow]) -> None:
        """Send rows until the server takes them; drop them if it refuses them."""
        body, pause_s = snappy(self._body(rows)), FIRST_PAUSE_S
        while not self._ended:
            try:
                status, why = self._post(body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                status, why = 0, str(error)
            if 200 <= status < 300:
                self.sent += len(rows)
                return
            if 400 <= status < 500 and status != 429:
                self.dropped += len(rows)
                self._complain(f"refuses samples with status {status}: {why}")
                return
            self._complain(f"does not take samples: {why or status}; trying again")
            with self._changed:
                self._changed.wait_for(lambda: self._ended, pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self.dropped += len(rows)

    def _post(self, body: bytes) -> tuple[int, str]:
        """Send a body; return status and reason. Raises OSError, HTTPException, ValueError."""
        url = urlsplit(self._target.url)
        headers = dict(HEADERS)
        if self._target.token_file:
            with Path(self._target.token_file).open("rb") as stream:
                headers["Authorization"] = f"Bearer {stream.read(MAX_TOKEN_BYTES).decode('ascii').strip()}"
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(url.netloc, timeout=TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
        try:
            connection.request("POST", url.path + (f"?{url.query}" if url.query else ""), body, headers)
            response = connection.getresponse()
            return response.status, response.read(300).decode("utf-8", "replace").strip()
        finally:
            connection.close()

    def _body(self, rows: Iterable[QueuedRow]) -> bytes:
        parts = []
        for row in rows:
            for labels, value in zip(self._labels_of(row), json.loads(row.values), strict=True):
                if value is not None and labels:
                    parts.append(_field(1, labels + sample_of(value, row.at_ms)))
        return b"".join(parts)

    def _labels_of(self, row: QueuedRow) -> list[bytes]:
        key = (row.node, row.job, row.names)
        found = self._labels.get(key)
        if found is None:
            if len(self._labels) >= MAX_LABEL_LISTS:
                self._labels.clear()
            known = [name.partition(":")[0] in TABLE for name in row.names]
            found = self._labels[key] = [
                labels_of(row, name, self._target.cluster) if is_known else b""
                for name, is_known in zip(row.names, known, strict=True)
            ]
        return found

    def _complain(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAIN_S:
            self._complained_s = now_s
            self._say("warning", f"{self._target.url} {text[:300]}")
