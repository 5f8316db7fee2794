"""Connect to a node through SSH: one paramiko connection, with one exec channel.

`hostkeys` decides which host keys are trusted, `sshconfig` decides the route. This module opens
sockets, logs in and runs the bootstrap. It does not know what is sent through the channel.

Rules:
- Everything here blocks, and runs in a thread that may be abandoned. `Abort` ends it: the shutdown
  of the first socket wakes every call of every hop, and also paramiko's own waits.
- After login, nothing polls. By default, paramiko checks its socket every 0.1 s for `close()` and
  keepalive timers. A shutdown wakes it as well, and our own pings replace the keepalive.

Sources: RFC 4252, 4254; ssh_config(5); tcp(7).
"""

from __future__ import annotations

import logging
import shlex
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko

from hpcsched.launch import hostkeys
from hpcsched.launch.bundle import bootstrap_command
from hpcsched.launch.pipe import Abort, Dial, LinkError, LinkProgress, Pipe
from hpcsched.launch.sshconfig import Hop, SshSettings, route_to
from hpcsched.model.node import NodeSpec

IDLE_POLL_S = 60.0
TCP_CONNECT_S = 6.0  # a booting machine answers the third SYN or a new one, not the kernel's SYN 8 s later
STDERR_TAIL_BYTES = 600
EXIT_STATUS_WAIT_S = 2.0


def ssh_dial(spec: NodeSpec, settings: SshSettings) -> Dial:
    """Return the Dial that opens a pipe to the bootstrap on the node `spec`."""

    def dial(abort: Abort, progress: LinkProgress) -> Pipe:
        # It logs what it also raises, with tracebacks.
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        transports = connect(spec, settings, abort, progress)
        try:
            progress("starting Python there")
            return _run_bootstrap(transports, spec, settings)
        except (paramiko.SSHException, OSError, EOFError) as error:
            close_all(transports)
            raise LinkError(f"cannot run a command on {spec.name}: {_words(error)}") from None

    return dial


def connect(
    spec: NodeSpec, settings: SshSettings, abort: Abort, progress: LinkProgress
) -> tuple[paramiko.Transport, ...]:
    """Return a logged-in transport for each hop to the node, the node's last.

    Raises LinkError.
    """
    route = route_to(spec, settings)
    progress(f"connecting to {route[0].host}:{route[0].port}")
    sock: socket.socket | paramiko.Channel = _tcp_connect(route[0], settings, abort)
    transports: list[paramiko.Transport] = []
    try:
        for number, hop in enumerate(route):
            if number:
                progress(f"going on from {route[number - 1].where} to {hop.host}:{hop.port}")
                sock = _forward(transports[-1], route[number - 1], hop, settings)
            progress(f"logging in to {hop.where}")
            transports.append(_negotiate(sock, hop, settings))
            _log_in(transports[-1], hop)
            sock.settimeout(IDLE_POLL_S)
    except BaseException:
        close_all(transports)
        sock.close()
        raise
    return tuple(transports)


def peek_host_key(spec: NodeSpec, settings: SshSettings, abort: Abort) -> paramiko.PKey:
    """Return the host key that the node presents, without trusting it and without login.

    Raises LinkError.
    """
    route = route_to(spec, settings)
    transports: list[paramiko.Transport] = []
    sock: socket.socket | paramiko.Channel = _tcp_connect(route[0], settings, abort)
    try:
        for number, hop in enumerate(route):
            if number:
                sock = _forward(transports[-1], route[number - 1], hop, settings)
            if number == len(route) - 1:
                transports.append(_key_exchange(sock, hop, settings, ()))
                return transports[-1].get_remote_server_key()
            transports.append(_negotiate(sock, hop, settings))
            _log_in(transports[-1], hop)
    except paramiko.SSHException as error:
        raise LinkError(f"cannot speak SSH with {spec.host}: {_words(error)}") from None
    finally:
        close_all(transports)
        sock.close()
    raise AssertionError("a route has at least the node")


