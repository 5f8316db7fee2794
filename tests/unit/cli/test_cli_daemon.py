"""`hpcsched down` stops the process that has the controller's socket, whether it answers or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcsched.cli.admin.main import hpcsched_command, run

# Listens as a controller does whose event loop is busy: connections come in, nobody reads them.
BUSY = """
import signal, socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    signal.pause()
"""


def test_a_controller_that_is_too_busy_to_answer_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "api.sock"
    monkeypatch.setenv("HPCSCHED_API", str(path))
    with subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == b"listens\n"
        assert run(hpcsched_command, "hpcsched", ["down"]) == 0
    assert capsys.readouterr().out == f"hpcschedd has stopped (process {busy.pid}); running jobs continue\n"
    assert run(hpcsched_command, "hpcsched", ["down"]) == 0  # the socket is left, as after a kill -9
    assert capsys.readouterr().out == "hpcschedd is not running\n"
    path.unlink()
    assert run(hpcsched_command, "hpcsched", ["down"]) == 0
    assert capsys.readouterr().out == "hpcschedd is not running\n"


def test_a_socket_that_cannot_be_reached_is_not_taken_for_a_controller_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPCSCHED_API", str(tmp_path / "file" / "api.sock"))
    assert run(hpcsched_command, "hpcsched", ["down"]) == 1
    assert "Not a directory" in capsys.readouterr().err
