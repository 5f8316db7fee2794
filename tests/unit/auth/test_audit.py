"""The chain of the audit log: what was altered, removed, reordered or cut off is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.auth.audit import (
    GENESIS,
    AuditEntry,
    AuditRecord,
    Head,
    chained,
    entry_of,
    record_from_json,
    record_to_json,
    verify,
)
from hpcsched.auth.authorize import Identity, Role

ANN = Identity(uid=7, user="ann", role=Role.USER)


def record_of(entry: AuditEntry, seq: int, previous: str) -> AuditRecord:
    return AuditRecord(**chained(entry, seq, previous))


def chain(count: int) -> list[AuditRecord]:
    records: list[AuditRecord] = []
    for number in range(1, count + 1):
        entry = entry_of(ANN, "cancel", float(number), object=f"job {number}", before={"state": "RUNNING"})
        records.append(record_of(entry, number, records[-1].hash if records else GENESIS))
    return records


def heads(records: list[AuditRecord], *numbers: int) -> list[Head]:
    return [Head(seq=number, hash=records[number - 1].hash, at_s=0.0) for number in numbers]


def signed(head: Head) -> bool:
    return head.signature != "forged"


def test_a_whole_log_is_good() -> None:
    records = chain(9)
    assert verify(records, heads(records, 3, 9), signed) == (9, "")
    assert verify([], [], signed) == (0, "")


@pytest.mark.parametrize(
    ("tamper", "good", "words"),
    [
        (lambda r: [*r[:4], replace(r[4], user="eve"), *r[5:]], 4, "record 5 was altered"),
        (lambda r: [*r[:4], *r[5:]], 4, "record 5 is missing: after record 4 comes record 6"),
        (lambda r: [*r[:4], r[5], r[4], *r[6:]], 4, "record 5 is missing"),
        (lambda r: [*r[:4], replace(r[5], seq=5), replace(r[4], seq=6), *r[6:]], 4, "record 5 was altered"),
        (lambda r: r[1:], 0, "record 1 is missing"),
        (lambda r: r[:7], 7, "record 8 is missing: a signed head knows 9 records"),
        (lambda r: [], 0, "record 1 is missing: a signed head knows 9 records"),
    ],
)
def test_f2_the_first_bad_record_is_named(
    tamper: Callable[[list[AuditRecord]], list[AuditRecord]], good: int, words: str
) -> None:
    records = chain(9)
    found, wrong = verify(tamper(records), heads(records, 3, 9), signed)
    assert (found, words in wrong) == (good, True), wrong


def test_f2_a_log_that_was_written_anew_does_not_have_the_signed_hashes() -> None:
    records = chain(9)
    forged = [record_of(replace(records[0], user="eve"), 1, GENESIS)]
    for record in records[1:]:
        forged.append(record_of(record, record.seq, forged[-1].hash))
    assert verify(forged, [], signed) == (9, "")  # the chain alone cannot show it
    assert verify(forged, heads(records, 3), signed) == (
        2,
        "record 3 is not the one that was signed: the log was written anew",
    )


def test_f2_a_forged_signature_is_named() -> None:
    records = chain(2)
    (head,) = heads(records, 2)
    assert (
        verify(records, [replace(head, signature="forged")], signed)[1]
        == "the signed head of record 2 has a wrong signature"
    )


@given(st.text(max_size=200), st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))
def test_a_record_survives_its_export(text: str, values: dict[str, str]) -> None:
    record = record_of(entry_of(ANN, text, 0.1, object=text, after=values), 1, GENESIS)
    again = record_from_json(record_to_json(record))
    assert again == record
    assert verify([again], [], signed) == (1, "")


# Also half of a surrogate pair, which a broken client can send.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)


TEXTS = dict.fromkeys(("user", "role", "source", "action", "object", "before", "after", "outcome"), ANY_TEXT)
TIMES = st.floats(allow_nan=False, allow_infinity=False)


@given(st.builds(AuditEntry, at_s=TIMES, uid=st.integers(-1, 2**32), **TEXTS))
def test_the_hash_of_any_record_is_that_of_its_canonical_text(entry: AuditEntry) -> None:
    """Records are hashed over a text that is made quickly, and verified over the one of the JSON encoder."""
    assert verify([record_of(entry, 1, GENESIS)], [], lambda _head: True) == (1, "")
