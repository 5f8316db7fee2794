"""The step commands of this node's jobs (hrun, hrsh) at the agent's socket.

Rules:
- The kernel tells the user of a connection (SO_PEERCRED). A command speaks for a job only if the job runs here as that user.
- Commands are not trusted: frames, memory and connections are bounded, and a slow command delays only itself.
- Their messages go to the controller, except those for a token of this node, which go to its shepherd.
- They outlive the agent: a client of an earlier agent returns with `StepBack` and gets its stream back (`ResumableClients`).
- A training program reports its progress on a connection of its own and gets no answer (see `training_progress`).

Which steps are allowed is the controller's business.
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

# ----- resumable clients: step commands with a request, on disk, so that they can return to the next agent
# A file for each stream, named by its number. It is written before the request is passed on, and removed when the stream closes.
# It must outlive the agent, but not a crash of the machine, which no step command survives. A stream belongs to one process:
# another process of the same user, or a new process with the same pid, cannot take it.


class ResumableClient(NamedTuple):
    """The process of a stream, and the job that it asked for."""

    number: int
    identity: process.ProcessIdentity
    uid: int
    job_id: int
    attempt: int


class ResumableClients:
    """Step clients of this agent, on disk, and clients of earlier agents that may return."""

    def __init__(self, root: str, boot_id: str) -> None:
        self._folder = os.path.join(root, "streams")
        self._boot_id = boot_id
        self._resumable: Dict[int, ResumableClient] = {}
        os.makedirs(self._folder, 0o700, exist_ok=True)
        for name in os.listdir(self._folder):
            if name.isdigit():
                self._recover(int(name))
        self.look()

    def __contains__(self, number: int) -> bool:
        return number in self._resumable

    def __len__(self) -> int:
        return len(self._resumable)

    def note(self, number: int, pid: int, uid: int, job_id: int, attempt: int) -> None:
        """Write the client of this stream to disk.

        Raises OSError: then its request must be refused.
        """
        identity = process.identify(pid, self._boot_id)
        if identity is not None:  # else it has ended, or is in a pid namespace that we do not see
            record = {"process": identity, "uid": uid, "job_id": job_id, "attempt": attempt}
            write_plainly(self._path(number), to_bytes(record), 0o600)

    def closed(self, number: int) -> None:
        """Remove the file of a closed stream."""
        try:
            os.unlink(self._path(number))
        except FileNotFoundError:
            pass

    def back(self, pid: int, uid: int) -> Optional[ResumableClient]:
        """Return the last stream of this process with an earlier agent, None if there is none."""
        identity = process.identify(pid, self._boot_id)
        last = max(
            (each for each in self._resumable.values() if (each.identity, each.uid) == (identity, uid)), default=None
        )
        return self._resumable.pop(last.number) if last is not None else None

    def sees(self, pid: int) -> bool:
        """Return whether a request of this process would have been written to disk."""
        return process.identify(pid, self._boot_id) is not None

    def look(self) -> List[int]:
        """Drop the streams of ended processes, and return their numbers."""
        gone = [each.number for each in self._resumable.values() if not process.is_alive(each.identity, self._boot_id)]
        for number in gone:
            del self._resumable[number]
            self.closed(number)
        return gone

    def _recover(self, number: int) -> None:
        record = read_object(self._path(number))
        if record is None:  # cut off: its request was not passed on
            self.closed(number)
            return
        identity = process.ProcessIdentity(*record["process"])
        self._resumable[number] = ResumableClient(number, identity, record["uid"], record["job_id"], record["attempt"])

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))


FRAME_S = 30.0  # limit for the first frame, and for each frame that has begun
FRAME_LOOK_S = 10.0  # between checks for a frame that has begun
LOOK_S = 1.0  # between checks whether resumable clients still live
MAX_CONNECTIONS = 2048
# For one account, and for all: bytes that clients have not read, and bytes of incomplete frames.
UNREAD_BYTES, ALL_UNREAD_BYTES = 64 << 20, 256 << 20
UNPARSED_BYTES, ALL_UNPARSED_BYTES = 16 << 20, 64 << 20
_CREDENTIALS = struct.Struct("3i")


def peer(sock: socket.socket) -> Tuple[int, int]:
    """Return (pid, uid) of the process that made this connection, from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid


Frames = List[Tuple[protocol.Message, bytes]]


def bounds() -> Bounds:
    """Return the bounds on connections.

    They leave half of this process's descriptors for the steps.
    """
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
    """The agent, as its clients use it."""

    node: str

    def to_controller(self, message: protocol.Message, blob: bytes = b"") -> bool: ...
    def job_runs_here(self, job_id: int, uid: int) -> Optional[int]: ...
    def owns_stream(self, token: str, stream: int) -> bool: ...
    def to_shepherd(self, token: str, message: protocol.Message, blob: bytes = b"") -> None: ...
    def send_again(self, stream: int) -> None: ...
    def take_over(
        self, client: CommandClient, stream: Stream, hello: protocol.Hello, frames: Frames, framer: protocol.Framer
    ) -> bool: ...


