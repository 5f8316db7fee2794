"""The agent's side of its shepherds: a pool of processes, and their connections.

    agent --StepOrder + two descriptors--> pool member == the shepherd of that step == frames == agent

It decides nothing about launches: that is the ledger's.

Rules:
- The agent locks an entry, and passes the lock to the process that will supervise it. So a free lock means that no shepherd
  lives and that nothing it forked waits for its release. Only then is a shepherd gone.
- A member supervises one step at a time. Forking a Python process costs more than supervising a short job, so a member
  whose step left nothing behind waits for the next one.
- A member gets a step over its control socket, with the lock and the socket on which shepherd and agent talk. A descriptor
  in flight keeps its lock, so the agent, the message or the member always holds it.
- Without an agent an idle member ends; a busy one ends after its step.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import socket
import sys
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Tuple

from hpcnode.os import cgroup, mounts, process
from hpcnode.os.account import UserAccount
from hpcnode.os.loop import READ, Loop, Stream, Timer, wake_on_signals
from hpcnode.shepherd.assignment import Assignment, Own, Setting
from hpcnode.shepherd.confinement import Sandboxes, StepConfinement
from hpcnode.shepherd.environment import MARKER
from hpcnode.shepherd.mpi import MpiVariables
from hpcnode.shepherd.relay import connect_in
from hpcnode.shepherd.shepherd import Shepherd
from hpcnode.shepherd.task import EXIT_SIGNAL, TaskForker
from hpcnode.wire import protocol, shepherd_messages
from hpcnode.wire.message import Message, WireError

IDLE = b"i"
MAX_ORDER = 128 << 10
# Objects: a short step makes fewer. A collection writes to, and so copies, pages that are shared with the agent.
GC_THRESHOLD = 20_000


class StepOrder(NamedTuple):
    """A step to be supervised. Its launch is in its spool entry."""

    token: str
    account: UserAccount
    environment: Dict[str, str]
    round: int
    suspended: bool
    confined: StepConfinement


def send_order(control: socket.socket, order: StepOrder, lock_fd: int, talk: socket.socket) -> None:
    """Send a step to a pool member. Raises OSError if the member is gone."""
    socket.send_fds(control, [json.dumps(order).encode("utf-8", "surrogateescape")], [lock_fd, talk.fileno()])


def member_main(setting: Setting, control: socket.socket) -> NoReturn:
    """Supervise steps until the agent is gone. Call it in a child of the agent."""
    code = 1
    try:
        os.setsid()
        process.close_all_but([control.fileno()])
        process.become_subreaper()
        gc.set_threshold(GC_THRESHOLD)
        forker = TaskForker()
        forker.start()
        _supervise_steps(setting, control, forker)
        code = 0
    except BaseException:
        import traceback  # see `agent` on the cost of imports

        traceback.print_exc(file=sys.stderr)  # to the agent's log
        sys.stderr.flush()
    finally:
        os._exit(code)


class _SignalTarget:
    """Forwards signals to the present shepherd."""

    def __init__(self) -> None:
        self.shepherd: Optional[Shepherd] = None

    def reap(self) -> None:
        if self.shepherd is not None:
            self.shepherd.reap()

    def terminate(self) -> None:
        if self.shepherd is not None:
            self.shepherd.terminate()


def _supervise_steps(setting: Setting, control: socket.socket, forker: TaskForker) -> None:
    loop, current = Loop(contains_faults=True), _SignalTarget()
    calls: Dict[int, Callable[[], None]] = {signal.SIGCHLD: current.reap, signal.SIGTERM: current.terminate}
    calls[EXIT_SIGNAL] = current.reap
    wake_on_signals(loop, {**calls, signal.SIGINT: lambda: None, signal.SIGHUP: lambda: None})
    identity = process.identify(os.getpid(), setting.boot_id)
    assert identity is not None
    own = Own(identity, forker)
    while True:
        order = _next_order(setting, control)
        if order is None:
            return
        job, talk = order
        current.shepherd = shepherd = Shepherd(setting, job, talk, loop, own)
        shepherd.run()
        if not shepherd.is_clean:
            return  # what is left goes with this process
        current.shepherd = None
        shepherd.close()
        loop.clear_timers()
        os.close(job.lock_fd)
        try:
            control.send(IDLE)
        except OSError:
            return  # the agent is gone


def _next_order(setting: Setting, control: socket.socket) -> Optional[Tuple[Assignment, socket.socket]]:
    data, fds, _flags, _address = socket.recv_fds(control, MAX_ORDER, 2)
    if not data:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    token, account, environment, round_, suspended, confined = json.loads(data.decode("utf-8", "surrogateescape"))
    launch = setting.spool.read_launch(token)
    if launch is None:
        raise ValueError("no launch in the spool entry of %s" % token)
    group, cover = confined
    held = StepConfinement(None if group is None else cgroup.StepGroup(*group), mounts.Cover(*cover))
    job = Assignment(launch, UserAccount(*account), environment, round_, suspended, fds[0], held)
    return job, socket.socket(fileno=fds[1])


MAX_IDLE = 8  # idle members that are kept for the next short jobs
TRIM_S = 10.0  # after a burst of jobs, before surplus members go: another burst often follows
SPARE_S = 0.02  # after the last idle member got a step, until another one is forked
RETRY_S = 0.02
MAX_RETRY_S = 1.0


class _Member:
    """A process of the pool, as the agent sees it."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.idle = True


