"""A rank's side of the roster.

One connection, a heartbeat thread, and the roster's requests.

Environment: HPCTRAIN_ROSTER is host:port, HPCTRAIN_ROSTER_KEY the run's key, HPCTRAIN_SLOT this process's slot.  The thread
sends a heartbeat ten times a second, and breaks exchanges off when the roster asks for it.  A member that is told to leave, or
loses the roster, ends at once: the others continue without it, so it must not publish.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import cast

from hpctrain.elastic.roster import Message
from hpctrain.errors import EXIT_REQUEUE, TrainError
from hpctrain.peers import GUEST, Messages, Proof, encryption_wanted

MOST_LINE_BYTES = 64 << 20
BEAT_S, SHORTEST_BEAT_S = 0.1, 0.01
CONNECT_S = 10.0


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return whether this process was started as a member of an elastic run."""
    return "HPCTRAIN_ROSTER" in environ


class Membership:
    """This process's membership in an elastic run."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        host, _, port = environ["HPCTRAIN_ROSTER"].rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), CONNECT_S)
        except OSError as error:
            raise TrainError(f"cannot join the run: its roster at {host}:{port} does not answer ({error})") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        self._sending = threading.Lock()
        self._unread = bytearray()
        self.key = environ["HPCTRAIN_ROSTER_KEY"].encode()
        self._messages = self._proved(encryption_wanted(environ))
        self._send({"type": "join", "slot": int(environ["HPCTRAIN_SLOT"])})
        welcome = self._line()
        if not welcome:
            raise TrainError("cannot join the run: its roster refused")
        self.number: int = json.loads(self._messages.unwrapped(welcome))["number"]
        self.changing = False  # the roster wants a new generation after the current step
        self.host = self._socket.getsockname()[0]  # this host's address as the roster's host sees it
        self._generations: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._breaking = threading.Lock()  # held while `_break_off` is called or replaced
        self._break_off: Callable[[], None] = lambda: None
        self._broken = -1  # the last generation that broke
        self._prepare: Callable[[Message], None] = lambda facts: None
        self._step, self._useful_s = -1, 0.0
        self._due = threading.Event()
        self._closed = False
        self._pause = threading.Event()  # never set: only waits
        self._threads = [
            threading.Thread(target=self._listen, name="roster", daemon=True),
            threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _proved(self, encrypted: bool) -> Messages:
        """Prove to each other that roster and member have the run's key."""
        mine = Proof(self.key, GUEST, encrypted=encrypted)
        try:
            self._socket.sendall(mine.nonce.hex().encode() + b"\n")
            other, proof = map(bytes.fromhex, self._line().decode().split())
            session = mine.checked(other, proof)
            if session is not None:
                self._socket.sendall(mine.of(GUEST, other).hex().encode() + b"\n")
        except (OSError, ValueError):
            session = None
        if session is None:
            raise TrainError(
                "cannot join the run: its roster has another key, or only one of the two has HPCTRAIN_ENCRYPT=1"
            )
        return Messages(session)

    def ready(self, offer: Message, prepare: Callable[[Message], None] = lambda facts: None) -> None:
        """Report that this member can take part, and its address for the others.

        `prepare` is called with the facts of a generation in which this member is a spare; it must not wait.
        """
        self._prepare = prepare
        self._send({"type": "ready", "offer": offer})

    def leave_generation(self, generation: int, *, failed: bool, unreached: Collection[int] = ()) -> None:
        """Report that this member has left a generation.

        `failed`: because an exchange failed. `unreached`: members to which its link is broken, as far as it knows.
        """
        self._send({"type": "left", "generation": generation, "failed": failed, "unreached": sorted(unreached)})

    def next_generation(self) -> Message:
        """Wait for the next generation in which this member takes part."""
        news = self._generations.get()
        self.changing = False
        return news

    def is_broken(self, generation: int) -> bool:
        """Return whether exchanges in a generation cannot succeed any more."""
        return self._broken >= generation

    def watch(self, generation: int, break_off: Callable[[], None]) -> None:
        """Call `break_off` when the generation breaks: at once, or later in another thread."""
        with self._breaking:
            self._break_off = break_off
            if self.is_broken(generation):
                break_off()

    def unwatch(self) -> None:
        """Stop watching; when this returns, `break_off` is not running and will not run."""
        with self._breaking:
            self._break_off = lambda: None

    def report_step(self, step: int, useful_s: float) -> None:
        """Report a step; `useful_s` is counted once for the run, from the first rank."""
        self._step = step
        self._useful_s += useful_s
        self._due.set()

    def done(self) -> None:
        """Report that this member ends without an error."""
        self._closed = True
        self._send({"type": "done"})
        self._due.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        for thread in self._threads:  # the libraries that they use end with the process
            thread.join(CONNECT_S)

    def failed(self, why: str) -> None:
        """Report that this member ends by an error that any other member would have too."""
        self._closed = True
        self._send({"type": "failed", "why": why})

    def report_misfit(self, why: str) -> None:
        """Report that this member does not fit the others, and ends."""
        self._closed = True
        self._send({"type": "turned away", "why": why})

    def _send(self, message: Message) -> None:
        with self._sending:
            try:
                self._socket.sendall(self._messages.wrapped(json.dumps(message).encode()))
            except OSError:
                self._out("the roster is gone")

    def _listen(self) -> None:
        try:
            while line := self._line():
                self._handle(json.loads(self._messages.unwrapped(line)))
        except (OSError, ValueError):
            pass  # a broken connection, or one with a forged message, is an ended one
        self._out("the roster is gone")

    def _line(self) -> bytes:
        """Return the next line, empty at the end.

        Not by a file: at exit, Python fails if a thread reads from one.
        """
        while (end := self._unread.find(b"\n")) < 0:
            part = self._socket.recv(1 << 16)
            if not part or len(self._unread) > MOST_LINE_BYTES:
                return b""
            self._unread += part
        line = bytes(self._unread[: end + 1])
        del self._unread[: end + 1]
        return line

    def _handle(self, message: Message) -> None:
        match message["type"]:
            case "generation":
                self._generations.put(message)
            case "prepare":
                self._prepare(message)
            case "changing":
                self.changing = True
            case "broken":
                with self._breaking:
                    self._broken = cast(int, message["generation"])
                    self._break_off()
            case "leave":
                self._out("it is not needed, or the run is over", status=0)
            case _:
                self._out("the run ends")

    def _send_heartbeats(self) -> None:
        while not self._closed:
            self._due.wait(BEAT_S)
            self._due.clear()
            useful_s, self._useful_s = self._useful_s, 0.0
            self._send({"type": "heartbeat", "step": self._step, "useful_s": useful_s})
            self._pause.wait(SHORTEST_BEAT_S)

    def _out(self, why: str, status: int = EXIT_REQUEUE) -> None:
        if self._closed:
            return
        sys.stderr.write(f"hpctrain: member {self.number} ends: {why}\n")
        sys.stderr.flush()
        os._exit(status)
