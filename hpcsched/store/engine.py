"""Open the database, run statements and transactions.

All that depends on which database it is.

Statements are SQLAlchemy Core. `Statement` compiles one once; the driver runs the text. What only
SQLite has (PRAGMA, BEGIN and COMMIT, its backup, its checks of a file) is in this module. The
driver's own transaction handling is off.

Sources: SQLite's documentation of WAL, of ``PRAGMA synchronous``, of its online backup API and of the
files of a database in WAL mode; Python's of `sqlite3` (``isolation_level``); SQLAlchemy's of
``Compiled``.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from sqlite3 import Connection, Cursor
from typing import Any
from urllib.parse import quote

from sqlalchemy import BindParameter, MetaData, Table, bindparam, column, select, table
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.sql import ClauseElement, Select
from sqlalchemy.sql.compiler import SQLCompiler

from hpcsched.errors import ConfigError, UnavailableError
from hpcsched.store.rows import meta, metadata

APPLICATION_ID = 0x68706373  # "hpcs": distinguishes our file from another program's
SCHEMA = 1  # version of the tables, in SQLite's user_version

# ----- statements

_DIALECT = sqlite.dialect()  # PostgreSQL's has the same `insert(...).on_conflict_do_update`

Row = Mapping[str, Any]


class Statement:
    """A statement of SQLAlchemy Core, compiled at its first use. Values are bound by name.

    `columns`: the columns that an INSERT or UPDATE sets to values, if not all.
    """

    def __init__(self, core: ClauseElement, columns: Iterable[str] | None = None) -> None:
        self.core = core
        self._columns = None if columns is None else list(columns)

    @cached_property
    def _compiled(self) -> tuple[str, list[str], Row]:
        """Return the SQL text, the names of its places in order, and its constants."""
        compiled = self.core.compile(
            dialect=_DIALECT, column_keys=self._columns, compile_kwargs={"render_postcompile": True}
        )
        assert isinstance(compiled, SQLCompiler)
        constants = {
            name: value
            for name, value in compiled.params.items()
            if value is not None and name not in (self._columns or ())
        }
        return str(compiled), list(compiled.positiontup or ()), constants

    @cached_property
    def _row(self) -> Callable[[Iterable[Any]], Any]:
        assert isinstance(self.core, Select)
        row: Any = namedtuple("Row", list(self.core.selected_columns.keys()))  # type: ignore[misc]  # made of the columns
        return row._make

    def run(self, connection: Connection, values: Row | None = None) -> Cursor:
        """Run the statement once."""
        text, names, constants = self._compiled
        values = {**constants, **(values or {})}
        return connection.execute(text, [values[name] for name in names])

    def run_many(self, connection: Connection, rows: Iterable[Row]) -> None:
        """Run the statement for each of these rows."""
        text, names, constants = self._compiled
        if constants:
            rows = ({**constants, **row} for row in rows)
        pick: Callable[[Row], Any] = itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],)
        connection.executemany(text, map(pick, rows))

    def rows(self, connection: Connection, values: Row | None = None) -> list[Any]:
        """Return the rows of a query; their values are attributes, named as the columns."""
        return list(map(self._row, self.run(connection, values)))

    def tuples(self, connection: Connection, values: Row | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a query as plain tuples. Names double the time of short rows."""
        return self.run(connection, values).fetchall()

    def value(self, connection: Connection, values: Row | None = None) -> Any:
        """Return the first value of the first row; None if there is no row."""
        row = self.run(connection, values).fetchone()
        return None if row is None else row[0]


def upsert(table: Table) -> Insert:
    """Return the statement that writes a row, or replaces the row with the same primary key."""
    made = insert(table)
    keys = table.primary_key.columns.keys()
    changes = {column.name: made.excluded[column.name] for column in table.columns if column.name not in keys}
    return made.on_conflict_do_update(index_elements=keys, set_=changes)


def adding(table: Table) -> Insert:
    """Return the statement that writes a row, or adds to the row with the same primary key."""
    made = insert(table)
    keys = table.primary_key.columns.keys()
    sums = {column.name: column + made.excluded[column.name] for column in table.columns if column.name not in keys}
    return made.on_conflict_do_update(index_elements=keys, set_=sums)


