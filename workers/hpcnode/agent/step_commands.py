"""The step commands of this node's jobs (hrun, hrsh) at the agent's socket: who they are, and what passes to and fro.

Rules: who speaks is what the kernel says (SO_PEERCRED); a command speaks for a job only if that job runs here as the same
user. They are not trusted: frames, memory and connections are bounded, and a slow one delays only itself. What they say goes
to the controller, except what belongs to a token of this node: that goes straight to its shepherd.

They outlive their agent: who had asked the one before it comes back with `StepBack` and has its stream again (see `awaited`).

A training program says on a connection of its own how far it is (see `progress`); it is not answered.

It does not know what steps are allowed: that is the controller's.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
from typing import Callable, Dict, List, NamedTuple, Optional, Protocol, Tuple, Union

from hpcnode.agent.training_progress import Progresses
from hpcnode.os import process
from hpcnode.os.durable import read_object, to_bytes, write_plainly
from hpcnode.os.loop import Loop, Stream
from hpcnode.os.process import boot_clock_s
from hpcnode.wire import protocol
from hpcnode.wire.connection_limits import Bounds, ConnectionLimits
from hpcnode.wire.shepherd_messages import OutputTaken, TaskInput

# ----- which step commands have asked an agent for something, on disk: they may come back to the agent after it
# A file for each stream, named by its number, from before anybody is told of the request until the stream is closed. It must
# outlive the agent, not a crash of the machine, which no step command survives. A stream belongs to one process, and nobody
# else can have it: not another of the same user, nor one that has got its pid. It does not know what was asked for.


class ResumableClient(NamedTuple):
    """The process that asked on a stream, and the job that it did so for."""

    number: int
    who: process.Identity
    uid: int
    job_id: int
    attempt: int


class ResumableClients:
    """Who asked this agent, and whom of those that asked the one before it may still expect."""

    def __init__(self, root: str, boot_id: str) -> None:
        self._folder = os.path.join(root, "streams")
        self._boot_id = boot_id
        self._awaited: Dict[int, ResumableClient] = {}
        os.makedirs(self._folder, 0o700, exist_ok=True)
        for name in os.listdir(self._folder):
            if name.isdigit():
                self._recover(int(name))
        self.look()

    def __contains__(self, number: int) -> bool:
        return number in self._awaited

    def __len__(self) -> int:
        return len(self._awaited)

    def note(self, number: int, pid: int, uid: int, job_id: int, attempt: int) -> None:
        """Keep on disk who asks on this stream. Raises OSError: then it must not ask, for it could not come back."""
        who = process.identify(pid, self._boot_id)
        if who is not None:  # else it has gone already, or is where we see no processes of
            record = {"who": who, "uid": uid, "job_id": job_id, "attempt": attempt}
            write_plainly(self._path(number), to_bytes(record), 0o600)

    def closed(self, number: int) -> None:
        """The stream is no more."""
        try:
            os.unlink(self._path(number))
        except FileNotFoundError:
            pass

    def back(self, pid: int, uid: int) -> Optional[ResumableClient]:
        """Return what this process, which is here again, asked for last; None: nothing that is known."""
        who = process.identify(pid, self._boot_id)
        last = max((each for each in self._awaited.values() if (each.who, each.uid) == (who, uid)), default=None)
        return self._awaited.pop(last.number) if last is not None else None

    def sees(self, pid: int) -> bool:
        """Whether this process would have been noted, had it asked."""
        return process.identify(pid, self._boot_id) is not None

    def look(self) -> List[int]:
        """Return the streams whose processes have ended since: nobody comes back to them."""
        gone = [each.number for each in self._awaited.values() if not process.is_alive(each.who, self._boot_id)]
        for number in gone:
            del self._awaited[number]
            self.closed(number)
        return gone

    def _recover(self, number: int) -> None:
        record = read_object(self._path(number))
        if record is None:  # cut off: nobody was told of it
            self.closed(number)
            return
        who = process.Identity(*record["who"])
        self._awaited[number] = ResumableClient(number, who, record["uid"], record["job_id"], record["attempt"])

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))


FRAME_S = 30.0  # in which the first frame must be complete, and each frame that has begun
FRAME_LOOK_S = 10.0  # between looks for one that has begun
LOOK_S = 1.0  # between looks whether those who may come back still live
MAX_CONNECTIONS = 2048
# Of one account, and of all: bytes that it has not read, and bytes of frames that are not complete.
UNREAD_BYTES, ALL_UNREAD_BYTES = 64 << 20, 256 << 20
UNPARSED_BYTES, ALL_UNPARSED_BYTES = 16 << 20, 64 << 20
_CREDENTIALS = struct.Struct("3i")


def peer(sock: socket.socket) -> Tuple[int, int]:
    """Return (pid, uid) of the process that made this connection, as the kernel noted it then."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid


Frames = List[Tuple[protocol.Message, bytes]]


