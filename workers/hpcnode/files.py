"""The files of a task, opened as the job's user: whatever the path is, it can do no more than the user could.

A FIFO without a reader cannot block the launch, a missing output directory is made, `%t %n %N` are filled per task.
"""

from __future__ import annotations

import os
import re
import stat

_PATTERN = re.compile(r"%(%|(\d{0,2})([tnN]))")


class FilesError(Exception):
    """A file of the task cannot be opened; the text says which and why."""


def fill(pattern: str, rank: int, node_rank: int, node: str) -> str:
    """Return `pattern` with %t (rank), %n (the node's number in the step) and %N (its name) filled; %3t pads."""

    def value(match: re.Match[str]) -> str:
        if match.group(1) == "%":
            return "%"
        width, word = match.group(2), match.group(3)
        if word == "N":
            return node
        return str(rank if word == "t" else node_rank).zfill(int(width or 0))

    return _PATTERN.sub(value, pattern)


def truncates(pattern: str, local_rank: int, node_rank: int) -> bool:
    """Return whether this task is the one that empties the file: of those that share it, the first."""
    if fill(pattern, 1, 0, "a") != fill(pattern, 2, 0, "a"):
        return True
    one_per_node = fill(pattern, 0, 1, "a") != fill(pattern, 0, 2, "b")
    return local_rank == 0 and (one_per_node or node_rank == 0)


def open_output(path: str, truncate: bool) -> int:
    """Open (or make) an output file for appending. Raises FilesError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if truncate:
        flags |= os.O_TRUNC
    try:
        try:
            return _blocking(os.open(path, flags, 0o666))
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            return _blocking(os.open(path, flags, 0o666))
    except OSError as error:
        raise FilesError("cannot open output file %s: %s" % (path, error.strerror)) from None


def open_input(path: str) -> int:
    """Open an input file. Raises FilesError."""
    try:
        return _blocking(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        raise FilesError("cannot open input file %s: %s" % (path, error.strerror)) from None


def _blocking(fd: int) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.set_blocking(fd, True)
    return fd
