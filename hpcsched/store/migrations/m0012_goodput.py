"""What part of its time a training job has used well, by its program's word; NULL: it has not said."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Add the column."""
    connection.execute("ALTER TABLE training ADD COLUMN goodput REAL")
