"""Write files on a share that may be NFS, so that readers see complete files only.

The fence: only the attempt with the highest claimed number may publish.  A claim is a file `attempt.NNNN` in the checkpoint
directory, created with O_EXCL and never removed.  Does not know what is published.
Rules: a name is never used twice, and is created with O_EXCL.  Errors of write, fsync and close all count (NFS reports a full
disk late).  A file is published by `link()` to its final name; the inode tells whether that worked, because the reply to a
link may be lost, and the repeated request then fails with "exists".  The directory is fsynced.
A writer checks the fence before it publishes, directly after it has created a file in the same directory: that refreshes the
directory's attributes, so an NFS client does not answer from an old listing.  A stale attempt may win a race by one
checkpoint; it is complete, so it does no harm.
Sources: open(2), link(2), close(2); RFC 1813 section 4 (retransmitted requests); nfs(5), "Data and metadata coherence".
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from hpctrain.checkpoint.writing import files
from hpctrain.env import JobFacts
from hpctrain.errors import PublishError, StaleAttemptError

# Errors of file systems without hard links; there the name, which is never used twice, must suffice.
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
DIRECT = getattr(os, "O_DIRECT", 0)
NOT_DIRECTLY = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
BLOCK_BYTES = 8 << 20
WRITERS = 2


def write_new(path: Path, pieces: Iterable[bytes | memoryview], *, direct: bool = False) -> int:
    """Create a file, write the pieces, fsync and close it; return the number of bytes.

    `direct`: past the page cache if the file system can, for large files that are not read again soon.

    Raises:
        FileExistsError: the name is taken.
        PublishError: write, fsync or close failed; the incomplete file is removed.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    closed = False
    try:
        if direct:
            written_bytes = _write_blocks(path, descriptor, pieces)
        else:
            written_bytes = sum(write_all(descriptor, piece) for piece in pieces)
        os.fsync(descriptor)
        closed = True  # also if close fails, the descriptor is freed
        os.close(descriptor)
    except BaseException as error:
        if not closed:
            _close_quietly(descriptor)
        remove(path)
        if isinstance(error, OSError):
            raise PublishError(f"cannot write {path}: {error.strerror or error}") from error
        raise  # the source of the pieces failed
    return written_bytes


def write_all(descriptor: int, piece: bytes | memoryview) -> int:
    """Write every byte of `piece`, also after short writes."""
    rest = memoryview(piece).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    return len(memoryview(piece).cast("B"))


def _write_blocks(path: Path, descriptor: int, pieces: Iterable[bytes | memoryview]) -> int:
    """Gather the pieces in aligned blocks, which threads write past the page cache.

    Write the rest normally.

    Touching new memory is much slower than a copy, and the page cache is new memory.
    """
    spare: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(WRITERS):
        spare.put(mmap.mmap(-1, BLOCK_BYTES))

    def write(parts: list[memoryview], at: int) -> None:
        block = spare.get()
        try:
            size = 0
            for part in parts:  # NumPy releases the GIL
                np.copyto(np.frombuffer(block, np.uint8, len(part), size), np.frombuffer(part, np.uint8))
                size += len(part)
            write_block(direct, descriptor, memoryview(block)[:size], at)
        finally:
            spare.put(block)

    at = 0
    under_way: deque[Future[None]] = deque()
    with _opened_direct(path) as direct, ThreadPoolExecutor(WRITERS, "disk") as disk:
        for parts in _blocks(pieces):
            under_way.append(disk.submit(write, parts, at))
            at += sum(map(len, parts))
            if len(under_way) > WRITERS:
                under_way.popleft().result()
        for work in under_way:
            work.result()
    return at


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """Yield the parts of pieces that fill a block, and at the end the rest."""
    parts: list[memoryview] = []
    room = BLOCK_BYTES
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest:
            parts.append(rest[:room])
            room, rest = room - len(parts[-1]), rest[room:]
            if not room:
                yield parts
                parts, room = [], BLOCK_BYTES
    if parts:
        yield parts


