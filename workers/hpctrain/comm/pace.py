"""How the sum of a whole gradient is best cut into buckets: by the speed of the link between hosts.

On one host the sum is over in less time than a thread beside the backward pass would take from it: one bucket, summed after it.
Between hosts the link is to be busy from the first gradient on and soon done after the last: a bucket is what it carries in
`BUCKET_S`, in powers of four so that two measurements of one link give the same, and so the same order of sums.
"""

from __future__ import annotations

import math
from typing import Any

from hpctrain.comm.base import MOST_BUCKET_BYTES, Pace
from hpctrain.comm.hosts import Hosts
from hpctrain.comm.ways import Way, measure

BUCKET_S = 0.008
LEAST_BUCKET_BYTES = 256 << 10
FIRST_BYTES, SECOND_BYTES = 128 << 10, 1 << 20
PATIENCE_S = 0.1


def pace_of(mpi: Any, hosts: Hosts, between: Way | None) -> Pace:
    """This will measure how fast the leaders of hosts sum over `between`, and cut accordingly; all ranks call it."""
    if hosts.count == 1:
        return Pace(bucket_bytes=MOST_BUCKET_BYTES, beside=False)
    bytes_per_s = 0.0
    if hosts.leaders is not None:
        assert between is not None
        size_bytes, seconds = FIRST_BYTES, measure(mpi, hosts.leaders, between, FIRST_BYTES)
        if seconds * SECOND_BYTES / FIRST_BYTES < PATIENCE_S:
            size_bytes, seconds = SECOND_BYTES, measure(mpi, hosts.leaders, between, SECOND_BYTES)
        bytes_per_s = 2 * (hosts.count - 1) / hosts.count * size_bytes / seconds
    bytes_per_s = hosts.here.bcast(bytes_per_s)
    return Pace(bucket_bytes=bucket_bytes(bytes_per_s), beside=True, bytes_per_s=bytes_per_s)


def bucket_bytes(bytes_per_s: float) -> int:
    """This will give the size of a bucket for a link of that speed."""
    power = round(math.log(max(1.0, bytes_per_s * BUCKET_S), 4))
    return min(MOST_BUCKET_BYTES, max(LEAST_BUCKET_BYTES, 4**power))
