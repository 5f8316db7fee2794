"""Build accounts, users, QOS, licences and fair share from hpcsched.toml, checked.

Accounts name parents and users. Users name default accounts. Both name QOS. QOS name the QOS that
they may preempt. An unknown name, or a cycle of parents, is a ConfigError that lists the known
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcsched.config.account_keys import ACCOUNT, FAIRSHARE, LICENSES, QOS, USER
from hpcsched.config.keys import table_of, values_of
from hpcsched.config.kinds import BadValue
from hpcsched.errors import ConfigError
from hpcsched.model.accounting import Account, Accounting, Fairness, Limits, PreemptMode, Qos, UserRules
from hpcsched.model.ids import NODE_NAME
from hpcsched.model.node import Partition
from hpcsched.model.text import nearest

TABLES = ("fairshare", "accounts", "users", "qos", "licenses")


def accounting_of(path: Path, tables: Mapping[str, Any]) -> Accounting:
    """Return the accounting part of the `tables` of the file `path`. Raises ConfigError."""
    fairshare = values_of(path, "[fairshare]", tables.get("fairshare", {}), FAIRSHARE)
    accounting = Accounting(
        accounts=tuple(_account(path, *item) for item in _named(path, "accounts", tables)),
        users=tuple(_user(path, *item) for item in _named(path, "users", tables)),
        qos=tuple(_qos(path, *item) for item in _named(path, "qos", tables)),
        licenses=_licenses(path, tables),
        fairness=Fairness(fairshare["algorithm"]),
        half_life_s=fairshare["half_life"],
        damping=fairshare["damping"],
        billing=fairshare["billing"],
    )
    _check_accounts(path, accounting)
    _check_users(path, accounting)
    _check_qos(path, accounting)
    return accounting


def check_partitions(path: Path, accounting: Accounting, partitions: Iterable[Partition]) -> None:
    """Raise ConfigError for a partition that allows an unknown account or QOS."""
    accounts, qos = [account.name for account in accounting.accounts], [known.name for known in accounting.qos]
    for partition in partitions:
        where = f"[partitions.{partition.name}]"
        for name in partition.allow_accounts:
            _must_be(path, f"{where} allow_accounts", name, accounts, "account")
        for name in partition.allow_qos:
            _must_be(path, f"{where} allow_qos", name, qos, "QOS")


def limits_from(values: dict[str, Any]) -> Limits:
    """Remove the limits from the `values` of a table, and return them."""
    fields = {"max_wall": "max_wall_s"}
    known = {name: fields.get(name, name) for name in values if fields.get(name, name) in Limits.__dataclass_fields__}
    return Limits(**{field: values.pop(name) for name, field in known.items()})


def _named(path: Path, section: str, tables: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, table in table_of(path, f"[{section}]", tables.get(section, {})).items():
        if section != "users" and not NODE_NAME.match(name):
            raise ConfigError(
                f"cannot use {path}: [{section}] {name!r} is no name: letters, digits, _ and -, at most 63"
            )
        yield name, table


def _account(path: Path, name: str, table: Any) -> Account:
    values = values_of(path, f"[accounts.{name}]", table, ACCOUNT)
    values |= {"parent": values["parent"] or "", "default_qos": values["default_qos"] or ""}
    return Account(name=name, limits=limits_from(values), **values)


def _user(path: Path, name: str, table: Any) -> UserRules:
    values = values_of(path, f"[users.{name}]", table, USER)
    values |= {"default_account": values["default_account"] or "", "default_qos": values["default_qos"] or ""}
    shares = values.pop("shares")
    if isinstance(shares, tuple):
        values["account_shares"] = shares
    else:
        values["shares"] = shares
    return UserRules(name=name, limits=limits_from(values), **values)


def _qos(path: Path, name: str, table: Any) -> Qos:
    values = values_of(path, f"[qos.{name}]", table, QOS)
    mode = values.pop("preempt_mode")
    return Qos(name=name, limits=limits_from(values), preempt_mode=PreemptMode(mode) if mode else None, **values)


def _licenses(path: Path, tables: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    licenses = []
    for name, count in _named(path, "licenses", tables):
        try:
            licenses.append((name, LICENSES.kind(count)))
        except BadValue as error:
            raise ConfigError(f"cannot use {path}: [licenses] {name} = {count!r}: {error}") from None
    return tuple(licenses)


def _check_accounts(path: Path, accounting: Accounting) -> None:
    names = [account.name for account in accounting.accounts]
    for account in accounting.accounts:
        where = f"[accounts.{account.name}]"
        if account.parent:
            _must_be(path, f"{where} parent", account.parent, names, "account")
        seen = [account.name]
        above = accounting.account(account.parent)
        while above is not None:
            if above.name in seen:
                raise ConfigError(f"cannot use {path}: {where} is its own ancestor: {' in '.join([*seen, above.name])}")
            seen.append(above.name)
            above = accounting.account(above.parent)


def _check_users(path: Path, accounting: Accounting) -> None:
    for rules in accounting.users:
        where = f"[users.{rules.name}]"
        own = accounting.accounts_of(rules.name)
        if accounting.accounts and not own:
            raise ConfigError(f"cannot use {path}: {where}: no account has {rules.name} among its users")
        for name in (rules.default_account, *(name for name, _ in rules.account_shares)):
            if name:
                _must_be(path, where, name, own, "account of this user")


def _check_qos(path: Path, accounting: Accounting) -> None:
    names = [qos.name for qos in accounting.qos]
    for section, owners in (("accounts", accounting.accounts), ("users", accounting.users)):
        for owner in owners:
            for name in (*owner.qos, owner.default_qos):
                if name:
                    _must_be(path, f"[{section}.{owner.name}]", name, names, "QOS")
            if owner.qos and owner.default_qos and owner.default_qos not in owner.qos:
                raise ConfigError(f"cannot use {path}: [{section}.{owner.name}] default_qos is not among its qos")
    for qos in accounting.qos:
        for name in qos.preempt:
            _must_be(path, f"[qos.{qos.name}] preempt", name, names, "QOS")
        if qos.name in qos.preempt:
            raise ConfigError(f"cannot use {path}: [qos.{qos.name}] preempt names itself")
    _refuse_circles(path, accounting)


def _refuse_circles(path: Path, accounting: Accounting) -> None:
    """Raise ConfigError for QOS that preempt each other in a cycle.

    Their jobs could preempt each other endlessly.
    """
    below = {qos.name: qos.preempt for qos in accounting.qos}

    def walk(name: str, way: list[str]) -> None:
        if name in way:
            circle = " -> ".join([*way[way.index(name) :], name])
            raise ConfigError(f"cannot use {path}: the QOS preempt each other in a circle: {circle}")
        for lower in below.pop(name, ()):
            walk(lower, [*way, name])

    for name in list(below):
        walk(name, [])


def _must_be(path: Path, where: str, name: str, known: list[str], what: str) -> None:
    if name not in known:
        raise ConfigError(
            f"cannot use {path}: {where} names {name!r}, and there is no such {what}{nearest(name, known)}; "
            f"there are {', '.join(known) or 'none'}"
        )
