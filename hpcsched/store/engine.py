"""Open the database file: pragmas, migrations, incarnation and epoch.

The driver's own transaction handling is off: this module sends BEGIN and COMMIT.

Sources: SQLite's documentation of WAL and of ``PRAGMA synchronous``; Python's of `sqlite3`
(``isolation_level``).
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection
from typing import Any
from urllib.parse import quote

from hpcsched.errors import ConfigError, UnavailableError
from hpcsched.store.migrations import MIGRATIONS

APPLICATION_ID = 0x68706373  # "hpcs": distinguishes our file from another program's


def open_database(path: Path | None, *, make: bool = False) -> Connection:
    """Open the database at `path` (None: a new one in memory) and migrate it to this version.

    A missing file is created only with `make`. A controller that starts with an empty database by
    mistake would treat all processes on its nodes as strays.

    Raises ConfigError if the file is missing, empty, damaged, not ours, or of a newer version of
    hpcsched, UnavailableError if the disk fails.
    """
    try:
        if path is not None:
            # Private from the first byte: the file holds scripts and environments.
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600))
        connection = _connected(":memory:" if path is None else f"file:{quote(str(path))}", _PRAGMAS)
        with _transaction(connection):
            _migrate(connection, path, make=make or path is None)
    except FileNotFoundError as error:
        raise _missing(path, "it is not there") from error
    except OSError as error:
        raise UnavailableError(f"cannot open the database {path}: {error.strerror}") from error
    except sqlite3.OperationalError as error:  # no space, a failing disk, or a lock
        raise UnavailableError(f"cannot open the database {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"cannot open the database {path}: {error}; restore it from a backup") from error
    return connection


def damaged(database: Path, why: str) -> ConfigError:
    """Return the error for a damaged database."""
    return ConfigError(
        f"cannot use the database {database}: it is damaged: {why}. Put a backup in its place: hpcsched restore FILE (the "
        "damaged one is kept beside it)"
    )


def _missing(path: Path | None, why: str) -> ConfigError:
    return ConfigError(
        f"cannot open the database {path}: {why}. If state_dir names the right directory, 'hpcsched restore FILE' puts a "
        "backup there, and 'hpcsched init --database' makes an empty one (then what the nodes still run is ended)"
    )


def create_database(path: Path) -> None:
    """Create the database at `path` if it is missing. Raises as `open_database`."""
    log = path.with_name(path.name + "-wal")
    if log.exists() and not path.exists():  # SQLite would delete it
        raise ConfigError(
            f"cannot make the database {path}: {log.name} is left of one that is not there; bring that back, or move it away"
        )
    open_database(path, make=True).close()


def open_read_only(path: Path) -> Connection:
    """Open an existing database read-only, beside a running controller.

    Raises UnavailableError.
    """
    try:
        return _connected(f"file:{quote(str(path))}?mode=ro", ("busy_timeout=5000",))
    except sqlite3.Error as error:
        raise UnavailableError(f"cannot open the database {path}: {error}") from error


def damage_of(connection: Connection) -> str:
    """Return the damage in the structure of the database, "" if there is none.

    It reads the whole file: call it in a thread. The check ends early, without a result, if another
    thread calls `connection.interrupt`.
    """
    try:
        found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    except sqlite3.OperationalError:  # interrupted; or an unreadable disk, which other reads report
        return ""
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    return "" if found == ["ok"] else " ".join(" ".join(found).split())[:300]


@contextmanager
def writing(connection: Connection) -> Iterator[Connection]:
    """Run the block as a transaction: on disk at its end, or rolled back.

    Raises UnavailableError if the write could succeed on another disk or later; else SQLite's error
    about the values.
    """
    try:
        with _transaction(connection):
            yield connection
    except (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError):
        raise  # the values are wrong: a retry would fail too
    except sqlite3.Error as error:
        raise UnavailableError(f"cannot write the database: {error}; nothing of the request was kept") from error


@contextmanager
def reading(connection: Connection) -> Iterator[Connection]:
    """Yield a connection for reading. Raises UnavailableError if the disk fails."""
    try:
        yield connection
    except sqlite3.OperationalError as error:  # a failing disk
        raise UnavailableError(f"cannot read the database: {error}") from error
    except sqlite3.Error as error:
        raise UnavailableError(
            f"cannot read the database: {error}; restore it from a backup: hpcsched restore"
        ) from error


@contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    connection.execute("BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors have already ended it
            connection.execute("ROLLBACK")
        raise


_PRAGMAS = (
    "busy_timeout=5000",
    "journal_mode=WAL",
    "synchronous=FULL",
    "secure_delete=FAST",  # Debian's default overwrites deleted scripts page by page, which delays everything
    f"journal_size_limit={64 << 20}",
)


def _connected(target: str, pragmas: tuple[str, ...]) -> Connection:
    """Return a connection on which this module, not the driver, begins and ends transactions."""
    connection = sqlite3.connect(target, uri=True, isolation_level=None, check_same_thread=False)
    try:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: Connection, path: Path | None, *, make: bool) -> None:
    version = _value(connection, "PRAGMA user_version")
    owner = _value(connection, "PRAGMA application_id")
    if owner not in (0, APPLICATION_ID) or (owner == 0 and version):
        raise ConfigError(f"cannot use {path}: it is a database of another program")
    if owner == 0 and not make:
        raise _missing(path, "it is empty")
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"cannot open the database {path}: it has schema {version}, this hpcsched knows up to {len(MIGRATIONS)}; "
            "install the version that wrote it, or a newer one"
        )
    for migration in MIGRATIONS[version:]:
        migration(connection)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    connection.execute("INSERT OR IGNORE INTO meta (key, value) VALUES ('incarnation', ?)", (secrets.token_hex(8),))


def _value(connection: Connection, query: str, *values: object) -> Any:
    """Return the single value of a query, None if it has no row."""
    row = connection.execute(query, values).fetchone()
    return None if row is None else row[0]


def _meta(connection: Connection, key: str) -> str | None:
    return _value(connection, "SELECT value FROM meta WHERE key = ?", key)


def incarnation(connection: Connection) -> str:
    """Return the random id of this incarnation of the database."""
    return str(_meta(connection, "incarnation"))


def restored_last_id(connection: Connection) -> int:
    """Return the highest job id of the restored backup, 0 if there was no restore."""
    return int(_meta(connection, "restored_last_job_id") or 0)


def asks_about_orphans(connection: Connection) -> bool:
    """Return whether processes from before a restore may be ended only by an admin's order."""
    return _meta(connection, "strays") in ("ask", "adopt")


def adopts_known(connection: Connection) -> bool:
    """Return whether jobs whose launch the restored database knows continue automatically.

    Otherwise an admin decides.
    """
    return _meta(connection, "strays") == "adopt"


def raise_epoch(connection: Connection) -> int:
    """Return an epoch for this start of the controller: higher than all before, on disk."""
    with writing(connection):
        epoch = current_epoch(connection) + 1
        connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('epoch', ?)", (str(epoch),))
    return epoch


def current_epoch(connection: Connection) -> int:
    """Return the epoch of the controller's present or last start, 0 before the first."""
    return int(_meta(connection, "epoch") or 0)
