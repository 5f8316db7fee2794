"""Weight files: slices are read as they are, and damaged or hostile files are refused before anything starts."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, tiny_model

from hpcserve import weights
from hpcserve.__main__ import main
from hpcserve.config import read_config
from hpcserve.errors import ModelFileError
from hpcserve.model import DecoderModel, whole_part
from hpcserve.split import Span
from hpcserve.weights import Int4Weight, Int8Weight, WeightFiles, quantized_int4, quantized_int8

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def refused(directory: Path, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        WeightFiles(directory)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)


def entry(start: int, stop: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("shortest", [1, 1 << 20], ids=["runs", "stripes"])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_slices_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, shortest: int, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("slices")
    whole = torch.arange(13 * 17, dtype=torch.float32).view(13, 17)
    save_file({"x": torch.ones(3), "y": whole}, directory / "model.safetensors")

    def span(length: int) -> Span:
        start = data.draw(st.integers(0, length))
        return Span(start, data.draw(st.integers(start, length)))

    rows, columns = span(13), span(17)
    with pytest.MonkeyPatch.context() as patch, WeightFiles(directory) as files:
        patch.setattr(weights, "SHORTEST_RUN_BYTES", shortest)
        patch.setattr(weights, "STRIPE_BYTES", 5 * 17 * 4)
        assert torch.equal(files.read("y", rows), whole[rows.start : rows.stop])
        assert torch.equal(files.read("y", rows, columns), whole[rows.start : rows.stop, columns.start : columns.stop])


def test_a_part_reads_its_own_bytes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.zeros(64, 2048)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        files.read("x", Span(8, 16))
        files.read("x", None, Span(0, 1024))
        assert files.bytes_read == 4 * (8 * 2048 + 64 * 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8], ids=str)
def test_types_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(12).view(3, 4).to(dtype)
    save_file({"x": whole, "empty": torch.zeros(0, 4, dtype=dtype)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        assert torch.equal(files.read("x"), whole)
        assert files.read("empty").shape == (0, 4)


def test_a_truncated_file_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    refused(directory, r"model\.safetensors'.*truncated")


HEADERS: dict[str, tuple[Any, bytes, int | None, str]] = {
    "long": ({}, b"", 1 << 62, "truncated"),
    "longer_than_file": ({}, b"", 100, "truncated"),
    "short": ({}, b"", 1, "truncated"),
    "list": ([], b"", None, "not a JSON object"),
    "cut": ({"x": 1}, b"", 5, "not a JSON object"),
    "overlap": ({"x": entry(0, 4, [4]), "y": entry(3, 7, [4])}, b"1234567", None, "overlaps"),
    "negative": ({"x": entry(-4, 0, [4])}, b"1234", None, "negative"),
    "backwards": ({"x": entry(4, 0, [4])}, b"1234", None, "not the size"),
    "outside": ({"x": entry(0, 5, [5])}, b"1234", None, "truncated"),
    "size": ({"x": entry(0, 4, [3])}, b"1234", None, "not the size"),
    "huge": ({"x": entry(0, 4, [1 << 40, 1 << 40])}, b"1234", None, "not the size"),
    "type": ({"x": entry(0, 4, [4], "F8_E4M3")}, b"1234", None, "'F8_E4M3'; supported are"),
    "float_offset": ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}, b"1", None, "broken"),
    "axes": ({"x": entry(0, 1, [1] * 9)}, b"1", None, "broken"),
    "no_offsets": ({"x": {"dtype": "U8", "shape": [1]}}, b"1", None, "no type, shape or offsets"),
    "text": ({"x": "y"}, b"", None, "no type, shape or offsets"),
}


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    header, data, length, words = HEADERS[name]
    write(tmp_path / "model.safetensors", header, data, length)
    refused(tmp_path, words)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    directory = tmp_path_factory.mktemp("random")
    (directory / "model.safetensors").write_bytes(content)
    try:
        WeightFiles(directory).close()
    except ModelFileError:
        pass


def index(directory: Path, table: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(table))


def test_shards_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"y": torch.zeros(3)}, tmp_path / "b.safetensors")
    index(tmp_path, {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    with WeightFiles(tmp_path) as files:
        assert files.read("y").tolist() == [0, 0, 0]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    index(tmp_path, {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    refused(tmp_path, r"b\.safetensors.*No such file")


def test_a_shard_without_its_tensor_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    index(tmp_path, {"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}})
    refused(tmp_path, r"a\.safetensors.*'y'")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(2), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index(tmp_path, {"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "x": "a.safetensors"}})
    refused(tmp_path, "'x' is in another file")


@pytest.mark.parametrize(
    "table",
    [
        {},
        [],
        {"weight_map": []},
        {"weight_map": {}},
        {"weight_map": {"x": "../a.safetensors"}},
        {"weight_map": {"x": 3}},
    ],
    ids=["empty", "list", "wrong", "none", "path", "number"],
)
def test_a_broken_index_is_refused(tmp_path: Path, table: Any) -> None:
    index(tmp_path, table)
    refused(tmp_path, "cannot read")


def test_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    refused(tmp_path, "pickle.*save_pretrained")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "neither")
    refused(tmp_path / "absent", "not a directory")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_not_a_regular_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.safetensors")
    refused(tmp_path, "not a regular file")


def test_links_out_of_the_directory_are_refused(directory: Path) -> None:
    outside = directory.parent / "other.safetensors"
    (directory / "model.safetensors").rename(outside)
    (directory / "model.safetensors").symlink_to(outside)
    refused(directory, "link out of")


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "models--x" / "snapshots" / "1")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (directory / "model.safetensors").rename(blobs / "0123")
    (directory / "model.safetensors").symlink_to("../../blobs/0123")
    WeightFiles(directory).close()


def replaced(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


def written(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


@pytest.mark.parametrize("change", [replaced, written, Path.unlink], ids=["replaced", "written", "removed"])
def test_a_file_that_changes_while_it_is_read_is_an_error(directory: Path, change: Callable[[Path], None]) -> None:
    with WeightFiles(directory) as files:
        files.read(NAME)
        change(directory / "model.safetensors")
        with pytest.raises(ModelFileError, match=r"changed or replaced|No such file"):
            files.read(NAME)


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=["nan", "infinite"])
def test_weights_that_are_not_finite_are_named(directory: Path, number: float) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[NAME][3, 5] = number
    save_file(tensors, path)
    with WeightFiles(directory) as files, pytest.raises(ModelFileError, match=rf"{NAME}'.*NaN"):
        DecoderModel(read_config(directory), files, whole_part(read_config(directory)), "bf16")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, r"has shape .* by config\.json"),
        ({"vocab_size": VOCAB + 1}, "has shape"),
        ({"num_hidden_layers": 3}, r"'model\.layers\.2\..*missing"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"q_proj\.bias' is missing"),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 9,
          "activation_function": "gelu"}, "missing"),
    ],
    ids=["width", "vocabulary", "layers", "biases", "family"],
)  # fmt: skip
def test_a_configuration_of_another_model_is_refused(directory: Path, changes: dict[str, Any], words: str) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = read_config(directory)
    with WeightFiles(directory) as files, pytest.raises(ModelFileError, match=words):
        DecoderModel(config, files, whole_part(config), "fp32")


def test_a_head_that_should_be_the_embedding_is_refused(tmp_path: Path) -> None:
    """Tied and untied: a file with a head of its own is not taken for a tied model's, and a missing head is named."""
    directory = tiny_model(tmp_path / "untied", tie_word_embeddings=True)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    config = read_config(directory)
    with WeightFiles(directory) as files, pytest.raises(ModelFileError, match=r"'lm_head\.weight' is missing"):
        DecoderModel(config, files, whole_part(config), "fp32")


