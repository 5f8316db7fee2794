"""The description of the API in OpenAPI 3.1, made of the schemas that check it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcserve.api.schema import REQUESTS

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
USAGE = {
    "type": "object",
    "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
    "required": ["prompt_tokens", "total_tokens"],
}
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}  # of a stream


def describe(name: str, version: str) -> dict[str, Any]:
    """Return the description; `name` and `version` are the model's."""
    model_name = {"type": "string", "enum": [name, f"{name}@{version}"]}
    paths = {
        "/v1/chat/completions": _post("ChatCompletionRequest", "Answer a conversation", _answer("chat.completion")),
        "/v1/completions": _post("CompletionRequest", "Continue texts", _answer("text_completion")),
        "/v1/embeddings": _post("EmbeddingRequest", "Return a vector for each text", _list(USAGE)),
        "/v1/models": _get("List the models", _list(None)),
        "/v1/models/{name}": _get(
            "Describe a model", {"type": "object", "required": ["id", "object"]}, parameters={"name": model_name}
        ),
        "/health": _get("Say that the process answers", {"type": "object"}),
        "/ready": _get("Say whether the model can answer", {"type": "object"}, not_ready=True),
        "/version": _get("Return the version of the model", {"type": "object", "required": ["model", "version"]}),
    }
    schemas: dict[str, Any] = {key: dict(schema) for key, schema in REQUESTS.items()} | {"ErrorAnswer": ERROR}
    for key in REQUESTS:
        schemas[key]["properties"] = {**schemas[key]["properties"], "model": model_name}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{name}, served by hpcsched", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _answer(kind: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"object": {"const": kind}, "choices": {"type": "array"}, "usage": USAGE},
        "required": ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"],
    }


def _list(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "object",
        "properties": {"object": {"const": "list"}, "data": {"type": "array"}},
        "required": ["object", "data"],
    }
    if usage is not None:
        made["properties"]["usage"] = usage
    return made


def _post(request: str, summary: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if request != "EmbeddingRequest":
        content["text/event-stream"] = {"schema": EVENT}
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}
    return {
        "post": {
            "summary": summary,
            "operationId": request.removesuffix("Request"),
            "requestBody": {"required": True, "content": body},
            "responses": {"200": {"description": "The answer", "content": content}, **_errors()},
        }
    }


def _get(
    summary: str, answer: Mapping[str, Any], *, parameters: Mapping[str, Any] = {}, not_ready: bool = False
) -> dict[str, Any]:
    ok = {"description": "The answer", "content": {"application/json": {"schema": answer}}}
    made: dict[str, Any] = {"summary": summary, "responses": {"200": ok, **_errors()}}
    if not_ready:
        made["responses"]["503"] = ok
    if parameters:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema} for name, schema in parameters.items()
        ]
    return {"get": made}


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    words = {
        "400": "The request is wrong",
        "401": "The key is missing or wrong",
        "404": "There is no such model",
        "405": "The address has other methods",
        "408": "The body took too long",
        "413": "The body is too large",
        "415": "The body is not application/json",
        "429": "The key is over a limit",
        "503": "The model cannot answer now",
    }
    return {status: {"description": text, "content": content} for status, text in words.items()}
