"""hsub, and sbatch: a script (a file, standard input, or --wrap) becomes a job.

Its options are those of job scripts (`hpcsched.jobscript`): command line over environment over the script's lines. Every
submission bears a request id, so that one which is sent again after a lost connection is still one job. Most submissions get
by without this module, which takes long to import: `hpcsched.cli.submit`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence

from hpcnode.commands import slurm_text
from hpcnode.os import rlimits
from hpcsched import client
from hpcsched.cli.errors import Explain, complain, guarded, note, print_version
from hpcsched.cli.output import clean, print_json
from hpcsched.cli.slurm import own_cluster
from hpcsched.client import Json
from hpcsched.commands.options import UsageError, option_lines
from hpcsched.commands.slurm import clusters_of, refuse_others
from hpcsched.errors import HpcschedError, NotFoundError, RequestError, UnavailableError
from hpcsched.jobscript.build import Built
from hpcsched.jobscript.layers import is_set, last
from hpcsched.jobscript.options import OPTIONS
from hpcsched.jobscript.scan import CommandLine, parse_command_line
from hpcsched.jobscript.script import MAX_SCRIPT_BYTES
from hpcsched.jobscript.submission import SubmissionWords, read_submission
from hpcsched.listing.states import ENDED_STATES
from hpcsched.listing.text import start_words
from hpcsched.model.codec import spec_to_json

NAME = "hsub"
STDIN = ("-", "/dev/stdin")
FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0

HELP_HEAD = """\
Usage: NAME [OPTIONS] SCRIPT [ARGUMENT...]
       NAME [OPTIONS] < SCRIPT
       NAME OPTIONS : OPTIONS ... SCRIPT
       NAME [OPTIONS] --wrap COMMAND
       NAME [OPTIONS] --each SCRIPT...

Submit a job. The script's #HSUB and #SBATCH lines may have the same options; those of the command line win over
HSUB_* and SBATCH_* variables, and these over the script's. What follows the script is passed to it.
"""
HELP_TAIL = """
File names may have %j (job id), %x (name), %u (user), %N (node), %A and %a (array and task), %t (task of a step).
"""


class Face(
    namedtuple(
        "Face",
        "name version explain cluster",
        defaults=(
            None,
            False,
        ),
    )
):
    """The name that the command goes by, and how it says its version and its errors."""

    __slots__ = ()

    name: str
    version: Callable[[str], None]
    explain: Explain | None
    cluster: bool  # --parsable with --clusters writes the cluster's name behind the id


OURS = Face(NAME, print_version)


def main(argv: Sequence[str] | None = None, face: Face = OURS) -> int:
    """Run the command and return its exit status."""
    return guarded(face.name, lambda words: _work(words, face), argv, explain=face.explain)


def _work(argv: Sequence[str], face: Face) -> int:
    try:
        line = parse_command_line(argv)
    except UsageError:
        raise
    except RequestError as error:
        raise UsageError(str(error)) from None
    if is_set(line.options, "help"):
        sys.stdout.write(help_text(face.name))
        return 0
    if is_set(line.options, "version"):
        face.version(face.name)
        return 0
    if is_set(line.options, "each"):
        return submit_each(face, line, argv)
    options, built = build(line, argv, face)
    if face.cluster and "verbose" in options:
        for text in option_block(options):
            print(f"{face.name}: {clean(text)}", file=sys.stderr)
    if not is_set(options, "quiet"):
        tell(face, built.notes, aloud="verbose" in options)
    job = spec_to_json(built.spec)
    if is_set(options, "dry-run"):
        print_json({"version": 1, "job": job, "notes": list(built.notes)})
        return 0
    if is_set(options, "test-only"):
        return _test(face, job, options)
    return _submit(face, job, options)


def option_block(options: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines in which sbatch --verbose lists the options that were given, in any place."""
    rule = f"{'-' * 20} {'-' * 20}"
    given = [f"{name:<20}: {','.join(values) or 'set'}" for name, values in sorted(options.items())]
    return ["defined options", rule, *given, rule, "end of defined options"]


def help_text(name: str = NAME) -> str:
    """Return what ``--help`` prints."""
    known = {option.name: option for option in OPTIONS}
    lines = []
    for title, names in slurm_text.groups(name, known):
        lines += ["", f"{title or 'Options'}:"]
        for option in map(known.__getitem__, names):
            lines += option_lines(option.spelling, option.help, indented=not option.short)
    return HELP_HEAD.replace("NAME", name) + "\n".join(lines) + "\n" + HELP_TAIL


def build(line: CommandLine, argv: Sequence[str], face: Face) -> tuple[Mapping[str, Sequence[str]], Built]:
    """Return the options of all layers, and the job that they ask for."""
    script = _read(face, line.script) if last(line.options, "wrap") is None else None
    try:
        work_dir = os.getcwd()
    except OSError as error:
        raise RequestError(f"cannot submit from this directory: {error.strerror}") from None
    words = SubmissionWords(
        command=face.name,
        argv=tuple(argv),
        script=script,
        script_path=_path(line.script),
        environ=rlimits.environment(),
        work_dir=work_dir,
        host=os.uname().nodename,
    )
    read = read_submission(words, line, time.time(), _job_id_of)
    if face.cluster and (named := clusters_of(last(read.options, "clusters") or "")):
        refuse_others(named, own_cluster())
    return read.options, read.built


