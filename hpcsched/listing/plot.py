"""Curves in cells of text: of a training run on a screen, of a metric in a terminal.

Knows no colours and no terminal. Sources: Unicode, block "Braille Patterns" (U+2800: the low byte of
the code point is the set of dots).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    Value = int | float | None

_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a dot, by row and column in its cell
Span = tuple[float, float]


class BrailleCanvas:
    """`width` by `height` cells of two by four dots.

    A cell has the last layer that was drawn there, and the dots of all.
    """

    def __init__(self, width: int, height: int, x: Span, y: Span) -> None:
        self._width, self._height, self._x, self._y = width, height, x, y
        self._bits = [[0] * width for _ in range(height)]
        self._layers = [[""] * width for _ in range(height)]

    def draw_line(self, points: Sequence[tuple[float, float]], layer: str) -> None:
        """Draw a line through the points."""
        dots = [self._dot(x, y) for x, y in points]
        for (x0, y0), (x1, y1) in zip(dots[:1] + dots, dots, strict=False):
            count = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(1, count + 1):
                self._set(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count), layer)

    def draw_squares(self, points: Sequence[tuple[float, float]], layer: str) -> None:
        """Draw each point as a square of four dots."""
        for column, row in [self._dot(x, y) for x, y in points]:
            for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
                self._set(column + dx, row + dy, layer)

    def draw_upright(self, x: float, layer: str) -> None:
        """Draw a dotted vertical line at `x`, behind what has been drawn."""
        column, _ = self._dot(x, self._y[0])
        for row in [row for row in range(self._height) if not self._layers[row][column // 2]]:
            self._set(column, row * 4, layer)
            self._set(column, row * 4 + 2, layer)

    def rows(self, *, ascii_only: bool = False) -> list[list[tuple[str, str]]]:
        """Return (character, layer) of each cell, row by row from the top."""
        return [
            [(_cell(bits, ascii_only=ascii_only), layer) for bits, layer in zip(*row, strict=True)]
            for row in zip(self._bits, self._layers, strict=True)
        ]

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        column = round(_part(x, self._x) * (self._width * 2 - 1))
        return column, round((1.0 - _part(y, self._y)) * (self._height * 4 - 1))

    def _set(self, column: int, row: int, layer: str) -> None:
        if 0 <= column < self._width * 2 and 0 <= row < self._height * 4:
            self._bits[row // 4][column // 2] |= _BITS[row % 4][column % 2]
            self._layers[row // 4][column // 2] = layer


def _part(value: float, span: Span) -> float:
    """Return the position of `value` in the span, 0 to 1."""
    low, high = span
    return 0.0 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))


def _cell(bits: int, *, ascii_only: bool) -> str:
    if not bits:
        return " "
    if not ascii_only:
        return chr(0x2800 + bits)
    upper, lower = bits & 0x1B, bits & 0xE4  # the dots of the upper and of the lower half
    return ":" if upper and lower else "'" if upper else "."


# ----- a series of values over time

UNITS = ("", "K", "M", "G", "T", "P", "E")


def short_number(value: float, unit: str = "", *, binary: bool = False) -> str:
    """Return a number for people, in at most four digits: ``1.5 GiB``, ``250``, ``0.031``."""
    base = 1024.0 if binary else 1000.0
    size, place = abs(value), 0
    while size >= base and place < len(UNITS) - 1:
        size, place = size / base, place + 1
    prefix = UNITS[place] + ("i" if binary and place else "")
    digits = f"{size:.3g}" if size < 999.5 else f"{size:.0f}" if size < 2000 else f"{size:.2e}"
    sign = "-" if value < 0 else ""
    return f"{sign}{digits}{' ' if prefix + unit else ''}{prefix}{unit}"


def unit_of(series: dict[str, object], *, is_rate: bool) -> tuple[str, bool]:
    """Return the unit of shown values of a series, and whether its prefixes are those of 1024."""
    unit = {"bytes": "B", "seconds": "s", "watts": "W", "joules": "J", "celsius": "C", "hertz": "Hz"}.get(
        str(series["unit"]), ""
    )
    if not is_rate:
        return unit, unit == "B"
    if unit == "s":  # seconds of cpus each second
        return "", False
    return ("W", False) if unit == "J" else (f"{unit}/s", unit == "B")


def time_plot(
    values: Sequence[Value],
    begin_s: float,
    step_s: float,
    width: int,
    height: int,
    unit: str,
    *,
    binary: bool,
    ascii_only: bool,
) -> list[str]:
    """Return the plot of a series in `height` + 2 lines: a curve, its scale, and the times.

    A gap stays empty. The scale begins at 0 unless all values are far from it.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ["no values"]
    low, high = min(known), max(known)
    if low >= 0 and (low < 0.8 * high or low == high):
        low = 0
    if high == low:
        high = low + 1
    marks = {0: short_number(high, unit, binary=binary), height - 1: short_number(low, unit, binary=binary)}
    margin = max(map(len, marks.values()))
    columns = max(10, width - margin - 2)
    canvas = BrailleCanvas(columns, height, (0, max(1, len(values) - 1)), (low, high))
    for line in _lines(values):
        canvas.draw_line(line, "")
    corner, upright, flat = ("+", "|", "-") if ascii_only else ("└", "┤", "─")
    lines = [
        f"{marks.get(row, ''):>{margin}} {upright}{''.join(cell for cell, _ in cells)}".rstrip()
        for row, cells in enumerate(canvas.rows(ascii_only=ascii_only))
    ]
    lines.append(" " * (margin + 1) + corner + flat * columns)
    lines.append(" " * (margin + 2) + _time_axis(begin_s, step_s * max(1, len(values) - 1), columns))
    return lines


def _lines(values: Sequence[Value]) -> list[list[tuple[float, float]]]:
    """Return the points of each run of values without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(values):
        if value is not None:
            runs[-1].append((place, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _time_axis(begin_s: float, span_s: float, width: int) -> str:
    """Return the times of a few places, as wide as the curve."""
    form = (
        "%H:%M:%S" if span_s < 600 else "%H:%M" if span_s < 86400 else "%d %b %H:%M" if span_s < 8 * 86400 else "%d %b"
    )
    texts = [time.strftime(form, time.localtime(begin_s + span_s * part / 4)) for part in range(5)]
    line = ""
    for part, text in enumerate(texts):
        begin = min(width - len(text), max(0, round(width * part / 4) - (0 if part == 0 else len(text) // 2)))
        if begin > len(line) or not line:
            line = line.ljust(begin) + text
    return line
