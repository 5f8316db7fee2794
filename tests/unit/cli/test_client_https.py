"""The way to a gateway: which addresses, certificates and token files are refused, and where the token goes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import write_certificate

from hpcsched import AsyncClient, Client, client
from hpcsched.client import aio, https
from hpcsched.client.jobs import ClusterConnection
from hpcsched.client.protocol import Send
from hpcsched.errors import ConfigError, HpcschedError, RequestError, UnavailableError

TOKEN = f"eyJ{'x' * 20}.{'y' * 40}.{'z' * 80}"
TLS_RECORD = b"\x16"  # the first byte of a handshake: a server without TLS answers it as a bad request
PONG = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"nodes": []}'


class Gateway:
    """A server with TLS (or without, if there is no context) that keeps what it receives and gives one answer."""

    def __init__(self, context: ssl.SSLContext | None, answer: bytes = PONG) -> None:
        self.received: list[bytes] = []
        self.answer = answer
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                self._one(sock)

    def _one(self, sock: socket.socket) -> None:
        sock.settimeout(20)
        try:
            served = self._context.wrap_socket(sock, server_side=True) if self._context else sock
            with served:
                data = b""
                while b"\r\n\r\n" not in data and data[:1] != TLS_RECORD and (more := served.recv(65536)):
                    data += more
                self.received.append(data)
                served.sendall(self.answer)
        except OSError:  # the client has hung up
            return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


Serve = Callable[..., Gateway]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a gateway with a certificate for `name`."""
    started = []

    def start(name: str = "127.0.0.1", answer: bytes = PONG, most: ssl.TLSVersion | None = None) -> Gateway:
        context = None
        if name:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(write_certificate(tmp_path, name))
            if most is not None:
                context.maximum_version = most
        started.append(Gateway(context, answer))
        return started[-1]

    yield start
    for gateway in started:
        gateway.close()


@pytest.fixture(params=["blocking", "asyncio"])
def nodes(request: pytest.FixtureRequest) -> Callable[..., list[object]]:
    """Return a function that asks the gateway at a URL for the nodes."""
    if request.param == "blocking":
        return lambda url, **given: Client(url, token=TOKEN, **given).nodes()
    return lambda url, **given: asyncio.run(AsyncClient(url, token=TOKEN, **given).nodes())


def test_a_request_goes_below_api_with_the_token(serve: Serve, nodes: Callable[..., object], tmp_path: Path) -> None:
    gateway = serve()
    url = f"https://127.0.0.1:{gateway.port}/hpc/"
    assert nodes(url, ca_file=tmp_path / "127.0.0.1.pem") == []
    head = gateway.received[0].decode()
    assert head.startswith("GET /hpc/api/v1/nodes HTTP/1.1\r\n")
    assert f"\r\nHost: 127.0.0.1:{gateway.port}\r\n" in head
    assert f"\r\nAuthorization: Bearer {TOKEN}\r\n" in head


def test_a12_a_gateway_without_a_trusted_certificate_gets_no_token(
    serve: Serve, nodes: Callable[..., object], tmp_path: Path
) -> None:
    stranger, other = serve(), serve("elsewhere.example")
    old, plain = serve("localhost", most=ssl.TLSVersion.TLSv1_2), serve("")
    with pytest.raises(ConfigError, match=r"cannot trust the gateway at 127.*self.signed.*HPCSCHED_CA_FILE"):
        nodes(f"https://127.0.0.1:{stranger.port}")
    with pytest.raises(ConfigError, match="cannot trust the gateway at 127.*(IP address|hostname) mismatch"):
        nodes(f"https://127.0.0.1:{other.port}", ca_file=tmp_path / "elsewhere.example.pem")
    with pytest.raises(UnavailableError, match=r"cannot speak TLS 1\.3 with localhost"):
        nodes(f"https://localhost:{old.port}", ca_file=tmp_path / "localhost.pem")
    with pytest.raises(UnavailableError, match=r"cannot speak TLS 1\.3 with 127|closed the connection"):
        nodes(f"https://127.0.0.1:{plain.port}")
    assert not [data for gateway in (stranger, other, old, plain) for data in gateway.received if b"Bearer" in data]


