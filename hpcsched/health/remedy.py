"""Which nodes to drain and which to resume, from their checks. Pure.

Rules: a node that fails is drained with what fails as the reason; one that is drained already is left as it is, and one
that does not answer too: it is DOWN, and gets no jobs as it is. Only what hhealth itself drained is resumed, and only
when all its checks are done and none is worse than WARN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcsched.health.report import Check, Status

BY = "hhealth"


def to_drain(views: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> dict[str, str]:
    """Return the nodes to drain, each with the reason."""
    found = {}
    for view in views:
        bad = [check for check in checks if check.node == view["name"] and check.status is Status.CRITICAL]
        if bad and view["link"] == "up" and not view["drained"]:
            found[str(view["name"])] = f"{BY}: " + "; ".join(f"{check.name}: {check.text}" for check in bad)
    return found


def to_resume(views: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> list[str]:
    """Return the nodes that hhealth drained and that are well again."""
    found = []
    for view in views:
        mine = [check.status for check in checks if check.node == view["name"]]
        well = bool(mine) and all(status in (Status.OK, Status.WARN) for status in mine)
        if view["drained"] and view["drained_by"] == BY and view["link"] == "up" and well:
            found.append(str(view["name"]))
    return found
