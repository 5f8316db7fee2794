"""Fair Tree's order and ties, and the classic formula's worked example (classic_fair_share.html of Slurm's documentation)."""

from __future__ import annotations

import math

import pytest

from hpcsched.model.accounting import Account, Accounting, Fairness, UserRules
from hpcsched.sched.fairshare import Branch, classic_factor, factors_of, fair_tree, share_usages

EXAMPLE = Accounting(
    accounts=(
        Account(name="A", shares=40),
        Account(name="D", parent="A", shares=30, users=("u1",)),
        Account(name="E", parent="A", shares=10, users=("u2", "u3")),
        Account(name="B", shares=60),
        Account(name="C", parent="B", shares=25, users=("u4",)),
        Account(name="F", parent="B", shares=35, users=("u5",)),
        Account(name="idle", shares=0, users=("nobody",)),
    ),
    fairness=Fairness.CLASSIC,
)
CHARGED = {
    ("D", "u1"): 0.2,
    ("E", "u2"): 0.25,
    ("E", "u3"): 0.0,
    ("C", "u4"): 0.25,
    ("F", "u5"): 0.0,
    ("idle", "nobody"): 0.3,
}


def test_the_classic_worked_example_to_six_digits() -> None:
    lines = {line.user: line for line in share_usages(EXAMPLE, CHARGED) if line.user}
    found = [lines[f"u{i}"] for i in range(1, 6)]
    assert [round(line.effective_usage, 4) for line in found] == [0.3875, 0.275, 0.15, 0.25, 0.1458]
    assert [round(line.norm_shares, 6) for line in found] == [0.3, 0.05, 0.05, 0.25, 0.35]
    assert [f"{line.fairshare:.6f}" for line in found] == ["0.408479", "0.022097", "0.125000", "0.500000", "0.749154"]


def test_damping_pulls_the_classic_factor_up_and_no_shares_give_none() -> None:
    assert classic_factor(0.25, 0.25) == 0.5
    assert classic_factor(0.25, 0.25, damping=2.0) == math.sqrt(0.5)
    assert classic_factor(0.1, 0.0) == 0.0


def user(account: str, name: str, usage: float, shares: int = 1) -> Branch:
    return Branch(account=account, user=name, usage=usage, shares=shares)


def account(name: str, *children: Branch, shares: int = 1) -> Branch:
    return Branch(account=name, shares=shares, usage=sum(child.usage for child in children), children=children)


def ranks(*children: Branch) -> dict[str, float]:
    factors = fair_tree(account("", *children))
    return {name: round(factor * len(factors), 6) for (_, name), factor in factors.items()}


def test_all_of_an_account_that_is_owed_more_come_first() -> None:
    light = account("light", user("light", "a", 9), user("light", "b", 1))
    heavy = account("heavy", user("heavy", "c", 0), user("heavy", "d", 90))
    assert ranks(heavy, light) == {"b": 4, "a": 3, "c": 2, "d": 1}


def test_shares_weigh_against_usage() -> None:
    assert ranks(user("", "a", 30, shares=4), user("", "b", 10, shares=1)) == {"a": 2, "b": 1}
    assert ranks(user("", "a", 50, shares=4), user("", "b", 10, shares=1)) == {"b": 2, "a": 1}
    assert ranks(user("", "none", 0, shares=0), user("", "much", 99)) == {"much": 2, "none": 1}


def test_equal_users_share_a_rank() -> None:
    assert ranks(user("", "a", 0), user("", "b", 0), user("", "c", 5)) == {"a": 3, "b": 3, "c": 1}


def test_equal_accounts_are_walked_as_one() -> None:
    one = account("one", user("one", "a", 8), user("one", "b", 2))
    two = account("two", user("two", "c", 6), user("two", "d", 4))
    assert ranks(one, two) == {"b": 4, "d": 3, "c": 2, "a": 1}


def test_of_accounts_walked_as_one_each_user_is_measured_against_his_own() -> None:
    one = account("one", user("one", "a", 8), user("one", "b", 2))
    two = account("two", user("two", "c", 12), user("two", "d", 8), shares=2)
    assert ranks(one, two) == {"b": 4, "d": 3, "c": 2, "a": 1}


def test_a_user_who_ties_with_an_account_has_its_best_user_s_rank() -> None:
    sub = account("sub", user("sub", "a", 8), user("sub", "b", 2))
    assert ranks(sub, user("", "x", 10), user("", "y", 11)) == {"x": 4, "b": 4, "a": 2, "y": 1}


def test_without_accounts_all_users_are_equals() -> None:
    factors = factors_of(Accounting(), {("", "ann"): 100.0, ("", "bob"): 0.0, ("", "cat"): 7.0})
    assert factors == {("", "bob"): 1.0, ("", "cat"): pytest.approx(2 / 3), ("", "ann"): pytest.approx(1 / 3)}


def test_who_left_an_account_keeps_no_shares_but_leaves_the_usage() -> None:
    lab = Accounting(
        accounts=(Account(name="p", users=("ann",)), Account(name="q", users=("bob",))), users=(UserRules(name="ann"),)
    )
    lines = share_usages(lab, {("p", "gone"): 50.0, ("q", "bob"): 10.0, ("closed", "old"): 5.0})
    found = {(line.account, line.user): (line.depth, line.shares, line.usage) for line in lines}
    assert found == {
        ("", ""): (0, 1, 65.0), ("closed", "old"): (1, 0, 5.0), ("p", ""): (1, 1, 50.0), ("p", "ann"): (2, 1, 0.0),
        ("p", "gone"): (2, 0, 50.0), ("q", ""): (1, 1, 10.0), ("q", "bob"): (2, 1, 10.0),
    }  # fmt: skip
    assert factors_of(lab, {("p", "gone"): 50.0, ("q", "bob"): 10.0})[("q", "bob")] == 1.0
