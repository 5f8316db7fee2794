"""The fixtures of the commands' tests: an API at a socket of their own, and a socket that another account serves."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_api import FakeApi, serving
from waiting import PATIENCE_S


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


@pytest.fixture
def linked() -> Iterator[tuple[socket.socket, str]]:
    """A socket of another account, at a path through its link in a directory like /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, socket.socket(socket.AF_UNIX) as server:
        base = Path(directory)
        base.chmod(0o755)
        (base / "shared").mkdir()
        (base / "shared").chmod(0o1777)
        (base / "home").mkdir()
        server.bind(str(base / "home" / "steps.sock"))
        (base / "shared" / "run").symlink_to(base / "home")
        for each in ("home", "home/steps.sock", "shared/run"):
            os.chown(base / each, 65534, 65534, follow_symlinks=False)
        os.seteuid(65534)  # SO_PEERCRED shows who called listen()
        try:
            server.listen(1)
        finally:
            os.seteuid(0)
        server.settimeout(PATIENCE_S)
        yield server, str(base / "shared" / "run" / "steps.sock")
