"""Which parts of a model a rank has in memory, and when they are read."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
import torch

from hpcserve.config import read_config
from hpcserve.errors import GroupLost, ServeError
from hpcserve.group import rank as rank_module
from hpcserve.group.arrange import even_split
from hpcserve.group.rank import PartLoader, warm_up
from hpcserve.model import DecoderModel
from hpcserve.split import ModelPart
from hpcserve.weights import WeightFiles
from tests.tiny_models import FAMILIES, tiny_model
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ModelPart]:
    """The parts that are read from files from now on."""
    parts: list[ModelPart] = []

    class NotedModel(DecoderModel):
        def __init__(self, config: object, checkpoint: object, part: ModelPart, kind: str) -> None:
            parts.append(part)
            super().__init__(config, checkpoint, part, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_module, "DecoderModel", NotedModel)
    return parts


def loader_and_parts(directory: Path) -> tuple[PartLoader, list[ModelPart]]:
    config = read_config(directory)
    split = even_split(config, 3, "tensor")
    return PartLoader(config, WeightFiles(directory)), [split.part(rank) for rank in range(3)]


def loaded(loader: PartLoader) -> DecoderModel:
    return loader.loaded(lambda: False)


def test_a_part_that_a_spare_has_prepared_is_not_read_again(model: Path, made: list[ModelPart]) -> None:
    loader, parts = loader_and_parts(model)
    loader.prepare(parts[:2], "fp32")
    wait_until(lambda: len(made) == 2, PATIENCE_S, "two parts")
    loader.begin(parts[1], "fp32", 8)
    assert (loaded(loader).part, loaded(loader).cache.blocks) == (parts[1], 8)
    loader.begin(parts[2], "fp32", 8)
    assert loaded(loader).part == parts[2]
    assert made == parts


def test_preparing_ends_when_a_generation_wants_a_part(
    model: Path, made: list[ModelPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_begun, may_end = threading.Event(), threading.Event()

    def wait(prepared: DecoderModel) -> None:
        is_begun.set()
        assert may_end.wait(PATIENCE_S)

    monkeypatch.setattr(rank_module, "warm_up", wait)
    loader, parts = loader_and_parts(model)
    loader.prepare(parts, "fp32")
    assert is_begun.wait(PATIENCE_S)
    loader.begin(parts[2], "fp32", 8)
    may_end.set()
    assert loaded(loader).part == parts[2]
    assert made == [parts[0], parts[2]]


def test_other_parts_are_freed_before_one_is_loaded(model: Path) -> None:
    loader, parts = loader_and_parts(model)
    loader.begin(parts[0], "fp32", 8)
    before = weakref.ref(loaded(loader))
    loader.begin(parts[1], "fp32", 8)
    assert loaded(loader).part == parts[1]
    assert before() is None


def test_a_part_that_cannot_be_prepared_is_no_error_of_the_rank(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prepared: DecoderModel) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(rank_module, "warm_up", fail)
    loader, parts = loader_and_parts(model)
    loader.prepare(parts, "fp32")
    loader.begin(parts[0], "fp32", 8)
    assert loaded(loader).part == parts[0]
    assert "this spare prepares no more parts: not enough memory" in capsys.readouterr().err


def test_a_generation_that_is_given_up_waits_for_no_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(rank_module, "warm_up", lambda prepared: may_end.wait(PATIENCE_S))
    loader, parts = loader_and_parts(model)
    loader.prepare(parts, "fp32")
    loader.begin(parts[0], "fp32", 8)
    with pytest.raises(GroupLost, match="the generation is over"):
        loader.loaded(lambda: True)
    may_end.set()


def test_an_error_of_loading_is_raised_by_the_rank(model: Path) -> None:
    loader, parts = loader_and_parts(model)
    (model / "model.safetensors").write_bytes(b"")
    loader.begin(parts[0], "fp32", 8)
    with pytest.raises(ServeError):
        loaded(loader)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_part_of_any_family_is_warmed_up(family: str, tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model", family)
    config = read_config(directory)
    with WeightFiles(directory) as checkpoint:
        for shape in ("tensor", "pipeline"):
            split = even_split(config, 2, shape)
            for rank in range(2):
                model = DecoderModel(config, checkpoint, split.part(rank), "fp32")
                warm_up(model)
                assert all(bool(torch.isfinite(keys).all()) for keys in model.cache.keys)
