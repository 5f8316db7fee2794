"""Read answers of replicas as they pass: usage, and what continues a stream elsewhere.

A replica that can continue streams names each in a header, and says before each event which tokens it is made of
(`hpcserve.api.resumption`). These comments are not passed on. It knows no connections and no replicas.

Rules: a replica may send anything, so that what is kept of an answer is bounded; a stream of which more would be kept passes, but
is not continued.

Sources: OpenAI's API reference; WHATWG HTML (server-sent events).
"""

from __future__ import annotations

import json
from array import array
from typing import Any

Json = dict[str, Any]

STREAM_HEADER = "x-hpcsched-stream"
NEW, RESUMED = "new", "resumed"  # its values in requests; in answers it is the stream's name
MAX_EVENT_BYTES = 1 << 20
MAX_NAME_CHARS = 256
MAX_TOKENS = 1 << 16  # of all choices, that are kept: 4 bytes each
MAX_CHOICES = 256
DONE = b"data: [DONE]"
_TOKENS = b": tokens "
_ERROR = b'data: {"error"'


class SentStream:
    """What a client has of a stream: the tokens of each choice, and which choices are over."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tokens: dict[int, array[int]] = {}
        self._over: set[int] = set()
        self._count = 0
        self.is_whole = len(name) <= MAX_NAME_CHARS  # all tokens are known

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return self._count

    def take(self, text: bytes) -> None:
        """Take what a replica says of the event that follows."""
        try:
            index, tokens, is_over = json.loads(text)
            made = array("i", tokens)
            known = type(index) is int and 0 <= index < MAX_CHOICES and type(is_over) is bool
            known = known and min(made, default=0) >= 0
        except (ValueError, TypeError, OverflowError, RecursionError):
            known = False
        if not known or self._count + len(made) > MAX_TOKENS:
            self.give_up()
        if not self.is_whole:
            return
        self._count += len(made)
        self._tokens.setdefault(index, array("i")).extend(made)
        if is_over:
            self._over.add(index)

    def give_up(self) -> None:
        """Forget the tokens: no other replica can continue the stream."""
        self.is_whole = False
        self._tokens.clear()

    def resumed(self) -> Json:
        """Return what another replica needs to continue."""
        choices = [
            {"index": index, "tokens": tokens.tolist(), "is_over": index in self._over}
            for index, tokens in self._tokens.items()
        ]
        return {"name": self._name, "choices": choices}


class AnswerMeter:
    """Reads the usage in an answer, and keeps what continues a stream.

    The event with the usage is dropped unless the client asked for it.
    """

    def __init__(self, *, is_stream: bool, shows_usage: bool, name: str = "") -> None:
        """Read an answer from its first byte on; `name` is of a stream that can be continued."""
        self.is_stream = is_stream
        self.prompt_tokens = self.completion_tokens = 0
        self.failure = ""  # of the replica: another one may continue the stream
        self.is_done = False  # the client has the end of the stream, or an error that no other replica can mend
        self._sent = SentStream(name) if name else None
        self._has_usage = False
        self._shows_usage = shows_usage
        self._rest = b""
        self._whole: list[bytes] | None = [] if not is_stream else None
        self._size = 0

    @property
    def stream(self) -> SentStream | None:
        """Return the stream if another replica can continue it."""
        return self._sent if self._sent is not None and self._sent.is_whole else None

    def feed(self, part: bytes) -> bytes:
        """Return what the client gets of a part; nothing after a failure."""
        if not self.is_stream:
            self._keep(part)
            return part
        *events, self._rest = (self._rest + part).split(b"\n\n")
        kept = []
        for event in events:
            kept.append(self._shown(event))
            if self.failure:
                break
        if len(self._rest) > MAX_EVENT_BYTES:
            kept.append(self._rest)
            self._rest = b""
            if self._sent is not None:
                self._sent.give_up()
        return b"".join(kept)

    def end(self) -> bytes:
        """Return what is left at the end of the answer."""
        if self._whole is not None:
            self._take(b"".join(self._whole))
        rest, self._rest = self._rest, b""
        return rest

    def broken(self) -> bytes:
        """Forget the event that a break has cut; return the end if nothing else is missing."""
        self._rest, self.failure = b"", ""
        return DONE + b"\n\n" if self._has_usage else b""

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._whole is not None:
            self._whole.append(part)
            if self._size > MAX_EVENT_BYTES * 8:
                self._whole = None

    def _shown(self, event: bytes) -> bytes:
        if self._sent is not None and event.startswith(_TOKENS):
            tokens, _, event = event[len(_TOKENS) :].partition(b"\n")
            self._sent.take(tokens)
            self.completion_tokens = self._sent.count  # until the usage comes
        if self.stream is not None and event.startswith(_ERROR):
            self.failure = failure_of(event[5:])
            if self.failure:
                return b""
        self.is_done = self.is_done or event == DONE or event.startswith(_ERROR)
        has_usage = b'"usage"' in event and event.startswith(b"data:")
        if has_usage and self._take(event[5:]) == [] and not self._shows_usage:
            return b""
        return event + b"\n\n"

    def _take(self, text: bytes) -> Any:
        """Take the usage of an answer or an event; return its choices."""
        try:
            found = json.loads(text)
            usage = found.get("usage")
            # An event of a stream that has choices says what one of them used so far.
            if isinstance(usage, dict) and not (self.is_stream and found.get("choices")):
                self._has_usage = True
                self.prompt_tokens = token_count(usage.get("prompt_tokens"))
                self.completion_tokens = token_count(usage.get("completion_tokens"))
            return found.get("choices")
        except (ValueError, RecursionError, AttributeError):
            return None


def failure_of(text: bytes) -> str:
    """Return the message of an error of the replica; empty if the request is at fault."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"])[:300] or "no message" if error["type"] == "server_error" else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def token_count(value: object) -> int:
    """Return a number of tokens, 0 for anything else: sums stay below the controller's bound."""
    return value if type(value) is int and 0 <= value < 1 << 31 else 0
