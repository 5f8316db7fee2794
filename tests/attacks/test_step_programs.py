"""Programs before and after a step or a task fail, hang, stay, or are interrupted: no step starts without its prolog."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpcnode.commands import hrun as step_command
from hpcnode.shepherd import task
from hpcsched.loopback.cluster import LocalCluster

Program = Callable[[str, str], str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), names=("n1",), settings={"controller": {"kill_wait_s": 2}}) as started:
            yield started


@pytest.fixture
def program(cluster: LocalCluster, tmp_path: Path) -> Program:
    """Return a function that writes a script of the shell and returns its path."""
    folder = Path(tempfile.mkdtemp(dir=cluster.share))

    def write(name: str, text: str) -> str:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


def hrun(cluster: LocalCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return cluster.run("hrun", *words, check=False)


FAILURES = {"fails": ("exit 3", 3), "is killed": ("kill -9 $$", 137), "cannot run": ("", 127)}


@pytest.mark.parametrize("how", FAILURES)
def test_c5_a_task_whose_prolog_fails_does_not_start_and_its_epilog_runs_once(
    cluster: LocalCluster, program: Program, how: str
) -> None:
    text, code = FAILURES[how]
    prolog = program("prolog", text) if text else "/nonexistent/prolog"
    marks = Path(program("marks", ""))
    marks.write_text("")
    epilog = program("epilog", f"echo epilog >> {marks}")
    said = hrun(cluster, f"--task-prolog={prolog}", f"--task-epilog={epilog}", "sh", "-c", f"echo ran >> {marks}")
    assert said.returncode == code, said.stderr
    assert "the task prolog" in said.stderr
    assert marks.read_text() == "epilog\n"


@pytest.mark.parametrize("how", FAILURES)
def test_c5_a_step_whose_prolog_fails_does_not_start_and_its_epilog_runs_once(
    cluster: LocalCluster, program: Program, how: str
) -> None:
    text, _ = FAILURES[how]
    prolog = program("prolog", text) if text else "/nonexistent/prolog"
    marks = Path(program("marks", ""))
    marks.write_text("")
    epilog = program("epilog", f"echo epilog >> {marks}")
    said = hrun(cluster, f"--prolog={prolog}", f"--epilog={epilog}", "sh", "-c", f"echo ran >> {marks}")
    assert said.returncode == 1, said.stderr
    assert marks.read_text() == "epilog\n"


def test_c5_what_a_prolog_leaves_running_does_not_hold_the_task_up(cluster: LocalCluster, program: Program) -> None:
    prolog = program("prolog", "sleep 600 &\necho export TOLD=yes")
    started_s = time.monotonic()
    assert hrun(cluster, f"--task-prolog={prolog}", "sh", "-c", "echo $TOLD").stdout == "yes\n"
    assert time.monotonic() - started_s < 60


def test_c5_a_job_that_is_cancelled_in_its_prolog_runs_no_program_and_one_epilog(
    cluster: LocalCluster, program: Program
) -> None:
    """And so does each attempt of a job that is requeued there."""
    marks = Path(program("marks", ""))
    marks.write_text("")
    prolog = program("prolog", f"echo prolog >> {marks}\nexec sleep 600")
    epilog = program("epilog", f"echo epilog >> {marks}")
    step = f"hrun --task-prolog={prolog} --task-epilog={epilog} sh -c 'echo ran >> {marks}'\n"
    job = cluster.run("hsub", "--parsable", "--requeue", stdin=f"#!/bin/sh\n{step}").stdout.strip()
    wait_until(lambda: marks.read_text() == "prolog\n", what="the prolog")
    cluster.run("hctl", "requeue", job)
    wait_until(lambda: marks.read_text() == "prolog\nepilog\nprolog\n", what="the prolog of the second attempt")
    cluster.run("hcancel", job)
    wait_until(lambda: cluster.api("GET", f"/v1/job/{job}")["jobs"][0]["state"] == "CANCELLED", what="the end")
    assert marks.read_text() == "prolog\nepilog\nprolog\nepilog\n"


def test_c5_a_prolog_that_hangs_has_a_deadline(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "PROLOG_S", 0.3)
    child = os.fork()
    if child == 0:
        task.run_prolog(program("prolog", "exec sleep 600"), {"PATH": os.environ["PATH"]})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + 9


@pytest.mark.parametrize("what", ["prolog", "epilog"])
def test_c5_a_program_of_a_step_that_hangs_is_killed_with_what_it_started(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    monkeypatch.setattr(step_command, "SCRIPT_S", 0.3)
    marks = tmp_path / "marks"
    hangs = program("hangs", f"sleep 600 &\necho $! >> {marks}\nwait")
    status = step_command._run_script(what, hangs, ["true"], step_command.HRUN, os.environ)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert f"the {what} {hangs} took longer than 0.3 seconds and was killed" in capfd.readouterr().err
    wait_until(lambda: not Path(f"/proc/{marks.read_text().strip()}/exe").exists(), what="the end of the sleep")


def test_c5_a_look_at_a_share_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that answers after a tenth of a second counts as full if it is full."""
    full = os.statvfs("/proc/self")
    gate = threading.Event()

    def slow(_path: str) -> os.statvfs_result:
        gate.wait(0.1)
        return os.statvfs_result((*full[:2], 1000, 0, 0, *full[5:]))

    monkeypatch.setattr(os, "statvfs", slow)
    assert task.is_full("/share")


def test_c5_a_signal_for_a_task_does_not_end_its_epilog(program: Program, tmp_path: Path) -> None:
    """A step command forwards the signal that ends its job, when the epilog may have begun."""
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    marks.touch()
    os.mkfifo(gate)
    fd = os.open(gate, os.O_RDWR)
    epilog = program("epilog", f"echo begun >> {marks}\nread word < {gate}\necho $word >> {marks}")
    child = os.fork()
    if child == 0:
        os.setsid()
        task.stay_for_epilog(epilog, {"PATH": os.environ["PATH"]}, wait_for_children=False)
        os._exit(0)
    wait_until(lambda: marks.read_text() == "begun\n", what="the epilog")
    os.killpg(child, signal.SIGTERM)
    os.write(fd, b"over\n")
    os.waitpid(child, 0)
    os.close(fd)
    assert marks.read_text() == "begun\nover\n"
