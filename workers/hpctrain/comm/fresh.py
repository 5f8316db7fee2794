"""A Gloo group for one generation of an elastic run: made anew for each, and given up with it.

Gloo notices a peer that dies; nothing wakes those who wait for one that is silent, its `abort` neither.  What does is an end of
the connections, and these are found as the sockets that came up with the group.
Rules: the store is a new one for each generation, on its first rank, so that no address of an earlier one is ever read.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.comm.background import Work
from hpctrain.errors import TrainError

FOR_EVER = timedelta(days=365)  # who is silent the roster misses


class FreshGroup:
    """One generation's group, of CPU tensors."""

    def __init__(self, rank: int, size: int, store: dist.Store, own_address: str, patience_s: float) -> None:
        before = _sockets()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=patience_s)  # for the others to come
        try:
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise TrainError(f"cannot make a group over gloo: {_first_line(error)}") from None
        self._sockets = _sockets() - before
        self._store = store  # goes with the group

    def begin(self, flat_L: torch.Tensor, then: Callable[[], None] | None = None) -> Work:
        """This will sum over all ranks, in place, by Gloo's threads; `then` is called by whoever waits."""
        asked = dist.AllreduceOptions()
        asked.timeout = FOR_EVER
        try:
            return _Asked(self._group.allreduce([flat_L], asked), then)
        except RuntimeError as error:
            raise TrainError(f"cannot sum over gloo: {_first_line(error)}") from None

    def break_off(self) -> None:
        """This will let all that is under way fail; from any thread."""
        for name in self._sockets & _sockets():
            for descriptor in _descriptors(name):
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                    one.getpeername()  # one that listens has no peer, and stays: Gloo takes its end for a bug
                    one.shutdown(socket.SHUT_RDWR)


class _Asked(Work):
    """A sum that Gloo was asked for."""

    def __init__(self, asked: dist.Work, then: Callable[[], None] | None) -> None:
        super().__init__()
        self._asked, self._then = asked, then

    def wait(self) -> None:
        try:
            self._asked.wait()
        except RuntimeError as error:
            raise TrainError(f"cannot sum over gloo: {_first_line(error)}") from None
        if self._then is not None:
            self._then()


def store_for(rank: int, address: str, tell_port: Callable[[int], int], patience_s: float) -> dist.Store:
    """This will make or find the store of a generation on its first rank; `tell_port` hands its port to all.

    Raises:
        TrainError: it cannot be reached.
    """
    patience = timedelta(seconds=patience_s)
    made = None
    try:
        if rank == 0:
            made = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=patience)
        port = tell_port(made.port if made is not None else 0)
        return made or dist.TCPStore(address, port, wait_for_workers=False, timeout=patience)
    except RuntimeError as error:
        raise TrainError(f"cannot meet at {address}: {_first_line(error)}") from None


def _sockets() -> set[str]:
    return {name for _, name in _open_sockets()}


def _descriptors(name: str) -> list[int]:
    return [descriptor for descriptor, other in _open_sockets() if other == name]


def _open_sockets() -> list[tuple[int, str]]:
    """This process's sockets: descriptors, and names that are given once."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if (name := os.readlink(entry)).startswith("socket:"):
                found.append((int(entry.name), name))
    return found


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].partition(". This is typically")[0]
