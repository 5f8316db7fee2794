"""The gateway as the way to a controller: its address, its token, and one request to it.

HPCSCHED_URL is the gateway's address. The token is in HPCSCHED_TOKEN, or in a file that only its owner can read. The token is
sent to that address alone, over verified TLS: redirects are not followed, proxies are not used, and plain HTTP is for
loopback addresses only. A route is the controller's own, below ``/api``.

Commands import this module only if HPCSCHED_URL is set: `ssl` takes longer to import than Python to start.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import stat
from collections import namedtuple
from urllib.parse import urlsplit

from hpcsched.client.protocol import (
    READ_BYTES,
    BrokenConnectionError,
    HttpReply,
    ReplyReader,
    Send,
    late,
    lost,
    request_bytes,
)
from hpcsched.errors import ConfigError, UnavailableError

URL = "HPCSCHED_URL"
TOKEN = "HPCSCHED_TOKEN"  # noqa: S105  # the variable's name
TOKEN_PATH = "HPCSCHED_TOKEN_FILE"  # noqa: S105
CA_PATH = "HPCSCHED_CA_FILE"
DEFAULT_PORT = 6820  # of the gateway, as slurmrestd's
MAX_TOKEN_BYTES = 2_000
_TOKEN = re.compile(r"eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]{8,}){2}")  # a JSON Web Token
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")


class GatewayEndpoint(namedtuple("GatewayEndpoint", "host port prefix tls token")):
    """A gateway and the token for it.

    `prefix`: of all paths. `tls`: None for plain HTTP to a loopback address.
    """

    __slots__ = ()

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    token: str

    @property
    def address(self) -> str:
        """Return host and port as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __repr__(self) -> str:
        return f"<GatewayEndpoint {self.address}>"  # without the token


def find_endpoint(url: str = "", token: str = "", ca_file: str = "") -> GatewayEndpoint:
    """Return the gateway that the arguments name, or else the environment. Raises ConfigError."""
    url = url or os.environ.get(URL, "")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"cannot use {url[:200]!r} as the cluster's address: {error}") from None
    why = ""
    if parts.scheme not in ("https", "http") or _HOST.fullmatch(host) is None:
        why = f"write it as https://HOST:{DEFAULT_PORT}"
    elif parts.username is not None or parts.query or parts.fragment:
        why = "it may have a host, a port and a path; the token is not a part of it"
    elif re.fullmatch(r"[A-Za-z0-9._~/-]*", parts.path) is None:
        why = "its path has other characters than letters, digits and ._~/-"
    elif re.search(r"/api(/v1)?/*\Z", parts.path):
        why = f"leave out {parts.path.rstrip('/')[parts.path.rindex('/api') :]}, which is added"
    elif parts.scheme == "http" and not is_loopback(host):
        why = "a token must not cross the network unencrypted; use https"
    if why:
        raise ConfigError(f"cannot use {_without_password(url)!r} as the cluster's address: {why}")
    tls = _context(ca_file or os.environ.get(CA_PATH, "")) if parts.scheme == "https" else None
    return GatewayEndpoint(host, port, parts.path.rstrip("/") + "/api", tls, _checked(token) if token else find_token())


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//...@", url)[:200]


def is_loopback(host: str) -> bool:
    """Return whether the name can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _context(ca_file: str) -> ssl.SSLContext:
    """Return how the gateway's certificate is verified. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ConfigError(f"cannot read the certificates in {ca_file}: {error.strerror or error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def find_token() -> str:
    """Return the token of HPCSCHED_TOKEN, or of the token file. Raises ConfigError.

    In a job, HPCSCHED_TOKEN is the secret of its launch, which is for its node alone.
    """
    given = os.environ.get(TOKEN, "")
    if _TOKEN.fullmatch(given) is not None or (given and "HPCSCHED_JOB_ID" not in os.environ):
        return _checked(given)
    path = os.environ.get(TOKEN_PATH, "") or _token_path()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(
            f"cannot read the token in {path}: {error.strerror}; make one on the head with 'hctl token create', and put it "
            f"there (chmod 600) or into {TOKEN}"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"cannot use the token in {path}: it is not a file")
        if found.st_uid not in (0, os.getuid()):
            raise ConfigError(f"cannot use the token in {path}: it belongs to uid {found.st_uid}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"cannot use the token in {path}: others may read it: chmod 600 {path}; if others have read it, revoke it: "
                "hctl token revoke"
            )
        text = os.read(descriptor, MAX_TOKEN_BYTES + 1)
    finally:
        os.close(descriptor)
    return _checked(text.decode("ascii", "replace").strip())


