"""Jobs that a command on the head holds, in a small world."""

from __future__ import annotations

from typing import Any

import pytest
from step_bench import a_job

from hpcnode.wire import protocol
from hpcsched.controller.stepping import ShellPorts, Shells
from hpcsched.errors import RequestError
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ExitStatus
from hpcsched.steps.step import HEAD, Origin

HALLOC: Origin = (HEAD, 3)


class ShellBench:
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
    bench = ShellBench()
    bench.asks()
    assert bench.shells.holds(JobId(12))
    bench.shells.job_running(a_job(12))
    assert bench.replies[-1] == (HALLOC, protocol.JobAllocated(12, {"SLURM_JOB_ID": "12"}))
    bench.shells.stream_closed((HEAD, 4))
    assert bench.released == []
    bench.shells.stream_closed(HALLOC)
    assert bench.released == [(12, ExitStatus(code=0).code)]
    assert not bench.shells.holds(JobId(12))


def test_it_is_told_when_somebody_else_ends_its_job() -> None:
    bench = ShellBench()
    bench.asks()
    bench.shells.job_ended(JobId(12))
    assert bench.replies[-1][1].error == "Job allocation 12 has been revoked."
    bench.shells.stream_closed(HALLOC)
    assert bench.released == []


@pytest.mark.parametrize(
    ("origin", "refusal", "text"),
    [
        (HALLOC, "cannot run on 99 nodes", "cannot run on 99 nodes"),
        ((NodeName("n1"), 3), "", "cannot allocate a job from a node"),
    ],
)
def test_what_is_refused(origin: Origin, refusal: str, text: str) -> None:
    bench = ShellBench()
    bench.refusal = refusal
    bench.asks(origin)
    assert text in bench.replies[-1][1].error
    assert not bench.shells.holds(JobId(12))


def test_a_second_job_on_one_connection_is_refused() -> None:
    bench = ShellBench()
    bench.asks()
    bench.asks()
    assert "second job" in bench.replies[-1][1].error
