"""The client: what it says when the controller is not there, is not ours, breaks off or refuses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_api import FakeApi, log_answer
from waiting import PATIENCE_S

from hpcnode.os import trust
from hpcnode.wire import sockets
from hpcsched import client, errors
from hpcsched.client import aio
from hpcsched.client.jobs import ClusterConnection, SubmitPlace, prepare_script
from hpcsched.client.protocol import Send
from hpcsched.gateway.upstream import Upstream, UpstreamError
from hpctrain.heartbeat import Heartbeat


def test_no_controller_says_where_it_looked_and_what_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_API", str(tmp_path / "none"))
    with pytest.raises(errors.UnavailableError) as error:
        client.call("GET", "/v1/ping")
    said = (
        f"Unable to contact hpcsched controller ({tmp_path}/none: No such file or directory): start it with 'hpcsched up'; "
        "'hpcsched doctor' says what is wrong"
    )
    assert str(error.value) == said


def test_a_socket_that_others_cannot_reach_is_the_admins_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "socket", _DeniedSocket)
    with pytest.raises(errors.UnavailableError, match=r"Permission denied\): an admin can set run_dir"):
        client.call("GET", "/v1/ping", where=tmp_path / "s")


class _DeniedSocket(socket.socket):
    def connect(self, address: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_the_socket_is_found_below_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCSCHED_API", raising=False)
    monkeypatch.setenv("HPCSCHED_CONFIG", str(tmp_path))
    assert client.socket_path() == str(tmp_path / "state" / "run" / "api.sock")
    (tmp_path / "hpcsched.toml").write_text('[controller]\nrun_dir = "/run/elsewhere"\n')
    assert client.socket_path() == "/run/elsewhere/api.sock"


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[socket.socket, int]]:
    """A server whose queue of clients is full, with the number of them. Its socket is `s`."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        server.bind(str(tmp_path / "s"))
        server.listen(0)
        others = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                other = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                other.setblocking(False)
                other.connect(str(tmp_path / "s"))
                others += 1
        assert others > 0
        yield server, others


@pytest.mark.parametrize("client_of", ["blocking", "asyncio", "gateway"])
def test_where_too_many_wait_to_be_served_a_client_waits_as_well(
    client_of: str, tmp_path: Path, crowded: tuple[socket.socket, int]
) -> None:
    server, others = crowded

    def serve() -> None:
        for _ in range(others):
            server.accept()[0].close()
        with server.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"pid": 7}')

    def wait_for_the_client(*words: object) -> None:
        thread.start()
        reach(*words)

    thread, reach = threading.Thread(target=serve), client.reach
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "reach", wait_for_the_client)  # it is called where the queue is full
        if client_of == "blocking":
            answer = client.call("GET", "/v1/ping", where=tmp_path / "s")
        elif client_of == "gateway":
            answer = json.loads(asyncio.run(Upstream(str(tmp_path / "s")).ask("GET", "/v1/ping", {})).body)
        else:
            step = Send("GET", "/v1/ping", None, 30.0)
            there = ClusterConnection(str(tmp_path / "s"), None, results="", calls=tmp_path, python="")
            reply = asyncio.run(aio.perform(step, there))
            answer = json.loads(reply.body)
    assert answer == {"pid": 7}
    thread.join()


def test_a_client_waits_no_longer_than_its_request_may_take(tmp_path: Path, crowded: tuple[socket.socket, int]) -> None:
    with pytest.raises(errors.UnavailableError, match="too many ask it at once; try again"):
        client.call("GET", "/v1/ping", where=tmp_path / "s", timeout_s=0.01)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs to serve as another user")
