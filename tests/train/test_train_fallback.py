"""A share that is full, read-only, slow or away: the newest state is on the node's own disk, and on the share later."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint_rounds import why_not
from share_disk import ShareDisk
from test_train_checkpoint import CHUNK_BYTES, NO_JOB, assert_holds, facts, state, write
from waiting import PATIENCE_S

from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import checkpoint_names
from hpctrain.checkpoint.writing import files, local_fallback
from hpctrain.checkpoint.writing.files import Claim, claim
from hpctrain.checkpoint.writing.maker import CheckpointReport, WriteOrder, WriterSetup
from hpctrain.checkpoint.writing.process import CheckpointKeeper
from hpctrain.checkpoint.writing.publish import RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot, layout_of
from hpctrain.errors import PublishError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCTRAIN_FALLBACK_DIR", str(tmp_path / "local"))
    return local_fallback.local_directory(tmp_path / "share")


class World:
    def __init__(self, share: Path, patience_s: float = 60.0) -> None:
        self.claim = claim(share, NO_JOB, now_s=0.0)
        task = WriterSetup(
            claim=self.claim,
            parent=None,
            base_every=9,
            policy=RetentionPolicy(keep=2),
            distrusted=(),
            chunk_bytes=CHUNK_BYTES,
        )
        self.keeper = CheckpointKeeper(task, None, patience_s)

    def make(self, step: int) -> CheckpointReport:
        snapshot = TensorSnapshot(layout_of(state(step)))
        snapshot.fill(state(step))
        made = WriteOrder(snapshot=snapshot, taken=None, facts=facts(step, self.claim.attempt))
        report, self.writer_state = self.keeper.make(made)
        assert isinstance(report, CheckpointReport)
        self.number = snapshot.number
        return report


def failing(share: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *more: object, **options: object) -> int:
        if str(path).startswith(str(share)) and flags & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "open", refuse)


def keep_step_2(place: Path) -> None:
    snapshot = TensorSnapshot(layout_of(state(2)))
    snapshot.fill(state(2))
    with ThreadPoolExecutor(1) as pool:
        local_fallback.keep_part(place, 0, 1, snapshot, facts(2, 0), pool, CHUNK_BYTES)


def publish_from(place: Path, mine: Claim) -> list[str]:
    local_fallback.bring_parts(place, mine.directory)
    return local_fallback.join_parts(mine)


@pytest.mark.root
@pytest.mark.skipif(bool(why_not()), reason=f"a share of two clients: {why_not()}")
def test_a_part_that_another_client_has_brought_just_now_is_joined(place: Path, tmp_path: Path) -> None:
    with ShareDisk(tmp_path / "mounts", 2) as disk:
        old, new = (path / "run" for path in disk.paths)
        old.mkdir()
        claim(old, NO_JOB, now_s=0.0)
        mine = claim(new, NO_JOB, now_s=0.0)
        assert not local_fallback.has_waiting_parts(new)  # this client remembers the listing
        keep_step_2(place)
        local_fallback.bring_parts(place, old)
        assert publish_from(place, mine) == ["step-0000000002.a0000"]


def parts_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("part-*"))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EIO])
def test_a_state_that_the_share_rejects_is_kept_locally_and_copied_later(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    share = tmp_path / "share"
    world = World(share)
    assert world.make(1).error is None
    with monkeypatch.context() as broken:
        failing(share, error, broken)
        for step in (2, 3):
            told = world.make(step).error or ""
            assert os.strerror(error) in told
            assert f"in {place}" in told
            assert world.writer_state.away
            assert world.writer_state.last_step == 1
        assert parts_in(place) == ["part-step-0000000003.a0000.r0.json"], "the newest alone"
        world.keeper.retry()
        assert world.keeper.waiting
    assert_holds(share, 1)
    world.keeper.retry()
    assert not world.keeper.waiting
    assert not list(place.iterdir())
    assert_holds(share, 3)
    assert world.make(4).error is None
    assert_holds(share, 4)


def test_a_share_that_hangs_is_not_waited_for_and_its_buffer_is_left_alone(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, back = tmp_path / "share", threading.Event()
    world = World(share, patience_s=0.2)
    real = files.write_new

    def hang(path: Path, pieces: object, **options: object) -> int:
        if path.parent == share:
            assert back.wait(PATIENCE_S)
        return real(path, pieces, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write_new", hang)
    assert "has not answered for 0.2 s; kept on " in (world.make(1).error or "")
    held = world.number
    assert world.writer_state.held == {held}
    assert "the share still does not answer; kept on " in (world.make(2).error or "")
    assert world.writer_state.held == {held}
    assert parts_in(place) == ["part-step-0000000002.a0000.r0.json"]
    slow = world.keeper._slow
    back.set()
    world.keeper._patience_s = PATIENCE_S
    assert slow is not None
    assert slow.result(PATIENCE_S).error is None
    world.keeper.retry()
    assert_holds(share, 2)
    assert world.make(3).error is None
    assert not world.writer_state.held
    assert_holds(share, 3)


def test_a_full_local_disk_is_reported(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "share")
    failing(tmp_path, errno.ENOSPC, monkeypatch)
    assert "only the running program has the state: " in (world.make(1).error or "")
    monkeypatch.undo()
    monkeypatch.setenv("HPCTRAIN_FALLBACK_DIR", str(tmp_path / "local"))
    assert world.make(2).error is None


def test_an_older_state_of_this_host_does_not_go_to_the_share(tmp_path: Path, place: Path) -> None:
    keep_step_2(place)
    share = tmp_path / "share"
    write(share, [1, 2, 3])
    assert publish_from(place, claim(share, NO_JOB, now_s=0.0)) == []
    assert not parts_in(place)
    assert_holds(share, 3)


def test_a_run_that_begins_anew_brings_it_first(tmp_path: Path, place: Path) -> None:
    share = tmp_path / "share"
    write(share, [1])
    keep_step_2(place)
    mine = claim(share, NO_JOB, now_s=0.0)
    assert publish_from(place, mine) == ["step-0000000002.a0000"]
    assert_holds(share, 2)


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_local_directory_that_other_users_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.delenv("HPCTRAIN_FALLBACK_DIR", raising=False)
    monkeypatch.setattr(local_fallback.tempfile, "gettempdir", lambda: str(tmp_path))
    place = local_fallback.local_directory(tmp_path / "share")
    keep_step_2(place)
    assert [folder.stat().st_mode & 0o777 for folder in (place.parent, place)] == [0o700, 0o700]
    (place.parent if which == "outer" else place).chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        keep_step_2(place)
    assert publish_from(place, claim(tmp_path / "share", NO_JOB, now_s=0.0)) == []
    assert checkpoint_names(tmp_path / "share") == []
    assert len(parts_in(place)) == 1  # whose it is nobody knows: it stays


def test_two_attempts_that_bring_the_same_state_leave_one_another_alone(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was stopped when it had read what is here, and goes on when a later one has published that."""
    share = tmp_path / "share"
    first = claim(share, NO_JOB, now_s=0.0)
    keep_step_2(place)
    real, brought = local_fallback._read, []

    def stopped(record: Path, key: CheckpointKey | None) -> local_fallback.LocalPart:
        found = real(record, key)
        if not brought:
            brought.append("by the second one")
            brought.extend(publish_from(place, claim(share, NO_JOB, now_s=0.0)))
        return found

    monkeypatch.setattr(local_fallback, "_read", stopped)
    assert publish_from(place, first) == []
    assert brought == ["by the second one", "step-0000000002.a0000"]
    assert_holds(share, 2)


@pytest.mark.parametrize("failing_name", [".json", ".bin"])
def test_an_incomplete_copy_does_not_stay_on_the_share(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, failing_name: str
) -> None:
    share = tmp_path / "share"
    mine = claim(share, NO_JOB, now_s=0.0)
    keep_step_2(place)
    real = files.write_new

    def refuse(path: Path, pieces: object, **options: object) -> int:
        if path.parent == share and failing_name in path.name:
            raise PublishError("no space")
        return real(path, pieces, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as full:
        full.setattr(files, "write_new", refuse)
        with pytest.raises(PublishError):
            publish_from(place, mine)
    assert not list(share.glob("data-*"))
    assert publish_from(place, mine) == ["step-0000000002.a0000"]
    assert_holds(share, 2)
