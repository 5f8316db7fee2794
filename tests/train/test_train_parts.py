"""Several ranks write one checkpoint: each its part, one manifest; read by any number of ranks."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import needs_mpi, run_mpi
from test_train_checkpoint import CHUNK_BYTES, NO_JOB, assert_holds, facts, state
from test_train_gradlog import TINY, WITH_WAITING, World, assert_alike, kinds_in, told
from thread_writer import ThreadWriter

from hpctrain.checkpoint.manifest import checkpoint_names, from_bytes
from hpctrain.checkpoint.writing import files
from hpctrain.checkpoint.writing.files import claim
from hpctrain.checkpoint.writing.gradient_log import GradientLog
from hpctrain.checkpoint.writing.group import Endpoint, First, Other
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.checkpoint.writing.publish import Retention, RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import TensorPiece, share_of

SECRET = b"s" * 32


class Ranks:
    """Writers of several ranks in one process, which write together."""

    def __init__(self, directory: Path, size: int, base_every: int = 4) -> None:
        self.directory, self.size = directory, size
        mine = claim(directory, NO_JOB, now_s=0.0)
        self.attempt = mine.attempt
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        groups = [First(size, listener, SECRET)] + [
            Other(Endpoint(rank=rank, addresses=("127.0.0.1",), port=port, secret=SECRET)) for rank in range(1, size)
        ]
        keep = Retention(mine, RetentionPolicy(keep=9))
        self.writers = [ThreadWriter(mine, None, base_every, keep, CHUNK_BYTES, group) for group in groups]

    def write(self, step: int) -> list[CheckpointReport]:
        base = any(not writer._writer_state.room for writer in self.writers)  # as the ranks agree
        for rank, writer in enumerate(self.writers):
            part = share_of(state(step), rank, self.size, {"model.mask"})
            writer.begin(part, facts(step, self.attempt), base=base)
        return [writer.wait() for writer in self.writers]  # type: ignore[misc]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_all_of_it_once(size: int) -> None:
    tensors = {
        "a": torch.arange(700_000, dtype=torch.float32).view(700, 1000),
        "empty": torch.zeros(0, 3),
        "b": torch.arange(300_000),
        "own": torch.tensor([7]),
    }
    shares = [share_of(tensors, rank, size, {"own"}) for rank in range(size)]
    for name, tensor in tensors.items():
        parts = [share[name] for share in shares if name in share]
        if isinstance(parts[0], TensorPiece):
            assert torch.equal(torch.cat([part.part for part in parts]), tensor.reshape(-1)), name
            assert [part.low for part in parts][0] == 0
        else:
            assert len(parts) == 1
            assert torch.equal(parts[0], tensor)
    assert "own" in shares[0]
    most = max(
        sum(one.part.nbytes if isinstance(one, TensorPiece) else one.nbytes for one in share.values())
        for share in shares
    )
    assert most < 5_200_000 / size + (2 << 20)


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_several_ranks_are_one_checkpoint(tmp_path: Path, size: int) -> None:
    ranks = Ranks(tmp_path, size)
    reports = [ranks.write(step) for step in range(1, 7)]
    ranks.close()
    assert [[one.error for one in each] for each in reports] == [[None] * size] * 6
    assert [each[0].kind for each in reports] == ["base", "delta", "delta", "delta", "base", "delta"]
    newest = from_bytes(
        checkpoint_names(tmp_path)[0], (tmp_path / f"{checkpoint_names(tmp_path)[0]}.json").read_bytes()
    )
    assert len({data.file for data in newest.data}) == size
    assert_holds(tmp_path, 6)


def test_a_full_share_on_one_rank_costs_the_checkpoint_and_the_next_is_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.write(1)
    real, failed = files.write_new, []

    def full_once(path: Path, pieces: object, **options: object) -> int:
        if path.name.startswith("data-") and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, pieces, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as full:
        full.setattr(files, "write_new", full_once)
        errors = [report.error for report in ranks.write(2)]
    assert all("No space left" in (error or "") for error in errors), errors
    assert_holds(tmp_path, 1)
    assert [report.kind for report in ranks.write(3)] == ["base", "base"]
    assert_holds(tmp_path, 3)
    ranks.close()


def test_a_stranger_is_not_one_of_the_group(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    port = ranks.writers[0]._maker._group._listener.getsockname()[1]  # type: ignore[union-attr]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"x" * 32)
        assert [report.error for report in ranks.write(1)] == [None, None]
    ranks.close()
    assert_holds(tmp_path, 1)


def test_logged_gradients_of_several_ranks_are_taken_again(tmp_path: Path) -> None:
    """Both ranks have the same gradients; each keeps half of them."""
    ranks, worlds = Ranks(tmp_path, 2), [World(tmp_path) for _ in range(2)]
    for rank, (world, writer) in enumerate(zip(worlds, ranks.writers, strict=True)):
        world.attempt = ranks.attempt
        world.log = GradientLog(
            world.model, world.groups, world.flats, 0, 1 << 20, world.optimizer.settings(), rank=rank, size=2
        )
        writer.follow(world.log)
    kinds = []
    with ThreadPoolExecutor(2) as pool:

        def step(rank: int) -> str:
            world, writer = worlds[rank], ranks.writers[rank]
            world.move()
            mine = None if log else share_of(world.tensors(), rank, 2)
            writer.begin(mine, world.facts(), base=base)
            report = writer.wait()
            assert report is not None
            assert report.error is None, report.error
            return report.kind

        for _ in range(4):
            for world in worlds:
                world.log.enabled = True
            base = any(not writer._writer_state.room for writer in ranks.writers)
            log = all(writer._writer_state.takes_log for writer in ranks.writers)
            kinds.append(list(pool.map(step, range(2)))[0])
    ranks.close()
    assert kinds == ["base", "delta", "gradients", "gradients"]
    again = World(tmp_path)
    again.restore()
    assert_alike(again, worlds[0])


# ---- the whole path


@needs_mpi
@pytest.mark.parametrize("more", [(), ("--zero",)])
def test_a_checkpoint_of_two_ranks_is_read_by_one_and_by_three(tmp_path: Path, more: tuple[str, ...]) -> None:
    options = ("--checkpoint-every", "2", "--base-every", "3", "--patient", *more)
    ended = run_mpi(2, TINY, "--out", tmp_path / "run", "--steps", "8", *options, extra=WITH_WAITING)
    assert ended.status == 0, ended.output
    directory = tmp_path / "run" / "checkpoints"
    newest = from_bytes(
        checkpoint_names(directory)[0], (directory / f"{checkpoint_names(directory)[0]}.json").read_bytes()
    )
    assert len(newest.data) == 2
    assert "base" in kinds_in(tmp_path / "run")
    for size, steps in ((1, "10"), (3, "12")):
        again = run_mpi(size, TINY, "--out", tmp_path / "run", "--steps", steps, *options, extra=WITH_WAITING)
        assert again.status == 0, again.output
        assert f"resumed from step {int(steps) - 2}" in again.output
        assert told(again.output)
