"""The streams between tasks and a step command, with bounded buffers.

Offsets count the bytes of a stream from its start, so repeated data is recognized. Memory is bounded: if a reader does not take
the output, the pipe stops the task that writes it.
"""

from __future__ import annotations

import os
from typing import List, Tuple

CHUNK = 64 << 10
MAX_UNTAKEN = 1 << 20
MAX_STEP_UNTAKEN = 32 << 20
INPUT_WINDOW = 1 << 20


def untaken_limit(tasks: int) -> int:
    """Return how many bytes each stream may keep, because one reader holds those of all tasks."""
    return max(CHUNK, min(MAX_UNTAKEN, MAX_STEP_UNTAKEN // (2 * max(1, tasks))))


class OutputStream:
    """The output of one task on one descriptor, from its pipe to its reader."""

    def __init__(self, task: int, fd: int, pipe: int, limit: int) -> None:
        self.task = task
        self.fd = fd
        self.pipe = pipe  # -1 when it has ended
        self._limit = limit
        self._kept = bytearray()
        self._taken = 0  # offset of the first byte that is kept
        self._sent = 0
        self._eof_sent = False

    @property
    def ended(self) -> bool:
        """Whether the task, and all processes that inherited its pipe, have closed it."""
        return self.pipe < 0

    @property
    def wants_more(self) -> bool:
        """Whether there is room to read from the pipe."""
        return not self.ended and len(self._kept) < self._limit

    @property
    def taken_bytes(self) -> int:
        """Bytes that the reader has acknowledged, or that were dropped."""
        return self._taken

    @property
    def all_sent(self) -> bool:
        """Whether all output and its end were sent."""
        return self._eof_sent

    @property
    def all_taken(self) -> bool:
        """Whether the reader has acknowledged all output."""
        return self._eof_sent and not self._kept

    def read(self) -> None:
        """Read from the pipe, as far as there is room."""
        if not self.wants_more:
            return  # reading 0 bytes would look like the end
        try:
            data = os.read(self.pipe, min(CHUNK, self._limit - len(self._kept)))
        except BlockingIOError:
            return
        if data:
            self._kept += data
        else:
            self.end()

    def end(self) -> None:
        """Close the pipe."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def drop(self) -> None:
        """Drop all output that was not acknowledged."""
        self._taken += len(self._kept)
        self._sent = self._taken
        self._kept.clear()

    def to_send(self) -> List[Tuple[int, bytes, bool]]:
        """Return (offset, bytes, eof) of unsent output, and count it as sent."""
        frames = []
        end = self._taken + len(self._kept)
        while self._sent < end:
            start = self._sent - self._taken
            data = bytes(self._kept[start : start + CHUNK])
            frames.append((self._sent, data, False))
            self._sent += len(data)
        if self.ended and not self._eof_sent:
            self._eof_sent = True
            frames.append((end, b"", True))
        return frames

    def taken(self, offset: int) -> None:
        """Drop output before `offset`, which the reader has acknowledged."""
        count = min(offset - self._taken, len(self._kept))
        if count > 0:
            del self._kept[:count]
            self._taken += count
            self._sent = max(self._sent, self._taken)

    def resend(self) -> None:
        """Count unacknowledged output, and the end, as unsent."""
        self._sent = self._taken
        self._eof_sent = False


class InputStream:
    """The input of one task, from its sender to its pipe."""

    def __init__(self, task: int, pipe: int) -> None:
        self.task = task
        self.pipe = pipe  # -1 when it is closed
        self._waiting = bytearray()
        self._received = 0
        self._eof = False

    @property
    def taken(self) -> int:
        """The offset before which the task or its pipe has all input."""
        return self._received - len(self._waiting)

    @property
    def wants_to_write(self) -> bool:
        """Whether input waits for room in the pipe."""
        return self.pipe >= 0 and bool(self._waiting or self._eof)

    def add(self, offset: int, data: bytes, eof: bool) -> bool:
        """Add the new part of `data`.

        Return False if bytes before it are missing or there is no room: send it again.
        """
        if offset > self._received:
            return False
        new = data[self._received - offset :]
        if len(self._waiting) + len(new) > INPUT_WINDOW:
            return False
        self._received += len(new)
        if self.pipe >= 0:
            self._waiting += new
            self._eof = self._eof or eof
        return True

    def write(self) -> bool:
        """Write as much as the pipe takes; return whether anything was written."""
        before = len(self._waiting)
        try:
            while self._waiting:
                del self._waiting[: os.write(self.pipe, self._waiting[:CHUNK])]
        except BlockingIOError:
            return len(self._waiting) < before
        except BrokenPipeError:
            self.close()
            return True
        if self._eof:
            self.close()
        return True

    def close(self) -> None:
        """Close the pipe; later input is accepted and dropped."""
        self._waiting.clear()
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
