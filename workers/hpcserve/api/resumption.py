"""Continue streams that another replica began.

A request with the header `x-hpcsched-stream: new` gets the stream's name in a header of the answer, and before each event a
comment that names the tokens since the last event. With `x-hpcsched-stream: resumed` the body is
`{"request": ..., "stream": ...}`: the request as it was, and the stream as far as its client has it. Only what follows is sent.

Knows no engine. Rules: the same tokens give the same text, so text is not sent back; only the version of the model that began a
stream continues it. The gateway alone sends the header. Other clients of a replica may do it as well: they can make a model
continue any text by a prompt.

Sources: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcserve.api.guard import ApiError
from hpcserve.api.prompts import TextRequest
from hpcserve.api.schema import MOST_PROMPTS, MOST_TOKENS, check
from hpcserve.errors import InvalidRequest

HEADER = "x-hpcsched-stream"
NEW, RESUMED = "new", "resumed"
MOST_STREAM_BYTES = 2 << 20  # of a resumed stream, beside its request

TOKEN = {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}
CHOICE = {
    "type": "object",
    "properties": {
        "index": {"type": "integer", "minimum": 0, "maximum": MOST_PROMPTS - 1},
        "tokens": {"type": "array", "items": TOKEN},
        "is_over": {"type": "boolean"},
    },
    "required": ["index", "tokens", "is_over"],
    "additionalProperties": False,
}
RESUMED_REQUEST = {
    "type": "object",
    "properties": {
        "request": {"type": "object"},
        "stream": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[0-9a-f]{32} [0-9]{1,12} [!-~]{1,128}$"},
                "choices": {"type": "array", "items": CHOICE, "maxItems": MOST_PROMPTS},
            },
            "required": ["name", "choices"],
            "additionalProperties": False,
        },
    },
    "required": ["request", "stream"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedStream:
    """A stream as far as its client has it: tokens of each begun choice, and which are over."""

    id: str
    created: int
    version: str
    tokens: Mapping[int, tuple[int, ...]]
    over: frozenset[int]

    def continued(self, requests: Sequence[TextRequest], version: str) -> list[TextRequest]:
        """Return the requests for the rest of the stream from a model of this version.

        Raises:
            ApiError: another model began it.
            InvalidRequest: it is not a stream of these requests.
        """
        if version != self.version:
            message = f"cannot continue the stream: version {self.version} of the model began it, and this is {version}"
            raise ApiError(409, message, code="version_changed")
        if unknown := self.tokens.keys() - {one.index for one in requests}:
            raise InvalidRequest(f"cannot continue the stream: it has no choice {min(unknown)}", param="stream")
        return [self._continued(one) for one in requests]

    def _continued(self, request: TextRequest) -> TextRequest:
        tokens = self.tokens.get(request.index)
        if tokens is None:
            return request
        if len(tokens) > request.generate.max_tokens:
            message = (
                f"cannot continue the stream: {len(tokens)} tokens are more than its {request.generate.max_tokens}"
            )
            raise InvalidRequest(message, param="stream")
        generate = dataclasses.replace(request.generate, sent=tokens, prompt_logprobs=False)
        return dataclasses.replace(request, generate=generate, is_begun=True, is_over=request.index in self.over)


def taken_apart(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ResumedStream]:
    """Return the request and the stream of a body that resumes one.

    Raises:
        InvalidRequest: it is something else.
    """
    check(body, RESUMED_REQUEST)
    name, created, version = body["stream"]["name"].split(" ")
    choices = body["stream"]["choices"]
    stream = ResumedStream(
        id=name,
        created=int(created),
        version=version,
        tokens={int(one["index"]): tuple(map(int, one["tokens"])) for one in choices},
        over=frozenset(int(one["index"]) for one in choices if one["is_over"]),
    )
    return body["request"], stream
