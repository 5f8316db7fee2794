"""`hpcnode agent`: the command line of the agent and its log.

`attach` writes the command line, not people.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import time
from typing import Callable, Dict, List, Optional

from hpcnode import paths
from hpcnode.agent.agent import IDLE_S, Agent, AgentError, log
from hpcnode.wire import protocol

# ----- the log of an agent and its shepherds: their stderr is the file ROOT/log
# It is bounded and never makes its writer fail. Text that a full disk does not take is dropped. Repeated lines, and lines beyond
# `MAX_LINES_PER_S`, are only counted. At `LOG_BYTES` the log moves to ROOT/log.1.


LOG_BYTES = 4 << 20
MAX_LINES_PER_S = 20
BURST_LINES = 500  # lines at once, for example of a traceback
MAX_LINE_CHARS = 8000
LOOK_BYTES = 64 << 10  # written between looks at the log's size
STAMP_CHARS = len("2026-01-01T00:00:00 ")


class EcsLines:
    """Writes lines of the log in the Elastic Common Schema, as `hpcsched.listing.ecs` does.

    A line that names a step has its job in `labels`, and the attempt as `trace.id`.
    """

    def __init__(self, cluster: str, node: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._service = {"name": "hpcnode", "version": paths.version(), "node": {"name": cluster}}
        self._node = node

    def line(self, text: str) -> str:
        """Return the line as JSON, in ASCII, so that no character of a text can end it."""
        millis = int(self._clock() * 1000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(millis // 1000))
        level = "error" if text.startswith(("cannot ", "Traceback ")) else "info"
        labels, trace = {"node": self._node}, {}
        for word in text.split():
            token = protocol.read_token(word.strip(",:;()'"))
            if token is not None:
                labels.update(job_id=str(token.job_id), attempt=str(token.attempt), step=token.step)
                trace = {"trace": {"id": "%s.%d.%d" % (token.incarnation, token.job_id, token.attempt)}}
                break
        document = {
            "@timestamp": "%s.%03dZ" % (stamp, millis % 1000),
            "log.level": level,
            "message": text,
            "ecs.version": "1.6.0",
            "process": {"pid": os.getpid(), "name": "hpcnode"},
            "service": self._service,
            "host": {"name": self._node},
            "labels": labels,
        }
        document.update(trace)
        return json.dumps(document, separators=(",", ":"))


class RateLimitedLog(io.TextIOBase):
    """A text stream that writes each line to a descriptor opened for appending, or drops it.

    `as_line` makes another format of a line without its time; None: lines stay text.
    """

    def __init__(self, fd: int, path: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`path`: the file, which moves to ``path.1`` when it is long; "": it never moves."""
        self._fd = fd
        self._path = path
        self.as_line: Optional[Callable[[str], str]] = None
        self._clock = clock
        self._partial = ""
        self._last = ""
        self._repeated = self._dropped = 0
        self._room = float(BURST_LINES)
        self._room_at_s = clock()
        self._written_bytes = LOOK_BYTES  # since the last look

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        """Write whole lines, within the rate; hold the rest."""
        *lines, rest = (self._partial + text).split("\n")
        self._partial = rest[:MAX_LINE_CHARS]
        for line in lines:
            self._take(line[:MAX_LINE_CHARS])
        return len(text)

    def flush(self) -> None:
        """Write the incomplete last line; of JSON there is none."""
        if self._partial and self.as_line is None:
            partial, self._partial = self._partial, ""
            self._put(partial)

    def _take(self, line: str) -> None:
        text = line[STAMP_CHARS:] if line[:4].isdigit() else line
        if text and text == self._last:
            self._repeated += 1
            return
        now_s = self._clock()
        self._room = min(BURST_LINES, self._room + (now_s - self._room_at_s) * MAX_LINES_PER_S)
        self._room_at_s = now_s
        if self._room < 1:
            self._dropped += 1
            return
        self._room -= 1
        if self._repeated:
            self._put_line("last line repeated %d times" % self._repeated)
        if self._dropped:
            self._put_line("%d lines dropped: more than %d per second" % (self._dropped, MAX_LINES_PER_S))
        self._last, self._repeated, self._dropped = text, 0, 0
        self._put_line(line if self.as_line is None else text)

    def _put_line(self, line: str) -> None:
        self._put((line if self.as_line is None else self.as_line(line)) + "\n")

    def _put(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        try:
            os.write(self._fd, data)
            self._written_bytes += len(data)
            if self._written_bytes >= LOOK_BYTES:
                self._written_bytes = 0
                self._rotate()
        except OSError:
            pass

    def _rotate(self) -> None:
        """Copy a long log to ``path.1`` and truncate it.

        Shepherds have the file open, so it is not replaced.
        """
        status = os.fstat(self._fd)
        if not self._path or status.st_size <= LOG_BYTES or not os.path.samestat(status, os.stat(self._path)):
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(self._path, "rb") as old, open(os.open(self._path + ".1", flags, 0o600), "wb") as older:
            old.seek(max(0, status.st_size - LOG_BYTES))
            older.write(old.read(LOG_BYTES))
        os.ftruncate(self._fd, 0)


NEEDED = ("--root", "--cluster", "--node")
OPTIONS = (*NEEDED, "--idle-s", "--ready-fd")
USAGE = "usage: hpcnode agent --root R --cluster C --node N [--idle-s S] [--ready-fd N]"


def main(argv: List[str]) -> int:
    """Run the agent: `agent --root R --cluster C --node N [--idle-s S] [--ready-fd N]`."""
    try:
        given = _options(argv)
        root, cluster, node = given["--root"], given["--cluster"], given["--node"]
        idle_s, ready_fd = float(given.get("--idle-s", IDLE_S)), int(given.get("--ready-fd", -1))
    except ValueError as error:
        sys.stderr.write("cannot start the agent: %s\n%s\n" % (error, USAGE))
        return 2
    sys.stderr = written = RateLimitedLog(2, os.path.join(root, "log"))
    report = functools.partial(_report_failure, ready_fd)
    try:
        lines = EcsLines(cluster, node)

        def log_as(name: str) -> None:
            written.as_line = lines.line if name == "ecs" else None

        agent = Agent(root=root, cluster=cluster, node=node, idle_s=idle_s, environ=os.environ)
        agent.log_as = log_as
        agent.run(ready_fd)
    except (AgentError, OSError) as error:
        report(str(error))
        return 1
    return 0


def _options(argv: List[str]) -> Dict[str, str]:
    """Return the values by option.

    Argparse would add a tenth to the memory that each fork maps.
    """
    given = dict(zip(argv[::2], argv[1::2]))
    unknown = set(given).difference(OPTIONS)
    if unknown or len(argv) % 2:
        raise ValueError("unknown option or no value: %s" % " ".join(unknown or argv[-1:]))
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise ValueError("missing: %s" % " ".join(missing))
    return given


def _report_failure(ready_fd: int, why: str) -> None:
    """Write the reason to the log, and to the process that waits for the agent."""
    log(why)
    if ready_fd >= 0:
        try:
            os.write(ready_fd, ("error: %s\n" % why).encode("utf-8", "surrogateescape"))
        except OSError:
            pass  # it got "ready" before, or is gone
