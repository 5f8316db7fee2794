"""A few rounds of faults on a share like NFS; many by `make checkpoint-rounds`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from checkpoint_rounds import why_not
from ranks import HERE

ROUNDS = 15


@pytest.mark.root
@pytest.mark.skipif(bool(why_not()), reason=f"rounds of faults on a share: {why_not()}")
def test_no_fault_of_the_share_breaks_a_promise() -> None:
    command = [sys.executable, "-m", "tests.train.checkpoint_rounds", "--rounds", str(ROUNDS), "--seed", "7"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1], check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{ROUNDS} rounds, all promises kept: ")
