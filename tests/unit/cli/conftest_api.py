"""The fixture of the commands' tests: an API at a socket of their own, in UTC."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fake_api import FakeApi, serving


@pytest.fixture
def api(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """Serve a fake API that the commands find, in UTC."""
    path = tmp_path_factory.mktemp("api") / "s"
    monkeypatch.setenv("HPCSCHED_API", str(path))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    with serving(path) as made:
        yield made
    monkeypatch.undo()
    time.tzset()