def _token_path() -> str:
    """Return the usual token file: ~/.config/hpcsched/token, also of root."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(base if base.startswith("/") else os.path.expanduser("~/.config"), "hpcsched", "token")


def _checked(token: str) -> str:
    """Return a token that can be sent in a header.

    Raises ConfigError, without the token in it.
    """
    if _TOKEN.fullmatch(token) is None or len(token) > MAX_TOKEN_BYTES:
        raise ConfigError("cannot use the token: it is not one that 'hctl token create' prints")
    return token


# ----- one request, without input and output


def request_of(endpoint: GatewayEndpoint, step: Send) -> bytes:
    """Return a request to the gateway as it is sent."""
    return request_bytes(
        step.method,
        endpoint.prefix + step.path,
        step.body,
        host=endpoint.address,
        headers=(f"Authorization: Bearer {endpoint.token}",),
    )


def checked_reply(endpoint: GatewayEndpoint, reply: HttpReply) -> HttpReply:
    """Return the answer.

    Raises ConfigError for a redirect, UnavailableError if it is not the gateway's.
    """
    if 300 <= reply.status < 400 and reply.status != 304:
        to = reply.headers.get("location", "")[:200]
        raise ConfigError(
            f"cannot ask {endpoint.address}: it redirects to {to!r}. The token is not sent to another address; if that is the "
            f"cluster's, set {URL} to it"
        )
    kind = reply.headers.get("content-type", "")
    if reply.status >= 400 and "json" not in kind:
        raise UnavailableError(
            f"cannot ask the controller at {endpoint.address}: status {reply.status}, and not from a gateway of hpcsched"
        )
    return reply


def broken(endpoint: GatewayEndpoint, error: BrokenConnectionError) -> BrokenConnectionError:
    """Return the error for a connection that ended early; plain HTTP may be why."""
    if endpoint.tls is not None:
        return error
    return BrokenConnectionError(f"{error}; if the gateway has a certificate, set {URL} to https://{endpoint.address}")


def check_peer(endpoint: GatewayEndpoint, address: object) -> None:
    """Raise ConfigError if plain HTTP would leave this machine, as by a strange name service."""
    host = str(address[0]) if isinstance(address, tuple) else ""
    if endpoint.tls is None and not is_loopback(host):
        raise ConfigError(f"cannot use http to {endpoint.address}: it is {host}, which is not this machine")


def unreachable(endpoint: GatewayEndpoint, error: OSError) -> UnavailableError | ConfigError:
    """Return the error for a gateway that cannot be connected to, or cannot be trusted."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConfigError(
            f"cannot trust the gateway at {endpoint.address}: {error.verify_message}. If its certificate is from an authority of "
            f"your own, name the authority's file: export {CA_PATH}=FILE"
        )
    if isinstance(error, ssl.SSLError):
        return UnavailableError(f"cannot speak TLS 1.3 with {endpoint.address}: {error.reason or error}")
    why = error.strerror or str(error) or "it closed the connection"
    return UnavailableError(
        f"Unable to contact hpcsched gateway ({endpoint.address}: {why}); see {URL}; 'hpcsched doctor' says why"
    )


# ----- the same, by a blocking socket


def perform(endpoint: GatewayEndpoint, step: Send) -> HttpReply:
    """Send one request, and return the answer. Raises UnavailableError, ConfigError."""
    sock = _connect(endpoint, step.timeout_s)
    try:
        reader = ReplyReader()
        try:
            sock.sendall(request_of(endpoint, step))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not read all, and may have sent the reason
        while (reply := reader.feed(sock.recv(READ_BYTES))) is None:
            pass
        return checked_reply(endpoint, reply)
    except TimeoutError:
        raise late(step.timeout_s) from None
    except OSError as error:
        raise broken(endpoint, lost(error)) from None
    except BrokenConnectionError as error:
        raise broken(endpoint, error) from None
    finally:
        sock.close()


def _connect(endpoint: GatewayEndpoint, timeout_s: float) -> socket.socket:
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
        try:
            check_peer(endpoint, sock.getpeername())
            if endpoint.tls is not None:
                sock = endpoint.tls.wrap_socket(sock, server_hostname=endpoint.host)
            return sock
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise unreachable(endpoint, error) from None
