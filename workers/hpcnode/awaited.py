"""Which step commands have asked an agent for something, on disk: they may come back to the agent after it.

A file for each stream, named by its number, from before anybody is told of the request until the stream is closed. It must
outlive the agent, not a crash of the machine, which no step command survives. A stream belongs to one process, and nobody
else can have it: not another of the same user, nor one that has got its pid. It does not know what was asked for.
"""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional

from hpcnode import process
from hpcnode.durable import read_object, to_bytes, write_plainly


class Asker(NamedTuple):
    """The process that asked on a stream, and the job that it did so for."""

    number: int
    who: process.Identity
    uid: int
    job_id: int
    attempt: int


class Awaited:
    """Who asked this agent, and whom of those that asked the one before it may still expect."""

    def __init__(self, root: str, boot_id: str) -> None:
        self._folder = os.path.join(root, "streams")
        self._boot_id = boot_id
        self._awaited: Dict[int, Asker] = {}
        os.makedirs(self._folder, 0o700, exist_ok=True)
        for name in os.listdir(self._folder):
            if name.isdigit():
                self._recover(int(name))
        self.look()

    def __contains__(self, number: int) -> bool:
        return number in self._awaited

    def __len__(self) -> int:
        return len(self._awaited)

    def note(self, number: int, pid: int, uid: int, job_id: int, attempt: int) -> None:
        """Keep on disk who asks on this stream. Raises OSError: then it must not ask, for it could not come back."""
        who = process.identify(pid, self._boot_id)
        if who is not None:  # else it has gone already, or is where we see no processes of
            record = {"who": who, "uid": uid, "job_id": job_id, "attempt": attempt}
            write_plainly(self._path(number), to_bytes(record), 0o600)

    def closed(self, number: int) -> None:
        """The stream is no more."""
        try:
            os.unlink(self._path(number))
        except FileNotFoundError:
            pass

    def back(self, pid: int, uid: int) -> Optional[Asker]:
        """Return what this process, which is here again, asked for last; None: nothing that is known."""
        who = process.identify(pid, self._boot_id)
        last = max((each for each in self._awaited.values() if (each.who, each.uid) == (who, uid)), default=None)
        return self._awaited.pop(last.number) if last is not None else None

    def sees(self, pid: int) -> bool:
        """Whether this process would have been noted, had it asked."""
        return process.identify(pid, self._boot_id) is not None

    def look(self) -> List[int]:
        """Return the streams whose processes have ended since: nobody comes back to them."""
        gone = [each.number for each in self._awaited.values() if not process.is_alive(each.who, self._boot_id)]
        for number in gone:
            del self._awaited[number]
            self.closed(number)
        return gone

    def _recover(self, number: int) -> None:
        record = read_object(self._path(number))
        if record is None:  # cut off: nobody was told of it
            self.closed(number)
            return
        who = process.Identity(*record["who"])
        self._awaited[number] = Asker(number, who, record["uid"], record["job_id"], record["attempt"])

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))
