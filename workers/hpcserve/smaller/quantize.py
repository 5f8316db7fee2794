"""Makes a smaller model of a model: its matrices as int8 or int4, in a new directory.

The format is described in `weights`. One matrix is in memory at a time. Does not know how well the result predicts:
`perplexity` does. Rules: a new directory appears as a whole or not at all, and never replaces another. Norms, biases, tables of
positions and routers stay floats, in bfloat16 if they were larger and have rows; so do matrices without whole groups for int4.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hpcserve.config import CONFIG_NAME, ModelFamily, StoredKind, read_config
from hpcserve.errors import ModelFileError, ServeError
from hpcserve.weights import (
    GROUP_COLUMNS,
    INDEX_NAME,
    SINGLE_NAME,
    WeightFiles,
    quantized_int4,
    quantized_int8,
)

SHARD_BYTES = 2 << 30
COPIED_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "added_tokens.json",
)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
PLAIN_MATRICES = ("wpe.weight", "mlp.gate.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The bytes of a model's weights, now and as bfloat16."""

    stored_bytes: int
    bf16_bytes: int


@dataclass(slots=True)
class ModelWriter:
    """A model directory in the making: tensors are written in shards of limited size."""

    folder: Path
    pending: dict[str, Tensor] = field(default_factory=dict)
    pending_bytes: int = 0
    shards: list[list[str]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor."""
        self.pending[name] = tensor.contiguous()
        self.pending_bytes += tensor.nbytes
        if self.pending_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the tensors that were added since the last shard."""
        if self.pending:
            name = f"part-{len(self.shards)}.safetensors"
            save_file(self.pending, self.folder / name, metadata={"format": "pt"})
            self.shards.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def finish(self, source: Path, config: Mapping[str, Any]) -> None:
        """Name the shards, and write what else a model has."""
        self.flush()
        count = len(self.shards)
        names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        if count == 1:
            names = [SINGLE_NAME]
        else:
            table = {tensor: name for name, shard in zip(names, self.shards, strict=True) for tensor in shard}
            (self.folder / INDEX_NAME).write_text(json.dumps({"weight_map": table}))
        for number, name in enumerate(names):
            (self.folder / f"part-{number}.safetensors").rename(self.folder / name)
        (self.folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        for name in COPIED_NAMES:
            if (source / name).is_file():
                shutil.copyfile(source / name, self.folder / name)


@contextmanager
def new_model(target: Path) -> Iterator[ModelWriter]:
    """Yield the writer of a new model directory, which appears as a whole when all is written.

    Raises:
        ServeError: it exists, or cannot be written; nothing is left of it.
    """
    if target.exists():
        raise ServeError(f"cannot write '{target}': it exists; name a new directory")
    folder = target.parent / f".{target.name}.{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise ServeError(f"cannot write '{target}': {error.strerror}") from None
    try:
        yield ModelWriter(folder)
        for path in (*folder.iterdir(), folder):
            sync(path)
        folder.rename(target)
        sync(target.parent)
    except OSError as error:
        raise ServeError(f"cannot write '{target}': {error.strerror or error}") from None
    except Exception as error:
        if type(error).__module__.startswith("safetensors"):  # its error for a full disk
            raise ServeError(f"cannot write '{target}': {error}") from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file or directory to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def quantize_model(source: Path, target: Path, kind: StoredKind) -> None:
    """Write the model of `source` with matrices of a kind to the new directory `target`.

    Raises:
        ServeError: a directory cannot be read or written.
    """
    config = read_config(source)
    if config.stored is not StoredKind.FLOAT:
        raise ModelFileError(f"cannot quantize '{source}': it is {config.stored} already; use the original model")
    values = config_values(source)
    values["hpcserve"] = {**values.get("hpcserve", {}), "weights": str(kind)}
    turned = config.family is ModelFamily.GPT2
    with WeightFiles(source) as files, new_model(target) as writer:
        for name in files.tensors:
            for part, tensor in quantized(name, files.read(name), kind, turned).items():
                writer.add(part, tensor)
        writer.finish(source, values)


def quantized(name: str, tensor: Tensor, kind: StoredKind, turned: bool) -> dict[str, Tensor]:
    """Return the tensors that take the place of one."""
    is_matrix = tensor.ndim == 2 and name.endswith(".weight") and not name.endswith(PLAIN_MATRICES)
    is_embedding = name.endswith(EMBEDDINGS)
    is_turned = turned and is_matrix and not is_embedding and not name.startswith("lm_head")
    matrix = tensor.t().contiguous() if is_turned else tensor
    is_eight = kind is StoredKind.INT8 or is_embedding
    if not is_matrix or (not is_eight and matrix.shape[1] % GROUP_COLUMNS):
        return {name: tensor.bfloat16() if tensor.ndim == 2 and tensor.dtype is torch.float32 else tensor}
    if is_eight:
        eight = quantized_int8(matrix)
        return {f"{name}.int8": eight.values, f"{name}.scale": eight.scale}
    four = quantized_int4(matrix)
    return {f"{name}.int4": four.values, f"{name}.scales": four.scales, f"{name}.zeros": four.zeros}


def config_values(directory: Path) -> dict[str, Any]:
    """Return config.json as it is; `read_config` has checked it."""
    values: dict[str, Any] = json.loads((directory / CONFIG_NAME).read_bytes())
    return values


def model_size(directory: Path) -> ModelSize:
    """Return the bytes of a model's weights.

    Raises:
        ModelFileError: it cannot be read.
    """
    stored = plain = 0
    with WeightFiles(directory) as files:
        for name, tensor in files.tensors.items():
            count = 1
            for length in tensor.shape:
                count *= length
            stored += count * tensor.dtype.itemsize
            weights = 2 * count if name.endswith(".int4") else count
            plain += 0 if name.endswith((".scale", ".scales", ".zeros")) else 2 * weights
    return ModelSize(stored_bytes=stored, bf16_bytes=plain)
