"""Check one large JSON body and split it into its jobs, in a separate program.

The controller's event loop therefore never parses such a body. Standard input is the body. Standard output is its parts, each
after its length: the object without `jobs`, then each job. Errors go to standard error, with exit status 1. A body with too
many values is rejected before any of them is created.

Run as ``python -I -S splitbody.py MAX_VALUES MAX_VALUES_OF_PART MAX_JOBS``: it imports nothing of hpcsched.
"""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import sys
from typing import Any

MAX_CPU_S = 20
MAX_MEMORY_BYTES = 1 << 30
MAX_DEPTH = 100
LENGTH = struct.Struct("!Q")
# A string, or a character that delimits values. Each byte is read once, even in an unterminated
# string.
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)


class BodyError(Exception):
    """The body is rejected."""


def main(argv: list[str]) -> int:
    """Split standard input into parts on standard output."""
    max_values, max_of_part, max_jobs = (int(word) for word in argv)  # int: our own arguments
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("900")  # the OOM killer takes this process rather than its controller
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        for part in parts_of(sys.stdin.buffer.read(), max_values, max_of_part, max_jobs):
            sys.stdout.buffer.write(LENGTH.pack(len(part)))
            sys.stdout.buffer.write(part)
    except BodyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parts_of(body: bytes, max_values: int, max_of_part: int, max_jobs: int) -> list[bytes]:
    """Return the object without `jobs`, then each job. Raises BodyError."""
    _count(body, max_values)
    try:
        found = json.loads(body, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise BodyError(str(error)) from None
    if not isinstance(found, dict):
        raise BodyError("not a JSON object")
    jobs = found.pop("jobs", [])
    if not isinstance(jobs, list):
        raise BodyError('"jobs" is not a list')
    if len(jobs) > max_jobs:
        raise BodyError(f"{len(jobs)} jobs at once: the most is {max_jobs}; an array counts as one")
    parts = [json.dumps(part, separators=(",", ":")).encode() for part in (found, *jobs)]
    for part in parts:
        _count(part, max_of_part)
    return parts


def _count(text: bytes, most: int) -> None:
    values = depth = 0
    for match in _PARTS.finditer(text):
        first = text[match.start()]
        if first == ord('"'):
            continue
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise BodyError(f"it is nested more than {MAX_DEPTH} deep")
        elif first in b"]}":
            depth -= 1
            continue
        values += 1
        if values > most:
            raise BodyError(f"it has more than {most} values")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BodyError("a field is there twice")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
