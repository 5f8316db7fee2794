"""How far training jobs were, by their programs' word: the last of each job."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Make the table."""
    connection.execute(
        """CREATE TABLE training (
            job_id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, at_s REAL NOT NULL, step INTEGER NOT NULL,
            total_steps INTEGER NOT NULL, loss REAL, samples_per_s REAL NOT NULL, steps_per_s REAL NOT NULL,
            checkpoint_step INTEGER NOT NULL, checkpoint_at_s REAL, note TEXT NOT NULL)"""
    )
