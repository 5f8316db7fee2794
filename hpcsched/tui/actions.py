"""The commands that keys stand for, and their output as it comes.

A command is one of hpcsched's own, run by its path and without a shell, as the user who runs hmon. So a key can do nothing that
the user could not type, and its errors are those of the command. Rules: a command has no terminal and no input, ends with its
page, and its output is bounded.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpcsched.errors import RequestError
from hpcsched.tui.views import Row

MARKED = "%"  # in a command line: the marked jobs or nodes
ON_TERMINAL = frozenset({"halloc", "hrun", "hsh", "htunnel"})  # they get the terminal until they end
COMMANDS = ON_TERMINAL | {
    "hacct", "hcancel", "hctl", "hhealth", "hinfo", "hlogs", "hpcsched", "hprio", "hqueue", "hreport", "hshare", "hsim", "hsub",
    "hwhy",
}  # fmt: skip
READ_BYTES = 64 << 10
MAX_OUTPUT_BYTES = 4 << 20


class KeyAction(NamedTuple):
    """A key's command: its words before and after the names of rows of a kind.

    `asks`: it changes something, so it waits for Enter.
    """

    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    help: str = ""
    asks: bool = True


ACTIONS = {
    "c": KeyAction("job", ("hcancel",), help="cancel"),
    "h": KeyAction("job", ("hctl", "hold"), help="hold"),
    "H": KeyAction("job", ("hctl", "release"), help="release"),
    "r": KeyAction("job", ("hctl", "requeue"), help="requeue"),
    "d": KeyAction("node", ("hctl", "drain"), ("maintenance",), help="drain; the last word is the reason"),
    "D": KeyAction("node", ("hctl", "resume"), help="take a drained node back"),
    "w": KeyAction("job", ("hwhy",), help="why it waits, or how it ended", asks=False),
    "W": KeyAction("job", ("hwhy", "--slow"), help="what slows it down", asks=False),
    "t": KeyAction("job", ("hctl", "story"), help="its story", asks=False),
}


def command_of(action: KeyAction, rows: Sequence[Row]) -> list[str]:
    """Return the words of an action's command for these rows.

    Raises RequestError if it is for none of them.
    """
    names = [row.name for row in rows if row.kind == action.kind]
    if not names:
        raise RequestError(f"cannot do that here: select a {action.kind}")
    if action.kind == "node":
        names = [",".join(names)]
    return [*action.before, *(names if action.asks else names[:1]), *action.after]


def words_of(text: str, names: Sequence[str]) -> list[str]:
    """Return the words of a command line; ``%`` is replaced by the marked names.

    Raises RequestError.
    """
    try:
        words = shlex.split(text.strip().removeprefix("$ "))
    except ValueError as error:
        raise RequestError(f"cannot read the command: {error}") from None
    if not words or words[0] not in COMMANDS:
        name = words[0][:60] if words else ""
        raise RequestError(f"cannot run {name!r} here: it is not a command of hpcsched")
    if MARKED in words and not names:
        raise RequestError(f"cannot run that: no job or node is selected for {MARKED}")
    return [part for word in words for part in (names if word == MARKED else (word,))]


def program_of(name: str) -> str:
    """Return the path of a command: of this installation, else on PATH. Raises RequestError."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RequestError(f"cannot run {name}: it is neither beside {sys.executable} nor on PATH")
    return found


def run_on_terminal(words: Sequence[str]) -> int:
    """Run a command on this terminal, wait for Enter, and return the exit status."""
    status = subprocess.run([program_of(words[0]), *words[1:]], check=False).returncode
    print(f"\nhmon: {words[0]} ended with exit status {status}; Enter returns to hmon ", end="", flush=True)
    sys.stdin.readline()
    return status


class RunningCommand:
    """A command whose output is passed on as it comes.

    `stop` ends it, with its processes. `output` gets pieces of bytes and, at the end, the exit status; it is called by
    another thread.
    """

    def __init__(self, words: Sequence[str], width: int, output: Callable[[bytes, int | None], None]) -> None:
        env = {**os.environ, "COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}
        try:
            self._process = subprocess.Popen(
                [program_of(words[0]), *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise RequestError(f"cannot run {words[0]}: {error.strerror or error}") from None
        self._output = output
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        taken = 0
        descriptor = self._process.stdout.fileno()
        while data := os.read(descriptor, READ_BYTES):
            taken += len(data)
            if taken > MAX_OUTPUT_BYTES:
                self._output(b"\n... the rest is left out\n", None)
                self.stop()
                break
            self._output(data, None)
        status = self._process.wait()
        self._process.stdout.close()
        self._output(b"", status)

    def stop(self) -> None:
        """End the command and its processes, if it has not ended."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
