"""srun as scripts and MPI launchers use it: in a job with nothing but what its nodes bring, and outside of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from clientrun import Client

from hpcsched.cli.admin.shell import ensure_directory
from hpcsched.loopback.cluster import LocalCluster


@pytest.fixture
def job(cluster: LocalCluster, slurm: Client, tmp_path: Path) -> Client:
    """Return a function that runs a script as a job on two nodes, two tasks each, and returns its output."""

    def run(text: str, *options: str) -> str:
        path = cluster.share / "out"
        path.unlink(missing_ok=True)
        script = f"#!/bin/bash\nexec 2>&1\n{text}\n"
        words = ("--parsable", "--wait", "-N2", "--ntasks-per-node=2", "-o", str(path), *options)
        slurm("sbatch", *words, stdin=script, check=False)
        return path.read_text()

    return run  # type: ignore[return-value]


def test_a_job_finds_srun_of_its_node(job: Client) -> None:
    said = job(
        'scontrol show hostnames; type -P srun; srun --version; srun -l -n4 sh -c "echo $SLURM_JOB_ID"', "-J", "x"
    )
    lines = str(said).splitlines()
    assert lines[:2] == ["n1", "n2"]
    assert lines[2].endswith("/bin/slurm/srun")
    assert lines[3] == "slurm 23.02.7"
    assert sorted(line.split(":")[0] for line in lines[4:]) == ["0", "1", "2", "3"]


def test_the_full_scontrol_is_found_behind_that_of_the_node(job: Client) -> None:
    assert "JobId=" in str(job("scontrol show job $SLURM_JOB_ID"))


def test_nothing_but_the_jobs_number_is_needed(job: Client) -> None:
    text = "for v in $(compgen -e | grep -E '^(SLURM|HPCSCHED)_' | grep -vx SLURM_JOB_ID); do unset $v; done\n"
    assert sorted(str(job(text + "srun -N2 -n2 sh -c 'echo $SLURM_PROCID'")).split()) == ["0", "1"]


EXIT_CODES = (
    ("true", 0),
    ("sh -c 'exit $((3 + SLURM_PROCID))'", 6),
    ("sh -c 'kill -9 $$'", 137),
    ("no-such-program", 2),
    ("--no-such-option true", 1),
    ("--mpi=pmix true", 1),
    ("-n99 true", 1),
    ("-n1 true : -n2 sh -c 'exit $((4 + SLURM_PROCID))'", 6),
    ("-n1 true : no-such-program", 2),
    ("-n1 : -n2 sh -c 'exit $((4 + SLURM_PROCID))'", 6),
    ("-n1 true : -n1", 1),
    ("-n1 true : --mem=1G true", 1),
    ("-n1 true :", 1),
    ("-n1 true : --output=3 true", 1),
    ("-n1 true : --export=NONE true", 1),
    ("--export=ALL -n1 true : --export=ALL,A=1 -n1 true : true", 0),
    ("--het-group=1 true", 1),
)


def exit_codes(job: Client, *lines: str) -> list[tuple[str, int]]:
    """Run lines of the shell in one job; return each with its exit code."""
    said = str(job("\n".join(f"{line}\necho code $?" for line in lines)))
    codes = [int(line.split()[1]) for line in said.splitlines() if line.startswith("code ")]
    return list(zip(lines, codes, strict=True))


def test_exit_codes(job: Client) -> None:
    expected = [(f"srun {words}", code) for words, code in EXIT_CODES]
    assert exit_codes(job, *(line for line, _ in expected)) == expected


def test_what_is_refused_says_what_to_do(job: Client) -> None:
    said = str(job("srun --mpi=pmi2 true; srun true : --mem=9M true; srun --mpi=list"))
    assert "srun: error: cannot start tasks with --mpi=pmi2" in said
    assert "mpirun" in said
    assert "srun: error: cannot give part 2 of the step its own --mem" in said
    assert "MPI plugin types are...\n\tnone\n" in said
    said = str(job("srun -n99 true; srun --jobid=99999 true"))
    assert "srun: error: Unable to create step for job " in said
    assert ": More processors requested than permitted\nsrun: error: cannot give the step 99 tasks" in said
    assert "srun: error: Unable to confirm allocation for job 99999: Invalid job id specified\n" in said


def test_what_launchers_say(job: Client) -> None:
    said = job(
        'srun --ntasks-per-node=1 --kill-on-bad-exit --mpi=none --cpu-bind=none --ntasks=2 sh -c "echo a"\n'
        "srun -N 2 -n 2 --input none sh -c 'cat; echo b $SLURM_NODEID'\n"
        "srun --nodelist n1,n2 -N 2 -n 2 --input none --external-launcher true\n"
        "srun -n1 --cpu-bind=q --cpus-per-task=1 --nodes=1 echo c\n"
        "srun --unbuffered --overlap --jobid=$SLURM_JOB_ID -w n2 -n1 sh -c 'echo d $SLURMD_NODENAME'\n"
        "srun --exclusive --exact --nodes 1 -n1 -l --hint=nomultithread -m block --gpu-bind=none --propagate echo e\n"
    )
    assert sorted(str(said).splitlines()) == ["0: e", "a", "a", "b 0", "b 1", "c", "d n2"]


def test_nodes_are_counted_from_the_jobs_first(job: Client) -> None:
    said = str(
        job(
            "srun -r1 -N1 -n1 -s --gres-flags=enforce-binding hostname; srun -N2 -n2 --relative=0 hostname | sort\n"
            "srun -r2 -n1 true; srun -r x -n1 true; SLURM_JOB_NODELIST= srun -r1 -n1 true"
        )
    )
    assert said.splitlines() == [
        "n2", "n1", "n2",
        "srun: error: cannot take --relative=2: the job has nodes 0 to 1",
        "srun: error: cannot take --relative=x: the job has nodes 0 to 1",
        "srun: error: cannot take --relative=1: it counts the nodes of the job that srun runs in",
    ]  # fmt: skip


def test_tasks_are_dealt_as_asked_for(job: Client) -> None:
    show = "sh -c 'echo $SLURM_PROCID $SLURMD_NODENAME $SLURM_LOCALID $SLURM_GTIDS $SLURM_DISTRIBUTION'"
    said = str(
        job(f"srun -l -m cyclic {show}; SLURM_DISTRIBUTION=plane=1 srun -l -n3 {show}; srun -m plane=2:cyclic {show}")
    )
    lines = said.splitlines()
    assert sorted(lines[:4]) == [
        "0: 0 n1 0 0,2 cyclic",
        "1: 1 n2 0 1,3 cyclic",
        "2: 2 n1 1 0,2 cyclic",
        "3: 3 n2 1 1,3 cyclic",
    ]
    assert sorted(lines[4:7]) == ["0: 0 n1 0 0,2 cyclic", "1: 1 n2 0 1 cyclic", "2: 2 n1 1 0,2 cyclic"]
    assert sorted(lines[7:]) == ["0 n1 0 0,1 plane", "1 n1 1 0,1 plane", "2 n2 0 2,3 plane", "3 n2 1 2,3 plane"]


def test_tasks_are_dealt_as_the_job_was_submitted(job: Client) -> None:
    show = "sh -c 'echo $SLURM_PROCID $SLURMD_NODENAME'"
    said = str(job(f"echo $SLURM_DISTRIBUTION $SLURM_DIST_PLANESIZE; srun {show}", "-m", "plane=1"))
    assert said.splitlines()[0] == "cyclic"  # one at a time
    assert sorted(said.splitlines()[1:]) == ["0 n1", "1 n2", "2 n1", "3 n2"]
    assert sorted(str(job(f"srun -m block {show}", "-m", "cyclic")).splitlines()) == ["0 n1", "1 n1", "2 n2", "3 n2"]


def test_several_programs(cluster: LocalCluster, job: Client) -> None:
    (cluster.share / "m.conf").write_text("0 echo server %t\n* sh -c 'echo client %o; exit %t'\n")
    said = str(job("srun --multi-prog m.conf; echo $?")).splitlines()
    errors = [f"srun: error: n{1 + task // 2}: task {task}: Exited with exit code {task}" for task in (1, 2, 3)]
    assert sorted(said) == ["3", "client 0", "client 1", "client 2", "server 0", *errors]


def test_several_programs_on_the_command_line(job: Client) -> None:
    show = "echo $SLURM_PROCID/$SLURM_NTASKS $SLURMD_NODENAME"
    said = str(job(f"srun -l -n1 sh -c '{show} a' : -n3 sh -c '{show} \"b c\"'"))
    assert sorted(said.splitlines()) == ["0: 0/4 n1 a", "1: 1/4 n1 b c", "2: 2/4 n2 b c", "3: 3/4 n2 b c"]


def test_several_programs_with_nodes_and_cpus_of_their_own(slurm: Client, job: Client) -> None:
    show = "sh -c 'echo $SLURM_PROCID/$SLURM_NTASKS $SLURMD_NODENAME $SLURM_CPUS_PER_TASK $SLURM_GTIDS'"
    said = str(job(f"srun -l -N1 -c2 {show} : -N1 --ntasks-per-node=2 {show}; srun -w n2 {show} : -w n1 -n2 {show}"))
    lines = said.splitlines()
    assert sorted(lines[:3]) == ["0: 0/3 n1 2 0", "1: 1/3 n2 1 1,2", "2: 2/3 n2 1 1,2"]
    assert sorted(lines[3:]) == ["0/3 n2 0", "1/3 n1 1,2", "2/3 n1 1,2"]  # nobody asked for cpus
    alone = slurm("srun", "-l", "-N1", "-c2", "hostname", ":", "-N2", "-n2", "printenv", "SLURM_STEP_NUM_NODES")
    assert sorted(line.split()[0] for line in alone.stdout.splitlines()) == ["0:", "1:", "2:"]
    assert "1: 3\n" in alone.stdout


def test_several_programs_with_files_and_variables_of_their_own(cluster: LocalCluster, job: Client) -> None:
    show = "sh -c 'echo $SLURM_PROCID $A $B; echo error $SLURM_PROCID >&2'"
    said = str(
        job(
            f"export A=a; srun -n1 --output=first-%j.out --export=ALL,B=one {show} :"
            f" -n2 --output=second-%t-%N.out --error=second.err --export=ALL,B=two {show} : -n1 --output=none {show}\n"
            "sort first-$SLURM_JOB_ID.out; cat second-1-n2.out second-2-n2.out; sort second.err\n"
            f"srun -l -n1 {show} : -n1 -o none -e all {show} 2>&1 | sort"
        )
    )
    assert said.splitlines() == [
        "0 a one", "error 0", "1 a two", "2 a two", "error 1", "error 2", "0: 0 a", "0: error 0", "1: error 1"
    ]  # fmt: skip


def test_a_file_of_hosts(cluster: LocalCluster, job: Client) -> None:
    (cluster.share / "hosts").write_text("n2\nn1*2\n")
    show = "sh -c 'echo $SLURM_PROCID $SLURMD_NODENAME $SLURM_DISTRIBUTION'"
    said = str(
        job(
            f"SLURM_HOSTFILE=hosts srun -m arbitrary {show}; srun -n1 -w ./hosts -N2 -n2 {show}; srun -m arbitrary true"
        )
    )
    lines = said.splitlines()
    assert sorted(lines[:3]) == ["0 n2 arbitrary", "1 n1 arbitrary", "2 n1 arbitrary"]
    assert sorted(lines[3:5]) == ["0 n1 block", "1 n2 block"]
    assert lines[5:] == [
        "srun: error: cannot place tasks with -m arbitrary: SLURM_HOSTFILE must name the file of their hosts"
    ]


def test_outside_of_a_job(slurm: Client) -> None:
    done = slurm(
        "srun", "-N2", "-n3", "-l", "sh", "-c", "echo $SLURM_STEP_TASKS_PER_NODE; exit $SLURM_PROCID", check=False
    )
    assert sorted(done.stdout.splitlines()) == ["0: 2,1", "1: 2,1", "2: 2,1"]
    assert done.returncode == 2
    assert done.stderr.startswith("srun: error: ")


def test_without_slurms_directory_on_the_path_a_job_has_no_srun(cluster: LocalCluster) -> None:
    assert str(ensure_directory()) not in cluster.env["PATH"]
    found = cluster.run("hrun", "sh", "-c", "command -v srun || true").stdout.strip()
    assert found == (shutil.which("srun", path=cluster.env["PATH"]) or "")  # Slurm's own, where it is installed
