"""Read a log in the Standard Workload Format: 18 numbers per job, headers after ``;``.

Of each job it takes submit time (field 2), run time (4), processors (8 requested, else 5 allocated), requested time (9, else
the run time) and user (12). Every field must be a number, also unused ones; a malformed line is an error. A job without
run time or processors never ran: it is left out and counted. If a job ran longer than requested, its run time counts as
requested, because a plan cannot know of a later end. A swapped-out job has one line for the whole job and then one for each part
(status, field 11: 2, 3 or 4): the parts are left out, as the authors of the format recommend.

Knows nothing of schedules. Source: cs.huji.ac.il/labs/parallel/workload/swf.html.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcsched.errors import RequestError

FIELDS = 18
PARTS = frozenset("234")  # status of a line about a part of a job
BIGGEST = 10**15  # a larger number, or nan, is an error
_HEADER = re.compile(r";\s*(MaxNodes|MaxProcs)\s*:\s*(\d+(?:,\d{3})*)", re.IGNORECASE)


class TraceJob(NamedTuple):
    """One job of a trace. Times are seconds from the start of the trace; `user` -1: unknown."""

    id: int
    submit_s: float
    run_s: float
    procs: int
    asked_s: float
    user: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The jobs in the order of submission, and the machine's size; 0: unknown."""

    name: str
    jobs: tuple[TraceJob, ...]
    procs: int
    nodes: int = 0
    never_ran: int = 0  # lines left out: no run time or no processors
    parts: int = 0  # lines left out: a part of the job of a line before
    overran: int = 0  # jobs whose request was raised to their run time


def read_trace(path: Path) -> Trace:
    """Return the trace in the file at `path`, which may be gzip'ed.

    Raises RequestError, for a broken line with its number.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot read trace {str(path)!r}: {why}") from error
    return trace_of(data.decode("utf-8-sig", errors="replace").splitlines(), path.name)


def trace_of(lines: Iterable[str], name: str) -> Trace:
    """Return the trace in `lines`; errors call it `name`. Raises RequestError."""
    sizes: dict[str, int] = {}
    jobs: list[TraceJob] = []
    never_ran = overran = parts = 0
    whole = ""  # the number of the job whose parts may follow
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if line.startswith(";"):
            if header := _HEADER.match(line):
                sizes.setdefault(header[1].lower(), int(header[2].replace(",", "")))
        elif line:
            fields = _fields(line, number, name)
            if fields[0] == whole and fields[10] in PARTS:
                parts += 1
                continue
            whole = fields[0]
            job = _job(fields, number, name)
            if job is None:
                never_ran += 1
                continue
            if job.run_s > job.asked_s:
                overran += job.asked_s > 0
                job = job._replace(asked_s=job.run_s)
            jobs.append(job)
    jobs.sort(key=_submit_s)  # stable: jobs of the same second keep the order of the file
    nodes = sizes.get("maxnodes", 0)
    procs = sizes.get("maxprocs", 0) or nodes
    return Trace(
        name=name, jobs=tuple(jobs), procs=procs, nodes=nodes, never_ran=never_ran, parts=parts, overran=overran
    )


def _fields(line: str, number: int, name: str) -> list[str]:
    fields = line.split()
    if len(fields) != FIELDS:
        raise RequestError(f"cannot read line {number} of {name}: it has {len(fields)} fields, not {FIELDS}")
    return fields


def _job(fields: list[str], number: int, name: str) -> TraceJob | None:
    """Return the job of one line, None if it never ran."""
    try:
        values = [_number(field) for field in fields]
    except ValueError as error:
        raise RequestError(f"cannot read line {number} of {name}: {error} is not a number of this format") from None
    job_id, procs, user = (int(values[at]) for at in (0, 7, 11))
    submit_s, run_s, asked_s = values[1], values[3], values[8]
    if procs <= 0:
        procs = int(values[4])
    if submit_s < 0:
        raise RequestError(f"cannot read line {number} of {name}: job {job_id} was submitted at {submit_s}, before 0")
    return TraceJob(job_id, submit_s, run_s, procs, max(0, asked_s), user) if run_s >= 0 and procs > 0 else None


def _number(text: str) -> float:
    """Return a number, an int if it is whole, which is faster and prints unchanged.

    Raises ValueError with its text.
    """
    if "_" in text or not text.isascii():  # Python would take 1_000 and other scripts' digits
        raise ValueError(repr(text[:40]))
    try:
        value: float = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(repr(text[:40])) from None
        value = int(value) if value.is_integer() else value
    if not -BIGGEST < value < BIGGEST:
        raise ValueError(repr(text[:40]))
    return value


def _submit_s(job: TraceJob) -> float:
    return job.submit_s
