"""`hsub --each`: many scripts in one call.

All are read before the first one is sent. They are sent in parts, each of them one transaction of the controller: its jobs
are on disk, all of them, before their ids are printed. A part bears the request id of the call with its number behind it, so
that a call that broke off can be repeated under the same id.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcsched import client
from hpcsched.cli.hsub import STDIN, Face, build, tell, wait_for
from hpcsched.cli.options import UsageError
from hpcsched.cli.output import clean, print_json
from hpcsched.client import Json
from hpcsched.errors import HpcschedError, RequestError
from hpcsched.jobscript.build import Built
from hpcsched.jobscript.layers import is_set, last
from hpcsched.jobscript.scan import CommandLine
from hpcsched.model.codec import spec_to_json

PART_JOBS = 500  # others wait while a part is checked

Options = Mapping[str, Sequence[str]]


def submit_each(face: Face, line: CommandLine, argv: Sequence[str]) -> int:
    """Submit each of the scripts that `line` names, and return the exit status. Raises UsageError, HpcschedError."""
    paths = _paths(line)
    read = _read(face, line, paths, argv[: len(argv) - len(paths)])
    options = [its_options for its_options, _ in read]

    def wanted(name: str) -> bool:
        return any(is_set(one, name) for one in options)

    request_id = last(line.options, "request-id") or os.urandom(16).hex()
    answered: list[Json] = []
    notes: list[str] = []
    for number, at in enumerate(range(0, len(read), PART_JOBS)):
        jobs = [spec_to_json(built.spec) for _, built in read[at : at + PART_JOBS]]
        try:
            answer = client.call_again("POST", "/v1/submit", {"request_id": f"{request_id}.{number}", "jobs": jobs})
        except HpcschedError as error:
            raise _about(error, paths, at, request_id) from None
        answered += answer["jobs"]
        notes += answer["notes"]
        if not wanted("json"):
            _print(answer["jobs"], quiet=wanted("quiet"), parsable=wanted("parsable"))
    if wanted("json"):
        print_json({"version": 1, "jobs": answered, "notes": notes})
    sys.stdout.flush()
    if not wanted("quiet"):
        tell(face, notes, aloud=wanted("verbose"))
    return max(wait_for(face, job["job_id"]) for job in answered) if wanted("wait") else 0


def _paths(line: CommandLine) -> tuple[str, ...]:
    if line.script is None:
        raise UsageError("cannot submit each of no scripts: name them behind the options")
    paths = (line.script, *line.args)
    if any(path in STDIN for path in paths):
        raise UsageError("cannot read a script from standard input with --each: name files")
    for option in ("test-only", "dry-run"):
        if is_set(line.options, option):
            raise UsageError(f"cannot take --{option} with --each: ask for one script at a time")
    return paths


def _read(face: Face, line: CommandLine, paths: Sequence[str], words: Sequence[str]) -> list[tuple[Options, Built]]:
    """Return the options and the job of each script; `words` are those of the command line before them."""
    read = []
    for path in paths:
        try:
            options, built = build(replace(line, script=path, args=()), [*words, path], face)
        except RequestError as error:
            raise RequestError(f"{clean(path)}: {error}; nothing was submitted") from None
        if not is_set(options, "quiet"):
            tell(face, [f"{path}: {text}" for text in built.notes], aloud="verbose" in options)
        read.append((options, built))
    return read


def _about(error: HpcschedError, paths: Sequence[str], at: int, request_id: str) -> HpcschedError:
    """Return the error of the part that begins `at`, with what it is about, what is in the queue, and what to do."""
    where = "" if error.at is None else f"{clean(paths[at + error.at])}: "
    there = (
        f"the first {at} of {len(paths)} scripts are in the queue" if at else "no script is known to be in the queue"
    )
    said = type(error)(f"{where}{error}; {there}: to submit the others, and none twice, add --request-id={request_id}")
    said.by_controller = error.by_controller
    return said


def _print(jobs: Sequence[Json], *, quiet: bool, parsable: bool) -> None:
    if parsable:
        sys.stdout.writelines(f"{job['job_id']}\n" for job in jobs)
    elif not quiet:
        sys.stdout.writelines(f"Submitted batch job {job['job_id']}\n" for job in jobs)
    sys.stdout.flush()
