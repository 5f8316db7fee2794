"""The routes of the REST API as a table, and the OpenAPI 3.1 description made of it.

Pure: knows paths, parameters and schemas, no sockets. Schemas of request bodies come from the dataclasses of
`hpcsched.model`. Sources: OpenAPI 3.1, JSON Schema 2020-12, RFC 9457 (problem details).
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import hpcsched
from hpcsched.model.spec import JobSpec

Json = dict[str, Any]

PREFIX = "/api/v1"
MAX_BODY_BYTES = 8 << 20
MAX_VALUE_CHARS = 4_000  # of a parameter

# Kinds of parameters: a pattern of their text, and their JSON Schema.
TEXT, NUMBER, WHOLE, FLAG = "text", "number", "whole", "flag"
_PATTERNS = {
    TEXT: re.compile(r"[^\x00-\x1f\x7f]*\Z"),
    NUMBER: re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,9})?\Z"),
    WHOLE: re.compile(r"-?[0-9]{1,15}\Z"),
    FLAG: re.compile(r"[01]\Z"),
}
_KINDS: Mapping[str, Json] = {
    TEXT: {"type": "string", "maxLength": MAX_VALUE_CHARS, "pattern": r"^[^\x00-\x1f\x7f]*$"},
    NUMBER: {"type": "number", "minimum": -1e14, "maximum": 1e14},
    WHOLE: {"type": "integer", "minimum": -(10**14), "maximum": 10**14},
    FLAG: {"type": "string", "enum": ["0", "1"]},
}


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A route. `path` is below `PREFIX`, and the controller has it below ``/v1``.

    `body`: the name of the schema of a POST's body. `answer`: ``json``, ``text``, ``bytes``, ``page`` or ``events``.
    """

    method: str
    path: str
    scope: str
    summary: str
    query: tuple[tuple[str, str], ...] = ()
    body: str = ""
    answer: str = "json"


def _texts(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, TEXT) for name in names)


_JOBS = _texts("id", "user", "name", "partition", "account", "qos", "reservation", "license", "state", "nodes", "whose")
_JOBS = (*_JOBS, ("expected", FLAG), ("strict", FLAG))
_PAGE = (("limit", WHOLE), ("cursor", TEXT))
_LISTING = (
    *_texts("format", "order", "time_format"), ("width", WHOLE),
    *((name, FLAG) for name in ("long", "array", "noheader", "dated", "fit", "colour", "others", "ended", "fold")),
)  # fmt: skip
_LOG = (("job", TEXT), ("stream", TEXT), ("offset", WHOLE))

# fmt: off
ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/ping", "read", "Version, cluster, and counts of jobs and nodes"),
    ApiRoute("GET", "/me", "read", "User, role and home directory of the credential"),
    ApiRoute("GET", "/jobs", "read", "Jobs, waiting, running and recently ended", (*_JOBS, *_PAGE), answer="page"),
    ApiRoute("GET", "/queue", "read", "The queue as text, as hqueue prints it", (*_JOBS, *_LISTING), answer="text"),
    ApiRoute("GET", "/job/{job}", "read", "A job, an array or a task"),
    ApiRoute("GET", "/job/{job}/why", "read", "Why a job waits"),
    ApiRoute("GET", "/job/{job}/story", "read", "The history of a job"),
    ApiRoute("GET", "/history", "read", "Ended jobs",
             (*_texts("id", "user", "state", "name"), ("start_s", NUMBER), ("end_s", NUMBER), ("limit", WHOLE))),
    ApiRoute("GET", "/nodes", "read", "Nodes"),
    ApiRoute("GET", "/partitions", "read", "Partitions"),
    ApiRoute("GET", "/reservations", "read", "Reservations"),
    ApiRoute("GET", "/licenses", "read", "Licences and their use"),
    ApiRoute("GET", "/shares", "read", "Fair share of accounts and users"),
    ApiRoute("GET", "/priorities", "read", "Priorities of waiting jobs", _JOBS),
    ApiRoute("GET", "/outages", "read", "Times without answers from nodes", (("start_s", NUMBER), ("end_s", NUMBER))),
    ApiRoute("GET", "/config", "read", "The configuration"),
    ApiRoute("GET", "/snapshot", "read", "The cluster as a plan sees it"),
    ApiRoute("GET", "/crontab", "read", "The crontab", _texts("user")),
    ApiRoute("GET", "/triggers", "read", "Triggers"),
    ApiRoute("GET", "/strays", "admin", "Launches from before a restore"),
    ApiRoute("GET", "/log", "read", "A part of a job's output", (*_LOG, ("limit", WHOLE), ("wait_s", NUMBER)), answer="bytes"),
    ApiRoute("GET", "/log/stream", "read", "The output of a job as it is written", _LOG, answer="events"),
    ApiRoute("GET", "/events", "read", "Changes of jobs as they happen", (("after", WHOLE),), answer="events"),
    ApiRoute("GET", "/tokens", "read", "Tokens, sessions and certificates", _texts("user")),
    ApiRoute("POST", "/submit", "submit", "Submit jobs", body="Submit"),
    ApiRoute("POST", "/test", "submit", "When a job would start", body="Test"),
    ApiRoute("POST", "/command", "read", "Run hsub, hqueue or hcancel", body="Object", answer="bytes"),
    ApiRoute("POST", "/cancel", "manage", "Cancel or signal jobs", body="Jobs"),
    ApiRoute("POST", "/hold", "manage", "Hold jobs", body="Jobs"),
    ApiRoute("POST", "/release", "manage", "Release held jobs", body="Jobs"),
    ApiRoute("POST", "/requeue", "manage", "Requeue jobs", body="Jobs"),
    ApiRoute("POST", "/suspend", "manage", "Suspend jobs", body="Jobs"),
    ApiRoute("POST", "/resume", "manage", "Resume suspended jobs", body="Jobs"),
    ApiRoute("POST", "/update", "manage", "Change jobs", body="Update"),
    ApiRoute("POST", "/crontab", "submit", "Replace the crontab", body="Object"),
    ApiRoute("POST", "/nodes/drain", "admin", "Drain nodes", body="Nodes"),
    ApiRoute("POST", "/nodes/resume", "admin", "Resume nodes", body="Nodes"),
    ApiRoute("POST", "/nodes/fence", "admin", "Declare nodes switched off", body="Nodes"),
    ApiRoute("POST", "/nodes/remove", "admin", "Remove a node", body="Nodes"),
    ApiRoute("POST", "/partitions/update", "admin", "Set the state of a partition", body="Partition"),
    ApiRoute("POST", "/reservations/create", "admin", "Create a reservation", body="Reservation"),
    ApiRoute("POST", "/reservations/update", "admin", "Change a reservation", body="Reservation"),
    ApiRoute("POST", "/reservations/delete", "admin", "Delete a reservation", body="Reservation"),
    ApiRoute("POST", "/usage/reset", "admin", "Reset past usage", body="Usage"),
    ApiRoute("POST", "/strays/adopt", "admin", "Adopt launches from before a restore", body="Strays"),
    ApiRoute("POST", "/strays/end", "admin", "End launches from before a restore", body="Strays"),
    ApiRoute("POST", "/reconfigure", "admin", "Read the configuration again", body="Object"),
    ApiRoute("POST", "/tokens/revoke", "manage", "Revoke tokens, sessions and certificates", body="Revoke"),
)
# fmt: on

