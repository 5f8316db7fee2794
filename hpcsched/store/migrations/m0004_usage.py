"""What users' jobs have used, by account and QOS, as it counted at a time: the base of fair share and of limits on usage."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Make the table; what jobs used before is not charged afterwards."""
    connection.execute(
        """CREATE TABLE usage (
            account TEXT NOT NULL, user TEXT NOT NULL, qos TEXT NOT NULL, at_s REAL NOT NULL, amounts TEXT NOT NULL,
            PRIMARY KEY (account, user, qos)) WITHOUT ROWID"""
    )
