"""sacctmgr: shows associations, accounts, users, QOS and the cluster.

These are configured in hpcsched.toml, so verbs that change them are rejected, with the place to edit. Source: sacctmgr(1), and
the requests of snakemake, Open OnDemand and metrics exporters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli.output import print_json, print_separated
from hpcsched.cli.slurm import own_cluster, run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, UsageError, Words, split_list
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean, date_text, fixed_columns, sized
from hpcsched.model.units import format_time_s

# ----- associations, accounts, users, QOS, the cluster, resources: rows by column
# Limits come from the configuration, shares from the fair-share tree. Entities that exist only in Slurm's database
# (events, transactions, federations ...) are empty. Source: sacctmgr(1), "LIST/SHOW FORMAT OPTIONS".


_TRES = (("cpu", "", 1), ("mem", "", 2), ("energy", "", 3), ("node", "", 4), ("billing", "", 5), ("fs", "disk", 6),
         ("vmem", "", 7), ("pages", "", 8), ("gres", "gpu", 1001))  # fmt: skip


def _accounting() -> Json:
    return client.call("GET", "/v1/config").get("accounting", {})


def _named(records: Sequence[Json], name: str) -> Json:
    return next((record for record in records if record["name"] == name), {})


def _shares() -> list[Json]:
    """Return the lines of the fair-share tree, always with one for the current user."""
    lines = list(client.call("GET", "/v1/shares")["shares"])
    me = client.my_name()
    if not any(line["user"] == me for line in lines):
        lines.append({"account": "", "user": me, "shares": 1})
    return lines


def _tres_text(tres: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{name}={count}" for name, count in tres)


def _limits(limits: Json | None) -> Json:
    """Return the limits of an account, a user or a QOS by Slurm's columns; "" without a limit."""
    found: Json = limits or {}

    def number(name: str) -> object:
        value = found.get(name)
        return "" if value is None else value

    wall_s = found.get("max_wall_s")
    return {
        "maxjobs": number("max_jobs"),
        "maxsubmit": number("max_submit_jobs"),
        "maxjobsperuser": number("max_jobs"),
        "maxsubmitjobsperuser": number("max_submit_jobs"),
        "maxwall": "" if wall_s is None else format_time_s(wall_s),
        "maxtres": _tres_text(found.get("max_tres_per_job", ())),
        "maxtresperuser": _tres_text(found.get("max_tres_per_user", ())),
        "maxtresmins": _tres_text(found.get("max_tres_mins_per_job", ())),
        "grpjobs": number("grp_jobs"),
        "grpsubmit": number("grp_submit_jobs"),
        "grptres": _tres_text(found.get("grp_tres", ())),
        "grptresmins": _tres_text(found.get("grp_tres_mins", ())),
        "grpwall": "",
    }


def _associations() -> list[Json]:
    cluster, accounting = own_cluster(), _accounting()
    every_qos = ",".join(sorted({"normal", *(qos["name"] for qos in accounting.get("qos", ()))}))
    rows = []
    for share in _shares():
        account = _named(accounting.get("accounts", ()), share["account"])
        user = _named(accounting.get("users", ()), share["user"]) if share["user"] else {}
        rows.append({"cluster": cluster, **_association(share, account, user, every_qos)})
    return rows


def _association(share: Json, account: Json, user: Json, every_qos: str) -> Json:
    """Return one association.

    `account` and `user` are their rules, `user` is empty for that of the account itself.
    """
    name = share["account"] or "root"
    parent = "root" if share["account"] else ""
    return {
        "account": name,
        "user": share["user"],
        "name": share["user"] or share["account"],
        "share": share["shares"],
        "parentname": "" if share["user"] else account.get("parent") or parent,
        "defaultaccount": user.get("default_account") or name,
        "descr": name,
        "org": name,
        "admin": "None",
        "qos": ",".join(user.get("qos") or account.get("qos") or ()) or every_qos,
        "defaultqos": user.get("default_qos") or account.get("default_qos") or "",
        **_limits((user if share["user"] else account).get("limits")),
    }


def _users() -> list[Json]:
    return [association | {"name": association["user"]} for association in _associations() if association["user"]]


def _accounts() -> list[Json]:
    rows = [
        association | {"name": association["account"]} for association in _associations() if not association["user"]
    ]
    return rows or [association | {"user": "", "name": association["account"]} for association in _associations()[:1]]


def _qos() -> list[Json]:
    configured = _accounting().get("qos", ())
    names = ["normal", *(qos["name"] for qos in configured if qos["name"] != "normal")]
    rows: list[Json] = []
    for name in names:
        qos = _named(configured, name)
        rows.append(
            {
                "name": name,
                "id": len(rows) + 1,
                "priority": qos.get("priority", 0),
                "gracetime": _clock(qos.get("grace_time_s", 0)),
                "preempt": ",".join(qos.get("preempt", ())),
                "preemptexempttime": _clock(qos["exempt_time_s"]) if qos.get("exempt_time_s") else "",
                "preemptmode": qos.get("preempt_mode") or "cluster",
                "flags": "",
                "usagethres": "",
                "usagefactor": f"{qos.get('usage_factor', 1.0):.6f}",
                "descr": name,
                **_limits(qos.get("limits")),
            }
        )
    return rows


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600:02}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def _clusters() -> list[Json]:
    return [{"cluster": own_cluster(), "name": own_cluster(), "controlhost": os.uname().nodename, "controlport": 0, "rpc": 9984,
             "share": 1, "qos": "normal"}]  # fmt: skip


