"""Chunks: columns of samples as few bytes, and samples combined into longer steps.

A chunk has the times of its rows and one list of values for each column; `None` is a value that was
not read. `encode` and `decode` are exact. A column is decoded without the others, at the speed of
`itertools.accumulate`: no loop of Python runs for each value.

A column of integers is stored as itself or as its first or second differences, whichever are
smallest; the numbers are divided by their greatest common divisor and reduced by the least of them,
so that they fill few bytes. Floats with few decimals are integers with a scale. Other floats are
combined with the value before them by XOR. The bytes of the numbers go plane by plane (all lowest
bytes first) through Deflate.

`rolled_up` makes rows of a longer step: of a counter the last value, because rates are made from
counters when they are read; of a gauge the mean, and the least and greatest value on request.

Sources: T. Pelkonen and others, "Gorilla: a fast, scalable, in-memory time series database", 2015;
RFC 1951 (Deflate).
"""

from __future__ import annotations

import json
import math
import operator
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

Number = int | float
Values = list[Number | None]
Spans = Sequence[tuple[int, int, int]]

VERSION = 1
MAX_ROWS = 100_000  # of a chunk that is read: a damaged one does not fill the memory
MAX_TEXT = 1 << 24  # bytes of a column that is stored as text
SCALES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 1_000_000_000)
LEVEL = 9  # of Deflate
SIGNIFICANT = 5  # digits of a mean and of an extreme
MOST_SHORT = 10**SIGNIFICANT
BYTES, PARTS = 1024, 1000  # in longer steps, counters are multiples of so many bytes, or parts of a second
GREATEST, LEAST = "max ", "min "  # before the name of a column that is rolled up; no series has a space in its name
PATIENCE_MS = 300_000
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_WHOLE = 1 << 63
_EXACT = 1 << 53  # larger integers have no float of their own
_HEAD = struct.Struct("<BIHI")  # version, rows, columns with the times, bytes of the heads of columns
_COLUMN = struct.Struct("<BBBBqqqI")  # kind, order, width, scale, divisor, least, first, bytes of the body
_LENGTH = struct.Struct("<I")
_EMPTY, _CONSTANT, _INTEGERS, _XOR, _TEXT = range(5)
_HAS_GAPS = 0x80  # with the kind: a bit for each row precedes the planes
_IS_FLOAT = 0x40


