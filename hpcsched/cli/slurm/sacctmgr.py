"""sacctmgr: shows the associations, accounts, users, qualities of service and the cluster, as clients ask for them.

They are configuration here (`hpcsched.toml`), so nothing is changed by it: those verbs are refused, with where to do it.
Source: sacctmgr(1); what snakemake, Open OnDemand and exporters of metrics send.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words, split_list
from hpcsched.cli.output import print_json
from hpcsched.cli.slurm.face import ELSEWHERE, Face, run_face
from hpcsched.client import Json
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean, fitted

FACE = Face(
    Command(
        "sacctmgr",
        ("[OPTIONS] show|list assoc|account|user|qos|cluster [NAME=VALUE...] [format=LIST]",),
        "Show accounts, users, qualities of service and the cluster. They are changed in hpcsched.toml.",
        (
            Option("associations", "s", help="with users or accounts: show their associations"),
            Option("immediate", "i", help="ask nothing (always so)"),
            Option("json", help="print as JSON"),
            Option("noheader", "n", help="print no line of headers"),
            Option("oneliner", "o", help="print each record on one line (always so)"),
            Option("parsable", "p", help="put | behind each column"),
            Option("parsable2", "P", help="put | between the columns"),
            Option("quiet", "Q", help="print errors only"),
            Option("readonly", "r", help="change nothing (always so)"),
            Option("verbose", "v", help="say more"),
            HELP,
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("usage"), Option("yaml")),
    ),
    "sacctmgr: error: slurmdbd",
)

_DEFAULTS = {
    "association": "Cluster,Account,User,Partition,Share,GrpJobs,GrpTRES,GrpSubmit,GrpWall,MaxJobs,QOS,DefaultQOS",
    "account": "Account,Descr,Org",
    "user": "User,DefaultAccount,Admin",
    "qos": "Name,Priority,GraceTime,PreemptMode,UsageFactor",
    "cluster": "Cluster,ControlHost,ControlPort,RPC,Share,QOS",
}
_ALIASES = {"def acct": "defaultaccount", "defaultacct": "defaultaccount", "acct": "account", "fairshare": "share",
            "description": "descr", "organization": "org", "adminlevel": "admin", "name": "name"}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(FACE, _work, argv)


def _work(words: Words) -> int:
    if not words.operands:
        raise UsageError("no command was given: see sacctmgr --help; it has no prompt of its own here")
    verb, *rest = words.operands
    if verb.lower() not in ("show", "list") or not rest:
        raise RequestError(
            f"cannot {clean(verb[:40])}: accounts, users and QOS are in hpcsched.toml; then scontrol reconfigure"
        )
    entity = _entity(rest[0])
    fields, conditions = _read(rest[1:])
    if entity in ("user", "account") and (words.has("associations") or conditions.pop("withassoc", None) is not None):
        fields = fields or split_list(f"{_DEFAULTS[entity]},{_DEFAULTS['association']}")
    records = [one for one in _RECORDS[entity]() if _is_meant(one, conditions)]
    if words.has("json"):
        print_json({f"{entity}s": records, "errors": [], "warnings": []})
    else:
        _print(records, fields or split_list(_DEFAULTS[entity]), words)
    return 0


def _entity(word: str) -> str:
    lowered = word.lower()
    known = {"associations": "association", "accounts": "account", "users": "user", "qos": "qos", "clusters": "cluster"}
    found = [name for full, name in known.items() if len(lowered) >= 3 and full.startswith(lowered)]
    if not found:
        raise RequestError(f"cannot show {clean(word[:40])!r}: there are {', '.join(known.values())}")
    return found[0]


def _read(rest: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns of ``format=`` and the other conditions: names in lower case, with their values."""
    fields: list[str] = []
    conditions: dict[str, list[str]] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        lowered = name.lower().rstrip("+-!")
        if not equals:
            if lowered in ("where", "set"):
                continue
            key = (
                "withassoc"
                if lowered.startswith("witha")
                else ""
                if lowered.startswith(("with", "only", "wop"))
                else "name"
            )
            if key:
                conditions.setdefault(key, []).extend([] if key == "withassoc" else split_list(word))
        elif lowered in ("format", "fields", "set"):
            fields += split_list(value)
        else:
            conditions.setdefault(lowered.rstrip("s"), []).extend(split_list(value))
    return fields, conditions


