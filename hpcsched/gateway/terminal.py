"""Show a terminal in a running job.

The screen is kept here, and the browser gets the lines that change, as texts.

The output of the job is hostile. Only the sequences of a simple terminal reach the screen, and none reaches the browser: titles,
links, the clipboard and all other strings are dropped. `pyte` keeps the screen. A WebSocket of the gateway's own origin carries
keys and lines (`wsproto`); it needs the session, as every request, and the Origin of the gateway's own pages.

Rules: what a screen, a sequence or a character takes is bounded. The job's output waits until the screen has taken it, at most
`RATE_BYTES` in a second, and a browser that does not read holds it up. All terminals together take at most half of the
gateway's time.

Sources: ECMA-48, console_codes(4), RFC 6455 (WebSockets).
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import time
import unicodedata
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import pyte
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from wcwidth import wcwidth
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.events import Request as Handshake
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from hpcnode.commands.pty import TYPED, WINDOW_SIZE, frame
from hpcnode.commands.pty import WINDOW as WINDOW_KIND
from hpcsched.gateway.app import GatewayApp, ProblemError, own_origin
from hpcsched.gateway.site import Site, refused
from hpcsched.gateway.streams import WRITE_S, JobStep, until_one_ends

MAX_ROWS, MAX_COLUMNS = 100, 300
MAX_MESSAGE_CHARS = 64 << 10  # of a browser
RATE_BYTES = 256 << 10
PIECE_CHARS = 2_000  # between two turns of the event loop
SHOW_S = 0.04  # between two pictures
READ_BYTES = 16 << 10
MAX_SAVED = 10  # cursors
MAX_ANSWER_CHARS = 1_000  # to the job
MAX_MARKS = 2  # on a character
_PATH = re.compile(r"/job/([^/]{1,4000})/terminal/socket\Z")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,1000}")
_SEQUENCE = re.compile(r"\x1b\[[0-?]{0,60}[ -/]{0,4}[@-~]")
_BEGUN = re.compile(r"\x1b\[[0-?]{0,60}[ -/]{0,4}\Z")
_KNOWN = re.compile(r"\x1b\[\??[0-9;]*[@A-Za-z`]\Z")
_STRING_END = re.compile(r"\x07|\x1b\\|\x9c|\x18|\x1a")
_STRINGS = "]PX^_"  # after ESC: title, clipboard, links, and other strings
_ESCAPES = "78DEMHc"  # after ESC: save and restore the cursor, lines, tabs, reset
_CONTROLS = "\x08\t\n\x0b\x0c\r"
_COLOURS = frozenset(("black", "red", "green", "brown", "blue", "magenta", "cyan", "white"))


class SequenceReader:
    """Splits output into texts and sequences that the screen knows; drops all others."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self._in_string = False

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield texts and sequences, each whole."""
        text, at = self._rest + self._decode(data), 0
        self._rest = ""
        while at < len(text):
            if self._in_string:
                end = _STRING_END.search(text, at)
                if end is None:
                    self._rest = "\x1b" if text.endswith("\x1b") else ""
                    return
                self._in_string, at = False, end.end()
                continue
            plain = _PLAIN.match(text, at)
            if plain is not None:
                at = plain.end()
                yield plain[0] if plain[0].isascii() else drawable(plain[0])
                continue
            size, token = self._control(text, at)
            if not size:
                self._rest = text[at:]
                return
            at += size
            if token:
                yield token

    def _control(self, text: str, at: int) -> tuple[int, str]:
        """Return how many characters a control has, 0: it is not whole, and what is drawn."""
        char = text[at]
        if char in "\x9d\x90\x98\x9e\x9f":
            self._in_string = True
        if char != "\x1b":
            return 1, char if char in _CONTROLS else ""
        if at + 1 == len(text):
            return 0, ""
        second = text[at + 1]
        if second == "[":
            whole = _SEQUENCE.match(text, at)
            if whole is not None:
                return len(whole[0]), whole[0] if _KNOWN.match(whole[0]) else ""
            return (0, "") if _BEGUN.match(text, at) else (2, "")
        if second in _STRINGS:
            self._in_string = True
        if second in "()#%":
            return (3, "") if at + 2 < len(text) else (0, "")
        return 2, text[at : at + 2] if second in _ESCAPES else ""


def drawable(text: str) -> str:
    """Return a text without characters that take no place, except a few marks on others."""
    kept, marks = [], MAX_MARKS
    for char in text:
        if wcwidth(char) > 0:
            marks = 0
        elif marks < MAX_MARKS and unicodedata.combining(char):
            marks += 1
        else:
            continue
        kept.append(char)
    return "".join(kept)


class _Screen(pyte.Screen):
    """A screen that keeps its answers to the job: where is the cursor, what are you."""

    answers = ""

    def write_process_input(self, data: str) -> None:
        self.answers = (self.answers + data)[:MAX_ANSWER_CHARS]


class TerminalScreen:
    """A screen, and which of its lines have changed."""

    def __init__(self, rows: int, columns: int) -> None:
        self._screen = _Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        self._reader = SequenceReader()
        self._shown: dict[int, list[list[str]]] = {}
        self._cursor_row = 0

    def take_answers(self) -> str:
        """Return what the job is told since the last call."""
        answers, self._screen.answers = self._screen.answers, ""
        return answers

    def tokens(self, data: bytes) -> Iterator[str]:
        """Draw output; yield what was drawn, so that others may have a turn."""
        for token in self._reader.feed(data):
            try:
                self._stream.feed(token)
            except (TypeError, ValueError, IndexError, KeyError, AssertionError):
                pass  # parameters that the sequence does not have
            del self._screen.savepoints[:-MAX_SAVED]
            yield token

    def resize(self, rows: int, columns: int) -> None:
        self._screen.resize(rows, columns)
        self._shown.clear()

    @property
    def has_application_keys(self) -> bool:
        """Whether the job wants other sequences for the arrow keys (DECCKM)."""
        return 1 << 5 in self._screen.mode

    def changes(self) -> dict[str, Any]:
        """Return the lines that differ from those that were returned before."""
        screen = self._screen
        cursor = None if screen.cursor.hidden else (screen.cursor.y, min(screen.cursor.x, screen.columns - 1))
        may_differ = screen.dirty | {self._cursor_row, screen.cursor.y}
        self._cursor_row = screen.cursor.y
        changed: dict[str, list[list[str]]] = {}
        for y in range(screen.lines):
            if y in may_differ or y not in self._shown:
                runs = _runs(screen, y, cursor)
                if self._shown.get(y) != runs:
                    changed[str(y)] = self._shown[y] = runs
        screen.dirty.clear()
        return {"size": screen.lines, "rows": changed, "application": self.has_application_keys} if changed else {}


def _runs(screen: pyte.Screen, y: int, cursor: tuple[int, int] | None) -> list[list[str]]:
    """Return a line as texts with their styles, the names of classes."""
    runs: list[list[str]] = []
    line = screen.buffer[y]
    used = max(line, default=-1)
    at = cursor[1] if cursor is not None and cursor[0] == y else -1
    for x in range(min(max(used, at) + 1, screen.columns)):
        char = line[x]
        style = _style(char) + (" cursor" if x == at else "")
        if runs and runs[-1][1] == style:
            runs[-1][0] += char.data
        else:
            runs.append([char.data, style])
    while runs and not runs[-1][1] and not runs[-1][0].strip():
        runs.pop()
    return runs


def _style(char: Any) -> str:
    words = [name for name in ("bold", "italics", "underscore", "reverse") if getattr(char, name)]
    for prefix, colour in (("fg-", char.fg), ("bg-", char.bg)):
        name = colour.removeprefix("bright")
        if name in _COLOURS:
            words.append(prefix + name)
    return " ".join(words)


class Typed(NamedTuple):
    """What a browser says: keys, or the new size of the window."""

    keys: str = ""
    rows: int = 0
    columns: int = 0


def read_typed(text: str) -> Typed:
    """Return a message of a browser. Raises ValueError."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not an object")
    keys, size = values.get("keys", ""), values.get("size", [0, 0])
    if not isinstance(keys, str) or not isinstance(size, list) or len(size) != 2:
        raise ValueError("neither keys nor a size")
    rows, columns = size
    if not all(type(one) is int for one in size) or not (0 <= rows <= MAX_ROWS and 0 <= columns <= MAX_COLUMNS):
        raise ValueError("not a size")
    return Typed(keys, rows, columns)


