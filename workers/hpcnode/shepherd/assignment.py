"""What a shepherd is given, and what it notes of its tasks. Plain values."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence

from hpcnode.os.account import UserAccount
from hpcnode.os.faults import CrashPoints
from hpcnode.os.process import Identity
from hpcnode.spool import Spool
from hpcnode.wire import protocol


class Setting(NamedTuple):
    """What all shepherds of an agent have in common."""

    spool: Spool
    faults: CrashPoints
    boot_id: str
    node: str
    socket_path: str
    cgroup_base: Optional[str]
    has_gpus: bool


class Own(NamedTuple):
    """What the process of a shepherd has of its own, the same for all steps that it supervises one after the other."""

    identity: Identity
    signals: Sequence[int]  # that it handles or ignores
    cgroup: Optional[str]  # of this process and its tasks
    limits_memory: bool  # the kernel can do that for the cgroup


class Assignment(NamedTuple):
    """What a shepherd has to know of its step."""

    launch: protocol.Launch
    account: UserAccount
    environment: Dict[str, str]  # to be added
    round: int  # of the output's readers, see `local`
    suspended: bool  # the job stands still: the tasks are not released before it goes on


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
