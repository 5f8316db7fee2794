"""Reads a trace in the Standard Workload Format: 18 numbers a line for each job, header lines that begin with ``;``.

Of each job it takes submit time (field 2), run time (4), processors (8 requested, else 5 allocated), requested time (9, else
the run time) and user (12). A job without run time or processors never ran: it is left out and counted. A job that ran longer
than it asked for is taken to have asked for what it ran, since nothing can be planned around an end that does not come.
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
_HEADER = re.compile(r";\s*(MaxNodes|MaxProcs)\s*:\s*(\d+)", re.IGNORECASE)


class TraceJob(NamedTuple):
    """One job of a trace; times in seconds as the trace counts them, `user` -1 where it does not say."""

    id: int
    submit_s: float
    run_s: float
    procs: int
    asked_s: float
    user: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The jobs in the order in which they come, and the machine's size by the header (0: it does not say)."""

    name: str
    jobs: tuple[TraceJob, ...]
    procs: int
    nodes: int = 0
    never_ran: int = 0  # lines left out: no run time or no processors
    overran: int = 0  # jobs whose request was raised to their run time


def read_trace(path: Path) -> Trace:
    """Return the trace in the file at `path`, which may be gzip'ed. Raises RequestError, for a broken line with its number."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"cannot read trace {str(path)!r}: {error}") from error
    return trace_of(data.decode("utf-8", errors="replace").splitlines(), path.name)


def trace_of(lines: Iterable[str], name: str) -> Trace:
    """Return the trace that `lines` hold; `name` stands for it in errors. Raises RequestError."""
    sizes: dict[str, int] = {}
    jobs: list[TraceJob] = []
    never_ran = overran = 0
    for number, line in enumerate(lines, start=1):
        if line.startswith(";"):
            if header := _HEADER.match(line):
                sizes.setdefault(header[1].lower(), int(header[2]))
        elif line and not line.isspace():
            job = _job(line, number, name)
            if job is None:
                never_ran += 1
                continue
            if job.run_s > job.asked_s:
                overran += job.asked_s > 0
                job = job._replace(asked_s=job.run_s)
            jobs.append(job)
    jobs.sort(key=_submit_s)  # stable: what comes at the same second stays in the order of the file
    nodes = sizes.get("maxnodes", 0)
    procs = sizes.get("maxprocs", 0) or nodes
    return Trace(name=name, jobs=tuple(jobs), procs=procs, nodes=nodes, never_ran=never_ran, overran=overran)


def _job(line: str, number: int, name: str) -> TraceJob | None:
    """Return the job of one line, None if it never ran."""
    fields = line.split()
    if len(fields) != FIELDS:
        raise RequestError(f"cannot read line {number} of {name}: it has {len(fields)} fields, not {FIELDS}")
    try:
        job_id, submit_s, run_s = int(fields[0]), _seconds(fields[1]), _seconds(fields[3])
        procs, asked_s, user = int(fields[7]), _seconds(fields[8]), int(fields[11])
        if procs <= 0:
            procs = int(fields[4])
    except ValueError:
        wrong = next(field for field in fields if not _is_number(field))
        raise RequestError(
            f"cannot read line {number} of {name}: {wrong[:40]!r} is not a number of this format"
        ) from None
    if submit_s < 0:
        raise RequestError(f"cannot read line {number} of {name}: job {job_id} was submitted at {submit_s}, before 0")
    return TraceJob(job_id, submit_s, run_s, procs, max(0.0, asked_s), user) if run_s >= 0 and procs > 0 else None


def _seconds(text: str) -> float:
    """Return a time: most are whole, which computes faster and prints as it was."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if not -1e15 < value < 1e15:
        raise ValueError(text)
    return value


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


def _submit_s(job: TraceJob) -> float:
    return job.submit_s
