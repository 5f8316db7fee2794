"""Whether others could replace what a path leads to, or bring it elsewhere.

    check_path       a program that root runs, a directory with orders for root
    open_directory   a directory that root writes to by a path of others, as a descriptor
    is_made_by       a socket: only root and the account that serves it have made the way to it

Rules: each directory and each link on the way counts, links are followed, and so is the thing at the end. In a directory that
others may write, with a sticky bit, they cannot rename what is not theirs. ACLs count: their mask is in the group's bits.

Source: sshd_config(5), StrictModes; path_resolution(7); openat(2).
"""

from __future__ import annotations

import os
import stat
from typing import Iterator, List, Set, Tuple, Union

MAX_COMPONENTS = 256  # directories and links of a way
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def way_to(path: Union[str, os.PathLike[str]]) -> Iterator[Tuple[str, os.stat_result]]:
    """Yield each directory and link that leads to an absolute path, and what is there.

    Raises: PermissionError for too many of them, another OSError if one is missing.
    """
    path = os.fspath(path)
    left, at = path.split("/")[::-1], "/"
    for _ in range(MAX_COMPONENTS):
        status = os.lstat(at)
        yield at, status
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(at)
            at = "/" if target.startswith("/") else os.path.dirname(at)
            left += target.split("/")[::-1]
        part = _next_part(left)
        if not part:
            return
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)
    raise PermissionError("the path %s has more than %d parts and links" % (path, MAX_COMPONENTS))


def _next_part(left: List[str]) -> str:
    """Take the next name off a path in reverse order; "" if none is left."""
    while left:
        part = left.pop()
        if part not in ("", "."):
            return part
    return ""


def check_path(path: Union[str, os.PathLike[str]], uid: int) -> str:
    """Check that only root and the user can replace it; return the path without links.

    Raises: PermissionError, another OSError if there is nothing.
    """
    at = "/"
    for at, status in way_to(path):
        _check_entry(at, status, uid, os.fspath(path))
    return at


def _check_entry(at: str, status: os.stat_result, uid: int, path: str) -> None:
    if status.st_uid not in (0, uid):
        raise PermissionError("%s belongs to user %d, who could replace %s" % (at, status.st_uid, path))
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & OF_OTHERS and not is_sticky:
        raise PermissionError("others may write %s, and so replace %s; run: chmod go-w %s" % (at, path, at))


def open_directory(path: str, uid: int) -> int:
    """Return a descriptor of a directory that only root and the user can replace.

    Also while it is opened: the user may be at work. So links count only if they are root's or our own.

    Raises: PermissionError, another OSError if there is no such directory.
    """
    for at, status in way_to(path):
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise PermissionError("%s is a link of user %d, who could lead %s elsewhere" % (at, status.st_uid, path))
    real = check_path(path, uid)
    directory = os.open("/", FOLDER)
    for part in filter(None, real.split("/")):
        above = directory
        try:
            directory = os.open(part, FOLDER, dir_fd=above)
        finally:
            os.close(above)
        try:
            _check_entry(real, os.fstat(directory), uid, path)
        except PermissionError:
            os.close(directory)
            raise
    return directory


def is_made_by(path: str, uid: int) -> bool:
    """Return whether only root and `uid` could make the directory and the links of a path.

    Above it, others may write a directory that is sticky, if what the path has there belongs to root: everybody may make
    something there, so that it belongs to `uid` proves nothing.

    Raises: OSError.
    """
    shared: Set[str] = set()
    at = "/"
    for at, status in way_to(os.path.join(os.getcwd(), os.path.dirname(path))):
        if status.st_uid not in (0, uid) or (status.st_uid and os.path.dirname(at) in shared):
            return False
        if stat.S_ISDIR(status.st_mode) and status.st_mode & OF_OTHERS:
            if not status.st_mode & stat.S_ISVTX:
                return False
            shared.add(at)
    return at not in shared
