"""A process of the agent that minds steps, one at a time: forked once, used for many short jobs.

Forking a Python process costs more than minding a short job, so a worker whose step is over and has left nothing waits for
the next. It gets each step over its control socket, with two descriptors: the lock of the spool entry, taken by the agent, and
the socket on which shepherd and agent will talk. A descriptor in flight keeps its lock, so at every moment either the agent,
the message or the worker holds it. Without an agent a worker that is idle ends; one that minds a step ends after it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Dict, NamedTuple, NoReturn, Optional, Tuple

from hpcnode import cgroup, process
from hpcnode.assignment import Assignment, Own, Setting
from hpcnode.loop import Loop, wake_on_signals
from hpcnode.shepherd import Shepherd
from hpcnode.task import touched_signals
from hpcnode.user import Account

IDLE = b"i"
MAX_ORDER = 128 << 10


class Order(NamedTuple):
    """A step to be minded; the rest is in its spool entry."""

    token: str
    account: Account
    environment: Dict[str, str]
    round: int
    suspended: bool


def send_order(control: socket.socket, order: Order, lock_fd: int, talk: socket.socket) -> None:
    """Hand a step to a worker. Raises OSError if the worker is gone."""
    socket.send_fds(control, [json.dumps(order).encode("utf-8", "surrogateescape")], [lock_fd, talk.fileno()])


def worker_main(setting: Setting, control: socket.socket) -> NoReturn:
    """Mind steps until the agent is gone. To be called in a child of the agent."""
    code = 1
    try:
        os.setsid()
        process.close_all_but([control.fileno()])
        process.become_subreaper()
        _mind_steps(setting, control)
        code = 0
    except BaseException:
        import traceback  # not before it is needed: see `agent` for what an import costs

        traceback.print_exc(file=sys.stderr)  # the agent's log; what is not on disk is found by the agent
        sys.stderr.flush()
    finally:
        os._exit(code)


class _Current:
    """Whoever is to hear of signals."""

    def __init__(self) -> None:
        self.shepherd: Optional[Shepherd] = None

    def reap(self) -> None:
        if self.shepherd is not None:
            self.shepherd.reap()

    def told_to_stop(self) -> None:
        if self.shepherd is not None:
            self.shepherd.told_to_stop()


def _mind_steps(setting: Setting, control: socket.socket) -> None:
    loop, current = Loop(), _Current()
    calls = {signal.SIGCHLD: current.reap, signal.SIGTERM: current.told_to_stop}
    wake_on_signals(loop, {**calls, signal.SIGINT: lambda: None, signal.SIGHUP: lambda: None})
    own = _own(setting)
    while True:
        order = _next_order(setting, control)
        if order is None:
            return
        job, lock_fd, talk = order
        current.shepherd = shepherd = Shepherd(setting, job, talk, loop, own)
        shepherd.run()
        if not shepherd.is_clean:
            return  # what is left goes with this process
        current.shepherd = None
        shepherd.close()
        loop.clear_timers()
        os.close(lock_fd)
        try:
            control.send(IDLE)
        except OSError:
            return  # the agent is gone


def _own(setting: Setting) -> Own:
    identity = process.identify(os.getpid(), setting.boot_id)
    assert identity is not None
    group = cgroup.enter_own(setting.cgroup_base) if setting.cgroup_base else None
    return Own(
        identity=identity,
        signals=touched_signals(),
        cgroup=group,
        limits_memory=group is not None and cgroup.can_limit_memory(group),
    )


def _next_order(setting: Setting, control: socket.socket) -> Optional[Tuple[Assignment, int, socket.socket]]:
    data, fds, _flags, _address = socket.recv_fds(control, MAX_ORDER, 2)
    if not data:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    token, account, environment, round_, suspended = json.loads(data.decode("utf-8", "surrogateescape"))
    launch = setting.spool.read_launch(token)
    if launch is None:
        raise ValueError("no launch in the spool entry of %s" % token)
    job = Assignment(launch, Account(*account), environment, round_, suspended)
    return job, fds[0], socket.socket(fileno=fds[1])
