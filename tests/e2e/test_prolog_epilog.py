"""The administrator's prolog and epilog: around real jobs, when they fail, and when the agent is killed meanwhile."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

SCRIPT = """#!/bin/sh
cd {notes}
echo "$$ $SLURM_JOB_ID $SLURM_JOB_USER $SLURM_JOB_UID $HPCSCHED_JOB_NODELIST $SLURM_SCRIPT_CONTEXT" >> {kind}.$SLURMD_NODENAME
while [ -e {kind}.wait ]; do sleep 0.02; done
if [ -e {kind}.fail.$SLURMD_NODENAME ]; then echo "no /scratch here"; exit 3; fi
echo $SLURM_JOB_ID >> {kind}.done.$SLURMD_NODENAME
"""


class Lab(LocalCluster):
    """Two nodes, whose scripts note in `notes` what they do, and wait or fail if a file there says so."""

    @property
    def notes(self) -> Path:
        return self.base / "notes"

    def flag(self, name: str, on: bool = True) -> None:
        (self.notes / name).touch() if on else (self.notes / name).unlink(missing_ok=True)

    def lines(self, name: str) -> list[str]:
        path = self.notes / name
        return path.read_text().splitlines() if path.exists() else []

    def submit(self, *words: str) -> int:
        return int(self.run("hsub", "--parsable", *words).stdout)

    def job(self, job_id: int) -> dict[str, Any]:
        return dict(self.api("GET", f"/v1/job/{job_id}")["jobs"][0])

    def node(self, name: str) -> dict[str, Any]:
        return next(dict(node) for node in self.api("GET", "/v1/nodes")["nodes"] if node["name"] == name)

    def wait_state(self, job_id: int, *states: str) -> None:
        wait_until(lambda: self.job(job_id)["state"] in states, 60, what=f"job {job_id} in {states}")

    def begun(self, kind: str, node: str, job_id: int) -> int:
        """Return how often the script has begun for the job."""
        return sum(line.split()[1] == str(job_id) for line in self.lines(f"{kind}.{node}"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        (base / "notes").mkdir()
        keys = {"requeue_delay_s": 0, "kill_wait_s": 2}
        for kind in ("prolog", "epilog"):
            path = base / kind
            path.write_text(SCRIPT.format(notes=base / "notes", kind=kind))
            path.chmod(0o755)
            keys[kind] = str(path)
        with Lab(base, names=("n1", "n2"), settings={"controller": keys}) as started:
            yield started


def test_they_run_once_on_each_node_around_the_job(lab: Lab) -> None:
    job_id = lab.submit("--wait", "-N2", "--wrap", f"cat {lab.notes}/prolog.done.*")
    lab.wait_state(job_id, "COMPLETED")
    for node in ("n1", "n2"):
        (line,) = [line for line in lab.lines(f"prolog.{node}") if line.split()[1] == str(job_id)]
        assert line.split()[2:] == [lab.job(job_id)["user"], str(os.getuid()), "n[1-2]", "prolog_slurmd"]
        assert lab.begun("epilog", node, job_id) == 1
        assert str(job_id) in lab.lines(f"epilog.done.{node}")


def test_a_step_without_a_script_has_them_too(lab: Lab) -> None:
    before = len(lab.lines("epilog.n1"))
    done = lab.run("hrun", "-w", "n1", "sh", "-c", "echo $SLURM_JOB_ID")
    job_id = int(done.stdout)
    assert lab.begun("prolog", "n1", job_id) == 1
    wait_until(lambda: lab.begun("epilog", "n1", job_id) == 1 and len(lab.lines("epilog.n1")) == before + 1)


def test_the_node_is_held_until_the_epilog_has_ended(lab: Lab) -> None:
    lab.flag("epilog.wait")
    first = lab.submit("-w", "n1", "--exclusive", "--wrap", "true")
    wait_until(lambda: lab.begun("epilog", "n1", first))
    lab.wait_state(first, "COMPLETING")
    second = lab.submit("-w", "n1", "--exclusive", "--wrap", "true")
    assert lab.job(second)["state"] == "PENDING"
    lab.flag("epilog.wait", on=False)
    lab.wait_state(second, "COMPLETED")
    assert lab.job(first)["state"] == "COMPLETED"


def test_a_job_that_is_cancelled_during_its_prolog_never_starts_and_has_its_epilog(lab: Lab) -> None:
    lab.flag("prolog.wait")
    job_id = lab.submit("-w", "n1", "--wrap", f"touch {lab.notes}/ran")
    wait_until(lambda: lab.begun("prolog", "n1", job_id))
    lab.run("hcancel", str(job_id))
    lab.flag("prolog.wait", on=False)
    lab.wait_state(job_id, "CANCELLED")
    assert not (lab.notes / "ran").exists()
    assert lab.begun("epilog", "n1", job_id) == 1


def test_a_prolog_that_fails_drains_the_node_and_the_job_runs_elsewhere(lab: Lab) -> None:
    lab.flag("prolog.fail.n1")
    lab.flag("busy")
    other = lab.submit("-w", "n2", "--exclusive", "--wrap", f"while [ -e {lab.notes}/busy ]; do sleep 0.02; done")
    lab.wait_state(other, "RUNNING")
    job_id = lab.submit("-N1", "--exclusive", "--wrap", f"echo $SLURMD_NODENAME >> {lab.notes}/ran.on")
    wait_until(lambda: lab.node("n1")["drained"])
    assert lab.node("n1")["drained_why"] == f"job {job_id}: prolog prolog ended with status 3: no /scratch here"
    lab.flag("busy", on=False)
    lab.wait_state(job_id, "COMPLETED")
    assert lab.lines("ran.on") == ["n2"]
    assert lab.begun("epilog", "n1", job_id) == 1
    lab.flag("prolog.fail.n1", on=False)
    lab.run("hctl", "resume", "n1")


def test_an_epilog_that_fails_drains_the_node_and_the_job_keeps_its_result(lab: Lab) -> None:
    lab.flag("epilog.fail.n2")
    job_id = lab.submit("-w", "n2", "--wrap", "true")
    lab.wait_state(job_id, "COMPLETED")
    wait_until(lambda: lab.node("n2")["drained"])
    assert lab.node("n2")["drained_why"] == f"job {job_id}: epilog epilog ended with status 3: no /scratch here"
    lab.flag("epilog.fail.n2", on=False)
    lab.run("hctl", "resume", "n2")


def test_a_program_that_others_can_replace_is_refused(lab: Lab) -> None:
    (lab.base / "prolog").chmod(0o777)
    job_id = lab.submit("-w", "n1", "--wrap", "true")
    wait_until(lambda: lab.node("n1")["drained"])
    assert "others may write" in lab.node("n1")["drained_why"]
    lab.run("hcancel", str(job_id))
    (lab.base / "prolog").chmod(0o755)
    lab.run("hctl", "resume", "n1")


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_an_agent_that_is_killed_meanwhile_loses_neither(lab: Lab, kind: str) -> None:
    lab.flag(f"{kind}.wait")
    job_id = lab.submit("-w", "n1", "--wrap", "true")
    wait_until(lambda: lab.begun(kind, "n1", job_id))
    os.kill(agent_of(lab, "n1"), signal.SIGKILL)
    lab.flag(f"{kind}.wait", on=False)
    lab.wait_state(job_id, "COMPLETED")
    assert lab.begun("prolog", "n1", job_id) == lab.begun("epilog", "n1", job_id) == 1


def agent_of(lab: Lab, node: str) -> int:
    import json

    (path,) = lab.base.rglob(f"*{node}*/**/agent.lock")
    return int(json.loads(path.read_text())["agent"][0])


# ----- on the head


@pytest.fixture(scope="module")
def head() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        (base / "notes").mkdir()
        keys: dict[str, object] = {"requeue_delay_s": 0, "kill_wait_s": 2}
        for kind in ("prolog", "epilog"):
            path = base / kind
            path.write_text(SCRIPT.format(notes=base / "notes", kind=kind).replace("$SLURMD_NODENAME", "head"))
            path.chmod(0o755)
            keys[f"{kind}_head"] = str(path)
        with Lab(base, names=("n1",), settings={"controller": keys}) as started:
            yield started


def test_the_head_runs_them_around_the_job(head: Lab) -> None:
    job_id = head.submit("--wait", "--wrap", f"cat {head.notes}/prolog.done.head > {head.notes}/seen")
    assert str(job_id) in head.lines("seen")
    wait_until(lambda: str(job_id) in head.lines("epilog.done.head"))
    assert [line.split()[-1] for line in head.lines("prolog.head") if line.split()[1] == str(job_id)] == [
        "prolog_slurmctld"
    ]
    step = int(head.run("hrun", "sh", "-c", "echo $SLURM_JOB_ID").stdout)
    assert str(step) in head.lines("prolog.done.head")
    wait_until(lambda: str(step) in head.lines("epilog.done.head"))


def test_a_prolog_of_the_head_that_fails_holds_the_job_and_cancels_a_command(head: Lab) -> None:
    head.flag("prolog.fail.head")
    job_id = head.submit("--wrap", "true")
    wait_until(lambda: head.job(job_id)["hold"] != "none" and head.job(job_id)["state"] == "PENDING")
    assert "the prolog on the head failed: prolog ended with status 3" in head.run("hwhy", str(job_id)).stdout
    assert head.run("hrun", "true", check=False).returncode
    wait_until(lambda: head.begun("epilog", "head", job_id) == 1)
    head.flag("prolog.fail.head", on=False)
    head.run("hctl", "release", str(job_id))
    head.wait_state(job_id, "COMPLETED")
    wait_until(lambda: head.begun("epilog", "head", job_id) == 2)


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_controller_that_is_killed_meanwhile_loses_neither(head: Lab, kind: str) -> None:
    head.flag(f"{kind}.wait")
    job_id = head.submit("--wrap", f"cat {head.notes}/prolog.done.head > {head.notes}/seen")
    wait_until(lambda: head.begun(kind, "head", job_id))
    os.kill(head.api("GET", "/v1/ping")["pid"], signal.SIGKILL)
    head.up()
    head.flag(f"{kind}.wait", on=False)
    head.wait_state(job_id, "COMPLETED")
    assert str(job_id) in head.lines("seen")
    wait_until(lambda: str(job_id) in head.lines("epilog.done.head"))
