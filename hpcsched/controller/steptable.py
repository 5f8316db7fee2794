"""The steps that a controller minds, found by their numbers, their tokens and the step commands that asked for them.

A step that is over is found by its tokens and its origin until that stream closes: output may still come.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcsched.controller.stepstate import Origin, Run, Step
from hpcsched.model.ids import JobId, NodeName


class StepTable:
    """Iterating gives those that run, as they are now: the table may change meanwhile."""

    def __init__(self) -> None:
        self._running: dict[tuple[JobId, int, int], Step] = {}
        self._by_token: dict[str, tuple[Step, Run]] = {}
        self._by_origin: dict[Origin, Step] = {}

    def __iter__(self) -> Iterator[Step]:
        return iter(list(self._running.values()))

    def add(self, step: Step) -> None:
        """Take in a step; once more if it has got another run."""
        if not step.finished:
            self._running[(step.job.id, step.job.attempt, step.number)] = step
        for run in step.runs.values():
            self._by_token[run.token] = (step, run)
        if step.origin is not None:
            self._by_origin[step.origin] = step

    def is_over(self, step: Step) -> None:
        """It runs no more."""
        self._running.pop((step.job.id, step.job.attempt, step.number), None)
        if step.origin is None:
            self.forget(step)

    def forget(self, step: Step) -> None:
        """Nothing can come for it any more."""
        for run in step.runs.values():
            self._by_token.pop(run.token, None)

    def leave(self, origin: Origin) -> Step | None:
        """Return the step of a step command that has gone."""
        return self._by_origin.pop(origin, None)

    def running(self, job_id: JobId, attempt: int, number: int) -> Step | None:
        """Return the running step of this number."""
        return self._running.get((job_id, attempt, number))

    def of_job(self, job_id: JobId) -> list[Step]:
        """Return the job's running steps."""
        return [step for step in self if step.job.id == job_id]

    def find(self, token: str) -> tuple[Step, Run] | None:
        """Return the step of a token, and its run."""
        return self._by_token.get(token)

    def of_token(self, node: NodeName, token: str) -> tuple[Step, Run] | None:
        """Return the same if the token was made for this node."""
        found = self.find(token)
        return found if found is not None and found[1].node == node else None

    def of_origin(self, origin: Origin) -> Step | None:
        """Return the step that `origin` asked for, also when it is over."""
        return self._by_origin.get(origin)

    def asked_for(self, node: NodeName) -> list[tuple[Origin, Step]]:
        """Return the steps that were asked for on `node` or have tasks there, and by whom."""
        return [(origin, step) for origin, step in self._by_origin.items() if origin[0] == node or node in step.runs]
