"""A group of ranks that may be lost and join.

A ring of TCP connections, made for every generation.

The roster (`hpctrain.elastic`) chooses the members of a generation.  Before `rendezvous` a member is alone.  All collectives
are made of the sum: gathered or broadcast bytes are added to the zeros of the other members.
Rules: an exchange with a lost member raises `PeerLost` on every other one, as soon as the roster misses it.  Partial sums are
discarded.  The next `rendezvous` is with the remaining members.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from hpctrain.comm.base import Background, BucketPlan, Plain, Work, check_contiguous, done, gather_over
from hpctrain.comm.hosts import MEET_S, Offer, await_left, bound_store, own_addresses, reach
from hpctrain.comm.ring import HALVES
from hpctrain.comm.tcp_ring import TcpRing
from hpctrain.elastic.member import Membership
from hpctrain.elastic.roster import Message, members_of
from hpctrain.errors import EXIT_FAILED, PeerLost, TrainError
from hpctrain.peers import encryption_wanted, keyed

# ----- a Gloo group for one generation of an elastic run
# Gloo notices a peer that dies, but nothing wakes a rank that waits for a silent peer, not even its `abort`.  Shutting down the
# connections does; these are the sockets that were opened with the group.
# Rules: each generation has a new store, on its first rank, so that an address of an earlier one is never read.


FOR_EVER = timedelta(days=365)  # the roster detects silent peers


class GlooGroup:
    """The Gloo group of one generation, for CPU tensors."""

    def __init__(self, rank: int, size: int, store: dist.Store, own_address: str, patience_s: float) -> None:
        before = _sockets()
        gloo: Any = dist.ProcessGroupGloo  # missing in torch's stubs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=patience_s)  # until all have joined
        try:
            self._group = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise TrainError(f"cannot make a group over gloo: {_first_line(error)}") from None
        self._sockets = _sockets() - before
        self._store = store  # must live as long as the group

    def begin(self, flat_L: torch.Tensor, then: Callable[[], None] | None = None) -> Work:
        """Sum over all ranks, in place, by Gloo's threads; `then` is called in `wait`."""
        asked = dist.AllreduceOptions()
        asked.timeout = FOR_EVER
        try:
            return _GlooWork(self._group.allreduce([flat_L], asked), then)
        except RuntimeError as error:
            raise TrainError(f"cannot sum over gloo: {_first_line(error)}") from None

    def break_off(self) -> None:
        """Make all current sums fail; may be called by any thread."""
        for name in self._sockets & _sockets():
            for descriptor in _descriptors(name):
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # listening sockets have no peer: Gloo aborts if they end
                    connection.shutdown(socket.SHUT_RDWR)


class _GlooWork(Work):
    """A sum by Gloo."""

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


def store_for(rank: int, address: str, share_port: Callable[[int], int], patience_s: float) -> dist.Store:
    """Create the store of a generation on its first rank, or connect to it.

    `share_port` broadcasts the port of the first rank.

    Raises:
        TrainError: the store cannot be reached.
    """
    patience = timedelta(seconds=patience_s)
    made = None
    try:
        if rank == 0:
            made = bound_store(address, None, patience)
        port = share_port(made.port if made is not None else 0)
        return made or dist.TCPStore(address, port, wait_for_workers=False, timeout=patience)
    except (OSError, RuntimeError) as error:
        raise TrainError(f"cannot meet at {address}: {_first_line(error)}") from None


def _sockets() -> set[str]:
    return {name for _, name in _open_sockets()}


def _descriptors(name: str) -> list[int]:
    return [descriptor for descriptor, other in _open_sockets() if other == name]


