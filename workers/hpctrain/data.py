"""The text that every machine has, and which sample comes when.

The corpus is the source of Python's own standard library: files in a fixed order, printable ASCII as tokens.  A sample
is addressed by (seed, epoch, global index): a keyed permutation says which window it is, so any number of ranks, before
or after a restart, sees each sample of an epoch exactly once.  Does not know models or ranks' speeds.
Rules: nothing here depends on the version of a random generator; the permutation is our own.
Sources: Black and Rogaway, "Ciphers with arbitrary finite domains" (cycle walking on a Feistel network), 2002;
Steele et al., "Fast splittable pseudorandom number generators" (the mixing function), 2014.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.errors import TrainError

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
FEISTEL_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens for training and for validation, and a hash by which ranks compare what they have."""

    train: np.ndarray
    validation: np.ndarray
    files: int
    digest: str


def standard_library(root: Path | None = None, limit_bytes: int = 8 << 20) -> Corpus:
    """This will read the standard library's source; every twentieth file or so is kept for validation.

    The whole files that come first in a fixed shuffled order are taken, up to `limit_bytes`.

    Raises:
        TrainError: there is not enough text at `root`.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    files = total_bytes = 0
    for key, path in sorted((_name_hash(path, root), path) for path in _sources(root)):
        text = path.read_bytes()
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
    """This will turn text into tokens (uint8): a tab becomes a blank, what is not printable ASCII one token."""
    table = np.full(256, UNKNOWN, dtype=np.uint8)
    for token, character in enumerate(CHARACTERS):
        table[ord(character)] = token
    table[ord("\t")] = CHARACTERS.index(" ")
    return table[np.frombuffer(text, dtype=np.uint8)]


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """This will turn tokens into text."""
    return "".join(CHARACTERS[token] for token in tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Which window of `length + 1` tokens each global sample index means."""

    seed: int
    tokens: int
    length: int

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            raise TrainError(f"cannot train: {self.tokens} tokens are too few for samples of {self.length}")

    @property
    def per_epoch(self) -> int:
        """Samples in one epoch; windows do not overlap but in one token, and shift by up to `length` per epoch."""
        return (self.tokens - 1) // self.length - 1

    def starts(self, low: int, high: int) -> np.ndarray:
        """This will give the first token of each sample with index in [low, high), over epochs' ends."""
        windows = order_of(low, high, self.per_epoch, self.seed)
        epochs, which = np.unique(np.arange(low, high, dtype=np.int64) // self.per_epoch, return_inverse=True)
        shifts = np.array([_epoch_key(self.seed, int(epoch)) % self.length for epoch in epochs], dtype=np.int64)
        return windows * self.length + shifts[which]


def order_of(low: int, high: int, count: int, seed: int) -> np.ndarray:
    """This will say which of `count` things the global samples [low, high) are: all once an epoch, in another order each."""
    indexes = np.arange(low, high, dtype=np.int64)
    things = np.empty_like(indexes)
    epochs = indexes // count
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        things[chosen] = permute(indexes[chosen] % count, count, _epoch_key(seed, int(epoch)))
    return things


def _epoch_key(seed: int, epoch: int) -> int:
    return int(mix(np.array([seed], dtype=np.uint64), epoch)[0])


def windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """This will cut inputs and targets, both (B, T) int64, out of the tokens."""
    rows_BT = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return rows_BT[:, :-1], rows_BT[:, 1:]


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """This will divide `total` samples among ranks by weight; exact in sum, largest remainders first.

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
    """This will map each of `values` in [0, count) to another, one to one, by a keyed Feistel network."""
    half_bits = max(1, (max(1, count - 1).bit_length() + 1) // 2)
    result = _feistel(values.astype(np.uint64), half_bits, key)
    outside = result >= count
    while outside.any():  # walk the cycle until it comes back into the range
        result[outside] = _feistel(result[outside], half_bits, key)
        outside = result >= count
    return result.astype(np.int64)


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """This will scramble 64-bit values with a key (SplitMix64's finalizer)."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + np.uint64((key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _feistel(values: np.ndarray, half_bits: int, key: int) -> np.ndarray:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for turn in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right, key + turn + 1) & mask)
    return (left << shift) | right


def _sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        if not SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts):
            yield path


def _name_hash(path: Path, root: Path) -> str:
    return hashlib.blake2b(path.relative_to(root).as_posix().encode(), digest_size=16).hexdigest()
