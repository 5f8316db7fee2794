"""A shepherd's connection to its agent, and the streams of its tasks over it.

Output is kept until the present reader (`round`) has acknowledged it; input is written as the task takes it. Offsets count the
bytes of a stream from its start, so repeated data is recognized. Memory is bounded: if a reader does not take the output, the
pipe stops the task that writes it.

If the agent is gone, the relay listens in the spool entry until the next agent connects. A bad frame ends the connection, as if
the agent had closed it. It does not know when a step is over. Sources: unix(7).
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Callable, List, Optional, Tuple

from hpcnode.os.loop import READ, WRITE, Loop, Stream
from hpcnode.wire import shepherd_messages
from hpcnode.wire.message import Message, WireError

MAX_UNSENT = 1 << 20
RETRY_S = 1.0  # between attempts to create the socket on a full disk
SOCKET_NAME = "sock"
CHUNK = 64 << 10
MAX_UNTAKEN = 1 << 20
MAX_STEP_UNTAKEN = 32 << 20
INPUT_WINDOW = 1 << 20


def untaken_limit(tasks: int) -> int:
    """Return how many bytes each stream may keep, because one reader holds those of all tasks."""
    return max(CHUNK, min(MAX_UNTAKEN, MAX_STEP_UNTAKEN // (2 * max(1, tasks))))


class OutputStream:
    """The output of one task on one descriptor, from its pipe to its reader."""

    def __init__(self, task: int, fd: int, pipe: int, limit: int) -> None:
        self.task = task
        self.fd = fd
        self.pipe = pipe  # -1 when it has ended
        self._limit = limit
        self._kept = bytearray()
        self._taken = 0  # offset of the first byte that is kept
        self._sent = 0
        self._eof_sent = False

    @property
    def ended(self) -> bool:
        """Whether the task, and all processes that inherited its pipe, have closed it."""
        return self.pipe < 0

    @property
    def wants_more(self) -> bool:
        """Whether there is room to read from the pipe."""
        return not self.ended and len(self._kept) < self._limit

    @property
    def taken_bytes(self) -> int:
        """Bytes that the reader has acknowledged, or that were dropped."""
        return self._taken

    @property
    def all_sent(self) -> bool:
        """Whether all output and its end were sent."""
        return self._eof_sent

    @property
    def all_taken(self) -> bool:
        """Whether the reader has acknowledged all output."""
        return self._eof_sent and not self._kept

    def read(self) -> None:
        """Read from the pipe, as far as there is room."""
        if not self.wants_more:
            return  # reading 0 bytes would look like the end
        try:
            data = os.read(self.pipe, min(CHUNK, self._limit - len(self._kept)))
        except BlockingIOError:
            return
        if data:
            self._kept += data
        else:
            self.end()

    def end(self) -> None:
        """Close the pipe."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def drop(self) -> None:
        """Drop all output that was not acknowledged."""
        self._taken += len(self._kept)
        self._sent = self._taken
        self._kept.clear()

    def to_send(self) -> List[Tuple[int, bytes, bool]]:
        """Return (offset, bytes, eof) of unsent output, and count it as sent."""
        frames = []
        end = self._taken + len(self._kept)
        while self._sent < end:
            start = self._sent - self._taken
            data = bytes(self._kept[start : start + CHUNK])
            frames.append((self._sent, data, False))
            self._sent += len(data)
        if self.ended and not self._eof_sent:
            self._eof_sent = True
            frames.append((end, b"", True))
        return frames

    def taken(self, offset: int) -> None:
        """Drop output before `offset`, which the reader has acknowledged."""
        count = min(offset - self._taken, len(self._kept))
        if count > 0:
            del self._kept[:count]
            self._taken += count
            self._sent = max(self._sent, self._taken)

    def resend(self) -> None:
        """Count unacknowledged output, and the end, as unsent."""
        self._sent = self._taken
        self._eof_sent = False


