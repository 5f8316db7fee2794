"""Test whether another machine has the same share: it compares a probe file with its hash.

`hpcsched node add`, `hhealth` and the controller use it. Nodes get the file's SHA-256 and answer
whether the file is the same.
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
    uid: int = -1  # the file's owner; may differ from its writer (NFS may map root to another account)

    def __enter__(self) -> ShareProbe:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "w", encoding="ascii") as file:
            file.write(self.content)
            file.flush()
            os.fsync(fd)  # other clients cannot read data that is not on the server yet
            self.uid = os.fstat(fd).st_uid
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def sha256(self) -> str:
        """Return the hash of the content, in hexadecimal."""
        return hashlib.sha256(self.content.encode("ascii")).hexdigest()


def share_probe(share: str) -> ShareProbe:
    """Return a probe for the directory `share`; entering it raises OSError on a failed write."""
    return ShareProbe(Path(share) / (PROBE_PREFIX + secrets.token_hex(8)))


def question(request: int, share: str, name: str, sha256: str, uid: int) -> CompareProbe:
    """Return the message that asks whether the share probe `name` is the same on a node.

    Raises ValueError if `name` is not a probe's name.
    """
    if not _NAME.match(name) or not _SHA256.match(sha256):
        raise ValueError("not a share probe")
    return CompareProbe(request=request, directory=share, name=name, sha256=sha256, uid=uid)


def problem_of(share: str, *, same: bool, error: str) -> str:
    """Return the problem of the share on a node, from the node's answer; "" if there is none."""
    if same:
        return ""
    return f"cannot compare {share} there: {error}" if error else f"{share} there is another directory than here"
