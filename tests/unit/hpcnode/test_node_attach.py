"""How long `attach` tries to reach an agent."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcnode.agent import attach


def test_a_machine_that_stood_still_has_one_more_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent works, but a pause of the machine has used up the time to reach it."""
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    there = socket.socket(socket.AF_UNIX)

    def answer_of(path: str) -> socket.socket:
        if clock.now_s:
            return there
        clock.now_s = 3600.0
        raise attach.Unanswered

    monkeypatch.setattr(attach, "time", clock)
    monkeypatch.setattr(attach, "answer_of", answer_of)
    with there:
        assert attach.reach(str(tmp_path), "c", "n1", None) is there
