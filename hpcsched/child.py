"""Run a child process of the controller that it never waits for.

Messages go into a socket that does not block, and into a bounded queue if the child is slow; what
does not fit is dropped and counted. A child that dies, or is killed for its memory, is started again,
later each time. Questions wait for their answer on the event loop, for a limited time.

`ChildProcess` is the controller's end. `ControllerSocket` is the end of the child, and `main_of` runs
it. The recorder (`hpcsched.recorder`) and the alerts (`hpcsched.alerts`) are such children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from hpcsched.errors import HpcschedError, InternalError, NotFoundError, RequestError, UnavailableError

Json = dict[str, Any]

FRAME = struct.Struct("<IB")  # bytes that follow, and what they are
MESSAGE, ANSWER, ERROR, LOG, STATS = range(5)
NUMBER = struct.Struct("<I")  # of a question, before its answer
MAX_QUEUED_BYTES = 4 << 20  # towards the child
MAX_ANSWER_BYTES = 32 << 20
MAX_QUESTIONS = 64
ANSWER_S = 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0  # a child that ran so long is started again at once
END_S = 5.0
_ERRORS: dict[str, type[HpcschedError]] = {
    kind.__name__: kind for kind in (NotFoundError, RequestError, UnavailableError)
}


class ChildProcess:
    """The child and the queue to it, on the event loop. The child's troubles block no method.

    `module`: what Python runs. `name`: what the log calls it. `cannot`: begins what is said of a
    question that the child does not answer.
    """

    def __init__(self, module: str, name: str, cannot: str) -> None:
        self._module, self._name, self._cannot = module, name, cannot
        self._log = logging.getLogger(module)
        self._socket: socket.socket | None = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._sent_of_first = 0
        self._received = bytearray()
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._next_question = 0
        self._running: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False
        self.dropped = 0  # messages
        self.starts = 0
        self.child: Json = {}  # what the child says of itself

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, None if it does not run."""
        return self._process.pid if self._process is not None and self._socket is not None else None

    def start(self) -> None:
        """Start the child, and start it again whenever it ends."""
        self._running = asyncio.get_running_loop().create_task(self._keep_running())

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

    def greeting(self) -> tuple[Any, ...]:
        """Return the first message to a new child."""
        raise NotImplementedError

    def was_disconnected(self) -> None:
        """Forget what a child knew that is gone."""

    def was_told(self, stats: Json) -> None:
        """Take what the child says of itself."""
        self.child = stats

    # ----- messages and questions

    async def ask(self, question: Json) -> bytes:
        """Return the answer to a question as JSON.

        Raises NotFoundError, RequestError or UnavailableError.
        """
        if len(self._questions) >= MAX_QUESTIONS:
            raise UnavailableError(f"{self._cannot}: too many questions wait; try again")
        self._next_question += 1
        number = self._next_question
        if not self.send(("ask", number, json.dumps(question))):
            raise UnavailableError(f"{self._cannot}: {self._name} does not run; the controller's log says why")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = future
        try:
            return await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            raise UnavailableError(f"{self._cannot}: no answer within {ANSWER_S:g} s") from None
        finally:
            self._questions.pop(number, None)

    def send(self, message: tuple[Any, ...]) -> bool:
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
                self._log.error("cannot start %s: %s", self._name, error.strerror)
            if self._closed:
                return
            if loop.time() - began_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            status = self._process.returncode if self._process is not None else None
            self._log.error("%s ended (status %s); it is started again in %g s", self._name, status, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run(self) -> None:
        """Run one child until it ends."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
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
        self.send(self.greeting())
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
        self.child = {}
        self.was_disconnected()
        for future in self._questions.values():
            if not future.done():
                future.set_exception(UnavailableError(f"{self._cannot}: {self._name} does not run: {why}"))

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
            self._log.log(getattr(logging, level.upper()), "%s", text)
        elif kind == STATS:
            self.was_told(json.loads(body))
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


# ----- the child's end


class ControllerSocket:
    """The child's end of the socket. Its threads may send."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, so that it can be waited for with others."""
        return self._socket.fileno()

    def say(self, level: str, text: str) -> None:
        """Send a line for the controller's log."""
        self.send(LOG, json.dumps([level, text]).encode())

    def send(self, kind: int, body: bytes) -> None:
        """Send an answer. If the controller is gone, the next read says so."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(FRAME.pack(len(body), kind) + body)

    def answer(self, number: int, question: Json, found: Any) -> None:
        """Answer a question with what `found()` returns; whatever it raises becomes an error."""
        try:
            text = json.dumps(found(), separators=(",", ":"), allow_nan=False)
            self.send(ANSWER, NUMBER.pack(number) + text.encode())
        except Exception as error:  # a question must not end the child
            kind = type(error).__name__ if isinstance(error, HpcschedError) else "InternalError"
            self.send(ERROR, NUMBER.pack(number) + json.dumps([kind, str(error)]).encode())
            if not isinstance(error, HpcschedError):
                self.say("error", f"cannot answer {str(question)[:200]}: {error!r:.300}")

    def messages(self, wait_s: float, also: Sequence[Any] = ()) -> Iterator[list[Any]]:
        """Yield the messages that have come, after at most `wait_s`.

        It ends earlier if one of `also` can be read. Raises EOFError when the controller is gone.
        """
        if self._socket not in select.select([self._socket, *also], [], [], wait_s)[0]:
            return
        data = self._socket.recv(1 << 20)
        if not data:
            raise EOFError
        self._received += data
        at = 0
        while len(self._received) - at >= FRAME.size:
            size, _ = FRAME.unpack_from(self._received, at)
            end = at + FRAME.size + size
            if len(self._received) < end:
                break
            yield json.loads(memoryview(self._received)[at + FRAME.size : end].tobytes())
            at = end
        del self._received[:at]


def main_of(run: Callable[[ControllerSocket, Callable[[], bool]], None]) -> None:
    """Be a child: run `run` on the socket whose descriptor is the argument.

    Its second argument says whether this process is to end.
    """
    os.umask(0o077)
    os.nice(5)
    told: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, frame: told.append(number))
    run(ControllerSocket(socket.socket(fileno=int(sys.argv[1]))), lambda: bool(told))
