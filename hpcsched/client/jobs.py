"""Jobs and nodes as values, and what the clients for programs do with them, as flows.

A flow is a generator of `hpcsched.client.protocol`.

Knows the API's routes, and how options become a job. The flows know no sockets and do not wait: the clients perform them,
through a `ClusterConnection`.
"""

from __future__ import annotations

import ast
import codecs
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcnode.os import rlimits
from hpcsched import client as transport
from hpcsched.client import functions, https
from hpcsched.client.functions import FunctionCall
from hpcsched.client.https import GatewayEndpoint
from hpcsched.client.protocol import HttpReply, Json, Pause, Send, ask, ask_log, ask_text, query
from hpcsched.errors import (
    JobFailedError,
    NotFoundError,
    ProtocolError,
    RequestError,
    UnavailableError,
    WaitTimeoutError,
    error_of,
)
from hpcsched.jobscript.build import (
    SubmissionWords,
    build_submission,
    check_no_service,
    read_layers,
    without_environment,
)
from hpcsched.jobscript.options import Use, find_option, parse_command_line
from hpcsched.jobscript.script import MAX_SCRIPT_BYTES
from hpcsched.listing.jobs import ENDED_STATES
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import JobSpec

if TYPE_CHECKING:
    from hpcsched.client.protocol import Flow


T = TypeVar("T")

FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0
TASKS_PER_S = 5_000  # of a waited array: the state of more tasks is asked for less often
SILENCE_S = 60.0  # a wait ends if the controller is not there for so long
LATE_RESULT_S = 10.0  # for which a shared directory may not show a new file yet
LOG_WAIT_S = 15.0


# ----- what jobs of both clients are


class JobReference:
    """Names a submitted job, or one task of an array; `call` is its function, if it has one."""

    def __init__(self, job_id: int, task: int | None, call: FunctionCall | None) -> None:
        self._call = call
        self.id = job_id
        self.task = task

    @property
    def display_id(self) -> str:
        """Return the id as commands take it: 7, or 7_3 for a task."""
        return str(self.id) if self.task is None else f"{self.id}_{self.task}"


class TaskSequence(Sequence[T]):
    """The tasks of an array, in the order of their indices."""

    def __init__(self, job_id: int, indices: Sequence[int], tasks: Sequence[T], call: FunctionCall | None) -> None:
        self._call = call
        self._indices = indices
        self._tasks = tasks
        self.id = job_id

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._tasks[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._tasks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}, {len(self)} tasks>"


# ----- values


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job, or a task of an array, as the controller shows it to you.

    `raw`: all its fields (`hqueue --json`).

    Texts that only the owner may see are None in other users' jobs. Times are Unix times.
    """

    id: int  # of an array's task, too
    display_id: str  # 7, or 7_3 for a task
    array_job_id: int | None
    array_task_id: int | None
    name: str
    user: str
    account: str
    partition: str
    qos: str
    state: str  # PENDING, RUNNING, COMPLETED, FAILED ...
    reason: str
    reason_detail: str
    nodes: tuple[str, ...]
    num_cpus: int
    mem_mib: int | None
    gpus: int
    restarts: int
    submitted_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    elapsed_s: float
    time_limit_s: int | None
    exit_code: int | None
    exit_signal: int | None
    work_dir: str | None
    stdout: str | None
    stderr: str | None
    raw: Json = field(repr=False, compare=False)

    @property
    def has_ended(self) -> bool:
        """Return whether the job is over."""
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A node. `raw`: all its fields (`hinfo --json`)."""

    name: str
    state: str  # IDLE, MIXED, ALLOCATED, DOWN, DRAINED ...
    host: str
    partitions: tuple[str, ...]
    features: tuple[str, ...]
    cpus: int
    cpus_alloc: int
    mem_mib: int
    mem_alloc_mib: int
    gpus: int
    gpus_alloc: int
    jobs: tuple[int, ...]
    raw: Json = field(repr=False, compare=False)


