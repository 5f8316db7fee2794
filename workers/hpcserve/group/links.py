"""Connections between the ranks of one generation: sums, hidden states, steps and results.

A *link* joins two ranks for one use: the leader's steps and the results (CONTROL), sums among the ranks of a stage (SUM), hidden
states from one stage to the next (HIDDEN). Ranks of one host share memory for sums; all else is TCP. Ranks that are threads use
local sockets. Does not know the model or the roster: it gets addresses, a key and a split.
Rules:
- Each rank sends its part of a sum to all, and adds all parts in the order of ranks in float32: all ranks have the same bits.
- A connection belongs to one generation: both ends prove a key that follows from it, so old messages arrive nowhere.
- Nothing waits without a limit, except a rank for its next step. `break_off` ends every wait at once, from any thread.
- A rank that waits spins briefly, because a sum takes microseconds, and then sleeps in `poll`.
- Sending never blocks a computation: what the kernel does not take at once leaves in a thread. (Sums send and receive at once.)
- A host that acknowledges nothing is cut off, whatever the ranks compute meanwhile: the kernel knows it first (`LinkWatch`).
Sources: Megatron-LM (two sums a layer); `hpctrain.peers` (proofs); `hpctrain.comm.shared_memory` (spin, then sleep).
"""

from __future__ import annotations

import enum
import json
import mmap
import os
import platform
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcserve.errors import GroupLost
from hpcserve.split import ModelSplit
from hpctrain.comm.hosts import MEET_S, NAP_S, TRY_S, Offer, reach, tune
from hpctrain.peers import keyed, prove_as_host, tunnel

STEP_LIMIT_S = 10.0  # the longest wait for another rank within a step
TOKENS_OF_LIMIT = 64  # a step of more tokens may take longer by this measure
SPINS = 60
POLL_S = 0.5
WATCH_S = 0.1
RETRANSMITS = 2  # of the bytes of struct tcp_info (linux/tcp.h): how often in vain since the last acknowledgement
RING_BYTES = 1 << 20
LINE_NUMBERS = 8  # each counter has its own cache line
COUNTERS_BYTES = 4 * 8 * LINE_NUMBERS
MEMORY_SPINS = 1000
MEMORY_NAP_S = 50e-6
MEMORY = Path("/dev/shm")  # noqa: S108  # names are random, and files are opened with O_EXCL
BUFFER_BYTES = 1 << 20
LENGTH = struct.Struct("<Q")
TENSOR_HEAD = struct.Struct("<IIII")  # dtype, rows, columns, number of the step
MOST_STEP_BYTES = 64 << 20
MOST_READY_BYTES = 1 << 16
MOST_TENSOR_BYTES = 4 << 30
HELLO = struct.Struct("<IIII")  # generation, use, the two ranks
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LinkUse(enum.IntEnum):
    """What a link is for."""

    CONTROL = 0
    SUM = 1
    HIDDEN = 2


class SharedRings:
    """Two rings of bytes, one for each direction, in memory that two ranks of one host share.

    Each counter has one writer. x86 keeps the order of stores, so bytes are there before the counter says so.
    """

    def __init__(self, memory: mmap.mmap, *, is_first: bool) -> None:
        counters, rings = memoryview(memory)[:COUNTERS_BYTES].cast("q"), memoryview(memory)[COUNTERS_BYTES:]
        self._counters = counters
        mine, other = (0, 1) if is_first else (1, 0)
        self._out, self._in = rings[mine * RING_BYTES :][:RING_BYTES], rings[other * RING_BYTES :][:RING_BYTES]
        self._written, self._taken = 2 * mine * LINE_NUMBERS, (2 * mine + 1) * LINE_NUMBERS  # of the ring that goes out
        self._filled, self._read = 2 * other * LINE_NUMBERS, (2 * other + 1) * LINE_NUMBERS

    def push(self, content: memoryview) -> int:
        """Write what there is room for; return the number of bytes."""
        written = self._counters[self._written]
        count = min(len(content), RING_BYTES - (written - self._counters[self._taken]))
        at = written % RING_BYTES
        first = min(count, RING_BYTES - at)
        self._out[at : at + first] = content[:first]
        self._out[: count - first] = content[first:count]
        self._counters[self._written] = written + count
        return count

    def pull(self, space: memoryview) -> int:
        """Read what is there; return the number of bytes."""
        read = self._counters[self._read]
        count = min(len(space), self._counters[self._filled] - read)
        if count == 0:
            return 0
        at = read % RING_BYTES
        first = min(count, RING_BYTES - at)
        space[:first] = self._in[at : at + first]
        space[first:count] = self._in[: count - first]
        self._counters[self._read] = read + count
        return count


