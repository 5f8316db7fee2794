"""What a controller must know of a step that another one began; NULL: that one kept nothing."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Add the column."""
    connection.execute("ALTER TABLE steps ADD COLUMN kept TEXT")
