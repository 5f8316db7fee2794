"""A log that may lie on a full disk: what cannot be written is dropped, and nobody fails for it.

The agent and its shepherds put it in the place of their stderr, the file ROOT/log.
"""

from __future__ import annotations

import io
import os


class LossyLog(io.TextIOBase):
    """Writes each text to a descriptor at once, or not at all."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        """Write `text` if the disk takes it."""
        try:
            os.write(self._fd, text.encode("utf-8", "backslashreplace"))
        except OSError:
            pass
        return len(text)
