"""`hpcsched node bench` on a cluster: measured in a reservation of its own, stored, shown again, refused beside jobs."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcsched.errors import NotFoundError, RequestError
from hpcsched.loopback.cluster import LocalCluster

pytestmark = pytest.mark.timeout(400)
TESTS = {"cpu", "cpus", "memory", "disk_write", "disk_read", "fsync", "fsync_p95"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), names=("n1", "n2")) as started:
            yield started


def benches(cluster: LocalCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.api("GET", "/v1/benches")["benches"]
    return found


def features(cluster: LocalCluster, node: str) -> list[str]:
    found: dict[str, list[str]] = {
        view["name"]: view["features"] for view in cluster.api("GET", "/v1/nodes")["nodes"] if view["link"] == "up"
    }
    return found.get(node, [])


def test_nodes_are_measured_and_the_results_kept(cluster: LocalCluster) -> None:
    said = cluster.json("hpcsched", "node", "bench", "n1", "--json")
    (found,) = said["nodes"]
    assert found["name"] == "n1"
    assert set(found["tests"]) == TESTS
    assert all(test["value"] > 0 for test in found["tests"].values())
    assert "no numpy" in found["notes"]["gemm"]
    (run,) = benches(cluster)
    assert run["node"] == "n1"
    assert ("bench.cpu" in features(cluster, "n1")) is (not run["busy"] and run["spread"]["cpu"] <= 0.1)
    assert cluster.api("GET", "/v1/reservations")["reservations"] == []
    actions = [record["action"] for record in cluster.api("GET", "/v1/audit?limit=20")["records"]]
    assert "bench-nodes" in actions
    assert "end-bench" in actions
    shown = cluster.run("hpcsched", "node", "bench", "--show").stdout
    assert "VERDICT" in shown
    assert "n1 " in shown
    assert len(benches(cluster)) == 1  # shown, not measured again


def test_a_node_with_jobs_is_measured_on_request_only_and_then_not_as_a_baseline(cluster: LocalCluster) -> None:
    job = cluster.run("hsub", "--parsable", "-w", "n2", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: cluster.api("GET", f"/v1/job/{job}")["jobs"][0]["state"] == "RUNNING")
    refused = cluster.run("hpcsched", "node", "bench", "n2", check=False)
    assert refused.returncode != 0
    assert f"cannot measure n2: it has jobs: job {job}" in refused.stderr
    cluster.run("hpcsched", "node", "bench", "n2", "--now")
    assert [run["busy"] for run in benches(cluster) if run["node"] == "n2"] == [f"jobs were running: {job}"]
    assert cluster.api("GET", "/v1/reservations")["reservations"] == []
    cluster.run("hcancel", job)


def test_links_are_measured_in_a_reservation_and_kept(cluster: LocalCluster) -> None:
    said = cluster.json("hpcsched", "node", "bench", "--links", "--json")
    (link,) = said["links"]
    assert (link["one"], link["other"], link["why"]) == ("n1", "n2", "")
    assert min(link["to_mbps"], link["from_mbps"], link["rtt_us"]) > 0
    assert link["near"]["device"] == link["far"]["device"] == "lo"
    assert cluster.api("GET", "/v1/reservations")["reservations"] == []
    shown = cluster.run("hpcsched", "node", "bench", "--links", "--show").stdout
    assert "MBIT/S" in shown
    assert "RTT US" in shown
    assert "virtual" in shown
    (path,) = cluster.base.rglob("nodes.d/n1.toml")
    assert f"link_mbps = {round(min(link['to_mbps'], link['from_mbps']))}\n" in path.read_text()
    wait_until(lambda: "fast-link" in features(cluster, "n1"))
    job = cluster.run("hsub", "--parsable", "-N2", "--constraint=fast-link", "--wrap", "true").stdout.strip()
    wait_until(lambda: cluster.api("GET", f"/v1/job/{job}")["jobs"][0]["state"] == "COMPLETED")
    cluster.down()
    cluster.up()
    wait_until(lambda: all("fast-link" in features(cluster, name) for name in ("n1", "n2")))
    for _ in range(6):
        cluster.api("POST", "/v1/nodes/bench", {"how": "links", "nodes": "n[1-2]"})
    assert len(cluster.api("GET", "/v1/links")["links"]) == 5


def test_links_beside_jobs_are_refused_and_those_of_a_silent_node_are_named(cluster: LocalCluster) -> None:
    job = cluster.run("hsub", "--parsable", "-w", "n2", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: cluster.api("GET", f"/v1/job/{job}")["jobs"][0]["state"] == "RUNNING")
    refused = cluster.run("hpcsched", "node", "bench", "--links", check=False)
    assert refused.returncode != 0
    assert f"cannot measure n2: it has jobs: job {job}" in refused.stderr
    (link,) = cluster.api("POST", "/v1/nodes/bench", {"how": "links", "nodes": "n1,n2", "now": True})["links"]
    assert link["busy"] == f"jobs were running: {job}"
    cluster.run("hcancel", job)


def test_what_is_not_a_node_or_a_path_is_refused(cluster: LocalCluster) -> None:
    for words, why in (
        (["n7"], "there is no node of that name"),
        (["n1", "--python", "venv/bin/python"], "give its absolute path on the nodes"),
    ):
        refused = cluster.run("hpcsched", "node", "bench", *words, check=False)
        assert refused.returncode != 0
        assert why in refused.stderr
    for body in (
        {"node": "n1", "how": []},
        {"node": ["n1"]},
        {"node": "n1", "python": {}},
        {"node": "n1", "how": "slow"},
        {"how": "links"},
        {"how": "links", "nodes": ["n1"]},
        {"how": "links", "nodes": "n1"},
        {"how": "links", "nodes": "n1,n1"},
        {"how": "links", "nodes": "n[1-65]"},
        {"how": "links", "nodes": "n[1-"},
    ):
        with pytest.raises(RequestError, match="cannot (measure|read)"):
            cluster.api("POST", "/v1/nodes/bench", body)
    with pytest.raises(NotFoundError, match="cannot measure 'n7'"):
        cluster.api("POST", "/v1/nodes/bench", {"how": "links", "nodes": "n1,n7"})


def test_the_table_is_made_in_a_database_from_before(cluster: LocalCluster) -> None:
    cluster.down()
    (path,) = cluster.base.rglob("hpcsched.db")
    database = sqlite3.connect(path)
    database.execute("DROP TABLE benches")
    database.execute("DROP TABLE links")
    database.commit()
    database.close()
    cluster.up()
    assert benches(cluster) == []
    assert cluster.api("GET", "/v1/links")["links"] == []