# ----- which route a request has


class Routing:
    """Finds the route of a method and path."""

    def __init__(self, routes: Sequence[ApiRoute] = ROUTES) -> None:
        self._exact = {(route.method, route.path): route for route in routes if "{" not in route.path}
        self._job = {route.path.partition("}")[2]: route for route in routes if "{" in route.path}
        self._paths: dict[str, set[str]] = {}
        for route in routes:
            self._paths.setdefault(route.path, set()).add(route.method)

    def find(self, method: str, path: str) -> tuple[ApiRoute, str] | frozenset[str]:
        """Return the route and the controller's path, or the methods that the path has.

        `path` is below `PREFIX`, as it came, with its percent signs.
        """
        route = self._exact.get((method, path))
        if route is not None:
            return route, "/v1" + path
        if path.startswith("/job/"):
            name, slash, rest = path[5:].partition("/")
            route = self._job.get(slash + rest)
            reference = unquote(name)
            if route is not None and 0 < len(reference) <= MAX_VALUE_CHARS and reference.isprintable():
                return (
                    (route, f"/v1/job/{quote(reference, safe='')}{slash}{rest}")
                    if method == "GET"
                    else frozenset({"GET"})
                )
        return frozenset(self._paths.get(path, ()))


def why_bad_query(route: ApiRoute, pairs: Sequence[tuple[str, str]]) -> str:
    """Return why the parameters do not fit the route, "" if they do."""
    known = dict(route.query)
    seen = set()
    for name, value in pairs:
        kind = known.get(name)
        if kind is None:
            return f"unknown parameter {name[:40]!r}; there are: {', '.join(known) or 'none'}"
        if name in seen:
            return f"parameter {name!r} is given twice"
        seen.add(name)
        if len(value) > MAX_VALUE_CHARS or not _PATTERNS[kind].match(value):
            return f"parameter {name!r} has the value {value[:40]!r}, which is not a {kind}"
    return ""


# ----- OpenAPI


