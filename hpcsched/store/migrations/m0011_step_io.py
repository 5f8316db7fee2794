"""What a step has read and written, in bytes; NULL of a step that ended before, or where its node does not count it."""

from __future__ import annotations

from sqlite3 import Connection

COLUMNS = ("disk_read_bytes INTEGER", "disk_write_bytes INTEGER")


def upgrade(connection: Connection) -> None:
    """Add the columns."""
    for column in COLUMNS:
        connection.execute(f"ALTER TABLE steps ADD COLUMN {column}")
