"""Python clients of Slurm from the package index, unmodified: each does here what it is used for."""

from __future__ import annotations

import re

import pytest
from clientrun import Client
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster


@pytest.mark.parametrize("what", ["submit", "tasks", "cancel", "requeue"])
def test_submitit(what: str, client: Client) -> None:
    assert client("use_submitit.py", what).stdout == "well done\n"


def test_simple_slurm(client: Client) -> None:
    assert client("use_simple_slurm.py").stdout.endswith("well done\n")


def test_psij(client: Client) -> None:
    assert client("use_psij.py").stdout == "well done\n"


@pytest.mark.minutes
def test_dask_jobqueue(client: Client) -> None:
    assert client("use_dask.py").stdout == "well done\n"


@pytest.mark.minutes
def test_parsl(client: Client) -> None:
    assert client("use_parsl.py").stdout == "well done\n"


@pytest.mark.minutes
@pytest.mark.parametrize("status", ["sacct", "squeue"])
def test_snakemake(status: str, client: Client, slurm: Client) -> None:
    """It looks at its jobs twice a minute or so."""
    assert client("use_snakemake.sh", status).stdout == "well done\n"
    rules = slurm("sacct", "-X", "-n", "-P", "-o", "Comment,State").stdout.split()
    assert {"rule_a|COMPLETED", "rule_b|COMPLETED"} <= set(rules)


@pytest.mark.minutes
@pytest.mark.timeout(600)
def test_lightning(client: Client) -> None:
    """Eight processes import torch, four at a time."""
    assert client("use_lightning.py", timeout_s=550).stdout == "well done\n"


def test_clustershell(client: Client, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "--nodelist=n2", "--mem=100M", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%t").stdout == "R\n", what="the job to run")
    assert client("use_clustershell.py", job_id, "n2").stdout == "well done\n"
    slurm("scancel", job_id)


def test_reportseff(cluster: LocalCluster, slurm: Client) -> None:
    command = "python3 -c 'import time\nwhile time.process_time() < 2: pass'"
    job_id = slurm("sbatch", "--parsable", "--wait", "-t", "2", "--mem=1G", "--wrap", command).stdout.strip()
    table = slurm("reportseff", "--no-color", job_id).stdout
    found = re.search(rf"^ *{job_id} +COMPLETED +00:00:\d\d +([\d.]+)% +([\d.]+)% +([\d.]+)%", table, re.MULTILINE)
    assert found, table
    assert 5 <= float(found[2]) <= 110
    assert 0 < float(found[3]) < 20
