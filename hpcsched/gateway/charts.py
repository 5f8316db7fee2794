"""Draw charts as SVG: lines over time, and jobs on nodes. Each has its values as text.

Pure. Colours come from the style sheet, by class; a chart has no style of its own, which the content security policy of the
pages would refuse. Text is escaped here, because the templates insert the charts as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hpcsched.listing.text import clean

WIDTH, HEIGHT = 600, 150
SCHEDULE_WIDTH = 1150
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 18  # margins for the labels
ROW = 22  # height of a node's line
COLOURS = 6  # classes of the style sheet: s0 ...
TABLE_ROWS = 30

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over one time axis.

    `lines`: label and values, each `step_s` after the one before; None is a gap.
    """

    title: str
    unit: str
    from_s: float
    step_s: float
    lines: Sequence[tuple[str, Values]]
    most: float | None = None  # the top of the axis; None: the greatest value

    def svg(self) -> str:
        """Return the drawing."""
        count = max((len(values) for _, values in self.lines), default=0)
        known = [value for _, values in self.lines for value in values if value is not None]
        top = self.most or rounded_up(max(known, default=0.0))
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart"><title>{_shown(self._words(known))}</title>'
        ]
        for part in (0.0, 0.5, 1.0):
            y = HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="axis" x="{LEFT - 5}" y="{y + 4:.1f}">{escape(short(part * top))}</text>')
        for number, (_, values) in enumerate(self.lines):
            for points in _runs(values, count, top):
                parts.append(f'<polyline class="s{number % COLOURS}" points="{points}"/>')
        to_s = self.from_s + max(0, count - 1) * self.step_s
        for at_s, anchor in ((self.from_s, "start"), (to_s, "end")):
            x = LEFT if anchor == "start" else WIDTH - RIGHT
            parts.append(
                f'<text class="axis {anchor}" x="{x}" y="{HEIGHT - 4}">{clock(at_s, to_s - self.from_s)}</text>'
            )
        return "".join([*parts, "</svg>"])

    def _words(self, known: Sequence[float]) -> str:
        if not known:
            return f"{self.title}: no values"
        return f"{self.title}: {short(min(known))} to {short(max(known))} {self.unit}".rstrip()

    def rows(self) -> list[list[str]]:
        """Return the values as a table of at most `TABLE_ROWS` rows: the time, then each value."""
        count = max((len(values) for _, values in self.lines), default=0)
        step = max(1, math.ceil(count / TABLE_ROWS))
        span_s = count * self.step_s
        return [
            [clock(self.from_s + at * self.step_s, span_s)]
            + [short(values[at]) if at < len(values) else "" for _, values in self.lines]
            for at in range(0, count, step)
        ]


def _runs(values: Values, count: int, top: float) -> list[str]:
    """Return the points of each part of a line without a gap."""
    runs: list[list[str]] = [[]]
    for at, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        x = LEFT + (at / (count - 1) if count > 1 else 0.5) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - max(0.0, min(1.0, value / top)) * (HEIGHT - TOP - BOTTOM)
        runs[-1].append(f"{x:.1f},{y:.1f}")
    return [" ".join(run if len(run) > 1 else run * 2) for run in runs if run]  # a line of one point is not drawn


def _shown(text: str) -> str:
    """Return a text as the drawing has it: without control characters, and not as markup."""
    return escape(clean(text))


def rounded_up(value: float) -> float:
    """Return the next number 1, 2 or 5 times a power of ten; 1 for nothing."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-9))


def short(value: float | None) -> str:
    """Return a number in at most six characters; "" for None."""
    if value is None or not math.isfinite(value):
        return ""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def clock(at_s: float, span_s: float) -> str:
    """Return a time of the axis, in local time: with its day if the axis is longer than a day."""
    return time.strftime("%m-%d %H:%M" if span_s > 86_400 else "%H:%M", time.localtime(at_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBar:
    """A job or reservation on a line of the schedule."""

    row: str
    begin_s: float
    end_s: float
    kind: str  # the class of the style sheet: running, expected, reserved
    label: str
    link: str = ""


def schedule(rows: Sequence[str], bars: Sequence[ScheduleBar], from_s: float, to_s: float) -> str:
    """Return the drawing of bars on lines of a time axis, cut off at its ends."""
    height, left = TOP + ROW * len(rows) + BOTTOM, 110
    places = {row: at for at, row in enumerate(rows)}

    def x(at_s: float) -> float:
        return left + max(0.0, min(1.0, (at_s - from_s) / (to_s - from_s))) * (SCHEDULE_WIDTH - left - RIGHT)

    parts = [f'<svg viewBox="0 0 {SCHEDULE_WIDTH} {height}" role="img" class="chart"><title>Schedule</title>']
    for part in range(5):
        at_s = from_s + part / 4 * (to_s - from_s)
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        parts.append(f'<line class="grid" x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text class="axis {anchor}" x="{x(at_s):.1f}" y="{height - 4}">{clock(at_s, 0)}</text>')
    for row, at in places.items():
        parts.append(f'<text class="axis start" x="2" y="{TOP + at * ROW + 15}">{_shown(row[:16])}</text>')
    for bar in bars:
        if bar.row not in places or bar.end_s <= from_s or bar.begin_s >= to_s:
            continue
        begin, end = x(bar.begin_s), x(bar.end_s)
        box = (
            f'<rect class="{bar.kind}" x="{begin:.1f}" y="{TOP + places[bar.row] * ROW + 2}" '
            f'width="{max(2.0, end - begin):.1f}" height="{ROW - 4}" rx="2"><title>{_shown(bar.label)}</title></rect>'
        )
        parts.append(f'<a href="{escape(bar.link)}">{box}</a>' if bar.link else box)
    return "".join([*parts, "</svg>"])
