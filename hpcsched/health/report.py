"""The result of a check: a status (monitoring plugins' exit code), a line, numbers.

Source: Monitoring Plugins Development Guidelines (exit codes 0 to 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Status(IntEnum):
    """The values are exit codes, not an order: see `worst`."""

    OK = 0
    WARN = 1
    CRITICAL = 2
    UNKNOWN = 3


# A known failure is worse than an impossible check.
_SEVERITY = (Status.OK, Status.WARN, Status.UNKNOWN, Status.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check. `node` is "" for checks of the head."""

    name: str
    status: Status
    text: str
    node: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """Return the object of the check: ``database``, ``node n1: disk``."""
        return f"node {self.node}: {self.name}" if self.node else self.name

    def as_json(self) -> dict[str, object]:
        """Return the check as an object of hhealth's JSON."""
        return {
            "check": self.name,
            "node": self.node or None,
            "status": self.status.name,
            "text": self.text,
            "numbers": dict(self.numbers),
        }


def worst(checks: Iterable[Check]) -> Status:
    """Return the worst status: CRITICAL before UNKNOWN before WARN before OK."""
    return max((check.status for check in checks), key=_SEVERITY.index, default=Status.OK)


def below(value: float, warn: float, critical: float) -> Status:
    """Return the status of a value that should be high."""
    return Status.CRITICAL if value < critical else Status.WARN if value < warn else Status.OK


def above(value: float, warn: float, critical: float) -> Status:
    """Return the status of a value that should be low."""
    return Status.CRITICAL if value > critical else Status.WARN if value > warn else Status.OK