def _tcp_connect(hop: Hop, settings: SshSettings, abort: Abort) -> socket.socket:
    timeout_s = min(settings.timeout_s, TCP_CONNECT_S)
    try:
        sock = socket.create_connection((hop.host, hop.port), timeout=timeout_s)
    except socket.gaierror as error:
        raise LinkError(f"cannot find host {hop.host!r}: {error.strerror}") from None
    except TimeoutError:
        raise LinkError(f"cannot reach {hop.host}:{hop.port}: no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise LinkError(f"cannot reach {hop.host}:{hop.port}: {_words(error)}") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # many small frames, and a peer waits for each
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.down_after_s * 1000))
    abort.also(lambda: _shut_down(sock))
    return sock


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already closed


def _forward(transport: paramiko.Transport, via: Hop, to: Hop, settings: SshSettings) -> paramiko.Channel:
    try:
        return transport.open_channel("direct-tcpip", (to.host, to.port), ("127.0.0.1", 0), timeout=settings.timeout_s)
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise LinkError(f"cannot reach {to.host}:{to.port} from {via.where}: {_words(error)}") from None


def _negotiate(sock: socket.socket | paramiko.Channel, hop: Hop, settings: SshSettings) -> paramiko.Transport:
    """Return a transport whose server has proved the expected host key."""
    known = [] if hop.pinned else hostkeys.known_keys(hop.known_hosts, hop.known_as, hop.port)
    key_types = (hop.pinned.split()[0],) if hop.pinned else tuple(key.split()[0] for key in known)
    transport = _key_exchange(sock, hop, settings, key_types)
    try:
        key = transport.get_remote_server_key()
        if hop.pinned:
            hostkeys.check_pinned(key, hop.pinned, hop.where)
        else:
            hostkeys.check_known(key, known, hop.where)
        hostkeys.check_agreement(transport, hop.where)
    except BaseException:
        transport.close()
        raise
    return transport


def _key_exchange(
    sock: socket.socket | paramiko.Channel, hop: Hop, settings: SshSettings, key_types: tuple[str, ...]
) -> paramiko.Transport:
    transport = paramiko.Transport(sock, disabled_algorithms=hostkeys.DISABLED_ALGORITHMS)
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = settings.timeout_s
    if key_types:
        # Request the type of the known key. Else the server presents its preferred type, which
        # cannot be checked.
        wanted = {name for key_type in key_types for name in hostkeys.algorithms_for(key_type)}
        options = transport.get_security_options()
        options.key_types = [name for name in options.key_types if name in wanted]
    try:
        transport.start_client(timeout=settings.timeout_s)
        transport.get_remote_server_key()  # raises if the time limit has passed
    except (paramiko.SSHException, EOFError, OSError) as error:
        transport.close()
        if key_types and "host key" in str(error):
            raise LinkError(
                f"cannot trust {hop.where}: it no longer has a host key of type {' or '.join(key_types)}, which it was "
                "known by; if the machine was set up anew, remove the node and add it again"
            ) from None
        raise LinkError(f"cannot speak SSH with {hop.where}: {_words(error)}") from None
    return transport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """A private key to try, or why it cannot be used."""

    label: str
    key: paramiko.PKey | None
    why_not: str = ""


def _log_in(transport: paramiko.Transport, hop: Hop) -> None:
    """Authenticate with the first key that the server accepts.

    Raises LinkError with the keys that were tried.
    """
    tried: list[str] = []
    for identity in _identities(hop):
        if identity.key is None:
            tried.append(f"{identity.label} ({identity.why_not})")
            continue
        tried.append(f"{identity.label} ({hostkeys.fingerprint(identity.key)})")
        try:
            more = transport.auth_publickey(hop.user, identity.key)
        except paramiko.BadAuthenticationType as error:
            others = ", ".join(filter(None, error.allowed_types))
            only = f", only {others}" if others else ""
            raise LinkError(f"cannot log in to {hop.where}: it takes no public keys{only}") from None
        except paramiko.AuthenticationException:
            if transport.is_active():
                continue
            break
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise LinkError(f"cannot log in to {hop.where}: {_words(error)}") from None
        if more:
            raise LinkError(f"cannot log in to {hop.where}: after the key it also wants {', '.join(more)}")
        return
    raise LinkError(
        f"cannot log in to {hop.where}: it refused every key; tried {', '.join(tried) or 'none, for there is none'}; "
        f"let the launch key in: hpcsched key | ssh -p {hop.port} {shlex.quote(f'{hop.user}@{hop.host}')} "
        "'umask 077; mkdir -p ~/.ssh; cat >> ~/.ssh/authorized_keys'"
    )