def _job_id_of(reference: str) -> int:
    """Return the number that was printed when the job `reference` (its name, or ``last``) was submitted."""
    job = client.call("GET", client.job_path(reference))["jobs"][0]
    return int(job["array_job_id"] or job["id"])


def _path(script: str | None) -> str:
    """Return the script's whole path; "" if it was in no file, or in one whose path cannot be written down."""
    path = "" if script is None or script in STDIN else os.path.abspath(script)
    return path if path.isprintable() else ""


def _read(face: Face, path: str | None) -> str:
    """Return the script's text; bytes that are no UTF-8 are kept for the check to name them."""
    try:
        if path is None or path in STDIN:
            if sys.stdin.isatty():
                note(face.name, "reading the script from the terminal; end it with Ctrl-D")
            data = sys.stdin.buffer.read(MAX_SCRIPT_BYTES + 1)
        else:
            with open(path, "rb") as stream:
                data = stream.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise RequestError(f"cannot read script {clean(path)}: {error.strerror}") from None
    return data.decode("utf-8", "surrogateescape")


def tell(face: Face, notes: Sequence[str], *, aloud: bool) -> None:
    for text in notes:
        if aloud:
            print(f"{face.name}: {clean(text)}", file=sys.stderr)
        else:
            note(face.name, clean(text))


def _test(face: Face, job: Json, options: Mapping[str, Sequence[str]]) -> int:
    answer = client.call("POST", "/v1/test", {"job": job})
    if is_set(options, "json"):
        print_json(answer)
    else:
        print(f"{face.name}: {start_words(answer)}", file=sys.stderr)
    return 0


def _submit(face: Face, job: Json, options: Mapping[str, Sequence[str]]) -> int:
    request_id = last(options, "request-id") or os.urandom(16).hex()
    try:
        answer = client.call_again("POST", "/v1/submit", {"request_id": request_id, "jobs": [job]})
    except client.BrokenConnectionError as error:
        raise UnavailableError(
            f"{error}; the job may be in the queue already: to submit it for sure and once, add --request-id={request_id}"
        ) from None
    job_id = answer["jobs"][0]["job_id"]
    if is_set(options, "json"):
        print_json(answer)
    elif is_set(options, "parsable"):
        print(f"{job_id};{own_cluster()}" if face.cluster and last(options, "clusters") else job_id)
    elif not is_set(options, "quiet"):
        print(f"Submitted batch job {job_id}")
    sys.stdout.flush()
    tell(face, answer.get("notes", ()), aloud="verbose" in options)
    return wait_for(face, job_id) if is_set(options, "wait") else 0


def wait_for(face: Face, job_id: int) -> int:
    """Wait until the job (of an array: all its tasks) is over; return the highest exit code."""
    pause_s = FIRST_POLL_S
    told = False
    while True:
        try:
            jobs = _look(job_id)
        except UnavailableError as error:  # the job goes on without the controller
            if not told:
                note(face.name, f"{error}; waiting for it")
            told = True
        else:
            if all(job["state"] in ENDED_STATES for job in jobs):
                return _exit_status(face, jobs)
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, LAST_POLL_S)


def _look(job_id: int) -> list[Json]:
    try:
        jobs = client.call("GET", client.query("/v1/jobs", id=job_id))["jobs"]
    except NotFoundError:  # ended a while ago: the history has it
        jobs = client.call("GET", client.job_path(str(job_id)))["jobs"]
    return [job for job in jobs if not job.get("het_offset")]  # the others' state is that of the first component


def _exit_status(face: Face, jobs: Sequence[Json]) -> int:
    statuses = []
    for job in jobs:
        status = 128 + job["exit_signal"] if job["exit_signal"] else job["exit_code"] or 0
        failed_by_itself = job["state"] == "FAILED" and job["started_at_s"] is not None
        if job["state"] != "COMPLETED" and not (failed_by_itself and status):  # else the status does not say it
            why = f": {clean(job['reason_detail'])}" if job["reason_detail"] else ""
            complain(face.name, f"job {job['display_id']} ended as {job['state']}{why}")
        statuses.append(status or int(job["state"] != "COMPLETED"))
    return max(statuses)


# ----- `hsub --each`: many scripts in one call
# All are read before the first one is sent. They are sent in parts, each of them one transaction of the controller: its jobs
# are on disk, all of them, before their ids are printed. A part bears the request id of the call with its number behind it, so
# that a call that broke off can be repeated under the same id.


PART_JOBS = 500  # others wait while a part is checked

Options = Mapping[str, Sequence[str]]


def submit_each(face: Face, line: CommandLine, argv: Sequence[str]) -> int:
    """Submit each of the scripts that `line` names, and return the exit status. Raises UsageError, HpcschedError."""
    paths = _paths(line)
    read = _read_each(face, line, paths, argv[: len(argv) - len(paths)])
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


def _read_each(
    face: Face, line: CommandLine, paths: Sequence[str], words: Sequence[str]
) -> list[tuple[Options, Built]]:
    """Return the options and the job of each script; `words` are those of the command line before them."""
    read = []
    for path in paths:
        try:
            one = CommandLine(options=line.options, script=path, args=(), further=line.further)
            options, built = build(one, [*words, path], face)
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
