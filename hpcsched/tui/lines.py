"""A line of the screen: texts, each with the name of its style.

A style is written as rich's: a color of the terminal's 16, ``bold``, ``dim``, ``reverse``. Knows no terminal. Rule: text of
users goes through `clean` (`hpcsched.listing.text`) before it becomes a part of a line, and is never read as markup.
"""

from __future__ import annotations

import textwrap
from unicodedata import east_asian_width

from hpcsched.listing.text import clean

Line = list[tuple[str, str]]

STATE_STYLES = {
    "IDLE": "green",
    "MIXED": "cyan",
    "ALLOCATED": "cyan",
    "RUNNING": "green",
    "COMPLETED": "dim",
    "CANCELLED": "dim",
    **dict.fromkeys(("DOWN", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"), "bold red"),
}  # any other state: yellow


def state_style(state: str) -> str:
    """Return the style of a state of a job or node."""
    return STATE_STYLES.get(state, "yellow")


def cell_width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def cell(value: object, width: int, *, right: bool = False) -> str:
    """Return a value of a user as a cell of `width` columns, cut with ``~`` if it is longer."""
    text = clean(value)
    taken = cell_width(text)
    if taken > width:
        while text and cell_width(text) > width - 1:
            text = text[: -max(1, (cell_width(text) - width) // 2)]
        text += "~"
        taken = cell_width(text)
    space = " " * (width - taken)
    return space + text if right else text + space


def bar(part: float, whole: float, width: int) -> str:
    """Return ``####----``: how much of `whole` is taken."""
    filled = 0 if whole <= 0 else max(0, min(width, round(width * part / whole)))
    return "#" * (filled or int(part > 0 < whole)) + "-" * (width - (filled or int(part > 0 < whole)))


def wrapped(text: str, width: int) -> list[str]:
    """Return a text of a user in lines of at most `width` characters."""
    return textwrap.wrap(clean(text), max(10, width))


def plain(line: Line) -> str:
    """Return the text of a line without its styles."""
    return "".join(text for text, _ in line).rstrip()
