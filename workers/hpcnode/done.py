"""What is over for good: the log that keeps a late, doubled Launch from running again after its entry has gone.

Two kinds of lines, in `spool/done` and (older) `spool/done.1`:
    t TOKEN                       this token is over and was acknowledged
    j INCARNATION JOB ATTEMPT     nothing of this job's attempts up to this one may start here (ATTEMPT-STAY: see `tokens`)

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
from hpcnode.tokens import Life, Token, read_token

LINES = 32_768
NEVER = (-1, 0)


class _Part:
    """One of the two files, in memory."""

    def __init__(self) -> None:
        self.nonces: Set[bytes] = set()
        self.floors: Dict[Tuple[str, int], Life] = {}
        self.lines = 0

    def take(self, line: str) -> None:
        """Learn one line; a line cut off by a power failure says nothing (its fsync never returned)."""
        self.lines += 1
        words = line.split(" ")
        if words[0] == "t" and len(words) == 2:
            token = read_token(words[1])
            if token is not None:
                self.learn(token)
        elif words[0] == "j" and len(words) == 4 and words[2].isdigit():
            attempt, _, stay = words[3].partition("-")
            if attempt.isdigit() and (stay or "0").isdigit():
                self.raise_floor((words[1], int(words[2])), (int(attempt), int(stay or 0)))

    def learn(self, token: Token) -> None:
        self.nonces.add(_name(token))
        if token.step == "batch":
            self.raise_floor(token.job, token.life)

    def raise_floor(self, job: Tuple[str, int], life: Life) -> None:
        self.floors[job] = max(life, self.floors.get(job, NEVER))


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
        name = _name(token)
        return any(
            name in part.nonces or token.life <= part.floors.get(token.job, NEVER)
            for part in (self._newer, self._older)
        )

    def is_noted(self, text: str) -> bool:
        """Return whether this very token was noted."""
        token = read_token(text)
        return token is not None and any(_name(token) in part.nonces for part in (self._newer, self._older))

    def add(self, tokens: Iterable[str]) -> None:
        """Note these tokens durably."""
        self._append(["t " + text for text in tokens])

    def end_attempts(self, job: Tuple[str, int], life: Life) -> None:
        """Note durably that no attempt of the job up to this one (of its last: no stay up to this) may start here."""
        if all(part.floors.get(job, NEVER) < life for part in (self._newer, self._older)):
            attempt, stay = life
            self._append(["j %s %d %d%s" % (*job, attempt, "-%d" % stay if stay else "")])

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


def _name(token: Token) -> bytes:
    """Return what no other token of this node has: the claims of one attempt share a nonce, each has a stay of its own."""
    return bytes.fromhex(token.nonce) + (b"%d" % token.stay if token.stay else b"")


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
