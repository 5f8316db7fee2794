"""Files that survive a power failure whole: write, fsync, rename, fsync the directory.

An OSError (disk full or broken) goes to the caller; the old content is still there then.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, Dict, Iterable, Optional

MAX_OBJECT_BYTES = 32 << 20  # a launch has at most 8 MiB on the wire, and JSON escapes make it longer
NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)  # nothing, a link or a socket


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, in as many calls as needed."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_way_to(path: str) -> None:
    """Make durable the names in a directory and in all directories above it that we may read."""
    while True:
        try:
            sync_folder(path)
        except PermissionError:
            pass  # another account created it, long ago
        above = os.path.dirname(path)
        if above == path:
            return
        path = above


def write_durably(folder: str, name: str, data: bytes, parents: Iterable[str] = ()) -> None:
    """Replace a file durably.

    `parents`: directories above `folder` whose names must be durable, too.
    """
    path = folder + "/" + name
    temporary = path + ".new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    for above in (folder, *parents):
        sync_folder(above)


def write_plainly(path: str, data: bytes, mode: int, new: bool = True) -> None:
    """Write a file that must outlive this process, but not a power failure.

    `new`: no file may have this path; else the file is emptied before.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, mode)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def to_bytes(obj: Dict[str, Any]) -> bytes:
    """Return the JSON of a record."""
    return json.dumps(obj, separators=(",", ":")).encode("utf-8", "surrogateescape")


def read_object(path: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object in a file.

    None: it is missing, was cut off, or is not a regular file of at most MAX_OBJECT_BYTES.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block us
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_OBJECT_BYTES + 1)
    finally:
        os.close(fd)
    try:
        obj = json.loads(data.decode("utf-8", "surrogateescape")) if len(data) <= MAX_OBJECT_BYTES else None
    except (ValueError, RecursionError):
        return None
    return obj if isinstance(obj, dict) else None
