"""What may be changed of a job after its submission, beyond the first schema: NULL is as its spec has it."""

from __future__ import annotations

from sqlite3 import Connection

STATEMENTS = (
    "ALTER TABLE jobs ADD COLUMN partition_asked TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE jobs ADD COLUMN dependency_set TEXT",
    "ALTER TABLE jobs ADD COLUMN array_limit_set INTEGER",
    "ALTER TABLE jobs ADD COLUMN deadline_set_s INTEGER",
    "ALTER TABLE jobs ADD COLUMN reservation_set TEXT",
)


def upgrade(connection: Connection) -> None:
    """Add the columns."""
    for statement in STATEMENTS:
        connection.execute(statement)
