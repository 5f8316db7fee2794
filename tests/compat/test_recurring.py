"""Recurring jobs (scrontab) and triggers (strigger), as a user types them."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest
from clientrun import Client, new_cluster
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A cluster of its own: crontabs, triggers and a drained node are no part of the queue."""
    with new_cluster() as started:
        yield started


def test_a_crontab_submits_a_job_for_its_next_time_and_again_when_that_has_ended(slurm: Client) -> None:
    text = "# nightly\n#SCRON --time=5 -J nightly\n0 4 * * * echo hello > cron.txt\n"
    slurm("scrontab", "-", stdin=text)
    assert slurm("scrontab", "-l").stdout == text

    def job() -> list[str]:
        return slurm("squeue", "-h", "-n", "nightly", "-o", "%i %T %r %l %S").stdout.split()

    wait_until(job, what="the job of the entry")
    first, state, reason, limit, start = job()
    assert (state, reason, limit, start[10:]) == ("PENDING", "BeginTime", "5:00", "T04:00:00")
    slurm("scontrol", "update", f"JobId={first}", "StartTime=now")
    wait_until(lambda: job() and job()[0] != first, what="the next job, when that one has ended")
    assert job()[4][10:] == "T04:00:00"
    assert "COMPLETED" in slurm("sacct", "-X", "-n", "-j", first, "-o", "State").stdout
    slurm("scancel", job()[0])
    wait_until(lambda: "#DISABLED: 0 4" in slurm("scrontab", "-l").stdout, what="the entry to be disabled")
    assert not job()
    slurm("scrontab", "-", stdin=text)
    wait_until(job, what="the job of the new crontab")
    slurm("scrontab", "-r")
    wait_until(lambda: not job(), what="the job to be cancelled with its crontab")
    gone = slurm("scrontab", "-l", check=False)
    assert (gone.returncode, gone.stderr) == (1, f"no crontab for {getpass.getuser()}\n")


def test_a_wrong_crontab_is_refused_and_the_old_one_stays(cluster: LocalCluster, slurm: Client) -> None:
    slurm("scrontab", "-", stdin="@yearly true\n")
    for text, why in (
        ("61 * * * * true\n", "line 1"),
        ("@daily true\n#SCRON --nosuch\n@daily true\n", "line 3"),
        ("#SCRON --array=1-3\n@daily true\n", "cannot be an array"),
    ):
        refused = slurm("scrontab", "-", stdin=text, check=False)
        assert (refused.returncode, why in refused.stderr) == (1, True), refused.stderr
    assert slurm("scrontab", "-l").stdout == "@yearly true\n"
    editor = cluster.share / "editor.sh"
    editor.write_text("#!/bin/sh\necho '@hourly false' >> \"$1\"\n")
    editor.chmod(0o755)
    slurm("scrontab", "-e", env={"EDITOR": str(editor), "VISUAL": ""})
    assert slurm("scrontab", "-l").stdout == "@yearly true\n@hourly false\n"
    slurm("scrontab", "-r")


def test_a_crontab_outlives_the_controller(cluster: LocalCluster, slurm: Client) -> None:
    slurm("scrontab", "-", stdin="#SCRON -J kept\n@yearly true\n")
    wait_until(lambda: slurm("squeue", "-h", "-n", "kept").stdout, what="its job")
    before = slurm("squeue", "-h", "-n", "kept", "-o", "%i").stdout
    cluster.down()
    cluster.up()
    assert slurm("scrontab", "-l").stdout == "#SCRON -J kept\n@yearly true\n"
    assert slurm("squeue", "-h", "-n", "kept", "-o", "%i").stdout == before
    slurm("scrontab", "-r")


def test_triggers_run_programs_when_jobs_end_and_nodes_change(
    cluster: LocalCluster, slurm: Client, tmp_path: Path
) -> None:
    program = tmp_path / "told.sh"
    program.write_text(f'#!/bin/sh\necho "$@" $(id -un) >> {tmp_path}/told\n')
    program.chmod(0o755)
    me = getpass.getuser()

    def told() -> list[str]:
        path = tmp_path / "told"
        return path.read_text().splitlines() if path.exists() else []

    job_id = slurm("sbatch", "--parsable", "--hold", "--wrap", "true").stdout.strip()
    slurm("strigger", "--set", "-j", job_id, "--fini", "-p", f"{program} ended")
    rows = slurm("strigger", "--get", "-h").stdout.split()
    assert rows[1:7] == ["job", job_id, "fini", "0", me, str(program)]
    slurm("strigger", "--set", "--node=n2", "--drained", "--flags=PERM", "-p", str(program))
    slurm("scontrol", "release", job_id)
    wait_until(lambda: told() == [f"ended {job_id} {me}"], what="the program of the job's trigger")
    for _ in range(2):
        count = len(told())
        slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
        wait_until(lambda count=count: told()[count:] == [f"n2 {me}"], what="the program of the node's trigger")
        slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    (number,) = [line.split()[0] for line in slurm("strigger", "--get", "-h").stdout.splitlines()]
    slurm("strigger", "--clear", f"--id={number}")
    assert slurm("strigger", "--get", "-h").stdout == ""


def test_wrong_triggers_are_refused(slurm: Client) -> None:
    for words, why in (
        (["--set", "-j", "99999999", "--fini", "-p", "/bin/true"], "Invalid job id specified"),
        (["--set", "--node=nosuch", "--down", "-p", "/bin/true"], "Invalid node name specified"),
        (["--set", "--node=n1", "--down", "-p", "true"], "absolute path"),
        (["--set", "--node=n1", "--fini", "-p", "/bin/true"], "of a --jobid"),
        (["--set", "--node=n1", "--down", "-o", "99999", "-p", "/bin/true"], "0 to 32767"),
        (["--clear"], "give --id"),
        (["--clear", "--id=77"], "there is no such one"),
        (["--get", "--set"], "give one of"),
    ):
        refused = slurm("strigger", *words, check=False)
        assert (refused.returncode, why in refused.stderr) == (1, True), (words, refused.stderr)