class RankLink:
    """A stream of bytes in both directions between this rank and another one."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection, self.name = connection, name
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._rest: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.rings: SharedRings | None = None  # in place of the connection, whose end still counts
        self._resting = 0  # messages, or parts of them, that the thread has not sent
        self._lock = threading.Lock()
        self._sender: threading.Thread | None = None

    def push(self, content: memoryview) -> int:
        """Send what the kernel, or the other rank's ring, takes at once."""
        if self.rings is not None:
            return self.rings.push(content)
        try:
            return self.connection.send(content)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self.lost(error.strerror or "the connection broke") from None

    def pull(self, space: memoryview) -> int:
        """Receive what is there."""
        if self.rings is not None:
            return self.rings.pull(space)
        return self.pull_connection(space)

    def pull_connection(self, space: memoryview) -> int:
        """Receive what the kernel has. Raises GroupLost if the connection has ended."""
        try:
            count = self.connection.recv_into(space)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self.lost(error.strerror or "the connection broke") from None
        if count == 0 and len(space):
            raise self.lost("the connection ended")
        return count

    def post(self, *parts: bytes | memoryview) -> None:
        """Send a message without waiting: the rest of it leaves in a thread."""
        with self._lock:
            for part in parts:
                view = memoryview(part).cast("B")
                at = 0
                while not self._resting and at < len(view) and (count := self.push(view[at:])):
                    at += count
                if at < len(view):
                    self._resting += 1
                    self._rest.put(bytes(view[at:]))
                    self._begin_sender()

    def receive(self, space: memoryview, limit_s: float | None) -> None:
        """Fill `space`; None: wait as long as it takes."""
        has = spins = 0
        until_s = None if limit_s is None else time.monotonic() + limit_s
        while has < len(space):
            count = self.pull(space[has:])
            has += count
            spins = 0 if count else spins + 1
            if spins > SPINS:
                wait_for([self.connection], [])
                if until_s is not None and time.monotonic() > until_s:
                    raise self.lost(f"silent for {limit_s:g} s")

    def message(self, most_bytes: int, limit_s: float | None) -> bytearray:
        """Return the next message that `post` sent after its length."""
        head = bytearray(LENGTH.size)
        self.receive(memoryview(head), limit_s)
        (length,) = LENGTH.unpack(head)
        if length > most_bytes:
            raise self.lost(f"sent a message of {length} bytes, more than {most_bytes}")
        content = bytearray(length)
        self.receive(memoryview(content), STEP_LIMIT_S if limit_s is None else limit_s)
        return content

    def post_tensor(self, tensor: torch.Tensor, number: int) -> None:
        """Send a matrix of the step with this number."""
        rows, columns = tensor.shape
        head = TENSOR_HEAD.pack(DTYPES.index(tensor.dtype), rows, columns, number)
        self.post(head, bytes_of(tensor))

    def tensor(self, rows: int, number: int, limit_s: float) -> torch.Tensor:
        """Return the matrix of the step with this number, which has so many rows."""
        head = bytearray(TENSOR_HEAD.size)
        self.receive(memoryview(head), limit_s)
        dtype, its_rows, columns, its_number = TENSOR_HEAD.unpack(head)
        if dtype >= len(DTYPES) or (its_rows, its_number) != (rows, number):
            raise self.lost(f"sent {its_rows} rows of step {its_number} instead of {rows} of step {number}")
        if rows * columns * DTYPES[dtype].itemsize > MOST_TENSOR_BYTES:
            raise self.lost(f"sent a matrix of {rows} x {columns} numbers, which is too large")
        tensor = torch.empty(rows, columns, dtype=DTYPES[dtype])
        self.receive(bytes_of(tensor), limit_s)
        return tensor

    def break_off(self) -> None:
        """End the connection for both sides, at once."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the thread and the connection."""
        self.break_off()
        if self._sender is not None:
            self._rest.put(None)
            self._sender.join()
        self.connection.close()

    def lost(self, why: str) -> GroupLost:
        """Return the error that names the other rank."""
        return GroupLost(f"{self.name} is lost: {why}")

    def _begin_sender(self) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_rest, name="link sender", daemon=True)
            self._sender.start()

    def _send_rest(self) -> None:
        with suppress(GroupLost):  # whoever receives on this link gets the error, too
            while (content := self._rest.get()) is not None:
                at = 0
                while at < len(content):
                    if not (count := self.push(memoryview(content)[at:])):
                        wait_for([], [self.connection])
                    at += count
                with self._lock:
                    self._resting -= 1


