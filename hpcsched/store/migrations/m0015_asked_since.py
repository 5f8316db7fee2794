"""Since when an elastic job has been asked to give nodes back; NULL: it is not asked, or was before this was kept."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Add the column."""
    connection.execute("ALTER TABLE jobs ADD COLUMN wanted_at_s REAL")
