"""The environment of batch steps and of steps, compared with recorded ones, and with what Slurm sets.

The recorded ones are in tests/golden/environment. A change that is meant: HPCSCHED_UPDATE_GOLDEN=1 records them anew.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import GpuRequest, Share
from hpcsched.model.spec import ArraySpec, JobSpec
from hpcsched.model.units import UNLIMITED_S
from hpcsched.steps.environment import (
    MASTER_PORT_LOW,
    MASTER_PORTS,
    job_environment,
    master_port,
    node_environment,
    step_environment,
    with_users,
)
from hpcsched.steps.layout import NodeTasks

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "environment"
MAN_PAGE = ROOT / "man" / "hpcsched-env.7"


def share(node: str, cpus: int = 2, tasks: int = 1, gpus: tuple[int, ...] = (), mem_mib: int = 4096) -> Share:
    return Share(node=NodeName(node), cpus=cpus, mem_mib=mem_mib, gpus=gpus, tasks=tasks)


def job(spec: JobSpec, *shares: Share) -> Job:
    return Job(
        id=JobId(128), spec_id=1, spec=spec, uid=1000, user="ann", submitted_at_s=1_800_000_000.0, partition="main",
        shares=shares, time_limit_s=3600, allocated_at_s=1_800_000_010.25,
    )  # fmt: skip


PLAIN = JobSpec(name="hello", script="#!/bin/sh\n", work_dir="/home/ann", submit_dir="/home/ann", submit_host="head")
# sbatch -N2 --ntasks-per-node=2 -c1, as recorded from a Slurm 22.05.8 on two nodes tn[1-2].
TWO_BY_TWO = replace(
    PLAIN, nodes_min=2, nodes_max=2, nodes_given=True, ntasks_per_node=2, cpus_per_task=1, cpus_per_task_given=True,
    mem_per_cpu_mib=512,
)  # fmt: skip
TN = (share("tn1", tasks=2), share("tn2", tasks=2))
FULL = replace(
    TWO_BY_TWO, account="lab", qos="high", env=(("PATH", "/bin"), ("SLURM_JOB_ID", "7")), work_dir="/data",
    array=ArraySpec(indices=(1, 3, 5), limit=2), gpus_total=(GpuRequest(count=4, type="a100"),),
    gpus_per_node=(GpuRequest(count=2),), gpus_per_task=(GpuRequest(count=1),),
)  # fmt: skip
FULL_JOB = replace(
    job(FULL, share("tn1", tasks=2, gpus=(0, 3)), share("tn2", tasks=2, gpus=(1, 2))),
    id=JobId(130), array_job_id=JobId(128), array_task_id=3, attempt=2, restarts=2,
)  # fmt: skip
LAYOUT = (
    NodeTasks(node=NodeName("tn1"), first_rank=0, count=2),
    NodeTasks(node=NodeName("tn2"), first_rank=2, count=1),
)


def batch(job: Job) -> dict[str, str]:
    return job_environment(
        job, cluster="lab", conf="/etc/hpcsched/hpcsched.toml", master_addr="10.0.0.1", share_dir="/share", gid=100
    )


def step(job: Job, layout: tuple[NodeTasks, ...] = LAYOUT, **more: int) -> dict[str, str]:
    return step_environment(
        job, 1, layout, cluster="lab", conf="/etc/hpcsched/hpcsched.toml", master_addr="10.0.0.1", share_dir="/share",
        gid=100, **more,
    )  # fmt: skip


RECORDED = {
    "batch-plain": batch(job(PLAIN, share("n1"))),
    "batch-2x2": batch(job(TWO_BY_TWO, *TN)),
    "batch-array-gpus-restarted": batch(FULL_JOB),
    "step-3-tasks": step(job(TWO_BY_TWO, *TN)),
    "step-node-2": node_environment(LAYOUT[1], node_rank=1, cpus=1, gpus=(1, 2)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_environment_is_the_recorded_one(name: str) -> None:
    text = "".join(f"{key}={value}\n" for key, value in sorted(RECORDED[name].items()))
    path = GOLDEN / f"{name}.env"
    if os.environ.get("HPCSCHED_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


# The names that this job found on Slurm, less what the node has to add (TASK_PID, and UMASK in a step); and those of the
# values that were recorded with them. The other values are by the manual.
SLURMS_NAMES = (
    "CLUSTER_NAME", "CONF", "CPUS_ON_NODE", "CPUS_PER_TASK", "GTIDS", "JOBID", "JOB_CPUS_PER_NODE", "JOB_GID", "JOB_ID",
    "JOB_NAME", "JOB_NODELIST", "JOB_NUM_NODES", "JOB_PARTITION", "JOB_UID", "JOB_USER", "LOCALID", "MEM_PER_CPU", "NNODES",
    "NODEID", "NODELIST", "NODE_ALIASES", "NPROCS", "NTASKS", "NTASKS_PER_NODE", "PRIO_PROCESS", "PROCID", "SUBMIT_DIR",
    "SUBMIT_HOST", "TASKS_PER_NODE", "TOPOLOGY_ADDR", "TOPOLOGY_ADDR_PATTERN", "WORKING_CLUSTER",
)  # fmt: skip
# What srun added to it for its tasks.
SRUNS_NAMES = (
    "DISTRIBUTION", "LAUNCH_NODE_IPADDR", "SRUN_COMM_HOST", "SRUN_COMM_PORT", "STEPID", "STEP_ID", "STEP_LAUNCHER_PORT",
    "STEP_NODELIST", "STEP_NUM_NODES", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE",
)  # fmt: skip
OF_23_02 = {"SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"}  # not in the 22.05 that was recorded
OF_A_TASK = {"SLURM_PROCID", "SLURM_LOCALID"}  # the node adds them to a step
SLURMS_VALUES = {
    "JOB_CPUS_PER_NODE": "2(x2)", "JOB_NODELIST": "tn[1-2]", "LOCALID": "0", "NODEID": "0", "NPROCS": "4", "NTASKS": "4",
    "NTASKS_PER_NODE": "2", "PROCID": "0", "TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def test_a_batch_step_finds_what_it_finds_under_slurm() -> None:
    env = batch(job(TWO_BY_TWO, *TN))
    assert slurms(env) == {f"SLURM_{name}" for name in SLURMS_NAMES} | {"SLURMD_NODENAME"} | OF_23_02
    assert {name: env[f"SLURM_{name}"] for name in SLURMS_VALUES} == SLURMS_VALUES
    assert "SLURM_MEM_PER_NODE" not in env
    assert "SLURM_RESTART_COUNT" not in env


def test_a_task_of_a_step_finds_what_it_finds_under_slurm() -> None:
    env = step(job(TWO_BY_TWO, *TN)) | node_environment(LAYOUT[1], node_rank=1, cpus=1, gpus=())
    names = {f"SLURM_{name}" for name in (*SLURMS_NAMES, *SRUNS_NAMES)} | {"SLURMD_NODENAME"} | OF_23_02
    assert slurms(env) == names - OF_A_TASK - {"SLURM_NTASKS_PER_NODE"}  # 2 and 1 tasks
    assert env["SLURM_WORKING_CLUSTER"] == "lab:head:0:0:0"


def test_the_submitters_slurm_conf_and_umask_stay() -> None:
    env = batch(job(replace(PLAIN, env=(("SLURM_CONF", "/etc/slurm.conf"), ("SLURM_UMASK", "0002"))), share("n1")))
    assert (env["SLURM_CONF"], env["SLURM_UMASK"]) == ("/etc/slurm.conf", "0002")


def slurms(env: dict[str, str]) -> set[str]:
    return {name for name in env if name.startswith(("SLURM_", "SLURMD_"))}


def test_what_was_not_asked_for_is_not_set() -> None:
    env = batch(job(PLAIN, share("n1")))
    names = set(SLURMS_NAMES) - {"NTASKS", "NPROCS", "NTASKS_PER_NODE", "CPUS_PER_TASK", "MEM_PER_CPU"} | {
        "MEM_PER_NODE"
    }
    assert slurms(env) == {f"SLURM_{name}" for name in names} | {"SLURMD_NODENAME"} | OF_23_02
    for name in (
        "NTASKS",
        "NPROCS",
        "NTASKS_PER_NODE",
        "CPUS_PER_TASK",
        "GPUS",
        "JOB_GPUS",
        "ARRAY_JOB_ID",
        "JOB_ACCOUNT",
    ):
        assert f"SLURM_{name}" not in env
        assert f"HPCSCHED_{name}" not in env
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(env)


SLURMS_ALONE = re.compile(r"SLURM_(NODE_ALIASES|TOPOLOGY_|PRIO_|CONF|WORKING_|SRUN_COMM_PORT|STEP_LAUNCHER_)")


def test_every_fact_has_both_names() -> None:
    for env in RECORDED.values():
        for name, value in env.items():
            if name.startswith("SLURM_") and not SLURMS_ALONE.match(name):
                assert env["HPCSCHED_" + name.removeprefix("SLURM_")] == value


def test_no_end_is_told_where_there_is_none() -> None:
    assert batch(job(PLAIN, share("n1")))["SLURM_JOB_END_TIME"] == "1800003610"
    for limit_s in (None, UNLIMITED_S):
        assert "SLURM_JOB_END_TIME" not in batch(replace(job(PLAIN, share("n1")), time_limit_s=limit_s))


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({}, "MEM_PER_NODE", "4096"),
        ({"mem_per_node_mib": 100}, "MEM_PER_NODE", "100"),
        ({"mem_per_node_mib": 0}, "MEM_PER_NODE", "4096"),
        ({"mem_per_cpu_mib": 100}, "MEM_PER_CPU", "100"),
        ({"ntasks": 2}, "NTASKS", "3"),
        ({"array": ArraySpec(indices=(0, 4, 8))}, "ARRAY_TASK_STEP", "4"),
        ({"array": ArraySpec(indices=(0, 4, 5))}, "ARRAY_TASK_STEP", "1"),
        ({"array": ArraySpec(indices=(7,))}, "ARRAY_TASK_STEP", "1"),
    ],
)
def test_facts_follow_from_the_job(change: dict[str, object], name: str, value: str) -> None:
    one = replace(job(replace(PLAIN, **change), share("n1", tasks=3)), array_job_id=JobId(1), array_task_id=0)
    env = batch(one)
    assert env["SLURM_" + name] == env["HPCSCHED_" + name] == value
    assert ("SLURM_MEM_PER_NODE" in env) + ("SLURM_MEM_PER_CPU" in env) == 1


def test_a_restart_is_counted_for_slurms_programs_from_the_first_one_on() -> None:
    env = batch(replace(job(PLAIN, share("n1")), restarts=1))
    assert (env["SLURM_RESTART_COUNT"], env["HPCSCHED_RESTART_COUNT"]) == ("1", "1")
    assert batch(job(PLAIN, share("n1")))["HPCSCHED_RESTART_COUNT"] == "0"


HOSTILE = {
    "SLURM_JOB_ID": "1", "SLURM_NTASKS": "99", "SLURMD_NODENAME": "x", "HPCSCHED_JOB_ID": "1", "HPCSCHED_SOCKET": "/evil",
    "HPCSCHED_MPI_HOSTS": "x", "SLURM_STEP_ID": "9", "SLURM_ANYTHING": "x",
}  # fmt: skip


def test_the_schedulers_variables_win_and_none_of_its_names_shows_through() -> None:
    clean = batch(job(PLAIN, share("n1")))
    env = batch(job(replace(PLAIN, env=(*HOSTILE.items(), ("MINE", "1"))), share("n1")))
    assert env == clean | {"MINE": "1"}
    assert with_users(HOSTILE, {"SLURM_JOB_ID": "128"}) == {"SLURM_JOB_ID": "128"}


def test_commands_in_a_job_find_their_controller() -> None:
    users = {"HPCSCHED_CONFIG": "/etc/x", "HPCSCHED_API": "/run/x", "SLURM_TIME_FORMAT": "standard"}
    assert with_users(users, {}) == users


def test_where_the_ranks_meet_is_the_users_to_say() -> None:
    ours = step(job(TWO_BY_TWO, *TN))
    assert ours["MASTER_ADDR"] == "10.0.0.1"
    env = with_users({"MASTER_ADDR": "other", "WORLD_SIZE": "77"}, ours)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"]) == ("other", ours["MASTER_PORT"], "3")
    assert env["HPCSCHED_MASTER_ADDR"] == "10.0.0.1"


def test_tasks_on_each_node_are_told_where_it_is_one_number() -> None:
    one = job(TWO_BY_TWO, *TN)
    even = tuple(replace(part, count=2) for part in LAYOUT)
    assert step(one, even)["SLURM_NTASKS_PER_NODE"] == "2"
    assert "SLURM_NTASKS_PER_NODE" not in step(one)
    assert "SLURM_NTASKS_PER_NODE" not in step(job(PLAIN, *TN), even)
    assert step(job(PLAIN, *TN), even, ntasks_per_node=2)["SLURM_NTASKS_PER_NODE"] == "2"


def test_a_steps_cpus_are_its_own() -> None:
    assert step(job(TWO_BY_TWO, *TN), cpus_per_task=3)["SLURM_CPUS_PER_TASK"] == "3"
    assert "SLURM_CPUS_PER_TASK" not in step(job(PLAIN, *TN))


def test_ports_differ_between_neighbours_and_stay_in_their_range() -> None:
    one = job(PLAIN, share("n1"))
    several = [replace(one, id=JobId(number)) for number in range(1, 200)]
    ports = {master_port(other, 0) for other in several}
    assert len(ports) == 199
    assert len({master_port(one, number) for number in range(50)}) == 50
    assert master_port(replace(one, attempt=1), 0) != master_port(one, 0)
    assert all(MASTER_PORT_LOW <= port < MASTER_PORT_LOW + MASTER_PORTS for port in ports)


def test_the_man_page_has_every_variable() -> None:
    words = re.findall(r"[A-Z][A-Z_]+", MAN_PAGE.read_text())
    names = {name for env in RECORDED.values() for name in env}
    assert {fact_of(name) for name in names} - {fact_of(word) for word in words} == set()


def fact_of(name: str) -> str:
    return re.sub(r"^(HPCSCHED|SLURM)_", "", name)


def test_gpus_that_cuda_knows_by_other_names_are_listed_by_them() -> None:
    env = node_environment(
        LAYOUT[1], node_rank=1, cpus=1, gpus=(1, 2), devices={1: "MIG-b", 2: "MIG-c"}, gpus_per_task=1
    )
    assert env["HPCSCHED_GPU_DEVICES"] == "MIG-b,MIG-c"
    assert env["HPCSCHED_STEP_GPUS_PER_TASK"] == "1"
    assert not {"SLURM_GPU_DEVICES", "SLURM_STEP_GPUS_PER_TASK"} & set(env)


def test_a_job_with_a_part_of_a_gpu_is_told_how_much() -> None:
    part = Share(node=NodeName("n1"), cpus=1, mem_mib=1, gpus=(3,), shards=2, shards_of=4)
    env = batch(job(PLAIN, part))
    assert (env["SLURM_SHARDS_ON_NODE"], env["SLURM_JOB_GPUS"]) == ("2", "3")
