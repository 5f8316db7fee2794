"""Seal the environments of jobs in the database and its backups.

An environment is encrypted with AES-256-GCM under a key of its own file, which is outside the
database's directory and in no backup. Equal environments are stored once: their row has an HMAC of
the text, not a hash, because a hash would confirm a guessed secret to the owner of a stolen database.

The key file has a line per key, the newest first: its id and 32 bytes in hexadecimal. New
environments get the newest key; the others open what was sealed before a rotation. A key that
another account can read is refused. Knows neither tables nor jobs.

Sources: NIST SP 800-38D (AES-GCM: 96-bit random nonces, at most 2^32 per key); RFC 5869.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hpcsched.errors import ConfigError

KEY_BYTES = 32
NONCE_BYTES = 12
MOST_KEYS = 1000
MOST_FILE_BYTES = 1 << 20
_HEADING = (
    "# Keys that open the environments of jobs in hpcsched's database, the newest first.\n"
    "# Keep a copy apart from the backups: without it, waiting jobs of a restored database are held.\n"
)


@dataclass(frozen=True)
class SealingKey:
    """A key of the file, and the keys derived from it."""

    secret: bytes

    @cached_property
    def id(self) -> str:
        """Return the public name of the key."""
        return self._derived(b"id")[:8].hex()

    @cached_property
    def _cipher(self) -> AESGCM:
        return AESGCM(self._derived(b"seal"))

    @cached_property
    def _mac_key(self) -> bytes:
        return self._derived(b"mac")

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self.secret, b"hpcsched environment " + purpose + b"\x01", "sha256")

    def mac(self, text: bytes) -> str:
        """Return the keyed hash under which equal texts are found."""
        return hmac.digest(self._mac_key, text, "sha256").hex()

    @cached_property
    def jobs_secret(self) -> bytes:
        """Return the secret from which the keys of jobs are derived."""
        return self._derived(b"jobs")

    def seal(self, mac: str, text: bytes) -> bytes:
        """Return `text` encrypted, and bound to its `mac`."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, text, mac.encode())

    def open(self, mac: str, sealed: bytes) -> bytes | None:
        """Return the text; None: another key sealed it, or it was altered."""
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], mac.encode())
        except (InvalidTag, ValueError):  # ValueError: no whole nonce
            return None


class SealingKeys:
    """The keys of one file. Without a path: a key of this process alone."""

    def __init__(self, path: Path | None = None, keys: tuple[SealingKey, ...] = (), owner: int = -1) -> None:
        self.path, self._owner = path, owner
        self._set(keys or (SealingKey(secrets.token_bytes(KEY_BYTES)),))

    def _set(self, keys: tuple[SealingKey, ...]) -> None:
        self.newest = keys[0]
        self._by_id = {key.id: key for key in keys}

    @property
    def ids(self) -> list[str]:
        """Return the ids of the keys, the newest first."""
        return list(self._by_id)

    @property
    def oldest(self) -> SealingKey:
        """Return the oldest key, which a rotation does not change."""
        return list(self._by_id.values())[-1]

    def open(self, key_id: str, mac: str, sealed: bytes) -> bytes | None:
        """Return the text; None: the key is not here, or the text was altered."""
        key = self._by_id.get(key_id)
        return None if key is None else key.open(mac, sealed)

    def read_again(self) -> None:
        """Read the file again. Raises ConfigError."""
        if self.path is not None:
            self._set(_read(self.path, self._owner))

    def rotate(self) -> None:
        """Put a new key before the others, on disk first. Raises ConfigError."""
        keys = (SealingKey(secrets.token_bytes(KEY_BYTES)), *self._by_id.values())
        self._write(keys)

    def forget(self, needed: set[str]) -> list[str]:
        """Delete the keys that are neither the newest nor `needed`; return their ids.

        Raises ConfigError.
        """
        kept = tuple(key for key in self._by_id.values() if key is self.newest or key.id in needed)
        gone = [key_id for key_id, key in self._by_id.items() if key not in kept]
        if gone:
            self._write(kept)
        return gone

    def _write(self, keys: tuple[SealingKey, ...]) -> None:
        if self.path is not None:
            _write(self.path, keys, self._owner, replace=True)
        self._set(keys)


def sealing_keys(path: Path, state_dir: Path, owner: int = -1) -> SealingKeys:
    """Return the keys of the file `path`, which is made if it is missing.

    `owner`: the uid to which the file must belong; -1: ours.

    Raises ConfigError: the file is in `state_dir`, cannot be made or read, or another account can
    read it.
    """
    if path.parent.resolve().is_relative_to(state_dir.resolve()):
        raise ConfigError(
            f"cannot use the key {path}: it is in the directory of the database, which backups and thieves copy as a whole; "
            "set seal_key in hpcsched.toml to a file elsewhere"
        )
    if not os.path.lexists(path):
        _write(path, (SealingKey(secrets.token_bytes(KEY_BYTES)),), owner, replace=False)
    return SealingKeys(path, _read(path, owner), owner)


def private_opener(path: str, flags: int) -> int:
    """Open a file of ours that others cannot read or write, for `open`.

    Raises: PermissionError if they can, or if it is another account's; other OSErrors.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(1, "other users can read or write it; run: chmod 600")
    return fd


def _read(path: Path, owner: int) -> tuple[SealingKey, ...]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"cannot use the key {path}: it is not a file")
        wanted = os.geteuid() if owner == -1 else owner
        if status.st_uid != wanted:
            raise ConfigError(f"cannot use the key {path}: it belongs to uid {status.st_uid}, not to uid {wanted}")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"cannot use the key {path}: other accounts can read it (mode {status.st_mode & 0o777:04o}); run: "
                f"chmod 600 {path}; then, because it may have been read: hpcsched seal --rotate"
            )
        content = file.read(MOST_FILE_BYTES)
    keys = []
    for number, line in enumerate(content.decode("ascii", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        keys.append(_key_of(path, number, line))
    if not keys or len(keys) > MOST_KEYS:
        raise ConfigError(
            f"cannot use the key {path}: it has {len(keys)} keys, not 1 to {MOST_KEYS}; bring back a copy of it"
        )
    return tuple(keys)


def _key_of(path: Path, number: int, line: str) -> SealingKey:
    try:
        key_id, text = line.split()
        key = SealingKey(bytes.fromhex(text))
    except ValueError:
        key_id, key = "", SealingKey(b"")
    if len(key.secret) != KEY_BYTES or not hmac.compare_digest(key.id, key_id):
        raise ConfigError(f"cannot use the key {path}: line {number} is damaged; bring back a copy of it")
    return key


def _write(path: Path, keys: tuple[SealingKey, ...], owner: int, *, replace: bool) -> None:
    """Write the file durably: private from its first byte, whole or not there."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w"
        ) as file:
            file.write(_HEADING + "".join(f"{key.id} {key.secret.hex()}\n" for key in keys))
            file.flush()
            os.fchown(file.fileno(), owner, -1)
            os.fsync(file.fileno())
        try:
            if replace:
                os.replace(part, path)
            else:
                os.link(part, path)  # unlike a rename, it never replaces a key
        finally:
            part.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        pass  # another process has made it meanwhile
    except OSError as error:
        raise ConfigError(
            f"cannot write the key {path}: {error.strerror}; make it as root with 'hpcsched seal', or set seal_key in "
            "hpcsched.toml to a file that the controller's account can write, outside of state_dir and of your backups"
        ) from None
