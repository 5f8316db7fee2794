"""The web pages with which users work: submit a job, see its files and checkpoints.

A script becomes a job here as `hsub` makes one on another machine: the same options, the same notes, none of this process's
variables. The browser sends it with the header that requests with a session need. Files come from the job's node, which reads
them as the user.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hpcsched.api.command import MAX_COMMENTS, MAX_SCRIPT_CHARS, MAX_WORD_CHARS
from hpcsched.errors import HpcschedError, RequestError
from hpcsched.gateway.app import SAFE_HEADERS, ProblemError
from hpcsched.gateway.site import Json, Site, query_of, refused
from hpcsched.gateway.upstream import UpstreamError, UpstreamReply
from hpcsched.jobscript.build import (
    Built,
    SubmissionWords,
    build_submission,
    check_no_service,
    read_layers,
    without_environment,
)
from hpcsched.jobscript.options import OPTIONS, Use, is_set, parse_command_line
from hpcsched.listing.text import clean, output_text, start_words
from hpcsched.model.codec import spec_to_json

# Of the form: the option, its title, and an example.
FIELDS = (
    ("job-name", "Name", "train"),
    ("time", "Time limit", "2:00:00"),
    ("nodes", "Nodes", "1"),
    ("ntasks", "Tasks", "1"),
    ("cpus-per-task", "CPUs per task", "4"),
    ("mem", "Memory on each node", "8G"),
    ("gres", "GPUs on each node", "gpu:1"),
    ("partition", "Partition", "main"),
    ("array", "Array", "0-15%4"),
    ("dependency", "After other jobs", "afterok:12"),
)
# Options of the command itself that would change what the page does.
NOT_HERE = ("help", "version", "dry-run", "test-only", "wait", "each", "wrap", "request-id", "parsable", "json")
FIRST_SCRIPT = "#!/bin/bash\n#HSUB --time=1:00:00\n\n"
MAX_SUBMISSION_BYTES = 2 << 20
SHOWN_BYTES = 256 << 10  # of a file on its page
CHUNK_BYTES = 1 << 20
CHECKPOINT = re.compile(r"step-([0-9]{10,18})\.a([0-9]{4,18})\.json")
CHECKPOINT_DATA = re.compile(r"data-(step-[0-9]{10,18}\.a[0-9]{4,18})-\w+\.bin")
CHECKPOINTS = "checkpoints"  # the directory of them in the output of hpctrain
MAX_SEARCHED = 20  # directories
MAX_LISTED = 20  # answers with a part of a directory of checkpoints


class Checkpoint(NamedTuple):
    """A checkpoint in a listing. `size`: of its manifest and data."""

    name: str
    step: int
    attempt: int
    at_s: float
    size: int


class WorkPages:
    """The pages with which users work."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[Route]:
        """Return the routes for the ASGI application."""
        return [
            *self._site.routes(
                {
                    "/submit": self.submit_page,
                    "/job/{job}/files": self.files,
                    "/job/{job}/file": self.file,
                    "/job/{job}/download": self.download,
                    "/job/{job}/checkpoints": self.checkpoints,
                }
            ),
            Route("/submit", self._site.app.guarded(self.submit), methods=["POST"]),
        ]

    # ----- submit

    async def submit_page(self, request: Request) -> Response:
        """Show the form, with the script of another job if the query names one."""
        given = query_of(request, ("from", "template"))
        earlier, templates = given["from"], self._site.job_templates
        template = templates.get(given["template"])
        if given["template"] and template is None:
            raise ProblemError(404, f"cannot find the job script {given['template'][:100]!r}")
        needed = {"partitions": "/v1/partitions"}
        found = await self._site.load(request, needed | ({"answer": _job_path(earlier)} if earlier else {}))
        job = found["answer"]["jobs"][0] if earlier else {}
        options = [option for option in OPTIONS if option.use is Use.JOB and option.in_script]
        values = {
            "fields": FIELDS,
            "options": options,
            "script": (template.script if template else job.get("script")) or FIRST_SCRIPT,
            "template": template,
            "templates": list(templates.values()),
            "earlier": job,
            "work_dir": job.get("work_dir") or found["me"].get("home", ""),
            "request_id": secrets.token_hex(16),
        }
        return self._site.page(request, "submit.html", {**found, **values})

    async def submit(self, request: Request) -> Response:
        """Submit the job of the form, or say when it would start, or why not."""
        app = self._site.app
        app.admit(request)
        data = await app.json_text(request)
        form = _form_of(data)
        me = json.loads(_good(await app.forward(request, "GET", "/v1/me")).body)
        try:
            built, command = job_of(form, me.get("home", ""), time.time())
        except HpcschedError as error:
            return _json({"error": str(error), "command": ""}, 200 if form["test"] else 400)
        spec = spec_to_json(built.spec)
        notes = [clean(note) for note in built.notes]
        if form["test"]:
            reply = await app.forward(request, "POST", "/v1/test", json.dumps({"job": spec}).encode())
        else:
            body = {"request_id": form["request_id"], "jobs": [spec]}
            reply = await app.forward(request, "POST", "/v1/submit", json.dumps(body).encode())
        if reply.status != 200:
            return _json(
                {"error": str(refused(reply)), "command": command, "notes": notes},
                200 if form["test"] else reply.status,
            )
        answer = json.loads(reply.body)
        if form["test"]:
            return _json({"text": start_words(answer), "command": command, "notes": notes})
        notes += [clean(note) for note in answer.get("notes", ())]
        job = answer["jobs"][0]["job_id"]
        return _json({"job": job, "text": f"Submitted batch job {job}", "command": command, "notes": notes})

    # ----- files

    async def files(self, request: Request) -> Response:
        """List a directory of the job's files."""
        given = query_of(request, ("path", "after"))
        job = request.path_params["job"]
        found = await self._site.load(
            request, {"answer": _job_path(job), "listed": "/v1/files?" + urlencode({"job": job, **given})}
        )
        values = {"job": found["answer"]["jobs"][0], "path": given["path"], "parts": parts_of(given["path"])}
        values["has_checkpoints"] = any(CHECKPOINT.fullmatch(one["name"]) for one in found["listed"]["files"])
        return self._site.page(request, "files.html", {**found, **values})

    async def file(self, request: Request) -> Response:
        """Show the beginning or the end of a file as text."""
        given = query_of(request, ("path", "part"))
        job, path = request.path_params["job"], given["path"]
        found = await self._site.load(request, {"answer": _job_path(job)})
        at_end = given["part"] == "end"
        self._site.app.admit(request)
        reply = await self._part(request, job, path, -SHOWN_BYTES if at_end else 0, SHOWN_BYTES)
        size, offset = (int(reply.headers[name]) for name in ("x-size", "x-offset"))  # int: of our own controller
        values = {
            "job": found["answer"]["jobs"][0],
            "path": path,
            "parts": parts_of(path),
            "text": output_text(reply.body.decode("utf-8", "replace")),
            "is_binary": b"\0" in reply.body,
            "size": size,
            "from": offset,
            "to": offset + len(reply.body),
        }
        return self._site.page(request, "file.html", {**found, **values})

    async def download(self, request: Request) -> Response:
        """Send a whole file, in parts as the browser takes them."""
        job, path = request.path_params["job"], query_of(request, ("path",))["path"]
        self._site.app.admit(request)
        first = await self._part(request, job, path, 0, CHUNK_BYTES)
        size = int(first.headers["x-size"])  # int: of our own controller

        async def whole() -> AsyncIterator[bytes]:
            part, sent = first.body[:size], 0
            try:
                while part:
                    yield part
                    sent += len(part)
                    if sent >= size:
                        return
                    more = await self._part(request, job, path, sent, min(CHUNK_BYTES, size - sent))
                    part = more.body[: size - sent]
            except (ProblemError, UpstreamError):
                pass
            if sent < size:
                await _end_early(request)  # so that the browser knows that it has not all

        name = path.rpartition("/")[2]
        headers = {
            **SAFE_HEADERS,
            "content-length": str(size),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        }
        return StreamingResponse(whole(), headers=headers, media_type="application/octet-stream")

    async def checkpoints(self, request: Request) -> Response:
        """Show the checkpoints in a directory of the job's files."""
        path, job = query_of(request, ("path",))["path"], request.path_params["job"]
        found = await self._site.load(request, {"answer": _job_path(job)})
        files, is_whole = await self._listed(request, found, path, MAX_LISTED)
        checkpoints = checkpoints_of(files)
        values = {
            "job": found["answer"]["jobs"][0],
            "path": path,
            "parts": parts_of(path),
            "checkpoints": checkpoints,
            "is_whole": is_whole,
            "elsewhere": [] if path or checkpoints else await self._directories(request, found, files),
        }
        return self._site.page(request, "checkpoints.html", {**found, **values})

    async def _listed(self, request: Request, found: Json, path: str, most: int) -> tuple[list[Json], bool]:
        """Return the files of a directory, of at most so many answers, and whether these are all."""
        job, files, after = request.path_params["job"], list[Json](), ""
        for _ in range(most):
            query = urlencode({"job": job, "path": path, "after": after})
            listed = (await self._site.load(request, {"listed": f"/v1/files?{query}"}, None, found))["listed"]
            files += listed["files"]
            after = listed.get("next", "")
            if not after:
                return files, True
        return files, False

    async def _directories(self, request: Request, found: Json, files: Sequence[Json]) -> list[str]:
        """Return directories of checkpoints here, and in the directories that are here."""
        names = [one["name"] for one in files if one["kind"] == "directory"]
        paths = [CHECKPOINTS] if CHECKPOINTS in names else []
        for name in names[:MAX_SEARCHED]:
            inner, _ = await self._listed(request, found, name, 1)
            paths += [
                f"{name}/{one['name']}" for one in inner if (one["name"], one["kind"]) == (CHECKPOINTS, "directory")
            ]
        return paths

    async def _part(self, request: Request, job: str, path: str, offset: int, limit: int) -> UpstreamReply:
        query = urlencode({"job": job, "path": path, "offset": offset, "limit": limit})
        return _good(await self._site.app.forward(request, "GET", f"/v1/file?{query}"))


