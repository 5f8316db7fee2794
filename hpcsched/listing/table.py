"""Tables: columns as wide as they need to be, and lines in colours. Knows neither terminals nor what the cells mean.

Source: ECMA-48 (colours).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"

Row = Sequence[str]


def painted(text: str, colour: str) -> str:
    """Return `text` in a colour; "" leaves it as it is."""
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


def columns(
    headers: Row, rows: Sequence[Row], *, right: Iterable[int] = (), colours: Sequence[str] = (), rule: bool = False
) -> str:
    """Return a table: columns as wide as their widest cell, those in `right` right-justified, one space between.

    Empty `headers` write none. `colours`: one for each row. `rule`: a line of dashes under the headers.
    """
    lines: list[Row] = [headers, *rows] if headers else list(rows)
    if not lines:
        return ""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if rule and headers:
        lines.insert(1, ["-" * width for width in widths])
    to_right = set(right)
    shape = " ".join(
        f"{{:{'>' if at in to_right else '<'}{width}}}" if width else "{}" for at, width in enumerate(widths)
    )
    texts = [shape.format(*line).rstrip() for line in lines]
    first = len(texts) - len(rows)
    if colours:
        texts[first:] = [painted(text, colour) for text, colour in zip(texts[first:], colours, strict=True)]
    return "\n".join(texts) + "\n"
