"""Identifiers, and the token that names one launch.

A token is ``incarnation.job.attempt.step.node.nonce``: file-safe and never used twice. The incarnation is made with the
database, or when it is restored from a backup, so that a reused job id is still another job. A node that has left an attempt and
is given to it again has another *stay*, written after the attempt (``2-1``): late reports of one stay do not count for the
next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from hpcsched.errors import ProtocolError

JobId = NewType("JobId", int)
NodeName = NewType("NodeName", str)

BATCH_STEP = "batch"
ALLOC_STEP = "alloc"  # the job's claim on each of its other nodes

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
_TOKEN = re.compile(
    r"([0-9a-f]{8,32})\.(\d{1,18})\.(\d{1,9})(?:-([1-9]\d{0,8}))?\.(batch|alloc|\d{1,9})\.([A-Za-z0-9][A-Za-z0-9_-]{0,62})\.([0-9a-f]{32})\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchToken:
    """One launch of one step of one attempt on one node."""

    incarnation: str
    job_id: JobId
    attempt: int
    step: str  # BATCH_STEP, ALLOC_STEP or the step's number
    node: NodeName
    nonce: str  # 128 bit, hex
    stay: int = 0  # how often the node has left the attempt before

    def __str__(self) -> str:
        attempt = f"{self.attempt}-{self.stay}" if self.stay else self.attempt
        return f"{self.incarnation}.{self.job_id}.{attempt}.{self.step}.{self.node}.{self.nonce}"

    @property
    def life(self) -> tuple[int, int]:
        """Return attempt and stay; nodes end all launches of a job up to one of them."""
        return self.attempt, self.stay

    @classmethod
    def parse(cls, text: str) -> LaunchToken:
        """Return the token that `text` spells. Raises ProtocolError for anything else."""
        match = _TOKEN.match(text)
        if match is None:
            raise ProtocolError(f"cannot read launch token {text[:200]!r}: not incarnation.job.attempt.step.node.nonce")
        incarnation, job, attempt, stay, step, node, nonce = match.groups()
        return cls(
            incarnation=incarnation,
            job_id=JobId(int(job)),  # int: bounded
            attempt=int(attempt),  # int: bounded
            step=step,
            node=NodeName(node),
            nonce=nonce,
            stay=int(stay or 0),  # int: bounded
        )
