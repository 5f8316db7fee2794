"""The requests of the API as JSON Schema, and the check of a request by its schema.

One source: what `check` refuses is what /openapi.json describes. `check` knows the keywords that these schemas use, no others.
Rules: fields that have no effect here are accepted by name; a field that no schema names is refused.

Sources: https://json-schema.org/draft/2020-12, https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hpcserve.errors import InvalidRequest

Schema = Mapping[str, Any]

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_PROMPTS = 256
MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_SALT_CHARACTERS = 1024
MOST_TOKENS = 2**31 - 1

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
    "null": (type(None),),
}


def optional(kind: str, **rules: Any) -> dict[str, Any]:
    """Return the schema of a value that may be null."""
    return {"type": [kind, "null"], **rules}


TEXT = {"type": "string"}
STOP = {"type": "string", "minLength": 1, "maxLength": MOST_STOP_CHARACTERS}
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}, "minItems": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MOST_PROMPTS}
TOKEN_LISTS = {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": MOST_PROMPTS}
PROMPT = {"anyOf": [TEXT, TEXTS, TOKEN_IDS, TOKEN_LISTS]}
FREE = {"type": "object"}  # whatever it holds is for the model or the schema compiler to judge
ANY_OBJECT = optional("object")

SAMPLING: Schema = {
    "temperature": optional("number", minimum=0, maximum=2),
    "top_p": optional("number", exclusiveMinimum=0, maximum=1),
    "top_k": optional("integer", minimum=-1, maximum=MOST_TOKENS),
    "min_p": optional("number", minimum=0, maximum=1),
    "seed": optional("integer", minimum=-(2**63), maximum=2**63 - 1),
    "presence_penalty": optional("number", minimum=-2, maximum=2),
    "frequency_penalty": optional("number", minimum=-2, maximum=2),
    "repetition_penalty": optional("number", exclusiveMinimum=0, maximum=10),
    "logit_bias": optional(
        "object",
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        maxProperties=MOST_BIASES,
        propertyNames={"pattern": "^[0-9]{1,9}$"},
    ),
    "n": optional("integer", minimum=1, maximum=MOST_CHOICES),
    "stop": {"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": MOST_STOPS}, {"type": "null"}]},
    "ignore_eos": optional("boolean"),
    "stream": optional("boolean"),
    "stream_options": optional(
        "object",
        properties={
            "include_usage": optional("boolean"),
            "continuous_usage_stats": optional("boolean"),  # vLLM's: the usage in each chunk
            "include_obfuscation": optional("boolean"),
        },
        additionalProperties=False,
    ),
}
WITHOUT_EFFECT: Schema = {
    "user": optional("string"),
    "metadata": ANY_OBJECT,
    "store": optional("boolean"),
    "service_tier": optional("string"),
    "safety_identifier": optional("string"),
    "prompt_cache_key": optional("string"),
}
CACHE_SALT: Schema = {"cache_salt": optional("string", maxLength=MOST_SALT_CHARACTERS)}
NAME = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[a-zA-Z0-9_-]+$"}
TOOL = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": NAME,
                "description": optional("string"),
                "parameters": ANY_OBJECT,
                "strict": optional("boolean"),
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
TOOL_CALL = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "type": {"enum": ["function"]},
        "index": {"type": "integer"},
        "function": {
            "type": "object",
            "properties": {"name": TEXT, "arguments": TEXT},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
    },
    "required": ["function"],
    "additionalProperties": False,
}
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": TEXT},
    "required": ["type", "text"],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [TEXT, {"type": "array", "items": TEXT_PART, "maxItems": MOST_MESSAGES}, {"type": "null"}]
        },
        "name": optional("string"),
        "tool_calls": {"anyOf": [{"type": "array", "items": TOOL_CALL, "maxItems": MOST_TOOLS}, {"type": "null"}]},
        "tool_call_id": optional("string"),
        "reasoning_content": optional("string"),
        "refusal": optional("string"),
        "audio": {"type": "null"},
        "function_call": {"type": "null"},
        "annotations": optional("array", maxItems=MOST_TOOLS),
    },
    "required": ["role"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": NAME,
                        "description": optional("string"),
                        "schema": FREE,
                        "strict": optional("boolean"),
                    },
                    "required": ["name", "schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}
TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["function"]},
                "function": {
                    "type": "object",
                    "properties": {"name": NAME},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}
LENGTH = optional("integer", minimum=0, maximum=MOST_TOKENS)
CHAT_LENGTH = optional("integer", minimum=1, maximum=MOST_TOKENS)

REQUESTS: Mapping[str, Schema] = {
    "ChatCompletionRequest": {
        "type": "object",
        "properties": {
            "model": TEXT,
            "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": MOST_MESSAGES},
            "max_tokens": CHAT_LENGTH,
            "max_completion_tokens": CHAT_LENGTH,
            "logprobs": optional("boolean"),
            "top_logprobs": optional("integer", minimum=0, maximum=MOST_LOGPROBS),
            "response_format": RESPONSE_FORMAT,
            "tools": {"anyOf": [{"type": "array", "items": TOOL, "maxItems": MOST_TOOLS}, {"type": "null"}]},
            "tool_choice": TOOL_CHOICE,
            "parallel_tool_calls": optional("boolean"),
            "chat_template_kwargs": ANY_OBJECT,
            "reasoning_effort": optional("string"),
            **SAMPLING,
            **CACHE_SALT,
            **WITHOUT_EFFECT,
        },
        "required": ["model", "messages"],
        "additionalProperties": False,
    },
    "CompletionRequest": {
        "type": "object",
        "properties": {
            "model": TEXT,
            "prompt": PROMPT,
            "max_tokens": LENGTH,
            "logprobs": optional("integer", minimum=0, maximum=MOST_LOGPROBS),
            "echo": optional("boolean"),
            "best_of": optional("integer", minimum=1, maximum=MOST_CHOICES),
            "suffix": optional("string"),
            **SAMPLING,
            **CACHE_SALT,
            **WITHOUT_EFFECT,
        },
        "required": ["model", "prompt"],
        "additionalProperties": False,
    },
    "EmbeddingRequest": {
        "type": "object",
        "properties": {
            "model": TEXT,
            "input": PROMPT,
            "encoding_format": {"enum": ["float", "base64", None]},
            "dimensions": optional("integer", minimum=1, maximum=MOST_TOKENS),
            **CACHE_SALT,
            **WITHOUT_EFFECT,
        },
        "required": ["model", "input"],
        "additionalProperties": False,
    },
}


def check(value: Any, schema: Schema, path: str = "") -> None:
    """Check that a value satisfies a schema.

    Raises:
        InvalidRequest: it does not; `param` is the path of the field.
    """
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], path)
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        raise _wrong(path, f"it must be one of {', '.join(map(repr, schema['enum']))}")
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is_a(value, kind) for kind in kinds):
        raise _wrong(path, f"it must be {' or '.join(kinds)}, not {kind_of(value)}")
    if isinstance(value, str):
        _check_length(len(value), schema, path, "Length", "characters")
        if "pattern" in schema and not _matches(value, schema["pattern"]):
            raise _wrong(path, f"it must match {schema['pattern']}")
    elif isinstance(value, list):
        _check_length(len(value), schema, path, "Items", "items")
        if inner := schema.get("items"):
            for index, item in enumerate(value):
                check(item, inner, f"{path}[{index}]")
    elif isinstance(value, dict):
        _check_object(value, schema, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(value, schema, path)


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return next((kind for kind in ("boolean", *TYPES) if _is_a(value, kind)), "nothing")


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[kind])


def _wrong(path: str, why: str) -> InvalidRequest:
    place = f"'{path}'" if path else "the body"
    return InvalidRequest(f"cannot read {place}: {why}", param=path or None)


def _check_any(value: Any, choices: list[Schema], path: str) -> None:
    """Check a value against alternatives.

    The error is of the alternative that has the value's type, if one has.
    """
    errors = []
    for choice in choices:
        try:
            check(value, choice, path)
            return
        except InvalidRequest as error:
            errors.append(error)
    deepest = max(errors, key=lambda error: len(error.param or ""))
    if (deepest.param or "") != path:
        raise deepest
    kind = kind_of(value)
    same = [error for error, choice in zip(errors, choices, strict=True) if choice.get("type") == kind]
    raise same[0] if same else errors[0]


def _check_length(length: int, schema: Schema, path: str, name: str, unit: str) -> None:
    if length > schema.get(f"max{name}", math.inf):
        raise _wrong(path, f"it must have at most {schema[f'max{name}']} {unit}, and has {length}")
    if length < schema.get(f"min{name}", 0):
        raise _wrong(path, f"it must have at least {schema[f'min{name}']} {unit}")


def _check_object(value: dict[str, Any], schema: Schema, path: str) -> None:
    _check_length(len(value), schema, path, "Properties", "fields")
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    pattern = schema.get("propertyNames", {}).get("pattern")
    for name, inner in value.items():
        inner_path = f"{path}.{name[:64]}".lstrip(".")
        if name in known:
            check(inner, known[name], inner_path)
        elif others is False:
            raise _wrong(inner_path, "there is no such field")
        elif isinstance(others, Mapping):
            check(inner, others, inner_path)
        if pattern is not None and not _matches(name, pattern):
            raise _wrong(inner_path, f"the name must match {pattern}")
    for name in schema.get("required", ()):
        if name not in value:
            raise _wrong(f"{path}.{name}".lstrip("."), "it is missing")


def _check_number(value: float, schema: Schema, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(path, "it must be a finite number")
    if value > schema.get("maximum", math.inf):
        raise _wrong(path, f"it must be at most {schema['maximum']}")
    if value < schema.get("minimum", -math.inf):
        raise _wrong(path, f"it must be at least {schema['minimum']}")
    if value <= schema.get("exclusiveMinimum", -math.inf):
        raise _wrong(path, f"it must be more than {schema['exclusiveMinimum']}")


def _matches(text: str, pattern: str) -> bool:
    return re.fullmatch(pattern.removeprefix("^").removesuffix("$"), text) is not None