def place(name: str) -> BindParameter[Any]:
    """Return the place of a value that is bound when the statement runs."""
    return bindparam(name, required=False)


PUT_META = Statement(upsert(meta))
_META = Statement(select(meta.c.value).where(meta.c.key == place("name")))
_TABLES = Statement(select(column("name")).select_from(table("sqlite_master")))  # `PRAGMA table_list` needs SQLite 3.37
_NEW_META = Statement(insert(meta).on_conflict_do_nothing())

# ----- open


def open_database(path: Path | None, *, make: bool = False) -> Connection:
    """Open the database at `path`, and make its tables if it is new.

    None: a new database in memory.

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
        with transaction(connection):
            _prepare(connection, path, make=make or path is None)
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


@contextmanager
def writing(connection: Connection) -> Iterator[Connection]:
    """Run the block as a transaction: on disk at its end, or rolled back.

    Raises UnavailableError if the write could succeed on another disk or later; else SQLite's error
    about the values.
    """
    try:
        with transaction(connection):
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
def transaction(connection: Connection) -> Iterator[None]:
    """Run the block as a transaction. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
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


def _prepare(connection: Connection, path: Path | None, *, make: bool) -> None:
    """Check that the database is ours, and make the tables in an empty one."""
    version, owner = _pragma(connection, "user_version"), _pragma(connection, "application_id")
    if owner not in (0, APPLICATION_ID) or (owner == 0 and version):
        raise ConfigError(f"cannot use {path}: it is a database of another program")
    if owner == 0 and not make:
        raise _missing(path, "it is empty")
    if version > SCHEMA:
        raise ConfigError(
            f"cannot open the database {path}: it has schema {version}, this hpcsched knows up to {SCHEMA}; "
            "install the version that wrote it, or a newer one"
        )
    _create_tables(connection, metadata)
    if version < SCHEMA:
        _mark(connection, APPLICATION_ID, SCHEMA)
    _NEW_META.run(connection, {"key": "incarnation", "value": secrets.token_hex(8)})


def _create_tables(connection: Connection, tables: MetaData) -> None:
    """Create the tables that are missing: all, or those that a newer version has added."""
    known = {name for (name,) in _TABLES.run(connection)}
    for each in tables.sorted_tables:
        if each.name in known:
            continue
        connection.execute(str(CreateTable(each).compile(dialect=_DIALECT)))
        for index in each.indexes:
            connection.execute(str(CreateIndex(index).compile(dialect=_DIALECT)))


def tables_to_add(path: Path) -> list[str]:
    """Return the tables that `open_database` would add to the database at `path`."""
    with closing(connected_to(path, "ro")) as connection:
        known = {name for (name,) in _TABLES.run(connection)}
    return [each.name for each in metadata.sorted_tables if each.name not in known]


def _mark(connection: Connection, owner: int, version: int) -> None:
    connection.execute(f"PRAGMA application_id = {owner}")
    connection.execute(f"PRAGMA user_version = {version}")


