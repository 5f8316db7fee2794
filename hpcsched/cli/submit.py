"""hsub, and sbatch, as they start: hand their words, the script and the environment to the controller, which reads them.

What reads them takes a command longer to import than Python takes to start, and the controller has it in memory. Where that
is not enough - for help, --wait, --test-only, an option or a script that is refused, no controller or one of the version
before - the whole command (`hpcsched.cli.hsub`) does it all; so there is one place that says what is wrong.

Knows of the options which ones take a value, no more than what it takes to find the script among the words.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence

from hpcnode.os import rlimits
from hpcsched import client
from hpcsched.cli.errors import Explain, guarded, note, print_version
from hpcsched.cli.output import clean
from hpcsched.client import Json
from hpcsched.errors import RequestError, UnavailableError

NAME = "hsub"
STDIN = ("-", "/dev/stdin")
NOT_SUBMITTED = -1
MAX_BYTES = 4 << 20  # of a script: about a longer one the whole command complains

# The options that the controller can read for us (hpcsched.jobscript.options; a test compares).
WITH_VALUE = frozenset((
    "account", "array", "begin", "chdir", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "deadline",
    "dependency", "distribution", "error", "exclude", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "hint",
    "input", "job-name", "lease", "licenses", "mail-type", "mail-user", "mem", "mem-per-cpu", "mem-per-gpu",
    "mincpus", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "partition", "prefer",
    "priority", "qos", "reservation", "signal", "switches", "time", "tmp", "wrap",
))  # fmt: skip
WITHOUT = frozenset((
    "contiguous", "elastic", "hold", "no-requeue", "overcommit", "parsable", "quiet", "requeue", "spread-job", "verbose",
))  # fmt: skip
LETTERS_WITH_VALUE = "AabcCdDeGiJLmnNopqtwx"
LETTERS_WITHOUT = "HOQv"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return start(NAME, sys.argv[1:] if argv is None else argv, _whole)


def _whole(argv: Sequence[str]) -> int:
    from hpcsched.cli import hsub

    return hsub.main(argv)


def start(
    name: str,
    argv: Sequence[str],
    whole: Callable[[Sequence[str]], int],
    explain: Explain | None = None,
    version: Callable[[str], None] = print_version,
) -> int:
    """Run the command `name` with the controller's help, or else `whole`; return its exit status."""
    if list(argv) in (["--version"], ["-V"]):

        def show(_: Sequence[str]) -> int:
            version(name)
            return 0

        return guarded(name, show, argv)
    status = guarded(name, lambda words: _by_controller(name, words), argv, explain=explain)
    return whole(argv) if status == NOT_SUBMITTED else status


def _by_controller(name: str, argv: Sequence[str]) -> int:
    words = _words(name, argv)
    if words is None:
        return NOT_SUBMITTED
    request_id = os.urandom(16).hex()
    try:
        answer = client.call_again("POST", "/v1/submit", {"request_id": request_id, "words": words})
    except client.BrokenConnectionError as error:
        raise UnavailableError(
            f"{error}; the job may be in the queue already: to submit it for sure and once, add --request-id={request_id}"
        ) from None
    except (RequestError, UnavailableError):
        return NOT_SUBMITTED
    manners = answer["manners"]
    job_id = answer["jobs"][0]["job_id"]
    if manners["parsable"]:
        print(job_id)
    elif not manners["quiet"]:
        print(f"Submitted batch job {job_id}")
    sys.stdout.flush()
    for text in () if manners["quiet"] else answer["notes"]:
        if manners["verbose"]:
            print(f"{name}: {clean(text)}", file=sys.stderr)
        else:
            note(name, clean(text))
    return 0


def _words(name: str, argv: Sequence[str]) -> Json | None:
    """Return what the controller is to read, None if that is for the whole command to do."""
    end = options_end(argv)
    if end is None:
        return None
    wrapped = any(word == "--wrap" or word.startswith("--wrap=") for word in argv[:end])
    path = argv[end] if end < len(argv) else None
    if path == ":":  # the components of a heterogeneous job
        return None
    if wrapped and path is not None:
        return None
    try:
        text = None if wrapped else _script(name, path)
        work_dir = os.getcwd()
    except (OSError, ValueError):
        return None
    whole_path = "" if wrapped or path is None or path in STDIN else os.path.abspath(path)
    return {
        "command": name,
        "argv": list(argv),
        "script": text,
        "script_path": whole_path if whole_path.isprintable() else "",
        "environ": rlimits.environment(),
        "work_dir": work_dir,
        "host": os.uname().nodename,
    }


def options_end(argv: Sequence[str]) -> int | None:
    """Return where the options end among the words; None if one of them is not for the controller to read."""
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        word = argv[at]
        at += 1
        if word == "--":
            return at
        if word.startswith("--"):
            option, equals, _ = word[2:].partition("=")
            if option in WITH_VALUE:
                at += not equals
            elif option not in WITHOUT:
                return None
            continue
        for place, letter in enumerate(word[1:], start=2):
            if letter in LETTERS_WITH_VALUE:
                at += place == len(word)
                break
            if letter not in LETTERS_WITHOUT:
                return None
    return at if at <= len(argv) else None


def _script(name: str, path: str | None) -> str:
    """Return the script's text. Raises OSError, or ValueError for one that the whole command has to look at.

    What was read from standard input is put back for it.
    """
    if path is None or path in STDIN:
        if sys.stdin.isatty():
            note(name, "reading the script from the terminal; end it with Ctrl-D")
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
        sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    else:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError
    return data.decode()
