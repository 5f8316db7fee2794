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
from hpcnode.wire.gate import MAX_DIGITS
from hpcsched.model.spec import JobSpec

Json = dict[str, Any]

PREFIX = "/api/v1"
MAX_BODY_BYTES = 8 << 20
MAX_VALUE_CHARS = 4_000  # of a parameter
# Of numbers and texts in a body: what `hpcnode.wire.gate` reads.
MAX_WHOLE = 10**MAX_DIGITS - 1
MAX_FRACTION = 1e300
MAX_NAMES = 10_000
_TEXT_VALUE = {"type": "string", "pattern": r"^[^\x00]*$"}


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """What a parameter may be: a pattern of its text, bounds of its number, its JSON Schema."""

    words: str
    pattern: re.Pattern[str]
    schema: Json
    least: float = 0.0
    most: float = 0.0

    def why_bad(self, value: str) -> str:
        """Return what the value must be, "" if it is that."""
        if len(value) > MAX_VALUE_CHARS or not self.pattern.match(value):
            return self.words
        return "" if self.least == self.most or self.least <= float(value) <= self.most else self.words


def _whole(least: int, most: int) -> ParameterKind:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return ParameterKind(f"a whole number from {least} to {most}", re.compile(r"-?[0-9]{1,15}\Z"), schema, least, most)


def _number(least: float, most: float) -> ParameterKind:
    schema = {"type": "number", "minimum": least, "maximum": most}
    pattern = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,20})?\Z")
    return ParameterKind(f"a number from {least:g} to {most:g}", pattern, schema, least, most)


