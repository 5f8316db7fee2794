"""Build the statements that all tables share: `select`, `insert`, `upsert`.

Other statements are written where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from sqlite3 import Connection
from typing import Any

Row = Mapping[str, Any]


def select(table: Any) -> str:
    """Return the start of a query for whole rows of `table` (in `hpcsched.store.columns`)."""
    return f"SELECT {', '.join(table._fields)} FROM {name_of(table)}"


def insert(table: Any, verb: str = "INSERT") -> str:
    """Return the statement for a new row, with its values in the order of the columns."""
    return f"{verb} INTO {name_of(table)} ({', '.join(table._fields)}) VALUES ({', '.join('?' for _ in table._fields)})"


def upsert(table: Any, keys: Iterable[str]) -> str:
    """Return the statement that writes a row or replaces the row with the same `keys`."""
    keys = tuple(keys)
    changes = ", ".join(f"{column} = excluded.{column}" for column in table._fields if column not in keys)
    return f"{insert(table)} ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changes}"


def name_of(table: Any) -> str:
    """Return the table's name in the database."""
    return str(table.__name__).lower()


class Putting:
    """A statement for many rows of a table."""

    def __init__(self, table: Any, sql: str) -> None:
        self._sql = sql
        self._values = itemgetter(*table._fields)

    def put(self, connection: Connection, rows: Iterable[Row]) -> None:
        connection.executemany(self._sql, map(self._values, rows))