def _identities(hop: Hop) -> Iterator[_Identity]:
    """Yield the keys to try, each once: files first, then keys that only the SSH agent has."""
    agent = paramiko.Agent()
    try:
        held = {bytes(key.asbytes()): key for key in agent.get_keys()}
        seen: set[bytes] = set()
        for path in hop.identities:
            if path.exists():
                identity = _from_file(path, held)
                blob = identity.key.asbytes() if identity.key is not None else b""
                if not blob or blob not in seen:
                    yield identity
                seen.add(blob)
        for blob, key in held.items() if hop.use_agent else ():
            if blob not in seen:
                yield _Identity(label=f"{key.comment or 'a key'} of the SSH agent", key=key)
    finally:
        agent.close()


def _from_file(path: Path, held: dict[bytes, paramiko.AgentKey]) -> _Identity:
    try:
        mode = path.stat().st_mode
        if mode & 0o077:  # as OpenSSH: other users who can read it may have a copy
            why_not = f"others may read it, its mode is {mode & 0o777:04o}; run: chmod 600 {shlex.quote(str(path))}"
            return _Identity(label=str(path), key=None, why_not=why_not)
        return _Identity(label=str(path), key=paramiko.PKey.from_path(path))
    except OSError as error:
        return _Identity(label=str(path), key=None, why_not=_words(error))
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError, TypeError) as error:
        key = _held_half(path, held)  # encrypted: the agent may have it unlocked
        why_not = f"damaged, or encrypted and not in the SSH agent: {_words(error)}"
        return _Identity(label=str(path), key=key, why_not="" if key else why_not)


def _held_half(path: Path, held: dict[bytes, paramiko.AgentKey]) -> paramiko.AgentKey | None:
    try:
        public = path.with_name(path.name + ".pub").read_text(encoding="utf-8")
        return held.get(hostkeys.blob_of(public))
    except (OSError, ValueError, IndexError):
        return None


def _run_bootstrap(transports: tuple[paramiko.Transport, ...], spec: NodeSpec, settings: SshSettings) -> Pipe:
    channel = transports[-1].open_session(timeout=settings.timeout_s)
    channel.exec_command(bootstrap_command(spec.python))
    return SshPipe(transports, channel)


class SshPipe:
    """The channel's stdin and stdout. One thread receives, another may send."""

    def __init__(self, transports: tuple[paramiko.Transport, ...], channel: paramiko.Channel) -> None:
        self._transports = transports
        self._channel = channel
        self._stderr = b""
        self._stderr_lock = threading.Lock()

    def receive(self, limit: int) -> bytes:
        data = self._channel.recv(limit)
        self._drain_stderr()  # if not read, it would fill the window that it shares with stdout
        return data

    def send_all(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(_words(error)) from None

    def epitaph(self) -> str:
        self._channel.status_event.wait(EXIT_STATUS_WAIT_S)
        self._drain_stderr()
        status = self._channel.exit_status
        if status == -1 and not self._transports[-1].is_active():
            how = "the connection was lost"
        else:
            how = "it ended without an exit status" if status == -1 else f"it ended with status {status}"
        last = self._stderr.decode("utf-8", "replace").strip()
        return f"{how}: {last}" if last else how

    def close(self) -> None:
        close_all(self._transports)

    def _drain_stderr(self) -> None:
        with self._stderr_lock:
            while self._channel.recv_stderr_ready():
                self._stderr = (self._stderr + self._channel.recv_stderr(65536))[-STDERR_TAIL_BYTES:]


def close_all(transports: tuple[paramiko.Transport, ...] | list[paramiko.Transport]) -> None:
    """Close each transport.

    The first one's socket is shut down at once, so that no thread waits for its next poll.
    """
    for transport in reversed(transports):
        if isinstance(transport.sock, socket.socket):
            _shut_down(transport.sock)
        transport.close()


def _words(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "the other end closed the connection"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
