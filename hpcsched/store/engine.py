"""Open the database file: pragmas, migrations, the incarnation and the epoch.

Sources: SQLite's documentation of WAL and of ``PRAGMA synchronous``; SQLAlchemy's notes on SQLite transactions (the
driver's own transaction handling is off, BEGIN is ours).
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.pool import StaticPool

from hpcsched.errors import ConfigError, UnavailableError
from hpcsched.store.migrations import MIGRATIONS
from hpcsched.store.schema import meta

APPLICATION_ID = 0x68706373  # "hpcs": tells our file from another program's


def open_database(path: Path | None, *, make: bool = False) -> Engine:
    """Open the database at `path` (None: a new one in memory) and bring it to this version's schema.

    A file that is not there is made only with `make`: a controller that begins with an empty database by mistake would take
    all that its nodes run for strays.

    Raises ConfigError if the file is missing, empty, damaged, not ours, or of a newer version of hpcsched, UnavailableError
    if the disk does not let us.
    """
    try:
        if path is not None:
            # Private from the first byte: the file holds scripts and environments.
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600))
        engine = _engine(path)
        with engine.begin() as connection:
            _migrate(connection, path, make=make or path is None)
    except FileNotFoundError as error:
        raise _missing(path, "it is not there") from error
    except OSError as error:
        raise UnavailableError(f"cannot open the database {path}: {error.strerror}") from error
    except OperationalError as error:  # no room, an unwell disk, somebody who locks it
        raise UnavailableError(f"cannot open the database {path}: {error.orig}") from error
    except DatabaseError as error:
        raise ConfigError(f"cannot open the database {path}: {error.orig}; restore it from a backup") from error
    return engine


def _missing(path: Path | None, why: str) -> ConfigError:
    return ConfigError(
        f"cannot open the database {path}: {why}. If state_dir names the right directory, 'hpcsched restore FILE' puts a "
        "backup there, and 'hpcsched init --database' makes an empty one (then what the nodes still run is ended)"
    )


def create_database(path: Path) -> None:
    """Make the database at `path` if it is not there yet. Raises as `open_database`."""
    log = path.with_name(path.name + "-wal")
    if log.exists() and not path.exists():  # SQLite would throw it away
        raise ConfigError(
            f"cannot make the database {path}: {log.name} is left of one that is not there; bring that back, or move it away"
        )
    open_database(path, make=True).dispose()


def open_read_only(path: Path) -> Engine:
    """Open an existing database for reading only, beside a running controller."""
    return _connected(f"file:{quote(str(path))}?mode=ro", ("busy_timeout=5000",))


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that is on disk when the block has ended; if it cannot be, raises UnavailableError and undoes it."""
    try:
        with engine.begin() as connection:
            yield connection
    except DBAPIError as error:
        raise UnavailableError(f"cannot write the database: {error.orig}; nothing of the request was kept") from error


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection to read by. Raises UnavailableError if the disk does not give what is asked for."""
    try:
        with engine.connect() as connection:
            yield connection
    except DBAPIError as error:
        raise UnavailableError(f"cannot read the database: {error.orig}") from error


def driver_connection(engine: Engine) -> sqlite3.Connection:
    """Return the engine's one connection itself, for what is asked too often to go through SQLAlchemy."""
    pooled = engine.raw_connection()
    try:
        connection = pooled.driver_connection
    finally:
        pooled.close()
    assert isinstance(connection, sqlite3.Connection)
    return connection


def _engine(path: Path | None) -> Engine:
    pragmas = ("busy_timeout=5000", "journal_mode=WAL", "synchronous=FULL")
    return _connected(":memory:" if path is None else f"file:{quote(str(path))}", pragmas)


def _connected(target: str, pragmas: tuple[str, ...]) -> Engine:
    """Return an engine with one connection; a transaction is begun and ended by us, not by the driver."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(target, uri=True, isolation_level=None, check_same_thread=False)
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        return connection

    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=StaticPool)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _migrate(connection: Connection, path: Path | None, *, make: bool) -> None:
    version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    owner = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
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
    connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.exec_driver_sql(f"PRAGMA user_version = {len(MIGRATIONS)}")
    connection.execute(
        insert(meta).values(key="incarnation", value=secrets.token_hex(8)).on_conflict_do_nothing(),
    )


def incarnation(engine: Engine) -> str:
    """Return the random id of this life of the database."""
    with engine.connect() as connection:
        return str(connection.execute(select(meta.c.value).where(meta.c.key == "incarnation")).scalar_one())


def restored_last_id(engine: Engine) -> int:
    """Return the highest job id of the backup that this database was restored from, 0 if it was not."""
    with engine.connect() as connection:
        value = connection.execute(
            select(meta.c.value).where(meta.c.key == "restored_last_job_id")
        ).scalar_one_or_none()
    return int(value or 0)


def asks_about_strays(engine: Engine) -> bool:
    """Return whether nothing that runs from before the restore is to be ended without an admin's word."""
    with engine.connect() as connection:
        value = connection.execute(select(meta.c.value).where(meta.c.key == "strays")).scalar_one_or_none()
    return value == "ask"


def raise_epoch(engine: Engine) -> int:
    """Begin a new term of the controller: return an epoch higher than all before, already on disk."""
    with writing(engine) as connection:
        old = connection.execute(select(meta.c.value).where(meta.c.key == "epoch")).scalar_one_or_none()
        epoch = int(old or 0) + 1
        statement = insert(meta).values(key="epoch", value=str(epoch))
        connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_={"value": str(epoch)}))
    return epoch


def current_epoch(engine: Engine) -> int:
    """Return the epoch of the controller's present or last term, 0 before the first."""
    with engine.connect() as connection:
        value = connection.execute(select(meta.c.value).where(meta.c.key == "epoch")).scalar_one_or_none()
    return int(value or 0)
