"""The last line of `hpcsched node add`, on a controller that has a history of jobs that waited.

The history is made by a controller without a network, whose clock is set. The one that adds the node is a real one.
"""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

import pytest
from unit.controller.cluster import ANN, Cluster

from hpcsched import paths
from hpcsched.config.load import load_config
from hpcsched.loopback.cluster import LocalCluster

pytestmark = pytest.mark.timeout(400)
HOUR_S, DAY_S, DAYS = 3600.0, 86400.0, 10


def fill(database: Path) -> None:
    """Record ten days on which two jobs took all of n1, the second when the first had ended."""
    past = Cluster("n1", path=database, up=False)
    past.now_s = time.time() - DAYS * DAY_S
    past.welcome("n1")
    for _ in range(DAYS - 1):
        jobs = [past.submit(ANN, cpus_per_task=2, time_limit_s=7200) for _ in range(2)]
        for job_id in jobs:
            past.tick()
            past.run(job_id)
            past.tick(HOUR_S)
            past.end(job_id)
        past.tick(DAY_S - 2 * HOUR_S)
    past.store.close()


def test_a_new_node_says_what_it_would_have_changed_for_past_jobs() -> None:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        cluster = LocalCluster(base, names=("n1", "n2"), mem_mib=4000)
        try:
            machine = cluster.start_machines().nodes["n2"]
            cluster.write_config()
            (cluster.config_dir / "nodes.d" / "n2.toml").unlink()
            fill(load_config(cluster.config_dir).controller.state_dir / paths.DATABASE_FILE)
            cluster.up()
            cluster.wait_for_nodes()
            where = f"{machine.user}@{machine.host}:{machine.port}"
            access = ("--identity", str(machine.identity_file), "--root", str(machine.root / "agent"))
            said = cluster.run("hpcsched", "node", "add", where, "--name", "n2", *access, "--yes").stdout
        finally:
            cluster.stop()
    last = said.splitlines()[-1]
    assert re.fullmatch(r"waits of jobs in the last \d+ days: 30:00 -> about 0:0\d with it", last), said
