"""How commands write: aligned columns, colour, JSON, times. Plain text; colour and bars only on a terminal.

What a user chose (a job's name, a reason) may hold anything: `clean` keeps it from moving the terminal's cursor or from
looking like a second line. Nothing is ever cut, wrapped or coloured where the output is no terminal. Knows no jobs or nodes.
Sources: NO_COLOR (no-color.org); ECMA-48 (colours).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence

from hpcsched.client import Json
from hpcsched.listing.text import clean as clean
from hpcsched.listing.text import date_text as date_text
from hpcsched.listing.text import fitted as fitted

BOLD, DIM, RED, GREEN, YELLOW, BLUE, CYAN = "1", "2", "31", "32", "33", "34", "36"

Row = Sequence[str]


def is_terminal() -> bool:
    """Say whether a person sees the output."""
    return sys.stdout.isatty()


def wants_colour() -> bool:
    """Say whether the output may have colours: on a terminal that knows them, unless NO_COLOR is set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


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


def print_json(answer: Json) -> None:
    """Print an answer as JSON: on one line, spread out on a terminal."""
    json.dump(answer, sys.stdout, indent=2 if is_terminal() else None)
    sys.stdout.write("\n")


def when_text(at_s: float, now_s: float) -> str:
    """Return a time for people: ``14:20:05`` if it is of today, else with its date."""
    today = time.strftime("%Y-%m-%d", time.localtime(now_s))
    day, _, clock = date_text(at_s).partition("T")
    return clock if day == today else f"{day} {clock}"


def bar(part: float, whole: float, width: int = 10) -> str:
    """Return how much of `whole` is in use: ``[####------]``."""
    filled = 0 if whole <= 0 else min(width, round(width * part / whole))
    if part > 0 and filled == 0:
        filled = 1
    return "[" + "#" * filled + "-" * (width - filled) + "]"
