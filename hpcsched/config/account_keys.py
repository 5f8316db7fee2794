"""The keys of accounts, users, QOS and limits: kinds, defaults and purpose.

See `hpcsched.config.keys`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpcsched.config.keys import PARTITION, SECTIONS, WEIGHTS
from hpcsched.config.kinds import (
    USER_NAME,
    BadValue,
    Key,
    memory_mib,
    number,
    one_of,
    optional,
    seconds,
    time_limit,
    whole,
    word,
    words,
)
from hpcsched.model.accounting import BILLING, CPU, EVERYBODY, GPU, LICENSE, MEM, NODE, Fairness, PreemptMode, Tres

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
        if isinstance(given, str) and _NUMBER.match(given):
            given = float(given)
        if type(given) not in (int, float) or not 0 <= given <= _MOST:
            raise BadValue(f"wants a number for {name}, zero or more")
        weights.append((name, float(given)))
    return tuple(weights)


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
    if isinstance(value, str):
        parts = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        given = [(name.strip(), amount.strip()) for name, _, amount in parts]
    elif isinstance(value, Mapping):
        given = list(value.items())
    else:
        raise BadValue('wants resources as "cpu=64,mem=512G,gpu=4"')
    found = [(_tres_name(name), amount) for name, amount in given]
    if len({name for name, _ in found}) != len(found):
        raise BadValue("names a resource twice")
    return found


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


LIMITS = (
    Key(
        name="max_jobs", kind=limit, default=UNSET, help="The most jobs of one user that may run at once. -1: no limit."
    ),
    Key(
        name="max_submit_jobs",
        kind=limit,
        default=UNSET,
        help="The most jobs of one user that may wait and run; more are refused. -1: no limit.",
    ),
    Key(name="max_wall", kind=time_limit, default="UNLIMITED", help="The longest time limit that a job here may have."),
    Key(
        name="max_tres_per_job",
        kind=tres,
        default="",
        help='The most that one job may have, as "cpu=64,mem=512G,gpu=4".',
    ),
    Key(
        name="max_tres_per_user",
        kind=tres,
        default="",
        help="The most that the running jobs of one user may have in all.",
    ),
    Key(
        name="max_tres_mins_per_job",
        kind=tres_minutes,
        default="",
        help='The most that one job may ask for, resources times its time limit in minutes, as "cpu=10000,gpu=500".',
    ),
    Key(
        name="grp_jobs", kind=limit, default=UNSET, help="The most jobs that may run at once, all users'. -1: no limit."
    ),
    Key(
        name="grp_submit_jobs",
        kind=limit,
        default=UNSET,
        help="The most jobs that may wait and run, all users'; more are refused. -1: no limit.",
    ),
    Key(name="grp_tres", kind=tres, default="", help="The most that all running jobs may have in all."),
    Key(
        name="grp_tres_mins",
        kind=tres_minutes,
        default="",
        help="The most that all jobs may use, resources times minutes: what was used of late, as it decays, and what the "
        "time limits of running jobs allow them.",
    ),
)

ACCOUNT = (
    Key(name="parent", kind=optional(word), default="", help="The account that it is a part of. Empty: none."),
    Key(name="shares", kind=whole(0, 2**31), default=1, help="Its part of the cluster, against its siblings' shares."),
    Key(
        name="users",
        kind=members,
        default=[],
        help='Its users. "*": all users that no account lists. The first account that lists a user is the default one.',
    ),
    Key(name="priority", kind=whole(0, 2**31), default=0, help="What the association's part of a priority comes from."),
    Key(
        name="qos",
        kind=words,
        default=[],
        help="The QOS that its jobs may have: others are closed to them. Empty: as its parent; in the end normal alone.",
    ),
    Key(
        name="default_qos",
        kind=optional(word),
        default="",
        help="The QOS of jobs that name none. Empty: as its parent.",
    ),
    *LIMITS,
)

USER = (
    Key(
        name="default_account",
        kind=optional(word),
        default="",
        help="The account of jobs that name none. Empty: the first that has the user.",
    ),
    Key(
        name="shares",
        kind=shares,
        default=1,
        help="The part of the account, against those of its other users; { physics = 2 } is in that account.",
    ),
    Key(
        name="priority",
        kind=limit,
        default=UNSET,
        help="What the association's part of a priority comes from. -1: the account's.",
    ),
    Key(name="qos", kind=words, default=[], help="The QOS that the user's jobs may have. Empty: as the account."),
    Key(name="default_qos", kind=optional(word), default="", help="The QOS of jobs that name none. Empty: the account's."),
    *(key for key in LIMITS if key.name in ("max_jobs", "max_submit_jobs", "max_wall", "max_tres_per_job",
                                            "max_tres_per_user", "max_tres_mins_per_job", "grp_tres_mins")),
)  # fmt: skip

QOS = (
    Key(name="priority", kind=whole(0, 2**31), default=0, help="What the QOS part of a priority comes from."),
    Key(
        name="usage_factor",
        kind=number(0, _MOST),
        default=1.0,
        help="What its jobs use is charged so many times. 0: nothing is charged.",
    ),
    Key(
        name="preempt", kind=words, default=[], help="Its waiting jobs may take the place of running jobs of these QOS."
    ),
    Key(
        name="preempt_mode",
        kind=optional(one_of(*PreemptMode)),
        default="",
        help="What happens to its own jobs that are preempted: requeue, cancel, checkpoint (signal, grace time, then "
        "requeue), suspend, off. Empty: as the scheduler's preempt_mode.",
    ),
    Key(
        name="grace_time_s",
        kind=seconds(),
        default=0,
        help="How long its jobs have from the signal that they are preempted to their end. 0: as the scheduler's "
        "preempt_grace_time_s with mode checkpoint, else kill_wait_s.",
    ),
    Key(
        name="exempt_time_s",
        kind=seconds(),
        default=0,
        help="For so long after their start its jobs are not preempted. 0: as the scheduler's preempt_exempt_time_s.",
    ),
    *LIMITS,
)

PARTITION_LIMITS = tuple(key for key in LIMITS if key.name not in ("max_wall", "grp_tres_mins"))

BILLING_WEIGHTS = Key(
    name="billing",
    kind=tres_weights,
    default="",
    help='What is charged for a second of each resource here, as "cpu=1,mem=0.25,gpu=4" (memory by the GiB). Empty: the '
    "scheduler's billing.",
)

PARTITION_RULES = (
    Key(
        name="priority_job_factor",
        kind=whole(0, 2**31),
        default=1,
        help="What the partition's part of a priority comes from, against the highest of all partitions.",
    ),
    Key(
        name="allow_accounts",
        kind=words,
        default=[],
        help="The accounts whose jobs may come here, with all below them. Empty: every account's.",
    ),
    Key(
        name="allow_qos", kind=words, default=[], help="The QOS whose jobs may come here. Empty: of every QOS, or none."
    ),
)

LICENSES = Key(name="NAME", kind=whole(0, 10**9), default=0, help="How many of the licence all jobs may have at once.")

FAIRSHARE = (
    Key(
        name="algorithm",
        kind=one_of(*Fairness),
        default=Fairness.FAIR_TREE.value,
        help="fair-tree: who has had least of a share comes first, level by level of the accounts; classic: a factor from "
        "shares and usage up to the root.",
    ),
    Key(
        name="half_life",
        kind=time_limit,
        default="7-00:00:00",
        help="After so long what was used counts half. UNLIMITED: it counts for ever.",
    ),
    Key(
        name="damping",
        kind=number(0.001, _MOST),
        default=1.0,
        help="classic alone: the factor is 2 to the minus (usage / shares / damping).",
    ),
    Key(
        name="billing",
        kind=tres_weights,
        default="cpu=1",
        help='What is charged for a second of each resource, as "cpu=1,mem=0.25,gpu=4" (memory by the GiB); of node and '
        "license/NAME too.",
    ),
)

TRES_WEIGHTS = Key(
    name="tres",
    kind=tres_weights,
    default="",
    help='Weights of single resources, each times the part of the cluster\'s that a job asks for, as "cpu=100,gpu=1000"; '
    "of license/NAME too.",
)

ALL_WEIGHTS = (*WEIGHTS, TRES_WEIGHTS)
ALL_PARTITION = (*PARTITION, *PARTITION_RULES, BILLING_WEIGHTS, *PARTITION_LIMITS)
ALL_SECTIONS = SECTIONS | {"scheduler.weights": ALL_WEIGHTS, "fairshare": FAIRSHARE}
