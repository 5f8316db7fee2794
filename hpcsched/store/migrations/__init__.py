"""Numbered migrations: module ``mNNNN_title`` with ``upgrade(connection)``. Never changed once released.

The number of the last one that ran is SQLite's ``user_version``.
"""

from __future__ import annotations

from collections.abc import Callable
from sqlite3 import Connection

from hpcsched.store.migrations import m0001_first

MIGRATIONS: tuple[Callable[[Connection], None], ...] = (m0001_first.upgrade,)
