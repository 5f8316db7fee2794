"""Word to the scheduler of how far a job is: what `hqueue` and `hctl show job` show of it.

In a job the node's agent listens at `HPCSCHED_SOCKET`: one message on each connection, no answer (hpcsched-env(7), "TELLING HOW
FAR"). Elsewhere nothing is said. Knows neither steps nor losses but as numbers.
Rules: at most one word every EVERY_S, and the last; it never waits for the agent, and an agent that is away, or too old to
understand, costs nothing: the next word comes anyway.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

EVERY_S = 5.0
TIMEOUT_S = 0.2
MAX_TEXT = 4000
_HEADER = struct.Struct("!II")  # lengths of the JSON text and of what follows it, which is nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What is said; 0, of loss and goodput NaN: not known."""

    step: int
    total_steps: int
    loss: float
    samples_per_s: float
    steps_per_s: float
    checkpoint_step: int
    checkpoint_at_s: float  # of the monotonic clock
    goodput: float  # useful time over all time
    note: str
    directory: str = ""  # of the checkpoints


class Heartbeat:
    """Says words for one job."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._path = environ.get("HPCSCHED_SOCKET", "")
        job = environ.get("HPCSCHED_JOB_ID", "")
        self._job_id = int(job) if job.isascii() and job.isdigit() else 0
        self._said_at_s = float("-inf")
        self.heard = bool(self._path and self._job_id)

    def due(self) -> bool:
        """Whether it is time for a word."""
        return self.heard and time.monotonic() - self._said_at_s >= EVERY_S

    def say(self, word: Word) -> bool:
        """Say the word now, and return whether it could be said."""
        if not self.heard:
            return False
        self._said_at_s = time.monotonic()
        return self._send(self._message(word, self._said_at_s))

    def _send(self, message: dict[str, object]) -> bool:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
                agent.settimeout(TIMEOUT_S)
                agent.connect(self._path)
                agent.sendall(_HEADER.pack(len(text), 0) + text)
        except OSError:
            return False  # the agent is being replaced, or has no room: the next word will do
        return True

    def fail(self, rank: int, ranks: int, text: str, *, echo: bool) -> bool:
        """Return why this rank fails, and return whether it could be said; `echo`: it noticed that another is gone."""
        message = {"job_id": self._job_id, "rank": rank, "ranks": ranks, "text": text[-MAX_TEXT:], "echo": echo}
        return self.heard and self._send({"type": "Failure"} | message)

    def _message(self, word: Word, now_s: float) -> dict[str, object]:
        message: dict[str, object] = {
            "type": "Progress",
            "job_id": self._job_id,
            "step": word.step,
            "total_steps": word.total_steps,
            "samples_per_s": _number(word.samples_per_s) or 0.0,
            "steps_per_s": _number(word.steps_per_s) or 0.0,
            "note": word.note,
        }
        message |= {name: value for name in ("loss", "goodput") if (value := _number(getattr(word, name))) is not None}
        if word.checkpoint_step:
            message |= {"checkpoint_step": word.checkpoint_step, "checkpoint_age_s": now_s - word.checkpoint_at_s}
        if directory := _plain(os.path.abspath(word.directory)) if word.directory else "":
            message["directory"] = directory
        return message


def _plain(path: str) -> str:
    """Return a path that JSON can carry; "" for one that is not UTF-8."""
    try:
        return path.encode().decode()
    except UnicodeEncodeError:
        return ""


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
