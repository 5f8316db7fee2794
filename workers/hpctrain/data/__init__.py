"""Training samples: their sources, and their order.

`order` has the order; `dataset` keeps tokens and arrays in files that are mapped into memory and have checksums, made by
`python -m hpctrain.data` (`prepare`, `tokenizer`); `sources` returns arrays by global index; `torchdata` adapts torch's
Dataset and DataLoader; `prefetch` loads samples ahead; `staging` copies data to the node's own disk.
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
