"""Read and write numbers, times, memory sizes and signals as Slurm's commands do.

Dates are `hpcsched.model.dates`'. Every reader is linear in the length of its text and raises RequestError with the text, why
it is refused and what would be right.

Sources: sbatch(1) --time, --mem, --signal; squeue(1) %l, %M, %m; signal(7).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isfinite

from hpcsched.errors import RequestError

# ----- numbers are read within bounds, and nowhere else
# `make lint` refuses a bare ``int(text)`` elsewhere: Python reads thousands of digits, slowly, and no table holds them.


def whole_number(text: str, what: str = "") -> int:
    """Return the whole number in `text`, which has at most 18 digits.

    `what` names it in the error. Raises RequestError.
    """
    from hpcnode.wire import gate  # here: it costs a command that only writes times and sizes 5 ms

    try:
        return gate.whole_number(text)
    except gate.GateError as error:
        raise RequestError(f"cannot read {what or 'a number'}: {error}") from None


def number(text: str, what: str = "") -> float:
    """Return the finite number in `text`, which may have a fraction.

    Raises RequestError.
    """
    from hpcnode.wire import gate

    try:
        found = float(text) if len(text) <= gate.MAX_NUMBER_CHARS else float("nan")
    except ValueError:
        found = float("nan")
    if not isfinite(found):
        raise RequestError(f"cannot read {what or 'a number'}: {text[:40]!r} is not a number")
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean that?)`` if something known is much like `name`, else ""."""
    import difflib  # only ever needed for an error message

    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


# ----- times and sizes


MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86_400
MIB_PER_GIB = 1024

# The limit of a job that asked for none: longer than any machine lasts, and still a valid date.
UNLIMITED_S = 36_500 * DAY_S
_UNLIMITED_WORDS = frozenset({"unlimited", "infinite", "-1"})

_TIME = re.compile(r"(?:([0-9]{1,10})-)?([0-9]{1,12})(?::([0-9]{1,12}))?(?::([0-9]{1,12}))?\Z")
_DURATION = re.compile(r"(?=[0-9])(?:([0-9]{1,6})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,10})m)?(?:([0-9]{1,12})s)?\Z")
_MEM = re.compile(r"([0-9]{1,18})([kmgtp]?)(i?b)?\Z")
_MIB_SHIFT = {"k": -10, "m": 0, "g": 10, "t": 20, "p": 30}


def parse_time_s(text: str, *, whole_minutes: bool = True) -> int | None:
    """Return `text` as a time limit in seconds, None for UNLIMITED, INFINITE and -1.

    ``30`` is minutes; ``M:S H:M:S D-H D-H:M D-H:M:S``; parts above 59 are taken as they are, as Slurm does. Also ``90s``,
    ``5m``, ``1h30m``, ``2d12h``, which Slurm does not know. Slurm keeps limits in whole minutes and rounds up; with
    `whole_minutes=False` nothing is rounded (durations that are no job's limit). Raises RequestError.
    """
    if text.strip().lower() in _UNLIMITED_WORDS:
        return None
    seconds = _duration_s(text)
    if seconds is None:
        match = _TIME.match(text.strip())
        if match is None:
            raise RequestError(
                f"cannot read time {_short(text)}: write minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S, 90s, 1h30m, 2d or UNLIMITED"
            )
        days, first, second, third = match.groups()
        clock_s = _clock_s(int(first), second, third, with_days=days is not None)  # int: bounded
        seconds = int(days or 0) * DAY_S + clock_s  # int: bounded
    if seconds > UNLIMITED_S:
        raise RequestError(f"cannot take time {_short(text)}: it is over {UNLIMITED_S // DAY_S} days; write UNLIMITED")
    return -(-seconds // MINUTE_S) * MINUTE_S if whole_minutes else seconds


def _duration_s(text: str) -> int | None:
    """Return the seconds of ``1h30m``; None: it is not a sequence of numbers with units."""
    match = _DURATION.match(text.strip().lower())
    if match is None:
        return None
    parts = zip(match.groups(), (DAY_S, HOUR_S, MINUTE_S, 1), strict=True)
    return sum(int(count) * unit_s for count, unit_s in parts if count)  # int: bounded


def _clock_s(first: int, second: str | None, third: str | None, *, with_days: bool) -> int:
    """Return the seconds of H[:M[:S]] after days; else of M, M:S or H:M:S."""
    if with_days or third is not None:
        return first * HOUR_S + int(second or 0) * MINUTE_S + int(third or 0)  # int: bounded
    return first * MINUTE_S + int(second or 0)  # int: bounded


def known_limit_s(limit_s: int | None) -> int | None:
    """Return the time limit; None: there is none, in any notation."""
    return limit_s if limit_s is not None and 0 < limit_s < UNLIMITED_S else None


def format_time_s(seconds: float | None, *, full: bool = False) -> str:
    """Return `seconds` as squeue's %l and %M: ``1-02:03:00``, ``2:03:00``, ``3:00``.

    None is UNLIMITED.

    With `full` hours always show, in two digits, as in sacct's Elapsed: ``00:03:00``.
    """
    if seconds is None or seconds >= UNLIMITED_S:
        return "UNLIMITED"
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    if full:
        return f"{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def parse_mem_mib(text: str, default_unit: str = "M") -> int:
    """Return the MiB that `text` means, rounded up.

    Such as ``4G``, ``190GB``, ``10Gb``, ``2GiB``, ``200K`` (that is 1).

    K M G T P are powers of 1024 in either case, with or without B, as in Slurm; a bare number is in `default_unit`.
    Raises RequestError.
    """
    match = _MEM.match(text.strip().lower())
    if match is None or (match.group(3) == "ib" and not match.group(2)):
        raise RequestError(f"cannot read memory size {_short(text)}: write a whole number with K, M, G or T, as 1536M")
    shift = _MIB_SHIFT[match.group(2) or default_unit.lower()]
    number = int(match.group(1))  # int: bounded
    mib = number << shift if shift >= 0 else -(-number >> -shift)
    if mib >= 1 << 53:
        raise RequestError(f"cannot take memory size {_short(text)}: no machine has as much")
    return mib


def format_mem(mib: int) -> str:
    """Return `mib` with its largest exact unit, as squeue's %m: ``512M``, ``2G``, ``0``."""
    if mib == 0:
        return "0"
    units = "MGTP"
    at = 0
    while mib % 1024 == 0 and at < len(units) - 1:
        mib //= 1024
        at += 1
    return f"{mib}{units[at]}"


# ----- signals: Linux's numbers, whatever system the command runs on

# fmt: off
_SIGNAL_NAMES = (
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
)
# fmt: on
_SIGNALS = {name: number for number, name in enumerate(_SIGNAL_NAMES, start=1)}
MAX_SIGNAL = 64


def parse_signal(text: str) -> int:
    """Return the number of the signal that `text` names: ``USR1``, ``SIGUSR1`` or ``10``.

    Raises RequestError.
    """
    word = text.strip().upper().removeprefix("SIG")
    if word in _SIGNALS:
        return _SIGNALS[word]
    if word.isascii() and word.isdigit() and len(word) <= 3 and 1 <= int(word) <= MAX_SIGNAL:  # int: bounded
        return int(word)  # int: bounded
    raise RequestError(f"cannot read signal {_short(text)}: write a name as USR1 or a number from 1 to {MAX_SIGNAL}")


def signal_name(signum: int) -> str:
    """Return the name of `signum` without SIG, or its number where it has none."""
    return _SIGNAL_NAMES[signum - 1] if 1 <= signum <= len(_SIGNAL_NAMES) else str(signum)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
