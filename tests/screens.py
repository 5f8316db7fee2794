"""Screens as the API and a training would make them."""

from __future__ import annotations

import math
from typing import Any

from hpcsched.demo.picture import Scene, StoryLine
from hpcsched.tui.reading import ClusterScreen, QueuedJob
from hpcsched.tui.training import LossPoint, SavedCheckpoint, TrainingRun


def node(name: str, **values: Any) -> dict[str, Any]:
    """Return a node as /v1/nodes has it."""
    plain = {"name": name, "state": "ALLOCATED", "link": "up", "link_why": "", "cpus": 2, "cpus_alloc": 2, "jobs": [1]}
    return plain | values


def job(number: int, name: str, **values: Any) -> dict[str, Any]:
    """Return a job as /v1/job has it: what the screen shows of one with a training."""
    plain = {
        "id": number,
        "display_id": str(number),
        "name": name,
        "state": "RUNNING",
        "reason": "None",
        "reason_detail": "",
        "attempt": 0,
        "exit_code": None,
        "node_list": "n[1-2]",
        "nodes": ["n1", "n2"],
    }
    return plain | values


def queued(number: int, name: str, state: str = "RUNNING", where: str = "n[1-2]", **values: Any) -> QueuedJob:
    """Return a line of the queue."""
    plain = {"display_id": str(number), "user": "ann", "time": "0:42"}
    return QueuedJob(number=number, name=name, state=state, where=where, **{**plain, **values})


def training(steps: int = 300, restart_at: int | None = None, lost: int = 13, total: int = 500) -> TrainingRun:
    """Return a run that resumed `lost` steps before `restart_at`."""

    def point(step: int, attempt: int) -> LossPoint:
        loss = 1.6 + 2.6 * math.exp(-step / 60) + 0.06 * math.sin(step * 1.7)
        return LossPoint(step=step, loss=loss, attempt=attempt)

    back = steps if restart_at is None else restart_at - lost
    points = [point(step, 0) for step in range(1, (restart_at or steps) + 1)]
    points += [point(step, 1) for step in range(back + 1, steps + 1)]
    made = [
        SavedCheckpoint(
            step=step,
            kind="base" if step % 125 == 25 else "delta",
            size_bytes=8_400_000,
            attempt=int(step > back),
        )
        for step in range(25, steps + 1, 25)
    ]
    validation = [
        LossPoint(step=s, loss=1.75 + 2.4 * math.exp(-s / 60), attempt=int(s > back)) for s in range(25, steps + 1, 25)
    ]
    return TrainingRun(
        points=tuple(points),
        validation=tuple(validation),
        checkpoints=tuple(made),
        resumes=((1, back),) if restart_at is not None else (),
        total_steps=total,
        world=2,
        backend="mpi",
        step_s=0.08,
    )


def whole_screen(**values: Any) -> ClusterScreen:
    """Return a cluster with a training."""
    plain: dict[str, Any] = {
        "now_s": 1000.0,
        "controller": {"pid": 4242, "epoch": 2, "now_s": 1000.0, "started_at_s": 960.0},
        "nodes": (node("n1"), node("n2"), node("n3", state="MIXED", cpus_alloc=1, jobs=[4])),
        "queue": (
            queued(1, "chargpt"),
            queued(4, "sweep", where="n3", display_id="2_3"),
            queued(5, "sweep", "PENDING", "(Resources)", display_id="2_[4-6]"),
            queued(10, "census", "PENDING", "(Resources)"),
            queued(11, "report", "PENDING", "(Dependency)"),
        ),
        "job": job(1, "chargpt"),
        "run": training(),
        "log": tuple(f"step {n:5d}/500  loss 2.1{n % 10}" for n in range(280, 301, 10)),
    }
    return ClusterScreen(**(plain | values))


def whole_scene(**values: Any) -> Scene:
    """Return the demo in the middle of its story; `values` are of its cluster."""
    story = (
        StoryLine(at_s=2.0, kind="act", text="three nodes behind OpenSSH's sshd answer"),
        StoryLine(at_s=3.0, kind="note", text="Submitted batch job 1"),
        StoryLine(at_s=60.0, kind="bad", text="the controller is killed (SIGKILL)"),
        StoryLine(at_s=64.0, kind="good", text="it is back and has found the job again"),
    )
    return Scene(cluster=whole_screen(**values), subtitle="1:23  training on two of three nodes", story=story)
