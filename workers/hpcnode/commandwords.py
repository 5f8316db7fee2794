"""The messages between the controller and a command in a job (hrun, hrsh, an API command) or a training program.

They go through the agent of the command's node, within FromStream and ToStream, or directly. A part of `hpcnode.protocol`,
by which all others know them.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from hpcnode.message import Fresh, Message


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
    scattered: List[List[int]] = Fresh(list)

    def parts(self) -> List[Tuple[str, Sequence[int], str]]:
        """Return node, ranks and token for each node."""
        ranks = self.scattered or [range(first, first + count) for _, first, count, _ in self.tasks]
        return [(node, mine, token) for (node, _, _, token), mine in zip(self.tasks, ranks)]


class Allocated(Message):
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
