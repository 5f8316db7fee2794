"""Programs before and after a step, or a task of it: srun --prolog, --epilog, --task-prolog, --task-epilog; and --bcast."""

from __future__ import annotations

from pathlib import Path

import pytest
from clientrun import Client

from hpcsched.loopback.cluster import LocalCluster

PROLOG = (
    'echo export TOLD=two words; echo unset DROPPED; echo print rank $SLURM_PROCID begins; echo noise; echo "export =x"'
)


@pytest.fixture
def program(cluster: LocalCluster):  # type: ignore[no-untyped-def]
    """Return a function that writes a script of the shell and returns its path."""

    def write(name: str, text: str) -> str:
        path: Path = cluster.share / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_a_tasks_prolog_changes_its_environment(slurm: Client, program) -> None:  # type: ignore[no-untyped-def]
    prolog = program("prolog", PROLOG)
    show = ("sh", "-c", "echo $SLURM_PROCID $TOLD ${DROPPED-none} $SLURM_TASK_PID $$")
    said = slurm("srun", "-n2", "-N2", f"--task-prolog={prolog}", *show, env={"DROPPED": "1"}).stdout.splitlines()
    assert sorted(line for line in said if "begins" in line) == ["rank 0 begins", "rank 1 begins"]
    told = sorted(line.split() for line in said if "begins" not in line)
    assert [words[:4] for words in told] == [["0", "two", "words", "none"], ["1", "two", "words", "none"]]
    assert all(words[4] == words[5] for words in told)  # SLURM_TASK_PID is the program's
    said = slurm("srun", "echo", "in spite of it", env={"SLURM_TASK_PROLOG": program("bad", "exit 3")}, check=False)
    assert (said.returncode, said.stdout) == (3, "")
    assert "the task prolog" in said.stderr
    assert "ended with status 3" in said.stderr


@pytest.mark.parametrize(
    ("ending", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -9 $$", 137)]
)
def test_a_tasks_epilog_runs_after_it_and_leaves_its_end_as_it_is(
    ending: str,
    code: int,
    slurm: Client,
    program,  # type: ignore[no-untyped-def]
) -> None:
    epilog = program("epilog", "echo epilog of $SLURM_PROCID")
    said = slurm("srun", f"--task-epilog={epilog}", "sh", "-c", f"echo work; {ending}", check=False)
    assert (said.returncode, said.stdout) == (code, "work\nepilog of 0\n")


def test_a_task_may_wait_for_what_it_has_started(slurm: Client) -> None:
    script = "(sleep 1; echo late) & echo early"
    assert slurm("srun", "--wait-for-children", "sh", "-c", script).stdout == "early\nlate\n"
    assert slurm("srun", "sh", "-c", "(sleep 60; echo late) & echo early").stdout == "early\n"


def test_a_steps_prolog_and_epilog_run_where_srun_runs(slurm: Client, program) -> None:  # type: ignore[no-untyped-def]
    script = program("beside", 'echo "$* of ${SLURM_JOB_ID:+a job}"')
    said = slurm("srun", f"--prolog={script}", f"--epilog={script}", "-n2", "echo", "work")
    assert said.stdout == "echo work of a job\nwork\nwork\necho work of a job\n"
    failed = slurm("srun", f"--epilog={program('fails', 'exit 9')}", "--prolog=none", "sh", "-c", "exit 4", check=False)
    assert failed.returncode == 4
    assert "the epilog" in failed.stderr
    in_job = slurm("salloc", "-Q", "-N2", "srun", "-N1", f"--prolog={script}", "echo", "work")
    assert in_job.stdout == "echo work of a job\nwork\n"


def test_bcast_copies_the_program_to_the_nodes(cluster: LocalCluster, slurm: Client, program) -> None:  # type: ignore[no-untyped-def]
    path = program("tool", 'echo "$0 $1 $SLURMD_NODENAME"')
    target = cluster.share / "copy of it"
    said = slurm("srun", "-N2", f"--bcast={target}", path, "word").stdout.splitlines()
    assert sorted(said) == [f"{target} word n1", f"{target} word n2"]
    assert target.read_text() == Path(path).read_text()
    said = slurm("salloc", "-Q", "-N2", "srun", "-N2", f"--bcast={cluster.share}/", path, "x").stdout.splitlines()
    assert [Path(line.split()[0]).name.rpartition("_")[2] for line in sorted(said)] == ["n1", "n2"]
    assert all(Path(line.split()[0]).name.startswith("slurm_bcast_") for line in said)
    missing = slurm("srun", "--bcast", "no-such-program", check=False)
    assert missing.returncode == 1
    assert "cannot copy no-such-program: No such file" in missing.stderr
