"""The messages between controller, agent, shepherd and the step commands: the one definition that every end uses.

Frames and the codec are in `message`; the messages between an agent and its shepherds are in `shepherd_messages`. A peer of
another version is recognized by `version` in `Hello` and `Welcome`.

Rules (see LAUNCH in the design): a launch is named by its token; `Launch` may be sent again freely and is answered
with the present state; a `Report` is repeated until its `seq` is acknowledged by `Ack`; a lower `epoch` than one seen
is refused.

Runs on Python 3.9 with the standard library only. Knows nothing of sockets, clocks or files.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

from hpcnode.wire.message import (
    MAX_BLOB_BYTES,
    MAX_FRAME_BYTES,
    MAX_JSON_BYTES,
    Codec,
    FrameReader,
    M,
    Message,
    WireError,
    changed,
    fresh,
    part,
)

# ----- the messages between the controller and a command in a job (hrun, hrsh, an API command) or a training program
# They go through the agent of the command's node, within FromStream and ToStream, or directly. A part of `hpcnode.wire.protocol`,
# by which all others know them.


class StepRequest(Message):
    """Start a step. `job_id` 0: allocate a job for it first (hrun alone). `options` are hrun's, by long name.

    Options that name resources are texts as the user typed them; the controller parses them.
    """

    version: int
    job_id: int
    options: Dict[str, Any]
    argv: List[str]
    work_dir: str
    env: Dict[str, str]


class StepAsked(Message):
    """From the agent, on each new connection, for each step command that had asked for something: is that known?

    Answered as the request is: with how far it has come, or with StepEnded and `again` if nothing has been done for it.
    """


class StepBack(Message):
    """To the agent, first on a connection: this process had asked the agent before it for a step (`started`: and got it).

    Answered as StepAsked is, and if the step had started with an empty StepWaiting; with Goodbye if nobody knows of it.
    """

    started: bool


class ApiRequest(Message):
    """A command in job `job_id` asks the controller's API, as the job's owner. `path` has the query; the blob is the body."""

    job_id: int
    method: str
    path: str


class ApiAnswer(Message):
    """What the API answered; the blob is the body."""

    status: int
    headers: Dict[str, str]


class StepWaiting(Message):
    """The job or step waits: `text` is for the user. Without a text: a node of the step has come to a new controller."""

    job_id: int
    text: str


class Progress(Message):
    """How far a training program of job `job_id` is. It says so to the agent of its node, on a connection of its own.

    The agent passes on the newest, at a bounded rate, within FromStream. `total_steps`, `steps_per_s`, `samples_per_s` and
    `checkpoint_step` are 0 where they are not known; a `loss` that is none is left out. `goodput` is the part of the run's time
    that went into steps which count. `age_s` is how long ago it was so,
    which spares the nodes' clocks; `checkpoint_age_s` counts from the same moment. `note` is a line for people.
    `directory` is where its checkpoints are.
    """

    job_id: int
    step: int
    total_steps: int = 0
    loss: Optional[float] = None
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    checkpoint_step: int = 0
    checkpoint_age_s: Optional[float] = None
    goodput: Optional[float] = None
    note: str = ""
    directory: str = ""
    age_s: float = 0.0


class Failure(Message):
    """Why rank `rank` of `ranks` of job `job_id` fails, in its own words; said and passed on as Progress is, but at once.

    `echo`: it only noticed that another one is gone.
    """

    job_id: int
    rank: int
    ranks: int
    text: str
    echo: bool = False
    age_s: float = 0.0


class StepStarted(Message):
    """The step has its nodes. `tasks`: node, first rank, count, token for each node, in order.

    `scattered` has the ranks of each node where they are not contiguous.
    """

    job_id: int
    step: int
    tasks: List[Tuple[str, int, int, str]]
    scattered: List[List[int]] = fresh(list)

    def parts(self) -> List[Tuple[str, Sequence[int], str]]:
        """Return node, ranks and token for each node."""
        ranks: Sequence[Sequence[int]] = self.scattered
        if not ranks:
            ranks = [range(first, first + count) for _, first, count, _ in self.tasks]
        return [(node, mine, token) for (node, _, _, token), mine in zip(self.tasks, ranks)]


class JobAllocated(Message):
    """To halloc alone: its job has its nodes; `env` is what the scheduler sets for the command that holds it."""

    job_id: int
    env: Dict[str, str]


class StepSignal(Message):
    """From hrun: pass `signum` on to all tasks."""

    signum: int


class StepEnded(Message):
    """All is over: codes and signals of all tasks by rank; `error` in words if the step could not run.

    `again`: a controller ended meanwhile, no task has run or will, and who asks again gets the step.
    """

    codes: List[int]
    signals: List[int]
    error: str = ""
    again: bool = False

    @property
    def never_ran(self) -> bool:
        """Whether no task has run, so that nothing more is said about it."""
        return self.again or (bool(self.error) and not self.codes)


__all__ = ["MAX_BLOB_BYTES", "MAX_FRAME_BYTES", "MAX_JSON_BYTES", "Message", "WireError", "changed"]

VERSION = 1
# Of frames from step commands, whom nobody vouches for.
MAX_COMMAND_BYTES = 4 << 20
MAX_COMMAND_VALUES = 50_000

BATCH = "batch"
ALLOC = "alloc"  # a job's part on a node that does not run its batch step: claimed, nothing to run

KEEP, KILL = "keep", "kill"  # Launch.lease
LEASE_OVER = "its lease ran out"

ALL_TASKS = -1
PROBE_PREFIX = ".hpcsched-probe-"  # of CompareProbe.name; 16 hexadecimal digits follow
PROBE_BYTES = 64

STREAMED = "-"  # Launch.stderr: a stream of its own although stdout is a file

# What a Report can say of a token.
CLAIMED = "claimed"  # the spool entry exists, the program is not released yet
READY = "ready"  # of a launch with `hold`: all is prepared, it waits for Go
STARTED = "started"
ENDED = "ended"  # with exit status; of a batch step also: nothing of the job is left on this node
REVOKED = "revoked"  # it never ran here and never will
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
    scattered: List[int] = fresh(list)  # the ranks, where they are not contiguous

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
    hosts: List[Tuple[str, int]] = fresh(list)  # (node, slots) of the whole allocation
    same_machine: bool = False  # the allocation's nodes are one machine posing as several
    allow_uid_below: int = 1000  # accounts of a lower uid are refused; see `hpcnode.os.account.why_refused`
    task_prolog: str = ""  # a program that each task runs as its user before its own, see `hpcnode.shepherd.task`
    task_epilog: str = ""  # and after it
    wait_for_children: bool = False  # a task is over when all that it has started is
    remote_shell: bool = False  # what hrsh starts: signals for the job's steps are not for it (`Entry.hears`)


class Go(Message):
    """Release the tasks of `token`, which was launched with `hold`. May be said again, and too early."""

    token: str


class SignalStep(Message):
    """Send `signum` to the tasks of `token`: to their process groups.

    Of the token of a batch step, or of a claim, one of these is set: `batch_only` means the batch shell alone, `steps`
    every other step of the job on this node, and `full` those, the batch shell and its children.
    """

    token: str
    signum: int
    batch_only: bool = False
    steps: bool = False
    full: bool = False


class EndStep(Message):
    """Bar `token`: if it never ran here it never will; if it runs: TERM, after `grace_s` KILL, until its tree is empty.

    Answered by Report ENDED, REVOKED, LOST or REFUSED (again, if it had ended before).
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
    knows the token (see hpcnode.agent.probe), with it the `rate_mbps` at which they came from there.
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