def test_the_token_is_not_sent_to_where_a_redirect_points(serve: Serve, nodes: Callable[..., object]) -> None:
    thief = serve("")
    answer = f"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:{thief.port}/\r\nContent-Length: 0\r\n\r\n".encode()
    gateway = serve("", answer)
    with pytest.raises(ConfigError, match=r"it redirects to 'http://127.*The token is not sent to another address"):
        nodes(f"http://127.0.0.1:{gateway.port}")
    assert len(gateway.received) == 1
    assert thief.received == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://head.lab:6820", "a token must not cross the network unencrypted; use https"),
        ("http://127.0.0.1.evil.example", "unencrypted"),
        ("http://localhost.evil.example", "unencrypted"),
        ("ftp://head.lab", "write it as https://HOST:6820"),
        ("head.lab:6820", "write it as https://HOST:6820"),
        ("https://", "write it as https://HOST:6820"),
        ("https://ann:secret@head.lab", "the token is not a part of it"),
        ("https://head.lab?token=secret", "the token is not a part of it"),
        ("https://head.lab:99999", "[Pp]ort"),
        ("https://head.lab/a b", "other characters"),
        ("https://head.lab/api", "leave out /api, which is added"),
        ("https://head.lab/proxy/api/v1/", "leave out /api/v1, which is added"),
        ("https://head.lab/\r\nX-Evil: 1", "other characters"),
    ],
)
def test_an_address_that_would_leak_the_token_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        Client(url, token=TOKEN)
    assert "secret" not in str(raised.value).replace("?token=secret", "")


@pytest.mark.parametrize("token", ["short", "a b" * 20, TOKEN + "\r\nX-Evil: 1", "é" * 20, TOKEN + "x" * 9000])
def test_a_token_that_is_none_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="cannot use the token: it is not one that") as raised:
        Client("https://head.lab", token=token)
    assert token not in str(raised.value)
    assert TOKEN not in repr(https.find_endpoint("https://head.lab", TOKEN))


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(https.TOKEN, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "hpcsched/token"
    with pytest.raises(ConfigError, match=rf"cannot read the token in {path}: No such file.*hctl token create"):
        https.find_token()
    path.parent.mkdir()
    path.write_text(TOKEN + "\n")
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"others may read it: chmod 600 {path}"):
            https.find_token()
    path.chmod(0o600)
    assert https.find_token() == TOKEN
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(ConfigError, match="it belongs to uid 65534"):
            https.find_token()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="it is not a file"):
        https.find_token()


def test_the_secret_of_a_launch_is_not_sent_to_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = "fd8c0e0ee6c8acc6.3.0.batch.n1.6e76de648def48c1841036a2c6fb41bf"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HPCSCHED_JOB_ID", "3")
    monkeypatch.setenv(https.TOKEN, launch)
    with pytest.raises(ConfigError, match="cannot read the token in"):
        https.find_token()
    monkeypatch.setenv(https.TOKEN, TOKEN)
    assert https.find_token() == TOKEN
    monkeypatch.delenv("HPCSCHED_JOB_ID")
    monkeypatch.setenv(https.TOKEN, launch)
    with pytest.raises(ConfigError, match="it is not one that"):
        https.find_token()


def test_a12_http_to_a_gateway_with_a_certificate_says_that_https_is_needed() -> None:
    def close_each(listening: socket.socket) -> None:
        for _ in range(2):
            listening.accept()[0].close()  # as a server of TLS does when it gets no handshake

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=close_each, args=(listening,), daemon=True).start()
        endpoint = https.find_endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", TOKEN)
        step = Send("GET", "/v1/nodes", None, 30.0)
        connection = ClusterConnection("", endpoint, results="json", calls=Path(), python="python3")
        with pytest.raises(UnavailableError, match="set HPCSCHED_URL to https://127.0.0.1"):
            https.perform(endpoint, step)
        with pytest.raises(UnavailableError, match="set HPCSCHED_URL to https://127.0.0.1"):
            asyncio.run(aio.perform(step, connection))


def test_results_from_another_machine_are_never_pickles() -> None:
    with pytest.raises(RequestError, match="cannot send back results as pickles from another machine"):
        Client("https://head.lab", token=TOKEN, results="pickle")


def test_an_answer_that_is_not_the_gateways_is_an_error(serve: Serve, nodes: Callable[..., object]) -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"
    refusal = json.dumps({"kind": "PermissionDeniedError", "error": "cannot see nodes: the token's scope"}).encode()
    problem = b"HTTP/1.1 403 X\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n" % len(refusal)
    with pytest.raises(UnavailableError, match="status 502, and not from a gateway of hpcsched"):
        nodes(f"http://127.0.0.1:{serve('', page).port}")
    with pytest.raises(HpcschedError, match="the token's scope"):
        nodes(f"http://127.0.0.1:{serve('', problem + refusal).port}")
    with pytest.raises(UnavailableError, match="Unable to contact hpcsched gateway"):
        nodes("http://127.0.0.1:1")


def test_commands_ask_the_gateway_of_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = serve("")
    monkeypatch.setenv(https.URL, f"http://127.0.0.1:{gateway.port}")
    monkeypatch.setenv(https.TOKEN, TOKEN)
    assert client.call("GET", "/v1/nodes") == {"nodes": []}
    with pytest.raises(ConfigError, match="cannot run halloc on this machine"):
        client.must_be_local("halloc")