@contextmanager
def _opened_direct(path: Path) -> Iterator[int | None]:
    """Open the file again, past the page cache; yield None if this file system cannot."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT)
    except OSError as error:
        if error.errno not in NOT_DIRECTLY:
            raise
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_block(direct: int | None, plain: int, block: memoryview, at: int) -> None:
    """Write a block, direct if possible.

    The rest of a short write and the file's end are not aligned.
    """
    try:
        while block and direct is not None and len(block) % BLOCK_BYTES == 0:
            size = os.pwrite(direct, block, at)
            block, at = block[size:], at + size
    except OSError as error:
        if error.errno not in NOT_DIRECTLY:
            raise
    while block:
        size = os.pwrite(plain, block, at)
        block, at = block[size:], at + size


def write_draft(path: Path, content: bytes) -> Path:
    """Write `content` durably to a new name in the directory of `path`.

    `commit` gives it the final name.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(6)}.tmp")
    write_new(draft, [content])
    return draft


def commit(draft: Path, path: Path) -> None:
    """Give the finished draft its final name atomically and durably.

    Raises:
        PublishError: another file has the name, or the share fails.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno in NO_LINKS:
            _commit_by_rename(draft, path)
            return
        if not _same_file(draft, path):  # "exists" may answer our own repeated request
            raise PublishError(f"cannot publish {path}: {error.strerror}") from error
    if not _same_file(draft, path):
        raise PublishError(f"cannot publish {path}: after link() it is not the file that was written")
    sync_directory(path.parent)
    remove(draft)


def replace_hint(path: Path, content: bytes) -> None:
    """Replace a small file that nothing depends on."""
    draft = write_draft(path, content)
    os.replace(draft, path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not supported, and not needed there
            raise PublishError(f"cannot make the names in {path} durable: {error.strerror}") from error
    finally:
        os.close(descriptor)


def remove(path: Path) -> bool:
    """Remove a file if it exists; return whether it did."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def to_json(value: object) -> bytes:
    """Return the canonical JSON of a value, so that its hash is defined."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _same_file(draft: Path, path: Path) -> bool:
    try:
        written, published = os.stat(draft), os.stat(path)
    except FileNotFoundError:
        return False
    return (written.st_ino, written.st_dev) == (published.st_ino, published.st_dev) and written.st_nlink >= 2


def _commit_by_rename(draft: Path, path: Path) -> None:
    if path.exists():
        raise PublishError(f"cannot publish {path}: the name is taken, and the share has no hard links")
    os.rename(draft, path)
    sync_directory(path.parent)


def _close_quietly(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        pass  # the first error is reported


CLAIM = re.compile(r"attempt\.(\d{4,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The number under which this attempt may publish."""

    directory: Path
    attempt: int


def claim(directory: Path, job: JobFacts, now_s: float) -> Claim:
    """Claim the next attempt number.

    The scheduler's, or one more than the highest claimed one.

    Raises:
        StaleAttemptError: a later attempt of the same job has claimed already.
    """
    directory.mkdir(parents=True, exist_ok=True)
    taken = -1
    while True:
        highest = max(highest_claim(directory), taken)
        _refuse_older_life(directory, job)
        number = max(highest + 1, job.attempt or 0)
        note = {
            "job": job.job,
            "job_attempt": job.attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "claimed_at_s": round(now_s, 3),
        }
        try:
            files.write_new(directory / f"attempt.{number:04d}", [files.to_json(note) + b"\n"])
        except FileExistsError:
            taken = number  # another process was faster; an old listing may miss its file for a minute
            continue
        files.sync_directory(directory)
        return Claim(directory=directory, attempt=number)


def check_claim(mine: Claim) -> None:
    """Check that no later attempt has claimed.

    Raises:
        StaleAttemptError: a later one has; nothing may be published or removed any more.
    """
    highest = highest_claim(mine.directory)
    if highest > mine.attempt:
        raise StaleAttemptError(
            f"cannot publish in {mine.directory}: this is attempt {mine.attempt}, and attempt {highest} has taken over"
        )


def highest_claim(directory: Path) -> int:
    """Return the highest claimed number, -1 if there is none."""
    return max((number for number, _ in _claims(directory)), default=-1)


def _claims(directory: Path) -> list[tuple[int, str]]:
    found = ((CLAIM.fullmatch(name), name) for name in os.listdir(directory))
    return [(int(match[1]), name) for match, name in found if match]


def _refuse_older_life(directory: Path, job: JobFacts) -> None:
    if job.job is None or job.attempt is None:
        return
    for _, name in _claims(directory):
        try:
            note = json.loads((directory / name).read_bytes())
        except ValueError:
            continue  # its writer died while writing it: only the number counts
        other = note.get("job_attempt")
        if note.get("job") == job.job and isinstance(other, int) and other > job.attempt:
            raise StaleAttemptError(
                f"cannot start attempt {job.attempt} of job {job.job} in {directory}: attempt {other} of "
                "it has already started"
            )
