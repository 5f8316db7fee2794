"""Scheduled backups of a running cluster: made, shown, restored on trial, and named when they fail."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

pytestmark = pytest.mark.timeout(400)


def test_backups_are_made_by_themselves_and_a_missing_disk_is_told() -> None:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        to = base / "backups"
        settings = {"backup": {"every": 1, "to": [str(to)]}}
        to.mkdir()
        with LocalCluster(base, names=("n1",), settings=settings) as cluster:

            def backup() -> dict[str, Any]:
                found: dict[str, Any] = cluster.api("GET", "/v1/ping")["backup"] or {"newest_at_s": 0, "why": ""}
                return found

            def outcomes() -> list[str]:
                records = cluster.api("GET", "/v1/audit?limit=100")["records"]
                return [record["outcome"] for record in records if record["action"] == "scheduled-backup"]

            wait_until(lambda: len(list(to.glob("[!.]*"))) > 1, what="a second backup")
            wait_until(lambda: backup()["newest_at_s"] and "done" in outcomes(), what="a record of it")
            assert "can be restored" in cluster.run("hpcsched", "restore", "--drill", str(to)).stdout
            checks = json.loads(cluster.run("hhealth", "--json", check=False).stdout)["checks"]
            assert {check["status"] for check in checks if check["check"] == "backup"} == {"OK"}
            to.rename(base / "unplugged")
            wait_until(lambda: "failed" in outcomes(), what="a failure in the audit log")
            why = backup()["why"]  # it may have vanished in the middle of a backup
            assert why.startswith(f"cannot back up into {to}: ")
            assert "o such" in why
            said = cluster.run("hhealth", check=False).stdout
            assert f"the last attempt failed: {why}" in said
