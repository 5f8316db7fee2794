"""Which references of a cancellation mean jobs, scripts and steps."""

from __future__ import annotations

from hpcsched.controller.requests.jobs import sort_out


def test_what_is_meant() -> None:
    meant = sort_out(["12", "12.0", "10_3.batch", "10_[1-3]", "train.py", "10_3.12", "12.batch", "v1.0"])
    assert meant.jobs == ["12", "10_[1-3]", "train.py", "v1.0"]
    assert meant.batch == ["10_3", "12"]
    assert meant.steps == [("12", 0), ("10_3", 12)]
