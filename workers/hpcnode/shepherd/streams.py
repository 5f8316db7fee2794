"""What flows between tasks and a step command: output kept until it was taken, input handed on as it is wanted.

Offsets count the bytes of one stream from its start, so that whatever is sent twice is seen once. Bounded: a reader that
does not take its output stops the task that writes it (through the pipe), never the memory of this process.
"""

from __future__ import annotations

import os
from typing import List, Tuple

CHUNK = 64 << 10
MAX_UNTAKEN = 1 << 20
MAX_STEP_UNTAKEN = 32 << 20
INPUT_WINDOW = 1 << 20


def untaken_limit(tasks: int) -> int:
    """Return how many bytes one stream may keep, in a step of so many tasks: their one reader has to hold them all."""
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
        """Whether the task (and all that inherited its pipe) has closed it."""
        return self.pipe < 0

    @property
    def wants_more(self) -> bool:
        """Whether there is room to read from the pipe."""
        return not self.ended and len(self._kept) < self._limit

    @property
    def taken_bytes(self) -> int:
        """How much the reader has acknowledged (or was dropped)."""
        return self._taken

    @property
    def all_sent(self) -> bool:
        """Whether the reader was sent everything, and the end."""
        return self._eof_sent

    @property
    def all_taken(self) -> bool:
        """Whether the reader has acknowledged everything."""
        return self._eof_sent and not self._kept

    def read(self) -> None:
        """Take what the pipe has now, as far as there is room."""
        if not self.wants_more:
            return  # a read of no bytes would look like the end
        try:
            data = os.read(self.pipe, min(CHUNK, self._limit - len(self._kept)))
        except BlockingIOError:
            return
        if data:
            self._kept += data
        else:
            self.end()

    def end(self) -> None:
        """Nothing comes any more."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def drop(self) -> None:
        """Forget all output: nobody wants it."""
        self._taken += len(self._kept)
        self._sent = self._taken
        self._kept.clear()

    def to_send(self) -> List[Tuple[int, bytes, bool]]:
        """Return the (offset, bytes, eof) that were not sent yet, and count them as sent."""
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
        """The reader has everything before `offset`: forget it."""
        count = min(offset - self._taken, len(self._kept))
        if count > 0:
            del self._kept[:count]
            self._taken += count
            self._sent = max(self._sent, self._taken)

    def resend(self) -> None:
        """Send again whatever was not acknowledged, and the end."""
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
        """The offset before which the task (or its pipe) has everything."""
        return self._received - len(self._waiting)

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for room in the pipe."""
        return self.pipe >= 0 and bool(self._waiting or self._eof)

    def add(self, offset: int, data: bytes, eof: bool) -> bool:
        """Take what is new of `data`; False if bytes before it are missing or it is too much: it must be sent again."""
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
        """Write what the pipe takes; return whether anything moved."""
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
        """Close the pipe; what still comes is taken and dropped, as by a program that reads no more."""
        self._waiting.clear()
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
