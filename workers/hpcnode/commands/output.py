"""Output of tasks on its way to files: ordered, cut into lines, labelled, written.

A stream belongs to one descriptor of a task, an outlet to one file that many streams may share. Connections and steps are not
known here.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
from typing import Dict, List, Mapping, Optional, Sequence

from hpcnode.wire import protocol

PIPE_PIECE = 4096  # PIPE_BUF: a pipe that is writable for poll takes as much without blocking
FILE_PIECE = 1 << 20
MAX_LINE = 64 << 10  # longer lines are written in pieces


class Outlet:
    """A descriptor for writing, shared by the tasks' streams."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.written = 0  # bytes that were written or dropped
        self.put = 0
        self.broken = False  # it has no reader: data is dropped
        self.reported = False
        self._pending = bytearray()
        self._piece = FILE_PIECE if stat.S_ISREG(os.fstat(fd).st_mode) else PIPE_PIECE

    @property
    def pending(self) -> bool:
        """Whether data waits to be written."""
        return bool(self._pending)

    def write(self, data: bytes) -> int:
        """Queue `data`; return the value of `written` when it is written."""
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
        """Write all queued data, however long that takes."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._pending:
            poll.poll()
            self.on_writable(0)


class LineStream:
    """The output of a task on one descriptor. Without an outlet it is counted and dropped."""

    def __init__(self, outlet: Optional[Outlet], label: bytes = b"", by_line: bool = True) -> None:
        self.outlet = outlet
        self.received = 0  # the offset before which all data has come
        self.all_came = False
        self._label = label
        self._by_line = by_line
        self._partial = b""
        self._at_line_start = True
        self._passed = 0  # `outlet.written` when all passed data is written
        self._acknowledged = 0

    def take(self, offset: int, data: bytes, eof: bool) -> bool:
        """Take `data` at `offset`; return False if bytes before it are missing."""
        if offset > self.received:
            return False
        if offset < self._acknowledged:
            self._acknowledged = offset  # the sender does not know the acknowledgement: repeat it
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
        """Start at `offset`, and ignore the output before."""
        self.received = self._acknowledged = offset

    def finish(self) -> None:
        """Write the incomplete last line."""
        if self._partial:
            self._write(self._partial)
            self._partial = b""
        if self._label and not self._at_line_start:
            self._write(b"\n")

    def to_acknowledge(self) -> Optional[int]:
        """Return the offset to acknowledge, None if there is nothing new."""
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


# ----- destinations of a step's streams: --output, --error and --input of hrun, and of the parts of ``srun A : B``
# hrun writes files that several tasks share, and all files of parts. Nodes write files with one name per task (%t %n %N).


_PATTERN = re.compile(r"%(%|\d*[A-Za-z])")
_OF_TASK = re.compile(r"%(%|(\d{0,2})([tnN]))")
STREAMS = {"output": 1, "error": 2}


class StreamTarget:
    """The destination or source of a stream: hrun, a file of hrun, or a file on the node."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.is_default = not text
        self.to_all = text == "all"
        self.task: Optional[int] = None  # the only task with this stream; None: all
        self.node_file = ""
        self.local_file = ""
        if text == "none":
            self.node_file = os.devnull
        elif text.isdigit():
            self.task = int(text)
        elif any(word[-1] in "tnN" for word in _PATTERN.findall(text)):
            self.node_file = text
        elif text and text != "all":
            self.local_file = text
            self.to_all = True

    def wants(self, task: int) -> bool:
        """Return whether the task's output is shown."""
        return self.task in (None, task)


class PartFiles:
    """The files of the parts of a step: ``ntasks``, ``output``, ``error``, as strings."""

    def __init__(self, parts: Sequence[Mapping[str, str]]) -> None:
        self._parts = parts

    @classmethod
    def read(cls, text: str, usual: Mapping[str, str]) -> Optional["PartFiles"]:
        """Return the files in the JSON `text`, None for "".

        `usual`: the files of parts without their own.
        """
        if not text:
            return None
        parts: List[Mapping[str, str]] = json.loads(text)
        return cls([{**usual, **part} for part in parts])

    def patterns(self, started: protocol.StepStarted) -> Dict[int, Dict[int, str]]:
        """Return the file of each task by descriptor, "" for hrun's own output.

        Patterns of the task are filled in.
        """
        nodes = {rank: (name, at) for at, (name, ranks, _) in enumerate(started.parts()) for rank in ranks}
        found: Dict[int, Dict[int, str]] = {fd: {} for fd in STREAMS.values()}
        first = 0
        for part in self._parts:
            for task in range(first, first + int(part["ntasks"])):
                for name, fd in STREAMS.items():
                    text = part[name] or part["output"]
                    found[fd][task] = _filled(text, task, *nodes[task]) if text != "all" else ""
            first += int(part["ntasks"])
        return found


def _filled(pattern: str, task: int, node: str, node_rank: int) -> str:
    facts = {"t": str(task), "n": str(node_rank), "N": node}

    def value(match: "re.Match[str]") -> str:
        if match.group(1) == "%":
            return "%%"  # the other letters are filled in later
        text = facts[match.group(3)]
        return text.zfill(int(match.group(2) or 0)) if text.isdigit() else text

    return os.devnull if pattern == "none" else _OF_TASK.sub(value, pattern)