async def _end_early(request: Request) -> None:
    """End the connection in the middle of an answer."""
    request.scope["state"]["connection"].drop()
    await asyncio.sleep(0)  # until the server knows


def _good(reply: UpstreamReply) -> UpstreamReply:
    """Return the reply if it is no refusal. Raises ProblemError."""
    if reply.status != 200:
        raise refused(reply)
    return reply


def _job_path(reference: str) -> str:
    return f"/v1/job/{quote(reference, safe='')}"


def _json(values: Json, status: int = 200) -> Response:
    return Response(json.dumps(values), status, headers=SAFE_HEADERS, media_type="application/json")


def _form_of(data: bytes) -> Json:
    """Return the values of the form. Raises ProblemError."""
    try:
        form: Any = json.loads(data) if len(data) <= MAX_SUBMISSION_BYTES else None
    except (ValueError, RecursionError):
        form = None
    usual: Json = {"script": "", "options": {}, "more": "", "work_dir": "", "test": True, "request_id": ""}
    good = isinstance(form, dict) and form.keys() <= usual.keys()
    good = good and all(type(value) is type(usual[name]) for name, value in form.items())
    if not good or not all(isinstance(value, str) for value in form.get("options", {}).values()):
        raise ProblemError(400, "cannot submit: the body must be " + json.dumps(usual))
    return {**usual, **form}


