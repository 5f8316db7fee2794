"""Bounds on connections, memory and rates of each account of a server.

`ConnectionLimits` bounds, for one account and for all together: connections, bytes that clients have not read, and bytes of
requests that are incomplete or not processed yet. If all together exceed a bound, the account that has most pays. `Rates`
bounds how often an account may send requests. The server asks before it accepts a connection, keeps bytes or starts work.

The agent and the controller use it. Runs on Python 3.9 with the standard library only. It knows nothing of sockets.
"""

from __future__ import annotations

from itertools import islice
from typing import Callable, Dict, NamedTuple, Optional, Protocol, Tuple

LOOKED_AT = 64  # connections that are searched for an idle one
FORGET_AT = 1000  # buckets


class Bounds(NamedTuple):
    """Bounds for one account and for all accounts together."""

    connections: int
    all_connections: int
    unread_bytes: int  # one answer may be larger
    all_unread_bytes: int
    unparsed_bytes: int
    all_unparsed_bytes: int


class Guest(Protocol):
    """One connection."""

    @property
    def is_busy(self) -> bool:
        """Whether the server works on its request."""

    @property
    def is_lasting(self) -> bool:
        """Whether closing it would end something: then it is never closed to make room."""

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that the client has not read yet."""

    def drop(self) -> None:
        """Close the connection now."""


class ConnectionLimits:
    """The connections of each account, the longest silent one first."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._of: Dict[int, Dict[Guest, None]] = {}
        self._count = 0
        self._unread = _Sum()  # an upper bound; `_look_at_unread` makes it exact
        self._unparsed = _Sum()

    def __len__(self) -> int:
        return self._count

    def comes(self, uid: int, guest: Guest) -> bool:
        """Admit a connection; another one may be closed for it. Return False if there is no room."""
        if len(self._of.get(uid, ())) >= self.bounds.connections and not self._make_room(uid):
            return False
        if self._count >= self.bounds.all_connections:
            most = max(self._of, key=lambda one: len(self._of[one]))
            if not self._make_room(most):
                return False
        self._of.setdefault(uid, {})[guest] = None
        self._count += 1
        return True

    def is_heard(self, uid: int, guest: Guest) -> None:
        """Note activity on the connection."""
        known = self._of.get(uid, {})
        if guest in known:
            del known[guest]
            known[guest] = None

    def goes(self, uid: int, guest: Guest) -> None:
        """Remove a connection."""
        known = self._of.get(uid, {})
        if guest in known:
            del known[guest]
            self._count -= 1
            if not known:
                del self._of[uid]
        self._unread.put(uid, guest, 0)
        self._unparsed.put(uid, guest, 0)

    def may_send(self, uid: int, guest: Guest, size: int) -> bool:
        """Return whether `size` more bytes may wait for this client, and count them.

        An account may have one answer of any size. If all together have too many, the largest connections are closed.
        """
        bounds, sums = self.bounds, self._unread
        if sums.of(uid) + size > bounds.unread_bytes:
            self._look_at_unread(uid)
            if sums.of(uid) and sums.of(uid) + size > bounds.unread_bytes:
                return False
        if sums.total + size > bounds.all_unread_bytes:
            for one in tuple(self._of):
                self._look_at_unread(one)
            while sums.total and sums.total + size > bounds.all_unread_bytes:
                if not self._drop_largest(sums, guest):
                    return False
        sums.put(uid, guest, sums.of_guest(uid, guest) + size)
        return True

    def may_hold(self, uid: int, guest: Guest, size: int) -> bool:
        """Count `size` bytes of unprocessed requests; return whether they are allowed.

        If all together have too many, the largest connections are closed.
        """
        bounds, sums = self.bounds, self._unparsed
        sums.put(uid, guest, size)
        if sums.of(uid) > bounds.unparsed_bytes:
            return False
        while sums.total > bounds.all_unparsed_bytes:
            if not self._drop_largest(sums, guest):
                return False
        return True

    def _make_room(self, uid: int) -> bool:
        """Close the longest silent connection of the account, an idle one if there is one."""
        leaving = None
        for one in islice(self._of[uid], LOOKED_AT):
            if not one.is_busy:
                leaving = one
                break
            if leaving is None and not one.is_lasting:
                leaving = one
        if leaving is None:
            return False
        self.goes(uid, leaving)
        leaving.drop()
        return True

    def _drop_largest(self, sums: _Sum, asking: Guest) -> bool:
        """Close the largest connection of the largest account.

        Return False if that is the one that asks.
        """
        uid, guest = sums.largest()
        if guest is asking:
            return False
        self.goes(uid, guest)
        guest.drop()
        return True

    def _look_at_unread(self, uid: int) -> None:
        for guest in self._of.get(uid, ()):
            self._unread.put(uid, guest, guest.unread_bytes)


class _Sum:
    """Bytes by connection, by account, and in total."""

    def __init__(self) -> None:
        self.total = 0
        self._of: Dict[int, Dict[Guest, int]] = {}
        self._sums: Dict[int, int] = {}

    def of(self, uid: int) -> int:
        return self._sums.get(uid, 0)

    def of_guest(self, uid: int, guest: Guest) -> int:
        return self._of.get(uid, {}).get(guest, 0)

    def put(self, uid: int, guest: Guest, size: int) -> None:
        """Set the bytes of a connection."""
        mine = self._of.get(uid)
        before = mine.get(guest, 0) if mine is not None else 0
        if size == before:
            return
        if mine is None:
            mine = self._of[uid] = {}
            self._sums[uid] = 0
        self.total += size - before
        self._sums[uid] += size - before
        if size:
            mine[guest] = size
            return
        del mine[guest]
        if not mine:
            del self._of[uid], self._sums[uid]

    def largest(self) -> Tuple[int, Guest]:
        """Return the largest account and its largest connection. There must be one."""
        uid = max(self._sums, key=lambda one: self._sums[one])
        mine = self._of[uid]
        return uid, max(mine, key=lambda guest: mine[guest])


class Rates:
    """A token bucket for each account: `burst` at once, then `per_s` per second.

    0 means no bound.
    """

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self.per_s = per_s
        self.burst = burst
        self._clock = clock
        self._buckets: Dict[int, Tuple[float, float]] = {}  # tokens, time

    def wait_s(self, uid: int, cost: float = 1.0) -> Optional[float]:
        """Take tokens and return None, or return the seconds until the account has one.

        A cost above the present tokens leaves a debt.
        """
        if not self.per_s:
            return None
        now_s = self._clock()
        tokens, at_s = self._buckets.get(uid, (self.burst, now_s))
        tokens = min(self.burst, tokens + (now_s - at_s) * self.per_s)
        if tokens < 1:
            return (1 - tokens) / self.per_s
        if len(self._buckets) >= FORGET_AT and uid not in self._buckets:
            self._forget_full(now_s)
        self._buckets[uid] = tokens - cost, now_s
        return None

    def _forget_full(self, now_s: float) -> None:
        self._buckets = {
            uid: (tokens, at_s)
            for uid, (tokens, at_s) in self._buckets.items()
            if tokens + (now_s - at_s) * self.per_s < self.burst
        }
