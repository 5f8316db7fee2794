"""The queue as lines of text: which columns, in which order. What squeue and hqueue print.

Rendered by the controller, so that only the text has to travel and a row that has not changed is not written again. A job is
the JSON object of the API. Source: squeue(1), --sort, --array, --long.
"""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from operator import itemgetter

from hpcsched.errors import UsageError
from hpcsched.listing.formats import Cell, FormatField, Look, cell_text, format_lines, header_text
from hpcsched.listing.jobfields import FIELDS, parse_format, parse_long_format
from hpcsched.listing.jobs import ACTIVE_STATES, ENDED_STATES, Job, end_s, start_s
from hpcsched.listing.text import DIM, GREEN, RED, YELLOW, columns

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any

# In the order in which Slurm numbers them, by which it sorts.
_STATE_ORDER = (
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
    "DEADLINE", "OUT_OF_MEMORY", "CONFIGURING", "COMPLETING",
)  # fmt: skip
_NUMBERS = {
    "rawid": "id", "time": "elapsed_s", "limit": "time_limit_s", "nodes": "num_nodes", "cpus": "num_cpus", "mem": "mem_mib",
    "priority": "priority", "share": "priority", "nice": "nice", "tasks": "num_tasks", "uid": "uid", "gpus": "gpus",
    "submitted": "submitted_at_s",
}  # fmt: skip
_FAR = float("inf")
# How a table becomes narrower: a column is cut to so many characters, or (0) left out.
NARROWER = (
    ("name", 16), ("partition", 0), ("name", 8), ("nodes", 0), ("cpus", 0), ("where", 16), ("starts", 0), ("within", 0),
    ("where", 8),
)  # fmt: skip
# Those that run, that wait, that have ended: an order, not a column.
_PHASE = FormatField("phase", "", "", lambda job, look: str(_phase(job)))


class Listing(
    namedtuple(
        "Listing",
        "cells order array header dated fit colour fold width",
        defaults=(False, True, False, False, False, False, 0),
    )
):
    """How the jobs shall be written. `order`: fields to sort by, with whether each is turned around."""

    __slots__ = ()

    cells: Sequence[Cell]
    order: Sequence[tuple[FormatField, bool]]
    array: bool  # each waiting task of an array on its line
    header: bool
    dated: bool  # with a line that says when
    fit: bool  # a table: columns as wide as they need to be
    fold: bool  # the ended tasks of an array are on one line, too
    colour: bool  # a table's lines in the colour of the job's state
    width: int  # a table leaves columns out to be no wider, 0: it may be as wide as it is


def make_listing(text: str, *, long: bool, order: str, fit: bool = False, width: int = 0, **layout: bool) -> Listing:
    """Return the listing with the format `text`: of long names, or else of percent signs or names. Raises UsageError."""
    cells = parse_long_format(text) if long else parse_format(text)
    return Listing(cells, parse_order(order), fit=fit and not long and "%" not in text, width=width, **layout)


def parse_order(text: str) -> list[tuple[FormatField, bool]]:
    """Return the fields of ``P,t,-p``: squeue's letters, or names. Raises UsageError."""
    keys = []
    for word in filter(None, text.split(",")):
        name = word.lstrip("+-")
        field = next((one for one in (*FIELDS, _PHASE) if name and name in (one.letter, one.name)), None)
        if field is None:
            raise UsageError(
                f"Invalid sort specification: {word[:60]}; write squeue's letters or columns: -S name or -S -time"
            )
        keys.append((field, word.startswith("-")))
    return keys


class QueueRow(namedtuple("QueueRow", "place ranks cells colour")):
    """A job's line, and by what it is sorted: `ranks`, one for each field of the listing's order, then `place`."""

    __slots__ = ()

    place: tuple[int, int]
    ranks: Sequence[object]
    cells: Sequence[str]  # of a table; else one, the whole line
    colour: str


def row_of(job: Job, listing: Listing, look: Look, *, ranked: bool = True) -> QueueRow:
    """Return the row that shows `job`, or an array's waiting tasks as one (``folded``), with its `ranks` or without."""
    place = (job["array_job_id"] or job["id"], job["array_task_id"] or 0)
    cells = [cell_text(cell, job, look) for cell in listing.cells]
    colour = _colour(job["state"]) if listing.colour else ""
    return QueueRow(
        place, ranks_of(job, listing, look) if ranked else (), cells if listing.fit else ("".join(cells),), colour
    )


