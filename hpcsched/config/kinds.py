"""The definition of a configuration key, and the kinds of values.

A kind is a function that takes the value from TOML and returns ours, or raises `BadValue` with the
expected format. The keys are in `hpcsched.config.keys`.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpcnode.os import rlimits
from hpcsched.errors import RequestError
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.units import parse_mem_mib, parse_time_s

ALL_NODES = "all"
LOCAL_HOST = "local"  # a node that is the head itself, without SSH
MAX_GPUS = 256

# An allow-list for text in a command line or a resolver: nothing starts with a dash.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}\Z")
USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,63}\Z")
_PYTHON = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_/.+-]{0,254}\Z")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_GPU = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})(?::([0-9]{1,3}))?\Z")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9/:._-]{0,99}\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadValue(Exception):
    """The key does not accept this value; the text says what it accepts."""


class Missing:
    """The default of a required key."""


REQUIRED = Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. `default` is its TOML value; `shown` replaces it if it depends on other keys."""

    name: str
    kind: Callable[[Any], Any]
    default: Any
    help: str
    shown: str = ""

    @property
    def default_text(self) -> str:
        """Return the default as the file shows it."""
        return self.shown or toml_value(self.default)


def toml_value(value: object) -> str:
    """Return `value` (text, number, boolean or a list) as TOML; JSON's syntax is also TOML's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def text(value: Any) -> str:
    if not isinstance(value, str) or _CONTROL.search(value):
        raise BadValue("wants a text on one line")
    return value


def word(value: Any) -> str:
    if not isinstance(value, str) or not _WORD.match(value):
        raise BadValue("wants a word of letters, digits and _.- (at most 63)")
    return value


def words(value: Any) -> tuple[str, ...]:
    return tuple(word(item) for item in _list(value))


def resource_limits(value: Any) -> str:
    """Return resource limits: ALL, NONE, or a list in one text."""
    try:
        rlimits.names(text(value))
    except ValueError:
        raise BadValue(f"wants ALL, NONE, or some of {','.join(rlimits.KINDS)}") from None
    return str(value)


def users(value: Any) -> tuple[str, ...]:
    return tuple(user(item) for item in _list(value))


def user(value: Any) -> str:
    if not isinstance(value, str) or not USER_NAME.match(value):
        raise BadValue("wants a user name")
    return value


def host(value: Any) -> str:
    if not isinstance(value, str) or not (_HOST.match(value) or _is_ipv6(value)):
        raise BadValue("wants a host name, an address or a Host of ~/.ssh/config")
    return value


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def python(value: Any) -> str:
    if not isinstance(value, str) or not _PYTHON.match(value):
        raise BadValue("wants the name or path of a Python 3.9 or newer")
    return value


def absolute_path(value: Any) -> str:
    if text(value) and not value.startswith("/"):
        raise BadValue("wants an absolute path")
    return value


def yes_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValue("wants true or false")
    return value


def whole(least: int, most: int = 10**9) -> Callable[[Any], int]:
    """Return the kind of whole numbers from `least` to `most`."""

    def kind(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise BadValue(f"wants a whole number from {least} to {most}")
        return value

    return kind


def seconds(least: float = 0.0) -> Callable[[Any], float]:
    """Return the kind of seconds, at least `least`: a number, or a text with a unit as "5m"."""

    def kind(value: Any) -> float:
        if isinstance(value, str) and value[-1:].lower() in ("s", "m", "h", "d"):
            try:
                value = parse_time_s(value, whole_minutes=False)
            except RequestError as error:
                raise BadValue(str(error)) from None
        if type(value) not in (int, float) or not least <= value <= 1e9:
            raise BadValue(f'wants seconds, {least:g} or more, or a text as "5m"')
        return float(value)

    return kind


def number(least: float = 0.0, most: float = 1e9) -> Callable[[Any], float]:
    """Return the kind of numbers from `least` to `most`."""

    def kind(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise BadValue(f"wants a number, {least:g} or more")
        return float(value)

    return kind


def time_limit(value: Any) -> int | None:
    """Return seconds from a time in Slurm's notation, None for UNLIMITED."""
    if type(value) is int and value >= 0:
        value = str(value)  # minutes, as in Slurm
    if not isinstance(value, str):
        raise BadValue('wants a time as "1-12:00:00", "36h" or "UNLIMITED"')
    try:
        limit_s = parse_time_s(value)
    except RequestError as error:
        raise BadValue(str(error)) from None
    if limit_s == 0:
        raise BadValue('wants a time above zero, or "UNLIMITED"')
    return limit_s


def memory_mib(value: Any) -> int:
    """Return MiB from a memory size: a text as "64G", or a number of MiB."""
    if type(value) is int and value >= 0:
        value = str(value)
    if not isinstance(value, str):
        raise BadValue('wants a size as "64G", or a number of MiB')
    try:
        return parse_mem_mib(value)
    except RequestError as error:
        raise BadValue(str(error)) from None


def hosts(value: Any) -> tuple[str, ...] | None:
    """Return a list of nodes; None means all nodes."""
    if value == ALL_NODES:
        return None
    names: list[str] = []
    for item in [value] if isinstance(value, str) else _list(value):
        try:
            names += expand_hostlist(item)
        except RequestError as error:
            raise BadValue(str(error)) from None
    if len(set(names)) != len(names):
        raise BadValue("names a node twice")
    return tuple(names)


def gpus(value: Any) -> tuple[str, ...]:
    """Return the type of each GPU, in the order of their indices; ``"a100:4"`` means four."""
    types: list[str] = []
    for item in _list(value):
        match = _GPU.match(item)
        if match is None:
            raise BadValue('wants a list of GPU types as ["a100", "a100"] or ["a100:2"]')
        types += [match.group(1)] * int(match.group(2) or 1)
    if len(types) > MAX_GPUS:
        raise BadValue(f"wants at most {MAX_GPUS} GPUs")
    return tuple(types)


def devices(value: Any) -> tuple[str, ...]:
    """Return a list of devices by CUDA's names: MIG-<uuid>, GPU-<uuid> or an index."""
    found = tuple(_list(value))
    if not all(_DEVICE.match(item) for item in found) or len(set(found)) < len(found):
        raise BadValue('wants a list of devices, each once, as ["MIG-41b36db3-...", "MIG-8d3f5a6e-..."]')
    return found


def one_of(*choices: str) -> Callable[[Any], str]:
    """Return the kind of words that accepts only these words."""

    def kind(value: Any) -> str:
        if value not in choices:
            raise BadValue(f"wants one of {', '.join(choices)}")
        return str(value)

    return kind


def optional(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the kind that also accepts "not set": an empty text or 0."""
    return lambda value: None if value in ("", 0) and value is not False else kind(value)


def _list(value: Any) -> Iterable[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadValue("wants a list of texts")
    return value
