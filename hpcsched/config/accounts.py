"""Read accounts, users, QOS, licences and limits of hpcsched.toml.

Accounts name parents and users. Users name default accounts. Both name QOS. QOS name the QOS that they may preempt. An unknown
name, or a cycle of parents, is a ConfigError that lists the known names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcsched.config.keys import (
    PARTITION,
    SECTIONS,
    USER_NAME,
    WEIGHTS,
    BadValue,
    Key,
    memory_mib,
    number,
    one_of,
    optional,
    seconds,
    table_of,
    time_limit,
    users,
    values_of,
    whole,
    word,
    words,
)
from hpcsched.errors import ConfigError
from hpcsched.model.accounting import (
    BILLING,
    CPU,
    EVERYBODY,
    GPU,
    LICENSE,
    MEM,
    NODE,
    TOKENS,
    Account,
    Accounting,
    Fairness,
    Limits,
    PreemptMode,
    Qos,
    Tres,
    UserRules,
)
from hpcsched.model.ids import NODE_NAME
from hpcsched.model.node import Partition
from hpcsched.model.units import nearest

UNSET = -1
_MOST = 2**31
_TYPED_GPU = re.compile(re.escape(GPU) + r":[A-Za-z][A-Za-z0-9_.-]{0,62}\Z")
_LICENSE = re.compile(re.escape(LICENSE) + r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?\Z")
_SUMMED = (CPU, MEM, GPU, BILLING)  # only the usage of these is accumulated


def limit(value: Any) -> int | None:
    """Return a count; -1 in the file means unlimited (None)."""
    if type(value) is not int or not UNSET <= value <= 10**9:
        raise BadValue("wants a whole number, -1 for no limit")
    return None if value == UNSET else value


def tres(value: Any) -> Tres:
    """Return resource counts, from a text as ``"cpu=64,mem=512G,gpu=4"`` or a table."""
    return tuple((name, _amount(name, given)) for name, given in _pairs(value))


def tres_minutes(value: Any) -> Tres:
    """Return resources times minutes; only resources whose usage is accumulated."""
    found = tres(value)
    for name, _ in found:
        if name not in _SUMMED:
            raise BadValue(f"wants only {', '.join(_SUMMED)}: of others no minutes are kept")
    return found


def tres_weights(value: Any) -> tuple[tuple[str, float], ...]:
    """Return resource factors, from ``"cpu=1,mem=0.25,gpu=4"`` or a table; memory is in GiB."""
    weights = []
    for name, given in _pairs(value):
        if name == BILLING:
            raise BadValue("wants no weight of billing: it is the sum of the others")
        if name == MEM and isinstance(given, str):
            given = given.rstrip("Gg")
        weights.append((name, _weight(name, given)))
    return tuple(weights)


def token_weights(value: Any) -> tuple[tuple[str, float], ...]:
    """Return billing seconds by kind of token, from ``"prompt=0.001"`` or a table."""
    weights = {}
    for name, given in _parts(value, "prompt=0.001,completion=0.01"):
        if name not in TOKENS:
            raise BadValue(f"knows no tokens {name[:63]!r}; there are {', '.join(TOKENS)}")
        if name in weights:
            raise BadValue(f"names {name} twice")
        weights[name] = _weight(name, given)
    return tuple(weights.items())


def _weight(name: str, given: Any) -> float:
    if isinstance(given, str) and _NUMBER.match(given):
        given = float(given)
    if type(given) not in (int, float) or not 0 <= given <= _MOST:
        raise BadValue(f"wants a number for {name}, zero or more")
    return float(given)


def members(value: Any) -> tuple[str, ...]:
    """Return a list of users; "*" means the users that no account names."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadValue("wants a list of user names")
    for item in value:
        if item != EVERYBODY and not USER_NAME.match(item):
            raise BadValue(f"wants user names, or {EVERYBODY!r}; {item[:63]!r} is none")
    return tuple(dict.fromkeys(value))


def shares(value: Any) -> int | tuple[tuple[str, int], ...]:
    """Return shares: a number, or a table with a number for each account."""
    if isinstance(value, dict):
        return tuple((word(name), whole(0, 2**31)(count)) for name, count in value.items())
    return whole(0, 2**31)(value)


