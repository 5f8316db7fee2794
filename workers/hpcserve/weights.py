"""The weights of a model, read from safetensors files by slices.

A rank reads its rows or columns of a matrix alone, with pread; nothing is mapped.  Does not know families or kernels.

Quantized files are safetensors, too, and config.json says so: `"hpcserve": {"weights": "int8"}` or `"int4"`.  A matrix NAME
(with `.weight`) of `out` rows and `in` columns is replaced; vectors, tables of positions and routers stay floats.  An embedding
is int8 in both, because a step reads few of its rows.  A GPT-2 matrix, which is stored as columns and rows, is turned round
first.
  int8:  NAME.int8    [out, in]     int8      value = int8 * scale, by row
         NAME.scale   [out]         float32
  int4:  NAME.int4    [out, in / 2]  uint8     two numbers 0 to 15: the even column in the low half
         NAME.scales  [out, in / 32] float16   value = (number - 8) * scale + zero, by groups of 32 columns
         NAME.zeros   [out, in / 32] float16
`quantized_int8` and `quantized_int4` return these tensors.

A model may have model.hashes.json, which `write_hashes` writes. It has hashes of all tensors, by runs of
rows and by runs of columns, so that a rank verifies the rows or columns that it reads, and reads nothing else. A run that a
part cuts is not verified.

Rules: headers are hostile: lengths, offsets and types are checked before anything is read.  Files stay open, and a file that
changes while it is read is an error.  Weights that are not finite are refused with the tensor's name.  Files of pickle are
refused; so are links that leave the directory, unless they are Hugging Face's links to blobs.
Sources: the format's description (huggingface/safetensors).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcserve.config import CONFIG_NAME, json_of
from hpcserve.errors import ModelFileError
from hpcserve.split import Span

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HASHES_NAME = "model.hashes.json"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json")
HEADER_LIMIT_BYTES = 100_000_000  # the format's own
INDEX_LIMIT_BYTES = 100_000_000
MOST_FILES = 4096
MOST_AXES = 8
STRIPE_BYTES = 8 << 20
SHORTEST_RUN_BYTES = 2048  # of a row: shorter ones are cut out of whole rows
SAMPLES_OF_A_FILE = 64
SAMPLE_BYTES = 4096
GROUP_COLUMNS = 32  # of int4
HASHED_RUN = 32  # rows or columns; the planner cuts at multiples of it
HASH_BYTES = 16
LARGEST_INT8 = 127
QUANTIZED_ROWS = 256  # at a time: bounds the memory of temporary numbers
LENGTH = struct.Struct("<Q")
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor is: its file by number, and the offset of its first byte there."""

    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A matrix as int8 with a scale for each row."""

    values: Tensor
    scale: Tensor

    def floats(self) -> Tensor:
        """Return the matrix as float32."""
        return self.values.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A matrix as pairs of 4-bit numbers, with scales and zeros for groups of columns."""

    values: Tensor
    scales: Tensor
    zeros: Tensor

    def floats(self) -> Tensor:
        """Return the matrix as float32."""
        numbers = torch.stack((self.values & 15, self.values >> 4), -1).flatten(1).float() - 8
        groups = numbers.view(len(numbers), -1, GROUP_COLUMNS)
        return (groups * self.scales.float()[..., None] + self.zeros.float()[..., None]).flatten(1)


