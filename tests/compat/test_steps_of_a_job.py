"""Steps of a running job, one by one, from outside: scancel ID.STEP."""

from __future__ import annotations

import getpass

from clientrun import Client
from waiting import wait_until

from hpcsched.demo.cluster import LocalCluster

SCRIPT = """#!/bin/bash
srun -n1 sh -c 'trap "echo got it; exit 7" USR1; while :; do sleep 0.1; done'
echo first $?
srun -n1 sleep 600
echo second $?
srun -n1 true
echo third $?
"""


def test_scancel_of_a_step(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", stdin=SCRIPT).stdout.strip()

    def running() -> list[str]:
        return slurm("squeue", "-h", "-s", "-j", job_id, "-o", "%i").stdout.split()

    wait_until(lambda: f"{job_id}.0" in running(), 30, "the first step")
    unknown = slurm("scancel", "-v", f"{job_id}.7")
    assert f"scancel: Terminating step {job_id}.7" in unknown.stderr
    assert "Invalid job id specified" in unknown.stderr

    def first_is_over() -> bool:  # until it has set its trap a signal may be lost on the shell
        slurm("scancel", "--signal=USR1", f"{job_id}.0")
        return f"{job_id}.1" in running()

    wait_until(first_is_over, 30, "the second step")
    slurm("scancel", f"{job_id}.1")
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, 60, "the end of the job")
    shown = (cluster.share / f"slurm-{job_id}.out").read_text().splitlines()
    assert [line for line in shown if line.startswith(("first", "second", "third"))][1:] == ["second 143", "third 0"]
    assert f"srun: error: step {job_id}.1 is ended: cancelled by {getpass.getuser()}" in shown
    rows = slurm("sacct", "-n", "-P", "-j", job_id, "-o", "JobID,State").stdout.split()
    assert f"{job_id}.1|CANCELLED" in rows
    assert f"{job_id}|COMPLETED" in rows