def job_info(view: Json) -> JobInfo:
    """Return the job in an answer. Raises ProtocolError."""
    values = _values(JobInfo, view)
    return JobInfo(**values | {"nodes": tuple(values["nodes"]), "raw": view})


def node_info(view: Json) -> NodeInfo:
    """Return the node in an answer. Raises ProtocolError."""
    values = _values(NodeInfo, view)
    lists = {name: tuple(values[name]) for name in ("partitions", "features", "jobs")}
    return NodeInfo(**values | lists | {"gpus": len(values["gpus"]), "raw": view})


def _values(kind: Any, view: object) -> Json:
    names = [one.name for one in fields(kind) if one.name != "raw"]
    if not isinstance(view, dict) or not view.keys() >= set(names):
        raise ProtocolError(f"cannot read the controller's answer: it is not a {kind.__name__}")
    return {name: view[name] for name in names}


# ----- what is submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitPlace:
    """Where a client's jobs come from.

    `work_dir`: of the jobs. `environ`: the variables that options and jobs take. `calls`: the folder of function calls, None
    if results come back as JSON. `python`: the program that runs functions.
    """

    work_dir: str
    environ: Mapping[str, str]
    host: str
    calls: Path | None
    python: str
    is_remote: bool = False  # then jobs take nothing of `environ` unless the option export names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job that is ready to be sent. The same `request_id` creates the same job once."""

    spec: JobSpec
    request_id: str
    call: FunctionCall | None = None

    @property
    def tasks(self) -> tuple[int, ...]:
        """Return the indices of an array's tasks, () for a single job."""
        return self.spec.array.indices if self.spec.array is not None else ()


def prepare_script(
    place: SubmitPlace,
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: Mapping[str, object],
    request_id: str,
) -> Prepared:
    """Return the job of a script: a path, or a text that begins with ``#!``.

    Raises RequestError.
    """
    if isinstance(script, str) and script.startswith("#!"):
        return Prepared(spec=_spec(place, script, "", args, options), request_id=request_id or new_id())
    path = os.path.abspath(script)
    try:
        with open(path, "rb") as stream:
            text = stream.read(MAX_SCRIPT_BYTES + 1).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RequestError(f"cannot read script {path}: {error.strerror}") from None
    return Prepared(spec=_spec(place, text, path, args, options), request_id=request_id or new_id())


def prepare_call(
    place: SubmitPlace,
    function: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    options: Mapping[str, object],
    request_id: str,
    *,
    array: bool,
) -> Prepared:
    """Return the job that calls `function` once for each of the `arguments`.

    Raises RequestError.
    """
    if not arguments:
        raise RequestError("cannot submit a call for each of no arguments")
    name = getattr(function, "__name__", "call")
    named: dict[str, object] = {"job_name": name if name.isprintable() and name.isascii() else "call"}
    if array:
        limit = options.get("array")
        named["array"] = f"0-{len(arguments) - 1}"
        if limit is not None and not str(limit).startswith("%"):
            raise RequestError("cannot take the option array: the arguments make it; array='%4' runs four at a time")
        options = {**options, "array": f"{named['array']}{limit or ''}"}
    elif "array" in options:
        raise RequestError("cannot take the option array for one call: use map")
    request_id = request_id or new_id()
    call = functions.pickled(function, arguments)
    if place.calls is None:
        mark = f"{functions.MARK}{secrets.token_hex(8)} "
        script = functions.script_of(place.python, call=call, mark=mark)
        spec = _spec(place, script, "", (), named | dict(options))
        return Prepared(spec=spec, request_id=request_id, call=FunctionCall(folder=None, mark=mark))
    folder = functions.make_folder(place.calls, secrets.token_hex(16))
    try:
        named["output"] = f"{folder}/%a.out" if array else f"{folder}/single.out"
        spec = _spec(place, functions.script_of(place.python), "", (str(folder),), named | dict(options))
        functions.write_call(folder, call)
    except RequestError:
        functions.remove(folder)
        raise
    return Prepared(spec=spec, request_id=request_id, call=FunctionCall(folder=folder))


