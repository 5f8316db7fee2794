"""Numbered migrations: module ``mNNNN_title`` with ``upgrade(connection)``. Never changed once released.

The number of the last one that ran is SQLite's ``user_version``.
"""

from __future__ import annotations

from collections.abc import Callable
from sqlite3 import Connection

from hpcsched.store.migrations import (
    m0001_first,
    m0002_changes,
    m0003_suspension,
    m0004_usage,
    m0005_reservations,
    m0006_resize,
    m0007_account_changes,
    m0008_training,
    m0009_failures,
    m0010_lowered_limits,
    m0011_step_io,
    m0012_goodput,
    m0013_barred_nodes,
    m0014_kept_steps,
    m0015_asked_since,
)

MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    m0001_first.upgrade,
    m0002_changes.upgrade,
    m0003_suspension.upgrade,
    m0004_usage.upgrade,
    m0005_reservations.upgrade,
    m0006_resize.upgrade,
    m0007_account_changes.upgrade,
    m0008_training.upgrade,
    m0009_failures.upgrade,
    m0010_lowered_limits.upgrade,
    m0011_step_io.upgrade,
    m0012_goodput.upgrade,
    m0013_barred_nodes.upgrade,
    m0014_kept_steps.upgrade,
    m0015_asked_since.upgrade,
)
