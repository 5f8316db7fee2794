"""What a step uses on this node: processor time, memory, and what it reads and writes.

Processor time comes with each process that has ended below (wait4); what was read and written the kernel adds up likewise, for
whoever waits for them (/proc/self/io, less what this process itself did). Memory is that of one task with all that runs below it:
the highest sum of resident pages that was seen, looked at ever more seldom, or of a single process, which the kernel
remembers to the page. Pages that processes share count once for each of them, as in Slurm.

Sources: proc(5), getrusage(2), wait4(2); Slurm's jobacct_gather/linux, which counts rchar and wchar too.
"""

from __future__ import annotations

import os
import resource
from typing import Dict, Iterable, Optional, Tuple

from hpcnode import process

FIRST_LOOK_S = 0.25
LAST_LOOK_S = 5.0


class Usage:
    """What all that runs, and has ended, below this process has used since this was made."""

    def __init__(self) -> None:
        self.user_s = 0.0
        self.system_s = 0.0
        self.max_rss_kib = 0
        self._look_s = FIRST_LOOK_S
        self._moved = _moved_below()

    def add(self, usage: resource.struct_rusage) -> None:
        """Take account of a child that has ended."""
        self.user_s += usage.ru_utime
        self.system_s += usage.ru_stime
        self.max_rss_kib = max(self.max_rss_kib, usage.ru_maxrss)

    def look(self, roots: Iterable[int]) -> float:
        """Take account of the memory of each of `roots` with all below it, and return after how many seconds to look again."""
        page_kib = resource.getpagesize() >> 10
        for root in roots:
            stats = [process.read_stat(pid) for pid in (root, *process.quick_descendants(root))]
            self.max_rss_kib = max(
                self.max_rss_kib, sum(stat.rss_pages * page_kib for stat in stats if stat is not None)
            )
        self._look_s = min(2 * self._look_s, LAST_LOOK_S)
        return self._look_s

    def as_dict(self) -> Dict[str, float]:
        """Return it as a report has it."""
        found = {
            "cpu_user_s": self.user_s,
            "cpu_system_s": self.system_s,
            "max_rss_kib": float(self.max_rss_kib),
        }
        moved = _moved_below()
        if moved is not None and self._moved is not None:
            found["disk_read_bytes"] = float(moved[0] - self._moved[0])
            found["disk_write_bytes"] = float(moved[1] - self._moved[1])
        return found


def _moved_below() -> Optional[Tuple[int, int]]:
    """Return how many bytes were read and written by all below that has ended; None where the kernel does not count them."""
    whole, own = _moved("/proc/self/io"), _moved("/proc/self/task/%d/io" % os.getpid())
    return None if whole is None or own is None else (whole[0] - own[0], whole[1] - own[1])


def _moved(path: str) -> Optional[Tuple[int, int]]:
    """Return what an io file of proc(5) says in its first two lines, rchar and wchar."""
    try:
        words = process.read_file(path).split(None, 4)
    except OSError:
        return None
    return int(words[1]), int(words[3])