def _pairs(value: Any) -> list[tuple[str, Any]]:
    found = [(_tres_name(name), amount) for name, amount in _parts(value, "cpu=64,mem=512G,gpu=4")]
    if len({name for name, _ in found}) != len(found):
        raise BadValue("names a resource twice")
    return found


def _parts(value: Any, example: str) -> list[tuple[str, Any]]:
    """Return names and amounts of a text such as the example, or of a table."""
    if isinstance(value, str):
        parts = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        return [(name.strip(), amount.strip()) for name, _, amount in parts]
    if isinstance(value, Mapping):
        return list(value.items())
    raise BadValue(f'wants a text as "{example}"')


def _tres_name(name: str) -> str:
    low = name.lower()
    if low == "gpu" or low.startswith("gpu:"):
        low = f"gres/{low}"
    if low in (CPU, MEM, NODE, GPU, BILLING) or _TYPED_GPU.match(low):
        return low
    if low.startswith(LICENSE) and _LICENSE.match(name):
        return name
    raise BadValue(f"knows no resource {name[:63]!r}; there are cpu, mem, node, gpu, gpu:TYPE, billing, license/NAME")


def _amount(name: str, given: Any) -> int:
    if name == MEM:
        return memory_mib(given)
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= 12:
        given = int(given)
    if type(given) is not int or not 0 <= given <= 10**12:
        raise BadValue(f"wants a whole number for {name}")
    return given


# fmt: off
LIMITS = (
    Key("max_jobs", limit, UNSET, "The maximum number of running jobs of a user. -1: no limit."),
    Key("max_submit_jobs", limit, UNSET,
        "The maximum number of waiting and running jobs of a user; further jobs are rejected. -1: no limit."),
    Key("max_wall", time_limit, "UNLIMITED", "The maximum time limit of a job."),
    Key("max_tres_per_job", tres, "", 'The maximum resources of a job, as "cpu=64,mem=512G,gpu=4".'),
    Key("max_tres_per_user", tres, "", "The maximum resources of all running jobs of a user."),
    Key("max_tres_mins_per_job", tres_minutes, "",
        'The maximum of resources times time limit in minutes of a job, as "cpu=10000,gpu=500".'),
    Key("grp_jobs", limit, UNSET, "The maximum number of running jobs of all users. -1: no limit."),
    Key("grp_submit_jobs", limit, UNSET,
        "The maximum number of waiting and running jobs of all users; further jobs are rejected. -1: no limit."),
    Key("grp_tres", tres, "", "The maximum resources of all running jobs."),
    Key("grp_tres_mins", tres_minutes, "",
        "The maximum of resources times minutes of all jobs: recent usage, which decays, and the rest of the time limits "
        "of running jobs."),
)

ACCOUNT = (
    Key("parent", optional(word), "", "The parent account. Empty: none."),
    Key("shares", whole(0, 2**31), 1, "The account's share of the cluster, relative to the shares of its siblings."),
    Key("users", members, [],
        'The account\'s users. "*": all users that no account lists. A user\'s default account is the first that lists the '
        "user."),
    Key("coordinators", users, [],
        "Users who may see and change the jobs of this account and of the accounts below it."),
    Key("priority", whole(0, 2**31), 0, "The association's priority, see the weight assoc."),
    Key("qos", words, [],
        "The QOS that the account's jobs may use. Empty: those of its parent; without a parent, only normal."),
    Key("default_qos", optional(word), "", "The QOS of jobs without --qos. Empty: that of its parent."),
    *LIMITS,
)

USER = (
    Key("default_account", optional(word), "",
        "The account of jobs without --account. Empty: the first that lists the user."),
    Key("shares", shares, 1,
        "The user's share of the account, relative to the shares of its other users; { physics = 2 }: only in that "
        "account."),
    Key("priority", limit, UNSET, "The association's priority, see the weight assoc. -1: that of the account."),
    Key("qos", words, [], "The QOS that the user's jobs may use. Empty: those of the account."),
    Key("default_qos", optional(word), "", "The QOS of jobs without --qos. Empty: that of the account."),
    *(key for key in LIMITS if key.name in ("max_jobs", "max_submit_jobs", "max_wall", "max_tres_per_job",
                                            "max_tres_per_user", "max_tres_mins_per_job", "grp_tres_mins")),
)

