"""What a run tells: a line for people, and one JSON object per step in a file.

Rank 0 writes.  Does not know what the numbers mean.
Rules: lines are appended one by one, unbuffered; a line that a killed writer left half written is ended first, so that
it spoils nothing.  After a restart the lines of the new attempt follow; for a step that was done twice the higher
attempt counts.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 64 << 10
RETRY_S = 5.0  # a share that is away may take as long to say so each time
MOST_BYTES = 64 << 20  # that wait; then the oldest lines are given up
LINE_END = b"\n"


class MetricsFile:
    """An append-only file of JSON lines.

    What a share that is full, read-only or stale does not take waits in memory, is tried again every few seconds, and follows in
    order; that is said once.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._stream: io.FileIO | None = None
        self._waiting = bytearray()
        self._not_before_s = float("-inf")
        self._trouble = ""
        self._attempt()

    def write(self, line: dict[str, object]) -> None:
        """This will append one line; what is None is left out."""
        kept = {name: value for name, value in line.items() if value is not None}
        self._waiting += json.dumps(kept, separators=(",", ":")).encode() + b"\n"
        if self._clock() >= self._not_before_s:
            self._attempt()

    def backwards(self) -> Iterator[dict[str, Any]]:
        """This will give the lines, the last one first: those that wait, then those of the file."""
        yield from filter(None, map(_line_of, reversed(bytes(self._waiting).split(LINE_END))))
        yield from read_backwards(self._path)

    def close(self) -> None:
        """This will try once more and close the file."""
        self._attempt()
        if self._stream is not None:
            self._stream.close()
        if self._waiting:
            print(f"metrics: {self._waiting.count(LINE_END)} lines could not be written to {self._path}", flush=True)

    def _attempt(self) -> None:
        try:
            self._append()
        except OSError as error:
            self._stream = None  # a stale one stays so: it is opened anew
            self._not_before_s = self._clock() + RETRY_S
            if not self._trouble:
                print(f"metrics: cannot write {self._path}, lines wait in memory: {error.strerror}", flush=True)
            self._trouble = str(error)
            if len(self._waiting) > MOST_BYTES:
                del self._waiting[: self._waiting.index(LINE_END, len(self._waiting) - MOST_BYTES) + 1]
            return
        if self._trouble:
            print(f"metrics: {self._path} is written again", flush=True)
        self._trouble = ""

    def _append(self) -> None:
        if self._stream is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torn = not self._trouble and _ends_in_half_a_line(self._path)
            self._stream = io.FileIO(self._path, "a")
            self._waiting[:0] = LINE_END * torn
        while self._waiting:  # a disk that gets full may take a part of a line: the rest follows
            del self._waiting[: self._stream.write(self._waiting)]


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """This will give the lines that are whole, in the file's order."""
    with path.open("rb") as stream:
        yield from filter(None, map(_line_of, stream))


def read_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """This will give the lines that are whole, the last one first; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        at, rest = stream.seek(0, 2), b""
        while at > 0:
            size = min(BLOCK_BYTES, at)
            at = stream.seek(at - size)
            rest, *lines = (stream.read(size) + rest).split(b"\n")
            yield from filter(None, map(_line_of, reversed(lines)))
        yield from filter(None, [_line_of(rest)])


def _line_of(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None  # half a line of a killed attempt
    return line if isinstance(line, dict) and "step" in line else None


def _ends_in_half_a_line(path: Path) -> bool:
    try:
        content = path.read_bytes()[-1:]
    except FileNotFoundError:
        return False
    return content not in (b"", b"\n")
