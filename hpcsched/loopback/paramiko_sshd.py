"""The SSH server of a loopback node without OpenSSH's sshd: a program with paramiko.

Run as `python -P paramiko_sshd.py SETTINGS` (JSON, see `Settings`); `server_command` returns that command. It has the
functions of sshd that hpcsched needs: public key login of one account, `exec` requests with stdin, stdout and stderr as
raw bytes, and `direct-tcpip` forwarding for ProxyJump. It has no terminals, shell sessions or sftp.

Rules:
- A command runs under `/bin/sh -c` in the account's home, with a small environment and without start-up files.
- Nothing is buffered without limit: unread data fills the SSH window or the pipe, and the other side waits.
- Half-closes are forwarded in both directions. The exit status is sent when the command ends. The channel closes when no process
  has the command's stdout and stderr open any more.
- If a client goes away, the pipes close and no process is killed. A thread outlives its channel only to reap its command.
- It listens on 127.0.0.1 only.

Sources: RFC 4252 (7), RFC 4254 (5, 6, 7.2); paramiko's server interface.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pwd
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST, cMSG_CHANNEL_REQUEST

CHUNK_BYTES = 64 * 1024
LOOK_MS = 200  # between checks of a waiting pump whether its channel is open
ACCEPT_S = 5.0
CONNECT_S = 5.0
GONE = (OSError, EOFError, paramiko.SSHException)  # raised by paramiko when the client is gone
RFC_SIGNALS = frozenset(
    ["ABRT", "ALRM", "FPE", "HUP", "ILL", "INT", "KILL", "PIPE", "QUIT", "SEGV", "TERM", "USR1", "USR2"]
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of the server of one node."""

    port: int
    user: str
    host_key: str
    authorized_keys: str
    environment: dict[str, str]


class Switch(TypedDict, total=False):
    """Arguments of Popen that run a command as another user; empty for the present one."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SshAccount:
    """The user that commands run as."""

    home: str
    environment: dict[str, str]
    switch: Switch


def server_command(
    *, port: int, user: str, host_key: Path, authorized_keys: Path, environment: Mapping[str, str]
) -> list[str]:
    """Return the command that runs the server in the foreground."""
    settings = Settings(
        port=port,
        user=user,
        host_key=str(host_key),
        authorized_keys=str(authorized_keys),
        environment=dict(environment),
    )
    return [sys.executable, "-P", __file__, json.dumps(asdict(settings))]


def account_of(settings: Settings) -> SshAccount:
    """Return the account of the settings."""
    try:
        entry = pwd.getpwnam(settings.user)
    except KeyError:  # a uid without a name, in a container
        home, shell, switch = "/", "/bin/sh", Switch()
    else:
        home, shell, switch = entry.pw_dir, entry.pw_shell, _switch_to(entry)
    environment = {"HOME": home, "USER": settings.user, "LOGNAME": settings.user, "SHELL": shell}
    return SshAccount(
        home=home if os.path.isdir(home) else "/", environment=environment | settings.environment, switch=switch
    )


def _switch_to(entry: pwd.struct_passwd) -> Switch:
    if entry.pw_uid == os.geteuid():
        return {}
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


class Door(paramiko.ServerInterface):
    """The permissions of a connection.

    Its methods run in the transport thread and must not block.
    """

    def __init__(self, settings: Settings, authorized: bytes, addresses: tuple[str, str]) -> None:
        self._account = account_of(settings)
        self._user = settings.user
        self._authorized = authorized
        self._ssh_environment = {"SSH_CLIENT": addresses[0], "SSH_CONNECTION": addresses[1]}
        self._commands_begun: set[int] = set()
        self._to_start: list[Callable[[], None]] = []
        self.forwards: dict[int, socket.socket] = {}  # by channel id, until the channel is open

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = username == self._user and key.asbytes() == self._authorized
        return paramiko.AUTH_SUCCESSFUL if known else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED if kind == "session" else paramiko.OPEN_FAILED_UNKNOWN_CHANNEL_TYPE

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if channel.get_id() in self._commands_begun:
            return False
        try:
            process = self._spawn(command)
        except (OSError, ValueError) as error:  # too long for the kernel, no memory, a NUL byte
            log.warning("cannot run a command of %d bytes: %s", len(command), error)
            return False
        self._commands_begun.add(channel.get_id())
        self._to_start.append(lambda: attach_command(channel, process))
        return True

    def _spawn(self, command: bytes) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=self._account.home,
            env=self._account.environment | self._ssh_environment,
            start_new_session=True,
            **self._account.switch,
        )

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        try:
            self.forwards[chanid] = socket.create_connection(destination, timeout=CONNECT_S)
        except OSError as error:
            log.info("cannot forward to %s: %s", destination, error)
            return paramiko.OPEN_FAILED_CONNECT_FAILED
        return paramiko.OPEN_SUCCEEDED

    def start_what_was_granted(self) -> None:
        """Start the pumps of commands whose request was answered."""
        while self._to_start:
            self._to_start.pop()()


def _answer_then_start(channel: paramiko.Channel, message: paramiko.Message) -> None:
    # A quick command must not end, and close its channel, before its request is answered.
    try:
        channel._handle_request(message)
    finally:
        channel.get_transport().server_object.start_what_was_granted()


class DoorTransport(paramiko.Transport):
    """A transport that answers a channel request before it starts the command."""

    _channel_handler_table = paramiko.Transport._channel_handler_table | {MSG_CHANNEL_REQUEST: _answer_then_start}


def attach_command(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    """Connect a running command with its channel until both have ended."""
    _in_thread(feed_command, channel, process)
    _in_thread(follow_command, channel, process)


def feed_command(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    """Copy the client's data to the command's stdin, and close that at the end."""
    assert process.stdin is not None
    with process.stdin as stdin:
        os.set_blocking(stdin.fileno(), False)
        taken = all(write_all(stdin.fileno(), data, channel) for data in _received(channel))
    if not taken:
        discard(channel)


def follow_command(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    """Copy the command's output, then report its end; reap the command in any case."""
    assert process.stdout is not None
    assert process.stderr is not None
    teller = ExitTeller(channel, process)
    with process.stdout as out, process.stderr as err:
        sinks = {out.fileno(): channel.sendall, err.fileno(): channel.sendall_stderr}
        finished = drain(channel, sinks, teller.tell_if_ended)
    try:
        if finished:
            channel.shutdown_write()
        process.wait()
        teller.tell_if_ended()
    except GONE:
        process.wait()
    channel.close()


