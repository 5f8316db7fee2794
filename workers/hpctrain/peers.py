"""Connections between hosts: both ends prove a key, and messages are authenticated.

The key is never sent. Each end sends a random nonce and a keyed hash of both nonces, so a recorded connection is of no use later.
The keys of a connection follow from the key and the nonces. Two uses of a connection:

- A stream of bulk data (`tunnel`) is not touched after the proof, unless encryption is requested: then two threads encrypt and
  decrypt records with AES-256-GCM between the connection and a local socket.
- Control messages (`Messages`) have a keyed hash each, over their number and direction, or are encrypted and numbered.

Environment: HPCSCHED_JOB_KEY is the key of a job's attempt, HPCTRAIN_ENCRYPT=1 requests encryption; all ranks must agree, or
the proof fails. Knows neither ranks nor the content of messages.
Sources: RFC 7693 (BLAKE2b with a key, a MAC), NIST SP 800-38D (counter nonces: one key per connection and direction).
"""

from __future__ import annotations

import atexit
import base64
import hmac
import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from hpctrain.errors import TrainError

NONCE_BYTES = 16
PROOF_BYTES = 32
RECORD_BYTES = 256 << 10
LENGTH = struct.Struct("!I")
COUNTER = struct.Struct("!IQ")  # a nonce of 96 bits
TAG_BYTES = 16
END_S = 1.0
HOST, GUEST = b"host", b"guest"  # who accepted the connection, who made it


def job_key(environ: Mapping[str, str]) -> bytes:
    """Return the key of the job's attempt, or of the elastic run; empty if there is neither."""
    return (environ.get("HPCSCHED_JOB_KEY") or environ.get("HPCTRAIN_ROSTER_KEY", "")).encode()


def encryption_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether connections between hosts are to be encrypted.

    Raises:
        TrainError: the package for it is missing, or the value is not 0 or 1.
    """
    wanted = environ.get("HPCTRAIN_ENCRYPT", "0")
    if wanted not in ("", "0", "1"):
        raise TrainError(f"cannot use HPCTRAIN_ENCRYPT={wanted!r}: it is 0 or 1")
    if wanted == "1":
        cipher_of(bytes(32))
    return wanted == "1"


def cipher_of(key: bytes) -> Any:
    """Return AES-256-GCM with a key. Raises TrainError if the package for it is missing."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise TrainError(
            "cannot encrypt: the package cryptography is missing on this host: pip install cryptography"
        ) from None
    return AESGCM(key)


def keyed(key: bytes, *parts: bytes) -> bytes:
    """Return the keyed hash of the parts, each with its length.

    Not by OpenSSL: at the end of a process it fails in threads that still run.
    """
    secret = key if len(key) <= blake2b.MAX_KEY_SIZE else blake2b(key).digest()
    content = b"".join(LENGTH.pack(len(part)) + part for part in parts)
    return blake2b(content, key=secret, digest_size=PROOF_BYTES, person=b"hpctrain").digest()


@dataclass(frozen=True, slots=True)
class Session:
    """The keys of one connection after the proof; `role` is this end's."""

    key: bytes
    role: bytes
    encrypted: bool

    def sending(self, purpose: bytes) -> bytes:
        """Return the key for what this end sends."""
        return keyed(self.key, purpose, self.role)

    def receiving(self, purpose: bytes) -> bytes:
        """Return the key for what the other end sends."""
        return keyed(self.key, purpose, GUEST if self.role == HOST else HOST)


class Proof:
    """One end's part in the proof of a connection: nonces are exchanged, then proofs."""

    def __init__(self, key: bytes, role: bytes, *, encrypted: bool) -> None:
        self._key, self._role, self._encrypted = key, role, encrypted
        self.nonce = os.urandom(NONCE_BYTES)

    def of(self, role: bytes, other: bytes) -> bytes:
        """Return the proof of the end in this role; `other` is the other end's nonce."""
        nonces = (self.nonce, other) if self._role == HOST else (other, self.nonce)
        return keyed(self._key, b"hpctrain proof", role, bytes([self._encrypted]), *nonces)

    def checked(self, other: bytes, proof: bytes) -> Session | None:
        """Return the session if the other end has proved that it has the key."""
        if not hmac.compare_digest(self.of(GUEST if self._role == HOST else HOST, other), proof):
            return None
        return Session(self.of(b"session", other), self._role, self._encrypted)


