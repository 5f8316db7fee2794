"""hctl's words about checkpoints: list, verify, prune, export, of a training job or in a directory.

Finds the directory by the claims that attempts leave there (hpcsched-checkpoint(5)); what is in it the training package reads,
in a process of its own: this one stays small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcsched import client
from hpcsched.cli.options import UsageError
from hpcsched.errors import NotFoundError

# What each takes beside the directory: NAME=VALUE words, and whether a file.
VERBS = {"list": (), "verify": ("step",), "prune": ("keep", "every"), "export": ("step", "all")}
WITH_JSON = ("list", "verify")
YES, NO = frozenset({"1", "yes", "true"}), frozenset({"0", "no", "false"})
SOME = 4  # tasks of an array that are named to choose from
DEEP = 4  # directories below the job's own in which its checkpoints are looked for


def run(rest: Sequence[str], as_json: bool) -> int:
    """Do what the words say, and return the exit status."""
    if len(rest) < 2 or rest[0] not in VERBS:
        raise UsageError(
            f"cannot tell what to do with checkpoints: hctl checkpoint {'|'.join(VERBS)} JOB|DIRECTORY ..."
        )
    verb, where, *more = rest
    if as_json and verb not in WITH_JSON:
        raise UsageError(f"cannot print {verb} as JSON: only {' and '.join(WITH_JSON)} take --json")
    options = [option for word in more for option in _option(verb, word)] + ["--json"] * as_json
    directory = Path(where) if os.sep in where or Path(where).is_dir() else _of_job(where)
    command = [sys.executable, "-m", "hpctrain.checkpoint", verb, *options, "--", str(directory), *_files(verb, more)]
    status = subprocess.run(command, check=False).returncode
    return status if status >= 0 else 128 - status  # of who was ended by a signal, as a shell says it


def _files(verb: str, words: Sequence[str]) -> list[str]:
    files = [word for word in words if "=" not in word]
    if len(files) != (verb == "export"):
        wanted = "hctl checkpoint export JOB|DIRECTORY FILE [step=N] [all=yes]" if verb == "export" else "no file here"
        raise UsageError(f"cannot understand {' '.join(files)!r}: {wanted}")
    return files


def _option(verb: str, word: str) -> list[str]:
    name, equals, value = word.partition("=")
    if not equals:
        return []
    if name.lower() not in VERBS[verb]:
        raise UsageError(f"cannot understand {word[:60]!r}: {verb} takes {', '.join(VERBS[verb]) or 'no such word'}")
    if name.lower() == "all":
        if value.lower() not in YES | NO:
            raise UsageError(f"cannot understand {word[:60]!r}: all=yes or all=no")
        return ["--all"] if value.lower() in YES else []
    return [f"--{name.lower()}", value]


def _of_job(reference: str) -> Path:
    job, *others = client.call("GET", client.job_path(reference))["jobs"]
    if others:
        some = ", ".join(one["display_id"] for one in (job, *others)[:SOME])
        raise UsageError(f"cannot tell which of {1 + len(others)} jobs {reference} means: name one, as {some}")
    found = [one for one in _directories(Path(job["work_dir"]), DEEP) if _claimed_by(one, str(job["id"]))]
    if len(found) == 1:
        return found[0]
    places = f"more than one directory in {job['work_dir']} has some: {', '.join(map(str, found))}"
    why = places if found else f"no directory in {job['work_dir']} has any of it"
    raise NotFoundError(
        f"cannot find the checkpoints of job {reference}: {why}; name it: hctl checkpoint list DIRECTORY"
    )


def _directories(top: Path, deep: int) -> Iterator[Path]:
    try:
        entries = [entry for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in entries:
        if entry.name == "checkpoints":
            yield Path(entry.path)
        elif deep > 1 and not entry.name.startswith("."):
            yield from _directories(Path(entry.path), deep - 1)


def _claimed_by(directory: Path, job: str) -> bool:
    for path in directory.glob("attempt.*"):
        try:
            note = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # its writer died in it
        if isinstance(note, dict) and note.get("job") == job:
            return True
    return False
