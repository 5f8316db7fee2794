"""How long a node that a health check has drained stays away after it is well again.

    (available) --drained by a check--> ill --found well--> well --the hold is over--> (available)
                                         ^------ill again, or lost----+

The hold doubles with each drain of the last day, up to `LONGEST` times the first, so that a node that is well and ill in turn
takes few jobs with it. A person who resumes the node ends the hold, and forgets the drains.

A node whose connection is lost again and again (`drops_s`) is drained by the same rule: to be well is to be connected.

Knows no clock and no node: events go in, times come out. Times are on the controller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CHECK = "hhealth"  # drains and resumes by health checks, as `NodeDrained.by`
LINK_CHECK = "hpcschedd/link"  # drains a node whose connection is lost again and again, and resumes it
DROPS_S = 1800.0  # lost connections that count are not older
DAY_S = 86_400.0
LONGEST = 16


@dataclass(frozen=True, slots=True)
class Probation:
    """What is known of a node's drains by health checks and for lost connections."""

    drains_s: tuple[float, ...] = ()  # in the last day before the newest
    well_since_s: float | None = None  # None: it is ill, or not drained by a check
    drops_s: tuple[float, ...] = ()  # when its connection was lost, since it was drained or resumed
    linked_since_s: float | None = None  # None: it is not connected, or is to lose its connection

    def drained(self, at_s: float) -> Probation:
        """Return it after a check has drained the node."""
        recent = tuple(drain_s for drain_s in self.drains_s if at_s - drain_s < DAY_S)
        return replace(self, drains_s=(*recent, at_s), well_since_s=None, drops_s=())

    def well(self, at_s: float) -> Probation:
        """Return it after a check has found the drained node well."""
        return self if self.well_since_s is not None else replace(self, well_since_s=at_s)

    def ill(self) -> Probation:
        """Return it after the node was found ill again, was lost, or has returned."""
        return self if self.well_since_s is None else replace(self, well_since_s=None)

    def linked(self, at_s: float) -> Probation:
        """Return it after the node has connected."""
        return replace(self, linked_since_s=at_s)

    def unlinked(self) -> Probation:
        """Return it after the controller has ended the connection, or has ordered the node's end."""
        return self if self.linked_since_s is None else replace(self, linked_since_s=None)

    def dropped(self, at_s: float) -> Probation:
        """Return it after the node does not answer any more; once for each connection."""
        if self.linked_since_s is None:
            return self
        recent = tuple(drop_s for drop_s in self.drops_s if at_s - drop_s < DROPS_S)
        return replace(self, linked_since_s=None, drops_s=(*recent, at_s))

    def steady(self) -> Probation:
        """Return it after the node was resumed because it has stayed connected."""
        return replace(self, drops_s=())

    def forgotten(self) -> Probation:
        """Return it after a person has resumed the node."""
        return Probation(linked_since_s=self.linked_since_s)

    def hold_s(self, first_s: float) -> float:
        """Return how long the node must be well, if the first hold is `first_s`."""
        return first_s * min(LONGEST, 1 << max(0, len(self.drains_s) - 1))

    def returns_at_s(self, first_s: float) -> float | None:
        """Return from when on the node may return if it stays well; None: it is ill."""
        return None if self.well_since_s is None else self.well_since_s + self.hold_s(first_s)

    def rejoins_at_s(self, first_s: float) -> float | None:
        """Return from when on the node may return if it stays connected; None: it is not."""
        return None if self.linked_since_s is None else self.linked_since_s + self.hold_s(first_s)
