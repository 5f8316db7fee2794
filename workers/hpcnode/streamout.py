"""Output of tasks on its way to files: put in order by offset, cut into lines, labelled, written when there is room.

It knows neither the connection nor what a step is. A stream belongs to one task's descriptor, an outlet to one file that
many streams may share.
"""

from __future__ import annotations

import os
import select
import stat
from typing import Optional

PIPE_PIECE = 4096  # PIPE_BUF: a pipe that poll calls writable takes as much without blocking
FILE_PIECE = 1 << 20
MAX_LINE = 64 << 10  # a longer line is passed on in pieces


class Outlet:
    """A descriptor to write to, shared by the tasks' streams."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.written = 0  # bytes that were put in and are out (or dropped) again
        self.put = 0
        self.broken = False  # nobody reads it any more: what comes is dropped
        self.reported = False
        self._pending = bytearray()
        self._piece = FILE_PIECE if stat.S_ISREG(os.fstat(fd).st_mode) else PIPE_PIECE

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._pending)

    def write(self, data: bytes) -> int:
        """Take `data`; return the value that `written` will have when it is out."""
        self.put += len(data)
        if self.broken:
            self.written += len(data)
        else:
            self._pending += data
        return self.put

    def on_writable(self, events: int) -> None:
        """Write a piece."""
        try:
            count = os.write(self.fd, self._pending[: self._piece])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.broken = True
            count = len(self._pending)
        del self._pending[:count]
        self.written += count

    def drain(self) -> None:
        """Write everything that waits, however long it takes."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._pending:
            poll.poll()
            self.on_writable(0)


class LineStream:
    """What one task writes on one descriptor. Without an outlet it is counted and dropped."""

    def __init__(self, outlet: Optional[Outlet], label: bytes = b"", by_line: bool = True) -> None:
        self.outlet = outlet
        self.received = 0  # the offset up to which everything came
        self.all_came = False
        self._label = label
        self._by_line = by_line
        self._partial = b""
        self._at_line_start = True
        self._passed = 0  # `outlet.written` when all that was passed on is out
        self._acknowledged = 0

    def take(self, offset: int, data: bytes, eof: bool) -> bool:
        """Take `data` that begins at `offset`; False if bytes before it are missing."""
        if offset > self.received:
            return False
        if offset < self._acknowledged:
            self._acknowledged = offset  # that it was taken is not known there: it is said again
        new = data[self.received - offset :]
        self.received += len(new)
        if self.outlet is not None:
            self._pass_on(new)
        if eof and not self.all_came:
            self.all_came = True
            self.finish()
        return True

    @property
    def acknowledged(self) -> int:
        """The offset that was acknowledged last."""
        return self._acknowledged

    def begin_at(self, offset: int) -> None:
        """Take what comes from `offset` on: nobody wants what was before."""
        self.received = self._acknowledged = offset

    def finish(self) -> None:
        """Pass a last line without an end on."""
        if self._partial:
            self._write(self._partial)
            self._partial = b""
        if self._label and not self._at_line_start:
            self._write(b"\n")

    def to_acknowledge(self) -> Optional[int]:
        """Return the offset to acknowledge, None if that is known already."""
        if self.received == self._acknowledged:
            return None
        if self.outlet is not None and self.outlet.written < self._passed:
            return None
        self._acknowledged = self.received
        return self.received

    def _pass_on(self, new: bytes) -> None:
        if not self._by_line:
            self._write(new)
            return
        data = self._partial + new
        end = data.rfind(b"\n") + 1
        if len(data) - end > MAX_LINE:
            end = len(data)
        self._write(data[:end])
        self._partial = data[end:]

    def _write(self, data: bytes) -> None:
        if not data or self.outlet is None:
            return
        if self._label:
            data = self._labelled(data)
        self._passed = self.outlet.write(data)

    def _labelled(self, data: bytes) -> bytes:
        text = (self._label if self._at_line_start else b"") + data
        self._at_line_start = data.endswith(b"\n")
        body = text[:-1] if self._at_line_start else text
        return body.replace(b"\n", b"\n" + self._label) + text[len(body) :]
