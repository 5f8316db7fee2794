"""srun and salloc as submitters: --no-shell, --dependency, --hold, --deadline, --licenses and others of a job of their own."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from clientrun import Client
from waiting import wait_until

from hpcsched.cli.admin.shell import ensure_directory
from hpcsched.loopback.cluster import LocalCluster


def test_no_shell_keeps_the_nodes_until_the_job_is_cancelled(cluster: LocalCluster, slurm: Client) -> None:
    granted = slurm("salloc", "--no-shell", "-N2", "-J", "kept")
    assert granted.stdout == ""
    job_id = granted.stderr.split()[-1]
    assert granted.stderr.splitlines()[-1] == f"salloc: Granted job allocation {job_id}"
    for _ in range(2):  # what ends is a step, not the job
        said = slurm("srun", f"--jobid={job_id}", "-n2", "-N2", "sh", "-c", "echo $SLURM_JOB_ID")
        assert said.stdout.split() == [job_id, job_id]
    cluster.down()
    cluster.up()
    cluster.wait_for_nodes()
    assert slurm("srun", f"--jobid={job_id}", "-n1", "echo", "there").stdout == "there\n"
    assert slurm("squeue", "-h", "-j", job_id, "-o", "%t %D %j").stdout == "R 2 kept\n"
    slurm("scancel", job_id)
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, what="the end of the job")


def test_what_srun_and_salloc_ask_of_their_jobs(cluster: LocalCluster, slurm: Client) -> None:
    first = slurm("sbatch", "--parsable", "-H", "--wrap", "true").stdout.strip()
    path = ensure_directory()

    def started(command: str, *words: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [str(path / command), "-J", "asked", *words, "true"],
            env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        ids = wait_until(lambda: slurm("squeue", "-h", "-n", "asked", "-o", "%i").stdout.split(), what="the job")
        return process, ids[0]

    asks = ("-d", f"afterok:{first}", "--deadline=now+2hours", "-t60", "--time-min=30", "--nice=7")
    for command in ("srun", "salloc"):
        process, job_id = started(command, *asks)
        shown = slurm("scontrol", "show", "job", job_id).stdout
        assert f"Dependency=afterok:{first}" in shown
        assert "Nice=7 " in shown
        assert "TimeMin=00:30:00" in shown
        assert "Deadline=Unknown" not in shown
        slurm("scancel", job_id)
        assert process.wait(60) == 1
    process, job_id = started("srun", "--hold")
    assert slurm("squeue", "-h", "-j", job_id, "-o", "%r").stdout == "JobHeldUser\n"
    slurm("scontrol", "release", job_id)
    assert process.wait(60) == 0
    slurm("scancel", first)


def test_salloc_immediate(slurm: Client) -> None:
    late = slurm("salloc", "-I1", "--begin=now+1hour", "true", check=False)
    assert late.returncode == 1
    assert "Unable to allocate resources: Requested nodes are busy" in late.stderr
    assert slurm("salloc", "-Q", "-I60", "echo", "here").stdout == "here\n"
    assert "is not a whole number" in slurm("salloc", "--immediate=soon", "true", check=False).stderr


def test_only_asks_when_it_would_start(slurm: Client) -> None:
    for command in (("srun", "--test-only", "-N2", "true"), ("sbatch", "--test-only", "-N2", "--wrap", "true")):
        assert re.fullmatch(
            command[0] + r": Job \d+ to start at 20\S+ using 2 processors on nodes n\[1-2\] in partition main\n",
            slurm(*command).stderr,
        )
    refused = slurm("srun", "--test-only", "-N9", "true", check=False)
    assert (refused.returncode, "cannot give job nine nodes" in refused.stderr) == (1, True)
    assert not slurm("squeue", "-h").stdout
    in_job = slurm("salloc", "-Q", "-N2", "srun", "--test-only", "-N2", "true")
    assert in_job.stderr.endswith("would start at once on n1,n2\n")
    assert slurm("salloc", "-Q", "srun", "--test-only", "-N3", "true", check=False).returncode == 1


TRAP = 'trap "echo got it; exit 5" USR1; while :; do sleep 0.1; done'


@pytest.mark.parametrize(
    "words",
    [
        ("srun", "-t1", "--signal=USR1@58"),
        ("salloc", "-Q", "-t1", "--signal=R:USR1@58", "srun"),
        ("salloc", "-Q", "srun", "-t1", "--signal=10@58"),
    ],
)
def test_a_signal_comes_before_the_time_limit(words: tuple[str, ...], slurm: Client) -> None:
    said = slurm(*words, "bash", "-c", TRAP, check=False)
    assert (said.returncode, said.stdout) == (5, "got it\n")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_runs_a_job_as_another_user(tmp_path: Path) -> None:
    """The cluster's sockets are where everybody may look."""
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        run_dir = Path(directory, "run")
        settings = {"controller": {"run_dir": str(run_dir), "allow_uid_below": 0}}
        with LocalCluster(Path(directory), names=("n1",), settings=settings) as own:
            own.share.chmod(0o777)
            env = {"PATH": f"{ensure_directory()}{os.pathsep}{own.env['PATH']}"}
            said = own.run("srun", "--uid=nobody", "id", "-un", env=env)
            assert said.stdout == "nobody\n"
            said = own.run("salloc", "-Q", "--uid=65534", "sh", "-c", "id -un", env=env)
            assert said.stdout == "nobody\n"
            shown = own.run("sacct", "-XnP", "-a", "-o", "User", env=env)
            assert shown.stdout.split() == ["nobody", "nobody"]


def test_salloc_wait_and_get_user_env(slurm: Client) -> None:
    late = slurm("salloc", "-W1", "--begin=now+1hour", "true", check=False)
    assert "Unable to allocate resources: Requested nodes are busy" in late.stderr
    show = ("sh", "-c", "echo ${OF_THIS_SHELL-none} $SLURM_JOB_NUM_NODES")
    assert slurm("salloc", "-Q", "--get-user-env=100L", *show, env={"OF_THIS_SHELL": "1"}).stdout == "none 1\n"
    assert slurm("salloc", "-Q", *show, env={"OF_THIS_SHELL": "1"}).stdout == "1 1\n"


def test_what_cannot_be_is_refused(slurm: Client) -> None:
    for words, why in (
        (("--dependency=afterok:999999",), "Job dependency problem"),
        (("--licenses=nosuch:1",), "nosuch"),
        (("--nice=x",), "'x'"),
        (("--deadline=now-1hour",), "deadline"),
        (("--uid=no-such-user",), "--uid"),
        (("--gid=0",), "--gid"),
        (("--no-allocate",), "--no-allocate"),
        (("-Z",), "--no-allocate"),
        (("--x11",), "ssh -X"),
        (("--signal=USR9",), "USR9"),
        (("--zzz",), "unknown option --zzz; see srun --help"),
    ):
        refused = slurm("srun", *words, "true", check=False)
        assert refused.returncode == 1
        assert why in refused.stderr, refused.stderr
