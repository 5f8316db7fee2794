"""Host lists as Slurm writes them: ``n[01-03,7],gpu1`` to names and back.

Knows nothing of the nodes that exist. Rules: the order of the names is kept, because the order of a job's nodes means
something (`SLURM_TASKS_PER_NODE` follows it): ``expand_hostlist(compress_hostlist(names)) == names``. How many names a
text means is known before the first is made, so that no short text can ask for a billion of them.

Sources: scontrol(1) "show hostnames", "show hostlist"; hostlists in slurm.conf(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from hpcsched.errors import RequestError

MAX_NAMES = 65_536
MAX_TEXT = 256 << 10
MAX_BRACKETS = 8  # in one name

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?\Z")
_PLAIN = re.compile(r"[^\[\],\s\x00-\x1f\x7f]*\Z")
_TRAILING_NUMBER = re.compile(r"[0-9]{1,18}\Z")  # only ever matched against the digits at a name's end


class _Span:
    """The numbers low .. high inclusive, padded with zeros to `width`.

    Plain: commands need no dataclass but this one.
    """

    __slots__ = ("high", "low", "width")

    def __init__(self, *, low: int, high: int, width: int) -> None:
        self.low = low
        self.high = high
        self.width = width

    def __len__(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[str]:
        return (str(number).zfill(self.width) for number in range(self.low, self.high + 1))


def expand_hostlist(text: str) -> list[str]:
    """Return the names of the host list `text`, in its order, with repetitions.

    Commas and white space separate; a name may have several brackets. Raises RequestError if it is not a host list and,
    before any name is made, for one of more than `MAX_NAMES` names.
    """
    if len(text) > MAX_TEXT:
        raise RequestError(f"cannot read host list {_short(text)}: it is longer than {MAX_TEXT} characters")
    patterns = [_parse_pattern(word, text) for word in _split(text)]
    count = sum(prod(sum(map(len, spans)) for spans in pattern[1::2]) for pattern in patterns)
    if count > MAX_NAMES:
        raise RequestError(f"cannot expand host list {_short(text)}: it names {count} hosts, the most is {MAX_NAMES}")
    return [name for pattern in patterns for name in _names(pattern)]


def compress_hostlist(names: Iterable[str]) -> str:
    """Return the short form of `names`: ``["n1", "n2", "n4"]`` is ``n[1-2,4]``."""
    parts: list[str] = []
    prefix = ""
    ranges: list[tuple[str, str]] = []  # (first, last) of the run of names that begin with `prefix`
    for name in names:
        head, digits = _split_number(name)
        if not digits or (ranges and head != prefix):
            parts += _render(prefix, ranges)
            ranges = []
        if not digits:
            parts.append(name)
            continue
        prefix = head
        if ranges and str(int(ranges[-1][1]) + 1).zfill(len(ranges[-1][0])) == digits:  # int: bounded
            ranges[-1] = (ranges[-1][0], digits)
        else:
            ranges.append((digits, digits))
    return ",".join(parts + _render(prefix, ranges))


def _render(prefix: str, ranges: list[tuple[str, str]]) -> list[str]:
    if not ranges:
        return []
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return [prefix + ranges[0][0]]
    inner = ",".join(low if low == high else f"{low}-{high}" for low, high in ranges)
    return [f"{prefix}[{inner}]"]


def _split_number(name: str) -> tuple[str, str]:
    """Return `name` divided before its last digits; no digits if there are none or too many."""
    if not name or _PLAIN.match(name) is None:
        raise RequestError(f"cannot write a host list with the name {_short(name)}: it has characters that no name has")
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return (head, digits) if _TRAILING_NUMBER.match(digits) else (name, "")


def _split(text: str) -> Iterator[str]:
    """Yield the words of `text`: separated by commas and white space that are not in brackets."""
    start, inside = 0, False
    for at, char in enumerate(text):
        if char == "[":
            if inside:
                raise RequestError(f"cannot read host list {_short(text)}: a '[' within brackets")
            inside = True
        elif char == "]":
            if not inside:
                raise RequestError(f"cannot read host list {_short(text)}: a ']' without its '['")
            inside = False
        elif not inside and (char == "," or char.isspace()):
            if at > start:
                yield text[start:at]
            start = at + 1
    if inside:
        raise RequestError(f"cannot read host list {_short(text)}: a '[' without its ']'")
    if start < len(text):
        yield text[start:]


def _parse_pattern(word: str, text: str) -> list[str | list[_Span]]:
    """Return `word` as literal, spans, literal, ...: odd places are what stood in brackets."""
    parts = re.split(r"[\[\]]", word)
    if len(parts) > 2 * MAX_BRACKETS + 1:
        raise RequestError(f"cannot read host list {_short(text)}: over {MAX_BRACKETS} brackets in one name")
    pattern: list[str | list[_Span]] = []
    for place, part in enumerate(parts):
        if place % 2:
            pattern.append([_parse_span(item, text) for item in part.split(",")])
        elif _PLAIN.match(part):
            pattern.append(part)
        else:
            raise RequestError(f"cannot read host list {_short(text)}: {_short(part)} has characters that no name has")
    return pattern


def _parse_span(item: str, text: str) -> _Span:
    match = _RANGE.match(item)
    if match is None:
        raise RequestError(f"cannot read host list {_short(text)}: {_short(item)} is neither a number nor a range")
    low, high = match.group(1), match.group(2) or match.group(1)
    if int(high) < int(low):  # int: bounded
        raise RequestError(f"cannot read host list {_short(text)}: the range {item} runs backwards")
    return _Span(low=int(low), high=int(high), width=len(low))  # int: bounded


def _names(pattern: list[str | list[_Span]]) -> Iterator[str]:
    if len(pattern) == 1:
        return (part for part in pattern if isinstance(part, str))
    choices = [[part] if isinstance(part, str) else [n for span in part for n in span] for part in pattern]
    return map("".join, product(*choices))


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
