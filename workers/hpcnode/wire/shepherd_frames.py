"""What agent and shepherd say to each other over their socket: a JSON list and raw bytes in each frame.

agent -> shepherd
    ["end", grace_s, why]              TERM, after the grace KILL, until nothing is left
    ["signal", signum, batch_only, full]     to the tasks; of a batch step: to the shell alone, to shell and children
    ["input", task, offset, eof] + bytes
    ["taken", task, fd, offset]        the reader has the output before this offset
    ["resend", round]                  there is a new reader: send again what was not acknowledged, as of this round
    ["go"]                             release the tasks of a launch with `hold`
    ["acknowledged"]                   the end is committed: go as soon as the output was taken
shepherd -> agent
    ["here", version, token]           first on each connection
    ["prepared"]                       of a launch with `hold`: all is ready
    ["started", record]  ["final", record]
    ["output", task, fd, offset, eof, round] + bytes    of an earlier round it is dropped: it comes again
    ["took", task, offset]             the task has taken its input before this offset
    ["signal_steps", signum]           the time limit's warning, for the job's other steps on this node

The two may be of different versions: the agent may have been replaced while the shepherd runs. Both ignore words they do not
know. The frame is that of `protocol`, with a list for the object. They trust each other: same account, a 0700 directory.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Iterator, List, Tuple

VERSION = 1
MAX_FRAME_BYTES = 32 << 20  # twice what any word has
_HEADER = struct.Struct("!II")


def pack(words: List[Any], blob: bytes = b"") -> bytes:
    """Return the frame of a message."""
    text = json.dumps(words, separators=(",", ":")).encode("utf-8", "surrogateescape")
    return _HEADER.pack(len(text), len(blob)) + text + blob


class Unpacker:
    """Turns received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Tuple[List[Any], bytes]]:
        """Yield each (words, blob) that is complete after `data`. Raises ValueError."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            text_size, blob_size = _HEADER.unpack_from(self._buffer)
            middle = _HEADER.size + text_size
            end = middle + blob_size
            if end > MAX_FRAME_BYTES:
                raise ValueError("cannot read a frame of %d bytes: too long" % end)
            if len(self._buffer) < end:
                return
            words = json.loads(self._buffer[_HEADER.size : middle].decode("utf-8", "surrogateescape"))
            blob = bytes(self._buffer[middle:end])
            del self._buffer[:end]
            yield words, blob
