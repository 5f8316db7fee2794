"""Recurring jobs: cron's five fields and words, and the lines of a scrontab.

Times are local. If both the day of the month and the day of the week are restricted, either one is enough, as in cron.
Knows no jobs. Sources: crontab(5); scrontab(1).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from hpcsched.errors import RequestError
from hpcsched.model.units import whole_number

MAX_ENTRIES = 100
MAX_TEXT_BYTES = 64 << 10
MAX_YEARS = 30  # a schedule that is not due for so long never is (the 30th of February)
OPTIONS_WORD = "#SCRON"
DISABLED_WORD = "#DISABLED: "

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_WORDS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@noon": "0 12 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CronSchedule:
    """The minutes at which something is due.

    `days` and `weekdays` (0: Sunday) are restricted unless `any_*`.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CronLine:
    """An entry of a crontab: schedule as text, command, and options of its #SCRON lines."""

    number: int  # of the line, from 1
    schedule: str
    command: str
    options: tuple[str, ...]


def parse_schedule(text: str) -> CronSchedule:
    """Return what ``*/5 * * * *`` or ``@daily`` means. Raises RequestError."""
    words = _WORDS.get(text.strip().lower(), text).split()
    if len(words) != len(_FIELDS):
        known = ", ".join(_WORDS)
        raise RequestError(f"cannot read schedule {text[:60]!r}: write five fields, as '0 4 * * 1', or one of {known}")
    minutes, hours, days, months, weekdays = (_field(word, *field) for word, field in zip(words, _FIELDS, strict=True))
    schedule = CronSchedule(
        minutes=minutes,
        hours=hours,
        days=days,
        months=months,
        weekdays=frozenset(day % 7 for day in weekdays),
        any_day=words[2].startswith("*"),
        any_weekday=words[4].startswith("*"),
    )
    if next_time_s(schedule, 0.0) is None:
        raise RequestError(f"cannot use schedule {text[:60]!r}: there is no such day")
    return schedule


def _field(text: str, name: str, least: int, most: int, names: Sequence[str]) -> frozenset[int]:
    """Return the numbers that ``1-5,*/10`` means in this field."""
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = _number(step_text, name, 1, most, ()) if slash else 1
        if span == "*":
            low, high = least, most
        else:
            first, dash, last = span.partition("-")
            low = _number(first, name, least, most, names)
            high = _number(last, name, least, most, names) if dash else (most if slash else low)
        if high < low:
            raise RequestError(f"cannot read {part[:40]!r} as {name}: it ends before it begins")
        found.update(range(low, high + 1, step))
    return frozenset(found)


def _number(text: str, name: str, least: int, most: int, names: Sequence[str]) -> int:
    if text.lower() in names:
        return names.index(text.lower()) + (1 if names is _MONTHS else 0)
    value = whole_number(text) if text.isascii() and text.isdigit() and len(text) <= 4 else -1
    if not least <= value <= most:
        raise RequestError(f"cannot read {text[:40]!r} as {name}: it must be {least} to {most}")
    return value


def next_time_s(schedule: CronSchedule, after_s: float) -> float | None:
    """Return the first due time after `after_s` (Unix seconds), None if there is none."""
    at = datetime.fromtimestamp(after_s).replace(second=0, microsecond=0) + timedelta(minutes=1)
    last_year = at.year + MAX_YEARS
    while at.year <= last_year:
        if at.month not in schedule.months:
            at = (at.replace(day=1, hour=0, minute=0) + timedelta(days=32)).replace(day=1)
        elif not _is_day(schedule, at):
            at = at.replace(hour=0, minute=0) + timedelta(days=1)
        elif at.hour not in schedule.hours:
            at = at.replace(minute=0) + timedelta(hours=1)
        elif at.minute not in schedule.minutes or at.timestamp() <= after_s:  # the hour that a clock change repeats
            at += timedelta(minutes=1)
        else:
            return at.timestamp()
    return None


def _is_day(schedule: CronSchedule, at: datetime) -> bool:
    day, weekday = at.day in schedule.days, (at.weekday() + 1) % 7 in schedule.weekdays
    if schedule.any_day or schedule.any_weekday:
        return day and weekday
    return day or weekday


def parse_crontab(text: str) -> list[CronLine]:
    """Return the entries of a crontab, in order.

    Raises RequestError with the number of the line that cannot be read.
    """
    if len(text.encode("utf-8", "surrogateescape")) > MAX_TEXT_BYTES:
        raise RequestError(f"cannot take the crontab: it has more than {MAX_TEXT_BYTES} bytes")
    found: list[CronLine] = []
    options: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        try:
            if bare.startswith(OPTIONS_WORD):
                options += shlex.split(bare[len(OPTIONS_WORD) :], comments=True)
            elif bare and not bare.startswith("#"):
                found.append(_entry(number, bare, options))
                options = []
        except (RequestError, ValueError) as error:
            raise RequestError(f"cannot read line {number} of the crontab: {error}") from None
    if len(found) > MAX_ENTRIES:
        raise RequestError(f"cannot take the crontab: it has {len(found)} entries, the most is {MAX_ENTRIES}")
    return found


def _entry(number: int, line: str, options: Sequence[str]) -> CronLine:
    count = 1 if line.startswith("@") else len(_FIELDS)
    words = line.split(None, count)
    if len(words) <= count:
        raise RequestError("an entry is a schedule, as '0 4 * * *' or @daily, and a command")
    schedule = " ".join(words[:count])
    parse_schedule(schedule)
    return CronLine(number=number, schedule=schedule, command=words[count], options=tuple(options))


def with_disabled(text: str, number: int) -> str:
    """Return the crontab with the entry on line `number` as a comment."""
    lines = text.splitlines()
    lines[number - 1] = DISABLED_WORD + lines[number - 1]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CronEntry:
    """An entry in the controller: its line, its job (JSON), and the last submitted job."""

    number: int
    schedule: str
    spec: str
    job_id: int = 0  # 0: none yet
    retry_at_s: float = 0.0  # after a submission that failed
    problem: str = ""  # why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Crontab:
    """The crontab of one user."""

    uid: int
    user: str
    text: str
    entries: tuple[CronEntry, ...]
