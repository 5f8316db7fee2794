"""What all web pages have: templates, static files, answers of the controller, errors.

Each page is HTML from a template in `hpcsched/web`, made from answers of the controller to requests with the browser's own
session. So a page shows what the user's commands show, and nothing is decided here. It knows no page in particular.

Source: WHATWG HTML; Content Security Policy Level 3.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import jinja2
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import hpcsched
from hpcsched.errors import report_fault
from hpcsched.gateway.app import SAFE_HEADERS, GatewayApp, ProblemError, packed
from hpcsched.gateway.balancing import RecentMap
from hpcsched.gateway.charts import short
from hpcsched.gateway.routes import TEXT
from hpcsched.gateway.upstream import UpstreamError, UpstreamReply
from hpcsched.listing.text import clean, date_text, output_text, when_text
from hpcsched.model.units import format_mem, format_time_s

Json = dict[str, Any]
Load = Mapping[str, str]  # what a page needs: a name, and the controller's path
Page = Callable[[Request], Awaitable[Response]]

HEAD: Load = {"ping": "/v1/ping", "me": "/v1/me"}  # what each page shows
HISTORY_ROWS = 1000  # jobs of one answer
# A page asks for itself again at most once in so long, for each page that is open: many pages are 10 % of a core together.
REFRESH_MS_EACH = 80
MOST_SHARED = 100  # pages
SHARED_S = 1.0  # clocks, memory and load of nodes change without an event
PACKAGE = Path(hpcsched.__file__).parent
HERE = PACKAGE / "web"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = SAFE_HEADERS | {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "vary": "accept-encoding",
}
HTML = "text/html; charset=utf-8"
MAX_TEMPLATE_CHARS = 64 << 10
_HEADER = re.compile(r"^# (title|description|opens): *(.*?) *\n", re.MULTILINE)

log = logging.getLogger("hpcsched.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTemplate:
    """A job script to begin with.

    `opens`: the page after its submission, "" for that of the job.
    """

    name: str
    title: str
    description: str
    opens: str
    script: str


def our_job_templates(package: Path = PACKAGE) -> Path:
    """Return the folder of the job scripts that come with hpcsched.

    That is `etc/templates` beside the package in a checkout. An installer puts it below the prefix
    of the environment, or below the directory of the package itself (`pip install --target`).
    """
    beside, prefix = package.parent, package.parents[min(3, len(package.parents) - 1)]
    places = [beside / "etc" / "templates", *(base / "share" / "hpcsched" / "templates" for base in (prefix, beside))]
    return next((place for place in places if place.is_dir()), places[1])


def read_job_templates(folders: Sequence[Path]) -> dict[str, JobTemplate]:
    """Return the job scripts in these folders, by name.

    One of a later folder replaces an earlier one of its name. Those that cannot be read are logged, and left out.
    """
    found: dict[str, JobTemplate] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.sh")) if folder.is_dir() else ():
            try:
                with path.open(encoding="utf-8") as file:
                    script = file.read(MAX_TEMPLATE_CHARS + 1)
            except (OSError, UnicodeDecodeError) as error:
                log.error("cannot read the job script %s: %s", path, error)
                continue
            if len(script) > MAX_TEMPLATE_CHARS:
                log.error("cannot use the job script %s: it has more than %d characters", path, MAX_TEMPLATE_CHARS)
                continue
            words = dict(_HEADER.findall(script))
            opens = words.get("opens", "")
            found[path.stem] = JobTemplate(
                name=path.stem,
                title=words.get("title", path.stem),
                description=words.get("description", ""),
                opens={"yes": "open", "terminal": "terminal"}.get(opens, ""),
                script=_HEADER.sub("", script),
            )
    return found


class SharedPage(NamedTuple):
    """A page for all requests of a user until something changes."""

    made: asyncio.Task[Response]
    begun_s: float

    def is_fresh(self) -> bool:
        """Return whether it is being made, or was made a moment ago."""
        if not self.made.done():
            return True
        was_made = not self.made.cancelled() and self.made.exception() is None
        return was_made and time.monotonic() - self.begun_s < SHARED_S


class Site:
    """The templates and static files, which are read once, at the start."""

    def __init__(self, app: GatewayApp, *, has_oidc: bool = False, own_templates: Path | None = None) -> None:
        self.app, self._has_oidc = app, has_oidc
        self.job_templates = read_job_templates([our_job_templates(), *([own_templates] if own_templates else [])])
        self._static = {
            path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix]) for path in sorted((HERE / "static").iterdir())
        }
        tags = {name: blake2b(data, digest_size=6).hexdigest() for name, (data, _) in self._static.items()}
        templates = {path.name: path.read_text("utf-8") for path in (HERE / "templates").iterdir()}
        self._templates = jinja2.Environment(
            loader=jinja2.DictLoader(templates),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_shown,
        )
        self._templates.globals |= {
            "static": lambda name: f"/static/{name}?v={tags[name]}",
            "version": hpcsched.__version__,
            "job_link": job_link,
            "node_link": lambda name: f"/node/{quote(str(name), safe='')}",
            "query": urlencode,
            "date": date_text,
            "when": when_text,
            "duration": format_time_s,
            "memory": format_mem,
            "short": short,
        }
        self._pages = {name: self._templates.get_template(name) for name in templates}
        self._shared = RecentMap[SharedPage](MOST_SHARED)

    def routes(self, pages: Mapping[str, Page]) -> list[Route]:
        """Return the routes of these pages."""
        return [Route(path, self._guarded(page), methods=["GET"]) for path, page in pages.items()]

    def shared_routes(self, pages: Mapping[str, Page]) -> list[Route]:
        """Return the routes of pages that browsers keep open and ask for after each change."""
        return self.routes({path: partial(self._shared_page, page) for path, page in pages.items()})

    async def _shared_page(self, page: Page, request: Request) -> Response:
        """Return the page, made once for all requests of a user between two events.

        The controller checks the credential of each of them: what it answers tells who asks, what that user may do,
        and the last event.
        """
        self.app.admit(request)
        me = await self.app.forward(request, "GET", HEAD["me"])
        if me.status != 200:
            raise refused(me)
        request.scope["state"]["me"] = json.loads(me.body)
        takes_gzip = b"gzip" if "gzip" in request.headers.get("accept-encoding", "") else b""
        asked = b"\0".join((me.body, request.scope["raw_path"], request.scope["query_string"], takes_gzip))
        shared = self._shared.get(asked)
        if shared is None or not shared.is_fresh():
            shared = SharedPage(asyncio.ensure_future(page(request)), time.monotonic())
            self._shared.put(asked, shared)
        answer = await asyncio.shield(shared.made)
        return Response(answer.body, answer.status_code, {**answer.headers, **self._pace()})

    def own_routes(self) -> list[Route]:
        """Return the routes of static files and of the page before a login."""
        return [
            Route("/static/{name}", self.app.guarded(self.static), methods=["GET"]),
            *self.routes({"/login": self.login}),
            Route("/{path:path}", self.nothing, methods=["GET"]),
        ]

    def _guarded(self, page: Page) -> Page:
        """Return the page with errors as pages, too."""

        async def handle(request: Request) -> Response:
            headers: Mapping[str, str] = {}
            try:
                return await page(request)
            except ProblemError as error:
                status, why, headers = error.status, str(error), error.headers
            except UpstreamError as error:
                status, why = error.status, str(error)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                status, why = 500, str(report_fault(error, f"GET {request.url.path[:200]!r}", "the gateway's log"))
            values = {"status": status, "why": why, "has_oidc": self._has_oidc}
            return self.page(request, "error.html", values, status, headers)

        return handle

    def page(
        self,
        request: Request,
        name: str,
        values: Json,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the page that the template `name` makes of the values."""
        body = self._pages[name].render({"me": None, "cluster": "", **values}).encode("utf-8", "replace")
        return packed(request, body, HTML, {**PAGE_HEADERS, **self._pace(), **(headers or {})}, status)

    def _pace(self) -> dict[str, str]:
        return {"x-hpcsched-refresh-ms": str(REFRESH_MS_EACH * self.app.open_streams)}

    async def load(self, request: Request, needed: Load, wanted: Load | None = None, known: Json | None = None) -> Json:
        """Return the controller's answers by name, added to those that are `known`.

        One of `wanted` that is refused is None. Raises ProblemError if one of `needed` is refused.
        """
        state = request.scope["state"]
        found: Json = {name: state[name] for name in HEAD if name in state} if known is None else dict(known)
        head = {name: path for name, path in HEAD.items() if name not in found}
        everything = {**head, **needed, **(wanted or {})}
        for _ in everything:  # each counts: a page must not multiply what a user may ask for
            self.app.admit(request)
        replies = await asyncio.gather(*(self.app.forward(request, "GET", path) for path in everything.values()))
        for name, reply in zip(everything, replies, strict=True):
            if reply.status == 200:
                found[name] = json.loads(reply.body)
            elif wanted is not None and name in wanted:
                found[name] = None
            else:
                raise refused(reply)
        found["cluster"], found["now_s"] = found["ping"]["cluster"], found["ping"]["now_s"]
        return found

    async def history(self, request: Request, known: Json, query: Json, most: int) -> tuple[list[Json], bool]:
        """Return the newest jobs of the history, about `most`, and whether they are all.

        Raises ProblemError.
        """
        jobs: list[Json] = []
        asked = {**query, "limit": HISTORY_ROWS}
        while True:
            page = (await self.load(request, {"page": f"/v1/history?{urlencode(asked)}"}, None, known))["page"]
            jobs += page["jobs"]
            asked["after"] = page.get("next_cursor")
            if not asked["after"] or len(jobs) >= most:
                return jobs, not asked["after"]

    async def static(self, request: Request) -> Response:
        """Send a file of the pages; its address changes with its content."""
        self.app.count(request)
        return self.file(request, request.path_params["name"])

    def file(self, request: Request, name: str) -> Response:
        """Return a static file. Raises ProblemError."""
        found = self._static.get(name)
        if found is None:
            raise ProblemError(404, f"cannot find {request.url.path[:200]!r}")
        headers = {**PAGE_HEADERS, "cache-control": "public, max-age=31536000, immutable"}
        return packed(request, found[0], found[1] + "; charset=utf-8", headers)

    async def nothing(self, request: Request) -> Response:
        """Answer for an unknown address: a page for browsers, problem details for others."""
        if "text/html" not in request.headers.get("accept", ""):
            answer: Response = await self.app.guarded(self.app.nothing)(request)
            return answer

        async def missing(request: Request) -> Response:
            self.app.count(request)
            raise ProblemError(404, f"cannot find {request.url.path[:200]!r}")

        return await self._guarded(missing)(request)

    def logged_in(self, request: Request, user: str) -> Response:
        """Return the page after a login at a provider.

        Only requests of this page carry the new cookie: it is strict, and the login came from another site.
        """
        return self.page(request, "loggedin.html", {"user": user})

    async def login(self, request: Request) -> Response:
        """Ask for a click, because programs that preview links must not use up the code."""
        self.app.count(request)
        code = request.query_params.get("code", "")[:200]
        return self.page(request, "login.html", {"code": code, "has_oidc": self._has_oidc})


def refused(reply: UpstreamReply) -> ProblemError:
    """Return the controller's refusal as the error of a page."""
    try:
        error = json.loads(reply.body)
        return ProblemError(reply.status, str(error["error"]), kind=str(error["kind"]))
    except (ValueError, KeyError, TypeError):
        return ProblemError(502, "cannot read the controller's answer")


def job_link(reference: object) -> str:
    """Return the address of a job's page."""
    return f"/job/{quote(str(reference), safe='')}"


def query_of(request: Request, names: Sequence[str]) -> dict[str, str]:
    """Return the parameters of a page, "" for those that are absent. Raises ProblemError."""
    unknown = set(request.query_params) - set(names)
    found = {name: request.query_params.get(name, "") for name in names}
    if unknown or any(TEXT.why_bad(value) for value in found.values()):
        raise ProblemError(400, f"cannot show that: the page takes {', '.join(names) or 'no parameters'}")
    return found


def _shown(value: Any) -> Any:
    """Return a value as the templates insert it: texts of users have no control characters."""
    if value is None:
        return ""
    if type(value) is not str or value.isprintable():
        return value
    return output_text(value) if "\n" in value else clean(value)
