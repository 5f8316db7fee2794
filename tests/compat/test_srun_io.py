"""srun's files, input, exit codes and waits, as srun(1) says: each case is a script in a job on two nodes, two tasks each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from clientrun import Client
from test_srun import exit_codes, job  # noqa: F401 - a fixture
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

SHOW = "sh -c 'echo out $SLURM_PROCID; echo err $SLURM_PROCID >&2'"


def files(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(path.read_text().splitlines()) for path in folder.iterdir()}


# Of one job, in which each is a step: JOB and STEP stand for their numbers.
PATTERNS = (
    ("-n2 -N2 -o %t.out -e %t.err", {f"{t}.{s}": [f"{s} {t}"] for t in (0, 1) for s in ("out", "err")}),
    (
        "-n4 -o %N-%n.%s",
        {"n1-0.STEP": ["err 0", "err 1", "out 0", "out 1"], "n2-1.STEP": ["err 2", "err 3", "out 2", "out 3"]},
    ),
    ("-n2 -o 1 -e all.err", {"all.err": ["err 0", "err 1"]}),
    ("-n12 -O -o %3t", {f"{t:03}": [f"err {t}", f"out {t}"] for t in range(12)}),
    ("-n1 -J my/name -o %x-%u-%%-%A", {f"my_name-{os.environ.get('USER', 'root')}-%-JOB": ["err 0", "out 0"]}),
    ("-n2 -l -o %j.%s.out", {"JOB.STEP.out": ["0: err 0", "0: out 0", "1: err 1", "1: out 1"]}),
    ("-n2 -o %t -e both", {"0": ["out 0"], "1": ["out 1"], "both": ["err 0", "err 1"]}),
    ("-n1 -o none -e J%J", {"JJOB.STEP": ["err 0"]}),
)


def folders(base: Path, names: Iterable[object]) -> list[Path]:
    """Make a folder for each name, in which all users can write."""
    base.chmod(0o777)
    made = [base / str(name) for name in names]
    for folder in made:
        folder.mkdir()
        folder.chmod(0o777)
    return made


def test_output_goes_where_its_pattern_says(tmp_path: Path, job: Client) -> None:  # noqa: F811
    places = folders(tmp_path, range(len(PATTERNS)))
    cases = list(zip(places, PATTERNS, strict=True))
    steps = [f"cd {folder}; srun {options} {SHOW}; echo $SLURM_JOB_ID $?" for folder, (options, _) in cases]
    said = str(job("\n".join(steps))).splitlines()
    job_id = said[-1].split()[0]
    assert said == [line for options, _ in PATTERNS for line in (*["out 1"] * ("-o 1" in options), f"{job_id} 0")]
    for number, (folder, (_, expected)) in enumerate(cases):
        assert files(folder) == {
            name.replace("JOB", job_id).replace("STEP", str(number)): lines for name, lines in expected.items()
        }


INPUTS = (
    ("echo hi | srun -n3 sh -c 'read x; echo $SLURM_PROCID $x'", ["0 hi", "1", "2"]),
    ("echo hi | srun -n3 -i all sh -c 'read x; echo $SLURM_PROCID $x'", ["0 hi", "1 hi", "2 hi"]),
    ("echo hi | srun -n3 -i 2 sh -c 'read x; echo $SLURM_PROCID $x'", ["0", "1", "2 hi"]),
    ("echo hi | srun -n3 -i none sh -c 'read x; echo $SLURM_PROCID $x'", ["0", "1", "2"]),
    ("echo hi > f; srun -n2 -N2 --input=f sh -c 'read x; echo $SLURM_PROCID $x'", ["0 hi", "1 hi"]),
    ("echo a > i0; echo b > i1; srun -n2 -i i%t sh -c 'read x; echo $SLURM_PROCID $x'", ["0 a", "1 b"]),
    ("printf 'x\\ny\\n' | while read l; do srun -n1 -i none echo $l; done", ["x", "y"]),
)


def test_input_reaches_the_tasks_that_are_to_have_it(job: Client) -> None:  # noqa: F811
    said = str(job("\n".join(f"{line}\necho end" for line, _ in INPUTS)))
    assert [sorted(part.splitlines()) for part in said.split("end\n")[:-1]] == [expected for _, expected in INPUTS]


EXIT_CODES = (
    ("srun -n3 sh -c 'exit $SLURM_PROCID'", 2),
    ("srun -n2 sh -c 'kill -$((SLURM_PROCID + 9)) $$'", 138),
    ("srun -n2 sh -c '[ $SLURM_PROCID = 0 ] || exit 3; kill -15 $$'", 143),
    ("srun --kill-on-bad-exit=1 -n4 sh -c '[ $SLURM_PROCID = 3 ] && exit 5; exec sleep 600'", 143),
    ("SLURM_KILL_BAD_EXIT=1 srun -n4 sh -c '[ $SLURM_PROCID = 3 ] && exit 5; exec sleep 600'", 143),
    ("srun -W 1 -n2 sh -c '[ $SLURM_PROCID = 1 ] && exit 0; exec sleep 600'", 137),
    ("srun -n1 /etc/passwd", 13),
    ("srun -D /nonexistent -n1 true", 1),
    ("timeout -s TERM 3 srun -n2 sleep 600", 124),
    ("srun --jobid=99999 true", 1),
    ("srun -w n3 true", 1),
    ("srun", 1),
)


def test_exit_codes(job: Client) -> None:  # noqa: F811
    assert exit_codes(job, *(line for line, _ in EXIT_CODES)) == list(EXIT_CODES)


@pytest.mark.minutes
def test_a_step_ends_with_its_own_time_limit(job: Client) -> None:  # noqa: F811
    """Seconds are rounded up to a minute."""
    assert exit_codes(job, line := "srun -t 0:02 -n1 sleep 600") == [(line, 143)]


def test_steps_wait_for_cpus_and_say_so(job: Client) -> None:  # noqa: F811
    said = str(
        job(
            "srun --exact -n4 -c1 sh -c 'touch up; echo first; while [ ! -e go ]; do sleep 0.1; done' &\n"
            "until [ -e up ]; do sleep 0.1; done\n"
            "srun --overlap -n1 echo beside\n"
            "srun --exact -n1 echo second 2>&1 | tee busy &\n"
            "until grep -q 'temporarily disabled' busy; do sleep 0.1; done; touch go; wait; rm up go busy"
        )
    ).splitlines()
    assert said.index("beside") < said.index("second")
    busy = [line for line in said if "temporarily disabled" in line]
    assert busy == [
        f"srun: Job {busy[0].split()[2]} step creation temporarily disabled, retrying (Requested nodes are busy)"
    ]
    assert f"srun: Step created for StepId={busy[0].split()[2]}.2" in said


def test_who_is_ended_after_the_first_task_is_told_in_slurms_words(job: Client) -> None:  # noqa: F811
    task = "if [ $SLURM_PROCID = 1 ]; then exit 3; fi; sleep 600"
    said = str(job(f"srun -N2 -n2 --wait=1 sh -c '{task}'; echo $?")).splitlines()
    step = said[1].split()[1]
    assert said == [
        "srun: First task exited 1s ago",
        f"srun: {step} task 0: running",
        f"srun: {step} task 1: exited",
        f"srun: Terminating {step}",
        "srun: error: n1: task 0: Killed",
        "srun: error: n2: task 1: Exited with exit code 3",
        "137",
    ]


def test_a_step_from_outside_of_its_job(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "-N2", "--wrap", "while [ ! -e over ]; do sleep 0.1; done").stdout.strip()
    show = "echo $SLURM_JOB_ID $SLURM_STEP_ID $SLURM_PROCID $SLURMD_NODENAME; exit 4"
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%t").stdout == "R\n", what="the job to run")
    try:
        wait = slurm("srun", f"--jobid={job_id}", "--overlap", "-w", "n2", "-n1", "sh", "-c", show, check=False)
        assert (wait.returncode, wait.stdout) == (4, f"{job_id} 0 0 n2\n")
        by_env = slurm("srun", "--overlap", "-N2", "sh", "-c", show, check=False, env={"SLURM_JOB_ID": job_id})
        assert sorted(by_env.stdout.splitlines()) == [f"{job_id} 1 0 n1", f"{job_id} 1 1 n2"]
    finally:
        (cluster.share / "over").touch()


def test_output_files_are_opened_as_open_mode_says(tmp_path: Path, job: Client) -> None:  # noqa: F811
    modes = {"a": ["1", "2"], "Append": ["1", "2"], "t": ["2"], "truncate": ["2"]}
    places = folders(tmp_path, modes)
    both = "srun -n1 --open-mode=$m -o one echo $i; srun -n1 --open-mode=$m -o %t echo $i"
    job(f"for m in {' '.join(modes)}; do cd {tmp_path}/$m; for i in 1 2; do {both}; done; done")
    assert [files(folder) for folder in places] == [{"one": lines, "0": lines} for lines in modes.values()]


def test_an_unknown_open_mode_is_refused(slurm: Client) -> None:
    refused = slurm("srun", "--open-mode=zzz", "true", check=False)
    assert refused.returncode == 1
    assert refused.stderr == "srun: error: Invalid --open-mode specification 'zzz': write append or truncate\n"
