"""The floor of an exchange beside the backward pass: bare sockets that carry as many bytes as the ring of two, and sum nothing.

Each bucket is given to the kernel by one `send` when its last gradient is there, and taken from it by one `recv` for each piece
of the ring's size, when all of that has come; both in threads that let go of Python's lock meanwhile.  What a step with it
loses against one without is the copies in the kernel, its packets and timers, and the threads: nobody who exchanges over TCP
loses less.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
from collections.abc import Iterable, Sequence

import torch

from hpctrain.comm.hosts import tune
from hpctrain.comm.tcp_ring import PIECE_BYTES


class Carrier:
    """Two connected ranks; `sizes` are the bytes of each bucket, the same on both."""

    def __init__(self, peer: socket.socket, sizes: Sequence[int]) -> None:
        self._peer, self._sizes = peer, sizes
        self._content = memoryview(bytearray(max(sizes)))
        self._landing = memoryview(bytearray(PIECE_BYTES))
        self._ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._over = threading.Semaphore(0)
        for run in (self._send, self._receive):
            threading.Thread(target=run, daemon=True).start()

    def watch(self, groups: Iterable[Sequence[torch.nn.Parameter]]) -> None:
        """This will send the bytes of each group of parameters when the gradient of the last one has come."""
        for index, group in enumerate(groups):
            group[-1].register_post_accumulate_grad_hook(lambda _, index=index: self._ready.put(index))

    def begin(self) -> None:
        """This will take what the other rank sends in a step."""
        self._begun.put(None)

    def wait(self) -> None:
        """This will return when all that belongs to the step has come and gone."""
        self._over.acquire()
        self._over.acquire()

    def _send(self) -> None:
        while True:
            for _ in self._sizes:
                self._peer.sendall(self._content[: self._sizes[self._ready.get()]])
            self._over.release()

    def _receive(self) -> None:
        poller = select.poll()
        poller.register(self._peer, select.POLLIN)
        set_bytes = 0
        while True:
            self._begun.get()
            for size in self._sizes:
                for piece in _pieces(size):
                    while piece:
                        if piece != set_bytes:  # be woken for all of it
                            self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, piece)
                            set_bytes = piece
                        poller.poll()
                        got = self._peer.recv_into(self._landing, piece, socket.MSG_DONTWAIT)
                        if not got:
                            return  # the other rank has ended
                        piece -= got
            self._over.release()


def connect(world, address: str) -> socket.socket:  # noqa: ANN001
    """This will connect the two ranks of `world`; `address` is the first one's."""
    if world.rank == 0:
        with socket.create_server((address, 0)) as listener:
            world.bcast(listener.getsockname()[1])
            peer = listener.accept()[0]
    else:
        peer = socket.create_connection((address, world.bcast(None)))
    tune(peer)
    return peer


def _pieces(size: int) -> list[int]:
    count = -(-size // PIECE_BYTES)
    return [size * (at + 1) // count - size * at // count for at in range(count)]
