"""The ring over sockets: exact sums, whoever begins when; a lost neighbour is told to who waits."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.base import Background
from hpctrain.comm.ring import split
from hpctrain.comm.tcp_ring import PIECE_BYTES, TcpRing
from hpctrain.errors import TrainError

PIECE = PIECE_BYTES // 4
LENGTHS = (1, 2, 5, 1000, PIECE - 1, 2 * PIECE + 3, 9 * PIECE)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def ring(size: int, pair: Callable[[], tuple[socket.socket, socket.socket]] = tcp_pair) -> Iterator[list[TcpRing]]:
    pairs = [pair() for _ in range(size)]  # pair i leads from rank i to the next
    rings = [TcpRing(rank, size, pairs[rank][0], pairs[rank - 1][1]) for rank in range(size)]
    yield rings
    for tcp_ring in rings:
        tcp_ring.close()


@settings(max_examples=10, deadline=None)
@given(
    st.integers(2, 5),
    st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
    st.randoms(),
    st.sampled_from([tcp_pair, socket.socketpair]),
)
def test_sums_are_the_same_bits_whichever_rank_begins_first(
    size: int,
    lengths: list[int],
    chance: random.Random,
    pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    flats = [[torch.randn(length, generator=generator) for length in lengths] for _ in range(size)]
    wanted = [sum(parts).tolist() for parts in zip(*[[f.double() for f in mine] for mine in flats], strict=True)]
    turns = [rank for rank in range(size) for _ in lengths]
    chance.shuffle(turns)
    with ring(size, pair) as rings:
        begun = [0] * size
        works = []
        for rank in turns:
            works.append(rings[rank].begin(flats[rank][begun[rank]]))
            begun[rank] += 1
        for work in works:
            work.wait()
    for at, want in enumerate(wanted):
        assert flats[0][at].tolist() == pytest.approx(want, abs=1e-5)
        assert all(torch.equal(mine[at], flats[0][at]) for mine in flats)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 1001, 5 * PIECE + 1])
def test_a_rank_may_get_its_part_alone_in_half_the_bytes_to_the_same_bits(size: int, length: int) -> None:
    flats = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    own = [flat.clone() for flat in flats]
    with ring(size) as rings:
        works = [tcp_ring.begin(part, own_part=True) for tcp_ring, part in zip(rings, own, strict=True)]
        works += [tcp_ring.begin(flat) for tcp_ring, flat in zip(rings, flats, strict=True)]
        for work in works:
            work.wait()
    for rank in range(size):
        assert torch.equal(split(own[rank], size)[rank], split(flats[rank], size)[rank])
        others = torch.cat([part for at, part in enumerate(split(own[rank], size)) if at != rank])
        whole = torch.cat([part for at, part in enumerate(split(flats[rank], size)) if at != rank])
        assert not others.numel() or not torch.equal(others, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
def test_other_kinds_of_numbers(dtype: torch.dtype) -> None:
    flats = [torch.arange(1000).to(dtype) * (rank + 1) for rank in range(3)]
    with ring(3) as rings:
        works = [tcp_ring.begin(flat) for tcp_ring, flat in zip(rings, flats, strict=True)]
        for work in works:
            work.wait()
    assert all(torch.equal(flat, torch.arange(1000).to(dtype) * 6) for flat in flats)


def test_halves_of_two_ranks_are_rounded_once_and_of_more_are_left_to_another_way() -> None:
    flats = [torch.full((9,), 256.0, dtype=torch.bfloat16), torch.full((9,), 1.0, dtype=torch.bfloat16)]
    wanted = (flats[0].float() + flats[1].float()).bfloat16()
    with ring(2) as rings:
        assert rings[0].sums(torch.bfloat16)
        for work in [tcp_ring.begin(flat) for tcp_ring, flat in zip(rings, flats, strict=True)]:
            work.wait()
    assert torch.equal(flats[0], wanted)
    assert torch.equal(flats[1], wanted)
    with ring(3) as rings:
        assert not rings[0].sums(torch.bfloat16)
        assert rings[0].sums(torch.float32)


def test_a_callback_after_a_sum_sees_the_sum() -> None:
    flats = [torch.ones(PIECE * 3), torch.ones(PIECE * 3)]
    seen: list[float] = []
    with ring(2) as rings:
        works = [
            rings[0].begin(flats[0], lambda: seen.append(float(flats[0].sum()))),
            rings[1].begin(flats[1]),
        ]
        for work in works:
            work.wait()
    assert seen == [6.0 * PIECE]


def test_waiting_for_a_lost_neighbour_fails_with_its_host() -> None:
    to_right, its_end = tcp_pair()
    from_left, left_end = tcp_pair()
    tcp_ring = TcpRing(0, 2, to_right, from_left)
    work = tcp_ring.begin(torch.ones(10))
    left_end.close()
    with pytest.raises(TrainError, match=r"the rank on 127.0.0.1 has ended; if .* it was killed"):
        work.wait()
    with pytest.raises(TrainError, match="ended"):
        tcp_ring.begin(torch.ones(10)).wait()
    tcp_ring.close()
    its_end.close()


def test_calls_in_the_background_keep_their_order_and_stop_at_the_first_that_fails() -> None:
    background = Background()
    made: list[int] = []

    def fail() -> None:
        raise ValueError("no disk")

    works = [background.begin(lambda: made.append(1)), background.begin(fail), background.begin(lambda: made.append(2))]
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(TrainError, match="cannot sum: ValueError.*no disk"):
            work.wait()
    background.close()
    assert made == [1]
