"""A call of a Python function as a job: the call's folder and script, and its result.

There are two ways for a result to come back. Both send the call to the job as a pickle, which the user's own job loads.

- ``pickle``: call and results are pickles in a folder of the user, which the nodes share. Loading a pickle runs code. So the
  folder and its files must belong to the user, and no other user may open them; otherwise they are not loaded. Who can write as
  the user, or is root where the folder is stored, can run code as the user anyway. Over the network this is refused: the
  results would be written by another host.
- ``json``: the call is in the script, and the result is a line of JSON in the job's output. The caller loads no pickle, so the
  cluster cannot run code on the caller's machine. The nodes need no common directory.

cloudpickle is used if it is installed. Without it, pickle sends functions by name: they must be importable in the job.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shlex
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsched.client import runner
from hpcsched.errors import JobFailedError, ProtocolError, RequestError

PICKLE, JSON = "pickle", "json"
MARK = "\x1ehpcsched-result "
RESULT_BYTES = 1 << 20  # at the end of the output, in which the result's line is
MAX_RESULT_BYTES = 8 << 30
PRIVATE = 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A call that was submitted.

    `folder` is None if its results are JSON in the output; then `mark` begins their line.
    """

    folder: Path | None
    mark: str = ""

    def result_path(self, task: int | None) -> Path:
        """Return the file of a task's result."""
        assert self.folder is not None
        return self.folder / f"{'single' if task is None else task}.result"


def default_folder() -> Path:
    """Return the folder of the calls: ~/.local/share/hpcsched/calls."""
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if data.startswith("/") else Path.home() / ".local/share") / "hpcsched/calls"


def pickled(function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> bytes:
    """Return a call as its job reads it: of a function, with these arguments for each task.

    Raises RequestError if it cannot be pickled.
    """
    try:
        from cloudpickle import dumps  # heavy, and not required
    except ImportError:
        dumps = pickle.dumps
        if getattr(function, "__module__", "") == "__main__" or "<" in getattr(function, "__qualname__", "<"):
            name = getattr(function, "__qualname__", repr(function))
            raise RequestError(
                f"cannot send the function {name}: a job cannot import it; install cloudpickle, or put it into a module"
            ) from None
    try:
        parts = [dumps(function), *(dumps((tuple(args), dict(kwargs))) for args, kwargs in arguments)]
    except Exception as error:
        raise RequestError(f"cannot send the function or its arguments to a job: {error}") from error
    head = {"paths": [path for path in sys.path if path], "lengths": [len(part) for part in parts]}
    return json.dumps(head).encode() + b"\n" + b"".join(parts)


def script_of(python: str, *, call: bytes = b"", mark: str = "", first: int = 0) -> str:
    """Return the script of a job that makes a call; `call`: empty if it is in the folder.

    Raises RequestError.
    """
    if not python.isprintable() or "'" in python:
        raise RequestError(f"cannot run the function with {python!r}: its path has a quote or a control character")
    text = Path(runner.__file__).read_text()
    head, _, rest = text.partition('CALL = ""')
    settings = f"CALL = {base64.b64encode(call).decode()!r}"
    rest = rest.replace('MARK = ""', f"MARK = {mark!r}", 1).replace("FIRST = 0", f"FIRST = {first}", 1)
    # A shell reads the second line as exec; Python reads it as a text.
    return f"#!/bin/sh\n'''exec' {shlex.quote(python)} -u \"$0\" \"$@\"\n' '''\n{head}{settings}{rest}"


def make_folder(below: Path, name: str) -> Path:
    """Return a new folder for a call, which only this user may open. Raises RequestError."""
    try:
        for parent in reversed((below, *below.parents)):
            if not parent.exists():
                with suppress(FileExistsError):
                    parent.mkdir(PRIVATE)
        check_private(below)
        folder = below / name
        folder.mkdir(PRIVATE)
        folder.chmod(PRIVATE)
    except OSError as error:
        raise RequestError(f"cannot make a folder for the call in {below}: {error.strerror}") from None
    return folder


def write_call(folder: Path, call: bytes) -> None:
    """Write the call that the job reads. Raises RequestError."""
    try:
        with open(os.open(folder / "call", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(call)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise RequestError(f"cannot write the call to {folder}: {error.strerror}") from None


def remove(folder: Path) -> None:
    """Remove a call's folder, whose job was refused."""
    with suppress(OSError):
        (folder / "call").unlink()
        folder.rmdir()


def check_private(path: Path, descriptor: int | None = None) -> None:
    """Raise RequestError unless `path` (open as `descriptor`) is ours alone. Raises OSError."""
    found = os.lstat(path) if descriptor is None else os.fstat(descriptor)
    if found.st_uid != os.getuid():
        raise RequestError(f"cannot use {path}: it belongs to uid {found.st_uid}, not to you")
    if stat.S_ISLNK(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
        raise RequestError(f"cannot use {path}: others may open it; only you may: chmod go= {path}")


def read_result(path: Path, job: str, state: str) -> Any:
    """Return the result in a file that a task of this user wrote.

    Raises JobFailedError for a function's exception, FileNotFoundError, RequestError if others may have written it.
    """
    check_private(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        check_private(path, descriptor)
        data = stream.read(MAX_RESULT_BYTES)
    try:
        is_result, value = pickle.loads(data)  # noqa: S301  # this user's own file, see the head of the module
    except Exception as error:
        raise ProtocolError(f"cannot read the result of job {job} in {path}: {error}") from error
    if is_result:
        return value
    name, text, trace, pickled_cause = value
    cause = None
    with suppress(Exception):  # its class may need what only the job has; name, text and traceback say the same
        cause = pickle.loads(pickled_cause)  # noqa: S301
    raise failure(job, state, name, text, trace) from cause


def result_in(output: bytes, mark: str, job: str, state: str) -> Any:
    """Return the result in the last line of the output that begins with `mark`.

    Raises JobFailedError for a function's exception, and if there is no such line.
    """
    begin = output.rfind(b"\n" + mark.encode())
    line, end, _ = output[begin + 1 + len(mark) :].partition(b"\n")
    if begin < 0 or not end:
        raise JobFailedError(f"cannot get the result of job {job}: its output has none", state=state)
    try:
        is_result, value = json.loads(line)
        if is_result is True:
            return value
        name, text, trace = map(str, value)
    except (ValueError, TypeError, RecursionError):
        raise ProtocolError(f"cannot read the result of job {job}: its line in the output is damaged") from None
    raise failure(job, state, name, text, trace)


def without_result(output: str) -> str:
    """Return a job's output without the line of its result."""
    before, mark, _ = output.rpartition("\n" + MARK)
    return before if mark else output


def failure(job: str, state: str, name: str, text: str, trace: str) -> JobFailedError:
    """Return the error for an exception of the function."""
    why = f"{name}: {text}" if text else name
    return JobFailedError(
        f"cannot get the result of job {job}: its function raised {why}", state=state, traceback=trace
    )
