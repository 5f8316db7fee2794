"""hsub and sbatch: submit a script (a file, standard input, or --wrap) as a job.

The options are those of job scripts (`hpcsched.jobscript`). The command line overrides the environment, which overrides the
script's lines. Every submission has a request id, so that a repeated submission after a lost connection creates only one job.
sbatch's errors begin with the phrases that clients match. Additional information follows.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcnode.commands import slurm_text
from hpcsched.commands.call import Call, OwnProcessError, refuse_other_clusters
from hpcsched.commands.options import FAILED, NO_CONTACT, UsageError, explained, slurm_explained
from hpcsched.errors import HpcschedError, RequestError, UnavailableError, UnsignedError
from hpcsched.jobscript.build import Built, Layers, SubmissionWords, build_submission, read_layers, without_environment
from hpcsched.jobscript.options import CommandLine, is_set, last, parse_command_line
from hpcsched.listing.text import clean

STDIN = ("-", "/dev/stdin")
_FAILURE = "Batch job submission failed"

# Beginnings of our own texts, and sbatch's phrase for each, before it contacts the controller.
_BEFORE = (("cannot read script ", "Unable to open file {}"), ("the script: it is empty", "Batch script is empty!"))

# Options of a command that waits, asks the user or reads files itself. Dates depend on the caller's
# time zone.
OWN_PROCESS = ("help", "version", "dry-run", "test-only", "wait", "each", "serve", "begin", "deadline", "cheap-by")

Options = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How hsub and sbatch differ.

    `slurms`: --verbose lists the options; with --clusters, --parsable adds the cluster.
    """

    name: str
    slurms: bool

    def explain(self, name: str, error: HpcschedError) -> tuple[str, int]:
        """Return an error's text for standard error, and the exit status."""
        return _explained(name, error) if self.slurms else explained(name, error)


HSUB = Setup(name="hsub", slurms=False)
SBATCH = Setup(name="sbatch", slurms=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to submit: the options from all sources, and the specification."""

    options: Options
    built: Built


def _explained(name: str, error: HpcschedError) -> tuple[str, int]:
    if isinstance(error, UnavailableError) and not error.by_controller:
        return f"{name}: error: {_FAILURE}: {NO_CONTACT}\n{name}: error: {error}", FAILED
    if error.by_controller:
        return f"{name}: error: {_FAILURE}: {slurm_text.of_job(str(error))}\n{name}: error: {error}", FAILED
    text, status = slurm_explained(name, error, f"{name}: error")
    words = [slurms for ours, slurms in _BEFORE if ours in str(error)]
    file = str(error).removeprefix(_BEFORE[0][0]).rpartition(": ")[0]
    return "\n".join([*(f"{name}: error: {phrase.format(file)}" for phrase in words), text]), status


async def submit(argv: Sequence[str], call: Call, setup: Setup, *, request_id: str, now_s: float) -> int:
    """Run hsub or sbatch; `request_id` is used if the words give none.

    Raises HpcschedError, OwnProcessError.
    """
    if list(argv) == ["--usage"]:
        raise OwnProcessError
    line = parse_words(argv)
    if not call.in_own_process and any(option in line.options for option in OWN_PROCESS):
        raise OwnProcessError
    request = await read(line, argv, call, setup, now_s)
    write_options(request, call, setup)
    try:
        await send(request, call, setup, request_id=request_id)
    except UnsignedError:
        if call.in_own_process:
            raise
        raise OwnProcessError from None  # the user's key is not for the controller
    return 0


def parse_words(argv: Sequence[str]) -> CommandLine:
    """Return the parsed words. Raises UsageError."""
    try:
        return parse_command_line(argv)
    except UsageError:
        raise
    except RequestError as error:
        raise UsageError(str(error)) from None


async def read(line: CommandLine, argv: Sequence[str], call: Call, setup: Setup, now_s: float) -> Submission:
    """Return the requested job. Raises RequestError, OwnProcessError, ScriptError."""
    wrapped = last(line.options, "wrap") is not None
    from_stdin = line.script is None or line.script in STDIN
    words = SubmissionWords(
        command=setup.name,
        argv=tuple(argv),
        script=None if wrapped else call.script(line.script, None if from_stdin else len(argv) - len(line.args) - 1),
        script_path=""
        if from_stdin or wrapped or call.caller.is_remote
        else _path(call.caller.work_dir, line.script or ""),
        environ=call.caller.environ,
        work_dir=call.caller.work_dir,
        host=call.caller.host,
    )
    layers = read_layers(words, line)
    if call.caller.is_remote:
        layers = without_environment(layers)
    _check_place(layers, call)
    built = build_submission(words, line, layers, now_s, call.api.job_id_of)
    if setup.slurms:
        await refuse_other_clusters(last(layers.options, "clusters") or "", call)
    return Submission(options=layers.options, built=built)


def _check_place(layers: Layers, call: Call) -> None:
    """Raise OwnProcessError if script or environment have an option unsupported here."""
    if not call.in_own_process and any(option in layers.options for option in OWN_PROCESS):
        raise OwnProcessError


def _path(work_dir: str, script: str) -> str:
    """Return the script's absolute path; "" if it is not printable."""
    path = posixpath.normpath(posixpath.join(work_dir, script))
    return path if path.isprintable() else ""


def write_options(request: Submission, call: Call, setup: Setup) -> None:
    """Write the notes on the job before it is sent; for sbatch --verbose also the options."""
    if setup.slurms and "verbose" in request.options:
        for text in option_block(request.options):
            call.output.err(f"{setup.name}: {clean(text)}\n")
    write_notes(request.built.notes, request.options, call, setup)


def write_notes(notes: Sequence[str], options: Options, call: Call, setup: Setup) -> None:
    """Write notes; with --verbose even if standard error is not a terminal."""
    if is_set(options, "quiet"):
        return
    for text in notes:
        if "verbose" in options:
            call.output.err(f"{setup.name}: {clean(text)}\n")
        else:
            call.note(setup.name, clean(text))


def option_block(options: Options) -> list[str]:
    """Return sbatch --verbose's list of the options from all sources."""
    rule = f"{'-' * 20} {'-' * 20}"
    given = [f"{name:<20}: {','.join(values) or 'set'}" for name, values in sorted(options.items())]
    return ["defined options", rule, *given, rule, "end of defined options"]


async def send(request: Submission, call: Call, setup: Setup, *, request_id: str) -> int:
    """Submit the job, write its id and the answer's notes, and return the id."""
    options = request.options
    answer = await call.api.submit(last(options, "request-id") or request_id, request.built.spec)
    job_id: int = answer["jobs"][0]["job_id"]
    if is_set(options, "json"):
        call.output.out(json.dumps(answer, indent=2 if call.caller.out_is_terminal else None) + "\n")
    elif is_set(options, "parsable"):
        named = setup.slurms and last(options, "clusters")
        call.output.out(f"{job_id};{(await call.api.get('/v1/ping'))['cluster']}\n" if named else f"{job_id}\n")
    elif not is_set(options, "quiet"):
        call.output.out(f"Submitted batch job {job_id}\n")
    write_notes(answer.get("notes", ()), options, call, setup)
    return job_id
