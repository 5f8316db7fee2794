"""SLURM_HOSTFILE names the node of each task, of a step and of a job that srun makes; a few small things of other commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from clientrun import Client
from test_srun import job  # noqa: F401 - a fixture

SHOW = ("sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME")


@pytest.mark.parametrize(
    ("hosts", "words", "expected"),
    [
        ("n3\nn1\nn3\n", (), ["0 n3", "1 n1", "2 n3"]),
        ("n3 n1*2 n2\n", ("-n3",), ["0 n3", "1 n1", "2 n1"]),
        ("n3\nn1\n", ("-m", "arbitrary"), ["0 n3", "1 n1"]),
        ("n3\nn1\n", ("-w", "n2"), ["0 n2"]),
    ],
)
def test_a_job_that_srun_makes_has_the_hosts_of_the_file(
    hosts: str, words: tuple[str, ...], expected: list[str], slurm: Client, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(hosts)
    found = slurm("srun", *words, *SHOW, env={"SLURM_HOSTFILE": str(tmp_path / "hosts")}).stdout
    assert sorted(found.splitlines()) == expected


def test_a_step_has_the_hosts_of_the_file(job: Client, tmp_path: Path) -> None:  # noqa: F811
    tmp_path.chmod(0o755)
    (tmp_path / "hosts").write_text("n2\nn1\n")
    said = str(job(f"SLURM_HOSTFILE={tmp_path}/hosts srun sh -c 'echo $SLURM_PROCID $SLURMD_NODENAME'"))
    assert sorted(said.splitlines()) == ["0 n2", "1 n1"]


def test_small_things(slurm: Client) -> None:
    assert slurm("squeue", "-h", "--partitions=main").returncode == 0
    refused = slurm("scancel", "0", check=False)
    assert (refused.returncode, refused.stderr) == (1, "scancel: error: Invalid job id 0\n")
    assert "AccountingStorageEnforce = none" in " ".join(slurm("scontrol", "show", "config").stdout.split())


def test_srun_says_which_options_about_places_have_no_effect(slurm: Client) -> None:
    said = slurm("srun", "-v", "--use-min-nodes", "--sockets-per-node=1", "-n2", "true").stderr
    assert "srun: --use-min-nodes has no effect: it is not taken into account\n" in said
    assert "srun: --sockets-per-node has no effect: it is not taken into account\n" in said
    assert slurm("srun", "--use-min-nodes", "-n1", "true").stderr == ""  # programs take what is there for an error
