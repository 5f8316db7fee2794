"""What a changed configuration is said to have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcsched.config.load import Config, build_config
from hpcsched.controller.recovery import settings_changed


def configured(**tables: Any) -> Config:
    return build_config(tables, [], config_dir=Path("/nonexistent"), environ={})


def test_each_section_that_differs_is_named_with_its_keys() -> None:
    before = configured(scheduler={"policy": "easy", "weights": {"age": 5}}, cluster={"name": "a"})
    after = configured(
        scheduler={"policy": "default", "preempt_type": "qos", "weights": {"age": 6}},
        cluster={"name": "b"},
        controller={"kill_wait_s": 3},
        qos={"night": {}},
        roles={"admins": ["ann"]},
        privacy={"hide": ["jobs"]},
        audit={"syslog": False},
    )
    assert settings_changed(before, before) == []
    assert settings_changed(before, after) == [
        "accounts, QOS, licenses, fair share: reloaded",
        "[cluster] name",
        "[controller] kill_wait_s",
        "[scheduler] policy, preempt_type",
        "[scheduler.weights] age",
        "[roles] admins",
        "[privacy] hide",
        "[audit] syslog",
    ]
