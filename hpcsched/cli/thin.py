"""hsub, hqueue, hcancel and their Slurm names as thin clients of the controller.

A client sends words, script and environment, and writes the answer.

If there was a C compiler at installation, `thin.c` replaces this, with the same protocol. Knows no options and no formats. The
whole command runs in its own process if the controller cannot do the rest: no controller, a terminal to read from, text that is
not UTF-8, or the answer "python". So one place writes the errors.

Source: `hpcsched.api.command`, for the answer.
"""

from __future__ import annotations

import importlib
import io
import os
import stat
import sys
import time
from collections.abc import Sequence

from hpcnode.os import rlimits
from hpcsched import client
from hpcsched.cli.output import guarded, terminal_width
from hpcsched.errors import ConfigError, ProtocolError, UnavailableError

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any

MODULES = {  # command -> the module with its whole code, in a function `main` or with Slurm's name
    "hsub": "hpcsched.cli.hsub",
    "hqueue": "hpcsched.cli.hqueue",
    "hcancel": "hpcsched.cli.hcancel",
    "sbatch": "hpcsched.cli.hsub",
    "squeue": "hpcsched.cli.hqueue",
    "scancel": "hpcsched.cli.hcancel",
}
REQUEST_ID = "HPCSCHED_REQUEST_ID"  # of a submission whose answer was lost: the whole command sends it again
MAX_SCRIPT_BYTES = 256 << 10
_STDIN = -1
_PYTHON = -2  # status: the whole command has to do it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that this process is called by; return its exit status."""
    return run(os.path.basename(sys.argv[0]), sys.argv[1:] if argv is None else argv)


def whole(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, in this process."""
    name, *words = sys.argv[1:] if argv is None else argv
    return _whole(name, words)


def run(name: str, argv: Sequence[str]) -> int:
    """Run the command `name` by the controller, or else here; return its exit status."""
    if client.is_remote():  # the cluster has no file and no account of this machine
        return _whole(name, argv)
    status = guarded(name, lambda words: _by_controller(name, words), argv)
    return _whole(name, argv) if status == _PYTHON else status


def _whole(name: str, argv: Sequence[str]) -> int:
    module = importlib.import_module(MODULES[name])
    status: int = getattr(module, name if name.startswith("s") else "main")(argv)
    return status


def _by_controller(name: str, argv: Sequence[str]) -> int:
    request_id = os.urandom(16).hex()
    script = _guess(argv) if name in ("hsub", "sbatch") else {}
    for _ in range(2):
        try:
            body = {**_facts(name, argv), "request_id": request_id, **script}
            "".join([*body["argv"], *body["environ"], body["work_dir"]]).encode()
            response = client.request("POST", "/v1/command", body)
        except client.BrokenConnectionError:
            if name in ("hcancel", "scancel"):
                raise
            os.environ[REQUEST_ID] = request_id
            return _PYTHON
        except (OSError, UnicodeEncodeError, UnavailableError, ConfigError, ProtocolError):
            return _PYTHON
        if response.status != 200:
            return _PYTHON
        status, wanted = _handle(response.body)
        if wanted is None:
            return status
        script = _script(argv, wanted)
        if not script:
            break
    return _PYTHON


def _facts(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return what the controller needs to know of this process. Raises OSError."""
    return {
        "command": name,
        "argv": list(argv),
        "environ": [f"{variable}={value}" for variable, value in rlimits.environment().items()],
        "work_dir": os.getcwd(),
        "host": os.uname().nodename,
        "width": terminal_width(),
        "out_is_terminal": sys.stdout.isatty(),
        "err_is_terminal": sys.stderr.isatty(),
        "utc_offset_s": time.localtime().tm_gmtoff,
    }


def _guess(argv: Sequence[str]) -> dict[str, Any]:
    """Return the first word that names a file as the script; the controller may correct it."""
    at = next((at for at, word in enumerate(argv) if not word.startswith("-") and os.path.isfile(word)), None)
    return {} if at is None else _script(argv, at)


def _script(argv: Sequence[str], at: int) -> dict[str, Any]:
    """Return the script as fields of the request, {} if that is not possible.

    It is the word at this place, or standard input.
    """
    try:
        if at == _STDIN:
            if sys.stdin.isatty():
                return {}
            data = sys.stdin.buffer.read()
            sys.stdin = io.TextIOWrapper(io.BytesIO(data))  # for the whole command
        else:
            with open(argv[at], "rb", opener=_open) as stream:
                if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    return {}
                data = stream.read(MAX_SCRIPT_BYTES + 1)
        if len(data) > MAX_SCRIPT_BYTES or b"\0" in data:
            return {}
        return {"script": data.decode(), "script_at": at}
    except (OSError, UnicodeDecodeError, IndexError):
        return {}


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a writer is not a script


def _handle(body: bytes) -> tuple[int, int | None]:
    """Print the answer; return the exit status, and the place of a requested script."""
    at = 0
    while (end := body.find(b"\n", at)) >= 0:
        word, _, text = body[at:end].partition(b" ")
        number = int(text) if text.isdigit() and len(text) < 19 else -1  # int: its length is bounded
        at = end + 1
        match word:
            case b"exit":
                return number, None
            case b"script":
                return _PYTHON, number
            case b"python":
                return _PYTHON, None
            case b"1" | b"2" if 0 <= number <= len(body) - at:
                stream = sys.stdout if word == b"1" else sys.stderr
                stream.write(body[at : at + number].decode("utf-8", "replace"))
                stream.flush()
                at += number
            case _:
                break
    raise ProtocolError("cannot read the controller's answer")
