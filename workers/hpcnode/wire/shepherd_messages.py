"""The messages between an agent and its shepherds.

Rules:
- The two may be of different versions, because an upgrade replaces the agent while its shepherds run on. Messages of an
  unknown type are dropped. A new field needs a default that means the old behaviour.
- The socket is in a 0700 directory, but a job of the agent's own account can reach it. So all frames are checked, and a bad
  one ends its connection only.
- `TasksStarted` and `TasksEnded` are also what the spool has in `started` and `final`.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from hpcnode.wire import protocol
from hpcnode.wire.message import Codec, FrameReader, Message, fresh
from hpcnode.wire.protocol import Address

MAX_SIGNAL = 64
MAX_S = 1e10  # more than three centuries
FINAL_STATUSES = frozenset({protocol.ENDED, protocol.REVOKED, protocol.REFUSED, protocol.LOST})


# ----- agent -> shepherd


class EndTasks(Message):
    """End the step: SIGTERM (or `signum`) to all processes, after `grace_s` SIGKILL."""

    grace_s: float
    why: str
    signum: int = 0
    batch_only: bool = False


class SignalTasks(Message):
    """Signal the tasks.

    Of a batch step: the children of its shell, the shell alone (`batch_only`), or both (`full`).
    """

    signum: int
    batch_only: bool = False
    full: bool = False


class TaskInput(Message):
    """The blob is input for a task (ALL_TASKS: for all) at `offset`.

    `eof` closes it after the blob.
    """

    task: int
    offset: int
    eof: bool


class OutputTaken(Message):
    """The reader has all output of this stream before `offset`."""

    task: int
    fd: int
    offset: int


class ResendOutput(Message):
    """There is a new reader: send unacknowledged output again, marked with this round."""

    round: int


class ReleaseTasks(Message):
    """Release the tasks of a launch with `hold`."""


class SuspendTasks(Message):
    """Suspend all processes of the step, or resume them (`on` false)."""

    on: bool


class ChangeTimeLimit(Message):
    """The step's time limit counts from its release (None: no limit)."""

    limit_s: Optional[float] = None


class EndCommitted(Message):
    """The controller has committed the end: leave as soon as the output was taken."""


# ----- shepherd -> agent


class TasksReady(Message):
    """All tasks of a launch with `hold` are ready for ReleaseTasks."""


class TasksStarted(Message):
    """The tasks run.

    `tasks` and `shepherd` are processes (pid, start ticks, boot id); see `hpcnode.os.process`.
    """

    pid: int
    at_s: float
    started_at_s: float
    tasks: List[Tuple[int, int, str]]
    shepherd: Tuple[int, int, str]
    boot_id: str
    started_boot_s: float
    uid: int
    cgroup: Optional[str] = None
    stream_to: Optional[Address] = None


class TasksEnded(Message):
    """How the step ended.

    The fields are those of `protocol.Report`; `ended_boot_s` is on the boot clock.
    """

    status: str
    at_s: float
    why: str
    stream_to: Optional[Address] = None
    pid: int = 0
    started_at_s: float = 0.0
    boot_id: str = ""
    ended_boot_s: Optional[float] = None
    ran_s: Optional[float] = None
    codes: List[int] = fresh(list)
    signals: List[int] = fresh(list)
    timed_out: bool = False
    out_of_memory: bool = False
    usage: Dict[str, float] = fresh(dict)
    unexecuted: bool = False
    output_full: bool = False
    node_fault: bool = False
    killed: bool = False  # its tree was killed: some kernels kill whatever is born later in a cgroup that was


class TaskOutput(Message):
    """The blob is output of a task at `offset`.

    The agent drops output of an earlier round: it comes again.
    """

    task: int
    fd: int
    offset: int
    eof: bool
    round: int


class InputTaken(Message):
    """The task has taken its input before `offset`."""

    task: int
    offset: int


class SignalOtherSteps(Message):
    """The warning before the time limit, for the job's other steps on this node."""

    signum: int


_MESSAGES = (
    EndTasks, SignalTasks, TaskInput, OutputTaken, ResendOutput, ReleaseTasks, SuspendTasks, ChangeTimeLimit, EndCommitted,
    TasksReady, TasksStarted, TasksEnded, TaskOutput, InputTaken, SignalOtherSteps,
)  # fmt: skip
_BOUNDS: Dict[str, Tuple[float, float]] = {
    "signum": (0, MAX_SIGNAL),
    "grace_s": (0.0, MAX_S),
    "limit_s": (0.0, MAX_S),
    "task": (protocol.ALL_TASKS, 1 << 31),
    "fd": (1, 2),
    "offset": (0, 1 << 62),
    "round": (0, 1 << 62),
}
_CODEC = Codec(_MESSAGES, quoting=(EndTasks, TasksEnded), bounds=_BOUNDS)
encode = _CODEC.encode


def reader() -> FrameReader:
    """Return a new reader of one connection's frames."""
    return FrameReader(_CODEC, skips_unknown=True)


def check_final(ended: TasksEnded) -> None:
    """Raise WireError unless the status is final."""
    if ended.status not in FINAL_STATUSES:
        raise protocol.WireError("cannot read TasksEnded: %.60r is not a final status" % ended.status)


def record_of(message: Message) -> Dict[str, Any]:
    """Return what the spool keeps of TasksStarted or TasksEnded."""
    return {name: value for name, value in _CODEC.to_json(message).items() if name != "type"}
