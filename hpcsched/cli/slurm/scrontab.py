"""scrontab: recurring jobs of a user.

An entry is a schedule and a command, with options in ``#SCRON`` lines before it.

This command builds the job of each entry, with the options of sbatch and the environment of a login, and sends it to the
controller with the text. Source: scrontab(1).
"""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, UsageError, Words
from hpcsched.errors import RequestError
from hpcsched.jobscript.build import SubmissionWords, build_submission, check_no_service, read_layers
from hpcsched.jobscript.options import parse_command_line
from hpcsched.listing.text import clean
from hpcsched.model.codec import spec_to_json
from hpcsched.model.cron import MAX_TEXT_BYTES, CronLine, parse_crontab

SCRONTAB = Face(
    Command(
        "scrontab",
        ("[-u user] <file>", "[-u user] [ -e | -l | -r ]"),
        "Show or change your recurring jobs. Each line has a schedule (five fields as in cron, or @daily ...) and a "
        "command; lines above it that begin with #SCRON have options of sbatch.",
        (
            Option("edit", "e", help="edit the crontab with $VISUAL, $EDITOR or vi"),
            Option("list", "l", help="print the crontab"),
            Option("remove", "r", help="delete the crontab"),
            Option("user", "u", "USER", "use the crontab of another user (admins only)"),
            HELP,
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("verbose", "v")),
    ),
    "scrontab: error",
)
EMPTY = "# MIN HOUR DAY(MONTH) MONTH DAY(WEEK) COMMAND\n# #SCRON --time=10\n# 0 4 * * * /path/to/program\n"
PATH = "/usr/local/bin:/usr/bin:/bin"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SCRONTAB, _work, argv)


def _work(words: Words) -> int:
    user = words.last("user")
    chosen = [name for name in ("edit", "list", "remove") if words.has(name)]
    if len(chosen) + len(words.operands) > 1:
        raise UsageError("cannot do that: give one of -e, -l, -r, or a file")
    match chosen:
        case ["list"]:
            return _list(user)
        case ["remove"]:
            _install("", user)
            return 0
        case ["edit"]:
            return _edit(user)
    _install(_read(words.operands[0] if words.operands else "-"), user)
    return 0


def _fetch(user: str) -> Json:
    return client.call("GET", client.query("/v1/crontab", user=user))


def _list(user: str) -> int:
    found = _fetch(user)
    if not found["text"]:
        print(f"no crontab for {clean(user or client.my_name())}", file=sys.stderr)
        return 1
    sys.stdout.write(found["text"] if found["text"].endswith("\n") else found["text"] + "\n")
    for entry in found["entries"]:
        if entry["problem"]:
            print(f"scrontab: line {entry['line']} waits: {clean(entry['problem'])}", file=sys.stderr)
    return 0


def _read(path: str) -> str:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with open(path, "rb") as stream:
                data = stream.read(MAX_TEXT_BYTES + 1)
        return data.decode("utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {clean(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"cannot take the crontab {clean(path)}: it is not UTF-8") from None


def _edit(user: str) -> int:
    import subprocess  # slow to import, and needed only here
    import tempfile

    before = _fetch(user)["text"] or EMPTY
    with tempfile.NamedTemporaryFile("w", prefix="scrontab-", suffix=".txt", delete=False) as stream:
        stream.write(before)
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    done = subprocess.run(["sh", "-c", f'{editor} "$0"', stream.name])
    if done.returncode != 0:
        os.unlink(stream.name)
        raise RequestError(f"cannot edit the crontab: {clean(editor)} ended with status {done.returncode}")
    after = _read(stream.name)
    if after == before:
        print("no changes made to crontab", file=sys.stderr)
    else:
        try:
            _install(after, user)
        except RequestError as error:
            raise RequestError(f"{error}; your text is in {stream.name}") from None
    os.unlink(stream.name)
    return 0


def _install(text: str, user: str) -> None:
    jobs = [_job(line, user) for line in parse_crontab(text)]
    client.call("POST", "/v1/crontab", {"text": text, "jobs": jobs, "user": user})


def _job(line: CronLine, user: str) -> Json:
    """Return the job of an entry. Raises RequestError with the number of the line."""
    try:
        account = pwd.getpwnam(user) if user else pwd.getpwuid(os.getuid())
    except KeyError:
        raise RequestError(f"cannot make jobs for {clean(user or os.getuid())}: there is no such account") from None
    name = os.path.basename(line.command.split()[0])
    argv = (f"--job-name={name}", *line.options, f"--wrap={line.command}")
    environ = {
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell or "/bin/sh",
        "PATH": PATH,
    }
    submitted = SubmissionWords(
        command="scrontab",
        argv=argv,
        script=None,
        script_path="",
        environ=environ,
        work_dir=account.pw_dir,
        host=os.uname().nodename,
    )
    try:
        read = parse_command_line(argv)
        layers = read_layers(submitted, read)
        check_no_service(layers)
        return spec_to_json(build_submission(submitted, read, layers, time.time()).spec)
    except RequestError as error:
        raise RequestError(f"cannot take line {line.number} of the crontab: {error}") from None
