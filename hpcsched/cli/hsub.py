"""hsub and sbatch in their own process: options that wait, ask or read files.

These are --wait, --test-only, --dry-run and --each; also --help.

The rest is `hpcsched.commands.submit`, the same code for the controller and for here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from hpcnode.commands import slurm_text
from hpcsched import client
from hpcsched.cli.output import complain, guarded, note, print_json, print_version
from hpcsched.cli.process import finish, own_call, submit_jobs, work_dir
from hpcsched.client import Json
from hpcsched.commands.call import Call
from hpcsched.commands.options import SLURM_VERSION, UsageError, option_lines, usage_text
from hpcsched.commands.submit import (
    HSUB,
    SBATCH,
    STDIN,
    Options,
    Setup,
    Submission,
    parse_words,
    read,
    send,
    write_notes,
    write_options,
)
from hpcsched.errors import HpcschedError, NotFoundError, RequestError, UnavailableError
from hpcsched.jobscript.options import OPTIONS, CommandLine, is_set, last
from hpcsched.listing.jobs import ENDED_STATES
from hpcsched.listing.text import clean, start_words
from hpcsched.model.codec import spec_to_json
from hpcsched.model.service import check_service_name

FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0

HELP_HEAD = """\
Usage: NAME [OPTIONS] SCRIPT [ARGUMENT...]
       NAME [OPTIONS] < SCRIPT
       NAME OPTIONS : OPTIONS ... SCRIPT
       NAME [OPTIONS] --wrap COMMAND
       NAME [OPTIONS] --each SCRIPT...

