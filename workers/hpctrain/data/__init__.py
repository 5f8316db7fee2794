"""Training samples: their sources, and their order.

`sources` has the order, and returns arrays by global index; `dataset` keeps tokens and arrays in files that are mapped into
memory and have checksums, made by `python -m hpctrain.data` (`prepare`), and copies them to the node's own disk; `torchdata`
adapts torch's Dataset and DataLoader; `prefetch` loads samples ahead.
"""

from __future__ import annotations

from hpctrain.data.sources import (
    CHARACTERS,
    VOCABULARY,
    Corpus,
    Rows,
    Sampler,
    Windows,
    decode,
    encode,
    order_of,
    permute,
    shares,
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
