"""Health checks of the cluster: of the head node, and of each node.

Each gives a status, one line and numbers.

`hpcsched.cli.hhealth` runs them. Each check of the head tests its object directly: the file through SQLite's own check, the
share through the calls that checkpoints depend on. A thread, never the caller, waits for a share that hangs.

The checks of nodes are pure. `view` is one node of the API's ``GET /v1/nodes?probe=1``: its configuration, the state of its link,
and in `facts` the results of hpcnode.agent.probe, with the controller's times of the request and the answer.

Source: Monitoring Plugins Development Guidelines (exit codes 0 to 3).
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from hpcnode.os.durable import sync_folder
from hpcnode.wire.protocol import PROBE_PREFIX
from hpcsched import client
from hpcsched.errors import HpcschedError
from hpcsched.metrics.hardware import hardware_problems
from hpcsched.model.probation import CHECK
from hpcsched.model.units import format_time_s
from hpcsched.sched.sentences import plural


class Status(IntEnum):
    """The values are exit codes, not an order: see `worst`."""

    OK = 0
    WARN = 1
    CRITICAL = 2
    UNKNOWN = 3


# A known failure is worse than an impossible check.
_SEVERITY = (Status.OK, Status.WARN, Status.UNKNOWN, Status.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check. `node` is "" for checks of the head."""

    name: str
    status: Status
    text: str
    node: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """Return the object of the check: ``database``, ``node n1: disk``."""
        return f"node {self.node}: {self.name}" if self.node else self.name

    def as_json(self) -> dict[str, object]:
        """Return the check as an object of hhealth's JSON."""
        return {
            "check": self.name,
            "node": self.node or None,
            "status": self.status.name,
            "text": self.text,
            "numbers": dict(self.numbers),
        }


def worst(checks: Iterable[Check]) -> Status:
    """Return the worst status: CRITICAL before UNKNOWN before WARN before OK."""
    return max((check.status for check in checks), key=_SEVERITY.index, default=Status.OK)


def below(value: float, warn: float, critical: float) -> Status:
    """Return the status of a value that should be high."""
    return Status.CRITICAL if value < critical else Status.WARN if value < warn else Status.OK


def above(value: float, warn: float, critical: float) -> Status:
    """Return the status of a value that should be low."""
    return Status.CRITICAL if value > critical else Status.WARN if value > warn else Status.OK


# ----- the head node: database, share, clock, and whether the controller answers


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
LATE_S = 900.0  # a backup takes time
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
    if found:
        text = f"{path} is damaged: {'; '.join(found)[:200]}; stop the controller and restore a backup"
        return Check(name="database", status=Status.CRITICAL, text=text, numbers=numbers)
    status = max(
        below(free_mib, STATE_FREE_WARN_MIB, STATE_FREE_CRITICAL_MIB), above(wal_mib, WAL_WARN_MIB, float("inf"))
    )
    text = f"whole; {numbers['size_mib']:.1f} MiB, log {wal_mib} MiB, {free_mib} MiB free in {path.parent}"
    return Check(name="database", status=status, text=text, numbers=numbers)


def _quick_check(path: Path) -> list[str]:
    from hpcsched.store.engine import connected_to, damage_in  # SQLAlchemy: only this check needs it

    deadline_s = time.monotonic() + DATABASE_S
    with closing(connected_to(path.absolute(), "ro")) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 100_000)
        return damage_in(connection, "quick_check", 5)


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


def check_controller() -> list[Check]:
    """Return whether the controller answers, and how fast; then its scheduled backups, if any."""
    started_s = time.monotonic()
    try:
        answer = client.call("GET", "/v1/ping", timeout_s=CONTROLLER_S)
    except HpcschedError as error:
        return [Check(name="controller", status=Status.CRITICAL, text=str(error))]
    took_s = time.monotonic() - started_s
    jobs = sum(answer["counts"].values())
    text = f"process {answer['pid']} answers in {took_s * 1000:.0f} ms; epoch {answer['epoch']}, {plural(jobs, 'job')} in reach"
    numbers = {"took_s": took_s, "jobs": jobs}
    status, backup = above(took_s, SLOW_WARN_S, SLOW_CRITICAL_S), answer.get("backup")
    if left := _of_before(answer):
        status, text = Status.WARN, f"{text}; {left}"
    found = Check(name="controller", status=status, text=text, numbers=numbers)
    return [found, *([check_backup(backup, answer["now_s"])] if backup else [])]


def _of_before(answer: dict[str, Any]) -> str:
    """Return what waits for an administrator.

    Of it are the jobs that may still run but are not, or no longer, in the database.
    """
    strays = [f"job {each['job_id']} on {each['node']}" for each in answer.get("orphans", ())]
    unseen = answer.get("unseen_nodes", [])
    parts = [*answer.get("not_taken", ()), *answer.get("scripts", ())[:8]]
    parts += [f"ending what is not in the database: {', '.join(strays[:8])}"] if strays else []
    if undecided := answer.get("undecided", 0):
        parts.append(f"launches from before the restore that wait for your decision: {undecided} (hctl strays)")
    if unseen:
        parts.append(
            f"not heard of since the database was restored, and may run jobs of before: {', '.join(unseen[:8])}"
            " (hctl fence NODE gives your word that it does not)"
        )
    return "; ".join(parts)


