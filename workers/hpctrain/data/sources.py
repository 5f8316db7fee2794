"""Samples by their global index: what `run.steps(model, optimizer, data=SOURCE)` takes.

A source is anything with `source[low:high]`, which gives the samples of these global indexes as arrays or tensors (one, or a
tuple, list or dict of them), the first dimension being the sample's.  These here give NumPy arrays; `batch.samples` has them as
tensors on the rank's device.  Shapes: B samples, T positions.
Rules: what a source gives depends on the indexes alone; it may be asked by another thread, so it draws no number from the
generators of a step (draw from one that is seeded with the index).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from hpctrain.data.order import Sampler, order_of
from hpctrain.errors import TrainError


class Source(Protocol):
    """Samples by global index."""

    def __getitem__(self, indexes: slice) -> Any:
        """The samples [low, high)."""


class Tokens(Protocol):
    """A long row of tokens: an array, or a split of a data set."""

    size: int

    def __getitem__(self, places: slice) -> np.ndarray:
        """The tokens [low, high)."""


class Windows:
    """Pieces of a row of tokens, in another order each epoch: what a model sees, and the same one token on, both (B, T) int64."""

    def __init__(self, tokens: Tokens | np.ndarray, seed: int, length: int) -> None:
        self._tokens = tokens
        self.sampler = Sampler(seed=seed, tokens=tokens.size, length=length)

    def __len__(self) -> int:
        return self.sampler.per_epoch

    def __getitem__(self, indexes: slice) -> tuple[np.ndarray, np.ndarray]:
        return windows(self._tokens, self.sampler.starts(indexes.start, indexes.stop), self.sampler.length)


class Rows:
    """Rows of arrays of the same length, in another order each epoch: a dict of arrays by name."""

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
    """This will cut inputs and targets, both (B, T) int64, out of the tokens."""
    rows_BT = np.empty((len(starts), length + 1), dtype=np.int64)
    for row_T, start in zip(rows_BT, starts.tolist(), strict=True):
        row_T[:] = tokens[start : start + length + 1]
    return rows_BT[:, :-1], rows_BT[:, 1:]
