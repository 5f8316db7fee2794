"""Steps of a running job, one by one, from outside: scancel ID.STEP, sattach ID.STEP."""

from __future__ import annotations

import getpass
import subprocess

from clientrun import Client
from waiting import PATIENCE_S, wait_until

from hpcsched.cli.admin.shell import ensure_directory
from hpcsched.loopback.cluster import LocalCluster

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

    wait_until(lambda: f"{job_id}.0" in running(), what="the first step")
    unknown = slurm("scancel", "-v", f"{job_id}.7")
    assert f"scancel: Terminating step {job_id}.7" in unknown.stderr
    assert "Invalid job id specified" in unknown.stderr

    def first_is_over() -> bool:  # until it has set its trap a signal may be lost on the shell
        slurm("scancel", "--signal=USR1", f"{job_id}.0")
        return f"{job_id}.1" in running()

    wait_until(first_is_over, what="the second step")
    slurm("scancel", f"{job_id}.1")
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, what="the end of the job")
    shown = (cluster.share / f"slurm-{job_id}.out").read_text().splitlines()
    assert [line for line in shown if line.startswith(("first", "second", "third"))][1:] == ["second 143", "third 0"]
    assert f"srun: error: step {job_id}.1 is ended: cancelled by {getpass.getuser()}" in shown
    rows = slurm("sacct", "-n", "-P", "-j", job_id, "-o", "JobID,State").stdout.split()
    assert f"{job_id}.1|CANCELLED" in rows
    assert f"{job_id}|COMPLETED" in rows


def test_sattach(cluster: LocalCluster, slurm: Client) -> None:
    """One task runs on the node that srun runs on, and the output of the other passes the controller anyhow."""
    task = "echo early; while [ ! -e heard ]; do echo here $SLURM_PROCID; sleep 0.02; done; echo last; exit $((SLURM_PROCID + 4))"
    script = f"#!/bin/bash\nsrun -N2 -n2 sh -c '{task}'\n"
    job_id = slurm("sbatch", "--parsable", "-N2", stdin=script).stdout.strip()
    step = f"{job_id}.0"
    try:
        wait_until(lambda: step in slurm("squeue", "-h", "-s", "-j", job_id, "-o", "%i").stdout, what="the step")
        wait_until(lambda: "early" in (cluster.share / f"slurm-{job_id}.out").read_text(), what="its output")
        told = slurm("sattach", "--layout", step).stdout
        assert told.splitlines()[0] == "Job step layout:"
        assert told.splitlines()[3:] == ["  Node 0 (n1), 1 task(s): 0", "  Node 1 (n2), 1 task(s): 1"]
        shown = cluster.share / "shown"
        with shown.open("w") as out:
            command = [str(ensure_directory() / "sattach"), "-l", step]
            listener = subprocess.Popen(command, env=cluster.env, stdout=out, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: {"0: here 0", "1: here 1"} <= set(shown.read_text().splitlines()), what="both tasks")
            (cluster.share / "heard").touch()
            assert listener.wait(PATIENCE_S) == 5
        finally:
            listener.kill()
            listener.wait()
        lines = shown.read_text().splitlines()
        assert {"0: last", "1: last"} <= set(lines)
        assert "0: early" not in lines
    finally:
        (cluster.share / "heard").touch()
    gone = slurm("sattach", step, check=False)
    assert gone.returncode == 1
    assert "Invalid job id specified" in gone.stderr or "not RUNNING" in gone.stderr
