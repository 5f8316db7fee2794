"""What is over for good: the log that keeps a late, doubled Launch from running again after its entry has gone.

Two kinds of lines, in `spool/done` and (older) `spool/done.1`:
    t TOKEN                       this token is over and was acknowledged
    j INCARNATION JOB ATTEMPT     nothing of this job's attempts up to this one may start here

The log is durable before an entry is removed, and before an EndJob is obeyed. It is bounded: when `done` has LINES lines it
becomes `done.1` and that is dropped, so at least the last LINES facts are known. What makes a launch later than that
impossible is not this log but the channel: it keeps order, the controller sends an Ack only after it has committed the end of
that token and never launches it after that, an older controller is refused by its epoch, and a restored one is of another
incarnation. The log is for what remains: a frame that was doubled or delayed within one controller's term.
"""

from __future__ import annotations

import os
from typing import Dict, Iterable, List, Set, Tuple

from hpcnode.durable import sync_folder, write_all
from hpcnode.faults import CrashPoints
from hpcnode.tokens import Token, read_token

LINES = 32_768


class _Part:
    """One of the two files, in memory."""

    def __init__(self) -> None:
        self.nonces: Set[bytes] = set()
        self.floors: Dict[Tuple[str, int], int] = {}
        self.lines = 0

    def take(self, line: str) -> None:
        """Learn one line; a line cut off by a power failure says nothing (its fsync never returned)."""
        self.lines += 1
        words = line.split(" ")
        if words[0] == "t" and len(words) == 2:
            token = read_token(words[1])
            if token is not None:
                self.learn(token)
        elif words[0] == "j" and len(words) == 4 and words[2].isdigit() and words[3].isdigit():
            self.raise_floor((words[1], int(words[2])), int(words[3]))

    def learn(self, token: Token) -> None:
        self.nonces.add(bytes.fromhex(token.nonce))
        if token.step == "batch":
            self.raise_floor(token.job, token.attempt)

    def raise_floor(self, job: Tuple[str, int], attempt: int) -> None:
        self.floors[job] = max(attempt, self.floors.get(job, -1))


class DoneLog:
    """The tokens and attempts that are over on this node."""

    def __init__(self, folder: str, faults: CrashPoints, lines: int = LINES) -> None:
        self._folder = folder
        self._path = os.path.join(folder, "done")
        self._limit = lines
        self._faults = faults
        self._older = _read(self._path + ".1")
        self._newer = _read(self._path)

    def is_over(self, token: Token) -> bool:
        """Return whether this token may not start because it, or its attempt, is over."""
        nonce = bytes.fromhex(token.nonce)
        return any(
            nonce in part.nonces or token.attempt <= part.floors.get(token.job, -1)
            for part in (self._newer, self._older)
        )

    def is_noted(self, text: str) -> bool:
        """Return whether this very token was noted."""
        nonce = bytes.fromhex(text.rpartition(".")[2])
        return nonce in self._newer.nonces or nonce in self._older.nonces

    def add(self, tokens: Iterable[str]) -> None:
        """Note these tokens durably."""
        self._append(["t " + text for text in tokens])

    def end_attempts(self, job: Tuple[str, int], attempt: int) -> None:
        """Note durably that no attempt of the job up to this one may start here."""
        if all(part.floors.get(job, -1) < attempt for part in (self._newer, self._older)):
            self._append(["j %s %d %d" % (job[0], job[1], attempt)])

    def _append(self, lines: List[str]) -> None:
        if not lines:
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # The leading newline ends a line that an earlier failure may have cut off.
            write_all(fd, ("\n" + "\n".join(lines) + "\n").encode())
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if self._newer.lines == 0:
            sync_folder(self._folder)
        for line in lines:
            self._newer.take(line)
        if self._newer.lines >= self._limit:
            self._turn()

    def _turn(self) -> None:
        os.rename(self._path, self._path + ".1")
        sync_folder(self._folder)
        self._faults.reached("done.turned")
        self._older, self._newer = self._newer, _Part()


def _read(path: str) -> _Part:
    part = _Part()
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                if line.strip():
                    part.take(line.rstrip("\n"))
    except FileNotFoundError:
        pass
    return part
