"""The agent's side of its shepherds: forks them, talks to them, finds those of an agent before it, notices their end.

Rules: the lock of an entry is taken here and handed to the worker that will mind it, so *the lock is free* means that no shepherd
lives and nothing that it forked waits to be released. Only then is a shepherd gone.
It does not decide anything about launches: that is the ledger's.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Tuple

from hpcnode.os import cgroup, process
from hpcnode.os.account import Account
from hpcnode.os.loop import READ, Loop, Stream, Timer, wake_on_signals
from hpcnode.shepherd.assignment import Assignment, Own, Setting
from hpcnode.shepherd.environment import MARKER
from hpcnode.shepherd.mpi import MpiVariables
from hpcnode.shepherd.relay import connect_in
from hpcnode.shepherd.shepherd import Shepherd
from hpcnode.shepherd.task import touched_signals
from hpcnode.wire import protocol, shepherd_messages
from hpcnode.wire.message import Message, WireError

# ----- a process of the agent that minds steps, one at a time: forked once, used for many short jobs
# Forking a Python process costs more than minding a short job, so a worker whose step is over and has left nothing waits for
# the next. It gets each step over its control socket, with two descriptors: the lock of the spool entry, taken by the agent, and
# the socket on which shepherd and agent will talk. A descriptor in flight keeps its lock, so at every moment either the agent,
# the message or the worker holds it. Without an agent a worker that is idle ends; one that minds a step ends after it.


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

    def terminate(self) -> None:
        if self.shepherd is not None:
            self.shepherd.terminate()


def _mind_steps(setting: Setting, control: socket.socket) -> None:
    loop, current = Loop(contains_faults=True), _Current()
    calls: Dict[int, Callable[[], None]] = {signal.SIGCHLD: current.reap, signal.SIGTERM: current.terminate}
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


MAX_IDLE = 8  # workers that wait for the next short job
TRIM_S = 10.0  # jobs that end together are often followed by as many: until then all that minded them wait
SPARE_S = 0.02  # after the last idle worker was given a step, another one is made ready
RETRY_S = 0.02
MAX_RETRY_S = 1.0


class _Worker:
    """A process that minds steps, one at a time (see `worker`)."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.idle = True


