"""Output of a job or a command as lines for the screen, followed while it grows.

`LogFeed` reads a job's output in a thread of its own; `OutputLines` turns bytes into lines. Rules: lines and their length are
bounded; escape sequences and control characters are left out; of a line that was written over (a progress bar), the last text
counts. A controller or node that does not answer is asked again.
"""

from __future__ import annotations

import codecs
import threading
from collections import deque
from collections.abc import Callable

from hpcsched import client
from hpcsched.errors import HpcschedError, RateLimitError, UnavailableError
from hpcsched.listing.text import output_text

WAIT_S = 10.0
RECONNECT_S = 1.0
MOST_LINES = 10_000
MOST_LINE_CHARS = 4_000
FIRST_BYTES = 256 << 10  # of output that is there already
MOST_BEHIND_BYTES = 4 << 20  # a faster job's output is skipped


class OutputLines:
    """The last lines of a stream of bytes. `lines` has no control characters."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def add(self, data: bytes) -> None:
        """Add a piece of the stream."""
        *whole, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        self.lines.extend(map(_shown, whole[-MOST_LINES:]))
        if len(self._rest) > MOST_LINE_CHARS:
            self._rest = self._rest[-MOST_LINE_CHARS:]

    def all(self) -> list[str]:
        """Return the lines, with the incomplete one at the end."""
        return [*self.lines, *([_shown(self._rest)] if self._rest else [])]


def _shown(line: str) -> str:
    """Return a line as a terminal shows it in the end."""
    text = line.rstrip("\r")
    return output_text(text[text.rfind("\r") + 1 :][: 4 * MOST_LINE_CHARS]).expandtabs()[:MOST_LINE_CHARS]


class LogFeed:
    """The output of a job, from shortly before its end on, until `stop`.

    `output` gets pieces of bytes; `note` gets why there are none at the moment, "" once there are. A thread calls both.
    """

    def __init__(
        self, job: str, stream: str, output: Callable[[bytes, int | None], None], note: Callable[[str], None]
    ) -> None:
        self._job, self._stream, self._output, self._note = job, stream, output, note
        self._stopped = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def stop(self) -> None:
        """End the feed."""
        self._stopped.set()

    def _follow(self) -> None:
        offset, wait_s = -FIRST_BYTES, 0.0
        while not self._stopped.is_set():
            try:
                part = client.fetch_log(self._job, stream=self._stream, offset=offset, wait_s=wait_s)
            except (UnavailableError, RateLimitError) as error:
                self._note(str(error))
                self._stopped.wait(RECONNECT_S)
                continue
            except HpcschedError as error:
                self._note(str(error))
                self._output(b"", 1)
                return
            wait_s = WAIT_S
            if 0 < part.size < offset:
                self._output(b"\n... the file has become shorter: from its start\n", None)
                offset = 0
                continue
            self._note("" if part.data or offset > 0 else "no output yet")
            if part.data and not self._stopped.is_set():
                self._output(part.data, None)
            offset = part.offset + len(part.data)
            if part.size - offset > MOST_BEHIND_BYTES:
                self._output(b"\n... %d bytes are left out\n" % (part.size - FIRST_BYTES - offset), None)
                offset = part.size - FIRST_BYTES
            elif part.ended and offset >= part.size:
                self._output(b"", 0)
                return
