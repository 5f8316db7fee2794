"""Ranks that write together while the share is away: each keeps its part on its own disk; they are joined on the share later."""

from __future__ import annotations

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_train_checkpoint import CHUNK_BYTES, NO_JOB, assert_holds, facts, state, write
from test_train_fallback import failing

from hpctrain.checkpoint.manifest import checkpoint_names
from hpctrain.checkpoint.writing import local_fallback
from hpctrain.checkpoint.writing.files import claim
from hpctrain.checkpoint.writing.group import Endpoint, First, Other
from hpctrain.checkpoint.writing.maker import CheckpointReport, WriteOrder, WriterSetup
from hpctrain.checkpoint.writing.process import CheckpointKeeper
from hpctrain.checkpoint.writing.publish import Retention, RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot, layout_of, share_of

SECRET = b"s" * 32
RANKS = 3


@pytest.fixture(autouse=True)
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCTRAIN_FALLBACK_DIR", str(tmp_path / "local"))
    return tmp_path / "local"


class World:
    """The processes that write, of ranks on hosts of their own."""

    def __init__(self, share: Path, top: Path) -> None:
        self.claim = claim(share, NO_JOB, now_s=0.0)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.keepers = []
        for rank in range(RANKS):
            endpoint = Endpoint(rank=rank, addresses=("127.0.0.1",), port=port, secret=SECRET) if rank else None
            task = WriterSetup(
                claim=self.claim,
                parent=None,
                base_every=9,
                policy=RetentionPolicy(keep=9),
                distrusted=(),
                chunk_bytes=CHUNK_BYTES,
                ranks=RANKS,
                endpoint=endpoint,
                secret=SECRET,
            )
            keeper = CheckpointKeeper(task, Other(endpoint) if endpoint else First(RANKS, listener, SECRET), 60.0)
            keeper._local = top / f"host-{rank}"
            self.keepers.append(keeper)
        self._pool = ThreadPoolExecutor(RANKS)

    def make(self, step: int, *, base: bool = True) -> list[str | None]:
        return list(self._pool.map(lambda rank: self._make(rank, step, base), range(RANKS)))

    def _make(self, rank: int, step: int, base: bool) -> str | None:
        part = share_of(state(step), rank, RANKS, {"model.mask"})
        snapshot = TensorSnapshot(layout_of(part))
        snapshot.fill(part)
        order = WriteOrder(snapshot=snapshot, taken=None, facts=facts(step, self.claim.attempt), base=base)
        report, _ = self.keepers[rank].make(order)
        assert isinstance(report, CheckpointReport)
        return report.error

    def make_in_vain(self, step: int, broken: pytest.MonkeyPatch, error: int = errno.ENOSPC) -> None:
        """Have each rank keep its part on its own disk: the share takes nothing meanwhile."""
        with broken.context() as share:
            failing(self.claim.directory, error, share)
            self.make(step)

    def retry(self, *ranks: int) -> None:
        for rank in ranks:
            self.keepers[rank].retry()

    def close(self) -> None:
        self._pool.shutdown()
        for keeper in self.keepers:
            keeper._maker.close()


