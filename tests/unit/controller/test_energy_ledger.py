"""The energy of jobs, from samples of a simulated meter to the database, the history and hacct."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.controller.energy import WRITE_EVERY_S, EnergyLedger
from hpcsched.metrics.energy import COMPONENT, ESTIMATED
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Gpu, GpuRequest

COLUMNS = ["node_energy_joules_total:package-0", "node_cpu_seconds_total:user", "node_cpu_seconds_total:idle"]


class MeteredNode:
    """n1, which counts its energy: 10 J for each second, and 90 J more for each second of a processor."""

    def __init__(self, cluster: Cluster, columns: list[str] | None = None) -> None:
        self.cluster = cluster
        self.columns = COLUMNS if columns is None else columns
        self.joules = self.user_s = self.idle_s = 0.0
        self.cpu_s: dict[int, float] = {}
        cluster.controller.metrics.connected(NodeName("n1"), samples=True)

    def work(self, lasted_s: float, **busy: float) -> None:
        """Let time pass, in which jobs (j1=...) and others use processors, and sample the node."""
        self.user_s += sum(busy.values())
        self.idle_s += 2 * lasted_s - sum(busy.values())
        self.joules += 10 * lasted_s + 90 * sum(busy.values())
        for name, seconds in busy.items():
            if name[0] == "j":
                number = int(name[1:])  # int: of this test
                self.cpu_s[number] = self.cpu_s.get(number, 0.0) + seconds
        self.cluster.tick(lasted_s)
        self.sample()

    def sample(self, *, jobs: bool = True) -> None:
        jobs_rows = [
            [number, self.cluster.job(number).attempt, self.cpu_s.get(number, 0.0)]
            for number in self.cluster.state.jobs
            if "n1" in self.cluster.job(number).held_nodes
        ]
        values = dict(zip(COLUMNS, [self.joules, self.user_s, self.idle_s], strict=True))
        said = protocol.Sample(
            columns=self.columns,
            job_columns=["job_cpu_seconds_total"],
            values=[values[name] for name in self.columns],
            jobs=jobs_rows if jobs else [],
        )
        self.cluster.controller.metrics.sampled(NodeName("n1"), said, self.cluster.now_s)
        self.cluster.tick()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster("n1", path=tmp_path / "hpcsched.db")


def energies(cluster: Cluster) -> dict[int, float]:
    found = cluster.store.load_energies([1, 2, 3])
    return {job_id: sum(use.joules for use in uses) for job_id, uses in found.items()}


def test_each_job_gets_what_its_processor_time_caused(cluster: Cluster) -> None:
    node = MeteredNode(cluster)
    node.sample()
    for who in (ANN, BOB):
        cluster.run(cluster.submit(who))
    for _ in range(20):
        node.work(10.0, j1=10.0, other=5.0)
    cluster.end(1)
    node.work(10.0)
    counted = node.joules
    found = energies(cluster)
    assert found[1] == pytest.approx(20 * (100 + 90 * 15) * 10 / 15)
    assert found.get(2, 0.0) == 0.0
    assert found[1] < counted


def test_the_energy_is_written_once_a_minute_and_after_the_end(cluster: Cluster) -> None:
    node = MeteredNode(cluster)
    node.sample()
    cluster.run(cluster.submit())
    node.work(10.0, j1=10.0)
    first = energies(cluster)[1]
    node.work(10.0, j1=10.0)
    assert energies(cluster)[1] == first
    node.work(WRITE_EVERY_S, j1=0.5)
    assert energies(cluster)[1] > 2 * first
    node.work(10.0, j1=10.0)
    cluster.end(1)
    node.work(10.0)
    assert energies(cluster)[1] == pytest.approx(3 * 1000 + WRITE_EVERY_S * 10 + 45)


def restarted(cluster: Cluster) -> None:
    """Kill the controller: the next one knows what is in the database."""
    killed = cluster.controller.energy
    cluster.controller.metrics.listeners.remove(killed.sampled)
    marks = cluster.store.energy_marks()
    energy = EnergyLedger(cluster.state, lambda work: cluster.controller.ask(work, lambda _: None, keep=True), marks)
    cluster.controller.energy = energy
    cluster.controller.metrics.listeners.append(energy.sampled)


def test_a_killed_controller_loses_no_energy_of_a_running_job(cluster: Cluster) -> None:
    node = MeteredNode(cluster)
    node.sample()
    cluster.run(cluster.submit())
    node.work(10.0, j1=10.0)  # written
    for _ in range(3):
        node.work(10.0, j1=10.0)
    assert energies(cluster)[1] == pytest.approx(1000)
    restarted(cluster)
    node.work(300.0, j1=100.0)
    assert energies(cluster)[1] == pytest.approx(node.joules)


def test_a_job_pays_no_idle_power_from_before_its_start(cluster: Cluster) -> None:
    spec = replace(cluster.state.nodes[NodeName("n1")].spec, idle_watts=10.0)
    cluster.state.nodes[NodeName("n1")] = replace(cluster.state.nodes[NodeName("n1")], spec=spec)
    node = MeteredNode(cluster)
    node.sample()
    node.joules += 10 * 90.0
    cluster.tick(90.0)
    cluster.run(cluster.submit())
    node.work(10.0)
    assert energies(cluster)[1] == pytest.approx(10 * 10 / 2)  # of its one cpu of two, for 10 of 100 s


@pytest.mark.parametrize(
    "mark",
    ["", "{", "[]", "{}", '{"boot_id": "b", "at_s": "x", "values": {}, "cpu_s": []}',
     '{"boot_id": "b", "at_s": 1, "values": {"what": 1}, "cpu_s": [[1]]}'],
)  # fmt: skip
def test_a_damaged_mark_counts_as_none(cluster: Cluster, mark: str) -> None:
    node = MeteredNode(cluster)
    cluster.ask(lambda tx: tx.put_energy([], {"n1": mark}))
    restarted(cluster)
    node.sample()
    cluster.run(cluster.submit())
    node.work(10.0, j1=10.0)
    assert energies(cluster)[1] == pytest.approx(1000)


def test_samples_without_jobs_wait_for_the_next_look_at_jobs(cluster: Cluster) -> None:
    node = MeteredNode(cluster)
    node.sample()
    cluster.run(cluster.submit())
    node.work(10.0, j1=1.0)
    node.joules += 500
    cluster.tick(10.0)
    node.sample(jobs=False)
    node.work(WRITE_EVERY_S, j1=1.0)
    assert energies(cluster)[1] == pytest.approx(node.joules)


def test_the_source_of_an_estimate_is_named(cluster: Cluster) -> None:
    spec = replace(cluster.state.nodes[NodeName("n1")].spec, idle_watts=20.0, peak_watts=60.0)
    cluster.state.nodes[NodeName("n1")] = replace(cluster.state.nodes[NodeName("n1")], spec=spec)
    node = MeteredNode(cluster, COLUMNS[1:])
    node.sample()
    cluster.run(cluster.submit())
    node.work(10.0, j1=10.0)
    (use,) = cluster.store.load_energies([1])[1]
    # Half of the cpus are busy: 40 W. Half of the idle power, and all that is above it, is the job's.
    assert (use.source, use.joules) == (ESTIMATED, pytest.approx(10 * (10 + 20)))


def test_a_node_without_meters_writes_nothing(cluster: Cluster) -> None:
    node = MeteredNode(cluster, COLUMNS[1:])
    node.sample()
    cluster.run(cluster.submit())
    node.work(100.0, j1=100.0)
    assert energies(cluster) == {}


def test_a_node_cannot_charge_a_job_that_it_does_not_have(cluster: Cluster) -> None:
    node = MeteredNode(cluster)
    cluster.submit(nodes_min=1)
    node.sample()
    rows = [[1, 7, 1e6], [2, 0, 1e6], [1, 0, -5.0]]
    said = protocol.Sample(COLUMNS, ["job_cpu_seconds_total"], [1e12, 1e6, 0.0], rows)
    cluster.tick(100.0)
    cluster.controller.metrics.sampled(NodeName("n1"), said, cluster.now_s)
    cluster.tick()
    assert set(energies(cluster)) <= {1}


def test_the_history_has_the_energy_on_request(cluster: Cluster) -> None:
    node = MeteredNode(cluster)
    node.sample()
    cluster.run(cluster.submit())
    node.work(10.0, j1=10.0)

    def history(**query: str) -> Any:
        return json.loads(asyncio.run(cluster.backend().history(ROOT, query)))["jobs"][0]

    assert "energy" not in history()
    assert history(energy="1")["energy"] == [
        {
            "job_id": 1,
            "attempt": 0,
            "node": "n1",
            "source": COMPONENT,
            "joules": pytest.approx(1000),
            "cost": None,
            "co2_g": None,
        }
    ]


def test_the_busy_part_of_the_gpus_that_a_job_holds_is_kept(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "hpcsched.db")
    node = cluster.state.nodes[NodeName("n1")]
    gpus = tuple(Gpu(index=index, type="a100") for index in range(3))
    cluster.state.nodes[NodeName("n1")] = replace(node, spec=replace(node.spec, gpus=gpus))
    job = cluster.submit(gpus_per_node=(GpuRequest(count=2),))
    cluster.run(job)
    cluster.controller.metrics.connected(NodeName("n1"), samples=True)

    def sample(*ratios: float | None) -> None:
        columns = [f"gpu_utilization_ratio:{index}" for index in range(len(ratios))]
        cluster.controller.metrics.sampled(
            NodeName("n1"), protocol.Sample(columns=columns, values=list(ratios)), cluster.now_s
        )
        cluster.tick(10.0)

    sample(1.0, 1.0, 1.0)  # of the time before it nothing is known
    for _ in range(6):
        sample(0.5, 1.0, 1.0)
    cluster.tick(1000.0)
    sample(1.0, 1.0, 1.0)  # nor of a long gap
    (use,) = cluster.store.load_gpu_uses([job])[job]
    held = cluster.job(job).shares[0].gpus
    busy = {0: 0.5, 1: 1.0, 2: 1.0}
    assert (use.seen_s, use.busy_s) == (120.0, 60.0 * sum(busy[index] for index in held))
