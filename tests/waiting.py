"""Wait for a condition instead of sleeping: the one way in which the tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(cond: Callable[[], T], timeout_s: float = 10.0, what: str = "the condition") -> T:
    """Poll `cond` until it returns something true, and return that; fail the test after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.005
    while True:
        value = cond()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s:g} s for {what}, last value {value!r}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)
