"""Columns of jobs that are suspended, preempted, or wait for what is being freed for them."""

from __future__ import annotations

from sqlite3 import Connection

COLUMNS = (
    "suspended_at_s REAL",
    "suspended_s REAL",
    "suspended_for INTEGER",
    "preempted_by INTEGER",
    "save_s REAL",
    "kept_shares TEXT NOT NULL DEFAULT '[]'",
    "charged_until_s REAL",
)


def upgrade(connection: Connection) -> None:
    """Add the columns."""
    for column in COLUMNS:
        connection.execute(f"ALTER TABLE jobs ADD COLUMN {column}")
