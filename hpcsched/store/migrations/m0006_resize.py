"""Columns of jobs whose allocation changes while they run."""

from __future__ import annotations

from sqlite3 import Connection

COLUMNS = (
    "leaving TEXT NOT NULL DEFAULT '[]'",
    "joining TEXT NOT NULL DEFAULT '[]'",
    "left_nodes TEXT NOT NULL DEFAULT '[]'",
    "wanted_nodes TEXT NOT NULL DEFAULT '[]'",
    "generation INTEGER NOT NULL DEFAULT 0",
)


def upgrade(connection: Connection) -> None:
    """Add the columns."""
    for column in COLUMNS:
        connection.execute(f"ALTER TABLE jobs ADD COLUMN {column}")