class ChunkError(ValueError):
    """The bytes are not a chunk, or a damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChunk:
    """Rows of samples: their times in milliseconds, and the values of each column."""

    times_ms: list[int]
    columns: dict[str, Values]


# ----- encode


def encode(times_ms: Sequence[int], columns: Iterable[Sequence[Number | None]]) -> bytes:
    """Return a chunk as bytes. The names of the columns are not in it.

    Raises ChunkError if a column has another number of values than there are times, or a value is
    not a number.
    """
    count = len(times_ms)
    encoded = []
    for values in (times_ms, *columns):
        if len(values) != count:
            raise ChunkError(f"a column has {len(values)} values for {count} times")
        encoded.append(_encoded(values))
    heads = zlib.compress(b"".join(_COLUMN.pack(*one.head) for one in encoded), LEVEL)
    bodies = [one.body for one in encoded]
    return b"".join((_HEAD.pack(VERSION, count, len(encoded), len(heads)), heads, *bodies))


class _Encoded(NamedTuple):
    """A column: the values of its `_COLUMN`, and its body."""

    head: tuple[int, ...]
    body: bytes


def _encoded(values: Sequence[Number | None]) -> _Encoded:
    known: Sequence[Number] = [value for value in values if value is not None]
    if not known:
        return _Encoded((_EMPTY, 0, 0, 0, 1, 0, 0, 0), b"")
    gaps, flags = b"", 0
    if len(known) < len(values):
        flags = _HAS_GAPS
        gaps = zlib.compress(bytes(value is not None for value in values), LEVEL)
        gaps = _LENGTH.pack(len(gaps)) + gaps
    types = set(map(type, known))
    if not types <= {int, float}:
        raise ChunkError("a value is not a number")
    packed = _PackedIntegers(_TEXT, 0, 0, 1, 0, 0, b"")
    scale = 0 if types == {int} else _scale_of(known)
    if scale is not None:
        found = _packed([round(value * SCALES[scale]) for value in known] if types != {int} else known)  # type: ignore[arg-type]
        packed = found or packed
        flags |= _IS_FLOAT if types != {int} else 0
    elif types == {float}:
        packed = _PackedIntegers(_XOR, 0, 8, 1, 0, 0, _deflated(_xored(known), 8))
    if packed.kind == _TEXT:
        packed = packed._replace(body=zlib.compress(json.dumps(known).encode(), LEVEL))
        flags &= ~_IS_FLOAT
    body = gaps + packed.body
    head = (packed.kind | flags, packed.order, packed.width, scale or 0, packed.divisor, packed.least, packed.first)
    return _Encoded((*head, len(body)), body)


def _scale_of(values: Sequence[Number]) -> int | None:
    """Return the place in `SCALES` that makes exact integers of all values, None if none does."""
    few = values[:4]
    for place, scale in enumerate(SCALES):
        if all(_fits(value, scale) for value in few) and all(_fits(value, scale) for value in values):
            return place
    return None


def _fits(value: Number, scale: int) -> bool:
    scaled = value * scale
    return -_EXACT < scaled < _EXACT and round(scaled) / scale == value


class _PackedIntegers(NamedTuple):
    """Integers as a body, and what it takes to read them."""

    kind: int
    order: int  # 0: the numbers, 1: their differences, 2: the differences of these
    width: int  # bytes of a number
    divisor: int
    least: int
    first: int
    body: bytes


def _packed(values: list[int]) -> _PackedIntegers | None:
    """Return the values as the smallest body; None if 64 bits are too few."""
    first = values[0]
    if not -_WHOLE <= min(values) <= max(values) < _WHOLE:
        return None
    once = list(map(operator.sub, values[1:], values))
    if not any(once):
        return _PackedIntegers(_CONSTANT, 0, 0, 1, 0, first, b"")
    twice = [once[0], *map(operator.sub, once[1:], once)]
    found = [
        (sum(map(int.bit_length, reduced.numbers)), order, reduced)
        for order, numbers in enumerate((values[1:], once, twice))
        if (reduced := _reduced(numbers)) is not None
    ]
    if not found:
        return None
    _, order, best = min(found, key=operator.itemgetter(0, 1))
    body = _deflated(array(_CODES[best.width], best.numbers), best.width)
    return _PackedIntegers(_INTEGERS, order, best.width, best.divisor, best.least, first, body)


class _Reduced(NamedTuple):
    """Numbers less `least`, divided by `divisor`: each fills `width` bytes."""

    numbers: list[int]
    width: int
    divisor: int
    least: int


def _reduced(numbers: list[int]) -> _Reduced | None:
    """Return the reduced numbers; None if 64 bits are too few."""
    least = min(numbers)
    lifted = [number - least for number in numbers] if least else numbers
    divisor = math.gcd(*lifted) or 1
    if divisor > 1:
        lifted = [number // divisor for number in lifted]
    most = max(lifted)
    if most >= 2 * _WHOLE or divisor >= _WHOLE or least < -_WHOLE or least >= _WHOLE:
        return None
    return _Reduced(lifted, next(width for width in _CODES if most < 1 << (8 * width)), divisor, least)


def _xored(values: Sequence[Number]) -> array[int]:
    bits = struct.unpack(f"<{len(values)}Q", struct.pack(f"<{len(values)}d", *values))
    return array("Q", [bits[0], *map(operator.xor, bits[1:], bits)])


def _deflated(numbers: array[int], width: int) -> bytes:
    """Return the bytes of the numbers, compressed: all lowest bytes first, then the next ones."""
    if sys.byteorder == "big":
        numbers.byteswap()
    raw = numbers.tobytes()
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, 9)
    return packer.compress(b"".join(raw[plane::width] for plane in range(width))) + packer.flush()


# ----- decode


class ColumnReader:
    """Reads columns of a chunk: those that are asked for.

    Raises ChunkError if the bytes are damaged.
    """

    def __init__(self, data: bytes) -> None:
        try:
            version, self.rows, count, head_bytes = _HEAD.unpack_from(data)
            if version != VERSION:
                raise ChunkError(f"it has version {version}, this hpcsched reads {VERSION}")
            if not 1 <= self.rows <= MAX_ROWS:
                raise ChunkError(f"it has {self.rows} rows")
            body_at = _HEAD.size + head_bytes
            heads = _inflated(data[_HEAD.size : body_at], count * _COLUMN.size, zlib.MAX_WBITS)
            self._heads = list(_COLUMN.iter_unpack(heads))
            self._starts = list(accumulate((head[-1] for head in self._heads), initial=body_at))
        except (struct.error, zlib.error) as error:
            raise ChunkError(str(error)) from None
        if len(self._heads) != count or self._starts[-1] != len(data):
            raise ChunkError("its length is not what it says")
        self._data = data

    @property
    def columns(self) -> int:
        """Return the number of columns, without the times."""
        return len(self._heads) - 1

    def times_ms(self) -> list[int]:
        """Return the times of the rows, in milliseconds."""
        return self._column(0)  # type: ignore[return-value]

    def column(self, place: int) -> Values:
        """Return the values of a column by its place."""
        if not 0 <= place < self.columns:
            raise ChunkError(f"it has no column {place}")
        return self._column(place + 1)

    def _column(self, place: int) -> Values:
        kind, order, width, scale, divisor, least, first, size = self._heads[place]
        body = self._data[self._starts[place] : self._starts[place] + size]
        try:
            shown, count = b"", self.rows
            if kind & _HAS_GAPS:
                (gap_bytes,) = _LENGTH.unpack_from(body)
                shown = _inflated(body[_LENGTH.size : _LENGTH.size + gap_bytes], self.rows, zlib.MAX_WBITS)
                body, count = body[_LENGTH.size + gap_bytes :], sum(shown)
            values = self._known(kind, _PackedIntegers(kind & 0x0F, order, width, divisor, least, first, body), count)
            if kind & _IS_FLOAT and kind & 0x0F != _XOR:
                values = list(map(SCALES[scale].__rtruediv__, values))  # type: ignore[arg-type]
        except (struct.error, zlib.error, ValueError, IndexError, TypeError, KeyError) as error:
            raise ChunkError(f"column {place}: {error}") from None
        if len(values) != count:
            raise ChunkError(f"column {place} has {len(values)} values of {count}")
        if not shown:
            return values
        known = iter(values)
        return [next(known) if there else None for there in shown]

    def _known(self, kind: int, packed: _PackedIntegers, count: int) -> Values:
        """Return the values that are not None; floats with a scale as integers."""
        if packed.kind == _EMPTY:
            return [None] * count
        if packed.kind == _CONSTANT:
            return [packed.first] * count
        if packed.kind == _TEXT:
            found = json.loads(_inflated(packed.body, MAX_TEXT, zlib.MAX_WBITS, whole=False))
            if not isinstance(found, list) or not set(map(type, found)) <= {int, float}:
                raise ChunkError("its text is not a list of numbers")
            return found
        numbers = _numbers(packed.body, packed.width, count if packed.kind == _XOR else count - 1)
        if packed.kind == _XOR:
            return list(struct.unpack(f"<{count}d", struct.pack(f"<{count}Q", *accumulate(numbers, operator.xor))))
        return _integers(numbers, packed)


def _numbers(body: bytes, width: int, count: int) -> array[int]:
    """Return the numbers of a body: `width` planes of `count` bytes."""
    code = _CODES[width]
    planes = _inflated(body, width * count, -zlib.MAX_WBITS)
    raw = bytearray(planes)
    if width > 1:
        for plane in range(width):
            raw[plane::width] = planes[plane * count : (plane + 1) * count]
    numbers = array(code, bytes(raw))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _integers(numbers: Iterable[int], packed: _PackedIntegers) -> Values:
    if packed.divisor > 1:
        numbers = map(packed.divisor.__mul__, numbers)
    if packed.least:
        numbers = map(packed.least.__add__, numbers)
    if packed.order == 0:
        return [packed.first, *numbers]
    if packed.order == 2:
        numbers = accumulate(numbers)
    return list(accumulate(numbers, initial=packed.first))


def _inflated(data: bytes, size: int, wbits: int, *, whole: bool = True) -> bytes:
    """Return `size` bytes (at most, unless `whole`). Raises ChunkError."""
    packer = zlib.decompressobj(wbits)
    found = packer.decompress(data, size + 1)
    if len(found) > size or (whole and len(found) < size):
        raise ChunkError(f"it has {len(found)} bytes in place of {size}")
    return found


def decode(data: bytes, names: Sequence[str]) -> SampleChunk:
    """Return all of a chunk.

    Raises ChunkError if it is damaged, or has not as many columns as names.
    """
    reader = ColumnReader(data)
    if reader.columns != len(names):
        raise ChunkError(f"it has {reader.columns} columns in place of {len(names)}")
    columns = {name: reader.column(place) for place, name in enumerate(names)}
    return SampleChunk(times_ms=reader.times_ms(), columns=columns)


# ----- combine rows into longer steps


def rolled_up(
    times_ms: Sequence[int],
    columns: Mapping[str, Sequence[Number | None]],
    step_ms: int,
    is_counter: Callable[[str], bool],
) -> SampleChunk:
    """Return one row for each step that has rows, with the time of its last row.

    `columns` may itself be rolled up. A gauge gets the columns `GREATEST` and `LEAST` + its name.
    """
    spans = spans_of(times_ms, step_ms)
    made: dict[str, Values] = {}
    for name, values in columns.items():
        if name.startswith((GREATEST, LEAST)):
            continue
        if is_counter(name):
            made[name] = [_coarse(name, _last(values[begin:end])) for _, begin, end in spans]
            continue
        parts = [[value for value in values[begin:end] if value is not None] for _, begin, end in spans]
        made[name] = [_mean(part) for part in parts]
        for prefix, choose in ((GREATEST, max), (LEAST, min)):
            extremes = columns.get(prefix + name, values)
            parts = [[value for value in extremes[begin:end] if value is not None] for _, begin, end in spans]
            made[prefix + name] = [_short(choose(part)) if part else None for part in parts]
    return SampleChunk(times_ms=[times_ms[end - 1] for _, _, end in spans], columns=made)


def spans_of(times_ms: Sequence[int], step_ms: int) -> list[tuple[int, int, int]]:
    """Return (step, first row, row after the last) of each step with rows.

    Steps are counted from 1970. The times ascend.
    """
    spans = []
    begin = 0
    while begin < len(times_ms):
        step = times_ms[begin] // step_ms
        end = bisect_left(times_ms, (step + 1) * step_ms, begin)
        spans.append((step, begin, end))
        begin = end
    return spans


def _last(values: Sequence[Number | None]) -> Number | None:
    return next((value for value in reversed(values) if value is not None), None)


def _coarse(name: str, value: Number | None) -> Number | None:
    """Return the end of a counter in a longer step: bytes and seconds are rounded down.

    What is lost does not show in a rate. Counts of events stay exact.
    """
    if type(value) is int and name.partition(":")[0].endswith("_bytes_total"):
        return value - value % BYTES
    if type(value) is float and 0 <= value < _EXACT / PARTS:
        return math.floor(value * PARTS) / PARTS
    return value


def _mean(values: Sequence[Number]) -> Number | None:
    """Return the mean, with few digits."""
    if not values:
        return None
    if values.count(values[0]) == len(values):
        return _short(values[0])
    mean = math.fsum(values) / len(values)
    return _short(mean) if math.isfinite(mean) else values[-1]


def _short(value: Number) -> Number:
    """Return the value with few digits, which fill few bytes. The order of two values stays."""
    if -MOST_SHORT < value < MOST_SHORT and type(value) is int:
        return value
    short = float(f"{value:.{SIGNIFICANT}g}")
    return int(short) if MOST_SHORT <= abs(short) < math.inf else short


def joined(chunks: Sequence[SampleChunk]) -> SampleChunk:
    """Return the rows of all chunks, by time. A column that a chunk lacks has no values there."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk.columns)
    times_ms = [time_ms for chunk in chunks for time_ms in chunk.times_ms]
    columns: dict[str, Values] = {}
    for name in names:
        column: Values = []
        for chunk in chunks:
            column += chunk.columns.get(name) or [None] * len(chunk.times_ms)
        columns[name] = column
    return ordered(SampleChunk(times_ms=times_ms, columns=columns))