def _open_sockets() -> list[tuple[int, str]]:
    """Return this process's sockets: descriptors, and unique names."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if (name := os.readlink(entry)).startswith("socket:"):
                found.append((int(entry.name), name))
    return found


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". This is typically")[0]


BUCKET_BYTES = 4 << 20


class ElasticCommunicator(Plain):
    """This member's part in the current generation."""

    name = "members"
    elastic = True

    def __init__(self, membership: Membership, *, by_gloo: bool = False) -> None:
        self.membership = membership
        self._by_gloo = by_gloo
        self._group: GlooGroup | None = None
        self.generation = -1
        self.rank, self.size = 0, 1  # alone
        self._listener = socket.create_server(("", 0), backlog=64)
        self._secret = os.urandom(16)
        self._encrypted = encryption_wanted(os.environ)
        if self._encrypted and by_gloo:
            raise TrainError(
                "cannot encrypt over gloo, whose connections are its own: leave out --backend gloo, or HPCTRAIN_ENCRYPT"
            )
        self._tcp_ring: TcpRing | None = None
        self._background = Background()
        self._failed = False  # an exchange of this generation failed

    @property
    def changing(self) -> bool:
        """Whether the roster wants a new generation after this step."""
        return self.membership.changing

    @changing.setter
    def changing(self, wanted: bool) -> None:
        self.membership.changing = wanted

    def rendezvous(self) -> None:
        """Leave the current generation for the next one; rank and size may change."""
        if self.generation < 0:
            port = self._listener.getsockname()[1]
            addresses = [self.membership.host, *own_addresses()]
            self.membership.ready({"addresses": addresses, "port": port, "secret": self._secret.hex()})
        while True:
            if self.generation >= 0:
                self._cut()
                self.membership.leave_generation(self.generation, failed=self._failed)
            self._failed = False
            news = self.membership.next_generation()
            members = members_of(news)
            self.generation = cast(int, news["generation"])
            self.size = len(members)
            self.rank = [member["number"] for member in members].index(self.membership.number)
            if self._connect(members):
                return
            self._failed = True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all members, in place."""
        self.begin(tensor).wait()

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """Sum in the background."""
        check_contiguous(tensor)
        if self.size == 1 or tensor.numel() == 0:
            if then is not None:
                then()
            return done()
        assert self._tcp_ring is not None
        flat = tensor.detach().view(-1)
        if self._group is not None and flat.device.type == "cpu":
            return _WatchedWork(self._group.begin(flat, then), self._note_failure)
        if flat.device.type == "cpu" and self._tcp_ring.sums(flat.dtype):
            return _WatchedWork(self._tcp_ring.begin(flat, then), self._note_failure)
        wide = flat.to("cpu", torch.float32 if flat.dtype in HALVES else flat.dtype)
        return _WatchedWork(self._tcp_ring.begin(wide, lambda: _narrow(wide, flat, then)), self._note_failure)

    def _note_failure(self) -> None:
        self._failed = True

    def run(self, call: Callable[[], None]) -> Work:
        """Run a call with collectives in a thread."""
        return self._background.begin(call)

    def bucket_plan(self) -> BucketPlan:
        """Return buckets that use a slow link early."""
        return BucketPlan(bucket_bytes=BUCKET_BYTES, beside=True)

    def report_step(self, step: int, step_s: float) -> None:
        """Report a step to the roster; only the first rank counts useful seconds."""
        self.membership.report_step(step, step_s if self.rank == 0 else 0.0)

    def describe(self) -> list[str]:
        """Return the generation and the number of members as text."""
        how = "over gloo" if self._group is not None else "in a ring of TCP connections"
        return [f"generation {self.generation}: {self.size} members {how}"]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copy the tensor of `root` to every rank."""
        check_contiguous(tensor)
        flat = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
        if self.rank != root:
            flat.zero_()
        self.all_reduce(flat)

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return every rank's piece for this one."""
        lengths = torch.zeros(self.size, self.size, dtype=torch.int64)
        lengths[self.rank] = torch.tensor([piece.numel() for piece in pieces])
        self.all_reduce(lengths)
        parts = self.all_gather(torch.cat(pieces), lengths.sum(dim=1).tolist())
        return [part.split(lengths[rank].tolist())[self.rank] for rank, part in enumerate(parts)]

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Return every rank's piece."""
        whole = torch.zeros(sum(lengths), dtype=torch.uint8)
        parts = list(whole.split(lengths))
        parts[self.rank].copy_(piece)
        self.all_reduce(whole)
        return parts

    def barrier(self) -> None:
        """Wait until every member has called it."""
        self.all_reduce(torch.zeros(1))

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's value, by rank."""
        return gather_over(self, value)

    def abort(self, code: int) -> None:
        """End this process, and the run with it."""
        self.membership.failed(f"rank {self.rank} of {self.size} failed, see above")
        os._exit(code)

    def turn_away(self, why: str) -> None:
        """End this process, which does not fit the run; its slot stays empty."""
        self.membership.report_misfit(why)
        os._exit(EXIT_FAILED)

    def close(self) -> None:
        """Leave the run, which is done."""
        self.membership.done()
        self._cut()
        self._background.close()
        self._listener.close()

    def _cut(self) -> None:
        self.membership.unwatch()
        tcp_ring, self._tcp_ring = self._tcp_ring, None
        group, self._group = self._group, None
        if group is not None:
            group.break_off()
        if tcp_ring is not None:
            tcp_ring.break_off()
            tcp_ring.close()
            self._background.close()
            self._background = Background()

    def _connect(self, members: list[Message]) -> bool:
        """Connect the ring; return whether that succeeded."""
        if self.size == 1:
            return True
        left, right = members[self.rank - 1], members[(self.rank + 1) % self.size]
        until_s = time.monotonic() + MEET_S
        found: list[socket.socket] = []
        mine = self._offer(members[self.rank], left)
        is_broken = lambda: self.membership.is_broken(self.generation)  # noqa: E731
        waiter = threading.Thread(target=await_left, args=(self._listener, mine, until_s, found, is_broken))
        waiter.start()
        peer = reach(self._offer(right, members[self.rank]), until_s, is_broken)
        waiter.join()
        if peer is None or not found:
            for connection in (peer, *found):
                if connection is not None:
                    connection.close()
            return False
        self._tcp_ring = TcpRing(self.rank, self.size, to_right=peer, from_left=found[0])
        self.membership.watch(self.generation, self._tcp_ring.break_off)
        return not self._by_gloo or self._make_group(members)

    def _make_group(self, members: list[Message]) -> bool:
        """Make the Gloo group that sums instead of the ring; return whether that succeeded."""
        assert self._tcp_ring is not None
        tcp_ring, until_s = self._tcp_ring, time.monotonic() + MEET_S
        hosts = [cast("list[str]", member["addresses"])[0] for member in members]
        try:
            store = store_for(self.rank, hosts[0], lambda port: self.all_gather_object(port)[0], MEET_S)
            left_s = max(0.1, until_s - time.monotonic())
            group = GlooGroup(self.rank, self.size, store, hosts[self.rank], left_s)
        except TrainError:  # as if the ring failed: the next generation tries again
            return False
        self._group = group

        def break_off() -> None:
            tcp_ring.break_off()
            group.break_off()

        self.membership.watch(self.generation, break_off)
        return True

    def _offer(self, host: Message, guest: Message) -> Offer:
        """Return the address of `host`, and the key of it and `guest` in this generation.

        The run's key is part of it, so that a listener of the roster does not have it.
        """
        seed = f"{host['secret']}.{guest['secret']}.{self.generation}".encode()
        key = keyed(self.membership.key, b"ring", seed)
        addresses = cast("list[str]", host["addresses"])
        return Offer(addresses=tuple(addresses), port=cast(int, host["port"]), key=key, encrypted=self._encrypted)


class _WatchedWork(Work):
    """A sum that fails when a member is lost."""

    def __init__(self, work: Work, on_failure: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._on_failure = work, on_failure

    def wait(self) -> None:
        try:
            self._work.wait()
        except TrainError as error:
            self._on_failure()
            raise PeerLost(str(error)) from None


def _narrow(wide: torch.Tensor, flat: torch.Tensor, then: Callable[[], Any] | None) -> None:
    flat.copy_(wide)
    if then is not None:
        then()