class Terminals:
    """The pages with terminals, and their WebSockets."""

    def __init__(self, app: GatewayApp, site: Site, steps_socket: str) -> None:
        self._app, self._site, self._socket = app, site, steps_socket
        self._turns = asyncio.Lock()  # of drawing

    def routes(self) -> list[Route]:
        """Return the routes for the ASGI application."""
        return self._site.routes({"/job/{job}/terminal": self.page})

    async def page(self, request: Request) -> Response:
        """Show a terminal in the first node of a job, or in another one."""
        job = request.path_params["job"]
        found = await self._site.load(request, {"answer": f"/v1/job/{quote(job, safe='')}"})
        return self._site.page(request, "terminal.html", {**found, "job": found["answer"]["jobs"][0]})

    def job_of(self, request: Request) -> str:
        """Return the job whose terminal a WebSocket asks for, "" if it asks for something else."""
        match = _PATH.match(request.scope["raw_path"].decode("ascii"))
        return unquote(match[1]) if match is not None else ""

    async def serve(
        self, request: Request, job: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Open a terminal, and serve it to its end.

        Raises ProblemError, UpstreamError, StreamError.
        """
        if request.headers.get("origin") != own_origin(request):
            raise ProblemError(403, "cannot open the terminal: a page of another origin asks for it")
        self._app.admit(request)
        asked = {"job": job, "terminal": True, "rows": 24, "columns": 80, "node": request.query_params.get("node", "")}
        reply = await self._app.forward(request, "POST", "/v1/reach", json.dumps(asked).encode())
        if reply.status != 200:
            raise refused(reply)
        step = await JobStep.open(self._socket, str(json.loads(reply.body)["key"]), holds=True)
        try:
            await TerminalSession(request, step, reader, writer, self._turns).run()
        finally:
            step.close()


class TerminalSession:
    """One terminal in one browser."""

    def __init__(
        self,
        request: Request,
        step: JobStep,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        turns: asyncio.Lock,
    ) -> None:
        self._request, self._step, self._reader, self._writer = request, step, reader, writer
        self._turns = turns
        self._socket = WSConnection(ConnectionType.SERVER)
        self._screen = TerminalScreen(24, 80)
        self._output: list[bytes] = []
        self._has_news = asyncio.Event()
        self._heard_s = time.monotonic()
        self._typed = ""
        step.on_output, step.on_end = self._take_output, lambda why: self._has_news.set()

    async def run(self) -> None:
        """Serve until the step or the browser is gone, or both are silent for too long.

        Raises ProblemError.
        """
        await self._shake_hands()
        for result in await until_one_ends([self._from_browser(), self._to_browser()], lambda: self._heard_s):
            if isinstance(result, Exception) and not isinstance(result, OSError | TimeoutError | RemoteProtocolError):
                raise result

    async def _shake_hands(self) -> None:
        raw: list[tuple[bytes, bytes]] = self._request.headers.raw
        lines = [b"GET " + self._request.scope["raw_path"] + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in raw if name != b"sec-websocket-extensions"]
        try:
            self._socket.receive_data(b"\r\n".join(lines) + b"\r\n\r\n")
            if not any(isinstance(event, Handshake) for event in self._socket.events()):
                raise ProblemError(400, "cannot open the terminal: this is no handshake of a WebSocket")
            self._send(AcceptConnection())
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise ProblemError(400, f"cannot open the terminal: {error}") from None

    def _send(self, event: Event) -> None:
        self._writer.write(self._socket.send(event))

    def _say(self, event: Event) -> None:
        """Send an event, unless one side has closed the WebSocket."""
        with suppress(LocalProtocolError):
            self._send(event)

    # ----- from the browser

    async def _from_browser(self) -> None:
        while data := await self._reader.read(READ_BYTES):
            self._heard_s = time.monotonic()
            self._socket.receive_data(data)
            for event in self._socket.events():
                if not self._hear(event):
                    return
            await self._step.drained()

    def _hear(self, event: Event) -> bool:
        """Take an event of the WebSocket; return whether it may go on."""
        match event:
            case Ping():
                self._say(event.response())
            case TextMessage():
                self._typed += event.data
                if len(self._typed) > MAX_MESSAGE_CHARS:
                    self._say(CloseConnection(code=1009, reason="too long"))
                    return False
                if event.message_finished:
                    text, self._typed = self._typed, ""
                    return self._type(text)
            case CloseConnection():
                self._say(event.response())
                return False
            case BytesMessage():
                self._say(CloseConnection(code=1003, reason="texts only"))
                return False
        return True

    def _type(self, text: str) -> bool:
        try:
            typed = read_typed(text)
        except (ValueError, RecursionError):
            self._say(CloseConnection(code=1008, reason="neither keys nor a size"))
            return False
        if typed.keys:
            self._step.send(frame(TYPED, typed.keys.encode("utf-8", "replace")))
        if typed.rows and typed.columns:
            self._screen.resize(typed.rows, typed.columns)
            self._step.send(frame(WINDOW_KIND, WINDOW_SIZE.pack(typed.rows, typed.columns)))
            self._has_news.set()
        return True

    # ----- to the browser

    def _take_output(self, data: bytes) -> None:
        self._output.append(data)
        self._has_news.set()

    async def _to_browser(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            output, self._output = b"".join(self._output), []
            await self._draw(output)
            async with self._turn():
                if changes := self._screen.changes():
                    self._say(TextMessage(data=json.dumps(changes)))
            is_over = self._step.why_over is not None and not self._output
            if is_over:
                self._say(TextMessage(data=json.dumps({"end": f"The terminal has ended: {self._step.why_over}"})))
                self._say(CloseConnection(code=1000))
            async with asyncio.timeout(WRITE_S):
                await self._writer.drain()
            if is_over:
                return
            await asyncio.sleep(SHOW_S)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for a turn to use processor time: all terminals take half of it at most."""
        async with self._turns:
            turn_s = time.monotonic()
            yield
            await asyncio.sleep(time.monotonic() - turn_s)

    async def _draw(self, output: bytes) -> None:
        """Draw output on the screen, and have the next sent, at a bounded rate."""
        if not output:
            return
        self._heard_s = begun_s = time.monotonic()
        tokens = self._screen.tokens(output)
        is_whole = False
        while not is_whole:
            async with self._turn():
                drawn = 0
                while drawn < PIECE_CHARS and not is_whole:
                    token = next(tokens, None)
                    is_whole, drawn = token is None, drawn + len(token or "")
        if answers := self._screen.take_answers():
            self._step.send(frame(TYPED, answers.encode()))
        await asyncio.sleep(max(0.0, len(output) / RATE_BYTES - (time.monotonic() - begun_s)))
        self._step.acknowledge()
