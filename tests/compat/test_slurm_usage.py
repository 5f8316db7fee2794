"""What Slurm's commands say of themselves: --usage of each, and what -v prints of a step and a submission."""

from __future__ import annotations

import re

import pytest
from clientrun import Client

from hpcsched.cli.admin.shell import COMMANDS


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "strigger"])
def test_each_command_shows_its_options_in_short(name: str, slurm: Client) -> None:
    said = slurm(name, "--usage").stdout.splitlines()
    assert said[0].startswith(f"Usage: {name} [-")
    assert max(map(len, said)) <= 80
    assert "Usage" in slurm(name, "--help").stdout


@pytest.mark.parametrize("name", ["sbatch", "srun", "salloc"])
def test_options_stand_where_slurms_help_has_them(name: str, slurm: Client) -> None:
    said = slurm(name, "--help").stdout
    headings = [line[:-1] for line in said.splitlines() if line.endswith(" options:")]
    assert headings == [
        "Parallel run options", "Constraint options", "Consumable resources related options", "Affinity/Multi-core options",
        "GPU scheduling options", "Further options", "Help options", "Other options",
    ]  # fmt: skip
    order = ["account", "begin", "dependency", "deadline", "gres", "hold", "job-name", "ntasks", "nodes", "overcommit",
             "signal", "time", "verbose", "contiguous", "constraint", "nodelist", "exclude", "gpus", "version"]  # fmt: skip
    found = [said.index(f"--{option}", said.index("Parallel run")) for option in order]
    assert found == sorted(found)
    assert slurm(name, "--usage").stdout.rstrip().count("[-V]") == 1


def test_short_usage_has_slurms_order(slurm: Client) -> None:
    said = slurm("squeue", "--usage").stdout
    assert said.startswith("Usage: squeue [-A LIST] [-a] [-h] [-i SECONDS] [-j LIST] [--json] [-l]")
    assert slurm("hrun", "--usage").stdout.startswith(
        "Usage: hrun [-A NAME] [--bcast=PATH] [-b TIME] [-D DIR]"
    )  # its own


@pytest.mark.parametrize("name", ["srun", "salloc", "hrun", "halloc"])
def test_an_unknown_option_points_to_the_help_of_its_command(name: str, slurm: Client) -> None:
    for word in ("--nosuchoption", "--zzz", "-Y"):
        said = slurm(name, word, "true", check=False)
        assert said.returncode in (1, 2)
        assert said.stderr.lower().endswith(f" see {name} --help\n")


def test_srun_and_sbatch_tell_what_they_do(slurm: Client) -> None:
    said = slurm("srun", "-v", "-N2", "-n3", "true").stderr.splitlines()
    assert [line for line in said if line.startswith("srun: defined options")]
    assert "srun: ntasks              : 3" in said
    step = [line for line in said if "launching" in line]
    assert re.fullmatch(r"srun: launching StepId=\d+\.0 on host n1, 2 tasks: \[0-1\]", step[0])
    assert re.fullmatch(r"srun: launching StepId=\d+\.0 on host n2, 1 tasks: 2", step[1])
    (placed,) = [line for line in said if line.startswith("srun: jobid ")]
    assert re.fullmatch(r"srun: jobid \d+: nodes\(2\):`n1,n2', cpu counts: 2\(x1\),1\(x1\)", placed)
    said = slurm("sbatch", "-v", "-J", "told", "--wrap", "srun -v hostname").stderr.splitlines()
    assert "sbatch: job-name            : told" in said
    assert said[-1] == "sbatch: end of defined options"