class Messages:
    """Wraps control messages as lines, and checks those of the other end."""

    def __init__(self, session: Session) -> None:
        self._sent = self._received = 0
        self._encrypted = session.encrypted
        self._send_key, self._receive_key = session.sending(b"message"), session.receiving(b"message")
        if self._encrypted:
            self._sealer, self._opener = cipher_of(self._send_key), cipher_of(self._receive_key)

    def wrapped(self, content: bytes) -> bytes:
        """Return a message as a line."""
        number, self._sent = COUNTER.pack(0, self._sent), self._sent + 1
        if self._encrypted:
            return base64.b64encode(self._sealer.encrypt(number, content, None)) + b"\n"
        return keyed(self._send_key, number, content).hex().encode() + b" " + content + b"\n"

    def unwrapped(self, line: bytes) -> bytes:
        """Return the message of a line.

        Raises:
            ValueError: it was altered, left out, repeated or not sent by the other end.
        """
        number, self._received = COUNTER.pack(0, self._received), self._received + 1
        if self._encrypted:
            try:
                return bytes(self._opener.decrypt(number, base64.b64decode(line.strip(), validate=True), None))
            except Exception as error:  # InvalidTag is of the optional package
                raise ValueError(f"a message is not authentic ({type(error).__name__})") from None
        mac, _, content = line.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(mac, keyed(self._receive_key, number, content).hex().encode()):
            raise ValueError("a message is not authentic")
        return content


def prove_as_host(peer: socket.socket, key: bytes, *, encrypted: bool = False) -> Session | None:
    """Prove both ends of an accepted connection; None: the other end does not have the key."""
    mine = Proof(key, HOST, encrypted=encrypted)
    other = _exactly(peer, NONCE_BYTES)
    if other is None or not _send(peer, mine.nonce + mine.of(HOST, other)):
        return None
    proof = _exactly(peer, PROOF_BYTES)
    return mine.checked(other, proof) if proof is not None else None


def prove_as_guest(peer: socket.socket, key: bytes, *, encrypted: bool = False) -> Session | None:
    """Prove both ends of a connection of ours; None: the other end has no key."""
    mine = Proof(key, GUEST, encrypted=encrypted)
    if not _send(peer, mine.nonce):
        return None
    answer = _exactly(peer, NONCE_BYTES + PROOF_BYTES)
    if answer is None:
        return None
    other = answer[:NONCE_BYTES]
    session = mine.checked(other, answer[NONCE_BYTES:])
    return session if session is not None and _send(peer, mine.of(GUEST, other)) else None


def tunnel(peer: socket.socket, session: Session) -> socket.socket:
    """Return the connection itself, or a local socket whose bytes travel encrypted over it."""
    if not session.encrypted:
        return peer
    peer.settimeout(None)
    outer, inner = socket.socketpair()
    for end in (outer, inner):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    sealer, opener = cipher_of(session.sending(b"stream")), cipher_of(session.receiving(b"stream"))
    threads = [
        threading.Thread(target=_seal, args=(inner, peer, sealer), name="seal", daemon=True),
        threading.Thread(target=_open, args=(peer, inner, opener), name="open", daemon=True),
    ]
    for thread in threads:
        thread.start()
    atexit.register(_stop, [inner, peer], threads)
    return outer


def _stop(ends: list[socket.socket], threads: list[threading.Thread]) -> None:
    """End the threads before OpenSSL ends with the process.

    What was sent gets a moment to leave.
    """
    threads[0].join(END_S)
    _end(*ends)
    for thread in threads:
        thread.join(END_S)


def _seal(inner: socket.socket, peer: socket.socket, cipher: Any) -> None:
    """Encrypt what is written to `inner` until its end, which an empty record tells."""
    with suppress(OSError):
        number, content = 0, b"first"
        while content:
            content = inner.recv(RECORD_BYTES)
            record = cipher.encrypt(COUNTER.pack(0, number), content, None)
            peer.sendall(LENGTH.pack(len(record)) + record)
            number += 1
        peer.shutdown(socket.SHUT_WR)
        return
    _end(inner, peer)


def _open(peer: socket.socket, inner: socket.socket, cipher: Any) -> None:
    """Decrypt until an empty record; a forged one breaks the connection."""
    number = 0
    try:
        while (head := _exactly(peer, LENGTH.size)) is not None:
            (length,) = LENGTH.unpack(head)
            record = _exactly(peer, length) if TAG_BYTES <= length <= RECORD_BYTES + TAG_BYTES else None
            if record is None:
                break
            content = cipher.decrypt(COUNTER.pack(0, number), record, None)
            if not content:
                inner.shutdown(socket.SHUT_WR)
                return
            inner.sendall(content)
            number += 1
    except Exception:  # noqa: S110  # altered, or either end is gone: below, both ends learn it
        pass
    _end(inner, peer)


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _send(peer: socket.socket, content: bytes) -> bool:
    try:
        peer.sendall(content)
    except OSError:
        return False  # the peer is gone
    return True


def _exactly(peer: socket.socket, length: int) -> bytes | None:
    """Return `length` bytes; None: the peer is too slow or has ended."""
    got = bytearray(length)
    view, has = memoryview(got), 0
    try:
        while has < length:
            part = peer.recv_into(view[has:])
            if not part:
                return None
            has += part
    except OSError:
        return None
    return bytes(got)
