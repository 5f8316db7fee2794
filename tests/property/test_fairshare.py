"""What Fair Tree promises, whatever the tree: its order, its range, and what use does to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hpcsched.sched.fairshare import Branch, fair_tree

AMOUNTS = st.integers(0, 12).map(float)
SHARES = st.integers(0, 4)


@st.composite
def trees(draw: st.DrawFn) -> Branch:
    names = iter(range(1000))

    def account(depth: int) -> Branch:
        name = f"a{next(names)}" if depth else ""
        children = [
            Branch(account=name, user=f"u{next(names)}", shares=draw(SHARES), usage=draw(AMOUNTS))
            for _ in range(draw(st.integers(0, 3)))
        ]
        if depth < 3:
            children += [account(depth + 1) for _ in range(draw(st.integers(0, 2)))]
        usage = sum(child.usage for child in children)
        return Branch(account=name, shares=draw(SHARES), usage=usage, children=tuple(children))

    return account(0)


def users(branch: Branch) -> Iterator[tuple[str, str]]:
    if branch.user:
        yield branch.account, branch.user
    for child in branch.children:
        yield from users(child)


def accounts(branch: Branch) -> Iterator[Branch]:
    if not branch.user:
        yield branch
    for child in branch.children:
        yield from accounts(child)


def level_fs(child: Branch, parent: Branch) -> float:
    shares = sum(sibling.shares for sibling in parent.children)
    if not child.shares:
        return 0.0
    return float("inf") if not child.usage else (child.shares / shares) / (child.usage / parent.usage)


@given(trees())
def test_factors_are_ranks(root: Branch) -> None:
    factors = fair_tree(root)
    everybody = list(users(root))
    assert set(factors) == set(everybody)
    assert all(0.0 < factor <= 1.0 for factor in factors.values())
    if everybody:
        assert max(factors.values()) == 1.0
        for factor in factors.values():  # so many are before it: nobody's rank is better than his place
            assert round(factor * len(factors)) >= len(factors) - sum(other > factor for other in factors.values())


@given(trees())
def test_all_users_of_a_sibling_with_higher_level_fs_come_first(root: Branch) -> None:
    factors = fair_tree(root)
    for parent in accounts(root):
        for one in parent.children:
            for other in parent.children:
                if level_fs(one, parent) > level_fs(other, parent):
                    for first in users(one):
                        for second in users(other):
                            assert factors[first] > factors[second]


@given(trees(), st.integers(1, 50))
def test_who_uses_more_never_moves_up(root: Branch, more: int) -> None:
    """And of equals of one account who uses more does not come before who does not."""
    for user in list(users(root)):
        after = fair_tree(used_more(root, user, more))
        assert after[user] <= fair_tree(root)[user] + 1e-12


def used_more(branch: Branch, user: tuple[str, str], more: float) -> Branch:
    if branch.user:
        return replace(branch, usage=branch.usage + more) if (branch.account, branch.user) == user else branch
    children = tuple(used_more(child, user, more) for child in branch.children)
    return replace(branch, children=children, usage=sum(child.usage for child in children))
