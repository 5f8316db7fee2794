"""Links between ranks: sums, hidden states, limits, and which connections are accepted. Ranks are threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcserve.errors import GroupLost
from hpcserve.group.links import (
    HELLO,
    MEMORY,
    LinkUse,
    LinkWatch,
    Meeting,
    RankAddress,
    RankLink,
    RankLinks,
    links_of,
    links_of_threads,
    offer_memory,
)
from hpcserve.split import ModelPart, ModelSplit, Span

PART = ModelPart(layers=Span(0, 1), kv_groups=Span(0, 1), ffn=Span(0, 1), vocab=Span(0, 1))


def split_of(*stages: int) -> ModelSplit:
    return ModelSplit(stages=tuple((PART,) * size for size in stages))


def on_all(links: list[RankLinks], call: Callable[[RankLinks], Any]) -> list[Any]:
    """Call something on every rank at once; the results by rank."""
    with ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(call, links))


def test_each_end_of_a_link_knows_the_other_one() -> None:
    for split in (split_of(1), split_of(3), split_of(1, 1, 1), split_of(2, 3), split_of(3, 1, 2)):
        ends = {(use, rank, other) for rank in range(split.size) for use, other in links_of(split, rank)}
        assert ends == {(use, other, rank) for use, rank, other in ends}
        later = {rank for use, rank, other in ends if use is LinkUse.HIDDEN and other < rank}
        assert later == set(range(len(split.stages[0]), split.size)), "each rank of a later stage gets hidden states"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 2048, 3_000_000])
def test_a_sum_has_the_same_bits_on_all_ranks(dtype: torch.dtype, length: int) -> None:
    links = links_of_threads(split_of(3))
    parts = [torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
    wanted = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)

    def summed(mine: RankLinks) -> torch.Tensor:
        tensor = parts[mine.rank].clone()
        mine.reduce(tensor)
        return tensor

    for tensor in on_all(links, summed):
        assert torch.equal(tensor, wanted)


def test_a_result_of_any_size_does_not_stop_its_sender() -> None:
    leader, last = links_of_threads(split_of(1, 1))
    hidden, logits = torch.randn(64, 50_000), torch.randn(3, 1_000_000)
    leader.send_hidden(hidden, 7)  # larger than what the kernel keeps
    last.send_result(logits, 6)
    received = last.receive_hidden(64, 7)
    assert received is not None
    assert torch.equal(received, hidden)
    assert torch.equal(leader.receive_result(1, 3, 6, 64), logits)
    for links in (leader, last):
        links.close()


def test_a_matrix_of_another_step_is_refused() -> None:
    leader, last = links_of_threads(split_of(1, 1))
    last.send_result(torch.zeros(1, 4), 5)
    with pytest.raises(GroupLost, match="rank 1 is lost: sent 1 rows of step 5 instead of 1 of step 6"):
        leader.receive_result(1, 1, 6, 1)


def test_a_silent_rank_is_lost_after_the_limit() -> None:
    links = links_of_threads(split_of(2), limit_s=0.01)
    with pytest.raises(GroupLost, match="rank 1 is lost: silent for 0.01 s"):
        links[0].reduce(torch.zeros(8))


def test_a_wait_without_limit_ends_when_it_is_broken_off() -> None:
    links = links_of_threads(split_of(2))
    errors: list[GroupLost] = []
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        with pytest.raises(GroupLost) as error:
            links[1].next_step()
        errors.append(error.value)

    waiter = threading.Thread(target=wait)
    waiter.start()
    is_waiting.wait()
    links[0].break_off()
    waiter.join()
    assert len(errors) == 1


class Met:
    """The ranks of a generation, each with a listener of its own."""

    def __init__(self, count: int, host: str = "") -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.ranks = [
            RankAddress(addresses=("127.0.0.1",), port=one.getsockname()[1], secret=f"secret of {rank}", host=host)
            for rank, one in enumerate(self.listeners)
        ]

    def connected(self, split: ModelSplit, *, keys: list[bytes], encrypted: bool = False) -> list[RankLinks]:
        def connect(rank: int) -> RankLinks:
            return Meeting(split, self.ranks, 4, keys[rank], encrypted=encrypted).connect(rank, self.listeners[rank])

        with ThreadPoolExecutor(split.size) as pool:
            return list(pool.map(connect, range(split.size)))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_ranks_meet_and_exchange_over_tcp(encrypted: bool) -> None:
    links = Met(3).connected(split_of(2, 1), keys=[b"key"] * 3, encrypted=encrypted)
    links[0].send_step(b"a step")
    assert [links[rank].next_step() for rank in (1, 2)] == [b"a step"] * 2

    def summed(mine: RankLinks) -> float:
        tensor = torch.full((9,), float(mine.rank + 1))
        mine.reduce(tensor)
        return tensor.sum().item()

    assert on_all(links[:2], summed) == [27.0, 27.0]
    links[0].send_hidden(torch.ones(2, 3), 1)
    assert links[2].receive_hidden(2, 1) is not None
    for one in links:
        one.close()


def test_connections_of_strangers_and_old_generations_are_closed() -> None:
    met = Met(2)
    old = socket.create_connection(met.listeners[0].getsockname())
    old.sendall(HELLO.pack(3, LinkUse.CONTROL, 0, 1))
    stranger = socket.create_connection(met.listeners[0].getsockname())
    stranger.sendall(HELLO.pack(4, LinkUse.CONTROL, 0, 1) + bytes(48))  # no key
    links = met.connected(split_of(2), keys=[b"key"] * 2)
    assert old.recv(1) == b""
    links[0].send_step(b"ours")
    assert links[1].next_step() == b"ours"
    for one in links:
        one.close()
    for connection in (old, stranger):
        connection.close()


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    met = Met(2)
    met.listeners[0].close()
    with pytest.raises(GroupLost, match=r"cannot reach rank 0 at 127\.0\.0\.1"):
        Meeting(split_of(2), met.ranks, 1, b"key", is_given_up=lambda: True).connect(1, met.listeners[1])


def test_ranks_that_do_not_answer_in_time_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcserve.group.links.MEET_S", 0.2)
    met, unreached = Met(3), list[int]()
    deaf = socket.create_server(("127.0.0.1", 0))
    ranks = [replace(met.ranks[0], port=deaf.getsockname()[1]), *met.ranks[1:]]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(Meeting(split_of(3), ranks, 1, b"key").connect, 1, met.listeners[1])
        meeting = Meeting(split_of(3), ranks, 1, b"key", on_unreached=unreached.append)
        with pytest.raises(GroupLost, match="cannot reach rank 0"):
            meeting.connect(2, met.listeners[2])
        with pytest.raises(GroupLost, match="cannot reach rank 0"):
            second.result()
    assert unreached == [0], "rank 1 was reached although rank 0 took all the time"
    deaf.close()


class ResendingSocket:
    """A connection whose kernel has sent again so many times."""

    def __init__(self, *times: int) -> None:
        self._times = iter(times)

    def getsockopt(self, level: int, name: int, length: int) -> bytes:
        return bytes([1, 0, next(self._times), *bytes(5)])


def test_a_rank_is_cut_off_after_the_kernel_resends_in_vain_for_long() -> None:
    connections: Any = {1: [ResendingSocket(0, 1, 2, 0, 1, 2, 3)], 2: [ResendingSocket(*[0] * 7)]}
    watch = LinkWatch(connections, 1.0, lambda rank: None)
    found = [watch.cut_off(now_s) for now_s in (0.0, 0.5, 1.4, 1.6, 2.0, 2.9, 3.1)]
    assert found == [[], [], [], [], [], [], [1]]


def test_a_process_that_stood_still_cuts_nobody_off() -> None:
    connections: Any = {1: [ResendingSocket(1, 1, 1)]}
    watch = LinkWatch(connections, 1.0, lambda rank: None)
    assert [watch.cut_off(now_s) for now_s in (5.0, 7.0, 7.9)] == [[], [], []]


def test_connections_that_are_not_tcp_are_not_watched() -> None:
    one, other = socket.socketpair()
    assert not LinkWatch({1: [one]}, 0.0, lambda rank: None).cut_off(1.0)
    one.close()
    other.close()


def test_ranks_of_one_host_sum_in_memory_that_has_no_name_afterwards() -> None:
    links = Met(3, host="this one").connected(split_of(3), keys=[b"key"] * 3)
    assert not list(MEMORY.glob("hpcserve-*"))

    def summed(mine: RankLinks) -> list[bool]:
        found = []
        for length in (3, 2048, 600_000):  # the last is larger than a ring
            tensor = torch.full((length,), float(mine.rank + 1))
            mine.reduce(tensor)
            found.append(bool((tensor == 6.0).all()))
        return found

    assert on_all(links, summed) == [[True] * 3] * 3
    links[2].break_off()
    with pytest.raises(GroupLost, match="rank 2 is lost"):
        links[0].reduce(torch.zeros(8))
    for one in links:
        one.close()


def test_ranks_that_cannot_share_memory_sum_over_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcserve.group.links.MEMORY", Path("/no/such/directory"))
    links = Met(2, host="this one").connected(split_of(2), keys=[b"key"] * 2)

    def summed(mine: RankLinks) -> float:
        tensor = torch.ones(4)
        mine.reduce(tensor)
        return tensor.sum().item()

    assert on_all(links, summed) == [8.0, 8.0]
    for one in links:
        one.close()


def test_memory_that_the_other_rank_does_not_take_has_no_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcserve.group.links.MEMORY", tmp_path)
    ends = socket.socketpair()
    link, other = (RankLink(end, "rank 1") for end in ends)
    other.break_off()
    with pytest.raises(GroupLost, match="rank 1 is lost"):
        offer_memory(link, 1.0)
    assert not list(tmp_path.iterdir())
    for one in (link, other):
        one.close()