def _is_meant(one: Json, conditions: dict[str, list[str]]) -> bool:
    for name, wanted in conditions.items():
        key = _ALIASES.get(name, name)
        if key in one and str(one[key]) not in wanted:
            return False
    return True


# ----- what there is


def _cluster() -> str:
    return str(client.call("GET", "/v1/ping")["cluster"])


def _shares() -> list[Json]:
    """Return the lines of the tree of shares, with one for whoever asks: everybody may submit, known yet or not."""
    lines = list(client.call("GET", "/v1/shares")["shares"])
    me = client.my_name()
    if not any(one["user"] == me for one in lines):
        lines.append({"account": "", "user": me, "shares": 1})
    return lines


def _associations() -> list[Json]:
    cluster = _cluster()
    return [
        {
            "cluster": cluster,
            "account": one["account"] or "root",
            "user": one["user"],
            "name": one["user"] or one["account"],
            "share": one["shares"],
            "defaultaccount": one["account"] or "root",
            "descr": one["account"] or "root",
            "org": one["account"] or "root",
            "admin": "None",
            "qos": "normal",
            "defaultqos": "",
        }
        for one in _shares()
    ]


def _users() -> list[Json]:
    return [one | {"name": one["user"]} for one in _associations() if one["user"]]


def _accounts() -> list[Json]:
    rows = [one | {"name": one["account"]} for one in _associations() if not one["user"]]
    return rows or [one | {"user": "", "name": one["account"]} for one in _associations()[:1]]


def _qos() -> list[Json]:
    config = client.call("GET", "/v1/config")["config"]
    names = sorted({"normal", *(config.get("qos") or ())})
    return [{"name": name, "priority": 0, "gracetime": "00:00:00", "preemptmode": "cluster", "usagefactor": "1.000000"}
            for name in names]  # fmt: skip


def _clusters() -> list[Json]:
    return [{"cluster": _cluster(), "name": _cluster(), "controlhost": os.uname().nodename, "controlport": 0, "rpc": 9984,
             "share": 1, "qos": "normal"}]  # fmt: skip


_RECORDS: dict[str, Callable[[], list[Json]]] = {
    "association": _associations,
    "account": _accounts,
    "user": _users,
    "qos": _qos,
    "cluster": _clusters,
}


# ----- how it is written


def _print(records: Sequence[Json], fields: Sequence[str], words: Words) -> None:
    columns = [_column(word) for word in fields]
    lines = [[clean(one.get(key, "")) for _, key, _, _ in columns] for one in records]
    header = [] if words.has("noheader") else [[name for name, _, _, _ in columns]]
    if words.has("parsable") or words.has("parsable2"):
        end = "|" if words.has("parsable") else ""
        sys.stdout.write("".join("|".join(line) + end + "\n" for line in [*header, *lines]))
        return
    rule = [["-" * width for _, _, width, _ in columns]] if header else []
    for line in [*header, *rule, *lines]:
        cells = [fitted(text, width, right=right) for text, (_, _, width, right) in zip(line, columns, strict=True)]
        print("".join(f"{cell} " for cell in cells))


def _column(word: str) -> tuple[str, str, int, bool]:
    """Return name, key, width and side of a column as it was asked for: ``account%256``."""
    name, _, width = word.partition("%")
    digits = width.lstrip("-")
    if digits and not digits.isdigit():
        raise UsageError(f"cannot show column {word[:60]!r}: the width must be a number")
    lowered = name.strip().lower()
    return name, _ALIASES.get(lowered, lowered), int(digits or 10), not width.startswith("-")
