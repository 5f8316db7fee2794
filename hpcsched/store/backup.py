"""Copies of the database while it is used, and the way back: `back_up` and `restore`.

A restored database is another life of the cluster: it has a new incarnation, so that whatever was launched since the
backup, under ids that will come round again, can be told from what is launched from now on. What that means for jobs and
nodes is the controller's to know (see man/adr/0003).

Rules: a backup is whole or not there, private, and never replaces a file. A restore checks all before it changes
anything, keeps what was there beside, and at every moment there is a whole database in place.

Sources: SQLite's documentation of its online backup API, and of what makes up a database in WAL mode.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from hpcsched.errors import ConfigError, RequestError, UnavailableError
from hpcsched.store.engine import APPLICATION_ID, open_database
from hpcsched.store.migrations import MIGRATIONS

BUSY_S = 5.0
MAX_IDS_BETWEEN = 10_000  # left free where nobody can say how many were given since the backup


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is in a database file, as far as a person about to restore it wants to know."""

    incarnation: str
    last_job_id: int
    jobs: int
    unfinished: int
    last_event_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore did. `kept` is where the database of before is now, None if there was none."""

    contents: Contents
    incarnation: str
    kept: Path | None


def back_up(database: Path, target: Path) -> int:
    """Write a copy of the database, as it is at one moment, to the new file `target`; return its size in bytes.

    To be called beside a running controller, in a thread of its own. Raises RequestError if `target` cannot be made.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise RequestError(f"cannot write a backup to {target}: {error.strerror}") from None
    try:
        _copy(database, part)
        _sync(part)
        os.link(part, target)  # unlike a rename it never replaces what is there
        _sync(target.parent)
        return target.stat().st_size
    except FileExistsError:
        raise RequestError(f"cannot write a backup to {target}: it is there already; name another file") from None
    except (OSError, sqlite3.Error) as error:
        raise UnavailableError(f"cannot write a backup to {target}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def _copy(database: Path, part: Path) -> None:
    with closing(_connected(database, "ro")) as source, closing(_connected(part, "rw")) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, that can be carried away
        _check_whole(copy, part)


def contents_of(path: Path) -> Contents:
    """Return what is in the database file at `path`, read as a whole. Raises ConfigError if it is none of ours."""
    if not path.is_file():
        raise ConfigError(f"cannot read the database {path}: there is no such file")
    try:
        with closing(_connected(path, "ro")) as connection:
            _check_ours(connection, path)
            _check_whole(connection, path)
            return _contents(connection)
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read the database {path}: {error}") from None


def _contents(connection: sqlite3.Connection) -> Contents:
    from hpcsched.store.queries import Seldom  # SQLAlchemy: the controller imports this module to make backups only

    incarnation, jobs, unfinished, last_job_id, at_s = Seldom(connection).counts()
    return Contents(
        incarnation=incarnation,
        last_job_id=last_job_id,
        jobs=jobs,
        unfinished=unfinished,
        last_event_at_s=at_s,
    )


def restore(backup: Path, database: Path, *, now_s: float, suffix: str, strays: str = "adopt") -> Restored:
    """Put a copy of `backup` in the place of `database`, as a new incarnation; what was there stays beside, with `suffix`.

    `strays`: what becomes of what the nodes run from before: "end", "ask" an admin, or "adopt" what the backup
    knows and ask about the rest.
    The controller must not run. Raises ConfigError if the backup is not whole, UnavailableError if something reads the
    present database.
    """
    contents = contents_of(backup)
    present = _present(database)
    kept = database.with_name(f"{database.name}.{suffix}") if database.exists() else None
    fresh = database.with_name(database.name + ".restored")
    try:
        fresh.unlink(missing_ok=True)
        with (
            open(backup, "rb") as source,
            open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
        ):
            shutil.copyfileobj(source, file)
        # Ids given since the backup were printed, and name output files: they do not come round again.
        last_job_id = max(
            contents.last_job_id, present.last_job_id if present else contents.last_job_id + MAX_IDS_BETWEEN
        )
        incarnation = _begin_new_life(fresh, contents, last_job_id, now_s, strays)
        _sync(fresh)
        if kept is not None:
            _put_aside(database, kept, whole=present is not None)
        os.replace(fresh, database)
        _sync(database.parent)
    except sqlite3.OperationalError as error:
        raise UnavailableError(f"cannot restore {database}: {error}") from None
    except OSError as error:
        raise UnavailableError(f"cannot restore {database}: {error.filename or database}: {error.strerror}") from None
    return Restored(contents=contents, incarnation=incarnation, kept=kept)


def _present(database: Path) -> Contents | None:
    """Return what is in the database that is to be replaced, None if it is not there or not whole."""
    try:
        return contents_of(database)
    except ConfigError:
        return None


def _begin_new_life(fresh: Path, contents: Contents, last_job_id: int, now_s: float, strays: str) -> str:
    """Migrate the copy and mark it: another incarnation, no node seen yet, no id given twice."""
    from hpcsched.store.queries import Seldom

    open_database(fresh).close()
    incarnation = secrets.token_hex(8)
    facts = {
        "incarnation": incarnation,
        "restored_at_s": str(now_s),
        "restored_last_job_id": str(contents.last_job_id),
        "last_job_id": str(last_job_id),
        "strays": strays,
    }
    with closing(_connected(fresh, "rw")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        Seldom(connection).mark_restored(facts)
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=DELETE")
    return incarnation


def _put_aside(database: Path, kept: Path, *, whole: bool) -> None:
    """Give the present database another name as well, with all that belongs to it."""
    wal, kept_wal = (path.with_name(path.name + "-wal") for path in (database, kept))
    if whole:
        with closing(_connected(database, "rw")) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode=DELETE").fetchone()  # folds its log in
        if mode != "delete":
            raise UnavailableError(f"cannot restore {database}: something reads the present one; end it and try again")
    elif wal.exists():
        os.replace(wal, kept_wal)  # a log beside a database that it is not of would be taken for its own
    os.link(database, kept)
    database.with_name(database.name + "-shm").unlink(missing_ok=True)
    _sync(database.parent)


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, isolation_level=None, timeout=BUSY_S)


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if owner != APPLICATION_ID:
        raise ConfigError(f"cannot use {path}: it is no database of hpcsched")
    if version > len(MIGRATIONS):
        raise ConfigError(f"cannot use {path}: it has schema {version}, this hpcsched knows up to {len(MIGRATIONS)}")


def _check_whole(connection: sqlite3.Connection, path: Path) -> None:
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(5)")]
    if found != ["ok"]:
        raise ConfigError(f"cannot use {path}: it is damaged: {'; '.join(found)[:300]}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
