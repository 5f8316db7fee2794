"""The rules that name what slows a job down: each cause, and nothing for jobs that are well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.metrics.findings import LEAST_LOOKS, NodeWindow, SlowCause, judge
from hpcsched.model.ids import NodeName

GIB = 1 << 30
N1, N2 = NodeName("n1"), NodeName("n2")


def window(*, job: dict[str, Any] | None = None, machine: dict[str, Any] | None = None, **more: Any) -> NodeWindow:
    """Return 30 looks at a healthy job of 4 CPUs on a node of 8, with other values for the named series."""
    made = {"cpu_seconds_total": 3.6, "memory_bytes": 3 * GIB, "memory_anonymous_bytes": 2 * GIB,
            "processes": 5, "processes_blocked": 0,
            "threads_runnable": 4, "major_faults_total": 0, "read_bytes_total": 2e6, "written_bytes_total": 1e5}  # fmt: skip
    node = {"node_cpu_seconds_total:user": 3.5, "node_cpu_seconds_total:system": 0.2, "node_cpu_seconds_total:idle": 4.3,
            "node_pressure_seconds_total:cpu:some": 0.05, "node_pressure_seconds_total:memory:some": 0.0,
            "node_pressure_seconds_total:io:some": 0.02, "node_swap_in_pages_total": 0, "node_swap_out_pages_total": 0,
            "node_disk_busy_seconds_total:sda": 0.05, "node_disk_read_bytes_total:sda": 2e6,
            "node_disk_written_bytes_total:sda": 1e5, "node_network_receive_bytes_total:eth0": 1e6,
            "node_network_transmit_bytes_total:eth0": 1e6, "node_tcp_segments_sent_total": 900,
            "node_tcp_retransmits_total": 1, "node_throttled_total:core": 0}  # fmt: skip
    spread = {f"job_{name}": _values(value) for name, value in (made | (job or {})).items()}
    whole = {key: _values(value) for key, value in (node | (machine or {})).items()}
    values: dict[str, Any] = {"node": N1, "step_s": 10.0, "cpus": 4, "node_cpus": 8, "memory_limit_bytes": 8 * GIB,
                              "link_bytes_per_s": 125e6, "job": spread, "machine": whole}  # fmt: skip
    return NodeWindow(**(values | more))


def _values(value: Any) -> list[float | None]:
    return list(value) if isinstance(value, list) else [value] * 30


def gpus(busy: Any, *, processes: Any = 1, heat: Any = 0) -> dict[str, Any]:
    return {"gpu_utilization_ratio:0": busy, "gpu_processes:0": processes, "gpu_throttle:0:heat": heat}


SAW = [0.05, 0.9, 0.1, 0.95, 0.05, 0.9] * 5
GROWING: list[float | None] = [2 * GIB + place * 0.06 * GIB for place in range(90)]
LOADED: list[float | None] = [min(4.0, 0.4 + place * 0.4) * GIB for place in range(90)]

STAGED: list[tuple[SlowCause, NodeWindow, str]] = [
    (SlowCause.HELD_EMPTY, window(job={"processes": 0, "cpu_seconds_total": 0}), "4 CPUs"),
    (SlowCause.GPU_UNUSED, window(machine=gpus(0.0, processes=0), gpus=(0,)), "no process uses it"),
    (SlowCause.GPU_UNUSED, window(machine=gpus(0.0), gpus=(0,)), "computes nothing"),
    (SlowCause.THROTTLED, window(machine={"node_throttled_total:core": [0, 0, 1] * 10}), "33%"),
    (SlowCause.THROTTLED, window(machine=gpus(0.97, heat=[0, 1] * 15), gpus=(0,)), "GPU 0"),
    (SlowCause.SWAPPING, window(machine={"node_swap_in_pages_total": 300, "node_swap_out_pages_total": 200}), "500 pages/s"),
    (
        SlowCause.CACHE_THRASH,
        window(
            job={"major_faults_total": 900, "cpu_seconds_total": 0.3, "memory_bytes": 7.9 * GIB},
            machine={"node_pressure_seconds_total:memory:some": 0.4, "node_disk_busy_seconds_total:sda": 0.99,
                     "node_pressure_seconds_total:io:some": 0.6},
        ),
        "900 faults/s",
    ),  # fmt: skip
    (SlowCause.MEMORY_LIMIT, window(job={"memory_anonymous_bytes": 7.7 * GIB}), "96%"),
    (SlowCause.MEMORY_LIMIT, window(job={"memory_anonymous_bytes": GROWING}), "8G it holds in about"),
    (
        SlowCause.OUTSIDE_LOAD,
        window(
            job={"cpu_seconds_total": 2.4},
            machine={"node_cpu_seconds_total:user": 7.6, "node_pressure_seconds_total:cpu:some": 0.7},
        ),
        "5.4 of its 8 CPUs",
    ),
    (SlowCause.OVERSUBSCRIBED, window(job={"threads_runnable": 16, "cpu_seconds_total": 3.9}), "16 threads"),
    (SlowCause.OVERSUBSCRIBED, window(job={"threads_runnable": 20, "cpu_seconds_total": 2.4}), "20 threads"),
    (SlowCause.DATA_STARVED, window(machine=gpus(SAW), gpus=(0,), job={"cpu_seconds_total": 1.02}), "one thread prepares"),
    (SlowCause.DATA_STARVED, window(machine=gpus(0.4), gpus=(0,), job={"cpu_seconds_total": 3.9}), "busy with preparing"),
    (SlowCause.DATA_STARVED, window(machine=gpus(0.4), gpus=(0,), job={"processes_blocked": 2}), "wait for files"),
    (
        SlowCause.DISK_SATURATED,
        window(
            job={"processes_blocked": 1, "written_bytes_total": 80e6},
            machine={"node_disk_busy_seconds_total:sda": 0.99, "node_disk_written_bytes_total:sda": 90e6},
        ),
        "by this job",
    ),
    (
        SlowCause.SHARE_SLOW,
        window(job={"cpu_seconds_total": 0.0}, machine={"node_filesystem_answers:/srv/share": [1] * 10 + [0] * 20}),
        "/srv/share does not answer",
    ),
    (SlowCause.SHARE_SLOW, window(job={"processes_blocked": 1, "cpu_seconds_total": 0.2}), "100%"),
    (SlowCause.NETWORK_SATURATED, window(machine={"node_network_receive_bytes_total:eth0": 121e6}), "121 MB/s by eth0"),
    (SlowCause.NETWORK_LOSS, window(machine={"node_tcp_retransmits_total": 40}), "4.4%"),
    (SlowCause.ONE_THREAD, window(job={"cpu_seconds_total": 1.0, "threads_runnable": 1}), "3 CPUs"),
    (SlowCause.IDLE, window(job={"cpu_seconds_total": 0.001, "read_bytes_total": 0, "written_bytes_total": 0}), "4 CPUs"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "staged", "words"), STAGED, ids=[f"{c.name}-{w}" for c, _, w in STAGED])
def test_each_cause_is_named_alone_with_its_numbers(cause: SlowCause, staged: NodeWindow, words: str) -> None:
    found = judge([staged])
    assert [finding.cause for finding in found] == [cause]
    assert words in found[0].text
    assert found[0].node == N1
    assert found[0].remedy


WELL: dict[str, NodeWindow] = {
    "all CPUs": window(),
    "loads its data": window(job={"memory_anonymous_bytes": LOADED}),
    "all memory that it asked for, in shared pages": window(job={"memory_anonymous_bytes": 30 * GIB}),
    "a mapped file that fills its memory": window(job={"memory_bytes": 8 * GIB, "major_faults_total": 300}),
    "one CPU": window(cpus=1, job={"cpu_seconds_total": 1.0, "threads_runnable": 1}),
    "a busy GPU": window(machine=gpus(0.96), gpus=(0,), job={"cpu_seconds_total": 1.0}),
    "a GPU that pauses for checkpoints": window(machine=gpus([0.97] * 25 + [0.1] * 5), gpus=(0,)),
    "a neighbour with the other CPUs": window(
        others_cpus=4,
        machine={"node_cpu_seconds_total:user": 7.6, "node_pressure_seconds_total:cpu:some": 0.6},
    ),
    "reads a file once": window(job={"major_faults_total": 400, "read_bytes_total": 150e6}),
    "a virtual device that is fast": window(machine={"node_network_receive_bytes_total:virtual": 9e9}),
    "no link rate known": window(link_bytes_per_s=0.0, machine={"node_network_receive_bytes_total:eth0": 9e9}),
    "a node that measures nothing": NodeWindow(node=N1, step_s=10.0, cpus=4, node_cpus=8),
}


@pytest.mark.parametrize("name", WELL)
def test_a_job_that_is_well_has_no_finding(name: str) -> None:
    assert judge([WELL[name]]) == []


@pytest.mark.parametrize(("cause", "staged", "words"), STAGED, ids=[f"{c.name}-{w}" for c, _, w in STAGED])
def test_nothing_is_said_before_there_are_enough_looks(cause: SlowCause, staged: NodeWindow, words: str) -> None:
    few = {name: values[: LEAST_LOOKS - 1] for name, values in staged.job.items()}
    short = {key: values[: LEAST_LOOKS - 1] for key, values in staged.machine.items()}
    assert judge([replace(staged, job=few, machine=short)]) == []


def test_processes_on_a_gpu_that_nvidia_smi_does_not_count_are_not_told() -> None:
    (found,) = judge([window(machine={"gpu_utilization_ratio:0": 0.0}, gpus=(0,))])
    assert found.text == "GPU 0 of 1 was below 5 % all the time"


def test_gaps_are_no_looks() -> None:
    empty = window(job={"processes": [None] * 25 + [0] * 5, "cpu_seconds_total": [None] * 30})
    assert judge([empty]) == []


def test_a_straggler_is_named_with_the_cause_on_its_node() -> None:
    slow = replace(STAGED[9][1], node=N2)
    found = judge([window(), slow], "the others wait for rank 1 on n2: 80 ms of a step's 200")
    assert [(finding.cause, finding.node) for finding in found] == [
        (SlowCause.OUTSIDE_LOAD, N2),
        (SlowCause.STRAGGLER, N2),
    ]
    assert "rank 1 on n2: 80 ms" in found[1].text
    assert found[1].text.endswith("there: load from outside")
    assert judge([window()], "checkpoints are on n1 alone") == []
    assert judge([window()], "the others wait for rank 1 on n2: 20 ms of a step's 200") == []  # ranks differ a little
    assert judge([window()], "the others wait for rank 1 on n2: 0 ms of a step's 0") == []
    assert judge([window()], f"the others wait for rank 1 on n2: {'9' * 400} ms of a step's 200") == []


@given(
    cpus=st.integers(1, 64),
    part=st.floats(0.2, 0.8),
    sizes=st.lists(st.floats(0.1, 0.85), min_size=30, max_size=30),
)
def test_no_healthy_use_of_many_cpus_is_blamed(cpus: int, part: float, sizes: list[float]) -> None:
    used = max(part * cpus, 1.3) if cpus > 1 else part
    job = {
        "cpu_seconds_total": used,
        "threads_runnable": cpus,
        "memory_anonymous_bytes": [size * 8 * GIB for size in sizes],
    }
    machine = {"node_cpu_seconds_total:user": used + 0.2}
    assert judge([window(cpus=cpus, node_cpus=64, job=job, machine=machine)]) == []
