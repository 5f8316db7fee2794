"""Which jobs are so little work that they may go ahead of everybody else, promises or not: for our own policy.

Of the machines whose logs we have half of the jobs run for less than ten minutes. They are one per cent of the work, and make
nearly all of the mean slowdown. Most of them ask for little time, so no prediction is needed to find them; whoever asks for
less than he needs is ended at his limit. What goes ahead holds a small share of the machine at most, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    """When a job may go ahead of everybody."""

    limit_s: float = 3600.0  # it asks for so little time,
    work_s: float = 60.0  # and for so little of it if all of the machine were to do it;
    share: float = 0.1  # with it such jobs hold no more than this part of the machine,
    part: float = 0.9  # and nobody has waited for more than this part of the measure

    def is_quick(self, limit_s: float, share: float) -> bool:
        """Say whether a job of this time limit, which needs this share of the machine (0..1), is so little work."""
        return limit_s <= self.limit_s and limit_s * share <= self.work_s
