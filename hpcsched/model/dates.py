"""Dates and times of day in the notations of Slurm's commands, read.

Knows no clock (`now_s` is an argument; only the local time zone is taken from the system). Readers raise RequestError with
the text and what would be right. A module of its own: most commands read no date, and `datetime` takes a while to import.

Sources: sbatch(1) --begin; sacct(1) --starttime.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from hpcsched.errors import RequestError
from hpcsched.model.units import DAY_S, HOUR_S, MINUTE_S, UNLIMITED_S

_RELATIVE = re.compile(r"now(?:([+-])([0-9]{1,10})\s*([a-z]*))?\Z")
_RELATIVE_UNITS_S = {"second": 1, "minute": MINUTE_S, "hour": HOUR_S, "day": DAY_S, "week": 7 * DAY_S}
_NAMED_HOURS = {"midnight": 0, "noon": 12, "elevenses": 11, "fika": 15, "teatime": 16}
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?(?:\.[0-9]{1,6})?([ap]m)?\Z")
_ISO = re.compile(r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})(?:[t-](.{1,20}))?\Z")
_US_DATE = re.compile(r"([0-9]{1,2})[/.]([0-9]{1,2})(?:[/.]([0-9]{4}|[0-9]{2}))?(?:-(.{1,20}))?\Z")
_DIGITS_DATE = re.compile(r"([0-9]{2})([0-9]{2})([0-9]{2})?(?:-(.{1,20}))?\Z")
_EPOCH = re.compile(r"uts([0-9]{1,11})\Z")

_Clock = tuple[int, int, int]
_Date = tuple[int | None, int, int]  # the year may be missing


def parse_when(text: str, now_s: float, *, past: bool = False) -> float:
    """Return the Unix time that `text` means, as seen at `now_s`, in the local time zone.

    ``now``, ``now+1hour``, ``now-2days``, ``16:00``, ``4:00PM``, ``midnight noon fika teatime``, ``today tomorrow``,
    ``2027-01-20``, ``2027-01-20T12:34:00``, ``012027``, ``01/20/27-12:34``, ``01/20``, a time and a date with a space
    or a dash between, ``uts1800000000``. What has no date or no year is the next such time, or with `past` (accounting)
    that of today or this year. Raises RequestError.
    """
    spelled = text.strip().lower()
    if len(spelled) > 80:
        raise RequestError(f"cannot read time {_short(text)}: it is too long")
    if relative := _RELATIVE.match(spelled):
        return now_s + _relative_s(relative, text)
    if epoch := _EPOCH.match(spelled):
        return float(epoch.group(1))
    now = datetime.fromtimestamp(now_s)
    date, clock = _date_and_clock(spelled, now, text)
    try:
        return _resolve(date, clock, now, past=past).timestamp()
    except (ValueError, OverflowError) as error:
        raise RequestError(f"cannot read time {_short(text)}: {error}") from None


def _relative_s(match: re.Match[str], text: str) -> int:
    sign, count, unit = match.groups()
    if sign is None:
        return 0
    names = [name for name in _RELATIVE_UNITS_S if name.startswith(unit.removesuffix("s") or "second")]
    if len(names) != 1:
        raise RequestError(f"cannot read time {_short(text)}: the unit is one of {', '.join(_RELATIVE_UNITS_S)}")
    seconds = int(count) * _RELATIVE_UNITS_S[names[0]]  # int: bounded
    if seconds > UNLIMITED_S:
        raise RequestError(f"cannot take time {_short(text)}: it is over {UNLIMITED_S // DAY_S} days from now")
    return -seconds if sign == "-" else seconds


def _date_and_clock(spelled: str, now: datetime, text: str) -> tuple[_Date | None, _Clock | None]:
    """Return the date and the time of day that the words of `spelled` give, each at most once."""
    date: _Date | None = None
    clock: _Clock | None = None
    words = re.sub(r"\s+([ap]m)\b", r"\1", spelled).split()  # 4:00 PM is one word
    for word in [part for whole in words for part in _parted(whole, now)]:
        new_date, new_clock = _read_word(word, now)
        if new_date is None and new_clock is None or date and new_date or clock and new_clock:
            raise RequestError(
                f"cannot read time {_short(text)}: write now+1hour, 16:00, tomorrow, 2027-01-20 or 2027-01-20T12:34:00"
            )
        date, clock = new_date or date, new_clock or clock
    if date is None and clock is None:
        raise RequestError("cannot read time '': it is empty")
    return date, clock


def _parted(word: str, now: datetime) -> list[str]:
    """Return ``noon-tomorrow`` as two words; a dash that belongs to a date stays."""
    return [word] if any(_read_word(word, now)) else word.split("-", 1)


def _read_word(word: str, now: datetime) -> tuple[_Date | None, _Clock | None]:
    if word in ("today", "tomorrow"):
        day = now + timedelta(days=word == "tomorrow")
        return (day.year, day.month, day.day), None
    if iso := _ISO.match(word):
        year, month, day_of_month, time = iso.groups()
    elif short := _US_DATE.match(word) or _DIGITS_DATE.match(word):
        month, day_of_month, year, time = short.groups()
    else:
        return None, _read_clock(word)
    clock = _read_clock(time) if time else None
    if time and clock is None:
        return None, None
    return (_full_year(year), int(month), int(day_of_month)), clock  # int: bounded


def _full_year(year: str | None) -> int | None:
    return None if year is None else int(year) + (2000 if len(year) == 2 else 0)  # int: bounded


def _read_clock(word: str) -> _Clock | None:
    if word in _NAMED_HOURS:
        return _NAMED_HOURS[word], 0, 0
    match = _CLOCK.match(word)
    if match is None:
        return None
    hour, minute, second = int(match.group(1)), int(match.group(2)), int(match.group(3) or 0)  # int: bounded
    if match.group(4):
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if match.group(4) == "pm" else 0)
    return hour, minute, second


def _resolve(date: _Date | None, clock: _Clock | None, now: datetime, *, past: bool) -> datetime:
    """Return the moment; a date without a time is its midnight.

    Raises ValueError for a day that no calendar has.
    """
    hour, minute, second = clock or (0, 0, 0)
    if date is None:
        at = now.replace(hour=hour, minute=minute, second=second, microsecond=0, fold=0)
        return at if past or at > now else at + timedelta(days=1)
    year, month, day = date
    at = datetime(year or now.year, month, day, hour, minute, second)
    return at if year or past or at > now else at.replace(year=now.year + 1)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
