"""Why ranks of training jobs failed, in their own words."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Make the table."""
    connection.execute(
        """CREATE TABLE failures (
            job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, ranks INTEGER NOT NULL,
            node TEXT NOT NULL, at_s REAL NOT NULL, echo INTEGER NOT NULL, text TEXT NOT NULL,
            PRIMARY KEY (job_id, attempt, rank)) WITHOUT ROWID"""
    )
