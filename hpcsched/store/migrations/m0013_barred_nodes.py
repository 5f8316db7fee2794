"""Which nodes have refused to take their part of a running job; `left_nodes` has been all that it is never given again."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Add the column."""
    connection.execute("ALTER TABLE jobs ADD COLUMN barred_nodes TEXT NOT NULL DEFAULT '[]'")