class InputStream:
    """The input of one task, from its sender to its pipe."""

    def __init__(self, task: int, pipe: int) -> None:
        self.task = task
        self.pipe = pipe  # -1 when it is closed
        self._waiting = bytearray()
        self._received = 0
        self._eof = False

    @property
    def taken(self) -> int:
        """The offset before which the task or its pipe has all input."""
        return self._received - len(self._waiting)

    @property
    def wants_to_write(self) -> bool:
        """Whether input waits for room in the pipe."""
        return self.pipe >= 0 and bool(self._waiting or self._eof)

    def add(self, offset: int, data: bytes, eof: bool) -> bool:
        """Add the new part of `data`.

        Return False if bytes before it are missing or there is no room: send it again.
        """
        if offset > self._received:
            return False
        new = data[self._received - offset :]
        if len(self._waiting) + len(new) > INPUT_WINDOW:
            return False
        self._received += len(new)
        if self.pipe >= 0:
            self._waiting += new
            self._eof = self._eof or eof
        return True

    def write(self) -> bool:
        """Write as much as the pipe takes; return whether anything was written."""
        before = len(self._waiting)
        try:
            while self._waiting:
                del self._waiting[: os.write(self.pipe, self._waiting[:CHUNK])]
        except BlockingIOError:
            return len(self._waiting) < before
        except BrokenPipeError:
            self.close()
            return True
        if self._eof:
            self.close()
        return True

    def close(self) -> None:
        """Close the pipe; later input is accepted and dropped."""
        self._waiting.clear()
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


