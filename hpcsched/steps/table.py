"""The steps of a controller, found by number, token or origin (their step command).

A finished step is still found by its tokens and its origin until that stream closes, because output
may still arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from hpcnode.wire import protocol
from hpcsched.model.ids import JobId, NodeName
from hpcsched.steps.request import StepOptions
from hpcsched.steps.step import Origin, Step, StepPart


class StepTable:
    """All steps. Iteration gives a copy of the running ones: the table may change meanwhile."""

    def __init__(self) -> None:
        self._running: dict[tuple[JobId, int, int], Step] = {}
        self._by_token: dict[str, tuple[Step, StepPart]] = {}
        self._by_origin: dict[Origin, Step] = {}

    def __iter__(self) -> Iterator[Step]:
        return iter(list(self._running.values()))

    def add(self, step: Step) -> None:
        """Add a step; call it again when the step gets another run."""
        if not step.finished:
            self._running[(step.job.id, step.job.attempt, step.number)] = step
        for run in step.runs.values():
            self._by_token[run.token] = (step, run)
        if step.origin is not None:
            self._by_origin[step.origin] = step

    def is_over(self, step: Step) -> None:
        """Mark the step as no longer running."""
        self._running.pop((step.job.id, step.job.attempt, step.number), None)
        if step.origin is None:
            self.forget(step)

    def forget(self, step: Step) -> None:
        """Remove the step: no more messages can arrive for it."""
        for run in step.runs.values():
            self._by_token.pop(run.token, None)

    def leave(self, origin: Origin) -> Step | None:
        """Remove the origin that has gone, and return its step."""
        return self._by_origin.pop(origin, None)

    def running(self, job_id: JobId, attempt: int, number: int) -> Step | None:
        """Return the running step of this number."""
        return self._running.get((job_id, attempt, number))

    def of_job(self, job_id: JobId) -> list[Step]:
        """Return the job's running steps."""
        return [step for step in self if step.job.id == job_id]

    def find(self, token: str) -> tuple[Step, StepPart] | None:
        """Return the step of a token, and its run."""
        return self._by_token.get(token)

    def of_token(self, node: NodeName, token: str) -> tuple[Step, StepPart] | None:
        """Return the step of a token and its run, if the token was made for this node."""
        found = self.find(token)
        return found if found is not None and found[1].node == node else None

    def of_origin(self, origin: Origin) -> Step | None:
        """Return the step that `origin` requested, even if it has finished."""
        return self._by_origin.get(origin)

    def asked_for(self, node: NodeName) -> list[tuple[Origin, Step]]:
        """Return the steps requested on `node` or with tasks there, with their origins."""
        return [(origin, step) for origin, step in self._by_origin.items() if origin[0] == node or node in step.runs]


# ----- queues of steps that wait for CPUs of their job, in the order of their requests
# Does not know placement, nodes or messages: `steps` decides which step may start.


class Waiting(NamedTuple):
    """A request of the step command behind `origin`.

    `options` None: they are read when its job has its nodes.
    """

    origin: Origin
    request: protocol.StepRequest
    options: StepOptions | None = None


class StepQueues:
    """A queue for each job that has waiting steps."""

    def __init__(self) -> None:
        self._queues: dict[JobId, deque[Waiting]] = {}

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._queues

    def add(self, job_id: JobId, waiting: Waiting) -> None:
        """Add a step at the end of its job's queue."""
        self._queues.setdefault(job_id, deque()).append(waiting)

    def first(self, job_id: JobId) -> Waiting | None:
        """Return the first waiting step of the job; None: no step of the job waits."""
        return self._queues[job_id][0] if job_id in self._queues else None

    def take_first(self, job_id: JobId) -> None:
        """Remove the first step from the job's queue, which must not be empty."""
        self._queues[job_id].popleft()
        self._clear(job_id)

    def take_all(self, job_id: JobId) -> list[Waiting]:
        """Remove all steps of the job from its queue and return them."""
        return list(self._queues.pop(job_id, ()))

    def drop(self, origin: Origin) -> list[JobId]:
        """Remove the waiting steps of `origin`; return their jobs."""
        jobs = list(dict.fromkeys(job_id for at, job_id in self.origins() if at == origin))
        for job_id in jobs:
            self._queues[job_id] = deque(waiting for waiting in self._queues[job_id] if waiting.origin != origin)
            self._clear(job_id)
        return jobs

    def origins(self) -> list[tuple[Origin, JobId]]:
        """Return the origins of waiting steps, each with its job."""
        return [(waiting.origin, job_id) for job_id, queue in self._queues.items() for waiting in queue]

    def _clear(self, job_id: JobId) -> None:
        if not self._queues[job_id]:
            del self._queues[job_id]
