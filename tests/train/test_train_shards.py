"""Data sets: what was put in comes out, and what is not whole is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data import Rows, Windows
from hpctrain.data import dataset as shards
from hpctrain.data.__main__ import main
from hpctrain.data.dataset import PAGE_BYTES, Dataset, DatasetWriter, Shard, new_directory, write_shard
from hpctrain.data.prepare import prepare_arrays
from hpctrain.errors import DamagedError, TrainError


def made(path: Path, tokens: np.ndarray, per_shard: int) -> Dataset:
    """Return a data set of these tokens in shards of so many."""
    with new_directory(path) as draft:
        writer = DatasetWriter(draft)
        for low in range(0, len(tokens), per_shard):
            writer.add("train", {"tokens": tokens[low : low + per_shard]})
        writer.finish("tokens", vocabulary=1000)
    return Dataset(path)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@given(count=st.integers(20, 400), per_shard=st.integers(1, 100), seed=st.integers(0, 9), length=st.integers(1, 9))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_over_shards_equal_those_of_the_whole_row(
    tmp_path_factory: pytest.TempPathFactory, count: int, per_shard: int, seed: int, length: int
) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    dataset = made(tmp_path_factory.mktemp("d") / "set", tokens, per_shard)
    assert len(list(dataset.shards())) == -(-count // per_shard)
    from_shards, from_memory = Windows(dataset.split("train"), seed, length), Windows(tokens, seed, length)
    epoch = len(from_memory)
    for low, high in ((0, epoch), (epoch - 1, epoch + 2)):
        for part, other in zip(from_shards[low:high], from_memory[low:high], strict=True):
            assert part.dtype == np.int64
            assert np.array_equal(part, other)
    inputs, targets = from_shards[0:epoch]
    assert np.array_equal(targets, inputs + 1)
    assert len(set(inputs[:, 0].tolist())) == epoch


def test_rows_of_arrays_stay_together_and_each_comes_once_an_epoch(tmp_path: Path) -> None:
    images = np.arange(60, dtype=np.float32).reshape(20, 3)
    arrays = {"image": images, "name": np.arange(20, dtype=np.int64)}
    sizes = prepare_arrays(tmp_path / "set", arrays, validation=0.3, shard_bytes=100)
    dataset = Dataset(tmp_path / "set")
    assert sizes["train"] + sizes["validation"] == 20
    assert len(dataset.splits["train"]) > 2
    rows = Rows(dataset.split("train").arrays(), seed=4)
    got = rows[0 : sizes["train"]]
    assert np.array_equal(got["image"], images[got["name"]])
    held_back = dataset.split("validation").arrays()["name"][0 : sizes["validation"]]
    assert sorted([*got["name"].tolist(), *held_back.tolist()]) == list(range(20))
    assert sorted(rows[sizes["train"] : 2 * sizes["train"]]["name"]) == sorted(got["name"])
    with pytest.raises(TrainError, match="the arrays need the same number of rows"):
        Rows({"a": np.zeros(3), "b": np.zeros(4)}, seed=1)


def test_a_damaged_chunk_is_found_when_it_is_first_read_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    path = tmp_path / "a.shard"
    write_shard(path, {"tokens": np.arange(1000, dtype=np.uint16)})
    flip(path, PAGE_BYTES + 2 * 64 + 5)
    shard = Shard(path)
    assert shard.read("tokens", 0, 64).tolist() == list(range(64))
    with pytest.raises(DamagedError, match=r"a\.shard: chunk 2 \(from byte 4224 on\) does not match its hash"):
        shard.read("tokens", 60, 66)
    with pytest.raises(DamagedError, match="chunk 2"):
        shard.check_all()
    with pytest.raises(DamagedError, match="chunk 2"):
        list(shard.pieces())


def test_other_damage_and_other_versions_are_refused_by_name(tmp_path: Path) -> None:
    def damaged(name: str, change: object) -> Path:
        path = tmp_path / name
        write_shard(path, {"tokens": np.arange(1000, dtype=np.uint16)})
        content = bytearray(path.read_bytes())
        change(content)  # type: ignore[operator]
        path.write_bytes(content)
        return path

    cases = (
        ("short.shard", lambda content: content.pop(), r"short\.shard: it has 6095 bytes instead of 6096"),
        ("head.shard", lambda content: content.__setitem__(70, 0), r"head\.shard: its head does not match its hash"),
        (
            "newer.shard",
            lambda content: content.__setitem__(8, 2),
            r"newer\.shard: it is of version 2, this program reads 1",
        ),
        ("other.shard", lambda content: content.clear(), r"other\.shard: it is not a shard of training data"),
    )
    for name, change, why in cases:
        path = damaged(name, change)
        with pytest.raises(DamagedError, match=why):
            Shard(path)
    with pytest.raises(DamagedError, match=r"cannot read .*none\.shard: No such file"):
        Shard(tmp_path / "none.shard")


def test_an_index_vouches_for_its_shards(tmp_path: Path) -> None:
    tokens = np.arange(100, dtype=np.uint16)
    dataset = made(tmp_path / "set", tokens, 50)
    other = made(tmp_path / "other", tokens[::-1].copy(), 50)
    assert dataset.digest != other.digest
    first = tmp_path / "set" / "train-00000.shard"
    first.write_bytes((tmp_path / "other" / "train-00000.shard").read_bytes())
    with pytest.raises(
        DamagedError, match=r"train-00000\.shard: it is not the shard that dataset\.json was written for"
    ):
        dataset.split("train")
    with pytest.raises(TrainError, match="it has no split 'test', only train"):
        other.split("test")
    index = tmp_path / "other" / "dataset.json"
    body = json.loads(index.read_text())
    for change, why in (
        ({"version": 7}, "it is of version 7, this program reads 1"),
        ({"vocabulary": 5}, "its checksum does not match its content"),
        ({"format": "x"}, "it is not an index of a data set"),
    ):
        index.write_text(json.dumps(body | change))
        with pytest.raises(DamagedError, match=why):
            Dataset(tmp_path / "other")
    index.write_text("{")
    with pytest.raises(DamagedError, match="it is incomplete"):
        Dataset(tmp_path / "other")


def test_the_command_packs_arrays_and_checks_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", image=np.zeros((50, 4), np.uint8), name=np.arange(50))
    np.save(tmp_path / "weight.npy", np.ones(50, np.float32))
    out = tmp_path / "set"
    words = ["arrays", "--out", str(out), "--validation", "0.1", str(tmp_path / "a.npz"), str(tmp_path / "weight.npy")]
    assert main(words) == 0
    assert "rows in 1 shards" in capsys.readouterr().out
    assert set(Dataset(out).split("train").arrays()) == {"image", "name", "weight"}
    assert main(words) == 1
    assert "it exists; remove it or give another name" in capsys.readouterr().err
    assert main(["check", str(out)]) == 0
    assert "no damage: every chunk matches its hash" in capsys.readouterr().out
    flip(out / "train-00000.shard", PAGE_BYTES + 8)
    assert main(["check", str(out)]) == 1
    assert "train-00000.shard: chunk 0" in capsys.readouterr().err
    np.save(tmp_path / "odd.npy", np.ones(3, np.complex64))
    for bad, why in (
        ([str(tmp_path / "odd.npy")], "shards do not support numbers of type complex64"),
        ([str(tmp_path / "odd.npy"), str(tmp_path / "weight.npy")], "all need the same number"),
        ([str(out / "dataset.json")], "cannot read arrays from"),
    ):
        assert main(["arrays", "--out", str(tmp_path / "bad"), *bad]) == 1
        assert why in capsys.readouterr().err
        assert not (tmp_path / "bad").exists()
    assert not list(tmp_path.glob(".*"))
