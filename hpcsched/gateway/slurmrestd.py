"""slurmrestd's paths: its clients list, submit, read, change and cancel jobs.

A request becomes one or two requests to the controller, which authorizes them like every other one. Knows paths, parameters and
answers; the objects are in `hpcsched.gateway.slurm_objects`. All versions of `VERSIONS` have the same routes.

Source: the OpenAPI specifications of Slurm 23.11 to 25.11.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hpcnode.wire import gate
from hpcsched.errors import HpcschedError, NotFoundError, RequestError, UnavailableError, error_of, report_fault
from hpcsched.gateway import slurm_objects as objects
from hpcsched.gateway.app import METHODS, SAFE_HEADERS, GatewayApp, ProblemError
from hpcsched.gateway.slurm_objects import Json
from hpcsched.gateway.upstream import UpstreamError
from hpcsched.model.codec import spec_to_json
from hpcsched.model.units import number

PAGE_JOBS = 200  # converted at a time: other requests are answered in between
PAGE_TRIES, PAGE_WAIT_S = 3, 5.0  # of a later page that the controller cannot answer now
MAX_PARAMETERS = 50
CLUSTER_S = 60.0  # how long the cluster's name is kept
_REFERENCE = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True, slots=True)
class SlurmCall:
    """A request, as its handler sees it. `name`: of the job, node or other object in the path."""

    request: Request
    version: str
    name: str
    query: Mapping[str, str]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class SlurmRoute:
    """A route. `path`: after the version; ``{...}`` is the name of an object.

    `missing`: Slurm's words if that object does not exist.
    """

    method: str
    path: str
    handler: Callable[[SlurmPaths, SlurmCall], Awaitable[Json | Response]]
    query: tuple[str, ...] = ()
    missing: str = objects.INVALID_JOB


class SlurmPaths:
    """Answers requests to slurmrestd's paths."""

    def __init__(self, app: GatewayApp) -> None:
        self._app = app
        self._cluster = ""
        self._cluster_until_s = 0.0

    def routes(self) -> list[Route]:
        """Return the routes for the ASGI application."""
        return [Route(f"/{family}/{{path:path}}", self.answer, methods=METHODS) for family in ("slurm", "slurmdb")]

    async def answer(self, request: Request) -> Response:
        """Answer a request in slurmrestd's form, errors too."""
        headers: Mapping[str, str] = {}
        source = f"{request.method} {request.url.path[:200]}"
        missing = objects.INVALID_JOB
        try:
            self._app.admit(request)
            route, version, name = _found(request.method, request.url.path)
            missing = route.missing
            call = SlurmCall(request, version, name, *_parameters(request, route))
            body = await route.handler(self, call)
            if isinstance(body, Response):
                return body
            return _response(objects.answer(body, warnings=call.warnings))
        except (HpcschedError, ProblemError, UpstreamError) as error:
            status, shown = _shown(error, source, missing)
            if not isinstance(error, HpcschedError):
                headers = error.headers if isinstance(error, ProblemError) else {"retry-after": "1"}
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            wrong = report_fault(error, f"{request.method} {request.url.path[:200]!r}", "the gateway's log")
            status, shown = 500, objects.error_object(str(wrong), _WORDS[503], source)
        return _response(objects.answer({}, errors=[shown]), status, headers)

    # ----- the controller

    async def _ask(self, call: SlurmCall, method: str, path: str, body: object = None, **query: str) -> Json:
        """Return the controller's answer. Raises HpcschedError, ProblemError, UpstreamError."""
        target = path + ("?" + urlencode(query) if query else "")
        data = b"" if body is None else json.dumps(body).encode()
        reply = await self._app.forward(call.request, method, target, data)
        values: Json = json.loads(reply.body)
        if reply.status != 200:
            if reply.status == 429:
                raise ProblemError(429, values["error"], {"retry-after": reply.headers.get("retry-after", "1")})
            raise error_of(values)
        return values

    async def _cluster_name(self, call: SlurmCall) -> str:
        if time.monotonic() > self._cluster_until_s:
            self._cluster = (await self._ask(call, "GET", "/v1/ping"))["cluster"]
            self._cluster_until_s = time.monotonic() + CLUSTER_S
        return self._cluster

    async def _described(self, call: SlurmCall) -> Json:
        """Return the body, an object. Raises RequestError."""
        data = await self._app.json_text(call.request)
        try:
            body = gate.read_json(data)
        except gate.GateError as error:
            raise RequestError(f"cannot read the request: {error}") from None
        if not isinstance(body, dict):
            raise RequestError("cannot read the request: it is not a JSON object")
        return body

    # ----- jobs

    async def jobs(self, call: SlurmCall) -> Response:
        """Send the queue, page by page.

        If the controller refuses a later page, the answer ends with the error: its beginning is sent.
        """
        cluster = await self._cluster_name(call)
        pages = self._pages(call)
        first = await anext(pages)

        async def text() -> AsyncIterator[bytes]:
            errors: list[Json] = []
            yield b'{"last_backfill":' + _text(objects.number(first["now_s"])) + b',"jobs":['
            page, is_first = first, True
            while True:
                shown = [_text(objects.job_object(view, cluster)) for view in page["jobs"]]
                if shown:
                    yield (b"" if is_first else b",") + b",".join(shown)
                    is_first = False
                try:
                    page = await anext(pages)
                except StopAsyncIteration:
                    break
                except (HpcschedError, ProblemError, UpstreamError) as error:
                    errors = [_shown(error, f"GET {call.request.url.path[:200]}", "")[1]]
                    break
            last = {"last_update": objects.number(first["now_s"])}
            yield b"]," + _text(objects.answer(last, errors=errors, warnings=call.warnings))[1:]

        return StreamingResponse(text(), headers=SAFE_HEADERS, media_type="application/json")

    async def _pages(self, call: SlurmCall, **wanted: str) -> AsyncIterator[Json]:
        page = await self._ask(call, "GET", "/v1/jobs", limit=str(PAGE_JOBS), **wanted)
        while True:
            yield page
            if "next_cursor" not in page:
                return
            page = await self._later_page(call, wanted | {"limit": str(PAGE_JOBS), "after": page["next_cursor"]})

    async def _later_page(self, call: SlurmCall, query: dict[str, str]) -> Json:
        """Return a page after the first one.

        It asks again if the controller cannot answer now, because the client cannot ask for a part.
        """
        for _ in range(PAGE_TRIES):
            try:
                return await self._ask(call, "GET", "/v1/jobs", **query)
            except ProblemError as error:
                if error.status != 429:
                    raise
                wait_s = min(float(error.headers.get("retry-after", "1")), PAGE_WAIT_S)
            except (UnavailableError, UpstreamError):
                wait_s = 1.0
            await asyncio.sleep(wait_s)
        return await self._ask(call, "GET", "/v1/jobs", **query)

    async def states(self, call: SlurmCall) -> Json:
        """Return the states of jobs; of all without ``job_id``."""
        wanted = {"id": call.query["job_id"]} if call.query.get("job_id") else {}
        return {
            "jobs": [
                {"job_id": view["display_id"], "state": [view["state"]], "reason": view["reason"]}
                async for page in self._pages(call, **wanted)
                for view in page["jobs"]
            ]
        }

    async def job(self, call: SlurmCall) -> Json:
        cluster = await self._cluster_name(call)
        found = await self._ask(call, "GET", f"/v1/job/{_reference(call.name)}")
        now = objects.number(time.time())
        return {
            "jobs": [objects.job_object(view, cluster) for view in found["jobs"]],
            "last_update": now,
            "last_backfill": now,
        }

    async def submit(self, call: SlurmCall) -> Json:
        me = await self._ask(call, "GET", "/v1/me")  # before its body is read: it has a credential
        body = await self._described(call)
        spec, warnings = objects.submission(body, me["home"] or "/", time.time())
        call.warnings.extend(warnings)
        made = await self._ask(call, "POST", "/v1/submit", {"request_id": "", "jobs": [spec_to_json(spec)]})
        job_id = made["jobs"][0]["job_id"]
        result = {"job_id": job_id, "step_id": "batch", "error_code": 0, "error": "", "job_submit_user_msg": ""}
        return {"job_id": job_id, "step_id": "batch", "job_submit_user_msg": "", "result": result}

    async def update(self, call: SlurmCall) -> Json:
        """Change a job, or hold or release it."""
        reference = _reference(call.name)
        await self._ask(call, "GET", "/v1/me")
        body = await self._described(call)
        changes, hold = objects.changes_of(body["job"] if isinstance(body.get("job"), dict) else body)
        done: list[int] = []
        if changes:
            done = await self._act(call, "update", {"jobs": [reference], "changes": changes})
        if hold is not None:
            done = await self._act(call, "hold" if hold else "release", {"jobs": [reference]})
        results = [{"job_id": one, "step_id": "", "error": "No error", "error_code": 0, "why": ""} for one in done]
        return {"results": results, "job_id": reference, "step_id": "", "job_submit_user_msg": ""}

    async def cancel(self, call: SlurmCall) -> Json:
        await self._act(call, "cancel", {"jobs": [_reference(call.name)], **_signal(call.query.get("signal", ""))})
        return {"status": []}

    async def cancel_many(self, call: SlurmCall) -> Json:
        """Cancel or signal the jobs that a body names or describes; each refusal is in the answer."""
        await self._ask(call, "GET", "/v1/me")
        body = {name: value for name, value in (await self._described(call)).items() if value not in (None, "", [])}
        if unknown := body.keys() - _FILTERS.keys() - {"jobs", "signal"}:
            raise RequestError(f"cannot take the field {min(unknown)[:60]}: jobs cannot be chosen by it here")
        named = body.get("jobs", [])
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise RequestError("cannot take the field jobs: it is not a list of texts")
        filters = {_FILTERS[name]: _joined(name, body[name]) for name in body.keys() & _FILTERS.keys()}
        if not named and not filters:
            raise RequestError("cannot cancel: the body must be an object that names jobs, or describes them")
        wanted = {"jobs": [_reference(one) for one in named], "filters": filters}
        outcome = await self._ask(call, "POST", "/v1/cancel", wanted | _signal(str(body.get("signal", ""))))
        status = []
        for error in outcome["errors"]:
            shown = objects.error_of(error_of(error), "")[1]
            why = {"string": shown["error"], "code": shown["error_number"], "message": shown["description"]}
            leading = error["job"].partition("_")[0]
            status.append({
                "error": why,
                "step_id": error["job"],
                "job_id": objects.number(number(leading) if leading.isdigit() else None),
                "federation": {"sibling": ""},
            })  # fmt: skip
        return {"status": status}

    async def _act(self, call: SlurmCall, verb: str, body: Json) -> list[int]:
        """Return the ids of the changed jobs. Raises the error of the first one that was refused."""
        outcome = await self._ask(call, "POST", f"/v1/{verb}", body)
        if outcome["errors"]:
            raise error_of(outcome["errors"][0])
        return list(outcome["jobs"])

    # ----- the cluster

    async def ping(self, call: SlurmCall) -> Json:
        began_s = time.monotonic()
        found = await self._ask(call, "GET", "/v1/ping")
        return {"pings": [objects.ping_object(found, round((time.monotonic() - began_s) * 1e6))]}

    async def diag(self, call: SlurmCall) -> Json:
        return {"statistics": objects.statistics_object(await self._ask(call, "GET", "/v1/ping"))}

    async def _list(self, call: SlurmCall, kind: str, shown: Callable[[Json], Json]) -> Json:
        """Return all objects of a kind, or the one that the path names. Raises NotFoundError."""
        found = (await self._ask(call, "GET", f"/v1/{kind}"))[kind]
        if call.name:
            found = [view for view in found if view["name"] == call.name]
            if not found:
                raise NotFoundError(f"cannot find {call.name!r} in {kind}")
        return {kind: [shown(view) for view in found], "last_update": objects.number(time.time())}

    async def nodes(self, call: SlurmCall) -> Json:
        cluster = await self._cluster_name(call)
        return await self._list(call, "nodes", lambda view: objects.node_object(view, cluster))

    async def update_node(self, call: SlurmCall) -> Json:
        """Drain or resume nodes."""
        await self._ask(call, "GET", "/v1/me")
        body = {name: value for name, value in (await self._described(call)).items() if value not in (None, "", [], {})}
        states = body.get("state")
        if body.keys() - {"state", "reason", "name"} or states not in (["DRAIN"], ["RESUME"], ["UNDRAIN"]):
            raise RequestError(
                'cannot take the field state: it must be ["DRAIN"] or ["RESUME"], with a reason, and no others'
            )
        verb = "drain" if states == ["DRAIN"] else "resume"
        why = {"why": str(body.get("reason", ""))} if verb == "drain" else {}
        await self._ask(call, "POST", f"/v1/nodes/{verb}", {"nodes": call.name, **why})
        return {}

    async def partitions(self, call: SlurmCall) -> Json:
        cluster = await self._cluster_name(call)
        return await self._list(call, "partitions", lambda view: objects.partition_object(view, cluster))

    async def reservations(self, call: SlurmCall) -> Json:
        return await self._list(call, "reservations", objects.reservation_object)

    async def delete_reservation(self, call: SlurmCall) -> Json:
        await self._ask(call, "POST", "/v1/reservations/delete", {"name": call.name})
        return {}

    async def licenses(self, call: SlurmCall) -> Json:
        return await self._list(call, "licenses", objects.license_object)

    async def shares(self, call: SlurmCall) -> Json:
        cluster = await self._cluster_name(call)
        found = (await self._ask(call, "GET", "/v1/shares"))["shares"]
        accounts, users = (set(filter(None, call.query.get(name, "").split(","))) for name in ("accounts", "users"))
        shown = [
            objects.share_object(view, cluster, call.version)
            for view in found
            if (not accounts or view["account"] in accounts) and (not users or view["user"] in users)
        ]
        return {
            "shares": {"shares": shown, "total_shares": sum(view["shares"] for view in found if view["depth"] == 1)}
        }

    # ----- ended jobs

    async def history(self, call: SlurmCall) -> Json:
        """Return jobs of the database, the one in the path or those that match."""
        query = {"limit": "1000"}
        if call.name:
            query["id"] = _reference(call.name)
        for name, ours in (("users", "user"), ("state", "state"), ("job_name", "name")):
            if call.query.get(name):
                query[ours] = call.query[name]
        for name, ours in (("start_time", "start_s"), ("end_time", "end_s")):
            if call.query.get(name):
                query[ours] = f"{number(call.query[name].removeprefix('uts'), 'the parameter ' + name):.0f}"
        cluster = await self._cluster_name(call)
        found = (await self._ask(call, "GET", "/v1/history", **query))["jobs"]
        if call.name and not found:
            raise NotFoundError(f"cannot find job {call.name}")
        if len(found) >= 1000:
            call.warnings.append("only 1000 jobs are shown: ask for a shorter time with start_time and end_time")
        return {"jobs": [objects.history_object(view, cluster) for view in found]}


