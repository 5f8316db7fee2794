"""The states of a step under its shepherd, and the events that change them, as one table.

    PREPARING -> READY -> RELEASED -> ENDING -> OVER -> RECORDED -> REPORTED -> ACKNOWLEDGED -> GONE

It has no timers and no processes: the shepherd acts, then applies the event.

Rules:
- `NEXT` is complete: an event that a state does not list is not allowed in it. `after` raises then.
- A step leaves PREPARING or READY for OVER directly: it never ran, and never will under this token.
- RECORDED is reached only when the end is on disk, or when nothing ever ran. So nothing is reported before it is durable.
- A new agent has not heard the report of the agent before it: RECONNECT takes REPORTED back to RECORDED.
"""

from __future__ import annotations

import enum
from typing import Dict


class State(enum.Enum):
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


class Event(enum.Enum):
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


BEFORE_RELEASE = frozenset({State.PREPARING, State.READY})
RUNNING = frozenset({State.RELEASED, State.ENDING})
REPORTABLE = frozenset({State.RECORDED, State.REPORTED, State.ACKNOWLEDGED})

NEXT: Dict[State, Dict[Event, State]] = {
    State.PREPARING: {
        Event.TASKS_READY: State.READY,
        Event.REFUSE: State.OVER,
        Event.END: State.OVER,
        Event.GO: State.PREPARING,
        Event.SUSPEND: State.PREPARING,
        Event.RESUME: State.PREPARING,
        Event.RECONNECT: State.PREPARING,
    },
    State.READY: {
        Event.RELEASE: State.RELEASED,
        Event.REFUSE: State.OVER,
        Event.END: State.OVER,
        Event.GO: State.READY,
        Event.SUSPEND: State.READY,
        Event.RESUME: State.READY,
        Event.RECONNECT: State.READY,
    },
    State.RELEASED: {
        Event.END: State.ENDING,
        Event.TASKS_OVER: State.ENDING,
        Event.TREE_EMPTY: State.OVER,
        Event.GO: State.RELEASED,
        Event.SIGNAL: State.RELEASED,
        Event.SUSPEND: State.RELEASED,
        Event.RESUME: State.RELEASED,
        Event.LIMIT: State.RELEASED,
        Event.RECONNECT: State.RELEASED,
    },
    State.ENDING: {
        Event.END: State.ENDING,
        Event.TREE_EMPTY: State.OVER,
        Event.GO: State.ENDING,
        Event.SIGNAL: State.ENDING,
        Event.RESUME: State.ENDING,
        Event.LIMIT: State.ENDING,
        Event.RECONNECT: State.ENDING,
    },
    State.OVER: {
        Event.RECORD: State.RECORDED,
        Event.END: State.OVER,
        Event.RECONNECT: State.OVER,
    },
    State.RECORDED: {
        Event.REPORT: State.REPORTED,
        Event.ACKNOWLEDGE: State.ACKNOWLEDGED,
        Event.LEAVE: State.GONE,
        Event.END: State.GONE,
        Event.RECONNECT: State.RECORDED,
    },
    State.REPORTED: {
        Event.ACKNOWLEDGE: State.ACKNOWLEDGED,
        Event.LEAVE: State.GONE,
        Event.END: State.GONE,
        Event.RECONNECT: State.RECORDED,
    },
    State.ACKNOWLEDGED: {
        Event.ACKNOWLEDGE: State.ACKNOWLEDGED,
        Event.LEAVE: State.GONE,
        Event.END: State.GONE,
        Event.RECONNECT: State.ACKNOWLEDGED,
    },
    State.GONE: {},
}


def allows(state: State, event: Event) -> bool:
    """Return whether the event may happen in this state."""
    return event in NEXT[state]


def after(state: State, event: Event) -> State:
    """Return the state after the event. Raises TransitionError if the table does not have it."""
    try:
        return NEXT[state][event]
    except KeyError:
        raise TransitionError("%s is not allowed while the step is %s" % (event.name, state.value)) from None
