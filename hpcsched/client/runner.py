"""The program of a job that calls a function.

Its text is the second part of the job script.

It reads the call, calls the function, and writes what came of it: as a pickle into the call's folder, or as JSON into a line
of its output. `hpcsched.client.functions` writes the call and reads the result.

Runs on the node with the user's own Python: 3.9 or newer, the standard library, and cloudpickle if the call was pickled with
it. Nothing of hpcsched is imported there.

The call is one line of JSON (`paths`: the submitter's sys.path, `lengths`: of the pickles) and the pickles: the function,
then for each task its arguments.
"""

import base64
import io
import json
import os
import pickle
import stat
import sys
import traceback
from typing import BinaryIO

CALL = ""  # base64; empty: the call is in the folder that the first argument names
MARK = ""  # begins the line with the result as JSON; empty: the result is a pickle in the folder
FIRST = 0  # index of the array's first task
MAX_RESULT_CHARS = 900_000


def main():
    """Call the function and write its result.

    Exits with 1 if there is none, so that the job is FAILED.
    """
    del sys.path[0]  # the directory of the job script
    task = os.environ.get("HPCSCHED_ARRAY_TASK_ID", "")
    folder = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        function, args, kwargs = read_call(folder, int(task or FIRST) - FIRST)
        outcome = (True, function(*args, **kwargs))
    except BaseException as error:
        traceback.print_exc()
        outcome = (False, failure_of(error))
    sys.stdout.flush()
    if MARK:
        text, is_result = as_json(outcome)
        sys.stdout.write("\n" + MARK + text + "\n")
        sys.stdout.flush()
    else:
        data, is_result = as_pickle(outcome)
        write(folder, (task or "single") + ".result", data)
    sys.exit(0 if is_result else 1)


def read_call(folder, index):
    """Return function, arguments and keyword arguments of a task."""
    if CALL:
        stream: BinaryIO = io.BytesIO(base64.b64decode(CALL))
    else:
        path = os.path.join(folder, "call")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        for where in (os.stat(folder), os.fstat(descriptor)):
            if where.st_uid != os.getuid() or stat.S_IMODE(where.st_mode) & 0o077:
                raise PermissionError(f"cannot use {path}: it belongs to another user, or others may open it")
        stream = os.fdopen(descriptor, "rb")
    with stream:
        head = json.loads(stream.readline())
        sys.path[:] = head["paths"] + [path for path in sys.path if path not in head["paths"]]
        begin = stream.tell()
        function = pickle.loads(stream.read(head["lengths"][0]))  # noqa: S301  # the same user wrote it
        stream.seek(begin + sum(head["lengths"][: index + 1]))
        args, kwargs = pickle.loads(stream.read(head["lengths"][index + 1]))  # noqa: S301
    return function, args, kwargs


def failure_of(error):
    """Return an exception as its type's name, its text, its traceback, and itself."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return (type(error).__name__, str(error), text, error)


def as_pickle(outcome):
    """Return the outcome as a pickle, and whether it has a result.

    The exception is a pickle in it, as it may be unreadable.
    """
    is_result, value = outcome
    if is_result:
        try:
            return dumps(outcome), True
        except Exception as error:
            value = failure_of(TypeError(f"cannot send back the result, of type {type(value).__name__}: {error}"))
    name, text, trace, raised = value
    try:
        cause = dumps(raised)
    except Exception:
        cause = None
    return pickle.dumps((False, (name, text, trace, cause))), False


def dumps(value):
    """Return a pickle, by cloudpickle if it is installed."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    return cloudpickle.dumps(value)


def as_json(outcome):
    """Return the outcome as JSON, and whether it has a result."""
    is_result, value = outcome
    if is_result:
        try:
            text = json.dumps([True, value], allow_nan=False)
            if len(text) <= MAX_RESULT_CHARS:
                return text, True
            why = f"it has {len(text)} characters, the most is {MAX_RESULT_CHARS}; write it to a file"
        except (TypeError, ValueError, RecursionError) as error:
            why = str(error)
        value = failure_of(TypeError(f"cannot send back the result, of type {type(value).__name__}, as JSON: {why}"))
    name, text, trace, _ = value
    return json.dumps([False, [name, text[:10_000], trace[-100_000:]]]), False


def write(folder, name, data):
    """Write a file whole or not at all."""
    path = os.path.join(folder, name)
    part = f"{path}.{os.getpid()}.part"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(part, path)


if __name__ == "__main__":
    main()
