"""A file on the share that tells whether another machine sees the same share: it is compared there with what was written.

`hpcsched node add`, `hhealth` and the controller use it. Nodes are told the file's SHA-256 and answer same or not same.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from hpcnode.wire.protocol import PROBE_BYTES, PROBE_PREFIX, CompareProbe

_NAME = re.compile(re.escape(PROBE_PREFIX) + r"[0-9a-f]{16}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(slots=True)
class ShareProbe:
    """A file with random content; it exists within the `with` block."""

    path: Path
    content: str = field(default_factory=lambda: secrets.token_hex(PROBE_BYTES // 2))
    uid: int = -1  # the file's owner: not always who wrote it (NFS may map root to another account)

    def __enter__(self) -> ShareProbe:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "w", encoding="ascii") as file:
            file.write(self.content)
            file.flush()
            os.fsync(fd)  # what is not on the server yet, another client cannot read
            self.uid = os.fstat(fd).st_uid
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def sha256(self) -> str:
        """The hash of the content, in hexadecimal."""
        return hashlib.sha256(self.content.encode("ascii")).hexdigest()


def share_probe(share: str) -> ShareProbe:
    """Return a probe for the directory `share`. Entering it raises OSError if it cannot be written."""
    return ShareProbe(Path(share) / (PROBE_PREFIX + secrets.token_hex(8)))


def question(request: int, share: str, name: str, sha256: str, uid: int) -> CompareProbe:
    """Return the question whether the share probe `name` is the same on a node. Raises ValueError if it is not a probe's."""
    if not _NAME.match(name) or not _SHA256.match(sha256):
        raise ValueError("not a share probe")
    return CompareProbe(request=request, directory=share, name=name, sha256=sha256, uid=uid)


def problem_of(share: str, *, same: bool, error: str) -> str:
    """Return what a node's answer says is wrong with the share there, "" if nothing is."""
    if same:
        return ""
    return f"cannot compare {share} there: {error}" if error else f"{share} there is another directory than here"
