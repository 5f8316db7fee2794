"""Who may have steps started, in which job, and when.

Only the job's owner, root or an admin may add a step. Who asks is what the kernel said to the head, or on a node the owner of
the job that the agent vouches for: user numbers of another machine mean nothing here.
"""

from __future__ import annotations

from hpcnode import protocol
from hpcsched.controller.stepports import StepPorts
from hpcsched.controller.stepstate import HEAD, Origin
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job, JobState


def permitted_job(ports: StepPorts, origin: Origin, said: protocol.FromStream, job_id: JobId) -> Job:
    """Return the job if the step command behind `origin` may have a step started in it now; raise what refuses it."""
    job = ports.job(job_id)
    if job is None:
        raise NotFoundError(f"cannot start a step in job {job_id}: Invalid job id specified")
    in_job = origin[0] != HEAD and said.job_id == job_id
    if in_job and said.attempt != job.attempt:
        raise RequestError(f"cannot start a step in attempt {said.attempt} of job {job_id}: it is over")
    if not in_job and not _may_act(ports, asking_uid(ports, origin, said), job):
        raise PermissionDeniedError(f"cannot start a step in job {job_id}: it is {job.user}'s")
    if ports.is_adopted(job):
        raise RequestError(f"cannot start a step in job {job_id}: it runs from before the database was restored")
    # The node's word that the batch step has started may come after the first hrun of its script.
    # And a script may ask just when it is suspended: then its nodes prepare the step, and let it go with the rest.
    if job.state is not JobState.RUNNING and not (in_job and may_launch(job)):
        raise RequestError(f"cannot start a step in job {job_id}: it is {job.state}, not RUNNING")
    return job


def asking_uid(ports: StepPorts, origin: Origin, said: protocol.FromStream) -> int:
    """Return who asks, in the user numbers of the head. Raises PermissionDeniedError."""
    if origin[0] == HEAD:
        return said.uid
    home = ports.job(JobId(said.job_id))
    if home is None or home.attempt != said.attempt:
        raise PermissionDeniedError(
            f"cannot start a step from {origin[0]}: this command runs in no job there; run it on the head node"
        )
    return home.uid


def _may_act(ports: StepPorts, uid: int, job: Job) -> bool:
    return uid in (0, job.uid) or ports.is_admin(uid)


def may_launch(job: Job, node: NodeName | None = None) -> bool:
    """Return whether the job has its nodes (and this one), and is not on its way to its end."""
    running = job.state in (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)
    return running and (node is None or node in job.held_nodes)
