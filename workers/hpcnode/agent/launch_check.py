"""Whether this node is fit to start a job.

A look before the first launch of each job, without a fork and within microseconds. It looks at what may be asked without being
blocked: file systems of this machine by statvfs (never a share, whose server may be away), and what the sampler and the watcher
of GPUs saw last. What is not known counts as well.

A node that is not fit refuses the launch with the reason, as a node with a full disk does: the job starts elsewhere, and the
node gets no jobs until it is fit again.
"""

from __future__ import annotations

import os
from typing import Callable, Collection, Dict, Iterable, List, Mapping, Set, Union

from hpcnode.os import process
from hpcnode.os.surroundings import NETWORK

LEAST_BYTES, LEAST_SHARE = 1 << 20, 20  # free: a MiB, or a twentieth of a small file system
LEAST_INODES = 8
MAX_TABLE = 1 << 20
MOUNTS_S = 60.0  # until the table of mounts is read again
GPU_INFO = "gpu_info:"
GROWTH = {  # between two looks of the sampler, a minute: above it the node is not fit
    "node_ecc_errors_total:uncorrected": (0, "%d uncorrected memory errors in the last minute"),
    "node_throttled_total:core": (600, "its cpus were slowed down for heat %d times in the last minute"),
    "node_throttled_total:package": (600, "its cpus were slowed down for heat %d times in the last minute"),
}
Values = Mapping[str, Union[int, float]]


class LaunchCheck:
    """The look of one agent.

    `places`: directories that a launch writes to. `latest`: what the sampler knows, its growth in the last minute included.
    """

    def __init__(
        self,
        places: Iterable[str],
        latest: Callable[[], Values],
        growth: Callable[[], Values],
        mounts: str = "/proc/self/mountinfo",
    ) -> None:
        self._places = list(dict.fromkeys(os.path.realpath(place) for place in places))
        self._latest, self._growth, self._mounts = latest, growth, mounts
        self._local: List[str] = []
        self._read_s = float("-inf")
        self._missed: Set[int] = set()  # GPUs for which a launch was refused

    def why_unfit(self, gpus: Collection[int]) -> str:
        """Return why a launch that uses these GPUs must not start here, "" if it may."""
        why = self._why_no_room() or self._why_no_gpus(gpus)
        if why:
            self._missed.update(gpus)
        return why or self._why_failing()

    def why_still(self) -> str:
        """Return why the node is still not fit for what it has refused, "" if it is."""
        why = self.why_unfit(self._missed)
        if not why:
            self._missed.clear()
        return why

    def _why_no_room(self) -> str:
        for place in self._local_places():
            try:
                info = os.statvfs(place)
            except OSError as error:
                return "cannot use %s: %s" % (place, error.strerror)
            if info.f_flag & os.ST_RDONLY:
                return "%s is read-only" % place
            least = min(LEAST_BYTES, info.f_blocks * info.f_frsize // LEAST_SHARE)
            if info.f_bavail * info.f_frsize < least:
                return "%s is full" % place
            if info.f_files and info.f_favail < LEAST_INODES:
                return "%s has no free inodes" % place
        return ""

    def _local_places(self) -> List[str]:
        now_s = process.boot_clock_s()
        if now_s - self._read_s > MOUNTS_S:
            self._read_s = now_s
            kinds = mount_kinds(self._mounts)
            self._local = [place for place in self._places if not is_remote(kind_of(place, kinds))]
        return self._local

    def _why_no_gpus(self, gpus: Collection[int]) -> str:
        if not gpus:
            return ""
        values = self._latest()
        if values.get("gpu_driver_answers") == 0:
            return "the GPU driver does not answer"
        there = {column[len(GPU_INFO) :].partition(":")[0] for column in values if column.startswith(GPU_INFO)}
        missing = [index for index in sorted(gpus) if str(index) not in there] if there else []
        return "GPU %s is not there any more" % ", ".join(map(str, missing)) if missing else ""

    def _why_failing(self) -> str:
        growth = self._growth()
        for column, (most, words) in GROWTH.items():
            if growth.get(column, 0) > most:
                return words % growth[column]
        return ""


def mount_kinds(path: str) -> Dict[str, str]:
    """Return the type of the file system at each mount point; later mounts cover earlier ones."""
    found: Dict[str, str] = {}
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(MAX_TABLE)
    except OSError:
        return found
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) > 4 and after:
            point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
            found[point] = after.split(" ")[0]
    return found


def kind_of(path: str, kinds: Mapping[str, str]) -> str:
    """Return the type of the file system that a path is on, "" if it is not known."""
    while path not in kinds and path != "/":
        path = os.path.dirname(path)
    return kinds.get(path, "")


def is_remote(kind: str) -> bool:
    """Return whether another machine, or a program, answers for file systems of this type."""
    return kind in NETWORK or kind.startswith(("fuse", "nfs", "autofs"))
