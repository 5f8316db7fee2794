"""Sign the end of the audit log: into a second file, and to the system's log.

The private key (Ed25519) is in the state directory and is made at the first signature. Each line of
the file is a `Head` as JSON. Copies on another machine, such as a central syslog, show that a log
and this file were replaced together.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import syslog
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcnode.os.durable import write_durably
from hpcnode.wire import gate
from hpcsched.auth.audit import Head, signature_check, signed_text
from hpcsched.errors import UnavailableError
from hpcsched.store.sealing import private_opener

if TYPE_CHECKING:  # the first requests are answered before it is loaded
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger("hpcsched.audit")

KEY_FILE = "audit.key"  # in the state directory
HEADS_FILE = "audit.heads"
KEY_BYTES = 32
MAX_HEADS = 100_000  # that are read: the last ones
LAST_BYTES = 64 << 10  # of the file, in which a start looks for the last head


class AuditHeads:
    """Signs the last record of the audit log if there are new records."""

    def __init__(
        self,
        state_dir: Path,
        heads: Path,
        end: Callable[[], tuple[int, str]],
        *,
        to_syslog: bool,
        incarnation: str = "",
    ) -> None:
        self._incarnation = incarnation
        self._key_file = state_dir / KEY_FILE
        self._heads = heads
        self._end = end
        self._to_syslog = to_syslog
        self._signed = 0  # number of the record that was signed last
        self._failed = ""

    def sign(self, at_s: float) -> None:
        """Sign the last record, unless it is signed. A failure is logged once and tried again."""
        seq, last_hash = self._end()
        if seq == self._signed:
            return
        try:
            head = Head(seq=seq, hash=last_hash, at_s=at_s, incarnation=self._incarnation)
            signature = self._key().sign(signed_text(head))
            line = json.dumps(asdict(replace(head, signature=base64.b64encode(signature).decode())))
            self._append(line)
        except (OSError, UnavailableError) as error:
            if str(error) != self._failed:
                log.error("cannot sign the audit log: %s; trying again", error)
            self._failed = str(error)
            return
        self._signed, self._failed = seq, ""
        if self._to_syslog:
            syslog.openlog("hpcschedd", 0, syslog.LOG_AUTHPRIV)
            syslog.syslog(syslog.LOG_NOTICE, f"audit head {line}")

    def lost_since(self, hash_of: Callable[[int], str]) -> Head | None:
        """Return the last signed head that the database does not have, None if it has all.

        SQLite says nothing if the file with the last transactions is damaged or gone: it takes what is left. `hash_of` returns
        the hash of a record, "" if there is none. A head that is not signed with our key proves nothing.
        """
        known = sorted(self._last_own(), key=lambda head: -head.seq)
        for head in known:
            if hash_of(head.seq) == head.hash:
                return None
            if self._key_file.exists() and signature_check(self.public_key())(head):
                return head
        return None

    def _last_own(self) -> list[Head]:
        """Return the last heads of this incarnation. What a crash has cut off is left out.

        Raises UnavailableError.
        """
        try:
            with open(self._heads, "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - LAST_BYTES))
                lines = stream.read(LAST_BYTES).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnavailableError(f"cannot read {self._heads}: {error.strerror}") from None
        found = []
        for line in lines:
            with suppress(ValueError, TypeError):  # cut off, or of another form
                found.append(Head(**gate.read_json(line)))
        return [head for head in found if head.incarnation == self._incarnation and type(head.seq) is int]

    def public_key(self) -> str:
        """Return the public key as base64. Raises UnavailableError."""
        return base64.b64encode(self._key().public_key().public_bytes_raw()).decode()

    def heads(self) -> list[dict[str, Any]]:
        """Return the signed heads. Raises UnavailableError if the file cannot be read."""
        try:
            lines = self._heads.read_text(encoding="utf-8").splitlines() if self._heads.exists() else []
            return [json.loads(line) for line in lines[-MAX_HEADS:]]
        except (OSError, ValueError) as error:
            raise UnavailableError(f"cannot read {self._heads}: {error}") from None

    def _key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            with open(self._key_file, "rb", opener=private_opener) as stream:
                return Ed25519PrivateKey.from_private_bytes(stream.read(KEY_BYTES + 1))
        except FileNotFoundError:
            return self._new_key()
        except OSError as error:
            raise UnavailableError(f"cannot read {self._key_file}: {error.strerror}") from None
        except ValueError:
            raise UnavailableError(f"cannot use {self._key_file}: it is damaged; bring back a copy of it") from None

    def _new_key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        write_durably(str(self._key_file.parent), self._key_file.name, key.private_bytes_raw())
        return key

    def _append(self, line: str) -> None:
        descriptor = os.open(self._heads, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())
