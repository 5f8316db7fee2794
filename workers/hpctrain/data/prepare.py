"""Make data sets of text files and of arrays, in bounded memory.

Does not know the command line.
Rules: whether a document is for validation depends only on its content, so the same files give the same data set.  Files that
cannot be read are rejected with name and place, and leave no output.
Text becomes tokens and text again without loss: byte-level BPE by the package `tokenizers`.  Token 0 ends a document; a
tokenizer is one JSON file, and a data set has its own copy.
Sources: Sennrich et al., "Neural machine translation of rare words with subword units", 2016; Radford et al., "Language models
are unsupervised multitask learners", 2019 (on bytes).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.dataset import DatasetWriter, new_directory
from hpctrain.env import require
from hpctrain.errors import DamagedError, TrainError

PIECE_BYTES = 1 << 20  # longer texts are cut at line ends, into several documents
BATCH_BYTES = 4 << 20  # of text that is tokenized at once
LEARNED_BYTES = 64 << 20  # of text to learn a vocabulary from
TEXT, VALIDATION, TRAIN = "text", "validation", "train"


@dataclass(slots=True)
class _OpenShard:
    """Tokens of a split that do not fill a shard yet."""

    parts: list[np.ndarray] = field(default_factory=list)
    count: int = 0


def prepare_text(
    out: Path,
    paths: Sequence[Path],
    *,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    validation: float,
    shard_bytes: int,
    key: str = TEXT,
) -> dict[str, int]:
    """Make a data set of tokens at `out`, and return the number of tokens of each split.

    Raises:
        TrainError: a file cannot be read as text, or the files have no text.
    """
    files = list(files_of(paths))
    with new_directory(out) as draft:
        if tokenizer is None:
            tokenizer = train_tokenizer(_first(documents(files, key), LEARNED_BYTES), vocabulary)
        writer = DatasetWriter(draft)
        most = max(1, shard_bytes // tokenizer.dtype.itemsize)
        shards = {TRAIN: _OpenShard(), VALIDATION: _OpenShard()}
        for batch in _batches(documents(files, key)):
            for text, tokens in zip(batch, tokenizer.encode_all(batch), strict=True):
                split = VALIDATION if is_validation(text.encode(), validation) else TRAIN
                _add(writer, split, shards[split], np.append(tokens, tokenizer.dtype.type(0)), most)
        for split, rest in shards.items():
            _flush(writer, split, rest)
        sizes = writer.finish("tokens", tokenizer.vocabulary, tokenizer.to_bytes())
        if TRAIN not in sizes:
            raise TrainError(f"cannot prepare {out}: there is no text in {', '.join(map(str, paths))}")
    return sizes


def prepare_arrays(
    out: Path, arrays: Mapping[str, np.ndarray], *, validation: float, shard_bytes: int
) -> dict[str, int]:
    """Make a data set of the rows of arrays at `out`; return the rows of each split.

    Raises:
        TrainError: the arrays differ in their number of rows.
    """
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise TrainError(
            f"cannot prepare {out}: the arrays have {lengths} rows; all need the same number, at least one"
        )
    rows = next(iter(lengths.values()))
    row_bytes = max(1, sum(array.nbytes // rows for array in arrays.values()))
    chosen = np.array([is_validation(row.to_bytes(8, "little"), validation) for row in range(rows)])
    with new_directory(out) as draft:
        writer = DatasetWriter(draft)
        for split, places in ((TRAIN, np.flatnonzero(~chosen)), (VALIDATION, np.flatnonzero(chosen))):
            step = max(1, shard_bytes // row_bytes)
            for low in range(0, len(places), step):
                part = places[low : low + step]
                writer.add(split, {name: array[part] for name, array in arrays.items()})
        return writer.finish("rows")


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, or the array of an .npy file, by name.

    Raises:
        TrainError: it is neither.
    """
    try:
        read = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise TrainError(f"cannot read arrays from {path}: {error}") from error
    return {path.stem: read} if isinstance(read, np.ndarray) else {name: read[name] for name in read.files}


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, those of directories sorted by name.

    Raises:
        TrainError: a file does not exist.
    """
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.exists():
            yield path
        else:
            raise TrainError(f"cannot read {path}: there is no such file")


def documents(files: Iterable[Path], key: str) -> Iterator[str]:
    """Yield texts: lines of .jsonl(.gz) by `key`, other files whole or cut at line ends.

    Raises:
        TrainError: names the file and the place that is not text.
    """
    for path in files:
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
                lines = path.name.removesuffix(".gz").endswith(".jsonl")
                yield from _lines(path, stream, key) if lines else _pieces(path, stream)
        except (OSError, EOFError) as error:
            raise TrainError(f"cannot read {path}: {error}") from error


def is_validation(content: bytes, share: float) -> bool:
    """Return whether a document belongs to the `share` of all that is for validation."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return number < share * 2**64


