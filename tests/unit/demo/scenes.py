"""Scenes as the API and a training would make them, for the view's tests."""

from __future__ import annotations

import math
from typing import Any

from hpcsched.demo.training import Checkpoint, Point, Training
from hpcsched.demo.view import Moment, Scene


def node(name: str, **values: Any) -> dict[str, Any]:
    """Return a node as /v1/nodes has it."""
    plain = {"name": name, "state": "ALLOCATED", "link": "up", "link_why": "", "cpus": 2, "cpus_alloc": 2, "jobs": [1]}
    return plain | values


def job(number: int, name: str, **values: Any) -> dict[str, Any]:
    """Return a job as /v1/jobs has it."""
    plain = {
        "id": number,
        "display_id": str(number),
        "array_job_id": None,
        "name": name,
        "state": "RUNNING",
        "reason": "None",
        "reason_detail": "",
        "attempt": 0,
        "elapsed_s": 42.0,
        "node_list": "n[1-2]",
        "nodes": ["n1", "n2"],
    }
    return plain | values


def training(steps: int = 300, restart_at: int | None = None, lost: int = 13, total: int = 500) -> Training:
    """Return a run that resumed `lost` steps before `restart_at`."""

    def point(step: int, attempt: int) -> Point:
        return Point(step=step, loss=1.6 + 2.6 * math.exp(-step / 60) + 0.06 * math.sin(step * 1.7), attempt=attempt)

    if restart_at is None:
        back = steps
        points = [point(step, 0) for step in range(1, steps + 1)]
        resumes: tuple[tuple[int, int, float], ...] = ()
    else:
        back = restart_at - lost
        points = [point(step, 0) for step in range(1, restart_at + 1)]
        points += [point(step, 1) for step in range(back + 1, steps + 1)]
        resumes = ((1, back, 0.0),)
    made = [
        Checkpoint(
            step=step,
            kind="base" if step % 125 == 25 else "delta",
            size_bytes=8_400_000,
            write_s=0.05,
            attempt=int(step > back),
        )
        for step in range(25, steps + 1, 25)
    ]
    return Training(
        points=tuple(points),
        validation=tuple(
            Point(step=s, loss=1.75 + 2.4 * math.exp(-s / 60), attempt=int(s > back)) for s in range(25, steps + 1, 25)
        ),
        checkpoints=tuple(made),
        resumes=resumes,
        total_steps=total,
        world=2,
        backend="mpi",
        step_s=0.08,
        samples_per_s=396.0,
    )


def whole_scene(**values: Any) -> Scene:
    """Return a scene in the middle of the story."""
    plain: dict[str, Any] = {
        "elapsed_s": 83.0,
        "now_s": 1000.0,
        "title": "training on two of three nodes",
        "controller": {"pid": 4242, "epoch": 2, "now_s": 1000.0, "started_at_s": 960.0},
        "nodes": (node("n1"), node("n2"), node("n3", state="MIXED", cpus_alloc=1, jobs=[4])),
        "jobs": (
            job(1, "chargpt"),
            *(job(2 + i, "sweep", array_job_id=2, state=s, display_id=f"2_{i + 1}") for i, s in enumerate(SWEEP)),
            job(10, "census", state="PENDING", reason="Resources", reason_detail="it needs 3 nodes", node_list=""),
            job(11, "report", state="PENDING", reason="Dependency", reason_detail="job 1 has to end", node_list=""),
        ),
        "training": training(),
        "log": tuple(f"step {n:5d}/500  loss 2.1{n % 10}" for n in range(280, 301, 10)),
        "story": (
            Moment(at_s=2.0, kind="act", text="three nodes behind OpenSSH's sshd answer"),
            Moment(at_s=3.0, kind="note", text="Submitted batch job 1"),
            Moment(at_s=60.0, kind="bad", text="the controller is killed (SIGKILL)"),
            Moment(at_s=64.0, kind="good", text="it is back and has found the job again"),
        ),
    }
    return Scene(**(plain | values))


SWEEP = ("COMPLETED", "COMPLETED", "RUNNING", "PENDING", "PENDING", "PENDING")
