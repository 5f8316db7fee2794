"""Accounts, limits, licences and fair share as an admin sets them up and users meet them, with a restart in between."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

CONFIG = """
[accounts.physics]
shares = 3
users = ["%(user)s"]
qos = ["normal", "single"]
[accounts.maths]
[qos.normal]
[qos.single]
priority = 10
usage_factor = 2.0
max_jobs = 1
max_tres_per_job = "cpu=1"
[licenses]
matlab = 1
[partitions.few]
allow_accounts = ["physics"]
allow_qos = ["single"]
"""


@pytest.fixture(scope="module")
def lab(cluster: LocalCluster) -> LocalCluster:
    """The cluster with accounts, which `hctl reconfigure` has read."""
    path = cluster.config_dir / "hpcsched.toml"
    user = cluster.run("id", "-un").stdout.strip()
    path.write_text(path.read_text() + CONFIG % {"user": user})
    assert "accounts, QOS, licenses, fair share: reloaded" in cluster.run("hctl", "reconfigure").stdout
    return cluster


def reason_of(lab: LocalCluster, job_id: int) -> str:
    return str(lab.json("hqueue", "--json", str(job_id))["jobs"][0]["reason"])


def test_who_may_submit_what(lab: LocalCluster, sub: Any) -> None:
    refused = lab.run("hsub", "-A", "maths", "--wrap", "true", check=False)
    assert (refused.returncode, "Invalid account" in refused.stderr) == (1, True)
    refused = lab.run("hsub", "-q", "single", "-c", "2", "--wrap", "true", check=False)
    assert "QOSMaxCpuPerJobLimit: QOS 'single' allows a job 1 cpu, and this job asks for 2 cpus" in refused.stderr
    refused = lab.run("hsub", "-L", "matlab:2", "--wrap", "true", check=False)
    assert "the cluster has 1" in refused.stderr
    refused = lab.run("hsub", "-p", "few", "--wrap", "true", check=False)
    assert "it takes only jobs of the QOS single, and this one's is 'normal'" in refused.stderr
    assert "AllowAccounts=physics AllowQos=single" in lab.run("hctl", "show", "partition", "few").stdout


def test_limits_and_licences_keep_jobs_waiting_and_say_so(
    lab: LocalCluster, sub: Any, running: Any, ended: Any
) -> None:
    first = sub("sleep 600", "-q", "single", "-L", "matlab")
    running(first)
    limited, licensed = sub("true", "-q", "single"), sub("true", "-L", "matlab")
    wait_until(lambda: reason_of(lab, limited) == "QOSMaxJobsPerUserLimit", what="the limit to be the reason")
    wait_until(lambda: reason_of(lab, licensed) == "Licenses", what="the licence to be the reason")
    assert "1 running job" in lab.run("hwhy", str(limited)).stdout
    assert "licences matlab" in lab.run("hwhy", str(licensed)).stdout
    shown = {job["id"]: job for job in lab.json("hprio", "--json")["jobs"]}
    assert (shown[limited]["factors"]["qos"], shown[licensed]["factors"]["qos"]) == (1.0, 0.0)
    assert shown[limited]["account"] == "physics"
    assert lab.run("hprio", "-h").stdout.split()[0] == str(limited)
    assert "LicenseName=matlab" in (free := lab.run("hctl", "show", "lic").stdout)
    assert "Total=1 Used=1 Free=0" in free
    lab.run("hctl", "update", str(limited), "QOS=normal")
    assert ended(limited)["state"] == "COMPLETED"
    lab.run("hcancel", str(first))
    assert [ended(job_id)["state"] for job_id in (limited, licensed)] == ["COMPLETED", "COMPLETED"]


def test_usage_is_charged_and_outlives_the_controller(lab: LocalCluster, sub: Any, ended: Any) -> None:
    ended(sub("sleep 1", "-q", "single"))
    before = lab.run("hshare", "-nPU", "-o", "account,rawusage").stdout
    account, usage = before.strip().split("|")
    assert account == "physics"
    assert int(usage) >= 2  # a cpu for a second at least, twice
    lab.down()
    lab.up()
    lab.wait_for_nodes()
    after = lab.run("hshare", "-nPU", "-o", "account,rawusage").stdout.strip().split("|")[1]
    assert abs(int(after) - int(usage)) <= 1  # it decays by less than that
    assert "usage of" in lab.run("hctl", "reset", "usage", "all").stdout
    assert lab.run("hshare", "-nPU", "-o", "account,rawusage").stdout == "physics|0\n"