def check_backup(backup: Mapping[str, Any], now_s: float) -> Check:
    """Return whether scheduled backups are made; `backup` is that of the controller's answer."""
    age_s, where = now_s - backup["newest_at_s"], ", ".join(backup["to"])
    age = f"the newest one is {format_time_s(max(0.0, age_s))} old" if backup["newest_at_s"] else "there is none yet"
    old = (
        above(age_s, LATE_S + 2 * backup["every_s"], LATE_S + 4 * backup["every_s"])
        if backup["newest_at_s"]
        else Status.WARN
    )
    status = max(old, Status.WARN if backup["why"] else Status.OK)
    text = f"in {where}: {age}" + (f"; the last attempt failed: {backup['why']}" if backup["why"] else "")
    return Check(name="backup", status=status, text=text, numbers={"age_s": age_s} if backup["newest_at_s"] else {})


# ----- nodes


View = Mapping[str, Any]

DISK_WARN_MIB, DISK_CRITICAL_MIB = 2048, 256
TMP_WARN_MIB, TMP_CRITICAL_MIB = 1024, 64
MEMORY_TOLERANCE = 0.98  # a kernel update may take a little
CLOCK_WARN_S, CLOCK_CRITICAL_S = 2.0, 60.0
LOAD_WARN = 2.0  # per CPU


def check_node(view: View, now_s: float) -> Iterator[Check]:
    """Yield all checks of one node; those that need its agent only if the agent answers."""
    link = _check_link(view, now_s)
    yield link
    if view.get("launch_failures"):
        yield _check_launches(view)
    facts = view.get("facts")
    if link.status is not Status.OK or link.name == "power" or not facts:
        return
    yield _check_clock(view, facts)
    yield _check_resources(view, facts)
    yield _check_space(view, "disk", facts, facts.get("root", "its root"), DISK_WARN_MIB, DISK_CRITICAL_MIB)
    yield _check_space(view, "tmp", facts, "/tmp", TMP_WARN_MIB, TMP_CRITICAL_MIB)  # noqa: S108 - only its free space is looked at
    yield _check_load(view, facts)
    yield _check_leftovers(view, facts)
    if view.get("hardware"):
        yield from _check_hardware(view, view["hardware"])
    if "share_error" in view:
        yield _check_share(view)


def _check(view: View, name: str, status: Status, text: str, **numbers: float) -> Check:
    return Check(name=name, status=status, text=text, node=str(view["name"]), numbers=numbers)


def _check_link(view: View, now_s: float) -> Check:
    since_s = max(0.0, now_s - float(view["link_since_s"] or now_s))
    if view.get("power", "on") != "on" and view["link"] != "up":
        off_s = max(0.0, now_s - float(view["power_since_s"] or now_s))
        text = f"switched off by {view['power_by']} for {_duration(off_s)} ({view['state']})"
        return _check(view, "power", Status.OK, text)
    if view["link"] == "down":
        text = f"down for {_duration(since_s)}: {view['link_why']}"
        return _check(view, "link", Status.CRITICAL, text, down_s=since_s)
    if view["link"] != "up":
        return _check(view, "link", Status.UNKNOWN, "not heard of since the controller started")
    if view.get("facts_error"):
        return _check(view, "link", Status.CRITICAL, f"its agent does not answer: {view['facts_error']}")
    if view.get("facts") is None:
        return _check(view, "link", Status.UNKNOWN, "its agent was not asked")
    return _check(view, "link", Status.OK, f"up for {_duration(since_s)}, agent {view['agent_version']}")


def _check_launches(view: View) -> Check:
    count = int(view["launch_failures"])
    jobs = "the last job" if count == 1 else f"the last {count} jobs"
    status = Status.CRITICAL if view["drained"] else Status.WARN
    text = f"{jobs} could not be started here, and could elsewhere: {view['launch_failure']}"
    return _check(view, "launches", status, text, failures=count)


def _check_clock(view: View, facts: Mapping[str, Any]) -> Check:
    asked_s, answered_s = float(facts["asked_at_s"]), float(facts["answered_at_s"])
    ahead_s = float(facts["time_s"]) - (asked_s + answered_s) / 2
    doubt_s = (answered_s - asked_s) / 2
    certain_s = max(0.0, abs(ahead_s) - doubt_s)
    text = f"{abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} the head's (known to {doubt_s:.2f} s)"
    return _check(view, "clock", above(certain_s, CLOCK_WARN_S, CLOCK_CRITICAL_S), text, ahead_s=ahead_s)


