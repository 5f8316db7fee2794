"""sacctmgr: shows the associations, accounts, users, qualities of service and the cluster, as clients ask for them.

They are configuration here (`hpcsched.toml`), so nothing is changed by it: those verbs are refused, with where to do it.
Source: sacctmgr(1); what snakemake, Open OnDemand and exporters of metrics send.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words, split_list
from hpcsched.cli.output import print_json
from hpcsched.cli.slurm.face import ELSEWHERE, Face, run_face
from hpcsched.cli.slurm.sacctmgrrows import RECORDS
from hpcsched.client import Json
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean, fitted

FACE = Face(
    Command(
        "sacctmgr",
        ("[OPTIONS] show|list assoc|account|user|qos|cluster|tres|reservation [NAME=VALUE...] [format=LIST]",),
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
    "qos": "Name,Priority,GraceTime,Preempt,PreemptExemptTime,PreemptMode,Flags,UsageThres,UsageFactor,GrpTRES,GrpTRESMins,"
    "GrpJobs,GrpSubmit,GrpWall,MaxTRES,MaxTRESMins,MaxWall,MaxTRESPU,MaxJobsPU,MaxSubmitPU",
    "cluster": "Cluster,ControlHost,ControlPort,RPC,Share,QOS",
    "tres": "Type,Name,ID",
    "reservation": "Cluster,Name,TRES,TimeStart,TimeEnd",
    "event": "Cluster,NodeName,TimeStart,TimeEnd,State,Reason,User",
    "federation": "Federation,Cluster",
    "problem": "Cluster,Account,User,Problem",
    "resource": "Name,Server,Type,Count",
    "runawayjobs": "ID,Name,Partition,Cluster,State",
    "transaction": "Time,Action,Actor,Where,Info",
    "wckey": "WCKey,Cluster,User",
}
_ALIASES = {
    "acct": "account",
    "adminlevel": "admin",
    "def acct": "defaultaccount",
    "defaultacct": "defaultaccount",
    "description": "descr",
    "end": "timeend",
    "fairshare": "share",
    "grpsubmitjobs": "grpsubmit",
    "maxjobspu": "maxjobsperuser",
    "maxsubmitjobs": "maxsubmit",
    "maxsubmitpu": "maxsubmitjobsperuser",
    "maxtresperjob": "maxtres",
    "maxtrespj": "maxtres",
    "maxtrespu": "maxtresperuser",
    "maxwalldurationperjob": "maxwall",
    "organization": "org",
    "start": "timestart",
}


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
    records = [one for one in RECORDS[entity]() if _is_meant(one, conditions)]
    if words.has("json"):
        print_json({f"{entity}s": records, "errors": [], "warnings": []})
    else:
        _print(records, fields or split_list(_DEFAULTS[entity]), words)
    return 0


def _entity(word: str) -> str:
    lowered = word.lower()
    found = [name for name in RECORDS if len(lowered) >= 3 and (name.startswith(lowered) or lowered == f"{name}s")]
    if not found:
        raise RequestError(f"cannot show {clean(word[:40])!r}: there are {', '.join(RECORDS)}")
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