QOS = (
    Key("priority", whole(0, 2**31), 0, "The priority of the QOS, see the weight qos."),
    Key("usage_factor", number(0, _MOST), 1.0,
        "The factor by which the usage of its jobs is charged. 0: nothing is charged."),
    Key("preempt", words, [], "Its waiting jobs may preempt running jobs of these QOS."),
    Key("preempt_mode", optional(one_of(*PreemptMode)), "",
        "What happens to its own jobs that are preempted: requeue, cancel, checkpoint (signal, grace time, then requeue), "
        "suspend, off. Empty: as the scheduler's preempt_mode."),
    Key("grace_time_s", seconds(), 0,
        "Seconds between the preemption signal and the end of its jobs. 0: the scheduler's preempt_grace_time_s with mode "
        "checkpoint, otherwise kill_wait_s."),
    Key("exempt_time_s", seconds(), 0,
        "Seconds after their start in which its jobs are not preempted. 0: the scheduler's preempt_exempt_time_s."),
    *LIMITS,
)

PARTITION_LIMITS = tuple(key for key in LIMITS if key.name not in ("max_wall", "grp_tres_mins"))

BILLING_WEIGHTS = Key("billing", tres_weights, "",
                      'The charge for a second of each resource in this partition, as "cpu=1,mem=0.25,gpu=4" (memory in GiB). '
                      "Empty: billing of fairshare.")

PARTITION_RULES = (
    Key("priority_job_factor", whole(0, 2**31), 1,
        "The partition's factor in the priority of its jobs, relative to the highest factor of all partitions."),
    Key("allow_accounts", words, [],
        "The accounts that may use the partition, with all accounts below them. Empty: all accounts."),
    Key("allow_qos", words, [], "The QOS that may use the partition. Empty: all QOS, and jobs without QOS."),
)

LICENSES = Key("NAME", whole(0, 10**9), 0, "The number of licences that all running jobs may hold together.")

FAIRSHARE = (
    Key("algorithm", one_of(*Fairness), Fairness.FAIR_TREE.value,
        "fair-tree: the least used share comes first, level by level of the accounts; classic: a factor from shares and "
        "usage up to the root."),
    Key("half_life", time_limit, "7-00:00:00", "The time after which usage counts half. UNLIMITED: usage does not decay."),
    Key("damping", number(0.001, _MOST), 1.0,
        "For classic: the factor is 2 to the power of minus (usage / shares / damping)."),
    Key("billing", tres_weights, "cpu=1",
        'The charge for a second of each resource, as "cpu=1,mem=0.25,gpu=4" (memory in GiB); also of node and '
        "license/NAME."),
    Key("token_billing", token_weights, "",
        'The charge for a token that a user asks of another user\'s service, as "prompt=0.001,completion=0.01", in seconds of '
        "billing. It is taken off the owner's usage, and is never more than the replicas cost. Empty: the owner pays for all."),
)

TRES_WEIGHTS = Key("tres", tres_weights, "",
                   'Weights of single resources, each times the requested fraction of the cluster\'s, as "cpu=100,gpu=1000"; '
                   "also of license/NAME.")
# fmt: on

ALL_WEIGHTS = (*WEIGHTS, TRES_WEIGHTS)
ALL_PARTITION = (*PARTITION, *PARTITION_RULES, BILLING_WEIGHTS, *PARTITION_LIMITS)
ALL_SECTIONS = SECTIONS | {"scheduler.weights": ALL_WEIGHTS, "fairshare": FAIRSHARE}


# ----- reading them from hpcsched.toml, checked


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
        token_billing=fairshare["token_billing"],
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
                f"cannot use {path}: [{section}] {name!r} is not a name: letters, digits, _ and -, at most 63"
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
