"""The messages between controller, agent and step commands.

Frames and the codec are in `message`; the messages between an agent and its shepherds are in `shepherd_messages`. A peer of
another version is recognized by `version` in `Hello` and `Welcome`.

Rules (see LAUNCH in the design): a token names a launch. `Launch` may be repeated, and is answered with the present state. A
`Report` is repeated until `Ack` has its `seq`. A lower `epoch` than one seen before is refused.

Runs on Python 3.9 with the standard library only. It knows nothing of sockets, clocks or files.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

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

# ----- messages between the controller and a command in a job (hrun, hrsh, an API command) or a training program
# They pass through the agent of the command's node, inside FromStream and ToStream, or go directly to the controller.


class StepRequest(Message):
    """Start a step.

    `job_id` 0: allocate a job for it first (hrun only). `options` are hrun's, by long name.

    Options that name resources are texts as the user typed them; the controller parses them.
    """

    version: int
    job_id: int
    options: Dict[str, Any]
    argv: List[str]
    work_dir: str
    env: Dict[str, str]


class PreparedStep(Message):
    """From the gateway: start the step that the API has prepared.

    It is the first message of its connection. `key`: the secret in the answer of the API. It works once.
    """

    key: str


class StepAsked(Message):
    """Ask for the state of a step command's request.

    The agent sends it for each one on each new connection.

    The answer is that of the request: how far it has come, or StepEnded with `again` if nothing was done for it.
    """


class StepBack(Message):
    """Resume a request to an earlier agent; the first message of a connection.

    `started`: its step had started.

    The answer is that of StepAsked, or an empty StepWaiting if the step had started, or Goodbye if the request is unknown.
    """

    started: bool


class ApiRequest(Message):
    """A request to the controller's API as the owner of job `job_id`.

    `path` has the query; the blob is the body.
    """

    job_id: int
    method: str
    path: str


class ApiAnswer(Message):
    """The answer of the API; the blob is the body."""

    status: int
    headers: Dict[str, str]


class StepWaiting(Message):
    """The job or step waits; `text` is for the user.

    Without text: a node of the step has connected to a new controller.
    """

    job_id: int
    text: str


class Progress(Message):
    """The progress of a training program of job `job_id`, sent to the agent of its node.

    The agent forwards the newest at a bounded rate, inside FromStream. `total_steps`, `steps_per_s`, `samples_per_s` and
    `checkpoint_step` are 0 if unknown. `goodput` is the share of the run's time spent in steps that count. `age_s` is the age
    of the report, so clocks need not agree; `checkpoint_age_s` counts from the same moment. `note` is a line for people,
    `directory` the directory of its checkpoints.
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
    """Why rank `rank` of `ranks` of job `job_id` fails.

    Sent and forwarded as Progress is, but at once.

    `echo`: the rank only noticed that another rank is gone.
    """

    job_id: int
    rank: int
    ranks: int
    text: str
    echo: bool = False
    age_s: float = 0.0


