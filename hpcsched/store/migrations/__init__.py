"""Numbered migrations: modules ``mNNNN_title`` with ``upgrade(connection)``.

A released migration is never changed. SQLite's ``user_version`` is the number of the last one that ran.
"""

from __future__ import annotations

from collections.abc import Callable
from sqlite3 import Connection

from hpcsched.store.migrations import m0001_first

MIGRATIONS: tuple[Callable[[Connection], None], ...] = (m0001_first.upgrade,)