def job_of(form: Mapping[str, Any], home: str, now_s: float) -> tuple[Built, str]:
    """Return the job of a form, and the command that it stands for. Raises RequestError."""
    known = {name for name, _, _ in FIELDS}
    if unknown := set(form["options"]) - known:
        raise RequestError(f"cannot submit: the form has no field {min(unknown)[:60]!r}")
    words = [f"--{name}={form['options'][name]}" for name, _, _ in FIELDS if form["options"].get(name)]
    try:
        words += shlex.split(form["more"])
    except ValueError as error:
        raise RequestError(f"cannot read the further options: {error}") from None
    script = form["script"].replace("\r\n", "\n")
    if sum(map(len, words)) > MAX_WORD_CHARS or len(script) > MAX_SCRIPT_CHARS or script.count("\n#") > MAX_COMMENTS:
        raise RequestError("cannot submit so much from this page: submit the script with hsub")
    line = parse_command_line([*words, "-"])
    refused_here = [name for name in NOT_HERE if is_set(line.options, name) or name in line.options]
    if refused_here:
        raise RequestError(f"cannot use --{refused_here[0]} here: it is for the command hsub")
    if line.script != "-" or line.args:
        raise RequestError("cannot read the further options: write them as --name=value")
    work_dir = form["work_dir"] or home
    called = SubmissionWords(
        command="hsub", argv=(*words, "-"), script=script, script_path="", environ={}, work_dir=work_dir, host="web"
    )
    layers = without_environment(read_layers(called, line))
    check_no_service(layers)
    built = build_submission(called, line, layers, now_s)
    place = f"--chdir={work_dir}" if form["work_dir"] and form["work_dir"] != home else ""
    return built, shlex.join(["hsub", *filter(None, [place]), *words, "job.sh"])


def parts_of(path: str) -> list[tuple[str, str]]:
    """Return the name and the path of each directory on the way to a file."""
    names = path.split("/") if path else []
    return [(name, "/".join(names[: at + 1])) for at, name in enumerate(names)]


def checkpoints_of(files: Sequence[Mapping[str, Any]]) -> list[Checkpoint]:
    """Return the checkpoints whose manifests are among the files, the newest step first."""
    sizes: dict[str, int] = {}
    for one in files:
        if named := CHECKPOINT_DATA.fullmatch(one["name"]):
            sizes[named[1]] = sizes.get(named[1], 0) + one["size"]
    checkpoints = []
    for one in files:
        named = CHECKPOINT.fullmatch(one["name"])
        if named is not None and one["kind"] == "file":
            stem = one["name"].removesuffix(".json")
            size = one["size"] + sizes.get(stem, 0)
            checkpoints.append(Checkpoint(stem, int(named[1]), int(named[2]), one["at_s"], size))
    return sorted(checkpoints, key=lambda one: (-one.step, -one.attempt))
