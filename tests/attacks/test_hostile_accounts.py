"""Five hostile accounts for some seconds: the controller stays, within its bounds, and answers everybody else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.siege import SYSTEM_PYTHON, besiege, percentile

FOR_S = 8.0  # of `python -m tests.attacks SECONDS`, enough for each kind of attack
MAX_RSS_MB = 512
MAX_LOG_BYTES = 1 << 20
MAX_DISK_BYTES = 256 << 20
MAX_MEDIAN_S = 5.0  # on a machine that does much else; `python -m tests.attacks` has the bounds of a quiet one


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that every account may enter, with a short path."""
    path = Path(tempfile.mkdtemp(prefix="siege-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to run as root: it acts as five accounts")
@pytest.mark.skipif(not os.access(SYSTEM_PYTHON, os.X_OK), reason=f"needs {SYSTEM_PYTHON}, which any account can run")
def test_e1_hostile_accounts_take_nothing_from_others(base: Path) -> None:
    found = besiege(base, FOR_S)
    assert found.same_process, found
    assert not found.failures, found
    assert found.most_rss_mb < MAX_RSS_MB, found
    assert found.log_bytes < MAX_LOG_BYTES, found
    assert 0 < found.disk_bytes < MAX_DISK_BYTES, found
    assert percentile(found.pings, 0.5) < MAX_MEDIAN_S, found
    assert found.attacks["bodies"], found
    assert found.attacks["frames"], found
