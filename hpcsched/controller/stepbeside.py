"""What a step command may ask for beside a step: fewer nodes for its job, another's output, how a step ended that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpcnode import protocol
from hpcsched.controller.stepports import StepPorts
from hpcsched.controller.steprights import asking_uid, permitted_job
from hpcsched.controller.stepstate import Origin, Step
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.model.ids import JobId


def resize(ports: StepPorts, origin: Origin, said: protocol.FromStream, request: protocol.StepRequest) -> None:
    """Have the job give back what it has beyond so many nodes. Raises RequestError and what `permitted_job` raises."""
    if not request.job_id:
        raise RequestError("cannot resize a job: run hrun --resize in one, or name it with --jobid")
    job = permitted_job(ports, origin, said, JobId(request.job_id))
    count = str(request.options["resize"])
    if not count.isdigit():
        raise RequestError(f"cannot resize job {job.display_id} to {count[:20]!r} nodes: that is not a whole number")
    ports.resize(job, int(count), asking_uid(ports, origin, said))
    ports.reply(origin, protocol.StepEnded(codes=[], signals=[]), b"")


def attachable(
    ports: StepPorts,
    steps: Mapping[tuple[JobId, int, int], Step],
    origin: Origin,
    said: protocol.FromStream,
    request: protocol.StepRequest,
) -> Step:
    """Return the running step whose output `origin` may hear. Raises NotFoundError and what `permitted_job` raises."""
    job = permitted_job(ports, origin, said, JobId(request.job_id))
    number = str(request.options["attach"])
    step = steps.get((job.id, job.attempt, int(number))) if number.isdigit() else None
    if step is None or any(run.place is None for run in step.runs.values()):
        raise NotFoundError(
            f"Invalid job id specified: no step {job.id}.{number[:20]} is running that can be attached to"
        )
    return step


def end_of_unknown(ports: StepPorts, said: protocol.FromStream, number: int) -> protocol.StepEnded:
    """Return the end of the step `number`, which was started by a controller before us and is on none of its nodes.

    They keep ends until step commands have them: so it has not come there, and will not, unless its row has an end.
    """
    rows = ports.recorded(JobId(said.job_id), said.attempt)
    row = next((row for row in rows if row.step == str(number)), None)
    if row is not None and row.ended_at_s is not None:
        codes, signals = [row.exit_code or 0] * row.ntasks, [row.exit_signal or 0] * row.ntasks
        return protocol.StepEnded(codes=codes, signals=signals)
    if row is not None:
        ports.record(replace(row, state="CANCELLED", ended_at_s=ports.now_s()))
    error = f"step {said.job_id}.{number} was on its way to its nodes when the controller ended: ask again"
    return protocol.StepEnded(codes=[], signals=[], error=error, again=True)
