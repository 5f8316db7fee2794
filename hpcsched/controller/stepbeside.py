"""What a step command may ask for beside a step: that its job gives nodes back, and to hear another's output."""

from __future__ import annotations

from hpcnode import protocol
from hpcsched.controller.stepports import StepPorts
from hpcsched.controller.steprights import asking_uid, permitted_job
from hpcsched.controller.stepstate import Origin, Step
from hpcsched.controller.steptable import StepTable
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
    steps: StepTable,
    origin: Origin,
    said: protocol.FromStream,
    request: protocol.StepRequest,
) -> Step:
    """Return the running step whose output `origin` may hear. Raises NotFoundError and what `permitted_job` raises."""
    job = permitted_job(ports, origin, said, JobId(request.job_id))
    number = str(request.options["attach"])
    step = steps.running(job.id, job.attempt, int(number)) if number.isdigit() else None
    if step is None or not step.is_whole:
        raise NotFoundError(
            f"Invalid job id specified: no step {job.id}.{number[:20]} is running that can be attached to"
        )
    return step
