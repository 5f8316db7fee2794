"""The order of samples, and each rank's share of a batch.

A sample is addressed by (seed, epoch, global index): a keyed permutation maps it to a window or row.  So any number of
ranks, before or after a restart, sees each sample of an epoch exactly once.  Does not know the samples or ranks' speeds.
Rules: the permutation is our own, so nothing depends on the version of a random generator.
Sources: Black and Rogaway, "Ciphers with arbitrary finite domains" (cycle walking on a Feistel network), 2002;
Steele et al., "Fast splittable pseudorandom number generators" (the mixing function), 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.errors import TrainError

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
    for turn in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right, key + turn + 1) & mask)
    return (left << shift) | right
