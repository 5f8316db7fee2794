"""The step commands of this node's jobs (hrun, hrsh) at the agent's socket: who they are, and what passes to and fro.

Rules: who speaks is what the kernel says (SO_PEERCRED); a command speaks for a job only if that job runs here as the same
user. They are not trusted: frames, memory and connections are bounded, and a slow one delays only itself. What they say goes
to the controller, except what belongs to a token of this node: that goes straight to its shepherd.

They outlive their agent: who had asked the one before it comes back with `StepBack` and has its stream again (see `awaited`).

A training program says on a connection of its own how far it is (see `progress`); it is not answered.

It does not know what steps are allowed: that is the controller's.
"""

from __future__ import annotations

import collections
import json
import socket
import struct
from typing import Any, Callable, Counter, Dict, List, Optional, Protocol, Tuple

from hpcnode import protocol
from hpcnode.awaited import Awaited
from hpcnode.loop import Loop, Stream
from hpcnode.progress import Progresses

FIRST_FRAME_S = 10.0
LOOK_S = 1.0  # between looks whether those who may come back still live
MAX_FRAME_BYTES = 4 << 20
MAX_UNSENT_BYTES = 256 << 20
MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_OF_USER = 512
_CREDENTIALS = struct.Struct("3i")
_HEADER_BYTES = 8


def peer(sock: socket.socket) -> Tuple[int, int]:
    """Return (pid, uid) of the process that made this connection, as the kernel noted it then."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid


Frames = List[Tuple[protocol.Message, bytes]]


class BoundedFramer(protocol.Framer):
    """A framer that refuses a frame longer than an untrusted peer needs."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.partial_bytes = 0

    def feed_all(self, data: bytes) -> Frames:
        """Return what is complete after `data`. Raises WireError."""
        frames = list(self.feed(data))
        self.partial_bytes = 0 if frames else self.partial_bytes + len(data)
        if self.partial_bytes > self.limit:
            raise protocol.WireError("cannot read a frame of more than %d bytes" % self.limit)
        return frames


class Home(Protocol):
    """What the clients need of the agent."""

    node: str

    def to_controller(self, message: protocol.Message, blob: bytes = b"") -> bool: ...
    def job_runs_here(self, job_id: int, uid: int) -> Optional[int]: ...
    def owns_stream(self, token: str, stream: int) -> bool: ...
    def to_shepherd(self, token: str, words: List[Any], blob: bytes) -> None: ...
    def send_again(self, stream: int) -> None: ...
    def take_over(self, stream: Stream, uid: int, frames: Frames, framer: BoundedFramer) -> bool: ...


class Client:
    """One connection of a step command."""

    def __init__(self, number: int, pid: int, uid: int) -> None:
        self.number = number
        self.pid = pid
        self.uid = uid
        self.job_id = 0
        self.attempt = 0
        self.asked = False  # it has sent its request
        self.asks_api = False  # and that was one to the API
        self.unsent: Optional[protocol.StepRequest] = None  # its request, which no controller has been told yet
        self.answered = False  # the controller has said something to it
        self.started = False  # it was told StepStarted, so output may come
        self.early: List[Tuple[protocol.Message, bytes]] = []
        self.stream: Optional[Stream] = None
        self.framer = BoundedFramer(MAX_FRAME_BYTES)


