"""The steps of the controllers before this one: found by what nodes report of them, and by what step commands ask.

It makes them anew as their rows have them (`stepkept`), and puts them into the table. What becomes of them then is
`StepService`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcnode import protocol
from hpcsched.controller.stepkept import asked_by, restored
from hpcsched.controller.stepports import StepPorts
from hpcsched.controller.stepstate import HEAD, Origin, Run, Step
from hpcsched.controller.steptable import StepTable
from hpcsched.errors import ProtocolError, RequestError
from hpcsched.model.ids import ALLOC_STEP, BATCH_STEP, JobId, NodeName, Token
from hpcsched.model.job import ACTIVE, Job
from hpcsched.store.rows import StepRow


def step_reports(inventory: Iterable[Mapping[str, Any]]) -> list[protocol.Report]:
    """Return the reports in an agent's inventory that are of steps other than the batch step.

    Raises ProtocolError for what is no report.
    """
    try:
        reports = [protocol.from_json({**fields, "type": "Report"}) for fields in inventory]
    except protocol.WireError as error:
        raise ProtocolError(str(error)) from None
    return [report for report in reports if Token.parse(report.token).step not in (BATCH_STEP, ALLOC_STEP)]


def find_again(ports: StepPorts, steps: StepTable, node: NodeName, report: protocol.Report) -> None:
    """Put the step of which `node` reports into `steps`, if its job's attempt runs; have it ended if it does not."""
    token = Token.parse(report.token)
    if token.node != node:
        return
    job = ports.job(token.job_id)
    if job is None or job.attempt != token.attempt or job.state not in ACTIVE:
        if report.status in (protocol.CLAIMED, protocol.READY, protocol.STARTED):
            ports.send(node, protocol.EndStep(report.token, ports.grace_s, "its job is over"), b"")
        return
    step = steps.running(job.id, job.attempt, int(token.step))
    if step is None and report.stream_to is None:
        return  # nobody can be waiting for it
    if step is None:
        row = next((row for row in ports.recorded(job.id, job.attempt) if row.step == token.step), None)
        step = (restored(job, row) if row is not None else None) or _told_by_node(job, int(token.step), report, row)
        if step.origin is not None and not step.finished:  # an agent answers with CloseStream if that stream is no more
            ports.reply(step.origin, protocol.StepWaiting(job_id=job.id, text=""), b"")
    if step.found and not step.finished and node not in step.runs:
        step.runs[node] = Run(node=node, token=report.token)
    steps.add(step)


def asked_before(ports: StepPorts, origin: Origin, said: protocol.FromStream) -> Step | None:
    """Return the step that a controller before us began for `origin`, and may have ended; None: none has.

    Raises RequestError: its job is over.
    """
    job = ports.job(JobId(said.job_id))
    if job is None or job.attempt != said.attempt or job.state not in ACTIVE:
        raise RequestError(f"job {said.job_id} has ended")
    row = next((row for row in ports.recorded(job.id, job.attempt) if asked_by(row) == origin), None)
    return restored(job, row) if row is not None else None


def _told_by_node(job: Job, number: int, report: protocol.Report, row: StepRow | None) -> Step:
    """Return a step of which nothing is known but a node's report and its row."""
    assert report.stream_to is not None
    origin = (NodeName(report.stream_to.node), report.stream_to.stream)
    gone = origin[0] == HEAD  # connections to the head ended with the controller that held them
    nodes = row.nodes if row is not None else [share.node for share in job.shares]
    return Step(
        job=job,
        number=number,
        origin=None if gone else origin,
        name=row.name if row is not None else "",
        nodes=tuple(NodeName(node) for node in nodes),
        ntasks=row.ntasks if row is not None else 0,
        started_at_s=(row.started_at_s if row is not None else None) or report.at_s,
        found=True,
        ending=gone,
        state="CANCELLED" if gone else "",
    )