class ExitTeller:
    """Reports the end of a command to the client, once."""

    def __init__(self, channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
        self._channel, self._process, self._has_answered = channel, process, False

    def tell_if_ended(self) -> None:
        """Send exit-status or exit-signal, if the command has ended and that was not sent yet."""
        status = None if self._has_answered else self._process.poll()
        if status is None or self._channel.closed:
            return
        self._has_answered = True
        if status >= 0:
            self._channel.send_exit_status(status)
        else:
            _send_exit_signal(self._channel, -status)


def _send_exit_signal(channel: paramiko.Channel, number: int) -> None:
    name = signal.Signals(number).name[3:] if number in set(signal.Signals) else f"SIG{number}"
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(name if name in RFC_SIGNALS else f"{name}@hpcsched")
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    channel.get_transport()._send_user_message(message)


def attach_socket(channel: paramiko.Channel, sock: socket.socket) -> None:
    """Connect a channel with a socket, each direction until its end, and close both."""
    sock.setblocking(False)
    backward = _in_thread(drain, channel, {sock.fileno(): channel.sendall}, lambda: None, channel.shutdown_write)
    with sock, channel:
        all(write_all(sock.fileno(), data, channel) for data in _received(channel))
        _half_close(sock)
        backward.join()


def _half_close(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the peer is gone already


def _received(channel: paramiko.Channel) -> Iterator[bytes]:
    while data := channel.recv(CHUNK_BYTES):
        yield data


def discard(channel: paramiko.Channel) -> None:
    """Drop data for a reader that is gone, so that the client does not block."""
    for _ in _received(channel):
        pass


def write_all(fd: int, data: bytes, channel: paramiko.Channel) -> bool:
    """Write all of `data` to a non-blocking descriptor.

    Return False if its reader or the connection is gone.

    The last data of a closed channel is still delivered to a slow reader.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    view = memoryview(data)
    while view:
        if not poll.poll(LOOK_MS):
            if not channel.get_transport().is_active():
                return False
            continue
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True


def drain(
    channel: paramiko.Channel,
    sinks: dict[int, Callable[[bytes], None]],
    at_each_look: Callable[[], None],
    at_end: Callable[[], None] = lambda: None,
) -> bool:
    """Copy each descriptor to its sink.

    Return True when all have ended, False if the channel is gone.
    """
    poll = select.poll()
    for fd in sinks:
        poll.register(fd, select.POLLIN)
    left = set(sinks)
    try:
        while left and not channel.closed:
            for fd, _ in poll.poll(LOOK_MS):
                if data := _read(fd):
                    sinks[fd](data)
                else:
                    poll.unregister(fd)
                    left.remove(fd)
            at_each_look()
        at_end()
    except GONE:
        return False
    return not left


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK_BYTES)
    except ConnectionError:
        return b""


def _in_thread(function: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name=function.__name__, daemon=True)
    thread.start()
    return thread


def serve_connection(sock: socket.socket, settings: Settings, host_key: paramiko.PKey, authorized: bytes) -> None:
    """Serve one client until it is gone."""
    try:
        with sock, contextlib.closing(DoorTransport(sock)) as transport:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            door = Door(settings, authorized, _addresses(sock))
            transport.add_server_key(host_key)
            transport.start_server(server=door)
            _serve_channels(transport, door)
    except GONE as error:
        log.info("a connection ended early: %s", error)


def _addresses(sock: socket.socket) -> tuple[str, str]:
    # SSH_CLIENT and SSH_CONNECTION, as sshd(8) has them
    (host, port), (peer_host, peer_port) = sock.getsockname(), sock.getpeername()
    return f"{peer_host} {peer_port} {port}", f"{peer_host} {peer_port} {host} {port}"


def _serve_channels(transport: paramiko.Transport, door: Door) -> None:
    held: list[paramiko.Channel] = []  # the transport itself has only weak references
    while transport.is_active():
        channel = transport.accept(ACCEPT_S)
        held = [other for other in held if not other.closed]
        if channel is None:
            continue
        if channel.get_id() in door.forwards:
            _in_thread(attach_socket, channel, door.forwards.pop(channel.get_id()))
        else:
            held.append(channel)


def main(settings_text: str) -> None:
    """Serve until killed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = Settings(**json.loads(settings_text))
    host_key = paramiko.Ed25519Key.from_private_key_file(settings.host_key)
    authorized = paramiko.PublicBlob.from_file(settings.authorized_keys).key_blob
    with socket.create_server(("127.0.0.1", settings.port), backlog=128) as listener:  # sets SO_REUSEADDR
        while True:
            sock, _ = listener.accept()
            _in_thread(serve_connection, sock, settings, host_key, authorized)


if __name__ == "__main__":
    main(sys.argv[1])