class CommandClient:
    """One connection of a step command."""

    def __init__(self, number: int, pid: int, uid: int) -> None:
        self.number = number
        self.pid = pid
        self.uid = uid
        self.job_id = 0
        self.attempt = 0
        self.asked = False  # it has sent its request
        self.asks_api = False  # its request is for the API
        self.unsent: Optional[protocol.StepRequest] = None  # its request, not passed to a controller yet
        self.answered = False  # the controller has sent it a message
        self.started = False  # it was sent StepStarted, so output may follow
        self.early: List[Tuple[protocol.Message, bytes]] = []
        self.stream: Optional[Stream] = None
        self.ended = False  # it was sent StepEnded
        self.heard_s = boot_clock_s()  # when the incomplete frame began
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
        self,
        loop: Loop,
        home: AgentServices,
        first_number: int,
        resumable: ResumableClients,
        log: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._home = home
        self._resumable = resumable
        self._log = log
        self._next = first_number  # never used before on this node, so a stale answer finds no client
        self._clients: Dict[int, CommandClient] = {}
        self._crowd = ConnectionLimits(bounds())
        self._unreported_closes: List[int] = []  # closed while no controller was connected
        self._progresses = Progresses(loop, home)
        if len(resumable):
            loop.later(LOOK_S, self._look_for_ended_clients)

    def __len__(self) -> int:
        return len(self._clients)

    def accept(self, sock: socket.socket) -> None:
        """Accept a connection. Its first frame tells what it is."""
        pid, uid = peer(sock)
        client = CommandClient(self._next, pid, uid)
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
        """Deliver a message of the controller to a client; return False if the client is gone.

        A message for a resumable client is dropped: the client asks for it again when it returns.
        """
        client = self._clients.get(number)
        if client is None or client.stream is None:
            return number in self._resumable
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
        """Deliver output of tasks that run on this node."""
        client = self._clients.get(number)
        if client is None:
            return  # it returns and asks for it, or the controller hears of its end and ends the step
        if client.started:
            self._deliver(client, message, blob)
        else:
            client.early.append((message, blob))

    def close(self, number: int) -> None:
        """Close a client that the controller has finished with."""
        client = self._clients.get(number)
        if client is not None and client.stream is not None:
            client.stream.close_when_sent()
            self._forget(client)

    def controller_came(self) -> None:
        """Send what waited for a controller, and request again what may have been lost."""
        self._progresses.controller_came()
        for number in self._unreported_closes:
            self._home.to_controller(protocol.CloseStream(number))
        self._unreported_closes.clear()
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
        """Pause all clients until a controller is connected."""
        for client in self._clients.values():
            if client.asked and client.unsent is None and client.stream is not None:
                client.stream.pause(True)

    # ----- one client

    def _received(self, client: CommandClient, data: bytes) -> None:
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
                self._handle(client, *frames.pop(0))
        except protocol.WireError as error:
            self._log("connection of uid %d closed: %s" % (client.uid, error))
            self._deliver(client, protocol.Goodbye(str(error)), b"")
            self._leave(client)

    def _is_controller(self, client: CommandClient, frames: Frames) -> bool:
        """Return whether the client is a controller.

        Then the agent takes over the connection and what came on it.
        """
        assert client.stream is not None
        hello = frames[0][0]
        if not isinstance(hello, protocol.Hello):
            return False
        if self._home.take_over(client, client.stream, hello, frames[1:], client.framer):
            self._forget(client)
        else:
            self._leave(client)
        return True

    def _handle(self, client: CommandClient, message: protocol.Message, blob: bytes) -> None:
        if isinstance(message, protocol.StepRequest):
            self._request(client, message)
        elif isinstance(message, protocol.StepBack):
            self._resume(client, message)
        elif isinstance(message, protocol.ApiRequest):
            self._ask(client, message, blob)
        elif isinstance(message, protocol.Ping):  # `attach` checks that the agent answers
            self._deliver(client, protocol.Pong(message.request), b"")
        elif isinstance(message, (protocol.Progress, protocol.Failure)) and not client.asked:
            self._progresses.note(client.uid, message)
            self._leave(client)  # one message per connection
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

    def _request(self, client: CommandClient, request: protocol.StepRequest) -> None:
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
            self._resumable.note(client.number, client.pid, client.uid, client.job_id, client.attempt)
        except OSError as error:
            why = "cannot start a step: this node cannot record the request: %s" % error.strerror
            self._deliver(client, protocol.StepEnded([], [], why), b"")
            self._leave(client)
            return
        if not self._pass_on(client, request, b""):
            client.unsent = request
            text = "this node is not connected to the controller: the step waits for it"
            self._deliver(client, protocol.StepWaiting(request.job_id, text), b"")

    def _resume(self, client: CommandClient, said: protocol.StepBack) -> None:
        """Give a step command the stream that it had with an earlier agent."""
        if client.asked:
            raise protocol.WireError("StepBack must be the first message of a connection")
        asker = self._resumable.back(client.pid, client.uid)
        if asker is not None:
            del self._clients[client.number]
            client.number, client.job_id, client.attempt = asker.number, asker.job_id, asker.attempt
            client.asked, client.started = True, said.started
            self._clients[client.number] = client
            self._ask_after(client)
            self._home.send_again(client.number)
            return
        never_told = not said.started and self._resumable.sees(
            client.pid
        )  # the earlier agent ended before it read the request
        why = "the previous agent had closed it"
        self._deliver(client, protocol.StepEnded([], [], again=True) if never_told else protocol.Goodbye(why), b"")
        self._leave(client)

    def _ask_after(self, client: CommandClient) -> None:
        """Ask the controller for the state of a client's request.

        Pause the client if none is connected.
        """
        assert client.stream is not None
        there = self._pass_on(client, protocol.StepAsked(), b"")
        client.stream.pause(not there)
        if there and client.started:
            self._deliver(client, protocol.StepWaiting(client.job_id, ""), b"")

    def _look_for_ended_clients(self) -> None:
        """Report resumable clients that have ended."""
        for number in self._resumable.look():
            self._gone(number)
        if len(self._resumable):
            self._loop.later(LOOK_S, self._look_for_ended_clients)

    def _ask(self, client: CommandClient, request: protocol.ApiRequest, blob: bytes) -> None:
        """Pass on an API request of a command in a job here.

        Fail at once if no controller is connected.
        """
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
            self._refuse(client, 503, "this node is not connected to the controller")

    def _refuse(self, client: CommandClient, status: int, why: str) -> None:
        kind = "UnavailableError" if status == 503 else "PermissionDeniedError"
        body = json.dumps({"error": "cannot ask the controller: " + why, "kind": kind}).encode()
        self._deliver(client, protocol.ApiAnswer(status, {}), body)
        self._leave(client)

    def _pass_on(self, client: CommandClient, message: protocol.Message, blob: bytes) -> bool:
        inner = protocol.to_json(message)
        frame = protocol.FromStream(client.number, client.uid, client.job_id, client.attempt, inner)
        return self._home.to_controller(frame, blob)

    def _deliver(self, client: CommandClient, message: protocol.Message, blob: bytes) -> None:
        if client.stream is None or client.stream.closed:
            return
        frame = protocol.encode(message, blob)
        if not self._crowd.may_send(client.uid, client, len(frame)):
            self._log("connection of uid %d closed: it does not read" % client.uid)
            self._dropped(client)
            return
        client.stream.send(frame)

    def _dropped(self, client: CommandClient) -> None:
        if client.stream is not None:
            client.stream.close()
        self._left(client)

    def _check_asked(self, client: CommandClient) -> None:
        """Close a connection whose first frame, or a begun frame, is not complete in time."""
        if self._clients.get(client.number) is not client:
            return
        is_due = not client.asked or client.framer.pending_bytes
        left_s = FRAME_S - (boot_clock_s() - client.heard_s) if is_due else FRAME_LOOK_S
        if left_s <= 0:
            self._dropped(client)
        else:
            self._loop.later(left_s, lambda: self._check_asked(client))

    def _leave(self, client: CommandClient) -> None:
        """Close a client when it has read all messages."""
        if client.stream is not None:
            client.stream.close_when_sent()
        self._left(client)

    def _left(self, client: CommandClient) -> None:
        if client.number not in self._clients:
            return
        self._forget(client)
        if client.asked and client.unsent is None:
            self._gone(client.number)

    def _gone(self, number: int) -> None:
        if not self._home.to_controller(protocol.CloseStream(number)):
            self._unreported_closes.append(number)

    def _forget(self, client: CommandClient) -> None:
        if self._clients.pop(client.number, None) is not None:
            if client.asked and not client.asks_api:
                self._resumable.closed(client.number)
            self._crowd.goes(client.uid, client)


def _for_shepherd(message: Union[protocol.Input, protocol.OutputAck]) -> protocol.Message:
    if isinstance(message, protocol.Input):
        return TaskInput(message.task, message.offset, message.eof)
    return OutputTaken(message.task, message.fd, message.offset)
