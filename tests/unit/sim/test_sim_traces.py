"""Whole logs of real machines: every job starts at the second that the reference schedules say.

The logs are data of others and not part of the repository: HPCSCHED_TRACES names the directory that has them. Here the
smallest of the three is replayed; `python -m tests.bench sched` does them all.
"""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import pytest

from hpcsched.sim.policies import simulate
from hpcsched.sim.swf import read_trace

TRACES = os.environ.get("HPCSCHED_TRACES")
needs_traces = pytest.mark.skipif(
    not TRACES, reason="HPCSCHED_TRACES is not set: replays of real machines' logs against references are NOT checked"
)


@needs_traces
@pytest.mark.parametrize("policy", ["fcfs", "easy", "easy-sjbf"])
def test_every_start_is_that_of_the_reference(policy: str) -> None:
    there = Path(TRACES or "")
    trace = read_trace(there / "KTH-SP2.pyss.swf.gz")
    done = simulate(trace, policy)
    with gzip.open(there / "reference" / f"KTH-SP2.pyss.{policy.replace('-', '_')}.csv.gz", "rt") as lines:
        reference = {int(row["job_id"]): int(row["start"]) for row in csv.DictReader(lines)}
    wrong = [job.id for job, at_s in zip(done.jobs, done.starts_s, strict=True) if reference[job.id] != at_s]
    assert (len(done.jobs), wrong) == (28481, [])


@needs_traces
def test_conservative_and_default_serve_better_than_easy() -> None:
    trace = read_trace(Path(TRACES or "") / "KTH-SP2.pyss.swf.gz")
    easy, conservative, ours = (simulate(trace, policy).metrics for policy in ("easy", "conservative", "default"))
    assert conservative.bounded_slowdown_mean <= easy.bounded_slowdown_mean
    assert ours.bounded_slowdown_mean <= 69.4
    assert ours.wait_mean_s <= easy.wait_mean_s
    assert ours.wait_max_s <= easy.wait_max_s
