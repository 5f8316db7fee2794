"""Copy a data set to the node's own disk, so that the share is read once per node.

Does not know samples.
Rules: one rank of each host copies, and the others wait for it; jobs that want the same data on the same disk wait for a
lock, and copy once.  Each chunk is verified while it is copied.  A copy has the checksum of the data set in its name, and
gets this name when it is complete.  If the disk is full or read-only, the run reads the share, and prints a line.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.checkpoint.writing.files import write_new
from hpctrain.comm import Communicator
from hpctrain.comm.hosts import identity
from hpctrain.data.dataset import INDEX, TOKENIZER, Dataset, new_directory
from hpctrain.errors import DamagedError, PublishError, TrainError

SPARE_BYTES = 64 << 20  # to leave free on the disk


def staged(directory: Path, disk: Path | None, comm: Communicator) -> tuple[Path, list[str]]:
    """Return the directory from which this rank reads, and lines to print; all ranks call it.

    Raises:
        DamagedError: the data set is damaged.
    """
    if disk is None:
        return directory, []
    hosts = comm.all_gather_object(identity())
    leads = hosts.index(identity()) == comm.rank
    mine = stage(directory, disk) if leads else (directory, "")
    answers = comm.all_gather_object((mine[0].as_posix(), mine[1]))
    path, _ = answers[hosts.index(identity())]
    return Path(path), [line for _, line in answers if line]


def stage(directory: Path, disk: Path) -> tuple[Path, str]:
    """Copy the data set to a disk of this node if it is not there.

    Return the directory and a line to print.
    """
    wanted = Dataset(directory)
    home = disk / f"hpctrain-{wanted.digest[:32]}"
    where = f"on {socket.gethostname()}"
    try:
        disk.mkdir(parents=True, exist_ok=True)
        with _alone(disk / f".{home.name}.lock"):
            if _is_whole(home, wanted.digest):
                return home, f"data: {home} {where} is used again"
            shutil.rmtree(home, ignore_errors=True)
            _remove_drafts(home)
            copied_bytes = _copy(wanted, home)
    except DamagedError:
        raise
    except (OSError, TrainError) as error:
        return directory, f"data: read from {directory} {where}, not from {disk}: {error}"
    return home, f"data: {copied_bytes / 1e6:.1f} MB copied to {home} {where}"


def _copy(wanted: Dataset, home: Path) -> int:
    need_bytes = sum(shard.file_bytes for shard in wanted.shards())
    room = os.statvfs(home.parent)
    free_bytes = room.f_bavail * room.f_frsize
    if need_bytes + SPARE_BYTES > free_bytes:
        raise PublishError(f"{need_bytes / 1e6:.1f} MB do not fit, {free_bytes / 1e6:.1f} MB are free")
    with new_directory(home) as draft:
        for shard in wanted.shards():
            write_new(draft / shard.path.name, shard.pieces())
        tokenizer = wanted.tokenizer()
        if tokenizer is not None:
            write_new(draft / TOKENIZER, [tokenizer])
        write_new(draft / INDEX, [(wanted.directory / INDEX).read_bytes()])
    return need_bytes


def _is_whole(home: Path, digest: str) -> bool:
    """Return whether the copy exists.

    Heads and lengths are checked here, chunks when they are read.
    """
    try:
        there = Dataset(home)
        return there.digest == digest and all(shard.rows >= 0 for shard in there.shards())
    except DamagedError:
        return False


def _remove_drafts(home: Path) -> None:
    """Remove the drafts of killed copies; the lock excludes other writers."""
    for draft in home.parent.glob(f".{home.name}.*.part"):
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this node; the kernel frees it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
