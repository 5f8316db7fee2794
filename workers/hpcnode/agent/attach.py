"""`hpcnode attach`: starts an agent if need be, and joins stdio to its socket.

It starts the agent in a session of its own, so that the agent outlives this connection. It replaces an agent of another version
by SIGTERM, which leaves its shepherds alone, and SIGKILL if that does not help. It also replaces an agent that accepts two
connections and answers on neither. Killing is safe, because everything that matters is on disk. The data that it forwards is not
looked at.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import BinaryIO, List, Optional, Tuple

from hpcnode import paths
from hpcnode.os import process
from hpcnode.wire import protocol

START_S = 20.0
ANSWER_S = 5.0
HAND_OVER_S = 5.0
MAX_UNANSWERED = 2
CHUNK = 256 << 10


class Unanswered(Exception):
    """A process accepts connections, but does not answer."""


class AttachError(Exception):
    """No agent can be reached; the text is the reason."""


def main(argv: List[str]) -> int:
    """Run `attach --root R --cluster C --node N [--idle-s S]`."""
    import argparse

    parser = argparse.ArgumentParser(prog="hpcnode attach")
    parser.add_argument("--root", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--idle-s", type=float, default=None)
    options = parser.parse_args(argv)
    process.leave_no_core_file()
    try:
        sock = reach(options.root, options.cluster, options.node, options.idle_s)
    except (AttachError, OSError) as error:
        sys.stderr.write("hpcnode: %s\n" % error)
        return 1
    if not join(sock):
        sys.stderr.write("hpcnode: the agent has ended or was killed (see %s/log)\n" % options.root)
        return 1
    return 0


def reach(root: str, cluster: str, node: str, idle_s: Optional[float]) -> socket.socket:
    """Return a connection to the agent of this root, started or replaced if need be.

    Raises AttachError.
    """
    deadline_s = time.monotonic() + START_S
    why = ""
    unanswered = 0
    late = False
    while not late:
        late = (
            time.monotonic() >= deadline_s
        )  # before the attempt, so that one more follows a suspended machine's wake-up
        running, version, python = who_runs(root)
        is_other = version != paths.version() or python not in ("", sys.executable)
        if running is not None and (is_other or unanswered >= MAX_UNANSWERED):
            replace(running, HAND_OVER_S if unanswered < MAX_UNANSWERED else 0.0)
            unanswered = 0
        try:
            sock = answer_of(paths.socket_path(root))
        except Unanswered:
            unanswered += 1
            continue
        if sock is not None:
            return sock
        why = start(root, cluster, node, idle_s) or why
        if why and "another one" not in why:
            break
    raise AttachError(why or "cannot reach the agent of %s: it does not answer (see %s/log)" % (root, root))


def who_runs(root: str) -> Tuple[Optional[process.ProcessIdentity], str, str]:
    """Return the living agent of this root, its version, and its Python ("" if unknown)."""
    try:
        with open(os.path.join(root, "agent.lock")) as file:
            noted = json.load(file)
        identity = process.ProcessIdentity(*noted["agent"])
        version, python = str(noted["version"]), str(noted.get("python", ""))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None, "", ""
    return (identity if process.is_alive(identity, process.boot_id(os.environ)) else None), version, python


def replace(running: process.ProcessIdentity, wait_s: float) -> None:
    """End an agent: SIGTERM, after `wait_s` SIGKILL. Its shepherds continue."""
    boot = process.boot_id(os.environ)
    process.send_signal(running, boot, signal.SIGTERM)
    deadline_s = time.monotonic() + wait_s
    while process.is_alive(running, boot):
        if time.monotonic() > deadline_s:
            process.send_signal(running, boot, signal.SIGKILL)  # safe: all state is on disk
            deadline_s += HAND_OVER_S
        time.sleep(0.005)


def answer_of(path: str) -> Optional[socket.socket]:
    """Return a connection to an agent that has answered, None if there is no agent.

    Raises Unanswered if the connection is accepted but not answered.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(ANSWER_S)
    try:
        sock.connect(path)
        if _peer_uid(sock) not in (0, os.geteuid()):
            raise AttachError("cannot trust %s: it belongs to another user" % path)
        sock.sendall(protocol.encode(protocol.Ping(0)))
        pong = protocol.encode(protocol.Pong(0))
        answer = b""
        while len(answer) < len(pong):
            part = sock.recv(len(pong) - len(answer))
            if not part:
                raise ConnectionResetError
            answer += part
    except socket.timeout as error:
        sock.close()
        raise Unanswered from error
    except OSError:
        sock.close()
        return None
    sock.settimeout(None)
    return sock


def _peer_uid(sock: socket.socket) -> int:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def start(root: str, cluster: str, node: str, idle_s: Optional[float]) -> str:
    """Start an agent and wait until it answers; return "" or why that failed."""
    words = ["agent", "--root", root, "--cluster", cluster, "--node", node]
    if idle_s is not None:
        words += ["--idle-s", str(idle_s)]
    read_end, write_end = os.pipe()
    with open_log(root) as log:
        child = subprocess.Popen(
            paths.command(*words, "--ready-fd", str(write_end)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write_end,),
            cwd="/",
            start_new_session=True,
        )
    os.close(write_end)
    said = _read_word(read_end)
    os.close(read_end)
    if said.startswith("ready"):
        child.returncode = 0  # it outlives this process; nothing waits for it
        return ""
    return said.partition("error: ")[2].strip() or "cannot start the agent: it ended at once (see %s/log)" % root


def _read_word(fd: int) -> str:
    said = b""
    deadline_s = time.monotonic() + START_S
    while b"\n" not in said:
        if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            return ""
        part = os.read(fd, 4096)
        if not part:
            break
        said += part
    return said.decode("utf-8", "replace")


def open_log(root: str) -> BinaryIO:
    """Return the agent's log, open for appending."""
    path = os.path.join(root, "log")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(fd, "ab")


def join(sock: socket.socket) -> bool:
    """Copy stdin to the socket and the socket to stdout until either ends.

    Return False if the agent ended.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    pumps = [_Pump(0, sock.fileno()), _Pump(sock.fileno(), 1)]
    for fd in (0, 1, sock.fileno()):
        os.set_blocking(fd, False)
    with selectors.PollSelector() as selector:
        while not any(pump.over for pump in pumps):
            wanted = {fd: 0 for fd in (0, 1, sock.fileno())}
            for pump in pumps:
                fd, event = pump.waits_for()
                wanted[fd] |= event
            for fd, events in wanted.items():
                _set(selector, fd, events)
            for key, _events in selector.select():
                for pump in pumps:
                    if key.fd in (pump.source, pump.sink):
                        pump.move()
    return not pumps[1].over


def _set(selector: selectors.PollSelector, fd: int, events: int) -> None:
    known = fd in selector.get_map()
    if events and known:
        selector.modify(fd, events)
    elif events:
        selector.register(fd, events)
    elif known:
        selector.unregister(fd)


class _Pump:
    """One direction of the copy; holds at most one chunk."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink
        self._held = b""
        self.over = False

    def waits_for(self) -> Tuple[int, int]:
        if self._held:
            return self.sink, selectors.EVENT_WRITE
        return self.source, selectors.EVENT_READ

    def move(self) -> None:
        """Read if nothing is held, then write as much as the sink takes."""
        try:
            if not self._held:
                self._held = os.read(self.source, CHUNK)
                self.over = not self._held
            while self._held:
                self._held = self._held[os.write(self.sink, self._held) :]
        except BlockingIOError:
            pass
        except OSError:
            self.over = True
