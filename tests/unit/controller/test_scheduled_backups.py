"""The controller's schedule of backups: what it keeps of a child that fails."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.controller import backups


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (("/nowhere/python",), "cannot back up: cannot start /nowhere/python: No such file or directory"),
        ((sys.executable, "-c", "raise SystemExit('the disk is gone')"), "the disk is gone"),
        ((sys.executable, "-c", "print('[1]')"), "cannot back up: exit status 0"),
    ],
)
def test_a_child_that_fails_leaves_its_reason(
    program: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "PROGRAM", program)
    controller: Any = SimpleNamespace(cluster=SimpleNamespace(backup=None))
    config: Any = SimpleNamespace(config_dir="/nowhere")
    state = asyncio.run(backups.ScheduledBackups(controller, config, time.time)._asked())
    assert (state.why, controller.cluster.backup) == (why, state)