def new_id() -> str:
    """Return a new request id."""
    return secrets.token_hex(16)


def _spec(place: SubmitPlace, script: str, path: str, args: Sequence[str], options: Mapping[str, object]) -> JobSpec:
    """Return the job of a script with hsub's options. Raises RequestError."""
    words = [*option_words(options), path or "-", *map(str, args)]
    line = parse_command_line(words)
    called = SubmissionWords(
        command="hsub",
        argv=tuple(words),
        script=script,
        script_path="" if place.is_remote else path,
        environ=place.environ,
        work_dir=place.work_dir,
        host=place.host,
    )
    layers = read_layers(called, line)
    check_no_service(layers)
    return build_submission(called, line, without_environment(layers) if place.is_remote else layers, time.time()).spec


def option_words(options: Mapping[str, object]) -> list[str]:
    """Return hsub's words for options by name: ``cpus_per_task=2`` is ``--cpus-per-task=2``.

    Raises RequestError.
    """
    words = []
    for name, value in options.items():
        option = find_option(name.replace("_", "-"))
        if option.use is Use.COMMAND:
            raise RequestError(f"cannot take the option {name}: it is for the command hsub")
        if value is None or value is False:
            continue
        if value is True:
            words.append(f"--{option.name}")
            continue
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        words.append(f"--{option.name}={text}")
    return words


def own_environment() -> dict[str, str]:
    """Return this process's environment, as hsub sends it."""
    return rlimits.environment()


# ----- flows


def home() -> Flow[str]:
    """Return the user's home directory on the cluster. Raises RequestError if there is none."""
    answer = yield from ask("GET", "/v1/me", again=True)
    return str(answer.get("home") or "/")


