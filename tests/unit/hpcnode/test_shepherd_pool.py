"""The number of pool members that an agent keeps. Members are sockets here."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from nodeworld import launch, token

from hpcnode.agent import shepherds
from hpcnode.agent.shepherds import IDLE
from hpcnode.os import process
from hpcnode.os.account import find_account
from hpcnode.os.faults import CrashPoints
from hpcnode.os.loop import Loop
from hpcnode.shepherd.assignment import Setting
from hpcnode.shepherd.confinement import Ground, Sandboxes
from hpcnode.shepherd.mpi import MpiVariables
from hpcnode.spool import Spool

BURST = shepherds.MAX_IDLE + 4


class Node:
    """ShepherdPool over a spool below `root`, and the members' ends."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members: list[socket.socket] = []
        self.job = 0
        make_pair = socket.socketpair

        def pair(family: int, kind: int) -> tuple[socket.socket, socket.socket]:
            ours, theirs = make_pair(family, kind)
            if kind == socket.SOCK_SEQPACKET:
                self.members.append(theirs.dup())
            return ours, theirs

        monkeypatch.setattr(socket, "socketpair", pair)
        monkeypatch.setattr(os, "fork", lambda: 1)
        self.loop = Loop()
        self.spool = Spool(str(root), CrashPoints())
        setting = Setting(self.spool, CrashPoints(), process.boot_id({}), "n1", str(root / "sock"), False)
        self.shepherds = shepherds.ShepherdPool(
            self.loop, setting, MpiVariables(str(root), print), Sandboxes(self.loop, Ground())
        )

    def start(self, count: int) -> None:
        """Start this many jobs at once."""
        for _ in range(count):
            self.job += 1
            one = launch(token(self.job))
            self.spool.claim(one, b"#!/bin/sh\n", "boot", (os.geteuid(), os.getegid()))
            self.shepherds.start(one, find_account("", os.geteuid()), suspended=False)

    def end_all(self) -> None:
        """Have all members report that they are idle."""
        for member in self.members:
            member.send(IDLE)
        self.loop.turn()


def test_the_members_of_a_burst_wait_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch)
    node.start(BURST)
    made = len(node.members)
    assert made >= BURST
    node.end_all()
    node.start(BURST)
    assert len(node.members) == made


def test_workers_that_nobody_needs_after_a_burst_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shepherds, "TRIM_S", 0.0)
    node = Node(tmp_path, monkeypatch)
    node.start(BURST)
    node.end_all()
    for member in node.members:
        member.setblocking(False)
    left = [member for member in node.members if _is_open(member)]
    assert len(left) == shepherds.MAX_IDLE


def _is_open(member: socket.socket) -> bool:
    """Return whether the agent keeps its end open."""
    try:
        while member.recv(1 << 17):
            pass
    except BlockingIOError:
        return True
    return False
