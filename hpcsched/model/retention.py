"""Which backups are kept: the newest one of each of the last days and weeks.

Pure: times and numbers. Rules: all of the last day are kept, and the newest `LEAST_KEPT` whatever their time, so that a wrong
clock does not delete them. A time after now is that of a clock that was set back: such a backup is kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import NamedTuple

from hpcsched.errors import RequestError
from hpcsched.model.units import whole_number

LEAST_KEPT = 3
DAY = timedelta(days=1)
_WORDS = re.compile(r"(?:(?P<days>\d{1,4})d daily)?(?:, *)?(?:(?P<weeks>\d{1,4})w weekly)?\Z")


class KeptBackups(NamedTuple):
    """For how many days one of each day is kept, and for how many weeks one of each week."""

    days: int
    weeks: int


def retention_of(text: str) -> KeptBackups:
    """Return the rule of a text as "7d daily, 8w weekly". Raises RequestError."""
    found = _WORDS.match(text.strip())
    if found is None or not (found["days"] or found["weeks"]):
        raise RequestError(f'cannot read {text[:60]!r}: write "7d daily, 8w weekly", or one of both')
    return KeptBackups(whole_number(found["days"] or "0"), whole_number(found["weeks"] or "0"))


def kept_times(times: Sequence[datetime], rule: KeptBackups, now: datetime) -> set[datetime]:
    """Return which of the backups of these times are kept."""
    ordered = sorted(times, reverse=True)
    kept = {*ordered[:LEAST_KEPT], *(time for time in ordered if now - time < DAY)}
    newest_of_day: dict[date, datetime] = {}
    newest_of_week: dict[tuple[int, ...], datetime] = {}
    for time in ordered:
        if now - time < rule.days * DAY:
            newest_of_day.setdefault(time.date(), time)
        if now - time < 7 * rule.weeks * DAY:
            newest_of_week.setdefault(tuple(time.isocalendar())[:2], time)
    return kept.union(newest_of_day.values(), newest_of_week.values())