_UPDATED = ("update_time", "flags")
_HISTORY = ("users", "state", "job_name", "start_time", "end_time")
# fmt: off
ROUTES: tuple[SlurmRoute, ...] = (
    SlurmRoute("GET", "slurm/ping", SlurmPaths.ping),
    SlurmRoute("GET", "slurm/diag", SlurmPaths.diag),
    SlurmRoute("GET", "slurm/jobs", SlurmPaths.jobs, _UPDATED),
    SlurmRoute("DELETE", "slurm/jobs", SlurmPaths.cancel_many),
    SlurmRoute("GET", "slurm/jobs/state", SlurmPaths.states, ("job_id",)),
    SlurmRoute("POST", "slurm/job/submit", SlurmPaths.submit, missing=""),
    SlurmRoute("GET", "slurm/job/{job}", SlurmPaths.job, _UPDATED),
    SlurmRoute("POST", "slurm/job/{job}", SlurmPaths.update),
    SlurmRoute("DELETE", "slurm/job/{job}", SlurmPaths.cancel, ("signal", "flags")),
    SlurmRoute("GET", "slurm/nodes", SlurmPaths.nodes, _UPDATED),
    SlurmRoute("GET", "slurm/node/{node}", SlurmPaths.nodes, _UPDATED, objects.INVALID_NODE),
    SlurmRoute("POST", "slurm/node/{node}", SlurmPaths.update_node, (), objects.INVALID_NODE),
    SlurmRoute("GET", "slurm/partitions", SlurmPaths.partitions, _UPDATED),
    SlurmRoute("GET", "slurm/partition/{partition}", SlurmPaths.partitions, _UPDATED, objects.INVALID_PARTITION),
    SlurmRoute("GET", "slurm/reservations", SlurmPaths.reservations, _UPDATED),
    SlurmRoute("GET", "slurm/reservation/{reservation}", SlurmPaths.reservations, _UPDATED, objects.INVALID_RESERVATION),
    SlurmRoute("DELETE", "slurm/reservation/{reservation}", SlurmPaths.delete_reservation, (), objects.INVALID_RESERVATION),
    SlurmRoute("GET", "slurm/licenses", SlurmPaths.licenses),
    SlurmRoute("GET", "slurm/shares", SlurmPaths.shares, ("accounts", "users")),
    SlurmRoute("GET", "slurmdb/jobs", SlurmPaths.history, _HISTORY),
    SlurmRoute("GET", "slurmdb/job/{job}", SlurmPaths.history),
)
# fmt: on
_EXACT = {(route.method, route.path): route for route in ROUTES if "{" not in route.path}
_NAMED = {(route.method, route.path.partition("{")[0]): route for route in ROUTES if "{" in route.path}
_FILTERS = {
    "account": "account", "job_name": "name", "job_state": "state", "nodes": "node", "partition": "partition",
    "qos": "qos", "reservation": "reservation", "user_name": "user",
}  # fmt: skip
_WORDS = {
    400: "Failure during parsing",
    401: "Authentication failure",
    403: "Access/permission denied",
    404: "Unable to find requested URL",
    405: "Unable to find requested URL",
    429: "Rate limit exceeded, please retry momentarily",
    503: "Unable to contact slurm controller (connect failure)",
}


