"""Numbers and names that people and programs write.

Numbers are read within bounds, and nowhere else.

`make lint` refuses a bare ``int(text)`` elsewhere: Python reads thousands of digits, slowly, and no table holds them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from math import isfinite

from hpcnode.wire import gate
from hpcnode.wire.gate import MAX_DIGITS
from hpcsched.errors import RequestError

__all__ = ["MAX_DIGITS", "number", "whole_number"]


def whole_number(text: str, what: str = "") -> int:
    """Return the whole number that `text` spells, at most 18 digits.

    `what` names it in the error. Raises RequestError.
    """
    try:
        return gate.whole_number(text)
    except gate.GateError as error:
        raise RequestError(f"cannot read {what or 'a number'}: {error}") from None


def number(text: str, what: str = "") -> float:
    """Return the number that `text` spells, fractions too; neither NaN nor infinite.

    Raises RequestError.
    """
    try:
        found = float(text) if len(text) <= gate.MAX_NUMBER_CHARS else float("nan")
    except ValueError:
        found = float("nan")
    if not isfinite(found):
        raise RequestError(f"cannot read {what or 'a number'}: {text[:40]!r} is not a number")
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean that?)`` if something known is much like `name`, else ""."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
