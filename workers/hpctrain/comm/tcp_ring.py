"""All-reduce as a ring of hosts over TCP connections of our own, in the background of whatever else a rank does.

One thread sleeps in `poll` until the kernel has something for it, so that the core is the backward pass's: MPI's wait
spins, and its progress between hooks needs a nap as short as a socket buffer.  Any number of sums are under way at once, so
the link is never idle between two of them.  Does not know hosts, MPI, buckets or devices: it is handed two sockets.
Rules:
- All ranks begin the same sums in the same order; where they are done is found by number.
- A chunk goes round as in `ring`, is summed in the same order and so to the same bits; float16 and bfloat16 are summed here
  for two ranks alone, where that rounds once.
- A piece for a sum that this rank has not begun is left in the socket: the sender is ahead, and waits.
- Nothing is copied but by the kernel, and what is to be added lands in one small buffer that stays in the cache.
Sources: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; tcp(7), socket(7)
(SO_RCVLOWAT: be woken for many bytes, not for each packet).
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from hpctrain.comm.base import Work
from hpctrain.comm.ring import HALVES, spans
from hpctrain.errors import TrainError

PIECE_BYTES = 512 << 10  # at most; far less than a connection's window: who waits for more than fits waits for ever
ALIGNED = 64  # bytes, of a piece but the last of a chunk
HEAD = struct.Struct(
    "!IIII"
)  # the sum's number, how many hops the piece has made, where in the chunk it begins, its length


@dataclass(slots=True, kw_only=True)
class _RingSum:
    """A sum: its chunks as bytes, how many bytes are still to come and to go, and what is to be done at its end."""

    number: int
    chunks: list[memoryview]
    least_bytes: int  # of any piece of it
    dtype: torch.dtype
    hops: int  # that a piece makes
    left_bytes: int
    coming_bytes: int  # of these: from the left
    then: Callable[[], None] | None
    work: Work = field(default_factory=Work)


class TcpRing:
    """A ring: what goes to the right neighbour, what comes from the left one."""

    def __init__(self, rank: int, size: int, to_right: socket.socket, from_left: socket.socket) -> None:
        self._rank, self._size = rank, size
        self._right, self._left = to_right, from_left
        self._left_host = _host_of(from_left)
        for one in (to_right, from_left):
            one.setblocking(False)
        self._begun: deque[_RingSum | None] = deque()  # None: there will be no more
        self._count = 0
        self._open: dict[int, _RingSum] = {}
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._wakes.setblocking(False)
        self._out: deque[tuple[_RingSum, list[memoryview]]] = deque()
        self._head = memoryview(bytearray(HEAD.size))
        self._head_has = 0
        self._landing = np.empty(PIECE_BYTES, np.uint8).data
        self._piece: _Piece | None = None
        self._lowat = 1
        self._full = self._empty = (
            False  # the kernel took, or had, less than it was asked for: ask again when `poll` says so
        )
        self._broken: TrainError | None = None
        self._closing = self._cut = self._left_has_ended = False
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._thread.start()

    def sums(self, dtype: torch.dtype) -> bool:
        """Whether numbers of this kind are summed as the rules want it."""
        return self._size == 2 or dtype not in HALVES

    def begin(self, flat_L: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """Sum `flat_L` (one dimension, CPU, contiguous) over all ranks, in place, in the background.

        `then` is called in the background when the sum is there.  `own_part`: only this rank's chunk of `split` will be the
        sum, the others are left as they are in between: half the bytes.
        """
        whole, each = flat_L.detach().view(torch.uint8).numpy().data, flat_L.element_size()
        chunks = [whole[each * low : each * high] for low, high in spans(flat_L.numel(), self._size)]
        total, mine = sum(map(len, chunks)), len(chunks[self._rank])
        before, after = len(chunks[self._rank - 1]), len(chunks[(self._rank + 1) % self._size])
        # To be added to, all chunks come by but the one that starts here, and all go on but the one that ends here, which is
        # whole then; all the others come back whole, and all go on but the one that the next host has made whole.
        coming, going, hops = total - before, total - mine, self._size - 1
        if not own_part:
            coming, going, hops = coming + total - mine, going + total - after, 2 * hops
        one = _RingSum(
            number=self._count,
            chunks=chunks,
            least_bytes=min((high - low for chunk in chunks for low, high in _cuts(len(chunk))), default=0),
            dtype=flat_L.dtype,
            hops=hops,
            left_bytes=coming + going,
            coming_bytes=coming,
            then=then,
        )
        self._count += 1
        self._begun.append(one)
        self._wake()
        return one.work

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        """Sum `flat_L` over all ranks, in place."""
        self.begin(flat_L).wait()

    def break_off(self) -> None:
        """Let all that is under way, and what is begun later, fail at once; from any thread."""
        self._cut = True
        self._wake()

    def close(self) -> None:
        """End the thread and the connections; nothing may be under way."""
        self._begun.append(None)
        self._wake()
        self._thread.join()
        for one in (self._right, self._left, self._waker, self._wakes):
            one.close()

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # so many wakes are waiting that one more says nothing

    # ----- in the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the outermost edge of a thread: whoever waits for a sum is told
            self._broken = error if isinstance(error, TrainError) else TrainError(f"cannot sum over hosts: {error!r}")
            for link in (self._right, self._left):
                link.close()  # so that the neighbours do not wait for this rank
            while True:
                self._take_begun()
                for one in self._open.values():
                    one.work.end(self._broken)
                self._open.clear()
                if self._closing:
                    return
                select.select([self._wakes], [], [])
                self._wakes.recv(4096)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wakes, select.POLLIN)
        watched = {self._left: False, self._right: False}
        while not self._closing:
            missing_bytes = self._missing()
            wanted = {self._left: missing_bytes > 0, self._right: bool(self._out)}
            if missing_bytes:
                self._be_woken_for(missing_bytes)
            for one, event in ((self._left, select.POLLIN), (self._right, select.POLLOUT)):
                if wanted[one] and not watched[one]:
                    poller.register(one, event)
                elif watched[one] and not wanted[one]:
                    poller.unregister(one)
            watched = wanted
            for fd, _ in poller.poll():
                if fd == self._wakes.fileno():
                    self._wakes.recv(4096)
                elif fd == self._left.fileno():
                    self._empty = False
                else:
                    self._full = False
            if self._cut:
                raise TrainError("cannot sum over hosts: it was broken off")
            self._take_begun()
            self._receive()
            if self._left_has_ended and any(one.coming_bytes for one in self._open.values()):
                raise TrainError(
                    f"cannot sum over hosts: the rank on {self._left_host} has ended; if it does not say why itself, it was "
                    "killed (for its use of memory, say)"
                )
            self._flush()

    def _take_begun(self) -> None:
        while self._begun:
            one = self._begun.popleft()
            if one is None:
                self._closing = True
                return
            self._open[one.number] = one
            first = one.chunks[self._rank - 1]
            for low, high in _cuts(len(first)):
                self._send(one, 0, low, first[low:high])
            self._progress(one, 0)

    def _send(self, one: _RingSum, hops: int, low: int, piece: memoryview) -> None:
        """Put a piece in the queue to the right."""
        self._out.append((one, [memoryview(HEAD.pack(one.number, hops, low, len(piece))), piece]))

    def _flush(self) -> None:
        """Give the kernel as much as it takes."""
        while self._out and not self._full:
            one, parts = self._out[0]
            try:
                sent = self._right.sendmsg(parts)
            except BlockingIOError:
                self._full = True
                return
            except OSError as error:
                raise TrainError(f"cannot sum over hosts: the next host in the ring is gone ({error})") from None
            before = len(parts[-1])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
                self._full = True
            else:
                self._out.popleft()
            self._progress(one, before - (len(parts[-1]) if parts else 0))

    def _receive(self) -> None:
        """Take what has come from the left, until nothing more is there or it is for a sum that is not begun."""
        while not self._left_has_ended and not self._empty:
            piece = self._piece
            if piece is not None and piece.target is None and not self._find_target(piece):
                return
            buffers = [self._head[self._head_has :]]
            if piece is not None:
                assert piece.target is not None
                buffers.insert(0, piece.target[piece.has :])
            try:
                got = self._left.recvmsg_into(buffers)[0]
            except BlockingIOError:
                self._empty = True
                return
            except OSError as error:
                raise TrainError(f"cannot sum over hosts: the rank on {self._left_host} is gone ({error})") from None
            if got == 0:
                self._left_has_ended = True
                return
            self._empty = got < sum(map(len, buffers))
            self._note(piece, got)
            self._flush()

    def _note(self, piece: _Piece | None, got: int) -> None:
        """Go on by so many bytes, of a piece and then of the next one's head."""
        if piece is not None:
            of_piece = min(got, piece.length - piece.has)
            piece.has += of_piece
            got -= of_piece
            if piece.has == piece.length:
                self._piece = None
                self._arrived(piece)
        self._head_has += got
        if self._head_has == HEAD.size:
            self._head_has = 0
            self._piece = _Piece(*HEAD.unpack(self._head))

    def _find_target(self, piece: _Piece) -> bool:
        """Where a piece is to be put; not known before its sum is begun."""
        one = self._open.get(piece.number)
        if one is None:
            return False
        turns = self._size - 1
        piece.chunk = (
            (self._rank - 2 - piece.hops) % self._size
            if piece.hops < turns
            else (self._rank - 1 - (piece.hops - turns)) % self._size
        )
        place = one.chunks[piece.chunk][piece.low : piece.low + piece.length]
        piece.target = self._landing[: piece.length] if piece.hops < turns else place
        return True

    def _arrived(self, piece: _Piece) -> None:
        """Add a piece to this rank's, or leave it where it is if it is whole; then hand it on."""
        one = self._open[piece.number]
        place = one.chunks[piece.chunk][piece.low : piece.low + piece.length]
        if piece.hops < self._size - 1:
            _add(self._landing[: piece.length], place, one.dtype)
        one.coming_bytes -= piece.length
        if piece.hops + 1 < one.hops:
            self._send(one, piece.hops + 1, piece.low, place)
        self._progress(one, piece.length)

    def _progress(self, one: _RingSum, by_bytes: int) -> None:
        one.left_bytes -= by_bytes
        if one.left_bytes == 0:
            if one.then is not None:
                one.then()
            del self._open[one.number]
            one.work.end()

    def _missing(self) -> int:
        """How many bytes are to come before there is something to do: a whole piece.  0: whatever comes, there is not."""
        if self._left_has_ended:
            return 0
        if self._piece is not None:
            return self._piece.length - self._piece.has if self._piece.target is not None else 0
        # The next piece may be of a sum that is not begun, and shorter: nothing can be done then until it is.
        least = min((one.least_bytes for one in self._open.values() if one.coming_bytes), default=0)
        return least and HEAD.size - self._head_has + least

    def _be_woken_for(self, missing_bytes: int) -> None:
        if missing_bytes != self._lowat:
            self._left.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing_bytes)
            self._lowat = missing_bytes


class _Piece:
    """A piece that is coming in."""

    __slots__ = ("chunk", "has", "hops", "length", "low", "number", "target")

    def __init__(self, number: int, hops: int, low: int, length: int) -> None:
        self.number, self.hops, self.low, self.length = number, hops, low, length
        self.has = self.chunk = 0
        self.target: memoryview | None = None


def _host_of(connection: socket.socket) -> str:
    """Where the other end is, for people."""
    try:
        peer = connection.getpeername()
    except OSError:  # it has ended already
        return "the host before"
    return str(peer[0]) if isinstance(peer, tuple) else "this host"


def _cuts(length: int) -> list[tuple[int, int]]:
    """Where the pieces of a chunk begin and end: of about the same length, so that who waits for one knows how much will come."""
    if length == 0:
        return []
    each = -(-length // -(-length // PIECE_BYTES))
    each += -each % ALIGNED
    return [(low, min(low + each, length)) for low in range(0, length, each)]


def _add(incoming: memoryview, place: memoryview, dtype: torch.dtype) -> None:
    ours = torch.frombuffer(place, dtype=dtype)
    ours += torch.frombuffer(incoming, dtype=dtype)