def test_scales_that_are_not_one_for_each_row_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight.int8": torch.ones(4, 8, dtype=torch.int8), "a.weight.scale": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files, pytest.raises(ModelFileError, match=r"scales of shape \[3\] for 4 rows"):
        files.matrix("a.weight")


def test_the_version_follows_all_that_changes_answers(directory: Path) -> None:
    def version() -> str:
        with WeightFiles(directory) as files:
            return files.version()

    first = version()
    assert version() == first
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, directory / "model.safetensors")
    second = version()
    (directory / "tokenizer.json").write_text("{}")
    assert len({first, second, version()}) == 3


def test_int8_rows_lose_half_a_step() -> None:
    matrix = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    matrix[7] = 0
    assert ((quantized_int8(matrix).floats() - matrix).abs() <= matrix.abs().amax(1, keepdim=True) / 127 / 1.99).all()


def test_int4_groups_lose_half_a_step() -> None:
    matrix = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    matrix[7] = 0.25
    groups = matrix.view(300, 2, 32)
    step = ((groups.amax(2) - groups.amin(2)) / 15)[..., None]
    lost = (quantized_int4(matrix).floats().view(300, 2, 32) - groups).abs()
    assert (lost <= step * 0.52 + 0.003).all()


@pytest.mark.parametrize("made", [quantized_int8, quantized_int4], ids=["int8", "int4"])
def test_stored_quantized_parts_are_those_of_the_whole(
    tmp_path: Path, made: Callable[[torch.Tensor], Int8Weight | Int4Weight]
) -> None:
    matrix = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    whole = made(matrix)
    fields = (
        {"int8": whole.values, "scale": whole.scale}
        if isinstance(whole, Int8Weight)
        else {"int4": whole.values, "scales": whole.scales, "zeros": whole.zeros}
    )
    save_file({f"x.weight.{name}": tensor for name, tensor in fields.items()}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        for rows, columns in ((Span(2, 5), None), (None, Span(32, 96)), (Span(1, 8), Span(40, 100))):
            part = files.matrix("x.weight", rows, columns)
            found = part if isinstance(part, torch.Tensor) else part.floats()
            rows, columns = rows or Span(0, 8), columns or Span(0, 128)
            assert torch.equal(found, whole.floats()[rows.start : rows.stop, columns.start : columns.stop])


def flip(directory: Path, name: str, at: int) -> None:
    """Change one byte of a tensor, and neither the size nor the time of its file."""
    path = directory / "model.safetensors"
    before = path.stat()
    with WeightFiles(directory) as files:
        offset = files.tensors[name].offset + at
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_part_is_verified_by_the_hashes_of_its_rows_or_columns(tmp_path: Path) -> None:
    whole = torch.randn(100, 90)
    save_file({"x": whole}, tmp_path / "model.safetensors")
    assert weights.write_hashes(tmp_path) == whole.nbytes
    flip(tmp_path, "x", 4 * (70 * 90 + 40))
    with WeightFiles(tmp_path) as files:
        for rows, columns in ((Span(0, 64), None), (Span(96, 100), None), (None, Span(0, 32)), (None, Span(64, 90))):
            files.read("x", rows, columns)
        for rows, columns in ((None, None), (Span(64, 96), None), (Span(50, 100), None), (None, Span(20, 80))):
            with pytest.raises(ModelFileError, match=r"tensor 'x' in '.*model\.safetensors' is not the one"):
                files.read("x", rows, columns)


def test_a_model_with_a_flipped_bit_is_not_served(directory: Path) -> None:
    assert main(["hash", str(directory)]) == 0
    config = read_config(directory)
    with WeightFiles(directory) as files:
        DecoderModel(config, files, whole_part(config), "fp32")
    flip(directory, NAME, 1000)
    with WeightFiles(directory) as files, pytest.raises(ModelFileError, match=NAME):
        DecoderModel(config, files, whole_part(config), "fp32")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "no hashes"),
        ('{"x": 1}', "no hashes"),
        ("{}", "no hash of all"),
        ('{"x": {"rows": [], "columns": 1}}', "of all"),
    ],
    ids=["list", "number", "empty", "short"],
)
def test_a_broken_file_of_hashes_is_refused(tmp_path: Path, content: str, words: str) -> None:
    save_file({"x": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / weights.HASHES_NAME).write_text(content)
    with pytest.raises(ModelFileError, match=words), WeightFiles(tmp_path) as files:
        files.read("x")


def test_the_version_of_a_model_with_hashes_follows_every_weight(directory: Path) -> None:
    def version() -> str:
        weights.write_hashes(directory)
        with WeightFiles(directory) as files:
            return files.version()

    first = version()
    assert version() == first
    flip(directory, NAME, 1000)
    assert version() != first
