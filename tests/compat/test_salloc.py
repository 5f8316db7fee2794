"""salloc: a command on the head that holds the nodes of a job."""

from __future__ import annotations

import os
import signal
import subprocess

from clientrun import Client
from waiting import PATIENCE_S, wait_until

from hpcsched.cli.admin.shell import ensure_directory
from hpcsched.loopback.cluster import LocalCluster


def test_a_command_has_the_jobs_environment_and_starts_steps(slurm: Client) -> None:
    script = (
        "echo $SLURM_JOB_NODELIST $SLURM_NTASKS ${SLURM_PROCID-none}; srun -l sh -c 'echo $SLURMD_NODENAME'; exit 5"
    )
    done = slurm("salloc", "-N2", "--ntasks-per-node=2", "-J", "held", "bash", "-c", script, check=False)
    assert done.returncode == 5
    lines = done.stdout.splitlines()
    assert lines[0] == "n[1-2] 4 none"
    assert sorted(lines[1:]) == ["0: n1", "1: n1", "2: n2", "3: n2"]
    job_id = done.stderr.split()[-1]
    assert done.stderr == f"salloc: Granted job allocation {job_id}\nsalloc: Relinquishing job allocation {job_id}\n"
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, check=False).stdout == "", what="the job to end")
    assert slurm("sacct", "-Xnj", job_id, "-o", "JobName,State").stdout.split() == ["held", "COMPLETED"]


def test_a_job_that_is_cancelled_hangs_up_its_command(cluster: LocalCluster, slurm: Client) -> None:
    env = {**cluster.env, **slurm_names()}
    command = ["salloc", "-n1", "sh", "-c", "echo $SLURM_JOB_ID; exec sleep 600"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    job_id = process.stdout.readline().strip()
    slurm("scancel", job_id)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"salloc: error: Job allocation {job_id} has been revoked." in err


def test_one_that_waits_may_be_interrupted(cluster: LocalCluster, slurm: Client) -> None:
    env = {**cluster.env, **slurm_names()}
    command = ["salloc", "--begin=now+1hour", "-J", "later", "true"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "queued and waiting for resources" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert "cancelled while waiting" in process.communicate(timeout=PATIENCE_S)[1]
    wait_until(lambda: slurm("squeue", "-h", "-n", "later").stdout == "", what="the job to be gone")


def test_variables_are_defaults_of_options(slurm: Client) -> None:
    show = ("sh", "-c", "echo $SLURM_JOB_NUM_NODES; scontrol show job $SLURM_JOB_ID | grep -o 'TimeLimit=[^ ]*'")
    env = {"SALLOC_TIMELIMIT": "7", "SALLOC_SPREAD_JOB": "1", "SALLOC_OVERCOMMIT": "0"}
    assert slurm("salloc", "-Q", "-n2", *show, env=env).stdout.split() == ["2", "TimeLimit=00:07:00"]
    assert slurm("salloc", "-Q", "-t9", *show, env=env).stdout.split() == ["1", "TimeLimit=00:09:00"]
    refused = slurm("salloc", "true", check=False, env={"SALLOC_PARTITION": "nosuch"})
    assert "Invalid partition name specified" in refused.stderr


def test_the_signal_of_a_command_whose_job_is_cancelled(cluster: LocalCluster, slurm: Client) -> None:
    env = {**cluster.env, **slurm_names()}
    script = 'trap "exit 9" HUP; trap "echo got USR2; exit 0" USR2; echo $SLURM_JOB_ID; while :; do sleep 0.1; done'
    command = ["salloc", "-n1", "--kill-command=USR2", "bash", "-c", script]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    slurm("scancel", process.stdout.readline().strip())
    assert process.communicate(timeout=PATIENCE_S)[0] == "got USR2\n"
    refused = slurm("salloc", "--kill-command=zzz", "true", check=False)
    assert (refused.returncode, "zzz" in refused.stderr.lower()) == (1, True)


def test_what_is_refused(slurm: Client) -> None:
    done = slurm("salloc", "-N99", "true", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "salloc: error: Job submit/allocate failed: Requested node configuration is not available",
        "salloc: error: cannot give job 99 nodes: partition 'main' has 3",
    ]
    assert slurm("salloc", "--version").stdout == "slurm 23.02.7\n"
    assert "no-such-program" in slurm("salloc", "no-such-program", check=False).stderr


def slurm_names() -> dict[str, str]:
    """Return the PATH of somebody who uses Slurm's names."""
    return {"PATH": f"{ensure_directory()}{os.pathsep}{os.environ['PATH']}"}
