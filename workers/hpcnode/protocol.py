"""The messages between controller, agent, shepherd and the step commands: the one definition that every end uses.

Those of the step commands are written down in `commandwords`; here is all else, and the frames in which all of them go.

A frame is two big-endian 32-bit lengths, then a JSON object, then raw bytes (output, input, a script): see `Framer`.
A message is a frozen value (see `message`); its JSON is its fields plus ``"type"``, without those that are as usual.
Unknown types and fields, missing fields, wrong types, duplicate keys, NaN, too long frames and deep nesting are refused
with `WireError`: a peer of another version is told so by `version` in `Hello` and `Welcome`, not by guessing.

Rules (see LAUNCH in the design): a launch is named by its token; `Launch` may be sent again freely and is answered
with the present state; a `Report` is repeated until its `seq` is acknowledged by `Ack`; a lower `epoch` than one seen
is refused.

Runs on Python 3.9 with the standard library only. Knows nothing of sockets, clocks or files.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Type

from hpcnode.commandwords import (
    Allocated,
    ApiAnswer,
    ApiRequest,
    Failure,
    Progress,
    StepAsked,
    StepBack,
    StepEnded,
    StepRequest,
    StepSignal,
    StepStarted,
    StepWaiting,
)
from hpcnode.message import Fresh, Message, WireError, changed, from_fields, part, to_fields

__all__ = ["Message", "WireError", "changed"]

VERSION = 1
MAX_JSON_BYTES = 8 << 20
MAX_BLOB_BYTES = 8 << 20
_HEADER = struct.Struct("!II")

BATCH = "batch"
ALLOC = "alloc"  # a job's part on a node that does not run its batch step: claimed, nothing to run

KEEP, KILL = "keep", "kill"  # Launch.lease
LEASE_OVER = "its lease ran out"

ALL_TASKS = -1
STREAMED = "-"  # Launch.stderr: a stream of its own although stdout is a file

# What a Report can say of a token.
CLAIMED = "claimed"  # the spool entry exists, the program is not released yet
READY = "ready"  # of a launch with `hold`: all is prepared, it waits for Go
STARTED = "started"
ENDED = "ended"  # with exit status; of a batch step also: nothing of the job is left on this node
BARRED = "barred"  # it never ran here and never will
REFUSED = "refused"  # it could not be started; `why` says so. Final
LOST = "lost"  # its record says started, but shepherd and processes are gone without an exit status


# ----- messages: controller -> agent


class Hello(Message):
    """First on a connection. The agent answers Welcome, or Goodbye (and closes) if `epoch` is lower than one it has seen."""

    version: int
    cluster: str
    incarnation: str
    epoch: int
    node: str


@part
class TaskSet(Message):
    """The tasks of a step that run on one node: ranks first_rank .. first_rank+count-1 of `total` on `nnodes` nodes."""

    first_rank: int
    count: int
    total: int
    node_rank: int
    nnodes: int
    scattered: List[int] = Fresh(list)  # the ranks, where they are not contiguous

    def ranks(self) -> Sequence[int]:
        """Return the ranks of these tasks, ascending."""
        return self.scattered or range(self.first_rank, self.first_rank + self.count)


@part
class Address(Message):
    """Where the output of a step goes: a stream of the agent on `node`, or of the controller itself (node "")."""

    node: str
    stream: int


class Launch(Message):
    """Claim `token` and start its tasks here. The blob is the batch script (empty for a step that has `argv`).

    `user` is the account's name, "" for whoever the agent is. `stdout`/`stderr`/`stdin` are file paths with only the
    per-task patterns (%t %n) left to fill, relative to `work_dir`; with `stream_to`, empty ones are streams instead,
    and an empty
    stdin is fed by `Input` to task 0. An empty stderr goes where stdout goes when that is a file (STREAMED: it does not).
    `gpus` are indices.
    `limit_s` counts from the start of the program: then TERM, after `grace_s` KILL, and the report says timed_out.
    `signum` is sent `signal_before_s` before that limit (0: none), to the batch process alone if `signal_batch_only`.

    The step ALLOC has nothing to run: it is claimed for as long as the job has the node, and answered with CLAIMED. With
    `hold` everything is prepared and answered with READY; the tasks are released by `Go`.
    With `lease` KILL nothing of it is left on the node once it has not heard of the controller for `lease_s` (TERM comes
    `grace_s` before that; the report is LOST, LEASE_OVER). The node counts from when it sent the last Ping that was answered.
    """

    token: str
    job_id: int
    attempt: int
    step: str
    epoch: int
    user: str
    work_dir: str
    argv: List[str]
    env: Dict[str, str]
    tasks: TaskSet
    cpus: int
    mem_mib: int
    gpus: List[int]
    stdout: str = ""
    stderr: str = ""
    stdin: str = ""
    append: bool = False
    label: bool = False
    stream_to: Optional[Address] = None
    limit_s: Optional[float] = None
    grace_s: float = 30.0
    signum: int = 0
    signal_before_s: float = 0.0
    signal_batch_only: bool = False
    kill_on_bad_exit: bool = False
    lease: str = KEEP
    lease_s: float = 0.0
    hold: bool = False
    hosts: List[Tuple[str, int]] = Fresh(list)  # (node, slots) of the whole allocation
    same_machine: bool = False  # the allocation's nodes are one machine posing as several
    remote_shell: bool = False  # what hrsh starts: signals for the job's steps are not for it (`Entry.hears`)


class Go(Message):
    """Release the tasks of `token`, which was launched with `hold`. May be said again, and too early."""

    token: str


class SignalStep(Message):
    """Send `signum` to the processes of `token`: to its tasks' process groups, or to the batch shell alone."""

    token: str
    signum: int
    batch_only: bool = False
    steps_too: bool = False  # of a batch token: also to every step of its job on this node


