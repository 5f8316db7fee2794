"""srun's input variables, --preserve-env and --overcommit, as srun(1) says: of jobs of its own, and in a job."""

from __future__ import annotations

import shlex

import pytest
from clientrun import Client
from test_srun import job  # noqa: F401 - a fixture

ENV = "srun env | grep -E '^SLURM_(NTASKS|JOB_NUM_NODES|NNODES|JOB_NAME)=' | sort -u"


@pytest.mark.parametrize(
    ("variables", "words", "tasks", "nodes"),
    [
        ({"SLURM_NTASKS": "3"}, "", 3, 1),
        ({"SLURM_NPROCS": "3"}, "", 3, 1),
        ({"SLURM_NTASKS": "3", "SLURM_NPROCS": "2"}, "", 3, 1),
        ({"SLURM_NTASKS": "3"}, "-n2", 2, 1),
        ({"SLURM_NNODES": "2"}, "", 2, 2),
        ({"SLURM_JOB_NUM_NODES": "2"}, "-n4", 4, 2),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}, "", 4, 2),
        ({"SLURM_OVERCOMMIT": "1"}, "-N1 -n9", 9, 1),
        ({}, "-N1 -n9 -O", 9, 1),
        ({}, "-O -n9", 9, 1),
        ({}, "-N2 -n9 --overcommit", 9, 2),
        ({"SLURM_MEM_PER_NODE": "64"}, "--mem-per-cpu=32", 1, 1),
    ],
)
def test_variables_and_overcommit_of_a_job_that_srun_makes(
    variables: dict[str, str], words: str, tasks: int, nodes: int, slurm: Client
) -> None:
    out = slurm("srun", *words.split(), "sh", "-c", "echo $SLURMD_NODENAME", env=variables).stdout.split()
    assert (len(out), len(set(out))) == (tasks, nodes)


def test_a_job_that_srun_makes_is_called_as_its_variable_says(slurm: Client) -> None:
    found = slurm("srun", "sh", "-c", "echo $SLURM_JOB_NAME", env={"SLURM_JOB_NAME": "mine"})
    assert found.stdout == "mine\n"
    found = slurm("srun", "-J", "yours", "sh", "-c", "echo $SLURM_JOB_NAME", env={"SLURM_JOB_NAME": "mine"})
    assert found.stdout == "yours\n"


def test_variables_in_a_job_count_once_the_user_has_set_them(job: Client) -> None:  # noqa: F811
    lines = str(
        job(
            "srun true; srun hostname | wc -l; SLURM_NTASKS=2 srun hostname | wc -l; SLURM_NNODES=1 srun hostname | wc -l"
        )
    )
    assert lines.split() == ["4", "2", "2"]
    lines = str(
        job("SLURM_JOB_NAME=other; export SLURM_JOB_NAME; " + ENV + "; sacct -nPj $SLURM_JOB_ID.0 -o JobName", "-Jx")
    )
    assert "SLURM_JOB_NAME=x" in lines
    assert "other" not in lines


def test_preserve_env(job: Client) -> None:  # noqa: F811
    shown = "sh -c 'echo $SLURM_NTASKS $SLURM_JOB_NUM_NODES' | sort -u"
    lines = str(
        job(f"export SLURM_NTASKS=7 SLURM_JOB_NUM_NODES=5; srun -n2 -N1 {shown}; srun -n2 -N1 -E {shown}")
    ).splitlines()
    assert lines == ["2 2", "7 5"]


@pytest.mark.parametrize(
    ("variables", "words", "code"),
    [
        ({"SLURM_EXIT_ERROR": "9"}, "--no-such-option true", 9),
        ({"SLURM_EXIT_ERROR": "9"}, "-N99 true", 9),
        ({"SLURM_EXIT_ERROR": "no"}, "-N99 true", 1),
        ({"SLURM_EXIT_ERROR": "9"}, "sh -c 'exit 3'", 3),
    ],
)
def test_exit_codes_of_errors(variables: dict[str, str], words: str, code: int, slurm: Client) -> None:
    assert slurm("srun", *shlex.split(words), check=False, env=variables).returncode == code


def test_overcommit_of_a_batch_job(slurm: Client, job: Client) -> None:  # noqa: F811
    text = "echo $SLURM_OVERCOMMIT $SLURM_NTASKS $SLURM_TASKS_PER_NODE $SLURM_CPUS_ON_NODE; srun hostname | wc -l"
    assert str(job(text, "-O", "-n20")).split("\n")[:2] == ["1 20 10(x2) 1", "20"]
    assert slurm("sbatch", "--parsable", "--wait", "-O", "-n100", "--wrap", "true").returncode == 0
    assert slurm("salloc", "-Q", "-O", "-N1", "-n12", "sh", "-c", "srun hostname | wc -l").stdout == "12\n"
