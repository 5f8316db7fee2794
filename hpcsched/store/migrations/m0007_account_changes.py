"""The account and QOS of a job may be changed after its submission: NULL is as its spec has it."""

from __future__ import annotations

from sqlite3 import Connection


def upgrade(connection: Connection) -> None:
    """Add the columns."""
    for name in ("account_set", "qos_set"):
        connection.execute(f"ALTER TABLE jobs ADD COLUMN {name} TEXT")