def parts_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("part-"))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ESTALE])
def test_each_rank_keeps_its_part_and_they_are_joined_on_the_share(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    share = tmp_path / "share"
    world = World(share, top)
    assert world.make(1) == [None] * RANKS
    with monkeypatch.context() as broken:
        failing(share, error, broken)
        for step in (2, 3):
            for rank, told in enumerate(world.make(step)):
                assert os.strerror(error) in (told or "")
                assert f"in {top / f'host-{rank}'}" in (told or "")
        world.retry(0, 1, 2)
    for rank in range(RANKS):
        assert parts_in(top / f"host-{rank}") == [f"part-step-0000000003.a0000.r{rank}.json"], "the newest alone"
    assert_holds(share, 1)
    world.retry(0, 1)
    assert world.keepers[0].waiting, "one part is missing"
    assert_holds(share, 1)
    world.retry(2, 0)
    assert_holds(share, 3)
    assert not any(keeper.waiting for keeper in world.keepers)
    assert not parts_in(share)
    assert not [path for rank in range(RANKS) for path in (top / f"host-{rank}").glob("*.bin")]
    assert world.make(4) == [None] * RANKS
    assert_holds(share, 4)
    world.close()


def test_the_next_attempt_publishes_the_parts_of_all_ranks(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    world = World(share, top)
    world.make(1)
    world.make_in_vain(2, monkeypatch, errno.EROFS)
    world.close()
    for rank in range(RANKS):
        local_fallback.bring_parts(top / f"host-{rank}", share)
    assert_holds(share, 1)
    later = claim(share, NO_JOB, now_s=0.0)
    assert local_fallback.join_parts(later) == ["step-0000000002.a0000"]
    assert_holds(share, 2)
    assert local_fallback.join_parts(later) == []
    assert_holds(share, 2)


def test_parts_that_something_newer_has_overtaken_are_removed(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    world = World(share, top)
    world.make_in_vain(2, monkeypatch)
    world.retry(0)
    assert len(parts_in(share)) == 1
    assert world.make(3) == [None] * RANKS
    files = {path.name for path in share.glob("*.bin")}
    world.retry(0, 1, 2)
    assert not parts_in(share)
    assert len({path.name for path in share.glob("*.bin")}) == len(files) - 1
    assert_holds(share, 3)
    world.close()


@pytest.mark.parametrize("what", ["record", "data", "a lost host"])
def test_incomplete_parts_are_not_joined(tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    share = tmp_path / "share"
    world = World(share, top)
    world.make(1)
    world.make_in_vain(2, monkeypatch)
    world.close()
    lost = top / "host-1"
    for path in lost.glob("part-*" if what == "record" else "data-*"):
        path.write_bytes(path.read_bytes()[:-9])
    for rank in (0, 2) if what == "a lost host" else range(RANKS):
        local_fallback.bring_parts(top / f"host-{rank}", share)
    later = claim(share, NO_JOB, now_s=0.0)
    assert local_fallback.join_parts(later) == []
    assert_holds(share, 1)
    keep = Retention(later, RetentionPolicy(keep=9))
    keep.sweep()
    assert len(parts_in(share)) == 2, "seen once"
    keep.sweep()
    assert not parts_in(share)
    assert len(list(share.glob("*.bin"))) == RANKS
    assert_holds(share, 1)


def test_a_share_that_is_gone_leaves_the_part_where_it_is(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    world = World(share, top)
    world.make_in_vain(2, monkeypatch)
    world.close()
    with pytest.raises(FileNotFoundError):
        local_fallback.bring_parts(top / "host-1", tmp_path / "unmounted")
    assert len(parts_in(top / "host-1")) == 1


def test_two_ranks_of_one_host_that_bring_the_same_part_leave_it_there_once(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    world = World(share, top)
    world.make_in_vain(2, monkeypatch)
    world.close()
    real = local_fallback.pieces_of

    def later(path: Path, length: int) -> object:
        with monkeypatch.context() as first:
            first.setattr(local_fallback, "pieces_of", real)
            local_fallback.bring_parts(top / "host-1", share)
        return iter([b"x" * length])

    monkeypatch.setattr(local_fallback, "pieces_of", later)
    local_fallback.bring_parts(top / "host-1", share)
    monkeypatch.undo()
    assert len(list(share.glob("*.bin"))) == 1
    for rank in (0, 2):
        local_fallback.bring_parts(top / f"host-{rank}", share)
    assert local_fallback.join_parts(claim(share, NO_JOB, now_s=0.0)) == ["step-0000000002.a0000"]
    assert_holds(share, 2)


def test_a_checkpoint_of_one_process_is_not_a_part(tmp_path: Path) -> None:
    share = tmp_path / "share"
    write(share, [1])
    assert local_fallback.join_parts(claim(share, NO_JOB, now_s=0.0)) == []
    assert not local_fallback.has_waiting_parts(share)
    assert len(checkpoint_names(share)) == 1