def _tres() -> list[Json]:
    licenses = [("license", name, 1002 + at) for at, (name, _) in enumerate(_accounting().get("licenses", ()))]
    return [{"type": kind, "name": name, "id": number} for kind, name, number in (*_TRES, *licenses)]


def _reservations() -> list[Json]:
    cluster = own_cluster()
    return [
        {
            "cluster": cluster,
            "name": reservation["name"],
            "tres": "",
            "timestart": date_text(reservation["start_s"]),
            "timeend": date_text(reservation["end_s"]),
        }
        for reservation in client.call("GET", "/v1/reservations")["reservations"]
    ]


def _none() -> list[Json]:
    return []


RECORDS: dict[str, Callable[[], list[Json]]] = {
    "association": _associations,
    "account": _accounts,
    "user": _users,
    "qos": _qos,
    "cluster": _clusters,
    "tres": _tres,
    "reservation": _reservations,
    "event": _none,
    "federation": _none,
    "problem": _none,
    "resource": _none,
    "runawayjobs": _none,
    "transaction": _none,
    "wckey": _none,
}

SACCTMGR = Face(
    Command(
        "sacctmgr",
        ("[OPTIONS] show|list assoc|account|user|qos|cluster|tres|reservation [NAME=VALUE...] [format=LIST]",),
        "Show accounts, users, qualities of service and the cluster. They are changed in hpcsched.toml.",
        (
            Option("associations", "s", help="with users or accounts: show their associations"),
            Option("immediate", "i", help="do not ask for confirmation (the default)"),
            Option("json", help="print as JSON"),
            Option("noheader", "n", help="do not print headers"),
            Option("oneliner", "o", help="print each record on one line (the default)"),
            Option("parsable", "p", help="end each column with |"),
            Option("parsable2", "P", help="separate columns with |"),
            Option("quiet", "Q", help="print errors only"),
            Option("readonly", "r", help="change nothing"),
            Option("verbose", "v", help="print more"),
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
    "acct": "account", "adminlevel": "admin", "def acct": "defaultaccount", "defaultacct": "defaultaccount",
    "description": "descr", "end": "timeend", "fairshare": "share", "grpsubmitjobs": "grpsubmit",
    "maxjobspu": "maxjobsperuser", "maxsubmitjobs": "maxsubmit", "maxsubmitpu": "maxsubmitjobsperuser",
    "maxtresperjob": "maxtres", "maxtrespj": "maxtres", "maxtrespu": "maxtresperuser",
    "maxwalldurationperjob": "maxwall", "organization": "org", "start": "timestart",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SACCTMGR, _work, argv)


def _work(words: Words) -> int:
    if not words.operands:
        raise UsageError("cannot tell what to do: give a command; see sacctmgr --help (there is no prompt)")
    verb, *rest = words.operands
    if verb.lower() not in ("show", "list") or not rest:
        raise RequestError(
            f"cannot {clean(verb[:40])}: accounts, users and QOS are in hpcsched.toml; then scontrol reconfigure"
        )
    entity = _entity(rest[0])
    fields, conditions = _read(rest[1:])
    if entity in ("user", "account") and (words.has("associations") or conditions.pop("withassoc", None) is not None):
        fields = fields or split_list(f"{_DEFAULTS[entity]},{_DEFAULTS['association']}")
    records = [record for record in RECORDS[entity]() if _is_meant(record, conditions)]
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
    """Return the columns of ``format=``, and the other conditions with names in lower case."""
    fields: list[str] = []
    conditions: dict[str, list[str]] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        lowered = name.lower().rstrip("+-!")
        if not equals:
            if lowered in ("where", "set", "tree"):
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


def _is_meant(record: Json, conditions: dict[str, list[str]]) -> bool:
    for name, wanted in conditions.items():
        key = _ALIASES.get(name, name)
        if key in record and str(record[key]) not in wanted:
            return False
    return True


# ----- output


def _print(records: Sequence[Json], fields: Sequence[str], words: Words) -> None:
    columns = [_column(word) for word in fields]
    lines = [[clean(record.get(key, "")) for _, key, _, _ in columns] for record in records]
    header = [] if words.has("noheader") else [[name for name, _, _, _ in columns]]
    if print_separated([*header, *lines], words):
        return
    widths = [(width, right) for _, _, width, right in columns]
    sys.stdout.write(fixed_columns([*header, *lines], widths, rule=bool(header)))


def _column(word: str) -> tuple[str, str, int, bool]:
    """Return name, key, width and alignment of a requested column: ``account%256``."""
    name, width, right = sized(word)
    return name, _ALIASES.get(name.lower(), name.lower()), width or 10, right
