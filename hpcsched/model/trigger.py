"""Triggers: programs that the controller runs when a job or node changes; see strigger(1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TriggerEvent(StrEnum):
    JOB_END = "fini"
    TIME_LIMIT = "time"
    NODE_DOWN = "down"
    NODE_UP = "up"
    NODE_DRAINED = "drained"


JOB_EVENTS = frozenset({TriggerEvent.JOB_END, TriggerEvent.TIME_LIMIT})
MAX_TRIGGERS = 1_000  # in all
MAX_TRIGGERS_PER_USER = 100
MAX_OFFSET_S = 32_767  # as in Slurm


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """One trigger. `target`: a job's id, a node's name, or ``*`` for any node.

    `offset_s`: from the event to the program.

    A trigger for TIME_LIMIT is due `offset_s` before the job's time limit. `due_at_s`: when the program runs, after its
    event; 0: the event has not come. `hit`: what it came for. Without `is_permanent` it is deleted when it has run.
    """

    id: int
    uid: int
    user: str
    event: TriggerEvent
    target: str
    offset_s: int = 0
    program: tuple[str, ...]
    is_permanent: bool = False
    due_at_s: float = 0.0
    hit: str = ""

    @property
    def is_of_job(self) -> bool:
        return self.event in JOB_EVENTS
