"""Heartbeats: the progress of a job, for `hqueue` and `hctl show job`.

In a job the node's agent listens at `HPCSCHED_SOCKET`: one message per connection, no answer (hpcsched-env(7)).  Outside
of a job nothing is sent.  Knows steps and losses as numbers only.
Rules: at most one heartbeat in EVERY_S, and the last one; sending never waits for the agent.  If the agent is away or too
old, the heartbeat is dropped, and the next one follows.  Nothing is sent if the socket's server is neither root, our own
account, nor the owner of a directory that only it and root could make.
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
from pathlib import PurePath

EVERY_S = 5.0
TIMEOUT_S = 0.2
MAX_TEXT = 4000
_UCRED = struct.Struct("iII")  # pid, uid, gid
_HEADER = struct.Struct("!II")  # lengths of the JSON text and of the attachment, which is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatStatus:
    """The content of a heartbeat; 0, or NaN for loss and goodput: not known."""

    step: int
    total_steps: int
    loss: float
    samples_per_s: float
    steps_per_s: float
    checkpoint_step: int
    checkpoint_at_s: float  # on the monotonic clock
    goodput: float  # useful time divided by all time
    note: str
    directory: str = ""  # of the checkpoints


class Heartbeat:
    """Sends heartbeats of one job."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._path = environ.get("HPCSCHED_SOCKET", "")
        job = environ.get("HPCSCHED_JOB_ID", "")
        self._job_id = int(job) if job.isascii() and job.isdigit() else 0
        self._sent_at_s = float("-inf")
        self.heard = bool(self._path and self._job_id)

    def due(self) -> bool:
        """Return whether the next heartbeat is due."""
        return self.heard and time.monotonic() - self._sent_at_s >= EVERY_S

    def send(self, status: HeartbeatStatus) -> bool:
        """Send a heartbeat now, and return whether it was sent."""
        if not self.heard:
            return False
        self._sent_at_s = time.monotonic()
        return self._send(self._message(status, self._sent_at_s))

    def _send(self, message: dict[str, object]) -> bool:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
                agent.settimeout(TIMEOUT_S)
                agent.connect(self._path)
                if not self._is_trusted(agent):
                    return False
                agent.sendall(_HEADER.pack(len(text), 0) + text)
        except OSError:
            return False  # the agent is being replaced, or is busy: the next heartbeat follows
        return True

    def _is_trusted(self, agent: socket.socket) -> bool:
        uid = _UCRED.unpack(agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
        folder = os.path.dirname(self._path)
        if uid in (0, os.getuid()) or os.path.basename(folder) == f"hpcnode-{uid}":  # as the agent names it
            return True
        found = [os.lstat(each) for each in [PurePath(folder), *PurePath(folder).parents]]
        is_closed = all(one.st_uid in (0, uid) and not one.st_mode & 0o022 for one in found)
        return is_closed and os.path.realpath(folder) == folder

    def fail(self, rank: int, ranks: int, text: str, *, echo: bool) -> bool:
        """Send the reason why this rank fails, and return whether it was sent.

        `echo`: another rank failed first.
        """
        message = {"job_id": self._job_id, "rank": rank, "ranks": ranks, "text": text[-MAX_TEXT:], "echo": echo}
        return self.heard and self._send({"type": "Failure"} | message)

    def _message(self, status: HeartbeatStatus, now_s: float) -> dict[str, object]:
        message: dict[str, object] = {
            "type": "Progress",
            "job_id": self._job_id,
            "step": status.step,
            "total_steps": status.total_steps,
            "samples_per_s": _number(status.samples_per_s) or 0.0,
            "steps_per_s": _number(status.steps_per_s) or 0.0,
            "note": status.note,
        }
        message |= {
            name: value for name in ("loss", "goodput") if (value := _number(getattr(status, name))) is not None
        }
        if status.checkpoint_step:
            message |= {"checkpoint_step": status.checkpoint_step, "checkpoint_age_s": now_s - status.checkpoint_at_s}
        if directory := _plain(os.path.abspath(status.directory)) if status.directory else "":
            message["directory"] = directory
        return message


def _plain(path: str) -> str:
    """Return a path that JSON can carry; "" for a path that is not UTF-8."""
    try:
        return path.encode().decode()
    except UnicodeEncodeError:
        return ""


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
