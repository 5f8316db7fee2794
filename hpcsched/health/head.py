"""Checks of the head node: database, share, clock, and whether the controller answers.

Each check tests its object directly, without other code of hpcsched: the file through SQLite, the
share through the calls that checkpoints depend on. A thread, never the caller, waits for a share
that hangs.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from hpcnode.os.durable import sync_folder
from hpcnode.wire.protocol import PROBE_PREFIX
from hpcsched import client
from hpcsched.errors import HpcschedError
from hpcsched.health.report import Check, Status, above, below
from hpcsched.sched.sentences import plural

T = TypeVar("T")

MIB = 1 << 20
DATABASE_S = 60.0
SHARE_S = 30.0
CONTROLLER_S = 15.0

STATE_FREE_WARN_MIB, STATE_FREE_CRITICAL_MIB = 1024, 128
WAL_WARN_MIB = 256  # something prevents the log from being merged into the database
SHARE_FREE_WARN, SHARE_FREE_CRITICAL = 0.10, 0.02  # of its size
SLOW_WARN_S, SLOW_CRITICAL_S = 1.0, 10.0
CLOCK_STEP_S = 0.5
CLOCK_BACK_S = 60.0
SANE_AFTER_S = 1_735_689_600  # 2025: a clock before that was never set


def check_database(path: Path) -> Check:
    """Return whether SQLite finds the database undamaged, and whether it has space to grow."""
    try:
        if not path.exists():
            return Check(name="database", status=Status.CRITICAL, text=f"{path} is not there; hpcsched init makes it")
        found = _quick_check(path)
        space = os.statvfs(path.parent)
    except (sqlite3.Error, OSError) as error:
        return Check(name="database", status=_database_error(error), text=f"cannot read {path}: {error}")
    free_mib = space.f_bavail * space.f_frsize // MIB
    wal_mib = _size(path.with_name(path.name + "-wal")) // MIB
    numbers = {"size_mib": _size(path) / MIB, "wal_mib": wal_mib, "free_mib": free_mib}
    if found != ["ok"]:
        text = f"{path} is damaged: {'; '.join(found)[:200]}; stop the controller and restore a backup"
        return Check(name="database", status=Status.CRITICAL, text=text, numbers=numbers)
    status = max(
        below(free_mib, STATE_FREE_WARN_MIB, STATE_FREE_CRITICAL_MIB), above(wal_mib, WAL_WARN_MIB, float("inf"))
    )
    text = f"whole; {numbers['size_mib']:.1f} MiB, log {wal_mib} MiB, {free_mib} MiB free in {path.parent}"
    return Check(name="database", status=status, text=text, numbers=numbers)


def _quick_check(path: Path) -> list[str]:
    deadline_s = time.monotonic() + DATABASE_S
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 100_000)
        return [str(row[0]) for row in connection.execute("PRAGMA quick_check(5)")]


def _database_error(error: Exception) -> Status:
    damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
    return Status.CRITICAL if damaged else Status.UNKNOWN


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def check_share(share: str) -> Check:
    """Return whether files on the share can be written, fsynced, linked and renamed.

    The check also reports the free space.
    """
    answer = _in_time(lambda: _look_at_share(Path(share)), SHARE_S)
    if answer is None:
        text = f"{share} hangs: no answer within {SHARE_S:g} s; is its server down?"
        return Check(name="share", status=Status.CRITICAL, text=text)
    problem, took_s, space = answer
    if problem or space is None:
        return Check(name="share", status=Status.CRITICAL, text=f"{share}: {problem}", numbers={"took_s": took_s})
    free = space.f_bavail / max(space.f_blocks, 1)
    free_gib = space.f_bavail * space.f_frsize / (1 << 30)
    text = f"{share} takes write, fsync, link, rename in {took_s * 1000:.0f} ms; {free_gib:.1f} GiB free ({free:.0%})"
    status = max(above(took_s, SLOW_WARN_S, SLOW_CRITICAL_S), below(free, SHARE_FREE_WARN, SHARE_FREE_CRITICAL))
    return Check(name="share", status=status, text=text, numbers={"took_s": took_s, "free_gib": free_gib})


def _look_at_share(share: Path) -> tuple[str, float, os.statvfs_result | None]:
    """Return the error, the duration, and the free space."""
    started_s = time.monotonic()
    problem = probe_directory(share)
    return problem, time.monotonic() - started_s, None if problem else os.statvfs(share)


def probe_directory(directory: Path) -> str:
    """Do the file operations of publishing a checkpoint; return the failure as text, or ""."""
    first = directory / (PROBE_PREFIX + secrets.token_hex(8))
    second, third = (first.with_name(first.name + end) for end in (".link", ".renamed"))
    content = secrets.token_bytes(4096)
    step = "open"
    try:
        with open(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            step = "write"
            file.write(content)
            file.flush()
            step = "fsync"
            os.fsync(file.fileno())
            step = "close"
        step = "link"
        os.link(first, second)
        if not os.path.samestat(os.stat(first), os.stat(second)):
            return "link made another file"
        step = "rename"
        os.rename(second, third)
        step = "fsync of the directory"
        sync_folder(str(directory))
        step = "read"
        if third.read_bytes() != content:
            return "what was read is not what was written"
        step = "unlink"
        os.unlink(first)
        os.unlink(third)
    except OSError as error:
        for path in (first, second, third):
            with suppress(OSError):
                path.unlink()
        return f"{step} fails: {error.strerror}"
    return ""


def _in_time(work: Callable[[], T], limit_s: float) -> T | None:
    """Return the result of `work`, or None after the time limit; its thread is abandoned."""
    answer: list[T] = []
    thread = threading.Thread(target=lambda: answer.append(work()), daemon=True)
    thread.start()
    thread.join(limit_s)
    return answer[0] if answer else None


def check_clock(*, wall_s: tuple[float, float], monotonic_s: tuple[float, float], last_commit_s: float | None) -> Check:
    """Return whether the clock is set, steady between two readings, and after the last commit."""
    stepped_s = (wall_s[1] - wall_s[0]) - (monotonic_s[1] - monotonic_s[0])
    numbers = {"stepped_s": stepped_s}
    if wall_s[1] < SANE_AFTER_S:
        return Check(name="clock", status=Status.CRITICAL, text=f"it says {_date(wall_s[1])}: it was never set")
    if abs(stepped_s) > CLOCK_STEP_S:
        text = f"it was just set {'forward' if stepped_s > 0 else 'back'} by {abs(stepped_s):.1f} s"
        return Check(name="clock", status=Status.WARN, text=text, numbers=numbers)
    if last_commit_s is not None and last_commit_s - wall_s[1] > CLOCK_BACK_S:
        text = f"it is {last_commit_s - wall_s[1]:.0f} s behind the last change of the database: it was set back"
        return Check(name="clock", status=Status.CRITICAL, text=text, numbers=numbers)
    return Check(name="clock", status=Status.OK, text=f"it says {_date(wall_s[1])}", numbers=numbers)


def last_change_s(database: Path) -> float | None:
    """Return the last change of the database's files, by the clock then; None if unreadable."""
    times = []
    for path in (database, database.with_name(database.name + "-wal")):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def check_controller() -> Check:
    """Return whether the controller answers, and how fast."""
    started_s = time.monotonic()
    try:
        answer = client.call("GET", "/v1/ping", timeout_s=CONTROLLER_S)
    except HpcschedError as error:
        return Check(name="controller", status=Status.CRITICAL, text=str(error))
    took_s = time.monotonic() - started_s
    jobs = sum(answer["counts"].values())
    text = f"process {answer['pid']} answers in {took_s * 1000:.0f} ms; epoch {answer['epoch']}, {plural(jobs, 'job')} in reach"
    numbers = {"took_s": took_s, "jobs": jobs}
    if left := _of_before(answer):
        return Check(name="controller", status=Status.WARN, text=f"{text}; {left}", numbers=numbers)
    return Check(name="controller", status=above(took_s, SLOW_WARN_S, SLOW_CRITICAL_S), text=text, numbers=numbers)


def _of_before(answer: dict[str, Any]) -> str:
    """Return the jobs that may still run but are not, or no longer, in the database."""
    strays = [f"job {each['job_id']} on {each['node']}" for each in answer.get("orphans", ())]
    unseen = answer.get("unseen_nodes", [])
    parts = list(answer.get("not_taken", ()))
    parts += [f"ending what is not in the database: {', '.join(strays[:8])}"] if strays else []
    if undecided := answer.get("undecided", 0):
        parts.append(f"launches from before the restore that wait for your decision: {undecided} (hctl strays)")
    if unseen:
        parts.append(
            f"not heard of since the database was restored, and may run jobs of before: {', '.join(unseen[:8])}"
            " (hctl fence NODE gives your word that it does not)"
        )
    return "; ".join(parts)