def wait_for(to_read: Sequence[socket.socket], to_write: Sequence[socket.socket]) -> None:
    """Sleep until one of the sockets is ready, or for a moment."""
    poller = select.poll()
    wanted: dict[int, int] = {}
    for sockets, event in ((to_read, select.POLLIN), (to_write, select.POLLOUT)):
        for one in sockets:
            wanted[one.fileno()] = wanted.get(one.fileno(), 0) | event
    for descriptor, events in wanted.items():
        poller.register(descriptor, events)
    poller.poll(POLL_S * 1000)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")  # an empty view cannot be cast
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


# ----- sums


class StageSum:
    """Sums tensors over the ranks of a stage; `links` are those to other places in it."""

    def __init__(self, place: int, links: Mapping[int, RankLink], limit_s: float) -> None:
        self._place, self._limit_s = place, limit_s
        self._links = [links[at] for at in sorted(links)]
        self._parts: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.waited_s = 0.0  # for other ranks, in all sums
        self._in_memory = any(link.rings is not None for link in self._links)
        self._spins = MEMORY_SPINS if self._in_memory else SPINS

    def __call__(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks, the same bits on each of them."""
        mine = tensor.detach().to("cpu").contiguous().view(-1)
        parts = self._landing(mine)
        began_s = time.perf_counter()
        self._exchange(bytes_of(mine), [bytes_of(part) for part in parts])
        self.waited_s += time.perf_counter() - began_s
        parts = [*parts[: self._place], mine, *parts[self._place :]]
        total = parts[0].float() + parts[1].float()
        for part in parts[2:]:
            total += part.float()
        tensor.copy_(total.view(tensor.shape))

    def _landing(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return memory for the other ranks' parts; it is kept for the next sum of this size."""
        key = (mine.numel(), mine.dtype)
        if key not in self._parts:
            if len(self._parts) > 8:  # sizes of prompts vary
                self._parts.clear()
            self._parts[key] = [torch.empty_like(mine) for _ in self._links]
        return self._parts[key]

    def _exchange(self, mine: memoryview, theirs: Sequence[memoryview]) -> None:
        """Send `mine` to all and fill `theirs`, at once: nobody waits for a reader."""
        count = len(self._links)
        sent, got, whole = [0] * count, [0] * count, len(mine)
        spins, until_s = 0, time.monotonic() + self._limit_s
        while True:
            moved = False
            for at, link in enumerate(self._links):
                if sent[at] < whole and (now := link.push(mine[sent[at] :])):
                    sent[at], moved = sent[at] + now, True
                if got[at] < whole and (now := link.pull(theirs[at][got[at] :])):
                    got[at], moved = got[at] + now, True
            if sum(sent) + sum(got) == 2 * count * whole:
                return
            spins = 0 if moved else spins + 1
            if spins > self._spins:
                self._sleep(sent, got, whole, until_s)

    def _sleep(self, sent: Sequence[int], got: Sequence[int], whole: int, until_s: float) -> None:
        to_read = [link for at, link in enumerate(self._links) if got[at] < whole]
        to_write = [link for at, link in enumerate(self._links) if sent[at] < whole]
        if self._in_memory:
            time.sleep(MEMORY_NAP_S)
            for link in to_read:
                if link.rings is not None:
                    link.pull_connection(memoryview(bytearray(1)))  # only its end can come
        else:
            wait_for([link.connection for link in to_read], [link.connection for link in to_write])
        if time.monotonic() > until_s:
            raise (*to_read, *to_write)[0].lost(f"silent for {self._limit_s:g} s")


# ----- all links of a rank


def links_of(split: ModelSplit, rank: int) -> list[tuple[LinkUse, int]]:
    """Return the links that a rank has: their use, and the rank at the other end."""
    stage, place = split.place(rank)
    first = [sum(map(len, split.stages[:at])) for at in range(len(split.stages) + 1)]
    ranks = [range(start, start + len(parts)) for start, parts in zip(first, split.stages, strict=False)]
    control = range(1, split.size) if rank == 0 else [0]
    links = [(LinkUse.CONTROL, other) for other in control]
    links += [(LinkUse.SUM, other) for other in ranks[stage] if other != rank]
    if stage > 0:
        links.append((LinkUse.HIDDEN, ranks[stage - 1][place % len(ranks[stage - 1])]))
    if stage + 1 < len(ranks):
        after = ranks[stage + 1]
        links += [(LinkUse.HIDDEN, other) for at, other in enumerate(after) if at % len(ranks[stage]) == place]
    return links


class RankLinks:
    """What a rank exchanges with others in one generation."""

    def __init__(
        self, split: ModelSplit, rank: int, ends: Mapping[tuple[LinkUse, int], RankLink], limit_s: float = STEP_LIMIT_S
    ) -> None:
        self.split, self.rank, self._ends, self._limit_s = split, rank, dict(ends), limit_s
        self.stage, self.place = split.place(rank)
        first = rank - self.place
        sums = {other - first: end for (use, other), end in ends.items() if use is LinkUse.SUM}
        self._is_broken = False
        # A rank that is alone in its stage has nothing to sum, but leaves a broken generation in the middle of a step.
        self.reduce: Callable[[torch.Tensor], None] = StageSum(self.place, sums, limit_s) if sums else self._check
        hidden = {other: end for (use, other), end in ends.items() if use is LinkUse.HIDDEN}
        self._before = next((end for other, end in hidden.items() if other < rank), None)
        self._after = [end for other, end in sorted(hidden.items()) if other > rank]

    @property
    def waited_s(self) -> float:
        """The seconds in which this rank waited for others of its stage."""
        return self.reduce.waited_s if isinstance(self.reduce, StageSum) else 0.0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.stage == len(self.split.stages) - 1

    def last_stage(self) -> range:
        """Return the ranks of the last stage."""
        return range(self.split.size - len(self.split.stages[-1]), self.split.size)

    def send_step(self, content: bytes) -> None:
        """Send a step from the leader to all others."""
        for other in range(1, self.split.size):
            self.control(other).post(LENGTH.pack(len(content)), content)

    def next_step(self) -> bytes:
        """Wait for the leader's next step."""
        return bytes(self.control(0).message(MOST_STEP_BYTES, None))

    def send_hidden(self, hidden: torch.Tensor, number: int) -> None:
        """Send hidden states to the next stage."""
        for end in self._after:
            end.post_tensor(hidden.detach().to("cpu").contiguous(), number)

    def receive_hidden(self, tokens: int, number: int) -> torch.Tensor | None:
        """Return the hidden states of the stage before; None: this is the first stage."""
        return None if self._before is None else self._before.tensor(tokens, number, self._limit_for(tokens))

    def send_result(self, part: torch.Tensor, number: int) -> None:
        """Send logits, or hidden states, to the leader."""
        self.control(0).post_tensor(part.detach().to("cpu").contiguous(), number)

    def receive_result(self, rank: int, rows: int, number: int, tokens: int) -> torch.Tensor:
        """Return what a rank of the last stage sent to the leader, for a step of so many tokens."""
        return self.control(rank).tensor(rows, number, self._limit_for(tokens))

    def say_ready(self, measured: Sequence[Sequence[float]] = ()) -> None:
        """Tell the leader that this rank has loaded its part, and what it has measured."""
        said = json.dumps(list(measured)).encode() if measured else b""
        self.control(0).post(LENGTH.pack(len(said)), said)

    def await_ready(self) -> list[Any]:
        """Wait until all other ranks are ready; return what they have measured."""
        found: list[Any] = []
        for other in range(1, self.split.size):
            said = self.control(other).message(MOST_READY_BYTES, None)
            try:
                found += json.loads(said) if said else []
            except (ValueError, TypeError, RecursionError):
                raise self.control(other).lost("said something else than its measurements") from None
        return found

    def link_with(self, other: int) -> RankLink | None:
        """Return a link with another rank, the same on both ends; None: there is none."""
        return next((self._ends[use, other] for use in LinkUse if (use, other) in self._ends), None)

    def connections(self) -> dict[int, list[socket.socket]]:
        """Return the connections with each other rank."""
        found: dict[int, list[socket.socket]] = {}
        for (_, other), end in self._ends.items():
            found.setdefault(other, []).append(end.connection)
        return found

    def control(self, other: int) -> RankLink:
        """Return the link between leader and another rank."""
        return self._ends[LinkUse.CONTROL, other]

    def break_off(self) -> None:
        """End every wait of this rank and its peers with GroupLost; may be called by any thread."""
        self._is_broken = True
        for end in self._ends.values():
            end.break_off()

    def _limit_for(self, tokens: int) -> float:
        """Return the longest wait for another stage, which computes the whole step first."""
        return self._limit_s * (1 + tokens / TOKENS_OF_LIMIT)

    def _check(self, _: torch.Tensor) -> None:
        if self._is_broken:
            raise GroupLost("the generation is over")

    def close(self) -> None:
        """Free the links."""
        for end in self._ends.values():
            end.close()


def links_of_threads(split: ModelSplit, limit_s: float = STEP_LIMIT_S) -> list[RankLinks]:
    """Return the links of all ranks of a split, for ranks that are threads of this process."""
    ends: list[dict[tuple[LinkUse, int], RankLink]] = [{} for _ in range(split.size)]
    for rank in range(split.size):
        for use, other in links_of(split, rank):
            if rank < other:
                one, two = socket.socketpair()
                ends[rank][use, other] = RankLink(one, f"rank {other}")
                ends[other][use, rank] = RankLink(two, f"rank {rank}")
    return [RankLinks(split, rank, mine, limit_s) for rank, mine in enumerate(ends)]


# ----- links that are cut without a word


class LinkWatch:
    """Tells which rank's host does not acknowledge what was sent to it for `silent_s`.

    A busy or stopped rank does not matter: its kernel acknowledges. Encrypted connections cannot be watched.
    """

    def __init__(
        self, connections: Mapping[int, Sequence[socket.socket]], silent_s: float, on_cut: Callable[[int], None]
    ) -> None:
        self._connections, self._silent_s, self._on_cut = connections, silent_s, on_cut
        self._resending_since_s: dict[int, float] = {}
        self._looked_at_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link watch", daemon=True)

    def __enter__(self) -> LinkWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def cut_off(self, now_s: float) -> list[int]:
        """Return the ranks that are cut off now; call it again and again."""
        found = []
        if now_s - self._looked_at_s > self._silent_s:
            self._resending_since_s.clear()  # this process stood still
        self._looked_at_s = now_s
        for rank, connections in self._connections.items():
            if not any(map(is_resending, connections)):
                self._resending_since_s.pop(rank, None)
            elif now_s - self._resending_since_s.setdefault(rank, now_s) > self._silent_s:
                found.append(rank)
        return found

    def _run(self) -> None:
        while not self._over.wait(WATCH_S):
            for rank in self.cut_off(time.monotonic()):
                self._on_cut(rank)
                self._over.set()


def is_resending(connection: socket.socket) -> bool:
    """Return whether the kernel sends again because nothing was acknowledged in time."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[RETRANSMITS] > 0
    except OSError:  # closed, or not TCP
        return False


# ----- connecting


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """Where a rank listens, and its part of the keys of its connections."""

    addresses: tuple[str, ...]
    port: int
    secret: str
    host: str = ""  # ranks with the same host share memory; empty: they do not


class Meeting:
    """The ranks of a generation connect: the lower one of two accepts, the higher one calls."""

    def __init__(
        self,
        split: ModelSplit,
        ranks: Sequence[RankAddress],
        generation: int,
        key: bytes,
        *,
        encrypted: bool = False,
        is_given_up: Callable[[], bool] = lambda: False,
        on_unreached: Callable[[int], None] = lambda rank: None,
    ) -> None:
        """Prepare the meeting; `on_unreached` gets each rank that does not answer in time."""
        self._on_unreached = on_unreached
        self._split, self._ranks, self._generation = split, ranks, generation
        self._key, self._encrypted, self._is_given_up = key, encrypted, is_given_up

    def connect(self, rank: int, listener: socket.socket, limit_s: float = STEP_LIMIT_S) -> RankLinks:
        """Return the links of a rank.

        Raises:
            GroupLost: another rank cannot be reached, or the meeting is given up.
        """
        links = links_of(self._split, rank)
        until_s = time.monotonic() + MEET_S
        found: dict[tuple[LinkUse, int], RankLink] = {}
        expected = {self._hello(use, rank, other): (use, other) for use, other in links if other > rank}
        threads = [threading.Thread(target=self._accept, args=(listener, expected, found, until_s), name="meeting")]
        threads += [  # at once, so that one that does not answer takes no time from the others
            threading.Thread(target=self._reach, args=(use, other, rank, found, until_s), name="meeting")
            for use, other in links
            if other < rank
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ends = dict(found)
        missing = [other for use, other in links if (use, other) not in ends]
        if missing:
            for link in ends.values():
                link.close()
            if not self._is_given_up():
                for other in sorted(set(missing)):
                    self._on_unreached(other)
            raise GroupLost(f"cannot reach rank {missing[0]} at {self._ranks[missing[0]].addresses[0]}")
        try:
            self._share_memory(rank, ends, limit_s)
        except GroupLost:
            for link in ends.values():
                link.close()
            raise
        return RankLinks(self._split, rank, ends, limit_s)

    def _share_memory(self, rank: int, ends: Mapping[tuple[LinkUse, int], RankLink], limit_s: float) -> None:
        """Move sums between ranks of one host from connections to memory; the lower rank makes it."""
        host = self._ranks[rank].host
        for (use, other), link in sorted(ends.items()):
            if use is LinkUse.SUM and host and host == self._ranks[other].host and platform.machine() == "x86_64":
                (offer_memory if rank < other else accept_memory)(link, limit_s)

    def _hello(self, use: LinkUse, low: int, high: int) -> bytes:
        return HELLO.pack(self._generation, use, low, high)

    def _key_of(self, hello: bytes, low: int, high: int) -> bytes:
        """Return the key of a link: the run's key is part of it, the generation too."""
        return keyed(self._key, b"serve", hello, self._ranks[low].secret.encode(), self._ranks[high].secret.encode())

    def _is_over(self, until_s: float) -> bool:
        return self._is_given_up() or time.monotonic() > until_s

    def _accept(
        self,
        listener: socket.socket,
        expected: Mapping[bytes, tuple[LinkUse, int]],
        found: dict[tuple[LinkUse, int], RankLink],
        until_s: float,
    ) -> None:
        """Accept the expected connections; close others, and those of old generations."""
        listener.settimeout(NAP_S)
        while not set(expected.values()) <= found.keys() and not self._is_over(until_s):
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            peer.settimeout(TRY_S)
            with suppress(OSError):
                hello = peer.recv(HELLO.size, socket.MSG_WAITALL)
                if hello in expected and expected[hello] not in found:
                    use, other = expected[hello]
                    _, _, low, high = HELLO.unpack(hello)
                    session = prove_as_host(peer, self._key_of(hello, low, high), encrypted=self._encrypted)
                    if session is not None:
                        tune(peer)
                        found[use, other] = RankLink(tunnel(peer, session), f"rank {other}")
                        continue
            peer.close()

    def _reach(
        self, use: LinkUse, low: int, high: int, found: dict[tuple[LinkUse, int], RankLink], until_s: float
    ) -> None:
        """Connect to the lower rank."""
        hello, lower = self._hello(use, low, high), self._ranks[low]
        key = self._key_of(hello, low, high)
        offer = Offer(addresses=lower.addresses, port=lower.port, key=key, encrypted=self._encrypted)
        connection = reach(offer, until_s, self._is_given_up, hello)
        if connection is not None:
            found[use, low] = RankLink(connection, f"rank {low}")


def offer_memory(link: RankLink, limit_s: float) -> None:
    """Make memory for a link, and use it if the other rank can open it, too."""
    path = MEMORY / f"hpcserve-{os.urandom(12).hex()}"
    try:
        memory = mapped(path, os.O_CREAT | os.O_EXCL)
    except OSError:  # no such directory, or it is full
        memory = None
    name = path.name.encode() if memory is not None else b""
    try:
        link.post(LENGTH.pack(len(name)), name)
        answer = link.message(1, limit_s)
    finally:
        path.unlink(missing_ok=True)
    if memory is not None and answer == b"1":
        link.rings = SharedRings(memory, is_first=True)


def accept_memory(link: RankLink, limit_s: float) -> None:
    """Use the memory that the other rank has made, if it can be opened here."""
    name = bytes(link.message(64, limit_s)).decode(errors="replace")
    memory = None
    if name.startswith("hpcserve-") and "/" not in name:
        with suppress(OSError):
            memory = mapped(MEMORY / name, 0)
    link.post(LENGTH.pack(1), b"0" if memory is None else b"1")
    if memory is not None:
        link.rings = SharedRings(memory, is_first=False)


def mapped(path: Path, flags: int) -> mmap.mmap:
    """Return the memory of a file that only this user can open."""
    size = COUNTERS_BYTES + 2 * RING_BYTES
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        if flags:
            os.posix_fallocate(descriptor, 0, size)  # a full /dev/shm is an error here, not a signal later
        elif os.fstat(descriptor).st_size != size:
            raise OSError("it has another size")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