def _pieces(path: Path, stream: io.BufferedIOBase) -> Iterator[str]:
    at, left = 0, b""
    while True:
        read = stream.read(PIECE_BYTES)
        content = left + read
        end = len(content) if not read else content.rfind(b"\n") + 1
        if end:
            yield _text(path, content[:end], at)
            at += end
        left = content[end:]
        if not read:
            return


def _lines(path: Path, stream: io.BufferedIOBase, key: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            yield str(json.loads(line)[key])
        except (ValueError, KeyError, TypeError) as error:
            raise TrainError(
                f"cannot read line {number} of {path}: it is not a JSON object with {key!r} ({error!r})"
            ) from error


def _text(path: Path, content: bytes, at: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TrainError(f"cannot read {path}: byte {at + error.start} is not UTF-8 ({error.reason})") from error


def _first(texts: Iterable[str], limit_bytes: int) -> Iterator[str]:
    for text in texts:
        yield text
        limit_bytes -= len(text)
        if limit_bytes <= 0:
            return


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= BATCH_BYTES or len(batch) >= 1000:
            yield batch
            batch = []
    if batch:
        yield batch


def _add(writer: DatasetWriter, split: str, shard: _OpenShard, tokens: np.ndarray, most: int) -> None:
    for low in itertools.count(0, most):
        part = tokens[low : low + most]
        if not part.size:
            return
        if shard.count + part.size > most:
            _flush(writer, split, shard)
        shard.parts.append(part)
        shard.count += part.size


def _flush(writer: DatasetWriter, split: str, shard: _OpenShard) -> None:
    if shard.count:
        writer.add(split, {"tokens": np.concatenate(shard.parts)})
    shard.parts.clear()
    shard.count = 0


END = "<|end|>"
LEAST_VOCABULARY = 257  # all bytes, and the end of a document


class Tokenizer:
    """Converts text to tokens and back."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.vocabulary: int = inner.get_vocab_size()
        self.dtype = np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, without an end token."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encoded]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens; ends of documents become empty lines."""
        documents: list[list[int]] = [[]]
        for token in tokens:
            if token == 0:
                documents.append([])
            else:
                documents[-1].append(int(token))
        return "\n\n".join(self._inner.decode(document, skip_special_tokens=False) for document in documents)

    def to_bytes(self) -> bytes:
        """Return the content of the file for `tokenizer_from`."""
        return self._inner.to_str().encode()


def tokenizer_from(content: bytes, name: str) -> Tokenizer:
    """Return the tokenizer in a file's content; `name` appears in error messages.

    Raises:
        DamagedError: it is not a tokenizer, not byte-level, or has another end of documents.
    """
    require("tokenizers")
    import tokenizers  # noqa: PLC0415 (an extra of its own: after the check)

    try:
        inner = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises bare exceptions
        raise DamagedError(f"cannot use {name}: it is not a tokenizer ({error})") from error
    if inner.token_to_id(END) != 0:
        raise DamagedError(f"cannot use {name}: its token 0 is not {END}, which ends a document")
    return Tokenizer(inner)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn a vocabulary from texts, which are read once.

    Raises:
        TrainError: the vocabulary is too small for all bytes.
    """
    if vocabulary < LEAST_VOCABULARY:
        raise TrainError(f"cannot make a vocabulary of {vocabulary}: bytes alone need {LEAST_VOCABULARY}")
    require("tokenizers")
    from tokenizers import Tokenizer as Inner  # noqa: PLC0415
    from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)
