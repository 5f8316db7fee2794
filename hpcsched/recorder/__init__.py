"""Run the recorder, a child process that keeps the history of metrics.

The controller never waits for the child. Samples go into a socket that does not block, and into a
bounded queue if the child is slow; what does not fit is dropped and counted. A child that dies, or
is killed for its memory, is started again, later each time. Questions wait for their answer on the
event loop, for a limited time.

The child (`hpcsched.recorder.__main__`) is the only process that opens the database.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpcsched.errors import HpcschedError, InternalError, NotFoundError, RequestError, UnavailableError

if TYPE_CHECKING:
    from hpcsched.metrics.series import Column, NodeSample

Json = dict[str, Any]

log = logging.getLogger("hpcsched.recorder")

FRAME = struct.Struct("<IB")  # bytes that follow, and what they are
MESSAGE, ANSWER, ERROR, LOG, STATS = range(5)
NUMBER = struct.Struct("<I")  # of a question, before its answer
MAX_QUEUED_BYTES = 4 << 20  # towards the child
MAX_ANSWER_BYTES = 32 << 20
MAX_COLUMN_LISTS = 4096
MAX_QUESTIONS = 64
ANSWER_S = 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0  # a child that ran so long is started again at once
END_S = 5.0
_ERRORS: dict[str, type[HpcschedError]] = {
    kind.__name__: kind for kind in (NotFoundError, RequestError, UnavailableError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """What the child needs to know. `keep_s`: how long rows of each tier are kept.

    `renamed`: the present name of a node, by an earlier one.
    """

    database: str
    keep_s: tuple[float, ...]
    max_bytes: int
    remote_write: str = ""  # URL; "": none
    remote_token_file: str = ""
    cluster: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)


class Recorder:
    """The child and the queue to it, on the event loop. The child's troubles block no method."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._settings = settings
        self._socket: socket.socket | None = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._sent_of_first = 0
        self._received = bytearray()
        self._columns: dict[int, tuple[int, tuple[Column, ...]]] = {}
        self._next_columns = 0
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._next_question = 0
        self._running: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False
        self.samples = 0
        self.dropped = 0
        self.starts = 0
        self.child: Json = {}  # what the child says of itself

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, None if it does not run."""
        return self._process.pid if self._process is not None and self._socket is not None else None

    def start(self) -> None:
        """Start the child, and start it again whenever it ends."""
        self._running = asyncio.get_running_loop().create_task(self._keep_running())

    def configure(self, settings: RecorderSettings) -> None:
        """Tell the child new settings."""
        if settings != self._settings:
            self._settings = settings
            self._send(("settings", asdict(settings)))

    async def close(self) -> None:
        """Let the child write what it has and end; kill it if that takes long."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()
        self._disconnect("the controller ends")
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), END_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()

    # ----- samples and questions

    def record(self, sample: NodeSample) -> None:
        """Give a sample to the child; drop it if the child is slow or does not run."""
        self.samples += 1
        if self._socket is None:
            self.dropped += 1
            return
        columns = self._columns_of(sample.columns)
        jobs = [(row.job_id, row.attempt, self._columns_of(row.columns), json.dumps(row.values)) for row in sample.jobs]
        at_ms = round(sample.received_at_s * 1000)
        message = ("sample", sample.node, sample.boot_id, at_ms, columns, json.dumps(sample.values), jobs)
        if not self._send(message):
            self.dropped += 1

    def _columns_of(self, columns: tuple[Column, ...]) -> int:
        """Return the number under which the child knows these columns; tell it if it does not."""
        known = self._columns.get(id(columns))
        if known is not None:
            return known[0]
        if len(self._columns) >= MAX_COLUMN_LISTS:
            self._columns.clear()
            self._send(("forget",))
        number = self._next_columns
        if self._send(("columns", number, tuple(column.key for column in columns))):
            self._next_columns += 1
            self._columns[id(columns)] = (number, columns)  # kept, so that its id stays its own
        return number

    async def ask(self, question: Json) -> bytes:
        """Return the answer to a question as JSON.

        Raises NotFoundError, RequestError or UnavailableError.
        """
        if len(self._questions) >= MAX_QUESTIONS:
            raise UnavailableError("cannot read metrics now: too many questions wait; try again")
        self._next_question += 1
        number = self._next_question
        if not self._send(("ask", number, json.dumps(question))):
            raise UnavailableError("cannot read metrics now: the recorder does not run; the controller's log says why")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = future
        try:
            return await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            raise UnavailableError(f"cannot read metrics now: no answer within {ANSWER_S:g} s") from None
        finally:
            self._questions.pop(number, None)

    def _send(self, message: tuple[Any, ...]) -> bool:
        """Queue a message; return whether there was room and a child."""
        if self._socket is None or self._queued_bytes >= MAX_QUEUED_BYTES:
            return False
        data = json.dumps(message).encode()
        frame = FRAME.pack(len(data), MESSAGE) + data
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if len(self._queue) == 1:
            self._write()
        return True

    def _write(self) -> None:
        """Write what the socket takes now; the rest when it takes more."""
        loop, connection = asyncio.get_running_loop(), self._socket
        if connection is None:
            return
        try:
            while self._queue:
                first = self._queue[0]
                sent = connection.send(memoryview(first)[self._sent_of_first :])
                self._sent_of_first += sent
                if self._sent_of_first < len(first):
                    break
                self._queue.popleft()
                self._queued_bytes -= len(first)
                self._sent_of_first = 0
        except BlockingIOError:
            pass
        except OSError as error:
            self._disconnect(str(error.strerror))
            return
        if self._queue:
            loop.add_writer(connection, self._write)
        else:
            loop.remove_writer(connection)

    # ----- the child

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while not self._closed:
            began_s = loop.time()
            try:
                await self._run()
            except OSError as error:
                log.error("cannot start the recorder: %s", error.strerror)
            if self._closed:
                return
            if loop.time() - began_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            status = self._process.returncode if self._process is not None else None
            log.error("the recorder of metrics ended (status %s); it is started again in %g s", status, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run(self) -> None:
        """Run one child until it ends."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "hpcsched.recorder",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.starts += 1
        ours.setblocking(False)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._read)
        self._send(("settings", asdict(self._settings)))
        await self._process.wait()
        self._disconnect("it ended")

    def _disconnect(self, why: str) -> None:
        """Forget the child's end: what is queued is dropped, questions fail."""
        connection, self._socket = self._socket, None
        if connection is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection)
        loop.remove_writer(connection)
        connection.close()
        self.dropped += len(self._queue)
        self._queue.clear()
        self._queued_bytes = self._sent_of_first = 0
        self._received.clear()
        self._columns.clear()
        self.child = {}
        for future in self._questions.values():
            if not future.done():
                future.set_exception(UnavailableError(f"cannot read metrics now: the recorder does not run: {why}"))

    def _read(self) -> None:
        connection = self._socket
        if connection is None:
            return
        try:
            data = connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._disconnect(str(error.strerror))
            return
        if not data:
            self._disconnect("it closed its socket")
            return
        self._received += data
        while len(self._received) >= FRAME.size:
            size, kind = FRAME.unpack_from(self._received)
            if size > MAX_ANSWER_BYTES:
                self._disconnect("its answer is too long")
                return
            if len(self._received) < FRAME.size + size:
                return
            body = bytes(self._received[FRAME.size : FRAME.size + size])
            del self._received[: FRAME.size + size]
            self._take(kind, body)

    def _take(self, kind: int, body: bytes) -> None:
        if kind == LOG:
            level, text = json.loads(body)
            log.log(getattr(logging, level.upper()), "%s", text)
        elif kind == STATS:
            self.child = json.loads(body)
        else:
            (number,) = NUMBER.unpack_from(body)
            future = self._questions.get(number)
            if future is None or future.done():
                return
            if kind == ANSWER:
                future.set_result(body[NUMBER.size :])
                return
            name, text = json.loads(body[NUMBER.size :])
            future.set_exception(_ERRORS.get(name, InternalError)(text))


def _environment() -> dict[str, str]:
    """Return the environment of the child, without what it does not need."""
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SSL_CERT_FILE")
    return {name: os.environ[name] for name in kept if name in os.environ}
