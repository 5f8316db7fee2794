"""Which attempt may publish: the one with the highest claimed number.

A claim is a file `attempt.NNNN` in the checkpoint directory, made with O_EXCL and never removed.  Does not know what
is published.
Rules: a writer asks before it publishes, just after it has created a file of its own in the same directory: that brings
back fresh attributes of the directory, so an NFS client does not answer from an old listing.  A stale attempt may lose
a race by one checkpoint; that one is complete and harmless, as all are.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.writing import files
from hpctrain.env import JobFacts
from hpctrain.errors import StaleAttemptError

CLAIM = re.compile(r"attempt\.(\d{4,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The number under which this life of the run may publish."""

    directory: Path
    attempt: int


def claim(directory: Path, job: JobFacts, now_s: float) -> Claim:
    """Take the next attempt number: the scheduler's, or one more than the highest that was ever claimed.

    Raises:
        StaleAttemptError: the same job has already claimed with a later attempt of the scheduler's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    taken = -1
    while True:
        highest = max(highest_claim(directory), taken)
        _refuse_older_life(directory, job)
        number = max(highest + 1, job.attempt or 0)
        note = {
            "job": job.job,
            "job_attempt": job.attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "claimed_at_s": round(now_s, 3),
        }
        try:
            files.write_new(directory / f"attempt.{number:04d}", [files.to_json(note) + b"\n"])
        except FileExistsError:
            taken = number  # another process was quicker; a listing of before may go on without it for a minute
            continue
        files.sync_directory(directory)
        return Claim(directory=directory, attempt=number)


def check(mine: Claim) -> None:
    """Return if no later attempt has claimed.

    Raises:
        StaleAttemptError: a later one has; nothing may be published or removed any more.
    """
    highest = highest_claim(mine.directory)
    if highest > mine.attempt:
        raise StaleAttemptError(
            f"cannot publish in {mine.directory}: this is attempt {mine.attempt}, and attempt {highest} has taken over"
        )


def highest_claim(directory: Path) -> int:
    """Return the highest claimed number, -1 if there is none."""
    return max((number for number, _ in _claims(directory)), default=-1)


def _claims(directory: Path) -> list[tuple[int, str]]:
    found = ((CLAIM.fullmatch(name), name) for name in os.listdir(directory))
    return [(int(match[1]), name) for match, name in found if match]


def _refuse_older_life(directory: Path, job: JobFacts) -> None:
    if job.job is None or job.attempt is None:
        return
    for _, name in _claims(directory):
        try:
            note = json.loads((directory / name).read_bytes())
        except ValueError:
            continue  # its writer died in it; the number counts, the note does not
        other = note.get("job_attempt")
        if note.get("job") == job.job and isinstance(other, int) and other > job.attempt:
            raise StaleAttemptError(
                f"cannot start attempt {job.attempt} of job {job.job} in {directory}: attempt {other} of "
                "it has already started"
            )
