"""Run hsub, hqueue, hcancel and their Slurm names for thin clients: POST /v1/command.

The client sends what it gets from the kernel and its environment: words, script, environment, directory, terminal. The answer
is the command's output and exit status. A client therefore needs no options, no formats and no JSON. The same code runs in the
command's own process (`hpcsched.commands`).

Rules: nothing that the client sends is trusted. The kernel identifies the caller. A command accesses jobs through the API's own
routes, with their checks. Input that takes long to parse, and commands that need the client's files, terminal or time zone, are
left to the client.

The answer: ``1 LENGTH`` and ``2 LENGTH`` lines, each followed by that many bytes for standard output or error. The last line is
``exit STATUS``. Or the only line is ``script PLACE`` (send the script, which is the word at this place, -1: standard input) or
``python`` (run the whole command in its own process: nothing was done here).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from hpcsched.api import web
from hpcsched.api.identity import is_account
from hpcsched.auth.authorize import Identity
from hpcsched.commands import cancel, queue, submit
from hpcsched.commands.call import Call, Caller, Collected, Entrance, Json, OwnProcessError, ScriptError
from hpcsched.commands.options import explained, slurm_explained
from hpcsched.errors import HpcschedError, RequestError, error_of
from hpcsched.model.spec import JobSpec

MAX_WORDS = 1_000
MAX_WORD_CHARS = 32 << 10  # of all words
MAX_VARIABLES = 2_000
MAX_SCRIPT_CHARS = 256 << 10
MAX_COMMENTS = 500  # lines of the script that begin with #: each may be an option, or look like one
MAX_ACCOUNTS = 8  # to look up, each perhaps in a directory service

Explain = Callable[[str, HpcschedError], tuple[str, int]]
Submit = Callable[[str, JobSpec], Awaitable[Json]]


class CommandWords(NamedTuple):
    """The data that a client sent."""

    command: str
    argv: tuple[str, ...]
    environ: dict[str, str]
    work_dir: str
    host: str
    request_id: str
    script: str | None
    script_at: int | None  # the script's place among the words, -1: standard input
    width: int
    out_is_terminal: bool
    err_is_terminal: bool
    utc_offset_s: int


class _Command(NamedTuple):
    """A command that the controller can run."""

    run: Entrance
    explain: Explain


_TEXT, _TEXTS, _NUMBER, _FLAG = (
    (str, "a text"),
    (list, "a list of texts"),
    (int, "a whole number"),
    (bool, "true or false"),
)
_TYPES = {
    "command": _TEXT, "work_dir": _TEXT, "host": _TEXT, "request_id": _TEXT, "script": _TEXT, "argv": _TEXTS, "environ": _TEXTS,
    "width": _NUMBER, "utc_offset_s": _NUMBER, "script_at": _NUMBER, "out_is_terminal": _FLAG, "err_is_terminal": _FLAG,
}  # fmt: skip


def read_words(body: Json) -> CommandWords:
    """Return the data that a client sent.

    Raises RequestError, and OwnProcessError for more data than is parsed here.
    """
    wrong = set(body) ^ (set(CommandWords._fields) - (set() if "script" in body else {"script", "script_at"}))
    if wrong:
        raise RequestError(f"cannot run the command: unknown or missing fields: {', '.join(sorted(wrong))[:200]}")
    for name, value in body.items():
        wanted, what = _TYPES[name]
        if type(value) is not wanted or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            raise RequestError(f'cannot run the command: "{name}" is not {what}')
    script = body.get("script")
    _check_sizes(body["argv"], body["environ"], script or "")
    environ: dict[str, str] = {}
    for item in body["environ"]:
        name, equals, value = item.partition("=")
        if equals:
            environ.setdefault(name, value)  # the first of several with one name counts, as in Python
    texts = {"argv": tuple(body["argv"]), "environ": environ, "script": script, "script_at": body.get("script_at")}
    return CommandWords(**{**body, **texts})


def _check_sizes(argv: Sequence[str], environ: Sequence[str], script: str) -> None:
    """Raise OwnProcessError for data that would block the event loop for long."""
    if (
        len(argv) > MAX_WORDS
        or sum(map(len, argv)) > MAX_WORD_CHARS
        or len(environ) > MAX_VARIABLES
        or len(script) > MAX_SCRIPT_CHARS
        or script.count("\n#") > MAX_COMMENTS
    ):
        raise OwnProcessError


def can_show(environ: Mapping[str, str]) -> bool:
    """Return whether the caller's output is UTF-8, as Python would decide by the environment."""
    if environ.get("PYTHONIOENCODING") or "0" in (environ.get("PYTHONUTF8"), environ.get("PYTHONCOERCECLOCALE")):
        return False
    name = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "C"
    encoding = name.partition(".")[2].partition("@")[0]
    return name in ("C", "POSIX") or encoding.replace("-", "").lower() == "utf8"


