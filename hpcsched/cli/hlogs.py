"""hlogs: prints the output of a job, on whichever node it is; with -f until the job ends.

Rules: bytes are not changed; a file that became shorter (of a requeued job) is printed from its start again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.output import note, run_command
from hpcsched.client import Json
from hpcsched.commands.options import FAILED, HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.errors import NotFoundError, UnavailableError
from hpcsched.listing.jobs import ENDED_STATES
from hpcsched.listing.text import clean, when_text

FOLLOW_WAIT_S = 15.0
FAR_END_BYTES = 64 << 10
RECONNECT_S = 1.0

COMMAND = Command(
    "hlogs",
    ("[OPTIONS] JOB",),
    "Print the output of a job, wherever it runs. With --follow, wait for the job to start, and print its output until it "
    "ends.",
    (
        Option("err", "e", help="print standard error instead of standard output (they are one file by default)"),
        Option("follow", "f", help="keep printing new output until the job ends"),
        Option("lines", "n", "N", "start with the last N lines"),
        HELP,
        VERSION,
    ),
    ("A JOB is a number, a task of an array (10_3), the name of one of your jobs, or 'last'.",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if len(words.operands) != 1:
        raise UsageError("cannot tell which output to print: name one job; see hlogs --help")
    reference, stream = words.operands[0], "err" if words.has("err") else "out"
    follow = words.has("follow")
    job = _report_failures(reference)
    has_ended = job["state"] in ENDED_STATES
    try:
        offset = _print_last_lines(reference, stream, int(words.number("lines", 0))) if words.has("lines") else 0
        _print_from(reference, stream, offset, follow=follow)
    except NotFoundError:
        if not has_ended or job["started_at_s"] is not None:
            raise
        return FAILED  # the reason has been printed
    if follow and not has_ended:
        _report_failures(reference)
    return 0


def _report_failures(reference: str) -> Json:
    """Print on stderr why an ended job and its ranks failed, the first cause first.

    Return the job.
    """
    job: Json = client.call("GET", client.job_path(reference))["jobs"][0]
    failures = job.get("failures", ())
    if job["state"] in ENDED_STATES and job["started_at_s"] is None:
        detail = f": {clean(job['reason_detail'])}" if job["reason_detail"] else ""
        _report(_why_nothing(job) + detail)
    elif job["state"] in ENDED_STATES and job["reason_detail"]:
        _report(f"job {job['display_id']} is {job['state']}: {clean(job['reason_detail'])}")
    for number, failure in enumerate(failures):
        where = f"rank {failure['rank']} of {failure['ranks']} on {failure['node']}"
        at = when_text(failure["at_s"], time.time())
        title = "first cause" if number == 0 else "noticed by" if failure["echo"] else "then"
        lines = [clean(line) for line in failure["text"].rstrip().splitlines()] or ["(no reason was given)"]
        _report(f"{title}: {where} at {at}: {lines[-1]}")
        if number == 0:
            for line in lines[:-1]:
                _report(f"    {line}")
    return job


def _report(text: str) -> None:
    print(f"{COMMAND.name}: {text}", file=sys.stderr)


def _print_last_lines(reference: str, stream: str, count: int) -> int:
    """Print the last `count` lines; return the offset of the end of the file."""
    taken = FAR_END_BYTES
    while True:
        data, start, size = _far_end(reference, stream, taken)
        if start == 0 or data.count(b"\n") > count:
            break
        taken *= 4
    _write(last_lines(data, count))
    return start + len(data)


def _far_end(reference: str, stream: str, length: int) -> tuple[bytes, int, int]:
    """Return the last `length` bytes of the output, their offset, and the size of the file."""
    part = client.fetch_log(reference, stream=stream, offset=-length)
    data, start, size = part.data, part.offset, part.size
    while data and start + len(data) < size:  # longer than one answer
        part = client.fetch_log(reference, stream=stream, offset=start + len(data))
        if not part.data:
            break
        data += part.data
    return data, start, size


def last_lines(data: bytes, count: int) -> bytes:
    """Return the last `count` lines of `data`; text after the last newline is a line."""
    if count <= 0:
        return b""
    at = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(count):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return data
    return data[at + 1 :]


def _print_from(reference: str, stream: str, offset: int, *, follow: bool) -> None:
    """Print the output from `offset` to its end, or with `follow` until the job ends."""
    begun = bool(offset)
    while True:
        part = _part(reference, stream, offset, follow=follow, patient=follow and begun)
        begun = True
        if 0 < part.size < offset:  # it was truncated; a size of 0 may also mean that it cannot be read at the moment
            offset = 0
            continue
        _write(part.data)
        offset = part.offset + len(part.data)
        if offset >= part.size and (part.ended or not follow):
            break
        if not part.data and not follow:
            break
    if offset == 0:
        job = client.call("GET", client.job_path(reference))["jobs"][0]
        if job["started_at_s"] is not None:
            note(COMMAND.name, f"nothing has been written to {clean(part.path)}")
        elif job["state"] not in ENDED_STATES:  # of an ended job, `_report_failures` has printed it
            _report(_why_nothing(job))


def _why_nothing(job: Json) -> str:
    """Return why a job without a start has no output."""
    which = f"job {job['display_id']}"
    if job["state"] == "PENDING":
        return f"{which} has not started; hwhy {job['display_id']} says what it waits for"
    how = {"CANCELLED": "was cancelled", "DEADLINE": "missed its deadline"}.get(job["state"], f"ended ({job['state']})")
    return f"{which} {how} before it started"


def _part(reference: str, stream: str, offset: int, *, follow: bool, patient: bool) -> client.LogChunk:
    """Return the next piece; if `patient`, wait for a controller or node that does not answer."""
    has_noted = False
    while True:
        try:
            return client.fetch_log(reference, stream=stream, offset=offset, wait_s=FOLLOW_WAIT_S if follow else 0)
        except UnavailableError as error:
            if not patient:
                raise
            if not has_noted:
                note(COMMAND.name, f"{clean(error)}; waiting for it")
            has_noted = True
            time.sleep(RECONNECT_S)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