def _found(method: str, path: str) -> tuple[SlurmRoute, str, str]:
    """Return route, version and name in the path of a request. Raises ProblemError."""
    family, version, *rest = [*path.strip("/").split("/"), "", ""]
    words = [word for word in rest if word]
    if version not in objects.VERSIONS:
        raise ProblemError(
            404, f"cannot find {path[:200]!r}: there are /slurm and /slurmdb, {', '.join(objects.VERSIONS)}"
        )
    target = "/".join([family, *words])
    if route := _EXACT.get((method, target)):
        return route, version, ""
    if words and (route := _NAMED.get((method, "/".join([family, *words[:-1], ""])))):
        name = unquote(words[-1])
        if _NAME.fullmatch(name) is not None or "+" in name or "[" in name:
            return route, version, name[:200]
    raise ProblemError(404, f"cannot {method} {path[:200]!r}: see docs/rest.md for the paths that exist")


def _parameters(request: Request, route: SlurmRoute) -> tuple[dict[str, str], list[str]]:
    """Return the parameters that a route takes, and warnings about the others.

    Raises RequestError.
    """
    text = request.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise RequestError("cannot read the request: the parameters are not UTF-8, or too many") from None
    query = {name: value for name, value in pairs if name in route.query}
    for value in query.values():
        if len(value) > 4_000 or not value.isprintable():
            raise RequestError("cannot read the request: the parameter is too long, or not printable")
    ignored = sorted({name for name, _ in pairs} - set(route.query))
    return query, [f"the parameter {name[:40]!r} has no effect" for name in ignored]


