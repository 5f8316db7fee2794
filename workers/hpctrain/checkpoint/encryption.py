"""Encryption of checkpoints at rest: the key of a run, and how files are sealed with it.

Knows neither tensors nor directories.
Rules: AES-256-GCM. Each file has a key of its own, derived from the run's key and a salt of 256 random bits, which is drawn
when the file is begun. The nonce is the number of the message in the file: a data file has a message for each stored chunk,
numbered by one counter in one process; a manifest or record has one message. Files are never appended to or written again. So
a pair of key and nonce repeats only if two random salts are equal, also if writers crash, repeat a checkpoint or run at once.
Hashes of contents are keyed: they confirm no guess. A manifest is sealed as a whole, and bound to its name by the authenticated
header. It has the salt, the number and the keyed hash of each chunk, so another chunk, file or order does not open. The manifest
names its parent by a keyed checksum.
Not hidden: the number, names, sizes and times of files. Not detected: the removal of the newest checkpoints, and a whole
directory of an earlier time or of another run with the same key, because nothing outside of the directory knows the newest one.
Sources: NIST SP 800-38D, 8.2.1 (counter nonces); RFC 7693 (BLAKE2b with a key, for derived keys); BLAKE3 (keyed mode).
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import blake3

from hpctrain.errors import CheckpointKeyError, DamagedError
from hpctrain.peers import cipher_of, keyed

FORMAT = "hpctrain-encrypted"
VERSION = 1
KEY_FILE, KEY_COMMAND = "HPCTRAIN_CHECKPOINT_KEY_FILE", "HPCTRAIN_CHECKPOINT_KEY_COMMAND"
KEY_BYTES = SALT_BYTES = 32
NONCE_BYTES = 12
COMMAND_S = 60.0
MOST_BYTES = 4096  # of a key file, or of the output of a command
# How each sealed manifest begins, because the keys of JSON are sorted.
BEGIN = b'{"format":"' + FORMAT.encode() + b'",'
KEY_ID = re.compile(re.escape(BEGIN) + rb'"key":"([0-9a-f]{1,64})"')
MAKE_A_KEY = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
GIVE_THE_KEY = "--checkpoint-key-file FILE or --checkpoint-key-command COMMAND, or key-file=FILE of hctl"


@dataclass(frozen=True)
class CheckpointKey:
    """The key of a run's checkpoints, and the keys derived from it."""

    secret: bytes = field(repr=False)

    @cached_property
    def id(self) -> str:
        """The public name of the key."""
        return keyed(self.secret, b"checkpoint id")[:8].hex()

    @cached_property
    def _hash_key(self) -> bytes:
        return keyed(self.secret, b"checkpoint hash")

    def cipher(self, purpose: bytes, salt: bytes) -> Any:
        """Return AES-256-GCM with the key of one file."""
        return cipher_of(keyed(self.secret, b"checkpoint " + purpose, salt))

    def digest(self, content: memoryview | bytes) -> str:
        """Return the keyed BLAKE3 hash (256 bit, hexadecimal) of a content."""
        return blake3.blake3(content, key=self._hash_key).hexdigest()

    def sealed(self, name: str, content: bytes) -> bytes:
        """Return a manifest or record as it is stored under a name."""
        salt = os.urandom(SALT_BYTES)
        head = _head(self.id, name, salt.hex())
        sealed = self.cipher(b"manifest", salt).encrypt(nonce_of(0), content, _canonical(head))
        return _canonical(head | {"sealed": base64.b64encode(sealed).decode()}) + b"\n"

    def opened(self, name: str, content: bytes) -> bytes:
        """Return what `sealed` has sealed under this name.

        Raises:
            DamagedError: it was altered, or stored under another name.
            CheckpointKeyError: it was sealed with another key.
        """
        head, sealed = _parsed(content)
        try:
            cipher = self.cipher(b"manifest", bytes.fromhex(head["salt"]))
            text = bytes(cipher.decrypt(nonce_of(0), sealed, _canonical(_head(self.id, name, head["salt"]))))
        except Exception as error:  # InvalidTag is of an optional package
            if type(error).__name__ != "InvalidTag" and not isinstance(error, ValueError):
                raise
            text = None
        if text is not None and (head["key"], head["name"]) == (self.id, name):
            return text
        if text is None and head["key"] != self.id and head["name"] == name:
            raise CheckpointKeyError(
                f"it is encrypted with the key {head['key']}, and yours is {self.id}: give the run's own key"
            )
        raise DamagedError("it was altered, or belongs to another checkpoint")


class FileSealer:
    """Encrypts the chunks of one data file."""

    def __init__(self, key: CheckpointKey) -> None:
        salt = os.urandom(SALT_BYTES)
        self.digest, self.salt = key.digest, salt.hex()
        self._cipher = key.cipher(b"data", salt)
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """Return a number that no other chunk of the file has."""
        return next(self._numbers)

    def seal(self, number: int, content: bytes | memoryview) -> bytes:
        """Return a chunk as it is stored."""
        sealed: bytes = self._cipher.encrypt(nonce_of(number), content, None)
        return sealed


