"""A time limit may be lowered so that the job starts earlier; an admin adds to a priority; an age stands still in a held job.

`asked_limit_s`: of a job that holds nodes, its limit before it was lowered. `time_min_set_s`: NULL is as its spec has it.
`aged_s`: what counted for its age before `eligible_at_s`.
"""

from __future__ import annotations

from sqlite3 import Connection

COLUMNS = (
    "time_min_set_s INTEGER",
    "asked_limit_s INTEGER",
    "site INTEGER NOT NULL DEFAULT 0",
    "aged_s REAL NOT NULL DEFAULT 0",
)


def upgrade(connection: Connection) -> None:
    """Add the columns."""
    for column in COLUMNS:
        connection.execute(f"ALTER TABLE jobs ADD COLUMN {column}")
