"""Reservations: one row each; lists are JSON."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Make the table."""
    connection.execute(
        """CREATE TABLE reservations (
            name TEXT PRIMARY KEY, start_s INTEGER NOT NULL, end_s INTEGER NOT NULL, nodes TEXT NOT NULL,
            users TEXT NOT NULL, accounts TEXT NOT NULL, partition TEXT NOT NULL, features TEXT NOT NULL,
            node_count INTEGER NOT NULL, flags TEXT NOT NULL, made_by TEXT NOT NULL, made_at_s REAL NOT NULL)"""
    )
