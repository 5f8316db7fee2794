"""A small event loop: descriptors, timers, and buffered byte streams.

No threads, because the agent forks.

Rules: a callback never blocks. The feeder of a stream bounds its buffer (see `Stream.unsent`). What is queued in one turn of the
loop goes out in one write. Messages are not known here.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import socket
import sys
from typing import Callable, Dict, List, Optional, Set, Tuple

from hpcnode.os.process import boot_clock_s

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
CHUNK = 256 << 10
MAX_WAIT_S = 300.0  # waits do not count sleep of the machine, timers do


class Timer:
    """A scheduled call; it may be cancelled at any time."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Optional[Callable[[], None]] = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Waits for descriptors and times, and calls back.

    `contains_faults`: an exception of a stream's handler is logged and ends that stream, not the loop.
    """

    def __init__(self, contains_faults: bool = False) -> None:
        self.contains_faults = contains_faults
        self._epoll = select.epoll()
        self._watches: Dict[int, Tuple[int, Callable[[int], None]]] = {}  # by descriptor: events, what to call
        self._timers: List[Tuple[float, int, Timer]] = []
        self._count = 0
        self._unflushed: Set[Stream] = set()
        self.stopped = False
        self.after_turn: Optional[Callable[[], None]] = None

    def watch(self, fd: int, events: int, call: Callable[[int], None]) -> None:
        """Call `call(events)` whenever `fd` is ready; replaces an earlier watch; no events: stop."""
        watched = self._watches.get(fd)
        if not events:
            if watched is not None:
                del self._watches[fd]
                with contextlib.suppress(OSError):  # it was closed
                    self._epoll.unregister(fd)
            return
        if watched is None:
            self._epoll.register(fd, events)
        elif watched[0] != events:
            self._epoll.modify(fd, events)
        self._watches[fd] = (events, call)

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once after `delay_s`."""
        timer = Timer(call)
        self._count += 1
        heapq.heappush(self._timers, (boot_clock_s() + delay_s, self._count, timer))
        return timer

    def flush_soon(self, stream: Stream) -> None:
        """Write out the stream at the end of this turn."""
        self._unflushed.add(stream)

    def run(self) -> None:
        """Serve until `stopped` is set."""
        self.stopped = False
        while not self.stopped:
            self.turn()

    def clear_timers(self) -> None:
        """Cancel all timers."""
        self._timers.clear()

    def turn(self) -> None:
        """Wait for events and timers, and serve them."""
        found = self._epoll.poll(self._wait_s(), max(1, len(self._watches)))
        for fd, events, watch in [(fd, events, self._watches.get(fd)) for fd, events in found]:
            if watch is not None and self._watches.get(fd) is watch:  # an earlier callback may have closed it
                # A peer that is gone, or an error, is found by reading and by writing.
                watch[1]((events if events & (READ | WRITE) == events else READ | WRITE) & watch[0])
        now_s = boot_clock_s()
        while self._timers and self._timers[0][0] <= now_s:
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                call()
        if self.after_turn is not None:
            self.after_turn()
        self.flush()

    def flush(self) -> None:
        """Write out all queued data."""
        while self._unflushed:
            self._unflushed.pop().flush()

    def _wait_s(self) -> Optional[float]:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(MAX_WAIT_S, max(0.0, self._timers[0][0] - boot_clock_s()))


class Stream:
    """A connected socket with an output buffer.

    `on_data(b"")` is called once, when the peer closes.
    """

    def __init__(self, loop: Loop, sock: socket.socket, on_data: Callable[[bytes], None]) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self.on_data = on_data
        self._out: List[bytes] = []
        self._offset = 0
        self._paused = False
        self._closing = False
        self._watched = 0
        self.unsent = 0
        self.closed = False
        self.failed = False  # its handler raised an exception
        self.what = "a connection"  # for the log, if its handler fails
        self._watch()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: bytes) -> None:
        """Queue `data` for the end of this turn, or for when the peer takes it."""
        if self.closed or self._closing:
            return
        self._out.append(data)
        self.unsent += len(data)
        self._loop.flush_soon(self)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading, so that the peer slows down."""
        if paused != self._paused and not self.closed:
            self._paused = paused
            self._watch()

    def close(self) -> None:
        """Close at once; drop unsent data."""
        if not self.closed:
            self.closed = True
            self._loop.watch(self._sock.fileno(), 0, self._ready)
            self._sock.close()
            self._out.clear()
            self.unsent = 0

    def close_when_sent(self) -> None:
        """Close as soon as the peer has taken all queued data."""
        self._closing = True
        if not self._out:
            self.close()

    def flush(self) -> None:
        """Write as much as the peer takes now."""
        if self.closed:
            return
        try:
            while self._out:
                if self._offset == 0 and len(self._out) > 1 and len(self._out[0]) < CHUNK:
                    self._join()
                sent = self._sock.send(memoryview(self._out[0])[self._offset :])
                self.unsent -= sent
                self._offset += sent
                if self._offset == len(self._out[0]):
                    self._out.pop(0)
                    self._offset = 0
        except BlockingIOError:
            pass
        except OSError:
            self._end()
            return
        if self._closing and not self._out:
            self.close()
        else:
            self._watch()

    def _join(self) -> None:
        count, size = 0, 0
        for part in self._out:
            count, size = count + 1, size + len(part)
            if size >= CHUNK:
                break
        self._out[:count] = [b"".join(self._out[:count])]

    def _watch(self) -> None:
        events = (0 if self._paused or self._closing else READ) | (WRITE if self._out else 0)
        if events != self._watched:
            self._watched = events
            self._loop.watch(self._sock.fileno(), events, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self.flush()
        if events & READ and not self.closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._hand_on(data)
        else:
            self._end()

    def _end(self) -> None:
        self.close()
        self._hand_on(b"")

    def _hand_on(self, data: bytes) -> None:
        try:
            self.on_data(data)
        except Exception:
            if not self._loop.contains_faults:
                raise
            log_exception("%s is closed: its handler failed" % self.what)
            self.failed = True
            if data:
                self._end()


def log_exception(what: str) -> None:
    """Write `what` and the traceback of the present exception to stderr."""
    import traceback  # see `agent` on the cost of imports

    sys.stderr.write("%s\n%s" % (what, traceback.format_exc()))
    sys.stderr.flush()


def wake_on_signals(loop: Loop, calls: Dict[int, Callable[[], None]]) -> None:
    """Call back in the loop when one of these signals arrives."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(_events: int) -> None:
        for number in set(os.read(read_end, 512)):
            if number in calls:
                calls[number]()

    for number in calls:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    loop.watch(read_end, READ, wake)