Submit a job script. #HSUB and #SBATCH lines in the script take the same options. Command-line options override HSUB_*
and SBATCH_* variables, which override the script. Words after SCRIPT are passed to it.
"""
HELP_TAIL = """
File names may have %j (job id), %x (name), %u (user), %N (node), %A and %a (array and task), %t (task of a step).
"""
REQUEST_ID = "HPCSCHED_REQUEST_ID"  # of a submission that another client has begun, and whose answer was lost


def main(argv: Sequence[str] | None = None, setup: Setup = HSUB) -> int:
    """Run the command and return its exit status."""
    return guarded(setup.name, lambda words: _work(words, setup), argv, explain=setup.explain)


def _work(argv: Sequence[str], setup: Setup) -> int:
    line = parse_words(argv)
    if is_set(line.options, "help"):
        sys.stdout.write(help_text(setup.name))
        return 0
    if is_set(line.options, "version"):
        if setup.slurms:
            print(f"slurm {SLURM_VERSION}")
        else:
            print_version(setup.name)
        return 0
    request_id = os.environ.pop(REQUEST_ID, "") or os.urandom(16).hex()
    if is_set(line.options, "each"):
        return submit_each(setup, line, argv, request_id)
    call = own_call(work_dir())
    request = finish(read(line, argv, call, setup, time.time()))
    write_options(request, call, setup)
    if is_set(request.options, "dry-run"):
        print_json({"version": 1, "job": spec_to_json(request.built.spec), "notes": list(request.built.notes)})
        return 0
    if is_set(request.options, "test-only"):
        return _test(setup, request)
    if "serve" in request.options:
        return serve(setup, request)
    job_id = finish(send(request, call, setup, request_id=request_id))
    sys.stdout.flush()
    return wait_for(setup, job_id) if is_set(request.options, "wait") else 0


def help_text(name: str = HSUB.name) -> str:
    """Return what ``--help`` prints."""
    known = {option.name: option for option in OPTIONS}
    lines = []
    for title, names in slurm_text.groups(name, known):
        lines += ["", f"{title or 'Options'}:"]
        for option in map(known.__getitem__, names):
            lines += option_lines(option.spelling, option.help, indented=not option.short)
    return HELP_HEAD.replace("NAME", name) + "\n".join(lines) + "\n" + HELP_TAIL


def _test(setup: Setup, request: Submission) -> int:
    answer = client.call("POST", "/v1/test", {"job": spec_to_json(request.built.spec)})
    if is_set(request.options, "json"):
        print_json(answer)
    else:
        print(f"{setup.name}: {start_words(answer)}", file=sys.stderr)
        if answer.get("cheaper") and not setup.slurms:
            print(f"{setup.name}: {clean(answer['cheaper'])}", file=sys.stderr)
    return 0


def wait_for(setup: Setup, job_id: int) -> int:
    """Wait until the job (of an array: all its tasks) is over; return the highest exit code."""
    pause_s = FIRST_POLL_S
    has_noted = False
    while True:
        try:
            jobs = _look(job_id)
        except UnavailableError as error:  # the job continues without the controller
            if not has_noted:
                note(setup.name, f"{error}; waiting for it")
            has_noted = True
        else:
            if all(job["state"] in ENDED_STATES for job in jobs):
                return _exit_status(setup, jobs)
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, LAST_POLL_S)


def _look(job_id: int) -> list[Json]:
    try:
        jobs = client.call("GET", client.query("/v1/jobs", id=job_id))["jobs"]
    except NotFoundError:  # ended a while ago: the history has it
        jobs = client.call("GET", client.job_path(str(job_id)))["jobs"]
    return [job for job in jobs if not job.get("het_offset")]  # the others' state is that of the first component


def _exit_status(setup: Setup, jobs: Sequence[Json]) -> int:
    statuses = []
    for job in jobs:
        status = 128 + job["exit_signal"] if job["exit_signal"] else job["exit_code"] or 0
        failed_by_itself = job["state"] == "FAILED" and job["started_at_s"] is not None
        if job["state"] != "COMPLETED" and not (failed_by_itself and status):  # else the status does not say it
            why = f": {clean(job['reason_detail'])}" if job["reason_detail"] else ""
            complain(setup.name, f"job {job['display_id']} ended as {job['state']}{why}")
        statuses.append(status or int(job["state"] != "COMPLETED"))
    return max(statuses)


# ----- `hsub --serve`: the script is the replica of a service


def serve(setup: Setup, request: Submission) -> int:
    """Start a service whose replicas run the script, and return the exit status.

    Raises UsageError, HpcschedError.
    """
    from hpcsched.cli.admin.hserve import replica_of, start_service, started_text  # other submissions do not need it

    options = request.options
    if is_set(options, "wait"):
        raise UsageError("cannot take --wait with --serve: a service runs until 'hserve stop'")
    name = check_service_name(last(options, "serve"))
    spec = replica_of(name, request.built.spec, is_named="job-name" in options, exports="export" in options)
    answer = start_service(
        name, spec.script_path or name, last(options, "serve-replicas"), last(options, "serve-open"), spec_to_json(spec)
    )
    if is_set(options, "json"):
        print_json(answer)
    elif not is_set(options, "quiet"):
        print(started_text(name))
    return 0


# ----- `hsub --each`: many scripts in one call
# All are read before the first one is sent. They are sent in parts, and each part is one transaction of the controller: all
# its jobs are on disk before their ids are printed. A part has the request id of the call with its number behind it, so that
# a call that broke off can be repeated under the same id.


PART_JOBS = 500  # other requests wait while a part is checked


def submit_each(setup: Setup, line: CommandLine, argv: Sequence[str], request_id: str) -> int:
    """Submit each of the scripts that `line` names, and return the exit status.

    Raises UsageError, HpcschedError.
    """
    paths = _paths(line)
    call = own_call(work_dir())
    requests = _read_each(setup, line, paths, argv[: len(argv) - len(paths)], call)

    def wanted(name: str) -> bool:
        return any(is_set(request.options, name) for request in requests)

    request_id = last(line.options, "request-id") or request_id
    answered: list[Json] = []
    notes: list[str] = []
    for number, at in enumerate(range(0, len(requests), PART_JOBS)):
        specs = [request.built.spec for request in requests[at : at + PART_JOBS]]
        try:
            answer = submit_jobs(f"{request_id}.{number}", specs)
        except HpcschedError as error:
            raise _about(error, paths, at, request_id) from None
        answered += answer["jobs"]
        notes += answer["notes"]
        if not wanted("json"):
            _print(answer["jobs"], quiet=wanted("quiet"), parsable=wanted("parsable"))
    if wanted("json"):
        print_json({"version": 1, "jobs": answered, "notes": notes})
    sys.stdout.flush()
    flags: Options = {name: [""] for name in ("quiet", "verbose") if wanted(name)}
    write_notes(notes, flags, call, setup)
    return max(wait_for(setup, job["job_id"]) for job in answered) if wanted("wait") else 0


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
    setup: Setup, line: CommandLine, paths: Sequence[str], words: Sequence[str], call: Call
) -> list[Submission]:
    """Return the job of each script; `words` are those of the command line before them."""
    requests = []
    for path in paths:
        try:
            single = CommandLine(options=line.options, script=path, args=(), further=line.further)
            request = finish(read(single, [*words, path], call, setup, time.time()))
            if "serve" in request.options:
                raise RequestError("cannot take --serve with --each: start one service at a time")
        except RequestError as error:
            raise RequestError(f"{clean(path)}: {error}; nothing was submitted") from None
        write_notes([f"{path}: {text}" for text in request.built.notes], request.options, call, setup)
        requests.append(request)
    return requests


def _about(error: HpcschedError, paths: Sequence[str], at: int, request_id: str) -> HpcschedError:
    """Return the error of the part at `at`: the script, the queued scripts, and what to do."""
    where = "" if error.at is None else f"{clean(paths[at + error.at])}: "
    there = (
        f"the first {at} of {len(paths)} scripts are in the queue" if at else "no script is known to be in the queue"
    )
    explained = type(error)(
        f"{where}{error}; {there}: to submit the others, and none twice, add --request-id={request_id}"
    )
    explained.by_controller = error.by_controller
    return explained


def _print(jobs: Sequence[Json], *, quiet: bool, parsable: bool) -> None:
    if parsable:
        sys.stdout.writelines(f"{job['job_id']}\n" for job in jobs)
    elif not quiet:
        sys.stdout.writelines(f"Submitted batch job {job['job_id']}\n" for job in jobs)
    sys.stdout.flush()


def sbatch(argv: Sequence[str] | None = None) -> int:
    """Run sbatch, which is hsub with Slurm's messages, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--usage"]:
        sys.stdout.write(usage_text(SBATCH.name, OPTIONS, "script [args...]"))
        return 0
    return main(words, SBATCH)