def ranks_of(job: Job, listing: Listing, look: Look) -> list[object]:
    """Return by what the row of `job` is sorted."""
    return [_rank(field, job, look) for field, _ in listing.order]


def _rank_at(at: int) -> Callable[[QueueRow], Any]:
    return lambda row: row[1][at]


def queue_text(rows: Sequence[QueueRow], listing: Listing, look: Look) -> str:
    """Return `rows` as text in the order that `listing` asks for, and else by number; with the headers."""
    made = sorted(rows, key=itemgetter(0))
    for at, (_, reverse) in reversed(list(enumerate(listing.order))):
        made.sort(key=_rank_at(at), reverse=reverse)
    if listing.fit:
        return _fitted(made, listing)
    lines = [time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(look.now_s))] if listing.dated else []
    lines += format_lines(listing.cells, (), look, header=listing.header)
    lines += [row[2][0] for row in made]
    return "".join([f"{line}\n" for line in lines])


def _fitted(rows: Sequence[QueueRow], listing: Listing) -> str:
    """Return `rows` in columns as wide as their contents, within the width of `listing`."""
    headers: Sequence[str] = [header_text(cell) for cell in listing.cells] if listing.header else []
    right: Sequence[bool] = [cell.right for cell in listing.cells]
    colours = [row.colour for row in rows] if listing.colour else ()
    cells: Sequence[Sequence[str]] = [row[2] for row in rows]
    if listing.width and rows:
        names = [cell.field.name for cell in listing.cells if cell.field is not None]
        headers, cells, right = _narrowed(names, headers, cells, right, listing.width)
    return columns(headers, cells, right=[at for at, is_right in enumerate(right) if is_right], colours=colours)


def _narrowed(
    names: Sequence[str], headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]], Sequence[bool]]:
    """Return headers, rows and sides of a table that is `width` wide at most: it is made narrower step by step.

    What is cut ends with a ``+``.
    """
    lines = [headers, *rows] if headers else list(rows)
    texts = {name: list(column) for name, column in zip(names, zip(*lines, strict=True), strict=True)}
    widths = {name: max(map(len, column)) for name, column in texts.items()}
    for name, least in NARROWER:
        over = sum(widths.values()) + len(widths) - 1 - width
        if over <= 0:
            break
        if name in texts and least:
            widths[name] = min(widths[name], max(least, widths[name] - over))
            most = widths[name]
            texts[name] = [text if len(text) <= most else text[: most - 1] + "+" for text in texts[name]]
        elif name in texts:
            del texts[name], widths[name]
    first, *others = zip(*texts.values(), strict=True)
    shown = [is_right for name, is_right in zip(names, right, strict=True) if name in texts]
    return (first, others, shown) if headers else ((), [first, *others], shown)


def _phase(job: Job) -> int:
    return 0 if job["state"] in ACTIVE_STATES else 2 if job["state"] in ENDED_STATES else 1


def _colour(state: str) -> str:
    match state:
        case "RUNNING" | "COMPLETING":
            return GREEN
        case "PENDING" | "CONFIGURING" | "SUSPENDED":
            return YELLOW
        case "COMPLETED" | "CANCELLED":
            return DIM
        case _:
            return RED


def _rank(field: FormatField, job: Job, look: Look) -> object:
    match field.name:
        case "id":
            return (job["array_job_id"] or job["id"], job["array_task_id"] or 0)
        case "phase":
            return _phase(job)
        case "st" | "state":
            return _STATE_ORDER.index(job["state"])
        case "start" | "eta":
            return _known(start_s(job))
        case "end":
            return _known(end_s(job))
        case "left":
            return _known(None if job["time_limit_s"] is None else job["time_limit_s"] - job["elapsed_s"])
        case "priority" | "share":
            return job["priority"] or 0
        case name if name in _NUMBERS:
            return _known(job[_NUMBERS[name]])
        case _:
            return cell_text(Cell(field), job, look)


def _known(value: float | None) -> float:
    return _FAR if value is None else value