def opened_chunk(key: CheckpointKey, salt: str, number: int, stored: bytes | memoryview) -> bytes:
    """Return the chunk that `FileSealer.seal` has stored in the file with this salt.

    Raises:
        DamagedError: it was altered, moved or replaced.
    """
    try:
        content: bytes = key.cipher(b"data", bytes.fromhex(salt)).decrypt(nonce_of(number), stored, None)
    except Exception as error:  # InvalidTag is of an optional package
        if type(error).__name__ != "InvalidTag" and not isinstance(error, ValueError):
            raise
        raise DamagedError("was altered, moved or replaced: its encryption does not verify") from None
    return content


def nonce_of(number: int) -> bytes:
    """Return the nonce of a file's message."""
    return number.to_bytes(NONCE_BYTES, "big")


def opened(name: str, content: bytes, key: CheckpointKey | None) -> bytes:
    """Return the JSON of a manifest or record; encrypted if and only if there is a key.

    Raises:
        DamagedError: it was altered, or stored under another name.
        CheckpointKeyError: the key is missing or another one, or there is a key and the content is not encrypted.
    """
    if key is not None and content.startswith(BEGIN):
        return key.opened(name, content)
    if key is None and content.startswith(BEGIN):
        found = KEY_ID.match(content)
        raise CheckpointKeyError(
            f"it is encrypted with the key {found[1].decode() if found else '?'}: give it with {GIVE_THE_KEY}"
        )
    if key is None:
        return content
    try:
        is_plain = "checksum" in json.loads(content)
    except (ValueError, TypeError, RecursionError):
        is_plain = False
    if is_plain:
        raise CheckpointKeyError(
            f"it is not encrypted, and you gave the key {key.id}; encrypted and other checkpoints are never mixed: give "
            "another --out, or leave the key away to use it"
        )
    raise DamagedError("it is neither encrypted nor a manifest")


def _head(key_id: str, name: str, salt: str) -> dict[str, object]:
    return {"format": FORMAT, "version": VERSION, "key": key_id, "name": name, "salt": salt}


def _parsed(content: bytes) -> tuple[dict[str, str], bytes]:
    """Return the header and the encrypted part.

    Raises:
        DamagedError: a byte is not as `sealed` writes it.
    """
    try:
        body = json.loads(content)
        head = _head(body["key"], body["name"], body["salt"])
        sealed = base64.b64decode(body["sealed"], validate=True)
        again = _canonical(head | {"sealed": base64.b64encode(sealed).decode()}) + b"\n"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"it is incomplete or altered ({type(error).__name__})") from None
    if again != content or not all(isinstance(head[name], str) for name in ("key", "name", "salt")):
        raise DamagedError("its header was altered, or is of a version that this program does not know")
    return {name: str(value) for name, value in head.items()}, sealed


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


# ----- the key, from a file or a command


def checkpoint_key(
    file: str | os.PathLike[str] | None, command: str | None, environ: Mapping[str, str]
) -> CheckpointKey | None:
    """Return the key that the arguments name, else the environment; None: there is none.

    Raises:
        CheckpointKeyError: it cannot be read, is not private, or is not a key.
    """
    if not file and not command:
        file, command = environ.get(KEY_FILE), environ.get(KEY_COMMAND, "").strip()
    if file and command:
        raise CheckpointKeyError("cannot use two keys for checkpoints: give a file or a command")
    if file:
        return _key_of(_file_content(Path(file)), f"the key {file}")
    if command:
        return _key_of(_output_of(command), f"the output of {command.split()[0]!r} as a key")
    return None


def _key_of(content: bytes, what: str) -> CheckpointKey:
    text = content.strip()
    secret = b""
    for decode in (binascii.unhexlify, lambda text: base64.b64decode(text, validate=True)):
        try:
            secret = decode(text)
        except ValueError:
            continue
        if len(secret) == KEY_BYTES:
            key = CheckpointKey(secret)
            key.cipher(b"data", b"")  # the package may be missing
            return key
    raise CheckpointKeyError(
        f"cannot use {what}: it has {len(text)} characters, not 32 bytes in hexadecimal or base64; {MAKE_A_KEY}"
    )


def _file_content(path: Path) -> bytes:
    """Return the content of a file of ours that other users can neither read nor write."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointKeyError(f"cannot read the key {path}: {error.strerror}; {MAKE_A_KEY}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointKeyError(f"cannot use the key {path}: it is not a file")
        if status.st_uid != os.getuid():
            raise CheckpointKeyError(f"cannot use the key {path}: it belongs to uid {status.st_uid}, not to you")
        if status.st_mode & 0o077:
            raise CheckpointKeyError(
                f"cannot use the key {path}: other users can read or write it (mode {status.st_mode & 0o777:04o}); run: "
                f"chmod 600 {path}"
            )
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def _output_of(command: str) -> bytes:
    try:
        done = subprocess.run(
            shlex.split(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=COMMAND_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        why = f"it took longer than {COMMAND_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        raise CheckpointKeyError(f"cannot get the key of checkpoints from {command!r}: {why}") from None
    if done.returncode:
        raise CheckpointKeyError(
            f"cannot get the key of checkpoints from {command!r}: it ended with status {done.returncode}"
        )
    return done.stdout[:MOST_BYTES]