class ShepherdPool:
    """All shepherds of this node, and the idle processes of the pool."""

    def __init__(self, loop: Loop, setting: Setting, mpi: MpiVariables, sandboxes: Sandboxes) -> None:
        self._loop = loop
        self._setting = setting
        self._mpi = mpi
        self._spool = setting.spool
        self._members: List[_Member] = []
        self._spare_timer: Optional[Timer] = None
        self._trim_timer: Optional[Timer] = None
        self._sandboxes = sandboxes
        self._streams: Dict[str, Stream] = {}
        self._unsent_frames: Dict[str, List[bytes]] = {}  # for shepherds that live but are not connected yet
        self.round = 0  # counts the readers of all output
        self.on_message: Callable[[str, Message, bytes], None] = lambda _token, _message, _blob: None
        self.on_gone: Callable[[str], None] = lambda _token: None

    def start(self, launch: protocol.Launch, account: UserAccount, suspended: bool) -> None:
        """Start the shepherd of a claimed token; a suspended job is not released.

        Raises OSError if the node cannot fork.
        """
        lock_fd = self._lock(launch.token)
        if lock_fd is None:
            raise OSError("its spool entry is locked by another shepherd")
        try:
            confined = self._sandboxes.begin(launch, account, self._setting.socket_path)
        except OSError:
            os.close(lock_fd)
            raise
        environment = self._mpi.variables(launch, account)
        order = StepOrder(launch.token, account, environment, self.round, suspended, confined)
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

    def _give(self, order: StepOrder, lock_fd: int, talk: socket.socket) -> None:
        for member in [member for member in self._members if member.idle]:
            try:
                send_order(member.control, order, lock_fd, talk)
            except OSError:
                self._drop(member)  # it was killed
                continue
            member.idle = False
            self._want_spare()
            return
        member = self._fork_member()
        member.idle = False
        send_order(member.control, order, lock_fd, talk)
        self._want_spare()

    def try_to_start(self) -> None:
        """Fork and reap a process that does nothing. Raises OSError if this node cannot fork."""
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def keep_one_ready(self) -> None:
        """Fork an idle member, so that the next launch need not wait for it."""
        self._spare_timer = None
        if any(member.idle for member in self._members):
            return
        try:
            self._fork_member()
        except OSError:
            pass  # the next launch reports it

    def _want_spare(self) -> None:
        if self._spare_timer is None:
            self._spare_timer = self._loop.later(SPARE_S, self.keep_one_ready)

    def forget_mpi_files(self) -> None:
        """Remove the host files of ended allocations. No job may be running."""
        self._mpi.remove_files()

    def _fork_member(self) -> _Member:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            member_main(self._setting, theirs)
        theirs.close()
        member = _Member(ours)
        self._members.append(member)
        self._loop.watch(ours.fileno(), READ, lambda _events: self._read_control(member))
        return member

    def _read_control(self, member: _Member) -> None:
        try:
            data = member.control.recv(16)
        except OSError:
            data = b""
        if not data:
            self._drop(member)
            return
        member.idle = True
        if self._trim_timer is None:
            self._trim_timer = self._loop.later(TRIM_S, self._trim)

    def _trim(self) -> None:
        """Drop surplus idle members. They end when their control socket closes."""
        self._trim_timer = None
        idle = [member for member in self._members if member.idle]
        for member in idle[MAX_IDLE:]:
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        self._members.remove(member)
        self._loop.watch(member.control.fileno(), 0, lambda _events: None)
        member.control.close()

    def is_supervised(self, token: str) -> bool:
        """Return whether a shepherd of this token lives, judged by the lock in its entry."""
        lock_fd = self._lock(token)
        if lock_fd is None:
            return True
        os.close(lock_fd)
        return False

    def adopt(self, token: str) -> None:
        """Connect to a shepherd of an earlier agent.

        It listens as soon as it notices that agent's end.
        """
        self._unsent_frames.setdefault(token, [])
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
        elif token in self._unsent_frames:
            self._unsent_frames[token].append(frame)

    def resend(self) -> None:
        """Have all unacknowledged output sent again, to a new reader."""
        self.round += 1
        for token in (*self._streams, *self._unsent_frames):
            self.send(token, shepherd_messages.ResendOutput(self.round))

    def unsent(self, token: str) -> int:
        """Return how many queued bytes the shepherd has not read."""
        stream = self._streams.get(token)
        return stream.unsent if stream is not None else 0

    def pause(self, paused: bool) -> None:
        """Stop or resume reading from all shepherds, to slow down the tasks' output."""
        for stream in self._streams.values():
            stream.pause(paused)

    def reap(self) -> None:
        """Collect ended children: members, and orphans of killed members."""
        while True:
            try:
                pid = os.waitpid(-1, os.WNOHANG)[0]
            except ChildProcessError:
                return
            if pid == 0:
                return

    def kill_remains(self, started: Dict[str, Any]) -> bool:
        """Kill the remaining processes of a step whose shepherd is gone.

        Return whether there were none.
        """
        if started.get("boot_id") != self._setting.boot_id:
            return True  # the node was rebooted since
        group = started.get("cgroup")
        if group:
            cgroup.kill(group)
        tasks = [process.ProcessIdentity(*item) for item in started.get("tasks", ())]
        left = process.remains_of(
            tasks,
            uid=started.get("uid", -1),
            marker=("%s=%s" % (MARKER, started["token"])).encode(),
        )
        process.signal_all(left, 9)
        if left or (group and cgroup.is_populated(group)):
            return False
        if group:
            cgroup.remove(group)
        return True

    def claim(self, launch: protocol.Launch, account: UserAccount) -> None:
        """Give a sandbox to a job that has this node and runs nothing here yet. Raises OSError."""
        self._sandboxes.claim(launch, account)

    def job_over(self, job: str, clean: bool) -> None:
        """Take back the sandbox of a job that is over on this node.

        `clean`: another job may have it, unless something is found in it.
        """
        self._sandboxes.job_over(job, clean)

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
                self._unsent_frames.setdefault(token, [])
                if stream.failed:  # its message was bad: it lives, and sends again
                    self._loop.later(MAX_RETRY_S, lambda: self._try_adopt(token, MAX_RETRY_S))
                else:
                    self._try_adopt(token, RETRY_S)
                return
            for message, blob in reader.feed(data):
                self.on_message(token, message, blob)

        stream = self._streams[token] = Stream(self._loop, sock, on_data)
        stream.what = "the connection of a shepherd"
        for frame in self._unsent_frames.pop(token, ()):
            stream.send(frame)

    def _adopted(self, token: str, sock: socket.socket) -> None:
        self._attach(token, sock)
        self.send(token, shepherd_messages.ResendOutput(self.round))

    def _try_adopt(self, token: str, pause_s: float) -> None:
        """Connect to the shepherd of a token, now or later; call `on_gone` if its lock is free."""
        if not self.is_supervised(token):
            self._unsent_frames.pop(token, None)
            self.on_gone(token)
            return
        try:
            sock = connect_in(self._spool.entry(token))
        except OSError:
            again_s = min(2 * pause_s, MAX_RETRY_S)
            self._loop.later(pause_s, lambda: self._try_adopt(token, again_s))
            return
        self._adopted(token, sock)
