"""The agent: our process on a node, at the other end of the controller's channel.

One thread, one loop, no blocking calls.

It serves one controller (the newest), the step commands of the node's jobs, and its shepherds, on one unix socket. The `ledger`
decides what happens to launches; here are the connections, the timers and the process. The agent ends when there was neither a
controller nor a living step for a while. It may be killed at any time: shepherds continue, and the next agent finds them in the
spool. On SIGTERM it ends and leaves the shepherds alone, because another version takes over.

Cost of imports: each fork maps the agent's whole memory, and copies a page at its first write. So modules that are rarely needed
are imported where they are needed, in a child if possible.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import signal
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Type, Union

from hpcnode import paths
from hpcnode.agent import helpers, probe
from hpcnode.agent.gpu_watch import GpuWatch
from hpcnode.agent.job_scripts import ScriptRunner
from hpcnode.agent.launch_check import LaunchCheck
from hpcnode.agent.ledger import FORGET_AT_ONCE, REPEAT_S, Ledger
from hpcnode.agent.sampler import NodeSampler
from hpcnode.agent.shepherds import ShepherdPool
from hpcnode.agent.step_commands import Clients, CommandClient, Frames, ResumableClients, peer
from hpcnode.lease import Renewals
from hpcnode.os import account as user
from hpcnode.os import process
from hpcnode.os.faults import CrashPoints, crash_points
from hpcnode.os.loop import READ, Loop, Stream, Timer, log_exception, wake_on_signals
from hpcnode.shepherd import confinement, environment
from hpcnode.shepherd.assignment import Setting
from hpcnode.shepherd.mpi import MpiVariables
from hpcnode.spool import Spool, identity_of
from hpcnode.wire import protocol
from hpcnode.wire.shepherd_messages import (
    ChangeTimeLimit,
    InputTaken,
    OutputTaken,
    ResendOutput,
    SignalOtherSteps,
    TaskInput,
    TaskOutput,
    TasksEnded,
    TasksReady,
    TasksStarted,
    check_final,
)

IDLE_S = 60.0
TICK_S = 0.1
FORGET_S = 1.0
RENAMED_S = 0.3  # until the connection of a controller that uses another node name has closed
HIGH_WATER = 8 << 20  # bytes unsent to the controller; above it the shepherds are paused
LOW_WATER = 1 << 20
ACCOUNT_AGE_S = 60.0
START_REPORT_S = 0.02  # a batch step that ends sooner is reported once


class AgentError(Exception):
    """The agent cannot run here; the text is the reason."""


class Agent:
    """One agent, from its lock to its end."""

    _for_all = False  # the agent has tasks of other users, whose commands may connect
    _idle_timer: Optional[Timer] = None
    _tick_timer: Optional[Timer] = None
    _starts_timer: Optional[Timer] = None
    _forget_timer: Optional[Timer] = None

    log_as: Callable[[str], None] = staticmethod(lambda _name: None)  # sets the format of the log

    def __init__(self, *, root: str, cluster: str, node: str, idle_s: float, environ: Mapping[str, str]) -> None:
        self.root = root
        self.cluster = cluster
        self.node = node
        self._idle_s = idle_s
        self._environ = environ
        self._boot_id = process.boot_id(environ)
        self._faults: CrashPoints = crash_points(environ)
        self._lock_fd = take_lock(root, self._boot_id)
        self._loop = Loop(contains_faults=True)
        self._spool = Spool(root, self._faults)
        self._identity = identity_of(self._spool.path, environ)
        self._socket_path = paths.socket_path(root)
        self._protect()
        self._ground = confinement.survey(root, node, self._boot_id)
        setting = Setting(
            spool=self._spool,
            faults=self._faults,
            boot_id=self._boot_id,
            node=node,
            socket_path=self._socket_path,
            has_gpus=environment.node_has_gpus(),
            cannot=[word for word, can, _ in confinement.abilities(self._ground) if not can],
        )
        self._sandboxes = confinement.Sandboxes(self._loop, self._ground)
        self._shepherds = ShepherdPool(self._loop, setting, MpiVariables(root, log), self._sandboxes)
        self._ledger = self._make_ledger()
        self._renewals = Renewals(self._loop, self._ledger.leases, self.to_controller)
        self._accounts: Dict[Tuple[str, int], Tuple[float, user.UserAccount]] = {}
        self._helpers = helpers.Helpers(self._loop)
        self._sampler = self._make_sampler()
        resumable = ResumableClients(root, self._boot_id)
        self._clients = Clients(self._loop, self, self._spool.reserve_seqs()[0], resumable, log)
        self._handlers = self._make_handlers()
        self._controller: Optional[Stream] = None
        self._welcomed = False
        self._link_pid = 0  # at the other end of its connection: what sshd started
        self._visitors: List[Stream] = []  # commands that look at the node, beside the controller
        self._gpus: Optional[List[Dict[str, Any]]] = None  # None: not known yet
        self._watchers: Dict[str, List[protocol.Address]] = {}  # other readers of the output of a token
        self._paused = False

    def _make_ledger(self) -> Ledger:
        places = [self.root, "/tmp"]  # noqa: S108 - only its free space is looked at
        return Ledger(
            node=self.node,
            boot_id=self._boot_id,
            spool=self._spool,
            shepherds=self._shepherds,
            send=self.to_controller,
            find_account=self._find_account,
            log=log,
            scripts=ScriptRunner(self._loop, self._spool.scripts, self._faults),
            check=LaunchCheck(places, lambda: self._sampler.latest(), lambda: self._sampler.growth()),
        )

    def _make_sampler(self) -> NodeSampler:
        return NodeSampler(
            self._loop,
            self._helpers,
            GpuWatch(self._loop, self._environ),
            ["/", "/tmp", self.root],  # noqa: S108 - only its free space is looked at
            lambda: iter(self._ledger.entries.values()),
            self.to_controller,
            lambda: self._controller.unsent if self._controller is not None else 0,
        )

    def run(self, ready_fd: int) -> None:
        """Serve until the agent is not needed any more.

        Write a line to `ready_fd` when the socket answers.
        """
        paths.write_shims(self.root)
        self._shepherds.on_message = self._from_shepherd
        self._shepherds.on_gone = self._shepherd_gone
        wake_on_signals(
            self._loop,
            {
                signal.SIGCHLD: self._shepherds.reap,
                signal.SIGTERM: self._hand_over,
                signal.SIGINT: self._hand_over,
                signal.SIGHUP: lambda: None,
            },
        )
        self._sandboxes.delete = lambda path: self._helpers.do(lambda: paths.remove_tree(path))
        self._sandboxes.take_over()
        self._ledger.recover()
        self._sandboxes.sweep(self._live_jobs())
        if self._ledger.is_idle:
            self._shepherds.forget_mpi_files()
            environment.remove_allocations(self.root)
        listener = self._listen()
        if ready_fd >= 0:
            os.write(ready_fd, b"ready\n")
            os.close(ready_fd)
        self._loop.later(REPEAT_S, self._repeat)
        self._loop.after_turn = self._after_turn
        gc.collect()
        process.return_free_memory()
        gc.freeze()  # a shepherd's garbage collector must not write to, and so copy, shared pages
        self._tidy()
        paths.unpack_aside(self.root, log)
        self._loop.run()
        self._tidy()
        self._sandboxes.tidy(math.inf)
        os.unlink(self._socket_path)
        listener.close()

    def _live_jobs(self) -> List[str]:
        """Return the jobs that run here or claim this node."""
        live = [entry for entry in self._ledger.entries.values() if not entry.is_final]
        return [confinement.job_name(entry.token, entry.key.job_id, entry.key.attempt) for entry in live]

    def _tidy(self) -> None:
        """Delete unused files of earlier versions.

        Their shepherds and step commands may still run.
        """
        if paths.version() == "source":
            return
        try:
            old = paths.delete_old_bundles(self.root, process.is_named, time.time())
            for name in (*old, *paths.delete_old_steps(self.root, process.is_named, time.time())):
                log("deleted %s: no process runs from it" % name)
        except OSError as error:
            log("cannot delete old bundles: %s" % error)

    def _protect(self) -> None:
        os.umask(0o077)
        process.leave_no_core_file()  # nor do shepherds, which inherit it
        process.become_subreaper()  # so that orphans of a killed shepherd become our children
        if os.geteuid() == 0:
            try:
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("-500")
            except OSError:
                pass  # a container may forbid it

    def _listen(self) -> socket.socket:
        path = self._socket_path
        paths.make_socket_folder(path)
        try:
            os.unlink(path)  # of an ended agent: we hold the lock
        except FileNotFoundError:
            pass
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        self._for_all = os.geteuid() == 0 or user.has_helper()
        os.chmod(path, 0o666 if self._for_all else 0o600)  # the peer of each connection is checked
        listener.listen(128)
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), READ, lambda _events: self._accept(listener))
        return listener

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            _, uid = peer(sock)
            if not self._for_all and uid not in (os.geteuid(), 0):
                sock.close()
                continue
            try:
                self._clients.accept(sock)
            except Exception:
                log_exception("a connection of uid %d is closed: it cannot be accepted" % uid)
                sock.close()

    # ----- the controller

    def take_over(
        self, client: CommandClient, stream: Stream, hello: protocol.Hello, frames: Frames, framer: protocol.Framer
    ) -> bool:
        """Accept the connection of a controller or a visitor, if it is allowed.

        `frames` came after its `hello`.
        """
        uid = client.uid
        why = self._refusal(hello, uid)
        if why:
            log("a controller was refused: %s" % why)
            stream.send(protocol.encode(protocol.Goodbye(why)))
            if uid in (os.geteuid(), 0) and (hello.cluster, hello.node) != (self.cluster, self.node):
                self._loop.later(RENAMED_S, self._end_if_unneeded)
            return False
        if hello.visit:
            self._receive_visitor(client.pid, stream, frames, framer)
            return True
        if self._controller is not None:
            self._controller.send(protocol.encode(protocol.Goodbye("another connection of the controller took over")))
            self._controller.close_when_sent()
        framer.limit, framer.max_values = protocol.MAX_FRAME_BYTES, 0
        self._end_renewals()
        self._sampler.stop()
        self._controller, self._welcomed, self._link_pid = stream, False, client.pid
        stream.what = "the controller's connection"
        stream.on_data = lambda data: self._received(stream, framer, data)
        self._look_then_welcome(stream)
        for message, blob in frames:
            self._handle(message, blob)
        return True

    def _refusal(self, hello: protocol.Hello, uid: int) -> str:
        if uid not in (os.geteuid(), 0):
            return "uid %d may not control this agent" % uid
        if hello.version != protocol.VERSION:
            return "this agent speaks protocol %d, not %d" % (protocol.VERSION, hello.version)
        if (hello.cluster, hello.node) != (self.cluster, self.node):
            return "this is node %s of cluster %s" % (self.node, self.cluster)
        try:
            accept = self._ledger.epochs.why_refused if hello.visit else self._ledger.epochs.begin
            return accept(hello.incarnation, hello.epoch, hello.start)
        except OSError as error:
            return "cannot store the controller's epoch in %s: %s" % (self.root, error.strerror)

    def _receive_visitor(self, pid: int, stream: Stream, frames: Frames, framer: protocol.Framer) -> None:
        """Answer the questions of a command that looks at the node; the controller's link stays."""

        def deliver(answer: protocol.Message) -> None:
            stream.send(protocol.encode(answer))

        def handle(message: protocol.Message) -> None:
            if isinstance(message, protocol.Probe):
                self._ask_for_facts(message, deliver, pid)
            elif isinstance(message, protocol.CompareProbe):
                self._compare_probe(message, deliver)
            elif isinstance(message, protocol.Ping):
                deliver(protocol.Pong(message.request))
            else:
                raise protocol.WireError("a visitor cannot say %s" % type(message).__name__)

        def received(data: bytes) -> None:
            try:
                for message, _ in framer.feed(data):
                    handle(message)
            except protocol.WireError as error:
                log("a visitor's connection is closed: %s" % error)
                deliver(protocol.Goodbye(str(error)))
                stream.close_when_sent()

        stream.what = "a visitor's connection"
        stream.on_data = received
        self._visitors = [*(each for each in self._visitors if not each.closed), stream]
        self._look_then_welcome(stream)
        for message, _ in frames:
            handle(message)

    def _look_then_welcome(self, stream: Stream) -> None:
        """Send Welcome, after a helper has counted the GPUs once, which may take seconds."""
        if self._gpus is None and probe.has_gpu_tool(self._environ):
            self._ask_for_facts(
                protocol.Probe(0), lambda facts: self._welcome(stream, facts.facts.get("gpus", [])), self._link_pid
            )
        else:
            self._welcome(stream, self._gpus or [])

    def _welcome(self, stream: Stream, gpus: List[Dict[str, Any]]) -> None:
        self._gpus = gpus
        if stream.closed or not (stream is self._controller or stream in self._visitors):
            return
        facts = probe.facts(self.root, self._environ, (), thorough=False)
        facts["gpus"] = gpus
        facts["fault"] = self._ledger.fault
        facts["spool"] = self._identity
        facts["abilities"] = confinement.abilities(self._ground)
        facts["samples"] = True  # it knows SampleEvery
        facts["log_formats"] = True  # it knows LogAs
        facts["jobs_with_scripts"] = self._ledger.jobs_with_scripts()
        welcome = protocol.Welcome(
            version=protocol.VERSION,
            node=self.node,
            boot_id=self._boot_id,
            agent_version=paths.version(),
            pid=os.getpid(),
            epoch=self._ledger.epochs.seen.epoch,
            inventory=self._ledger.inventory(),
            facts=facts,
        )
        stream.send(protocol.encode(welcome))
        if stream is not self._controller:
            return
        self._welcomed = True
        self._clients.controller_came()
        self._shepherds.resend()
        self._shepherds.keep_one_ready()

    def to_controller(self, message: protocol.Message, blob: bytes = b"") -> bool:
        """Send a message if a controller is connected; return whether one is."""
        if self._controller is None or not self._welcomed or self._controller.closed:
            return False
        if not isinstance(message, (protocol.Report, protocol.Sample)):
            self._ledger.report_starts()  # what a job asks for must not arrive before the job's start
        self._controller.send(protocol.encode(message, blob))
        return True

    def _received(self, stream: Stream, framer: protocol.Framer, data: bytes) -> None:
        if not data:
            self._controller_gone(stream)
            return
        try:
            for message, blob in framer.feed(data):
                if stream is self._controller:
                    self._handle(message, blob)
        except protocol.WireError as error:
            log("the controller's connection is closed: %s" % error)
            stream.send(protocol.encode(protocol.Goodbye(str(error))))
            stream.close_when_sent()
            self._controller_gone(stream)

    def _controller_gone(self, stream: Stream) -> None:
        if stream is self._controller:
            self._controller, self._welcomed = None, False
            self._watchers.clear()  # the next controller asks again
            self._sampler.stop()
            self._end_renewals()
            self._clients.controller_went()

    def _end_renewals(self) -> None:
        self._renewals.forget()
        self._ledger.disconnected()

    def _handle(self, message: protocol.Message, blob: bytes) -> None:
        """Do what the controller says. Raises WireError if a controller cannot say it."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise protocol.WireError("a controller cannot say %s" % type(message).__name__)
        handler(message, blob)

    def _make_handlers(self) -> Dict[Type[protocol.Message], Callable[[Any, bytes], None]]:
        """Return what to call for each message of a controller."""
        ledger = self._ledger
        return {
            protocol.Launch: ledger.launch,
            protocol.Ack: lambda message, _blob: ledger.ack(message.seqs),
            protocol.EndStep: lambda message, _blob: ledger.end_step(message),
            protocol.EndJob: lambda message, _blob: ledger.end_job(message),
            protocol.SuspendJob: lambda message, _blob: ledger.suspend_job(message),
            protocol.TimeLimit: lambda message, _blob: self.to_shepherd(
                message.token, ChangeTimeLimit(message.limit_s)
            ),
            protocol.Allocation: lambda message, _blob: self._note_allocation(message),
            protocol.SignalStep: lambda message, _blob: ledger.signal_step(message),
            protocol.Go: lambda message, _blob: ledger.go(message),
            protocol.Pong: lambda message, _blob: self._renew(message),
            protocol.Ping: lambda message, _blob: self._answer(protocol.Pong(message.request)),
            protocol.Probe: lambda message, _blob: self._ask_for_facts(message, self.to_controller, self._link_pid),
            protocol.SampleEvery: lambda message, _blob: self._sampler.every(message),
            protocol.LogAs: lambda message, _blob: self.log_as(message.format),
            protocol.ReadFile: lambda message, _blob: self._read_file(message),
            protocol.ListFiles: lambda message, _blob: self._list_files(message),
            protocol.CompareProbe: lambda message, _blob: self._compare_probe(message, self.to_controller),
            protocol.PowerOff: lambda message, _blob: self._power_off(message),
            protocol.WatchOutput: lambda message, _blob: self._watch(message),
            protocol.ToStream: self._to_client,
            protocol.CloseStream: lambda message, _blob: self._clients.close(message.stream),
            protocol.Input: lambda message, blob: self.to_shepherd(
                message.token, TaskInput(message.task, message.offset, message.eof), blob
            ),
            protocol.OutputAck: lambda message, _blob: self._taken(message),
        }

    def _answer(self, message: protocol.Message) -> None:
        self.to_controller(message)

    def _renew(self, pong: protocol.Pong) -> None:
        asked_s = self._renewals.answered(pong.request)
        if asked_s is not None:
            self._ledger.renewed(asked_s)

    def _taken(self, ack: protocol.OutputAck) -> None:
        self.to_shepherd(ack.token, OutputTaken(ack.task, ack.fd, ack.offset))
        if ack.again:
            self.to_shepherd(ack.token, ResendOutput(self._shepherds.round))
        if ack.again and ack.to is not None and self._ledger.is_forgotten(ack.token):
            self.to_controller(protocol.Output(ack.to, ack.token, protocol.ALL_TASKS, 0, 0, True))

    def _watch(self, order: protocol.WatchOutput) -> None:
        others = [to for to in self._watchers.pop(order.token, ()) if to != order.to]
        if order.on and order.token in self._ledger.entries:
            others.append(order.to)
        if others:
            self._watchers[order.token] = others

    def _note_allocation(self, order: protocol.Allocation) -> None:
        try:
            news = environment.write_allocation(self.root, order)
        except OSError as error:
            log("cannot write the nodes of job %d: %s" % (order.job_id, error))  # sent again on each connection
            return
        if news:
            self._ledger.signal_job(order.incarnation, order.job_id, order.attempt, signal.SIGWINCH)

    def _to_client(self, message: protocol.ToStream, blob: bytes) -> None:
        if not self._clients.to_stream(message.stream, protocol.from_json(message.message), blob):
            self.to_controller(protocol.CloseStream(message.stream))

    def _ask_for_facts(self, order: protocol.Probe, deliver: Callable[[Any], object], link_pid: int) -> None:
        live = {entry.key.job_id for entry in self._ledger.entries.values() if not entry.is_final}

        def look() -> Dict[str, Any]:
            if order.bench:
                from hpcnode.agent import bench  # in a child; see `agent` on the cost of imports
                from hpcnode.os import program

                process.become_subreaper()
                try:
                    return {"bench": bench.bench(self.root, order.bench, order.bench_python)}
                finally:
                    program.end_rest()  # of the users' Python
            if order.link_token:
                from hpcnode.agent import link_speed

                return link_speed.link_facts(order.link_token, order.link_host, order.link_port)
            return probe.facts(self.root, self._environ, live, measure=order.measure, link_pid=link_pid)

        self._helpers.ask(
            lambda: (protocol.Facts(order.request, look()), b""),
            lambda why: (protocol.Facts(order.request, {"error": why}), b""),
            lambda answer: deliver(answer[0]),
            protocol.BENCH_DEADLINES_S.get(order.bench, helpers.DEADLINE_S),
        )

    def _read_file(self, order: protocol.ReadFile) -> None:
        def failed(why: str) -> helpers.Answer:
            return protocol.FileData(order.request, order.offset, 0, "cannot read %s: %s" % (order.path, why)), b""

        self._as_user(order.user, lambda account: helpers.read_file(order, account), failed)

    def _list_files(self, order: protocol.ListFiles) -> None:
        def failed(why: str) -> helpers.Answer:
            what = "/".join(filter(None, (order.beneath, order.path)))
            return protocol.FileList(order.request, error="cannot list %s: %s" % (what, why)), b""

        self._as_user(order.user, lambda account: helpers.list_files(order, account), failed)

    def _as_user(
        self, name: str, work: Callable[[user.UserAccount], helpers.Answer], failed: Callable[[str], helpers.Answer]
    ) -> None:
        """Have a child work as the user, and send its answer."""
        try:
            account = self._find_account(name)
        except user.UserError as error:
            self.to_controller(*failed(str(error)))
            return
        if os.geteuid() not in (0, account.uid):  # the root helper starts signed tasks, and reads nothing
            self.to_controller(*failed("the agent of this node is not root; read the file itself"))
            return
        self._helpers.ask(lambda: work(account), failed, lambda answer: self.to_controller(*answer), of=account.name)

    def _compare_probe(self, order: protocol.CompareProbe, deliver: Callable[[protocol.Message], object]) -> None:
        self._helpers.ask(
            lambda: helpers.compare_probe(order),
            lambda why: (protocol.ProbeCompared(order.request, False, why), b""),
            lambda answer: deliver(answer[0]),
        )

    def _power_off(self, order: protocol.PowerOff) -> None:
        """Run the command that switches this node off, unless jobs are here."""
        live = {entry.key.job_id for entry in self._ledger.entries.values() if not entry.is_final}
        live |= {job_id for _, job_id, _, _ in self._ledger.jobs_with_scripts()}

        def failed(why: str) -> helpers.Answer:
            return protocol.Facts(order.request, {"error": why}), b""

        if live:
            self.to_controller(*failed("jobs are on the node: %s" % ", ".join(map(str, sorted(live)[:8]))))
            return
        log("switching off: %s" % " ".join(order.command))

        def run() -> helpers.Answer:
            import shutil  # in a child; see `agent` on the cost of imports

            from hpcnode.os import program

            path = shutil.which(order.command[0], path=program.PATH) if order.command else None
            if path is None:
                return failed("there is no program %s" % " ".join(order.command[:1]))
            why = program.run(path, {}, order.limit_s, order.command[1:])
            return failed(why) if why else (protocol.Facts(order.request, {}), b"")

        self._helpers.ask(run, failed, lambda answer: self.to_controller(*answer), order.limit_s + helpers.DEADLINE_S)

    def _find_account(self, name: str, allow_uid_below: int = 0) -> user.UserAccount:
        now_s = process.boot_clock_s()
        key = (name, allow_uid_below)
        known = self._accounts.get(key)
        if known is None or now_s - known[0] > ACCOUNT_AGE_S:
            known = self._accounts[key] = (now_s, user.find_account(name, os.geteuid(), allow_uid_below))
        return known[1]

    # ----- shepherds and step commands

    def _from_shepherd(self, token: str, message: protocol.Message, blob: bytes) -> None:
        """Take a message of a shepherd. Raises WireError: then its connection ends."""
        if isinstance(message, TasksReady):
            self._ledger.shepherd_ready(token)
        elif isinstance(message, TasksStarted):
            self._ledger.shepherd_started(token, message)
        elif isinstance(message, TasksEnded):
            check_final(message)
            self._ledger.shepherd_ended(token, message)
        elif isinstance(message, SignalOtherSteps):
            entry = self._ledger.entries.get(token)
            if entry is not None:
                self._ledger.signal_steps(entry, message.signum)
        elif isinstance(message, (TaskOutput, InputTaken)):
            self._forward_stream(token, message, blob)

    def _forward_stream(self, token: str, message: Union[TaskOutput, InputTaken], blob: bytes) -> None:
        """Send stream traffic to the step command of the step, and output to watchers."""
        entry = self._ledger.entries.get(token)
        to = entry.launch.stream_to if entry is not None and entry.launch is not None else None
        if to is None:
            return
        forwarded: protocol.Message
        if isinstance(message, TaskOutput):
            if message.round != self._shepherds.round:
                return  # it was sent to an earlier reader; it comes again
            forwarded = protocol.Output(to, token, message.task, message.fd, message.offset, message.eof)
            for other in self._watchers.get(token, ()):
                self.to_controller(protocol.changed(forwarded, to=other), blob)
        else:
            forwarded = protocol.InputAck(to, token, message.task, message.offset)
        if to.node == self.node:
            self._clients.output(to.stream, forwarded, blob)
        else:
            self.to_controller(forwarded, blob)

    def _shepherd_gone(self, token: str) -> None:
        self._watchers.pop(token, None)
        self._ledger.shepherd_gone(token)

    def job_runs_here(self, job_id: int, uid: int) -> Optional[int]:
        """Return the attempt of the job that runs here as this user, None if none does.

        Root and our account see all jobs.
        """
        for entry in self._ledger.entries.values():
            if entry.key.job_id == job_id and not entry.is_final:
                owner = entry.account.uid if entry.account is not None else entry.record.get("uid", os.geteuid())
                if uid in (owner, os.geteuid(), 0):
                    return entry.key.attempt
        return None

    def owns_stream(self, token: str, stream: int) -> bool:
        """Return whether the tasks of this token run here and stream to this step command."""
        entry = self._ledger.entries.get(token)
        to = entry.launch.stream_to if entry is not None and entry.launch is not None else None
        return to is not None and (to.node, to.stream) == (self.node, stream)

    def send_again(self, stream: int) -> None:
        """Have the unacknowledged output of this step command's tasks here sent again."""
        for token in self._ledger.entries:
            if self.owns_stream(token, stream):
                self.to_shepherd(token, ResendOutput(self._shepherds.round))

    def to_shepherd(self, token: str, message: protocol.Message, blob: bytes = b"") -> None:
        """Send a message to the shepherd of a token, if it lives."""
        self._shepherds.send(token, message, blob)

    # ----- time

    def _after_turn(self) -> None:
        """Set timers that the turn made necessary; pause or resume the shepherds."""
        self._flow()
        self._renewals.keep_on(self._welcomed)
        if self._ledger.has_unreported_starts and self._starts_timer is None:
            self._starts_timer = self._loop.later(START_REPORT_S, self._report_starts)
        if self._ledger.waits and self._tick_timer is None:
            self._tick_timer = self._loop.later(TICK_S, self._tick)
        if self._ledger.to_forget >= FORGET_AT_ONCE:
            self._forget()
        elif self._ledger.to_forget and self._forget_timer is None:
            self._forget_timer = self._loop.later(FORGET_S, self._forget)
        needed = not self._is_unneeded()
        if needed and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        elif not needed and self._idle_timer is None:
            self._idle_timer = self._loop.later(self._idle_s, self._hand_over)

    def _is_unneeded(self) -> bool:
        asked = self._controller is not None or any(not each.closed for each in self._visitors)
        return not asked and len(self._clients) == 0 and self._ledger.is_idle

    def _end_if_unneeded(self) -> None:
        if self._is_unneeded():
            self._hand_over()

    def _flow(self) -> None:
        unsent = self._controller.unsent if self._controller is not None else 0
        if (unsent > HIGH_WATER) != self._paused and (unsent > HIGH_WATER or unsent < LOW_WATER):
            self._paused = not self._paused
            self._shepherds.pause(self._paused)

    def _report_starts(self) -> None:
        self._starts_timer = None
        self._ledger.report_starts()

    def _tick(self) -> None:
        self._tick_timer = None
        self._ledger.tick()

    def _forget(self) -> None:
        if self._forget_timer is not None:
            self._forget_timer.cancel()
            self._forget_timer = None
        tokens = self._ledger.forget_some()
        if tokens:
            self._helpers.do(lambda: self._spool.remove(tokens))

    def _repeat(self) -> None:
        if self._welcomed:
            self._ledger.repeat()
        self._loop.later(REPEAT_S, self._repeat)

    def _hand_over(self) -> None:
        """End. Shepherds continue, and the next agent reads the spool."""
        if self._ledger.to_forget:
            self._forget()
        self._loop.stopped = True


def take_lock(root: str, boot: str) -> int:
    """Take the lock of the one agent of this root, and write our identity to it.

    Raises AgentError.
    """
    path = os.path.join(root, "agent.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AgentError("cannot start the agent: another one holds %s" % path) from None
    identity = process.identify(os.getpid(), boot)
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"agent": identity, "version": paths.version(), "python": sys.executable}).encode(), 0)
    return fd


def log(text: str) -> None:
    """Write a line to the agent's log (its stderr)."""
    print(time.strftime("%Y-%m-%dT%H:%M:%S"), text, file=sys.stderr)
