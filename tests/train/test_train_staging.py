"""A data set on the node's own disk: copied once, checked on the way, and done without where there is no room."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest
from ranks import HERE, needs_mpi, run_mpi

from hpctrain.comm.base import SingleCommunicator
from hpctrain.data import dataset
from hpctrain.data.dataset import PAGE_BYTES, Dataset, DatasetWriter, Shard, new_directory, stage, staged
from hpctrain.errors import DamagedError


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A data set of two shards."""
    path = tmp_path / "share"
    with new_directory(path) as draft:
        writer = DatasetWriter(draft)
        for number in range(2):
            writer.add("train", {"tokens": np.arange(number * 1000, number * 1000 + 1000, dtype=np.uint16)})
        writer.finish("tokens", vocabulary=2000, tokenizer=b"{}")
    return path


def tokens_of(path: Path) -> list[int]:
    return Dataset(path).split("train")[0:2000].tolist()


def test_a_copy_is_made_once_and_used_again(share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, said = stage(share, tmp_path / "disk")
    assert "copied to" in said
    assert home.parent == tmp_path / "disk"
    assert tokens_of(home) == list(range(2000))
    assert Dataset(home).tokenizer() == b"{}"
    monkeypatch.setattr(Shard, "pieces", None)  # the share's content is not read again
    again, said = stage(share, tmp_path / "disk")
    assert again == home
    assert "is used again" in said


def test_an_incomplete_copy_is_made_again(share: Path, tmp_path: Path) -> None:
    home, _ = stage(share, tmp_path / "disk")
    (home / "train-00001.shard").write_bytes(b"cut")
    half = tmp_path / "disk" / f".{home.name}.0123456789ab.part"
    half.mkdir()
    assert stage(share, tmp_path / "disk")[0] == home
    assert tokens_of(home) == list(range(2000))
    assert not half.exists()


def test_a_data_set_damaged_on_the_share_is_refused_by_name(share: Path, tmp_path: Path) -> None:
    path = share / "train-00001.shard"
    content = bytearray(path.read_bytes())
    content[PAGE_BYTES] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"share/train-00001\.shard: chunk 0"):
        stage(share, tmp_path / "disk")
    assert not [entry for entry in (tmp_path / "disk").iterdir() if entry.is_dir()]


def test_without_room_the_share_is_read_and_a_line_reports_it(
    share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(dataset, "SPARE_BYTES", 1 << 60)
        where, lines = staged(share, tmp_path / "disk", SingleCommunicator())
        assert where == share
        assert len(lines) == 1
        assert "do not fit" in lines[0]
    real = os.write

    def full(descriptor: int, piece: bytes) -> int:
        if len(piece) > 1500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, piece)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        where, said = stage(share, tmp_path / "disk")
    assert where == share
    assert "No space left on device" in said
    assert not [entry for entry in (tmp_path / "disk").iterdir() if entry.is_dir()]
    (tmp_path / "file").write_text("")
    where, said = stage(share, tmp_path / "file")
    assert where == share
    assert staged(share, None, SingleCommunicator()) == (share, [])


def test_jobs_that_want_the_same_data_at_once_copy_it_once(share: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        answers = pool.starmap(stage, [(share, tmp_path / "disk")] * 6)
    assert len({home for home, _ in answers}) == 1
    assert sum("copied to" in said for _, said in answers) == 1
    assert tokens_of(answers[0][0]) == list(range(2000))


@needs_mpi
def test_ranks_read_one_copy_and_learn_what_they_learn_from_the_share(share: Path, tmp_path: Path) -> None:
    words = ("--data", share, "--steps", "6", "--batch", "6", "--shares", "2,1")
    direct = run_mpi(2, HERE / "tokens.py", "--out", tmp_path / "a", "--prefetch", "0", *words)
    copied = run_mpi(2, HERE / "tokens.py", "--out", tmp_path / "b", "--stage", tmp_path / "disk", *words)
    assert (direct.status, copied.status) == (0, 0), direct.output + copied.output
    assert copied.output.count("copied to") == 1
    last = [ended.output.splitlines()[-1] for ended in (direct, copied)]
    assert last[0].startswith("weights sha256")
    assert last[0] == last[1]
    seen = re.findall(r"rank \d step \d samples (\d+) to (\d+)", copied.output)
    indexes = sorted(index for low, high in seen for index in range(int(low), int(high)))
    assert indexes == list(range(36))
