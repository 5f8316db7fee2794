"""The states of a step under its shepherd, and the events that change them, as one table.

    PREPARING -> READY -> RELEASED -> ENDING -> OVER -> RECORDED -> REPORTED -> ACKNOWLEDGED -> GONE

It has no timers and no processes: the shepherd acts, then applies the event.

Rules:
- `NEXT` is complete: an event that a state does not list is not allowed in it. `after` raises then.
- A step leaves PREPARING or READY for OVER directly: it never ran, and never will under this token.
- RECORDED is reached only when the end is on disk, or when nothing ever ran. So nothing is reported before it is durable.
- A new agent does not have the reports that the earlier one got: RECONNECT takes REPORTED back to RECORDED.
"""

from __future__ import annotations

import enum
from typing import Dict


class StepState(enum.Enum):
    """How far a step has come on this node."""

    PREPARING = "preparing"  # its tasks are forked; some have not opened their files yet
    READY = "ready"  # each task waits on the release pipe
    RELEASED = "released"  # `started` is on disk; the tasks run
    ENDING = "ending"  # an end was requested, or leftover processes are being killed
    OVER = "over"  # no process is left; its end is being written to disk
    RECORDED = "recorded"  # its end may be reported
    REPORTED = "reported"  # the connected agent was sent its end
    ACKNOWLEDGED = "acknowledged"  # the controller has committed its end
    GONE = "gone"  # nothing is left to do


class StepEvent(enum.Enum):
    """What happens to a step. The last group comes from the agent, at any time."""

    TASKS_READY = "all tasks are ready"
    RELEASE = "its tasks are released"
    REFUSE = "it cannot run"
    TASKS_OVER = "all tasks are over, other processes are left"
    TREE_EMPTY = "no process is left"
    RECORD = "its end is on disk"
    REPORT = "its end is reported"
    LEAVE = "nothing is left to do"

    END = "an end is requested"
    GO = "release"
    SIGNAL = "a signal"
    SUSPEND = "suspend"
    RESUME = "resume"
    LIMIT = "a new time limit"
    ACKNOWLEDGE = "the end is committed"
    RECONNECT = "a new agent"


class TransitionError(Exception):
    """The table does not allow this event in this state."""


BEFORE_RELEASE = frozenset({StepState.PREPARING, StepState.READY})
RUNNING = frozenset({StepState.RELEASED, StepState.ENDING})
REPORTABLE = frozenset({StepState.RECORDED, StepState.REPORTED, StepState.ACKNOWLEDGED})

NEXT: Dict[StepState, Dict[StepEvent, StepState]] = {
    StepState.PREPARING: {
        StepEvent.TASKS_READY: StepState.READY,
        StepEvent.REFUSE: StepState.OVER,
        StepEvent.END: StepState.OVER,
        StepEvent.GO: StepState.PREPARING,
        StepEvent.SUSPEND: StepState.PREPARING,
        StepEvent.RESUME: StepState.PREPARING,
        StepEvent.RECONNECT: StepState.PREPARING,
    },
    StepState.READY: {
        StepEvent.RELEASE: StepState.RELEASED,
        StepEvent.REFUSE: StepState.OVER,
        StepEvent.END: StepState.OVER,
        StepEvent.GO: StepState.READY,
        StepEvent.SUSPEND: StepState.READY,
        StepEvent.RESUME: StepState.READY,
        StepEvent.RECONNECT: StepState.READY,
    },
    StepState.RELEASED: {
        StepEvent.END: StepState.ENDING,
        StepEvent.TASKS_OVER: StepState.ENDING,
        StepEvent.TREE_EMPTY: StepState.OVER,
        StepEvent.GO: StepState.RELEASED,
        StepEvent.SIGNAL: StepState.RELEASED,
        StepEvent.SUSPEND: StepState.RELEASED,
        StepEvent.RESUME: StepState.RELEASED,
        StepEvent.LIMIT: StepState.RELEASED,
        StepEvent.RECONNECT: StepState.RELEASED,
    },
    StepState.ENDING: {
        StepEvent.END: StepState.ENDING,
        StepEvent.TREE_EMPTY: StepState.OVER,
        StepEvent.GO: StepState.ENDING,
        StepEvent.SIGNAL: StepState.ENDING,
        StepEvent.RESUME: StepState.ENDING,
        StepEvent.LIMIT: StepState.ENDING,
        StepEvent.RECONNECT: StepState.ENDING,
    },
    StepState.OVER: {
        StepEvent.RECORD: StepState.RECORDED,
        StepEvent.END: StepState.OVER,
        StepEvent.RECONNECT: StepState.OVER,
    },
    StepState.RECORDED: {
        StepEvent.REPORT: StepState.REPORTED,
        StepEvent.ACKNOWLEDGE: StepState.ACKNOWLEDGED,
        StepEvent.LEAVE: StepState.GONE,
        StepEvent.END: StepState.GONE,
        StepEvent.RECONNECT: StepState.RECORDED,
    },
    StepState.REPORTED: {
        StepEvent.ACKNOWLEDGE: StepState.ACKNOWLEDGED,
        StepEvent.LEAVE: StepState.GONE,
        StepEvent.END: StepState.GONE,
        StepEvent.RECONNECT: StepState.RECORDED,
    },
    StepState.ACKNOWLEDGED: {
        StepEvent.ACKNOWLEDGE: StepState.ACKNOWLEDGED,
        StepEvent.LEAVE: StepState.GONE,
        StepEvent.END: StepState.GONE,
        StepEvent.RECONNECT: StepState.ACKNOWLEDGED,
    },
    StepState.GONE: {},
}


def allows(state: StepState, event: StepEvent) -> bool:
    """Return whether the event may happen in this state."""
    return event in NEXT[state]


def after(state: StepState, event: StepEvent) -> StepState:
    """Return the state after the event. Raises TransitionError if the table does not have it."""
    try:
        return NEXT[state][event]
    except KeyError:
        raise TransitionError("%s is not allowed while the step is %s" % (event.name, state.value)) from None
