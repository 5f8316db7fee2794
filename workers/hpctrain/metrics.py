"""What a run tells: a line for people, and one JSON object per step in a file.

Rank 0 writes.  Does not know what the numbers mean.
Rules: lines are appended and flushed one by one; a line that a killed writer left half written is ended first, so that
it spoils nothing.  After a restart the lines of the new attempt follow; for a step that was done twice the higher
attempt counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

BLOCK_BYTES = 64 << 10


class MetricsFile:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_in_half_a_line(path)
        self._stream: IO[str] = path.open("a", encoding="utf-8")
        if torn:
            self._stream.write("\n")

    def write(self, line: dict[str, object]) -> None:
        """This will append one line and flush it; what is None is left out."""
        kept = {name: value for name, value in line.items() if value is not None}
        self._stream.write(json.dumps(kept, separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """This will close the file."""
        self._stream.close()


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
