"""A step as its command sees it: request, streams, signals, end. hrun and hrsh use it.

A `StepClient` owns the connection and the one loop that waits: for the connection, stdin, room in the outputs, signals and
deadlines. Nothing is polled. Options, files and messages are the business of its `Front`.

Rules:
- Output is acknowledged when it is written, so a slow reader slows down the task, and memory is bounded.
- Repeated bytes, recognized by their offsets, are written once.
- Blocking flags of shared descriptors are not changed: a pipe gets pieces that fit when poll reports room.
- If the agent is killed or replaced, the client connects to the next one (`StepBack`), and repeats and requests again what may
  have been lost, input included.
- If the connection to a controller breaks, the other side ends the step. If a controller ends before the step has begun,
  `must_ask_again` is true after `run`: then another client must send the same request on another connection.

Sources: poll(2), pipe(7); the launch protocol in hpcnode.wire.protocol.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from typing import Callable, Dict, List, Mapping, Optional, Set, Tuple

from hpcnode.commands.output import LineStream, Outlet
from hpcnode.wire import protocol
from hpcnode.wire.gate import why_not_text
from hpcnode.wire.sockets import AGENT_BACK_S

INPUT_WINDOW = 256 << 10
READ_SIZE = 64 << 10
SEND_LIMIT = 1 << 20
DRAIN_S = 60.0  # how long to wait for missing output after the end of the step, while Pings are answered
FAILED_DRAIN_S = 1.0  # the same for a failed step, because some of its tasks may never have run
ASK_AGAIN_S = 0.5
BACK_AGAIN_S = 0.05
MOST_BACK_AGAIN_S = 1.0
MISSING_OUTPUT = "some of the tasks' output did not arrive"


class ConnectionLost(Exception):
    """The connection was lost; the text is the reason."""


class Front:
    """The reactions of a step command to events; hrun and hrsh override them."""

    def on_waiting(self, said: protocol.StepWaiting) -> None:
        """React to a step that waits."""

    def on_started(self, said: protocol.StepStarted) -> None:
        """React to the start of the step: set the client's `outlets`."""

    def on_signal(self, signum: int) -> None:
        """React to a signal of this process."""

    def on_task_over(self, task: int) -> None:
        """React to the end of a task's output."""