def schema_of(kind: Any) -> Json:
    """Return the JSON Schema of a type as our JSON has it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(one) for one in args]}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": schema_of(args[0])}
        return {
            "type": "array",
            "prefixItems": [schema_of(one) for one in args],
            "minItems": len(args),
            "maxItems": len(args),
        }
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return {"$ref": f"#/components/schemas/{kind.__name__}"}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"type": "string", "enum": [one.value for one in kind]}
    supertype = getattr(kind, "__supertype__", kind)  # of a NewType
    plain: dict[Any, Json] = {
        str: {"type": "string"},
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        float: {"type": "number"},
        type(None): {"type": "null"},
    }
    return plain[supertype]


def dataclass_schemas(kind: Any) -> dict[str, Json]:
    """Return the schemas of a dataclass and of those in its fields, by name."""
    found: dict[str, Json] = {}
    waiting = _dataclasses_in(kind)
    while waiting:
        one = waiting.pop()
        if one.__name__ in found:
            continue
        hints = typing.get_type_hints(one)
        properties = {field.name: schema_of(hints[field.name]) for field in dataclasses.fields(one)}
        missing = dataclasses.MISSING
        required = [
            field.name
            for field in dataclasses.fields(one)
            if field.default is missing and field.default_factory is missing
        ]
        found[one.__name__] = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
        waiting += [part for hint in hints.values() for part in _dataclasses_in(hint)]
    return found


def _dataclasses_in(hint: Any) -> list[Any]:
    own: list[Any] = [hint] if dataclasses.is_dataclass(hint) else []
    return own + [found for part in typing.get_args(hint) for found in _dataclasses_in(part)]


_TEXT_MAP: Json = {"type": "object", "additionalProperties": {"type": "string"}}
_NAMES: Json = {"type": "array", "items": {"type": "string"}, "maxItems": 10_000}


def _object(required: Sequence[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


_BODIES: Mapping[str, Json] = {
    "Object": {"type": "object"},
    "Submit": _object(
        ["jobs"],
        request_id={"type": "string", "maxLength": 200},
        jobs={"type": "array", "items": {"$ref": "#/components/schemas/JobSpec"}, "minItems": 1, "maxItems": 1000},
    ),
    "Test": _object(["job"], job={"$ref": "#/components/schemas/JobSpec"}),
    "Jobs": _object(["jobs"], jobs=_NAMES, filters=_TEXT_MAP, signal={"type": "string"}),
    "Update": _object(["jobs", "changes"], jobs=_NAMES, changes=_TEXT_MAP),
    "Nodes": _object(["nodes"], nodes={"type": "string"}, why={"type": "string"}),
    "Partition": _object(["name", "state"], name={"type": "string"}, state={"type": "string"}),
    "Reservation": _object([], name={"type": "string"}, changes=_TEXT_MAP),
    "Usage": _object([], accounts=_NAMES, users=_NAMES),
    "Strays": _object(["tokens"], tokens=_NAMES),
    "Revoke": _object([], ids=_NAMES, user={"type": "string"}),
    "Problem": _object(
        ["type", "title", "status", "detail", "error", "kind"],
        type={"type": "string"},
        title={"type": "string"},
        status={"type": "integer"},
        detail={"type": "string"},
        error={"type": "string"},
        kind={"type": "string"},
        at={"type": "integer"},
    ),
    "Answer": {"type": "object", "properties": {"version": {"const": 1}}, "required": ["version"]},
}
_STATUSES = {
    400: "The request is impossible",
    401: "No valid credential",
    403: "Not allowed",
    404: "Not found",
    413: "The body is too long",
    415: "The body is not JSON",
    429: "Too many requests",
    500: "A bug of hpcsched",
    502: "The controller does not run",
    503: "Not now",
    504: "The controller did not answer in time",
}
_TYPES = {"text": "text/plain", "bytes": "application/octet-stream", "events": "text/event-stream"}


def openapi() -> Json:
    """Return the OpenAPI 3.1 description of all routes."""
    found: dict[str, Json] = {}
    for route in ROUTES:
        found.setdefault(PREFIX + route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "hpcsched", "version": hpcsched.__version__, "description": "See docs/rest.md."},
        "paths": found,
        "components": {
            "schemas": {**_BODIES, **dataclass_schemas(JobSpec)},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
                "session": {"type": "apiKey", "in": "cookie", "name": "__Host-hpcsched"},
            },
        },
        "security": [{"token": []}, {"session": []}],
    }


def _operation(route: ApiRoute) -> Json:
    words = re.sub(r"[{}]", "", route.path).strip("/").replace("/", "_")
    parameters: list[Json] = [
        {"name": name, "in": "query", "required": False, "schema": _KINDS[kind]} for name, kind in route.query
    ]
    if "{job}" in route.path:
        parameters.append(
            {
                "name": "job",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1, "maxLength": 4000},
            }
        )
    good: Json = {"schema": {"$ref": "#/components/schemas/Answer"}}
    kind = _TYPES.get(route.answer, "application/json")
    answers: Json = {"200": {"description": "Done", "content": {kind: good if kind == "application/json" else {}}}}
    if route.method == "GET" and route.answer != "events":
        parameters.append({"name": "If-None-Match", "in": "header", "required": False, "schema": {"type": "string"}})
        answers["304"] = {"description": "Unchanged"}
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    answers |= {str(status): {"description": text, "content": problem} for status, text in _STATUSES.items()}
    operation: Json = {
        "operationId": f"{route.method.lower()}_{words}",
        "summary": route.summary,
        "description": f"Needs the scope `{route.scope}`.",
        "parameters": parameters,
        "responses": answers,
    }
    if route.body:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{route.body}"}}},
        }
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "schema": {"type": "string", "maxLength": 200},
            }
        )
    return operation
