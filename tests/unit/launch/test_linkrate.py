"""Whose link is how fast, of transfers between pairs."""

from __future__ import annotations

import itertools

from hpcsched.launch.visit import link_rates
from hpcsched.model.ids import NodeName

A, B, C, D = (NodeName(name) for name in "abcd")


def rates_of(links: dict[NodeName, int], names: list[NodeName], others: list[NodeName]) -> dict[NodeName, int]:
    """Return what is found where a transfer is as fast as the slower of two links."""
    return link_rates(names, others, lambda giver, taker: min(links[giver], links[taker]))


def test_every_link_is_found_as_fast_as_it_is() -> None:
    links = {A: 1000, B: 100, C: 1000, D: 100}
    for names in itertools.permutations(links):
        assert rates_of(links, list(names), []) == links


def test_no_two_are_together_twice() -> None:
    tried = []
    link_rates([A, B, C, D], [], lambda giver, taker: tried.append({giver, taker}) or 7)
    assert len(tried) == 6
    assert all(tried.count(pair) == 1 for pair in tried)


def test_a_slow_neighbour_is_not_held_against_a_node() -> None:
    names = [NodeName(name) for name in "abcdefgh"]
    many = dict.fromkeys(names, 100) | {names[0]: 1000, names[2]: 1000, names[5]: 800}  # who is between slow ones
    assert rates_of(many, names, []) == many


def test_one_alone_is_measured_with_some_of_the_others() -> None:
    assert rates_of({A: 1000, B: 100, C: 900}, [A], [B, C]) == {A: 900}
    tried = []

    def measure(giver: NodeName, taker: NodeName) -> int:
        tried.append(taker)
        return 5

    assert link_rates([A], [B, C, D, NodeName("e")], measure) == {A: 5}
    assert tried == [B, C, D]


def test_who_could_not_be_measured_has_no_rate() -> None:
    assert link_rates([A, B], [], lambda giver, taker: 0) == {}
    broken = {A: 1000, B: 1000, C: 0}
    assert rates_of(broken, [A, B, C], []) == {A: 1000, B: 1000}
