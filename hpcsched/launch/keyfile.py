"""The launch key: an Ed25519 key pair of OpenSSH's file format, with which the controller logs in to the nodes."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def make_key(path: Path, comment: str) -> str:
    """Write a new private key to `path` (0600 from the first byte) and the public one to `path`.pub; return that.

    Raises FileExistsError where there is one.
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    openssh = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public = f"{openssh.decode('ascii')} {comment}"
    _write(path, private, 0o600)
    _write(path.with_name(path.name + ".pub"), public.encode() + b"\n", 0o644)
    return public


def _write(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
