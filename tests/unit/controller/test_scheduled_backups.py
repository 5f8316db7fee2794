"""The controller's schedule of backups: what it keeps of a child that fails."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.config.load import Config
from hpcsched.controller import backups
from hpcsched.state.cluster import BackupState


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


def test_a_failure_that_lasts_is_recorded_once(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Any] = []
    controller: Any = SimpleNamespace(ask=lambda *args, **options: asked.append(args))
    schedule = backups.ScheduledBackups(controller, Config.__new__(Config), time.time)
    schedule._config = SimpleNamespace(backup=SimpleNamespace(to=("/far",)))  # type: ignore[assignment]
    whys = ["", "no disk", "no disk", "no disk", "no room", "", ""]
    for before, why in zip(whys, whys[1:], strict=False):
        schedule._has_made = not why
        schedule._record(BackupState(newest_at_s=1.0, why=why), before)
    assert [record.getMessage() for record in caplog.records] == [
        f"scheduled backup: no {word}" for word in ("disk", "room")
    ]
    assert len(asked) == 4  # both failures, and two that were made