def ordered(chunk: SampleChunk) -> SampleChunk:
    """Return the chunk with its rows by time."""
    times_ms = chunk.times_ms
    if all(map(operator.le, times_ms, times_ms[1:])):
        return chunk
    order = sorted(range(len(times_ms)), key=times_ms.__getitem__)
    columns = {name: [values[place] for place in order] for name, values in chunk.columns.items()}
    return SampleChunk(times_ms=[times_ms[place] for place in order], columns=columns)


# ----- what a plot shows: one value for each step


class SteppedSeries:
    """Values of one series, one for each step, filled chunk after chunk by time.

    Of a gauge the mean, least or greatest value; of a counter its growth each second. A counter
    that falls, that belongs to another life of its node, or that was not read for `patience_ms`,
    has a gap there.
    """

    def __init__(self, begin_ms: int, step_ms: int, count: int, *, is_counter: bool, of: str = "mean") -> None:
        self._first = begin_ms // step_ms
        self._step_ms = step_ms
        self._count = count
        self._is_counter = is_counter
        self._of = of
        self._patience_ms = max(3 * step_ms, PATIENCE_MS)
        self._before: tuple[str, int, Number] | None = None
        self._sums: list[float] = [0.0] * count
        self._weights: list[float] = [0.0] * count
        self._best: Values = [None] * count

    def add(self, life: str, times_ms: Sequence[int], values: Sequence[Number | None], spans: Spans) -> None:
        """Add the rows of a chunk. `spans`: `spans_of` its times and the step."""
        if self._is_counter:
            self._add_growth(life, times_ms, values, spans[:1])
            if not self._add_steady_growth(times_ms, values, spans):
                self._add_growth(life, times_ms, values, spans[1:])
        elif self._of == "mean":
            self._add_means(values, spans)
        else:
            self._add_extremes(values, spans)

    def _add_means(self, values: Sequence[Number | None], spans: Spans) -> None:
        has_gaps = None in values
        for step, begin, end in spans:
            place = step - self._first
            if 0 <= place < self._count:
                part = values[begin:end]
                known = [value for value in part if value is not None] if has_gaps else part
                self._sums[place] += sum(known)  # type: ignore[arg-type]
                self._weights[place] += len(known)

    def _add_extremes(self, values: Sequence[Number | None], spans: Spans) -> None:
        choose = max if self._of == "max" else min
        for step, begin, end in spans:
            place = step - self._first
            known = [value for value in values[begin:end] if value is not None]
            if known and 0 <= place < self._count:
                best = self._best[place]
                self._best[place] = choose(known) if best is None else choose(best, *known)

    def _add_growth(self, life: str, times_ms: Sequence[int], values: Sequence[Number | None], spans: Spans) -> None:
        for step, begin, end in spans:
            at = end - 1
            while at > begin and values[at] is None:
                at -= 1
            value = values[at]
            if value is None:
                continue
            place, before = step - self._first, self._before
            self._before = (life, times_ms[at], value)
            if before is None or before[0] != life or not 0 <= place < self._count:
                continue
            passed_ms = times_ms[at] - before[1]
            if 0 < passed_ms <= self._patience_ms and value >= before[2]:
                self._sums[place] += value - before[2]
                self._weights[place] += passed_ms / 1000

    def _add_steady_growth(self, times_ms: Sequence[int], values: Sequence[Number | None], spans: Spans) -> bool:
        """Add all but the first span at once if no step, value or growth is missing."""
        if len(spans) < 3:
            return False
        first, last = spans[1][0] - self._first, spans[-1][0] - self._first
        if first < 0 or last >= self._count or last - first != len(spans) - 2:
            return False
        rows = [end - 1 for _, _, end in spans]
        at_ms, found = [times_ms[row] for row in rows], [values[row] for row in rows]
        if None in found:
            return False
        grown = list(map(operator.sub, found[1:], found))
        passed_ms = list(map(operator.sub, at_ms[1:], at_ms))
        if min(grown) < 0 or min(passed_ms) <= 0 or max(passed_ms) > self._patience_ms or self._before is None:
            return False
        if any(self._weights[first : last + 1]):
            return False
        self._sums[first : last + 1] = grown
        self._weights[first : last + 1] = [passed / 1000 for passed in passed_ms]
        self._before = (self._before[0], at_ms[-1], found[-1])  # type: ignore[assignment]
        return True

    def values(self) -> Values:
        """Return the value of each step, None where there is none."""
        if not self._is_counter and self._of != "mean":
            return self._best
        return [total / weight if weight else None for total, weight in zip(self._sums, self._weights, strict=True)]
