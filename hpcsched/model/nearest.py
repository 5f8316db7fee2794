"""What a mistyped name may have meant. Names that people write are short, and lists of them too."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean that?)`` if something known is much like `name`, else ""."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
