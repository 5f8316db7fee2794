"""The outermost layer of a command: words, output, errors, exit status.

Exit statuses: 0 success; 1 failure; 2 usage error; 130 interrupted from the terminal. Rules: a bug keeps its traceback; texts
that users chose (job names, reasons) are printed through `clean`; text is truncated, wrapped and coloured only on a terminal.
Knows no command. Source: NO_COLOR (no-color.org).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

import hpcsched
from hpcsched.client import Json
from hpcsched.commands.options import FAILED, Command, Words, explained, header_note, help_text, read_words
from hpcsched.errors import HpcschedError

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from typing import Any


def is_terminal() -> bool:
    """Return whether the output is a terminal."""
    return sys.stdout.isatty()


def terminal_width() -> int:
    """Return the number of columns of the terminal, 0 if it is not known."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def wants_colour() -> bool:
    """Return whether to use colours: on a terminal that has them, unless NO_COLOR is set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def print_json(answer: Json) -> None:
    """Print an answer as JSON: on one line, indented on a terminal."""
    json.dump(answer, sys.stdout, indent=2 if is_terminal() else None)
    sys.stdout.write("\n")


def print_separated(lines: Sequence[Sequence[str]], words: Words) -> bool:
    """Print cells separated by bars, if --parsable or --parsable2 was given.

    Return whether one was.
    """
    end = "|" if words.has("parsable") else ""
    if end or words.has("parsable2"):
        sys.stdout.writelines("|".join(line) + end + "\n" for line in lines)
    return bool(end) or words.has("parsable2")


def bar(part: float, whole: float, width: int = 10) -> str:
    """Return a bar with the used fraction of `whole`: ``[####------]``."""
    filled = 0 if whole <= 0 else min(width, round(width * part / whole))
    if part > 0 and filled == 0:
        filled = 1
    return "[" + "#" * filled + "-" * (width - filled) + "]"


# ----- what is wrong with an installation, and how it is corrected: `hctl security`, `hpcsched doctor`
# A finding has `rule` (id, severity, title, why), `at`, `detail`, `fix` and `as_json`. Severity "info" is no fault.


def print_findings(
    found: Sequence[Any],
    unseen: Sequence[str],
    skipped: Sequence[str] = (),
    *,
    as_json: bool,
    well: Sequence[tuple[str, str]] = (),
) -> int:
    """Print findings, and what was not checked, as text or JSON; return the exit status.

    The status is 1 with any fault, 2 if a check was not possible. `well`: steps without a fault, in text only.
    """
    from hpcsched.listing.text import clean  # most commands print no findings

    faults = sum(finding.rule.severity != "info" for finding in found)
    if as_json:
        answer = {"findings": [finding.as_json() for finding in found], "faults": faults}
        print_json({"version": 1, **answer, "not_checked": list(unseen), "skipped": list(skipped)})
        return 1 if faults else 2 if unseen else 0
    for name, text in well:
        print(clean(f"ok   {name}: {text}"))
    for finding in found:
        print(clean(f"{finding.rule.id} {finding.rule.severity}: {finding.rule.title}: {finding.at}"))
        print(clean(f"    {finding.detail}"))
        print(clean(f"    why: {finding.rule.why}"))
        print(clean(f"    fix: {finding.fix}"))
    for text in (*unseen, *skipped):
        print(clean(f"not checked: {text}"))
    print(f"{faults} {'finding' if faults == 1 else 'findings'}")
    return 1 if faults else 2 if unseen else 0


# ----- a command that ends or requeues its own job
# The job's processes, including the command, get SIGTERM at once, perhaps before the command has read its answer: its caller
# would see a failure of a request that succeeded. So the command ignores the signal; the job is killed later if need be.


def outlive_its_end() -> None:
    """Ignore SIGTERM from now on, if this command runs in a job."""
    if os.environ.get("HPCSCHED_JOB_ID") or os.environ.get("SLURM_JOB_ID"):
        import signal  # its import takes a tenth of the start of Python

        signal.signal(signal.SIGTERM, signal.SIG_IGN)


INTERRUPTED = 130


Explain = Callable[[str, HpcschedError], tuple[str, int]]


def run_command(
    command: Command,
    work: Callable[[Words], int],
    argv: Sequence[str] | None,
    *,
    explain: Explain | None = None,
    version: Callable[[str], None] | None = None,
) -> int:
    """Read the words of `command`, do its work and return its exit status.

    `explain` writes its errors and `version` its version, if they differ from those of our own commands.
    """

    def body(words: Sequence[str]) -> int:
        read = read_words(command, words)
        if read.has("help"):
            sys.stdout.write(help_text(command))
            return 0
        if read.has("version"):
            (version or print_version)(command.name)
            return 0
        if list(words) == ["-h"] and read.has("noheader") and explain is None:
            note(command.name, header_note(command.name))
        return work(read)

    return guarded(command.name, body, argv, explain=explain)


def guarded(
    name: str, body: Callable[[Sequence[str]], int], argv: Sequence[str] | None, *, explain: Explain | None = None
) -> int:
    """Call `body` with the words of the command line.

    Return its status, or the status of its error.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may have characters that the locale lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        status = body(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except HpcschedError as error:
        text, status = (explain or explained)(name, error)
        print(text, file=sys.stderr)
        return status
    except PermissionError as error:  # a file of the cluster, such as its configuration
        complain(name, f"cannot use {error.filename}: {error.strerror}; only its owner and root may")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone. Flushing the buffer at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def complain(name: str, text: str) -> None:
    """Print an error to standard error."""
    print(f"{name}: error: {text}", file=sys.stderr)


def note(name: str, text: str) -> None:
    """Print a note to standard error if it is a terminal."""
    if sys.stderr.isatty():
        print(f"{name}: {text}", file=sys.stderr)


def print_version(name: str) -> None:
    """Print the version."""
    print(f"{name} (hpcsched) {hpcsched.__version__}")