class Relay:
    """The connection of a shepherd, and all streams of its tasks."""

    def __init__(self, loop: Loop, entry: str, round_: int, sock: socket.socket) -> None:
        self._loop = loop
        self._entry = entry
        self._round: Optional[int] = round_
        self._frames = shepherd_messages.reader()
        self._listener: Optional[socket.socket] = None
        self._agent: Optional[Stream] = Stream(loop, sock, self._received)
        self._outputs: List[OutputStream] = []
        self._inputs: List[InputStream] = []
        self.handle: Callable[[Message], None] = lambda _message: None  # for messages that are not about streams
        self.greet: Callable[[], None] = lambda: None  # a new agent has connected
        self.moved: Callable[[], None] = lambda: None  # data was sent or taken

    @property
    def is_connected(self) -> bool:
        return self._agent is not None

    @property
    def is_over(self) -> bool:
        """Whether all output has ended, and the first agent is still connected."""
        return all(stream.ended for stream in self._outputs) and self._listener is None

    @property
    def has_output(self) -> bool:
        return bool(self._outputs)

    @property
    def taken_bytes(self) -> int:
        """Bytes of output that the reader has acknowledged."""
        return sum(stream.taken_bytes for stream in self._outputs)

    @property
    def all_sent(self) -> bool:
        """Whether all output and its ends were sent."""
        return all(stream.all_sent for stream in self._outputs)

    @property
    def all_taken(self) -> bool:
        """Whether the reader has acknowledged all output."""
        return all(stream.all_taken for stream in self._outputs)

    def add_output(self, task: int, fd: int, limit: int) -> int:
        """Add a stream of a task's output; return the end that the task writes to."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        stream = OutputStream(task, fd, read_end, limit)
        self._outputs.append(stream)
        self._loop.watch(read_end, READ, lambda _events: self._output_ready(stream))
        return write_end

    def add_input(self, task: int) -> int:
        """Add a stream of a task's input; return the end that the task reads from."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        self._inputs.append(InputStream(task, write_end))
        return read_end

    def send(self, message: Message, blob: bytes = b"") -> None:
        """Queue a message for the agent, if one is connected."""
        if self._agent is not None:
            self._agent.send(shepherd_messages.encode(message, blob))

    def finish(self) -> None:
        """Write out all queued messages, however slowly the agent reads them."""
        self._loop.flush()
        while self._agent is not None and self._agent.unsent and not self._agent.closed:
            self._loop.turn()

    def close(self) -> None:
        """Close the connection and the tasks' inputs."""
        for stream in self._inputs:
            if stream.pipe >= 0:
                self._loop.watch(stream.pipe, 0, _nothing)
                stream.close()
        if self._agent is not None:
            self._agent.close()

    def pump(self) -> None:
        """Send output as far as the agent takes it, and read where there is room."""
        for stream in self._outputs:
            if self._agent is not None and self._round is not None and self._agent.unsent < MAX_UNSENT:
                for offset, data, eof in stream.to_send():
                    self.send(shepherd_messages.TaskOutput(stream.task, stream.fd, offset, eof, self._round), data)
            if not stream.ended:
                self._loop.watch(stream.pipe, READ if stream.wants_more else 0, self._reader(stream))
        self.moved()

    def drop_output(self) -> None:
        """Drop the rest of the output."""
        for stream in self._outputs:
            if not stream.ended:
                self._loop.watch(stream.pipe, 0, _nothing)
                stream.end()
            stream.drop()
        self.pump()

    # ----- streams

    def _reader(self, stream: OutputStream) -> Callable[[int], None]:
        return lambda _events: self._output_ready(stream)

    def _output_ready(self, stream: OutputStream) -> None:
        before = stream.pipe
        stream.read()
        if stream.ended:
            self._loop.watch(before, 0, _nothing)
        self.pump()

    def _feed(self, task: int, offset: int, data: bytes, eof: bool) -> None:
        for stream in self._inputs:
            if task in (-1, stream.task):
                if not stream.add(offset, data, eof):
                    self._report_taken()
                self._push_input(stream)

    def _push_input(self, stream: InputStream) -> None:
        pipe = stream.pipe
        if pipe < 0:
            self._report_taken()
            return
        moved = stream.write()
        if stream.pipe < 0:
            self._loop.watch(pipe, 0, _nothing)
        else:
            self._loop.watch(pipe, WRITE if stream.wants_to_write else 0, lambda _events: self._push_input(stream))
        if moved:
            self._report_taken()

    def _report_taken(self) -> None:
        for stream in self._inputs:
            self.send(shepherd_messages.InputTaken(stream.task, stream.taken))

    def _taken(self, task: int, fd: int, offset: int) -> None:
        for stream in self._outputs:
            if stream.task == task and stream.fd == fd:
                stream.taken(offset)

    def _resend(self, round_: int) -> None:
        self._round = round_
        for stream in self._outputs:
            stream.resend()
        self._report_taken()

    # ----- the agent

    def _received(self, data: bytes) -> None:
        if not data:
            self._agent_gone()
            return
        try:
            for message, blob in self._frames.feed(data):
                self._take(message, blob)
        except WireError as error:
            print("the agent's connection is closed: %s" % error, file=sys.stderr, flush=True)
            if self._agent is not None:
                self._agent.close()
            self._agent_gone()
            return
        self.pump()

    def _take(self, message: Message, blob: bytes) -> None:
        if isinstance(message, shepherd_messages.TaskInput):
            self._feed(message.task, message.offset, blob, message.eof)
        elif isinstance(message, shepherd_messages.OutputTaken):
            self._taken(message.task, message.fd, message.offset)
        elif isinstance(message, shepherd_messages.ResendOutput):
            self._resend(message.round)
        else:
            self.handle(message)

    def _agent_gone(self) -> None:
        self._agent = None
        self._round = None  # no output until the next agent sends its round
        self._frames = shepherd_messages.reader()
        self._listen()
        self.pump()

    def _listen(self) -> None:
        """Listen for the next agent in the spool entry."""
        try:
            self._listener = listen_in(self._entry)
        except OSError as error:
            print("cannot listen for the next agent in %s: %s" % (self._entry, error), file=sys.stderr, flush=True)
            self._loop.later(RETRY_S, self._listen)
            return
        self._loop.watch(self._listener.fileno(), READ, lambda _events: self._agent_came())

    def _agent_came(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._loop.watch(self._listener.fileno(), 0, _nothing)
        self._listener.close()
        os.unlink(os.path.join(self._entry, SOCKET_NAME))
        self._agent = Stream(self._loop, sock, self._received)
        self.greet()
        self.pump()


def listen_in(folder: str) -> socket.socket:
    """Return a listening socket in the folder, whose path may have any length."""
    path = os.path.join(folder, SOCKET_NAME)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short_path(folder) as short:
        listener.bind(short)
    listener.listen(1)
    listener.setblocking(False)
    return listener


def connect_in(folder: str) -> socket.socket:
    """Return a connection to the shepherd that listens in the folder. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(folder) as short:
            sock.connect(short)
    except OSError:
        sock.close()
        raise
    return sock


class _short_path:
    """The path of the socket in a folder, short enough for an address (108 bytes)."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return "/proc/self/fd/%d/%s" % (self._fd, SOCKET_NAME)

    def __exit__(self, *_exc: object) -> None:
        os.close(self._fd)


def _nothing(_events: int) -> None:
    pass
