"""What sacctmgr shows: associations, accounts, users, qualities of service, the cluster, resources; rows by column.

Limits come from the configuration, shares from the tree of fair share. What a Slurm's database has and there is not here
(events, transactions, federations ...) is empty. Source: sacctmgr(1), "LIST/SHOW FORMAT OPTIONS".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from hpcsched import client
from hpcsched.cli.clusters import own_cluster
from hpcsched.cli.output import date_text
from hpcsched.client import Json
from hpcsched.model.units import format_time_s

_TRES = (("cpu", "", 1), ("mem", "", 2), ("energy", "", 3), ("node", "", 4), ("billing", "", 5), ("fs", "disk", 6),
         ("vmem", "", 7), ("pages", "", 8), ("gres", "gpu", 1001))  # fmt: skip


def _accounting() -> Json:
    return client.call("GET", "/v1/config").get("accounting", {})


def _named(records: Sequence[Json], name: str) -> Json:
    return next((one for one in records if one["name"] == name), {})


def _shares() -> list[Json]:
    """Return the lines of the tree of shares, with one for whoever asks: everybody may submit, known yet or not."""
    lines = list(client.call("GET", "/v1/shares")["shares"])
    me = client.my_name()
    if not any(one["user"] == me for one in lines):
        lines.append({"account": "", "user": me, "shares": 1})
    return lines


def _tres_text(tres: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{name}={count}" for name, count in tres)


def _limits(limits: Json | None) -> Json:
    """Return what the limits of an account, a user or a QOS are called in Slurm's columns; "" for none."""
    found: dict[str, Any] = limits or {}

    def number(name: str) -> Any:
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
    every_qos = ",".join(sorted({"normal", *(one["name"] for one in accounting.get("qos", ()))}))
    rows = []
    for one in _shares():
        account = _named(accounting.get("accounts", ()), one["account"])
        rules = _named(accounting.get("users", ()), one["user"]) if one["user"] else {}
        rows.append(
            {
                "cluster": cluster,
                "account": one["account"] or "root",
                "user": one["user"],
                "name": one["user"] or one["account"],
                "share": one["shares"],
                "parentname": "" if one["user"] else account.get("parent") or ("root" if one["account"] else ""),
                "defaultaccount": rules.get("default_account") or one["account"] or "root",
                "descr": one["account"] or "root",
                "org": one["account"] or "root",
                "admin": "None",
                "qos": ",".join(rules.get("qos") or account.get("qos") or ()) or every_qos,
                "defaultqos": rules.get("default_qos") or account.get("default_qos") or "",
                **_limits((rules if one["user"] else account).get("limits")),
            }
        )
    return rows


def _users() -> list[Json]:
    return [one | {"name": one["user"]} for one in _associations() if one["user"]]


def _accounts() -> list[Json]:
    rows = [one | {"name": one["account"]} for one in _associations() if not one["user"]]
    return rows or [one | {"user": "", "name": one["account"]} for one in _associations()[:1]]


def _qos() -> list[Json]:
    configured = _accounting().get("qos", ())
    names = ["normal", *(one["name"] for one in configured if one["name"] != "normal")]
    rows = []
    for name in names:
        one = _named(configured, name)
        rows.append(
            {
                "name": name,
                "id": len(rows) + 1,
                "priority": one.get("priority", 0),
                "gracetime": _clock(one.get("grace_time_s", 0)),
                "preempt": ",".join(one.get("preempt", ())),
                "preemptexempttime": _clock(one["exempt_time_s"]) if one.get("exempt_time_s") else "",
                "preemptmode": one.get("preempt_mode") or "cluster",
                "flags": "",
                "usagethres": "",
                "usagefactor": f"{one.get('usage_factor', 1.0):.6f}",
                "descr": name,
                **_limits(one.get("limits")),
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
            "name": one["name"],
            "tres": "",
            "timestart": date_text(one["start_s"]),
            "timeend": date_text(one["end_s"]),
        }
        for one in client.call("GET", "/v1/reservations")["reservations"]
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
