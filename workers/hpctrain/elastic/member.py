"""A rank's side of the roster: its one connection, a thread that keeps it alive, and what the roster wants of it.

Environment: HPCTRAIN_ROSTER is host:port, HPCTRAIN_ROSTER_KEY the run's key, HPCTRAIN_SLOT this process's slot.  The thread
sends a heartbeat ten times a second and breaks exchanges off when the roster says so; whoever is told to leave, or loses the
roster, ends at once: the others go on without it, and it must publish nothing any more.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import cast

from hpctrain.elastic.roster import Message
from hpctrain.errors import EXIT_REQUEUE, TrainError

BEAT_S, SHORTEST_BEAT_S = 0.1, 0.01
CONNECT_S = 10.0


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this process was started as a member of an elastic run."""
    return "HPCTRAIN_ROSTER" in environ


class Membership:
    """This process as the roster sees it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        host, _, port = environ["HPCTRAIN_ROSTER"].rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), CONNECT_S)
        except OSError as error:
            raise TrainError(f"cannot join the run: its roster at {host}:{port} does not answer ({error})") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        self._sending = threading.Lock()
        self._lines = self._socket.makefile("r")
        self._send({"say": "join", "key": environ["HPCTRAIN_ROSTER_KEY"], "slot": int(environ["HPCTRAIN_SLOT"])})
        welcome = self._lines.readline()
        if not welcome:
            raise TrainError("cannot join the run: its roster refused")
        self.number: int = json.loads(welcome)["number"]
        self.changing = False  # the roster wants another generation, after a step
        self.host = self._socket.getsockname()[0]  # as the roster's host sees this one
        self._generations: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._breaking = threading.Lock()  # while `_break_off` is called, or is about to be another
        self._break_off: Callable[[], None] = lambda: None
        self._broken = -1  # the last generation that broke
        self._step, self._useful_s = -1, 0.0
        self._due = threading.Event()
        self._closed = False
        self._pause = threading.Event()  # nobody sets it: a nap
        threading.Thread(target=self._listen, name="roster", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def ready(self, offer: Message) -> None:
        """Say that this member can take part, and where others reach it."""
        self._send({"say": "ready", "offer": offer})

    def part(self, generation: int, *, failed: bool) -> None:
        """Say that this member exchanges no more in a generation; `failed`: it cannot, and nobody can."""
        self._send({"say": "part", "generation": generation, "failed": failed})

    def next_generation(self) -> Message:
        """Wait for the next generation in which this member takes part."""
        news = self._generations.get()
        self.changing = False
        return news

    def is_broken(self, generation: int) -> bool:
        """Return whether exchanging in a generation has no sense any more."""
        return self._broken >= generation

    def watch(self, generation: int, break_off: Callable[[], None]) -> None:
        """Have `break_off` called as soon as that is so, at once or in another thread."""
        with self._breaking:
            self._break_off = break_off
            if self.is_broken(generation):
                break_off()

    def unwatch(self) -> None:
        """Have nothing called any more, nor being called when this returns: what it would break off may go now."""
        with self._breaking:
            self._break_off = lambda: None

    def stepped(self, step: int, useful_s: float) -> None:
        """Note a step that was taken; `useful_s` is counted once for a run: by the first rank alone."""
        self._step = step
        self._useful_s += useful_s
        self._due.set()

    def done(self) -> None:
        """Say that this member ends, and that all is well."""
        self._closed = True
        self._send({"say": "done"})

    def failed(self, why: str) -> None:
        """Say that this member ends because of an error which another one would meet as well."""
        self._closed = True
        self._send({"say": "failed", "why": why})

    def turned_away(self, why: str) -> None:
        """Say that this member does not fit the others, and ends."""
        self._closed = True
        self._send({"say": "turned away", "why": why})

    def _send(self, message: Message) -> None:
        with self._sending:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._out("the roster is gone")

    def _listen(self) -> None:
        try:
            for line in self._lines:
                self._hear(json.loads(line))
        except OSError:
            pass  # as if it had ended
        self._out("the roster is gone")

    def _hear(self, message: Message) -> None:
        match message["say"]:
            case "generation":
                self._generations.put(message)
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

    def _beat(self) -> None:
        while not self._closed:
            self._due.wait(BEAT_S)
            self._due.clear()
            useful_s, self._useful_s = self._useful_s, 0.0
            self._send({"say": "beat", "step": self._step, "useful_s": useful_s})
            self._pause.wait(SHORTEST_BEAT_S)

    def _out(self, why: str, status: int = EXIT_REQUEUE) -> None:
        if self._closed:
            return
        sys.stderr.write(f"hpctrain: member {self.number} ends: {why}\n")
        sys.stderr.flush()
        os._exit(status)
