"""Limits that the shepherd itself has to keep, where no cgroup does.

Memory: the resident pages of the tree are added up every second. Pages that processes share count once for each of them, so
when the sum is too high, the exact share (Pss) decides, which costs more to ask for.
"""

from __future__ import annotations

import resource

from hpcnode import process

WATCH_S = 1.0


def exceeds(root_pid: int, mem_mib: int) -> bool:
    """Return whether the processes below `root_pid` together hold more than `mem_mib`."""
    limit_kib = mem_mib << 10
    page_kib = resource.getpagesize() >> 10
    pids = process.quick_descendants(root_pid)
    stats = (process.read_stat(pid) for pid in pids)
    if sum(stat.rss_pages * page_kib for stat in stats if stat is not None) <= limit_kib:
        return False
    return sum(process.proportional_memory_kib(pid) for pid in pids) > limit_kib
