"""Texts of one line, and tables: cleaned, cut to a width, times as in Slurm, colours.

Knows no jobs and no terminals. What a user chose (a job's name, a reason) may hold anything: `clean` keeps it from moving the
terminal's cursor or from looking like a second line. Source: ECMA-48 (colours).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from hpcsched.errors import UsageError

MAX_WIDTH = 4096  # of a column

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any


def clean(value: object) -> str:
    """Return `value` as one line without control characters: they become ``?``."""
    text = value if type(value) is str else str(value)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def output_text(text: str) -> str:
    """Return output without escape sequences; of control characters, newlines and tabs stay."""
    parts: list[str] = []
    for piece in text.split("\x1b["):
        if parts:
            end = next((at for at, char in enumerate(piece) if "@" <= char <= "~"), -1)
            piece = piece[end + 1 :]
        parts.append(piece)
    return "".join(char for char in "".join(parts) if char in "\n\t" or char.isprintable())


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` in exactly `width` characters, cut if it is longer."""
    cut = text[:width]
    return cut.rjust(width) if right else cut.ljust(width)


def date_text(at_s: float | None, none: str = "N/A") -> str:
    """Return a time as Slurm writes it: ``2027-01-20T12:34:00``, local time."""
    return none if at_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s))


def when_text(at_s: float, now_s: float) -> str:
    """Return a time for people: ``14:20:05`` if it is of today, else with its date."""
    today = time.strftime("%Y-%m-%d", time.localtime(now_s))
    day, _, clock = date_text(at_s).partition("T")
    return clock if day == today else f"{day} {clock}"


def start_words(answer: dict[str, Any]) -> str:
    """Return the text of --test-only: when and where the job would start, or why it would not."""
    if answer["start_s"] is None or not answer["nodes"]:
        when = f"; not before {date_text(answer['start_s'])}" if answer["start_s"] is not None else ""
        return f"Job {answer['job_id']} {clean(answer['text'])}{when}"
    return (
        f"Job {answer['job_id']} to start at {date_text(answer['start_s'])} using {answer['cpus']} processors "
        f"on nodes {clean(answer['node_list'])} in partition {clean(answer['partition'])}"
    )


def split_list(text: str) -> list[str]:
    """Return the parts of `text` between commas outside brackets: ``a,10_[1,3]`` has two."""
    items, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            items.append(text[start:at])
            start = at + 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def sized(word: str) -> tuple[str, int, bool]:
    """Return name, width and right-justification of a column ``NAME%20`` or ``NAME%-20``.

    A width that is not given is 0. Raises UsageError.
    """
    name, percent, text = word.partition("%")
    digits = text.removeprefix("-").removeprefix("+")
    width = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 4 else 0  # int: four digits
    if percent and not 0 < width <= MAX_WIDTH:
        raise UsageError(f"cannot show column {word[:60]!r}: its width must be a number from 1 to {MAX_WIDTH}")
    return name.strip(), width, not text.startswith("-")


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return those of `known` that look like `word`, at most three."""
    import difflib  # only ever needed for an error message

    return difflib.get_close_matches(word[:60], list(known), n=3, cutoff=0.6)


BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"

Row = Sequence[str]


def painted(text: str, colour: str) -> str:
    """Return `text` in a colour; "" leaves it as it is."""
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


def fixed_columns(rows: Sequence[Row], widths: Sequence[tuple[int, bool]], *, rule: bool = False) -> str:
    """Return a table as Slurm's accounting commands print one.

    Cells are cut to the width of their column, and each column ends with a space.

    `widths`: of each column, and whether it is right-justified. `rule`: a line of dashes under the first row.
    """
    lines = [
        [fitted(text, width, right=right) for text, (width, right) in zip(row, widths, strict=True)] for row in rows
    ]
    if rule:
        lines.insert(1, ["-" * width for width, _ in widths])
    return "".join("".join(f"{cell} " for cell in line) + "\n" for line in lines)


def columns(
    headers: Row, rows: Sequence[Row], *, right: Iterable[int] = (), colours: Sequence[str] = (), rule: bool = False
) -> str:
    """Return a table with columns as wide as their widest cell, and one space between.

    Columns in `right` are right-justified.

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