class Minders:
    """The shepherds that live on this node."""

    def __init__(self, loop: Loop, setting: Setting, mpi: MpiVariables) -> None:
        self._loop = loop
        self._setting = setting
        self._mpi = mpi
        self._spool = setting.spool
        self._workers: List[_Worker] = []
        self._spare_timer: Optional[Timer] = None
        self._trim_timer: Optional[Timer] = None
        self._streams: Dict[str, Stream] = {}
        self._unsaid: Dict[str, List[bytes]] = {}  # for shepherds that we know to live but have not reached yet
        self.round = 0  # of the output's readers, see `local`
        self.on_message: Callable[[str, Message, bytes], None] = lambda _token, _message, _blob: None
        self.on_gone: Callable[[str], None] = lambda _token: None

    def start(self, launch: protocol.Launch, account: Account, suspended: bool) -> None:
        """Give a claimed token to a worker; if its job is suspended, it waits. Raises OSError if the node cannot fork."""
        order = Order(launch.token, account, self._mpi.variables(launch, account), self.round, suspended)
        lock_fd = self._lock(launch.token)
        if lock_fd is None:
            raise OSError("its spool entry is locked by another shepherd")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        faults = self._setting.faults
        try:
            faults.reached("fork.before")
            self._give(order, lock_fd, theirs)
            faults.reached("fork.after")
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(lock_fd)
        self._attach(launch.token, ours)

    def _give(self, order: Order, lock_fd: int, talk: socket.socket) -> None:
        for worker in [worker for worker in self._workers if worker.idle]:
            try:
                send_order(worker.control, order, lock_fd, talk)
            except OSError:
                self._drop(worker)  # somebody killed it
                continue
            worker.idle = False
            self._want_spare()
            return
        worker = self._fork_worker()
        worker.idle = False
        send_order(worker.control, order, lock_fd, talk)
        self._want_spare()

    def try_to_start(self) -> None:
        """Find out whether this node can have one more process. Raises OSError if it cannot."""
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def keep_one_ready(self) -> None:
        """Have a worker at hand: the next launch need not wait for a fork and for the kernel to move it into its group."""
        self._spare_timer = None
        if any(worker.idle for worker in self._workers):
            return
        try:
            self._fork_worker()
        except OSError:
            pass  # the launch that needs one says so

    def _want_spare(self) -> None:
        if self._spare_timer is None:
            self._spare_timer = self._loop.later(SPARE_S, self.keep_one_ready)

    def forget_mpi_files(self) -> None:
        """Remove the host files of allocations that are over; no job may be running."""
        self._mpi.remove_files()

    def _fork_worker(self) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            worker_main(self._setting, theirs)
        theirs.close()
        worker = _Worker(ours)
        self._workers.append(worker)
        self._loop.watch(ours.fileno(), READ, lambda _events: self._heard(worker))
        return worker

    def _heard(self, worker: _Worker) -> None:
        try:
            said = worker.control.recv(16)
        except OSError:
            said = b""
        if not said:
            self._drop(worker)
            return
        worker.idle = True
        if self._trim_timer is None:
            self._trim_timer = self._loop.later(TRIM_S, self._trim)

    def _trim(self) -> None:
        """Let go of workers that a burst of jobs has left. They end when they find us gone."""
        self._trim_timer = None
        idle = [worker for worker in self._workers if worker.idle]
        for worker in idle[MAX_IDLE:]:
            self._drop(worker)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        if self._setting.cgroup_base is not None:
            cgroup.remove_empty(self._setting.cgroup_base)
        self._loop.watch(worker.control.fileno(), 0, lambda _events: None)
        worker.control.close()

    def is_minded(self, token: str) -> bool:
        """Return whether a shepherd of this token lives, by the lock in its entry."""
        lock_fd = self._lock(token)
        if lock_fd is None:
            return True
        os.close(lock_fd)
        return False

    def adopt(self, token: str) -> None:
        """Connect to a shepherd that an agent before us has left; it listens as soon as it has noticed."""
        self._unsaid.setdefault(token, [])
        self._try_adopt(token, RETRY_S)

    def send(self, token: str, message: Message, blob: bytes = b"") -> None:
        """Send a message to the shepherd of a token, now or as soon as it is connected."""
        try:
            frame = shepherd_messages.encode(message, blob)
        except WireError as error:  # what a step command has sent, say
            print("a message to the shepherd of %s is dropped: %s" % (token, error), file=sys.stderr, flush=True)
            return
        if token in self._streams:
            self._streams[token].send(frame)
        elif token in self._unsaid:
            self._unsaid[token].append(frame)

    def resend(self) -> None:
        """There is a new reader of all output."""
        self.round += 1
        for token in (*self._streams, *self._unsaid):
            self.send(token, shepherd_messages.ResendOutput(self.round))

    def unsent(self, token: str) -> int:
        """Return how many bytes wait for the shepherd to read them."""
        stream = self._streams.get(token)
        return stream.unsent if stream is not None else 0

    def pause(self, paused: bool) -> None:
        """Stop (or go on) listening to the shepherds: how a slow controller slows its tasks' output down."""
        for stream in self._streams.values():
            stream.pause(paused)

    def reap(self) -> None:
        """Collect ended children: workers, and orphans of those that were killed."""
        while True:
            try:
                pid = os.waitpid(-1, os.WNOHANG)[0]
            except ChildProcessError:
                return
            if pid == 0:
                return

    def kill_remains(self, started: Dict[str, Any]) -> bool:
        """Kill what is left of a step whose shepherd is gone; return whether nothing was left."""
        if started.get("boot_id") != self._setting.boot_id:
            return True  # the node was rebooted since
        group = started.get("cgroup")
        if group:
            cgroup.kill(group)
        tasks = [process.Identity(*item) for item in started.get("tasks", ())]
        left = process.remains_of(
            sessions=[task.pid for task in tasks],
            since_ticks=min((task.ticks for task in tasks), default=0),
            uid=started.get("uid", -1),
            marker=("%s=%s" % (MARKER, started["token"])).encode(),
        )
        process.signal_all(left, 9)
        if left or (group and cgroup.is_populated(group)):
            return False
        if group:
            cgroup.remove(group)
        return True

    def _lock(self, token: str) -> Optional[int]:
        fd = self._spool.open_lock(token)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _attach(self, token: str, sock: socket.socket) -> None:
        reader = shepherd_messages.reader()

        def on_data(data: bytes) -> None:
            if not data:
                del self._streams[token]
                self._unsaid.setdefault(token, [])
                if stream.failed:  # of something that it said: it lives, and is about to say it again
                    self._loop.later(MAX_RETRY_S, lambda: self._try_adopt(token, MAX_RETRY_S))
                else:
                    self._try_adopt(token, RETRY_S)
                return
            for message, blob in reader.feed(data):
                self.on_message(token, message, blob)

        stream = self._streams[token] = Stream(self._loop, sock, on_data)
        stream.what = "the connection of a shepherd"
        for frame in self._unsaid.pop(token, ()):
            stream.send(frame)

    def _adopted(self, token: str, sock: socket.socket) -> None:
        self._attach(token, sock)
        self.send(token, shepherd_messages.ResendOutput(self.round))

    def _try_adopt(self, token: str, pause_s: float) -> None:
        """Connect to the shepherd of a token, now or later; say that it is gone when its lock is free."""
        try:
            sock = connect_in(self._spool.entry(token))
        except OSError:
            if self.is_minded(token):
                again_s = min(2 * pause_s, MAX_RETRY_S)
                self._loop.later(pause_s, lambda: self._try_adopt(token, again_s))
            else:
                self._unsaid.pop(token, None)
                self.on_gone(token)
            return
        self._adopted(token, sock)