class CompareProbe(Message):
    """Compare the share probe `name` in `directory` with its SHA-256; answered by ProbeCompared with the same `request`.

    `uid` is the probe's owner as its writer sees it. The probe's content never leaves the node.
    """

    request: int
    directory: str
    name: str
    sha256: str
    uid: int


class Input(Message):
    """The blob is input for task `task` of the step (-1: all tasks) at `offset`; `eof` closes it after the blob."""

    token: str
    task: int
    offset: int
    eof: bool


class WatchOutput(Message):
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
    codes: List[int] = fresh(list)
    signals: List[int] = fresh(list)
    timed_out: bool = False
    out_of_memory: bool = False
    why: str = ""
    usage: Dict[str, float] = fresh(dict)
    stream_to: Optional[Address] = None
    output_full: bool = False  # of ENDED: the file system of its output file was full
    unexecuted: bool = False  # of ENDED: its program was never executed, `why` says why not
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
    """Answer to Probe: see hpcnode.agent.probe for the keys of `facts`."""

    request: int
    facts: Dict[str, Any]


class FileData(Message):
    """Answer to ReadFile: the blob is the data from `offset` on; `size` is the file's; `error` in words if it failed."""

    request: int
    offset: int
    size: int
    error: str = ""


class ProbeCompared(Message):
    """Answer to CompareProbe: whether the content is the same; `error` says in words why that could not be told."""

    request: int
    same: bool
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
    Probe, ReadFile, CompareProbe, Input, WatchOutput, OutputAck, ToStream, CloseStream,
    Ping, Welcome, Goodbye, Report, Condition, JobGone, Facts, FileData, ProbeCompared, Output, InputAck, FromStream, Pong,
    StepRequest, StepAsked, StepBack, StepWaiting, StepStarted, JobAllocated, StepSignal, StepEnded, Progress, Failure,
    ApiRequest, ApiAnswer,
)  # fmt: skip
# Their texts are words for people: what is not UTF-8 in them is the name of a file that they are about.
_QUOTING = (
    Welcome, Goodbye, Report, Condition, Facts, FileData, ProbeCompared, StepWaiting, StepEnded, Failure, Progress,
)  # fmt: skip
_CODEC = Codec(_MESSAGES, _QUOTING)
to_json, from_json, encode, parse = _CODEC.to_json, _CODEC.from_json, _CODEC.encode, _CODEC.parse


def read_as(cls: Type[M], obj: Any) -> M:
    """Return `obj` (parsed JSON) as a message of the class `cls`. Raises WireError if it is none, or another."""
    message = from_json(obj)
    if not isinstance(message, cls):
        raise WireError("cannot read a message: it is %s, not %s" % (type(message).__name__, cls.__name__))
    return message


class Framer(FrameReader):
    """Reads frames of this protocol; see `FrameReader`."""

    def __init__(self, limit: int = MAX_FRAME_BYTES, max_values: int = 0) -> None:
        super().__init__(_CODEC, limit, max_values)
