"""The client: what it says when the controller is not there, is not ours, breaks off or refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from fake_api import FakeApi, log_answer

from hpcsched import client, errors


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


def test_where_too_many_wait_to_be_served_a_client_waits_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        server.bind(str(tmp_path / "s"))
        server.listen(0)
        others: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                others.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
                others[-1].setblocking(False)
                others[-1].connect(str(tmp_path / "s"))
        assert len(others) > 1

        def served(_: float) -> None:
            """Instead of a pause: whoever was first is served, and who comes now in a thread."""
            for _ in others[:-1]:
                server.accept()[0].close()
            thread = threading.Thread(target=serve_one)
            thread.start()
            stack.callback(thread.join)

        def serve_one() -> None:
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"pid": 7}')

        monkeypatch.setattr(client.time, "sleep", served)
        assert client.call("GET", "/v1/ping", where=tmp_path / "s") == {"pid": 7}


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs to serve as another user")
def test_a11_a_socket_that_somebody_else_serves_is_not_talked_to(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path_factory.mktemp("foreign") / "s"
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