async def answer(words: CommandWords, identity: Identity, api: Routed) -> bytes:
    """Run the command for the client, and return the answer's body.

    Raises RequestError for an unknown command.
    """
    command = _command(words)
    output = Collected()
    caller = Caller(
        environ=words.environ,
        uid=identity.uid,
        user=identity.user,
        host=words.host,
        work_dir=words.work_dir,
        width=words.width,
        out_is_terminal=words.out_is_terminal,
        err_is_terminal=words.err_is_terminal,
        in_our_zone=words.environ.get("TZ") == os.environ.get("TZ")
        and words.utc_offset_s == time.localtime().tm_gmtoff,
    )
    call = Call(caller=caller, api=api, output=output, script=_script_of(words), in_own_process=False)
    try:
        if not can_show(words.environ):
            raise OwnProcessError
        status = await command.run(words.argv, call)
    except OwnProcessError:
        return b"python\n"
    except ScriptError as error:
        return b"script %d\n" % (-1 if error.at is None else error.at)
    except HpcschedError as error:
        text, status = command.explain(words.command, error)
        output.err(text + "\n")
    return _framed(output.parts) + b"exit %d\n" % status


def _framed(parts: Sequence[tuple[int, str]]) -> bytes:
    encoded = [(stream, text.encode("utf-8", "backslashreplace")) for stream, text in parts if text]
    return b"".join([b"%d %d\n%b" % (stream, len(data), data) for stream, data in encoded])


def _script_of(words: CommandWords) -> Callable[[str | None, int | None], str]:
    """Return the function that gives the command its script, if it is the one that was sent."""

    def script(_path: str | None, at: int | None) -> str:
        if words.script is None or words.script_at != (-1 if at is None else at):
            raise ScriptError(at)
        return words.script

    return script


def _command(words: CommandWords) -> _Command:
    match words.command:
        case "hsub" | "sbatch":
            setup = submit.SBATCH if words.command == "sbatch" else submit.HSUB

            async def run(argv: Sequence[str], call: Call) -> int:
                return await submit.submit(argv, call, setup, request_id=words.request_id, now_s=time.time())

            return _Command(run, setup.explain)
        case "hqueue":
            return _Command(queue.hqueue, explained)
        case "hcancel":
            return _Command(cancel.hcancel, explained)
        case "squeue":
            return _Command(queue.squeue, _slurms(queue.SQUEUE.contact))
        case "scancel":
            return _Command(cancel.scancel, _slurms(cancel.SCANCEL.contact))
    raise RequestError(
        f"cannot run the command {words.command[:60]!r}: only hsub, hqueue, hcancel and their Slurm names"
    )


def _slurms(contact: str) -> Explain:
    return lambda name, error: slurm_explained(name, error, contact)


class Routed:
    """The API for a command: each request goes to its usual route, for the same account."""

    def __init__(
        self,
        request: web.Request,
        find: Callable[[web.Request], web.Handler],
        submit: Submit,
        job_id_of: Callable[[str], int],
    ) -> None:
        self._request = request
        self._find = find
        self._submit = submit
        self._job_id_of = job_id_of
        self._accounts = 0

    async def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Json:
        answer: Json = json.loads(await self._answer("GET", path, parameters or {}))
        return answer

    async def text(self, path: str, parameters: Mapping[str, str]) -> str:
        return (await self._answer("GET", path, parameters)).decode("utf-8", "replace")

    async def job(self, reference: str) -> Json:
        return await self.get(f"/v1/job/{quote(reference, safe='')}")

    async def cancel(self, body: Json) -> Json:
        answer: Json = json.loads(await self._answer("POST", "/v1/cancel", {}, json.dumps(body).encode()))
        return answer

    async def submit(self, request_id: str, spec: JobSpec) -> Json:
        try:
            return await self._submit(request_id, spec)
        except HpcschedError as error:
            error.by_controller = True
            raise

    def job_id_of(self, reference: str) -> int:
        try:
            return self._job_id_of(reference)
        except HpcschedError as error:
            error.by_controller = True
            raise

    def is_account(self, name: str) -> bool:
        self._accounts += 1
        if self._accounts > MAX_ACCOUNTS:
            raise OwnProcessError
        return is_account(name)

    async def _answer(self, method: str, path: str, parameters: Mapping[str, str], body: bytes = b"") -> bytes:
        query = {name: value for name, value in parameters.items() if value}
        asked = web.Request(method, path, query, {}, body, peer=self._request.peer, uid=self._request.uid)
        asked.scopes, asked.source = self._request.scopes, self._request.source
        response = await self._find(asked)(asked)
        if response.status != 200:
            raise error_of(json.loads(response.body))
        return response.body
