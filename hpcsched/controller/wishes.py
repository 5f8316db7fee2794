"""What an admin's words ask of a reservation, read: ``StartTime=now+1hour Duration=2:00:00 Users+=ben Flags=DAILY``.

Knows no world: whether the reservation can be is for `hpcsched.controller.reserving` to say. Source: scontrol(1), "RESERVATIONS".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpcsched.errors import RequestError
from hpcsched.model.dates import parse_when
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.reservation import Flag, Reservation
from hpcsched.model.units import DAY_S, parse_time_s

KEYS = {  # scontrol's name in lower case: what it changes
    "starttime": "start", "endtime": "end", "duration": "duration", "nodes": "nodes", "nodecnt": "node_count",
    "features": "features", "partitionname": "partition", "partition": "partition", "users": "users", "user": "users",
    "accounts": "accounts", "account": "accounts", "flags": "flags",
}  # fmt: skip
NODES_NAMED = "SPEC_NODES"  # shown of a reservation whose nodes were named; asking for it means nothing
LISTS = ("users", "accounts", "flags", "nodes")  # that += adds to and -= takes from
LONGEST_S = 365 * DAY_S  # of a duration that is UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the changes say; None: nothing. `signs` has + and - of those that add or take away."""

    start_s: int | None = None
    end_s: int | None = None
    duration_s: int | None = None
    nodes: tuple[str, ...] | None = None
    node_count: int | None = None
    features: str | None = None
    partition: str | None = None
    users: tuple[str, ...] | None = None
    accounts: tuple[str, ...] | None = None
    flags: tuple[str, ...] | None = None
    signs: Mapping[str, str]


def read_wish(changes: Mapping[str, str], now_s: float) -> Wish:
    """Return what the changes ask for. Raises RequestError."""
    values: dict[str, str] = {}
    signs: dict[str, str] = {}
    for word, value in changes.items():
        sign = word[-1:] if word[-1:] in ("+", "-") else ""
        name = KEYS.get(word.removesuffix(sign).lower().replace("_", "") if sign else word.lower().replace("_", ""))
        if name is None:
            known = "StartTime EndTime Duration Nodes NodeCnt Features PartitionName Users Accounts Flags"
            raise RequestError(f"cannot give a reservation {word[:60]!r}: it has {known}")
        if sign and name not in LISTS:
            raise RequestError(f"cannot write {word[:60]}=: only users, accounts, nodes and flags are added to")
        values[name] = value
        signs |= {name: sign} if sign else {}
    return Wish(
        start_s=int(parse_when(values["start"], now_s)) if "start" in values else None,
        end_s=int(parse_when(values["end"], now_s)) if "end" in values else None,
        duration_s=_duration_s(values["duration"]) if "duration" in values else None,
        node_count=_count(values["node_count"]) if "node_count" in values else None,
        features=values.get("features"),
        partition=values.get("partition"),
        nodes=_node_words(values["nodes"]) if "nodes" in values else None,
        users=_words(values["users"]) if "users" in values else None,
        accounts=_words(values["accounts"]) if "accounts" in values else None,
        flags=tuple(word.upper() for word in _words(values["flags"])) if "flags" in values else None,
        signs=signs,
    )


def _duration_s(text: str) -> int:
    found_s = parse_time_s(text, whole_minutes=False)
    return LONGEST_S if found_s is None else found_s


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 9):
        raise RequestError(f"cannot reserve {text[:60]!r} nodes: NodeCnt= is a number, at least 1")
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word.startswith("-"):
            raise RequestError(f"cannot except {word[1:60]!r}: name those who may use the reservation")
    return words


def _node_words(text: str) -> tuple[str, ...]:
    return ("ALL",) if text.strip().upper() == "ALL" else tuple(expand_hostlist(text))


def wished(known: Reservation, wish: Wish) -> Reservation:
    """Return `known` as it is wished, but for its nodes."""
    flags = [flag for flag in combined([flag.value for flag in known.flags], wish, "flags") if flag != NODES_NAMED]
    unknown = [flag for flag in flags if flag not in Flag.__members__]
    if unknown:
        raise RequestError(f"cannot set flag {unknown[0][:60]!r}: there are {', '.join(Flag)}")
    return replace(
        known,
        users=combined(known.users, wish, "users"),
        accounts=combined(known.accounts, wish, "accounts"),
        flags=tuple(Flag(flag) for flag in flags),
        partition=wish.partition if wish.partition is not None else known.partition,
        features=wish.features if wish.features is not None else known.features,
        node_count=0 if wish.nodes is not None else wish.node_count or known.node_count,
    )


def combined(known: Sequence[str], wish: Wish, name: str) -> tuple[str, ...]:
    """Return a list as it is wished: as it was, replaced, with more or with less."""
    given: tuple[str, ...] | None = getattr(wish, name)
    if given is None:
        return tuple(known)
    if wish.signs.get(name) == "+":
        return tuple(dict.fromkeys((*known, *given)))
    return tuple(word for word in known if word not in given) if wish.signs.get(name) == "-" else given
