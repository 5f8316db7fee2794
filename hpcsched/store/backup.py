"""Back up the database while it is in use, and restore it: `back_up` and `restore`.

A restored database gets a new incarnation. Launches since the backup used ids that will be used
again; the incarnation distinguishes them from later launches. The controller decides what this
means for jobs and nodes (see man/adr/0003).

Rules: a backup is complete or absent. It is private, and never replaces a file. A restore checks
everything before it changes anything, and keeps the old database beside the new one. A complete
database is in place at every moment.

Sources: SQLite's documentation of its online backup API, and of the files of a database in WAL
mode.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hpcsched.errors import ConfigError, RequestError, UnavailableError
from hpcsched.store.engine import (
    connected_to,
    copy_into,
    damage_in,
    make_single_file,
    open_database,
    transaction,
    why_unusable,
)
from hpcsched.store.store import Store

MAX_IDS_BETWEEN = 10_000  # left unused if it is not known how many ids were given since the backup


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Summary of a database file, for an admin about to restore it."""

    incarnation: str
    last_job_id: int
    jobs: int
    unfinished: int
    last_event_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of a restore. `kept` is the old database's new path, None if there was none."""

    contents: Contents
    incarnation: str
    kept: Path | None


def back_up(database: Path, target: Path) -> int:
    """Write a consistent copy of the database to the new file `target`; return its bytes.

    Call it in a separate thread of a running controller. Raises RequestError if `target` cannot be
    created.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise RequestError(f"cannot write a backup to {target}: {error.strerror}") from None
    try:
        _copy(database, part)
        _sync(part)
        os.link(part, target)  # unlike a rename, it never replaces a file
        _sync(target.parent)
        return target.stat().st_size
    except FileExistsError:
        raise RequestError(f"cannot write a backup to {target}: it is there already; name another file") from None
    except (OSError, sqlite3.Error) as error:
        raise UnavailableError(f"cannot write a backup to {target}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def _copy(database: Path, part: Path) -> None:
    with closing(connected_to(database, "ro")) as source, closing(connected_to(part, "rw")) as copy:
        copy_into(source, copy)
        _check_whole(copy, part)


def contents_of(path: Path) -> Contents:
    """Return the contents of the database file at `path`, after reading all of it.

    Raises ConfigError if it is not our database.
    """
    if not path.is_file():
        raise ConfigError(f"cannot read the database {path}: there is no such file")
    try:
        with closing(connected_to(path, "ro")) as connection:
            if why := why_unusable(connection):
                raise ConfigError(f"cannot use {path}: {why}")
            _check_whole(connection, path)
            return _contents(connection)
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read the database {path}: {error}") from None


def _contents(connection: sqlite3.Connection) -> Contents:
    incarnation, jobs, unfinished, last_job_id, at_s = Store(connection).counts()
    return Contents(
        incarnation=incarnation,
        last_job_id=last_job_id,
        jobs=jobs,
        unfinished=unfinished,
        last_event_at_s=at_s,
    )


def restore(backup: Path, database: Path, *, now_s: float, suffix: str, strays: str = "adopt") -> Restored:
    """Replace `database` by a copy of `backup`, as a new incarnation.

    The old database is kept beside it, with `suffix`. The controller must not run. `strays`: what
    happens to processes on nodes from before the restore. "end" ends them, "ask" asks an admin,
    "adopt" keeps the ones that the backup knows and asks about the rest.
    Raises ConfigError if the backup is damaged, UnavailableError if another process reads the
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
        # Ids given since the backup were printed and name output files: they must not be used
        # again.
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
    """Return a summary of the database to replace; None if it is missing or damaged."""
    try:
        return contents_of(database)
    except ConfigError:
        return None


def _begin_new_life(fresh: Path, contents: Contents, last_job_id: int, now_s: float, strays: str) -> str:
    """Mark the copy: new incarnation, no node seen yet, no id used twice."""
    open_database(fresh).close()
    incarnation = secrets.token_hex(8)
    facts = {
        "incarnation": incarnation,
        "restored_at_s": str(now_s),
        "restored_last_job_id": str(contents.last_job_id),
        "last_job_id": str(last_job_id),
        "strays": strays,
    }
    with closing(connected_to(fresh, "rw")) as connection:
        with transaction(connection):
            Store(connection).mark_restored(facts)
        make_single_file(connection)
    return incarnation


def _put_aside(database: Path, kept: Path, *, whole: bool) -> None:
    """Link the present database, with all its files, to a second name."""
    wal, kept_wal = (path.with_name(path.name + "-wal") for path in (database, kept))
    if whole:
        with closing(connected_to(database, "rw")) as connection:
            merged = make_single_file(connection)
        if not merged:
            raise UnavailableError(f"cannot restore {database}: something reads the present one; end it and try again")
    elif wal.exists():
        os.replace(wal, kept_wal)  # SQLite would apply a log of another database to this one
    os.link(database, kept)
    database.with_name(database.name + "-shm").unlink(missing_ok=True)
    _sync(database.parent)


def _check_whole(connection: sqlite3.Connection, path: Path) -> None:
    if found := damage_in(connection, "integrity_check", 5):
        raise ConfigError(f"cannot use {path}: it is damaged: {'; '.join(found)[:300]}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