def quantized_int8(weight: Tensor) -> Int8Weight:
    """Return a matrix [out, in] as int8; a row of zeros has a scale of 1."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for first in range(0, len(weight), QUANTIZED_ROWS):
        part = slice(first, first + QUANTIZED_ROWS)
        rows = weight[part].float()
        largest = rows.abs().amax(1) / LARGEST_INT8
        scale[part] = torch.where(largest > 0, largest, 1.0)
        values[part] = torch.round(rows / scale[part, None]).to(torch.int8)
    return Int8Weight(values=values, scale=scale)


def quantized_int4(weight: Tensor) -> Int4Weight:
    """Return a matrix [out, in] as int4; `in` is a multiple of 32."""
    count, groups = len(weight), weight.shape[1] // GROUP_COLUMNS
    values = torch.empty((count, weight.shape[1] // 2), dtype=torch.uint8)
    scales, zeros = torch.empty((count, groups), dtype=torch.half), torch.empty((count, groups), dtype=torch.half)
    for first in range(0, count, QUANTIZED_ROWS):
        part = slice(first, first + QUANTIZED_ROWS)
        rows = weight[part].float().unflatten(1, (groups, GROUP_COLUMNS))
        low, high = rows.amin(2), rows.amax(2)
        steps = ((high - low) / 15).half()
        scales[part] = torch.where(steps > 0, steps, 1.0)
        zeros[part] = (low + 8 * scales[part].float()).half()
        numbers = torch.round((rows - zeros[part, :, None].float()) / scales[part, :, None].float()) + 8
        numbers = numbers.clamp_(0, 15).to(torch.uint8).flatten(1)
        values[part] = numbers[:, ::2] | (numbers[:, 1::2] << 4)
    return Int4Weight(values=values, scales=scales, zeros=zeros)


class TensorHashes:
    """The hashes of a model's tensors, as its file has them."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ModelFileError: it cannot be read, or has another form.
        """
        self.path = path
        table = json_of(path, INDEX_LIMIT_BYTES)
        try:
            self._axes = {name: (axes["rows"], axes["columns"]) for name, axes in table.items()}
        except (KeyError, TypeError, AttributeError):
            raise ModelFileError(f"cannot read {str(path)!r}: it has no hashes of tensors") from None

    def is_right(self, name: str, part: Tensor, axis: int, start: int, length: int) -> bool:
        """Return whether all whole runs of a part are as they were.

        The part starts at `start` of `length` on an axis.

        Raises:
            ModelFileError: the file has no such hashes.
        """
        run, stop = _run_of(name), start + part.shape[axis]
        for number in range(-(-start // run), -(-stop // run)):
            last = min((number + 1) * run, length)
            if last > stop:
                break
            try:
                known = self._axes[name][axis][number]
            except (KeyError, IndexError, TypeError):
                raise ModelFileError(f"cannot read {str(self.path)!r}: it has no hash of all of {name!r}") from None
            if _hash(part.narrow(axis, number * run - start, last - number * run)) != known:
                return False
        return True


def _run_of(name: str) -> int:
    """Return the rows or columns of a tensor that have a hash together."""
    return {"int4": HASHED_RUN // 2, "scales": 1, "zeros": 1}.get(name.rpartition(".")[2], HASHED_RUN)


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes_of(tensor.contiguous())).hexdigest()[: 2 * HASH_BYTES]


def write_hashes(directory: Path) -> int:
    """Write the hashes of a model's tensors beside them; return the bytes that were read.

    Raises:
        ModelFileError: a file is damaged, or the hashes cannot be written.
    """
    path = directory / HASHES_NAME
    with WeightFiles(directory, verified=False) as files:
        table = {}
        for name in files.tensors:
            tensor = files.read(name)
            axes = [[_hash(run) for run in tensor.split(_run_of(name), axis)] for axis in range(min(2, tensor.dim()))]
            table[name] = dict(zip(("rows", "columns"), [*axes, [], []], strict=False))
        read = files.bytes_read
    new = path.with_name(f".{HASHES_NAME}.{os.getpid()}")
    try:
        new.write_text(json.dumps(table))
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ModelFileError(f"cannot write {str(path)!r}: {error.strerror}") from None
    return read


class WeightFiles:
    """The open weight files of a model; `bytes_read` counts what was read of tensors."""

    def __init__(self, directory: Path, *, verified: bool = True) -> None:
        """Open all files and check their headers.

        `verified`: what is read must have its hash, if the model has hashes.

        Raises:
            ModelFileError: a file is missing, damaged, truncated or not supported.
        """
        self.directory = directory
        self.bytes_read = 0
        hashes = directory / HASHES_NAME
        self._hashes = TensorHashes(hashes) if verified and hashes.exists() else None
        self.tensors: dict[str, StoredTensor] = {}
        self._files: list[_File] = []
        try:
            for name, wanted in _shards(directory).items():
                self._open(name, wanted)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, wanted: frozenset[str] | None) -> None:
        number = len(self._files)
        file = _File(self.directory, name)
        self._files.append(file)
        found = file.tensors(number)
        missing = sorted((wanted or frozenset()) - found.keys())
        if missing:
            raise ModelFileError(
                f"cannot read {file.path!r}: {INDEX_NAME} says that it has {missing[0]!r}; it does not"
            )
        twice = sorted(found.keys() & self.tensors.keys())
        if twice:
            raise ModelFileError(f"cannot read {file.path!r}: {twice[0]!r} is in another file, too")
        self.tensors.update(found)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_matrix(self, name: str) -> bool:
        """Return whether the model has a matrix of this name, in any form."""
        return not self.tensors.keys().isdisjoint((name, f"{name}.int8", f"{name}.int4"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            ModelFileError: the model has no such tensor.
        """
        return self._stored(name).shape

    def _stored(self, name: str) -> StoredTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"cannot read {str(self.directory)!r}: tensor {name!r} is missing") from None

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """Return a tensor, or rows of it, or columns of a matrix, in the type of the file.

        Raises:
            ModelFileError: it is missing, is outside, is not finite, or its file has changed.
        """
        stored = self._stored(name)
        file = self._files[stored.file]
        shape = stored.shape
        for span, axis in ((rows, 0), (columns, 1)):
            if span is not None and (axis >= len(shape) or not 0 <= span.start <= span.stop <= shape[axis]):
                raise ModelFileError(f"cannot read {span} of axis {axis} of {name!r}: its shape is {list(shape)}")
        if columns is None:
            tensor, count = file.read_rows(stored, rows)
        else:
            tensor, count = file.read_columns(stored, Span(0, shape[0]) if rows is None else rows, columns)
        self.bytes_read += count
        file.check_unchanged()
        if tensor.is_floating_point() and not _finite(tensor):
            raise ModelFileError(
                f"cannot serve the model: tensor {name!r} in {file.path!r} has NaN or infinite numbers"
            )
        if self._hashes is not None:
            self._verify(name, tensor, rows, columns)
        return tensor

    def _verify(self, name: str, part: Tensor, rows: Span | None, columns: Span | None) -> None:
        """Check a part of a tensor by its hashes; one that is cut on both axes has none."""
        stored = self._stored(name)
        if not stored.shape or self._hashes is None or part.numel() == 0:
            return
        axis, span = (0, rows) if columns is None else (1, columns)
        if axis == 1 and len(part) < stored.shape[0]:
            return
        if not self._hashes.is_right(name, part, axis, 0 if span is None else span.start, stored.shape[axis]):
            raise ModelFileError(
                f"cannot serve the model: tensor {name!r} in {self._files[stored.file].path!r} is not the one that "
                f"{HASHES_NAME} describes: the file is damaged or was changed; copy it again, or, "
                f"if the change is wanted, run 'hserve hash {self.directory}'"
            )

    def matrix(
        self, name: str, rows: Span | None = None, columns: Span | None = None
    ) -> Tensor | Int8Weight | Int4Weight:
        """Return a matrix, or a part of it, as it is stored: floats, int8 or int4.

        Columns of an int4 matrix that cut a group are returned as float32.
        """
        if f"{name}.int8" in self.tensors:
            values, scale = self.read(f"{name}.int8", rows, columns), self.read(f"{name}.scale", rows).float()
            if scale.shape != values.shape[:1]:
                raise ModelFileError(
                    f"cannot serve the model: {name!r} has scales of shape {list(scale.shape)} for {len(values)} rows"
                )
            return Int8Weight(values=values, scale=scale)
        if f"{name}.int4" in self.tensors:
            return self._int4(name, rows, columns)
        return self.read(name, rows, columns)

    def _int4(self, name: str, rows: Span | None, columns: Span | None) -> Tensor | Int4Weight:
        wanted = Span(0, 2 * self.shape(f"{name}.int4")[1]) if columns is None else columns
        groups = Span(wanted.start // GROUP_COLUMNS, -(-wanted.stop // GROUP_COLUMNS))
        whole = Int4Weight(
            values=self.read(f"{name}.int4", rows, Span(groups.start * 16, groups.stop * 16)),
            scales=self.read(f"{name}.scales", rows, groups),
            zeros=self.read(f"{name}.zeros", rows, groups),
        )
        start = wanted.start - groups.start * GROUP_COLUMNS
        if start == 0 and len(wanted) == len(groups) * GROUP_COLUMNS:
            return whole
        return whole.floats()[:, start : start + len(wanted)].contiguous()

    def version(self) -> str:
        """Return a hash of configuration, tokenizer, headers, and samples of the weights.

        Two models without hashes that differ in a few single weights alone may have the same version.
        """
        digest = hashlib.sha256()
        for name in (CONFIG_NAME, INDEX_NAME, HASHES_NAME, *TOKENIZER_NAMES):
            path = self.directory / name
            content = path.read_bytes() if path.is_file() else b""
            digest.update(LENGTH.pack(len(content)))
            digest.update(content)
        for file in self._files:
            for piece in file.samples():
                digest.update(piece)
        return digest.hexdigest()[:16]


def _finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite; a finite sum needs no second look."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def _shards(directory: Path) -> Mapping[str, frozenset[str] | None]:
    """Return the names of weight files, each with the tensors that the index expects there.

    Raises:
        ModelFileError: there are none, or the index is damaged.
    """
    if not directory.is_dir():
        raise ModelFileError(f"cannot read {str(directory)!r}: it is not a directory")
    index = directory / INDEX_NAME
    if index.is_file():
        return _index(index)
    if (directory / SINGLE_NAME).exists():
        return {SINGLE_NAME: None}
    if next(directory.glob("*.bin"), None) or next(directory.glob("*.pt*"), None):
        raise ModelFileError(
            f"cannot read {str(directory)!r}: its weights are pickle files, which can run code; "
            "convert them to safetensors: model.save_pretrained(DIRECTORY) in transformers"
        )
    raise ModelFileError(f"cannot read {str(directory)!r}: it has neither {SINGLE_NAME} nor {INDEX_NAME}")


def _index(path: Path) -> Mapping[str, frozenset[str]]:
    table = json_of(path, INDEX_LIMIT_BYTES)
    try:
        pairs = sorted((str(file), str(name)) for name, file in table["weight_map"].items())
    except (KeyError, TypeError, AttributeError):
        raise ModelFileError(f"cannot read {str(path)!r}: it has no weight_map") from None
    files = {
        file: frozenset(name for _, name in group) for file, group in itertools.groupby(pairs, key=lambda pair: pair[0])
    }
    if not files or len(files) > MOST_FILES:
        raise ModelFileError(f"cannot read {str(path)!r}: it names {len(files)} files; 1 to {MOST_FILES} are possible")
    return files


class _File:
    """An open safetensors file."""

    def __init__(self, directory: Path, name: str) -> None:
        path = directory / name
        self.path = str(path)
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"cannot read {self.path!r}: {name!r} is not the name of a safetensors file")
        if not _stays_inside(path):
            raise ModelFileError(f"cannot read {self.path!r}: it is a link out of the model's directory")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
        except OSError as error:
            raise ModelFileError(f"cannot read {self.path!r}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise ModelFileError(f"cannot read {self.path!r}: it is not a regular file")
        self._state = self._now()
        self._header = bytearray()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _now(self) -> tuple[int, ...]:
        """Return what shows whether the file at the path is still this one, unchanged."""
        try:
            opened, there = os.fstat(self._fd), os.stat(self.path)
        except OSError as error:
            raise ModelFileError(f"cannot read {self.path!r}: {error.strerror}") from None
        return opened.st_size, opened.st_mtime_ns, opened.st_ino, opened.st_dev, there.st_ino, there.st_dev

    def check_unchanged(self) -> None:
        """Check that the file is the one that was opened.

        Raises:
            ModelFileError: it was changed or replaced.
        """
        if self._now() != self._state:
            raise ModelFileError(f"cannot read {self.path!r}: the file was changed or replaced after it was opened")

    def tensors(self, number: int) -> dict[str, StoredTensor]:
        """Return the tensors that the header describes.

        Raises:
            ModelFileError: the header is damaged, or the file is shorter than it says.
        """
        size = self._state[0]
        length = LENGTH.unpack(self._bytes(0, LENGTH.size))[0] if size >= LENGTH.size else 0
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - LENGTH.size):
            raise ModelFileError(
                f"cannot read {self.path!r}: its header has {length} bytes and the file {size}; "
                "it is truncated or not a safetensors file"
            )
        content = self._bytes(LENGTH.size, length)
        try:
            table = json.loads(content)
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise ModelFileError(f"cannot read {self.path!r}: its header is not a JSON object")
        self._header = content
        first = LENGTH.size + length
        table.pop("__metadata__", None)
        spans = {name: _checked(self.path, name, entry, size - first) for name, entry in table.items()}
        for (_, before), (name, after) in itertools.pairwise(sorted(spans.items(), key=lambda item: item[1][:2])):
            if after[0] < before[1]:
                raise ModelFileError(f"cannot read {self.path!r}: tensor {name!r} overlaps another one")
        return {
            name: StoredTensor(file=number, offset=first + start, shape=shape, dtype=dtype)
            for name, (start, _, shape, dtype) in spans.items()
        }

    def _bytes(self, offset: int, count: int) -> bytearray:
        """Return so many bytes from an offset on.

        Raises:
            ModelFileError: the file ends before.
        """
        content = bytearray(count)
        self._fill(memoryview(content), offset)
        return content

    def _fill(self, target: memoryview, offset: int) -> None:
        """Read as many bytes as the target has.

        Raises:
            ModelFileError: the file ends before.
        """
        while target:
            try:
                count = os.preadv(self._fd, [target], offset)
            except OSError as error:
                raise ModelFileError(f"cannot read {self.path!r}: {error.strerror}") from None
            if not count:
                raise ModelFileError(f"cannot read {self.path!r}: it ends at {offset}; it is truncated")
            target, offset = target[count:], offset + count

    def read_rows(self, stored: StoredTensor, rows: Span | None) -> tuple[Tensor, int]:
        """Return consecutive rows, or all, and the bytes that were read."""
        shape = stored.shape if rows is None else (len(rows), *stored.shape[1:])
        tensor = torch.empty(shape, dtype=stored.dtype)
        target = _bytes_of(tensor)
        before = 0 if rows is None or not len(rows) else rows.start * len(target) // len(rows)
        self._fill(target, stored.offset + before)
        return tensor, len(target)

    def read_columns(self, stored: StoredTensor, rows: Span, columns: Span) -> tuple[Tensor, int]:
        """Return columns of some rows, and the bytes that were read."""
        item = stored.dtype.itemsize
        stride, width = stored.shape[1] * item, len(columns) * item
        tensor = torch.empty((len(rows), len(columns)), dtype=stored.dtype)
        first = stored.offset + rows.start * stride
        if stride == width or width == 0:
            target = _bytes_of(tensor)
            self._fill(target, first)
            return tensor, len(target)
        if width >= SHORTEST_RUN_BYTES:
            target = _bytes_of(tensor)
            for row in range(len(rows)):
                at = row * width
                self._fill(target[at : at + width], first + row * stride + columns.start * item)
            return tensor, len(target)
        step = max(1, STRIPE_BYTES // stride)
        stripe = torch.empty((min(step, len(rows)), stored.shape[1]), dtype=stored.dtype)
        for row in range(0, len(rows), step):
            part = stripe[: min(step, len(rows) - row)]
            self._fill(_bytes_of(part), first + row * stride)
            tensor[row : row + len(part)] = part[:, columns.start : columns.stop]
        return tensor, len(rows) * stride

    def samples(self) -> Iterator[bytes | bytearray]:
        """Yield the header and pieces from all over the file."""
        size = self._state[0]
        yield LENGTH.pack(size)
        yield self._header
        for index in range(SAMPLES_OF_A_FILE):
            offset = max(0, size - SAMPLE_BYTES) * index // (SAMPLES_OF_A_FILE - 1)
            yield self._bytes(offset, min(size, SAMPLE_BYTES))


def _stays_inside(path: Path) -> bool:
    """Return whether a file is in its directory.

    Links of a Hugging Face cache to a blob of the same model count as inside.
    """
    target, directory = path.resolve(), path.parent.resolve()
    if target.parent == directory:
        return True
    return directory.parent.name == "snapshots" and target.parent == directory.parent.parent / "blobs"


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(bytearray())


def _checked(path: str, name: str, entry: Any, size: int) -> tuple[int, int, tuple[int, ...], torch.dtype]:
    """Return first byte, end, shape and type of a tensor in the data of `size` bytes.

    Raises:
        ModelFileError: the header's entry is impossible.
    """
    trouble = f"cannot read {path!r}: tensor {name!r}"
    try:
        start, stop = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), TYPES.get(entry["dtype"])
    except (KeyError, TypeError, ValueError):
        raise ModelFileError(f"{trouble} has no type, shape or offsets") from None
    if dtype is None:
        raise ModelFileError(f"{trouble} has type {entry['dtype']!r}; supported are {', '.join(TYPES)}")
    if len(shape) > MOST_AXES or not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ModelFileError(f"{trouble} has negative or broken offsets or shape")
    if stop - start != dtype.itemsize * math.prod(shape):
        raise ModelFileError(f"{trouble} has {stop - start} bytes, which is not the size of {list(shape)}")
    if stop > size:
        raise ModelFileError(f"{trouble} ends at {stop}, after the end of the file at {size}: the file is truncated")
    return start, stop, shape, dtype