class Clients:
    """All step commands that are connected to this agent."""

    def __init__(self, loop: Loop, home: Home, first_number: int, awaited: Awaited, log: Callable[[str], None]) -> None:
        self._loop = loop
        self._home = home
        self._awaited = awaited
        self._log = log
        self._next = first_number  # never used before on this node: a stale answer finds nobody
        self._clients: Dict[int, Client] = {}
        self._of_user: Counter[int] = collections.Counter()
        self._closed_unseen: List[int] = []  # closed while no controller listened
        self._progresses = Progresses(loop, home)
        if len(awaited):
            loop.later(LOOK_S, self._look_for_awaited)

    def __len__(self) -> int:
        return len(self._clients)

    def accept(self, sock: socket.socket) -> None:
        """Take a new connection; what it is shows in its first frame."""
        pid, uid = peer(sock)
        if len(self._clients) >= MAX_CONNECTIONS or self._of_user[uid] >= MAX_CONNECTIONS_OF_USER:
            self._log("connection of uid %d refused: too many" % uid)
            sock.close()
            return
        client = Client(self._next, pid, uid)
        self._next += 1
        self._clients[client.number] = client
        self._of_user[uid] += 1
        client.stream = Stream(self._loop, sock, lambda data: self._received(client, data))
        self._loop.later(FIRST_FRAME_S, lambda: self._check_asked(client))

    def to_stream(self, number: int, message: protocol.Message, blob: bytes) -> bool:
        """Deliver what the controller says to one of them; False if it is gone for good.

        What is said to one that may come back is dropped: it is asked for again then.
        """
        client = self._clients.get(number)
        if client is None or client.stream is None:
            return number in self._awaited
        client.answered = True
        if isinstance(message, protocol.Output) and not client.started:
            client.early.append((message, blob))
            return True
        self._deliver(client, message, blob)
        if isinstance(message, protocol.StepStarted) and not client.started:
            client.started = True
            early, client.early = client.early, []
            for output, data in early:
                self._deliver(client, output, data)
        return True

    def output(self, number: int, message: protocol.Message, blob: bytes) -> None:
        """Deliver output of a step whose tasks run on this very node."""
        client = self._clients.get(number)
        if client is None:
            return  # it may come back, and asks for it then; or the controller is told that it went, and ends the step
        if client.started:
            self._deliver(client, message, blob)
        else:
            client.early.append((message, blob))

    def close(self, number: int) -> None:
        """The controller is done with it."""
        client = self._clients.get(number)
        if client is not None and client.stream is not None:
            client.stream.close_when_sent()
            self._forget(client)

    def controller_came(self) -> None:
        """Say what went unsaid, and ask for what may have been lost with the last connection, or controller."""
        self._progresses.controller_came()
        for number in self._closed_unseen:
            self._home.to_controller(protocol.CloseStream(number))
        self._closed_unseen.clear()
        for client in tuple(self._clients.values()):
            if client.unsent is not None:
                if self._pass_on(client, client.unsent, b""):
                    client.unsent = None
            elif client.asks_api:
                if not client.answered:
                    self._refuse(client, 503, "the connection to it broke before it answered")
            elif client.asked:
                self._ask_after(client)

    def controller_went(self) -> None:
        """Listen to them again when there is one to tell."""
        for client in self._clients.values():
            if client.asked and client.unsent is None and client.stream is not None:
                client.stream.pause(True)

    # ----- one client

    def _received(self, client: Client, data: bytes) -> None:
        if not data:
            self._left(client)
            return
        try:
            frames = client.framer.feed_all(data)
            while frames:
                if not client.asked and self._is_controller(client, frames):
                    return
                self._said(client, *frames.pop(0))
        except protocol.WireError as error:
            self._log("connection of uid %d closed: %s" % (client.uid, error))
            self._deliver(client, protocol.Goodbye(str(error)), b"")
            self._leave(client)

    def _is_controller(self, client: Client, frames: Frames) -> bool:
        """Whether it begins as a controller does: then the agent takes the connection over, with what came already."""
        assert client.stream is not None
        if not isinstance(frames[0][0], protocol.Hello):
            return False
        if self._home.take_over(client.stream, client.uid, frames, client.framer):
            self._forget(client)
        else:
            self._leave(client)
        return True

    def _said(self, client: Client, message: protocol.Message, blob: bytes) -> None:
        if isinstance(message, protocol.StepRequest):
            self._request(client, message)
        elif isinstance(message, protocol.StepBack):
            self._came_back(client, message)
        elif isinstance(message, protocol.ApiRequest):
            self._ask(client, message, blob)
        elif isinstance(message, protocol.Ping):  # is anybody there? `attach` asks before it lets the controller speak
            self._deliver(client, protocol.Pong(message.request), b"")
        elif isinstance(message, (protocol.Progress, protocol.Failure)) and not client.asked:
            self._progresses.note(client.uid, message)
            self._leave(client)  # one is enough: who has news comes again
        elif not client.asked:
            raise protocol.WireError("cannot begin with %s" % type(message).__name__)
        elif isinstance(message, (protocol.Input, protocol.OutputAck)) and self._home.owns_stream(
            message.token, client.number
        ):
            self._home.to_shepherd(message.token, _words(message), blob)
        elif isinstance(message, (protocol.Input, protocol.OutputAck, protocol.StepSignal)):
            self._pass_on(client, message, blob)
        else:
            raise protocol.WireError("a step command cannot say %s" % type(message).__name__)

    def _request(self, client: Client, request: protocol.StepRequest) -> None:
        if client.asked:
            raise protocol.WireError("a connection asks for one step only")
        client.asked = True
        if request.job_id:
            attempt = self._home.job_runs_here(request.job_id, client.uid)
            if attempt is None:
                why = "cannot start a step: job %d does not run on this node as uid %d" % (request.job_id, client.uid)
                self._deliver(client, protocol.StepEnded([], [], why), b"")
                self._leave(client)
                return
            client.job_id, client.attempt = request.job_id, attempt
        try:
            self._awaited.note(client.number, client.pid, client.uid, client.job_id, client.attempt)
        except OSError as error:
            why = "cannot start a step: this node cannot keep that it was asked for: %s" % error.strerror
            self._deliver(client, protocol.StepEnded([], [], why), b"")
            self._leave(client)
            return
        if not self._pass_on(client, request, b""):
            client.unsent = request
            text = "this node's controller is away: the step waits for it"
            self._deliver(client, protocol.StepWaiting(request.job_id, text), b"")

    def _came_back(self, client: Client, said: protocol.StepBack) -> None:
        """Give a step command the stream that it had with an agent before us."""
        if client.asked:
            raise protocol.WireError("a connection comes back once, and first")
        asker = self._awaited.back(client.pid, client.uid)
        if asker is not None:
            del self._clients[client.number]
            client.number, client.job_id, client.attempt = asker.number, asker.job_id, asker.attempt
            client.asked, client.started = True, said.started
            self._clients[client.number] = client
            self._ask_after(client)
            self._home.send_again(client.number)
            return
        never_told = not said.started and self._awaited.sees(
            client.pid
        )  # the agent ended before it had read the request
        why = "the agent before this one had closed it"
        self._deliver(client, protocol.StepEnded([], [], again=True) if never_told else protocol.Goodbye(why), b"")
        self._leave(client)

    def _ask_after(self, client: Client) -> None:
        """Ask the controller what has become of what a step command had asked for; it listens when one is there."""
        assert client.stream is not None
        there = self._pass_on(client, protocol.StepAsked(), b"")
        client.stream.pause(not there)
        if there and client.started:
            self._deliver(client, protocol.StepWaiting(client.job_id, ""), b"")

    def _look_for_awaited(self) -> None:
        """Say of those who might have come back and have ended that they are gone."""
        for number in self._awaited.look():
            self._gone(number)
        if len(self._awaited):
            self._loop.later(LOOK_S, self._look_for_awaited)

    def _ask(self, client: Client, request: protocol.ApiRequest, blob: bytes) -> None:
        """Pass on a question of a command that runs in a job here; nobody waits for a controller that is away."""
        if client.asked:
            raise protocol.WireError("a connection asks once")
        attempt = self._home.job_runs_here(request.job_id, client.uid)
        client.job_id, client.attempt = request.job_id, attempt or 0
        if attempt is None:
            self._refuse(client, 403, "job %d does not run on this node as uid %d" % (request.job_id, client.uid))
            return
        client.asked = client.asks_api = True
        if not self._pass_on(client, request, blob):
            client.asked = False
            self._refuse(client, 503, "this node's controller is away")

    def _refuse(self, client: Client, status: int, why: str) -> None:
        kind = "UnavailableError" if status == 503 else "PermissionDeniedError"
        body = json.dumps({"error": "cannot ask the controller: " + why, "kind": kind}).encode()
        self._deliver(client, protocol.ApiAnswer(status, {}), body)
        self._leave(client)

    def _pass_on(self, client: Client, message: protocol.Message, blob: bytes) -> bool:
        inner = protocol.to_json(message)
        frame = protocol.FromStream(client.number, client.uid, client.job_id, client.attempt, inner)
        return self._home.to_controller(frame, blob)

    def _deliver(self, client: Client, message: protocol.Message, blob: bytes) -> None:
        if client.stream is None or client.stream.closed:
            return
        if client.stream.unsent > MAX_UNSENT_BYTES:
            self._log("connection of uid %d closed: it does not read" % client.uid)
            client.stream.close()
            self._left(client)
            return
        client.stream.send(protocol.encode(message, blob))

    def _check_asked(self, client: Client) -> None:
        if not client.asked and client.number in self._clients:
            assert client.stream is not None
            client.stream.close()
            self._forget(client)

    def _leave(self, client: Client) -> None:
        """Close it as soon as it has what was said to it."""
        if client.stream is not None:
            client.stream.close_when_sent()
        self._left(client)

    def _left(self, client: Client) -> None:
        if client.number not in self._clients:
            return
        self._forget(client)
        if client.asked and client.unsent is None:
            self._gone(client.number)

    def _gone(self, number: int) -> None:
        if not self._home.to_controller(protocol.CloseStream(number)):
            self._closed_unseen.append(number)

    def _forget(self, client: Client) -> None:
        if self._clients.pop(client.number, None) is not None:
            if client.asked and not client.asks_api:
                self._awaited.closed(client.number)
            self._of_user[client.uid] -= 1
            if not self._of_user[client.uid]:
                del self._of_user[client.uid]


def _words(message: Any) -> List[Any]:
    if isinstance(message, protocol.Input):
        return ["input", message.task, message.offset, message.eof]
    return ["taken", message.task, message.fd, message.offset]