def submit(prepared: Prepared) -> Flow[int]:
    """Submit the job and return its id.

    A repeated submission with the same request id creates no second job.
    """
    body = {"request_id": prepared.request_id, "jobs": [spec_to_json(prepared.spec)]}
    try:
        answer = yield from ask("POST", "/v1/submit", body, again=True)
    except RequestError:
        if prepared.call is not None and prepared.call.folder is not None:
            functions.remove(prepared.call.folder)
        raise
    try:
        return int(answer["jobs"][0]["job_id"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ProtocolError("cannot read the controller's answer: it has no job id") from None


def jobs(filters: Mapping[str, str]) -> Flow[list[JobInfo]]:
    """Return the jobs that match all filters.

    Without a filter: all that the controller remembers.
    """
    answer = yield from ask("GET", query("/v1/jobs", **filters), again=True)
    return [job_info(view) for view in answer["jobs"]]


def metrics(target: str, series: Sequence[str], period: Mapping[str, object]) -> Flow[Json]:
    """Return values of series of a node or job. Raises NotFoundError, RequestError."""
    asked = {name: value for name, value in period.items() if value is not None}
    return (
        yield from ask("GET", query("/v1/metrics/history", target=target, series=",".join(series), **asked), again=True)
    )


def nodes() -> Flow[list[NodeInfo]]:
    """Return the nodes."""
    answer = yield from ask("GET", "/v1/nodes", again=True)
    return [node_info(view) for view in answer["nodes"]]


def info(reference: str) -> Flow[list[JobInfo]]:
    """Return a job; of an array all its tasks. Raises NotFoundError."""
    try:
        return (yield from jobs({"id": reference}))
    except NotFoundError:  # it ended a while ago: the history has it
        answer = yield from ask("GET", f"/v1/job/{reference}", again=True)
        return [job_info(view) for view in answer["jobs"]]


def single_info(reference: str) -> Flow[JobInfo]:
    """Return one job. Raises NotFoundError, RequestError."""
    found = yield from info(reference)
    if len(found) != 1:
        raise RequestError(f"cannot tell which job {reference} means: it is an array of {len(found)} tasks")
    return found[0]


def cancel(references: Sequence[str]) -> Flow[None]:
    """End jobs. Jobs that have ended are left as they are. Raises the first refusal of others."""
    body: Json = {"jobs": list(references), "filters": {}, "signal": None, "batch": False, "full": False}
    answer = yield from ask("POST", "/v1/cancel", body, again=True)
    refusals = [refusal for refusal in answer.get("errors", ()) if refusal.get("kind") != "RequestError"]
    if refusals:
        raise error_of(refusals[0])


def states(reference: str) -> Flow[dict[str, str]]:
    """Return the state of a job, or of each task of an array, by its id as it is shown.

    Raises NotFoundError.
    """
    path = query("/v1/queue", id=reference, state="ALL", format="%i %T", array="1", noheader="1")
    try:
        text = yield from ask_text(path, again=True)
    except NotFoundError:
        text = ""
    found = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    if found:
        return found
    return {one.display_id: one.state for one in (yield from info(reference))}


def wait(reference: str, timeout_s: float | None) -> Flow[dict[str, str]]:
    """Wait until a job, or each task of an array, has ended; return the states.

    Raises WaitTimeoutError.

    The controller may be away for a while: jobs run without it.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = FIRST_POLL_S
    seen_s = time.monotonic()
    found: dict[str, str] = {}
    while True:
        try:
            found = yield from states(reference)
            seen_s = time.monotonic()
        except UnavailableError:
            if time.monotonic() > seen_s + SILENCE_S:
                raise
        left = [display_id for display_id, state in found.items() if state not in ENDED_STATES]
        if found and not left:
            return found
        if deadline_s is not None and time.monotonic() >= deadline_s:
            shown = found.get(reference) or f"{len(left)} of {len(found)} tasks have not ended"
            raise WaitTimeoutError(f"cannot wait longer for job {reference}: after {timeout_s:g} s it is {shown}")
        most_s = max(LAST_POLL_S, len(found) / TASKS_PER_S)
        until_s = most_s if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        yield Pause(min(pause_s, most_s, until_s))
        pause_s *= 1.3


def wait_for_result(call: FunctionCall | None, reference: str, task: int | None, timeout_s: float | None) -> Flow[Any]:
    """Wait for a job that calls a function, and return the function's result.

    Raises JobFailedError if there is none, WaitTimeoutError.
    """
    if call is None:
        raise RequestError(f"cannot get a result of job {reference}: it runs a script; wait() returns how it ended")
    found = yield from wait(reference, timeout_s)
    return (yield from result(call, reference, task, found[reference]))


def results(call: FunctionCall | None, job_id: int, tasks: Sequence[int], timeout_s: float | None) -> Flow[list[Any]]:
    """Wait for all tasks of an array, and return their results in order.

    Raises as `wait_for_result`.
    """
    if call is None:
        raise RequestError(f"cannot get results of job {job_id}: it runs a script; wait() returns how it ended")
    found = yield from wait(str(job_id), timeout_s)
    got = []
    for task in tasks:
        reference = f"{job_id}_{task}"
        got.append((yield from result(call, reference, task, found[reference])))
    return got


def result(call: FunctionCall, reference: str, task: int | None, state: str) -> Flow[Any]:
    """Return the result of a job that has ended in `state`.

    Raises JobFailedError if there is none.
    """
    if call.folder is None:
        output = yield from read_end(reference, "out", functions.RESULT_BYTES)
        if state != "COMPLETED" and call.mark.encode() not in output:
            raise (yield from _no_result(reference, state))
        return functions.result_in(output, call.mark, reference, state)
    path = call.result_path(task)
    late_s = time.monotonic() + (LATE_RESULT_S if state == "COMPLETED" else LAST_POLL_S)
    while True:
        try:
            return functions.read_result(path, reference, state)
        except FileNotFoundError:
            if time.monotonic() > late_s:
                raise (yield from _no_result(reference, state, path)) from None
        except OSError as error:
            raise RequestError(f"cannot read the result of job {reference} in {path}: {error.strerror}") from None
        yield Pause(0.1)


def _no_result(reference: str, state: str, path: Path | None = None) -> Flow[JobFailedError]:
    """Return the error for a job without a result.

    Why it ended, and the end of its standard error.
    """
    if state == "COMPLETED" and path is not None:
        why = f"it is COMPLETED, but {path} is not there; if the nodes do not share that directory, use results='json'"
    else:
        ended = yield from single_info(reference)
        code = f" with exit code {ended.exit_code}" if ended.exit_code else ""
        why = f"it is {state}{code}" + (f": {ended.reason_detail}" if ended.reason_detail else "")
    return JobFailedError(f"cannot get the result of job {reference}: {why}", state=state)


def read_end(reference: str, stream: str, most_bytes: int) -> Flow[bytes]:
    """Return the last bytes of a job's output."""
    part = yield from ask_log(reference, stream=stream, offset=-most_bytes)
    data = part.data
    while part.data and part.offset + len(part.data) < part.size:
        part = yield from ask_log(reference, stream=stream, offset=part.offset + len(part.data))
        data += part.data
    return data


class LogFlow:
    """Reads a job's output piece by piece, from its start; with `follow` until the job ends."""

    def __init__(self, reference: str, stream: str, *, follow: bool) -> None:
        self._reference = reference
        self._stream = stream
        self._follow = follow
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.has_ended = False

    def next(self) -> Flow[str]:
        """Return the next piece as text, "" if there is nothing new.

        At the end it sets `has_ended`.
        """
        wait_s = LOG_WAIT_S if self._follow else 0.0
        part = yield from ask_log(self._reference, stream=self._stream, offset=self._offset, wait_s=wait_s)
        if 0 < part.size < self._offset:  # a requeued job writes the file anew
            self._offset = 0
            self._decoder.reset()
            return ""
        self._offset = part.offset + len(part.data)
        is_all = self._offset >= part.size and (part.ended or not self._follow)
        self.has_ended = is_all or (not part.data and not self._follow)
        return self._decoder.decode(part.data, self.has_ended)


def read_text(reference: str, stream: str) -> Flow[str]:
    """Return all of a job's output as text, without the line of a function's result."""
    log = LogFlow(reference, stream, follow=False)
    texts = []
    while not log.has_ended:
        texts.append((yield from log.next()))
    return functions.without_result("".join(texts))


def found_call(reference: str, *, trusts_files: bool) -> Flow[FunctionCall | None]:
    """Return the call that a job makes, None if it runs a script.

    The controller shows a job's script to its owner.

    Raises RequestError if its result is a pickle, and the caller may not load one (`trusts_files`).
    """
    answer = yield from ask("GET", f"/v1/job/{reference}", again=True)
    view = answer["jobs"][0]
    lines = (view.get("script") or "").splitlines()
    marks = [str(ast.literal_eval(line.removeprefix("MARK = "))) for line in lines if line.startswith("MARK = ")]
    args = view.get("script_args") or []
    if not marks:
        return None
    if marks[0]:
        return FunctionCall(folder=None, mark=marks[0])
    if not trusts_files or len(args) != 1:
        raise RequestError(
            f"cannot load the result of job {reference} here: it is a pickle on the cluster; read it there"
        )
    return FunctionCall(folder=Path(args[0]))


# ----- where requests go, and where jobs come from


class ClusterConnection:
    """The controller that a client asks, and the place that its jobs come from."""

    def __init__(
        self, socket: str, endpoint: GatewayEndpoint | None, *, results: str, calls: Path, python: str
    ) -> None:
        self.socket = socket  # "": the default one
        self.endpoint = endpoint  # of a gateway; then there is no socket
        self._results = results
        self._calls = calls
        self._python = python
        self._home = ""  # on the cluster

    def perform(self, step: Send) -> HttpReply:
        """Send one request, and wait for the answer."""
        if self.endpoint is not None:
            return https.perform(self.endpoint, step)
        return transport.perform(step, self.socket or transport.socket_path())

    def prepare(
        self,
        what: str | os.PathLike[str] | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, object],
        request_id: str,
    ) -> Flow[Prepared]:
        """Return the job of a function, or of a script. Raises RequestError."""
        place = yield from self._place()
        if callable(what):
            return prepare_call(place, what, [(tuple(args), kwargs)], options, request_id, array=False)
        if kwargs:
            raise RequestError("cannot give keyword arguments to a script: it has words, which follow the script")
        prepared = prepare_script(place, what, args, options, request_id)
        if prepared.spec.array is not None:
            raise RequestError("cannot submit an array as one job: use submit_array")
        return prepared

    def prepare_array(
        self, script: str | os.PathLike[str], args: Sequence[str], options: Mapping[str, object], request_id: str
    ) -> Flow[Prepared]:
        """Return the array of a script. Raises RequestError."""
        prepared = prepare_script((yield from self._place()), script, args, options, request_id)
        if prepared.spec.array is None:
            raise RequestError("cannot submit an array without indices: give the option array='0-9'")
        return prepared

    def prepare_map(
        self,
        function: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        options: Mapping[str, object],
        request_id: str,
    ) -> Flow[Prepared]:
        """Return the array that calls a function for each item. Raises RequestError."""
        if not iterables:
            raise RequestError("cannot map a function over nothing: give an iterable")
        arguments: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [
            (items, {}) for items in zip(*iterables, strict=False)
        ]
        return prepare_call((yield from self._place()), function, arguments, options, request_id, array=True)

    @property
    def loads_pickles(self) -> bool:
        """Return whether results may be pickles: files of this user on this machine."""
        return self.endpoint is None

    def call_of(self, job_id: int, task: int | None) -> Flow[FunctionCall | None]:
        """Return the call that a job makes, None if it runs a script. Raises NotFoundError."""
        reference = str(job_id) if task is None else f"{job_id}_{task}"
        return found_call(reference, trusts_files=self.loads_pickles)

    def _place(self) -> Flow[SubmitPlace]:
        if self.endpoint is not None:
            if not self._home:
                self._home = yield from home()
            return SubmitPlace(
                work_dir=self._home,
                environ=dict(os.environ),
                host=os.uname().nodename,
                calls=None,
                python=self._python or "python3",
                is_remote=True,
            )
        try:
            work_dir = os.getcwd()
        except OSError as error:
            raise RequestError(f"cannot submit from this directory: {error.strerror}") from None
        return SubmitPlace(
            work_dir=work_dir,
            environ=own_environment(),
            host=os.uname().nodename,
            calls=self._calls if self._results == functions.PICKLE else None,
            python=self._python or sys.executable,
        )


def find_connection(
    *,
    url: str,
    token: str,
    ca_file: str | os.PathLike[str],
    socket: str | os.PathLike[str] | None,
    results: str,
    calls: str | os.PathLike[str] | None,
    python: str,
) -> ClusterConnection:
    """Return the connection for a client's arguments. Raises RequestError, ConfigError."""
    endpoint = None
    if url or (socket is None and transport.is_remote()):
        if socket is not None:
            raise RequestError("cannot ask both a socket and an address: give one of them")
        endpoint = https.find_endpoint(url, token, os.fspath(ca_file))
    results = results or (functions.PICKLE if endpoint is None else functions.JSON)
    if results not in (functions.PICKLE, functions.JSON):
        raise RequestError(f"cannot send back results as {results!r}: there are pickle and json")
    if endpoint is not None and results == functions.PICKLE:
        raise RequestError(
            "cannot send back results as pickles from another machine, as they can run code here: use json"
        )
    folder = Path(calls) if calls is not None else functions.default_folder()
    return ClusterConnection(os.fspath(socket or ""), endpoint, results=results, calls=folder.absolute(), python=python)
