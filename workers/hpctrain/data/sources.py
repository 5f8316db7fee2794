"""Sources of samples by global index, and their order, for `run.steps(..., data=SOURCE)`.

A source is any object with `source[low:high]`, which returns the samples of these global indexes as arrays or tensors (one, or
a tuple, list or dict of them), with the sample as first dimension.  The sources here return NumPy arrays; `batch.samples` has
them as tensors on the rank's device.  Shapes: B samples, T positions.
Rules: the samples depend on the indexes only.  Another thread may call a source, so it must not use the global random
generators (use one that is seeded with the index). A sample is addressed by (seed, epoch, global index): a keyed permutation
maps it to a window or row.  So any number of ranks, before or after a restart, sees each sample of an epoch exactly once.  The
permutation is our own, so nothing depends on the version of a random generator.
Sources: Black and Rogaway, "Ciphers with arbitrary finite domains" (cycle walking on a Feistel network), 2002; Steele et al.,
"Fast splittable pseudorandom number generators" (the mixing function), 2014.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hpctrain.errors import TrainError


class Source(Protocol):
    """Samples by global index."""

    def __getitem__(self, indexes: slice) -> Any:
        """Return the samples [low, high)."""


class Tokens(Protocol):
    """A long row of tokens: an array, or a split of a data set."""

    @property
    def size(self) -> int:
        """The number of tokens."""

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the tokens [low, high)."""


class Windows:
    """Windows of a row of tokens, in a new order each epoch.

    Inputs and targets, both (B, T) int64.
    """

    def __init__(self, tokens: Tokens | np.ndarray, seed: int, length: int) -> None:
        self._tokens = tokens
        self.sampler = Sampler(seed=seed, tokens=tokens.size, length=length)

    def __len__(self) -> int:
        return self.sampler.per_epoch

    def __getitem__(self, indexes: slice) -> tuple[np.ndarray, np.ndarray]:
        return windows(self._tokens, self.sampler.starts(indexes.start, indexes.stop), self.sampler.length)


class Rows:
    """Rows of arrays of the same length, in a new order each epoch: a dict of arrays by name."""

    def __init__(self, arrays: Mapping[str, Any], seed: int) -> None:
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            raise TrainError(f"cannot take rows of {lengths}: the arrays need the same number of rows, at least one")
        self._arrays, self._seed = dict(arrays), seed

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, indexes: slice) -> dict[str, np.ndarray]:
        rows = order_of(indexes.start, indexes.stop, len(self), self._seed)
        return {name: np.asarray(array[rows]) for name, array in self._arrays.items()}


