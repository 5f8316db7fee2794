"""How far a training job is, as its own program says: what hqueue shows of it beside what the scheduler knows.

The numbers are the program's word. One thing is decided by them: whether a job whose rank was killed is worth another attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.model.ids import JobId, NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why a rank of a training job failed. `echo`: it only noticed that another one was gone."""

    job_id: JobId
    attempt: int
    rank: int
    ranks: int
    node: NodeName
    at_s: float
    echo: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """The state of one attempt of a job as of `at_s`. 0 of steps and rates: not known."""

    job_id: JobId
    attempt: int
    at_s: float
    step: int
    total_steps: int
    loss: float | None
    samples_per_s: float
    steps_per_s: float
    checkpoint_step: int
    checkpoint_at_s: float | None
    goodput: float | None  # steps that count: their part of the time since the run first began
    note: str  # what a person should know: which rank the others wait for, say
    directory: str = ""  # of its checkpoints; "": not known

    @property
    def ends_at_s(self) -> float | None:
        """Return when the last step ends at the present rate; None: unknown."""
        if self.total_steps <= 0 or self.steps_per_s <= 0:
            return None
        return self.at_s + max(0, self.total_steps - self.step) / self.steps_per_s
