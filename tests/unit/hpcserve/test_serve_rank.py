"""A rank's part: it is kept while it stays the same, and loading it does not hold a rank in a broken generation."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpcserve.config import ModelConfig, read_config
from hpcserve.errors import GroupLost, ModelFileError, ServeError
from hpcserve.group.arrange import even_split
from hpcserve.group.rank import PartLoader, free_bytes
from hpcserve.model import DecoderModel
from hpcserve.weights import WeightFiles
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def loader_of(directory: Path) -> tuple[PartLoader, ModelConfig]:
    config = read_config(directory)
    return PartLoader(config, WeightFiles(directory)), config


def loaded(loader: PartLoader, config: ModelConfig, ranks: int, blocks: int = 4) -> DecoderModel:
    loader.begin(even_split(config, ranks, "tensor").part(0), "fp32", blocks)
    return loader.loaded(lambda: False)


def test_a_part_is_kept_while_it_stays_the_same(model: Path) -> None:
    loader, config = loader_of(model)
    first = loaded(loader, config, 2)
    assert loaded(loader, config, 2) is first
    assert loaded(loader, config, 2, blocks=7) is first
    assert first.cache.blocks == 7
    assert loaded(loader, config, 3) is not first


def test_loading_is_not_waited_for_when_the_generation_is_given_up(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, config = loader_of(model)
    may_load = threading.Event()

    class SlowModel(DecoderModel):
        def __init__(self, *words: object, **more: object) -> None:
            may_load.wait()
            super().__init__(*words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("hpcserve.group.rank.DecoderModel", SlowModel)
    loader.begin(even_split(config, 2, "tensor").part(0), "fp32", 4)
    with pytest.raises(GroupLost):
        loader.loaded(lambda: True)
    may_load.set()
    assert loaded(loader, config, 3).part == even_split(config, 3, "tensor").part(0), "after the one that nobody wants"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ModelFileError("cannot read 'x'"), "cannot read 'x'"),
        (RuntimeError("no memory"), "cannot load layers 0 to 2: no"),
    ],
    ids=["file", "memory"],
)
def test_an_error_of_loading_reaches_the_rank(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    loader, config = loader_of(model)

    def fail(*words: object) -> None:
        raise error

    monkeypatch.setattr("hpcserve.group.rank.DecoderModel", fail)
    with pytest.raises(ServeError, match=shown):
        loaded(loader, config, 1)


def test_free_memory_is_some_of_the_hosts() -> None:
    assert 0 < free_bytes() < 1 << 50
