"""Where training samples come from, and which of them comes when.

`order` says it; `stdlib` is a text that every machine has; `shards` and `dataset` keep tokens and arrays in files that can be
mapped into memory and prove that they are whole, made by `python -m hpctrain.data` (`prepare`, `tokenizer`); `sources` gives
tensors by global index; `prefetch` has them ready before they are asked for; `staging` brings them to the node's own disk.
"""

from __future__ import annotations

from hpctrain.data.order import Sampler, order_of, permute, shares
from hpctrain.data.sources import (
    CHARACTERS,
    VOCABULARY,
    Corpus,
    Rows,
    Windows,
    decode,
    encode,
    standard_library,
    windows,
)

__all__ = [
    "CHARACTERS",
    "VOCABULARY",
    "Corpus",
    "Rows",
    "Sampler",
    "Windows",
    "decode",
    "encode",
    "order_of",
    "permute",
    "shares",
    "standard_library",
    "windows",
]