TEXT = ParameterKind(
    f"a text of at most {MAX_VALUE_CHARS} characters without control characters",
    re.compile(r"[^\x00-\x1f\x7f]*\Z"),
    {"type": "string", "maxLength": MAX_VALUE_CHARS, "pattern": r"^[^\x00-\x1f\x7f]*$"},
)
FLAG = ParameterKind("0 or 1", re.compile(r"[01]\Z"), {"type": "string", "enum": ["0", "1"]})
LIMIT = _whole(1, 10_000)
EVENT = _whole(0, 10**15 - 1)
BYTES = _whole(0, 10**15 - 1)
CHUNK = _whole(1, 1 << 20)
WIDTH = _whole(0, 1_000)
TIME = _number(0, 1e11)  # Unix seconds
STEP = _number(1, 1e9)
WAIT = _number(0, 20)


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A route. `path` is below `PREFIX`, and the controller has it below ``/v1``.

    `body`: the name of the schema of a POST's body. `answer`: ``json``, ``text``, ``bytes``, ``page`` or ``events``.
    """

    method: str
    path: str
    scope: str
    summary: str
    query: tuple[tuple[str, ParameterKind], ...] = ()
    body: str = ""
    answer: str = "json"

    @property
    def repeatable(self) -> bool:
        """Return whether the route takes an idempotency key: it changes something."""
        return self.method == "POST" and self.path not in ("/test", "/command")


def _texts(*names: str) -> tuple[tuple[str, ParameterKind], ...]:
    return tuple((name, TEXT) for name in names)


_JOBS = _texts("id", "user", "name", "partition", "account", "qos", "reservation", "license", "state", "nodes", "whose")
_JOBS = (*_JOBS, ("expected", FLAG), ("strict", FLAG))
_PAGE = (("limit", LIMIT), ("cursor", TEXT))
_LISTING = (
    *_texts("format", "order", "time_format"), ("width", WIDTH),
    *((name, FLAG) for name in ("long", "array", "noheader", "dated", "fit", "colour", "others", "ended", "fold")),
)  # fmt: skip
_LOG = (("job", TEXT), ("stream", TEXT), ("offset", BYTES))

# fmt: off
ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/ping", "read", "Version, cluster, and counts of jobs and nodes"),
    ApiRoute("GET", "/me", "read", "User, role, home directory and possible actions of the credential; number of the last event"),
    ApiRoute("GET", "/jobs", "read", "Jobs, waiting, running and recently ended",
             (*_JOBS, ("fold", FLAG), *_PAGE), answer="page"),
    ApiRoute("GET", "/queue", "read", "The queue as text, as hqueue prints it", (*_JOBS, *_LISTING), answer="text"),
    ApiRoute("GET", "/job/{job}", "read", "A job, an array or a task"),
    ApiRoute("GET", "/job/{job}/why", "read", "Why a job waits"),
    ApiRoute("GET", "/job/{job}/slow", "read", "What slows a running job down"),
    ApiRoute("GET", "/slow", "read", "What holds up the queue although resources are free"),
    ApiRoute("GET", "/job/{job}/story", "read", "The history of a job"),
    ApiRoute("GET", "/history", "read", "Ended jobs",
             (*_texts("id", "user", "state", "name"), ("start_s", TIME), ("end_s", TIME), ("attempts", FLAG),
              ("energy", FLAG), *_PAGE), answer="page"),
    ApiRoute("GET", "/nodes", "read", "Nodes", _PAGE, answer="page"),
    ApiRoute("GET", "/partitions", "read", "Partitions", _PAGE, answer="page"),
    ApiRoute("GET", "/reservations", "read", "Reservations", _PAGE, answer="page"),
    ApiRoute("GET", "/licenses", "read", "Licences and their use", _PAGE, answer="page"),
    ApiRoute("GET", "/shares", "read", "Fair share of accounts and users", _PAGE, answer="page"),
    ApiRoute("GET", "/priorities", "read", "Priorities of waiting jobs", (*_JOBS, *_PAGE), answer="page"),
    ApiRoute("GET", "/outages", "read", "Times in which nodes took no jobs",
             (("start_s", TIME), ("end_s", TIME), *_texts("kinds"), *_PAGE), answer="page"),
    ApiRoute("GET", "/tariff", "read", "Prices of a period", (("start_s", TIME), ("end_s", TIME))),
    ApiRoute("GET", "/metrics/history", "read", "What a node or job used in a period",
             (*_texts("target", "series", "of"), ("from_s", TIME), ("to_s", TIME), ("step_s", STEP),
              ("known_only", FLAG))),
    ApiRoute("GET", "/metrics/series", "read", "Nodes with metrics, or the series of a node or job", _texts("target")),
    ApiRoute("GET", "/config", "read", "The configuration"),
    ApiRoute("GET", "/snapshot", "read", "The cluster as a plan sees it"),
    ApiRoute("GET", "/crontab", "read", "The crontab", _texts("user")),
    ApiRoute("GET", "/triggers", "read", "Triggers", _PAGE, answer="page"),
    ApiRoute("GET", "/services/usage", "read", "What users asked of served models, day by day",
             (("days", LIMIT), *_PAGE), answer="page"),
    ApiRoute("GET", "/services", "read", "Served models", _PAGE, answer="page"),
    ApiRoute("GET", "/alerts", "read", "Alerts, silences and receivers", _PAGE, answer="page"),
    ApiRoute("GET", "/strays", "admin", "Launches from before a restore", _PAGE, answer="page"),
    ApiRoute("GET", "/log", "read", "A part of a job's output", (*_LOG, ("limit", CHUNK), ("wait_s", WAIT)), answer="bytes"),
    ApiRoute("GET", "/files", "submit", "Files of a directory below that of an own job",
             (*_texts("job", "path", "after"), ("limit", LIMIT))),
    ApiRoute("GET", "/file", "submit", "A part of a file below the directory of an own job",
             (*_texts("job", "path"), ("offset", BYTES), ("limit", CHUNK)), answer="bytes"),
    ApiRoute("GET", "/log/stream", "read", "The output of a job as it is written", _LOG, answer="events"),
    ApiRoute("GET", "/events", "read", "What happens to jobs, nodes and the rest",
             (("after", EVENT), *_texts("about", "node")), answer="events"),
    ApiRoute("GET", "/tokens", "read", "Tokens, sessions and certificates", (*_texts("user"), *_PAGE), answer="page"),
    ApiRoute("POST", "/submit", "submit", "Submit jobs", body="Submit"),
    ApiRoute("POST", "/test", "submit", "When a job would start", body="Test"),
    ApiRoute("POST", "/command", "read", "Run hsub, hqueue or hcancel", body="Object", answer="bytes"),
    ApiRoute("POST", "/cancel", "manage", "Cancel or signal jobs", body="Cancel"),
    ApiRoute("POST", "/hold", "manage", "Hold jobs", body="Jobs"),
    ApiRoute("POST", "/release", "manage", "Release held jobs", body="Jobs"),
    ApiRoute("POST", "/requeue", "manage", "Requeue jobs", body="Requeue"),
    ApiRoute("POST", "/suspend", "manage", "Suspend jobs", body="Jobs"),
    ApiRoute("POST", "/resume", "manage", "Resume suspended jobs", body="Jobs"),
    ApiRoute("POST", "/update", "manage", "Change jobs", body="Update"),
    ApiRoute("POST", "/crontab", "submit", "Replace the crontab", body="Object"),
    ApiRoute("POST", "/services/start", "submit", "Serve a model", body="Service"),
    ApiRoute("POST", "/services/roll", "submit", "Bring in a new version of a served model", body="Rollout"),
    ApiRoute("POST", "/services/scale", "manage", "Change the number of replicas of a service", body="ServiceScale"),
    ApiRoute("POST", "/services/stop", "manage", "Stop a service", body="ServiceName"),
    ApiRoute("POST", "/nodes/drain", "admin", "Drain nodes", body="Nodes"),
    ApiRoute("POST", "/nodes/resume", "admin", "Resume nodes", body="Nodes"),
    ApiRoute("POST", "/nodes/fence", "admin", "Declare nodes switched off", body="Nodes"),
    ApiRoute("POST", "/nodes/power-down", "admin", "Switch nodes off", body="Nodes"),
    ApiRoute("POST", "/nodes/power-up", "admin", "Switch nodes on", body="Nodes"),
    ApiRoute("POST", "/nodes/remove", "admin", "Remove a node", body="Nodes"),
    ApiRoute("POST", "/partitions/update", "admin", "Set the state of a partition", body="Partition"),
    ApiRoute("POST", "/reservations/create", "admin", "Create a reservation", body="Reservation"),
    ApiRoute("POST", "/reservations/update", "admin", "Change a reservation", body="Reservation"),
    ApiRoute("POST", "/reservations/delete", "admin", "Delete a reservation", body="Reservation"),
    ApiRoute("POST", "/silences/create", "admin", "Silence alerts", body="Silence"),
    ApiRoute("POST", "/silences/end", "admin", "End a silence", body="SilenceEnd"),
    ApiRoute("POST", "/alerts/test", "admin", "Send a test to a receiver of alerts", body="ReceiverTest"),
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
        if wanted := kind.why_bad(value):
            return f"parameter {name!r} has the value {value[:40]!r}; it must be {wanted}"
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
        str: _TEXT_VALUE,
        bool: {"type": "boolean"},
        int: {"type": "integer", "minimum": -MAX_WHOLE, "maximum": MAX_WHOLE},
        float: {"type": "number", "minimum": -MAX_FRACTION, "maximum": MAX_FRACTION},
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


_TEXT_MAP: Json = {"type": "object", "additionalProperties": _TEXT_VALUE, "maxProperties": MAX_NAMES}
_NAMES: Json = {"type": "array", "items": _TEXT_VALUE, "maxItems": MAX_NAMES}


_FLAG_VALUE: Json = {"type": "boolean"}
_REPLICAS: Json = {"type": "integer", "minimum": 0, "maximum": 64}
_NULL_OR_TEXT: Json = {"type": ["string", "null"]}
_FILTER_VALUES: Json = {
    "type": "object",
    "properties": dict.fromkeys(
        ("user", "name", "state", "partition", "account", "qos", "reservation", "node"), _TEXT_VALUE
    ),
    "additionalProperties": False,
}


def _object(required: Sequence[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


_BODIES: Mapping[str, Json] = {
    "Object": {"type": "object"},
    "Submit": _object(
        ["jobs"],
        request_id=_TEXT_VALUE | {"maxLength": 200},
        jobs={"type": "array", "items": {"$ref": "#/components/schemas/JobSpec"}, "minItems": 1, "maxItems": 250},
    ),
    "Test": _object(["job"], job={"$ref": "#/components/schemas/JobSpec"}),
    "Jobs": _object(["jobs"], jobs=_NAMES),
    "Cancel": _object(
        ["jobs"], jobs=_NAMES, filters=_FILTER_VALUES, signal=_NULL_OR_TEXT, batch=_FLAG_VALUE, full=_FLAG_VALUE
    ),
    "Requeue": _object(["jobs"], jobs=_NAMES, incomplete=_FLAG_VALUE, held=_FLAG_VALUE, special=_FLAG_VALUE),
    "Update": _object(["jobs", "changes"], jobs=_NAMES, changes=_TEXT_MAP),
    "Nodes": _object(["nodes"], nodes=_TEXT_VALUE, why=_TEXT_VALUE),
    "Partition": _object(["name", "state"], name=_TEXT_VALUE, state=_TEXT_VALUE),
    "Reservation": _object([], name=_TEXT_VALUE, changes=_TEXT_MAP),
    "Service": _object(
        ["name", "model", "job"],
        name=_TEXT_VALUE,
        model=_TEXT_VALUE,
        job={"$ref": "#/components/schemas/JobSpec"},
        least=_REPLICAS,
        most=_REPLICAS,
        audience=_TEXT_VALUE,
    ),
    "ServiceScale": _object(["name"], name=_TEXT_VALUE, least=_REPLICAS, most=_REPLICAS),
    "Rollout": _object(
        ["name"],
        name=_TEXT_VALUE,
        model=_TEXT_VALUE,
        job={"$ref": "#/components/schemas/JobSpec"},
        back=_FLAG_VALUE,
        canary={"type": "integer", "minimum": 1, "maximum": 100},
        max_errors={"type": "number", "minimum": 0, "maximum": 1},
        max_ttft={"type": "number", "minimum": 1, "maximum": 100},
        checks={"type": "array", "items": {"type": "object"}, "maxItems": 100},
    ),
    "ServiceName": _object(["name"], name=_TEXT_VALUE),
    "Silence": _object(
        ["matchers", "until_s", "why"],
        matchers=_TEXT_MAP,
        until_s={"type": "number", "minimum": 0, "maximum": 1e11},
        why=_TEXT_VALUE,
    ),
    "SilenceEnd": _object(["id"], id={"type": "integer", "minimum": 0, "maximum": MAX_WHOLE}),
    "ReceiverTest": _object(["receiver"], receiver=_TEXT_VALUE),
    "Usage": _object([], accounts=_NAMES, users=_NAMES),
    "Strays": _object(["tokens"], tokens=_NAMES),
    "Revoke": _object([], ids=_NAMES, user=_TEXT_VALUE),
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
    "Answer": _object(["version"], version={"const": 1}),
    "Page": _object(["version"], version={"const": 1}, next_cursor={"type": "string"}),
}
_STATUSES = {
    400: "The request is impossible",
    401: "No valid credential",
    403: "Not allowed",
    404: "Not found",
    405: "The path has other methods",
    408: "The request came too slowly",
    409: "The idempotency key belongs to another request",
    412: "If-Match is not supported",
    413: "The body is too long",
    415: "The body is not JSON",
    429: "Too many requests: wait as many seconds as Retry-After says",
    431: "The head of the request is too long",
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
        {"name": name, "in": "query", "required": False, "schema": kind.schema} for name, kind in route.query
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
    schema = "Page" if route.answer == "page" else "Answer"
    good: Json = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
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
    if route.repeatable:
        key = {"type": "string", "minLength": 1, "maxLength": 200}
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": key})
    return operation