def _shown(error: HpcschedError | ProblemError | UpstreamError, source: str, missing: str) -> tuple[int, Json]:
    """Return the status of an error, and the error in Slurm's form."""
    if isinstance(error, HpcschedError):
        return objects.error_of(error, source, missing)
    words = _WORDS[503] if isinstance(error, UpstreamError) else _WORDS.get(error.status, "Failure during parsing")
    return error.status, objects.error_object(str(error), words, source)


def _reference(text: str) -> str:
    """Return the job id of a path. Raises NotFoundError."""
    if _REFERENCE.fullmatch(text) is None:
        raise NotFoundError(f"cannot find job {text[:40]!r}: it is not a job id")
    return text


def _signal(text: str) -> dict[str, str]:
    return {"signal": text} if text and text not in ("KILL", "SIGKILL", "9") else {}


def _joined(name: str, value: object) -> str:
    """Return a filter's value as one text. Raises RequestError."""
    values: list[object] = value if isinstance(value, list) else [value]
    texts = [one for one in values if isinstance(one, str)]
    if len(texts) < len(values):
        raise RequestError(f"cannot take the field {name}: it is not a text, or a list of texts")
    return ",".join(texts)


def _text(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _response(body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_text(body), status, {**SAFE_HEADERS, **(headers or {})}, media_type="application/json")
