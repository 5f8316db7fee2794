"""Usage that is to count no more: an admin's word, ``hctl reset usage``, as ``sacctmgr modify ... set RawUsage=0``.

What ended jobs used becomes 0. What a running job has used until now is charged when it ends, and that cannot be taken out of
its clocks without telling them apart from what was held; so as much is written down as a debt the other way round. Both
decay alike, so their sum stays what is used from now on. Job records (hacct) are not touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hpcsched.api.identity import Asker
from hpcsched.controller.books import used_now
from hpcsched.errors import RequestError
from hpcsched.model.nearest import nearest
from hpcsched.sched.usage import Used, at, plus
from hpcsched.store.world import Transaction, World


def reset(tx: Transaction, asker: Asker, accounts: Sequence[str], users: Sequence[str]) -> list[tuple[str, str]]:
    """Have what these users used in these accounts, and those below them, count no more; empty: in all, of all.

    Return the associations that had used something.
    """
    asker.must_be_admin("reset what has been used")
    world = tx.world
    rows = used_now(world, tx.now_s)
    accounting = world.config.accounting
    _must_be("account", accounts, {account.name for account in accounting.accounts} | {row.account for row in rows})
    _must_be("user", users, _known_users(world, rows))
    found: dict[tuple[str, str], None] = {}
    for row in rows:
        if (accounts and not accounting.is_part_of(row.account, accounts)) or (users and row.user not in users):
            continue
        known = world.usage.get(row.key) or replace(row, amounts=())
        less = tuple((name, -amount) for name, amount in row.amounts)
        tx.put_usage(plus(at(known, tx.now_s, accounting.half_life_s), less))
        found[row.account, row.user] = None
    return list(found)


def _known_users(world: World, rows: Sequence[Used]) -> set[str]:
    accounting = world.config.accounting
    named = {user for account in accounting.accounts for user in account.users}
    return named | {rules.name for rules in accounting.users} | {row.user for row in rows}


def _must_be(what: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            there = ", ".join(sorted(filter(None, known))) or "none"
            raise RequestError(
                f"cannot reset the usage of {what} {name[:63]!r}: there is none{nearest(name, sorted(known))}; "
                f"known are {there}"
            )
