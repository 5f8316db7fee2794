"""Ranks of unequal speed: one is held to a third of its core by a CPU quota in mid-run. Needs root and cgroups."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench import hosts
from tests.bench.figures import Figure, from_samples

SCRIPT = Path(__file__).with_name("unequal.py")
PERIOD_US, PART = 10_000, 3
SETTLED = 10  # steps at the end that are looked at


def run(quick: bool = False) -> list[Figure]:
    """Return samples per second with shares by speed beside the sum of what each rank does alone, and steps to the new shares."""
    with tempfile.TemporaryDirectory() as folder, quota(PERIOD_US // PART) as group:
        if group is None:
            print("not root, or no CPU cgroups: nothing is measured")
            return []
        found = json.loads(hosts.run(hosts.mpirun_here(2, SCRIPT, folder, str(group))).splitlines()[-1])
    at, rates, shares = found["slowed_at"], found["samples_per_s"], found["shares"]
    last = shares[-1]
    followed = next(step for step, now in enumerate(shares[at:], 1) if abs(now[0] - last[0]) <= max(2, last[0] // 8))
    return [
        from_samples(
            f"2 ranks, speeds {found['solo'][0]:.1f} and {found['solo'][1]:.1f}: shares {last[0]} and {last[1]}",
            rates[-SETTLED:],
            "samples/s",
            bar=">= 0.92",
            floor=sum(found["solo"]),
            floor_name="the sum alone",
        ),
        Figure(name="steps from the slowdown to the new shares", value=followed, unit="steps", bar="<= 5"),
    ]


@contextmanager
def quota(quota_us: int) -> Iterator[Path | None]:
    """Make a CPU cgroup whose processes get so many microseconds in each period. None: it cannot be made."""
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group = (old if old.is_dir() else new) / f"hpcsched-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        if old.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        yield group
    finally:
        group.rmdir()