def windows(tokens: Tokens | np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, both (B, T) int64, from the tokens.

    Targets are one token ahead.
    """
    rows_BT = np.empty((len(starts), length + 1), dtype=np.int64)
    for row_T, start in zip(rows_BT, starts.tolist(), strict=True):
        row_T[:] = tokens[start : start + length + 1]
    return rows_BT[:, :-1], rows_BT[:, 1:]


# ----- a text that every machine has: the source of Python's standard library, character by character
# Files are read in a fixed order; printable ASCII characters are tokens.


SKIPPED_DIRECTORIES = frozenset(
    [
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    ]
)
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127)) + "\x7f"
UNKNOWN = len(CHARACTERS) - 1
VOCABULARY = len(CHARACTERS)
VALIDATION_SHARE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens for training and validation, and a hash that ranks compare."""

    train: np.ndarray
    validation: np.ndarray
    files: int
    digest: str


def standard_library(root: Path | None = None, limit_bytes: int = 8 << 20) -> Corpus:
    """Read the standard library's source; about every twentieth file is for validation.

    Files are taken whole, in a fixed shuffled order, up to `limit_bytes`.

    Raises:
        TrainError: `root` has not enough text.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    files = total_bytes = 0
    for key, name in sorted((_name_hash(name), name) for name in _sources(root)):
        text = root.joinpath(name).read_bytes()
        if total_bytes + len(text) > limit_bytes:
            break
        parts[int(key[:8], 16) % VALIDATION_SHARE == 0].append(text)
        files, total_bytes = files + 1, total_bytes + len(text)
    train, validation = (encode(b"\n".join(part)) for part in parts)
    if min(train.size, validation.size) < 1 << 14:
        raise TrainError(f"cannot train on the standard library: {root} holds only {total_bytes} bytes of source")
    digest = hashlib.blake2b(train.tobytes() + validation.tobytes(), digest_size=16).hexdigest()
    return Corpus(train=train, validation=validation, files=files, digest=digest)


def encode(text: bytes) -> np.ndarray:
    """Return the tokens (uint8) of a text.

    A tab becomes a blank, other non-printable bytes one token.
    """
    table = np.full(256, UNKNOWN, dtype=np.uint8)
    for token, character in enumerate(CHARACTERS):
        table[ord(character)] = token
    table[ord("\t")] = CHARACTERS.index(" ")
    return table[np.frombuffer(text, dtype=np.uint8)]


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text of tokens."""
    return "".join(CHARACTERS[token] for token in tokens)


def _sources(root: Path) -> Iterator[str]:
    """Yield the paths of the files below `root`, relative to it."""
    # pathlib would take six times as long
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_DIRECTORIES]
        below = os.path.relpath(folder, root)
        prefix = "" if below == os.curdir else below + os.sep
        yield from (prefix + name for name in files if name.endswith(".py"))


def _name_hash(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


FEISTEL_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Maps global sample indexes to windows of `length + 1` tokens."""

    seed: int
    tokens: int
    length: int

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            raise TrainError(f"cannot train: {self.tokens} tokens are too few for samples of {self.length}")

    @property
    def per_epoch(self) -> int:
        """Samples per epoch; windows overlap in one token and shift in each epoch."""
        return (self.tokens - 1) // self.length - 1

    def starts(self, low: int, high: int) -> np.ndarray:
        """Return the first token of each sample [low, high), (samples,) int64."""
        windows = order_of(low, high, self.per_epoch, self.seed)
        epochs, which = np.unique(np.arange(low, high, dtype=np.int64) // self.per_epoch, return_inverse=True)
        shifts = np.array([_epoch_key(self.seed, int(epoch)) % self.length for epoch in epochs], dtype=np.int64)
        return windows * self.length + shifts[which]


def order_of(low: int, high: int, count: int, seed: int) -> np.ndarray:
    """Map samples [low, high) to numbers below `count`: each once per epoch, shuffled."""
    indexes = np.arange(low, high, dtype=np.int64)
    things = np.empty_like(indexes)
    epochs = indexes // count
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        things[chosen] = permute(indexes[chosen] % count, count, _epoch_key(seed, int(epoch)))
    return things


def _epoch_key(seed: int, epoch: int) -> int:
    return int(mix(np.array([seed], dtype=np.uint64), epoch)[0])


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` samples among ranks by weight.

    The sum is exact, largest remainders first.

    Raises:
        TrainError: a weight is negative, or all are zero.
    """
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise TrainError(f"cannot divide a batch by the weights {list(weights)}: none may be negative, nor all zero")
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def permute(values: np.ndarray, count: int, key: int) -> np.ndarray:
    """Permute values in [0, count) by a keyed Feistel network."""
    half_bits = max(1, (max(1, count - 1).bit_length() + 1) // 2)
    result = _feistel(values.astype(np.uint64), half_bits, key)
    outside = result >= count
    while outside.any():  # walk the cycle back into the range
        result[outside] = _feistel(result[outside], half_bits, key)
        outside = result >= count
    return result.astype(np.int64)


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """Scramble 64-bit values with a key (SplitMix64's finalizer)."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + np.uint64((key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _feistel(values: np.ndarray, half_bits: int, key: int) -> np.ndarray:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for round_number in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right, key + round_number + 1) & mask)
    return (left << shift) | right