class EndStep(Message):
    """Bar `token`: if it never ran here it never will; if it runs: TERM, after `grace_s` KILL, until its tree is empty.

    Answered by Report ENDED, BARRED, LOST or REFUSED (again, if it had ended before).
    """

    token: str
    grace_s: float
    why: str  # cancelled | timeout | preempted | ...: noted in the spool for the log


class EndJob(Message):
    """Leave nothing of this attempt (and of earlier ones) of the job on this node; no later launch of it may start.

    Nor of this `stay` (and earlier ones) of the node in the attempt: when it is given to it again, that is the next.
    With `signum` that is what its processes get instead of TERM at first (only its batch shell if `batch_only`), so that it
    can save what it has; after `grace_s` comes KILL. Answered by JobGone.
    """

    incarnation: str
    job_id: int
    attempt: int
    grace_s: float
    signum: int = 0
    batch_only: bool = False
    stay: int = 0


class SuspendJob(Message):
    """Have all processes of the job's attempt on this node stand still, or (`on` false) go on.

    What is launched of it meanwhile is prepared and not released. Time limits do not run. Not answered; said again on
    every connection. An attempt that is being ended goes on.
    """

    incarnation: str
    job_id: int
    attempt: int
    on: bool


class TimeLimit(Message):
    """The time limit of `token`, which has been launched, is `limit_s` now (None: none). Said again on every connection."""

    token: str
    limit_s: Optional[float] = None


class Allocation(Message):
    """The job's attempt, which runs, has `nodes` now; with `wanted` it is asked to give all but these back (`hrun --resize`).

    Kept in a file that the job is told of (HPCSCHED_ALLOCATION_FILE), then its processes here get SIGWINCH. One of a
    generation that is known changes nothing.
    """

    incarnation: str
    job_id: int
    attempt: int
    generation: int
    nodes: List[str]
    wanted: List[str]


class Ack(Message):
    """These reports are committed: they need not be repeated, and ended spool entries may go."""

    seqs: List[int]


class Probe(Message):
    """Look at the node again; answered by Facts with the same `request`. With `measure` its speed is measured too.

    With `link_token` only the network is: without `link_host` the answer is the `link_port` where zeros are given to who
    knows the token (see hpcnode.linkspeed), with it the `rate_mbps` at which they came from there.
    """

    request: int
    measure: bool = False
    link_token: str = ""
    link_host: str = ""
    link_port: int = 0