def _pragma(connection: Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


# ----- maintenance of a file


BUSY_S = 5.0


def connected_to(path: Path, mode: str) -> Connection:
    """Return a connection to a database file; `mode` is "ro" or "rw". Raises sqlite3.Error."""
    target = f"file:{quote(str(path))}?mode={mode}"
    return sqlite3.connect(target, uri=True, isolation_level=None, timeout=BUSY_S)


def copy_into(source: Connection, copy: Connection) -> None:
    """Copy a whole database, in use or not, into `copy`, which becomes a single file."""
    source.backup(copy)
    make_single_file(copy)


def make_single_file(connection: Connection) -> bool:
    """Merge the log into the database file; return whether it worked.

    Nothing else reads the file.
    """
    return bool(_pragma(connection, "journal_mode=DELETE") == "delete")


def why_unusable(connection: Connection) -> str:
    """Return why the database cannot be used by this version, "" if it can. Reads no rows."""
    version, owner = _pragma(connection, "user_version"), _pragma(connection, "application_id")
    if owner != APPLICATION_ID:
        return "it is not a database of hpcsched"
    return "" if version <= SCHEMA else f"it has schema {version}, this hpcsched knows up to {SCHEMA}"


def damage_in(connection: Connection, check: str, most: int) -> list[str]:
    """Return the damage that SQLite finds, at most `most` lines. It reads the whole file.

    `check` is "quick_check" or "integrity_check" (indices too). Raises sqlite3.Error.
    """
    found = [str(row[0]) for row in connection.execute(f"PRAGMA {check}({most})")]
    return [] if found == ["ok"] else found


def damage_of(connection: Connection) -> str:
    """Return the damage in the structure of the database, "" if there is none.

    It reads the whole file: call it in a thread. The check ends early, without a result, if another
    thread calls `connection.interrupt`.
    """
    try:
        found = damage_in(connection, "quick_check", 3)
    except sqlite3.OperationalError:  # interrupted; or an unreadable disk, which other reads report
        return ""
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    return " ".join(" ".join(found).split())[:300]


# ----- a database that may be lost: the history of metrics


class OtherDatabaseError(ConfigError):
    """The file is of another program, or of a newer version: it stays as it is."""


def open_expendable(path: Path, tables: MetaData, owner: int, version: int, *, loses_none: bool = False) -> Connection:
    """Open or create a database whose last commits may be lost when the machine fails.

    It is whole anyway. With `loses_none`, a commit is on disk when it returns. A page that becomes free
    can be given back to the file system.

    Raises OtherDatabaseError, or sqlite3.Error: `is_damage` tells a damaged file from a disk that is
    full or a file that is locked.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600))
    connection = _connected(f"file:{quote(str(path))}", ("busy_timeout=2000",))
    try:
        found, is_of = _pragma(connection, "user_version"), _pragma(connection, "application_id")
        if is_of not in (0, owner) or (is_of == 0 and found):
            raise OtherDatabaseError(f"{path} is a database of another program")
        if found > version:
            raise OtherDatabaseError(f"{path} has schema {found}, this hpcsched knows up to {version}")
        safety = "FULL" if loses_none else "NORMAL"
        settings = ["journal_mode=WAL", f"synchronous={safety}", f"journal_size_limit={8 << 20}", "cache_size=-4096"]
        for pragma in settings if found else ["auto_vacuum=INCREMENTAL", *settings]:
            connection.execute(f"PRAGMA {pragma}")
        if found < version:
            with transaction(connection):
                _create_tables(connection, tables)
                _mark(connection, owner, version)
    except BaseException:
        connection.close()
        raise
    return connection


class ExpendableDatabase:
    """A database that `open_expendable` opens.

    Its methods raise sqlite3.Error, and OtherDatabaseError at the start.
    """

    def __init__(self, path: Path, tables: MetaData, owner: int, version: int, *, loses_none: bool = False) -> None:
        self._connection = open_expendable(path, tables, owner, version, loses_none=loses_none)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Run the block as one transaction."""
        with transaction(self._connection):
            yield


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the error says that the file is damaged: no later try would succeed."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def used_bytes(connection: Connection) -> int:
    """Return the size of the database file without its free pages."""
    return int(_pragma(connection, "page_count") - _pragma(connection, "freelist_count")) * int(
        _pragma(connection, "page_size")
    )


def give_pages_back(connection: Connection, most: int) -> None:
    """Give at most so many free pages back to the file system, and shorten the log."""
    for _ in connection.execute(f"PRAGMA incremental_vacuum({most})"):
        pass
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


# ----- who the database is: its incarnation and epoch


def _meta(connection: Connection, key: str) -> str | None:
    value: str | None = _META.value(connection, {"name": key})
    return value


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
    """Return an epoch for this start of the controller: higher than all before, on disk.

    A controller on a copy of the database gets the same epoch, and another `start_id`.
    """
    with writing(connection):
        epoch = current_epoch(connection) + 1
        PUT_META.run(connection, {"key": "start", "value": secrets.token_hex(8)})
        PUT_META.run(connection, {"key": "epoch", "value": str(epoch)})
    return epoch


def start_id(connection: Connection) -> str:
    """Return the random id of the controller's present or last start, "" before the first."""
    return _meta(connection, "start") or ""


def current_epoch(connection: Connection) -> int:
    """Return the epoch of the controller's present or last start, 0 before the first."""
    return int(_meta(connection, "epoch") or 0)