class StepStarted(Message):
    """The step has its nodes. `tasks`: node, first rank, count, token for each node, in order.

    `scattered` has the ranks of each node if they are not contiguous.
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
    """To halloc only: its job has its nodes.

    `env` are the scheduler's variables for the command of halloc.
    """

    job_id: int
    env: Dict[str, str]


class StepSignal(Message):
    """From hrun: send `signum` to all tasks."""

    signum: int


class StepEnded(Message):
    """The step is over: codes and signals of all tasks by rank.

    `error` is the reason if it could not run.

    `again`: a controller ended meanwhile and no task has run or will; the command must request the step again.
    `unsigned`: its user must sign it first.
    """

    codes: List[int]
    signals: List[int]
    error: str = ""
    again: bool = False
    unsigned: bool = False

    @property
    def never_ran(self) -> bool:
        """Whether no task has run, so that no further message follows."""
        return self.again or (bool(self.error) and not self.codes)


__all__ = ["MAX_BLOB_BYTES", "MAX_FRAME_BYTES", "MAX_JSON_BYTES", "Message", "WireError", "changed"]

VERSION = 1
# Bounds on frames of step commands, which are not trusted.
MAX_COMMAND_BYTES = 4 << 20
MAX_COMMAND_VALUES = 50_000

BATCH = "batch"
ALLOC = "alloc"  # a job's claim on a node without its batch step; nothing runs

KEEP, KILL = "keep", "kill"  # Launch.lease
LEASE_OVER = "its lease ran out"

ALL_TASKS = -1
PROBE_PREFIX = ".hpcsched-probe-"  # of CompareProbe.name, before 16 hexadecimal digits
PROBE_BYTES = 64

BENCH_DEADLINES_S = {"quick": 60.0, "full": 240.0}  # of Probe.bench; a quick run takes less than 20 s

STREAMED = "-"  # Launch.stderr: a stream although stdout is a file

# Report.status
CLAIMED = "claimed"  # the spool entry exists, the tasks are not released yet
READY = "ready"  # a launch with `hold`: the tasks are ready and wait for Go
STARTED = "started"
ENDED = "ended"  # with exit status; for a batch step also: nothing of the job is left on this node
REVOKED = "revoked"  # it never ran here and never will
REFUSED = "refused"  # it could not be started; final
LOST = "lost"  # it was started, but its shepherd and processes are gone without an exit status


# ----- messages: controller -> agent


class Hello(Message):
    """The first message of a controller.

    The agent answers Welcome, or Goodbye if it refuses the controller. `start`: random, of this
    start of the controller, because two on copies of one database have the same epoch. `visit`: a
    command looks at the node, beside the controller; it may send Probe, CompareProbe and Ping.
    """

    version: int
    cluster: str
    incarnation: str
    epoch: int
    node: str
    start: str = ""
    visit: bool = False


@part
class TaskSet(Message):
    """The tasks of a step on one node: `count` ranks from `first_rank` on, of `total`."""

    first_rank: int
    count: int
    total: int
    node_rank: int
    nnodes: int
    scattered: List[int] = fresh(list)  # the ranks, if they are not contiguous

    def ranks(self) -> Sequence[int]:
        """Return the ranks of these tasks, ascending."""
        return self.scattered or range(self.first_rank, self.first_rank + self.count)


@part
class Address(Message):
    """The destination of output: a stream of the agent on `node` (controller: node "")."""

    node: str
    stream: int


@part
class Confinement(Message):
    """A job's share of a node, and which parts of it the node enforces.

    `words`: cpus, processes, gpus, shm, tmp, proc; see `hpcnode.shepherd.confinement`. Memory is always limited. `gpus` are
    indices of `gpu_files`; without files they are those of the driver. 0: no limit.
    """

    words: List[str] = fresh(list)
    cpus: int = 0
    mem_mib: int = 0
    gpus: List[int] = fresh(list)
    gpu_files: List[str] = fresh(list)
    max_processes: int = 0


@part
class JobScripts(Message):
    """The administrator's programs around a job's processes on a node.

    See `hpcnode.agent.job_scripts`. `prolog` and `epilog` are absolute paths, "" for none. Each may run for `limit_s`. `env` is
    their environment. `gpu_power`: the watts to which the `gpus` of the job, by index or UUID, are limited meanwhile; 0: not.
    """

    prolog: str = ""
    epilog: str = ""
    limit_s: float = 0.0
    env: Dict[str, str] = fresh(dict)
    gpu_power: int = 0
    gpus: List[str] = fresh(list)


class Launch(Message):
    """Claim `token` and start its tasks here.

    The blob is the batch script (empty for a step that has `argv`).

    `user` is the account's name, "" for the agent's own. `stdout`, `stderr` and `stdin` are paths relative to `work_dir`, with
    only the per-task patterns (%t %n) left to fill. With `stream_to`, empty ones are streams, and an empty stdin is fed by
    `Input` to task 0. An empty stderr follows stdout if that is a file (STREAMED: it does not). `gpus` are indices.
    `limit_s` counts from the start of the program: then SIGTERM, after `grace_s` SIGKILL, and the report has timed_out.
    `signum` (0: none) is sent `signal_before_s` before that limit, to the batch process only if `signal_batch_only`.

    The step ALLOC has nothing to run: it is claimed as long as the job has the node, and answered with CLAIMED. With `hold` the
    tasks are prepared and answered with READY; `Go` releases them. With `lease` KILL nothing of the launch is left on the node
    when it has not heard from the controller for `lease_s` (SIGTERM comes `grace_s` before; the report is LOST, LEASE_OVER).
    The node counts from the last Ping that was answered.
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
    same_machine: bool = False  # the allocation's nodes are one machine that poses as several
    allow_uid_below: int = 1000  # accounts with a lower uid are refused; see `hpcnode.os.account.why_refused`
    task_prolog: str = ""  # a program that each task runs as its user before its own, see `hpcnode.shepherd.task`
    task_epilog: str = ""  # a program that each task runs after its own
    wait_for_children: bool = False  # a task is over when all processes that it has started are
    confine: Confinement = fresh(Confinement)
    remote_shell: bool = False  # started by hrsh; see `hpcnode.entry.Entry.accepts_signal`
    scripts: JobScripts = fresh(JobScripts)


