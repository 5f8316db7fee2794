"""A whole submission: the words of the command line, the script and the environment to a `JobSpec`.

The same for a command that makes the specification itself and for the controller, to which `hsub` may hand all three as they
are: importing what reads them takes a command longer than all the rest of it. Knows no files and no clock. What the
controller cannot do in a command's place (wait, answer questions, know the user's time zone) it refuses by
an error, and the command then does it itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcsched.errors import RequestError
from hpcsched.jobscript.build import Built, build_spec, script_name
from hpcsched.jobscript.check import check_spec
from hpcsched.jobscript.components import with_components
from hpcsched.jobscript.layers import environment_options, is_set, last, merge_layers
from hpcsched.jobscript.scan import CommandLine, parse_command_line
from hpcsched.jobscript.script import read_script, wrap_script

# --wait and these are the command's own business; a date means what the user's time zone makes of it.
_NOT_REMOTE = (
    "help", "version", "dry-run", "test-only", "wait", "each", "json", "request-id", "begin", "deadline", "clusters",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a command was called with. `script` None: its text is that of --wrap."""

    command: str
    argv: tuple[str, ...]
    script: str | None
    script_path: str
    environ: Mapping[str, str]
    work_dir: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What became of the words: the options of all layers, and the job that they ask for."""

    options: Mapping[str, Sequence[str]]
    built: Built


def read_submission(words: Words, line: CommandLine, now_s: float) -> Submission:
    """Return the job that `words` ask for; `line` is what `parse_command_line` made of them. Raises RequestError."""
    wrapped = last(line.options, "wrap")
    if wrapped is not None and not wrapped.strip():
        raise RequestError("cannot submit: the command of --wrap is empty")
    script = (words.script or "") if wrapped is None else wrap_script(wrapped)
    directives = read_script(script)
    options = merge_layers(directives.options, environment_options(words.environ), line.options)
    built = build_spec(
        options,
        script=script,
        default_name=script_name(line.options, line.script),
        work_dir=words.work_dir,
        environ=words.environ,
        now_s=now_s,
        script_args=line.args,
        script_path=words.script_path if wrapped is None else "",
        submit_line=shlex.join([words.command, *words.argv]),
        submit_host=words.host,
    )
    spec = with_components(built.spec, options, directives.further, line.further)
    check_spec(spec)
    late = tuple(
        f"line {number} of the script is not read: it stands behind a command" for number in directives.late_lines
    )
    return Submission(options=options, built=Built(spec=spec, notes=(*built.notes, *late)))


def read_remote(words: Words, now_s: float) -> Submission:
    """Return the job that `words` ask for, in the command's place. Raises RequestError."""
    line = parse_command_line(words.argv)
    if words.script is None and last(line.options, "wrap") is None:
        raise RequestError("cannot submit: neither a script nor --wrap")
    found = read_submission(words, line, now_s)
    for name in _NOT_REMOTE:
        if any(name in options for options in (found.options, *line.further)):
            raise RequestError(f"cannot submit the words of a command with --{name}: it has to read them itself")
    return found


def words_from_json(obj: object) -> Words:
    """Return the words that a command has sent. Raises RequestError."""
    if not isinstance(obj, dict) or set(obj) - {field for field in Words.__dataclass_fields__}:
        raise RequestError('cannot submit: "words" has unknown fields, or is no object')
    argv, environ = obj.get("argv"), obj.get("environ")
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        raise RequestError('cannot submit: "argv" is no list of words')
    if not isinstance(environ, dict) or not all(isinstance(value, str) for value in environ.values()):
        raise RequestError('cannot submit: "environ" is no object of texts')
    texts = {name: obj.get(name, "") for name in ("command", "script_path", "work_dir", "host")}
    script = obj.get("script")
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(script, str | None):
        raise RequestError('cannot submit: a field of "words" is no text')
    return Words(argv=tuple(argv), environ=environ, script=script, **texts)


def manners(submission: Submission) -> dict[str, bool]:
    """Return what the options, of all layers, say of how the command answers."""
    options = submission.options
    return {
        "quiet": is_set(options, "quiet"),
        "verbose": "verbose" in options,
        "parsable": is_set(options, "parsable"),
    }
