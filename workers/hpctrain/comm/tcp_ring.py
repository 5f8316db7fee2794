"""All-reduce as a ring of hosts over our own TCP connections, in the background.

One thread sleeps in `poll`, so that the core is free for the backward pass: MPI's wait spins, and needs frequent calls for
progress.  Any number of sums are under way at once, so that the link is never idle between two of them.  Does not know
hosts, MPI, buckets or devices: it gets two sockets.
Rules:
- All ranks begin the same sums in the same order; a sum is found by its number.
- A chunk travels as in `ring`, and is summed in the same order to the same bits.  float16 and bfloat16 are summed here for
  two ranks only, because that rounds once.
- A piece for a sum that this rank has not begun stays in the socket: the sender is ahead, and waits.
- Only the kernel copies; a piece to be added goes to one small buffer that stays in the cache.
Sources: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; tcp(7), socket(7)
(SO_RCVLOWAT: wake up for many bytes, not for each packet).
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

PIECE_BYTES = 512 << 10  # largest; must be far below a connection's window, else waiting for a whole piece deadlocks
ALIGNED = 64  # bytes; all pieces of a chunk but the last are multiples
HEAD = struct.Struct("!IIII")  # number of the sum, hops so far, offset in the chunk, length


@dataclass(slots=True, kw_only=True)
class _RingSum:
    """A sum: its chunks as bytes, the bytes to receive and to send, and the callback."""

    number: int
    chunks: list[memoryview]
    least_bytes: int  # smallest length of its pieces
    dtype: torch.dtype
    hops: int  # of a piece
    left_bytes: int
    coming_bytes: int  # of these: from the left neighbour
    then: Callable[[], None] | None
    work: Work = field(default_factory=Work)


class TcpRing:
    """A ring: sends to the right neighbour, receives from the left one."""

    def __init__(self, rank: int, size: int, to_right: socket.socket, from_left: socket.socket) -> None:
        self._rank, self._size = rank, size
        self._right, self._left = to_right, from_left
        self._left_host = _host_of(from_left)
        for connection in (to_right, from_left):
            connection.setblocking(False)
        self._begun: deque[_RingSum | None] = deque()  # None: no more sums follow
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
        self._full = self._empty = False  # the kernel took or had less than asked for: wait for `poll`
        self._broken: TrainError | None = None
        self._closing = self._cut = self._left_has_ended = False
        self._thread = threading.Thread(target=self._run, name="tcp_ring", daemon=True)
        self._thread.start()

    def sums(self, dtype: torch.dtype) -> bool:
        """Return whether the ring sums this dtype by the rules."""
        return self._size == 2 or dtype not in HALVES

    def begin(self, flat_L: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """Sum `flat_L` (one dimension, CPU, contiguous) in place, in the background.

        `then` is called in the background after the sum.  `own_part`: only this rank's chunk of `split` becomes the sum, and the
        other chunks get partial sums: half the bytes.
        """
        whole, each = flat_L.detach().view(torch.uint8).numpy().data, flat_L.element_size()
        chunks = [whole[each * low : each * high] for low, high in spans(flat_L.numel(), self._size)]
        total, mine = sum(map(len, chunks)), len(chunks[self._rank])
        before, after = len(chunks[self._rank - 1]), len(chunks[(self._rank + 1) % self._size])
        # Reduce: all chunks arrive except the one that starts here, and all are sent on except the one that ends here, complete.
        # Gather: all other chunks arrive complete, and all are sent on except the one that the next host has completed.
        coming, going, hops = total - before, total - mine, self._size - 1
        if not own_part:
            coming, going, hops = coming + total - mine, going + total - after, 2 * hops
        summing = _RingSum(
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
        self._begun.append(summing)
        self._wake()
        return summing.work

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        """Sum `flat_L` over all ranks, in place."""
        self.begin(flat_L).wait()

    def break_off(self) -> None:
        """Make all current and later sums fail at once; may be called by any thread."""
        self._cut = True
        self._wake()

    def close(self) -> None:
        """End the thread and the connections; no sum may be under way."""
        self._begun.append(None)
        self._wake()
        self._thread.join()
        for end in (self._right, self._left, self._waker, self._wakes):
            end.close()

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # wakes are pending already

    # ----- in the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # top of the thread: waiting sums get the error
            self._broken = error if isinstance(error, TrainError) else TrainError(f"cannot sum over hosts: {error!r}")
            for link in (self._right, self._left):
                link.close()  # the neighbours must not wait for this rank
            while True:
                self._take_begun()
                for summing in self._open.values():
                    summing.work.end(self._broken)
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
            for connection, event in ((self._left, select.POLLIN), (self._right, select.POLLOUT)):
                if wanted[connection] and not watched[connection]:
                    poller.register(connection, event)
                elif watched[connection] and not wanted[connection]:
                    poller.unregister(connection)
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
            if self._left_has_ended and any(summing.coming_bytes for summing in self._open.values()):
                raise TrainError(
                    f"cannot sum over hosts: the rank on {self._left_host} has ended; if it does not print a reason, it was "
                    "killed (for example, for its use of memory)"
                )
            self._flush()

    def _take_begun(self) -> None:
        while self._begun:
            summing = self._begun.popleft()
            if summing is None:
                self._closing = True
                return
            self._open[summing.number] = summing
            first = summing.chunks[self._rank - 1]
            for low, high in _cuts(len(first)):
                self._send(summing, 0, low, first[low:high])
            self._progress(summing, 0)

    def _send(self, summing: _RingSum, hops: int, low: int, piece: memoryview) -> None:
        """Put a piece into the queue to the right."""
        self._out.append((summing, [memoryview(HEAD.pack(summing.number, hops, low, len(piece))), piece]))

    def _flush(self) -> None:
        """Send as much as the kernel takes."""
        while self._out and not self._full:
            summing, parts = self._out[0]
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
            self._progress(summing, before - (len(parts[-1]) if parts else 0))

    def _receive(self) -> None:
        """Receive from the left until nothing is there, or the sum is not begun here."""
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
        """Count received bytes of a piece, then of the next one's head."""
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
        """Find the memory for a piece; False while its sum is not begun."""
        summing = self._open.get(piece.number)
        if summing is None:
            return False
        turns = self._size - 1
        piece.chunk = (
            (self._rank - 2 - piece.hops) % self._size
            if piece.hops < turns
            else (self._rank - 1 - (piece.hops - turns)) % self._size
        )
        place = summing.chunks[piece.chunk][piece.low : piece.low + piece.length]
        piece.target = self._landing[: piece.length] if piece.hops < turns else place
        return True

    def _arrived(self, piece: _Piece) -> None:
        """Add a piece to this rank's chunk unless it is a complete one, then send it on."""
        summing = self._open[piece.number]
        place = summing.chunks[piece.chunk][piece.low : piece.low + piece.length]
        if piece.hops < self._size - 1:
            _add(self._landing[: piece.length], place, summing.dtype)
        summing.coming_bytes -= piece.length
        if piece.hops + 1 < summing.hops:
            self._send(summing, piece.hops + 1, piece.low, place)
        self._progress(summing, piece.length)

    def _progress(self, summing: _RingSum, by_bytes: int) -> None:
        summing.left_bytes -= by_bytes
        if summing.left_bytes == 0:
            if summing.then is not None:
                summing.then()
            del self._open[summing.number]
            summing.work.end()

    def _missing(self) -> int:
        """Return the bytes to wait for until a whole piece is there; 0: none can be processed."""
        if self._left_has_ended:
            return 0
        if self._piece is not None:
            return self._piece.length - self._piece.has if self._piece.target is not None else 0
        # The next piece may be shorter, and of a sum that is not begun.
        least = min((summing.least_bytes for summing in self._open.values() if summing.coming_bytes), default=0)
        return least and HEAD.size - self._head_has + least

    def _be_woken_for(self, missing_bytes: int) -> None:
        if missing_bytes != self._lowat:
            self._left.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing_bytes)
            self._lowat = missing_bytes


class _Piece:
    """A piece that is being received."""

    __slots__ = ("chunk", "has", "hops", "length", "low", "number", "target")

    def __init__(self, number: int, hops: int, low: int, length: int) -> None:
        self.number, self.hops, self.low, self.length = number, hops, low, length
        self.has = self.chunk = 0
        self.target: memoryview | None = None


def _host_of(connection: socket.socket) -> str:
    """Return the address of the other end, for messages."""
    try:
        peer = connection.getpeername()
    except OSError:  # already ended
        return "the host before"
    return str(peer[0]) if isinstance(peer, tuple) else "this host"


def _cuts(length: int) -> list[tuple[int, int]]:
    """Return where pieces of a chunk begin and end.

    Of about equal length, so the receiver knows how much comes.
    """
    if length == 0:
        return []
    each = -(-length // -(-length // PIECE_BYTES))
    each += -each % ALIGNED
    return [(low, min(low + each, length)) for low in range(0, length, each)]


def _add(incoming: memoryview, place: memoryview, dtype: torch.dtype) -> None:
    ours = torch.frombuffer(place, dtype=dtype)
    ours += torch.frombuffer(incoming, dtype=dtype)
