"""/metrics: what the controller counts, what nodes send, and who sees what of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from hpcnode.agent import gpu_watch, sampler
from hpcnode.agent.sampler import JOB_COLUMNS, Counters
from hpcnode.wire import protocol
from hpcsched.auth.authorize import HIDEABLE, Action, Identity, Role
from hpcsched.config.load import MetricsSettings
from hpcsched.controller import metrics
from hpcsched.controller.stepping import Stepping
from hpcsched.listing import jobs as queue
from hpcsched.metrics import slurm
from hpcsched.metrics.series import TABLE, Group, NodeSample
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import TrainingStatus

GOLDEN = Path(__file__).parents[2] / "golden"
N1 = NodeName("n1")
EVE = Identity(uid=77, user="eve", role=Role.USER)
SERVICE = Identity(uid=1003, user="prom", role=Role.SERVICE)
ALL = frozenset(HIDEABLE.values())
Samples = dict[str, float]


def lab(*names: str) -> Cluster:
    cluster = Cluster(*(names or ("n1", "n2")))
    for name in cluster.state.nodes:
        cluster.controller.metrics.connected(name, samples=True)
    return cluster


def page(cluster: Cluster, identity: Identity = ROOT, which: str = "") -> Samples:
    """Return the samples of a page: "name{label=value}" -> value; the same in both formats."""
    found = []
    for open_metrics in (False, True):
        made = cluster.controller.metrics
        coming = (
            made.slurm_page(identity, which, cluster.now_s, open_metrics=open_metrics)
            if which
            else made.page(identity, cluster.now_s, open_metrics=open_metrics)
        )
        text = asyncio.run(coming).decode()
        parse: Any = parse_open_metrics if open_metrics else parse_text
        found.append(
            {
                sample.name + "".join(f"{{{name}={value}}}" for name, value in sample.labels.items()): sample.value
                for family in parse(text)
                for sample in family.samples
                if not sample.name.startswith(("hpcsched_metrics_snapshot", "process_cpu"))
            }
        )
    assert found[0] == found[1]
    return found[0]


def send(cluster: Cluster, node: str = "n1", jobs: list[list[Any]] | None = None, **columns: Any) -> None:
    """Send a sample with these columns (``node_load1=0.5``) after the interval has gone by."""
    cluster.now_s += 10.0
    names = {name.replace("__", ":"): value for name, value in columns.items()}
    cluster.controller.metrics.sampled(
        NodeName(node),
        protocol.Sample(
            columns=list(names), values=list(names.values()), jobs=jobs or [], job_columns=["job_cpu_seconds_total"]
        ),
        cluster.now_s,
    )


def test_a_job_is_counted_from_its_submission_to_its_end() -> None:
    cluster = lab()
    first, waits = cluster.submit(), cluster.submit(nodes_min=2, cpus_per_task=2)
    cluster.run(first)
    cluster.tick(5.0)
    found = page(cluster)
    assert found["hpcsched_jobs{state=running}{partition=main}"] == 1
    assert found["hpcsched_jobs{state=pending}{partition=main}"] == 1
    assert found["hpcsched_jobs_submitted_total"] == 2
    assert sum(value for name, value in found.items() if name.startswith("hpcsched_jobs_pending{")) == 1
    assert found["hpcsched_oldest_pending_seconds{partition=main}"] >= 5.0
    assert found["hpcsched_job_wait_seconds_count{partition=main}"] == 1
    assert found["hpcsched_node_cpus_allocated{node=n1}"] == 1
    assert found["hpcsched_node_state{node=n1}{state=mixed}"] == 1
    assert found["hpcsched_node_up{node=n2}"] == 1
    assert [name for name in found if name.startswith(f"hpcsched_job_info{{job={first}}}{{user=ann}}")]
    assert not [name for name in found if f"{{job={waits}}}" in name]
    cluster.end(first, code=3)
    found = page(cluster)
    assert found["hpcsched_jobs_ended_total{state=FAILED}{partition=main}"] == 1
    assert found["hpcsched_job_run_seconds_count{partition=main}"] == 1
    assert not [name for name in found if f"{{job={first}}}" in name]


def test_a_sample_is_shown_until_it_is_old() -> None:
    cluster = lab()
    seen: list[NodeSample] = []
    cluster.controller.metrics.listeners.append(seen.append)
    send(cluster, node_load1=0.5, node_network_receive_bytes_total__eth0=2**53 + 1, node_swap_used_bytes=None)
    found = page(cluster)
    assert found["hpcsched_node_load1{node=n1}"] == 0.5
    assert found["hpcsched_node_network_receive_bytes_total{node=n1}{device=eth0}"] == 2**53 + 1
    assert not [name for name in found if "swap" in name or ("load1" in name and "n2" in name)]
    assert [sample.known()["node_load1"] for sample in seen] == [0.5]
    assert found["hpcsched_node_sample_age_seconds{node=n1}"] == 0
    cluster.now_s += 31.0
    found = page(cluster)
    assert "hpcsched_node_load1{node=n1}" not in found
    assert found["hpcsched_node_sample_age_seconds{node=n1}"] == 31


def test_the_clock_of_a_node_is_compared_when_its_sample_comes() -> None:
    cluster = lab()
    made = cluster.controller.metrics
    assert made.clock_ahead_s(N1, cluster.now_s) is None
    send(cluster, node_time_seconds=cluster.now_s + 10.0 + 75.0)
    assert made.clock_ahead_s(N1, cluster.now_s) == 75.0
    cluster.now_s += 3600.0  # the head's clock steps: what came before is not compared with it
    assert made.clock_ahead_s(N1, cluster.now_s) is None
    cluster.now_s -= 7200.0
    assert made.clock_ahead_s(N1, cluster.now_s) == 75.0
    send(cluster, node_load1=0.5)
    assert made.clock_ahead_s(N1, cluster.now_s) is None


def test_errors_are_counted_over_an_hour_and_from_zero_after_a_restart_of_the_node() -> None:
    cluster = lab()
    metrics = cluster.controller.metrics
    assert metrics.hardware(NodeName("n1"), cluster.now_s) is None
    for look in range(600):  # 100 minutes
        send(cluster, node_ecc_errors_total__corrected=look, node_on_mains=1, node_load1=1.0)
    found = metrics.hardware(NodeName("n1"), cluster.now_s)
    assert found is not None
    assert found["conditions"] == {"node_on_mains": 1}
    assert found["hours"] == pytest.approx(1.0, abs=0.01)
    assert 355 <= found["errors"]["node_ecc_errors_total:corrected"] <= 395
    cluster.welcome("n1", boot_id="boot-2", facts={"samples": True})
    send(cluster, node_ecc_errors_total__corrected=3)
    found = metrics.hardware(NodeName("n1"), cluster.now_s)
    assert found is not None
    assert found["errors"] == {"node_ecc_errors_total:corrected": 0}
    assert metrics.hardware(NodeName("n1"), cluster.now_s + 3600) is None


def test_lists_of_jobs_have_what_a_running_job_uses_now() -> None:
    cluster = lab()
    job = cluster.submit(cpus_per_task=2)
    cluster.run(job)
    assert listed(cluster, job)["use"] is None
    send(cluster, jobs=[[job, 0, 5.0]], node_load1=1.0)
    assert listed(cluster, job)["use"]["busy_cpus"] is None
    send(cluster, jobs=[[job, 0, 20.0]], node_load1=1.0)
    use = listed(cluster, job)["use"]
    assert (use["cpu_s"], use["busy_cpus"]) == (20.0, 1.5)
    assert queue.cpu_use_text(listed(cluster, job)) == "75%"
    cluster.end(job)
    assert listed(cluster, job)["use"] is None
    assert cluster.controller.metrics.live_use(cluster.job(job)) is None


def test_an_allocation_without_a_process_is_counted_as_such() -> None:
    cluster = lab()
    Stepping(cluster.controller, cluster.ports, clock=lambda: cluster.now_s, reply_head=lambda *_: None)
    held = cluster.submit(script="", no_shell=True)
    batch = cluster.submit()
    cluster.run(batch)
    (node,) = cluster.job(held).held_nodes
    seen: list[NodeSample] = []
    cluster.controller.metrics.listeners.append(seen.append)
    send(cluster, node, jobs=[[batch, 0, 5.0]], node_load1=1.0)
    send(cluster, node, node_load1=1.0)  # the node did not look at its jobs
    assert page(cluster)[f"hpcsched_job_processes{{job={held}}}"] == 0
    assert [[row.job_id for row in sample.jobs] for sample in seen] == [[batch, held], [held]]
    assert listed(cluster, held)["use"]["processes"] == 0
    assert listed(cluster, batch)["use"]["cpu_s"] == 5.0
    cluster.controller.metrics.step_nodes = lambda job_id: {node}
    send(cluster, node, node_load1=1.0)  # a step runs, and the node did not count its processes
    assert seen[-1].jobs == ()
    cluster.controller.metrics.step_nodes = lambda job_id: ()
    send(cluster, node, jobs=[[held, 0, 7.0]], node_load1=1.0)  # a step that the node still counts
    assert [row.values for row in seen[-1].jobs] == [(7.0,)]


def listed(cluster: Cluster, job: JobId) -> dict[str, Any]:
    (found,) = cluster.backend().job(ROOT, str(job))["jobs"]
    return found  # type: ignore[no-any-return]


def test_a_job_on_two_nodes_is_summed_and_has_its_training() -> None:
    cluster = lab()
    job_id = cluster.submit(nodes_min=2)
    cluster.run(job_id)
    job = cluster.job(job_id)
    for node in ("n1", "n2"):
        send(cluster, node, jobs=[[job_id, job.attempt, 30.5]], node_load1=1)
    status = TrainingStatus(
        job_id=job_id, attempt=job.attempt, at_s=cluster.now_s, step=40, total_steps=100, loss=0.25, samples_per_s=8.0,
        steps_per_s=1.0, checkpoint_step=0, checkpoint_at_s=None, goodput=0.9, note="",
    )  # fmt: skip
    cluster.state.training[job_id] = status
    found = page(cluster)
    labels = f"{{job={job_id}}}"
    assert found["hpcsched_job_cpu_seconds_total" + labels] == 61
    assert found["hpcsched_job_cpus" + labels] == 2
    assert found["hpcsched_job_training_step" + labels] == 40
    assert found["hpcsched_job_training_loss" + labels] == 0.25
    assert "hpcsched_job_training_checkpoint_step" + labels not in found  # not known
    cluster.state.training[job_id] = replace(status, attempt=job.attempt + 1)
    assert "hpcsched_job_training_step" + labels not in page(cluster)


def test_d7_a_hostile_node_says_nothing_of_others_and_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    cluster = lab()
    job_id = cluster.submit()
    cluster.run(job_id)
    (node,) = cluster.job(job_id).held_nodes
    other = "n2" if node == "n1" else "n1"
    send(cluster, node, jobs=[[job_id, 0, 5.0]], node_load1=1)
    send(
        cluster,
        other,
        jobs=[[job_id, 0, 9999.0], [10**12, 0, 1.0]],
        node_load1__n1=9,
        evil=1,
        hpcsched_node_load1=5,
        gpu_utilization_ratio__0=2**63 - 1,
        node_filesystem_size_bytes__a='"} 1\n',
    )
    found = page(cluster)
    assert found[f"hpcsched_job_cpu_seconds_total{{job={job_id}}}"] == 5
    assert [name for name in found if name.startswith("hpcsched_node_load1")] == [f"hpcsched_node_load1{{node={node}}}"]
    assert found["hpcsched_node_samples_rejected_total"] == 7
    for _ in range(1000):  # without a pause
        cluster.controller.metrics.sampled(NodeName(other), protocol.Sample(values=[1] * 1000), cluster.now_s)
    assert page(cluster)["hpcsched_node_samples_rejected_total"] == 1007
    send(cluster, other, **{f"x{i}": i for i in range(2000)})
    cluster.controller.metrics.sampled(
        NodeName("n9"), protocol.Sample(values=[1], columns=["node_load1"]), cluster.now_s
    )
    assert not [name for name in page(cluster) if "n9" in name]
    complaints = [record for record in caplog.records if "dropped what node" in record.message]
    assert len(complaints) == 1  # once an hour


def test_a_node_that_connects_again_gets_no_extra_turn() -> None:
    cluster = lab()
    send(cluster, node_load1=1)
    cluster.controller.metrics.connected(N1, samples=True)
    cluster.controller.metrics.sampled(N1, protocol.Sample(values=[2], columns=["node_load1"]), cluster.now_s)
    assert "hpcsched_node_load1{node=n1}" not in page(cluster)


def test_nodes_are_asked_for_samples_when_they_connect_if_their_agent_can() -> None:
    cluster = Cluster("n1")
    assert not cluster.sent(protocol.SampleEvery)  # an agent of an older version
    cluster.controller.metrics.connected(N1, samples=True)
    cluster.state.config = replace(
        cluster.state.config, share="/srv", metrics=MetricsSettings(interval_s=2.0, jobs=False)
    )
    cluster.controller.reconfigured()
    assert cluster.sent(protocol.SampleEvery) == [("n1", protocol.SampleEvery(2.0, ["/srv"], False))]


def test_names_of_jobs_are_escaped_and_cut() -> None:
    cluster = lab()
    for hostile in ('a"b\\c} 1', "x" * 1000, "<img onerror=1>\u202e"):
        cluster.run(cluster.submit(name=hostile))
    names = [name for name in page(cluster) if name.startswith("hpcsched_job_info")]
    assert len(names) == 3
    assert max(map(len, names)) < 300
    assert [name for name in names if 'a"b\\c} 1' in name]


def test_a4_a_user_sees_no_job_node_or_count_of_others_if_they_are_private() -> None:
    cluster = lab()
    mine, other = cluster.submit(ANN, name="secret-ann"), cluster.submit(BOB, name="secret-bob")
    for job_id in (mine, other):
        cluster.run(job_id)
    for node in ("n1", "n2"):
        send(cluster, node, jobs=[[mine, 0, 1.0], [other, 0, 1.0]], node_load1=1)
    for which in ("", *slurm.PAGES):
        seen = page(cluster, replace(ANN, hidden=ALL), which)
        assert "bob" not in str(seen), which
        assert f"{{job={other}}}" not in str(seen), which
        nobody = page(cluster, replace(EVE, hidden=ALL), which)
        assert "secret" not in str(nobody), which
        assert "{node=" not in str(nobody), which
    assert page(cluster, replace(ANN, hidden=ALL))["hpcsched_jobs{state=running}{partition=main}"] == 1
    assert "hpcsched_jobs_submitted_total" not in page(cluster, replace(ANN, hidden=ALL))
    assert page(cluster, replace(ANN, hidden=ALL), "jobs")["slurm_jobs_running"] == 1
    assert "slurm_user_jobs{username=bob}" in page(cluster, replace(SERVICE, hidden=ALL), "jobs-users-accts")
    assert "hpcsched_jobs{state=running}{partition=main}" not in page(
        cluster, replace(ANN, scope=frozenset({Action.SUBMIT}))
    )


def test_the_page_has_the_jobs_that_have_run_for_longest_up_to_the_limit() -> None:
    cluster = lab(*(f"n{i}" for i in range(5)))
    jobs = [cluster.submit() for _ in range(10)]
    for job_id in jobs:
        cluster.run(job_id)
        cluster.tick(1.0)
    cluster.state.config = replace(cluster.state.config, metrics=MetricsSettings(max_jobs=3))
    shown = {name.split("}")[0].rpartition("=")[2] for name in page(cluster) if name.startswith("hpcsched_job_info")}
    assert shown == {str(job_id) for job_id in jobs[:3]}
    cluster.state.config = replace(cluster.state.config, metrics=MetricsSettings(jobs=False))
    assert not [name for name in page(cluster) if "{job=" in name]


# ----- Slurm's pages


def test_slurms_pages_have_its_values() -> None:
    cluster = lab()
    runs = cluster.submit(cpus_per_task=2)
    cluster.run(runs)
    cluster.submit(nodes_min=2, hold=True)
    over = cluster.submit()
    cluster.run(over)
    cluster.end(over)
    (node,) = cluster.job(runs).held_nodes
    send(cluster, node, node_memory_available_bytes=12345)
    jobs = page(cluster, which="jobs")
    assert (jobs["slurm_jobs"], jobs["slurm_jobs_running"], jobs["slurm_jobs_pending"], jobs["slurm_jobs_hold"]) == (
        2,
        1,
        1,
        1,
    )
    assert (jobs["slurm_jobs_completed"], jobs["slurm_jobs_cpus_alloc"], jobs["slurm_jobs_nodes_alloc"]) == (1, 2, 1)
    nodes = page(cluster, which="nodes")
    assert (nodes["slurm_nodes"], nodes["slurm_nodes_alloc"], nodes["slurm_nodes_idle"]) == (2, 1, 1)
    assert nodes[f"slurm_node_cpus_alloc{{node={node}}}"] == 2
    assert nodes[f"slurm_node_memory_free_bytes{{node={node}}}"] == 12345
    partitions = page(cluster, which="partitions")
    assert partitions["slurm_partitions"] == 1
    assert partitions["slurm_partition_jobs_running{partition=main}"] == 1
    assert partitions["slurm_partition_jobs_max_job_nodes{partition=main}"] == 2
    assert partitions["slurm_partition_jobs_max_job_nodes_nohold{partition=main}"] == 0
    assert partitions["slurm_partition_nodes_cpus_idle{partition=main}"] == 2
    users = page(cluster, which="jobs-users-accts")
    assert users["slurm_user_jobs_running{username=ann}"] == 1
    scheduler = page(cluster, which="scheduler")
    assert scheduler["slurm_sched_stats_timestamp"] > 0
    assert scheduler["slurm_sdiag_jobs_submitted"] == 3
    assert scheduler["slurm_sdiag_jobs_completed"] == 1


def test_every_name_of_slurm_is_there() -> None:
    cluster = lab()
    cluster.run(cluster.submit(account="physics"))
    for node in ("n1", "n2"):
        send(cluster, node, node_memory_available_bytes=1)
    found = {name.split("{")[0] for which in slurm.PAGES for name in page(cluster, which=which)}
    wanted = set()
    for line in (GOLDEN / "slurm-25.11-metrics.txt").read_text().splitlines()[1:]:
        begin, _, ends = line.partition(":")
        wanted |= {begin if end == "-" else f"{begin}_{end}" for end in ends.split()}
    assert len(wanted) > 250
    assert wanted - found == set()
    later = {name for name in found - wanted if not name.endswith(("_gpus", "_gpus_alloc"))}  # of 25.11.1
    assert later == set()


# ----- the bars: series of a lab, 1,000 nodes of 40 series


def test_a_lab_of_50_nodes_with_200_gpus_and_100_jobs_has_at_most_7000_series() -> None:
    cluster = lab(*(f"n{i}" for i in range(50)))
    seen = {**Counters().look(), **sampler.sensors(), **sampler.file_systems(["/", "/tmp", "/srv"])}
    columns = [*seen, "gpu_driver_answers", *(f"node_temperature_celsius:chip{i}" for i in range(3))]
    for series in TABLE.values():
        if series.group is Group.GPU and series.column_labels:
            kinds = {"reason": tuple(gpu_watch.THROTTLE), "kind": ("corrected", "uncorrected"), "model": ("u:m",)}.get(
                series.column_labels[-1], ("",)
            )
            columns += [":".join(filter(None, (series.name, str(gpu), kind))) for gpu in range(4) for kind in kinds]
    for _ in range(100):
        cluster.run(cluster.submit())
    for name in cluster.state.nodes:
        jobs = [[job.id, 0, *(1 for _ in JOB_COLUMNS)] for job in cluster.state.jobs_on(name)]
        sample = protocol.Sample(columns=columns, values=[1] * len(columns), jobs=jobs, job_columns=JOB_COLUMNS)
        cluster.controller.metrics.sampled(name, sample, cluster.now_s)
    found = page(cluster)
    assert len([name for name in found if name.startswith("hpcsched_gpu_utilization_ratio")]) == 200
    assert len([name for name in found if name.startswith("hpcsched_job_info")]) == 100
    assert 4000 < len(found) <= 7000


# ----- 1,000 nodes


def test_the_page_of_1000_nodes_is_made_in_short_slices() -> None:
    cluster = Cluster(*(f"n{i}" for i in range(1000)), up=False)
    columns = [f"node_network_receive_bytes_total:eth{i}" for i in range(40)]
    taken_s = 0.0
    for name in cluster.state.nodes:
        cluster.controller.metrics.connected(name, samples=True)
        sample = protocol.Sample(columns=columns, values=[10**12 + i for i in range(40)])
        began_s = time.process_time()
        cluster.controller.metrics.sampled(name, sample, cluster.now_s)
        taken_s += time.process_time() - began_s
    turns: list[float] = []

    async def both() -> bytes:
        async def tick() -> None:
            while True:
                turns.append(time.process_time())
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        made = await cluster.controller.metrics.page(ROOT, cluster.now_s)
        ticking.cancel()
        return made

    text = asyncio.run(both())
    assert text.count(b"hpcsched_node_network_receive_bytes_total{") == 40_000
    assert len(turns) > 5, "the loop had no turn while the page was made"
    assert metrics.SLICE_S <= 0.005
