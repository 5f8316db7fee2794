"""hrun and hrsh through real agents on two nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_until

from hpcsched.loopback.cluster import LocalCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    running = LocalCluster(tmp_path_factory.mktemp("steps"), ("n1", "n2"), cpus=4).start()
    yield running
    running.stop()


def hrun(cluster: LocalCluster, *args: str, stdin: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        ["hrun", *args], env=cluster.env, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def submit(cluster: LocalCluster, tmp_path: Path, text: str) -> str:
    """Submit a job on both nodes, two tasks each, whose output is tmp_path/out; return its id."""
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\n#HSUB -N2 --ntasks-per-node=2 -o {tmp_path}/out\ncd {tmp_path}\n{text}\necho over\n"
    )
    done = subprocess.run(
        ["hsub", "--parsable", str(script)],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.strip()


def output(tmp_path: Path, until: str = "over\n") -> str:
    """Return the job's output once it has `until` in it."""
    path = tmp_path / "out"
    wait_until(lambda: path.exists() and until in path.read_text(), what=f"{until!r} in the job's output")
    return path.read_text()


def in_job(cluster: LocalCluster, tmp_path: Path, text: str) -> list[str]:
    submit(cluster, tmp_path, text)
    return output(tmp_path).splitlines()[:-1]


def long_sleep(number: int) -> str:
    """Return an argument for `sleep` that no other run of these tests has on this machine."""
    return f"{number}{os.getpid():08}"


