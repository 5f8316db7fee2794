"""What a rank prints before it aborts is read before the launcher is told: `wait_until_read`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpctrain.run import wait_until_read


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_it_waits_until_the_other_end_has_read(kind: str) -> None:
    reader, writer = os.pipe() if kind == "pipe" else [end.detach() for end in socket.socketpair()]
    os.write(writer, b"why")
    assert not wait_until_read(writer, limit_s=0.01)
    read = threading.Timer(0.05, os.read, (reader, 3))
    read.start()
    assert wait_until_read(writer, limit_s=60)
    read.join()
    for end in (reader, writer):
        os.close(end)


def test_a_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        print("why", file=log, flush=True)
        assert wait_until_read(log.fileno(), limit_s=0)


@pytest.mark.parametrize("closed", [1, 2])
def test_a_rank_without_a_standard_stream_ends_all_the_same(closed: int) -> None:
    script = (
        "from hpctrain.comm.base import SingleCommunicator; from hpctrain.run import all_or_none\n"
        "with all_or_none(SingleCommunicator()): raise SystemExit(7)"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}>&-', sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stderr == ("hpctrain: the script ended with status 7\n" if closed == 1 else "")