def bounds() -> Bounds:
    """Return what connections may have. Half of the files that this process may open are for the steps."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(1, min(MAX_CONNECTIONS, files // 2))
    return Bounds(
        connections=max(1, most // 4),
        all_connections=most,
        unread_bytes=UNREAD_BYTES,
        all_unread_bytes=ALL_UNREAD_BYTES,
        unparsed_bytes=UNPARSED_BYTES,
        all_unparsed_bytes=ALL_UNPARSED_BYTES,
    )


class AgentServices(Protocol):
    """What the clients need of the agent."""

    node: str

    def to_controller(self, message: protocol.Message, blob: bytes = b"") -> bool: ...
    def job_runs_here(self, job_id: int, uid: int) -> Optional[int]: ...
    def owns_stream(self, token: str, stream: int) -> bool: ...
    def to_shepherd(self, token: str, message: protocol.Message, blob: bytes = b"") -> None: ...
    def send_again(self, stream: int) -> None: ...
    def take_over(
        self, stream: Stream, uid: int, hello: protocol.Hello, frames: Frames, framer: protocol.Framer
    ) -> bool: ...


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
        self.ended = False  # it was told StepEnded
        self.heard_s = boot_clock_s()  # when the frame that is coming began
        self.framer = protocol.Framer(protocol.MAX_COMMAND_BYTES, protocol.MAX_COMMAND_VALUES)
        self.on_drop: Callable[[], None] = lambda: None

    @property
    def is_busy(self) -> bool:
        return self.asked and not self.ended

    @property
    def is_lasting(self) -> bool:
        return self.is_busy

    @property
    def unread_bytes(self) -> int:
        return self.stream.unsent if self.stream is not None else 0

    def drop(self) -> None:
        """End the connection now."""
        self.on_drop()


class Clients:
    """All step commands that are connected to this agent."""

    def __init__(
        self, loop: Loop, home: AgentServices, first_number: int, awaited: ResumableClients, log: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._home = home
        self._awaited = awaited
        self._log = log
        self._next = first_number  # never used before on this node: a stale answer finds nobody
        self._clients: Dict[int, Client] = {}
        self._crowd = ConnectionLimits(bounds())
        self._closed_unseen: List[int] = []  # closed while no controller listened
        self._progresses = Progresses(loop, home)
        if len(awaited):
            loop.later(LOOK_S, self._look_for_awaited)

    def __len__(self) -> int:
        return len(self._clients)

    def accept(self, sock: socket.socket) -> None:
        """Take a new connection; what it is shows in its first frame."""
        pid, uid = peer(sock)
        client = Client(self._next, pid, uid)
        if not self._crowd.comes(uid, client):
            self._log("connection of uid %d refused: too many" % uid)
            sock.close()
            return
        self._next += 1
        self._clients[client.number] = client
        client.on_drop = lambda: self._dropped(client)
        client.stream = Stream(self._loop, sock, lambda data: self._received(client, data))
        client.stream.what = "a connection of uid %d" % uid
        self._loop.later(FRAME_S, lambda: self._check_asked(client))

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
        if isinstance(message, protocol.StepEnded):
            client.ended = True
            if message.never_ran:
                self._leave(client)
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
        self._crowd.is_heard(client.uid, client)
        if not client.framer.pending_bytes:
            client.heard_s = boot_clock_s()
        try:
            frames = list(client.framer.feed(data))
            if not self._crowd.may_hold(client.uid, client, client.framer.pending_bytes):
                raise protocol.WireError("uid %d sends too much at once" % client.uid)
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
        hello = frames[0][0]
        if not isinstance(hello, protocol.Hello):
            return False
        if self._home.take_over(client.stream, client.uid, hello, frames[1:], client.framer):
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
            self._home.to_shepherd(message.token, _for_shepherd(message), blob)
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
        frame = protocol.encode(message, blob)
        if not self._crowd.may_send(client.uid, client, len(frame)):
            self._log("connection of uid %d closed: it does not read" % client.uid)
            self._dropped(client)
            return
        client.stream.send(frame)

    def _dropped(self, client: Client) -> None:
        if client.stream is not None:
            client.stream.close()
        self._left(client)

    def _check_asked(self, client: Client) -> None:
        """Close a connection whose first frame, or one that has begun, is not complete in time."""
        if self._clients.get(client.number) is not client:
            return
        is_due = not client.asked or client.framer.pending_bytes
        left_s = FRAME_S - (boot_clock_s() - client.heard_s) if is_due else FRAME_LOOK_S
        if left_s <= 0:
            self._dropped(client)
        else:
            self._loop.later(left_s, lambda: self._check_asked(client))

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
            self._crowd.goes(client.uid, client)


def _for_shepherd(message: Union[protocol.Input, protocol.OutputAck]) -> protocol.Message:
    if isinstance(message, protocol.Input):
        return TaskInput(message.task, message.offset, message.eof)
    return OutputTaken(message.task, message.fd, message.offset)