class ReadFile(Message):
    """Read up to `limit` bytes of `path` from `offset`, as `user`; answered by FileData with the same `request`.

    A negative `offset` counts from the end.
    """

    request: int
    user: str
    path: str
    offset: int
    limit: int


class Input(Message):
    """The blob is input for task `task` of the step (-1: all tasks) at `offset`; `eof` closes it after the blob."""

    token: str
    task: int
    offset: int
    eof: bool


class Watch(Message):
    """Send the output of this token to this stream as well, from now on (or no more, if not `on`). It acknowledges nothing."""

    token: str
    to: Address
    on: bool


class OutputAck(Message):
    """The reader has everything of this stream before `offset`: the shepherd may forget it. `again`: and misses the rest.

    A shepherd goes when its reader has all there was. If one that misses something asks then, what it misses is the end:
    it is told (`to`, which the controller fills in) with an Output of ALL_TASKS.
    """

    token: str
    task: int
    fd: int
    offset: int
    again: bool = False
    to: Optional[Address] = None


class ToStream(Message):
    """Deliver the inner message (and the blob) to the local step command on `stream`."""

    stream: int
    message: Dict[str, Any]


class CloseStream(Message):
    """Close `stream`; sent by the agent when a step command went away, by the controller when it is done with it."""

    stream: int


class Ping(Message):
    request: int


# ----- messages: agent -> controller


class Welcome(Message):
    """The agent's answer to Hello: who it is and all that its spool knows (`inventory`: Report fields, seq included)."""

    version: int
    node: str
    boot_id: str
    agent_version: str
    pid: int
    epoch: int
    inventory: List[Dict[str, Any]]
    facts: Dict[str, Any]


class Goodbye(Message):
    """The connection ends here: `why` in words."""

    why: str


class Report(Message):
    """What is so of `token` on this node. `status` is one of the words above.

    `seq` grows with every report of this node's spool and survives the agent. Times are this node's clock (Unix s).
    For ENDED: `codes` and `signals` have one entry per task, in rank order (code 0..255, or signal > 0).
    `usage`: cpu_user_s, cpu_system_s, disk_read_bytes, disk_write_bytes (of the whole step on this node) and max_rss_kib (of one
    of its tasks), as far as it is known.
    """

    seq: int
    token: str
    status: str
    at_s: float
    pid: int = 0
    started_at_s: float = 0.0
    codes: List[int] = Fresh(list)
    signals: List[int] = Fresh(list)
    timed_out: bool = False
    out_of_memory: bool = False
    why: str = ""
    usage: Dict[str, float] = Fresh(dict)
    stream_to: Optional[Address] = None
    node_fault: bool = False  # of REFUSED: the node is in no state to start anything (its disk is full, say)
    ran_s: Optional[float] = None  # from release to end, of STARTED: to now; by the clock that knows no steps
    ago_s: Optional[float] = None  # of ENDED: how long ago that was when this was sent; None: the node has booted since


class Condition(Message):
    """Whether this node can take launches: `why` not, in words, or "". Said when that changes, and at each refusal.

    The same is in `Welcome.facts` under "fault".
    """

    why: str


class JobGone(Message):
    """Nothing of the job's attempts up to `attempt` (of that: of the stays up to `stay`) is left on this node."""

    incarnation: str
    job_id: int
    attempt: int
    stay: int = 0


class Facts(Message):
    """Answer to Probe: see hpcnode.probe for the keys of `facts`."""

    request: int
    facts: Dict[str, Any]


class FileData(Message):
    """Answer to ReadFile: the blob is the data from `offset` on; `size` is the file's; `error` in words if it failed."""

    request: int
    offset: int
    size: int
    error: str = ""


class Output(Message):
    """The blob is output of task `task` on descriptor `fd` (1 or 2) at `offset`; `eof` after the last one."""

    to: Address
    token: str
    task: int
    fd: int
    offset: int
    eof: bool


