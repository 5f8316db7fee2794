"""The input of a shepherd, and its tasks. Plain values."""

from __future__ import annotations

from typing import Dict, NamedTuple, Sequence

from hpcnode.os.account import UserAccount
from hpcnode.os.faults import CrashPoints
from hpcnode.os.process import ProcessIdentity
from hpcnode.shepherd.confinement import StepConfinement
from hpcnode.shepherd.task import TaskForker
from hpcnode.spool import Spool
from hpcnode.wire import protocol


class Setting(NamedTuple):
    """Values that all shepherds of an agent share."""

    spool: Spool
    faults: CrashPoints
    boot_id: str
    node: str
    socket_path: str
    has_gpus: bool
    cannot: Sequence[str] = ()  # words of `confinement.abilities` that this node cannot enforce


class Own(NamedTuple):
    """Values of a shepherd's process, the same for all steps that it supervises in turn."""

    identity: ProcessIdentity
    forker: TaskForker


class Assignment(NamedTuple):
    """One step for a shepherd."""

    launch: protocol.Launch
    account: UserAccount
    environment: Dict[str, str]  # added to the launch's
    round: int  # counts the readers of the output, see `hpcnode.agent.shepherds`
    suspended: bool  # the job is suspended: the tasks are released when it is resumed
    lock_fd: int  # of the spool entry
    confined: StepConfinement = StepConfinement()


class Task:
    """One task of the step."""

    def __init__(self, rank: int, pid: int, status_fd: int) -> None:
        self.rank = rank
        self.pid = pid
        self.status_fd = status_fd
        self.ready = False
        self.over = False
        self.code = 0
        self.signal = 0
