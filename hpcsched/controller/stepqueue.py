"""The steps that wait for the cpus of their job, which others have: in the order of their requests.

Knows no places, nodes or messages: who may start is decided in `steps`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hpcnode import protocol
from hpcsched.controller.steprequest import StepOptions
from hpcsched.controller.stepstate import Origin
from hpcsched.model.ids import JobId


class Waiting(NamedTuple):
    """A request of the step command behind `origin`; `options` None: they are read when its job has its nodes."""

    origin: Origin
    request: protocol.StepRequest
    options: StepOptions | None = None


class StepQueues:
    """A queue for each job of which a step waits."""

    def __init__(self) -> None:
        self._queues: dict[JobId, deque[Waiting]] = {}

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._queues

    def add(self, job_id: JobId, waiting: Waiting) -> None:
        """Put a step at the end of its job's queue."""
        self._queues.setdefault(job_id, deque()).append(waiting)

    def first(self, job_id: JobId) -> Waiting | None:
        """Return whose turn it is; None: no step of the job waits."""
        return self._queues[job_id][0] if job_id in self._queues else None

    def take_first(self, job_id: JobId) -> None:
        """Take the first step of the job, one of which must wait, out of its queue."""
        self._queues[job_id].popleft()
        self._clear(job_id)

    def take_all(self, job_id: JobId) -> list[Waiting]:
        """Take all steps of the job out of its queue and return them."""
        return list(self._queues.pop(job_id, ()))

    def drop(self, origin: Origin) -> list[JobId]:
        """Take out what `origin` waits for; return the jobs of which it was."""
        jobs = list(dict.fromkeys(job_id for at, job_id in self.origins() if at == origin))
        for job_id in jobs:
            self._queues[job_id] = deque(waiting for waiting in self._queues[job_id] if waiting.origin != origin)
            self._clear(job_id)
        return jobs

    def origins(self) -> list[tuple[Origin, JobId]]:
        """Return who waits, and for a step of which job."""
        return [(waiting.origin, job_id) for job_id, queue in self._queues.items() for waiting in queue]

    def _clear(self, job_id: JobId) -> None:
        if not self._queues[job_id]:
            del self._queues[job_id]