class InputAck(Message):
    """Task `task` has taken its input before `offset`: more may be sent."""

    to: Address
    token: str
    task: int
    offset: int


class FromStream(Message):
    """A step command on this node's `stream` says the inner message (with the blob). The agent vouches for `uid`.

    `job_id` is the job whose environment the command runs in (the agent checked that it runs on this node as `uid`),
    0: none.
    """

    stream: int
    uid: int
    job_id: int
    attempt: int
    message: Dict[str, Any]


class Pong(Message):
    request: int


_MESSAGES = (
    Hello, Launch, Go, SignalStep, EndStep, EndJob, SuspendJob, TimeLimit, Allocation, Ack,
    Probe, ReadFile, Input, Watch, OutputAck, ToStream, CloseStream,
    Ping, Welcome, Goodbye, Report, Condition, JobGone, Facts, FileData, Output, InputAck, FromStream, Pong,
    StepRequest, StepAsked, StepBack, StepWaiting, StepStarted, Allocated, StepSignal, StepEnded, Progress, Failure,
    ApiRequest, ApiAnswer,
)  # fmt: skip
_BY_NAME: Dict[str, Type[Message]] = {cls.__name__: cls for cls in _MESSAGES}


def to_json(message: Message) -> Dict[str, Any]:
    """Return the JSON object of `message`, its type included, without the fields that are as usual.

    A step command of the version before, which runs in a job that outlives an upgrade, knows no newer fields: it must not
    be sent them for nothing.
    """
    return {"type": type(message).__name__, **to_fields(message)}


def from_json(obj: Any) -> Message:
    """Return the message that `obj` (parsed JSON) is. Raises WireError if it is none."""
    if not isinstance(obj, dict):
        raise WireError("cannot read a message: not a JSON object")
    cls = _BY_NAME.get(obj.get("type", ""))
    if cls is None:
        raise WireError("cannot read a message: unknown type %.60r" % (obj.get("type"),))
    fields = dict(obj)
    del fields["type"]
    return from_fields(cls, fields)


def encode(message: Message, blob: bytes = b"") -> bytes:
    """Return the frame of `message` and `blob`. Raises WireError if it is too long to be taken by the other end."""
    text = json.dumps(to_json(message), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "surrogateescape"
    )
    if len(text) > MAX_JSON_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise WireError("cannot send %s: %d + %d bytes are too many" % (type(message).__name__, len(text), len(blob)))
    return _HEADER.pack(len(text), len(blob)) + text + blob


def _no_duplicates(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    obj = dict(pairs)
    if len(obj) != len(pairs):
        raise WireError("cannot read a message: duplicate keys")
    return obj


def _no_constant(word: str) -> Any:
    raise WireError("cannot read a message: %s is no number" % word)


class Framer:
    """Turns received bytes into messages. Holds at most one frame; forgets nothing, resynchronizes never."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Tuple[Message, bytes]]:
        """Yield each (message, blob) that is complete after `data`. Raises WireError; the connection must then close."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            json_size, blob_size = _HEADER.unpack_from(self._buffer)
            if json_size > MAX_JSON_BYTES or blob_size > MAX_BLOB_BYTES:
                raise WireError("cannot read a frame of %d + %d bytes: too long" % (json_size, blob_size))
            end = _HEADER.size + json_size + blob_size
            if len(self._buffer) < end:
                return
            text = bytes(self._buffer[_HEADER.size : _HEADER.size + json_size])
            blob = bytes(self._buffer[_HEADER.size + json_size : end])
            del self._buffer[:end]
            yield parse(text), blob


def parse(text: bytes) -> Message:
    """Return the message of one frame's JSON text. Raises WireError."""
    try:
        obj = json.loads(
            text.decode("utf-8", "surrogateescape"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except RecursionError:
        raise WireError("cannot read a message: nested too deep") from None
    except ValueError as error:
        raise WireError("cannot read a message: %s" % error) from None
    return from_json(obj)
