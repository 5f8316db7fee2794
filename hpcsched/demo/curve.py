"""A curve in text: points on a canvas of Braille cells, each two dots wide and four high.

Knows no colours and no terminal: it returns, for each cell, its character and which layer it belongs to.
Source: Unicode, block "Braille Patterns" (U+2800: the code point's low byte is the set of dots).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Bit of each dot by (row, column) in a cell.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The values that the canvas spans, both ends included."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """Return where `value` lies, from 0 to 1."""
        span = self.high - self.low
        return 0.0 if span <= 0 else min(1.0, max(0.0, (value - self.low) / span))


class Canvas:
    """`width` by `height` cells. Later layers win a cell's name, and all keep their dots."""

    def __init__(self, width: int, height: int, x: Range, y: Range) -> None:
        self._width, self._height = width, height
        self._x, self._y = x, y
        self._bits = [[0] * width for _ in range(height)]
        self._layers: list[list[str]] = [[""] * width for _ in range(height)]

    def line(self, points: Sequence[tuple[float, float]], layer: str) -> None:
        """Draw a line through the points."""
        dots = [self._dot(x, y) for x, y in points]
        for dot in dots[:1]:
            self._set(*dot, layer)
        for (x0, y0), (x1, y1) in zip(dots, dots[1:], strict=False):
            count = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(1, count + 1):
                self._set(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count), layer)

    def marks(self, points: Sequence[tuple[float, float]], layer: str) -> None:
        """Draw each point as a small square of dots."""
        for x, y in points:
            column, row = self._dot(x, y)
            for dx in (0, 1):
                for dy in (0, 1):
                    self._set(column + dx, row + dy, layer)

    def upright(self, x: float, layer: str) -> None:
        """Draw a dotted vertical line at `x`, behind what is drawn already."""
        column, _ = self._dot(x, self._y.low)
        free = [row for row in range(self._height) if not self._layers[row][column // 2]]
        for row in free:
            self._set(column, row * 4, layer)
            self._set(column, row * 4 + 2, layer)

    def rows(self) -> list[list[tuple[str, str]]]:
        """Return (text, layer) runs for each row, from the top."""
        return [self._runs(bits, layers) for bits, layers in zip(self._bits, self._layers, strict=True)]

    def _runs(self, bits: list[int], layers: list[str]) -> list[tuple[str, str]]:
        runs: list[tuple[str, str]] = []
        for bit, layer in zip(bits, layers, strict=True):
            char = chr(_BLANK + bit) if bit else " "
            if runs and runs[-1][1] == layer:
                runs[-1] = (runs[-1][0] + char, layer)
            else:
                runs.append((char, layer))
        return runs

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        column = round(self._x.part(x) * (self._width * 2 - 1))
        row = round((1.0 - self._y.part(y)) * (self._height * 4 - 1))
        return column, row

    def _set(self, column: int, row: int, layer: str) -> None:
        if 0 <= column < self._width * 2 and 0 <= row < self._height * 4:
            self._bits[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
            self._layers[row // 4][column // 2] = layer


def smoothed(values: Sequence[float], keep: float = 0.85) -> list[float]:
    """Return the exponential moving average of the values, without the bias of its start."""
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(average / weight)
    return result
