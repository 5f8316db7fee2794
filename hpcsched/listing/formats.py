"""Formats: which columns, in which widths, with what between them.

Three ways to write one: names with commas (``id,name,state``); squeue's and sinfo's ``-o``, a percent sign, a width if the
column shall have one (cut if longer; with a dot before it right-justified), a letter, any other text standing for itself
(``%.18i %.9P``); and their ``-O``, long names with commas, each with ``:[.][width][suffix]`` (20 wide if nothing is said).

Knows no columns: they are handed in. Source: squeue(1), sinfo(1), -o and -O.
"""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Callable, Sequence

from hpcsched.errors import UsageError
from hpcsched.listing.text import clean, date_text, fitted, nearest, split_list

Record = object  # a job of the API, a group of nodes: what the columns are of
LONG_WIDTH = 20


class Look(namedtuple("Look", "now_s time_format", defaults=("",))):
    """The current time (Unix seconds), and the format of times (SLURM_TIME_FORMAT)."""

    __slots__ = ()

    now_s: float
    time_format: str

    def date(self, at_s: float | None, none: str = "N/A") -> str:
        """Return a time as text."""
        if at_s is None or self.time_format in ("", "standard"):
            return date_text(at_s, none)
        if self.time_format == "relative":
            return relative_text(at_s, self.now_s)
        return time.strftime(self.time_format, time.localtime(at_s))


def relative_text(at_s: float, now_s: float) -> str:
    """Return a time as ``SLURM_TIME_FORMAT=relative`` has it: shorter, the nearer its day is."""
    at, now = time.localtime(at_s), time.localtime(now_s)
    days = (time.mktime((*at[:3], 12, 0, 0, 0, 0, -1)) - time.mktime((*now[:3], 12, 0, 0, 0, 0, -1))) / 86_400
    match round(days):
        case 0:
            return time.strftime("%H:%M:%S", at)
        case -1:
            return time.strftime("Ystday %H:%M", at)
        case 1:
            return time.strftime("Tomorr %H:%M", at)
        case near if -7 < near < 7:
            return time.strftime("%a %H:%M", at)
        case _:
            return time.strftime("%-d %b %H:%M", at)


class FormatField(namedtuple("FormatField", "name letter header text right longs", defaults=(False, ()))):
    """A column.

    `text` writes it of a record as seen in a `Look`; `longs` are its names in -O, in lower case.
    """

    __slots__ = ()

    name: str
    letter: str  # "" if Slurm has none for it
    header: str
    text: Callable[..., str]
    right: bool
    longs: tuple[str, ...]


class Cell(namedtuple("Cell", "field literal width right", defaults=("", 0, False))):
    """A place in a format: a column with its width, or literal text.

    Width 0 is as wide as the content.
    """

    __slots__ = ()

    field: FormatField | None
    literal: str
    width: int
    right: bool


Fields = Sequence[FormatField]


def parse_names(text: str, fields: Fields) -> list[Cell]:
    """Return the cells of ``id,name,state``.

    Raises UsageError for an unknown column.
    """
    by_name = {field.name: field for field in fields}
    return [_named(word, by_name) for word in split_list(text)]


def _named(word: str, by_name: dict[str, FormatField]) -> Cell:
    field = by_name.get(word.lower())
    if field is not None:
        return Cell(field, right=field.right)
    near = nearest(word.lower(), by_name)
    hint = f"did you mean {' or '.join(near)}?" if near else ", ".join(by_name)
    raise UsageError(f"cannot show column {word[:60]!r}: no such column; {hint}")


def parse_percent(text: str, fields: Fields) -> list[Cell]:
    """Return the cells of the format ``%.18i %.9P``; ``%all`` means all columns.

    Raises UsageError for an unknown letter.
    """
    by_letter = {field.letter: field for field in fields if field.letter}
    if text.lower() == "%all":
        text = "|".join(f"%{letter}" for letter in sorted(by_letter, key=lambda letter: (letter.isupper(), letter)))
    cells = []
    at = 0
    while at < len(text):
        percent = text.find("%", at)
        if percent < 0:
            cells.append(Cell(None, text[at:]))
            break
        if percent > at:
            cells.append(Cell(None, text[at:percent]))
        cell, at = _percent_cell(text, percent + 1, by_letter)
        cells.append(cell)
    return cells


def _percent_cell(text: str, at: int, by_letter: dict[str, FormatField]) -> tuple[Cell, int]:
    """Return the cell whose percent sign is before `at`, and where it ends."""
    if text.startswith("%", at):
        return Cell(None, "%"), at + 1
    right = text.startswith(".", at)
    width, end = _digits(text, at + right)
    letter = text[end : end + 1]
    field = by_letter.get(letter)
    if field is None:
        raise UsageError(
            f"cannot show column {'%' + letter!r}: no such column; there are {' '.join(sorted(by_letter))}"
        )
    return Cell(field, "", width, right), end + 1


def parse_long(text: str, fields: Fields) -> list[Cell]:
    """Return the cells of ``JobArrayID:18,StateCompact:.5,UserName:|``. Raises UsageError."""
    by_long = {long: field for field in fields for long in field.longs}
    cells: list[Cell] = []
    for word in text.split(","):
        name, colon, layout = word.partition(":")
        field = by_long.get(name.strip().lower().replace("_", "-")) or by_long.get(name.strip().lower())
        if field is None:
            near = nearest(name.lower(), by_long)
            hint = f"did you mean {' or '.join(near)}?" if near else "see squeue(1), sinfo(1) --Format"
            raise UsageError(f"Invalid job format specification: {name[:60]}: no such column; {hint}")
        right = layout.startswith(".")
        width, end = _digits(layout, int(right))  # int: a literal of digits
        suffix = layout[end:]
        if not width and not suffix:
            width = LONG_WIDTH
        cells.append(Cell(field, "", width, right))
        cells += [Cell(None, suffix)] if suffix else []
    return cells


def _digits(text: str, at: int) -> tuple[int, int]:
    """Return the number at `at` (0: none), and where it ends."""
    end = at
    while end < len(text) and text[end].isascii() and text[end].isdigit():
        end += 1
    return int(text[at:end][:4] or 0), end  # int: four digits


def cell_text(cell: Cell, record: Record, look: Look) -> str:
    """Return the text of `cell` for `record`, in its width."""
    if cell.field is None:
        return cell.literal
    text = clean(cell.field.text(record, look))
    return fitted(text, cell.width, right=cell.right) if cell.width else text


def header_text(cell: Cell) -> str:
    """Return the header of `cell`, in its width."""
    if cell.field is None:
        return cell.literal
    return fitted(cell.field.header, cell.width, right=cell.right) if cell.width else cell.field.header


def format_lines(cells: Sequence[Cell], records: Sequence[Record], look: Look, *, header: bool) -> list[str]:
    """Return the lines of a format with widths, as squeue prints them."""
    lines = ["".join(map(header_text, cells))] if header else []
    return lines + ["".join([cell_text(cell, record, look) for cell in cells]) for record in records]
