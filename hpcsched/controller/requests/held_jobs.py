"""Manage jobs that a command on the head (halloc, salloc) holds while it runs.

Such a job has nodes, and runs only the steps that the command starts. `Shells` does no I/O: it uses `ShellPorts`. It does not
know steps, nor how a job gets its nodes.

Rules: the job belongs to the stream that requested it, and ends when the stream closes, also while it waits. With --no-shell it
belongs to no stream once it has its nodes. Nothing of this is stored on disk: after a restart of the controller no stream
claims the job, and the step service releases it.

Source: salloc(1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcnode.wire import protocol
from hpcsched.errors import HpcschedError, ProtocolError, RequestError
from hpcsched.model.ids import JobId
from hpcsched.model.job import ExitStatus, Job
from hpcsched.steps.step import HEAD, Origin

OPTION = "shell"  # marks a StepRequest that asks for a job without a step


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellPorts:
    """What this module needs of the controller. These functions must not call back."""

    # Creates a job without a batch step for uid; may raise RequestError.
    allocate: Callable[[protocol.StepRequest, int], JobId]
    release: Callable[[JobId, ExitStatus], None]
    reply: Callable[[Origin, protocol.Message, bytes], None]
    environment: Callable[[Job], Mapping[str, str]]  # for the command that holds the job


class Shells:
    """All jobs that are held in this way, waiting or running."""

    def __init__(self, ports: ShellPorts) -> None:
        self._ports = ports
        self._jobs: dict[JobId, Origin] = {}

    def holds(self, job_id: JobId) -> bool:
        """Return whether the job is one of these."""
        return job_id in self._jobs

    def request(self, origin: Origin, uid: int, request: Mapping[str, object]) -> None:
        """Request a job; a refusal is answered with StepEnded and its error."""
        try:
            message = protocol.from_json(request)
            if not isinstance(message, protocol.StepRequest) or message.version != protocol.VERSION:
                raise ProtocolError("cannot allocate a job: this command and the controller are of different versions")
            if origin[0] != HEAD:
                raise RequestError("cannot allocate a job from a node: run this on the head node")
            if origin in self._jobs.values():
                raise ProtocolError("cannot allocate a second job on one connection")
            job_id = self._ports.allocate(message, uid)
        except (HpcschedError, protocol.WireError) as error:
            self._ports.reply(origin, protocol.StepEnded(codes=[], signals=[], error=str(error)), b"")
            return
        self._jobs[job_id] = origin
        waiting = protocol.StepWaiting(job_id=job_id, text=f"job {job_id} queued and waiting for resources")
        self._ports.reply(origin, waiting, b"")

    def stream_closed(self, origin: Origin) -> None:
        """End the job of a command that has disconnected."""
        for job_id, owner in list(self._jobs.items()):
            if owner == origin:
                del self._jobs[job_id]
                self._ports.release(job_id, ExitStatus(code=0))

    def job_running(self, job: Job) -> None:
        """Tell the command that the job has its nodes."""
        env = dict(self._ports.environment(job))
        self._ports.reply(self._jobs[job.id], protocol.JobAllocated(job_id=job.id, env=env), b"")
        if job.spec.no_shell:
            del self._jobs[job.id]

    def job_ended(self, job_id: JobId) -> None:
        """Handle a job that was cancelled or reached its time limit."""
        origin = self._jobs.pop(job_id)
        error = f"Job allocation {job_id} has been revoked."
        self._ports.reply(origin, protocol.StepEnded(codes=[], signals=[], error=error), b"")
