"""Checked input: JSON and whole numbers from outside, within bounds.

All text from outside passes through here: bodies and queries of the controller's API, frames of step commands, agents and nodes,
configuration. Rejected are text that is not UTF-8, lone surrogates and NUL in texts and names, duplicate names, NaN and infinite
numbers, whole numbers of more than MAX_DIGITS digits, and nesting deeper than MAX_DEPTH levels. Types and ranges are checked by
the caller, who knows the meaning.

Runs on Python 3.9 with the standard library only. Source: RFC 8259, RFC 7493 (I-JSON: unique names, no lone surrogates).
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, Iterable, Iterator, List, Tuple

MAX_DIGITS = 18  # fits into 64 bits, and into SQLite's integers
MAX_DEPTH = 32
MAX_NUMBER_CHARS = 40  # of a fraction; repr writes 24 at most
SHOWN_CHARS = 60

# An escape that may be NUL or half of a surrogate pair. Only texts with one are checked value by value.
_SUSPICIOUS = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_BAD_CHARACTER = re.compile("[\0\ud800-\udfff]")
_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
_CONTAINERS = frozenset((dict, list))
_WHOLE_NUMBER = re.compile("[+-]?[0-9]{1,%d}" % MAX_DIGITS)


class GateError(ValueError):
    """The input is rejected; the text completes "cannot read ...: "."""


def read_json(data: bytes) -> Any:
    """Return the value of the JSON text `data`. Raises GateError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GateError("it is not UTF-8 text (byte %d)" % error.start) from None
    try:
        value = (_CAREFUL_DECODER if _has_long_number(data) else _DECODER).decode(text)
    except RecursionError:
        raise GateError("it is nested too deep") from None
    except GateError:
        raise
    except ValueError as error:
        raise GateError("it is not JSON: %s" % error) from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if _SUSPICIOUS.search(data):
        check_texts(value)
    return value


def check_value(value: Any) -> None:
    """Raise GateError if `value` (dictionaries, lists, plain values) is not acceptable.

    For values that another parser has read, such as TOML.
    """
    _check_depth(value)
    check_texts(value)
    for where, item in _items(value):
        if type(item) is int and not -(10**MAX_DIGITS) < item < 10**MAX_DIGITS:
            raise GateError("%sit is a number of more than %d digits" % (where, MAX_DIGITS))


def check_texts(value: Any) -> None:
    """Raise GateError if a text or a name in `value` has a NUL or a lone surrogate.

    The error has its place.
    """
    for where, item in _items(value):
        if type(item) is str and _BAD_CHARACTER.search(item):
            raise GateError(where + why_not_text(item))


def why_not_text(text: str) -> str:
    """Return why `text` is rejected, "" if it is not."""
    found = _BAD_CHARACTER.search(text)
    if found is None:
        return ""
    if found.group() == "\0":
        return "it has a NUL (character %d)" % (found.start() + 1)
    return "it is not UTF-8 text (character %d)" % (found.start() + 1)


def whole_number(text: str) -> int:
    """Return the whole number in `text`, at most MAX_DIGITS ASCII digits. Raises GateError."""
    if _WHOLE_NUMBER.fullmatch(text) is None:
        short = repr(text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "...")
        if text.lstrip("+-").isdigit():
            raise GateError("%s has more than %d digits" % (short, MAX_DIGITS))
        raise GateError("%s is not a whole number" % short)
    return int(text)


def replaced(text: str) -> str:
    """Return `text` with rejected characters replaced, for messages with file names."""
    return _BAD_CHARACTER.sub("\ufffd", text)


def _object(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise GateError("a field is there twice")
    return found


def _no_constant(word: str) -> Any:
    raise GateError("%s is not a number" % word)


def _has_long_number(data: bytes) -> bool:
    """Return whether `data` may have a number of more than MAX_DIGITS digits.

    Digits in texts count, too.
    """
    return _TOO_MANY_DIGITS in data.translate(_DIGITS_ALIKE)


def _json_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS + digits.startswith("-"):
        raise GateError("a number has more than %d digits" % MAX_DIGITS)
    return int(digits)


def _json_float(digits: str) -> float:
    number = float(digits) if len(digits) <= MAX_NUMBER_CHARS else None
    if number is None or number - number != 0.0:
        raise GateError("the number %.20s... is too large, or too long" % digits)
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_json_float)
_CAREFUL_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_json_float, parse_int=_json_int
)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH - 1):
        level = [item for one in level for item in filter(None, _contents(one)) if type(item) in _CONTAINERS]
        if not level:
            return
    # On the last allowed level empty containers count, too.
    if any(type(item) in _CONTAINERS for one in level for item in _contents(one)):
        raise GateError("it is nested too deep: the most is %d levels" % MAX_DEPTH)


def _contents(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def _items(value: Any, where: str = "") -> Iterator[Tuple[str, Any]]:
    """Yield each value and name in `value` (not nested deep) with its place, for an error."""
    if type(value) is dict:
        for name, item in value.items():
            yield "%sa name: " % where, name
            yield from _items(item, "%s%s: " % (where, replaced(str(name))[:SHOWN_CHARS]))
    elif type(value) is list:
        for number, item in enumerate(value):
            yield from _items(item, "%snumber %d: " % (where, number + 1))
    else:
        yield where, value
