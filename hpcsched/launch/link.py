"""The kept-open connection to one node, for the controller's event loop.

It is up, receives messages, is down, and reconnects. All of `NodeLink` runs on the loop's thread.
Each connection, or attempt, is a `_Session` with two threads: one dials, greets and receives, the
other sends. The threads report events to the loop. Events of an abandoned session are dropped. The
loop therefore never waits for a network, and a call that hangs in a library costs only a thread.

Rules:
- `send` refuses while the link is not up: orders to a node are repeated after each Welcome.
- A silent link is pinged. A link that is silent for too long is ended, with the reason as text.
- Frames that are queued in one turn of the loop are sent in one write.
- A node that reads nothing is disconnected too, once MAX_UNSENT_BYTES are queued for it.
- The first reconnect comes after 1 s. The pause then doubles each time, with jitter, while the link
  is open. Its maximum is 5 s for a node that was up within the last hour (it may be booting), and
  30 s for other nodes.

`greet` exchanges the first messages: the dialogue of the bootstrap, then Hello and Welcome. It skips
output of the node's shell, up to a bound. Every refusal becomes a LinkError with a text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hpcnode.wire import gate, protocol
from hpcsched.launch.bundle import MARK, Bundle
from hpcsched.launch.pipe import Abort, Dial, LinkError, LinkProgress, Pipe
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec

MAX_UNSENT_BYTES = 64 << 20
MAX_UNREAD_CHUNKS = 32  # received, and not yet processed by the loop: then the node must wait
SEND_BYTES = 1 << 20
STEADY_S = 10.0  # a link that was up for this long counts as working

log = logging.getLogger("hpcsched.launch")


class LinkEvents(Protocol):
    """Receiver of a link's events. Called on the loop's thread."""

    def on_up(self, node: NodeName, welcome: protocol.Welcome) -> str:
        """Handle the agent's Welcome. Return why it is rejected, "" if it is accepted."""

    def on_message(self, node: NodeName, message: protocol.Message, blob: bytes) -> None: ...

    def on_down(self, node: NodeName, why: str) -> None:
        """Handle a lost or failed link; called again when the reason changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Seconds. `connect` bounds each stage of an attempt."""

    connect_s: float = 20.0
    heartbeat_s: float = 15.0
    down_after_s: float = 45.0
    retry_first_s: float = 1.0
    retry_most_s: float = 30.0
    # The maximum for a node that was up, or whose link was started, less than `missed_s` ago.
    retry_missed_s: float = 5.0
    missed_s: float = 3600.0