def _check_resources(view: View, facts: Mapping[str, Any]) -> Check:
    """Check that the node has the resources that its configuration promises to jobs.

    A node with fewer resources is CRITICAL; a full node is not.
    """
    lacks = []
    if facts["cpus"] < view["cpus"]:
        lacks.append(f"{facts['cpus']} of {plural(view['cpus'], 'cpu')}")
    memory_mib = facts.get("mem_mib", view["mem_mib"])
    if memory_mib < view["mem_mib"] * MEMORY_TOLERANCE:
        lacks.append(f"{memory_mib} MiB memory of {view['mem_mib']}")
    gpus = facts.get("gpus", [])
    if len(gpus) < len(view["gpus"]):
        lacks.append(f"{len(gpus)} of {plural(len(view['gpus']), 'GPU')}")
    free_mib = facts.get("mem_free_mib", 0)
    if lacks:
        return _check(view, "resources", Status.CRITICAL, f"it has only {', '.join(lacks)}", mem_free_mib=free_mib)
    text = f"{plural(facts['cpus'], 'cpu')}, {memory_mib} MiB memory ({free_mib} MiB free), {plural(len(gpus), 'GPU')}"
    return _check(view, "resources", Status.OK, text, mem_free_mib=free_mib)


def _check_space(
    view: View, name: str, facts: Mapping[str, Any], where: str, warn_mib: float, critical_mib: float
) -> Check:
    free_mib = facts.get(f"{name}_free_mib")
    if free_mib is None:
        return _check(view, name, Status.UNKNOWN, f"it does not say how much is free in {where}")
    total_mib = facts.get(f"{name}_total_mib", free_mib)
    # A small disk is not full merely because it is small.
    status = below(free_mib, min(warn_mib, total_mib / 4), min(critical_mib, total_mib / 20))
    return _check(view, name, status, f"{free_mib} MiB free in {where}", free_mib=free_mib)


def _check_load(view: View, facts: Mapping[str, Any]) -> Check:
    load = float(facts["load"][0])
    cpus = max(int(facts["cpus"]), 1)
    text = f"{load:.1f} on {plural(cpus, 'cpu')}, {view['cpus_alloc']} of {view['cpus']} given to jobs"
    return _check(view, "load", above(load / cpus, LOAD_WARN, float("inf")), text, load=load)


def _check_leftovers(view: View, facts: Mapping[str, Any]) -> Check:
    found = facts.get("leftovers", [])
    if not found:
        return _check(view, "leftovers", Status.OK, "no processes of ended jobs", processes=0)
    jobs = sorted({each["job"] for each in found})
    text = f"{len(found)} processes of ended jobs {', '.join(map(str, jobs[:8]))}: pids {_some(found)}"
    return _check(view, "leftovers", Status.WARN, text, processes=len(found))


def _some(found: list[Mapping[str, int]]) -> str:
    pids = [str(each["pid"]) for each in found]
    return ", ".join(pids[:8]) + (", ..." if len(pids) > 8 else "")


def _check_share(view: View) -> Check:
    error = view["share_error"]
    return _check(view, "share", Status.CRITICAL if error else Status.OK, error or "is the head's")


def _check_hardware(view: View, hardware: Mapping[str, Any]) -> Iterator[Check]:
    """Yield the problems of the machine by its last samples, or one check that is well."""
    found = list(hardware_problems(hardware["conditions"], hardware["errors"]))
    if not found:
        since_s = 3600 * hardware["hours"]
        text = f"no errors in the last {_duration(since_s)}" if since_s >= 1 else "no errors"
        yield _check(view, "hardware", Status.OK, text)
    for problem in found:
        # Without the head's share nobody knows whose fault it is: the node keeps its jobs.
        is_unclear = problem.series == "node_filesystem_answers" and "share_error" not in view
        status = Status.CRITICAL if problem.is_critical and not is_unclear else Status.WARN
        yield _check(view, problem.check, status, problem.text)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


# ----- which nodes to drain and which to resume, from their checks. Pure
# Rules: a failing node is drained, with its failures as the reason. A drained node is not changed.
# A node that does not answer is not changed either: it is DOWN, and gets no jobs. Only nodes that
# hhealth itself drained are resumed, and only when all their checks are complete and none is worse
# than WARN.


BY = CHECK


def to_drain(views: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> dict[str, str]:
    """Return the nodes to drain, each with the reason."""
    found = {}
    for view in views:
        bad = [check for check in checks if check.node == view["name"] and check.status is Status.CRITICAL]
        if bad and view["link"] == "up" and not view["drained"]:
            found[str(view["name"])] = f"{BY}: " + "; ".join(f"{check.name}: {check.text}" for check in bad)
    return found


def to_drain_again(views: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> dict[str, str]:
    """Return the nodes that were well after hhealth had drained them, and are ill again."""
    waiting = [{**view, "drained": False} for view in views if view.get("returns_at_s") is not None]
    return to_drain(waiting, checks)


def to_resume(views: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> list[str]:
    """Return the nodes that hhealth drained and that are healthy again."""
    found = []
    for view in views:
        mine = [check.status for check in checks if check.node == view["name"]]
        well = bool(mine) and all(status in (Status.OK, Status.WARN) for status in mine)
        if view["drained"] and view["drained_by"] == BY and view["link"] == "up" and well:
            found.append(str(view["name"]))
    return found
