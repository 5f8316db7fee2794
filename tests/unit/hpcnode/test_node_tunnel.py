"""Connections through a tunnel in one process: nothing is lost, unbounded or delayed."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcnode.commands.tunnel import WINDOW, Tunnel, TunnelError, connect_own, make_own_directory, own_directory
from hpcnode.os.loop import Loop


class Ends:
    """A tunnel from the head to a server on the node, with counted traffic."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.refused: list[str] = []
        self.carried = 0
        self.node = Tunnel(self.loop, lambda data: self._carry(self.head, data), self._connect)
        tell_node = self.loop.after_turn
        self.head = Tunnel(self.loop, lambda data: self._carry(self.node, data))
        tell_head = self.loop.after_turn

        def after_turn() -> None:
            for tell in (tell_node, tell_head):
                assert tell is not None
                tell()

        self.loop.after_turn = after_turn
        self.head.on_refused = self.refused.append

    def _connect(self) -> socket.socket:
        return socket.create_connection(self.server.getsockname())

    def _carry(self, to: Tunnel, data: bytes) -> None:
        self.carried += len(data)
        self.loop.later(0, lambda: to.feed(data))

    def connection(self) -> tuple[socket.socket, socket.socket]:
        """Return both outer ends of a new connection."""
        ours, theirs = socket.socketpair()
        self.head.add(theirs)
        self.turn(lambda: False, 3)
        there, _ = self.server.accept()
        for sock in (ours, there):
            sock.setblocking(False)
        return ours, there

    def turn(self, until: Callable[[], bool], most: int = 100_000) -> None:
        for _ in range(most):
            if until():
                return
            self.loop.later(0.001, lambda: None)
            self.loop.turn()


def read(sock: socket.socket) -> bytes | None:
    try:
        return sock.recv(1 << 20)
    except BlockingIOError:
        return None


def test_data_and_its_end_arrive_through_the_tunnel() -> None:
    ends = Ends()
    here, there = ends.connection()
    got = bytearray()
    here.send(b"question")
    ends.turn(lambda: got.extend(read(there) or b"") or bytes(got) == b"question")
    there.send(b"answer")
    there.close()
    said: list[bytes | None] = []
    ends.turn(lambda: said.append(read(here)) or said[-1] == b"")
    assert b"".join(one for one in said if one) == b"answer"


def test_a_slow_reader_holds_up_its_writer_alone() -> None:
    ends = Ends()
    slow_here, slow_there = ends.connection()
    here, there = ends.connection()
    sent = 0

    def write_much() -> bool:
        nonlocal sent
        try:
            sent += slow_here.send(bytes(1 << 20))
        except BlockingIOError:
            pass
        return False

    ends.turn(write_much, 400)
    before = ends.carried
    ends.turn(write_much, 100)
    assert ends.carried == before  # it stands still
    here.send(b"hello")
    got = bytearray()
    ends.turn(lambda: got.extend(read(there) or b"") or bytes(got) == b"hello")
    total = 0

    def read_all() -> bool:
        nonlocal total
        total += len(read(slow_there) or b"")
        return total == sent

    ends.turn(read_all)
    assert total == sent > WINDOW


def test_a_port_where_nobody_listens_is_told_and_closed() -> None:
    ends = Ends()
    ends.server.close()
    ends._connect = lambda: socket.create_connection(("127.0.0.1", 1))  # type: ignore[method-assign]
    ends.node._connect = ends._connect
    ours, theirs = socket.socketpair()
    ends.head.add(theirs)
    ours.setblocking(False)
    said: list[bytes | None] = []
    ends.turn(lambda: said.append(read(ours)) or said[-1] == b"")
    assert ends.refused == ["Connection refused"]


def test_a_bad_frame_of_a_tunnel_is_rejected() -> None:
    with pytest.raises(TunnelError, match="too long"):
        Tunnel(Loop(), lambda data: None).feed(b"GET / HTTP/1.0\r\n")


def test_the_jobs_own_socket_is_in_a_directory_that_only_its_user_enters() -> None:
    environ = {"HPCSCHED_JOB_KEY": "k"}
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # the path of a socket is short
        path = make_own_directory(environ, folder)
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        assert make_own_directory(environ, folder) == path
        assert make_own_directory({"HPCSCHED_JOB_KEY": "l"}, folder) != path
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        with server, connect_own(environ, folder):
            pass


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_a_directory_that_another_could_have_made_is_refused(tmp_path: Path, trap: str) -> None:
    environ = {"HPCSCHED_JOB_KEY": "k"}
    path = Path(own_directory(environ, str(tmp_path)))
    if trap == "open":
        path.mkdir(mode=0o777)
        path.chmod(0o777)
    elif trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to("elsewhere")
    else:
        path.touch(mode=0o600)
    for act in (make_own_directory, connect_own):
        with pytest.raises(OSError, match="only its user"):
            act(environ, str(tmp_path))
    with pytest.raises(OSError, match="HPCSCHED_JOB_KEY"):
        make_own_directory({}, str(tmp_path))
