"""A file on the share that tells whether another machine sees the same share: it reads there what was written here.

Standard library only: `hpcsched node add`, `hhealth` and the controller use it.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = ".hpcsched-probe-"
PROBE_BYTES = 64
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{16}\Z")


@dataclass(slots=True)
class ShareProbe:
    """A file with random content; it exists within the `with` block."""

    path: Path
    content: str = field(default_factory=lambda: secrets.token_hex(PROBE_BYTES // 2))

    def __enter__(self) -> ShareProbe:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "w", encoding="ascii") as file:
            file.write(self.content)
            file.flush()
            os.fsync(fd)  # what is not on the server yet, another client cannot read
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)

    def judge(self, error: str, content: str) -> str:
        """Return what is wrong with what a node read, in words; "" if nothing is."""
        if error:
            return f"cannot read {self.path.parent} there: {error}"
        if content != self.content:
            return f"{self.path.parent} there is another directory than here"
        return ""


def share_probe(share: str) -> ShareProbe:
    """Return a probe for the directory `share`. Entering it raises OSError if it cannot be written."""
    return ShareProbe(Path(share) / (PREFIX + secrets.token_hex(8)))


def is_probe_name(name: str) -> bool:
    """Say whether `name` is that of a probe file: nothing else on the share is read for whoever asks."""
    return _NAME.match(name) is not None
