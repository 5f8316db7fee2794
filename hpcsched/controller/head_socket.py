"""Serve the steps socket on the head: each connection is one step command (hrun).

Frames of hpcnode.wire.protocol go both ways. The kernel reports the user of a connection. An
account's connections and bytes are limited together with those at the API's socket. Requests that
come too fast wait. A connection of the gateway begins with the key of a step that the API has
prepared (`hpcsched.controller.requests.reaches`). From then on it is that of the step's user, for this step
alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import lru_cache
from pathlib import Path

from hpcnode.wire import protocol
from hpcsched.api.connection_limits import Listener, SocketLimits, listening_socket, read_less
from hpcsched.api.identity import peer_uid
from hpcsched.controller.requests.reaches import Reaches
from hpcsched.controller.stepping import Stepping
from hpcsched.errors import HpcschedError, ProtocolError, report_fault
from hpcsched.steps.step import HEAD

log = logging.getLogger("hpcsched.heads")

MAX_UNSENT_BYTES = 16 << 20  # unsent bytes at which a slow reader is disconnected
FRAME_S = 30.0  # limit for the first frame, and for each frame that has begun
LOOK_S = 10.0  # between checks for an incomplete frame
FREE_BYTES = 4 << 10  # of a frame's JSON
BYTES_PER_REQUEST = 16 << 10  # of JSON beyond that, each counted as a request
# Messages of a running step: not counted as requests.
STREAM_WORDS = (protocol.Input, protocol.OutputAck, protocol.Ping)
# All that a prepared step may say after its key.
PREPARED_WORDS = (*STREAM_WORDS, protocol.StepSignal)


class HeadStreams:
    """The connections to the steps socket."""

    def __init__(self, socket_limits: SocketLimits | None = None) -> None:
        self.stepping: Stepping | None = None
        self.reaches: Reaches | None = None
        self.socket_limits = socket_limits or SocketLimits()
        self.streams: dict[int, _Stream] = {}
        self._last_stream = 0
        self._listener: Listener | None = None

    async def serve(self, path: Path, mode: int) -> None:
        """Listen at `path`.

        Raises: ConfigError if that is not possible.
        """
        self._listener = Listener(listening_socket(path, mode), self._stream, self.socket_limits, self._refused)

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._listener is not None:
            self._listener.close()
        for stream in tuple(self.streams.values()):
            stream.close()

    def reply(self, stream: int, message: protocol.Message, blob: bytes) -> None:
        """Send to the command on `stream` if it is still connected."""
        if stream in self.streams:
            self.streams[stream].send(message, blob)

    def take(self, stream: int, uid: int, message: protocol.Message, blob: bytes) -> None:
        """Pass on the message of a command."""
        if isinstance(message, protocol.Ping):  # answered here, as agents do
            self.reply(stream, protocol.Pong(message.request), b"")
            return
        if self.stepping is None:
            return
        said = protocol.FromStream(stream=stream, uid=uid, job_id=0, attempt=0, message=protocol.to_json(message))
        self.stepping.on_from_stream(HEAD, said, blob)

    def prepared(self, stream: int, key: str) -> tuple[int, protocol.StepRequest]:
        """Return the user and the request of the step of a key. Raises HpcschedError."""
        if self.reaches is None:
            raise ProtocolError("cannot start the step: this controller prepares none")
        reach = self.reaches.begin(stream, key)
        return reach.identity.uid, reach.request

    def why_over(self, stream: int) -> str:
        """Return why the controller must end a prepared step now, "" if it need not."""
        return self.reaches.why_over(stream) if self.reaches is not None else ""

    def closed(self, stream: int) -> None:
        """Note that the connection of a command has closed."""
        del self.streams[stream]
        if self.reaches is not None:
            self.reaches.end(stream)
        if self.stepping is not None:
            self.stepping.on_stream_closed((HEAD, stream))

    def _stream(self) -> _Stream:
        self._last_stream += 1
        return _Stream(self, self._last_stream)

    def _refused(self, uid: int) -> bytes:
        return _goodbye(self.socket_limits.too_often(uid))


@lru_cache(maxsize=8)  # a flood has thousands in a second
def _goodbye(why: str) -> bytes:
    """Return the only frame for a client that is refused."""
    return protocol.encode(protocol.Goodbye(why))


class _Stream(asyncio.Protocol):
    """The connection of one step command."""

    def __init__(self, heads: HeadStreams, number: int) -> None:
        self._heads = heads
        self._limits = heads.socket_limits.limits
        self._number = number
        self._framer = protocol.Framer(protocol.MAX_COMMAND_BYTES, protocol.MAX_COMMAND_VALUES)
        # A waiting frame, parsed or not.
        self._next: tuple[protocol.Message | bytes, bytes] | None = None
        self._waits: asyncio.TimerHandle | None = None
        self._began_s = 0.0  # when the incomplete frame began
        self._has_asked = False
        self._has_ended = False
        self._is_prepared = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        read_less(transport)
        self._loop = asyncio.get_running_loop()
        sock: socket.socket = transport.get_extra_info("socket")
        self._uid = peer_uid(sock)
        self._heads.streams[self._number] = self
        self._began_s = self._loop.time()
        self._timer = self._loop.call_later(FRAME_S, self._look)
        if not self._limits.comes(self._uid, self):
            self._end(f"uid {self._uid} has too many step commands connected")

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        if self._waits is not None:
            self._waits.cancel()
        self._limits.goes(self._uid, self)
        self._heads.closed(self._number)

    @property
    def is_busy(self) -> bool:
        return self._has_asked and not self._has_ended

    @property
    def is_lasting(self) -> bool:
        return self.is_busy

    @property
    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def drop(self) -> None:
        """Abort the connection now."""
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after the command has read all messages."""
        self._transport.close()

    def send(self, message: protocol.Message, blob: bytes) -> None:
        """Send a message to the command."""
        if self._transport.is_closing():
            return
        frame = protocol.encode(message, blob)
        if self.unread_bytes > MAX_UNSENT_BYTES or not self._limits.may_send(self._uid, self, len(frame)):
            log.warning("cutting off a step command of uid %d that does not read what it asked for", self._uid)
            self.drop()
            return
        self._transport.write(frame)
        if isinstance(message, protocol.StepEnded):
            self._has_ended = True
            if message.never_ran:
                self.close()

    def data_received(self, data: bytes) -> None:
        self._limits.is_heard(self._uid, self)
        if not self._framer.pending_bytes:
            self._began_s = self._loop.time()
        self._framer.push(data)
        if self._waits is not None:
            return
        self._work()
        pause_s = self._heads.socket_limits.pause_s(self._uid, len(data))
        if pause_s is not None and self._waits is None and not self._transport.is_closing():
            self._wait(pause_s)

    def eof_received(self) -> bool:
        return False  # a command that has stopped sending does not read either

    def _work(self) -> None:
        """Handle received frames, as fast as the account's rate limit allows."""
        try:
            while not self._transport.is_closing():
                frame = self._next or self._framer.next_frame()
                if frame is None:
                    break
                self._next = None
                text, blob = frame
                if isinstance(text, bytes):
                    self._began_s = self._loop.time()
                    if len(text) > FREE_BYTES and not self._may(frame, 1 + len(text) / BYTES_PER_REQUEST):
                        return
                    message = protocol.parse(text)
                else:
                    message = text
                if not isinstance(message, STREAM_WORDS) and not self._may((message, blob), 1.0):
                    return
                self._take(message, blob)
        except (protocol.WireError, ProtocolError) as error:
            self._end(str(error))
            return
        except Exception as error:
            why = str(report_fault(error, f"serve a step command of uid {self._uid}"))
            self.send(protocol.StepEnded(codes=[], signals=[], error=why), b"")
            return
        if not self._limits.may_hold(self._uid, self, self._framer.pending_bytes):
            self._end(f"uid {self._uid} sends too much at once")

    def _take(self, message: protocol.Message, blob: bytes) -> None:
        """Pass a message on. Raises ProtocolError if a prepared step may not say it."""
        if isinstance(message, protocol.PreparedStep):
            self._become(message.key)
            return
        if self._is_prepared and not isinstance(message, PREPARED_WORDS):
            raise ProtocolError("cannot do anything else on the connection of a prepared step")
        self._has_asked = self._has_asked or not isinstance(message, protocol.Ping)
        self._heads.take(self._number, self._uid, message, blob)

    def _become(self, key: str) -> None:
        """Start the step of a key, as its user. Raises ProtocolError."""
        if self._has_asked:
            raise ProtocolError("cannot start a prepared step: the key must be the first message")
        self._has_asked = True
        try:
            uid, request = self._heads.prepared(self._number, key)
        except HpcschedError as error:
            self.send(protocol.StepEnded(codes=[], signals=[], error=str(error)), b"")
            return
        self._is_prepared = True
        self._timer.cancel()
        self._timer = self._loop.call_later(LOOK_S, self._look)
        self._limits.goes(self._uid, self)
        self._uid = uid
        if not self._limits.comes(self._uid, self):
            raise ProtocolError(f"uid {self._uid} has too many step commands connected")
        self._heads.take(self._number, self._uid, request, b"")

    def _may(self, frame: tuple[protocol.Message | bytes, bytes], cost: float) -> bool:
        """Charge the frame to the account; if over the rate limit, wait and stop reading.

        Returns whether the frame may be handled now.
        """
        wait_s = self._heads.socket_limits.request_wait_s(self._uid, cost)
        if wait_s is None:
            return True
        self._next = frame
        self._wait(wait_s)
        return False

    def _wait(self, wait_s: float) -> None:
        """Stop reading for `wait_s` seconds."""
        self._transport.pause_reading()
        self._waits = self._loop.call_later(wait_s, self._go_on)

    def _go_on(self) -> None:
        self._waits = None
        self._began_s = self._loop.time()
        self._transport.resume_reading()
        self._work()

    def _end(self, why: str) -> None:
        log.info("a step command of uid %d was cut off: %s", self._uid, why)
        if not self._transport.is_closing():
            self._transport.write(protocol.encode(protocol.Goodbye(why)))
            self._transport.close()

    def _look(self) -> None:
        if why := self._heads.why_over(self._number):
            self._end(f"the step is ended: {why}")
            self._timer = self._loop.call_later(LOOK_S, self.drop)
            return
        is_due = self._waits is None and (not self._has_asked or self._framer.pending_bytes)
        left_s = FRAME_S - (self._loop.time() - self._began_s) if is_due else LOOK_S
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._end(f"a frame did not come whole within {FRAME_S:g} s")
        self._timer = self._loop.call_later(LOOK_S, self.drop)  # it may not read that message
