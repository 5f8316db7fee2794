"""The time zone of a test: the process has one, and what it had before returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def time_zone(name: str) -> Iterator[None]:
    """Have this zone, as the variable TZ names it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


def zone_fixture(name: str, *, autouse: bool = True) -> Callable[..., Any]:
    """Return a fixture for tests in this zone; with `autouse` it is that of all tests of the file."""

    @pytest.fixture(autouse=autouse)
    def zone() -> Iterator[None]:
        with time_zone(name):
            yield

    return zone
