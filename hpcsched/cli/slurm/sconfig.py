"""``scontrol show config``, version and ping: the controller's settings under the names of slurm.conf(5), as far as it has
such. Clients look for MinJobAge, MaxArraySize and ClusterName."""

from __future__ import annotations

import os

from hpcsched import client
from hpcsched.cli.slurm.face import SLURM_VERSION
from hpcsched.client import Json
from hpcsched.listing.text import clean, date_text


def ping_line() -> str:
    """Return what scontrol ping says. Raises UnavailableError where nobody answers."""
    client.call("GET", "/v1/ping")
    return f"Slurmctld(primary) at {os.uname().nodename} is UP"


def config_lines() -> list[str]:
    """Return the lines of scontrol show config."""
    config, ping = client.call("GET", "/v1/config")["config"], client.call("GET", "/v1/ping")
    scheduler = config.get("scheduler") or {}
    host = os.uname().nodename
    values = {
        "AccountingStorageEnforce": "associations,limits,qos",
        "AccountingStorageHost": host,
        "AccountingStorageTRES": "cpu,mem,energy,node,billing,gres/gpu",
        "AccountingStorageType": "accounting_storage/slurmdbd",  # sacct works: clients ask by this
        "AuthType": "auth/peercred",
        "BOOT_TIME": date_text(ping["started_at_s"]),
        "ClusterName": ping["cluster"],
        "FirstJobId": 1,
        "GresTypes": "gpu,shard",
        "InactiveLimit": "0 sec",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobRequeue": int(bool(config.get("requeue", True))),
        "KillWait": f"{_whole(config, 'kill_wait_s', 30)} sec",
        "MaxArraySize": _whole(scheduler, "max_array_size", 10_000) + 1,  # Slurm's is one more than the highest index
        "MaxJobCount": _whole(scheduler, "max_jobs", 100_000),
        "MinJobAge": f"{_whole(config, 'min_job_age_s', 300)} sec",
        "MpiDefault": "none",
        "PriorityType": "priority/multifactor",
        "ProctrackType": "proctrack/linuxproc",
        "SchedulerType": "sched/backfill",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_MEMORY",
        "SlurmctldHost[0]": host,
        "SlurmctldPort": 0,
        "SlurmUser": config.get("user") or "root(0)",
        "SLURM_VERSION": SLURM_VERSION,
        "StateSaveLocation": config.get("state_dir", ""),
        "SwitchType": "switch/none",
        "TaskPlugin": "task/none",
        "TopologyPlugin": "topology/tree",
    }
    lines = [f"Configuration data as of {date_text(ping['now_s'])}"]
    lines += [
        f"{name:<23} = {clean(value)}" for name, value in sorted(values.items(), key=lambda item: item[0].lower())
    ]
    return [*lines, "", f"Slurmctld(primary) at {host} is UP"]


def _whole(table: Json, key: str, default: int) -> int:
    value = table.get(key, default)
    return int(value) if isinstance(value, int | float) else default
