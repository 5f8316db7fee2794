"""What nodes say that a step has used becomes its row, whatever they say."""

from __future__ import annotations

import math

from hpcsched.steps.step import used


def test_the_nodes_of_a_step_are_added_up_but_for_the_memory_of_a_task() -> None:
    nodes = [
        {"cpu_user_s": 1.5, "cpu_system_s": 0.5, "max_rss_kib": 10.0, "disk_read_bytes": 7.0, "disk_write_bytes": 1.0},
        {"cpu_user_s": 2.0, "max_rss_kib": 30.0, "disk_write_bytes": 2.0},
        {},
    ]
    assert used(nodes) == {
        "cpu_user_s": 3.5, "cpu_system_s": 0.5, "max_rss_kib": 30, "disk_read_bytes": 7, "disk_write_bytes": 3
    }  # fmt: skip
    assert set(used([]).values()) == {None}


def test_what_cannot_be_is_not_taken() -> None:
    assert set(used([{"max_rss_kib": math.inf, "cpu_user_s": math.nan, "disk_read_bytes": -1.0}]).values()) == {None}
