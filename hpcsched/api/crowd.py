"""Who is connected: no account takes the server from the others.

An account has so many connections at once; one more ends the one that it was silent on for longest, first among those on
which nothing is being answered. Of answers that it does not read so many bytes are kept; one more is not sent, and its
connection ended. Of answers that take long to make so many are made for it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Protocol

LOOKED_AT = 64  # connections, for one on which nothing is being answered


class Guest(Protocol):
    """One connection."""

    @property
    def is_busy(self) -> bool:
        """Whether something is being answered on it."""

    @property
    def unsent_bytes(self) -> int:
        """So much of the answers on it has not been taken."""

    def drop(self) -> None:
        """End it now."""


class Crowd:
    """The connections of each account, the one that was heard longest ago first."""

    def __init__(self, most: int, most_unsent_bytes: int) -> None:
        self._most = most
        self._most_unsent_bytes = most_unsent_bytes
        self._of: dict[int, dict[Guest, None]] = {}

    def comes(self, uid: int, guest: Guest) -> None:
        """Take the connection in; another one of the account may have to go."""
        known = self._of.setdefault(uid, {})
        if len(known) >= self._most:
            oldest = next(iter(known))
            leaving = next((one for one in islice(known, LOOKED_AT) if not one.is_busy), oldest)
            del known[leaving]
            leaving.drop()
        known[guest] = None

    def is_heard(self, uid: int, guest: Guest) -> None:
        """Note that something came on the connection, or was answered."""
        known = self._of.get(uid, {})
        if guest in known:
            del known[guest]
            known[guest] = None

    def goes(self, uid: int, guest: Guest) -> None:
        """Forget the connection."""
        known = self._of.get(uid, {})
        known.pop(guest, None)
        if not known:
            self._of.pop(uid, None)

    def may_leave(self, uid: int, size: int) -> bool:
        """Return whether so many bytes more may wait for the account to read them, if they are all that waits or not too many."""
        unsent = sum(guest.unsent_bytes for guest in self._of.get(uid, ()))
        return not unsent or unsent + size <= self._most_unsent_bytes


class Turns:
    """Has each account wait for its own: so many of its answers are made at once, and others' in between."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[int, tuple[asyncio.Semaphore, int]] = {}  # by uid, with how many have a turn or wait for one

    @asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Wait for a turn of the account; it lasts as long as the block."""
        turns, count = self._of.get(uid) or (asyncio.Semaphore(self._most), 0)
        self._of[uid] = turns, count + 1
        try:
            async with turns:
                yield
        finally:
            _, count = self._of[uid]
            if count == 1:
                del self._of[uid]
            else:
                self._of[uid] = turns, count - 1
