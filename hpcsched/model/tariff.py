"""Prices of energy by the hour of the week, and the cheapest time for a job.

Times of windows are those of the local clock of the machine that asks, which is the head. A window over midnight belongs to the
day on which it begins. A window that begins or ends in the hour that a clock change skips begins or ends with the change; in the
hour that a clock change repeats, it counts both times. Knows no jobs and no currencies.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isfinite
from typing import Any, NamedTuple

from hpcsched.errors import RequestError
from hpcsched.model.units import whole_number

DEFAULT = "default"
MAX_WINDOWS = 50
MAX_PRICE = 1e9
JOULES_PER_KWH = 3.6e6
DAY_MINUTES, WEEK_MINUTES = 24 * 60, 7 * 24 * 60
WEEK_S = WEEK_MINUTES * 60.0
MAX_PERIOD_S = 11 * 366 * 86400.0  # of steps
LATEST_S = 32_503_680_000.0  # the year 3000
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WINDOW = re.compile(r"(?:([A-Za-z,-]{2,60})\s+)?(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})\Z", re.ASCII)
_EXAMPLE = 'write it as "Mo-Fr 22:00-06:00", "Sa,Su 00:00-24:00" or "12:00-14:00"'


class PriceWindow(NamedTuple):
    """A window of a week with its price. `spans`: minutes since Monday 0:00, without the last."""

    name: str
    spans: tuple[tuple[int, int], ...]
    price: float


@dataclass(frozen=True, slots=True)
class Price:
    """A price for each minute of a week: that of its window, else `default`."""

    default: float = 0.0
    windows: tuple[PriceWindow, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.default or any(window.price for window in self.windows))

    def at_minute(self, minute: int) -> float:
        """Return the price in this minute of the week."""
        for window in self.windows:
            if any(start <= minute < end for start, end in window.spans):
                return window.price
        return self.default


FREE = Price()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """[cost]: what reports charge; see `hpcsched.config.keys.COST` for each. 0: nothing."""

    currency: str = "EUR"
    cpu_hour: float = 0.0
    gpu_hour: float = 0.0
    kwh: Price = FREE
    gco2_per_kwh: Price = FREE


NO_TARIFF = Tariff()


def price_of(value: Any) -> Price:
    """Return the price that a number, or a table of windows with `default`, means.

    Raises RequestError.
    """
    if not isinstance(value, Mapping):
        return Price(_number(value))
    if DEFAULT not in value:
        raise RequestError(f"it has no {DEFAULT}, the price outside of its windows")
    if len(value) > MAX_WINDOWS + 1:
        raise RequestError(f"it has more than {MAX_WINDOWS} windows")
    windows = [
        PriceWindow(str(name), _spans(str(name)), _number(price)) for name, price in value.items() if name != DEFAULT
    ]
    _refuse_overlap(windows)
    return Price(_number(value[DEFAULT]), tuple(windows))


def as_written(price: Price) -> Any:
    """Return the number or the table that `price_of` reads as this price."""
    if not price.windows:
        return price.default
    return {DEFAULT: price.default, **{window.name: window.price for window in price.windows}}


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_PRICE:
        raise RequestError("a price must be a number, 0 or more")
    return float(value)


def _spans(name: str) -> tuple[tuple[int, int], ...]:
    match = _WINDOW.match(name.strip())
    if match is None:
        raise RequestError(f"cannot read the window {name[:60]!r}: {_EXAMPLE}")
    days = _days(match[1] or "Mo-Su", name)
    start, end = _minute(match[2], match[3], name), _minute(match[4], match[5], name)
    if start in (end, DAY_MINUTES):
        raise RequestError(f"cannot use the window {name[:60]!r}: it is empty; {_EXAMPLE}")
    end += DAY_MINUTES * (end < start)
    spans = [(day * DAY_MINUTES + start, day * DAY_MINUTES + end) for day in sorted(days)]
    over = [(0, end - WEEK_MINUTES) for _, end in spans if end > WEEK_MINUTES]  # from Sunday to Monday
    return (*over, *((start, min(end, WEEK_MINUTES)) for start, end in spans))


def _minute(hours: str, minutes: str, name: str) -> int:
    minute = whole_number(hours) * 60 + whole_number(minutes)
    if whole_number(minutes) > 59 or minute > DAY_MINUTES:
        raise RequestError(f"cannot use the window {name[:60]!r}: {hours}:{minutes} is not a time of day; {_EXAMPLE}")
    return minute


def _days(text: str, name: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        begin = _day(first, name)
        end = _day(last, name) if dash else begin
        found.update((begin + more) % 7 for more in range((end - begin) % 7 + 1))
    return found


def _day(word: str, name: str) -> int:
    found = [number for number, day in enumerate(_DAYS) if len(word) >= 2 and day.startswith(word.lower())]
    if not found:
        raise RequestError(f"cannot use the window {name[:60]!r}: {word[:20]!r} is not a day; {_EXAMPLE}")
    return found[0]


def _refuse_overlap(windows: Sequence[PriceWindow]) -> None:
    for number, one in enumerate(windows):
        for other in windows[:number]:
            if one.price != other.price and _overlap(one, other):
                raise RequestError(f"the windows {other.name!r} and {one.name!r} overlap, and have different prices")


def _overlap(one: PriceWindow, other: PriceWindow) -> bool:
    return any(a < d and c < b for a, b in one.spans for c, d in other.spans)


# ----- prices over time


class PriceSteps:
    """The price over a period: `steps` are (time, price until the next), ascending.

    Before the first time and after the last, the nearest price counts.
    """

    def __init__(self, steps: Iterable[Sequence[float]]) -> None:
        self.steps = [(float(at_s), float(price)) for at_s, price in steps] or [(0.0, 0.0)]
        self._times_s = [at_s for at_s, _ in self.steps]
        self._sums = [0.0]  # price times seconds, from the first time to each
        for (at_s, price), (next_s, _) in zip(self.steps, self.steps[1:], strict=False):
            self._sums.append(self._sums[-1] + price * (next_s - at_s))

    def __bool__(self) -> bool:
        return any(price for _, price in self.steps)

    def mean(self, start_s: float, end_s: float) -> float:
        """Return the mean price over a period; of an empty one, the price then."""
        if end_s <= start_s:
            return self.steps[self._index(start_s)][1]
        return (self._sum_to(end_s) - self._sum_to(start_s)) / (end_s - start_s)

    def _index(self, at_s: float) -> int:
        return max(0, bisect_right(self._times_s, at_s) - 1)

    def _sum_to(self, at_s: float) -> float:
        index = self._index(at_s)
        return self._sums[index] + self.steps[index][1] * (at_s - self._times_s[index])


class EnergyPrices(NamedTuple):
    """The price and the CO2 of a kilowatt-hour over a period."""

    kwh: PriceSteps
    gco2_per_kwh: PriceSteps

    def cost(self, joules: float, start_s: float, end_s: float) -> float:
        """Return the price of energy that was used evenly over a period."""
        return joules / JOULES_PER_KWH * self.kwh.mean(start_s, end_s)

    def co2_g(self, joules: float, start_s: float, end_s: float) -> float:
        """Return the CO2 of such energy, in grams."""
        return joules / JOULES_PER_KWH * self.gco2_per_kwh.mean(start_s, end_s)


NO_PRICES = EnergyPrices(PriceSteps(()), PriceSteps(()))


class PeriodPrices(NamedTuple):
    """What hours and energy cost in a period: the answer of ``/v1/tariff``."""

    currency: str
    cpu_hour: float
    gpu_hour: float
    energy: EnergyPrices

    def __bool__(self) -> bool:
        return bool(self.cpu_hour or self.gpu_hour or self.energy.kwh)

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> PeriodPrices:
        """Return the prices of an answer of the API."""
        energy = EnergyPrices(PriceSteps(answer["kwh"]), PriceSteps(answer["gco2_per_kwh"]))
        return cls(answer["currency"], answer["cpu_hour"], answer["gpu_hour"], energy)


def prices_of(tariff: Tariff, start_s: float, end_s: float) -> EnergyPrices:
    """Return the prices of energy over a period, by the local clock."""
    return EnergyPrices(steps_of(tariff.kwh, start_s, end_s), steps_of(tariff.gco2_per_kwh, start_s, end_s))


def steps_of(price: Price, start_s: float, end_s: float) -> PriceSteps:
    """Return the price over a period, of `MAX_PERIOD_S` at most, by the local clock."""
    if not price.windows or not (isfinite(start_s) and isfinite(end_s)):
        return PriceSteps([(start_s if isfinite(start_s) else 0.0, price.default)])
    edges = sorted({edge for window in price.windows for span in window.spans for edge in span})
    found: list[tuple[float, float]] = []
    at_s, end_s = start_s, min(end_s, start_s + MAX_PERIOD_S)
    while not found or at_s < end_s:
        minute, past_s = _minute_of_week(at_s)
        value = price.at_minute(minute)
        if not found or value != found[-1][1]:
            found.append((at_s, value))
        following = next((edge for edge in edges if edge > minute), WEEK_MINUTES)
        at_s = _before_clock_change(at_s, at_s + (following - minute) * 60.0 - past_s)
    return PriceSteps(found)


def _minute_of_week(at_s: float) -> tuple[int, float]:
    """Return the minute of the week by the local clock, and the seconds since it began."""
    at = datetime.fromtimestamp(at_s)
    return at.weekday() * DAY_MINUTES + at.hour * 60 + at.minute, at.second + at.microsecond / 1e6


def _offset(at_s: float) -> timedelta | None:
    """Return how far the local clock is ahead of UTC."""
    return datetime.fromtimestamp(at_s).astimezone().utcoffset()


def _before_clock_change(start_s: float, end_s: float) -> float:
    """Return the time of the first change of the local clock in the period, else its end."""
    offset_s = _offset(start_s)
    if _offset(end_s) == offset_s:
        return end_s
    low, high = int(start_s), int(end_s) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(middle) == offset_s:
            low = middle
        else:
            high = middle
    return float(high)


# ----- the cheapest start


def cheapest_starts(price: Price, length_s: float, from_s: float, until_s: float) -> list[tuple[float, float]]:
    """Return times at which a job may begin, with its mean price then, the cheapest first.

    `length_s`: how long it lasts. All times are from `from_s` until `until_s`; of equal prices, the earliest comes first. They
    include `from_s`, and the cheapest of all starts within a week.
    """
    until_s = max(from_s, min(until_s, from_s + WEEK_S))
    length_s = max(1.0, min(length_s, MAX_PERIOD_S / 2))
    steps = steps_of(price, from_s, until_s + length_s)
    edges = [at_s for at_s, _ in steps.steps]
    starts = {from_s, until_s, *edges, *(at_s - length_s for at_s in edges)}
    allowed = sorted(at_s for at_s in starts if from_s <= at_s <= until_s)
    return sorted(
        ((at_s, round(steps.mean(at_s, at_s + length_s), 9)) for at_s in allowed), key=lambda one: (one[1], one[0])
    )
