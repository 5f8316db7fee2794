"""The states of jobs by name and by Slurm's short codes, and those that belong together. Source: squeue(1), job states."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.errors import UsageError

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any

ENDED_STATES = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE", "BOOT_FAIL"}
)
ACTIVE_STATES = frozenset({"CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"})
STATE_CODES = {
    "PD": "PENDING", "CF": "CONFIGURING", "R": "RUNNING", "S": "SUSPENDED", "CG": "COMPLETING", "CD": "COMPLETED",
    "F": "FAILED", "CA": "CANCELLED", "TO": "TIMEOUT", "NF": "NODE_FAIL", "OOM": "OUT_OF_MEMORY", "PR": "PREEMPTED",
    "DL": "DEADLINE", "BF": "BOOT_FAIL", "SE": "SPECIAL_EXIT",
}  # fmt: skip
SPECIAL_EXIT = "SPECIAL_EXIT"  # what a waiting job shows that was requeued so


def shown_state(job: dict[str, Any]) -> str:
    """Return the state of a job, the JSON object of the API, as its users see it."""
    return SPECIAL_EXIT if job["state"] == "PENDING" and job.get("hold") == "special" else job["state"]


def parse_states(words: Sequence[str]) -> list[str]:
    """Return the names of states given by names or short codes in either case; none for ``all``. Raises UsageError."""
    states = []
    for word in words:
        state = STATE_CODES.get(word.upper(), word.upper())
        if state == "ALL":
            return []
        if state not in STATE_CODES.values():
            known = ", ".join(f"{name} ({code})" for code, name in STATE_CODES.items())
            raise UsageError(f"Invalid job state specified: {word[:60]}; there are {known}")
        states.append(state)
    return states
