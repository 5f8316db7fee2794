"""How fast a node is beside others: one number for its cpus, one for its network.

The number for cpus is how many GB of BLAKE2b one of them hashes in a second of its own time: plain arithmetic in registers and
the nearest cache, no special instructions, and the same code in every Python. It compares machines; it is no unit of anything,
and says nothing of memory or GPUs. Cpu time is counted, not the clock's, so that a node that is busy is not taken for a slow
one (one whose cpus share cores still seems slower then). The network's is the rate of the link that the default route takes, by
the kernel's word; a virtual one or Wi-Fi has none.
"""

from __future__ import annotations

import time

CHUNK = b"\x5a" * (1 << 16)  # fits the nearest caches
ROUND_BYTES = 24 << 20  # some 30 ms on a machine of today
ROUNDS = 5  # the best one counts: what disturbs only makes it slower


def cpu_speed(rounds: int = ROUNDS, round_bytes: int = ROUND_BYTES) -> float:
    """Return the speed of a cpu, to three digits after the point; never 0."""
    import hashlib  # asked for by an admin, in a child: no agent need have it in memory

    best = 0.0
    for _ in range(rounds):
        digest = hashlib.blake2b()
        began_s = time.thread_time()
        for _ in range(round_bytes // len(CHUNK)):
            digest.update(CHUNK)
        took_s = time.thread_time() - began_s
        best = max(best, round_bytes / max(took_s, 1e-6) / 1e9)
    return max(round(best, 3), 0.001)


def link_mbps(routes: str = "/proc/net/route", net: str = "/sys/class/net") -> int:
    """Return the rate of the link of the default route in Mbit/s, 0 if it is not known."""
    try:
        with open(routes) as file:
            rows = [line.split() for line in file]
        device = next(row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000")
        with open("%s/%s/speed" % (net, device)) as file:
            return max(0, int(file.read()))
    except (OSError, StopIteration, ValueError):
        return 0
