"""Lock the state directory, so that only one controller uses it.

Beside the file lock it records which process holds it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from hpcsched.errors import UnavailableError

LOCK_FILE = "controller.lock"
HOLDER_FILE = "controller.json"


class StateLock:
    """Holds the state directory for this process until it ends or `release` is called."""

    def __init__(self, state_dir: Path) -> None:
        self._lock = FileLock(state_dir / LOCK_FILE)
        self._holder = state_dir / HOLDER_FILE

    def acquire(self, now_text: str, what: str = "start") -> None:
        """Take the lock, to do `what`.

        Raises: UnavailableError that names the holder, or says why the directory is not writable.
        """
        try:
            self._lock.acquire(timeout=0)
            self._note_holder(now_text)
        except Timeout:
            raise UnavailableError(
                f"cannot {what}: {self._describe_holder()} holds {self._lock.lock_file}; stop it with 'hpcsched down'"
            ) from None
        except OSError as error:  # a full or read-only disk
            raise UnavailableError(f"cannot {what}: cannot write to {self._holder.parent}: {error.strerror}") from None

    def _note_holder(self, now_text: str) -> None:
        holder = {"pid": os.getpid(), "since": now_text, "host": os.uname().nodename}
        temporary = self._holder.with_suffix(".tmp")
        temporary.write_text(json.dumps(holder) + "\n")
        temporary.replace(self._holder)

    def _describe_holder(self) -> str:
        try:
            holder = json.loads(self._holder.read_text())
            return f"another hpcschedd (process {holder['pid']} on {holder['host']}, since {holder['since']})"
        except (OSError, ValueError, KeyError):
            return "another hpcschedd"

    def release(self) -> None:
        """Release the state directory."""
        self._holder.unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> StateLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
