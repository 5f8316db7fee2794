"""How long a node that a health check has drained stays away after it is well again.

    (available) --drained by a check--> ill --found well--> well --the hold is over--> (available)
                                         ^------ill again, or lost----+

The hold doubles with each drain of the last day, up to `LONGEST` times the first, so that a node that is well and ill in turn
takes few jobs with it. A person who resumes the node ends the hold, and forgets the drains.

Knows no clock and no node: events go in, times come out. Times are on the controller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CHECK = "hhealth"  # drains and resumes by health checks, as `NodeDrained.by`
DAY_S = 86_400.0
LONGEST = 16


@dataclass(frozen=True, slots=True)
class Probation:
    """What is known of a node's drains by health checks."""

    drains_s: tuple[float, ...] = ()  # in the last day before the newest
    well_since_s: float | None = None  # None: it is ill, or not drained by a check

    def drained(self, at_s: float) -> Probation:
        """Return it after a check has drained the node."""
        recent = tuple(drain_s for drain_s in self.drains_s if at_s - drain_s < DAY_S)
        return Probation((*recent, at_s))

    def well(self, at_s: float) -> Probation:
        """Return it after a check has found the drained node well."""
        return self if self.well_since_s is not None else replace(self, well_since_s=at_s)

    def ill(self) -> Probation:
        """Return it after the node was found ill again, was lost, or has returned."""
        return self if self.well_since_s is None else replace(self, well_since_s=None)

    def hold_s(self, first_s: float) -> float:
        """Return how long the node must be well, if the first hold is `first_s`."""
        return first_s * min(LONGEST, 1 << max(0, len(self.drains_s) - 1))

    def returns_at_s(self, first_s: float) -> float | None:
        """Return from when on the node may return if it stays well; None: it is ill."""
        return None if self.well_since_s is None else self.well_since_s + self.hold_s(first_s)
