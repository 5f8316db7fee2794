"""The text of a job's script is not in memory: whether a job has one is asked by `has_script`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hpcsched"
CORE = sorted(
    path for part in ("api", "controller", "lifecycle", "sched", "store") for path in (ROOT / part).rglob("*.py")
)
WITH_TEXT = {"store/store.py"}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_asks_a_jobs_specification_for_the_text(path: Path) -> None:
    if str(path.relative_to(ROOT)) not in WITH_TEXT:
        assert re.findall(r"spec\.script\b", path.read_text()) == []
