"""Children of the agent: they compare share probes, and read no other file for that."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcnode.agent import helpers
from hpcnode.wire import protocol

NAME = protocol.PROBE_PREFIX + "0123456789abcdef"
CONTENT = b"a" * protocol.PROBE_BYTES


def asked(share: Path, *, name: str = NAME, content: bytes = CONTENT, uid: int | None = None) -> protocol.CompareProbe:
    sha256 = hashlib.sha256(content).hexdigest()
    return protocol.CompareProbe(1, str(share), name, sha256, os.geteuid() if uid is None else uid)


def test_a_share_probe_is_the_same_or_not(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    same, blob = helpers.compare_probe(asked(tmp_path))
    other, other_blob = helpers.compare_probe(asked(tmp_path, content=b"b" * 64))
    assert (same.same, other.same) == (True, False)
    assert blob == other_blob == b"", "the content stays on the node"


@pytest.mark.parametrize("kind", ["symlink", "hard link", "directory", "fifo", "longer", "shorter"])
def test_what_is_not_a_share_probe_is_not_read(tmp_path: Path, kind: str) -> None:
    share, secret = tmp_path / "share", tmp_path / "secret"
    share.mkdir()
    secret.write_bytes(CONTENT)
    probe = share / NAME
    match kind:
        case "symlink":
            probe.symlink_to(secret)
        case "hard link":
            probe.hardlink_to(secret)
        case "directory":
            probe.mkdir()
        case "fifo":
            os.mkfifo(probe)
        case "longer":
            probe.write_bytes(CONTENT + b"a")
        case "shorter":
            probe.write_bytes(CONTENT[1:])
    with pytest.raises((OSError, ValueError)):
        helpers.compare_probe(asked(share))


@pytest.mark.parametrize("name", ["../secret", "secret", NAME + "/../../secret", NAME + "\n", "", ".", NAME.upper()])
def test_a_share_probe_has_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(CONTENT)
    with pytest.raises(ValueError, match="not the name of a share probe"):
        helpers.compare_probe(asked(tmp_path, name=name))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_share_probe_of_another_account_is_not_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    os.chown(tmp_path / NAME, 65534, 65534)
    with pytest.raises(ValueError, match="belongs to uid 65534 there, and to uid 0 here"):
        helpers.compare_probe(asked(tmp_path))
    answer, _ = helpers.compare_probe(asked(tmp_path, uid=65534))
    assert answer.same


def test_e1_g7_reads_of_one_account_that_hang_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may mount a file system that never answers, and follow files on it."""
    ends: list[Callable[[bytes], None]] = []
    monkeypatch.setattr(helpers, "ask_child", lambda _loop, _work, deliver, _deadline_s: ends.append(deliver))
    loop: Any = None
    asked, said = helpers.Helpers(loop), []

    def ask(of: str) -> None:
        asked.ask(lambda: (protocol.Pong(1), b""), lambda why: (protocol.Goodbye(why), b""), said.append, of=of)

    for _ in range(helpers.MAX_OF_ONE + 3):
        ask("eve")
    assert said == [(protocol.Goodbye("too many requests at once"), b"")] * 3
    for of in ("ann", ""):
        ask(of)
    assert (len(said), len(ends)) == (3, helpers.MAX_OF_ONE + 2)
    ends[0](protocol.encode(protocol.Pong(1)))
    ask("eve")
    assert said[3:] == [(protocol.Pong(1), b"")]
