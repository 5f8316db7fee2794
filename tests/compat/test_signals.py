"""scancel --signal: which processes of a job a signal reaches, and how often, as scancel(1) says."""

from __future__ import annotations

from pathlib import Path

import pytest
from clientrun import Client
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

COUNTS = """
import os, signal, sys, time
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
signal.signal(signal.SIGUSR2, lambda *_: heard.append(2))
name = sys.argv[1] + (os.environ["SLURM_PROCID"] if sys.argv[1] == "task" else "")
while not os.path.exists("over"):
    with open(name + ".new", "w") as file:
        file.write("%d %d" % (heard.count(1), heard.count(2)))
    os.rename(name + ".new", name)
    time.sleep(0.02)
"""
SCRIPT = """#!/bin/bash
cd {folder}
trap 'touch script' USR1
trap '' USR2
(trap - USR2; exec /usr/bin/python3 counts.py child) &
srun -N2 -n2 /usr/bin/python3 counts.py task
echo srun $? > srun
wait
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"task0": 1, "task1": 1, "child": 0, "script": 0}),
        (("--full",), {"task0": 1, "task1": 1, "child": 1, "script": 1}),
        (("--batch",), {"task0": 0, "task1": 0, "child": 0, "script": 1}),
        (("--batch", "--full"), {"task0": 1, "task1": 1, "child": 1, "script": 1}),
    ],
)
def test_which_processes_a_signal_reaches(
    options: tuple[str, ...], expected: dict[str, int], cluster: LocalCluster, slurm: Client, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "counts.py").write_text(COUNTS)
    programs = ("child", "task0", "task1")

    def heard(which: int) -> dict[str, int]:
        return {name: int((tmp_path / name).read_text().split()[which]) for name in programs}

    job_id = slurm("sbatch", "--parsable", "-N2", stdin=SCRIPT.format(folder=tmp_path)).stdout.strip()
    try:
        wait_until(lambda: all((tmp_path / name).exists() for name in programs), what="all to listen")
        slurm("scancel", "-s", "USR1", *options, job_id)
        reached = {name for name in programs if expected[name]}
        wait_until(lambda: all(heard(0)[name] for name in reached), what="the signal")
        slurm("scancel", "-s", "USR2", "--full", job_id)  # comes behind whatever was still on its way
        wait_until(lambda: all(heard(1).values()), what="the second signal")
        assert heard(0) | {"script": expected["script"]} == expected
        assert set(heard(1).values()) == {1}
    finally:
        (tmp_path / "over").touch()
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, what="the end of the job")
    assert (tmp_path / "script").exists() == bool(expected["script"])
    assert (tmp_path / "srun").read_text() == "srun 0\n"


def test_a_signal_for_a_job_that_srun_made_reaches_its_tasks(cluster: LocalCluster, slurm: Client) -> None:
    script = "trap 'exit 7' USR1; while :; do scancel -s USR1 $SLURM_JOB_ID; sleep 0.2; done"
    assert slurm("srun", "bash", "-c", script, check=False).returncode == 7


def test_signal_9_ends_the_job(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%t").stdout == "R\n", what="the job to run")
    slurm("scancel", "-s", "KILL", job_id)
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, what="the end of the job")
    assert slurm("sacct", "-nXP", "-j", job_id, "-o", "State").stdout.startswith("CANCELLED")


def test_hcancel_says_that_a_job_has_no_steps(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%t").stdout == "R\n", what="the job to run")
    assert "runs no steps, so nothing got the signal" in slurm("hcancel", "-s", "USR1", job_id).stderr
    assert not slurm("scancel", "-s", "USR1", job_id).stderr
    slurm("scancel", job_id)
