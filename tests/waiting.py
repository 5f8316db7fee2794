"""Wait for a condition instead of sleeping: the one way in which the tests wait.

`PATIENCE_S` is how long anything is waited for, whatever it is: it is spent only when a test fails, and a machine that is
busy, slow, or stands still for some seconds must not make one fail.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE_S = 120.0


def wait_until(cond: Callable[[], T], timeout_s: float = PATIENCE_S, what: str = "the condition") -> T:
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


def played(scene: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a test of a coroutine: it runs on an event loop of its own, and fails after `PATIENCE_S`."""

    @functools.wraps(scene)
    def test(*args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run(asyncio.wait_for(scene(*args, **kwargs), PATIENCE_S))

    return test
