"""A real Prometheus scrapes our /metrics, and each query of the dashboards and alerts returns data there.

The values are those of an invented lab, because no test machine has all sensors: the pages are made by the controller's code.
Grafana is not run: that a dashboard looks right is not seen here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from waiting import wait_until

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "controller"))

from cluster import ROOT as ADMIN  # noqa: E402
from cluster import Cluster  # noqa: E402

from hpcnode.agent.sampler import JOB_COLUMNS, Counters  # noqa: E402
from hpcnode.wire import protocol  # noqa: E402
from hpcsched.metrics.exposition import content_type_for  # noqa: E402
from hpcsched.metrics.series import SAMPLED, TABLE, SeriesKind  # noqa: E402
from hpcsched.model.job import TrainingStatus  # noqa: E402
from hpcsched.model.node import Gpu, GpuRequest  # noqa: E402

TOOL = runpy.run_path(str(ROOT / "docs" / "tools" / "metrics.py"))
QUERIES = {
    f"{board}: {panel.title}: {legend}": query
    for board, (_, panels) in TOOL["BOARDS"].items()
    for panel in panels
    for legend, query in panel.queries.items()
}


def test_the_files_are_what_the_tool_makes_of_the_table() -> None:
    for path, text in TOOL["files"]().items():
        assert (ROOT / path).read_text() == text, f"{path}: write it anew: .venv/bin/python docs/tools/metrics.py"


def test_panels_and_alerts_name_series_that_exist() -> None:
    for where, query in (QUERIES | {name: rule[0] for name, rule in TOOL["ALERTS"].items()}).items():
        for name in re.findall(r"hpcsched_([a-z0-9_]+)", query):
            assert name in TABLE or name.removesuffix("_bucket") in TABLE, (where, name)


def test_dashboards_have_what_grafana_needs() -> None:
    uids = set()
    for path in sorted((ROOT / "etc" / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        uids.add(board["uid"])
        assert [one["id"] for one in board["panels"]] == list(range(1, len(board["panels"]) + 1))
        for panel in board["panels"]:
            assert panel["description"], (path, panel["title"])
            assert [target["refId"] for target in panel["targets"]] == sorted({t["refId"] for t in panel["targets"]})
    assert len(uids) == len(TOOL["BOARDS"])


class Lab:
    """An invented lab whose counters grow, with a page of metrics."""

    def __init__(self) -> None:
        self.cluster = Cluster("n1", "n2")
        self.looks = 0
        state = self.cluster.state
        for name, node in list(state.nodes.items()):
            state.nodes[name] = replace(node, spec=replace(node.spec, gpus=(Gpu(index=0, type="a100"),)))
            self.cluster.controller.metrics.connected(name, samples=True)
        accounting = replace(state.config.accounting, licenses=(("matlab", 2),))
        state.config = replace(state.config, accounting=accounting)
        self.job = self.cluster.submit(gpus_per_node=(GpuRequest(count=1),))
        self.cluster.run(self.job)
        self.cluster.submit(hold=True)
        self.columns = [
            ":".join((series.name, *(self.label(label) for label in series.column_labels)))
            for series in TABLE.values()
            if series.group in SAMPLED
        ]

    @staticmethod
    def label(name: str) -> str:
        return {"mode": "user", "kind": "some", "gpu": "0", "reason": "heat"}.get(name, name)

    def page(self, accept: str) -> bytes:
        """Return the page after another look at the nodes and another ended job."""
        cluster, self.looks = self.cluster, self.looks + 1
        over = cluster.submit()
        cluster.run(over)
        cluster.end(over)
        cluster.now_s += 10.0
        for name in cluster.state.nodes:
            values = [
                self.looks * 7 if TABLE[one.split(":")[0]].kind is SeriesKind.COUNTER else 0.5 for one in self.columns
            ]
            jobs = [[self.job, 0, *(self.looks * 3 for _ in JOB_COLUMNS)]]
            sample = protocol.Sample(values=values, columns=self.columns, jobs=jobs, job_columns=JOB_COLUMNS)
            cluster.controller.metrics.sampled(name, sample, cluster.now_s)
        cluster.state.training[self.job] = TrainingStatus(
            job_id=self.job, attempt=0, at_s=cluster.now_s, step=self.looks, total_steps=100, loss=0.5, samples_per_s=9.0,
            steps_per_s=1.0, checkpoint_step=1, checkpoint_at_s=None, goodput=0.9, note="",
        )  # fmt: skip
        cluster.controller.metrics.tick.observe(0.002)
        cluster.controller.metrics.request("/v1/ping", 200, 0.001)
        page = cluster.controller.metrics.page(
            ADMIN, cluster.now_s, open_metrics="openmetrics" in content_type_for(accept)
        )
        return asyncio.run(page)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def lab() -> Iterator[str]:
    """Serve the page of an invented lab; yield its address."""
    labs: list[Lab] = []  # made and used by the server's thread, which owns the database

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            labs[:] = labs or [Lab()]
            accept = self.headers.get("accept", "")
            body = labs[0].page(accept)
            self.send_response(200)
            self.send_header("Content-Type", content_type_for(accept))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def prometheus(lab: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a real Prometheus that scrapes the lab each second; yield its address."""
    program = shutil.which("prometheus")
    if program is None:
        assert os.environ.get("CI") != "true", "prometheus is missing: apt-get install prometheus"
        pytest.skip("prometheus is missing: apt-get install prometheus")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    shutil.copy(ROOT / "etc" / "prometheus" / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\n"
        "scrape_configs: [{job_name: hpcsched, honor_labels: true, scrape_timeout: 1s, "
        f"static_configs: [{{targets: ['{lab}']}}]}}]\n"
    )
    with open(folder / "log", "wb") as log:
        running = subprocess.Popen(
            [
                program,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(30)


def ask(prometheus: str, path: str, **query: str) -> Any:
    try:
        with urllib.request.urlopen(
            f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None  # it starts


def test_each_panel_of_the_dashboards_has_data_in_a_real_prometheus(prometheus: str) -> None:
    left = {where: query.replace("$__rate_interval", "20s").replace("$node", ".*") for where, query in QUERIES.items()}

    def all_have_data() -> bool:
        for where, query in list(left.items()):
            found = ask(prometheus, "query", query=query)
            if found is None:
                return False
            if any(row["value"][1] != "NaN" for row in found["result"]):
                del left[where]
        return not left

    deadline_s = time.monotonic() + 90.0
    while not all_have_data() and time.monotonic() < deadline_s:
        scrapes = ask(prometheus, "query", query="count_over_time(hpcsched_controller_epoch[10m])")
        wait_until(
            lambda seen=scrapes: (
                ask(prometheus, "query", query="count_over_time(hpcsched_controller_epoch[10m])") != seen
            )
        )
    assert left == {}


def test_a_real_prometheus_evaluates_each_alert_without_an_error(prometheus: str) -> None:
    def rules() -> Any:
        found = ask(prometheus, "rules")
        made = [rule for group in found["groups"] for rule in group["rules"]] if found else []
        return made if made and all(rule["health"] != "unknown" for rule in made) else None

    evaluated = wait_until(rules, what="the alerts to be evaluated")
    assert {rule["name"] for rule in evaluated} == {f"Hpcsched{name}" for name in TOOL["ALERTS"]}
    assert [rule for rule in evaluated if rule["health"] != "ok"] == []
    target = ask(prometheus, "targets")["activeTargets"][0]
    assert (target["health"], target["lastError"]) == ("up", "")


def test_promtool_accepts_the_scrape_configuration(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert os.environ.get("CI") != "true", "promtool is missing: apt-get install prometheus"
        pytest.skip("promtool is missing: apt-get install prometheus")
    text = (ROOT / "etc" / "prometheus" / "scrape.yml").read_text().replace("/etc/prometheus", str(tmp_path))
    for name in ("scrape.yml", "hpcsched.token", "hpcsched-ca.crt"):
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "etc" / "prometheus" / "alerts.yml", tmp_path)
    # Its own check of the certificate would need a real one.
    (tmp_path / "scrape.yml").write_text(text.replace("    tls_config:\n      ca_file", "    # ca_file"))
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "scrape.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ----- our counters and those of node_exporter

SAME = {
    "node_forks_total": "node_forks_total",
    "node_memory_total_bytes": "node_memory_MemTotal_bytes",
    "node_major_faults_total": "node_vmstat_pgmajfault",
    "node_swap_in_pages_total": "node_vmstat_pswpin",
    "node_oom_kills_total": "node_vmstat_oom_kill",
    "node_tcp_segments_sent_total": "node_netstat_Tcp_OutSegs",
    "node_tcp_retransmits_total": "node_netstat_Tcp_RetransSegs",
    "node_boot_time_seconds": "node_boot_time_seconds",
    "node_pressure_seconds_total:cpu:some": "node_pressure_cpu_waiting_seconds_total",
    "node_pressure_seconds_total:io:full": "node_pressure_io_stalled_seconds_total",
    "node_pressure_seconds_total:memory:some": "node_pressure_memory_waiting_seconds_total",
}


def test_our_counters_are_those_of_node_exporter_at_the_same_moment() -> None:
    program = shutil.which("prometheus-node-exporter")
    if program is None:
        assert os.environ.get("CI") != "true", "node_exporter is missing: apt-get install prometheus-node-exporter"
        pytest.skip("node_exporter is missing: apt-get install prometheus-node-exporter")
    port = free_port()
    running = subprocess.Popen(
        [program, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def theirs() -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        found: dict[str, float] = {}
        for family in parse_text(text):
            for one in family.samples:
                labels = {name: value for name, value in one.labels.items() if name != "cpu"}
                name = ":".join((one.name, *labels.values()))
                found[name] = found.get(name, 0.0) + one.value  # of all cpus
        return found

    try:
        wait_until(theirs, what="node_exporter")
        counters = Counters()
        before, seen, after = counters.look(), theirs(), counters.look()
    finally:
        running.terminate()
        running.wait(30)
    names = SAME | {
        f"node_cpu_seconds_total:{mode}": f"node_cpu_seconds_total:{mode}" for mode in ("user", "idle", "steal")
    }
    names |= {name: name for name in before if name.startswith(("node_network_receive", "node_disk_read"))}
    compared = {ours: other for ours, other in names.items() if ours in before and other in seen}
    assert len(compared) >= 10, sorted(seen)
    for ours, other in compared.items():
        slack = 0.01 * abs(before[ours]) if "cpu_seconds" in ours else 1e-3  # each cpu's ticks are rounded
        assert before[ours] - slack <= seen[other] <= after[ours] + slack, ours
