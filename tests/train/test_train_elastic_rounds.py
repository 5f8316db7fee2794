"""A rank that is lost in any exchange of a run, from its start to its end, costs no step; all by `make elastic-rounds`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ranks import HERE, finish, started

FIRST, EVERY = 8, 4


def test_wherever_a_rank_is_lost_no_step_is_lost_or_taken_twice(tmp_path: Path) -> None:
    """In a process of its own: forked ranks need one that has computed nothing yet."""
    command = [sys.executable, HERE / "elastic_rounds.py", "--first", str(FIRST), "--every", str(EVERY)]
    with started(command, {"TMPDIR": str(tmp_path)}) as process:
        ended = finish(process, 380)
    assert ended.status == 0, ended.output
    counts = [int(number) for number in re.findall(r": (\d+) rounds, 0 of them wrong", ended.output)]
    assert len(counts) == 2, ended.output
    assert min(counts) >= 15, "the run has more sums than that"
