"""The audit log: a record of each change, chained by hashes, and the check of the chain.

Each record has the hash of its content and of the record before it. So a changed, removed or
reordered record is found by everyone who knows a later hash. The controller signs the last hash
each minute into a second file (`Head`); a log that was cut off, or replaced with the database, does
not contain it. This module knows neither database nor file.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from json.encoder import encode_basestring_ascii as _quoted
from operator import attrgetter
from typing import Any, Final

from hpcsched.auth.authorize import Identity
from hpcsched.errors import RequestError

GENESIS: Final = "0" * 64  # the hash before the first record
MAX_TEXT: Final = 4000  # characters of `before` and of `after`
DONE, REFUSED, FAILED = "done", "refused", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """A record before it has its place in the chain.

    `source`: where the request came from. `object`: what was changed. `before`, `after`: JSON text
    of the values that changed.
    """

    at_s: float
    uid: int
    user: str
    role: str
    source: str
    action: str
    object: str = ""
    before: str = ""
    after: str = ""
    outcome: str = DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(AuditEntry):
    """An entry in the chain: `seq` counts from 1 without gaps."""

    seq: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The signed hash of a record. `signature` is base64 of Ed25519 over `signed_text`.

    `incarnation`: of the database. A restored database has another one, and lacks records of the earlier one rightly.
    """

    seq: int
    hash: str
    at_s: float
    signature: str = ""
    incarnation: str = ""


_NAMES = tuple(field.name for field in fields(AuditEntry))
_SORTED_NAMES = sorted(_NAMES)
_RECORD_NAMES = tuple(field.name for field in fields(AuditRecord))
_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode
_values_of = attrgetter(*_SORTED_NAMES)
_TEXT = "{" + ",".join([f'"{name}":%s' for name in _SORTED_NAMES]) + "}"


def entry_of(
    identity: Identity,
    action: str,
    at_s: float,
    *,
    object: str = "",
    before: Any = None,
    after: Any = None,
    outcome: str = DONE,
) -> AuditEntry:
    """Return the entry of an identity's request; `before` and `after` are values for JSON."""
    return AuditEntry(
        at_s=at_s,
        uid=identity.uid,
        user=identity.user,
        role=identity.role.value,
        source=identity.source,
        action=action,
        object=_short(object),
        before=_short(_encode(before)) if before else "",
        after=_short(_encode(after)) if after else "",
        outcome=_short(outcome),
    )


def chained(entry: AuditEntry, seq: int, previous: str) -> dict[str, Any]:
    """Return the values of the record of `entry` after the record with hash `previous`."""
    values = _values_of(entry)
    return {**dict(zip(_SORTED_NAMES, values, strict=True)), "seq": seq, "hash": _hash(seq, previous, _text_of(values))}


def signed_text(head: Head) -> bytes:
    """Return what a head's signature signs."""
    database = f"{head.incarnation}\n" if head.incarnation else ""
    return f"hpcsched audit head\n{head.seq}\n{head.hash}\n{head.at_s!r}\n{database}".encode()


def signature_check(public_key: str) -> Callable[[Head], bool]:
    """Return the check of signatures by `public_key`, the base64 of an Ed25519 key.

    Raises: RequestError if it is none.
    """
    from cryptography.exceptions import InvalidSignature  # heavy, and only verifying needs it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(b64decode(public_key, validate=True))
    except ValueError:
        raise RequestError("cannot use the public key: it is not the base64 of an Ed25519 key") from None

    def is_signed(head: Head) -> bool:
        try:
            key.verify(b64decode(head.signature, validate=True), signed_text(head))
        except (InvalidSignature, ValueError):
            return False
        return True

    return is_signed


def verify(records: Iterable[AuditRecord], heads: Iterable[Head], is_signed: Callable[[Head], bool]) -> tuple[int, str]:
    """Check the chain from its first record, and that it contains all signed heads.

    Return the number of good records from the start, and what is wrong with the next one; "": nothing.
    """
    wanted: dict[int, list[Head]] = {}
    for head in heads:
        if not is_signed(head):
            return 0, f"the signed head of record {head.seq} has a wrong signature"
        wanted.setdefault(head.seq, []).append(head)
    seq, previous = 0, GENESIS
    for record in records:
        if record.seq != seq + 1:
            return seq, f"record {seq + 1} is missing: after record {seq} comes record {record.seq}"
        values = {name: getattr(record, name) for name in _NAMES}
        if record.hash != _hash(record.seq, previous, _encode(values)):
            return seq, f"record {record.seq} was altered, or is not the one that followed record {seq}"
        seq, previous = record.seq, record.hash
        if any(head.hash != record.hash for head in wanted.pop(seq, ())):
            return seq - 1, f"record {seq} is not the one that was signed: the log was written anew"
    if wanted:
        last = max(wanted)
        return seq, f"record {seq + 1} is missing: a signed head knows {last} records"
    return seq, ""


def record_to_json(record: AuditRecord) -> dict[str, Any]:
    """Return the record as `hctl audit export` writes it."""
    return {name: getattr(record, name) for name in _RECORD_NAMES}


def record_from_json(values: Mapping[str, Any]) -> AuditRecord:
    """Return the record of a line of an export. Raises TypeError, KeyError if it is none."""
    return AuditRecord(**{name: values[name] for name in _RECORD_NAMES})


def _text_of(values: Sequence[Any]) -> str:
    """Return what `_encode` makes of an entry with these values, in a third of the time.

    The values are in the order of their names.
    """
    return _TEXT % tuple([_quoted(value) if isinstance(value, str) else value for value in values])


def _hash(seq: int, previous: str, text: str) -> str:
    return sha256(f"{previous}\n{seq}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