class Go(Message):
    """Release the tasks of `token`, which was launched with `hold`.

    May be repeated, and come early.
    """

    token: str


class SignalStep(Message):
    """Send `signum` to the process groups of the tasks of `token`.

    For the token of a batch step or of a claim one of these is set: `batch_only` means the batch shell only, `steps` every
    other step of the job on this node, `full` those, the batch shell and its children.
    """

    token: str
    signum: int
    batch_only: bool = False
    steps: bool = False
    full: bool = False


class EndStep(Message):
    """Revoke `token`: if it never ran here it never will.

    If it runs: SIGTERM, after `grace_s` SIGKILL until nothing is left.

    The answer is a final Report (again, if it had ended before).
    """

    token: str
    grace_s: float
    why: str  # cancelled | timeout | preempted | ...; recorded in the spool


class EndJob(Message):
    """End this attempt of the job and all earlier ones on this node.

    No later launch of them may start.

    The same holds for this `stay` of the node in the attempt and earlier ones. With `signum`, its processes (the batch shell
    only, if `batch_only`) get that signal instead of SIGTERM first, to save their state. SIGKILL follows after `grace_s`.
    The answer is JobGone.
    """

    incarnation: str
    job_id: int
    attempt: int
    grace_s: float
    signum: int = 0
    batch_only: bool = False
    stay: int = 0


class SuspendJob(Message):
    """Suspend all processes of the job's attempt on this node, or resume them (`on` false).

    Later launches of it are prepared and not released. Time limits do not run meanwhile. An attempt that is being ended is
    not suspended. There is no answer; the controller repeats it on every connection.
    """

    incarnation: str
    job_id: int
    attempt: int
    on: bool


class TimeLimit(Message):
    """Change the time limit of `token`, which was launched (None: no limit).

    Repeated on every connection.
    """

    token: str
    limit_s: Optional[float] = None


class Allocation(Message):
    """The nodes of the job's running attempt.

    With `wanted`, it should give back all other nodes (`hrun --resize`).

    They are written to the file in HPCSCHED_ALLOCATION_FILE, and the job's processes here get SIGWINCH. A known generation
    changes nothing.
    """

    incarnation: str
    job_id: int
    attempt: int
    generation: int
    nodes: List[str]
    wanted: List[str]


class Ack(Message):
    """These reports are committed: the agent need not repeat them."""

    seqs: List[int]


class Probe(Message):
    """Ask for the facts of the node, with `measure` for its speed, too.

    The answer is Facts with the same `request`.

    With `link_token`, the key of one measurement, only the link is measured: without `link_host` the answer is the `link_port` of
    a listener, with it the `link` to that listener (see `hpcnode.agent.link_speed`).

    With `bench` ("quick" or "full") the answer is `bench`, see `hpcnode.agent.bench`; `bench_python` is the users' Python for
    matrix products, "" for none.
    """

    request: int
    measure: bool = False
    link_token: str = ""
    link_host: str = ""
    link_port: int = 0
    bench: str = ""
    bench_python: str = ""


class SampleEvery(Message):
    """Send a Sample each `interval_s`, 0: none.

    `mounts`: directories whose file systems are looked at, besides those of the agent and /tmp. `jobs`: with rows of jobs.
    """

    interval_s: float
    mounts: List[str] = fresh(list)
    jobs: bool = True


class LogAs(Message):
    """Write the agent's log as `format`: text, or ecs (one JSON object on each line)."""

    format: str


class ReadFile(Message):
    """Read up to `limit` bytes of `path` from `offset` as `user`.

    The answer is FileData with the same `request`.

    A negative `offset` counts from the end. `beneath`: `path` is relative to this directory, and has no "..", and no part of it
    is a symbolic link.
    """

    request: int
    user: str
    path: str
    offset: int
    limit: int
    beneath: str = ""


class ListFiles(Message):
    """List up to `limit` files of the directory `path`, "" for `beneath` itself, as `user`.

    The answer is FileList with the same `request`. `path` is as in ReadFile. `after`: only names after this one, in the order
    of their code points.
    """

    request: int
    user: str
    beneath: str
    path: str
    after: str
    limit: int


