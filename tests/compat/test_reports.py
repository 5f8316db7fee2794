"""What Slurm's users ask after their jobs have run: seff, sreport; and sgather from within one."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterator

import pytest
from clientrun import Client, new_cluster

from hpcsched.loopback.cluster import LocalCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A cluster of its own: the reports count all jobs that it has run."""
    with new_cluster() as started:
        yield started


def test_seff_has_the_lines_that_slurms_has(slurm: Client) -> None:
    busy = "import time; \\nwhile time.process_time() < 2: pass"
    done = slurm("sbatch", "--parsable", "--wait", "-c2", "--mem=200M", "--wrap", f"printf '{busy}' | python3 -")
    job_id = done.stdout.strip()
    lines = dict(line.split(": ", 1) for line in slurm("seff", job_id).stdout.splitlines())
    assert list(lines) == [
        "Job ID", "Cluster", "User/Group", "State", "Nodes", "Cores per node", "CPU Utilized", "CPU Efficiency",
        "Job Wall-clock time", "Memory Utilized", "Memory Efficiency",
    ]  # fmt: skip
    assert (lines["Job ID"], lines["State"], lines["Cores per node"]) == (job_id, "COMPLETED (exit code 0)", "2")
    part, walltime = re.fullmatch(r"(\d+\.\d\d)% of (\d\d:\d\d:\d\d) core-walltime", lines["CPU Efficiency"]).groups()
    assert "00:00:02" <= lines["CPU Utilized"] < walltime
    assert 0 < float(part) <= 60
    assert lines["Memory Efficiency"].endswith("% of 200.00 MB")


def test_seff_of_what_has_not_run_or_is_not_there(slurm: Client) -> None:
    held = slurm("sbatch", "--parsable", "--hold", "--wrap", "true").stdout.strip()
    assert slurm("seff", held).stdout.splitlines()[-1] == "Efficiency not available for jobs in the PENDING state."
    slurm("scancel", held)
    unknown = slurm("seff", "99999999", check=False)
    assert (unknown.returncode, "Invalid job id specified" in unknown.stderr) == (1, True)
    assert slurm("seff", check=False).returncode == 1


def test_sreport_counts_what_jobs_used(slurm: Client) -> None:
    slurm("sbatch", "--wait", "-n2", "--wrap", "sleep 2")
    me = getpass.getuser()
    rows = slurm("sreport", "-nP", "-t", "seconds", "cluster", "utilization", "start=now-1hour", "end=now").stdout
    cluster, allocated, down, _, idle, _, reported = rows.strip().split("|")
    assert cluster == "demo"
    assert int(allocated) >= 4
    assert int(down) == 0
    assert abs(int(allocated) + int(idle) - int(reported)) <= 1
    assert int(allocated) < int(reported) < 3 * 4 * 3600, "nodes count since they were first seen"
    top = slurm("sreport", "-nP", "-t", "seconds", "user", "top", "start=now-1hour", "end=now").stdout.split("|")
    assert top[1] == me
    assert int(top[4]) == int(allocated)
    table = slurm("sreport", "cluster", "AccountUtilizationByUser", "start=now-1hour", "end=now").stdout.splitlines()
    assert table[1].startswith("Cluster/Account/User Utilization 20")
    assert table[2] == "Usage reported in CPU Minutes"
    assert table[4] == "  Cluster         Account     Login     Proper Name     Used   Energy "
    assert [line.split()[:3] for line in table[6:]][1] == ["demo", "root", me]
    shown = slurm("sreport", "cluster", "utilization").stdout
    assert "PLND Dow" in shown
    wrong = slurm("sreport", "cluster", "nosuch", check=False)
    assert (wrong.returncode, "Not valid report" in wrong.stderr) == (1, True)


def test_sgather_brings_a_file_of_each_node(cluster: LocalCluster, slurm: Client) -> None:
    script = (
        "#!/bin/bash\nsrun -N2 -n2 sh -c 'echo from $SLURMD_NODENAME > $HPCSCHED_SPOOL_FILE'\n"
        "sgather -p $HPCSCHED_SPOOL_FILE gathered && cat gathered.* && sgather $HPCSCHED_SPOOL_FILE gathered"
    ).replace("$HPCSCHED_SPOOL_FILE", "/tmp/hpcsched-gather.$SLURM_JOB_ID")
    # All nodes are this machine: one file, which each of them names as its own.
    done = slurm("sbatch", "--parsable", "--wait", "-N2", stdin=script, check=False)
    job_id = done.stdout.strip()
    lines = (cluster.share / f"slurm-{job_id}.out").read_text().splitlines()
    assert [line[:6] for line in lines[:2]] == ["from n"] * 2
    assert "it is there already; -f writes over it" in lines[2]
