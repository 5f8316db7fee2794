"""The signed ends of the audit log: one for each change, with a key that others cannot read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcsched.auth.audit import Head, signature_check
from hpcsched.store.audit_heads import HEADS_FILE, KEY_FILE, AuditHeads


@pytest.fixture
def end() -> list[tuple[int, str]]:
    return [(1, "aa")]


@pytest.fixture
def heads(tmp_path: Path, end: list[tuple[int, str]]) -> AuditHeads:
    return AuditHeads(tmp_path, tmp_path / HEADS_FILE, lambda: end[-1], to_syslog=False)


def test_an_end_is_signed_once(heads: AuditHeads, end: list[tuple[int, str]], tmp_path: Path) -> None:
    heads.sign(5.0)
    heads.sign(6.0)
    end.append((2, "bb"))
    heads.sign(7.0)
    found = [Head(**values) for values in heads.heads()]
    assert [(head.seq, head.hash, head.at_s) for head in found] == [(1, "aa", 5.0), (2, "bb", 7.0)]
    assert all(map(signature_check(heads.public_key()), found))
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in (KEY_FILE, HEADS_FILE)} == {0o600}


def test_d6_a_signed_end_that_the_database_lacks_is_found(
    heads: AuditHeads, end: list[tuple[int, str]], tmp_path: Path
) -> None:
    assert heads.lost_since(lambda seq: "") is None  # nothing was signed yet
    end.append((9, "cc"))
    heads.sign(5.0)
    known = {9: "cc"}
    assert heads.lost_since(lambda seq: known.get(seq, "")) is None
    for there in ("", "of another log"):
        known[9] = there
        lost = heads.lost_since(lambda seq: known.get(seq, ""))
        assert lost is not None
        assert (lost.seq, lost.at_s) == (9, 5.0)
    with (tmp_path / HEADS_FILE).open("a") as file:  # a crash has cut the last one off
        file.write('{"seq": 10, "hash": "dd", "at_s"')
    found = heads.lost_since(lambda seq: "")
    assert found is not None
    assert found.seq == 9


def test_d6_ends_that_prove_nothing_refuse_no_database(
    heads: AuditHeads, end: list[tuple[int, str]], tmp_path: Path
) -> None:
    """Those of an earlier incarnation, before a restore; and those that somebody else has written."""
    end.append((9, "cc"))
    heads.sign(5.0)
    restored = AuditHeads(tmp_path, tmp_path / HEADS_FILE, lambda: (3, "aa"), to_syslog=False, incarnation="feedc0de")
    assert restored.lost_since(lambda seq: "") is None
    restored.sign(6.0)
    with (tmp_path / HEADS_FILE).open("a") as file:
        forged = {"seq": 99, "hash": "ee", "at_s": 7.0, "signature": "AAAA", "incarnation": "feedc0de"}
        file.write(f"{json.dumps(forged)}\nnull\n[]\n{'[' * 2000}\n")
    assert restored.lost_since(lambda seq: "aa" if seq == 3 else "") is None
    lost = restored.lost_since(lambda seq: "")
    assert lost is not None
    assert lost.seq == 3


@pytest.mark.parametrize("harm", ["readable", "link", "short"])
def test_f1_a_key_that_is_not_ours_alone_signs_nothing(
    harm: str, heads: AuditHeads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heads.public_key()
    key = tmp_path / KEY_FILE
    if harm == "readable":
        key.chmod(0o640)
    elif harm == "link":
        key.rename(tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", key)
    else:
        key.write_bytes(b"short")
    heads.sign(5.0)
    heads.sign(6.0)
    assert heads.heads() == []
    assert len(caplog.messages) == 1
    assert str(key) in caplog.messages[0]
