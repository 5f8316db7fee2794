"""Write the log of controller or gateway, limited in size, rate and repetition.

A record that repeats one of the last minute is counted, not written. The same applies to a place in
the code that logs faster than `PER_S`; other places are not affected. A count is written with the
next record, or when the log is closed. At its maximum size a log file is renamed (``.1``, ``.2``),
and the process's standard error moves to the new file.

With the format "ecs" each record is a line of JSON (`hpcsched.listing.ecs`). What others write to standard error, as Python does
when it cannot start, is text in any case.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from socket import gethostname

import hpcsched
from hpcsched.listing.ecs import MAX_TEXT, cut_text, ecs_head, ecs_line

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
REMEMBERED_S = 60.0
MAX_REMEMBERED = 256  # texts, and places in the code
PER_S = 10.0  # per place in the code
BURST = 100.0
MAX_LABEL = 100
SHOWN_CHARS = 100  # of a repeated text

_Text = tuple[str, int, str]
_Place = tuple[str, int]


class Bounded(logging.Handler):
    """Passes records on to `target`, except repeated and too frequent ones."""

    def __init__(self, target: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._target = target
        self._clock = clock
        # Time of the last write, repetitions since.
        self._said: OrderedDict[_Text, tuple[float, int]] = OrderedDict()
        # Tokens, time, suppressed records.
        self._rates: OrderedDict[_Place, tuple[float, float, int]] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        now_s = self._clock()
        self._write_counts(now_s)
        text = record.name, record.levelno, record.getMessage()
        if text in self._said:
            at_s, count = self._said[text]
            self._said[text] = at_s, count + 1
            return
        if not self._has_room((record.pathname, record.lineno), record, now_s):
            return
        self._said[text] = now_s, 0
        if len(self._said) > MAX_REMEMBERED:
            self._write_repeated(*self._said.popitem(last=False))
        self._target.handle(record)

    def flush(self) -> None:
        """Flush the target."""
        self._target.flush()

    def close(self) -> None:
        """Write the counts and close the target."""
        self._write_counts(float("inf"))
        for place in tuple(self._rates):
            self._write_held_back(place)
        self._target.close()
        super().close()

    def _has_room(self, place: _Place, record: logging.LogRecord, now_s: float) -> bool:
        tokens, at_s, held_back = self._rates.pop(place, (BURST, now_s, 0))
        tokens = min(BURST, tokens + (now_s - at_s) * PER_S)
        has_room = tokens >= 1
        self._rates[place] = (tokens - 1, now_s, held_back) if has_room else (tokens, now_s, held_back + 1)
        if has_room and held_back:
            self._write_held_back(place)
        if len(self._rates) > MAX_REMEMBERED:
            self._write_held_back(next(iter(self._rates)))
            self._rates.popitem(last=False)
        return has_room

    def _write_held_back(self, place: _Place) -> None:
        tokens, at_s, held_back = self._rates[place]
        self._rates[place] = tokens, at_s, 0
        if held_back:
            where = f"{Path(place[0]).name}:{place[1]}"
            self._say(f"{held_back:,} messages of {where} not written: more than {PER_S:g} per second")

    def _write_counts(self, now_s: float) -> None:
        while self._said:
            text, (at_s, count) = next(iter(self._said.items()))
            if now_s - at_s < REMEMBERED_S:
                return
            del self._said[text]
            self._write_repeated(text, (at_s, count))

    def _write_repeated(self, text: _Text, said: tuple[float, int]) -> None:
        if said[1]:
            message = text[2]
            shown = message if len(message) <= SHOWN_CHARS else message[:SHOWN_CHARS] + "..."
            self._say(f"message repeated {said[1]:,} times: {shown}", text[0], text[1])

    def _say(self, text: str, name: str = "hpcsched.log", level: int = logging.WARNING) -> None:
        self._target.handle(logging.LogRecord(name, level, __file__, 0, text, None, None))


class EcsFormatter(logging.Formatter):
    """Writes a record as one line of ECS JSON.

    Fields are those of `StdlibFormatter` of ecs-logging, but for the original message; `service` is the daemon's name.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._common = {"service": {"name": service, "version": hpcsched.__version__}, "host": {"name": gethostname()}}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        document = {
            **ecs_head(record.created, record.levelname.lower(), record.getMessage()),
            "log": {
                "logger": record.name,
                "origin": {
                    "file": {"line": record.lineno, "name": record.filename},
                    **({"function": record.funcName} if record.funcName else {}),
                },
            },
            **({"labels": labels} if (labels := labels_of(record)) else {}),
            "process": {"pid": record.process, "name": record.processName, "thread": {"name": record.threadName}},
            **self._common,
        }
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            stack = "".join(traceback.format_tb(trace))
            document["error"] = {
                "type": kind.__name__,
                "message": cut_text(str(error)),
                "stack_trace": stack[-MAX_TEXT:],
            }
        return ecs_line(document)


_PLACE = re.compile(r"(?:\b(node|job|user) )?%(?:%|[#0 +-]*(?:\d+|\*)?(?:\.(?:\d+|\*))?[a-zA-Z])")


def labels_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the node, job and user that a record names.

    These are the arguments that our own text announces as such.

    What an argument says is not looked at, so that no text from outside makes a label.
    """
    if not isinstance(record.args, tuple) or not isinstance(record.msg, str):
        return {}
    found: dict[str, str] = {}
    arguments = iter(record.args)
    for place in _PLACE.finditer(record.msg):
        if place[0].endswith("%%") or "*" in place[0]:
            continue
        argument = next(arguments, None)
        if place[1] is not None and argument is not None:
            found.setdefault({"job": "job_id"}.get(place[1], place[1]), str(argument)[:MAX_LABEL])
    return found


class LogFile(RotatingFileHandler):
    """A log file of limited size. The process's standard output and error go there too."""

    def doRollover(self) -> None:  # noqa: N802 - the library's name
        """Start a new file."""
        ours = os.fstat(self.stream.fileno()) if self.stream is not None else None
        followers = [fd for fd in (1, 2) if ours is not None and os.path.samestat(os.fstat(fd), ours)]
        super().doRollover()
        if self.stream is not None:
            for fd in followers:
                os.dup2(self.stream.fileno(), fd)


def start_log(
    level: str,
    path: Path | None,
    max_bytes: int = 0,
    files: int = 0,
    *,
    is_ecs: bool = False,
    service: str = "hpcschedd",
) -> None:
    """Write all records of this level to the file or to standard error.

    As text or as ECS JSON.

    Raises: OSError.
    """
    target: logging.Handler
    if path is None:
        target = logging.StreamHandler(sys.stderr)
    else:
        target = LogFile(path, maxBytes=max_bytes, backupCount=files, encoding="utf-8", errors="backslashreplace")
    target.setFormatter(EcsFormatter(service) if is_ecs else logging.Formatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[Bounded(target)])
