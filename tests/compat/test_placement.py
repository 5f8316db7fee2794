"""Where the tasks of a job go: --spread-job, --contiguous, and both levels of --distribution."""

from __future__ import annotations

import pytest
from clientrun import Client

SHOW = ("sh", "-c", "echo $SLURMD_NODENAME")


def test_spread_job(slurm: Client) -> None:
    assert set(slurm("srun", "-n2", *SHOW).stdout.split()) == {"n1"}
    assert sorted(slurm("srun", "-n2", "--spread-job", *SHOW).stdout.split()) == ["n1", "n2"]
    assert sorted(slurm("srun", "-n5", *SHOW, env={"SLURM_SPREAD_JOB": "1"}).stdout.split()) == [
        "n1",
        "n1",
        "n2",
        "n2",
        "n3",
    ]
    said = slurm("sbatch", "--test-only", "-n3", "--spread-job", "--wrap", "true").stderr
    assert "using 3 processors on nodes n[1-3] " in said


def test_contiguous(slurm: Client) -> None:
    holder = slurm("salloc", "--no-shell", "-w", "n2", "-n4").stderr.split()[-1]
    try:
        assert sorted(slurm("srun", "-N2", *SHOW).stdout.split()) == ["n1", "n3"]
        waits = slurm("sbatch", "--parsable", "-N2", "--contiguous", "-n2", "--wrap", "true").stdout.strip()
        assert "Contiguous=1" in slurm("scontrol", "show", "job", waits).stdout
        assert slurm("squeue", "-h", "-j", waits, "-o", "%t %O").stdout.split() == ["PD", "1"]
        late = slurm("srun", "-N2", "--contiguous", "-I1", "true", check=False)
        assert late.returncode == 1
    finally:
        slurm("scancel", holder)
    assert sorted(slurm("srun", "-N2", "--contiguous", *SHOW).stdout.split()) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("block", "block"),
        ("block:cyclic", "block:cyclic"),
        ("cyclic:block:fcyclic", "cyclic:block:fcyclic"),
        ("*:*,Pack", "block:cyclic"),
        ("plane=2", "plane"),
    ],
)
def test_the_variable_has_all_levels_of_the_distribution(given: str, shown: str, slurm: Client) -> None:
    said = slurm("srun", "-N2", "-n4", "-m", given, "sh", "-c", "echo $SLURM_DISTRIBUTION").stdout.split()
    assert said == [shown] * 4
    said = slurm(
        "sbatch", "-W", "-N2", "-n4", "-m", given, "-o", "/dev/null", "--wrap", f'test "$SLURM_DISTRIBUTION" = {shown}'
    )
    assert said.returncode == 0
    in_job = slurm(
        "salloc", "-Q", "-N2", "-n4", "-m", given, "sh", "-c", "srun -n1 -N1 sh -c 'echo $SLURM_DISTRIBUTION'"
    )
    assert in_job.stdout.split() == [shown]


def test_a_distribution_that_there_is_not_is_refused(slurm: Client) -> None:
    for command, more in (("srun", ("true",)), ("sbatch", ("--wrap", "true"))):
        refused = slurm(command, "-n2", "-m", "block:sideways", *more, check=False)
        assert (refused.returncode, "block:sideways" in refused.stderr) == (1, True)