class CompareProbe(Message):
    """Compare the share probe `name` in `directory` with its SHA-256.

    The answer is ProbeCompared.

    `uid` is the probe's owner as its writer sees it. The probe's content never leaves the node.
    """

    request: int
    directory: str
    name: str
    sha256: str
    uid: int


class PowerOff(Message):
    """Run the `command` that switches this node off, for `limit_s` at most, if no job is here.

    The answer is Facts with the same `request`; with `error` if the node stays on.
    """

    request: int
    command: List[str]
    limit_s: float


class Input(Message):
    """The blob is input for task `task` of the step (-1: all tasks) at `offset`.

    `eof` closes it after the blob.
    """

    token: str
    task: int
    offset: int
    eof: bool


class WatchOutput(Message):
    """Send the output of this token to this stream as well, or stop (`on` false).

    The stream acknowledges nothing.
    """

    token: str
    to: Address
    on: bool


class OutputAck(Message):
    """The reader has all output of this stream before `offset`, so the shepherd may drop it.

    `again`: the rest is missing.

    A shepherd leaves when its reader has all output. A reader that asks after that only misses the end. The end is sent to
    `to` (which the controller fills in) as an Output of ALL_TASKS.
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
    """Close `stream`.

    The agent sends it when a step command is gone, the controller when it has finished with one.
    """

    stream: int


class Ping(Message):
    request: int


# ----- messages: agent -> controller


class Welcome(Message):
    """The agent's answer to Hello.

    `inventory` has the fields of a Report for each entry of its spool.
    """

    version: int
    node: str
    boot_id: str
    agent_version: str
    pid: int
    epoch: int
    inventory: List[Dict[str, Any]]
    facts: Dict[str, Any]


class Goodbye(Message):
    """The connection ends here, because of `why`."""

    why: str


class Report(Message):
    """The state of `token` on this node. `status` is one of the constants above.

    `seq` grows with every report of this node's spool, across agents. Times are Unix seconds of this node's clock.
    For ENDED: `codes` and `signals` have one entry per task, in rank order (code 0..255, or signal > 0).
    `usage` has, as far as known, cpu_user_s, cpu_system_s, disk_read_bytes, disk_write_bytes (of the whole step on this node) and
    max_rss_kib (of one of its tasks).
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
    output_full: bool = False  # ENDED: the file system of its output file was full
    unexecuted: bool = False  # ENDED: its program was never executed; `why` is the reason
    node_fault: bool = False  # REFUSED: the node cannot start anything, for example because its disk is full
    ran_s: Optional[float] = None  # from release to end (STARTED: to now), on a clock without steps
    ago_s: Optional[float] = None  # ENDED: age of the end when this was sent; None: the node has rebooted since
    clearing: bool = False  # ENDED, of a batch step: the epilog runs here; JobGone says that it is over


class Condition(Message):
    """Why this node can start nothing, "" if it can.

    Sent when that changes, and at each refusal.

    The same text is in `Welcome.facts` under "fault".
    """

    why: str


class ScriptFailed(Message):
    """The prolog or epilog of a job has failed here, so the node should get no more jobs.

    Repeated until Ack has its `seq`.
    """

    seq: int
    job_id: int
    why: str


class Sample(Message):
    """What the node and its jobs use now: best effort, neither repeated nor stored.

    `columns` names the `values`, and `job_columns` those of each row of `jobs` after its job and attempt. Both are sent with
    the first sample of a connection, and again when they change. None: it could not be read. Counters never start again
    until the node does.
    """

    values: List[Any]
    jobs: List[List[Any]] = fresh(list)
    columns: List[str] = fresh(list)
    job_columns: List[str] = fresh(list)


class JobGone(Message):
    """Nothing of the job up to `attempt` (and its `stay`) is left on this node."""

    incarnation: str
    job_id: int
    attempt: int
    stay: int = 0


class Facts(Message):
    """Answer to Probe. `hpcnode.agent.probe` lists the keys of `facts`."""

    request: int
    facts: Dict[str, Any]


class FileData(Message):
    """Answer to ReadFile.

    The blob is the data from `offset`; `size` is that of the file; `error` "" if it succeeded.
    """

    request: int
    offset: int
    size: int
    error: str = ""


class FileList(Message):
    """Answer to ListFiles.

    `files`: name, kind (file, directory, link or other), bytes, and time of the last change. A name that is not UTF-8 is of
    the kind other, and has escapes. `more`: there are further names. `error` "" if it succeeded.
    """

    request: int
    files: List[Tuple[str, str, int, float]] = fresh(list)
    more: bool = False
    error: str = ""


