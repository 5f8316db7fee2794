"""The fence: only the attempt with the highest claimed number may publish.

A claim is a file `attempt.NNNN` in the checkpoint directory, created with O_EXCL and never removed.  Does not know what is
published.
Rules: a writer checks before it publishes, directly after it has created a file in the same directory: that refreshes the
directory's attributes, so an NFS client does not answer from an old listing.  A stale attempt may win a race by one
checkpoint; it is complete, so it does no harm.
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
    """The number under which this attempt may publish."""

    directory: Path
    attempt: int


def claim(directory: Path, job: JobFacts, now_s: float) -> Claim:
    """Claim the next attempt number.

    The scheduler's, or one more than the highest claimed one.

    Raises:
        StaleAttemptError: a later attempt of the same job has claimed already.
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
            taken = number  # another process was faster; an old listing may miss its file for a minute
            continue
        files.sync_directory(directory)
        return Claim(directory=directory, attempt=number)


def check(mine: Claim) -> None:
    """Check that no later attempt has claimed.

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
            continue  # its writer died while writing it: only the number counts
        other = note.get("job_attempt")
        if note.get("job") == job.job and isinstance(other, int) and other > job.attempt:
            raise StaleAttemptError(
                f"cannot start attempt {job.attempt} of job {job.job} in {directory}: attempt {other} of "
                "it has already started"
            )