def sleepers(mark: str) -> list[int]:
    """Return the processes that run `sleep` with this argument."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", mark.encode()]:
            found.append(int(name))
    return found


def test_tasks_know_who_they_are(cluster: LocalCluster) -> None:
    facts = "$SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $RANK/$WORLD_SIZE $SLURMD_NODENAME $SLURM_STEP_TASKS_PER_NODE"
    code, out, err = hrun(cluster, "-Q", "-N2", "-n4", "-l", "sh", "-c", f"echo {facts}")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "0: 0 0 0 0/4 n1 3,1",
        "1: 1 1 0 1/4 n1 3,1",
        "2: 2 2 0 2/4 n1 3,1",
        "3: 3 0 1 3/4 n2 3,1",
    ]


@pytest.mark.parametrize(
    ("args", "code"),
    [(("true",), 0), (("sh", "-c", "exit 7"), 7), (("sh", "-c", "kill -9 $$"), 137), (("no-such",), 2)],
)
def test_exit_codes(cluster: LocalCluster, args: tuple[str, ...], code: int) -> None:
    assert hrun(cluster, *args)[0] == code


def test_input(cluster: LocalCluster) -> None:
    assert hrun(cluster, "-n2", "-l", "cat", stdin="hello\n")[1] == "0: hello\n"
    out = hrun(cluster, "-N2", "-n2", "-l", "-i", "all", "cat", stdin="hello\n")[1]
    assert sorted(out.splitlines()) == ["0: hello", "1: hello"]


def test_more_than_fits_anywhere_passes_through_whole(cluster: LocalCluster) -> None:
    data = "".join(f"{number}\n" for number in range(400_000))
    code, out, _ = hrun(cluster, "-w", "n2", "cat", stdin=data)
    assert (code, out == data) == (0, True)


def test_what_never_fits_is_refused(cluster: LocalCluster) -> None:
    code, out, err = hrun(cluster, "-N9", "true")
    assert (code, out) == (1, "")
    assert "has 2" in err


# A step that has all cpus until there is a file `go`, and one that waits for some.
ONE_RUNS_ONE_WAITS = """
until_seen() { until grep -q "$1" out; do sleep 0.1; done; }
hrun -n4 sh -c 'echo first; until [ -e go ]; do sleep 0.1; done' &
until_seen first
hrun -n1 echo second &
until_seen 'Requested nodes are busy'
"""


def test_steps_in_a_job_queue_for_its_cpus(cluster: LocalCluster, tmp_path: Path) -> None:
    said = in_job(cluster, tmp_path, ONE_RUNS_ONE_WAITS + "hrun -n1 --overlap echo third\ntouch go\nwait")
    assert [re.sub("[0-9]+", "N", line) for line in said if line != "first"] == [
        "hrun: Job N step creation temporarily disabled, retrying (Requested nodes are busy)",
        "third",
        "hrun: Step created for StepId=N.N",
        "second",
    ]


def test_files_of_tasks(cluster: LocalCluster, tmp_path: Path) -> None:
    said = in_job(cluster, tmp_path, "hrun -o d/%j.%t.%N -n4 sh -c 'echo $SLURM_PROCID'; cat d/*.0.n1 d/*.3.n2")
    assert said == ["0", "3"]


def test_a_bad_exit_ends_all_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    mark = long_sleep(1)
    text = f"hrun -K -N2 -n2 sh -c '[ $SLURM_PROCID = 0 ] && exit 3; exec sleep {mark}'; echo code $?"
    assert in_job(cluster, tmp_path, text)[-1] == "code 143"
    assert sleepers(mark) == []


def test_hrsh(cluster: LocalCluster, tmp_path: Path) -> None:
    said = in_job(cluster, tmp_path, "hrsh -x n2 'echo $SLURMD_NODENAME; cat; exit 5' <<< text; echo code $?")
    assert said == ["n2", "text", "code 5"]


@pytest.mark.parametrize("signum", ["USR1", "USR2"])
def test_a_signal_for_steps_does_not_reach_a_remote_shell(cluster: LocalCluster, tmp_path: Path, signum: str) -> None:
    """mpirun forwards these signals to its ranks; its daemons would die of them."""
    there = "echo ready; until [ -e go ]; do sleep 0.1; done; echo unharmed"
    job_id = submit(
        cluster,
        tmp_path,
        f"hrsh n2 'cd {tmp_path}; {there}' & hrun -n1 sh -c 'trap \"touch go; exit\" {signum}; "
        "echo ready; while :; do sleep 0.1; done'; wait; echo code $?",
    )
    wait_until(
        lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text().count("ready") == 2, what="both steps"
    )
    subprocess.run(["hcancel", "-s", signum, job_id], env=cluster.env, check=True)
    assert {"unharmed", "code 0"} <= set(output(tmp_path).splitlines())


def test_a_killed_hrun_leaves_nothing(cluster: LocalCluster) -> None:
    mark = long_sleep(2)
    process = subprocess.Popen(["hrun", "-N2", "-n2", "sleep", mark], env=cluster.env, stdin=subprocess.DEVNULL)
    wait_until(lambda: len(sleepers(mark)) == 2, what="both tasks")
    process.kill()
    process.wait()
    wait_until(lambda: not sleepers(mark), what="the tasks to end")


def test_signals_reach_the_tasks(cluster: LocalCluster) -> None:
    process = subprocess.Popen(
        ["hrun", "-N2", "-n2", "sh", "-c", "trap 'echo got; exit 4' USR1; echo ready; while :; do sleep 0.1; done"],
        env=cluster.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (4, "got\ngot\n")


def test_a_step_lives_through_a_restart_of_the_controller(cluster: LocalCluster, tmp_path: Path) -> None:
    text = "hrun -N2 -n2 sh -c 'echo ready; until [ -e go ]; do sleep 0.1; done; echo done; exit $SLURM_PROCID'; echo code $?"
    submit(cluster, tmp_path, text)
    wait_until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() == "ready\n" * 2)
    cluster.down()
    cluster.up()
    cluster.wait_for_nodes()
    (tmp_path / "go").touch()
    said = output(tmp_path).splitlines()
    assert said.count("done") == 2
    assert said[-2] == "code 1"


def test_a_step_that_waits_lives_through_a_restart_of_the_controller(cluster: LocalCluster, tmp_path: Path) -> None:
    submit(cluster, tmp_path, ONE_RUNS_ONE_WAITS + "wait")
    output(tmp_path, until="busy")
    cluster.down()
    cluster.up()
    cluster.wait_for_nodes()
    output(tmp_path, until="busy)\nhrun: Job")  # it has asked again
    (tmp_path / "go").touch()
    said = output(tmp_path).splitlines()
    assert said.count("second") == 1, said
    assert said.count("first") == 4