class ProbeCompared(Message):
    """Answer to CompareProbe: whether the content is the same.

    `error` is why it could not be compared.
    """

    request: int
    same: bool
    error: str = ""


class Output(Message):
    """The blob is output of task `task` on descriptor `fd` (1 or 2) at `offset`.

    `eof` marks the end.
    """

    to: Address
    token: str
    task: int
    fd: int
    offset: int
    eof: bool


class InputAck(Message):
    """Task `task` has taken its input before `offset`, so more may be sent."""

    to: Address
    token: str
    task: int
    offset: int


class FromStream(Message):
    """The inner message (and the blob) come from the step command on `stream`.

    The agent has checked its `uid`.

    `job_id` is the job of the command (0: none); the agent has checked that it runs on this node as `uid`.
    """

    stream: int
    uid: int
    job_id: int
    attempt: int
    message: Dict[str, Any]


class Pong(Message):
    request: int


_MESSAGES = (
    Hello, Launch, Go, SignalStep, EndStep, EndJob, SuspendJob, TimeLimit, Allocation, Ack, Probe, SampleEvery, LogAs, ReadFile,
    ListFiles, CompareProbe, PowerOff, Input, WatchOutput, OutputAck, ToStream, CloseStream, Ping, Welcome, Goodbye, Report,
    Condition, ScriptFailed, Sample, JobGone, Facts, FileData, FileList, ProbeCompared, Output, InputAck, FromStream, Pong,
    StepRequest, PreparedStep, StepAsked, StepBack, StepWaiting, StepStarted, JobAllocated, StepSignal, StepEnded, Progress,
    Failure, ApiRequest, ApiAnswer,
)  # fmt: skip
# Messages whose texts are for people; what is not UTF-8 in them is a file name.
_QUOTING = (
    Welcome, Goodbye, Report, Condition, ScriptFailed, Facts, FileData, FileList, ProbeCompared, StepWaiting, StepEnded,
    Failure, Progress,
)  # fmt: skip
_CODEC = Codec(_MESSAGES, _QUOTING)
to_json, from_json, encode, parse = _CODEC.to_json, _CODEC.from_json, _CODEC.encode, _CODEC.parse


def read_as(cls: Type[M], obj: Any) -> M:
    """Return `obj` (parsed JSON) as a message of the class `cls`.

    Raises WireError if it is none, or another.
    """
    message = from_json(obj)
    if not isinstance(message, cls):
        raise WireError("cannot read a message: it is %s, not %s" % (type(message).__name__, cls.__name__))
    return message


class Framer(FrameReader):
    """Reads frames of this protocol; see `FrameReader`."""

    def __init__(self, limit: int = MAX_FRAME_BYTES, max_values: int = 0) -> None:
        super().__init__(_CODEC, limit, max_values)


Life = Tuple[int, int]  # (attempt, stay); they end in this order on a node

_INCARNATION = re.compile("[0-9a-f]{8,32}")
_TOKEN = re.compile(
    r"([0-9a-f]{8,32})\.(\d{1,18})\.(\d{1,9})(?:-([1-9]\d{0,8}))?\.(batch|alloc|\d{1,9})\.([A-Za-z0-9][A-Za-z0-9_-]{0,62})\.([0-9a-f]{32})\Z"
)


class Token(NamedTuple):
    """One launch of one step of one attempt on one node."""

    incarnation: str
    job_id: int
    attempt: int
    step: str
    node: str
    nonce: str
    stay: int = 0

    @property
    def job(self) -> Tuple[str, int]:
        """The job, without its attempt."""
        return self.incarnation, self.job_id

    @property
    def life(self) -> Life:
        """The attempt, and the stay of this node in it."""
        return self.attempt, self.stay


def is_incarnation(text: str) -> bool:
    """Return whether the text can be an incarnation.

    If not, it must not become a part of a file name, or of a line.
    """
    return _INCARNATION.fullmatch(text) is not None


def read_token(text: str) -> Optional[Token]:
    """Return the token in `text`, None if it is not a token.

    Then it must not become a file name.
    """
    match = _TOKEN.match(text)
    if match is None:
        return None
    incarnation, job, attempt, stay, step, node, nonce = match.groups()
    return Token(incarnation, int(job), int(attempt), step, node, nonce, int(stay or 0))  # int: bounded by the pattern