class StepClient:
    """The client's end of one step. After `run` returns, `ended` has the end of the step."""

    def __init__(
        self, sock: socket.socket, front: Front, connect_again: Optional[Callable[[], socket.socket]] = None
    ) -> None:
        """`connect_again`: connects to the next agent or raises OSError.

        None: `sock` does not lead to an agent.
        """
        self.front = front
        self.started: Optional[protocol.StepStarted] = None
        self.ended: Optional[protocol.StepEnded] = None
        self.given_up = ""  # why the client stopped
        self.outlets: Dict[
            int, Callable[[int], Optional[LineStream]]
        ] = {}  # by descriptor: returns the stream of a task
        self.input_fd: Optional[int] = None
        self.input_task = 0  # or protocol.ALL_TASKS
        self.wrap_input: Callable[[bytes], bytes] = lambda data: data  # makes input to send from input that was read
        self._sock: Optional[socket.socket] = sock  # None: the agent is away
        self._connect_again = connect_again
        self._away_since_s = 0.0
        self._framer = protocol.Framer()
        self._sending = bytearray()
        self._selector = selectors.PollSelector()  # unlike epoll it takes regular files
        self._streams: Dict[Tuple[int, int], LineStream] = {}
        self._tokens: Dict[int, str] = {}
        self._ask_not_before_s = float("-inf")
        self._answered = False  # since the last Ping
        self._input_sent = 0
        self._input_kept = bytearray()  # sent input that some task has not acknowledged
        self._input_taken: Dict[int, int] = {}
        self._input_over = False
        self._over: List[int] = []
        self._deadlines: List[Tuple[float, Callable[[], None]]] = []
        self._signals: List[int] = []
        self._unsent_signals: List[int] = []  # for the tasks, not sent yet
        self._missed_signals: List[int] = []  # received while no agent was connected
        self._caught: Tuple[signal.Signals, ...] = ()
        self._wakeup, self._wakeup_in = socket.socketpair()

    # ----- for fronts

    def request(self, request: protocol.StepRequest) -> None:
        """Send the request of the step."""
        self._send(request)

    def signal_tasks(self, signum: int) -> None:
        """Send `signum` to all tasks; SIGKILL ends the whole step at once."""
        (self._missed_signals if self._sock is None else self._unsent_signals).append(signum)
        self._send(protocol.StepSignal(signum=signum))

    def give_up(self, why: str) -> None:
        """Stop; the closed connection ends the step."""
        self.given_up = self.given_up or why

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call `act` in the loop after `delay_s`, unless the step is over before."""
        self._deadlines.append((time.monotonic() + delay_s, act))

    def over_tasks(self) -> List[int]:
        """Return the tasks that have closed their output."""
        return sorted(self._over)

    @property
    def must_ask_again(self) -> bool:
        """Whether no task has run and all input is here, so that the request can be repeated."""
        all_here = len(self._input_kept) == self._input_sent
        return self.ended is not None and self.ended.again and all_here and not self.given_up

    def take_input_of(self, former: StepClient) -> None:
        """Take over the input that `former` has read, and continue to read after it."""
        self.input_fd = former.input_fd
        self._input_kept, self._input_sent = former._input_kept, former._input_sent
        self._input_over = former._input_over

    def catch(self, signals: Tuple[signal.Signals, ...]) -> None:
        """Pass these signals to the front."""
        for each in (self._wakeup, self._wakeup_in):
            each.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_in.fileno(), warn_on_full_buffer=False)
        self._caught = signals
        for signum in signals:
            signal.signal(signum, lambda number, _frame: self._signals.append(number))

    # ----- the loop

    def run(self) -> None:
        """Wait for the step's end and all of its output. Raises ConnectionLost or WireError."""
        assert self._sock is not None
        self._sock.setblocking(False)
        while not self._is_over():
            self._register()
            for key, events in self._selector.select(self._timeout_s()):
                key.data(events)
            self._take_signals()
            self._take_deadlines()
            self._acknowledge()
        self._flush_rest()

    def _is_over(self) -> bool:
        if self.given_up:
            return True
        if self.ended is None:
            return False
        return self.ended.never_ran or all(stream.all_came for stream in self._streams.values())

    def _register(self) -> None:
        """Register the descriptors that can make progress now."""
        wanted: Dict[int, Tuple[int, Callable[[int], None]]] = {}
        if self._sock is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._sending else 0)
            wanted[self._sock.fileno()] = (events, self._on_socket)
        wanted[self._wakeup.fileno()] = (selectors.EVENT_READ, self._on_wakeup)
        if self._wants_input():
            assert self.input_fd is not None
            wanted[self.input_fd] = (selectors.EVENT_READ, self._on_input)
        for outlet in self._outlets():
            if outlet.pending:
                wanted[outlet.fd] = (selectors.EVENT_WRITE, outlet.on_writable)
        known = self._selector.get_map()
        for fd in [key.fd for key in known.values() if key.fd not in wanted]:
            self._selector.unregister(fd)
        for fd, (mask, call) in wanted.items():
            if fd not in known:
                self._selector.register(fd, mask, call)
            elif known[fd].events != mask:
                self._selector.modify(fd, mask, call)

    def _outlets(self) -> List[Outlet]:
        found = {id(stream.outlet): stream.outlet for stream in self._streams.values() if stream.outlet is not None}
        return list(found.values())

    def _timeout_s(self) -> Optional[float]:
        if not self._deadlines:
            return None
        return max(0.0, min(at for at, _ in self._deadlines) - time.monotonic())

    def _take_deadlines(self) -> None:
        now_s = time.monotonic()
        due = [act for at, act in self._deadlines if at <= now_s]
        self._deadlines = [(at, act) for at, act in self._deadlines if at > now_s]
        for act in due:
            act()

    def _on_wakeup(self, events: int) -> None:
        try:
            self._wakeup.recv(512)
        except BlockingIOError:
            pass

    def _take_signals(self) -> None:
        while self._signals:
            self.front.on_signal(self._signals.pop(0))

    # ----- the connection

    def _send(self, message: protocol.Message, blob: bytes = b"") -> None:
        if self._sock is not None:  # else `_catch_up` repeats what matters
            self._sending += protocol.encode(message, blob)

    def _on_socket(self, events: int) -> None:
        if self._sock is None:
            return
        if events & selectors.EVENT_WRITE and self._sending:
            try:
                del self._sending[: self._sock.send(self._sending)]
                if not self._sending:
                    self._unsent_signals.clear()
            except BlockingIOError:
                pass
            except OSError:
                self._sending.clear()  # closed by the peer; its last messages may still be unread
        if not events & selectors.EVENT_READ:
            return
        try:
            data = self._sock.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._broken(error.strerror or str(error))
            return
        if not data:
            self._broken("it was closed")
        for message, blob in self._framer.feed(data):
            self._on_message(message, blob)

    def _broken(self, why: str) -> None:
        """Handle the end of the connection without a message before it."""
        if self._connect_again is None or self._is_over():
            self._lost(why)
            return
        assert self._sock is not None
        self._selector.unregister(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self._sending.clear()
        self._missed_signals += self._unsent_signals
        self._unsent_signals.clear()
        self._framer = protocol.Framer()
        self._away_since_s = time.monotonic()
        self.after(BACK_AGAIN_S, lambda: self._come_back(BACK_AGAIN_S))

    def _come_back(self, pause_s: float) -> None:
        assert self._connect_again is not None
        try:
            self._sock = self._connect_again()
        except OSError:
            away_s = time.monotonic() - self._away_since_s
            if away_s < AGENT_BACK_S <= away_s + pause_s:
                self.front.on_waiting(
                    protocol.StepWaiting(0, "this node's agent does not answer: the step continues without it")
                )
            self.after(pause_s, lambda: self._come_back(min(2 * pause_s, MOST_BACK_AGAIN_S)))
            return
        self._sock.setblocking(False)
        self._send(protocol.StepBack(started=self.started is not None))

    def _lost(self, why: str) -> None:
        if self.ended is None:
            raise ConnectionLost(why)
        self.give_up(MISSING_OUTPUT)

    def _on_message(self, message: protocol.Message, blob: bytes) -> None:
        if isinstance(message, protocol.Output):
            self._on_output(message, blob)
        elif isinstance(message, protocol.InputAck):
            self._input_taken[message.task] = max(message.offset, self._input_taken.get(message.task, 0))
            self._forget_input()
        elif isinstance(message, protocol.StepWaiting) and self.started is not None:
            self._catch_up()
        elif isinstance(message, protocol.StepWaiting):
            self.front.on_waiting(message)
        elif isinstance(message, protocol.StepStarted):
            self._on_started(message)
        elif isinstance(message, protocol.StepEnded):
            self._on_ended(message)
        elif isinstance(message, protocol.Pong):
            self._answered = True
        elif isinstance(message, (protocol.CloseStream, protocol.Goodbye)):
            self._lost(getattr(message, "why", "") or "the other side closed it")
        else:
            raise protocol.WireError("cannot take %s from the controller" % type(message).__name__)

    def _on_started(self, said: protocol.StepStarted) -> None:
        if self.started is not None:
            return
        self.started = said
        for _, ranks, token in said.parts():
            self._tokens.update(dict.fromkeys(ranks, token))
        self.front.on_started(said)
        self._send_input(0, bytes(self._input_kept))
        for fd, stream_of in self.outlets.items():
            for task in self._tokens:
                stream = stream_of(task)
                if stream is not None:
                    self._streams[(task, fd)] = stream

    def _on_ended(self, said: protocol.StepEnded) -> None:
        if self.ended is None:
            self.ended = said
            self._ask_for_missing()  # all output was sent before this message
            self.after(ASK_AGAIN_S, lambda: self._watch_drain(-1, 0.0))

    def _watch_drain(self, seen_before: int, silent_s: float) -> None:
        """Request missing output repeatedly, and give up when it does not come.

        Only time with answered Pings counts: an agent without a controller does not answer them.
        """
        seen = sum(stream.received for stream in self._streams.values())
        if seen != seen_before or self._is_writing():
            silent_s = 0.0
        elif self._answered:
            silent_s += ASK_AGAIN_S
        assert self.ended is not None
        if silent_s >= (FAILED_DRAIN_S if self.ended.error else DRAIN_S):
            self.give_up(MISSING_OUTPUT)
            return
        self._answered = False
        self._send(protocol.Ping(0))
        self._ask_for_missing()
        self.after(ASK_AGAIN_S, lambda: self._watch_drain(seen, silent_s))

    def _is_writing(self) -> bool:
        return any(outlet.pending for outlet in self._outlets())

    # ----- output

    def _on_output(self, message: protocol.Output, blob: bytes) -> None:
        if message.task == protocol.ALL_TASKS:  # nothing is left on that node, so all output has come
            for (task, fd), each in self._streams.items():
                if self._tokens[task] == message.token and not each.all_came:
                    self._on_output(protocol.Output(message.to, message.token, task, fd, each.received, True), b"")
            return
        stream = self._streams.get((message.task, message.fd))
        if stream is None:
            raise protocol.WireError("cannot take output of task %d, descriptor %d" % (message.task, message.fd))
        if not stream.take(message.offset, blob, message.eof):
            self._miss(message, stream.acknowledged)
            return
        if stream.all_came and message.task not in self._over:
            others = [each for (task, _), each in self._streams.items() if task == message.task]
            if all(each.all_came for each in others):
                self._over.append(message.task)
                self._forget_input()
                self.front.on_task_over(message.task)

    def _miss(self, beyond: protocol.Output, acknowledged: int) -> None:
        """Request the output before this message again: it was lost when a controller ended."""
        now_s = time.monotonic()
        if now_s >= self._ask_not_before_s:
            self._ask_not_before_s = now_s + ASK_AGAIN_S  # messages on their way have the same gap
            self._send(protocol.OutputAck(beyond.token, beyond.task, beyond.fd, acknowledged, again=True))

    def _ask_for_missing(self) -> None:
        """Request unacknowledged output of each node again, which may have been lost."""
        asked = set()
        for (task, fd), stream in self._streams.items():
            token = self._tokens[task]
            if not stream.all_came and token not in asked:
                asked.add(token)  # its shepherd sends that of all its tasks
                self._send(protocol.OutputAck(token, task, fd, stream.acknowledged, again=True))

    def _catch_up(self) -> None:
        """Repeat and request again what may have been lost before a new connection."""
        self._ask_for_missing()
        for (task, fd), stream in self._streams.items():
            if stream.all_came and stream.acknowledged:
                self._send(protocol.OutputAck(self._tokens[task], task, fd, stream.acknowledged))
        self._send_input(self._input_sent - len(self._input_kept), bytes(self._input_kept))
        while self._missed_signals:
            self.signal_tasks(self._missed_signals.pop(0))

    def _acknowledge(self) -> None:
        """Acknowledge output that was written or dropped since the last call."""
        for outlet in self._outlets():
            if outlet.broken and not outlet.reported:
                outlet.reported = True
                self.signal_tasks(signal.SIGPIPE)
        for (task, fd), stream in self._streams.items():
            offset = stream.to_acknowledge()
            if offset is not None:
                self._send(protocol.OutputAck(token=self._tokens[task], task=task, fd=fd, offset=offset))

    def _flush_rest(self) -> None:
        """Write the remaining output. The step is over, so this may block."""
        for signum in self._caught:
            signal.signal(signum, signal.SIG_DFL)
        for stream in self._streams.values():
            stream.finish()
        for outlet in self._outlets():
            outlet.drain()

    # ----- input

    def _wants_input(self) -> bool:
        if self.input_fd is None or self._input_over or self.started is None or self.ended is not None:
            return False
        return len(self._input_kept) < INPUT_WINDOW and len(self._sending) < SEND_LIMIT

    def _forget_input(self) -> None:
        """Drop input that all living tasks have acknowledged."""
        live = [task for task in self._input_tasks() if task not in self._over]
        taken = min((self._input_taken.get(task, 0) for task in live), default=self._input_sent)
        del self._input_kept[: max(0, len(self._input_kept) - (self._input_sent - taken))]

    def _input_tasks(self) -> List[int]:
        return list(self._tokens) if self.input_task == protocol.ALL_TASKS else [self.input_task]

    def _on_input(self, events: int) -> None:
        assert self.input_fd is not None
        try:
            data = os.read(self.input_fd, READ_SIZE)
        except BlockingIOError:
            return  # another process made it non-blocking and read first
        except OSError:
            data = b""  # a terminal in the background, or gone: like the end
        self.feed(self.wrap_input(data) if data else b"", eof=not data)

    def feed(self, data: bytes, *, eof: bool = False) -> None:
        """Send `data` as input to the input task, or to all."""
        if self._input_over:
            return
        offset = self._input_sent
        self._input_kept += data
        self._input_sent += len(data)
        self._input_over = eof
        self._send_input(offset, data)

    def _send_input(self, offset: int, data: bytes) -> None:
        if not data and not self._input_over:
            return
        for token in sorted({self._tokens[task] for task in self._input_tasks()}):
            self._send(protocol.Input(token=token, task=self.input_task, offset=offset, eof=self._input_over), data)


class ListeningClient(StepClient):
    """A client that watches the step of another client from now on.

    It neither acknowledges nor sends anything.
    """

    def __init__(self, sock: socket.socket, front: Front) -> None:
        super().__init__(sock, front)
        self._begun: Set[Tuple[int, int]] = set()

    def _is_over(self) -> bool:
        return bool(self.given_up) or self.ended is not None  # output comes before the message about the end

    def _on_output(self, message: protocol.Output, blob: bytes) -> None:
        stream = self._streams.get((message.task, message.fd))
        if stream is not None and (message.task, message.fd) not in self._begun:
            self._begun.add((message.task, message.fd))
            stream.begin_at(message.offset)
        super()._on_output(message, blob)

    def _acknowledge(self) -> None:
        pass

    def _ask_for_missing(self) -> None:
        pass

    def _miss(self, beyond: protocol.Output, acknowledged: int) -> None:
        raise protocol.WireError("output of task %d is missing before byte %d" % (beyond.task, beyond.offset))


def is_open(fd: int) -> bool:
    """Return whether this process has `fd` open."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def exported(text: str, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that ``--export=text`` passes on: ALL, NONE, names, NAME=VALUE.

    Variables of the scheduler are always passed on.
    """
    words = [word for word in text.split(",") if word]
    env = {name: value for name, value in environ.items() if name.startswith(("HPCSCHED_", "SLURM_"))}
    if "ALL" in words or not words:
        env = dict(environ)
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            env[name] = value
        elif name not in ("ALL", "NONE") and name in environ:
            env[name] = environ[name]
    return as_text(env)


def as_text(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that are UTF-8 text and fit into a message.

    Hsub leaves out the others, too.
    """
    return {name: value for name, value in environ.items() if not why_not_text(name + value)}


def umask() -> str:
    """Return this process's umask, octal."""
    mask = os.umask(0o077)
    os.umask(mask)
    return "%04o" % mask
