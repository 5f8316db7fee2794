"""Shares of unequal ranks: they finish together, follow a change, and leave out who only delays."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.env import node_speed
from hpctrain.exchange.balance import Balance, best_shares, start_weights

LINES = st.tuples(st.floats(0.0, 2.0), st.floats(0.001, 1.0))


def longest(counts: list[int], lines: list[tuple[float, float]]) -> float:
    return max(a + c * n for n, (a, c) in zip(counts, lines, strict=True) if n)


@given(st.integers(1, 12), st.lists(LINES, min_size=1, max_size=3))
def test_no_other_division_ends_sooner(batch: int, lines: list[tuple[float, float]]) -> None:
    counts = best_shares(batch, lines)
    assert sum(counts) == batch
    others = (list(n) for n in itertools.product(range(batch + 1), repeat=len(lines)) if sum(n) == batch)
    assert longest(counts, lines) <= min(longest(other, lines) for other in others) * (1 + 1e-9)


def run(balance: Balance, lines: list[tuple[float, float]], steps: int) -> list[str]:
    said = []
    for _ in range(steps):
        said.append(balance.note([a + c * n if n else 0.0 for n, (a, c) in zip(balance.counts, lines, strict=True)]))
    return [line for line in said if line]


def test_a_rank_of_a_third_of_the_speed_gets_a_quarter() -> None:
    balance = Balance(32, [16, 16])
    said = run(balance, [(0.0, 0.01), (0.0, 0.03)], 3)
    assert balance.counts == [24, 8]
    assert said == ["shares 24 8: a step takes 240 ms instead of 480"]


def test_shares_follow_a_slowdown_within_five_steps() -> None:
    balance = Balance(32, [16, 16])
    run(balance, [(0.01, 0.01), (0.01, 0.01)], 20)
    assert balance.counts == [16, 16]
    run(balance, [(0.01, 0.01), (0.03, 0.03)], 5)
    assert longest(balance.counts, [(0.01, 0.01), (0.03, 0.03)]) < 0.28  # 0.51 as before, 0.265 at best


def test_one_odd_step_changes_nothing() -> None:
    balance = Balance(32, [16, 16])
    run(balance, [(0.0, 0.01), (0.0, 0.01)], 10)
    run(balance, [(0.0, 0.01), (0.0, 0.5)], 1)
    run(balance, [(0.0, 0.01), (0.0, 0.01)], 10)
    assert balance.counts == [16, 16]


def test_a_rank_that_only_delays_gets_no_samples_and_is_named() -> None:
    balance = Balance(8, [4, 4])
    said = run(balance, [(0.0, 0.01), (0.0, 1.0)], 4)
    assert balance.counts == [8, 0]
    assert said[-1].endswith("rank 1 is left out, it would make the others wait")


def test_a_rank_that_was_slow_for_a_while_takes_part_again() -> None:
    balance = Balance(8, [4, 4])
    run(balance, [(0.0, 0.01), (0.0, 1.0)], 4)
    said = run(balance, [(0.0, 0.01), (0.0, 0.01)], 1300)
    assert said[0] == "shares 7 1: rank 1, which was left out, is tried again"
    assert balance.counts == [4, 4]


def test_retrying_a_slow_rank_costs_almost_nothing() -> None:
    lines = [(0.0, 0.01), (0.0, 1.0)]
    balance = Balance(8, [4, 4])
    run(balance, lines, 4)
    spent_s, said = 0.0, []
    for _ in range(5000):
        spent_s += longest(balance.counts, lines)
        said += run(balance, lines, 1)
    assert balance.counts == [8, 0]
    assert sum("tried again" in line for line in said) == sum("is left out" in line for line in said) == 3
    assert spent_s < 1.03 * 5000 * 0.08


def test_noise_moves_nothing() -> None:
    balance = Balance(32, [16, 16])
    for turn in range(50):
        assert not balance.note([0.16 * (1 + 0.01 * (turn % 3)), 0.16 * (1 - 0.01 * (turn % 2))])


@pytest.mark.parametrize("fixed_s", [0.0, 0.5])
def test_the_fixed_part_is_learned_once_shares_have_moved(fixed_s: float) -> None:
    balance = Balance(40, [20, 20])
    run(balance, [(fixed_s, 0.01), (0.0, 0.05)], 12)
    best = best_shares(40, [(fixed_s, 0.01), (0.0, 0.05)])
    assert longest(balance.counts, [(fixed_s, 0.01), (0.0, 0.05)]) <= 1.05 * longest(
        best, [(fixed_s, 0.01), (0.0, 0.05)]
    )


# ----- the shares before anything is measured


@pytest.mark.parametrize(
    ("batch", "speeds", "weights"),
    [
        (12, (2.0, 1.0), (2.0, 1.0)),
        (12, (0.91, 0.455, 0.91), (0.91, 0.455, 0.91)),
        (12, (1.0, 1.02), ()),  # not worth another order of the sums
        (12, (1.0, 0.0), ()),  # a node that was not measured
        (12, (1.0, 200.0), ()),
        (12, (1.0, float("nan")), ()),
        (12, (1.0, float("inf")), ()),
        (12, (1.0, -1.0), ()),
        (4, (9.0, 1.0), ()),  # the second rank would have no sample
        (12, (1.0,), ()),
        (12, (), ()),
    ],
)
def test_shares_begin_by_the_speeds_of_nodes_that_make_sense(
    batch: int, speeds: tuple[float, ...], weights: tuple[float, ...]
) -> None:
    assert start_weights(batch, speeds) == weights


SPEEDS = "n1=0.91,n2=4.5e-1,long=" + "1" * 40 + ",odd=inf,none=,zero=0,minus=-3,no=1_0x,=5"


@pytest.mark.parametrize(
    ("name", "speed"),
    [("n1", 0.91), ("n2", 0.45), *((bad, 0.0) for bad in ("n3", "long", "odd", "none", "zero", "minus", "no", ""))],
)
def test_a_rank_reads_the_speed_of_its_node(name: str, speed: float) -> None:
    assert node_speed({"HPCSCHED_NODE_SPEEDS": SPEEDS, "HPCSCHED_NODENAME": name}, "host") == speed
    under_mpi = {"HPCSCHED_NODE_SPEEDS": SPEEDS, "HPCSCHED_NODENAME": "n1", "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert node_speed(under_mpi, f"{name}.lab") == speed  # mpirun gave it the environment of another node
    assert node_speed({"HPCSCHED_NODE_SPEEDS": SPEEDS * 1000, "HPCSCHED_NODENAME": name}, "host") == 0.0
