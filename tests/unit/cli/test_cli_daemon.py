"""`hpcsched up`, `down` and `status`: the process that has the controller's socket, whether it answers or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_api import FakeApi, node

from hpcsched.cli.admin import daemon, hpcsched_command, run

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


def test_an_unreachable_socket_is_not_taken_for_a_stopped_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPCSCHED_API", str(tmp_path / "file" / "api.sock"))
    assert run(hpcsched_command, "hpcsched", ["down"]) == 1
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "line"), [(1, "1 of 1 node answers"), (2, "2 of 2 nodes answer")])
def test_up_counts_the_nodes_that_answer(api: FakeApi, count: int, line: str) -> None:
    api.answers["GET /v1/nodes"] = {"nodes": [node(f"n{number}") for number in range(count)]}
    assert daemon._nodes_that_answer() == [line]


def test_status_names_the_log_of_the_controller(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["GET /v1/ping"] = {
        "cluster": "lab", "hpcsched": "0.1.0", "pid": 7, "now_s": 16.0, "started_at_s": 1.0, "epoch": 1, "nodes": {},
        "counts": {},
    }  # fmt: skip
    monkeypatch.setenv("HPCSCHED_CONFIG", str(tmp_path))
    (tmp_path / "hpcsched.toml").write_text(f'[controller]\nstate_dir = "{tmp_path}"\n')
    assert run(hpcsched_command, "hpcsched", ["status"]) == 0
    assert "log" not in capsys.readouterr().out
    (tmp_path / "hpcschedd.log").touch()
    assert run(hpcsched_command, "hpcsched", ["status"]) == 0
    assert f"  log     {tmp_path}/hpcschedd.log\n" in capsys.readouterr().out


def test_who_came_by_ssh_is_told_the_way_to_a_gateway_on_the_loopback_address() -> None:
    came = {"SSH_CONNECTION": "192.0.2.7 50000 192.0.2.1 22", "LOGNAME": "ann"}
    tunnel = "ssh -N -L 6820:localhost:6820 ann@192.0.2.1"
    assert daemon.gateway_address("127.0.0.1", 6820, came) == ("https://localhost:6820", tunnel)
    for environ in ({}, {"SSH_CONNECTION": ""}, {"SSH_CONNECTION": "x"}):
        assert daemon.gateway_address("127.0.0.1", 6820, environ) == ("https://localhost:6820", "")
    assert daemon.gateway_address("0.0.0.0", 6820, came)[1] == ""
