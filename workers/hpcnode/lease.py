"""Leases: how long a step may run on a node that does not hear from the controller.

A lease is renewed by a round trip, not by any message that arrives: the agent sends a Ping at `asked_s`, and the controller
answers. So the controller was alive and had this node connected at `asked_s` or later, however long the answer waited in the
queue of a sleeping machine. The controller counts from the end of its last connection to the node, which is later. So the lease
ends on the node first.

Rules:
- All times are CLOCK_BOOTTIME, which counts sleep and has no steps.
- An expired lease is not renewed: the controller may have started the next attempt elsewhere.
- A renewal is written to a file of the spool entry, which the shepherd reads when its time runs out, with or without an agent.
  The file need not be durable, because what ends the machine ends the step.

`Leases` are those of a node, `Renewals` the round trips, `StepLease` is the shepherd's view. None of them knows
how a step is ended.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Optional

from hpcnode.entry import Entry
from hpcnode.os.loop import Loop, Timer
from hpcnode.os.process import boot_clock_s
from hpcnode.wire import protocol

RENEWALS = 6  # round trips per lease, so that a slow one ends nothing
LOOK_S = 1.0  # how often a shepherd reads its clock, because timers do not count sleep


class Leases:
    """The entries that need a lease, and their renewals."""

    def __init__(self, spool: Any, log: Callable[[str], None], boot_s: Callable[[], float]) -> None:
        self._spool = spool
        self._log = log
        self._boot_s = boot_s
        self._entries: Dict[str, Entry] = {}
        self._heard_s: Optional[float] = None  # last renewal on this connection

    def add(self, entry: Entry) -> None:
        """Add an entry, if it needs a lease."""
        if entry.lease_s:
            self._entries[entry.token] = entry

    def begin(self, entry: Entry) -> None:
        """Start the lease of a new launch, if the controller has just answered."""
        if entry.lease_s and self._heard_s is not None and self._boot_s() < self._heard_s + entry.lease_s / RENEWALS:
            self._renew(entry, self._heard_s)

    def holds(self, entry: Entry) -> bool:
        """Return whether the lease of an entry is valid now."""
        return entry.renewed_s is not None and self._boot_s() < entry.renewed_s + entry.lease_s

    def renewed(self, asked_s: float) -> List[Entry]:
        """Renew all valid leases: a Ping of that time was answered.

        Return entries that waited for their first lease.
        """
        self._heard_s = asked_s
        waiting = self.waiting()
        for entry in self._living():
            if entry.renewed_s is None or self.holds(entry):
                self._renew(entry, asked_s)
        return waiting

    def disconnected(self) -> List[Entry]:
        """Note the end of the connection.

        Return entries that cannot get their first lease any more.
        """
        self._heard_s = None
        return self.waiting()

    def waiting(self) -> List[Entry]:
        """Return entries that wait for their first lease."""
        return [entry for entry in self._living() if entry.renewed_s is None]

    @property
    def renew_every_s(self) -> Optional[float]:
        """Seconds between Pings; None if no entry has a lease."""
        return min((entry.lease_s for entry in self._living()), default=0.0) / RENEWALS or None

    def _living(self) -> List[Entry]:
        for token in [token for token, entry in self._entries.items() if entry.is_final]:
            del self._entries[token]
        return list(self._entries.values())

    def _renew(self, entry: Entry, asked_s: float) -> None:
        entry.renewed_s = asked_s
        try:
            self._spool.renew(entry.token, asked_s)
        except OSError as error:
            self._log("cannot renew the lease of %s: %s" % (entry.token, error))  # its shepherd ends the step


class Renewals:
    """The agent's Pings to its controller."""

    def __init__(self, loop: Loop, leases: Leases, send: Callable[[protocol.Message], Any]) -> None:
        self._loop = loop
        self._leases = leases
        self._send = send
        self._asked: Dict[int, float] = {}
        self._number = 0
        self._last_s: Optional[float] = None
        self._timer: Optional[Timer] = None

    def keep_on(self, connected: bool) -> None:
        """Send a Ping now if an entry waits for its first lease, else when it is due.

        Call it after each turn of the loop.
        """
        every_s = self._leases.renew_every_s if connected else None
        if every_s is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if self._timer is None:
            self._timer = self._loop.later(every_s, self._due)
        if not self._asked and (self._last_s is None or self._leases.waiting()):
            self._ask()

    def _due(self) -> None:
        self._timer = None
        self._ask()

    def _ask(self) -> None:
        self._number += 1
        self._asked[self._number] = boot_clock_s()
        self._send(protocol.Ping(self._number))

    def answered(self, number: int) -> Optional[float]:
        """Return when the answered Ping was sent, None if the answer renews nothing."""
        asked_s = self._asked.pop(number, None)
        if asked_s is None or (self._last_s is not None and asked_s <= self._last_s):
            return None
        self._asked = {key: value for key, value in self._asked.items() if key > number}
        self._last_s = asked_s
        return asked_s

    def forget(self) -> None:
        """Ignore answers to earlier Pings: the connection has ended."""
        self._asked.clear()
        self._last_s = None


class StepLease:
    """The lease of one step, as its shepherd sees it."""

    def __init__(self, launch: protocol.Launch, read: Callable[[], Optional[float]]) -> None:
        self.lasts_for_ever = launch.lease != protocol.KILL or launch.lease_s <= 0
        self.grace_s = min(launch.grace_s, launch.lease_s / 2)
        self._until_term_s = launch.lease_s - self.grace_s
        self._read = read
        self._renewed_s: Optional[float] = None

    def left_s(self) -> float:
        """Return the seconds until SIGTERM is due; 0 or less if it is overdue by that much.

        The spool entry is read when the known lease has run out.
        """
        left_s = self._left_s()
        if left_s <= 0:
            self._renewed_s = self._read() or self._renewed_s
            left_s = self._left_s()
        return left_s

    def _left_s(self) -> float:
        if self._renewed_s is None:
            return -self.grace_s
        return self._renewed_s + self._until_term_s - boot_clock_s()


def write_renewal(entry: str, asked_s: float) -> None:
    """Write the time of a renewal into the spool entry, in place because of full disks."""
    text = "%020.3f %020.3f\n" % (asked_s, asked_s)
    fd = os.open(_path(entry), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, text.encode("ascii"), 0)
    finally:
        os.close(fd)


def read_renewal(entry: str) -> Optional[float]:
    """Return the last renewal; None if there is none or it is being written."""
    try:
        with open(_path(entry), "rb") as file:
            words = file.read(64).split()
        return float(words[0]) if len(words) == 2 and words[0] == words[1] else None
    except (OSError, ValueError):
        return None


def _path(entry: str) -> str:
    return os.path.join(entry, "lease")
