"""The signed ends of the audit log: one for each change, with a key that others cannot read."""

from __future__ import annotations

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
