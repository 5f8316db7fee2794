"""Jobs that a command on the head holds, in a small world."""

from __future__ import annotations

from typing import Any

import pytest
from stepworld import a_job

from hpcnode.wire import protocol
from hpcsched.controller.requests.held_jobs import ShellPorts, Shells
from hpcsched.errors import RequestError
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ExitStatus
from hpcsched.steps.step import HEAD, Origin

HALLOC: Origin = (HEAD, 3)


class World:
    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.released: list[tuple[int, int]] = []
        self.refusal = ""
        self.shells = Shells(
            ShellPorts(
                allocate=self._allocate,
                release=lambda job_id, exit: self.released.append((job_id, exit.code)),
                reply=lambda origin, message, blob: self.replies.append((origin, message)),
                environment=lambda job: {"SLURM_JOB_ID": str(job.id)},
            )
        )

    def _allocate(self, request: protocol.StepRequest, uid: int) -> JobId:
        if self.refusal:
            raise RequestError(self.refusal)
        return JobId(12)

    def asks(self, origin: Origin = HALLOC) -> None:
        request = protocol.StepRequest(protocol.VERSION, 0, {"shell": True}, ["sh"], "/", {})
        self.shells.request(origin, 1001, protocol.to_json(request))


def test_it_is_told_when_its_job_has_its_nodes_and_ends_it() -> None:
    world = World()
    world.asks()
    assert world.shells.holds(JobId(12))
    world.shells.job_running(a_job(12))
    assert world.replies[-1] == (HALLOC, protocol.JobAllocated(12, {"SLURM_JOB_ID": "12"}))
    world.shells.stream_closed((HEAD, 4))
    assert world.released == []
    world.shells.stream_closed(HALLOC)
    assert world.released == [(12, ExitStatus(code=0).code)]
    assert not world.shells.holds(JobId(12))


def test_it_is_told_when_somebody_else_ends_its_job() -> None:
    world = World()
    world.asks()
    world.shells.job_ended(JobId(12))
    assert world.replies[-1][1].error == "Job allocation 12 has been revoked."
    world.shells.stream_closed(HALLOC)
    assert world.released == []


@pytest.mark.parametrize(
    ("origin", "refusal", "text"),
    [
        (HALLOC, "cannot run on 99 nodes", "cannot run on 99 nodes"),
        ((NodeName("n1"), 3), "", "cannot allocate a job from a node"),
    ],
)
def test_what_is_refused(origin: Origin, refusal: str, text: str) -> None:
    world = World()
    world.refusal = refusal
    world.asks(origin)
    assert text in world.replies[-1][1].error
    assert not world.shells.holds(JobId(12))


def test_a_second_job_on_one_connection_is_refused() -> None:
    world = World()
    world.asks()
    world.asks()
    assert "second job" in world.replies[-1][1].error