class NodeLink:
    """One node's connection. `start` it, `send` through it, `close` it."""

    def __init__(
        self,
        spec: NodeSpec,
        *,
        dial: Dial,
        bundle: Bundle,
        identity: ControllerIdentity,
        times: LinkTimes,
        events: LinkEvents,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.spec = spec
        self._dial, self._bundle, self._identity = dial, bundle, identity
        self._times, self._events, self._loop = times, events, loop
        self._session: _Session | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self._last_up_s = loop.time()
        self._up_since_s: float | None = None
        self._heard_s = 0.0
        self._watch_due_s = 0.0
        self._pings = 0
        self._told = ""
        self._closed = False

    @property
    def up(self) -> bool:
        """Return whether the agent has sent Welcome and no error has occurred since."""
        return self._up_since_s is not None

    def start(self) -> None:
        """Start to connect, and retry until `close`."""
        self._connect()

    def retry_now(self) -> None:
        """End the pause before the next attempt now."""
        if self._session is None and not self._closed:
            self._connect()

    def send(self, message: protocol.Message, blob: bytes = b"") -> bool:
        """Queue a message; return False if the link is not up and the message is dropped.

        Raises WireError if it is too long.
        """
        if self._session is None or self._up_since_s is None:
            return False
        session = self._session
        queued = session.queue(protocol.encode(message, blob))
        if queued is None:
            self._fail(f"it takes nothing: {MAX_UNSENT_BYTES >> 20} MiB wait to be sent")
            return False
        if queued:
            self._loop.call_soon(session.send_queued)
        return True

    def close(self) -> None:
        """End the link permanently, without an event."""
        self._closed = True
        self._drop_session()

    # ----- called only by the loop

    def _connect(self) -> None:
        self._drop_session()
        session = _Session(self)
        self._session = session
        self._arm(self._times.connect_s, lambda: self._timed_out(session))
        session.start()

    def _drop_session(self) -> None:
        self._disarm()
        if self._session is not None:
            self._session.abort.now()
            self._session.stop_sending()
        self._session = None
        self._up_since_s = None

    def _arm(self, delay_s: float, call: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(delay_s, call)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _timed_out(self, session: _Session) -> None:
        self._fail(f"cannot reach {self.spec.name}: no answer within {self._times.connect_s:g} s while {session.stage}")

    def _fail(self, why: str) -> None:
        """End the current session: report it, and retry after a pause."""
        now_s = self._loop.time()
        was_up_s = None if self._up_since_s is None else now_s - self._up_since_s
        if was_up_s is not None:
            self._last_up_s = now_s
        self._drop_session()
        self._failures = 1 if was_up_s is not None and was_up_s > STEADY_S else self._failures + 1
        missed = now_s - self._last_up_s < self._times.missed_s
        most_s = min(self._times.retry_missed_s, self._times.retry_most_s) if missed else self._times.retry_most_s
        longest_s = min(most_s, self._times.retry_first_s * 2 ** min(self._failures - 1, 10))
        self._arm(longest_s * random.uniform(0.5, 1.0), self._connect)
        if was_up_s is not None or why != self._told:
            self._told = why
            self._events.on_down(self.spec.name, why)

    def _on_stage(self, session: _Session) -> None:
        if session is self._session and self._up_since_s is None:
            self._arm(self._times.connect_s, lambda: self._timed_out(session))

    def _on_greeting(self, session: _Session, greeting: Greeting) -> None:
        if session is not self._session:
            return
        why = self._events.on_up(self.spec.name, greeting.welcome)
        if why:
            self._fail(why)
            return
        self._up_since_s = self._heard_s = self._loop.time()
        self._told = ""
        self._plan_watch(self._times.heartbeat_s)
        self._deliver(session, greeting.rest)

    def _on_chunk(self, session: _Session, messages: list[tuple[protocol.Message, bytes]]) -> None:
        session.taken()
        if session is self._session:
            self._heard_s = self._loop.time()
            self._deliver(session, messages)

    def _deliver(self, session: _Session, messages: list[tuple[protocol.Message, bytes]]) -> None:
        for message, blob in messages:
            if session is not self._session:
                return  # a listener closed the link
            if isinstance(message, protocol.Goodbye):
                self._fail(f"the agent of {self.spec.name} ended the connection: {message.why}")
            elif isinstance(message, protocol.Ping):
                self.send(protocol.Pong(request=message.request))
            elif not isinstance(message, protocol.Pong):
                self._events.on_message(self.spec.name, message, blob)

    def _on_end(self, session: _Session, why: str) -> None:
        if session is self._session:
            self._fail(why)

    def _plan_watch(self, delay_s: float) -> None:
        self._watch_due_s = self._loop.time() + delay_s
        self._arm(delay_s, self._watch)

    def _watch(self) -> None:
        """Ping a silent link; end one that has been silent for too long."""
        now_s = self._loop.time()
        if now_s - self._watch_due_s > self._times.heartbeat_s / 2:
            self._heard_s = now_s  # this process was stopped: data that arrived meanwhile is not read yet
        silent_s = now_s - self._heard_s
        if silent_s >= self._times.down_after_s:
            self._fail(f"no sign of life for {silent_s:.0f} s")
            return
        if silent_s >= self._times.heartbeat_s * 0.9:
            self._pings += 1
            self.send(protocol.Ping(request=self._pings))
        if self._session is not None:
            self._plan_watch(min(self._times.heartbeat_s, self._times.down_after_s - silent_s))


class _Session:
    """One connection or attempt, from dialling to its end: two threads and their shared state."""

    def __init__(self, link: NodeLink) -> None:
        self.abort = Abort()
        self.stage = "starting"
        self._link = link
        self._loop = link._loop
        self._unread = threading.Semaphore(MAX_UNREAD_CHUNKS)
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._flush_is_due = False  # `send_queued` will be called
        self._wake = threading.Condition()
        self._ended = False

    def start(self) -> None:
        self._thread("receive", self._receive_all)

    def queue(self, frame: bytes) -> bool | None:
        """Queue a frame for the sender; return None if too much is queued.

        True: the caller must call `send_queued` once all frames of the present turn of the loop are queued. The sender
        is not woken for each frame, because then it and the loop take the interpreter's lock from each other.
        """
        with self._wake:
            if self._outbox_bytes + len(frame) > MAX_UNSENT_BYTES:
                return None
            self._outbox.append(frame)
            self._outbox_bytes += len(frame)
            is_first, self._flush_is_due = not self._flush_is_due, True
        return is_first

    def send_queued(self) -> None:
        """Wake the sender."""
        with self._wake:
            self._flush_is_due = False
            self._wake.notify()

    def stop_sending(self) -> None:
        """Let the threads end; queued frames are dropped."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._unread.release()

    def taken(self) -> None:
        """Note that the loop has processed a chunk: one more may come."""
        self._unread.release()

    def _thread(self, what: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=f"{self._link.spec.name}-{what}", daemon=True).start()

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, self, *args)
        except RuntimeError:
            self.stop_sending()  # the loop is closed: no listener remains

    def _progress(self, stage: str) -> None:
        self.stage = stage
        self._tell(self._link._on_stage)

    def _receive_all(self) -> None:
        try:
            why = self._live()
        except (LinkError, protocol.WireError) as error:
            why = str(error)
        except Exception as error:  # outermost call of the thread: the node is not reached
            log.exception("node %s: unexpected", self._link.spec.name)
            why = f"cannot reach {self._link.spec.name}: {type(error).__name__}: {error}"
        self.stop_sending()
        self._tell(self._link._on_end, why)

    def _live(self) -> str:
        """Dial, greet and receive until the end; return why it ended."""
        link = self._link
        pipe = link._dial(self.abort, self._progress)
        try:
            greeting = greet(pipe, link.spec, link._bundle, link._identity, self._progress)
            self._tell(link._on_greeting, greeting)
            self._thread("send", lambda: self._send_all(pipe))
            while not self._ended and (data := pipe.receive(RECEIVE_BYTES)):
                messages = list(greeting.framer.feed(data))
                self._unread.acquire()
                self._tell(link._on_chunk, messages)
            return f"lost the agent of {link.spec.name}: {pipe.epitaph()}"
        finally:
            pipe.close()

    def _send_all(self, pipe: Pipe) -> None:
        while frames := self._next_frames():
            try:
                pipe.send_all(frames)
            except OSError:
                return  # the receiver also notices the end, and reports the reason

    def _next_frames(self) -> bytes:
        """Wait for frames and return all that fit in one write; b"" at the end."""
        with self._wake:
            while (not self._outbox or self._flush_is_due) and not self._ended:
                self._wake.wait()
            if self._ended:
                return b""
            frames = [self._outbox.popleft()]
            size = len(frames[0])
            while self._outbox and size + len(self._outbox[0]) <= SEND_BYTES:
                frames.append(self._outbox.popleft())
                size += len(frames[-1])
            self._outbox_bytes -= size
        return b"".join(frames)


MAX_NOISE_BYTES = 256 << 10
RECEIVE_BYTES = 256 << 10
COMMAND_NOT_FOUND = ("status 126", "status 127")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerIdentity:
    """Identity of the controller for the node to which it connects."""

    cluster: str
    incarnation: str
    epoch: int
    start: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The agent's answer, and data received after it; `framer` holds an incomplete frame."""

    welcome: protocol.Welcome
    rest: list[tuple[protocol.Message, bytes]]
    framer: protocol.Framer


def greet(
    pipe: Pipe,
    spec: NodeSpec,
    bundle: Bundle,
    identity: ControllerIdentity,
    progress: LinkProgress,
    *,
    visit: bool = False,
) -> Greeting:
    """Copy hpcnode.pyz to the node if it is missing, and return the agent's welcome.

    `visit`: beside a link of the controller, for questions only. Raises LinkError.
    """
    order = {
        "sha256": bundle.sha256,
        "size": len(bundle.data),
        "root": spec.root,
        "cluster": identity.cluster,
        "node": spec.name,
    }
    try:
        pipe.send_all(json.dumps(order).encode("ascii") + b"\n")
        said, left = _next_line(pipe, b"", spec)
        if said.get("need"):
            progress(f"copying the agent there ({len(bundle.data) >> 10} KiB)")
            pipe.send_all(bundle.data)
            said, left = _next_line(pipe, left, spec)
        progress("waiting for the agent's welcome")
        hello = protocol.Hello(
            version=protocol.VERSION,
            cluster=identity.cluster,
            incarnation=identity.incarnation,
            epoch=identity.epoch,
            node=spec.name,
            start=identity.start,
            visit=visit,
        )
        pipe.send_all(protocol.encode(hello))
        return _welcome(pipe, left, spec)
    except OSError:  # it ended before it read all our data
        raise LinkError(_no_bootstrap(spec, pipe.epitaph(), b"")) from None
    except protocol.WireError as error:
        raise LinkError(f"cannot understand the agent on {spec.name}: {error}") from None


def _next_line(pipe: Pipe, data: bytes, spec: NodeSpec) -> tuple[dict[str, Any], bytes]:
    """Return the bootstrap's next line and the data after it."""
    while True:
        start = data.find(b"\n" + MARK)
        end = data.find(b"\n", start + 1) if start >= 0 else -1
        if end >= 0:
            break
        if len(data) > MAX_NOISE_BYTES:
            raise LinkError(
                f"cannot start the agent on {spec.name}: its shell printed {len(data)} bytes and ran no command; "
                f"the last were {_tail(data)!r}"
            )
        more = pipe.receive(RECEIVE_BYTES)
        if not more:
            raise LinkError(_no_bootstrap(spec, pipe.epitaph(), data))
        data += more
    try:
        said = gate.read_json(data[start + 1 + len(MARK) : end])
        if not isinstance(said, dict):
            raise gate.GateError("not a JSON object")
    except gate.GateError:
        raise LinkError(f"cannot understand the bootstrap on {spec.name}: {_tail(data)!r}") from None
    if "error" in said:
        raise LinkError(f"cannot start the agent on {spec.name}: {said['error']}")
    return said, data[end + 1 :]


def _no_bootstrap(spec: NodeSpec, epitaph: str, noise: bytes) -> str:
    text = f"cannot start the agent on {spec.name}: {epitaph}"
    if any(status in epitaph for status in COMMAND_NOT_FOUND):
        text += f" (is there no {spec.python}? install Python 3.9 or newer there, or set python in {spec.name}.toml)"
    return text + (f"; before that it printed {_tail(noise)!r}" if noise.strip() else "")


def _welcome(pipe: Pipe, data: bytes, spec: NodeSpec) -> Greeting:
    framer = protocol.Framer()
    messages = list(framer.feed(data))
    while not messages:
        data = pipe.receive(RECEIVE_BYTES)
        if not data:
            raise LinkError(f"cannot start the agent on {spec.name}: {pipe.epitaph()}")
        messages = list(framer.feed(data))
    first, rest = messages[0][0], messages[1:]
    if isinstance(first, protocol.Goodbye):
        raise LinkError(f"cannot use node {spec.name}: its agent says: {first.why}")
    if not isinstance(first, protocol.Welcome):
        raise LinkError(f"cannot understand the agent on {spec.name}: it said {type(first).__name__} before Welcome")
    if first.version != protocol.VERSION:
        raise LinkError(
            f"cannot use node {spec.name}: its agent speaks protocol {first.version}, we speak {protocol.VERSION}"
        )
    if first.node != spec.name:
        raise LinkError(f"cannot use node {spec.name}: the agent there says that it is {first.node!r}")
    return Greeting(welcome=first, rest=rest, framer=framer)


def _tail(data: bytes) -> str:
    return data[-200:].decode("utf-8", "replace").strip()
