"""hctl's words about reservations: create, update, delete, show, in scontrol's grammar and with its names.

What a ``Name=value`` means is for the controller to say; here it only becomes a request, and the answer text.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.options import UsageError, Words, split_list
from hpcsched.cli.output import clean, date_text, print_json
from hpcsched.client import Json
from hpcsched.errors import NotFoundError
from hpcsched.listing.table import columns
from hpcsched.model.units import format_time_s

RecordWords = Sequence[tuple[str, object]]

NAMES = ("reservationname", "reservation")


def is_meant(rest: Sequence[str]) -> bool:
    """Say whether the words behind a verb are about a reservation: by its first word, or by its name and no job's."""
    if rest[0].lower() in ("reservation", "res"):
        return True
    keys = [key.lower() if equals else "" for key, equals, _ in (word.partition("=") for word in rest)]
    return any(key in NAMES for key in keys) and not any(key in ("", "jobid", "job") for key in keys)


def create(rest: Sequence[str], words: Words) -> int:
    """Make a reservation and print its name."""
    name, changes = _read(rest)
    answer = client.call("POST", "/v1/reservations/create", {"name": name, "changes": changes})
    if words.has("json"):
        print_json(answer)
    else:
        print(f"Reservation created: {clean(answer['name'])}")
    return 0


def update(rest: Sequence[str], words: Words) -> int:
    """Change a reservation."""
    name, changes = _read(rest)
    answer = client.call("POST", "/v1/reservations/update", {"name": _must_be(name), "changes": changes})
    if words.has("json"):
        print_json(answer)
    return 0


def delete(rest: Sequence[str], words: Words) -> int:
    """Delete a reservation."""
    name, changes = _read(rest)
    if changes:
        raise UsageError("cannot delete that: write hctl delete reservation NAME")
    answer = client.call("POST", "/v1/reservations/delete", {"name": _must_be(name)})
    if words.has("json"):
        print_json(answer)
    return 0


def fetch(names: Sequence[str]) -> Json:
    """Return the controller's answer with the reservations of these names, all if there are none."""
    answer = client.call("GET", "/v1/reservations")
    wanted = [name for word in names for name in split_list(word)]
    by_name = {one["name"]: one for one in answer["reservations"]}
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"Reservation {clean(name[:60])} not found; there are: {', '.join(by_name) or 'none'}")
    answer["reservations"] = [by_name[name] for name in wanted] if wanted else answer["reservations"]
    return answer


def lines(one: Json) -> list[RecordWords]:
    """Return a reservation as ``scontrol show reservation`` does."""
    flags = [*one["flags"], *([] if one["node_count"] else ["SPEC_NODES"])]
    return [
        [
            ("ReservationName", one["name"]),
            ("StartTime", date_text(one["start_s"])),
            ("EndTime", date_text(one["end_s"])),
            ("Duration", format_time_s(one["duration_s"], full=True)),
        ],
        [
            ("Nodes", one["node_list"]),
            ("NodeCnt", len(one["nodes"])),
            ("CoreCnt", one["cpus"]),
            ("Features", one["features"]),
            ("PartitionName", one["partition"]),
            ("Flags", ",".join(flags)),
        ],
        [("TRES", f"cpu={one['cpus']}")],
        [
            ("Users", ",".join(one["users"])),
            ("Groups", ""),
            ("Accounts", ",".join(one["accounts"])),
            ("Licenses", ""),
            ("State", one["state"]),
            ("MaxStartDelay", ""),
        ],
    ]


def table(reservations: Sequence[Json], *, header: bool) -> str:
    """Return the reservations as ``sinfo -T`` does."""
    headers = ["RESV_NAME", "STATE", "START_TIME", "END_TIME", "DURATION", "NODELIST"]
    rows = [
        [
            clean(one["name"]),
            one["state"],
            date_text(one["start_s"]),
            date_text(one["end_s"]),
            format_time_s(one["duration_s"], full=True),
            one["node_list"],
        ]
        for one in reservations
    ]
    return columns(headers if header else [], rows)


def _read(rest: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the name and the changes in ``[reservation] [NAME] Name=value ...``; ``Users+=ann`` is a change too."""
    name = ""
    changes: dict[str, str] = {}
    for at, word in enumerate(rest):
        key, equals, value = word.partition("=")
        if equals and key.lower() in NAMES:
            name = value
        elif equals:
            changes[key] = value
        elif word.lower() in ("reservation", "res") and at == 0:
            continue
        elif name:
            raise UsageError(f"cannot understand {word[:60]!r}: write NAME=VALUE")
        else:
            name = word
    return name, changes


def _must_be(name: str) -> str:
    if not name:
        raise UsageError("cannot tell which reservation: name it, as ReservationName=maint")
    return name
