"""A whole log of a real machine: every job starts at the second that the reference schedules say.

`python -m tests.bench sched` does the same with larger logs, job by job, where HPCSCHED_TRACES names a directory of them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hpcsched.sim.policies import simulate
from hpcsched.sim.swf import read_trace

KTH = Path(__file__).parents[2] / "golden" / "traces" / "KTH-SP2.swf.gz"
# Of the schedules that another simulator made; see the README beside the log.
FINGERPRINTS = {
    "fcfs": "f4bfb04d70fa5e2f19f3594765b0c3d2267b6a391d26c42a32500751b04c1367",
    "easy": "432acf25ef9c0f1f613982a07e7babe25b979442ad78fd7865c3dd2a2aa4ab87",
    "easy-sjbf": "9d0ce69889232cc45f2ace8e1681ffeb9f6ae23cb59c9802a4a25e1a693fbf9b",
}


@pytest.mark.parametrize("policy", sorted(FINGERPRINTS))
def test_every_start_is_that_of_the_reference(policy: str) -> None:
    done = simulate(read_trace(KTH), policy)
    starts = sorted(zip((job.id for job in done.jobs), done.starts_s, strict=True))
    assert len(starts) == 28481
    lines = "".join(f"{job_id},{int(at_s)}\n" for job_id, at_s in starts)
    assert hashlib.sha256(lines.encode()).hexdigest() == FINGERPRINTS[policy]


def test_conservative_and_default_serve_better_than_easy() -> None:
    trace = read_trace(KTH)
    easy, conservative, ours = (simulate(trace, policy).metrics for policy in ("easy", "conservative", "default"))
    assert conservative.bounded_slowdown_mean <= easy.bounded_slowdown_mean
    assert ours.bounded_slowdown_mean <= 69.4
    assert ours.wait_mean_s <= easy.wait_mean_s
    assert ours.wait_max_s <= easy.wait_max_s
