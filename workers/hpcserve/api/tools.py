"""Tool calls: read from a model's text, and schemas that force them.

Models write calls in few forms: `<tool_call>{...}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS][...]` (Mistral), and bare JSON, with
or without `<|python_tag|>` (Llama 3, and every answer that a schema forces). What looks like a call but names no tool of the
request remains text. Does not run tools.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcserve.tokens import begun

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LIST_MARK = "[TOOL_CALLS]"
PYTHON_MARK = "<|python_tag|>"
MARKS = (OPEN, LIST_MARK, PYTHON_MARK)
SHOWN_WORDS = (*MARKS, CLOSE)  # shown even where they are control tokens
MOST_CALLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


class ToolReader:
    """Separates calls from text that comes in pieces.

    Text before the first mark is passed on at once.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._begun = False  # a mark was seen, or the text begins as JSON
        self._sent = False

    def push(self, text: str) -> str:
        """Return the text that cannot belong to a call."""
        self._held += text
        if self._begun:
            return ""
        if not self._sent and self._held.lstrip()[:1] in ("", "{", "["):
            self._begun = bool(self._held.strip())
            return ""
        places = [self._held.find(mark) for mark in MARKS if mark in self._held]
        self._begun = bool(places)
        at = min(places) if places else len(self._held) - begun(self._held, MARKS)
        out, self._held = self._held[:at], self._held[at:]
        self._sent = self._sent or bool(out)
        return out

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text that is left, and the calls."""
        text, self._held = self._held, ""
        calls = self._calls(text)
        return ("", calls) if calls else (text, ())

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        found: list[ToolCall] = []
        for value in _json_values(text):
            for item in value if isinstance(value, list) else [value]:
                call = self._call(item)
                if call is None or len(found) == MOST_CALLS:
                    return ()
                found.append(call)
        return tuple(found)

    def _call(self, item: Any) -> ToolCall | None:
        if not isinstance(item, dict) or item.get("name") not in self._names:
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", name=item["name"], arguments=arguments)


def _json_values(text: str) -> list[Any]:
    """Return the JSON values of a text between marks; none if there is anything else."""
    for mark in SHOWN_WORDS:
        text = text.replace(mark, " ")
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in " \t\r\n;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values.append(value)
    return values


def call_schema(tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """Return the schema of an answer that calls one of the tools, or `several`."""
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        place = f"#/$defs/call{index}"
        definitions[f"call{index}"] = _moved(tool["function"].get("parameters") or {"type": "object"}, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    one: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
    if several:
        one = {"type": "array", "items": one, "minItems": 1, "maxItems": 8}
    return one | {"$defs": definitions}


def either(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a text that satisfies one of two schemas.

    The second is of `call_schema`.
    """
    place = "#/$defs/answer"
    rest = {key: value for key, value in second.items() if key != "$defs"}
    definitions = {"answer": _moved(first, place), **second["$defs"]}
    return {"anyOf": [{"$ref": place}, rest], "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """Return a copy of a schema for another place; its references within itself follow."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := copy.get("$ref"), str) and reference.startswith("#"):
        copy["$ref"] = place + reference.removeprefix("#")
    return copy


def description(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what a model is told of the tools if its chat template does not read them."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = '{"name": NAME, "arguments": {...}}'
    return f"You can call these functions. To call one, answer only with JSON: {form}\n{functions}"