def test_a11_a_socket_that_somebody_else_serves_is_not_talked_to(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path_factory.mktemp("foreign") / "s"
    path.parent.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        os.seteuid(65534)  # SO_PEERCRED shows who called listen()
        try:
            server.listen(1)
        finally:
            os.seteuid(0)
        monkeypatch.setenv("HPCSCHED_API", str(path))
        with pytest.raises(errors.UnavailableError, match="served by uid 65534, which is neither root nor you"):
            client.call("POST", "/v1/submit", {"secret": 1})
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b""


COMMANDS = {
    "hrun on a node": ("-m", "hpcnode.commands.hrun", "true"),
    "hrsh": ("-m", "hpcnode.commands.hrsh", "n1", "true"),
    "hrun on the head": ("-m", "hpcnode.commands.hrun", "true"),
    "halloc": ("-c", "from hpcsched.cli.halloc import main; exit(main())", "true"),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to run as root: another account serves the socket")
@pytest.mark.parametrize("command", COMMANDS)
def test_a11_a_step_command_sends_nothing_to_a_socket_that_somebody_else_serves(command: str) -> None:
    """Others may write the directory above that of the socket, as in /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base, socket.socket(socket.AF_UNIX) as server:
        Path(base).chmod(0o1777)
        run_dir = Path(base) / "run"
        run_dir.mkdir()
        path = run_dir / "steps.sock"
        server.bind(str(path))
        for each in (run_dir, path):
            os.chown(each, 65534, 65534)
        os.seteuid(65534)  # SO_PEERCRED shows who called listen()
        try:
            server.listen(1)
        finally:
            os.seteuid(0)
        (Path(base) / "hpcsched.toml").write_text(f'[controller]\nrun_dir = "{run_dir}"\n')
        server.settimeout(PATIENCE_S)
        env = dict(os.environ, HPCSCHED_CONFIG=base, HPCSCHED_SOCKET="", HPCSCHED_JOB_ID="")
        if command in ("hrun on a node", "hrsh"):
            env |= {"HPCSCHED_SOCKET": str(path), "HPCSCHED_JOB_ID": "7"}
        words = [sys.executable, *COMMANDS[command]]
        with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(100) == b""
            assert process.stderr is not None
            assert b"it is served by uid 65534" in process.stderr.read()
        assert process.returncode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to run as root: another account serves the socket")
@pytest.mark.parametrize("who", ["a command", "a step command", "the gateway", "a heartbeat"])
def test_a11_a_link_that_another_account_made_leads_to_no_server(linked: tuple[socket.socket, str], who: str) -> None:
    server, path = linked
    if who == "a command":
        with pytest.raises(errors.UnavailableError, match="served by uid 65534"):
            client.call("GET", "/v1/ping", where=path)
    elif who == "a step command":
        with pytest.raises(PermissionError, match="served by uid 65534"):
            sockets.connect(path)
    elif who == "a heartbeat":
        heartbeat = Heartbeat({"HPCSCHED_SOCKET": path, "HPCSCHED_JOB_ID": "1"})
        assert not heartbeat.fail(rank=0, ranks=1, text="secret", echo=False)
    else:
        with pytest.raises(UpstreamError, match="served by another account"):
            asyncio.run(Upstream(path).ask("GET", "/v1/ping", {}, timeout_s=PATIENCE_S))
    connection, _ = server.accept()
    with connection:
        assert connection.recv(100) == b""


@pytest.mark.parametrize(
    ("owners", "modes", "is_given"),
    [
        ((0, 7), (0o755, 0o755), True),
        ((7, 7), (0o755, 0o755), True),
        ((0, 7), (0o1777, 0o755), False),
        ((0, 0), (0o1777, 0o755), True),
        ((0, 7), (0o755, 0o775), False),
        ((8, 7), (0o755, 0o755), False),
        ((7, 8), (0o755, 0o755), False),
    ],
)
def test_a11_a_directory_is_safe_if_only_root_and_the_server_made_it(
    monkeypatch: pytest.MonkeyPatch, owners: tuple[int, int], modes: tuple[int, int], is_given: bool
) -> None:
    found = dict(zip(("/srv", "/srv/run"), zip(owners, modes, strict=True), strict=True))

    def status(path: str) -> os.stat_result:
        uid, mode = found.get(path, (0, 0o755))
        return os.stat_result((mode | 0o040000, 0, 0, 2, uid, 0, 0, 0, 0, 0))

    monkeypatch.setattr(os, "lstat", status)
    assert trust.is_made_by("/srv/run/agent.sock", 7) is is_given


def test_errors_come_back_as_their_kinds(api: FakeApi) -> None:
    api.answers["GET /v1/ping"] = (404, {"error": "Invalid job id specified: 9", "kind": "NotFoundError"})
    with pytest.raises(errors.NotFoundError, match="Invalid job id specified: 9"):
        client.call("GET", "/v1/ping")
    api.answers["GET /v1/ping"] = (400, {"error": "no", "kind": "annotations"})  # a name of the module, but no error
    with pytest.raises(errors.RequestError, match="no"):
        client.call("GET", "/v1/ping")


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", client.BrokenConnectionError),
        (b"HTTP/1.1 200 OK\r\nContent-", client.BrokenConnectionError),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", errors.ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", errors.ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{x", errors.ProtocolError),
        (b"junk\r\n\r\n", errors.ProtocolError),
        (b"HTTP/1.1 500 X\r\nContent-Length: 3\r\n\r\n[1]", errors.ProtocolError),
    ],
)
def test_an_answer_that_is_cut_or_no_answer_is_an_error(api: FakeApi, raw: bytes, kind: type[Exception]) -> None:
    api.answers["GET /v1/ping"] = raw
    with pytest.raises(kind):
        client.call("GET", "/v1/ping")


def test_an_answer_is_taken_when_it_is_whole_however_late_the_server_hangs_up(tmp_path: Path) -> None:
    hung_up = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not connection.recv(1000).endswith(b"\r\n\r\n"):
                pass
            for part in (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 8\r\n\r", b'\n{"a"', b": 1}"):
                connection.sendall(part)
            hung_up.append(connection.recv(1))  # by the client, before us

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        assert client.call("GET", "/v1/ping", where=tmp_path / "s", timeout_s=20) == {"a": 1}
        server.join(20)
    assert hung_up == [b""]


def test_a_broken_connection_is_tried_again_with_the_same_request(api: FakeApi) -> None:
    api.answers["POST /v1/submit"] = [None, None, {"jobs": [{"job_id": 5, "tasks": 1}]}]
    answer = client.call_again("POST", "/v1/submit", {"request_id": "abc"})
    assert answer["jobs"][0]["job_id"] == 5
    assert [body["request_id"] for body in api.requests("POST /v1/submit")] == ["abc"] * 3


def test_a_refusal_is_not_tried_again(api: FakeApi) -> None:
    api.answers["POST /v1/submit"] = (503, {"error": "the controller is stopping", "kind": "UnavailableError"})
    with pytest.raises(errors.UnavailableError, match="stopping"):
        client.call_again("POST", "/v1/submit", {})
    assert len(api.asked) == 1


def test_a_piece_of_output_comes_as_bytes_with_its_place(api: FakeApi) -> None:
    api.answers["GET /v1/log"] = log_answer(b"\xff\r\n\r\nx", offset=7, size=20, ended=False)
    part = client.fetch_log("10_3", stream="err", offset=7, wait_s=1)
    assert part == (b"\xff\r\n\r\nx", 7, 20, "/w/out", False)
    assert api.parameters("GET /v1/log") == {"job": "10_3", "stream": "err", "offset": "7", "wait_s": "1"}


def test_references_are_quoted(api: FakeApi) -> None:
    api.answers["GET /v1/job/a b/../?x[1-3]"] = {"jobs": []}
    assert client.call("GET", client.job_path("a b/../?x[1-3]"))["jobs"] == []
    assert "/../" not in client.job_path("a b/../?x")


def test_a_client_that_asks_too_often_waits_and_asks_again(tmp_path: Path) -> None:
    api = FakeApi(tmp_path / "s")
    api.answers["GET /v1/ping"] = [(429, {"error": "wait", "kind": "RequestError"}), {"pid": 7}]
    began_s = time.monotonic()
    assert client.call("GET", "/v1/ping", where=api.path)["pid"] == 7
    assert time.monotonic() - began_s >= 0.4  # half of the second that is waited where nothing else is said
    assert len(api.asked) == 2
    api.close()


def test_a_client_that_is_always_sent_away_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.protocol, "PATIENCE_S", 0.1)
    api = FakeApi(tmp_path / "s")
    api.answers["GET /v1/ping"] = (429, {"error": "cannot answer now: uid 7 asks too often", "kind": "RequestError"})
    with pytest.raises(errors.RequestError, match="uid 7 asks too often"):
        client.call("GET", "/v1/ping", where=api.path)
    api.close()


def test_an_answer_that_comes_before_all_was_sent_is_read(tmp_path: Path) -> None:
    refusal = (
        b"HTTP/1.1 413 X\r\nContent-Length: 51\r\n\r\n" + b'{"error":"cannot read it: long","kind":"RequestError"}'[:51]
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)

        def refuse() -> None:
            sock, _ = listener.accept()
            sock.recv(10)
            sock.sendall(refusal)
            sock.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        response = client.request("POST", "/v1/submit", {"a": "x" * (8 << 20)}, where=tmp_path / "s")
        thread.join()
    assert response.status == 413
    assert response.body.startswith(b'{"error":"cannot read it')


def test_a_script_that_is_to_be_a_service_is_not_submitted_as_a_job() -> None:
    place = SubmitPlace(work_dir="/", environ={}, host="head", calls=None, python="python3")
    assert prepare_script(place, "#!/bin/sh\n#HSUB --mem=1G\nserver\n", (), {}, "").spec.mem_per_node_mib == 1024
    with pytest.raises(errors.RequestError, match="cannot start a service here, because of --serve"):
        prepare_script(place, "#!/bin/sh\n#HSUB --serve=chat\nserver\n", (), {}, "")
